"""The numbers and units that composite results (one entry a layer, one a step) take from those they gather.

    Eigenpairs    values, residuals * scale --rows--> [entries, k], nan where an entry has fewer
    Trace         value, stderr
    LayerTraces   values, stderr, by the layers' names
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pipeline.curvature.space import HOST


class Eigenvalues(Protocol):
    """Eigenvalues, [k], whose residuals, [k], are relative to a scale, as those of `Eigenpairs`."""

    @property
    def values(self) -> Tensor: ...

    @property
    def residuals(self) -> Tensor: ...

    @property
    def scale(self) -> float: ...


class Estimate(Protocol):
    """A number with its standard error, as `Trace`."""

    @property
    def value(self) -> float: ...

    @property
    def stderr(self) -> float: ...


class LayerEstimates(Protocol):
    """A number with its standard error for each layer, as `LayerTraces`."""

    @property
    def values(self) -> Mapping[str, float]: ...

    @property
    def stderr(self) -> Mapping[str, float]: ...


def error_bounds(eigenvalues: Eigenvalues) -> Tensor:
    """[k], in units of eigenvalue: some eigenvalue of the matrix is no further from each value."""
    return eigenvalues.residuals.double() * eigenvalues.scale


def rows(of: Sequence[Tensor]) -> Tensor:
    """[entries, k], float64, of one tensor for each entry; nan at the end of the shorter ones."""
    table = torch.full((len(of), max(map(len, of), default=0)), math.nan, **HOST)
    for row, entries in zip(table, of, strict=True):
        row[: len(entries)] = entries
    return table
