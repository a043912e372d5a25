"""The contents of tensors, kept before something is written there, and put back.

    tensors ─► Contents ◄── keep ── an operation is about to write into one of them
                  └──────── put_back ─► their storages, as they were first
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

T = TypeVar("T", bound=Tensor)


class Contents:
    """The contents of tensors: which storage each has, and of storages what is in them, kept before they are written.

    With them, of leaves, whether they need a gradient, and their hooks.

    Args:
        tensors: those. What is written into others is not kept, nor into those without a storage, as sparse ones.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self._leaves = [(leaf, leaf.requires_grad, _hooks_of(leaf)) for leaf in tensors if leaf.is_leaf]
        self._data = [(tensor, tensor.detach()) for tensor in tensors if not tensor.is_meta and storage_of(tensor) >= 0]
        self._storages = {storage_of(data): data.untyped_storage() for _, data in self._data}
        self._copies: dict[int, torch.UntypedStorage] = {}

    def keep(self, tensor: Tensor) -> None:
        """Keep the storage of a tensor as it is now, if it was there; as it was first, where it is kept already."""
        key = storage_of(tensor)
        if key in self._storages and key not in self._copies:
            self._copies[key] = self._storages[key].clone()

    def put_back(self) -> None:
        """Put back all. No version of a tensor tells of it, as of BatchNorm's own writing."""
        for leaf, needs_grad, hooks in self._leaves:
            if leaf.requires_grad != needs_grad and leaf.is_leaf:
                leaf.requires_grad_(needs_grad)
            if _hooks_of(leaf) != hooks:
                _put_back_hooks(leaf, hooks)
        for tensor, data in self._data:
            if storage_of(tensor) != storage_of(data):  # `tensor.data = ...`
                tensor.data = data
        for device in {copy.device for copy in self._copies.values()}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)  # another stream may read it still
        for key, copy in self._copies.items():
            storage = self._storages[key]
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _hooks_of(leaf: Tensor) -> list[dict[int, Any]]:
    return [dict(getattr(leaf, kind) or {}) for kind in _HOOKS]


def _put_back_hooks(leaf: Tensor, hooks: list[dict[int, Any]]) -> None:
    for kind, entries in zip(_HOOKS, hooks):
        present = getattr(leaf, kind)
        if present is not None:  # in the dict from which their handles remove them
            present.clear()
            present.update(entries)


@contextmanager
def unwritten(tensors: Iterable[Tensor]) -> Iterator[Contents]:
    """Within: what operations write into some tensors is kept; at the end it is put back.

    Example:
        >>> weight = torch.zeros(3)
        >>> with unwritten([weight]):
        ...     _ = weight.add_(1)
        >>> weight
        tensor([0., 0., 0.])
    """
    contents = Contents(tensors)
    try:
        with _WriteObserver(contents):
            yield contents
    finally:
        contents.put_back()


class _WriteObserver(TorchDispatchMode):
    supports_higher_order_operators = True  # flex_attention's

    def __init__(self, contents: Contents) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._contents = contents

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            self._contents.keep(tensor)
        return func(*args, **kwargs)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments into which an operation writes."""
    places = _written(func)
    if not places:
        return []
    values = [args[place] if place < len(args) else kwargs.get(name) for place, name in places]
    return tensors_in(values)


PLAIN = (type(None), bool, int, float, str)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a pytree."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) in (tuple, list):  # in less time than tree_iter
        tensors: list[Tensor] = []
        for entry in value:
            if isinstance(entry, Tensor):
                tensors.append(entry)
            elif type(entry) not in PLAIN:
                tensors += tensors_in(entry)
        return tensors
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]


@cache
def _written(func: Any) -> list[tuple[int, str]]:
    """The places and names of the arguments into which an operation writes."""
    if isinstance(func, HigherOrderOperator) or func is torch.ops.aten.record_stream.default:  # which says it writes
        return []
    arguments = enumerate(func._schema.arguments)
    return [
        (place, argument.name) for place, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]  # fmt: skip


def unwrapped(tensor: Any) -> Iterator[Tensor]:
    """A tensor; of one that wraps others, as quantised weights do, these.

    Example:
        >>> weight = torch.zeros(2)
        >>> [tensor is weight for tensor in unwrapped(weight)]
        [True]
    """
    if wraps(tensor):
        for inner in [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]:
            if isinstance(inner, Tensor):  # a DTensor has a mesh, too
                yield from unwrapped(inner)
    else:
        yield tensor


def wraps(tensor: Any) -> bool:
    """Whether a tensor wraps others, and tells torch which."""
    return type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor)


def rewrapped(tensor: Any, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor that wraps others, with what `change` makes of each of these."""
    names, context = tensor.__tensor_flatten__()
    inner = {name: change(value) if isinstance(value := getattr(tensor, name), Tensor) else value for name in names}
    other: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return other


def with_attributes(stand_in: T, tensor: Tensor, change: Callable[[Any], Any] = lambda value: value) -> T:
    """A tensor that stands for another, with what layers have set on that; what it wraps is its own.

    Args:
        stand_in: gets them.
        tensor: has them.
        change: what becomes of each.

    Example:
        >>> weight = torch.zeros(2)
        >>> weight.is_wide = True
        >>> with_attributes(torch.ones(2), weight).is_wide
        True
    """
    own = vars(stand_in)
    own.update({name: change(value) for name, value in vars(tensor).items() if name not in own})
    return stand_in


def nbytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor's numbers; of one that wraps others, of theirs."""
    return sum(inner.nbytes for inner in unwrapped(tensor))


def version_of(value: Any) -> int:
    """The number of writes in place into a tensor; 0 for an inference tensor, which does not count, and for others."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def storage_of(tensor: Tensor) -> int:
    """The key of the storage of a tensor; below 0 where it has none, as sparse ones."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return -id(tensor)


def storage_holder(tensor: Tensor) -> Any:
    """An object that keeps the key of a tensor's storage its own, not the memory: no other one has it meanwhile."""
    return tensor if storage_of(tensor) < 0 else StorageWeakRef(tensor.untyped_storage())
