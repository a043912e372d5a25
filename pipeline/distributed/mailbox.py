"""The mailbox over ranks: values between two actions that may be on two ranks.

    caller   --moved to this rank's device--> a dict --> F(0, i)
    F(s, i)  --same rank--> a dict --> F(reader, i)
             --other rank--> Sender ==channel==> Receiver --> F(reader, i)        gradients: the same, back

A message travels with its spec (transports/link.py). The P2PPlan of a phase has the order of every channel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pipeline.common.places import Place
from pipeline.data.pytrees import Activations, Grads
from pipeline.data.values import CALLER, Value, Values
from pipeline.distributed.group import RankGroup
from pipeline.execution.mailbox import Mailbox, sent
from pipeline.execution.p2p_plan import MessageKey, P2PPlan
from pipeline.transports.local import Local, Parcel
from pipeline.transports.message import Message

MemoryOrigin: TypeAlias = tuple[int, int, int]


class RankMailbox(Mailbox):
    """The values under way in one call, as one rank sees them.

    Args:
        values: the table.
        rank_of: the rank of each stage.
        ranks: the ranks, and the links between them.
        series: what the messages of all such calls have in common.
        transport: moves the caller's tensors to this rank's device, as in one process.
    """

    def __init__(
        self, values: Values, rank_of: Sequence[int], ranks: RankGroup, series: str, transport: Local
    ) -> None:
        self._values = values
        self._rank_of = rank_of
        self._ranks = ranks
        self._series = series
        self._transport = transport
        self._messages: P2PPlan | None = None  # of the phase that runs
        self._activations: dict[Any, tuple[Activations, Parcel | None]] = {}  # by MessageKey
        self._gradients: dict[Any, Grads] = {}

    def begin(self, phase: int, messages: P2PPlan | None) -> None:
        assert messages is not None  # a plan over ranks has them
        self._messages = messages
        self._ranks.connect(messages.pairs)
        for (source, to), expected in messages.channels.items():
            links = self._ranks.connections
            link = links.receiver(source) if to == self._ranks.rank else links.sender(to)
            link.begin(f"{self._series}/{phase}", [message.name for message in expected])

    def end(self) -> None:
        channels = list(self._current().channels)
        for source, to in channels:
            if to == self._ranks.rank:
                self._ranks.connections.receiver(source).finish()
        for _, to in channels:
            if to != self._ranks.rank:
                self._ranks.finish(to)
        self._messages = None

    def _current(self) -> P2PPlan:
        assert self._messages is not None  # a phase has begun
        return self._messages

    def put(self, stage: int, chunk: int, outputs: Sequence[Activations]) -> None:
        rows = self._values.made_by[stage]
        for row, message in zip(rows, _with_last_readers(rows, outputs), strict=True):
            key = row.name, chunk, False
            if stage == CALLER:
                parcel = self._transport.send(message.tree.tensors, None, Place(self._ranks.device))
                self._activations[key] = sent(message, parcel), parcel
            elif row.reader == CALLER or self._rank_of[row.reader] == self._ranks.rank:
                self._activations[key] = message, None
            else:
                tree = message.tree
                self._send(key, Message(tree.tensors, tree.skeleton, message.needs_grad, message.memory))

    def take(self, stage: int, chunk: int) -> list[Activations]:
        inbox = [self._taken((row.name, chunk, False), row) for row in self._values.read_by[stage]]
        last: dict[MemoryOrigin, int] = {}
        for memory in [memory for message in inbox for memory in message.memory]:  # one memory may have come two ways
            last[memory.origin] = max(memory.until, last.get(memory.origin, memory.until))
        return _until(inbox, last)

    def _taken(self, key: MessageKey, row: Value) -> Activations:
        if key in self._activations or row.producer == CALLER:
            activations, parcel = self._activations.pop(key)
            if parcel is not None:
                self._transport.receive(parcel)
            return activations
        message = self._receive(key)
        return Activations(message.tree, message.needs_grad, message.memory)

    def put_grads(self, stage: int, chunk: int, grads: Sequence[Grads]) -> None:
        for row, row_grads in zip(self._values.read_by[stage], grads, strict=True):
            key = row.name, chunk, True
            if stage == CALLER or row.producer == CALLER or self._rank_of[row.producer] == self._ranks.rank:
                self._gradients[key] = row_grads
            else:
                self._send(key, Message(row_grads))

    def take_grads(self, stage: int, chunk: int) -> list[Grads]:
        return [self._taken_grads((row.name, chunk, True), row) for row in self._values.made_by[stage]]

    def _taken_grads(self, key: MessageKey, row: Value) -> Grads:
        if key in self._gradients or row.reader == CALLER:
            return self._gradients.pop(key)
        return self._receive(key).tensors

    def _send(self, key: MessageKey, message: Message) -> None:
        messages = self._current()
        _, to = messages.channel_of[key]
        self._ranks.connections.sender(to).send(messages.name_of[key], message)

    def _receive(self, key: MessageKey) -> Message:
        """Wait for a message, and free what it proves to have been received."""
        messages, monitor = self._current(), self._ranks.monitor
        channel, name = messages.channel_of[key], messages.name_of[key]
        source, target = channel
        action = monitor.at
        assert isinstance(action, tuple)  # the action that reads it
        monitor.at = (*action, "for", name + ", from rank", source)
        receiver = self._ranks.connections.receiver(source)
        message = receiver.receive(name)
        self.arrived = max(self.arrived, receiver.arrived)
        monitor.at = action
        if (target, source) in messages.channels:
            self._ranks.connections.sender(source).reap(messages.delivered(channel, receiver.position))
        return message


def _with_last_readers(rows: Sequence[Value], messages: Sequence[Activations]) -> list[Activations]:
    """Messages that know of each memory the last stage that reads it by another way.

    What one rank keeps and another gets has one memory too, and a value that was sent is no longer under way here.
    """
    ends = defaultdict[MemoryOrigin, list[int]](list)  # of each tensor with that memory
    for row, message in zip(rows, messages, strict=True):
        for memory in dict.fromkeys(message.memory):
            ends[memory.origin] += [memory.until, row.reader]
    last = {origin: max(own_ends) if len(own_ends) > 2 else own_ends[0] for origin, own_ends in ends.items()}
    return _until(messages, last)


def _until(messages: Sequence[Activations], last: Mapping[MemoryOrigin, int]) -> list[Activations]:
    """Messages that know these last readers."""
    return [
        message._replace(memory=tuple([identity._replace(until=last[identity.origin]) for identity in message.memory]))
        for message in messages
    ]
