"""The comparison of the losses of some chunks, combined, with the loss of their joined output.

The gradients at the outputs are compared, too. The losses may agree where the gradients do not: those of surrogates,
of which only the gradient matters (a policy gradient, loss / loss.detach()), are the same number whatever the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from partition.precision import HALF
from pipeline.common.torch_modes import without_function_modes
from pipeline.data.loss_means import detached_number

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_LOOSE = 2e-2  # half precision
_ROUNDING = 2.0  # times as far apart as they move


class LossComparison(NamedTuple):
    """One comparison.

    Attributes:
        rows: of the chunks.
        ours: their losses, combined.
        whole: the loss of their joined output.
        same_value, same_grads: 0-d, bool: on the device, until `differences` reads them.
    """

    rows: tuple[int, ...]
    ours: Tensor
    whole: Tensor
    same_value: Tensor
    same_grads: Tensor

    @classmethod
    def of(
        cls,
        rows: tuple[int, ...],
        ours: Tensor,
        size: Tensor,
        dtypes: Collection[torch.dtype],
        whole: Tensor,
        grads: Sequence[tuple[Tensor, Tensor]],
        may_overflow: bool,
    ) -> LossComparison:
        """Compare. No host waits here.

        Args:
            rows, ours, whole: see above.
            size: the sum of the sizes of what was combined, to which rounding errors are relative.
            dtypes: of the chunks' losses, and in which rows were summed for them.
            grads: (that of the chunk's own loss, that of the whole).
            may_overflow: gradients of the chunks that are not finite are the scaler's affair.
        """
        tolerance = _LOOSE if whole.dtype in HALF else max(_TOLERANCE.get(dtype, _LOOSE) for dtype in dtypes)
        near = tolerance * (size.nan_to_num(0.0, 0.0) + 1e-3)
        whole_loss = detached_number(whole)
        same = _is_near(ours.double(), whole_loss.to(ours).double(), tolerance, near)
        return cls(rows, ours, whole_loss, same, _same_grads(grads, may_overflow).to(same.device))


def differences(comparisons: Sequence[LossComparison]) -> Iterator[str]:
    """The differences in some comparisons, in words, one for each that has any. The host waits."""
    with without_function_modes():
        flags = [torch.stack([comparison.same_value, comparison.same_grads]) for comparison in comparisons]
        rows = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
    for comparison, (same_value, same_grads) in zip(comparisons, rows, strict=True):
        combine = f"the losses of two chunks ({list(comparison.rows)} rows) combine to"
        if not same_value:
            whole = comparison.whole.item()
            yield f"{combine} {comparison.ours.item():.8g}, but on both outputs joined it is {whole:.8g}"
        elif not same_grads:
            yield f"{combine} the loss of both outputs joined, but their gradients do not combine to its gradient"


def are_rounding(grads: Sequence[tuple[Tensor, Tensor]], moved: Sequence[Sequence[Tensor]]) -> Tensor:
    """Whether gradients are no further apart than rounding: than each moves where the outputs do, in the last place.

    So are those of a loss that is at an extremum (a divergence from what the output is): nothing but rounding, and not
    near each other beside their own size.

    Args:
        grads: as `LossComparison.of` takes them.
        moved: those of the whole where the outputs are a little others.
    """
    with without_function_modes():
        rounded = [
            _distance(ours, whole) <= _ROUNDING * torch.stack([_distance(whole, each[place]) for each in moved]).sum()
            for place, (ours, whole) in enumerate(grads)
        ]
        return torch.stack([each.to(rounded[0].device) for each in rounded]).all()


def _same_grads(grads: Sequence[tuple[Tensor, Tensor]], may_overflow: bool) -> Tensor:
    with without_function_modes():
        largest = [_largest(whole) for _, whole in grads]
        same = torch.ones((), dtype=torch.bool, device=largest[0].device if largest else "cpu")
        for (ours, whole), most in zip(grads, largest, strict=True):
            tolerance = _TOLERANCE.get(ours.dtype, _LOOSE)
            near = _is_near(ours, whole, tolerance, tolerance * most)
            same = same & (near | ~ours.isfinite().all() if may_overflow else near).to(same.device)
    return same


def _distance(one: Tensor, other: Tensor) -> Tensor:
    """The sum of the sizes of the differences."""
    return (one - other).abs().sum(dtype=torch.float64)


def _largest(tensor: Tensor) -> Tensor:
    return torch.nan_to_num(tensor.abs(), 0.0, 0.0).amax() if tensor.numel() else tensor.real.new_zeros(())


def _is_near(one: Tensor, other: Tensor, rtol: float, atol: Tensor) -> Tensor:
    """torch.allclose with equal_nan, as a tensor: the host need not wait."""
    near = (one - other).abs() <= atol + rtol * other.abs()
    return (near | (one == other) | one.isnan() & other.isnan()).all()
