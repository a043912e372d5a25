"""The loss of a mini-batch from the losses of its chunks: the un-pipelined loss.

    "mean"         loss = sum_i loss_i * rows_i / rows          each chunk's loss is a mean over its rows
    "sum"          loss = sum_i loss_i
    (sum, count)   loss = sum_i sum_i / sum_i count_i           token masks: exact
    {name: (sum, count)} beside one of these: metrics, combined in the same way

With (sum, count) the gradients of the sums are added first and divided by the whole count at the end, since
the counts of later chunks are not known when the first goes backward. Meanwhile they are scaled by a power of two near
1 / rows, which is exact in binary floating point and keeps half precision in range.

torch's cross entropy and negative log likelihood, with reduction "mean" and class indices, are means over the tokens
that count, not over rows. Wherever loss_fn calls them, loss_means sees their sums and counts. Counts are added
in float64: in their own type a few hundred tokens are too many for bfloat16 or uint8.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from math import ceil, inf, log2
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from partition.contents import tensors_in
from pipeline.common.interrupts import calls_users_code
from pipeline.common.torch_modes import without_function_modes
from pipeline.data.loss_comparison import is_same_loss
from pipeline.data.loss_functions import MOVED, TO_HOST
from pipeline.data.loss_means import BENT, UNSEEN, Divisor, DivisorTrace, LossForm, detached_number
from pipeline.data.loss_proof import LossCount, Proof, is_alike, proof, with_earlier
from pipeline.data.metrics import Metrics, added
from pipeline.data.pytrees import same_values

LossFn: TypeAlias = Callable[[Any, Any], Any]
Divisors: TypeAlias = tuple[Divisor, ...]
REDUCTIONS = ("mean", "sum")
_UNSEEN = frozenset((*TO_HOST, MOVED))  # in the form of a loss
_SAID = 8  # after so many steps it is said that each is compared
_PAIR, _TOKENS, _SINGLE = "(sum, count)", "a mean over tokens", "a single loss"  # kinds of what loss_fn returned


class ChunkLoss(NamedTuple):
    """The loss of one chunk.

    Attributes:
        amount: its loss, or its sum: a number.
        counted: how much that counts. None: loss_fn returned a single loss, which is no mean over tokens.
        divisors: within it. None: unknown.
        form: the form of the loss.
        dtypes: in which rows were summed.
        foreign: the tensors that loss_fn has read and no function made that was seen.
    """

    amount: Tensor
    counted: Tensor | None
    divisors: Divisors | None
    form: LossForm
    dtypes: set[torch.dtype]
    foreign: Sequence[Tensor]


def divide_(grad: Tensor, divisor: Tensor | None) -> Tensor:
    """Divide a gradient in place by the divisor of its loss; None: by nothing."""
    return grad if divisor is None else grad.div_(divisor.to(grad.device))


def divided(grad: Tensor, divisor: Tensor | None) -> Tensor:
    """The same in a new tensor, for a gradient that others may share."""
    return grad if divisor is None else grad / divisor.to(grad.device)


class Loss:
    """The loss of one call, added up from its chunks.

    Args:
        loss_fn: (output, target) -> loss, or (sum, count); either with a dict of metrics behind it.
        reduction: "mean" or "sum"; None: `loss_fn.reduction` if it has one, else "mean".
        rows: the rows of each chunk.
        is_part: whether the mini-batch is one of several, whose parts are added up by their `weight`.
        known: what earlier mini-batches have shown of this loss.

    Raises:
        TypeError: loss_fn is not callable.
        ValueError: an unknown reduction, or another one than loss_fn's own.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        reduction: str | None,
        rows: Sequence[int],
        is_part: bool = False,
        known: LossCount = LossCount(),
    ) -> None:
        if isinstance(loss_fn, type):
            raise TypeError(f"loss_fn is the class {loss_fn.__name__}. Give an object of it: {loss_fn.__name__}().")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn is {loss_fn!r}, which is not callable. Give (output, target) -> loss.")
        self._requested = reduction
        self._reduction = _reduction(loss_fn, reduction)
        self.loss_fn = loss_fn
        self._rows = rows
        self._known = known
        self._chunks: dict[int, ChunkLoss] = {}
        self._kind = ""  # of the losses of the chunks
        self._is_single = len(rows) == 1 and not is_part
        self._of_count: Callable[[Tensor], Tensor] | None = None  # what loss_fn makes of a count: n.clamp(min=1)
        self._name = name_of(loss_fn)
        self.metrics = Metrics(self._name)

    @property
    def all_rows(self) -> int:
        """The rows of the mini-batch."""
        return sum(self._rows)

    @property
    def is_counted(self) -> bool:
        """Whether the chunks' losses are means over tokens, which loss_fn returned as single losses."""
        return self._kind == _TOKENS

    @property
    def rule(self) -> str:
        """The rule by which losses are combined: "mean" and "sum" are over rows, "count" is by what counts."""
        return "count" if self._kind in (_PAIR, _TOKENS) else self._reduction

    def factor(self, rows: int, whole: int | None = None) -> float:
        """The factor of the loss of so many rows in that of `whole` rows (None: of all). Of sums until their count is
        known: a power of two near 1 / rows."""
        whole = self.all_rows if whole is None else whole
        if self.rule == "count":
            return float(0.5 ** ceil(log2(whole)))
        return 1.0 if self.rule == "sum" else rows / whole

    def chunk(self, chunk: int, output: Any, target: Any, batch_dim: int = 0) -> tuple[Tensor, float]:
        """Compute the loss of a chunk.

        Args:
            chunk: which.
            output, target: its own.
            batch_dim: the dim that counts their rows.

        Returns:
            The tensor to differentiate, and the factor that makes it the chunk's part of the whole.
        """
        rows = self._rows[chunk]
        outputs = tensors_in(output)
        trace = DivisorTrace(rows, outputs, tensors_in(target), self._reduction == "mean", batch_dim)
        # A whole mini-batch needs none. But on the CPU torch's own mean over tokens of float16 overflows.
        is_traced = not self._is_single or any([tensor.dtype is torch.float16 for tensor in outputs])
        try:
            with trace if is_traced else nullcontext():
                value = _call(self.loss_fn, output, target)
        except Exception as error:
            error.add_note(f"{self._name}, of {rows} of the {self.all_rows} rows")
            raise
        value = self.metrics.record(chunk, value, trace)
        read = self._pair if isinstance(value, tuple) and value else self._single
        kind, amount, count, divisors = read(value, trace)
        if self._kind not in ("", kind):
            kinds = " for one chunk and ".join(sorted([self._kind, kind]))
            raise ValueError(
                f"{self._name} returned {kinds} for another. Return the same for every chunk. One without tokens adds "
                "nothing to torch's mean over tokens, so no `if` is needed there; of (sum, count) return (0, 0), with "
                "0 * output.sum() as the sum."
            )
        self._kind = kind
        counted = None if count is None else detached_number(count)
        self._chunks[chunk] = ChunkLoss(
            detached_number(amount), counted, divisors, trace.form, trace.dtypes, trace.foreign
        )
        return amount, self.factor(self._rows[chunk])

    def _pair(self, value: tuple[Any, ...], trace: DivisorTrace) -> tuple[str, Tensor, Tensor | None, Divisors | None]:
        """The kind of a chunk's loss, its amount, how much that counts, and its divisors, see `ChunkLoss`."""
        origin, count = trace.origin(value[0]), trace.count(value[-1])
        pair = self._checked_pair((*value[:-1], count.number))
        self._of_count = count.function or self._of_count
        if trace.branches or not count.is_seen or origin is not None and BENT in origin.marks:
            return _PAIR, *pair, None
        is_seen = origin is not None and count.is_kept and UNSEEN not in origin.marks
        return _PAIR, *pair, (*(origin.divisors if origin is not None else ()), *([] if is_seen else [Divisor(inf)]))

    def _single(self, value: Any, trace: DivisorTrace) -> tuple[str, Tensor, Tensor | None, Divisors | None]:
        """The same where loss_fn returned one number: a mean over tokens, or something else."""
        loss, origin = self._checked(value, "a loss"), trace.origin(value)
        if origin is None:
            return _SINGLE, loss, None, None
        tokens = None if self._is_single else origin.total_and_count(loss)
        is_hidden = origin.marks & {BENT, UNSEEN} or trace.branches or tokens is None and trace.read
        divisors = None if is_hidden else origin.divisors
        if tokens is None:
            return _SINGLE, loss, None, divisors
        total, count = tokens
        return _TOKENS, total.reshape(()), count.to(total.device, torch.float64), divisors

    @property
    def _by_chunk(self) -> list[ChunkLoss]:
        """The losses of the chunks so far, in their order."""
        return [self._chunks[chunk] for chunk in sorted(self._chunks)]

    @property
    def _counted(self) -> Tensor:
        return added([chunk.counted.double() for chunk in self._by_chunk if chunk.counted is not None])

    @property
    def _count(self) -> Tensor:
        return self.whole_count(self._counted)

    def whole_count(self, counted: Tensor) -> Tensor:
        """The divisor of a sum that counts so much: what loss_fn makes of that."""
        return counted if self._of_count is None else self._of_count(counted).double()

    @property
    def _parts(self) -> list[Tensor]:
        """The summand of each chunk."""
        if self.rule != "mean":
            return [chunk.amount for chunk in self._by_chunk]
        with without_function_modes():
            return [self._chunks[chunk].amount * self.factor(self._rows[chunk]) for chunk in sorted(self._chunks)]

    @property
    def divisor(self) -> Tensor | None:
        """The divisor of the summed gradients, once all counts are known; None: they are not divided."""
        if self.rule != "count":
            return None
        count = self._count
        if self.is_counted:  # as torch does: where no token counts the loss is nan, its gradient zero
            with without_function_modes():
                count = torch.where(count == 0, 1.0, count)
        return count * self.factor(1)

    @property
    def weight(self) -> Tensor:
        """The weight of this mini-batch among several of its rule: its rows, its count, or 1."""
        if self.rule == "count":
            if self._of_count is not None and self._counted and self._count != self._counted:
                raise self.neither("beside other mini-batches a count must stay what torch has summed")
            return self._counted
        return torch.tensor(1.0 if self.rule == "sum" else self.all_rows, dtype=torch.float64, device="cpu")

    @property
    def total(self) -> Tensor:
        """The summand of this mini-batch in that of several of its rule, which the sum of their weights divides."""
        total = added(self._parts).double()
        return total * self.all_rows if self.rule == "mean" else total

    @property
    def value(self) -> Tensor:
        """The loss of the mini-batch, a 0-d tensor."""
        total = added(self._parts)
        return (total.double() / self._count).to(total.dtype) if self.rule == "count" else total

    def is_empty(self, chunk: int) -> bool:
        """Whether loss_fn returned (sum, count) for a chunk, and both are nothing."""
        return self._kind == _PAIR and not self._chunks[chunk].counted and not self._chunks[chunk].amount

    def is_zero(self, chunk: int) -> bool:
        """Whether a chunk's part of the loss is 0. The host waits."""
        return not self._chunks[chunk].amount

    def anew(self, rows: Sequence[int]) -> Loss:
        """A loss of the same loss_fn, of chunks of so many rows, that is one of several."""
        return Loss(self.loss_fn, self._requested, rows, True)

    def of(self, chunks: Sequence[int]) -> tuple[Loss, Tensor | float]:
        """The loss of some chunks, which have been computed, as of a mini-batch of their own.

        Returns:
            It, and the weight with which its gradient at an output is that of the chunk's own part of the whole.
        """
        part = self.anew([self._rows[chunk] for chunk in chunks])
        part._chunks = {index: self._chunks[chunk] for index, chunk in enumerate(chunks)}
        part._kind, part._of_count = self._kind, self._of_count
        divisor = part.divisor
        if divisor is None:
            return part, self.factor(part.all_rows)
        return part, divisor / part.factor(1) * self.factor(1)

    def whole(self, output: Any, target: Any) -> Tensor:
        """The value of loss_fn on the whole, joined output."""
        own = Loss(self.loss_fn, self._requested, [self.all_rows])
        amount, _ = own.chunk(0, output, target)
        return (amount.double() / own._count).to(amount.dtype) if own.rule == "count" else amount

    def difference(self, whole: Tensor) -> str | None:
        """The difference between the combined losses of the chunks and `whole`, in words. None: it is rounding."""
        # Parts that cancel (a policy gradient's) leave rounding errors relative to the parts, not to the small sum.
        size = added([part.double().abs() for part in self._parts])
        size = size / self._count.abs() if self.rule == "count" else size
        dtypes = {dtype for chunk in self._by_chunk for dtype in (chunk.amount.dtype, *chunk.dtypes)}
        if is_same_loss(self.value, whole, size, dtypes):
            return None
        return f"{self.in_words} {self.value.item():.8g}, but on their outputs joined it is {whole.item():.8g}"

    @property
    def in_words(self) -> str:
        """The subject of a sentence about how the losses of chunks combine."""
        return f"the losses of {len(self._rows)} chunks ({list(self._rows)} rows) combine to"

    def check_counts(self) -> None:
        """Raise ValueError if a count that loss_fn returned is no whole number. All chunks have been seen."""
        counts = [chunk.counted for chunk in self._by_chunk if chunk.counted is not None and self._kind == _PAIR]
        has_fractions = any([count.is_floating_point() for count in counts])  # else the host need not wait
        for count in torch.stack(counts).tolist() if has_fractions else ():
            if count % 1 != 0:
                raise ValueError(
                    f"{self._name} returned {count:.6g} as a count, which is no whole number: a pair is read as (sum, "
                    "count). A metric goes into a dict: return (loss, {'accuracy': (sum, count)}). For class weights "
                    "call F.cross_entropy(output, target, weight=...) in loss_fn and return that: its weights are "
                    "counted. With other weights divide by those of all rows, which the target brings "
                    "(NoChunk(weights.sum())), and give loss_reduction='sum'."
                )

    @property
    def is_proven(self) -> bool:
        """Whether the trace proves the weights of the chunks. Called after all chunks.

        What Python makes of a number that it reads (`min(n, 5)`), or a loss of a row that it takes, cannot be seen.
        """
        return (len(self._rows) == 1 or self._form.isdisjoint(_UNSEEN)) and self._has_proof

    @property
    def is_weighed(self) -> bool:
        """Whether the weights of the chunks are known as well as they can be where these cannot be compared."""
        return self._is_told or self._has_proof

    @property
    def _is_told(self) -> bool:
        """Whether loss_fn returned how much each chunk counts, as far as its trace can tell."""
        return self._kind == _PAIR and None not in [chunk.divisors for chunk in self._by_chunk]

    @property
    def _has_proof(self) -> bool:
        """Whether the divisors prove the weights of the chunks.

        What a comparison showed to vary with the rows is no constant that happens to be the same in all chunks.
        """
        return self.proof is not None and is_alike(self.proof, self._shown)

    @property
    def is_new(self) -> bool:
        """Whether the first chunk's loss has another form than in all comparisons."""
        proofs = self._known.proofs
        return bool(proofs) and len(self._chunks) == 1 < len(self._rows) and self._first_form not in proofs

    @property
    def _first_form(self) -> LossForm:
        """The form of the loss in the first chunk. Empty: another process has computed it."""
        return self._by_chunk[0].form if self._chunks else frozenset()

    @property
    def _shown(self) -> Proof:
        """The proof of that form in an earlier comparison."""
        return self._known.proofs.get(self._first_form, ())

    @property
    def _form(self) -> LossForm:
        """The form of the loss in all chunks."""
        return frozenset().union(*[chunk.form for chunk in self._by_chunk])

    def known(self, number: int, compared: bool) -> LossCount:
        """The count of this loss after so many mini-batches, with what is known of it. `compared`: this one was."""
        if not compared:
            return self._known._replace(number=number if self.is_proven else 0)
        proofs = {**self._known.proofs, self._first_form: with_earlier(self.proof or (), self._shown)}
        if self.is_proven:
            return LossCount(number, proofs)
        if self._known.unproven + 1 == _SAID:
            warnings.warn(
                f"{self._name} is compared with the loss of the joined outputs in every step, which takes a second "
                f"call of it and of its gradient: {self._unproven}.", UserWarning, stacklevel=2,
            )
        return LossCount(0, proofs, self._known.unproven + 1)

    @cached_property
    def proof(self) -> Proof | None:
        """The proof that the traced divisors give of the weights of the chunks. None: they prove nothing."""
        return self._proof(self._by_chunk, self._rows) if self._chunks else ()

    def _proof(self, chunks: Sequence[ChunkLoss], rows: Sequence[int]) -> Proof | None:
        """The same of some chunks of so many rows. What is foreign is a constant, or was made where nobody sees it."""
        foreign = [chunk.foreign for chunk in chunks]
        if any([len(own) != len(foreign[0]) or not all(map(same_values, own, foreign[0])) for own in foreign]):
            return None
        return proof([chunk.divisors for chunk in chunks], rows, self.rule, self.is_counted)

    def is_proven_beside(self, other: Loss) -> bool:
        """Whether the traced divisors prove the weights of the chunks beside that of another mini-batch's first.

        Of a sum there is nothing to prove: it has no weight.
        """
        if self._reduction == "sum" or self._is_told and other._is_told:
            return True
        rows = [other._rows[min(other._chunks)], *[self._rows[chunk] for chunk in sorted(self._chunks)]]
        varies = self._proof((other._by_chunk[0], *self._by_chunk), rows)
        # Of one chunk, which nothing was compared with, a mean over rows has one that varies with them.
        is_alone = len(self._rows) == 1 and len(set(rows)) > 1 and self.rule == other.rule == "mean"
        return varies is not None and (not is_alone or any(varies))

    def unproven(self) -> ValueError:
        """The error for a loss whose weights are not proven."""
        return self.neither(self._unproven)

    @property
    def _unproven(self) -> str:
        """The reason why the weights are not proven, in words."""
        reads = ", ".join(sorted(map(str, self._form & TO_HOST)))
        if reads:
            return (
                f"Python reads numbers there ({reads}), and what it does with them cannot be seen. Keep the tensor of "
                "what is logged, loss.detach(), and return tensors as metrics"
            )
        if self._kind == _PAIR:
            return "what a function that is not linear has made of a number cannot be seen"
        return (
            f"what it divides by in the chunks of this mini-batch ({list(self._rows)} rows) is not in proportion to "
            "their rows (a mask, ignored tokens, a mean over a choice of entries), or cannot be seen: a term is "
            "scripted, of an extension or of torch.func, or something else than sums and factors came behind a mean"
        )

    def neither(self, reason: str) -> ValueError:
        """The error for a loss that is neither a mean nor a sum over rows."""
        other = "'mean' if it is a mean" if self._reduction == "sum" else "'sum' if it adds"
        said, remedy = (
            "returned (sum, count) that do not add up over the chunks",
            "Return as count how much the sum has of each chunk, 0 where that is nothing: mask.sum(), or that with "
            ".clamp(min=1), which is done to the count of all chunks, but not max(count, 1)",
        ) if self._kind == _PAIR else (
            f"is not a {self._reduction} over rows",
            "Return (sum, count) from loss_fn (the sum over what counts, and how much that is), or give "
            f"loss_reduction={other}",
        )  # fmt: skip
        return ValueError(
            f"{self._name} {said}: {reason}. {remedy}. A loss that draws random numbers or compares rows with each "
            "other cannot be cut into chunks: give all rows at once, in one mini-batch with chunks=1, or take "
            "gradients of loss_fn(pipe(x), target)."
        )

    def _checked_pair(self, value: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        if len(value) != 2:
            raise ValueError(
                f"{self._name} returned a tuple of {len(value)}. Return a loss, or (sum, count); metrics go into a "
                "dict behind it: (loss, {'accuracy': (sum, count)})."
            )
        total = self._checked(value[0], "a sum")
        if self._requested == "sum":
            raise ValueError(
                f"loss_reduction is 'sum' but {self._name} returned (sum, count), whose loss is sum / count. Return "
                "the sum alone, or leave loss_reduction out."
            )
        count = value[1]
        if isinstance(count, Tensor) and count.requires_grad:
            raise ValueError(
                f"the second of the pair that {self._name} returned requires a gradient: a pair is read as (sum, "
                "count). Return count.detach() if it is one; what is only to be logged goes into a dict: return (loss, "
                "{'name': (sum, count)})."
            )
        if not isinstance(count, (Tensor, int, float)):
            raise TypeError(f"{self._name} returned {count!r} as a count. Return a number or a 0-d tensor.")
        if isinstance(count, (int, float)):  # filled in on the device: with a copy the host would wait
            dtype = torch.float64 if isinstance(count, float) else torch.int64
            count = torch.full((), count, dtype=dtype, device=total.device)
        count = count.to(total.device)
        if count.numel() != 1:
            raise ValueError(f"{self._name} returned a count of shape {list(count.shape)}. Return one number.")
        return total, count.reshape(())

    def _checked(self, value: Any, role: str) -> Tensor:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise TypeError(f"{self._name} returned {value!r} as {role}. Return a floating-point tensor.")
        if value.dim() == 0:
            return value
        if value.numel() != 1:
            raise ValueError(
                f"{self._name} returned {role} of shape {list(value.shape)}. Return one number: loss.mean(), "
                "loss.sum() with loss_reduction='sum', or (sum, count)."
            )
        return value.reshape(())


@calls_users_code
def _call(loss_fn: LossFn, output: Any, target: Any) -> Any:
    try:
        return loss_fn(output, target)
    except RuntimeError as error:
        if "appears to not have been used in the graph" not in str(error):
            raise
        raise RuntimeError(
            f"{name_of(loss_fn)} asks for a gradient by a tensor that its arguments do not depend on. In a step a loss "
            "sees the output of the last stage alone: x, the target and parameters are not behind it. For a penalty on "
            "gradients call the Pipe: loss = loss_fn(pipe(x), target), torch.autograd.grad(loss, ..., "
            "create_graph=True), then backward() of both."
        ) from error


def _reduction(loss_fn: LossFn, requested: str | None) -> str:
    if isinstance(loss_fn, partial):
        own_reduction = loss_fn.keywords.get("reduction")
    else:
        own_reduction = getattr(loss_fn, "reduction", None)
    if requested is not None and requested not in REDUCTIONS:
        raise ValueError(
            f"loss_reduction is {requested!r}. Use 'mean' or 'sum'; a loss_fn may also return (sum, count)."
        )
    if own_reduction == "none":
        raise ValueError(f"{name_of(loss_fn)} has reduction='none'. Use 'mean' or 'sum', or return (sum, count).")
    if own_reduction in REDUCTIONS and requested is not None and requested != own_reduction:
        raise ValueError(
            f"loss_reduction is {requested!r} but {name_of(loss_fn)} has reduction={own_reduction!r}. Give one of them."
        )
    return requested or (own_reduction if own_reduction in REDUCTIONS else "mean")


def name_of(loss_fn: LossFn) -> str:
    """The name of a loss function, or of its class.

    Example:
        >>> name_of(partial(torch.nn.functional.huber_loss, delta=0.5)), name_of(torch.nn.MSELoss())
        ('huber_loss', 'MSELoss')
    """
    if isinstance(loss_fn, partial):
        return name_of(loss_fn.func)
    name = str(getattr(loss_fn, "__name__", type(loss_fn).__name__))
    if name == "<lambda>" and isinstance(loss_fn, FunctionType):
        return f"the lambda of line {loss_fn.__code__.co_firstlineno}"
    return name
