"""The mailbox over ranks: values between two actions that may be on two ranks.

    caller   --moved to this rank's device--> a dict --> F(0, i)
    F(s, i)  --same rank--> a dict --> F(reader, i)
             --other rank--> Sender ==channel==> Receiver --> F(reader, i)        gradients: the same, back

A message travels with its spec (transports/link.py). The P2PPlan of a phase has the order of every channel.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.common.places import Place
from pipeline.data.pytrees import Activations, Grads
from pipeline.data.values import CALLER, Value, Values
from pipeline.distributed.group import RankGroup
from pipeline.execution.mailbox import Mailbox
from pipeline.execution.p2p_plan import MessageKey, P2PPlan
from pipeline.transports.local import Local
from pipeline.transports.message import Message


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
        super().__init__(values, dict.fromkeys(range(len(rank_of)), Place(ranks.device)), transport)
        self._is_here = {CALLER, *[stage for stage, rank in enumerate(rank_of) if rank == ranks.rank]}.__contains__
        self._ranks = ranks
        self._series = series
        self._messages: P2PPlan | None = None  # of the phase that runs

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

    def _put(self, row: Value, chunk: int, message: Activations) -> None:
        if self._is_here(row.reader):
            super()._put(row, chunk, message)
        else:
            self._send((row.name, chunk, False), Message.of(message))

    def _take(self, row: Value, chunk: int) -> Activations:
        if self._is_here(row.producer):
            return super()._take(row, chunk)
        return self._receive((row.name, chunk, False)).activations

    def _put_grads(self, row: Value, chunk: int, grads: Grads) -> None:
        if self._is_here(row.producer):
            super()._put_grads(row, chunk, grads)
        else:
            self._send((row.name, chunk, True), Message(grads))

    def _take_grads(self, row: Value, chunk: int) -> Grads:
        if self._is_here(row.reader):
            return super()._take_grads(row, chunk)
        return self._receive((row.name, chunk, True)).tensors

    def _send(self, key: MessageKey, message: Message) -> None:
        (_, to), name = self._current().route_of[key]
        self._ranks.connections.sender(to).send(name, message)

    def _receive(self, key: MessageKey) -> Message:
        """Wait for a message, and free what it proves to have been received."""
        messages, monitor = self._current(), self._ranks.monitor
        channel, name = messages.route_of[key]
        source, target = channel
        action = monitor.at
        assert isinstance(action, tuple)  # the action that reads it
        monitor.at = (*action, "for", name + ", from rank", source)
        receiver = self._ranks.connections.receiver(source)
        message = receiver.receive(name)
        self.arrived = max(self.arrived, receiver.arrived)
        monitor.at = action
        if (target, source) in messages.channels:
            self._ranks.connections.sender(source).reap(messages.delivered[channel][receiver.position])
        return message
