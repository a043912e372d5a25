"""The sampling that all estimates from random vectors share.

    random z --> A z --> a number, as z . A z --> mean +- standard error --> near enough, or more vectors?
    unit vectors e --> A e: after `size` of them the sum is exact

    samples, rel, abs, min_samples, kind, seed, show --> SampleSize   a mean over random vectors, its arguments checked
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipeline.common.arguments import check_count, check_number
from pipeline.curvature.estimates.resume import Resumable
from pipeline.curvature.linear import LinearMap, blocks, if_finite
from pipeline.curvature.results.result import Result
from pipeline.curvature.results.tables import plus_minus
from pipeline.curvature.space import HOST, Space, Vec
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
        return bool((stderrs <= (values.abs() * float(self.rel or 0)).clamp(min=float(self.abs or 0))).all())

    def resumable(self, quantity: str, **settings: Any) -> Resumable:
        """The run that estimates `quantity` of the matrix, as it was left or from the beginning.

        Args:
            settings: further settings of it.
        """
        vectors = {"samples": self.samples, "kind": self.kind, "seed": self.seed, "block": self.A.block}
        goal = {"rel": self.rel, "abs": self.abs, "min_samples": self.min_samples}
        total = min(self.samples, self.A.space.size)
        settings = {"file": f"{quantity} 6", **vectors, **goal, **settings}
        title = f"{quantity} of {self.A.name}"
        return Resumable(self.A, title, total, settings, self.show, self.resume, self.save_every)


def check_tol(tol: float) -> None:
    """Refuse what is no relative residual.

    Raises:
        TypeError: it is no number.
        ValueError: it is not between 0 and 1.
    """
    if not 0.0 < check_number("tol", tol) < 1.0:
        raise ValueError(f"tol is {tol}: it bounds a relative residual, between 0 and 1; use a number like 1e-6")


Measure: TypeAlias = Callable[[list[Vec], list[Vec]], Tensor]  # vectors, A times each -> [vectors, ...]
OnProgress: TypeAlias = Callable[[int, Any, str], None]  # see `Resumable.record`
VectorTransform: TypeAlias = Callable[[list[Vec]], list[Vec]]  # what A is multiplied with, from random vectors


@dataclass(frozen=True, eq=False)
class SampledResult(Result):
    """A result that spent a bounded number of products, and has errors.

    Args:
        samples: products spent.
        stopped: "samples" (all spent), "tolerance" (the errors are as small as asked) or "exact".
        matrix: the name of the matrix.
    """

    samples: int
    stopped: str
    matrix: str

    @property
    def converged(self) -> bool:
        """Whether the errors are as small as asked, or zero."""
        return self.stopped != "samples"

    @property
    def cost(self) -> str:
        """In words."""
        return f"{self.samples} products, stopped by: {self.stopped}"


@dataclass(frozen=True, eq=False)
class SampledNumber(SampledResult):
    """A number with its standard error.

    Args:
        value: the estimate.
        stderr: its standard error; 0 if exact, inf if one draw is all there is.
        draws: [draws], float64: what each random vector says alone; the value is their mean.

    Attributes:
        quantity: in words.
    """

    quantity: ClassVar[str]
    value: float
    stderr: float
    draws: Tensor

    def draw(self, ax: Any) -> None:
        """The mean after each draw, with its standard error."""
        counts = list(range(1, len(self.draws) + 1))
        estimates = [mean_and_stderr(self.draws[:count]) for count in counts]
        errors = [float(stderr) if count > 1 else 0.0 for count, (_, stderr) in zip(counts, estimates, strict=True)]
        ax.errorbar(counts, [float(mean) for mean, _ in estimates], yerr=errors)
        ax.set_xlabel("draws")
        ax.set_ylabel(f"{self.quantity} of {self.matrix}")


class SampleStatistics(NamedTuple):
    """The result of a run of random vectors."""

    values: Tensor  # [draws, ...], float64: what each vector says alone, one number or several
    mean: Tensor  # [...]
    stderr: Tensor  # [...]: inf from one draw, 0 where exact
    spent: int  # products
    stopped: str  # "samples" (all spent), "tolerance" (reached) or "exact"


def estimate(sampling: SampleSize, measure: Measure, quantity: str, **settings: Any) -> SampleStatistics:
    """The mean of a measure over random vectors; exact, over a basis, where there are products enough for one.

    Args:
        measure: a quadratic form or several, so that the sum over a basis is the mean over random vectors.
        quantity: of the matrix is estimated, for the progress bar.
        settings: of the measure, for a run that goes on.
    """
    with sampling.resumable(quantity, **settings) as run:
        return sampled_mean(sampling, measure, run.record, run.saved_state)


def sampled_mean(
    sampling: SampleSize,
    measure: Measure,
    on_progress: OnProgress,
    saved: Tensor | None,
    first: int = 0,
    prepare: VectorTransform | None = None,
) -> SampleStatistics:
    """The mean of a measure over random vectors `first`, `first` + 1, ... of a seed, or its sum over a basis.

    Args:
        on_progress: told after each group of products how many draws there are, and their values.
        saved: the values of draws before.
    """
    drawn = torch.zeros(0, **HOST) if saved is None else saved  # the first values give it its other dims
    groups = sampled_products(sampling, len(drawn), first, prepare)
    while not (is_enough := sampling.is_reached(*mean_and_stderr(drawn), len(drawn))) and (group := next(groups, None)):
        drawn = torch.cat([drawn, if_finite(measure(*group), sampling.A.name)])
        on_progress(len(drawn), drawn, _note(sampling, drawn))
    if sampling.is_exact:
        total = drawn.sum(0)
        return SampleStatistics(total[None], total, torch.zeros_like(total), len(drawn), "exact")
    return SampleStatistics(drawn, *mean_and_stderr(drawn), len(drawn), "tolerance" if is_enough else "samples")


def _note(sampling: SampleSize, drawn: Tensor) -> str:
    """The mean so far, of one number; parts of a basis say nothing of it."""
    if sampling.is_exact or drawn.dim() > 1:
        return ""
    mean, stderr = mean_and_stderr(drawn)
    return plus_minus(float(mean), float(stderr))


def mean_and_stderr(values: Tensor) -> tuple[Tensor, Tensor]:
    """Of independent draws [draws, ...]. One draw tells nothing of its error, which is then inf.

    Example:
        >>> mean_and_stderr(torch.tensor([1.0, 2.0, 3.0]))
        (tensor(2.), tensor(0.5774))
    """
    mean = values.mean(0)
    if len(values) < 2:
        return mean, torch.full_like(mean, math.inf)
    return mean, values.std(0) / math.sqrt(len(values))


def sampled_products(
    sampling: SampleSize, done: int, first: int = 0, prepare: VectorTransform | None = None
) -> Iterator[tuple[list[Vec], list[Vec]]]:
    """The vectors of a run and A times each, a block at a time: random ones, or the unit vectors.

    Args:
        done: how many it has had.
        first: the number of its first random vector.
        prepare: changes random vectors.
    """
    A = sampling.A
    entries = counted_entries(A.space) if sampling.is_exact else {}
    for block in blocks(range(first + done, first + min(sampling.samples, A.space.size)), A.block):
        if sampling.is_exact:
            vectors = [_unit_vector(A.space, entries, index) for index in block]
        else:
            vectors = [A.space.random(sampling.kind, sampling.seed, index) for index in block]
        if prepare is not None:
            vectors = prepare(vectors)
        yield vectors, A.products(vectors)


def counted_entries(space: Space) -> dict[str, int]:
    """The names of the parameters of all processes, and their entries, each where it counts in sums."""
    marked = space.zeros()
    for shard, counts in zip(marked, space.counted, strict=True):
        shard.fill_(float(counts))
    local = {name: part.numel() for name, part in space.named(marked).items() if part.numel() and part.any()}
    return {name: count for row in space.rows(local) for name, count in row.items()}


def _unit_vector(space: Space, entries: Mapping[str, int], index: int) -> Vec:
    """1 at an entry, counted through the parameters of all processes, and 0 elsewhere."""
    vec = space.zeros()
    named = space.named(vec)
    for name, count in entries.items():
        if 0 <= index < count and name in named:  # on each process that has it: of tied ones they are equal
            named[name].view(-1)[index] = 1.0
        index -= count
    return vec
