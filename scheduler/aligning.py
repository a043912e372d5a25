"""Tables of text: rows of cells, made into lines whose columns stand below each other."""

from collections.abc import Iterable

__all__ = ["aligned"]


def aligned(rows: Iterable[Iterable[str]], left: int = 1) -> list[str]:
    """The lines of a table, two spaces between columns: the first `left` columns flush left, the others flush right.

    >>> aligned([["layer", "trace"], ["0.weight", "638 +- 12"]])
    ['layer         trace', '0.weight  638 +- 12']
    """
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
