"""Numbers with errors in a table that people read.

    [["layer", "trace"], ["0.weight", "638 +- 12"]]  -->  layer         trace
                                                          0.weight  638 +- 12
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

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
