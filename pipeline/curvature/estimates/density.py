"""The spectral density of a matrix that has as many eigenvalues as the model has parameters.

    random unit vectors --Lanczos--> T of each run --eigh--> nodes, weights --Gaussians--> a curve of each run
    the curves' mean: the density      their spread over the runs: its error band

Integrated: the share of eigenvalues below x, with bounds that tell what few steps miss.

    nodes  t1 < t2 < ... < tm, weights w1 ... wm of one run:
    w1 + ... + w(k-1)  <=  share of the start below tk  <=  w1 + ... + wk            (Chebyshev, Markov, Stieltjes)

So between two nodes the share is known up to the weights of these two, whatever the matrix is; a node that has settled
on an eigenvalue has its weight right there. Over the runs comes the luck of the random starts: two standard errors. No
width is chosen, and nothing is smoothed. Golub and Meurant, "Matrices, moments and quadrature", 1994.

Stochastic Lanczos quadrature: Golub and Meurant 1994; Ubaru, Chen and Saad 2017; of networks: Ghorbani, Krishnan and
Xiao, "An investigation into neural net optimization via Hessian eigenvalue density", 2019 (arXiv 1901.10159).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.common.arguments import check_count, check_number
from pipeline.curvature.estimates.quadrature import edges, gauss, smoothed, stacked, tridiagonals, width
from pipeline.curvature.estimates.resume import Resumable
from pipeline.curvature.estimates.sampling import mean_and_stderr
from pipeline.curvature.linear import LinearMap
from pipeline.curvature.results.result import Result
from pipeline.curvature.results.tables import table, with_error
from pipeline.curvature.space import HOST
from scheduler.errors import refuse_unless_finite


@dataclass(frozen=True, eq=False)
class Density(Result):
    """A spectral density: the share of eigenvalues per unit of eigenvalue. Its integral over the grid is 1.

    The band is the mean of the runs' curves minus and plus two standard errors, not below 0. At a point where the runs
    spread like a normal distribution it holds the truth, smoothed in the same way, in 95 of 100 cases (92 for 10 runs,
    82 for 3). It tells the luck of the random vectors alone, neither what the smoothing hides nor what few steps miss;
    the band of `integrated` tells that.
    One run has no band: None.

    Attributes:
        matrix: the matrix's name.
        size: how many eigenvalues the matrix has.
        grid: [points], evenly spaced; each point is the middle of a cell, and the density there the mean over the cell.
        density: [points].
        lower: [points]: the lower end of the band.
        upper: [points]: the upper end of the band.
        nodes: [runs, steps], of a smaller matrix [runs, size]: each run's Ritz values, ascending. A run that ended
            early repeats its last one, with weight 0.
        weights: [runs, steps]: the share of the eigenvalues that each node stands for; a run's sum to 1.
        widths: [runs, steps]: of the Gaussian at each node, in units of eigenvalue: `sigma`, more where the steps tell
            less.
        reach: [runs, steps]: no eigenvalue that a node stands for is farther from it; 0 where the node is one.
        sigma: the least width, in units of eigenvalue.
        products: with the matrix, in all runs.
    """

    matrix: str
    size: int
    grid: Tensor
    density: Tensor
    lower: Tensor | None
    upper: Tensor | None
    nodes: Tensor
    weights: Tensor
    widths: Tensor
    reach: Tensor
    sigma: float
    products: int

    def moment(self, power: int) -> tuple[float, float | None]:
        """The mean over the eigenvalues of their power: sum of eigenvalue ** power / size, of the matrix as it is.

        Args:
            power: from 0; up to 2 * steps - 1 the steps cost nothing, and all error is that of the random vectors.

        Returns:
            The estimate and its standard error over the runs, None for one run.
        """
        return self._mean(self.nodes ** check_count("power", power, least=0))

    def trace(self) -> tuple[float, float | None]:
        """The sum of all eigenvalues and its standard error over the runs, None for one run."""
        return self._mean(self.nodes, self.size)

    def count(self, low: float, high: float) -> tuple[float, float | None]:
        """About how many eigenvalues are in [low, high].

        The eigenvalues around a node count as where it is. So set the ends into gaps of the spectrum, or expect an
        error of up to the weight of one node at each end, which the standard error does not tell.

        Returns:
            The estimate and its standard error over the runs, None for one run.
        """
        if not check_number("low", low) <= check_number("high", high):
            raise ValueError(f"low must not be above high (low: {low}, high: {high})")
        return self._mean(self._within(low, high), self.size)

    def integrated(self) -> IntegratedDensity:
        """The share of eigenvalues below each point of the grid, with a band that tells what few steps miss, too.

        A node that an eigenvalue is nearer to than a tenth of the default `sigma` is taken for it.
        """
        settled, runs = 0.1 * width(self.nodes), zip(self.nodes, self.weights, self.reach, strict=True)
        ends = [bounds(self.grid, *run, settled) for run in runs]
        lower, upper = [torch.stack(side) for side in zip(*ends, strict=True)]
        share, error = _over_runs((lower + upper) / 2.0)
        room = 0.0 if error is None else 2.0 * error
        low = (lower.mean(0) - room).clamp(0.0, 1.0).cummax(0).values
        high = (upper.mean(0) + room).clamp(0.0, 1.0).flip(0).cummin(0).values.flip(0)
        return IntegratedDensity(self.matrix, self.size, self.grid, share, low, high)

    def lines(self) -> Iterator[str]:
        runs, steps = self.nodes.shape
        yield (
            f"spectral density of {self.matrix}: {self.size} eigenvalues, "
            f"{runs} runs of {steps} steps, {self.products} products"
        )
        below, above = math.nextafter(-self.sigma, -math.inf), math.nextafter(self.sigma, math.inf)
        numbers = {
            "smallest node": (float(self.nodes.min()), None),
            "largest node": (float(self.nodes.max()), None),
            "trace": self.trace(),
            "mean eigenvalue": self.moment(1),
            "share below -sigma": self._mean(self._within(-math.inf, below)),
            "share around 0": self._mean(self._within(-self.sigma, self.sigma)),
            "share above sigma": self._mean(self._within(above, math.inf)),
            "sigma": (self.sigma, None),
        }
        yield from table([
            [name, with_error(value, math.inf if error is None else error)] for name, (value, error) in numbers.items()
        ])

    def draw(self, ax: Any) -> None:
        """The density on a logarithmic scale, down to a tenth of what one eigenvalue of all makes; the band filled."""
        grid = self.grid.numpy()
        floor = 0.1 / (self.size * self.sigma * math.sqrt(2.0 * math.pi))
        ax.semilogy(grid, self.density.clamp(min=floor).numpy(), label=f"density of {self.matrix}")
        if self.lower is not None and self.upper is not None:
            band = [end.clamp(min=floor).numpy() for end in (self.lower, self.upper)]
            ax.fill_between(grid, *band, alpha=0.3, label="two standard errors")
        ax.set_ylim(bottom=floor)
        ax.set_xlabel("eigenvalue")
        ax.set_ylabel("share of eigenvalues per unit")
        ax.legend()

    def _within(self, low: float, high: float) -> Tensor:
        return (self.nodes >= low) & (self.nodes <= high)

    def _mean(self, values: Tensor, factor: float = 1.0) -> tuple[float, float | None]:
        """The mean over the eigenvalues of a function, [runs, steps] at the nodes, and its standard error; scaled."""
        mean, error = _over_runs((self.weights * values).sum(1))
        return factor * float(mean), None if error is None else factor * float(error)


def density(
    A: LinearMap,
    *,
    steps: int = 80,
    runs: int = 10,
    points: int = 1000,
    sigma: float | None = None,
    margin: float = 0.05,
    seed: int = 0,
    show: bool | None = None,
    resume: str | os.PathLike[str] | None = None,
    save_every: float = 300.0,
) -> Density:
    """The spectral density by stochastic Lanczos quadrature.

    Costs steps * runs products. `A.block` runs go at a time, and each keeps its `steps` vectors meanwhile: without them
    Lanczos finds the same eigenvalues again and again.

    Args:
        A: a symmetric matrix.
        steps: of Lanczos in a run. The ends of the spectrum and separate eigenvalues need few, its inside many. A run
            ends early where it has found all there is: the discrete spectrum is then exact.
        runs: random starts; the error falls with their root.
        points: of the grid, at least 10.
        sigma: the width of the Gaussians, in units of eigenvalue. None: 1 / 400 of the nodes' range, and wider at
            a node that has not settled, as far as the next one at most.
        margin: how far the grid goes on behind the outermost nodes, as a share of their range; at least 6 sigma.
        seed: of the random vectors. The same numbers on any number of devices and processes, up to rounding.
        show: a progress bar, on one process. None: where it goes to a terminal.
        resume, save_every: a file from which an interrupted run goes on, and seconds; see `top_eigenpairs`.

    Raises:
        ValueError: a number is out of its range.
        FloatingPointError: a product is not finite.

    Example: the eigenvalues 0, 0, 0, 2, of which three quarters are 0.
        >>> import torch
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> model = nn.Sequential(nn.Linear(4, 1, bias=False)).double()
        >>> x, y = torch.tensor([[0.0, 0.0, 1.0, 0.0]]).double(), torch.zeros(1, 1).double()
        >>> found = density(Hessian(model, (x, y), nn.functional.mse_loss, block=100), steps=10, runs=400)
        >>> round(torch.trapezoid(found.density, found.grid).item(), 6)
        1.0
        >>> share, error = found.count(-0.5, 0.5)
        >>> abs(share - 3.0) < 4.0 * error < 0.3
        True
    """
    for name, value, least in ("steps", steps, 1), ("runs", runs, 1), ("points", points, 10):
        check_count(name, value, least)
    steps = min(steps, A.space.size)  # of more a run would make no use
    if sigma is not None:
        refuse_unless_finite("sigma", sigma, above=True, error=ValueError)
    refuse_unless_finite("margin", margin, error=ValueError)
    settings = {"file": "density 4", "steps": steps, "runs": runs, "seed": seed, "block": A.block}
    with Resumable(A, f"density of {A.name}", steps * runs, settings, show, resume, save_every) as run:
        saved = run.saved_state or []
        starts = (A.space.random("normal", seed, index) for index in range(len(saved), runs))
        matrices = tridiagonals(A, starts, steps, run.record, saved)
    nodes, weights, reach = stacked([gauss(alphas, betas) for alphas, betas in matrices], steps)
    least_width = width(nodes) if sigma is None else float(sigma)
    widths = torch.hypot(reach if sigma is None else torch.zeros_like(reach), torch.tensor(least_width, **HOST))
    ends = edges(nodes, widths, points, margin)
    curves = [smoothed(*rule, ends) for rule in zip(nodes, weights, widths, strict=True)]
    mean, error = _over_runs(torch.stack(curves))
    return Density(
        matrix=A.name,
        size=A.space.size,
        grid=(ends[1:] + ends[:-1]) / 2.0,
        density=mean,
        lower=None if error is None else (mean - 2.0 * error).clamp(min=0.0),
        upper=None if error is None else mean + 2.0 * error,
        nodes=nodes,
        weights=weights,
        widths=widths,
        reach=reach,
        sigma=least_width,
        products=sum([len(alphas) for alphas, _ in matrices]),
    )


def _over_runs(values: Tensor) -> tuple[Tensor, Tensor | None]:
    """The mean over the first dimension and its standard error, None where there is one run."""
    mean, error = mean_and_stderr(values)
    return mean, error if len(values) > 1 else None


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
        if not 0.0 < check_number("share", share) < 1.0:
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


def bounds(
    grid: Tensor, nodes: Tensor, weights: Tensor, reach: Tensor, settled: float
) -> tuple[Tensor, Tensor]:
    """Of one run the least and the largest share of its start that can be below each point.

    Args:
        grid: [points].
        nodes, weights, reach: [steps]; no eigenvalue that a node stands for is farther from it than its reach.
        settled: the reach up to which a node is an eigenvalue.

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
