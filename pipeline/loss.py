"""What is the loss of a mini-batch whose chunks have losses of their own? The un-pipelined one.

    "mean"         loss = sum_i loss_i * rows_i / rows          each chunk's loss is a mean over its rows
    "sum"          loss = sum_i loss_i
    (sum, count)   loss = sum_i sum_i / sum_i count_i           token masks, class weights: exact

Where the last kind is used the gradients of the sums are added first and divided by the whole count at the end, since
the counts of later chunks are not known when the first goes backward. Meanwhile they are scaled by a power of two near
1 / rows, which is exact in binary floating point and keeps half precision in range.

torch's own cross entropy and negative log likelihood, with reduction "mean" and class indices, are means over the
tokens that count, not over rows: they are turned into (sum, count) here. Counts are added in float64: in their own type
a few hundred tokens are too many for bfloat16 or uint8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, log2
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.ambient import without_function_modes
from pipeline.interrupts import calls_users_code

LossFn: TypeAlias = Callable[[Any, Any], Any]
REDUCTIONS = ("mean", "sum")
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_LOOSE = 2e-2  # half precision
_HALF = (torch.float16, torch.bfloat16)


class Loss:
    """Adds the chunk losses of one call up.

    Args:
        loss_fn: (output, target) -> loss, or (sum, count).
        reduction: "mean" or "sum"; None: what `loss_fn.reduction` says, else "mean".
        rows: the rows of each chunk.

    Raises:
        TypeError: loss_fn is not callable.
        ValueError: an unknown reduction, or another one than loss_fn's own.
    """

    def __init__(self, loss_fn: LossFn, reduction: str | None, rows: Sequence[int]) -> None:
        if isinstance(loss_fn, type):
            raise TypeError(f"loss_fn is the class {loss_fn.__name__}. Give an object of it: {loss_fn.__name__}().")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn is {loss_fn!r}, which is not callable. Give (output, target) -> loss.")
        self._name = _name(loss_fn)
        self._asked = reduction
        self._reduction = _reduction(loss_fn, reduction)
        self._whole = loss_fn
        self._loss_fn = _as_sum_and_count(loss_fn) if self._reduction == "mean" else loss_fn
        self._rows = rows
        self._all_rows = sum(rows)
        self._scale = scale_of(self._all_rows)
        self._found: dict[int, Tensor] = {}  # by chunk: its loss, or its sum
        self._counts: dict[int, Tensor] = {}

    @calls_users_code
    def chunk(self, chunk: int, output: Any, target: Any) -> tuple[Tensor, float]:
        """Compute the loss of a chunk.

        Returns:
            What is to be differentiated, and what it is to be multiplied by to be its part of the whole.
        """
        value = self._loss_fn(output, target)
        if isinstance(value, tuple):
            total, count = self._checked_pair(value)
            self._found[chunk], self._counts[chunk] = _alone(total), _alone(count)
            return total, self._scale
        loss = self._checked(value, "a loss")
        if self._counts:
            raise ValueError(f"{self._name} returned (sum, count) for one chunk and a single loss for another.")
        self._found[chunk] = _alone(loss)
        return loss, self._share(chunk)

    def _share(self, chunk: int) -> float:
        return 1.0 if self._reduction == "sum" else self._rows[chunk] / self._all_rows

    @property
    def _parts(self) -> dict[int, Tensor]:
        """By chunk, what is added up."""
        if self._counts or self._reduction == "sum":
            return self._found
        with without_function_modes():
            return {chunk: loss * self._share(chunk) for chunk, loss in self._found.items()}

    @property
    def key(self) -> str:
        """What loss functions of the same code share, such as a lambda written in the training loop."""
        function = self._whole.func if isinstance(self._whole, partial) else self._whole
        code = getattr(function, "__code__", None)
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}"
        return f"{type(function).__module__}.{type(function).__qualname__}"

    @property
    def divisor(self) -> Tensor | None:
        """What the summed gradients are to be divided by, now that all counts are known; None: nothing."""
        if not self._counts:
            return None
        count = self._count()
        if self._loss_fn is not self._whole:  # torch's own: where no token counts the loss is nan, its gradient zero
            count = torch.where(count == 0, 1.0, count)
        return count * self._scale

    @property
    def row_share(self) -> float:
        """What one row's own gradient is multiplied by among those that are summed: see `divisor` for what follows."""
        return self._scale if self._counts else 1.0 if self._reduction == "sum" else 1 / self._all_rows

    @property
    def weight(self) -> tuple[str, Tensor]:
        """How much this mini-batch counts among several: its rows, its count, or 1; and by which of these rules."""
        if self._counts:
            return "count", self._count()
        whole = torch.ones((), dtype=torch.float64, device="cpu")
        return ("sum", whole) if self._reduction == "sum" else ("mean", whole * self._all_rows)

    @property
    def value(self) -> Tensor:
        """The loss of the mini-batch, a 0-d tensor."""
        total = _sum(self._parts)
        return (total.double() / self._count()).to(total.dtype) if self._counts else total

    def check(self, output: Any, target: Any) -> Tensor:
        """Compare with loss_fn on the whole, joined output; return its value there.

        Raises:
            ValueError: they disagree, so loss_fn is neither a mean nor a sum over rows.
        """
        value = self._whole(output, target)
        if isinstance(value, tuple):
            total, count = self._checked_pair(value)
            whole = (total.double() / count).to(total.dtype)
        else:
            whole = self._checked(value, "a loss")
        ours = self.value
        tolerance = max(_TOLERANCE.get(each.dtype, _LOOSE) for each in self._found.values())
        if whole.dtype in _HALF:
            tolerance = _LOOSE
        # Parts that cancel (a policy gradient's) leave rounding errors of their own size, not of the small whole's.
        scale = _sum({chunk: part.double().abs() for chunk, part in self._parts.items()})
        scale = scale / self._count().abs() if self._counts else scale
        near = tolerance * (scale.nan_to_num(0.0, 0.0).item() + 1e-3)
        found = whole.detach()
        if not torch.allclose(ours.double(), found.to(ours).double(), rtol=tolerance, atol=near, equal_nan=True):
            raise self._neither(
                f"the chunks' losses ({list(self._rows)} rows) combine to {ours.item():.8g}, but on the whole output "
                f"it is {found.item():.8g}"
            )
        return whole

    def check_grads(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Compare the chunks' gradients of an output with those of the whole.

        Args:
            pairs: (that of the chunk's own loss, that of the whole), one for each chunk.

        Raises:
            ValueError: they disagree. The losses may agree nevertheless: those of surrogates, of which only the
                gradient matters (a policy gradient, loss / loss.detach()), are the same number whatever the rows.
        """
        divisor = self.divisor
        largest = max([_largest(whole) for _, whole in pairs], default=0.0)
        for ours, whole in pairs:
            ours = ours if divisor is None else ours / divisor.to(ours.device)
            tolerance = _TOLERANCE.get(ours.dtype, _LOOSE)
            if not torch.allclose(ours, whole, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
                raise self._neither(
                    f"the chunks' losses ({list(self._rows)} rows) combine to the loss of the whole output, but their "
                    "gradients do not combine to its gradient"
                )

    def _neither(self, what: str) -> ValueError:
        return ValueError(
            f"{self._name} is not a {self._reduction} over rows: {what}. Return (sum, count) from loss_fn (the sum "
            "over what counts, and how much that is), or give loss_reduction='sum' if it adds. A loss that draws "
            "random numbers or compares rows with each other cannot be cut into chunks: use the forward door, "
            "loss_fn(pipe(x), target).backward()."
        )

    def _count(self) -> Tensor:
        return _sum(self._counts)

    def _checked_pair(self, value: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        if len(value) != 2:
            raise ValueError(f"{self._name} returned a tuple of {len(value)}. Return a loss, or (sum, count).")
        total = self._checked(value[0], "a sum")
        if len(self._found) != len(self._counts):
            raise ValueError(f"{self._name} returned (sum, count) for one chunk and a single loss for another.")
        if self._asked == "sum":
            raise ValueError(
                f"loss_reduction is 'sum' but {self._name} returned (sum, count), whose loss is sum / count. Return "
                "the sum alone, or leave loss_reduction out."
            )
        count = value[1]
        if isinstance(count, Tensor) and count.requires_grad:
            raise ValueError(f"the count of {self._name} requires a gradient. Return count.detach().")
        if not isinstance(count, (Tensor, int, float)):
            raise TypeError(f"{self._name} returned {count!r} as a count. Return a number or a 0-d tensor.")
        if isinstance(count, Tensor):
            count = count.to(total.device, torch.float64)
        else:  # filled in where it is needed: copied there, the host would wait
            count = torch.full((), float(count), dtype=torch.float64, device=total.device)
        if count.numel() != 1:
            raise ValueError(f"{self._name} returned a count of shape {list(count.shape)}. Return one number.")
        return total, count.reshape(())

    def _checked(self, value: Any, what: str) -> Tensor:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise TypeError(f"{self._name} returned {value!r} as {what}. Return a floating-point tensor.")
        if value.dim() == 0:
            return value
        if value.numel() != 1:
            raise ValueError(
                f"{self._name} returned {what} of shape {list(value.shape)}. Return one number: loss.mean(), "
                "loss.sum() with loss_reduction='sum', or (sum, count)."
            )
        return value.reshape(())


def scale_of(rows: int) -> float:
    """The power of two by which sums over so many rows are scaled until their count is known."""
    return float(0.5 ** ceil(log2(rows)))


def _alone(number: Tensor) -> Tensor:
    """A 0-d tensor, detached. It must not keep what it was taken from: torch's mse_loss reduces within its input."""
    found = number.detach()
    return found.clone() if found.untyped_storage().nbytes() > found.element_size() else found


def _largest(tensor: Tensor) -> float:
    return float(torch.nan_to_num(tensor.abs(), 0.0, 0.0).amax()) if tensor.numel() else 0.0


def _sum(by_chunk: dict[int, Tensor]) -> Tensor:
    """Added in the order of the chunks."""
    first, *more = (by_chunk[chunk] for chunk in sorted(by_chunk))
    total: Tensor = first
    with without_function_modes():
        for each in more:
            total = total + each
    return total


def _reduction(loss_fn: LossFn, asked: str | None) -> str:
    own = loss_fn.keywords.get("reduction") if isinstance(loss_fn, partial) else getattr(loss_fn, "reduction", None)
    if asked is not None and asked not in REDUCTIONS:
        raise ValueError(f"loss_reduction is {asked!r}. Use 'mean' or 'sum'; a loss_fn may also return (sum, count).")
    if own == "none":
        raise ValueError(f"{_name(loss_fn)} has reduction='none'. Use 'mean' or 'sum', or return (sum, count).")
    if own in REDUCTIONS and asked is not None and asked != own:
        raise ValueError(f"loss_reduction is {asked!r} but {_name(loss_fn)} has reduction={own!r}. Give one of them.")
    return asked or (own if own in REDUCTIONS else "mean")


def _name(loss_fn: LossFn) -> str:
    if isinstance(loss_fn, partial):
        return _name(loss_fn.func)
    return str(getattr(loss_fn, "__name__", type(loss_fn).__name__))


def _as_sum_and_count(loss_fn: LossFn) -> LossFn:
    """torch's own token means as (sum, count); any other function as it is."""
    if type(loss_fn) is nn.CrossEntropyLoss and not _has_hooks(loss_fn):
        options = {"ignore_index": loss_fn.ignore_index, "label_smoothing": loss_fn.label_smoothing}
        return _tokens(functional.cross_entropy, loss_fn.weight, loss_fn, **options)
    if type(loss_fn) is nn.NLLLoss and not _has_hooks(loss_fn):
        return _tokens(functional.nll_loss, loss_fn.weight, loss_fn, ignore_index=loss_fn.ignore_index)
    if _is_torchs(loss_fn):
        return _tokens(loss_fn, None, loss_fn)
    if isinstance(loss_fn, partial) and _is_torchs(loss_fn.func):
        options = {key: value for key, value in loss_fn.keywords.items() if key not in ("weight", "reduction")}
        if not loss_fn.args and options.keys() <= {"ignore_index", "label_smoothing"}:
            return _tokens(loss_fn.func, loss_fn.keywords.get("weight"), loss_fn, **options)
    return loss_fn


def _is_torchs(function: LossFn) -> bool:
    return function is functional.cross_entropy or function is functional.nll_loss


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _tokens(function: Callable[..., Tensor], weight: Tensor | None, whole: LossFn, **options: Any) -> LossFn:
    ignore_index = options.get("ignore_index", -100)

    def sum_and_count(output: Any, target: Any) -> Any:
        if not isinstance(target, Tensor) or target.is_floating_point():
            return whole(output, target)  # class probabilities: a mean over rows
        if isinstance(output, Tensor) and output.dtype in _HALF:  # a sum of float16 would overflow
            total = function(output, target, weight=weight, reduction="none", **options).sum(dtype=torch.float32)
        else:
            total = function(output, target, weight=weight, reduction="sum", **options)
        counts = target != ignore_index
        if weight is None:
            return total, counts.sum()
        # What does not count weighs nothing. (By a mask, target[counts], the host would have to wait for a GPU.)
        weights = weight[torch.where(counts, target, 0).long()]
        return total, torch.where(counts, weights, 0.0).sum()

    return sum_and_count
