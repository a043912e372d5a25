"""The arguments that estimators share, checked in one place.

    samples, rel, abs, min_samples, kind, seed, show  --> SampleSize   a mean over random vectors
    tol                                               --> check_tol  what ends at a residual
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipeline.common.arguments import check_count
from pipeline.curvature.estimates.resume import Resumable
from pipeline.curvature.linear import LinearMap
from scheduler.errors import refuse_unless_finite

KINDS = ("rademacher", "normal")


@dataclass(frozen=True)
class SampleSize:
    """The number of random vectors of a mean, and its goal.

    Attributes:
        A: the matrix.
        samples: the most products to spend.
        kind: of random vectors, "rademacher" or "normal".
        rel, abs: the standard error at which to end, times the value's magnitude, and in the value's unit. Of two
            bounds the looser one holds.
        min_samples: draws below which nobody looks. A standard error of few draws is often far too small; ending where
            it happens to be small would make most results look better than they are.
        seed: of the random vectors.
        show: whether to show a progress bar, on one process. None: where it goes to a terminal.
        resume: the file of a run that may be interrupted, or None.
        save_every: seconds between two saves.

    Raises:
        ValueError: no product may be spent, a bound means nothing, or there is no such kind.
    """

    A: LinearMap
    samples: int
    kind: str
    rel: float | None
    abs: float | None
    min_samples: int
    seed: int
    show: bool | None
    resume: str | os.PathLike[str] | None
    save_every: float

    def __post_init__(self) -> None:
        check_count("samples", self.samples)
        check_count("min_samples", self.min_samples, least=2)  # draws, of which a standard error needs two
        for name, bound in {"rel": self.rel, "abs": self.abs}.items():
            if bound is not None:
                refuse_unless_finite(name, bound, error=ValueError)
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}: random vectors are of kind {' or '.join(map(repr, KINDS))}")

    @property
    def is_exact(self) -> bool:
        """Whether the products are enough for a whole basis."""
        return self.samples >= self.A.space.size

    @property
    def has_goal(self) -> bool:
        """Whether the run may end before all samples are spent."""
        return not self.is_exact and (self.rel is not None or self.abs is not None)

    def is_reached(self, values: Tensor, stderrs: Tensor, draws: int) -> bool:
        """Whether every one of the standard errors is small enough to end."""
        if not self.has_goal or draws < self.min_samples:
            return False
        return bool((stderrs <= (values.abs() * (self.rel or 0.0)).clamp(min=self.abs or 0.0)).all())

    def resumable(self, quantity: str, **settings: Any) -> Resumable:
        """The run that estimates `quantity` of the matrix, as it was left or from the beginning.

        Args:
            settings: further settings of it.
        """
        vectors = {"samples": self.samples, "kind": self.kind, "seed": self.seed, "block": self.A.block}
        goal = {"rel": self.rel, "abs": self.abs, "min_samples": self.min_samples}
        total = self.A.space.size if self.is_exact else self.samples
        settings = {"file": f"{quantity} 3", **vectors, **goal, **settings}
        title = f"{quantity} of {self.A.name}"
        return Resumable(self.A, title, total, settings, self.show, self.resume, self.save_every)


def check_tol(tol: float) -> None:
    """Refuse what is no relative residual.

    Raises:
        ValueError: it is not between 0 and 1.
    """
    if not 0.0 < tol < 1.0:
        raise ValueError(f"tol is {tol}: it bounds a relative residual, between 0 and 1; use a number like 1e-6")
