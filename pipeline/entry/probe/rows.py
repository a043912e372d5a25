"""The comparisons of a probe: which rows came out otherwise, by more than rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from partition.rows import row_dim
from pipeline.common.torch_modes import without_function_modes
from pipeline.data.pytrees import Activations, Tree, computable

_ROUNDING = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4, torch.complex64: 1e-4}
_HALF_ROUNDING = 8e-3
_LEAST = 1e-3  # the least change of a row, relative to that of its neighbours, if layers mix rows
_LEAST_ELSEWHERE = 0.05  # that of a row among another number of rows, relative to its size: half precision adds up
_MOST_ROWS = 8  # the number of rows that are compared

RowComparison: TypeAlias = Callable[[Tensor, Tensor], bool]  # whether rows of one tensor are others in another one


def any_differs(ones: Sequence[Tensor], others: Sequence[Tensor], differs: RowComparison) -> bool:
    """Whether rows of any of some tensors have changed."""
    return len(ones) == len(others) and any(map(differs, ones, others))


def is_mixed(reference: Tensor, probed: Tensor, batch_dim: int, rows: int, least: float = _LEAST) -> bool:
    """Whether at least a quarter of the rows that were kept have changed. (A few may: near ties, by rounding.)

    Args:
        least: the least change that counts, relative to that of the rows beside; 0.0: any but rounding.
    """
    if reference.shape != probed.shape:
        return False
    parts, other_parts = _row_parts(reference, batch_dim, rows), _row_parts(probed, batch_dim, rows)
    if not parts:
        return False
    kept_rows = range(1, rows, 2)
    kept_rows = kept_rows[:: -(-len(kept_rows) // _MOST_ROWS)]
    with without_function_modes():
        moved = max([_change(parts[row - 1], other_parts[row - 1])[0] for row in kept_rows])
        changes = [_change(parts[row], other_parts[row]) for row in kept_rows]
    rounding = _ROUNDING.get(reference.dtype, _HALF_ROUNDING)
    changed = [change > least * moved + rounding * size for change, size in changes]
    return 4 * sum(changed) >= len(changed)


def is_moved(reference: Tensor, probed: Tensor, batch_dim: int, rows: int, places: Sequence[int]) -> bool:
    """Whether a row has changed that stands at another place. (Not of integers: rounding decides near ties.)"""
    parts, other_parts = _row_parts(reference, batch_dim, rows), _row_parts(probed, batch_dim, len(places))
    if not (reference.is_floating_point() or reference.is_complex()) or not parts or not other_parts:
        return False
    pairs = [(parts[row], part) for row, part in zip(places, other_parts, strict=True) if row < rows]
    if any([part.shape != other_part.shape for part, other_part in pairs]):
        return False
    with without_function_modes():
        changes = [_change(*pair) for pair in pairs]
    rounding = _ROUNDING.get(reference.dtype, _HALF_ROUNDING)
    return any([change > _LEAST_ELSEWHERE * size + rounding for change, size in changes])


def _row_parts(tensor: Tensor, batch_dim: int, rows: int) -> Sequence[Tensor]:
    """The parts of a tensor that belong to each of so many rows. Empty: it has no rows."""
    if tensor.dim() == 0 or tensor.layout is not torch.strided or not tensor.numel():
        return ()
    dim = row_dim(tensor, batch_dim)
    with without_function_modes():
        return () if tensor.shape[dim] % rows else tensor.tensor_split(rows, dim)


def _change(one: Tensor, other: Tensor) -> tuple[float, float]:
    """The mean size of the difference, and of the values."""
    one, other = computable(one), computable(other)
    if not (one.is_floating_point() or one.is_complex()):
        return (one != other).float().mean().item(), 0.0
    difference = torch.where((one == other) | one.isnan() & other.isnan(), 0, one - other)
    finite = torch.where(one.isfinite(), one, 0)
    return difference.abs().mean(dtype=torch.float64).nan_to_num(1.0, 1.0).item(), (
        finite.abs().mean(dtype=torch.float64).item()
    )


def all_same(ones: Sequence[Activations] | None, others: Sequence[Activations] | None) -> bool:
    """Whether two runs made the same values, but for rounding, or both raised."""
    if ones is None or others is None:
        return ones is others
    return len(ones) == len(others) and all([
        same_rows(one.tree, other.tree) for one, other in zip(ones, others, strict=True)
    ])


def same_rows(one: Tree | None, other: Tree | None) -> bool:
    """Whether two trees have the same tensors, but for rounding."""
    if one is None or other is None:
        return one is other
    return len(one.tensors) == len(other.tensors) and all([
        mine.shape == theirs.shape and mine.dtype == theirs.dtype and _close(mine, theirs)
        for mine, theirs in zip(one.tensors, other.tensors, strict=True)
    ])


def _close(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    change, size = _change(one, other) if one.numel() else (0.0, 0.0)
    return change <= _ROUNDING.get(one.dtype, _HALF_ROUNDING) * size
