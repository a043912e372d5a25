"""Linear systems with one matrix, solved together in few calls, to a true residual.

    b, b, ... --a recurrence for each, in lockstep--> one call of products, one or two all-reduces a step --> x, x, ...
              <--again, from what is left of b--------- b - (A + damping I) x, by a product

The recurrences are in recurrences.py. Whenever one waits for a product, its SystemState says where it stands: a single
system that is interrupted goes on from there (resume.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipeline.curvature.estimates.recurrences import (
    DotsRequest,
    ProductRequest,
    Steps,
    SystemState,
    conjugate_gradients,
    minimal_residual,
)
from pipeline.curvature.estimates.resume import Resumable, from_host
from pipeline.curvature.linear import LinearMap, blocks, finite, taken
from pipeline.curvature.space import HOST, Space, Vec, add_, combined, copy, scale_

if TYPE_CHECKING:
    from pipeline.curvature.estimates.solve import Inverse

VecLike: TypeAlias = Vec | Mapping[str, Tensor] | Tensor  # one vector: of the space, by name, or flat

METHODS = {"cg": conjugate_gradients, "minres": minimal_residual}


class SystemResult(NamedTuple):
    """The result of one system."""

    x: Vec
    residual: float  # the true one, divided by the norm of b
    products: int


def solved(
    system: Inverse, bs: Sequence[Vec], start: Vec | None = None, run: Resumable | None = None
) -> list[SystemResult]:
    """The end of each system, `system.block` of them at a time. `bs` and `start` are not changed.

    Args:
        system: what they share.
        bs: the right-hand sides.
        start: a guess of each solution.
        run: shows the progress of a single system, and may be interrupted.

    Raises:
        IndefiniteError: by "cg", where A + damping I is not positive definite.
        FloatingPointError: a vector has entries that are not finite.
    """
    A = system.map
    saved = {} if run is None or run.saved_state is None else dict(run.saved_state)
    spent = saved.pop("spent", 0)
    vectors = {name: from_host(A.space, saved[name]) for name in saved if name.endswith("vectors")}
    state, results = SystemState(**{**saved, **vectors}), list[SystemResult]()

    def products(requests: Sequence[ProductRequest]) -> list[Vec]:
        nonlocal spent
        if run is not None:
            run.record(spent, {"spent": spent, **vars(state)}, f"residual {requests[0].residual:.1e}")
        spent += len(requests)
        return A.products([request.vec for request in requests])

    for block in blocks(bs, A.block):
        runs = [_solve_one(system, b, start, SystemState() if run is None else state) for b in block]
        results += _run_in_lockstep(A, system.damping, runs, products)
    if run is not None and spent:
        run.advance(1)  # the last one
    return results


def _run_in_lockstep(
    A: LinearMap,
    damping: float,
    runs: Sequence[Steps[SystemResult]],
    products: Callable[[Sequence[ProductRequest]], list[Vec]],
) -> list[SystemResult]:
    """Answers inner products, all by one all-reduce, until all wait for products; then these, by one call."""
    results: dict[int, SystemResult] = {}
    requests: dict[int, ProductRequest | DotsRequest] = {}

    def answer(index: int, value: Any) -> None:
        try:
            requests[index] = runs[index].send(value)
        except StopIteration as stop:
            results[index] = stop.value
            requests.pop(index, None)

    for index in range(len(runs)):
        answer(index, None)
    while requests:
        while dots := {index: request for index, request in requests.items() if isinstance(request, DotsRequest)}:
            for index, numbers in _dots(A, dots).items():
                answer(index, numbers)
        waiting = {index: request for index, request in requests.items() if isinstance(request, ProductRequest)}
        for (index, request), image in zip(
            waiting.items(), products([*waiting.values()]) if waiting else (), strict=True
        ):
            answer(index, add_(image, request.vec, damping))
    return [results[index] for index in range(len(runs))]


def _dots(A: LinearMap, requests: Mapping[int, DotsRequest]) -> dict[int, list[float]]:
    pairs = [pair for request in requests.values() for pair in request.pairs]
    total = finite(A.space.sum_over(A.space.local_pairs(pairs)), f"{A.name}, or b itself,")
    numbers = iter(total.tolist())
    return {index: [next(numbers) for _ in request.pairs] for index, request in requests.items()}


def _solve_one(system: Inverse, b: Vec, start: Vec | None, state: SystemState) -> Steps[SystemResult]:
    """Runs the recurrence on what is left of b, until the true residual is small enough or falls no more.

    Args:
        system: what is solved, and how.
        b, start: the right-hand side, and a guess of x.
        state: where to go on; kept up to date.
    """
    (square,) = yield DotsRequest(((b, b),))
    size = math.sqrt(square)
    if size == 0.0:
        return SystemResult([torch.zeros_like(part) for part in b], 0.0, 0)
    remainder: Vec = []
    if state.phase == "start":
        x = [torch.zeros_like(part) for part in b] if start is None else start
        remainder = copy(b) if start is None else combined([b, (yield ProductRequest(x))], [1.0, -1.0])
        (square,) = yield DotsRequest(((remainder, remainder),))
        state.vectors, state.residual, state.products = [x], math.sqrt(square) / size, int(start is not None)
    while state.residual > system.tol and state.products + 2 <= system.limit:
        if state.phase == "start":
            # Of norm 1, so that float32 does not underflow.
            scale_(remainder, 1.0 / (state.residual * size))
            state.phase = "steps"
        if state.phase == "steps":
            # Aimed a little lower, so that rounding needs no further round.
            target_norm, limit = 0.9 * system.tol / state.residual, system.limit - state.products - 1
            correction, state.steps = yield from METHODS[system.method](system, remainder, target_norm, limit, state)
            trial = add_(scale_(correction, state.residual * size), state.vectors[0])
            state.phase, state.vectors, state.step_vectors = "check", [state.vectors[0], trial], []
        trial, old_residual = state.vectors[1], state.residual
        remainder = combined([b, (yield ProductRequest(trial, old_residual))], [1.0, -1.0])
        (square,) = yield DotsRequest(((remainder, remainder),))
        new_residual = math.sqrt(square) / size
        state.products, state.rounds = state.products + state.steps + 1, state.rounds + 1
        if new_residual > old_residual and (state.rounds > 1 or system.method == "minres"):
            break  # rounding alone; but conjugate gradients lower another norm, and may raise this one on their way
        state.phase, state.vectors, state.residual = "start", [trial], new_residual
        if new_residual > old_residual / 2.0:
            break
    return SystemResult(state.vectors[0], state.residual, state.products)


def scales_of(A: LinearMap, preconditioner: VecLike, damping: float) -> Vec:
    """1 / (diagonal + damping), which must be above 0 everywhere, on all processes."""
    diagonal = [part + damping for part in fitting(A.space, preconditioner, "preconditioner")]
    bad_counts = [(~((part > 0.0) & part.isfinite())).sum().item() for part in diagonal]
    local_bad = sum(count for count, counts in zip(bad_counts, A.space.counted, strict=True) if counts)
    bad_entries = int(A.space.sum_over(torch.tensor([local_bad], **HOST)))
    if bad_entries:
        raise ValueError(
            f"{bad_entries} of {A.space.size} entries of preconditioner + damping are not above 0 and finite "
            f"(damping: {damping:g}). Take their absolute values, raise them to a floor, or use a larger damping."
        )
    return [part.reciprocal() for part in diagonal]


def fitting(space: Space, vector: VecLike, name: str) -> Vec:
    """A vector of the space with the entries that were given, in memory of its own.

    Raises:
        KeyError, ValueError: it does not fit; `name` names it.
    """
    if isinstance(vector, Tensor) and vector.dim() != 1:
        raise ValueError(f"{name} has shape {list(vector.shape)}. Give one vector, of shape [n].")
    vec = taken(space, vector)[0][0] if isinstance(vector, (Tensor, Mapping)) else vector
    targets = space.zeros()
    shapes, expected = [tuple(part.shape) for part in vec], [tuple(part.shape) for part in targets]
    if shapes != expected:
        raise ValueError(
            f"{name} has shards of shapes {shapes}, the space {expected}. Make it with space.vec(by_name)."
        )
    return [part.detach().to(target, copy=True) for part, target in zip(vec, targets, strict=True)]
