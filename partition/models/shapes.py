"""Tensors of which no numbers are there: nan, where they lie in another part; made up, where they have none yet."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from partition.contents import storage_of
from partition.models.lost import poison_of


def poison(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape and type, without memory, that no numbers may come from: nan, where there is one."""
    return torch.full((), poison_of(tensor.dtype), dtype=tensor.dtype, device=device).expand(tensor.shape)


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


def is_whole(tensor: Tensor) -> bool:
    """Whether no other numbers lie in the storage of a tensor. An expanded one has each once."""
    if tensor.layout is not torch.strided:
        return False
    count = prod([size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride])
    return storage_of(tensor) >= 0 and tensor.untyped_storage().nbytes() == count * tensor.element_size()
