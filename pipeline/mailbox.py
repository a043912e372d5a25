"""Where is a value between the action that made it and the action that reads it?

    F(s, i)  --activations[name, i, reader]-->  F(reader, i)
    B(s, i)  --gradients[name, i, reader]---->  B(producer, i)

Each entry is put once and taken once; taking it is what frees it.
"""

from __future__ import annotations

from typing import TypeAlias

from pipeline.trees import Grads, Message
from pipeline.values import Values

Inbox: TypeAlias = dict[str, Message]
GradBox: TypeAlias = dict[str, list[Grads]]


class Mailbox:
    """The values under way in one call, in one process."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._activations: dict[tuple[str, int, int], Message] = {}
        self._gradients: dict[tuple[str, int, int], Grads] = {}

    def put(self, stage: int, chunk: int, outbox: Inbox) -> None:
        """Post what `stage` (or the caller) made of `chunk` to all readers."""
        for row in self._values.made_by[stage]:
            for reader in row.readers:
                self._activations[row.name, chunk, reader] = outbox[row.name]

    def take(self, stage: int, chunk: int) -> Inbox:
        """Take what `stage` (or the caller) reads of `chunk`."""
        return {row.name: self._activations.pop((row.name, chunk, stage)) for row in self._values.read_by[stage]}

    def put_grads(self, stage: int, chunk: int, outbox: dict[str, Grads]) -> None:
        """Post the gradients that `stage` (or the caller) has for the values it read."""
        for row in self._values.read_by[stage]:
            self._gradients[row.name, chunk, stage] = outbox[row.name]

    def take_grads(self, stage: int, chunk: int) -> GradBox:
        """Take the gradients of the values that `stage` (or the caller) made, one for each reader, in their order."""
        return {
            row.name: [self._gradients.pop((row.name, chunk, reader)) for reader in row.readers]
            for row in self._values.made_by[stage]
        }

    def __len__(self) -> int:
        return len(self._activations) + len(self._gradients)
