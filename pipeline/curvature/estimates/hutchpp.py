"""Hutch++: the trace from a sketch of the few directions that hold most of it, and from random vectors for the rest.

    A times random vectors --orthonormal--> Q                         a third of the products
    tr(Q' A Q)                              exact                     a third
    z . A z,  z = (1 - Q Q') random         Hutchinson on the rest    a third, and the only error

Hutch++ of Meyer, Musco, Musco, Woodruff 2021 (arXiv 2010.09649), algorithm 1. The sketch is of normal vectors, which no
matrix of more than its columns can hide from; products that a sketch of lower rank does not need go to the rest.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from pipeline.curvature.estimates.arguments import Sampling
from pipeline.curvature.estimates.krylov import append_orthonormal, subtract_
from pipeline.curvature.estimates.sampling import Drawn, draw, paired_dots, random_products
from pipeline.curvature.linear import LinearMap, finite, products_of
from pipeline.curvature.results.progress import Progress
from pipeline.curvature.space import Vec


def hutchpp(sampling: Sampling, bar: Progress, sketch: int | None = None) -> Drawn:
    """The trace by Hutch++. Each of its values is the exact part plus what one vector says of the rest.

    Args:
        sampling: of at least 4 samples, fewer than the matrix has entries.
        sketch: how many of the sketch; as many vectors are held. None: a third of the samples.

    Raises:
        ValueError: the sketch leaves no two products for the rest.
    """
    A, samples = sampling.A, sampling.samples
    columns = samples // 3 if sketch is None else sketch
    if not 1 <= columns <= (samples - 2) // 2:
        raise ValueError(
            f"sketch is {sketch} of {samples} samples: it costs two products a column and leaves at least two for the "
            f"rest; use 1 to {(samples - 2) // 2}, or more samples"
        )
    basis = _range(replace(sampling, samples=columns, kind="normal"), bar)
    caught = _caught(A, basis, bar)

    def deflated(vectors: list[Vec]) -> list[Vec]:
        along = A.space.dots(basis, vectors)
        return [subtract_(vec, basis, along[:, one]) for one, vec in enumerate(vectors)]

    def rest(vectors: list[Vec], products: list[Vec]) -> Tensor:
        return caught + paired_dots(A.space, vectors, products)

    spent = columns + len(basis)
    drawn = draw(replace(sampling, samples=samples - spent), rest, bar, first=columns, prepare=deflated)
    return drawn._replace(spent=spent + drawn.spent)


def _range(sampling: Sampling, bar: Progress) -> list[Vec]:
    """Orthonormal vectors that span A times random ones."""
    basis: list[Vec] = []
    for _, products in random_products(sampling, range(sampling.samples)):
        for product in products:
            append_orthonormal(sampling.A.space, basis, product)
        bar.advance(len(products), note="sketch")
    return basis


def _caught(A: LinearMap, basis: list[Vec], bar: Progress) -> float:
    """The trace of A on the span of a basis."""
    total = 0.0
    for vectors, products in products_of(A, basis):
        total += float(finite(paired_dots(A.space, vectors, products), A.name).sum())
        bar.advance(len(vectors), note="exact part")
    return total
