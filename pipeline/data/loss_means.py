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
from partition.precision import HALF
from pipeline.common.torch_modes import within_checkpoint, without_function_modes
from pipeline.data.loss_functions import MOVED, VIEWING, LossFunction, dims_along, known, takes_all


class Divisor:
    """A divisor or factor within the loss of one chunk.

    Args:
        amount: its value.
        is_count: whether it is the count of a mean over tokens.
    """

    __slots__ = ("amount", "is_count")

    def __init__(self, amount: Tensor | float, is_count: bool = False) -> None:
        self.amount = amount
        self.is_count = is_count


LossForm: TypeAlias = frozenset[str | int]  # names of the torch functions that it calls, numbers of its factors; MOVED


class Bend(NamedTuple):
    """A number that loss_fn has put through functions that are not linear, as in `mask.sum().clamp(min=1)`.

    Attributes:
        number: as it was before.
        function: these, one after the other.
        divisor: 1 where they have left the number as it was, else infinite, which proves nothing. None: they are not
            all floors of at most one, which leave every count of something as it is.
    """

    number: Tensor
    function: Callable[[Tensor], Tensor]
    divisor: Divisor | None


class Count(NamedTuple):
    """A count that loss_fn returned for a chunk.

    Attributes:
        number: what adds up over the chunks.
        function: what makes of the sum of these the count of the whole. None: it is that.
        is_seen: whether it is known to add up.
        is_kept: whether the function leaves every count of something as it is.
    """

    number: Any
    function: Callable[[Tensor], Tensor] | None
    is_seen: bool
    is_kept: bool = True


class LossOrigin(NamedTuple):
    """The origin of a tensor within a loss.

    Attributes:
        marks: what of these was computed on the way to it.
            CONSTANT: neither output nor target: it has no other mark, and the factors and fractions that made it.
            OUTPUT: it was computed with the output.
            REDUCED: a part of it was summed over rows.
            SEVERAL: such sums are several numbers (one for each column), which are no divisors that are noted.
            TOKENS: it is a mean over tokens, or a linear combination of such and of constants.
            BENT: such a part went through a function that is not linear: its kink, if it has one (`(mean - 1).abs()`,
                `target > median`), shows in no comparison as long as all chunks are on one side. Or it is the largest
                of some rows, or a product of two such parts of the output.
        divisors: its divisors and factors, in order.
        total: the sum of a mean over tokens, from which it was computed.
        bend: of one number of the target that has gone through functions that are not linear, and nothing else.
    """

    marks: frozenset[str]
    divisors: tuple[Divisor, ...] = ()
    total: Tensor | None = None
    bend: Bend | None = None

    @property
    def tokens(self) -> Tensor:
        """The count of a mean over tokens, of a combination that of its first."""
        count = next(divisor.amount for divisor in self.divisors if divisor.is_count)
        assert isinstance(count, Tensor)
        return count

    def total_of(self, mean: Tensor) -> Tensor | None:
        """The part of `mean`, the tensor itself, that adds up over chunks. None: it is no combination of means of tokens."""
        if TOKENS not in self.marks or self.total is not None:
            return self.total
        with without_function_modes():
            mean = mean.float() if mean.dtype in HALF else mean
            return torch.where(self.tokens == 0, 0.0, mean) * self.tokens.to(mean)  # zero for no tokens


CONSTANT, OUTPUT, REDUCED, SEVERAL, TOKENS, BENT = "constant", "output", "reduced", "several", "tokens", "bent"
_OF_CONSTANTS, _OF_FOREIGN, _OF_CHECK = [LossOrigin(frozenset([CONSTANT])) for _ in range(3)]
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
        is_blind: whether a function was called that may divide unseen.
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
        self.is_blind = False
        self.dtypes: set[torch.dtype] = set()
        self.branches = False
        self.read: list[float] = []
        self._names: set[str] = set()
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
        return frozenset({*self._names, *range(self._factors)})

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
        self._origins[id(tensor)] = (lambda: tensor), _OF_CONSTANTS if tensor.requires_grad else _OF_FOREIGN
        self.is_blind |= not tensor.is_leaf
        return _OF_CONSTANTS

    def _note(self, tensor: Tensor, origin: LossOrigin) -> None:
        self._origins[id(tensor)] = weakref.ref(tensor), origin

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.l1_loss:
            kwargs = {"weight": _weight_of_l1_loss(), **kwargs}
        if self.is_over:
            return func(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.is_blind = True
            return func(*args, **kwargs)
        function = known(func)
        if function.is_reducing:
            kwargs = _with_reduction(kwargs)
        if function.reads and self._joined(args, {}) is _OF_CHECK:
            return func(*args, **kwargs)
        self._names.add(function.name)
        weighs_by_several = function.weighs and any(map(self._is_several_sums, [*args, *kwargs.values()]))
        if function.is_token_mean and _is_mean(kwargs) and _has_labels(args, kwargs) and not weighs_by_several:
            origin = self._joined(args, kwargs)
            if CONSTANT not in origin.marks:
                return self._token_mean(func, args, kwargs, origin)
        result = func(*args, **kwargs)
        if func is torch._is_all_true:  # by which torch checks arguments: those of distributions
            self._note(result, _OF_CHECK)
            return result
        along_rows = function.looks and self._looks_along_rows(function, args, kwargs, result)
        if along_rows and takes_all(function, args):
            self._names.add(MOVED)
        elif along_rows and not function.sums_rows or function.is_opaque:
            self.is_blind = True
        elif weighs_by_several:
            self.is_blind = True
        if function.reads:
            marks = self._joined(args, kwargs).marks
            self.branches |= marks >= {OUTPUT, REDUCED}
            self.read += [result if type(result) in (int, float) else nan] if REDUCED in marks else []
        value = args[0] if function.name == "__setitem__" else result
        if isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and value and isinstance(value[0], Tensor)):
            self._follow(function, args, kwargs, value, along_rows and function.sums_rows)
        return result

    def _follow(
        self, function: LossFunction, args: Sequence[Any], kwargs: dict[str, Any], result: Any, sums_rows: bool
    ) -> None:
        """Note the origin of a function's result."""
        marks, divisors, _, bend = self._joined(args, kwargs, function.weighs)
        amounts = self._amounts(function, args, kwargs, result)
        divisors += tuple([Divisor(amount) for amount in amounts])
        self._factors += sum([isinstance(amount, Tensor) or amount != 0 for amount in amounts])
        if CONSTANT in marks:
            for tensor in tensors_in(result):
                self._note(tensor, LossOrigin(marks, divisors))
            return
        if OUTPUT in marks and not function.is_known and self._rows > 1:
            self.is_blind |= _is_one_of_several(result, (*args, *kwargs.values()))
        several = not (isinstance(result, Tensor) and result.numel() == 1)
        adds_number = function.adds and any([isinstance(value, (int, float)) and value for value in args])
        if several or not function.is_linear or adds_number or function.name == "detach":  # a fused one has its own
            marks -= {TOKENS}
        if bend is not None or REDUCED in marks and not function.is_linear:
            bend = None if several or OUTPUT in marks else self._bend(function, args, kwargs, result, bend)
            marks = marks if bend is not None else marks | {BENT}
        if sums_rows or isinstance(result, Tensor) and not result.dim():  # one number is of all rows
            marks |= {REDUCED, SEVERAL} if several else {REDUCED}
            if OUTPUT in marks and function.sums_rows and not function.is_linear:  # their largest, their norm
                marks |= {BENT}
        if marks >= {OUTPUT, REDUCED} and isinstance(result, Tensor) and result.is_floating_point():
            self.dtypes.add(result.dtype)
        origin = LossOrigin(marks, divisors, bend=bend)
        for tensor in tensors_in(result):
            self._note(tensor, origin)

    def _joined(self, args: Sequence[Any], kwargs: dict[str, Any], weighs: bool = False) -> LossOrigin:
        """The joined origin of a function's arguments. `weighs`: it multiplies them."""
        origins: list[LossOrigin] = []
        for value in [*args, *kwargs.values()]:
            if isinstance(value, (Tensor, tuple, list)):
                origins += map(self._read, tensors_in(value))
        if len(origins) < 2:
            return origins[0] if origins else _OF_CONSTANTS
        bends = [origin.bend.divisor for origin in origins if origin.bend is not None]
        divisors = [*[divisor for origin in origins for divisor in origin.divisors], *[bend for bend in bends if bend]]
        marks = frozenset().union(*[origin.marks for origin in origins])
        if not all([CONSTANT in origin.marks for origin in origins]):
            marks -= {CONSTANT}
        if not all([origin.marks & {CONSTANT, TOKENS} for origin in origins]):
            marks -= {TOKENS}
        is_product = weighs and sum([origin.marks >= {OUTPUT, REDUCED} for origin in origins]) > 1  # of two means
        if is_product or None in bends:
            marks = (marks | {BENT}) - {TOKENS}
        return LossOrigin(marks, tuple(dict.fromkeys(divisors)))

    def _bend(
        self, function: LossFunction, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor, earlier: Bend | None
    ) -> Bend | None:
        """The bend of one number of the target after one more function. None: it is not of that number alone."""
        places = [place for place, value in enumerate(args) if self.origin(value) is not None]
        if len(places) != 1 or function.name != function.plain or function.name.startswith("__i") or tensors_in(kwargs):
            return None
        place, number = places[0], args[places[0]]
        if number.numel() != 1:
            return None

        def bent(number: Tensor) -> Tensor:
            number = number if earlier is None else earlier.function(number)
            with without_function_modes():
                result: Tensor = function.func(*args[:place], number, *args[place + 1 :], **kwargs)
            return result

        with without_function_modes():
            number = number.detach().clone() if earlier is None else earlier.number
            bounds = [*args[1:], *kwargs.values()]
            is_floor = function.name in _FLOORS and len(bounds) == 1 and "max" not in kwargs
            is_floor = is_floor and isinstance(bounds[0], (int, float)) and bounds[0] <= 1
            keeps = is_floor and (earlier is None or earlier.divisor is not None)
            divisor = Divisor(torch.where(result.detach() == number, 1.0, torch.inf).reshape(())) if keeps else None
        return Bend(number, bent, divisor)

    def count(self, value: Any) -> Count:
        """The count of the chunk, a tensor or a number; one that the host has made of what it has read is not seen."""
        origin = self.origin(value)
        if origin is None:
            number = value.item() if isinstance(value, Tensor) and self.read and value.numel() == 1 else value
            return Count(value, None, not self.read or number in (0, *self.read))
        if origin.bend is not None and BENT not in origin.marks:
            return Count(origin.bend.number, origin.bend.function, True, origin.bend.divisor is not None)
        return Count(value, None, BENT not in origin.marks)

    def _is_several_sums(self, value: Any) -> bool:
        """Whether a value is several sums over the target's rows: the rows that count of each column."""
        origin = self.origin(value)
        return origin is not None and SEVERAL in origin.marks and OUTPUT not in origin.marks

    def _looks_along_rows(
        self, function: LossFunction, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> bool:
        """Whether a function sums or compares numbers of several rows, chooses some by their place, or moves them."""
        if function.plain in VIEWING:
            return self.origin(args[0]) is not None and self._has_rows(args[0]) and not self._has_rows(result)
        return any([
            dim in (place, place - value.dim())
            for value, dims in dims_along(function, args, kwargs)
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

    def _amounts(
        self, function: LossFunction, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> list[Tensor | float]:
        """The divisors and factors of a function call, and the other fractions that it is given: they may be some."""
        name = function.name
        if name in ("l1_loss", "mse_loss") and kwargs.get("weight") is not None and _is_mean(kwargs):
            with without_function_modes():
                return [kwargs["weight"].detach().sum()]
        if name == "mean" or (function.is_reducing and _is_mean(kwargs)):
            averaged = args[0] if args else kwargs["input"]
            return [averaged.shape[1] if name == "ctc_loss" else averaged.numel() / max(result.numel(), 1)]
        if not function.scales:
            return list(_floats([*args, *kwargs.values()]))
        values = [*args, *([kwargs["other"]] if "other" in kwargs else [])]
        if name in ("__rdiv__", "__rtruediv__"):
            values.reverse()
        if function.plain not in ("mul", "multiply"):  # a division: only the denominator
            values = values[1:]
        return [
            detached_number(value).reshape(()) if isinstance(value, Tensor) else float(value)
            for value in values
            if isinstance(value, (int, float)) or (isinstance(value, Tensor) and self._is_of_chunk(value, values))
        ]

    def _is_of_chunk(self, value: Tensor, factors: Sequence[Any]) -> bool:
        """Whether a tensor is one number of the whole chunk, rather than a factor that is the loss itself.

        One without an origin may have been made from the host's numbers, if it is no parameter.
        """
        origin = self.origin(value)
        if origin is None or value.numel() != 1:
            return value.numel() == 1 and not value.requires_grad
        if value.dim() and self._rows == 1:
            return False
        return len(factors) == 1 or OUTPUT not in origin.marks

    def _token_mean(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], origin: LossOrigin
    ) -> Tensor:
        with without_function_modes():
            count = _count(_target(args, kwargs), kwargs.get("weight"), kwargs.get("ignore_index"))
        marks = origin.marks | ({REDUCED, TOKENS} if self._sums else {REDUCED})
        mean: Tensor
        if self._sums and not within_checkpoint():  # which recomputes the mean, and must see the same calls
            mean, total = _mean_and_total(func, args, kwargs, count)
        else:
            mean, total = func(*args, **kwargs), None
        self._factors += 1
        self.dtypes.add(mean.dtype)
        self._note(mean, LossOrigin(marks, (*origin.divisors, Divisor(count, True)), total))
        return mean


def _is_one_of_several(result: Any, values: Any) -> bool:
    """Whether one number was made of several."""
    return any([tensor.numel() == 1 for tensor in tensors_in(result)]) and any([
        tensor.numel() > 1 for tensor in tensors_in(values)
    ])


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


def _mean_and_total(
    func: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any], count: Tensor
) -> tuple[Tensor, Tensor]:
    is_half = any(isinstance(value, Tensor) and value.dtype in HALF for value in args)  # whose sum would overflow
    losses = func(*args, **{**kwargs, "reduction": "none" if is_half else "sum"})
    with without_function_modes():
        total = losses.sum(dtype=torch.float32) if is_half else losses
        is_empty = count == 0  # nan, with a gradient of zero
        mean = torch.where(is_empty, nan, total / count.masked_fill(is_empty, 1).to(total))
        return mean.to(losses.dtype), total


def _count(target: Tensor, weight: Tensor | None, ignore_index: int | None) -> Tensor:
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


def _is_mean(kwargs: dict[str, Any]) -> bool:
    """Whether a call has reduction "mean". torch.nn.functional gives modes all but the tensors by name."""
    return kwargs.get("reduction", "mean") in ("mean", "batchmean")


def _target(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return kwargs["target"] if "target" in kwargs else args[-1]


def _has_labels(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the target is class indices; class probabilities have a mean over rows."""
    target = _target(args, kwargs)
    return isinstance(target, Tensor) and not target.is_floating_point()


def detached_number(number: Tensor) -> Tensor:
    """A 0-d tensor, detached. It must not keep its source alive: torch's mse_loss reduces within its input."""
    detached = number.detach()
    return detached.clone() if detached.untyped_storage().nbytes() > detached.element_size() else detached
