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

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial, reduce
from math import ceil, log2
from typing import Any, TypeAlias

import torch
from torch import Tensor

from partition.contents import tensors_in
from pipeline.common.interrupts import calls_users_code
from pipeline.common.torch_modes import without_function_modes
from pipeline.data.loss_comparison import LossComparison, differences
from pipeline.data.loss_means import Divisor, DivisorTrace, LossForm, detached_number
from pipeline.data.loss_proof import ChunkTrace, Proof, Shown, is_alike, proof
from pipeline.data.metrics import Metrics, without_metrics

LossFn: TypeAlias = Callable[[Any, Any], Any]
REDUCTIONS = ("mean", "sum")


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
        shown: by comparisons of this loss over as uneven chunks.

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
        shown: Shown = Shown(),
    ) -> None:
        if isinstance(loss_fn, type):
            raise TypeError(f"loss_fn is the class {loss_fn.__name__}. Give an object of it: {loss_fn.__name__}().")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn is {loss_fn!r}, which is not callable. Give (output, target) -> loss.")
        self._requested = reduction
        self._reduction = _reduction(loss_fn, reduction)
        self.loss_fn = loss_fn
        self._rows = rows
        self._shown = shown
        self._losses: dict[int, Tensor] = {}  # by chunk: its loss, or its sum
        self._counts: dict[int, Tensor] = {}
        self._traces: dict[int, ChunkTrace] = {}
        self._is_single = len(rows) == 1 and not is_part
        self.is_counted = False  # not by loss_fn, which returned single losses
        self._has_fractions = False  # loss_fn returned counts that may not be whole
        self.metrics = Metrics(self._name)

    @property
    def _name(self) -> str:
        return _name(self.loss_fn)

    @property
    def all_rows(self) -> int:
        """The rows of the mini-batch."""
        return sum(self._rows)

    @property
    def _scale(self) -> float:
        """The factor of sums until the count is known."""
        return scale_of(self.all_rows)

    def chunk(self, chunk: int, output: Any, target: Any, batch_dim: int = 0) -> tuple[Tensor, float]:
        """Compute the loss of a chunk.

        Args:
            chunk: which.
            output, target: its own.
            batch_dim: the dim that counts their rows.

        Returns:
            The tensor to differentiate, and the factor that makes it the chunk's part of the whole.
        """
        value, trace = self._computed(output, target, self._rows[chunk], self._is_single, batch_dim)
        value = self.metrics.record(chunk, value)
        if isinstance(value, tuple):
            pair = self._checked_pair(value)
            if len(self._losses) != len(self._counts) or self.is_counted:
                raise ValueError(f"{self._name} returned (sum, count) for one chunk and a single loss for another.")
            self._losses[chunk], self._counts[chunk] = map(detached_number, pair)
            if trace is not None:
                self._note(chunk, trace, None if trace.branches or _is_bent(value, trace) else ())
            return pair[0], self._scale
        return self._single(chunk, value, trace)

    def _computed(
        self, output: Any, target: Any, rows: int, is_whole: bool, batch_dim: int = 0
    ) -> tuple[Any, DivisorTrace | None]:
        """The result of loss_fn, and the trace of its means. A whole mini-batch needs no trace."""
        outputs = tensors_in(output)
        if is_whole and not any([tensor.dtype is torch.float16 for tensor in outputs]):
            return _call(self.loss_fn, output, target), None
        trace = DivisorTrace(rows, outputs, tensors_in(target), self._reduction == "mean", batch_dim)
        with trace:  # on the CPU torch's own mean over tokens of float16 overflows
            return _call(self.loss_fn, output, target), trace

    def _single(self, chunk: int, value: Any, trace: DivisorTrace | None) -> tuple[Tensor, float]:
        """The same where loss_fn returned one number: a mean over tokens, or something else."""
        loss = self._checked(value, "a loss")
        origin = None if trace is None else trace.origin(value)
        total = None if origin is None or self._is_single else origin.total_of(loss)
        if self._losses and (total is not None) != bool(self._counts):
            kind = "(sum, count)" if self._counts and not self.is_counted else "a mean over tokens"
            raise ValueError(f"{self._name} returned {kind} for one chunk and a single loss for another.")
        is_blind = trace is None or trace.branches or total is None and trace.is_blind
        is_seen = origin is not None and not origin.is_bent and not is_blind
        divisors = origin.divisors if origin is not None and is_seen else None
        self._note(chunk, trace, divisors)
        self.is_counted = total is not None
        if origin is None or total is None:
            self._losses[chunk] = detached_number(loss)
            return loss, self._share(chunk)
        counts = [divisor.amount for divisor in origin.divisors if divisor.is_count]
        summed, self._counts[chunk] = self._checked_pair((total, counts[0]))
        self._losses[chunk] = detached_number(summed)
        return summed, self._scale

    def _note(self, chunk: int, trace: DivisorTrace | None, divisors: tuple[Divisor, ...] | None) -> None:
        form, dtypes = (LossForm(), frozenset()) if trace is None else (trace.form, frozenset(trace.dtypes))
        self._traces[chunk] = ChunkTrace(divisors, form, dtypes)

    def _share(self, chunk: int) -> float:
        return 1.0 if self._reduction == "sum" else self._rows[chunk] / self.all_rows

    @property
    def _parts(self) -> dict[int, Tensor]:
        """The summand of each chunk."""
        if self._counts or self._reduction == "sum":
            return self._losses
        with without_function_modes():
            return {chunk: loss * self._share(chunk) for chunk, loss in self._losses.items()}

    @property
    def divisor(self) -> Tensor | None:
        """The divisor of the summed gradients, once all counts are known; None: they are not divided."""
        if not self._counts:
            return None
        count = self._count()
        if self.is_counted:  # as torch does: where no token counts the loss is nan, its gradient zero
            with without_function_modes():
                count = torch.where(count == 0, 1.0, count)
        return count * self._scale

    @property
    def row_share(self) -> float:
        """The factor of one row's own gradient in the sum, before the division by `divisor`."""
        return self._scale if self._counts else 1.0 if self._reduction == "sum" else 1 / self.all_rows

    @property
    def weight(self) -> tuple[str, Tensor]:
        """The rule and the weight of this mini-batch among several: its rows, its count, or 1."""
        if self._counts:
            return "count", self._count()
        unit = torch.ones((), dtype=torch.float64, device="cpu")
        return ("sum", unit) if self._reduction == "sum" else ("mean", unit * self.all_rows)

    @property
    def value(self) -> Tensor:
        """The loss of the mini-batch, a 0-d tensor."""
        total = _sum(self._parts)
        return (total.double() / self._count()).to(total.dtype) if self._counts else total

    def is_empty(self, chunk: int) -> bool:
        """Whether loss_fn returned (sum, count) for a chunk, and counted nothing."""
        return bool(self._counts) and not self.is_counted and not self._counts[chunk]

    def of(self, chunks: Sequence[int]) -> tuple[Loss, Tensor | float]:
        """The loss of some chunks, which have been computed, as of a mini-batch of their own.

        Returns:
            It, and the weight with which its gradient at an output is that of the chunk's own part of the whole.
        """
        rows = [self._rows[chunk] for chunk in chunks]
        part = Loss(self.loss_fn, self._requested, rows, True)
        part._losses = {index: self._losses[chunk] for index, chunk in enumerate(chunks)}
        part._traces = {index: self._traces[chunk] for index, chunk in enumerate(chunks) if chunk in self._traces}
        part.is_counted = self.is_counted
        if not self._counts:
            return part, 1.0 if self._reduction == "sum" else sum(rows) / self.all_rows
        part._counts = {index: self._counts[chunk] for index, chunk in enumerate(chunks)}
        divisor = part.divisor
        assert divisor is not None
        return part, divisor / part._scale * self._scale

    def whole(self, output: Any, target: Any) -> Tensor:
        """The value of loss_fn on the whole, joined output."""
        value, _ = self._computed(output, target, self.all_rows, True)
        value = without_metrics(value)
        if isinstance(value, tuple):
            total, count = self._checked_pair(value)
            return (total.double() / count).to(total.dtype)
        return self._checked(value, "a loss")

    def compared(
        self, whole: Tensor, grads: Sequence[tuple[Tensor, Tensor]], may_overflow: bool = False
    ) -> LossComparison:
        """The comparison of the combined losses of the chunks with `whole`, see `LossComparison.of`."""
        # Parts that cancel (a policy gradient's) leave rounding errors relative to the parts, not to the small sum.
        size = _sum({chunk: part.double().abs() for chunk, part in self._parts.items()})
        size = size / self._count().abs() if self._counts else size
        dtypes = {loss.dtype for loss in self._losses.values()}
        dtypes.update(*[trace.dtypes for trace in self._traces.values()])
        return LossComparison.of(tuple(self._rows), self.value, size, dtypes, whole, grads, may_overflow)

    def check(self, comparisons: Sequence[LossComparison]) -> None:
        """Raise ValueError if loss_fn is neither a mean nor a sum over rows in one of them. The host waits."""
        for difference in differences(comparisons):
            raise self._neither(difference)

    def check_counts(self) -> None:
        """Raise ValueError if a count that loss_fn returned is no whole number. All chunks have been seen."""
        for count in torch.stack(list(self._counts.values())).tolist() if self._has_fractions else ():
            if count % 1 != 0:
                raise ValueError(
                    f"{self._name} returned {count:.6g} as a count, which is no whole number: a pair is read as (sum, "
                    "count). A metric goes into a dict: return (loss, {'accuracy': (sum, count)}). For class weights "
                    "call F.cross_entropy(output, target, weight=...) in loss_fn and return that: its weights are "
                    "counted. With other weights call loss_fn(pipe(x), target).backward() instead of step()."
                )

    @property
    def is_proven(self) -> bool:
        """Whether the traced divisors prove the weights of the chunks. Called after all chunks.

        What a comparison showed to vary with the rows is no constant that happens to be the same in all chunks.
        """
        return self.proof is not None and is_alike(self.proof, self._shown.proof)

    @property
    def is_new(self) -> bool:
        """Whether the first chunk's loss has a form that no comparison has seen."""
        seen = self._shown.form
        return seen is not None and len(self._traces) == 1 < len(self._rows) and not self._form.is_within(seen)

    @property
    def _form(self) -> LossForm:
        """The form of the loss in all chunks."""
        return reduce(LossForm.joined, [trace.form for trace in self._traces.values()], LossForm())

    @property
    def shown(self) -> Shown:
        """The result of all comparisons, after one in this call."""
        return Shown(self.proof or (), self._form.joined(self._shown.form or LossForm()))

    @cached_property
    def proof(self) -> Proof | None:
        """The proof that the traced divisors give of the weights of the chunks. None: they prove nothing."""
        divisors = [self._traces[chunk].divisors for chunk in sorted(self._traces)]
        return proof(divisors, self._rows, self.is_counted) if divisors else ()

    def is_proven_beside(self, other: Loss) -> bool:
        """Whether the traced divisors prove the weights of the chunks beside that of another mini-batch's first.

        Of a sum there is nothing to prove: it has no weight.
        """
        if self._reduction == "sum" or not self._traces or not other._traces:
            return True
        chunks, first = sorted(self._traces), min(other._traces)
        divisors = [other._traces[first].divisors, *[self._traces[chunk].divisors for chunk in chunks]]
        rows = [other._rows[first], *[self._rows[chunk] for chunk in chunks]]
        varies = proof(divisors, rows, self.is_counted)
        # Of one chunk, which nothing was compared with, a mean over rows has one that varies with them.
        is_alone = len(self._rows) == 1 and len(set(rows)) > 1 and not self._counts and not other._counts
        return varies is not None and (not is_alone or any([flag is not False for flag in varies]))

    def unproven(self) -> ValueError:
        """The error for a loss whose weights are not proven."""
        return self._neither(
            f"what it divides by in the chunks of this mini-batch ({list(self._rows)} rows) is not in proportion to "
            "their rows (a mask, ignored tokens, a mean over a choice of entries), or cannot be seen: something else "
            "than sums and factors came behind a mean, or Python has read it (.item(), an if)"
        )

    def _neither(self, reason: str) -> ValueError:
        return ValueError(
            f"{self._name} is not a {self._reduction} over rows: {reason}. Return (sum, count) from loss_fn (the sum "
            "over what counts, and how much that is), or give loss_reduction='sum' if it adds. A loss that draws "
            "random numbers or compares rows with each other cannot be cut into chunks: use pipe(x), "
            "loss_fn(pipe(x), target).backward()."
        )

    def _count(self) -> Tensor:
        return _sum(self._counts)

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
        if isinstance(count, Tensor):
            self._has_fractions |= count.is_floating_point() and not self.is_counted
            count = count.to(total.device, torch.float64)
        else:
            self._has_fractions |= isinstance(count, float)
            # Filled in on the device: with a copy the host would wait.
            count = torch.full((), float(count), dtype=torch.float64, device=total.device)
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


def scale_of(rows: int) -> float:
    """The power of two by which sums over so many rows are scaled until their count is known."""
    return float(0.5 ** ceil(log2(rows)))


def _call(loss_fn: LossFn, output: Any, target: Any) -> Any:
    try:
        return _called(loss_fn, output, target)
    except RuntimeError as error:
        if "appears to not have been used in the graph" not in str(error):
            raise
        raise RuntimeError(
            f"{_name(loss_fn)} asks for a gradient by a tensor that its arguments do not depend on. In a step a loss "
            "sees the output of the last stage alone: x, the target and parameters are not behind it. For a penalty on "
            "gradients call the Pipe: loss = loss_fn(pipe(x), target), torch.autograd.grad(loss, ..., "
            "create_graph=True), then backward() of both."
        ) from error


@calls_users_code
def _called(loss_fn: LossFn, output: Any, target: Any) -> Any:
    return loss_fn(output, target)


def _is_bent(pair: Iterable[Any], trace: DivisorTrace) -> bool:
    return any([origin.is_bent for part in pair if (origin := trace.origin(part)) is not None])


def _sum(by_chunk: dict[int, Tensor]) -> Tensor:
    """Added in the order of the chunks."""
    first, *later_parts = (by_chunk[chunk] for chunk in sorted(by_chunk))
    total: Tensor = first
    with without_function_modes():
        for part in later_parts:
            total = total + part
    return total


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
        raise ValueError(f"{_name(loss_fn)} has reduction='none'. Use 'mean' or 'sum', or return (sum, count).")
    if own_reduction in REDUCTIONS and requested is not None and requested != own_reduction:
        raise ValueError(
            f"loss_reduction is {requested!r} but {_name(loss_fn)} has reduction={own_reduction!r}. Give one of them."
        )
    return requested or (own_reduction if own_reduction in REDUCTIONS else "mean")


def _name(loss_fn: LossFn) -> str:
    if isinstance(loss_fn, partial):
        return _name(loss_fn.func)
    return str(getattr(loss_fn, "__name__", type(loss_fn).__name__))
