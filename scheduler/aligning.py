"""Tables of text: rows of cells, made into lines whose columns stand below each other."""

from collections.abc import Iterable
from unicodedata import combining, east_asian_width


def aligned(rows: Iterable[Iterable[str]], left: int = 1) -> list[str]:
    """The lines of a table, two spaces between columns: the first `left` columns flush left, the others flush right.

    >>> aligned([["layer", "trace"], ["0.weight", "638 +- 12"]])
    ['layer         trace', '0.weight  638 +- 12']
    """
    cells = [list(row) for row in rows]
    widths = [max(map(columns_of, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        spaces = [" " * (width - columns_of(cell)) for cell, width in zip(row, widths, strict=True)]
        padded = [cell + space if place < left else space + cell
                  for place, (cell, space) in enumerate(zip(row, spaces))]
        lines.append("  ".join(padded).rstrip())
    return lines


def columns_of(text: str) -> int:
    """The columns of a terminal that a text takes: an East Asian letter two, an accent of its own none.

    >>> columns_of("layer 1"), columns_of("\N{CJK UNIFIED IDEOGRAPH-5C42}"), columns_of("e\N{COMBINING TILDE}")
    (7, 2, 1)
    """
    return sum(0 if combining(letter) else 1 + (east_asian_width(letter) in "WF") for letter in text)
