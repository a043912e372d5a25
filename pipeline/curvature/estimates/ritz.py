"""Ritz pairs: eigenpairs from a projection onto a Krylov space, their residuals, and a bound on what it misses.

    rows of Q:  p with known products | f without       A Q_p = Q [ T ]     T: [p, p], symmetric
                                                                  [ R ]     R: [f, p], what leads out of the span
    T y = theta y  -->  x = Q_p y,  |A x - theta x| = |R y|

What it can miss. Let u be an eigenvector at mu that is none of the Ritz vectors, and z = Q'u. From u'A Q_p = mu u'Q_p
follows z_p = W z_f with W = (mu - T)^-1 R', and |z| <= 1. So the part of u in the start block, which is a piece of z_p
(`EigenvectorMap`), can be no longer than some number: the bound of Chebyshev, Markov and Stieltjes on the mass of a
measure at a point, for blocks (one start: 1 / sum of p_j(mu)^2, with the orthonormal polynomials; Akhiezer 1965, ch.
2). It falls geometrically with the steps. But a start drawn at random in d dimensions has a part shorter than r in u
with probability at most V_b (d r^2 / 2 pi)^(b/2), b vectors in the block, V_b the volume of the unit ball (the density
of b entries of a random unit vector is at most (d / 2 pi)^(b/2) for d >= b + 2). So a bound under that r says, up to
that probability: there is no such u.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.curvature.space import HOST

WHICH = {
    "LM": "of largest magnitude",
    "LA": "largest",
    "SA": "smallest",
    "BE": "from both ends",
}


class RitzPairs(NamedTuple):
    """The eigenpairs of a projection."""

    values: Tensor  # [p], ascending
    vectors: Tensor  # [p, p], columns: in terms of the rows with known products
    rest: Tensor  # [f, p]: R times each

    @property
    def residuals(self) -> Tensor:
        """|A x - theta x| of each: [p]."""
        norms: Tensor = torch.linalg.vector_norm(self.rest, dim=0)
        return norms

    def passages(self, points: Sequence[float]) -> Tensor:
        """W at each point: what an eigenvector there has in the known rows, in terms of its part in the others:
        [points, p, f]."""
        distances = torch.tensor(points, **HOST)[:, None] - self.values
        return self.vectors @ (self.rest.T / distances[:, :, None])


def ritz(projection: Tensor) -> RitzPairs:
    """The Ritz pairs of a projection [p + f, p], which is T above R.

    Example:
        >>> found = ritz(torch.tensor([[2.0, 1.0], [1.0, 2.0], [0.0, 0.5]]))
        >>> [round(value, 4) for value in found.values.tolist()]
        [1.0, 3.0]
        >>> [round(value, 4) for value in found.residuals.tolist()]
        [0.3536, 0.3536]
    """
    dimension = projection.shape[1]
    inner = projection[:dimension]
    values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
    return RitzPairs(values, vectors, projection[dimension:] @ vectors)


def wanted(values: Tensor, count: int, which: str, setbacks: Tensor | float = 0.0) -> list[int]:
    """The places of the wanted values, the most wanted first; for "BE" the largest first.

    Args:
        count: how many; all if there are fewer.
        setbacks: for each value how far it is set back against the others, in its own unit.

    Example:
        >>> wanted(torch.tensor([1.0, -3.0, 2.0]), 2, "LM"), wanted(torch.tensor([1.0, -3.0, 2.0]), 2, "BE")
        ([1, 2], [2, 1])
    """
    setbacks = torch.zeros_like(values) + setbacks
    if which == "BE":
        high = wanted(values, -(-count // 2), "LA", setbacks)
        rest = [place for place in range(len(values)) if place not in high]
        low = wanted(values[rest], count - len(high), "SA", setbacks[rest])
        return high + [rest[place] for place in reversed(low)]
    key = {"LM": values.abs(), "LA": values, "SA": -values}[which] - setbacks
    return torch.argsort(key, descending=True, stable=True)[:count].tolist()


def thresholds(values: Tensor, which: str, slack: float) -> list[float]:
    """Past which points an eigenvalue would be more wanted than the last of these, by more than `slack`."""
    if which == "LM":
        point = float(values.abs().min()) + slack
        return [point, -point]
    high = {"LA": len(values), "SA": 0, "BE": -(-len(values) // 2)}[which]
    above, below = values.sort(descending=True).values.tensor_split([high])
    return [float(value) + slack for value in above[-1:]] + [float(value) - slack for value in below[:1]]


@dataclass(frozen=True)
class EigenvectorMap:
    """The map from the parts of an eigenvector in some rows of the basis to those in the start block, at some points.

    At the beginning these rows are the start block itself; after a restart the rows that were without products then.
    """

    points: tuple[float, ...]
    first: int  # of the rows, counted in the projection
    factors: Tensor  # [points, starts, rows]

    @classmethod
    def begin(cls, points: Sequence[float], starts: int) -> EigenvectorMap:
        """For a block of starts that are the first rows."""
        return cls(tuple(points), 0, torch.eye(starts, **HOST).expand(len(points), -1, -1).clone())

    def followed(self, pairs: RitzPairs, first: int) -> EigenvectorMap:
        """The chain to the rows without products, which will be the rows from `first` on."""
        return EigenvectorMap(self.points, first, self._through(pairs.passages(self.points)))

    def longest(self, pairs: RitzPairs) -> float:
        """No eigenvector at one of the points, or farther out, has a longer part in the start block than this."""
        passages = pairs.passages(self.points)
        if not len(pairs.rest):
            return 0.0
        cholesky = torch.linalg.cholesky(torch.eye(len(pairs.rest), **HOST) + passages.mT @ passages)
        scaled = torch.linalg.solve_triangular(cholesky, self._through(passages).mT, upper=False)
        return float(torch.linalg.matrix_norm(scaled, 2).max())

    def _through(self, passages: Tensor) -> Tensor:
        return self.factors @ passages[:, self.first : self.first + self.factors.shape[2]]


def shortest(dimensions: int, starts: int, miss: float) -> float:
    """The length that the part of a fixed direction in a random block of starts falls below with probability `miss`."""
    if dimensions < starts + 2:
        return 0.0
    ball = math.pi ** (starts / 2) / math.gamma(starts / 2 + 1)
    return math.sqrt(2 * math.pi / dimensions) * math.pow(miss / ball, 1 / starts)
