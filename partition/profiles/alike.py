"""Layers that are alike, so that one run without numbers tells what all of them take and hold.

    layer, its input --differences--> names of attributes that differ from an earlier layer's
          none, or only such as that one's run did not read ──► the earlier result, and an output like the earlier one
          others ──► it runs, and what it reads of these is watched: later layers may differ in what it did not read

Two layers are alike if their modules are of the same types under the same names, their inputs, parameters and buffers
have the same shapes, strides, types and share memory in the same places, and all else that stands in their modules is
the same object or an equal plain value, but for what no run reads (the number of a block, say). Whoever reads the same
does the same: without numbers nothing else can differ. What cannot be compared so is run by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from partition.contents import storage_of, tensors_in, wraps
from partition.models.parts import Block

Attribute = tuple[str, str]  # path of a module in a layer, name
T = TypeVar("T")


class Likeness(NamedTuple):
    """One layer that has run, and its result.

    Attributes:
        layer: what ran: the layer, or the block of a part of a model.
        around: of what surrounds a block: its outline and its chain.
        form: of its input, of the arguments of a block, and of its parameters and buffers.
        unread: attributes that differ from those of another layer, and that its run did not read.
        result: of the visit.
        x, y: its input and its output.
    """

    layer: nn.Module
    around: tuple[Hashable, ...]
    form: list[Any]
    unread: frozenset[Attribute]
    result: Any
    x: Any
    y: Any


class LikenessCache:
    """The layers that have run without numbers, in one pass over all."""

    def __init__(self) -> None:
        self._entries: list[Likeness] = []

    def run(
        self, layer: nn.Module, copy: nn.Module, x: Any, visit: Callable[[], tuple[T, Any]],
        reuse: Callable[[T, Any, Any], T],
    ) -> tuple[T, Any]:  # fmt: skip
        """The result and the output of a layer that runs, or that is like one that ran.

        Args:
            layer: the layer.
            copy: of it, that would run.
            x: its input, of fakes.
            visit: runs the copy; its output is of no graph.
            reuse: as of `each_layer`.
        """
        around: tuple[Hashable, ...] = ()
        inner, arguments = copy, None
        if isinstance(layer, Block) and isinstance(copy, Block):
            arguments = copy.called(x)
            if arguments is None:
                return visit()
            around, inner, layer = layer.around, copy.block, layer.block
        form = _form((x, arguments, [
            [_opened(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())]
            for module in inner.modules()
        ]))  # fmt: skip
        differing: frozenset[Attribute] = frozenset()
        for earlier in reversed(self._entries if form is not None else ()):
            if (earlier.form, earlier.around) == (form, around):
                differences = _differences(earlier.layer, layer)
                if differences is not None and differences <= earlier.unread:
                    y = _like(earlier, x)
                    return reuse(earlier.result, x, y), y
                differing = differing or differences or frozenset()
        with _watched(inner, differing) as read:
            result, y = visit()
        if form is not None and _form((x, y)) is not None:
            self._entries.append(Likeness(layer, around, form, differing - read, result, x, y))
        return result, y


@contextmanager
def _watched(layer: nn.Module, differing: frozenset[Attribute]) -> Iterator[set[Attribute]]:
    """Within, what a layer reads of the attributes that differ is added to the set."""
    read: set[Attribute] = set()
    by_path: dict[str, set[str]] = {}
    for path, name in differing:
        by_path.setdefault(path, set()).add(name)
    modules = [(layer.get_submodule(path), path, names) for path, names in by_path.items()]
    try:
        for module, path, names in modules:
            module.__class__ = _watching(type(module), path, frozenset(names), read)
        yield read
    finally:
        for module, *_ in modules:
            if "_watches" in vars(type(module)):
                module.__class__ = type(module).__mro__[1]


def _watching(kind: Any, path: str, names: frozenset[str], read: set[Attribute]) -> Any:
    def watch(module: Any, name: str) -> Any:
        if name in names:
            read.add((path, name))
        elif name == "__dict__" and sys._getframe(1).f_globals is not vars(nn.modules.module):  # that looks up others
            read.update((path, attribute) for attribute in names)
        return kind.__getattribute__(module, name)

    space = {"__getattribute__": watch, "__module__": kind.__module__, "_watches": names}
    return type(kind.__name__, (kind,), space)


# ------------------------------------------------------------------------------------------------------------ modules


def _differences(one: nn.Module, other: nn.Module) -> frozenset[Attribute] | None:
    """The attributes in which two layers differ, beside their tensors. None: they differ in more."""
    pairs = list(zip(one.named_modules(remove_duplicate=False), other.named_modules(remove_duplicate=False)))
    if len(pairs) != sum(1 for _ in one.modules()) or len(pairs) != sum(1 for _ in other.modules()):
        return None  # a module stands in two places, or one has more
    attributes = set[Attribute]()
    for (path, module), (other_path, other_module) in pairs:
        values, others = vars(module), vars(other_module)
        are_alike = path == other_path and type(module) is type(other_module) and values.keys() == others.keys()
        if not are_alike or isinstance(module, torch.jit.ScriptModule):
            return None
        if any([_places(values[table]) != _places(others[table]) for table in _TABLES]):
            return None
        if not all([_is_same(_set_on(values[table]), _set_on(others[table])) for table in ("_parameters", "_buffers")]):
            return None
        attributes.update(
            (path, name) for name in values if name not in _TABLES and not _is_same(values[name], others[name])
        )
    return frozenset(attributes)


_TABLES = ("_parameters", "_buffers", "_modules")


def _places(table: Mapping[str, Any]) -> dict[str, bool]:
    """The names in a table, and whether something stands there."""
    return {name: entry is not None for name, entry in table.items()}


def _set_on(table: Mapping[str, Tensor | None]) -> dict[str, dict[str, Any]]:
    """Attributes that are set on the tensors in a table. Those of tensors that wrap others the form of a layer has."""
    return {name: vars(entry) for name, entry in table.items() if entry is not None and not wraps(entry)}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two attributes are one object, or equal plain values."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(_is_same(one[key], other[key]) for key in one)
    return isinstance(one, _PLAIN) and bool(one == other)


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, set, frozenset)


# ------------------------------------------------------------------------------------------------------------- values


def _form(value: Any) -> list[Any] | None:
    """All of a value but the numbers of its tensors. None: there are leaves that cannot be made anew, or told apart."""
    leaves, tree = pytree.tree_flatten(value)
    places: dict[int, int] = {}  # by storage: of the first leaf that lies there
    form: list[Any] = [tree]
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not is_lazy(leaf) and not wraps(leaf):
            first = places.setdefault(storage_of(leaf), place)
            if leaves[first].dtype is not leaf.dtype:
                return None
            form.append((type(leaf), first, leaf.untyped_storage().nbytes(), leaf.size(), leaf.stride(),
                         leaf.storage_offset(), leaf.dtype, leaf.device, leaf.requires_grad))  # fmt: skip
        elif leaf is None or isinstance(leaf, _PLAIN):
            form.append((type(leaf), leaf))
        else:
            return None
    return form


def _opened(tensor: Tensor | None) -> Any:
    """A parameter or buffer; of one that wraps others its own type, context and shape, and these, opened."""
    if tensor is None or not wraps(tensor):
        return tensor
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # as it wraps others
    about = f"{type(tensor)} {names} {context}", tensor.dtype, tensor.size(), tensor.stride(), tensor.requires_grad
    return [about, [_opened(getattr(tensor, name)) for name in names]]


def _like(earlier: Likeness, x: Any) -> Any:
    """An output like the earlier one, in storages of its own, and in those of its input where that is."""
    bases = {storage_of(old): new.detach() for old, new in zip(tensors_in(earlier.x), tensors_in(x), strict=True)}

    def like(old: Tensor) -> Tensor:
        storage = storage_of(old)
        if storage not in bases:
            count = old.untyped_storage().nbytes() // old.itemsize
            bases[storage] = torch.empty(count, dtype=old.dtype, device=old.device)
        view = bases[storage].as_strided(old.size(), old.stride(), old.storage_offset()).detach()
        return view.requires_grad_(old.requires_grad)

    return pytree.tree_map_only(Tensor, like, earlier.y)
