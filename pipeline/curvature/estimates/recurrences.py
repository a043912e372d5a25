"""Recurrences that solve a symmetric linear system by products: CG and MINRES.

    recurrence --ProductRequest(v)----> M v, M = A + damping I, from who has the matrix
               --DotsRequest(u.w, ...)> numbers, from who can sum over the processes: the same on all of them

A recurrence is a generator for one right-hand side: it reads as in its paper. Who drives several of them answers their
products in one call and their inner products in one all-reduce (systems.py). Whenever it waits for a product, its
SystemState is all that it needs to go on from there.

Conjugate gradients: Hestenes and Stiefel 1952; for positive definite M, 5 vectors.
MINRES: Paige and Saunders, "Solution of sparse indefinite systems of linear equations", 1975; for any M, 8 vectors.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from pipeline.curvature.space import Vec, add_, copy, scale_

if TYPE_CHECKING:
    from pipeline.curvature.estimates.solve import Inverse

T = TypeVar("T")


class IndefiniteError(ValueError):
    """Conjugate gradients met a direction in which the matrix does not curve upwards."""


@dataclass(frozen=True)
class ProductRequest:
    """Asks for M times a vector, a new one; says how large the residual is by now."""

    vec: Vec
    residual: float = math.nan


@dataclass(frozen=True)
class DotsRequest:
    """Asks for inner products, as a list of floats."""

    pairs: tuple[tuple[Vec, Vec], ...]


@dataclass
class SystemState:
    """The state of a system that asks for a product.

    Attributes:
        phase: "start", in the "steps" of a recurrence, or at the "check" of what that gave.
        vectors: x; at the check what may take its place, too.
        residual: of x, relative to b.
        products, rounds: those that led to x.
        steps: of the recurrence, at the check.
        norm: of M with the preconditioner, as far as it is known, a lower bound. MINRES asks for it: a residual that M
            makes nothing of shows only beside what M makes of others.
        step_vectors, step_numbers: those of the recurrence; empty: at its beginning.
    """

    phase: str = "start"
    vectors: list[Vec] = field(default_factory=list)
    residual: float = 1.0
    products: int = 0
    rounds: int = 0
    steps: int = 0
    norm: float = 0.0
    step_vectors: list[Vec] = field(default_factory=list)
    step_numbers: list[Any] = field(default_factory=list)


Steps: TypeAlias = Generator[ProductRequest | DotsRequest, Any, T]


def conjugate_gradients(
    system: Inverse, residual: Vec, target_norm: float, limit: int, state: SystemState
) -> Steps[tuple[Vec, int]]:
    """Solves M x = residual.

    Args:
        residual: is used up; not read where `state` has steps.
        target_norm: the norm of the residual to end at.
        limit: on steps, each one product.
        state: its steps say where to go on; kept up to date.

    Returns:
        x, and the number of steps.

    Raises:
        IndefiniteError: M is not positive definite.
    """
    if state.step_vectors:
        x, residual, along = state.step_vectors
        energy, square, step = state.step_numbers
    else:
        x = [torch.zeros_like(part) for part in residual]
        scaled = system.scaled(residual)
        along = copy(scaled)
        energy, square = yield DotsRequest(((residual, scaled), (residual, residual)))
        step = 0
    while step < limit and math.sqrt(square) > target_norm:
        state.step_vectors, state.step_numbers = [x, residual, along], [energy, square, step]
        step += 1
        image = yield ProductRequest(along, math.sqrt(square))
        curvature, length, reach = yield DotsRequest(((along, image), (along, along), (image, image)))
        # Below this not even the sign of p.Mp is known; for positive definite M p.Mp is never near it.
        if curvature <= system.eps * math.sqrt(length * reach):
            raise IndefiniteError(_indefinite(system, curvature / max(length, torch.finfo(torch.float64).tiny), step))
        add_(x, along, energy / curvature)
        add_(residual, image, -energy / curvature)
        scaled = system.scaled(residual)
        old_energy = energy
        energy, square = yield DotsRequest(((residual, scaled), (residual, residual)))
        add_(scale_(along, energy / old_energy), scaled)
    return x, step


def minimal_residual(
    system: Inverse, residual: Vec, target_norm: float, limit: int, state: SystemState
) -> Steps[tuple[Vec, int]]:
    """Solves M x = residual for any symmetric M; where there is no solution, it heads for the smallest residual.

    Takes and returns what `conjugate_gradients` does; the names of numbers are those of the paper's section 6.
    """
    if state.step_vectors:
        x, older, old, last, unit_vec, along, rest = state.step_vectors
        beta, phi_bar, residual_norm, cos, sin, delta_bar, epsilon, step = state.step_numbers
    else:
        x, older, old, last = ([torch.zeros_like(part) for part in residual] for _ in range(4))
        fresh = residual  # the next Lanczos vector; divided by its norm it is `unit_vec`, and preconditioned `along`
        scaled = system.scaled(fresh)
        energy, square = yield DotsRequest(((fresh, scaled), (fresh, fresh)))
        beta = phi_bar = math.sqrt(energy)
        unit_vec, along = _unit(fresh, scaled, beta)
        rest, residual_norm = copy(unit_vec), math.sqrt(square)  # residual = phi_bar * rest
        cos, sin, delta_bar, epsilon = -1.0, 0.0, 0.0, 0.0
        step = 0
    while step < limit and residual_norm > target_norm:
        state.step_vectors = [x, older, old, last, unit_vec, along, rest]
        state.step_numbers = [beta, phi_bar, residual_norm, cos, sin, delta_bar, epsilon, step]
        step += 1
        fresh = yield ProductRequest(along, residual_norm)
        (alpha,) = yield DotsRequest(((along, fresh),))
        add_(add_(fresh, unit_vec, -alpha), older, -beta)  # `older` begins at zero
        scaled = system.scaled(fresh)
        energy, across, square, rests = yield DotsRequest(
            ((fresh, scaled), (rest, fresh), (fresh, fresh), (rest, rest))
        )
        beta, epsilon_old = math.sqrt(max(energy, 0.0)), epsilon
        delta, gamma_bar = cos * delta_bar + sin * alpha, sin * delta_bar - cos * alpha
        epsilon, delta_bar = sin * beta, -cos * beta
        state.norm = max(state.norm, abs(alpha), beta)
        gamma = math.hypot(gamma_bar, beta)
        if math.hypot(gamma_bar, delta_bar) <= 30.0 * system.eps ** (2.0 / 3.0) * state.norm:
            break  # |M residual| / |residual| is nothing: M is singular, and what is left is out of its reach
        cos, sin = gamma_bar / gamma, beta / gamma
        # The new direction, in the memory of the oldest: (along - epsilon_old * old - delta * last) / gamma.
        old, last = last, scale_(add_(add_(scale_(old, -epsilon_old), last, -delta), along), 1.0 / gamma)
        add_(x, last, cos * phi_bar)
        phi_bar *= sin
        if beta <= system.eps * state.norm:  # the space is complete
            break
        older, (unit_vec, along) = unit_vec, _unit(fresh, scaled, beta)
        residual_norm = phi_bar * math.sqrt(
            max(sin * sin * rests - 2.0 * sin * cos * across / beta + cos * cos * square / beta**2, 0.0)
        )
        add_(scale_(rest, sin), unit_vec, -cos)
    return x, step


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
