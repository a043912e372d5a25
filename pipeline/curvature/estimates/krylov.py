"""Gram-Schmidt, done twice, for orthonormal vectors that are each as large as the model.

    w = A q --[Q'w, w -= Q(Q'w)]--> --[once more]--> w, at right angles to all rows of Q --/ its norm--> a new row

    rows     0..7  a slab: on each shard one tensor [8, entries of the shard]
             8..15 the next slab, and so on: it grows without a copy, so that the peak is what it holds

A pass reads Q twice and sums m numbers over the processes; no vector leaves its shard. Two passes of classical
Gram-Schmidt leave rows at right angles up to rounding ("twice is enough": Giraud, Langou, Rozloznik and van den
Eshof, 2005), which is what Lanczos needs to show each eigenvalue once and not again (Paige 1972; Parlett 1980, ch. 13).
Unlike Cholesky QR that holds for directions of any length above rounding.

    orthogonalise_       against a Basis: many steps, a few vectors at once, three all-reduces; at most 7 rows in vain
    append_orthonormal   to a list of vectors: a sketch, which holds not one more than it says; two all-reduces
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from partition.precision import in_full_precision
from pipeline.curvature.estimates.resume import from_host
from pipeline.curvature.linear import if_finite
from pipeline.curvature.space import HOST, Space, Vec, add_, scale_

SLAB = 8  # rows: at most seven vectors' memory are held in vain
STRIP = 1 << 16  # columns that `rotate_` turns at a time
NOISE = 32  # what is left of a product that lies in the basis, in units of its rounding


class Basis:
    """Orthonormal vectors of a space, this process's part of them.

    Args:
        space: the space.
        state: of a basis, to go on with; or of an empty one.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> model = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
        >>> x, y = torch.diag(torch.tensor([1.0, 2.0, 3.0])).double(), torch.zeros(3, 1).double()
        >>> H = Hessian(model, (x, y), nn.MSELoss(reduction="sum"))  # diag(2, 8, 18)
        >>> basis = Basis(H.space)
        >>> basis.append(H.space.vec({"0.weight": torch.tensor([[1.0, 0.0, 0.0]])}))
        >>> vec = H.space.vec({"0.weight": torch.tensor([[5.0, 3.0, 4.0]])})
        >>> orthogonalise_([basis], [vec], "example")
        [Split(inside=tensor([5.], dtype=torch.float64), norm=5.0)]
        >>> vec
        [tensor([0., 3., 4.], dtype=torch.float64)]
    """

    def __init__(self, space: Space, state: Mapping[str, Any] = {"slabs": [], "rows": 0}) -> None:
        self.space = space
        self.slabs = from_host(space, state["slabs"])  # [slab][shard]: [SLAB, entries]
        self._rows: int = state["rows"]

    def __len__(self) -> int:
        return self._rows

    def row(self, index: int) -> Vec:
        """A row as views: do not write to it."""
        slab, row = divmod(range(self._rows)[index], SLAB)
        return [shard[row] for shard in self.slabs[slab]]

    def append(self, vec: Vec) -> None:
        """Copy a vector, which the caller made orthonormal, into a new last row."""
        if self._rows == len(self.slabs) * SLAB:
            self.slabs.append([shard.new_zeros(SLAB, len(shard)) for shard in vec])
        self._rows += 1
        for row, shard in zip(self.row(-1), vec, strict=True):
            row.data.copy_(shard)  # as no write to the slab: the rows that a state knows of stay as they are

    def cut(self, rows: int) -> None:
        """Forget all rows from this one on."""
        self._rows = min(rows, self._rows)
        del self.slabs[-(-self._rows // SLAB) :]

    @in_full_precision()
    def local_inside(self, vec: Vec) -> Tensor:
        """This process's share of the inner products of all rows with a vector: [rows], float64, on the CPU."""
        total = torch.zeros(self._rows, **HOST)
        for index, (shard, counts) in enumerate(zip(vec, self.space.counted, strict=True)):
            if counts and self._rows:  # one wait for the device a shard
                total += torch.cat([torch.mv(rows, shard) for rows in self._filled(index)]).to("cpu", torch.float64)
        return total

    @in_full_precision()
    def subtract_(self, vec: Vec, factors: Tensor) -> None:
        """Take the rows, each times its factor [rows], from a vector."""
        for index, shard in enumerate(vec):
            for rows, part in zip(self._filled(index), factors.to(shard).split(SLAB), strict=False):
                shard.addmv_(rows.T, part, alpha=-1)

    @in_full_precision()
    def combined(self, factors: Tensor) -> list[Vec]:
        """New vectors: for each column of `factors` [rows, count] the sum of the rows, each times its entry."""
        shards = [shard.new_zeros(factors.shape[1], len(shard)) for shard in self.space.zeros()]
        for index, total in enumerate(shards):
            for rows, part in zip(self._filled(index), factors.to(total).split(SLAB), strict=False):
                total.addmm_(part.T, rows)
        return [[shard[column] for shard in shards] for column in range(factors.shape[1])]

    @in_full_precision()
    def rotate_(self, factors: Tensor) -> None:
        """Put such sums in the place of the rows, a strip of columns at a time: hardly any memory is needed for it.

        Args:
            factors: [rows, count], with orthonormal columns, count <= rows.
        """
        for index, shard in enumerate(self.space.zeros() if self._rows else []):
            rotation = factors.T.to(shard)
            for first in range(0, len(shard), STRIP):
                strips = [rows[:, first : first + STRIP] for rows in self._filled(index)]
                rotated = rotation @ torch.cat(strips)
                for strip, part in zip(strips, rotated.split(SLAB), strict=False):
                    strip[: len(part)] = part
        self.cut(factors.shape[1])

    def state(self) -> dict[str, Any]:
        """All that it holds, by reference: in the memory layout in which sums round alike."""
        return {"slabs": self.slabs, "rows": self._rows}

    def _filled(self, index: int) -> list[Tensor]:
        """On one shard the slabs' rows that hold something."""
        return [slab[index][: self._rows - number * SLAB] for number, slab in enumerate(self.slabs)]


class Split(NamedTuple):
    """A vector as a part in the span of a basis and the rest."""

    inside: Tensor  # inner products with the rows: [rows], float64, on the CPU
    norm: float  # of the rest

    @property
    def whole(self) -> float:
        """The norm before."""
        return float(torch.linalg.vector_norm(self.inside).hypot(torch.tensor(self.norm, **HOST)))


def orthogonalise_(bases: Sequence[Basis], vecs: Sequence[Vec], source: str) -> list[Split]:
    """Take from each vector, in place, its part in the span of its basis: three all-reduces for all of them.

    Args:
        source: what the vectors are products of, for the error.

    Raises:
        FloatingPointError: an entry is not finite.
    """
    space = bases[0].space
    counts = [len(basis) for basis in bases]
    inside = [torch.zeros(count, **HOST) for count in counts]
    for _ in range(2):
        local_dots = [basis.local_inside(vec) for basis, vec in zip(bases, vecs, strict=True)]
        for lane, part in enumerate(if_finite(space.sum_over(torch.cat(local_dots)), source).split(counts)):
            bases[lane].subtract_(vecs[lane], part)
            inside[lane] += part
    squares = if_finite(space.paired_dots(zip(vecs, vecs)), source)
    norms = squares.clamp(min=0.0).sqrt().tolist()
    return [Split(coordinates, norm) for coordinates, norm in zip(inside, norms, strict=True)]


def is_noise(norm: float, scale: float, space: Space) -> bool:
    """Whether what is left of a product is no more than its rounding.

    Args:
        norm: of what is left.
        scale: the largest norm of a product with a unit vector so far.
    """
    return norm <= NOISE * torch.finfo(space.dtype).eps * scale


def append_orthonormal(space: Space, basis: list[Vec], vec: Vec) -> Tensor:
    """Take out of `vec`, in place, what lies along the basis, and append the rest at length 1 if it is not rounding.

    Returns:
        the coordinates of `vec` in the basis as it is now: [len(basis)], float64.

    Raises:
        FloatingPointError: `vec` has entries that are not finite.
    """
    along, initial_norm = torch.zeros(len(basis), **HOST), 0.0
    for sweep in range(2):
        dots = if_finite(space.dots([*basis, vec], [vec])[:, 0], "the matrix")
        initial_norm = initial_norm if sweep else math.sqrt(max(float(dots[-1]), 0.0))
        along += dots[:-1]
        subtract_(vec, basis, dots[:-1])
    length = math.sqrt(max(float(dots[-1] - dots[:-1].square().sum()), 0.0))
    if length <= 100 * torch.finfo(space.dtype).eps * initial_norm:
        return along
    basis.append(scale_(vec, 1.0 / length))
    return torch.cat([along, torch.tensor([length], **HOST)])


def subtract_(vec: Vec, basis: Sequence[Vec], factors: Tensor) -> Vec:
    """Take each vector of `basis`, times its factor, from `vec` in place; the vector itself."""
    for row, factor in zip(basis, factors.tolist(), strict=True):
        add_(vec, row, -factor)
    return vec
