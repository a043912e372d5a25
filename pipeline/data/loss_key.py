"""Equality of loss functions: the same code, computing with the same values.

    lambda in the training loop     code, and the values it closes over   the same in every step
    Crit("mse"), Crit("rmse")       class and attributes                 two
    partial(f, beta=0.5)            f, and its arguments                 another than with 0.6

Plain values, tuples, sets and dicts count by value, functions by their parts and the plain globals that they name,
everything else by identity and plain attributes. What has no weak references counts by value if it has a hash (numbers
of numpy, fractions), else, as lists do, by type. A loss that is made of
different objects in every step (a counter, a tensor of the mini-batch) counts as new in the first steps only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch.utils.weak import WeakIdRef

from partition.containers import length, reader_of
from pipeline.data.loss_proof import LossCount

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type)
_VALUES = frozenset([type(None), bool, int, float, str])
_MOST = 64  # distinct losses of one code or class; all further ones count as one


class LossCounts:
    """The number of mini-batches of each loss function. Numbers 1, 2, 4, 8, ... validate.

    Mini-batches of another kind count by themselves: whose chunks have unlike numbers of rows, or of another reduction.
    """

    def __init__(self) -> None:
        self._counts: dict[Hashable, dict[Hashable, dict[Hashable, LossCount]]] = {}  # by code or class, key, kind

    def __reduce__(self) -> tuple[type[LossCounts], tuple[()]]:
        """A copy begins anew."""
        return LossCounts, ()

    def of(self, loss_fn: Callable[..., Any]) -> dict[Hashable, LossCount]:
        """The counts of mini-batches of a loss function, by kind: those that are known. It may be written."""
        counts = self._counts.setdefault(_kind(loss_fn), {})
        key = key_of(loss_fn)
        return counts.setdefault(key if key in counts or len(counts) < _MOST else None, {})


def key_of(loss_fn: Callable[..., Any]) -> Hashable:
    """A key that is equal for equal loss functions.

    >>> def made(power):
    ...     return lambda output, target: (output - target).abs().pow(power).mean()
    >>> key_of(made(2)) == key_of(made(2)), key_of(made(2)) == key_of(made(3))
    (True, False)
    """
    if isinstance(loss_fn, (partial, FunctionType, MethodType)) or not hasattr(loss_fn, "__dict__"):
        return _key(loss_fn, 0)
    return type(loss_fn), tuple([(name, _key(value, 0)) for name, value in vars(loss_fn).items()])


def _kind(loss_fn: Any) -> Hashable:
    while isinstance(loss_fn, (partial, MethodType)):
        loss_fn = loss_fn.func if isinstance(loss_fn, partial) else loss_fn.__func__
    return (loss_fn.__code__ if isinstance(loss_fn, FunctionType) else type(loss_fn),)


def _key(value: Any, depth: int) -> Hashable:
    """The key of a part of a loss function."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value) if isinstance(value, (float, complex)) else value  # nan is nan, -0.0 is not 0.0
    if depth > 8:  # a function that refers to itself
        return (type(value),)
    if isinstance(value, partial):
        return partial, _key(value.func, depth + 1), _key(value.args, depth + 1), _key(value.keywords, depth + 1)
    if isinstance(value, MethodType):
        return MethodType, _key(value.__func__, depth + 1), _object(value.__self__)
    if isinstance(value, FunctionType):
        namespace = value.__globals__
        names = [name for name in value.__code__.co_names if name in namespace and type(namespace[name]) in _VALUES]
        read = tuple([(name, _key(namespace[name], depth)) for name in names])
        return FunctionType, value.__code__, value.__module__, _key(captured(value), depth + 1), read
    if isinstance(value, (tuple, set, frozenset, dict)) and length(value) < 32:
        return type(value), tuple([_key(item, depth + 1) for item in reader_of(type(value))(value)])
    return _object(value)


def _object(value: Any) -> Hashable:
    """The key of an object: its identity as long as it lives, and the plain ones of its attributes."""
    table = getattr(value, "__dict__", {}) if not isinstance(value, ModuleType) else {}
    try:
        identity: Any = WeakIdRef(value)
    except TypeError:
        identity = type(value), _hashable(value)
    return identity, tuple([(name, _key(item, 0)) for name, item in table.items() if type(item) in _VALUES])


def _hashable(value: Any) -> Hashable:
    """A value that has a hash. None: it has none."""
    with suppress(TypeError):
        hash(value)
        return cast(Hashable, value)
    return None


def captured(function: FunctionType) -> tuple[Any, ...]:
    """The values that a function holds: its defaults, and what it has closed over so far."""
    return function.__defaults__, function.__kwdefaults__, *[cell.cell_contents for cell in filled_cells(function)]


def filled_cells(function: FunctionType) -> list[CellType]:
    """The cells over which a function has closed, and that something was put into."""
    return [cell for cell in function.__closure__ or () if cell != CellType()]
