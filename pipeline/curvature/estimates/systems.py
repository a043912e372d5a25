"""Linear systems with one matrix, solved together in few calls, to a true residual.

    b, b, ... --a recurrence for each, in lockstep--> one call of products, one or two all-reduces a step --> x, x, ...
              <--again, from what is left of b--------- b - (A + damping I) x, by a product

    recurrence --yields v------------> M v, M = A + damping I, from who has the matrix
               --yields (u, w), ...--> u.w, ..., from who can sum over the processes: the same on all of them

A recurrence is a generator for one right-hand side: it reads as in its paper. Whenever it waits for a product, its
SystemState is all that it needs to go on: a single system that is interrupted goes on from there (resume.py).

Conjugate gradients: Hestenes and Stiefel 1952; for positive definite M, 5 vectors.
MINRES: Paige and Saunders, "Solution of sparse indefinite systems of linear equations", 1975; for any M, 8 vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from pipeline.common.arguments import shown
from pipeline.curvature.estimates.resume import Resumable, from_host
from pipeline.curvature.linear import LinearMap, blocks, if_finite, taken
from pipeline.curvature.space import HOST, Space, Vec, add_, copy, scale_

if TYPE_CHECKING:
    from pipeline.curvature.estimates.solve import Inverse

T = TypeVar("T")


class IndefiniteError(ValueError):
    """Conjugate gradients met a direction in which the matrix does not curve upwards."""


@dataclass
class SystemState:
    """The state of a system that asks for a product.

    Attributes:
        vectors: x; at the check of what a recurrence gave that, too. Empty: the residual of the guess is not known yet.
        residual: of x, relative to b.
        products, rounds: those that led to x.
        spent: products in all, from the system's beginning.
        steps: of the recurrence.
        left: the norm of what they leave of the residual, by the recurrence.
        norm: of M with the preconditioner, as far as it is known, a lower bound. MINRES asks for it: a residual that M
            makes nothing of shows only beside what M makes of others.
        step_vectors, step_numbers: those of the recurrence; empty: at its beginning.
    """

    vectors: list[Vec] = field(default_factory=list)
    residual: float = 1.0
    products: int = 0
    rounds: int = 0
    spent: int = 0
    steps: int = 0
    left: float = 1.0
    norm: float = 0.0
    step_vectors: list[Vec] = field(default_factory=list)
    step_numbers: list[Any] = field(default_factory=list)


SystemRequest: TypeAlias = Vec | tuple[tuple[Vec, Vec], ...]  # M times a vector, a new one; inner products, as floats
Steps: TypeAlias = Generator[SystemRequest, Any, T]


def conjugate_gradients(
    system: Inverse, residual: Vec, target_norm: float, limit: int, state: SystemState
) -> Steps[Vec]:
    """Solves M x = residual.

    Args:
        residual: is used up; not read where `state` has steps.
        target_norm: the norm of the residual to end at.
        limit: on steps, each one product.
        state: its steps say where to go on; kept up to date.

    Raises:
        IndefiniteError: M is not positive definite.
    """
    if state.step_vectors:
        x, residual, along = state.step_vectors
        (energy,) = state.step_numbers
    else:
        x = [torch.zeros_like(part) for part in residual]
        scaled = system.scaled(residual)
        along = copy(scaled)
        energy, square = yield (residual, scaled), (residual, residual)
        state.left = math.sqrt(square)
    while state.steps < limit and state.left > target_norm:
        state.step_vectors, state.step_numbers = [x, residual, along], [energy]
        image = yield along
        state.steps += 1
        curvature, length, reach = yield (along, image), (along, along), (image, image)
        # Below this not even the sign of p.Mp is known; for positive definite M p.Mp is never near it.
        if curvature <= system.eps * math.sqrt(length * reach):
            curvature /= max(length, torch.finfo(torch.float64).tiny)
            raise IndefiniteError(_indefinite(system, curvature, state.steps))
        add_(x, along, energy / curvature)
        add_(residual, image, -energy / curvature)
        scaled = system.scaled(residual)
        old_energy = energy
        energy, square = yield (residual, scaled), (residual, residual)
        state.left = math.sqrt(square)
        add_(scale_(along, energy / old_energy), scaled)
    return x


def minimal_residual(
    system: Inverse, residual: Vec, target_norm: float, limit: int, state: SystemState
) -> Steps[Vec]:
    """Solves M x = residual for any symmetric M; where there is no solution, it heads for the smallest residual.

    Takes and returns what `conjugate_gradients` does; the names of numbers are those of the paper's section 6.
    """
    if state.step_vectors:
        x, older, old, last, unit_vec, along, rest = state.step_vectors
        beta, phi_bar, cos, sin, delta_bar, epsilon = state.step_numbers
    else:
        x, older, old, last = ([torch.zeros_like(part) for part in residual] for _ in range(4))
        fresh = residual  # the next Lanczos vector; divided by its norm it is `unit_vec`, and preconditioned `along`
        scaled = system.scaled(fresh)
        energy, square = yield (fresh, scaled), (fresh, fresh)
        beta = phi_bar = math.sqrt(energy)
        unit_vec, along = _unit(fresh, scaled, beta)
        rest, state.left = copy(unit_vec), math.sqrt(square)  # residual = phi_bar * rest
        cos, sin, delta_bar, epsilon = -1.0, 0.0, 0.0, 0.0
    while state.steps < limit and state.left > target_norm:
        state.step_vectors = [x, older, old, last, unit_vec, along, rest]
        state.step_numbers = [beta, phi_bar, cos, sin, delta_bar, epsilon]
        fresh = yield along
        state.steps += 1
        (alpha,) = yield ((along, fresh),)
        add_(add_(fresh, unit_vec, -alpha), older, -beta)  # `older` begins at zero
        scaled = system.scaled(fresh)
        energy, across, square, rests = yield (fresh, scaled), (rest, fresh), (fresh, fresh), (rest, rest)
        beta, epsilon_old = math.sqrt(max(energy, 0.0)), epsilon
        delta, gamma_bar = cos * delta_bar + sin * alpha, sin * delta_bar - cos * alpha
        epsilon, delta_bar = sin * beta, -cos * beta
        state.norm = max(state.norm, abs(alpha), beta)
        gamma = math.hypot(gamma_bar, beta)
        if math.hypot(gamma_bar, delta_bar) <= 2.0 * system.eps ** 0.5 * state.norm:
            break  # |M residual| / |residual| is nothing: M is singular, and what is left is out of its reach
        cos, sin = gamma_bar / gamma, beta / gamma
        # The new direction, in the memory of the oldest: (along - epsilon_old * old - delta * last) / gamma.
        old, last = last, scale_(add_(add_(scale_(old, -epsilon_old), last, -delta), along), 1.0 / gamma)
        add_(x, last, cos * phi_bar)
        phi_bar *= sin
        if beta <= system.eps * state.norm:  # the space is complete
            break
        older, (unit_vec, along) = unit_vec, _unit(fresh, scaled, beta)
        state.left = phi_bar * math.sqrt(
            max(sin * sin * rests - 2.0 * sin * cos * across / beta + cos * cos * square / beta**2, 0.0)
        )
        add_(scale_(rest, sin), unit_vec, -cos)
    return x


def _unit(fresh: Vec, scaled: Vec, norm: float) -> tuple[Vec, Vec]:
    along = scaled if scaled is fresh else scale_(scaled, 1.0 / norm)
    return scale_(fresh, 1.0 / norm), along


def _indefinite(system: Inverse, curvature: float, step: int) -> str:
    return (
        f"{system.map.name} + damping * I is not positive definite: conjugate gradients met curvature {curvature:.3g} "
        f"(p.Mp / p.p) at step {step}, with damping {system.damping:g}. Use a damping above "
        f"{system.damping - curvature:.3g}, maybe well above, since the smallest eigenvalue may be lower still; "
        "or a matrix that is never negative, such as GaussNewton; or method='minres', which solves indefinite systems."
    )


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
        MismatchError: processes solve different systems.
    """
    A, saved = system.map, (run and run.saved_state) or {}
    A.space.check_same(system.settings)
    vectors = {name: from_host(A.space, saved[name]) for name in saved if name.endswith("vectors")}
    state, results = SystemState(**{**saved, **vectors}), list[SystemResult]()

    def products(vecs: list[Vec]) -> list[Vec]:
        if run is not None:
            run.record(state.spent, dict(vars(state)), f"residual {state.residual * state.left:.1e}")
        state.spent += len(vecs)
        return A.products(vecs)

    for block in blocks(bs, A.block):
        runs = [_solve_one(system, b, start, SystemState() if run is None else state) for b in block]
        results += _run_in_lockstep(A, system.damping, runs, products)
    if run is not None and state.spent:
        run.advance(1)  # the last one
    return results


def _run_in_lockstep(
    A: LinearMap,
    damping: float,
    runs: Sequence[Steps[SystemResult]],
    products: Callable[[list[Vec]], list[Vec]],
) -> list[SystemResult]:
    """Answers inner products, all by one all-reduce, until all wait for products; then these, by one call."""
    results: dict[int, SystemResult] = {}
    requests: dict[int, SystemRequest] = {}

    def answer(index: int, value: Any) -> None:
        try:
            requests[index] = runs[index].send(value)
        except StopIteration as stop:
            results[index] = stop.value
            requests.pop(index, None)

    for index in range(len(runs)):
        answer(index, None)
    while requests:
        pairs = {index: request for index, request in requests.items() if isinstance(request, tuple)}
        if pairs:
            dots = A.space.paired_dots([pair for request in pairs.values() for pair in request])
            numbers = iter(if_finite(dots, f"{A.name}, or b itself,").tolist())
            for index, request in pairs.items():
                answer(index, [next(numbers) for _ in request])
        else:
            vecs = {index: request for index, request in requests.items() if isinstance(request, list)}  # all
            for (index, vec), image in zip(vecs.items(), products(list(vecs.values())), strict=True):
                answer(index, add_(image, vec, damping))
    return [results[index] for index in range(len(runs))]


def _solve_one(system: Inverse, b: Vec, start: Vec | None, state: SystemState) -> Steps[SystemResult]:
    """Runs the recurrence on what is left of b, until the true residual is small enough or falls no more.

    Args:
        system: what is solved, and how.
        b, start: the right-hand side, and a guess of x.
        state: where to go on; kept up to date.
    """
    (square,) = yield ((b, b),)
    size = math.sqrt(square)
    if size == 0.0:
        return SystemResult([torch.zeros_like(part) for part in b], 0.0, 0)
    remainder: Vec = []
    if not state.vectors:
        x = [torch.zeros_like(part) for part in b] if start is None else start
        remainder = copy(b) if start is None else add_(scale_((yield x), -1.0), b)
        (square,) = yield ((remainder, remainder),)
        state.vectors, state.residual, state.products = [x], math.sqrt(square) / size, int(start is not None)
    while state.residual > system.tol and state.products + 2 <= system.limit:
        if len(state.vectors) == 1:
            if not state.step_vectors:
                # Of norm 1, so that float32 does not underflow.
                scale_(remainder, 1.0 / (state.residual * size))
                state.steps = 0
            # Aimed a little lower, so that rounding needs no further round.
            target_norm, limit = 0.9 * system.tol / state.residual, system.limit - state.products - 1
            correction = yield from METHODS[system.method](system, remainder, target_norm, limit, state)
            trial = add_(scale_(correction, state.residual * size), state.vectors[0])
            state.vectors, state.step_vectors = [state.vectors[0], trial], []
        trial, old_residual = state.vectors[1], state.residual
        remainder = add_(scale_((yield trial), -1.0), b)
        (square,) = yield ((remainder, remainder),)
        new_residual = math.sqrt(square) / size
        state.products, state.rounds = state.products + state.steps + 1, state.rounds + 1
        if new_residual > old_residual and (state.rounds > 1 or system.method == "minres"):
            break  # rounding alone; but conjugate gradients lower another norm, and may raise this one on their way
        state.vectors, state.residual = [trial], new_residual
        if new_residual > old_residual / 2.0:
            break
    return SystemResult(state.vectors[0], state.residual, state.products)


def scales_of(A: LinearMap, preconditioner: VecLike, damping: float) -> Vec:
    """1 / (diagonal + damping), which must be above 0 everywhere, on all processes."""
    diagonal = [part + damping for part in vector_from(A.space, preconditioner, "preconditioner")]
    bad_counts = [(~((part > 0.0) & part.isfinite())).sum().item() for part in diagonal]
    local_bad = sum(count for count, counts in zip(bad_counts, A.space.counted, strict=True) if counts)
    bad_entries = int(A.space.sum_over(torch.tensor([local_bad], **HOST)))
    if bad_entries:
        raise ValueError(
            f"{bad_entries} of {A.space.size} entries of preconditioner + damping are not above 0 and finite "
            f"(damping: {damping:g}). Take their absolute values, raise them to a floor, or use a larger damping."
        )
    return [part.reciprocal() for part in diagonal]


def vector_from(space: Space, vector: VecLike, name: str) -> Vec:
    """A vector of the space with the entries that were given, in memory of its own.

    Raises:
        TypeError: it is no vector; `name` names it.
        KeyError, ValueError: it does not fit.
    """
    is_vec = isinstance(vector, Sequence) and all(isinstance(part, Tensor) for part in vector)
    if not (is_vec or isinstance(vector, Tensor | Mapping)):
        raise TypeError(f"{name} is {shown(vector)}. Give a vector: a dict of tensors by name, or one of shape [n].")
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
