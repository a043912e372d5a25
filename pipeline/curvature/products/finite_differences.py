"""Central differences beside derivatives: the step that is tried, the error, and what of it rounding explains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LIMITS = {torch.float64: 1e-4}
LOOSE = 2e-2  # float32 and less: what is wrong is wrong by more


def limit(dtype: torch.dtype) -> float:
    """The largest relative error that rounding and the step leave."""
    return LIMITS.get(dtype, LOOSE)


def least(error_at: Callable[[float], tuple[float, float]], step: float, enough: float) -> float:
    """The smallest error at some steps. A step may lead over a kink (that of ReLU), which a shorter one does not reach.

    A wrong derivative is wrong at every step.

    Args:
        error_at: step -> the relative error, and the part of it that rounding alone could make.
        step: the longest step.
        enough: the error at which the search ends.
    """
    smallest = float("inf")
    for factor in (1.0, 0.1, 0.01):
        error, rounding = error_at(step * factor)
        if rounding > enough and smallest < float("inf"):  # at shorter steps rounding hides everything
            break
        smallest = min(smallest, max(error - rounding, 0.0))
        if smallest <= enough:
            break
    return smallest


def compared(
    plus: Sequence[Tensor | None], minus: Sequence[Tensor | None], derivative: Sequence[Tensor | None], step: float
) -> tuple[float, float]:
    """The error of a derivative, relative to it, and the part of that which rounding alone could make.

    Args:
        plus, minus: the function's values at `step` and at `-step` along a direction.
        derivative: along it; None: zero.
        step: the distance.
    """
    precision = 0.0
    difference, computed_sum, expected_sum, values = 0.0, 0.0, 0.0, 0.0
    for plus_part, minus_part, derivative_part in zip(plus, minus, derivative, strict=True):
        if plus_part is None or minus_part is None:
            continue
        expected = (plus_part.double() - minus_part.double()) / (2 * step)
        computed = torch.zeros_like(expected) if derivative_part is None else derivative_part.double()
        precision = max(precision, torch.finfo(plus_part.dtype).eps)
        difference += float((expected - computed).square().sum())
        computed_sum += float(computed.square().sum())
        expected_sum += float(expected.square().sum())
        values += float(plus_part.double().square().sum())
    rounding = 3 * precision * values**0.5 / step
    size = max(computed_sum**0.5, expected_sum**0.5, rounding, 1e-300)
    return float(difference**0.5 / size), float(rounding / size)


def norm(tensors: Sequence[Tensor]) -> float:
    """The length of some tensors as one vector."""
    return float(sum(float(tensor.detach().double().square().sum()) for tensor in tensors) ** 0.5)
