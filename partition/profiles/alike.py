"""Layers that are alike, so that one run without numbers tells what all of them take and hold.

    layer, its input --differences--> names of attributes that differ from an earlier layer's
          none, or only such as that one's run did not read ──► the earlier result, and an output like the earlier one
          others ──► it runs, and what it reads of these is watched: later layers may differ in what it did not read

Two layers are alike if their modules are of the same types under the same names, their parameters and buffers have the
same shapes, types and ties, their inputs have the same shapes, strides, types and share memory in the same places, and
all else that stands in their modules is the same object or an equal plain value, but for what no run reads (the number
of a block, say). Whoever reads the same does the same: without numbers nothing else can differ. What cannot be compared
so is run by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from partition.contents import storage_of
from partition.models.parts import Block

Attribute = tuple[str, str]  # path of a module in a layer, name
T = TypeVar("T")


class Likeness(NamedTuple):
    """One layer that has run, and its result.

    Attributes:
        layer: what ran: the layer, or the block of a part of a model.
        around: of what surrounds a block: its outline and its chain.
        input_forms: the forms of the input, and of the arguments of a block.
        unread: attributes that differ from those of another layer, and that its run did not read.
        result: of the visit.
        output_form: how its output follows from its input.
    """

    layer: nn.Module
    around: tuple[Hashable, ...]
    input_forms: list[Form | None]
    unread: frozenset[Attribute]
    result: Any
    output_form: Form


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
            visit: runs the copy.
            reuse: as of `each_layer`.
        """
        around: tuple[Hashable, ...] = ()
        inner, input_forms = copy, [Form.of(x)]
        if isinstance(layer, Block) and isinstance(copy, Block):
            arguments = copy.called(x)
            input_forms.append(None if arguments is None else Form.of(arguments, x))
            if arguments is not None:
                around, inner, layer = layer.around, copy.block, layer.block
        differing: frozenset[Attribute] = frozenset()
        for earlier in reversed(self._entries if None not in input_forms else ()):
            if (earlier.input_forms, earlier.around) == (input_forms, around):
                differences = _differences(earlier.layer, layer)
                if differences is not None and differences <= earlier.unread:
                    y = earlier.output_form.build(pytree.tree_leaves(x))
                    return reuse(earlier.result, x, y), y
                differing = differing or differences or frozenset()
        with _watched(inner, differing) as read:
            result, y = visit()
        output_form = Form.of(y, x)
        if None not in input_forms and output_form is not None:
            self._entries.append(Likeness(layer, around, input_forms, differing - read, result, output_form))
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
            if len(type(module).__mro__) > 1 and "_watches" in vars(type(module)):
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
    """The attributes in which two layers differ. None: they differ in more."""
    pairs = list(zip(one.named_modules(remove_duplicate=False), other.named_modules(remove_duplicate=False)))
    if len(pairs) != sum(1 for _ in one.modules()) or len(pairs) != sum(1 for _ in other.modules()):
        return None  # a module stands in two places, or one has more
    attributes = set()
    tensors: list[tuple[Any, Any]] = []
    for (path, module), (other_path, other_module) in pairs:
        same = path == other_path and type(module) is type(other_module) and (
            vars(module).keys() == vars(other_module).keys()
        )
        if not same or isinstance(module, torch.jit.ScriptModule):
            return None
        for name, value in vars(module).items():
            other_value = vars(other_module)[name]
            if name in ("_parameters", "_buffers"):
                if value.keys() != other_value.keys():
                    return None
                tensors += zip(value.values(), other_value.values())
            elif name == "_modules":
                if value.keys() != other_value.keys() or [child is None for child in value.values()] != [
                    child is None for child in other_value.values()
                ]:
                    return None
            elif not _is_same(value, other_value):
                attributes.add((path, name))
    return frozenset(attributes) if _have_same_form(tensors) else None


def _have_same_form(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Whether parameters and buffers have the same form, and stand in the same places."""
    partners: dict[int, int] = {}
    for one, other in pairs:
        if one is None or other is None:
            if one is not other:
                return False
        elif partners.setdefault(id(one), id(other)) != id(other) or _of_tensor(one) != _of_tensor(other):
            return False
    return len(set(partners.values())) == len(partners)


def _of_tensor(tensor: Tensor) -> Hashable:
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor._backward_hooks:
        return id(tensor)  # like no other
    return type(tensor), tensor.size(), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, repr(
        sorted(vars(tensor)) if hasattr(tensor, "__dict__") else ""
    )


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


class _TensorForm(NamedTuple):
    """A tensor of a value: all but its numbers, and where it lies."""

    kind: type
    source: int  # the leaf of the value beside in whose storage it lies, or -1 - the number of a new storage
    nbytes: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool


class _PlainForm(NamedTuple):
    """A leaf that is equal to those of its own type alone."""

    kind: type
    value: Any


class Form(NamedTuple):
    """The form of a value, whose tensors may lie in the memory of those of another one, beside it."""

    leaves: tuple[_TensorForm | _PlainForm, ...]
    tree: pytree.TreeSpec

    @classmethod
    def of(cls, value: Any, base: Any = ()) -> Form | None:
        """None: there are leaves that cannot be made anew, or told apart."""
        base_leaves = pytree.tree_leaves(base)
        number_of = {storage_of(leaf): number for number, leaf in reversed(list(enumerate(base_leaves)))
                     if isinstance(leaf, Tensor)}  # fmt: skip
        leaves, tree = pytree.tree_flatten(value)
        new: dict[int, tuple[int, torch.dtype]] = {}
        forms: list[_TensorForm | _PlainForm] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                source = number_of.get(storage_of(leaf))
                if source is None:
                    source, dtype = new.setdefault(storage_of(leaf), (-1 - len(new), leaf.dtype))
                else:
                    dtype = base_leaves[source].dtype
                if dtype is not leaf.dtype:
                    return None
                forms.append(_TensorForm(type(leaf), source, leaf.untyped_storage().nbytes(), leaf.size(),
                                         leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device,
                                         leaf.requires_grad))  # fmt: skip
            elif leaf is None or isinstance(leaf, _PLAIN):
                forms.append(_PlainForm(type(leaf), leaf))
            else:
                return None
        return cls(tuple(forms), tree)

    def build(self, base_leaves: Sequence[Any]) -> Any:
        """A value of this form, beside another with these leaves."""
        new: dict[int, Tensor] = {}
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf, _PlainForm):
                leaves.append(leaf.value)
                continue
            if leaf.source >= 0:
                base = base_leaves[leaf.source].detach()
            else:
                if leaf.source not in new:
                    count = leaf.nbytes // leaf.dtype.itemsize
                    new[leaf.source] = torch.empty(count, dtype=leaf.dtype, device=leaf.device)
                base = new[leaf.source]
            view = base.as_strided(leaf.size, leaf.stride, leaf.offset).detach()
            leaves.append(view.requires_grad_(leaf.needs_grad))
        return pytree.tree_unflatten(leaves, self.tree)
