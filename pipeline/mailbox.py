"""Where is a value between the action that made it and the action that reads it?

    F(s, i)  --activations[name, i, reader]-->  F(reader, i)
    B(s, i)  --gradients[name, i, reader]---->  B(producer, i)

Each entry is put once and taken once; taking it is what frees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.trees import Grads, Message
from pipeline.values import Name, Values


class Mailbox:
    """The values under way in one call, in one process. What is put and taken stands in the order of the table."""

    def __init__(self, values: Values) -> None:
        self._read_by = values.read_by
        self._made_by = values.made_by
        self._activations: dict[tuple[Name, int, int], Message] = {}
        self._gradients: dict[tuple[Name, int, int], Grads] = {}

    def put(self, stage: int, chunk: int, made: Sequence[Message]) -> None:
        """Post what `stage` (or the caller) made of `chunk` to all readers."""
        for row, message in zip(self._made_by[stage], made, strict=True):
            for reader in row.readers:
                self._activations[row.name, chunk, reader] = message

    def take(self, stage: int, chunk: int) -> list[Message]:
        """Take what `stage` (or the caller) reads of `chunk`."""
        return [self._activations.pop((row.name, chunk, stage)) for row in self._read_by[stage]]

    def put_grads(self, stage: int, chunk: int, grads: Sequence[Grads]) -> None:
        """Post the gradients that `stage` (or the caller) has for the values it read."""
        for row, each in zip(self._read_by[stage], grads, strict=True):
            self._gradients[row.name, chunk, stage] = each

    def take_grads(self, stage: int, chunk: int) -> list[list[Grads]]:
        """Take the gradients of the values that `stage` (or the caller) made, one for each reader, in their order."""
        return [[self._gradients.pop((row.name, chunk, reader)) for reader in row.readers]
                for row in self._made_by[stage]]

    def under_way(self, chunk: int) -> Iterator[Message]:
        """What of `chunk` was made and is not read yet."""
        return (message for (_, number, _), message in self._activations.items() if number == chunk)

    def __len__(self) -> int:
        return len(self._activations) + len(self._gradients)
