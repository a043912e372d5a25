"""The diagonal of a matrix that is known by its products only.

    random z of +1 and -1 --> A z --> z * A z, entry by entry     mean = diagonal, spread = the rest of each row
    running: one vector of means, one of squared deviations       memory does not grow with the samples

Bekas, Kokiopoulou, Saad 2007, "An estimator for the diagonal of a matrix", with Rademacher vectors, for which their
quotient needs no division. Entry i of one draw has the variance sum over j != i of A_ij^2: a diagonal matrix is found
by one product, one with large entries beside the diagonal by many.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.curvature.estimates.resume import Resumable, from_host
from pipeline.curvature.estimates.sampling import SampledResult, SampleSize, sampled_products
from pipeline.curvature.linear import LinearMap, if_finite
from pipeline.curvature.results.tables import plus_minus, table
from pipeline.curvature.space import Vec, add_


@dataclass(frozen=True, eq=False)
class Diagonal(SampledResult):
    """The diagonal of a matrix: this process's part, by the parameters' names.

    Args:
        values: name -> estimates, in the parameter's shape.
        stderr: name -> their standard errors; 0 if exact, inf if one draw is all there is.
        rms: of all entries, those of other processes too: the root of the mean square.
        rms_stderr: the same of their standard errors.
    """

    values: dict[str, Tensor]
    stderr: dict[str, Tensor]
    rms: float
    rms_stderr: float

    def lines(self) -> Iterator[str]:
        yield f"diagonal of {self.matrix}  root mean square {plus_minus(self.rms, self.rms_stderr)}"
        yield f"  {self.cost}"
        cells = [["parameter", "mean", "least", "largest", "error (rms)"]]
        for name, values in self.values.items():
            if values.numel():
                error = self.stderr[name].double().square().mean().sqrt()
                shown = (float(values.double().mean()), float(values.min()), float(values.max()), float(error))
                cells.append([name, *(f"{number:.4g}" for number in shown)])
        yield from table(cells)

    def draw(self, ax: Any) -> None:
        """The numbers of entries of this process by value."""
        entries = torch.cat([values.flatten() for values in self.values.values()]).double()
        counts, edges = torch.histogram(entries, bins=min(100, max(1, len(entries))))
        ax.stairs(counts.tolist(), edges.tolist())
        ax.set_yscale("log")
        ax.set_xlabel(f"diagonal entries of {self.matrix}")
        ax.set_ylabel("entries")


def diagonal(
    A: LinearMap,
    samples: int = 100,
    *,
    rel: float | None = None,
    abs: float | None = None,
    min_samples: int = 10,
    seed: int = 0,
    show: bool | None = None,
    resume: str | os.PathLike[str] | None = None,
    save_every: float = 300.0,
) -> Diagonal:
    """The diagonal of A, estimated without bias, with an error for each entry.

    With `samples` at least the size of A it is exact, by as many products as A has rows. Standard errors of few draws
    are themselves uncertain, by a quarter at ten draws. Two vectors are held beside those that are multiplied.

    Args:
        A: the matrix; over ranks every process makes the same call and gets its own part.
        samples: the most products to spend.
        rel: end where the root mean square of the standard errors is at most this times that of the entries.
        abs: end where it is at most this. Of two bounds the looser one holds.
        min_samples: draws before the first look at the error.
        seed: of the random vectors; equal seeds give equal results.
        show: a progress bar, on one process. None: where it goes to a terminal.
        resume, save_every: a file from which an interrupted run goes on, and seconds; see `top_eigenpairs`.

    Raises:
        ValueError: an argument means nothing.
        FloatingPointError: a product is not finite.

    Example: two draws, which agree for a diagonal matrix.
        >>> import torch
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> model = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
        >>> x, y = torch.diag(torch.tensor([1.0, 2.0, 3.0])).double(), torch.zeros(3, 1).double()
        >>> H = Hessian(model, (x, y), nn.MSELoss(reduction="sum"))  # diag(2, 8, 18)
        >>> found = diagonal(H, 2)
        >>> found.values["0.weight"].round(decimals=9).tolist(), found.rms_stderr < 1e-9
        ([[2.0, 8.0, 18.0]], True)
    """
    sampling = SampleSize(A, samples, "rademacher", rel, abs, min_samples, seed, show, resume, save_every)
    with sampling.resumable("diagonal") as run:
        running = _RunningMoments(A, sampling.is_exact, run.saved_state)
        return running.result(_draw(sampling, running, run))


def _draw(sampling: SampleSize, running: _RunningMoments, run: Resumable) -> str:
    """Take all vectors, or enough; why it ended. The sum over a basis of q * A q is the diagonal of A Q Q' = A."""
    groups = sampled_products(sampling, running.count)
    while True:
        if sampling.has_goal and running.count:  # of a run that goes on, too
            values, errors = running.sizes()
            run.advance(0, f"{float(errors / values):.2g} of rms" if values > 0 else "")
            if sampling.is_reached(values, errors, running.count):
                return "tolerance"
        if (group := next(groups, None)) is None:
            return "exact" if sampling.is_exact else "samples"
        for vec, product in zip(*group, strict=True):
            running.add([shard.mul_(factor) for shard, factor in zip(product, vec, strict=True)])
        run.record(running.count, running.state())


class _RunningMoments:
    """Mean and squared deviations so far, by Welford's update, which does not cancel; or the sum over a basis."""

    def __init__(self, A: LinearMap, is_sum: bool, saved: dict[str, Any] | None) -> None:
        self.A, self._is_sum = A, is_sum
        saved = saved or {"sums": [A.space.zeros(), A.space.zeros()], "count": 0}
        self.mean, self.squares = from_host(A.space, saved["sums"])
        self.count: int = saved["count"]

    def state(self) -> dict[str, Any]:
        """All that a run needs to go on."""
        return {"sums": [self.mean, self.squares], "count": self.count}

    def add(self, draw: Vec) -> None:
        self.count += 1
        if self._is_sum:
            add_(self.mean, draw)
            return
        for mean, squares, new in zip(self.mean, self.squares, draw, strict=True):
            deviation = new - mean
            mean.add_(deviation, alpha=1.0 / self.count)
            squares.addcmul_(deviation, new.sub_(mean))

    def errors(self) -> Vec:
        """A vector of standard errors."""
        if self._is_sum:
            return self.A.space.zeros()
        if self.count < 2:
            return [torch.full_like(shard, math.inf) for shard in self.squares]
        return [shard.div(self.count * (self.count - 1)).sqrt_() for shard in self.squares]

    def sizes(self) -> tuple[Tensor, Tensor]:
        """The root mean squares of values and of errors."""
        space, errors = self.A.space, self.errors()
        values = if_finite(space.dots([self.mean], [self.mean])[0, 0], self.A.name)
        squares = space.dots([errors], [errors])[0, 0]
        return (values / space.size).sqrt(), (squares / space.size).sqrt()

    def result(self, stopped: str) -> Diagonal:
        values, errors = self.sizes()
        named_values, named_errors = self.A.space.on_host(self.mean), self.A.space.on_host(self.errors())
        return Diagonal(self.count, stopped, self.A.name, named_values, named_errors, float(values), float(errors))
