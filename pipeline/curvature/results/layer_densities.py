"""The spectral densities of the layers' own blocks of a matrix.

    layer -> Density      print: a row each      plot: a strip each, the number of eigenvalues as its colour
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.curvature.estimates.density import Density
from pipeline.curvature.results.plots import symlog
from pipeline.curvature.results.result import Result
from pipeline.curvature.results.tables import table
from pipeline.curvature.space import HOST

_COLUMNS = 200


@dataclass(frozen=True, eq=False)
class LayerDensities(Result):
    """The spectral density of each layer's block: `found["0"]` is that of layer "0".

    Args:
        matrix: the name of the matrix.
        parts: layer -> the fields of its `Density`.
    """

    matrix: str
    parts: dict[str, dict[str, Any]]

    @property
    def names(self) -> list[str]:
        """Of the layers, in order."""
        return list(self.parts)

    def __getitem__(self, name: str) -> Density:
        """The density of a layer's block.

        Raises:
            KeyError: there is no such layer.
        """
        return Density(**self.parts[name])

    def lines(self) -> Iterator[str]:
        yield f"spectral densities of layers of {self.matrix}"
        cells = [["layer", "rows", "smallest", "median", "largest", "below 0", "trace"]]
        for name in self.names:
            density = self[name]
            low, high = float(density.nodes.min()), float(density.nodes.max())
            below, _ = density.count(-math.inf, -1e-6 * max(-low, high))
            numbers = low, density.integrated().quantile(0.5)[0], high
            cells.append([name, f"{density.size:,}", *(f"{number:.4g}" for number in numbers),
                          f"{100 * below / density.size:.3g} %", f"{density.trace()[0]:.4g}"])  # fmt: skip
        yield from table(cells)

    def draw(self, ax: Any) -> None:
        """A strip for each layer: about how many of its eigenvalues are in each piece of a logarithmic axis."""
        nodes = torch.cat([self[name].nodes.flatten() for name in self.names])
        edges = _edges(nodes)
        counts = torch.stack([_histogram(self[name], edges) for name in self.names])
        shown = counts.log10().clamp(min=-1.0)  # a tenth of an eigenvalue and less is none
        rows = [row - 0.5 for row in range(len(counts) + 1)]
        image = ax.pcolormesh(edges.numpy(), rows, shown.numpy(), cmap="magma_r")
        ax.figure.colorbar(image, ax=ax, label="log10 of the number of eigenvalues")
        symlog(ax, "x", nodes)
        ax.set_yticks(range(len(self.names)), self.names)
        ax.invert_yaxis()  # the first layer on top
        ax.set_xlabel(f"eigenvalue of each layer's block of {self.matrix}")

    def inches(self) -> tuple[float, float]:
        """As high as the layers need; a page of a PDF holds 200 inches."""
        return 6.4, min(200.0, max(4.8, 1.0 + 0.25 * len(self.parts)))


def _edges(nodes: Tensor) -> Tensor:
    """The ends of pieces that are equally long on an axis that is linear up to a thousandth of the largest."""
    unit = 1e-3 * float(nodes.abs().max()) or 1.0
    ends = torch.asinh(torch.stack([nodes.min(), nodes.max()]) / unit)
    return unit * torch.sinh(torch.linspace(float(ends[0]) - 0.1, float(ends[1]) + 0.1, _COLUMNS + 1, **HOST))


def _histogram(density: Density, edges: Tensor) -> Tensor:
    """About how many eigenvalues are in each piece: the mean over the runs."""
    places = torch.searchsorted(edges, density.nodes.flatten()).clamp(1, len(edges) - 1) - 1
    sums = torch.zeros(len(edges) - 1, **HOST).index_add(0, places, density.weights.flatten())
    return sums * (density.size / len(density.nodes))
