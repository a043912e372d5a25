"""The Frobenius norm of a matrix that is known by its products only.

    random z --> A z --> |A z|^2      mean = sum of the squares of A's entries = sum of the squares of its eigenvalues

One product a draw. Pairs of draws, (z_i . A z_j)^2, have the same mean and come from the same products, but spread much
more where many eigenvalues are of one order, as 2 |A|^4 a pair; they are not used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.curvature.estimates.sampling import SampledNumber, SampleSize, estimate
from pipeline.curvature.linear import LinearMap
from pipeline.curvature.results.tables import plus_minus


@dataclass(frozen=True, eq=False)
class Norm(SampledNumber):
    """A squared Frobenius norm with its standard error."""

    quantity = "squared Frobenius norm"

    @property
    def norm(self) -> float:
        """The Frobenius norm itself."""
        return math.sqrt(self.value)

    def lines(self) -> Iterator[str]:
        squared = plus_minus(self.value, self.stderr)
        yield f"squared Frobenius norm of {self.matrix}  {squared}  (norm {self.norm:.6g})"
        yield f"  {self.cost}"


def frobenius_squared(
    A: LinearMap,
    samples: int = 100,
    *,
    kind: str = "rademacher",
    rel: float | None = None,
    abs: float | None = None,
    min_samples: int = 10,
    seed: int = 0,
    show: bool | None = None,
    resume: str | os.PathLike[str] | None = None,
    save_every: float = 300.0,
) -> Norm:
    """The squared Frobenius norm of A, estimated without bias.

    With B = A A the variance of one draw is `2 (|B|^2 - sum of B_ii^2)` for Rademacher vectors, and `2 |B|^2` for
    normal ones. With `samples` at least the size of A the result is exact.

    Args:
        A: the matrix; over ranks every process makes the same call.
        samples: the most products to spend.
        kind: of random vectors, "rademacher" or "normal".
        rel: end where the standard error is at most this times the value.
        abs: end where it is at most this. Of two bounds the looser one holds.
        min_samples: draws before the first look at the error, which few draws often make far too small.
        seed: of the random vectors; equal seeds give equal results.
        show: a progress bar, on one process. None: where it goes to a terminal.
        resume, save_every: a file from which an interrupted run goes on, and seconds; see `top_eigenpairs`.

    Raises:
        ValueError: an argument means nothing.
        FloatingPointError: a product is not finite.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> model = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
        >>> x, y = torch.diag(torch.tensor([1.0, 2.0, 3.0])).double(), torch.zeros(3, 1).double()
        >>> H = Hessian(model, (x, y), nn.MSELoss(reduction="sum"))  # diag(2, 8, 18)
        >>> print(frobenius_squared(H))
        squared Frobenius norm of Hessian  392 +- 0  (norm 19.799)
          3 products, stopped by: exact
    """
    sampling = SampleSize(A, samples, kind, rel, abs, min_samples, seed, show, resume, save_every)
    drawn = estimate(sampling, lambda _, products: A.space.paired_dots(zip(products, products)), "Frobenius norm")
    return Norm(drawn.spent, drawn.stopped, A.name, float(drawn.mean), float(drawn.stderr), drawn.values)
