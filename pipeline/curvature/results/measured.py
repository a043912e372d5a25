"""The numbers, units and columns that composite results (one entry a layer, one a step) have in common.

    Eigenpairs    values, residuals * scale --rows--> [entries, k], nan where an entry has fewer
    Trace         value, stderr
    LayerTraces   values, stderr, by the layers' names

    curves: "eigenvalue 1", values, errors; ... "trace", values, errors --column--> a column of the table
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pipeline.curvature.estimates.eigenpairs import Eigenpairs
from pipeline.curvature.results.tables import with_error

Curve: TypeAlias = tuple[str, Tensor, Tensor]  # head, [entries], their errors


def error_bounds(eigenpairs: Eigenpairs) -> Tensor:
    """[k], in units of eigenvalue: some eigenvalue of the matrix is no further from each value."""
    return eigenpairs.residuals.double() * eigenpairs.scale


def rows(tensors: Sequence[Tensor]) -> Tensor:
    """[entries, k], float64, of one tensor for each entry; nan at the end of the shorter ones."""
    return pad_sequence([entries.double() for entries in tensors], batch_first=True, padding_value=math.nan)


def curves(
    values: Tensor, value_errors: Tensor, traces: Tensor | None, trace_errors: Tensor | None
) -> Iterator[Curve]:
    """Each eigenvalue over the entries, of [entries, k]; then the trace, if it was measured."""
    for place, (eigenvalues, errors) in enumerate(zip(values.T, value_errors.T, strict=True)):
        yield f"eigenvalue {place + 1}", eigenvalues, errors
    if traces is not None and trace_errors is not None:
        yield "trace", traces, trace_errors


def column(head: str, values: Tensor, errors: Tensor | None = None) -> list[str]:
    """The head and the cells of a table's column; no errors: they are unknown.

    >>> column("trace", torch.tensor([638.3, math.nan]), torch.tensor([12.04, 0.0])), column("loss", torch.ones(1))
    (['trace', '638.3 +- 12', '-'], ['loss', '1'])
    """
    errors = torch.full_like(values, math.inf) if errors is None else errors
    return [head, *map(with_error, values.tolist(), errors.tolist())]
