"""Layer-wise curvature: the eigenvalues, the trace and the density of each layer's own block of the matrix.

    matrix, cut by layers      block of "0" --Lanczos--> its top eigenvalues     one row of the table,
    [ "0"  .  ]                             --Hutchinson--> its trace            one group of bars
    [  .  "2" ]                block of "2" --> ...

    layer -> Density           print: a row each      plot: a strip each, the number of eigenvalues as its colour

One block after another: products begin at its layer, stages before only run forward.

    resume: run.pt holds the layers that are done; run.layer.pt is the state of the one under way

The blocks leave out how layers act together: the whole matrix's top eigenvalue may lie far above that of each block.
Layer-wise traces and eigenvalues as a measure of sensitivity: Dong et al. 2020, HAWQ-V2 (arXiv 1911.03852).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import starmap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.common.arguments import check_count
from pipeline.curvature.estimates.density import Density
from pipeline.curvature.estimates.layer_traces import parameter_names_by_layer
from pipeline.curvature.estimates.resume import Resumable, checked_path
from pipeline.curvature.results.plots import or_zero, symlog
from pipeline.curvature.results.result import Result
from pipeline.curvature.results.tables import column, curves, rows, table
from pipeline.curvature.space import HOST

if TYPE_CHECKING:
    from pipeline.curvature.operators import Operator


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
            ax.barh(heights, or_zero(values).tolist(), height=bar_height, xerr=errors.tolist(), label=label)
        drawn = [self.values]
        if self.traces is not None and self.trace_errors is not None:
            errors = or_zero(self.trace_errors).tolist()
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
            below, _ = density.count(-math.inf, -1e-6 * (max(-low, high) or 1.0))
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
    sums = torch.histogram(density.nodes.flatten(), edges, weight=density.weights.flatten()).hist
    return sums * (density.size / len(density.nodes))


def per_layer(
    A: Operator,
    k: int = 1,
    *,
    samples: int | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    which: str = "LM",
    tol: float = 1e-4,
    seed: int = 0,
    show: bool | None = None,
    resume: str | os.PathLike[str] | None = None,
    save_every: float = 300.0,
) -> LayerSpectra:
    """The top eigenvalues of each layer's own block of the matrix, and the traces of the blocks.

    A block's products begin at its layer: stages before it only run forward.

    Args:
        k: how many eigenvalues; fewer of a layer that has fewer entries.
        samples: products for the traces, of all layers together; None: no traces.
        groups: layer -> names of its parameters, of all ranks, the same on each. None: one for each module.
        which, tol, seed: see `top_eigenpairs`.
        show: a progress bar, on one process. None: where it goes to a terminal.
        resume, save_every: a file from which an interrupted run goes on, and seconds; see `top_eigenpairs`.
    """
    k = check_count("k", k)
    layers = parameter_names_by_layer(A.space, groups)

    def pairs(block: Operator, options: dict[str, Any]) -> dict[str, Any]:
        eigenpairs = block.top_eigenpairs(min(k, block.space.size), which=which, tol=tol, seed=seed, **options)
        return {"size": block.space.size, "values": eigenpairs.values, "errors": eigenpairs.error_bounds}

    options = {"show": show, "resume": resume, "save_every": save_every}
    settings = {"file": "eigenvalues by layers 2", "k": k, "which": which, "tol": tol, "seed": seed}
    with _computed_by_layer(A, "layers", layers, pairs, settings, options) as by_layer:
        traces = None
        if samples is not None:
            traces = A.layer_traces(layers, samples, seed=seed, **_beside(options, "traces"))
    return LayerSpectra(
        names=list(by_layer),
        sizes=[entry["size"] for entry in by_layer.values()],
        values=rows([entry["values"] for entry in by_layer.values()]),
        value_errors=rows([entry["errors"] for entry in by_layer.values()]),
        matrix=A.name,
        traces=None if traces is None else torch.tensor([traces.values[name] for name in by_layer], **HOST),
        trace_errors=None if traces is None else torch.tensor([traces.stderr[name] for name in by_layer], **HOST),
    )


def layer_densities(
    A: Operator,
    *,
    steps: int = 40,
    runs: int = 4,
    groups: Mapping[str, Sequence[str]] | None = None,
    seed: int = 0,
    show: bool | None = None,
    resume: str | os.PathLike[str] | None = None,
    save_every: float = 300.0,
) -> LayerDensities:
    """The spectral density of each layer's own block of the matrix.

    Costs up to steps * runs products for each layer; fewer of one that has fewer entries than steps.

    Args:
        steps, runs, seed: see `density`.
        groups: layer -> names of its parameters, of all ranks, the same on each. None: one for each module.
        show: a progress bar, on one process. None: where it goes to a terminal.
        resume, save_every: a file from which an interrupted run goes on, and seconds; see `top_eigenpairs`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        >>> H = Hessian(model, (torch.ones(4, 2).double(), torch.ones(4, 1).double()), nn.functional.mse_loss)
        >>> found = H.layer_densities(steps=24, runs=2)
        >>> found.names, found["2"].size
        (['0', '2'], 9)
    """

    def density(block: Operator, options: dict[str, Any]) -> dict[str, Any]:
        spectrum = block.density(steps=steps, runs=runs, seed=seed, **options)
        return dict(vars(spectrum))

    options = {"show": show, "resume": resume, "save_every": save_every}
    settings = {"file": "densities by layers 1", "steps": steps, "runs": runs, "seed": seed}
    layers = parameter_names_by_layer(A.space, groups)
    with _computed_by_layer(A, "densities of layers", layers, density, settings, options) as parts:
        return LayerDensities(A.name, parts)


@contextmanager
def _computed_by_layer(
    A: Operator,
    label: str,
    layers: Mapping[str, list[str]],
    compute: Callable[[Operator, dict[str, Any]], dict[str, Any]],
    settings: Mapping[str, Any],
    options: dict[str, Any],
) -> Iterator[dict[str, dict[str, Any]]]:
    """By layer what is computed of its block. What is done is saved after each layer, and the file removed at the end.
    """
    settings = {**settings, "block": A.block, "layers": layers}
    at_once = {**options, "save_every": 0.0}
    of_layer = {**_beside(options, "layer"), "show": False}
    with Resumable(A, f"{label} of the {A.name}", len(layers), settings, **at_once) as run:
        done: dict[str, dict[str, Any]] = dict(run.saved_state or {})
        for layer, names in layers.items():
            if layer not in done:
                done[layer] = compute(A.restricted(names), of_layer)
                run.record(len(done), done, layer)
        yield done


def _beside(options: dict[str, Any], label: str) -> dict[str, Any]:
    """The same with a file beside the other: `run.layer.pt` beside `run.pt`."""
    if options["resume"] is None:
        return options
    path = checked_path(options["resume"])
    return {**options, "resume": path.with_name(f"{path.stem}.{label}{path.suffix}")}
