"""Numbers with errors in a table that people read, and what composite results (one entry a layer, one a step) share.

    [["layer", "trace"], ["0.weight", "638 +- 12"]]  -->  layer         trace
                                                          0.weight  638 +- 12

    values of entries --rows--> [entries, k], nan where an entry has fewer
    curves: "eigenvalue 1", values, errors; ... "trace", values, errors --column--> a column of the table
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from scheduler.aligning import aligned


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows, set in by two spaces: the first column flush left, the others flush right, two spaces between.

    >>> print(*table([["layer", "trace"], ["0.weight", "638 +- 12"]]), sep="\\n")
      layer         trace
      0.weight  638 +- 12
    """
    return (f"  {line}" for line in aligned(rows))


def plus_minus(value: float, error: float, digits: int = 6) -> str:
    """A value with its error.

    >>> plus_minus(638.3, 1.25)
    '638.3 +- 1.2'
    """
    return f"{value:.{digits}g} +- {error:.2g}"


def with_error(value: float, error: float) -> str:
    """A value and its error; "-" for what was not measured, no error where nobody knows it.

    >>> with_error(638.3, 12.04), with_error(638.3, 0.0), with_error(638.3, math.inf), with_error(math.nan, 0.0)
    ('638.3 +- 12', '638.3 +- 0', '638.3', '-')
    """
    if math.isnan(value):
        return "-"
    return plus_minus(value, error, 5) if math.isfinite(error) else f"{value:.5g}"


Curve: TypeAlias = tuple[str, Tensor, Tensor]  # head, [entries], their errors


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
