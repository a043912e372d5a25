"""The connections between the ranks of a group: channels of one generation, and the links over them.

    connect(pairs)  -->  rendezvous: Channels, between all ranks that have the same pairs  -->  Sender, Receiver
    carry(pairs)    -->  rendezvous: payloads beside the channels of pairs whose ranks have devices
    a failure       -->  abort wakes all waits, close drops everything; the next call builds the next generation

Channels connect ordered pairs of ranks: each is a process group of torch, so that no receive blocks a send.

Payloads are connected when the first phase begins that needs them, and for the pairs of its plan alone: a communicator
of NCCL takes memory and time, and a pair that only says yes and no has none. Whoever connects a pair waits for its
other rank, so all ranks connect at one place of the call, and each takes its pairs in the order of all pairs. Of the
pairs that are not yet connected, take the first: both of its ranks have connected all that they have before it, so both
are at it, and it will be. So no two ranks wait for each other, whatever each of them would need first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from pipeline.distributed.failure.monitor import FailureMonitor
from pipeline.distributed.rendezvous import AbortableRendezvous
from pipeline.transports.channel import ChannelError, IncomingChannel, OutgoingChannel
from pipeline.transports.distributed import Channels
from pipeline.transports.link import Receiver, Sender

RankPairs: TypeAlias = tuple[tuple[int, int], ...]


class ConnectionRequest(NamedTuple):
    """A request of all ranks.

    Attributes:
        pairs: channels between them, or payloads.
        with_devices: those of them whose payloads can be connected; None: channels.
    """

    pairs: RankPairs
    with_devices: RankPairs | None = None


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
        new_channels: Callable[[dist.Store, RankPairs], Channels],
    ) -> None:
        self.generation = 0
        self._rank = rank
        self._device = device
        self._rendezvous = rendezvous
        self._monitor = monitor
        self._new_channels = new_channels
        self._requests: list[ConnectionRequest] = []
        self._agreed = 0  # how many of them all ranks have made
        self._channels: list[Channels] = []  # one entry for each request of channels
        self._channels_of: dict[tuple[int, int], Channels] = {}  # by pair, of those with this rank
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Request channels for these ordered pairs. All ranks request the same ones, in the same order."""
        requested = {pair for request in self._requests if request.with_devices is None for pair in request.pairs}
        new = tuple(sorted(set(pairs) - requested))
        if new:
            self._request(ConnectionRequest(new))

    def uncarried(self, pairs: Collection[tuple[int, int]]) -> RankPairs:
        """Those of some pairs, which have channels, whose payloads were never requested."""
        requested = {pair for request in self._requests if request.with_devices is not None for pair in request.pairs}
        return () if requested.issuperset(pairs) else tuple(sorted(set(pairs) - requested))

    def carry(self, pairs: RankPairs, with_devices: Iterable[tuple[int, int]]) -> None:
        """Request payloads for these ordered pairs, as `connect` does.

        Args:
            with_devices: those whose ranks both have devices.
        """
        self._request(ConnectionRequest(pairs, tuple(sorted(with_devices))))

    def _request(self, request: ConnectionRequest) -> None:
        self._requests.append(request)
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
        pairs, with_devices = self._requests[index]
        key = f"{self.generation}/{index}"
        if with_devices is None:
            channels = self._rendezvous.build(key, lambda store: self._new_channels(store, pairs))
            self._channels.append(channels)
            self._channels_of.update({pair: channels for pair in pairs if self._rank in pair})
        elif with_devices:
            self._rendezvous.build(key, lambda store: self._carry(store, with_devices))
        if self._rendezvous.is_given_up:  # some channels here may be new since then
            raise ChannelError(f"rank {self._rank} gave the call up")

    def _carry(self, store: dist.Store, with_devices: RankPairs) -> None:
        for pair in with_devices:
            if self._rank in pair:
                self._channels_of[pair].carry(dist.PrefixStore(f"{pair[0]}to{pair[1]}", store), pair)

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
        self._channels_of.clear()
        self._senders.clear()
        self._receivers.clear()
        self.generation += 1

    def drain(self, seconds: float) -> None:
        """Wait until others have received what they still have to."""
        for channels in self._channels:
            channels.drain(seconds)

    @property
    def place(self) -> str:
        """The place of this rank's payloads. "": it has none."""
        return self._channels[0].place

    def outgoing(self, to: int) -> OutgoingChannel:
        """The channel to a rank."""
        return self._channels_of[self._rank, to].outgoing(to)

    def incoming(self, source: int) -> IncomingChannel:
        """The channel from a rank."""
        return self._channels_of[source, self._rank].incoming(source)

    def sender(self, to: int) -> Sender:
        """The link to a rank."""
        if to not in self._senders:
            self._senders[to] = Sender(self.outgoing(to), f"rank {self._rank} to rank {to}")
        return self._senders[to]

    def receiver(self, source: int) -> Receiver:
        """The link from a rank."""
        if source not in self._receivers:
            label = f"rank {source} to rank {self._rank}"
            self._receivers[source] = Receiver(self.incoming(source), label, device=self._device)
        return self._receivers[source]
