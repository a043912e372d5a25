"""Linear systems with one matrix, solved together in few calls, to a true residual.

    b, b, ... --a recurrence for each, in lockstep--> one call of products, one or two all-reduces a step --> x, x, ...
              <--again, from what is left of b--------- b - (A + damping I) x, by a product

The recurrences are in recurrences.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.curvature.estimates.arguments import check_tol
from pipeline.curvature.estimates.recurrences import (
    Dots,
    Product,
    Steps,
    System,
    T,
    conjugate_gradients,
    minimal_residual,
)
from pipeline.curvature.linear import LinearMap
from pipeline.curvature.results.progress import Progress
from pipeline.curvature.space import HOST, Space, Vec, add_, combined, copy, scale_

METHODS = {"cg": conjugate_gradients, "minres": minimal_residual}


@dataclass(frozen=True)
class SolveSettings:
    """The checked arguments of a solve."""

    system: System
    tol: float
    limit: int
    method: str


@dataclass(frozen=True)
class End:
    """The result of one system."""

    x: Vec
    residual: float
    """The true one, divided by the norm of b."""
    products: int


def solved(
    A: LinearMap, plan: SolveSettings, bs: Sequence[Vec], starts: Sequence[Vec] | None, show: bool | None
) -> list[End]:
    """The end of each system, `A.block` of them at a time. `bs` and `starts` are not changed.

    Raises:
        IndefiniteError: by "cg", where A + damping I is not positive definite.
        FloatingPointError: a vector has entries that are not finite.
    """
    ends: list[End] = []
    with Progress(None, f"solve with {A.name}", A.shows(show)) as bar:
        for first in range(0, len(bs), A.block):
            members = range(first, min(first + A.block, len(bs)))
            runs = [_refined(plan, bs[index], None if starts is None else starts[index]) for index in members]
            ends += _in_lockstep(A, plan.system.damping, runs, bar.advance)
    return ends


def _in_lockstep(
    A: LinearMap, damping: float, runs: Sequence[Steps[T]], advance: Callable[[int, str], None]
) -> list[T]:
    """Answers all products that are asked for by one call, all inner products by one all-reduce."""
    ends: dict[int, T] = {}
    asks = {index: next(run) for index, run in enumerate(runs)}
    while asks:
        products = {index: ask for index, ask in asks.items() if isinstance(ask, Product)}
        images: dict[int, Vec] = {}
        if products:
            images = dict(zip(products, A.products([ask.vec for ask in products.values()]), strict=True))
            advance(len(products), f"residual {max(ask.residual for ask in products.values()):.1e}")
        for index, ask in products.items():
            add_(images[index], ask.vec, damping)
        numbers = _dots(A, {index: ask for index, ask in asks.items() if isinstance(ask, Dots)})
        for index in list(asks):
            try:
                asks[index] = runs[index].send(images[index] if index in images else numbers[index])
            except StopIteration as stop:
                ends[index] = stop.value
                del asks[index]
    return [ends[index] for index in range(len(runs))]


def _dots(A: LinearMap, asks: Mapping[int, Dots]) -> dict[int, list[float]]:
    if not asks:
        return {}
    pairs = [pair for ask in asks.values() for pair in ask.pairs]
    total = A.space.sum_over(A.space.local_pairs(pairs))
    if not bool(total.isfinite().all()):
        raise FloatingPointError(
            f"solve with {A.name}: a vector has entries that are not finite, or too large to square. "
            "Look at b and at a product with it: the loss, its gradient or a parameter may be nan or infinite."
        )
    numbers = iter(total.tolist())
    return {index: [next(numbers) for _ in ask.pairs] for index, ask in asks.items()}


def _refined(plan: SolveSettings, b: Vec, start: Vec | None) -> Steps[End]:
    """Runs the recurrence on what is left of b, until the true residual is small enough or falls no more."""
    (square,) = yield Dots(((b, b),))
    size = math.sqrt(square)
    if size == 0.0:
        return End([torch.zeros_like(part) for part in b], 0.0, 0)
    x, products = ([torch.zeros_like(part) for part in b], 0) if start is None else (start, 1)
    left = copy(b) if start is None else combined([b, (yield Product(x))], [1.0, -1.0])
    (square,) = yield Dots(((left, left),))
    residual, rounds, norm = math.sqrt(square) / size, 0, 0.0
    while residual > plan.tol and products + 2 <= plan.limit:
        # Of norm 1, so that float32 does not underflow; aimed a little lower, so that rounding needs no further round.
        scale_(left, 1.0 / (residual * size))
        aim, limit = 0.9 * plan.tol / residual, plan.limit - products - 1
        more, steps, norm = yield from METHODS[plan.method](plan.system, left, aim, limit, norm)
        trial = add_(scale_(more, residual * size), x)
        left = combined([b, (yield Product(trial, residual))], [1.0, -1.0])
        (square,) = yield Dots(((left, left),))
        before, residual_now = residual, math.sqrt(square) / size
        products, rounds = products + steps + 1, rounds + 1
        if residual_now > before and (rounds > 1 or plan.method == "minres"):
            break  # rounding alone; but conjugate gradients lower another norm, and may raise this one on their way
        x, residual = trial, residual_now
        if residual > before / 2.0:
            break
    return End(x, residual, products)


def planned(
    A: LinearMap,
    damping: float,
    tol: float,
    max_products: int | None,
    preconditioner: Vec | Mapping[str, Tensor] | None,
    method: str,
) -> SolveSettings:
    """Checks what `solve` takes; see there. All processes call it.

    Raises:
        ValueError: an argument is out of its range, or a vector does not fit.
    """
    if method not in METHODS:
        raise ValueError(f"method must be 'cg' or 'minres' (method: {method!r})")
    if not math.isfinite(damping):
        raise ValueError(f"damping must be finite (damping: {damping})")
    check_tol(tol)
    limit = 1000 if max_products is None else max_products
    if limit < 2:
        raise ValueError(f"max_products must be at least 2: a step and a check (max_products: {limit})")
    scales = None if preconditioner is None else _scales(A, preconditioner, damping)
    return SolveSettings(System(A.name, float(damping), A.space.dtype, scales), float(tol), limit, method)


def _scales(A: LinearMap, preconditioner: Vec | Mapping[str, Tensor], damping: float) -> Vec:
    """1 / (diagonal + damping), which must be above 0 everywhere, on all processes."""
    diagonal = [part + damping for part in fitting(A.space, preconditioner, "preconditioner")]
    wrong = [(~((part > 0.0) & part.isfinite())).sum().item() for part in diagonal]
    local = sum(count for count, counts in zip(wrong, A.space.counted, strict=True) if counts)
    bad = int(A.space.sum_over(torch.tensor([local], **HOST)))
    if bad:
        raise ValueError(
            f"{bad} of {A.space.size} entries of preconditioner + damping are not above 0 and finite "
            f"(damping: {damping:g}). Take their absolute values, raise them to a floor, or use a larger damping."
        )
    return [part.reciprocal() for part in diagonal]


def fitting(space: Space, given: Vec | Mapping[str, Tensor], what: str) -> Vec:
    """A vector of the space with the entries that were given, in memory of its own.

    Raises:
        KeyError, ValueError: it does not fit; `what` names it.
    """
    vec, own = space.vec(given) if isinstance(given, Mapping) else given, space.zeros()
    shapes, wanted = [tuple(part.shape) for part in vec], [tuple(part.shape) for part in own]
    if shapes != wanted:
        raise ValueError(f"{what} has shards of shapes {shapes}, the space {wanted}. Make it with space.vec(by_name).")
    return [part.detach().to(place, copy=True) for part, place in zip(vec, own, strict=True)]
