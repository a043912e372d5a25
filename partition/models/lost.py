"""Values that another part of a model has computed: their numbers are not here.

    an absent module returns a LostTensor ──► + ──► a LostTensor ──► an argument of a block, or the output: refused

So the way of a forward through its own code may depend on anything: where it needs what is not there, it is refused.
"""

from __future__ import annotations

from contextvars import ContextVar
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from partition.contents import storage_of, tensors_in, version_of

filled: ContextVar[set[int]] = ContextVar("filled")  # the storages whose numbers have arrived, in the run under way


class LostTensor(Tensor):
    """A tensor that another part has computed, or that was computed from one. Its numbers are nan, whole ones 0.

    One into which such numbers are written becomes one.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            given = tensors_in((*args, *kwargs.values()) if kwargs or len(args) > 1 else args[0])
            versions = list(map(version_of, given)) if len(given) > 1 else []
            result = func(*args, **kwargs)
            written = [tensor for tensor, version in zip(given, versions) if version_of(tensor) != version]
        if not written and (not isinstance(result, Tensor | tuple | list) or isinstance(result, torch.Size)):
            return result
        if func.__name__.startswith("new_") or func.__name__.endswith("_like"):  # these read shapes alone
            return result
        read = args[:1] if func.__name__ in _AS_ANOTHER else given
        if not any(map(is_lost, read)):
            return result
        for tensor in written:
            for holder in (tensor, tensor._base):
                if type(holder) is Tensor:
                    holder.__class__ = LostTensor
        there = set(map(id, given))
        return tree_map_only(Tensor, lambda tensor: tensor if id(tensor) in there else as_lost(tensor), result)


_AS_ANOTHER = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})  # in the form of their second argument


def as_lost(tensor: Tensor) -> Tensor:
    """A tensor whose numbers are not here, of the same memory. One of torch's fake tensors has no numbers anyway."""
    if type(tensor) is not Tensor:
        return tensor
    is_view = tensor._base is not None or tensor.grad_fn is not None  # the other way forgets it
    return tensor.as_subclass(LostTensor) if is_view else Tensor._make_subclass(LostTensor, tensor)


def is_lost(value: Any) -> bool:
    """Whether a value is one, and its numbers have not arrived since."""
    if not isinstance(value, LostTensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return storage_of(value) not in filled.get(())


def lost(meta: Tensor, device: torch.device) -> Tensor:
    """A tensor like one on the meta device, and in its layout, whose numbers are not here."""
    return as_lost(torch.full_like(meta, poison_of(meta.dtype), device=device, layout=torch.strided))


def another(tensor: Tensor) -> Tensor:
    """Another tensor of the same memory: what one block returns is told from what the next one does."""
    with torch._C.DisableTorchFunctionSubclass():
        return as_lost(tensor.detach())


def poison_of(dtype: torch.dtype) -> float:
    """The number that stands for those that are not here."""
    return nan if dtype.is_floating_point or dtype.is_complex else 0
