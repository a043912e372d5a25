"""Central differences beside derivatives: the steps that are tried, the error, and what of it rounding explains."""

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

    @property
    def is_double(self) -> bool:
        """Whether finite differences show what is wrong, and no more."""
        return self.eps < _SINGLE

    def step(self, size: float, along: float) -> float:
        """The longest step along a direction of this length, from a point of this size."""
        return float(self.eps ** (1 / 3) * max(size, 1e-3) / along)


_HALF, _SINGLE = 1e-4, 1e-8
_LIMITS = (_HALF, 0.05, 2e-2), (_SINGLE, 1e-3, 2e-2), (0.0, 1e-10, 1e-4)  # in float32 what is wrong is wrong by more


def error_of(
    derivative: Sequence[Tensor | None],
    values_at: Callable[[float], Sequence[Tensor | None]],
    longest: float,
    precision: Precision,
    norm: Callable[[list[Tensor]], float],
) -> float:
    """The error of a derivative, relative to it, less what rounding alone could make: the smallest one at some steps.

    A step may lead over a kink (that of ReLU), which a shorter one does not reach. A wrong derivative is wrong at every
    step.

    Args:
        derivative: along a direction; None: zero.
        values_at: step -> the function's values so far along the direction; None: nothing to compare.
        longest: the first step.
        precision: in which the values are computed.
        norm: the length of some tensors as one vector.
    """
    smallest = float("inf")
    for step in (longest, 0.1 * longest, 0.01 * longest):
        values, changes, rests = list[Tensor](), list[Tensor](), list[Tensor]()
        for plus, minus, part in zip(values_at(step), values_at(-step), derivative, strict=True):
            if plus is not None and minus is not None:
                values.append(plus)
                changes.append(plus - minus)
                rests.append(changes[-1] if part is None else changes[-1] - 2 * step * part)
        rounding = 6 * precision.eps * norm(values)
        expected = 2 * step * norm([part for part in derivative if part is not None])
        size = max(expected, norm(changes), rounding, 1e-300)
        if rounding > precision.limit * size and smallest < float("inf"):  # at shorter steps rounding hides everything
            break
        smallest = min(smallest, max((norm(rests) - rounding) / size, 0.0))
        if smallest <= precision.limit:
            break
    return smallest


def norm(tensors: Sequence[Tensor]) -> float:
    """The length of some tensors as one vector."""
    return float(sum(float(tensor.detach().abs().double().square().sum()) for tensor in tensors) ** 0.5)
