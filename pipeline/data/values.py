"""The table of values that cross stages: for each its producer and its readers.

    Value(name, producer, readers)     "h1" is made by stage 0 and read by stage 1
    caller --x--> 0 --h1--> 1 --h2--> 2 --y--> caller
                  `--skip 'early'-----^

A stage's inputs and outputs are the rows of this table that name it, in the order of the table: first the value that
goes from stage to stage, then the skips that it stashes for other stages, or pops.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from pipeline.skip import Key

Name: TypeAlias = Key | str

CALLER = -1  # the caller of the Pipe: gives the input, takes the output


class Value(NamedTuple):
    """A named value: made by one stage, read by others (or by the caller)."""

    name: Name
    producer: int
    readers: tuple[int, ...]


class Values:
    """The table of values of a pipeline, looked up by stage."""

    def __init__(self, rows: tuple[Value, ...]) -> None:
        self.rows = rows
        stages = {row.producer for row in rows} | {reader for row in rows for reader in row.readers}
        self.read_by = {stage: tuple(row for row in rows if stage in row.readers) for stage in stages}
        self.made_by = {stage: tuple(row for row in rows if stage == row.producer) for stage in stages}

    def edges(self) -> list[tuple[Name, int, int]]:
        """Every value with its producer and each of its readers, where both are stages, in the order of the table."""
        return [
            (row.name, row.producer, reader)
            for row in self.rows
            for reader in row.readers
            if CALLER not in (row.producer, reader)
        ]


def chain(stages: int, skips: Iterable[tuple[Name, int, int]] = ()) -> Values:
    """The values of a sequence of stages.

    Args:
        stages: their number.
        skips: (name, the stage that makes it, the stage that reads it).

    Example:
        >>> [f"{row.name}: {row.producer} -> {row.readers}" for row in chain(2).rows]
        ['x: -1 -> (0,)', 'h1: 0 -> (1,)', 'y: 1 -> (-1,)']
    """
    names = ("x", *(f"h{stage}" for stage in range(1, stages)), "y")
    readers = (*range(stages), CALLER)
    rows = [Value(name, reader - 1 if reader != CALLER else stages - 1, (reader,))
            for name, reader in zip(names, readers, strict=True)]
    return Values((*rows, *(Value(name, producer, (reader,)) for name, producer, reader in skips)))
