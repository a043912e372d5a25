"""A table of words, printed by rich: in styles on a terminal, as plain text into a pipe."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["show"]


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """Prints a table: words to the left in the first column, numbers to the right in the others.

    Args:
        columns: the head of each
        rows: the cells of each row
        styles: of each row, in rich's words ("bold", "dim", "")

    >>> show(["schedule", "step", "bubble"], [["zb-h1", "27", "11.1%"], ["1f1b", "33", "27.3%"]])
    schedule  step  bubble
    ──────────────────────
    zb-h1       27   11.1%
    1f1b        33   27.3%
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if number else "left", no_wrap=True)
    for row, style in zip(rows, [*styles, *[""] * (len(rows) - len(styles))]):
        table.add_row(*map(Text, row), style=style)
    console = Console(width=_WIDE)
    console.width = console.measure(table).maximum  # rather two lines of a narrow terminal for a row than half a number
    console.print(table)


_WIDE = 10_000
