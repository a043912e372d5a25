"""Text tables of numbers with errors.

    [["layer", "trace"], ["0.weight", "638 +- 12"]]  -->  layer         trace
                                                          0.weight  638 +- 12
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows with the first column flush left, the others flush right, two spaces between.

    >>> print(*aligned([["layer", "trace"], ["0.weight", "638 +- 12"]]), sep="\\n")
    layer         trace
    0.weight  638 +- 12
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(wide) for cell, wide in zip(others, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def with_error(value: float, error: float) -> str:
    """A value and its error; "-" for what was not measured, no error where nobody knows it.

    >>> with_error(638.3, 12.04), with_error(638.3, 0.0), with_error(638.3, math.inf), with_error(math.nan, 0.0)
    ('638.3 +- 12', '638.3 +- 0', '638.3', '-')
    """
    if math.isnan(value):
        return "-"
    return f"{value:.5g} +- {error:.2g}" if math.isfinite(error) else f"{value:.5g}"
