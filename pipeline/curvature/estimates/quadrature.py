"""Lanczos quadrature: a discrete spectrum from one run of Lanczos, which leaves a tridiagonal matrix T.

    start v, |v| = 1 --Lanczos--> T [m, m] --eigh--> nodes (Ritz values), weights (squared first components)
    sum of weight f(node) = v.f(A)v        exactly, for every polynomial f up to degree 2 m - 1
    mean of v.f(A)v over random v = trace f(A) / n

    start / its norm = q0 --A--> alpha0 = q0'A q0,  rest = beta0 q1 --A--> alpha1,  rest = beta1 q2 --> ...

        alpha0 beta0                      its eigenvalues: nodes of Gauss's rule for the spectral measure of the start,
        beta0  alpha1 beta1               its eigenvectors' first entries, squared: the rule's weights
               beta1  alpha2 ...          (Golub and Welsch 1969; Lanczos 1950)

The last beta times an eigenvector's last entry is the residual of its Ritz vector: how far A's next eigenvalue can be.
Every new vector is made orthogonal to all before, so that no eigenvalue comes again as a ghost.

So nodes and weights are a discrete spectrum that stands for that of A; Gaussians make a curve of it. In the inside of
a wide spectrum a node stands for all eigenvalues up to the next nodes: its Gaussian is as wide as that, else the curve
would show a tooth for each node. A separate eigenvalue that Lanczos has found keeps its place.

Golub and Meurant, "Matrices, moments and quadrature", 1994; with random starts: Ubaru, Chen and Saad, "Fast estimation
of tr(f(A)) via stochastic Lanczos quadrature", 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.curvature.estimates.krylov import Basis, Split, is_noise, orthogonalise_
from pipeline.curvature.linear import LinearMap
from pipeline.curvature.space import HOST, Vec, copy, scale_


def tridiagonals(
    A: LinearMap,
    starts: Iterable[Vec],
    steps: int,
    on_progress: Callable[[int, list[dict[str, Any]]], None] = lambda products, states: None,
    saved_states: Sequence[dict[str, Any]] = (),
) -> list[tuple[Tensor, Tensor]]:
    """Run Lanczos from each of some vectors, as many in lockstep as are best multiplied together.

    It holds A.block * steps vectors.

    Args:
        starts: of any length but 0; not changed. Each is asked for when its run begins.
        steps: products for each start. Fewer are spent once its Krylov space is invariant, at the latest after as
            many as vectors have entries.
        on_progress: told after each group of products how many there were so far, and the states of the runs that have
            begun.
        saved_states: of runs that had begun, to go on from; `starts` are those of the others.

    Returns:
        for each start alphas [m] and betas [m], float64, on the CPU, the same on every process; m <= steps. The last
        beta is the norm of what the last step left over, 0 where the Krylov space is invariant.

    Raises:
        FloatingPointError: a product is not finite.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> model = nn.Sequential(nn.Linear(2, 1, bias=False)).double()
        >>> x, y = torch.diag(torch.tensor([1.0, 2.0])).double(), torch.zeros(2, 1).double()
        >>> H = Hessian(model, (x, y), nn.MSELoss(reduction="sum"))  # diag(2, 8)
        >>> [(alphas, betas)] = tridiagonals(H, [H.space.vec({"0.weight": torch.ones(1, 2)})], 5)
        >>> alphas.round(decimals=9).tolist(), betas.round(decimals=9).tolist()
        ([5.0, 5.0], [3.0, 0.0])
    """
    most = min(steps, A.space.size)
    remaining = iter(starts)
    lanes = [_LanczosLane(Basis(A.space, state["basis"]), *state["numbers"]) for state in saved_states]
    while True:
        if all([lane.is_done for lane in lanes]):
            for start in islice(remaining, A.block):
                lanes.append(_LanczosLane(Basis(A.space)))
                lanes[-1].basis.append(scale_(copy(start), 1 / A.space.norm(start)))
        live = [lane for lane in lanes if not lane.is_done]
        if not live:
            return [(torch.tensor(lane.alphas, **HOST), torch.tensor(lane.betas, **HOST)) for lane in lanes]
        images = A.products([lane.basis.row(-1) for lane in live])
        splits = orthogonalise_([lane.basis for lane in live], images, A.name)
        for lane, image, split in zip(live, images, splits, strict=True):
            lane.take(image, split, most)
        on_progress(sum([len(lane.alphas) for lane in lanes]), [lane.state() for lane in lanes])


@dataclass
class _LanczosLane:
    """The run of one start."""

    basis: Basis
    alphas: list[float] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)
    scale: float = 0.0
    is_done: bool = False

    def take(self, image: Vec, split: Split, most: int) -> None:
        """The product of the last row, of which `image` is the rest that is orthogonal to all rows."""
        self.alphas.append(float(split.inside[-1]))
        self.scale = max(self.scale, split.whole)
        rest = 0.0 if is_noise(split.norm, self.scale, self.basis.space) else split.norm
        self.betas.append(rest)
        self.is_done = len(self.alphas) == most or not rest
        if self.is_done:
            self.basis.cut(0)
        else:
            self.basis.append(scale_(image, 1 / rest))

    def state(self) -> dict[str, Any]:
        """All that it needs to go on."""
        return {"basis": self.basis.state(), "numbers": [self.alphas, self.betas, self.scale, self.is_done]}


TAIL = 6.0  # the grid ends so many widths behind the last node: what is left of a Gaussian there is 1e-9


class QuadratureRule(NamedTuple):
    """The discrete spectrum of one run.

    Attributes:
        nodes: ascending, [m].
        weights: the share of the spectrum that each stands for, [m]; they sum to 1.
        reach: no farther from the node is an eigenvalue, [m]: its residual, or the distance to the farther one of the
            next nodes if that is less, for between two nodes there is an eigenvalue. 0 where the node is one.
    """

    nodes: Tensor
    weights: Tensor
    reach: Tensor


def gauss(alphas: Tensor, betas: Tensor) -> QuadratureRule:
    """The rule of Gauss quadrature from Lanczos' coefficients.

    Args:
        alphas: the diagonal of T, [m], float64.
        betas: the entries beside it, [m]: the last stands outside of T.

    >>> rule = gauss(torch.tensor([2.0, 2.0]).double(), torch.tensor([1.0, 0.5]).double())
    >>> [[round(number, 6) for number in numbers.tolist()] for numbers in rule]
    [[1.0, 3.0], [0.5, 0.5], [0.353553, 0.353553]]
    """
    off_diagonal = betas[:-1]
    nodes, vectors = torch.linalg.eigh(torch.diag(alphas) + torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1))
    weights = vectors[0].square()
    residuals, gaps = betas[-1] * vectors[-1].abs(), nodes.diff()
    farther = torch.maximum(torch.cat([gaps.new_zeros(1), gaps]), torch.cat([gaps, gaps.new_zeros(1)]))
    return QuadratureRule(
        nodes, weights / weights.sum(), torch.minimum(residuals, farther) if len(nodes) > 1 else residuals
    )


def stacked(rules: Sequence[QuadratureRule], steps: int) -> QuadratureRule:
    """Several runs in one, [runs, steps] each.

    A run that ended early, because it had found all there is, repeats its last node with weight 0.
    """
    nodes, weights, reach = zip(*rules, strict=True)
    repeated = [torch.cat([run, run[-1:].expand(steps - len(run))]) for run in nodes]
    filled = [[functional.pad(run, (0, steps - len(run))) for run in runs] for runs in (weights, reach)]
    return QuadratureRule(*map(torch.stack, (repeated, *filled)))


def width(nodes: Tensor) -> float:
    """A Gaussian's width for nodes that nobody gave one for: 1 / 400 of their range, or of the only one's size.

    So what is seen of a Gaussian, four widths on a logarithmic scale, ends within one per cent of the range.
    """
    span = float(nodes.max() - nodes.min())
    size = float(nodes.abs().max())
    return 0.0025 * (span if span > 1e-10 * size else size or 1.0)


def edges(nodes: Tensor, widths: Tensor, points: int, margin: float) -> Tensor:
    """The ends of `points` cells of equal length, at least 3, [points + 1].

    All but the first and the last hold every node with its Gaussian. So these two are empty, and a sum over the cells
    and the trapezoidal rule agree.
    """
    low, high = float(nodes.min()), float(nodes.max())
    resolved = 1e-9 * points * float(nodes.abs().max())  # cells must not be shorter than the rounding of their ends
    room = max(margin * (high - low), resolved)
    first = min(low - room, float((nodes - TAIL * widths).min()))
    last = max(high + room, float((nodes + TAIL * widths).max()))
    cell = (last - first) / (points - 2)
    return torch.linspace(first - cell, last + cell, points + 1, **HOST)


def smoothed(nodes: Tensor, weights: Tensor, widths: Tensor, ends: Tensor) -> Tensor:
    """Each cell's mean of the sum of Gaussians at the nodes, times their weights.

    The mean over a cell, not the value in its middle: a Gaussian that is narrower than a cell keeps its whole mass.

    Args:
        nodes, weights, widths: of one run, [steps].
        ends: of the cells, [points + 1].

    Returns:
        [points].
    """
    scaled = (ends - nodes[:, None]) / (widths[:, None] * 2.0**0.5)
    masses = torch.special.erf(scaled).diff(dim=1) / 2.0
    return torch.mv(masses.T, weights) / (ends[1] - ends[0])
