"""The gloo transport: bytes between processes, with a process group for each ordered pair of ranks.

    rank 0                                                    rank 1
    outgoing(1).send ---- group of the pair (0, 1) ---------> incoming(0).post
    incoming(1).post <--- group of the pair (1, 0) ---------- outgoing(0).send

A receive never stands before a send of the other way in one queue: each pair has a connection of its own. All groups
of a rank share one device, which is one thread; groups have none of their own, since only point-to-point messages are
sent. The streams of a channel are tags. gloo is not told how long a message is: one that is longer than the buffer
posted for it ends the process, a shorter one leaves garbage (`pipeline.transports.link` sees that neither happens).

Payloads have a group beside that one (`pipeline.transports.payloads`), for the pairs for which `carry` makes one.

Nothing ends a group but a wait that runs out: `abort` posts a receive on each, of which nobody knows, and waits for it
for a millisecond. That wakes those who wait, but for a message that is under way: once some of it has been written or
read, or a write has failed, gloo has it in no list of what waits (gloo/transport/tcp/pair.cc, signalException), and its
wait goes on until its time is over. So other threads wait for sends, and for long receives; a short one comes whole.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.transports.channel import ChannelError, Handle, IncomingChannel, OutgoingChannel
from pipeline.transports.payloads import Carrier, Payloads, drain
from pipeline.transports.waiters import Waiters

_STREAM, _EXTRA, _NOBODYS = 0, 1, 2  # tags
_SHORT = 2**16  # bytes that a socket has room for
LAST_WORDS = 1.0  # seconds for payloads under way when a channel is given up: calls that went well need theirs


class Channels:
    """The channels of this rank.

    Every rank that a pair names makes one, with the same pairs; it returns when those have connected.

    Args:
        store: where ranks find each other; no other channels are in it.
        rank: this process.
        pairs: (a, b) for each channel from rank a to rank b. Those without this rank are skipped.
        timeout: how long to wait for others: to connect, and for a message.
        carrier: what payloads of this rank travel over; None: everything goes through the host.

    Raises:
        ChannelError: another rank did not connect in time.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        pairs: Iterable[tuple[int, int]],
        timeout: timedelta,
        carrier: Carrier | None = None,
    ) -> None:
        self._rank = rank
        self._timeout = timeout
        self._carrier = carrier
        self._ending = threading.Lock()
        self._waiters = Waiters()
        self._channels: dict[tuple[int, int], _GlooChannel] = {}
        self.connect(store, pairs)

    def connect(self, store: dist.Store, pairs: Iterable[tuple[int, int]]) -> None:
        """Connect more pairs, as every rank does that they name; those that have channels are skipped.

        Raises:
            ChannelError: another rank did not connect in time.
        """
        options, channels = _options(self._timeout), {}
        # In one order on all ranks: of the pairs not yet connected, both ranks of the first one are at it.
        for pair in sorted(set(pairs) - self._channels.keys()):
            if self._rank in pair:
                channels[pair] = _GlooChannel(store, pair, self._rank, options, self._waiters)
        with self._ending:
            self._channels.update(channels)

    def carry(self, store: dist.Store, pair: tuple[int, int]) -> None:
        """Connect the devices of a channel: its ends have payloads from now on.

        Returns when both ranks have called this. Where several channels are connected, all ranks take them in one
        order: see `Connections.connect`.

        Args:
            store: where the two find each other; nothing else is in it.
            pair: the channel. Both of its ranks have a carrier, and their places differ.

        Raises:
            ChannelError: the other rank did not connect in time, or the channels were closed meanwhile.
        """
        assert self._carrier is not None  # it has a place
        name = self._channels[pair].name
        payloads = Payloads(name, self._carrier, store, pair.index(self._rank), self._timeout)
        with self._ending:
            if pair in self._channels:
                self._channels[pair].payloads = payloads
                return
        payloads.close()
        raise ChannelError(f"{name} has been closed.")

    def outgoing(self, to: int) -> OutgoingChannel:
        """The channel from this rank to another."""
        return self._channels[self._rank, to]

    def incoming(self, source: int) -> IncomingChannel:
        """The channel from another rank to this one."""
        return self._channels[source, self._rank]

    def abort(self) -> None:
        """Give all channels up: whoever waits on one, here or on the other rank, gets a ChannelError at once.

        But for a send of the other rank that meets the closed connection: its wait goes on until that rank gives up,
        too. May be called from any thread, and more than once.
        """
        with self._ending:
            _at_once([channel.abort for channel in self._channels.values()])
            self._waiters.wake()
            drain(self._all_payloads(), LAST_WORDS)
            for payloads in self._all_payloads():
                payloads.abort()

    def drain(self, seconds: float) -> None:
        """Wait until the payloads under way have gone and come, but no longer than that: `close` ends them.

        Handles say nothing of payloads; so this is for whoever leaves while all is well.
        """
        with self._ending:
            drain(self._all_payloads(), seconds)

    def close(self) -> None:
        """End the channels: afterwards no thread and no socket of them is left.

        The other ranks have received what this one sent when its handles have been waited for and they have said so;
        before, they may lose it.
        """
        with self._ending:
            for payloads in self._all_payloads():
                payloads.close()
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()
            self._waiters.wake()

    def _all_payloads(self) -> list[Payloads]:
        return [channel.payloads for channel in self._channels.values() if channel.payloads is not None]


class _GlooChannel(OutgoingChannel, IncomingChannel):
    """This rank's end of one channel: the group of the pair, and what is under way on it."""

    payloads: Payloads | None = None

    def __init__(
        self, store: dist.Store, pair: tuple[int, int], rank: int, options: Any, waiters: Waiters
    ) -> None:
        source, to = pair
        self.name = f"the channel from rank {source} to rank {to}"
        self._other = 1 if rank == source else 0  # which of the two in the group
        self._is_given_up = False
        self._waiters = waiters
        self._under_way: dict[int, dist.Work] = {}  # each keeps its buffer
        self._told_handle: Handle | None = None
        self._count = 0
        try:
            meeting_place = dist.PrefixStore(f"channels/{source}to{to}", store)
            self._group = _gloo()(meeting_place, 1 - self._other, 2, options)
        except RuntimeError as error:
            raise ChannelError(f"{self.name} cannot be connected: {error}") from error

    # Whoever keeps an error keeps what the variables of these functions hold: so no group, and no work.

    def begin(self, buffer: Tensor, sends: bool, extra: bool) -> Handle:
        """Begin to send or to receive."""
        if self._group is None or self._is_given_up:
            raise self._error()
        begin = self._group.send if sends else self._group.recv
        try:
            work = begin([buffer], self._other, _EXTRA if extra else _STREAM)
        except RuntimeError as error:
            del begin
            raise self._error() from error
        self._count += 1
        self._under_way[self._count] = work
        return _WorkHandle(self, self._count, not sends and buffer.numel() <= _SHORT)

    def send(self, buffer: Tensor, extra: bool = False) -> Handle:
        return self.begin(buffer, True, extra)

    def tell(self, buffer: Tensor) -> None:
        if self._told_handle is not None:
            self._told_handle.collect()  # it has been received
        self._told_handle = self.send(buffer)

    def post(self, buffer: Tensor, extra: bool = False) -> Handle:
        return self.begin(buffer, False, extra)

    def wait(self, number: int, at_once: bool) -> None:
        """Wait for what was begun as this number. `at_once`: it has ended, or comes whole."""
        work = self._under_way.get(number)
        if work is None:
            raise self._error()
        try:
            has_ended = bool(work.wait()) if at_once else self._waiters.wait(work.wait)
        except RuntimeError as error:
            del work
            raise self._error() from error
        if not has_ended:
            raise self._error()
        self._under_way.pop(number, None)

    def abort(self) -> None:
        """Wake all that wait."""
        if self._group is None or self._is_given_up:
            return
        self._is_given_up = True
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:
            self._group.recv([nothing], self._other, _NOBODYS).wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass  # as it must: the wait ran out, and the group with it

    def close(self) -> None:
        """Drop the group. What is under way would keep it."""
        self._told_handle = None
        self._under_way.clear()
        self._group = None

    def _error(self) -> ChannelError:
        if self._group is None:
            return ChannelError(f"{self.name} has been closed.")
        if self._is_given_up:
            return ChannelError(f"{self.name} was given up by this rank.")
        return ChannelError(f"{self.name} has died: the other rank is gone, gave it up, or did not answer in time.")


class _WorkHandle(Handle):
    __slots__ = ("_channel", "_number", "_comes_whole")

    def __init__(self, channel: _GlooChannel, number: int, comes_whole: bool) -> None:
        self._channel: _GlooChannel | None = channel
        self._number = number
        self._comes_whole = comes_whole

    def wait(self) -> None:
        if self._channel is not None:
            self._channel.wait(self._number, self._comes_whole)
            self._channel = None

    def collect(self) -> None:
        if self._channel is not None:
            self._channel.wait(self._number, True)
            self._channel = None


def _at_once(works: Iterable[Callable[[], None]]) -> None:
    """Run all works, each in a thread of its own; in this one where none starts: Python 3.12 starts none as it ends."""
    threads = []
    for work in works:
        thread = threading.Thread(target=work, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            work()
        else:
            threads.append(thread)
    for thread in threads:
        thread.join()


def _options(timeout: timedelta) -> Any:
    """One device for all groups, and no threads beside its own: only collectives need them."""
    options = _gloo()._Options()
    options._devices = [_device()]
    options._threads = 0
    options._timeout = timeout
    return options


def _device() -> Any:
    """As torch.distributed chooses it: the interface that GLOO_SOCKET_IFNAME names, or the one of the host's name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return _gloo().create_device(interface=interface, lazy_init=False)
    return _gloo().create_default_device(lazy_init=False)


def _gloo() -> Any:
    """The class of process groups, of which torch's annotations know little; a torch without gloo has none."""
    return dist.ProcessGroupGloo
