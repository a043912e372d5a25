"""The rows of a mini-batch: which dim of its tensors counts them, and what has none.

    (x [rows, ...], NoChunk(mask [...]))  --with_rows-->  (x [other rows, ...], NoChunk(mask))  --bare-->  (x, mask)

`batch_dim` is the dim that counts rows; a tensor with too few dims for that has one value for each row, along dim 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from partition.contents import tensors_in
from partition.errors import PartitionError


@dataclass(frozen=True, eq=False)
class NoChunk:
    """Marks a part of the input that every chunk gets whole.

    Args:
        value: a tensor, or a pytree of tensors and plain values.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline import NoChunk, Pipe
        >>> class Scale(nn.Module):
        ...     def forward(self, pair):
        ...         x, scale = pair
        ...         return x * scale
        >>> pipe = Pipe(nn.Sequential(Scale()), [1], chunks=2)
        >>> pipe((torch.ones(4, 2), NoChunk(torch.tensor([2.0, 3.0]))))[3]
        tensor([2., 3.])
    """

    value: Any


def bare(value: Any) -> Any:
    """A value without the marks for what is not cut.

    Example:
        >>> bare((1, NoChunk(2)))
        (1, 2)
    """
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda leaf: isinstance(leaf, NoChunk))
    return pytree.tree_unflatten([leaf.value if isinstance(leaf, NoChunk) else leaf for leaf in leaves], spec)


def row_dim(tensor: Tensor, batch_dim: int) -> int:
    """The dim of a tensor that counts rows: `batch_dim`, or 0 where it has no such dim."""
    return batch_dim if tensor.dim() > batch_dim else 0


def rows_of(sample: Any, batch_dim: int = 0) -> int:
    """The rows of a mini-batch: those of its first tensor outside NoChunk.

    Raises:
        PartitionError: it has no tensor, or no rows.
    """
    lengths = [tensor.shape[row_dim(tensor, batch_dim)] for tensor in tensors_in(sample) if tensor.dim()]
    if not lengths or not lengths[0]:
        raise PartitionError(f"the sample has no rows: give a mini-batch of tensors with rows along dim {batch_dim}.")
    return lengths[0]


def with_rows(sample: Any, rows: int, sample_rows: int, batch_dim: int = 0) -> Any:
    """A mini-batch with another number of rows: some of those there are, again and again if they are too few.

    What stands in NoChunk, and tensors with another length than `sample_rows`, belong to no row, and stay.
    """

    def cut(tensor: Tensor) -> Tensor:
        dim = row_dim(tensor, batch_dim)
        if not tensor.dim() or tensor.shape[dim] != sample_rows:
            return tensor
        resized = tensor.detach()
        if rows > sample_rows:
            times = math.ceil(rows / sample_rows)
            resized = resized.repeat([times if place == dim else 1 for place in range(resized.dim())])
        return resized.narrow(dim, 0, rows).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, cut, sample)
