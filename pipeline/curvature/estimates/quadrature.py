"""Lanczos quadrature: a discrete spectrum from one run of Lanczos.

    start v, |v| = 1 --Lanczos--> T [m, m] --eigh--> nodes (Ritz values), weights (squared first components)
    sum of weight f(node) = v.f(A)v        exactly, for every polynomial f up to degree 2 m - 1
    mean of v.f(A)v over random v = trace f(A) / n

So nodes and weights are a discrete spectrum that stands for that of A; Gaussians make a curve of it.

Golub and Meurant, "Matrices, moments and quadrature", 1994; with random starts: Ubaru, Chen and Saad, "Fast estimation
of tr(f(A)) via stochastic Lanczos quadrature", 2017.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.curvature.space import HOST

TAIL = 6.0  # the grid ends so many widths behind the last node: what is left of a Gaussian there is 1e-9


def gauss(alphas: Tensor, betas: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes and weights of Gauss quadrature from Lanczos' coefficients.

    Args:
        alphas: the diagonal of T, [m], float64.
        betas: the entries beside it, [m - 1].

    Returns:
        nodes, ascending, and weights, which sum to 1: each [m].

    >>> nodes, weights = gauss(torch.tensor([2.0, 2.0]).double(), torch.tensor([1.0]).double())
    >>> [round(node, 6) for node in nodes.tolist()], [round(weight, 6) for weight in weights.tolist()]
    ([1.0, 3.0], [0.5, 0.5])
    """
    matrix = torch.diag(alphas) + torch.diag(betas, 1) + torch.diag(betas, -1)
    nodes, vectors = torch.linalg.eigh(matrix)
    weights = vectors[0].square()
    return nodes, weights / weights.sum()


def stacked(rules: Sequence[tuple[Tensor, Tensor]], steps: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of several runs, [runs, steps] each.

    A run that ended early, because it had found all there is, repeats its last node with weight 0.
    """
    nodes = torch.stack([torch.cat([found, found[-1:].expand(steps - len(found))]) for found, _ in rules])
    weights = torch.stack([torch.cat([found, found.new_zeros(steps - len(found))]) for _, found in rules])
    return nodes, weights


def width(nodes: Tensor) -> float:
    """A Gaussian's width for nodes that nobody gave one for: a hundredth of their range, or of the only one's size."""
    span = float(nodes.max() - nodes.min())
    size = float(nodes.abs().max())
    return 0.01 * (span if span > 1e-10 * size else size or 1.0)


def edges(nodes: Tensor, sigma: float, points: int, margin: float) -> Tensor:
    """The ends of `points` cells of equal length, at least 3, [points + 1].

    All but the first and the last hold every node with its Gaussian. So these two are empty, and a sum over the cells
    and the trapezoidal rule agree.
    """
    low, high = float(nodes.min()), float(nodes.max())
    resolved = 1e-9 * points * float(nodes.abs().max())  # cells must not be shorter than the rounding of their ends
    room = max(TAIL * sigma, margin * (high - low), resolved)
    cell = (high - low + 2.0 * room) / (points - 2)
    return torch.linspace(low - room - cell, high + room + cell, points + 1, **HOST)


def smoothed(nodes: Tensor, weights: Tensor, ends: Tensor, sigma: float) -> Tensor:
    """Each cell's mean of the sum of Gaussians of width `sigma` at the nodes, times their weights.

    The mean over a cell, not the value in its middle: a Gaussian that is narrower than a cell keeps its whole mass.

    Args:
        nodes, weights: of one run, [steps].
        ends: of the cells, [points + 1].

    Returns:
        [points].
    """
    scaled = (ends - nodes[:, None]) / (sigma * 2.0**0.5)
    masses = torch.special.erf(scaled).diff(dim=1) / 2.0
    return torch.mv(masses.T, weights) / (ends[1] - ends[0])
