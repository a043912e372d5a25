"""The connections between the ranks of a group: channels of one generation, and the links over them.

    connect(pairs)  -->  rendezvous: Channels, between all ranks that have the same pairs  -->  Sender, Receiver
    a failure       -->  abort wakes all waits, close drops everything; the next call builds the next generation

Channels connect ordered pairs of ranks: each is a process group of torch, so that no receive blocks a send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
import torch.distributed as dist

from pipeline.distributed.failure.monitor import FailureMonitor
from pipeline.distributed.rendezvous import AbortableRendezvous
from pipeline.transports.channel import ChannelError, Incoming, Outgoing
from pipeline.transports.distributed import Channels
from pipeline.transports.link import Receiver, Sender

Pairs: TypeAlias = tuple[tuple[int, int], ...]


class Connections:
    """The connections of one rank.

    Args:
        rank: this one.
        device: where what it receives shall be.
        rendezvous: where the ranks build channels together.
        monitor: wakes their waits there.
        new_channels: connects some pairs, given a store.

    Attributes:
        generation: how often they were closed.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        rendezvous: AbortableRendezvous,
        monitor: FailureMonitor,
        new_channels: Callable[[dist.Store, Pairs], Channels],
    ) -> None:
        self.generation = 0
        self._rank = rank
        self._device = device
        self._rendezvous = rendezvous
        self._monitor = monitor
        self._new_channels = new_channels
        self._requests: list[Pairs] = []  # one entry for each `connect`
        self._agreed = 0  # how many of them all ranks have made
        self._channels: list[Channels] = []  # one entry for each request
        self._of: dict[tuple[int, int], Channels] = {}  # by pair, of those with this rank
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Request channels for these ordered pairs. All ranks request the same ones, in the same order."""
        known = {pair for request in self._requests for pair in request}
        new = tuple(sorted(set(pairs) - known))
        if new:
            self._requests.append(new)
            if self._channels:
                self._build(len(self._requests) - 1)

    def agree(self) -> None:
        """Note that all ranks have made the same requests."""
        self._agreed = len(self._requests)

    def open(self) -> None:
        """Begin a call: from now on `abort` wakes its waits."""
        self._rendezvous.open()

    def build(self) -> None:
        """Build the channels, if there are none: at first, and when a failure closed them."""
        if not self._channels:
            for index in range(len(self._requests)):
                self._build(index)

    def _build(self, index: int) -> None:
        self._monitor.at = "the connecting of all ranks"
        pairs = self._requests[index]
        channels = self._rendezvous.build(f"{self.generation}/{index}", lambda store: self._new_channels(store, pairs))
        self._channels.append(channels)
        self._of.update({pair: channels for pair in pairs if self._rank in pair})
        if self._rendezvous.is_given_up:  # some channels here may be new since then
            raise ChannelError(f"rank {self._rank} gave the call up")

    def abort(self) -> None:
        """Wake all waits for another rank. From any thread."""
        self._rendezvous.give_up()
        for channels in self._channels:
            channels.abort()

    def close(self) -> None:
        """Drop the channels with their links' cached specs, and requests that not all ranks are known to have made."""
        self.abort()
        for channels in self._channels:
            channels.close()
        del self._requests[self._agreed :]
        self._channels.clear()
        self._of.clear()
        self._senders.clear()
        self._receivers.clear()
        self.generation += 1

    def drain(self, seconds: float) -> None:
        """Wait until others have received what they still have to."""
        for channels in self._channels:
            channels.drain(seconds)

    def outgoing(self, to: int) -> Outgoing:
        """The channel to a rank."""
        return self._of[self._rank, to].outgoing(to)

    def incoming(self, source: int) -> Incoming:
        """The channel from a rank."""
        return self._of[source, self._rank].incoming(source)

    def sender(self, to: int) -> Sender:
        """The link to a rank."""
        if to not in self._senders:
            self._senders[to] = Sender(self.outgoing(to), f"rank {self._rank} to rank {to}")
        return self._senders[to]

    def receiver(self, source: int) -> Receiver:
        """The link from a rank."""
        if source not in self._receivers:
            what = f"rank {source} to rank {self._rank}"
            self._receivers[source] = Receiver(self.incoming(source), what, device=self._device)
        return self._receivers[source]
