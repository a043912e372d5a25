"""The connections between the ranks of a group: channels of one generation, and the links over them.

    connect(pairs)  -->  rendezvous of all ranks: Channels, with payloads where both have devices  -->  Sender, Receiver
    a failure       -->  abort wakes all waits, close drops everything: the next generation begins

Channels connect ordered pairs of ranks: each is a process group of torch, so that no receive blocks a send. A
generation begins with those of the tree. All others are connected when the first phase begins that needs them, for the
pairs of its plan alone, and so are payloads: a communicator of NCCL takes memory and time, and a pair that only says
yes and no has none.

Whoever connects a pair waits for its other rank, so all ranks connect at one place of the call, and each takes its
pairs in the order of all pairs. Of the pairs that are not yet connected, take the first: both of its ranks have
connected all that they have before it, so both are at it, and it will be. So no two ranks wait for each other, whatever
each of them would need first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
import torch.distributed as dist

from pipeline.distributed.failure.monitor import FailureMonitor
from pipeline.distributed.rendezvous import AbortableRendezvous
from pipeline.execution.p2p_plan import RankPair
from pipeline.transports.channel import ChannelError
from pipeline.transports.distributed import Channels
from pipeline.transports.link import Receiver, Sender


class Connections:
    """The connections of one rank.

    Args:
        rank: this one.
        device: where what it receives shall be.
        rendezvous: where the ranks connect together.
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
        new_channels: Callable[[dist.Store, Collection[RankPair]], Channels],
    ) -> None:
        self.generation = 0
        self._rank = rank
        self._device = device
        self._rendezvous = rendezvous
        self._monitor = monitor
        self._new_channels = new_channels
        self._channels: Channels | None = None  # None: this generation has none yet
        self._meetings = 0  # in this generation
        self._complete: set[RankPair] = set()  # whose payloads, if any, are connected
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}

    def open(self) -> None:
        """Begin a call: from now on `abort` wakes its waits."""
        self._rendezvous.open()

    @property
    def are_closed(self) -> bool:
        """Whether no pair is connected: at first, and when a failure closed them."""
        return self._channels is None

    def incomplete(self, pairs: Collection[RankPair]) -> list[RankPair]:
        """Those of some ordered pairs that were not connected, or without a word on devices."""
        return [] if self._complete.issuperset(pairs) else sorted(set(pairs) - self._complete)

    def connect(self, pairs: Collection[RankPair], with_devices: Collection[RankPair] | None = None) -> None:
        """Connect these ordered pairs. All ranks connect the same ones, in the same order.

        Args:
            with_devices: those whose ranks both have devices, so that payloads go from one to the other. None: it is
                not known yet.
        """
        self._monitor.at = "the connecting of all ranks"
        self._meetings += 1
        channels = self._channels  # a thread that is left behind at the rendezvous shall not have later ones

        def make(store: dist.Store) -> Channels:
            if channels is None:
                return self._new_channels(store, pairs)
            channels.connect(store, pairs)
            for pair in sorted(with_devices or ()):
                if self._rank in pair:
                    channels.carry(dist.PrefixStore(f"{pair[0]}to{pair[1]}", store), pair)
            return channels

        self._channels = self._rendezvous.build(f"{self.generation}/{self._meetings}", make)
        if self._rendezvous.is_given_up:  # some channels here may be new since then
            raise ChannelError(f"rank {self._rank} gave the call up")
        if with_devices is not None:
            self._complete.update(pairs)

    def abort(self) -> None:
        """Wake all waits for another rank. From any thread."""
        self._rendezvous.give_up()
        if self._channels is not None:
            self._channels.abort()

    def close(self) -> None:
        """Drop the channels with their links' cached specs: the next generation begins."""
        self.abort()
        if self._channels is not None:
            self._channels.close()
        self._channels = None
        self._complete.clear()
        self._senders.clear()
        self._receivers.clear()
        self._meetings = 0
        self.generation += 1

    def drain(self, seconds: float) -> None:
        """Wait until others have received what they still have to."""
        if self._channels is not None:
            self._channels.drain(seconds)

    @property
    def channels(self) -> Channels:
        """The channels of this generation."""
        assert self._channels is not None  # within a call
        return self._channels

    def sender(self, to: int) -> Sender:
        """The link to a rank."""
        if to not in self._senders:
            self._senders[to] = Sender(self.channels.outgoing(to), f"rank {self._rank} to rank {to}")
        return self._senders[to]

    def receiver(self, source: int) -> Receiver:
        """The link from a rank."""
        if source not in self._receivers:
            label = f"rank {source} to rank {self._rank}"
            self._receivers[source] = Receiver(self.channels.incoming(source), label, device=self._device)
        return self._receivers[source]
