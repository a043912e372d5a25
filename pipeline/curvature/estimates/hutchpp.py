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

from pipeline.common.arguments import check_count
from pipeline.curvature.estimates.krylov import append_orthonormal, subtract_
from pipeline.curvature.estimates.resume import Resumable, from_host
from pipeline.curvature.estimates.sampling import SampleSize, SampleStatistics, sampled_mean, sampled_products
from pipeline.curvature.linear import if_finite, products_of
from pipeline.curvature.space import Vec


def hutchpp(sampling: SampleSize, run: Resumable, sketch: int | None = None) -> SampleStatistics:
    """The trace by Hutch++. Each of its values is the exact part plus what one vector says of the rest.

    Args:
        sampling: of at least 4 samples, fewer than the matrix has entries.
        run: the state is told to it.
        sketch: how many of the sketch; as many vectors are held. None: a third of the samples.

    Raises:
        ValueError: the sketch leaves no two products for the rest.
    """
    A, samples = sampling.A, sampling.samples
    columns = samples // 3 if sketch is None else check_count("sketch", sketch, least=0)
    if not 1 <= columns <= (samples - 2) // 2:
        raise ValueError(
            f"sketch is {sketch} of {samples} samples: it costs two products a column and leaves at least two for the "
            f"rest; use 1 to {(samples - 2) // 2}, or more samples"
        )
    saved = run.saved_state or {"basis": [], "drawn": 0, "parts": [], "values": None}
    basis, drawn, parts = from_host(A.space, saved["basis"]), saved["drawn"], saved["parts"]

    def record(label: str, draws: int = 0, values: Tensor | None = None) -> None:
        state = {"basis": basis, "drawn": drawn, "parts": parts, "values": values}
        run.record(drawn + len(parts) + draws, state, label)

    # Orthonormal vectors that span A times random ones.
    for _, products in sampled_products(replace(sampling, samples=columns, kind="normal"), drawn):
        for product in products:
            append_orthonormal(A.space, basis, product)
        drawn += len(products)
        record("sketch")
    for pair in products_of(A, basis[len(parts) :]):
        parts += if_finite(A.space.paired_dots(zip(*pair, strict=True)), A.name).tolist()
        record("exact part")

    exact_part: float = sum(parts)

    def deflated(vectors: list[Vec]) -> list[Vec]:
        along = A.space.dots(basis, vectors)
        return [subtract_(vec, basis, along[:, column]) for column, vec in enumerate(vectors)]

    def rest(vectors: list[Vec], products: list[Vec]) -> Tensor:
        return exact_part + A.space.paired_dots(zip(vectors, products, strict=True))

    spent = columns + len(basis)
    found = sampled_mean(
        replace(sampling, samples=samples - spent), rest, lambda draws, values, note: record(note, draws, values),
        saved["values"], first=columns, prepare=deflated
    )
    return found._replace(spent=spent + found.spent)
