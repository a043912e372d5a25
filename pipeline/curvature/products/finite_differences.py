"""Central differences beside derivatives: the step that is tried, the error, and what of it rounding explains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from partition.graph import nodes_of


class Precision(NamedTuple):
    """The precision of numbers, and what it leaves of laws.

    Attributes:
        eps: the distance of 1 from the next number.
        exact: the largest relative error of what differs by rounding only.
        limit: that of finite differences, of which the step is a part.
    """

    eps: float
    exact: float
    limit: float

    @classmethod
    def of(cls, dtypes: Iterable[torch.dtype]) -> Precision:
        """That of the least precise of some floating types.

        Example:
            >>> Precision.of([torch.float64, torch.float32]).limit
            0.02
        """
        eps = max([torch.finfo(dtype).eps for dtype in dtypes])
        return next(cls(eps, exact, limit) for least, exact, limit in _LIMITS if eps >= least)

    @classmethod
    def within(cls, roots: Sequence[Tensor]) -> Precision:
        """That of the least precise type in which what some tensors depend on is computed: under autocast, say."""
        edges = [edge for node in nodes_of(roots) for edge in node.next_functions if edge[0] is not None]
        # Those that are used: of an index beside them a node says float32.
        metadata = [node._input_metadata[number] for node, number in edges]
        return cls.of([root.dtype for root in roots] + [entry.dtype for entry in metadata])

    @property
    def is_half(self) -> bool:
        """Whether numbers have three digits: finite differences of them may be anything."""
        return self.eps > _HALF

    def step(self, size: float, along: float) -> float:
        """The longest step along a direction of this length, from a point of this size."""
        return float(self.eps ** (1 / 3) * max(size, 1e-3) / along)


_HALF = 1e-4
_LIMITS = (_HALF, 0.05, 2e-2), (1e-8, 1e-3, 2e-2), (0.0, 1e-10, 1e-4)  # in float32 what is wrong is wrong by more


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
    plus: Sequence[Tensor | None],
    minus: Sequence[Tensor | None],
    derivative: Sequence[Tensor | None],
    step: float,
    eps: float,
) -> tuple[float, float]:
    """The error of a derivative, relative to it, and the part of that which rounding alone could make.

    Args:
        plus, minus: the function's values at `step` and at `-step` along a direction.
        derivative: along it; None: zero.
        step: the distance.
        eps: of the precision in which the values are computed.
    """
    difference, computed_sum, expected_sum, values = 0.0, 0.0, 0.0, 0.0
    for plus_part, minus_part, derivative_part in zip(plus, minus, derivative, strict=True):
        if plus_part is None or minus_part is None:
            continue
        value = _in_double(plus_part)
        expected = (value - _in_double(minus_part)) / (2 * step)
        computed = torch.zeros_like(expected) if derivative_part is None else _in_double(derivative_part)
        difference += float((expected - computed).abs().square().sum())
        computed_sum += float(computed.abs().square().sum())
        expected_sum += float(expected.abs().square().sum())
        values += float(value.abs().square().sum())
    rounding = 3 * eps * values**0.5 / step
    size = max(computed_sum**0.5, expected_sum**0.5, rounding, 1e-300)
    return float(difference**0.5 / size), float(rounding / size)


def _in_double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def norm(tensors: Sequence[Tensor]) -> float:
    """The length of some tensors as one vector."""
    return float(sum(float(tensor.detach().abs().double().square().sum()) for tensor in tensors) ** 0.5)
