"""The comparison of the losses of some chunks, combined, with the loss of their joined output.

The gradients at the outputs are compared, too. The losses may agree where the gradients do not: those of surrogates,
of which only the gradient matters (a policy gradient, loss / loss.detach()), are the same number whatever the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from partition.precision import HALF
from pipeline.common.torch_modes import without_function_modes

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_LOOSE = 2e-2  # half precision
_ROUNDING = 2.0  # times as far apart as they move


def is_same_loss(ours: Tensor, whole: Tensor, size: Tensor, dtypes: Collection[torch.dtype]) -> bool:
    """Whether the losses of some chunks, combined, are the loss of their joined output, but for rounding.

    Args:
        ours, whole: these.
        size: the sum of the sizes of what was combined, to which rounding errors are relative.
        dtypes: of the chunks' losses, and in which rows were summed for them.
    """
    tolerance = _LOOSE if whole.dtype in HALF else max(_TOLERANCE.get(dtype, _LOOSE) for dtype in dtypes)
    near = tolerance * (size.nan_to_num(0.0, 0.0) + 1e-3)
    return bool(_is_near(ours.double(), whole.detach().to(ours).double(), tolerance, near))


def are_same_grads(grads: Sequence[tuple[Tensor, Tensor]], may_overflow: bool) -> bool:
    """Whether gradients are the same, but for rounding.

    Args:
        grads: (that of the chunk's own loss, that of the whole).
        may_overflow: gradients of the chunks that are not finite are the scaler's affair.
    """
    with without_function_modes():
        for ours, whole in grads:
            tolerance = _TOLERANCE.get(ours.dtype, _LOOSE)
            near = _is_near(ours, whole, tolerance, tolerance * _largest(whole))
            if not (near or may_overflow and not ours.isfinite().all()):
                return False
    return True


def are_rounding(grads: Sequence[tuple[Tensor, Tensor]], moved: Sequence[Sequence[Tensor]]) -> bool:
    """Whether gradients are no further apart than rounding: than each moves where the outputs do, in the last place.

    So are those of a loss that is at an extremum (a divergence from what the output is): nothing but rounding, and not
    near each other beside their own size.

    Args:
        grads: as `are_same_grads` takes them.
        moved: those of the whole where the outputs are a little others.
    """
    with without_function_modes():
        return all([
            _distance(ours, whole) <= _ROUNDING * torch.stack([_distance(whole, each[place]) for each in moved]).sum()
            for place, (ours, whole) in enumerate(grads)
        ])


def _distance(one: Tensor, other: Tensor) -> Tensor:
    """The sum of the sizes of the differences."""
    return (one - other).abs().sum(dtype=torch.float64)


def _largest(tensor: Tensor) -> Tensor:
    return torch.nan_to_num(tensor.abs(), 0.0, 0.0).amax() if tensor.numel() else tensor.real.new_zeros(())


def _is_near(one: Tensor, other: Tensor, rtol: float, atol: Tensor) -> Tensor:
    """torch.allclose with equal_nan, and a tolerance on the device."""
    near = (one - other).abs() <= atol + rtol * other.abs()
    return (near | (one == other) | one.isnan() & other.isnan()).all()
