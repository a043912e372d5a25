"""Copies of many small tensors at little cost, and their values put back.

A network with a hundred batch norms has three hundred buffers, and each chunk may need their values from before it.
torch copies those of one dtype and device at once: on an accelerator with a few kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.data.pytrees import memory_address


def copies(tensors: Sequence[Tensor], storages: Sequence[int] | None = None) -> list[Tensor]:
    """Detached copies that share memory among themselves as the originals do.

    Args:
        tensors: the originals.
        storages: a number for each, the same for those that share memory, where that is known.
    """
    storages = list(map(memory_address, tensors)) if storages is None else storages
    sharing = Counter(dict(zip(map(id, tensors), storages)).values()) if len(set(storages)) < len(storages) else {}
    copied: dict[int, Tensor] = {}
    unshared: dict[torch.dtype, list[Tensor]] = {}
    bases: dict[int, torch.UntypedStorage] = {}
    for tensor, storage in zip(tensors, storages):
        if sharing.get(storage, 1) == 1:
            unshared.setdefault(tensor.dtype, []).append(tensor)
            continue
        if storage not in bases:
            bases[storage] = tensor.untyped_storage().clone()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copied[id(tensor)] = empty.set_(bases[storage], tensor.storage_offset(), tensor.shape, tensor.stride())
    for group in unshared.values():
        leaves = [tensor.detach() if tensor.requires_grad else tensor for tensor in group]
        copied.update(zip(map(id, group), torch._foreach_clone(leaves)))
    return [copied[id(tensor)] for tensor in tensors]


def refill(tensor: Tensor, values: Tensor) -> None:
    """Restore a tensor's values and shape: observers of quantization resize theirs.

    Not counted as a write: a graph that has saved the tensor finds its earlier values.
    """
    with torch.no_grad():
        if tensor.shape != values.shape:  # torch resizes no tensor with gradients, not even to the same shape
            tensor.resize_(values.shape)
        tensor.data.copy_(values)
