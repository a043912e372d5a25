"""Lanczos quadrature: a discrete spectrum from one run of Lanczos.

    start v, |v| = 1 --Lanczos--> T [m, m] --eigh--> nodes (Ritz values), weights (squared first components)
    sum of weight f(node) = v.f(A)v        exactly, for every polynomial f up to degree 2 m - 1
    mean of v.f(A)v over random v = trace f(A) / n

So nodes and weights are a discrete spectrum that stands for that of A; Gaussians make a curve of it. In the inside of
a wide spectrum a node stands for all eigenvalues up to the next nodes: its Gaussian is as wide as that, else the curve
would show a tooth for each node. A separate eigenvalue that Lanczos has found keeps its place.

Golub and Meurant, "Matrices, moments and quadrature", 1994; with random starts: Ubaru, Chen and Saad, "Fast estimation
of tr(f(A)) via stochastic Lanczos quadrature", 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.curvature.space import HOST

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
    rows = []
    for nodes, weights, reach in rules:
        padding = steps - len(nodes)
        filled = nodes[-1:].expand(padding), nodes.new_zeros(padding), nodes.new_zeros(padding)
        rows.append([torch.cat(pair) for pair in zip((nodes, weights, reach), filled, strict=True)])
    return QuadratureRule(*[torch.stack(runs) for runs in zip(*rows, strict=True)])


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
