"""The sampling that all estimates from random vectors share.

    random z --> A z --> a number, as z . A z --> mean +- standard error --> near enough, or more vectors?
    random z, each made orthonormal to those before: after `size` of them a complete basis, and the sum is exact
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipeline.curvature.estimates.krylov import append_orthonormal
from pipeline.curvature.linear import LinearMap, blocks, finite, products_of
from pipeline.curvature.results.progress import Progress
from pipeline.curvature.space import Space, Vec

KINDS = ("rademacher", "normal")
Measure: TypeAlias = Callable[[list[Vec], list[Vec]], Tensor]  # vectors, A times each -> [vectors, numbers]
Prepare: TypeAlias = Callable[[list[Vec]], list[Vec]]  # what A is multiplied with, from random vectors


class Drawn(NamedTuple):
    """What a run of random vectors gave."""

    values: Tensor  # [draws, numbers], float64: what each vector says alone
    mean: Tensor  # [numbers]
    stderr: Tensor  # [numbers]: inf from one draw, 0 where exact
    spent: int  # products
    stopped: str  # "samples" (all spent), "tolerance" (reached) or "exact"


class Goal(NamedTuple):
    """How small the standard error must be for a run to end.

    Args:
        rel: times the value's magnitude.
        abs: in the value's unit. Of two bounds the looser one holds.
        least: draws below which nobody looks. A standard error of few draws is often far too small; ending where it
            happens to be small would make most results look better than they are.

    Example:
        >>> goal = Goal(rel=0.01, abs=None, least=10)
        >>> goal.reached(torch.tensor([200.0]), torch.tensor([1.5]), draws=12)
        True
        >>> goal.reached(torch.tensor([200.0]), torch.tensor([1.5]), draws=9)
        False
    """

    rel: float | None
    abs: float | None
    least: int

    @property
    def asked(self) -> bool:
        return self.rel is not None or self.abs is not None

    def reached(self, values: Tensor, stderrs: Tensor, draws: int) -> bool:
        """Whether every one of the standard errors is small enough."""
        if not self.asked or draws < self.least:
            return False
        return bool((stderrs <= (values.abs() * (self.rel or 0.0)).clamp(min=self.abs or 0.0)).all())


def checked_goal(samples: int, rel: float | None, abs: float | None, min_samples: int) -> Goal:
    """The goal of a call's arguments.

    Raises:
        ValueError: no product may be spent, or a bound means nothing.
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}: an estimate spends at least one product; use samples=100")
    if min_samples < 2:
        raise ValueError(f"min_samples is {min_samples}: a standard error needs two draws; use min_samples=10")
    for name, bound in {"rel": rel, "abs": abs}.items():
        if bound is not None and not 0.0 <= bound < math.inf:
            raise ValueError(f"{name} is {bound}: a bound on the standard error is finite and not negative")
    return Goal(rel, abs, min_samples)


def check_kind(kind: str) -> str:
    """The kind of random vectors, if it is one."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}: random vectors are of kind {' or '.join(map(repr, KINDS))}")
    return kind


def estimate(
    A: LinearMap, measure: Measure, samples: int, goal: Goal, kind: str, seed: int, title: str, show: bool | None
) -> Drawn:
    """The mean of a measure over random vectors; exact, over a basis, where there are products enough for one.

    Args:
        measure: a quadratic form or several, so that the sum over a basis is the mean over random vectors.
    """
    exact = samples >= A.space.size
    with Progress(A.space.size if exact else samples, title, A.shows(show)) as bar:
        if exact:
            return exactly(A, measure, seed, bar)
        return draw(A, measure, samples, goal, kind, seed, bar)


def draw(
    A: LinearMap,
    measure: Measure,
    samples: int,
    goal: Goal,
    kind: str,
    seed: int,
    bar: Progress,
    first: int = 0,
    prepare: Prepare | None = None,
) -> Drawn:
    """The mean of a measure over random vectors `first`, `first` + 1, ... of a seed."""
    values, stopped = [], "samples"
    for vectors, products in random_products(A, kind, seed, range(first, first + samples), prepare):
        values.append(finite(measure(vectors, products), A.name))
        mean, stderr = mean_and_stderr(torch.cat(values))
        bar.advance(len(vectors), note=plus_minus(mean, stderr))
        if goal.reached(mean, stderr, sum(map(len, values))):
            stopped = "tolerance"
            break
    drawn = torch.cat(values)
    return Drawn(drawn, *mean_and_stderr(drawn), len(drawn), stopped)


def exactly(A: LinearMap, measure: Measure, seed: int, bar: Progress) -> Drawn:
    """The sum of a measure over an orthonormal basis: `size` products, and as many vectors are held."""
    values = []
    for vectors, products in basis_products(A, seed):
        values.append(finite(measure(vectors, products), A.name))
        bar.advance(len(vectors))
    total = torch.cat(values).sum(0)
    return Drawn(total[None], total, torch.zeros_like(total), A.space.size, "exact")


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


def random_products(
    A: LinearMap, kind: str, seed: int, indices: Sequence[int], prepare: Prepare | None = None
) -> Iterator[tuple[list[Vec], list[Vec]]]:
    """Random vectors (prepared) and A times each, a block at a time."""
    for block in blocks(indices, A.block):
        vectors = [A.space.random(kind, seed, index) for index in block]
        if prepare is not None:
            vectors = prepare(vectors)
        yield vectors, A.products(vectors)


def basis_products(A: LinearMap, seed: int) -> Iterator[tuple[list[Vec], list[Vec]]]:
    """The vectors of an orthonormal basis and A times each, a block at a time."""
    basis: list[Vec] = []
    for index in range(2 * A.space.size + 8):  # one that lies in the span of the others is as good as impossible
        if len(basis) < A.space.size:
            append_orthonormal(A.space, basis, A.space.random("normal", seed, index))
    assert len(basis) == A.space.size  # random vectors span the space
    yield from products_of(A, basis)


def paired_dots(space: Space, left: Sequence[Vec], right: Sequence[Vec]) -> Tensor:
    """The inner products of each vector on the left with its neighbour on the right: [len(left), 1], one all-reduce."""
    local = [space.local_dots([one], [other])[0] for one, other in zip(left, right, strict=True)]
    return space.sum_over(torch.stack(local))


def plus_minus(value: Tensor, stderr: Tensor) -> str:
    """A value with its error, if it is one.

    Example:
        >>> plus_minus(torch.tensor([638.3]), torch.tensor([1.25]))
        '638.3 +- 1.2'
    """
    return f"{float(value):.6g} +- {float(stderr):.2g}" if value.numel() == 1 else ""


def draw_means(ax: Any, draws: Tensor, label: str) -> None:
    """Into matplotlib axes: the mean after each draw, with its standard error."""
    counts = list(range(1, len(draws) + 1))
    found = [mean_and_stderr(draws[:count]) for count in counts]
    errors = [float(stderr) if count > 1 else 0.0 for count, (_, stderr) in zip(counts, found, strict=True)]
    ax.errorbar(counts, [float(mean) for mean, _ in found], yerr=errors)
    ax.set_xlabel("draws")
    ax.set_ylabel(label)
