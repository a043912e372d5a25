"""Layer-wise curvature: the eigenvalues and the trace of each layer's own block of the matrix.

    matrix, cut by layers      block of "0" --Lanczos--> its top eigenvalues     one row of the table,
    [ "0"  .  ]                             --Hutchinson--> its trace            one group of bars
    [  .  "2" ]                block of "2" --> ...

The blocks leave out how layers act together: the whole matrix's top eigenvalue may lie far above that of each block.
Layer-wise traces and eigenvalues as a measure of sensitivity: Dong et al. 2020, HAWQ-V2 (arXiv 1911.03852).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from torch import Tensor

from pipeline.curvature.results.measured import column, curves
from pipeline.curvature.results.plots import finite, symlog
from pipeline.curvature.results.result import Result
from pipeline.curvature.results.tables import table


@dataclass(frozen=True, eq=False)
class LayerSpectra(Result):
    """The top eigenvalues, and maybe the trace, of each layer's block of a matrix.

    Args:
        names: of the layers, or of whatever blocks of parameters.
        sizes: how many rows each block has.
        values: [layers, k], each layer's eigenvalues from the top; nan where a block has fewer.
        value_errors: [layers, k], in units of eigenvalue: some eigenvalue of the block is no further from the value.
        matrix: the name of the matrix.
        traces: [layers], or None.
        trace_errors: [layers], standard errors of the traces; 0 if exact, inf if unknown. None without traces.

    Example:
        >>> import torch
        >>> print(LayerSpectra(["0", "2"], [72, 10], torch.tensor([[9.5, 2.0], [0.25, -1.0]]), torch.zeros(2, 2), "H"))
        H by layers, 82 rows in all
          layer  rows  eigenvalue 1  eigenvalue 2
          0        72      9.5 +- 0        2 +- 0
          2        10     0.25 +- 0       -1 +- 0
    """

    names: list[str]
    sizes: list[int]
    values: Tensor
    value_errors: Tensor
    matrix: str
    traces: Tensor | None = None
    trace_errors: Tensor | None = None

    def lines(self) -> Iterator[str]:
        yield f"{self.matrix} by layers, {sum(self.sizes):,} rows in all"
        columns = [["layer", *self.names], ["rows", *(f"{size:,}" for size in self.sizes)]]
        columns += starmap(column, curves(self.values, self.value_errors, self.traces, self.trace_errors))
        if self.traces is not None:
            columns.append(column("mean eigenvalue", self.traces / self.traces.new_tensor(self.sizes)))
        yield from table(list(zip(*columns, strict=True)))

    def draw(self, ax: Any) -> None:
        """Bars for each layer's eigenvalues, a diamond for its trace; logarithmic in both directions."""
        layers, k = self.values.shape
        bar_height = 0.8 / max(1, k)
        for place, (values, errors) in enumerate(zip(self.values.T, self.value_errors.T, strict=True)):
            heights = [layer + (place - (k - 1) / 2.0) * bar_height for layer in range(layers)]
            label = f"eigenvalue {place + 1}"
            ax.barh(heights, finite(values).tolist(), height=bar_height, xerr=errors.tolist(), label=label)
        drawn = [self.values]
        if self.traces is not None and self.trace_errors is not None:
            errors = finite(self.trace_errors).tolist()
            ax.errorbar(self.traces.tolist(), range(layers), xerr=errors, fmt="kD", markersize=4, label="trace")
            drawn.append(self.traces)
        symlog(ax, "x", *drawn)
        ax.axvline(0.0, color="black", linewidth=0.8)
        ax.set_yticks(range(layers), self.names)
        ax.invert_yaxis()  # the first layer on top
        ax.set_xlabel(f"of each layer's block of {self.matrix}")
        if k or self.traces is not None:
            ax.legend()

    def inches(self) -> tuple[float, float]:
        """As high as the layers need; a page of a PDF holds 200 inches."""
        bars = len(self.names) * max(1, self.values.shape[1])
        return 6.4, min(200.0, max(4.8, math.ceil(1.0 + 0.15 * bars + 0.1 * len(self.names))))
