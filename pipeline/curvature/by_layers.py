"""A matrix by its layers' own blocks: the eigenvalues, the trace and the density of each, in one run.

    A, cut by layers    block of "0" --its products--> top eigenpairs, density      one block after another: products
    [ "0"  .  ]                                                                     begin at its layer, stages before
    [  .  "2" ]         block of "2" --> ...                                        only run forward

    resume: run.pt holds the layers that are done; run.layer.pt is the state of the one under way
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.curvature.estimates.layer_traces import layers_of
from pipeline.curvature.estimates.resume import Resumable
from pipeline.curvature.results.layers import LayerDensities, LayerSpectra
from pipeline.curvature.results.tables import rows
from pipeline.curvature.space import HOST

if TYPE_CHECKING:
    from pipeline.curvature.operators import Operator


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
    layers = layers_of(A.space, groups)

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
    layers = layers_of(A.space, groups)
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
                done[layer] = compute(A.restricted(frozenset(names)), of_layer)
                run.record(len(done), done, layer)
        yield done


def _beside(options: dict[str, Any], label: str) -> dict[str, Any]:
    """The same with a file beside the other: `run.layer.pt` beside `run.pt`."""
    if options["resume"] is None:
        return options
    path = Path(options["resume"])
    return {**options, "resume": path.with_name(f"{path.stem}.{label}{path.suffix}")}
