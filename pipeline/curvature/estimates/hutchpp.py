"""Hutch++: the trace from a sketch of the few directions that hold most of it, and from random vectors for the rest.

    A times random vectors --orthonormal--> Q                         a third of the products
    tr(Q' A Q)                              exact                     a third
    z . A z,  z = (1 - Q Q') random         Hutchinson on the rest    a third, and the only error

Hutch++ of Meyer, Musco, Musco, Woodruff 2021 (arXiv 2010.09649), algorithm 1. The sketch is of normal vectors, which no
matrix of more than its columns can hide from; products that a sketch of lower rank does not need go to the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from pipeline.curvature.estimates.arguments import SampleSize
from pipeline.curvature.estimates.krylov import append_orthonormal, subtract_
from pipeline.curvature.estimates.resume import Resumable, from_host, on_host
from pipeline.curvature.estimates.sampling import SampleStatistics, draw, paired_dots, sampled_products
from pipeline.curvature.linear import LinearMap, finite, products_of
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
    columns = samples // 3 if sketch is None else sketch
    if not 1 <= columns <= (samples - 2) // 2:
        raise ValueError(
            f"sketch is {sketch} of {samples} samples: it costs two products a column and leaves at least two for the "
            f"rest; use 1 to {(samples - 2) // 2}, or more samples"
        )
    trace_sketch = _TraceSketch(A, run)
    trace_sketch.draw(replace(sampling, samples=columns, kind="normal"))
    basis, exact_part = trace_sketch.basis, trace_sketch.catch()

    def deflated(vectors: list[Vec]) -> list[Vec]:
        along = A.space.dots(basis, vectors)
        return [subtract_(vec, basis, along[:, column]) for column, vec in enumerate(vectors)]

    def rest(vectors: list[Vec], products: list[Vec]) -> Tensor:
        return exact_part + paired_dots(A.space, vectors, products)

    spent = columns + len(basis)

    def on_progress(draws: int, values: Callable[[], Tensor], note: str) -> None:
        trace_sketch.note(spent + draws, note, values())

    rest_sampling = replace(sampling, samples=samples - spent)
    drawn = draw(rest_sampling, rest, on_progress, trace_sketch.values, first=columns, prepare=deflated)
    return drawn._replace(spent=spent + drawn.spent)


class _TraceSketch:
    """The basis, its part of the trace, and the values of the rest, as far as they are computed.

    Args:
        A: the matrix.
        run: the run, of which this goes on from what was kept.
    """

    def __init__(self, A: LinearMap, run: Resumable) -> None:
        self.A, self._run = A, run
        saved = run.saved_state or {"basis": [], "drawn": 0, "parts": [], "values": None}
        self.basis = from_host(A.space, saved["basis"])
        self._drawn: int = saved["drawn"]
        self._parts: list[float] = list(saved["parts"])  # of the trace on the basis, for each vector
        self.values: list[Tensor] = [] if saved["values"] is None else [saved["values"]]

    def draw(self, sampling: SampleSize) -> None:
        """Make the basis: orthonormal vectors that span A times random ones."""
        for _, products in sampled_products(sampling, self._drawn):
            for product in products:
                append_orthonormal(self.A.space, self.basis, product)
            self._drawn += len(products)
            self.note(self._drawn, "sketch")

    def catch(self) -> float:
        """The trace of A on the span of the basis."""
        for vectors, products in products_of(self.A, self.basis[len(self._parts) :]):
            self._parts += finite(paired_dots(self.A.space, vectors, products), self.A.name)[:, 0].tolist()
            self.note(self._drawn + len(self._parts), "exact part")
        return sum(self._parts)

    def note(self, products: int, label: str, values: Tensor | None = None) -> None:
        """Tell the run how far this is. The basis only grows, and its vectors stay as they are."""
        basis, state = list(self.basis), {"drawn": self._drawn, "parts": list(self._parts), "values": values}
        self._run.record(products, lambda: {"basis": on_host(basis), **state}, label)
