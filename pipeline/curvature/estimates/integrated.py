"""The integrated spectral density: the share of eigenvalues below x, with bounds that tell what few steps miss.

    nodes  t1 < t2 < ... < tm, weights w1 ... wm of one run:
    w1 + ... + w(k-1)  <=  share of the start below tk  <=  w1 + ... + wk            (Chebyshev, Markov, Stieltjes)

So between two nodes the share is known up to the weights of these two, whatever the matrix is; a node that has settled
on an eigenvalue has its weight right there. Over the runs comes the luck of the random starts: two standard errors. No
width is chosen, and nothing is smoothed. Golub and Meurant, "Matrices, moments and quadrature", 1994.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.curvature.estimates.sampling import mean_and_stderr
from pipeline.curvature.results.result import Result
from pipeline.curvature.results.tables import table

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


@dataclass(frozen=True, eq=False)
class IntegratedDensity(Result):
    """The share of eigenvalues below each of some points.

    At a point where the steps leave something open the band holds the truth in 95 of 100 cases if there are ten runs or
    more. Where they do not, the luck of ten starts is held in 92, and in fewer beside a single eigenvalue, whose weight
    spreads unevenly. Of one run the band tells what the steps leave open, and nothing of that luck.

    Attributes:
        matrix: the matrix's name.
        size: how many eigenvalues the matrix has.
        grid: [points], ascending.
        share: [points]: of the eigenvalues, those below the point; the middle of what the runs' nodes allow.
        lower: [points]: the lower end of the band.
        upper: [points]: the upper end of the band.
    """

    matrix: str
    size: int
    grid: Tensor
    share: Tensor
    lower: Tensor
    upper: Tensor

    def quantile(self, share: float) -> tuple[float, float, float]:
        """The eigenvalue below which a share of all is: the estimate, and from where to where the band has it.

        Raises:
            ValueError: the share is not between 0 and 1.
        """
        if not 0.0 < share < 1.0:
            raise ValueError(f"share must be between 0 and 1 (share: {share})")
        curves = self.share, self.upper, self.lower
        place, low, high = [min(int((curve < share).sum()), len(curve) - 1) for curve in curves]  # they do not fall
        return float(self.grid[place]), float(self.grid[max(low - 1, 0)]), float(self.grid[high])

    def lines(self) -> Iterator[str]:
        yield f"eigenvalues of {self.matrix}, {self.size} in all, by the share that is below"
        cells = [["below", "eigenvalue", "from", "to"]]
        for share in QUANTILES:
            cells.append([f"{100 * share:g} %", *(f"{value:.4g}" for value in self.quantile(share))])
        yield from table(cells)

    def draw(self, ax: Any) -> None:
        """The share over the eigenvalue, the band filled."""
        grid = self.grid.numpy()
        ax.plot(grid, self.share.numpy(), label=f"share of eigenvalues of {self.matrix} below")
        ax.fill_between(grid, self.lower.numpy(), self.upper.numpy(), alpha=0.3, label="what steps and runs leave open")
        ax.set_ylim(-0.02, 1.02)
        ax.set_xlabel("eigenvalue")
        ax.set_ylabel("share of eigenvalues below")
        ax.legend()


def integrated(
    matrix: str, size: int, grid: Tensor, nodes: Tensor, weights: Tensor, reach: Tensor, settled: float
) -> IntegratedDensity:
    """The integrated density of a discrete spectrum for each run.

    Args:
        grid: [points].
        nodes, weights, reach: [runs, steps]; no eigenvalue that a node stands for is farther from it than its reach.
        settled: the reach up to which a node is an eigenvalue.
    """
    ends = [bounds(grid, *run, settled) for run in zip(nodes, weights, reach, strict=True)]
    lower, upper = torch.stack([low for low, _ in ends]), torch.stack([high for _, high in ends])
    share, error = mean_and_stderr((lower + upper) / 2.0)
    error = torch.zeros_like(error) if len(ends) == 1 else error
    low = (lower.mean(0) - 2.0 * error).clamp(0.0, 1.0).cummax(0).values
    high = (upper.mean(0) + 2.0 * error).clamp(0.0, 1.0).flip(0).cummin(0).values.flip(0)
    return IntegratedDensity(matrix, size, grid, share, low, high)


def bounds(
    grid: Tensor, nodes: Tensor, weights: Tensor, reach: Tensor, settled: float
) -> tuple[Tensor, Tensor]:
    """Of one run the least and the largest share of its start that can be below each point.

    >>> nodes, half = torch.tensor([0.0, 1.0]).double(), torch.tensor([0.5, 0.5]).double()
    >>> [end.tolist() for end in bounds(torch.tensor([-3.0, 0.5, 3.0]).double(), nodes, half, half, 0.0)]
    [[0.0, 0.0, 1.0], [0.0, 1.0, 1.0]]
    >>> [end.tolist() for end in bounds(torch.tensor([-3.0, 0.5, 3.0]).double(), nodes, half, 0 * half, 0.0)]
    [[0.0, 0.5, 1.0], [0.0, 0.5, 1.0]]
    """
    sums = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    below = torch.searchsorted(nodes, grid)  # the number of nodes below each point
    previous, following = (below - 1).clamp(min=0), below.clamp(max=len(nodes) - 1)
    open_previous = (reach > settled)[previous] & (below > 0)
    open_following = (reach > settled)[following] & (below < len(nodes))
    lower = sums[below] - weights[previous] * open_previous
    upper = sums[below] + weights[following] * open_following
    first, last = nodes[0] - reach[0], nodes[-1] + reach[-1]
    lower, upper = torch.where(grid > last, 1.0, lower), torch.where(grid < first, 0.0, upper)
    return lower.clamp(0.0, 1.0), upper.clamp(0.0, 1.0)
