"""The Python state that modules or a loss can reach, which an extra call of them must not change.

    attributes, lists, dicts, sets, deques and arrays on them, tensors that are no parameters
    objects of the user's classes; the containers, numbers and words of these classes, and their methods
    functions: their closures, and the functions, containers, numbers and words that they name among the globals of
        their module; an lru_cache of them, which is emptied where it has got an entry
    generators of torch, numpy and Python's random

Only objects a few steps away, and no large tensor: this covers counters, caches and logs, not data sets.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from functools import _lru_cache_wrapper, partial
from typing import Any

import torch
from torch import Tensor, nn

from partition.containers import CONTAINERS, length
from partition.generators import GENERATORS, generators_among
from partition.models.as_found import PutBacks
from pipeline.data.loss_key import captured, filled_cells
from pipeline.data.pytrees import same_values
from pipeline.recompute.attributes import ARRAY, OBJECTS, OTHER_PACKAGES, is_installed, kind_of, package_of
from pipeline.recompute.copies import refill

_DEPTH = 9
_MOST = 200_000  # objects
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)
_LONGEST = 100_000  # entries of a container
_LONG = 2_000  # so many are searched; a dict has two for each name
_LARGEST = 1_000_000  # entries of a tensor
_CODE = (types.FunctionType, staticmethod, classmethod, property, _lru_cache_wrapper)

Undo = Callable[[], None]


class ReachableState:
    """The objects that some modules or functions can reach, with their present state.

    Args:
        roots: the modules or functions.
        left_out: the objects with these ids are left out, with what only they reach.
        of_loss: whether this is for a loss: all globals that it names count, and no objects of installed packages, as
            threads of these (of a logger, say) may be changing them.

    Attributes:
        generators: those among them.
    """

    def __init__(self, roots: Iterable[Any], left_out: Iterable[int] = (), of_loss: bool = False) -> None:
        self._undo: list[Undo] = []
        self._of_loss = of_loss
        self._seen: dict[int, Any] = dict.fromkeys(left_out)  # referenced, so that ids are not reused
        under_way: list[tuple[Any, int]] = [(root, 0) for root in roots]
        while under_way and len(self._seen) < _MOST:
            value, depth = under_way.pop()
            if type(value) in _PLAIN or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if depth < _DEPTH:
                under_way += [(part, depth + 1) for part in self._note(value)]
        self.generators = tuple(generators_among(self._seen.values()).values())

    @classmethod
    def of_loss(cls, loss_fn: Any, stages: Iterable[Iterable[nn.Module]]) -> ReachableState:
        """That of a loss, but for the modules of the stages."""
        modules = [module for layers in stages for layer in layers for module in layer.modules()]
        return cls([loss_fn], map(id, modules), of_loss=True)

    def put_back(self) -> None:
        """Restore everything."""
        PutBacks.note()
        for undo in self._undo:
            undo()

    def _note(self, value: Any) -> Iterable[Any]:
        """Keep the contents of `value`, and return them."""
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and _is_small(value):
                self._undo.append(partial(_refill_tensor, value, value._version, value.detach().clone()))
            return ()
        if isinstance(value, types.FunctionType):
            return () if self._is_foreign(package_of(value)) else self._note_function(value)
        if isinstance(value, _lru_cache_wrapper):
            self._undo.append(partial(_empty, value, [value.cache_info().misses]))
            return (value.__wrapped__,)
        if isinstance(value, (staticmethod, classmethod)):
            return (value.__func__,)
        if isinstance(value, property):
            return (value.fget,)
        if isinstance(value, partial):
            return (value.func, value.args, value.keywords)
        if isinstance(value, types.MethodType):
            return (value.__self__, value.__func__)
        if isinstance(value, types.BuiltinFunctionType):  # such as log.append
            return (value.__self__,)
        if isinstance(value, nn.Module):
            return (vars(value), *self._note_classes(type(value)))
        kind = kind_of(type(value))  # type: ignore[arg-type]  # a type is Hashable
        if kind is None or kind is ARRAY and (value.size > _LARGEST or value.dtype.hasobject):
            return ()
        of_classes: Iterable[Any] = ()
        if kind in OBJECTS:
            if self._of_loss and is_installed(package_of(type(value))):
                return ()
            of_classes = self._note_classes(type(value))
        if kind.long is not None and length(value) > _LONGEST:
            kind = kind.long
        entries = list(kind.read(value))
        self._undo.append(partial(kind.write, value, entries))
        read = entries if len(entries) <= _LONG else ()
        return (*read, *([vars(value)] if kind.has_dict else ()), *of_classes)

    def _note_classes(self, kind: type) -> Iterable[Any]:
        """Keep the numbers and words of a class, and of those that it is derived from, and return what else they have.

        Of installed packages that is no code but forwards, from which all of a package may be in reach.
        """
        for base in kind.__mro__:
            if id(base) in self._seen or self._is_foreign(package_of(base)):
                continue
            self._seen[id(base)] = base
            entries = dict(vars(base))
            plain = {name: value for name, value in entries.items() if type(value) in _PLAIN}
            self._undo.append(partial(_reset, base, plain))
            yield from [entry for entry in entries.values() if isinstance(entry, CONTAINERS)]
            forward = entries.get("forward")
            if not is_installed(package_of(base)):
                yield from [entry for entry in entries.values() if isinstance(entry, _CODE)]
            elif isinstance(forward, types.FunctionType):
                yield from self._note_function(forward)

    def _is_foreign(self, package: str) -> bool:
        return package in OTHER_PACKAGES or self._of_loss and is_installed(package)

    def _note_function(self, function: types.FunctionType) -> Iterable[Any]:
        cells = filled_cells(function)
        self._undo += [partial(setattr, cell, "cell_contents", cell.cell_contents) for cell in cells]
        names = function.__globals__
        counted = object if self._of_loss else (*CONTAINERS, *GENERATORS, *_CODE)
        named = [value for name in function.__code__.co_names if isinstance(value := names.get(name), counted)]
        named = [value for value in named if not isinstance(value, _CODE) or not is_installed(package_of(value))]
        plain = {name: names[name] for name in function.__code__.co_names if type(names.get(name, names)) in _PLAIN}
        if plain:
            self._undo.append(partial(names.update, plain))
        return (*captured(function), *named)


def _is_small(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_inference() and tensor.numel() <= _LARGEST


def _refill_tensor(tensor: Tensor, version: int, values: Tensor) -> None:
    if tensor._version != version or tensor.device.type == "cpu" and not same_values(tensor, values):
        refill(tensor, values)


def _empty(cache: Any, misses: list[int]) -> None:
    """Empty a function's cache that has got an entry: which one, it does not tell."""
    if cache.cache_info().misses != misses[0]:
        cache.cache_clear()
        misses[0] = 0


def _reset(kind: type, plain: dict[str, Any]) -> None:
    for name, value in plain.items():
        if vars(kind).get(name, kind) is not value:
            setattr(kind, name, value)
