"""The mailbox over ranks: values between two actions that may be on two ranks.

    caller   --moved to this rank's device--> a dict --> F(0, i)
    F(s, i)  --same rank--> a dict --> F(reader, i)
             --other rank--> Sender ==channel==> Receiver --> F(reader, i)        gradients: the same, back

A message travels with its spec (transports/link.py). P2PPlan has the order of every channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from pipeline.common.places import Place
from pipeline.data.pytrees import Activations, Grads, MemoryId, Tree
from pipeline.data.values import CALLER, Value, Values
from pipeline.distributed.p2p_plan import Channel, Key, P2PPlan
from pipeline.execution.mailbox import Post, sent
from pipeline.transports.local import Local, Parcel
from pipeline.transports.message import Message


class Lines(Protocol):
    """The interface of the links to other ranks. A message's slot is its name."""

    def send(self, rank: int, slot: str, letter: Message) -> None: ...

    def receive(self, rank: int, slot: str) -> Message: ...


class RankMailbox(Post):
    """The values under way in one call, as one rank sees them.

    Args:
        values: the table.
        rank_of: the rank of each stage.
        rank: this one.
        lines: the links to the others.
        traffic: the plan of the phase that runs.
        place: that of this rank.
        transport: moves the caller's tensors there, as in one process.
    """

    def __init__(
        self,
        values: Values,
        rank_of: Sequence[int],
        rank: int,
        lines: Lines,
        traffic: Callable[[], P2PPlan],
        place: Place,
        transport: Local,
    ) -> None:
        self._values = values
        self._rank_of = rank_of
        self._rank = rank
        self._lines = lines
        self._traffic = traffic
        self._place = place
        self._transport = transport
        self._activations: dict[Key, tuple[Activations, Parcel | None]] = {}
        self._gradients: dict[Key, Grads] = {}

    def put(self, stage: int, chunk: int, made: Sequence[Activations]) -> None:
        rows = self._values.made_by[stage]
        until = _until(rows, made)
        for row, message in zip(rows, made, strict=True):
            for reader in row.readers:
                key = row.name, chunk, reader, False
                if stage == CALLER:
                    parcel = self._transport.send(message.tree.tensors, None, self._place)
                    self._activations[key] = sent(message, parcel), parcel
                elif reader == CALLER or self._rank_of[reader] == self._rank:
                    self._activations[key] = message, None
                else:
                    memory = tuple((each.origin, until[each.origin]) for each in message.memory)
                    tree = message.tree
                    self._send(key, Message(tree.tensors, tree.skeleton, message.needs_grad, memory))

    def take(self, stage: int, chunk: int) -> list[Activations]:
        return [self._taken((row.name, chunk, stage, False), row) for row in self._values.read_by[stage]]

    def _taken(self, key: Key, row: Value) -> Activations:
        if key in self._activations or row.producer == CALLER:
            message, parcel = self._activations.pop(key)
            if parcel is not None:
                self._transport.receive(parcel)
            return message
        tensors, skeleton, needs_grad, memory = self._receive(key)
        tree = Tree(tuple([tensor for tensor in tensors if tensor is not None]), skeleton)
        return Activations(tree, needs_grad, tuple([_memory(each) for each in memory]))

    def put_grads(self, stage: int, chunk: int, grads: Sequence[Grads]) -> None:
        for row, each in zip(self._values.read_by[stage], grads, strict=True):
            key = row.name, chunk, stage, True
            if stage == CALLER or row.producer == CALLER or self._rank_of[row.producer] == self._rank:
                self._gradients[key] = each
            else:
                self._send(key, Message(each))

    def take_grads(self, stage: int, chunk: int) -> list[list[Grads]]:
        return [
            [self._taken_grads((row.name, chunk, reader, True), reader) for reader in row.readers]
            for row in self._values.made_by[stage]
        ]

    def _taken_grads(self, key: Key, reader: int) -> Grads:
        if key in self._gradients or reader == CALLER:
            return self._gradients.pop(key)
        return self._receive(key).tensors

    def under_way(self, chunk: int) -> Iterator[MemoryId]:
        found = [message for (_, number, _, _), (message, _) in self._activations.items() if number == chunk]
        return (memory for message in found for memory in message.memory)

    def __len__(self) -> int:
        return len(self._activations) + len(self._gradients)

    def _send(self, key: Key, letter: Message) -> None:
        traffic = self._traffic()
        self._lines.send(traffic.channel_of[key][1], traffic.name_of[key], letter)

    def _receive(self, key: Key) -> Message:
        traffic = self._traffic()
        channel: Channel = traffic.channel_of[key]
        return self._lines.receive(channel[0], traffic.name_of[key])


def _until(rows: Sequence[Value], made: Sequence[Activations]) -> dict[tuple[int, int, int], int]:
    """For each memory that is sent the last stage that reads it by another way: a rank between would not know."""
    found: dict[tuple[int, int, int], int] = {}
    times: dict[tuple[int, int, int], int] = {}
    for row, message in zip(rows, made, strict=True):
        for memory in dict.fromkeys(message.memory):
            times[memory.origin] = times.get(memory.origin, 0) + 1
            found[memory.origin] = max(found.get(memory.origin, -1), memory.until, *row.readers)
    return {
        memory.origin: found[memory.origin] if times[memory.origin] > 1 else memory.until
        for message in made
        for memory in message.memory
    }


def _memory(found: object) -> MemoryId:
    assert isinstance(found, tuple)  # as _until wrote it
    origin, until = found
    return MemoryId(tuple(origin), until)
