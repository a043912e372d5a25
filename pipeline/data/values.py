"""The table of values that cross stages: for each its producer and its one reader.

    Value(name, producer, reader)     "h1" is made by stage 0 and read by stage 1
    caller --x--> 0 --h1--> 1 --h2--> 2 --y--> caller
                  `--skip 'early'-----^

A stage's inputs and outputs are the rows of this table that name it, in the order of the table: first the value that
goes from stage to stage, then the skips that it stashes for other stages, or pops.

A value has one reader. What a stage returns goes to the next stage, or to the caller; a skip goes to the stage that
pops it, and `pipeline.skip.verify_skippables` refuses a name that two layers stash or pop. So a value under way is
known by its name and its chunk, and one gradient comes back for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from pipeline.skip import Key

Name: TypeAlias = Key | str

CALLER = -1  # the caller of the Pipe: gives the input, takes the output


class Value(NamedTuple):
    """A named value: made by one stage, read by another (either may be the caller)."""

    name: Name
    producer: int
    reader: int


class Values:
    """The table of values of a pipeline, looked up by stage."""

    def __init__(self, rows: tuple[Value, ...]) -> None:
        self.rows = rows
        stages = {stage for row in rows for stage in (row.producer, row.reader)}
        self.read_by = {stage: tuple(row for row in rows if stage == row.reader) for stage in stages}
        self.made_by = {stage: tuple(row for row in rows if stage == row.producer) for stage in stages}

    def between_stages(self) -> list[Value]:
        """The values that the caller neither gives nor takes, in the order of the table."""
        return [row for row in self.rows if CALLER not in (row.producer, row.reader)]


def chain(stages: int, skips: Iterable[tuple[Name, int, int]] = ()) -> Values:
    """The values of a sequence of stages.

    Args:
        stages: their number.
        skips: (name, the stage that makes it, the stage that reads it).

    Example:
        >>> [f"{row.name}: {row.producer} -> {row.reader}" for row in chain(2).rows]
        ['x: -1 -> 0', 'h1: 0 -> 1', 'y: 1 -> -1']
    """
    names = ("x", *(f"h{stage}" for stage in range(1, stages)), "y")
    rows = map(Value, names, (CALLER, *range(stages)), (*range(stages), CALLER))
    return Values((*rows, *(Value(*skip) for skip in skips)))
