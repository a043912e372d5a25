"""Tensors of which no numbers are there: nan, where they lie in another part; made up, where they have none yet."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partition.contents import storage_of
from partition.models.lost import poison_of


class TensorShape(NamedTuple):
    """A tensor of which only the shape and the type are known."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorShape:
        """Those of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def poison(self, device: torch.device) -> Tensor:
        """A tensor without memory that no numbers may come from: nan, where there is one."""
        return torch.full((), poison_of(self.dtype), dtype=self.dtype, device=device).expand(self.shape)


def form_in_memory(tensor: Tensor) -> tuple[Any, ...]:
    """The shape and type of a tensor, and how it lies in memory."""
    return tensor.shape, tensor.dtype, tensor.stride() if tensor.layout is torch.strided else tensor.layout


def blank(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor like another, and in its layout, on a device that has no memory: meta, or any under torch's fake mode.

    Operations hand layouts on, and sums round by them.
    """
    if tensor.layout is not torch.strided:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


class MadeUpBuffer(Tensor):
    """A buffer with numbers that are made up, in the place of one that has none yet. No outline keeps them."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain


def is_without_memory(tensor: Tensor) -> bool:
    """Whether one number stands for all."""
    if tensor.layout != torch.strided:
        return False
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return bool(strides) and not any(strides)


def is_whole(value: Any) -> bool:
    """Whether a value is a tensor in whose storage no other numbers lie. An expanded one has each once."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    count = prod([size for size, stride in zip(value.shape, value.stride(), strict=True) if stride])
    return storage_of(value) >= 0 and value.untyped_storage().nbytes() == count * value.element_size()
