"""The numbers and units that composite results (one entry a layer, one a step) take from those they gather.

    Eigenpairs    values, residuals * scale --rows--> [entries, k], nan where an entry has fewer
    Trace         value, stderr
    LayerTraces   values, stderr, by the layers' names
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.curvature.estimates.eigenpairs import Eigenpairs
from pipeline.curvature.space import HOST


class Pairs(NamedTuple):
    """The eigenvalues alone, as a saved run of a layer keeps them."""

    values: Tensor
    residuals: Tensor
    scale: float


def error_bounds(eigenvalues: Eigenpairs | Pairs) -> Tensor:
    """[k], in units of eigenvalue: some eigenvalue of the matrix is no further from each value."""
    return eigenvalues.residuals.double() * eigenvalues.scale


def rows(of: Sequence[Tensor]) -> Tensor:
    """[entries, k], float64, of one tensor for each entry; nan at the end of the shorter ones."""
    table = torch.full((len(of), max(map(len, of), default=0)), math.nan, **HOST)
    for row, entries in zip(table, of, strict=True):
        row[: len(entries)] = entries
    return table
