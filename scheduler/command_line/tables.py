"""A table of words: some rows dim on a terminal, as plain text into a pipe."""

from collections.abc import Sequence

import click

from scheduler.aligning import aligned, columns_of


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], dim: Sequence[bool] = ()) -> None:
    """Prints a table: words to the left in the first column, numbers to the right in the others.

    Args:
        columns: the head of each
        rows: the cells of each row
        dim: for each row whether it is dim; none is, where nothing is given

    >>> show(["schedule", "step", "bubble"], [["zb-h1", "27", "11.1%"], ["1f1b", "33", "27.3%"]])
    schedule  step  bubble
    ──────────────────────
    zb-h1       27   11.1%
    1f1b        33   27.3%
    """
    head, *lines = aligned([columns, *rows])
    click.echo(head)
    click.echo("─" * max(map(columns_of, [head, *lines])))
    for line, is_dim in zip(lines, dim or [False] * len(lines)):
        click.echo(click.style(line, dim=True) if is_dim else line)
