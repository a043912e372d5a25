"""The trace of the means within a loss: the divisor of each, recorded while loss_fn computes.

    loss_fn(output, target), under DivisorTrace (a torch-function mode)
        F.cross_entropy(...)  --> its sum over the tokens that count, and their count: exact, chunk by chunk
        x.mean(), x / n, ...  --> a divisor: in proportion to the chunk's rows, the same for all, or neither

A mean over tokens weighs a chunk by its tokens. Where the loss of loss_fn is one, or a combination of some with
constants, what adds up is that times the count. Any other loss weighs a chunk by its rows, which is right only if all
that it divides by is in proportion to them. Code that calls no torch function (scripted, an extension) is not traced:
what it returns is `foreign`, as are the constants of a loss, but another in each chunk. In torch.func's transforms
tensors are others than outside, so nothing is traced there.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from math import isfinite, nan
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn._reduction import legacy_get_string
from torch.overrides import TorchFunctionMode

from partition.contents import tensors_in
from partition.precision import HALF, widened
from pipeline.common.torch_modes import within_checkpoint, without_function_modes
from pipeline.data.loss_functions import (
    ADDING,
    KNOWN,
    LINEAR,
    MOVED,
    SCALING,
    SUMMING_ROWS,
    TO_HOST,
    VIEWING,
    WEIGHING,
    LossCall,
    known,
)


class Divisor:
    """A divisor or factor within the loss of one chunk.

    Args:
        amount: its value.
        is_count: whether it is the count of a mean over tokens.
        counts_rows: whether it is a number of entries of the rows, as such a count is: where it is the same for other
            rows, that is by chance.
    """

    __slots__ = ("amount", "is_count", "counts_rows")

    def __init__(self, amount: Tensor | float, is_count: bool = False, counts_rows: bool = False) -> None:
        self.amount = amount
        self.is_count = is_count
        self.counts_rows = is_count or counts_rows


LossForm: TypeAlias = frozenset[str | int]  # the torch functions that it calls, the number of its factors; MOVED


class Count(NamedTuple):
    """A number that loss_fn has counted in a chunk: of the target, put through functions that are not linear, or not.

    Attributes:
        number: what adds up over the chunks, as in `mask.sum().clamp(min=1)` the sum.
        function: what makes of the sum of these the number of the whole. None: it is that.
        is_kept: whether the function leaves every count of something as it is: floors of at most one do.
        is_seen: whether the number is known to add up.
    """

    number: Any
    function: Callable[[Tensor], Tensor] | None = None
    is_kept: bool = True
    is_seen: bool = True


class LossOrigin(NamedTuple):
    """The origin of a tensor within a loss.

    Attributes:
        marks: what of these was computed on the way to it.
            CONSTANT: neither output nor target: it has no other mark but UNSEEN, and the factors that made it.
            OUTPUT: it was computed with the output.
            REDUCED: a part of it was summed over rows.
            SEVERAL: such sums are several numbers (one for each column), which are no divisors that are noted.
            COUNTED: it is a sum of the target over rows (of a mask, say), times nothing; or over something else that
                is as long as some rows.
            TOKENS: it is a mean over tokens, or a linear combination of such and of constant tensors.
            UNSEEN: a function that may divide unseen, or choose among rows, was called on the way to it, or code that
                calls no torch function. Of constants too: of those that have a graph.
            BENT: such a part went through a function that is not linear: its kink, if it has one (`(mean - 1).abs()`,
                `target > median`), shows in no comparison as long as all chunks are on one side. Or it is the largest
                of some rows, or a product of two such parts of the output.
        divisors: its divisors and factors, in order.
        total: the sum of a mean over tokens, from which it was computed.
        as_count: of one number of the target that has gone through functions that are not linear, and nothing else.
    """

    marks: frozenset[str]
    divisors: tuple[Divisor, ...] = ()
    total: Tensor | None = None
    as_count: Count | None = None

    def total_and_count(self, mean: Tensor) -> tuple[Tensor, Tensor] | None:
        """The total of `mean`, the tensor itself, and its count. None: it is no combination of means over tokens."""
        if TOKENS not in self.marks:
            return None
        with without_function_modes():
            # Of several counts the first: the others are in proportion to it.
            count = next(divisor.amount for divisor in self.divisors if divisor.is_count)
            assert isinstance(count, Tensor)
            if self.total is not None:
                return self.total, count
            mean = widened(mean)
            return torch.where(count == 0, 0.0, mean) * count.to(mean), count  # zero for no tokens


CONSTANT, OUTPUT, REDUCED, SEVERAL, COUNTED = "constant", "output", "reduced", "several", "counted"
TOKENS, BENT, UNSEEN = "tokens", "bent", "unseen"
_OF_CONSTANTS, _OF_FOREIGN, _OF_CHECK = [LossOrigin(frozenset([CONSTANT])) for _ in range(3)]
_OF_UNSEEN = LossOrigin(frozenset([CONSTANT, UNSEEN]))
_COUNTING = ("sum", "nansum", "count_nonzero")
_FLOORS = ("clamp", "clip", "clamp_min")  # where they have no upper end


class DivisorTrace(TorchFunctionMode):
    """A torch-function mode that traces one evaluation of loss_fn.

    Args:
        rows: of the chunk.
        output, target: their tensors.
        sums: whether to compute means over tokens from their sums, and to weigh by their counts.
        batch_dim: the dim that counts rows, of tensors with another number along it dim 0.

    Attributes:
        is_over: whether the evaluation has ended.
        dtypes: in which rows of the output were summed.
        branches: whether the host has read what was reduced from the output: it may go on otherwise by it.
        read: the numbers that it has read of what was reduced; nan: a truth value, or several.
    """

    def __init__(
        self, rows: int, output: Iterable[Tensor], target: Iterable[Tensor], sums: bool, batch_dim: int = 0
    ) -> None:
        super().__init__()
        self._rows = rows
        self._sums = sums
        self._batch_dim = batch_dim
        self._depth = 0
        self.is_over = False
        self.dtypes: set[torch.dtype] = set()
        self.branches = False
        self.read: list[float] = []
        self._calls: set[str] = set()
        self._factors = 0  # and divisors, that are not zero
        self._origins: dict[int, tuple[Callable[[], Tensor | None], LossOrigin]] = {}  # of tensors that were seen
        for tensor in target:
            self._note(tensor, LossOrigin(frozenset()))
        for tensor in output:
            if tensor.dim():  # else a number that the model has computed: nobody saw what it divides by
                self._note(tensor, LossOrigin(frozenset([OUTPUT])))

    def __enter__(self) -> DivisorTrace:
        while _is_left_behind():
            torch._C._pop_torch_function_stack()
        self._depth = torch._C._len_torch_function_stack()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self.is_over = True  # an interrupt may leave it on the stack: it lets calls through then
        if torch._C._len_torch_function_stack() > self._depth:  # an interrupt within torch may have popped it
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    @property
    def form(self) -> LossForm:
        """The form of the loss, as far as it shows: another one may weigh rows in another way."""
        return frozenset({*self._calls, self._factors})

    @property
    def foreign(self) -> list[Tensor]:
        """The tensors without gradients that were read, and that no function made that was seen."""
        tensors = [tensor() for tensor, origin in self._origins.values() if origin is _OF_FOREIGN]
        return [tensor for tensor in tensors if tensor is not None]

    def origin(self, value: Any) -> LossOrigin | None:
        """The origin of a tensor. None: it was not computed from output or target, or is no tensor."""
        entry = self._origins.get(id(value))
        is_seen = entry is not None and entry[0]() is value and CONSTANT not in entry[1].marks
        return entry[1] if entry is not None and is_seen else None

    def _read(self, tensor: Tensor) -> LossOrigin:
        """The origin of an argument. One that was not seen is a constant, or foreign."""
        entry = self._origins.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        with_grad = _OF_CONSTANTS if tensor.is_leaf else _OF_UNSEEN
        self._origins[id(tensor)] = (lambda: tensor), with_grad if tensor.requires_grad else _OF_FOREIGN
        return self._origins[id(tensor)][1]

    def _note(self, tensor: Tensor, origin: LossOrigin) -> None:
        self._origins[id(tensor)] = weakref.ref(tensor), origin

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.l1_loss:
            kwargs = {"weight": _weight_of_l1_loss(), **kwargs}
        if self.is_over or torch._C._functorch.peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        function = known(func)
        call = LossCall(function, args, _with_reduction(kwargs) if function.is_reducing else kwargs)
        tensors = tensors_in([value for value in call.values if isinstance(value, (Tensor, tuple, list))])
        origins = list(map(self._read, tensors))
        origin = _joined(origins, function.plain in WEIGHING)
        if origin is _OF_CHECK and function.name in TO_HOST:
            return call.result()
        self._calls.add(call.form)
        weighs_by_several = function.plain in WEIGHING and any([
            SEVERAL in each.marks and OUTPUT not in each.marks for each in origins
        ])  # by the rows that count in each column
        if call.is_token_mean and CONSTANT not in origin.marks and not weighs_by_several:
            return self._token_mean(call, origin)
        result = call.result()
        if func is torch._is_all_true:  # by which torch checks arguments: those of distributions
            self._note(result, _OF_CHECK)
            return result
        if function.name in TO_HOST and (REDUCED in origin.marks or function.is_opaque):
            self.branches |= {OUTPUT, REDUCED} <= origin.marks
            self.read.append(result if type(result) in (int, float) else nan)
        value = args[0] if function.name == "__setitem__" else result
        made = tensors_in(value) if isinstance(value, (Tensor, tuple, list)) else []
        along_rows = function.looks and self._looks_along_rows(call, result)
        is_unseen = function.is_opaque or weighs_by_several
        if along_rows and call.takes_all:
            self._calls.add(MOVED)
        elif along_rows:
            self._calls.add(f"{function.name} along rows")
            is_unseen |= function.plain not in SUMMING_ROWS
        if OUTPUT in origin.marks and not (function.is_reducing or function.plain in KNOWN) and self._rows > 1:
            is_unseen |= any([one.numel() == 1 for one in made]) and any([one.numel() > 1 for one in tensors])
        if made:
            origin = self._followed(call, value, origin, along_rows)
        if is_unseen and CONSTANT not in origin.marks:
            origin = origin._replace(marks=origin.marks | {UNSEEN})
        for tensor in made:
            self._note(tensor, origin)
            if tensor._base is not None and any([tensor is one for one in tensors]):  # written, and its base with it
                self._note(tensor._base, _joined([self._read(tensor._base), origin], False))
        return result

    def _followed(self, call: LossCall, result: Any, origin: LossOrigin, along_rows: bool) -> LossOrigin:
        """The origin of a function's result, from the joined one of its arguments."""
        (marks, divisors, _, count), function = origin, call.function
        own = self._divisors(call, result, marks)
        divisors += own
        self._factors += sum([isinstance(divisor.amount, Tensor) or divisor.amount != 0 for divisor in own])
        if CONSTANT in marks:
            return LossOrigin(marks, divisors)
        is_linear, sums_rows = function.plain in LINEAR, function.plain in SUMMING_ROWS
        several = not (isinstance(result, Tensor) and result.numel() == 1)
        adds_number = function.plain in ADDING and any([isinstance(one, (int, float)) and one for one in call.args])
        if several or not is_linear or adds_number or function.name == "detach":  # a fused one has its own gradient
            marks -= {TOKENS}
        if function.plain in SCALING or function.name == "mean":
            marks -= {COUNTED}
        elif function.name in _COUNTING and not marks & {OUTPUT, REDUCED} and not divisors:
            marks |= {COUNTED} if self._has_rows(call.first) else set()
        if count is not None or REDUCED in marks and not is_linear:
            is_number = not several and not marks & {OUTPUT} and (count is not None or BENT not in marks)
            count = self._count(call, count) if is_number else None
            if count is None or not count.is_kept:
                marks |= {BENT}
            else:
                with without_function_modes():  # 1 where it is as it was, else infinite, which proves nothing
                    is_same = result.detach() == count.number
                    divisors += (Divisor(torch.where(is_same, 1.0, torch.inf).reshape(())),)
        if along_rows and sums_rows or isinstance(result, Tensor) and not result.dim():  # one number is of all rows
            marks |= {REDUCED, SEVERAL} if several else {REDUCED}
            if OUTPUT in marks and sums_rows and not is_linear:  # their largest, their norm
                marks |= {BENT}
        if marks >= {OUTPUT, REDUCED} and isinstance(result, Tensor) and result.is_floating_point():
            self.dtypes.add(result.dtype)
        return LossOrigin(marks, divisors, as_count=count)

    def _count(self, call: LossCall, earlier: Count | None) -> Count | None:
        """The count of one number of the target after one more function. None: it is not of that number alone."""
        function, args, kwargs = call
        places = [place for place, value in enumerate(args) if self.origin(value) is not None]
        if len(places) != 1 or function.name != function.plain or function.name.startswith("__i") or tensors_in(kwargs):
            return None
        (place,) = places
        if args[place].numel() != 1:
            return None
        with without_function_modes():
            earlier = earlier or Count(args[place].detach().clone())
        number, before, is_kept, _ = earlier

        def counted(number: Tensor) -> Tensor:
            number = number if before is None else before(number)
            with without_function_modes():
                result: Tensor = function.func(*args[:place], number, *args[place + 1 :], **kwargs)
            return result

        bounds = [*args[1:], *kwargs.values()]
        is_floor = function.name in _FLOORS and len(bounds) == 1 and "max" not in kwargs
        is_floor = is_floor and isinstance(bounds[0], (int, float)) and bounds[0] <= 1
        return Count(number, counted, is_floor and is_kept)

    def count(self, value: Any) -> Count:
        """The count of the chunk, a tensor or a number; one that the host has made of what it has read is not seen."""
        origin = self.origin(value)
        if origin is None:
            number = value.item() if isinstance(value, Tensor) and self.read and value.numel() == 1 else value
            return Count(value, is_seen=not self.read or number in (0, *self.read))
        return origin.as_count or Count(value, is_seen=BENT not in origin.marks)

    def _looks_along_rows(self, call: LossCall, result: Any) -> bool:
        """Whether a function sums or compares numbers of several rows, chooses some by their place, or moves them."""
        if call.function.plain in VIEWING:
            value = call.first
            return self.origin(value) is not None and self._has_rows(value) and not self._has_rows(result)
        return any([
            dim in (place, place - value.dim())
            for value, dims in call.dims_along()
            if self.origin(value) is not None
            for place in [self._place(value)]
            for dim in dims
        ])

    def _has_rows(self, value: Tensor) -> bool:
        """Whether a tensor may have rows, or parts of them, along a dimension that may be that of the rows."""
        dims = {0, self._batch_dim} & set(range(value.dim()))
        return any([value.shape[dim] % self._rows == 0 for dim in dims])

    def _place(self, value: Tensor) -> int:
        """The dimension of the rows: the first one, or `batch_dim` where it is as long."""
        is_other = value.dim() > self._batch_dim and value.shape[self._batch_dim] == self._rows
        return self._batch_dim if is_other else 0

    def _divisors(self, call: LossCall, result: Any, marks: frozenset[str]) -> tuple[Divisor, ...]:
        """The divisors and factors of a function call, and the other fractions that it is given: they may be some.

        Args:
            marks: of its arguments.
        """
        function, args, kwargs = call
        name = function.name
        if name == "mean" or call.is_mean:
            is_of_rows = OUTPUT in marks and REDUCED not in marks and isinstance(result, Tensor) and not result.dim()
            return (Divisor(_mean_divisor(call, result), counts_rows=is_of_rows),)
        if function.plain not in SCALING:
            return tuple([Divisor(amount) for amount in _floats(call.values)])
        values = [*args, *([kwargs["other"]] if "other" in kwargs else [])]
        if name in ("__rdiv__", "__rtruediv__"):
            values.reverse()
        divides = function.plain not in ("mul", "multiply")
        return tuple([
            Divisor(detached_number(value).reshape(()), counts_rows=COUNTED in self._read(value).marks)
            if isinstance(value, Tensor) else Divisor(float(value))
            for value in (values[1:] if divides else values)
            if isinstance(value, (int, float)) or (isinstance(value, Tensor) and self._is_of_chunk(value, divides))
        ])

    def _is_of_chunk(self, value: Tensor, divides: bool) -> bool:
        """Whether a tensor is one number of the whole chunk, rather than a factor that is the loss itself.

        One without an origin may have been made from the host's numbers, if it is no parameter.
        """
        origin = self.origin(value)
        if origin is None or value.numel() != 1:
            return value.numel() == 1 and not value.requires_grad
        return (divides or OUTPUT not in origin.marks) and not (value.dim() and self._rows == 1)

    def _token_mean(self, call: LossCall, origin: LossOrigin) -> Tensor:
        with without_function_modes():
            count = _tokens(call.args[-1], call.kwargs["weight"], call.kwargs["ignore_index"])
        marks = origin.marks | ({REDUCED, TOKENS} if self._sums else {REDUCED})
        if REDUCED in origin.marks:  # it is not linear
            marks |= {UNSEEN}
        mean: Tensor
        if self._sums and not within_checkpoint():  # which recomputes the mean, and must see the same calls
            mean, total = _mean_and_total(call, count)
        else:
            mean, total = call.result(), None
        self._factors += 1
        self.dtypes.add(mean.dtype)
        self._note(mean, LossOrigin(marks, (*origin.divisors, Divisor(count, True)), total))
        return mean


def _mean_divisor(call: LossCall, result: Any) -> Tensor | float:
    """The number that a mean divides by."""
    name, weight = call.function.name, call.kwargs.get("weight")
    if name in ("l1_loss", "mse_loss") and weight is not None:
        with without_function_modes():
            total: Tensor = weight.detach().sum()
        return total
    entries: float = call.first.shape[1] if name == "ctc_loss" else call.first.numel() / max(result.numel(), 1)
    return entries


def _joined(origins: Sequence[LossOrigin], weighs: bool) -> LossOrigin:
    """The joined origin of a function's arguments. `weighs`: it multiplies them."""
    if len(origins) < 2:
        return origins[0] if origins else _OF_CONSTANTS
    traced = [origin for origin in origins if CONSTANT not in origin.marks]
    marks = frozenset().union(*[origin.marks for origin in origins])
    if traced:
        marks -= {CONSTANT}
    if not all([TOKENS in origin.marks for origin in traced]):
        marks -= {TOKENS}
    if weighs and sum([origin.marks >= {OUTPUT, REDUCED} for origin in traced]) > 1:  # a product of two means
        marks = (marks | {BENT}) - {TOKENS}
    divisors = dict.fromkeys([divisor for origin in origins for divisor in origin.divisors])
    return LossOrigin(marks, tuple(divisors), as_count=traced[0].as_count if len(traced) == 1 else None)


def _floats(values: Iterable[Any]) -> dict[float, None]:
    """The floats among some values and the lists in them, each once, without infinity and nan."""
    numbers: dict[float, None] = {}
    for value in values:
        if type(value) in (list, tuple):
            numbers.update(_floats(value))
        elif isinstance(value, float) and isfinite(value):
            numbers[value] = None
    return numbers


def _weight_of_l1_loss() -> Any:
    """The weight of the l1_loss under way: torch hands it to no mode, and would leave it out."""
    frame: Any = sys._getframe()
    while frame.f_code is not functional.l1_loss.__code__:
        frame = frame.f_back
    return frame.f_locals["weight"]


def _is_left_behind() -> bool:
    """Whether the innermost mode is a trace that an interrupt left on the stack."""
    depth = torch._C._len_torch_function_stack()
    mode = torch._C._get_function_stack_at(depth - 1) if depth else None
    return isinstance(mode, DivisorTrace) and mode.is_over


def _mean_and_total(call: LossCall, count: Tensor) -> tuple[Tensor, Tensor]:
    is_half = any([value.dtype in HALF for value in call.args])  # whose sum would overflow
    losses = call.function.func(*call.args, **{**call.kwargs, "reduction": "none" if is_half else "sum"})
    with without_function_modes():
        total = losses.sum(dtype=torch.float32) if is_half else losses
        is_empty = count == 0  # nan, with a gradient of zero
        mean = torch.where(is_empty, nan, total / count.masked_fill(is_empty, 1).to(total))
        return mean.to(losses.dtype), total


def _tokens(target: Tensor, weight: Tensor | None, ignore_index: int | None) -> Tensor:
    """The count of the tokens: their number, or the sum of their weights."""
    counts = target != (-100 if ignore_index is None else ignore_index)
    if weight is None:
        return counts.sum()
    # Ignored tokens weigh nothing. (With a mask, target[counts], the host would have to wait for a GPU.)
    weights = weight.detach()[torch.where(counts, target, 0).long()]
    return torch.where(counts, weights, 0.0).sum()


def _with_reduction(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with "reduction" in the place of torch's old names for it."""
    old = kwargs.get("size_average"), kwargs.get("reduce")
    if old == (None, None):
        return kwargs
    return {**kwargs, "size_average": None, "reduce": None, "reduction": legacy_get_string(*old)}


def detached_number(number: Tensor) -> Tensor:
    """A 0-d tensor, detached. It must not keep its source alive: torch's mse_loss reduces within its input."""
    detached = number.detach()
    return detached.clone() if detached.untyped_storage().nbytes() > detached.element_size() else detached
