"""Payloads: the tensors of a message sent from device to device, beside its header.

    rank 0                                                        rank 1
    Payloads.send(buffer)    ---- group of two, in order --->    Payloads.post(nbytes) -> take
    kept until it has gone                                       take(): the current stream waits, the host does not

A Carrier is what they travel over: it makes the groups, which send, receive and abort, and of whose transfers
`is_completed` tells whether the device has done them. NCCL's is in `pipeline.transports.nccl`; all else is here, so
that it is tried over any other.

A group is used in one direction only, and both ends begin its transfers in one order, that of the headers. The first
is a byte that says nothing, sent while the ranks connect: only then does NCCL connect the two, and whoever connects
waits for the other; so that is done where all ranks keep to one order of pairs (`pipeline.distributed.connections`).

What is under way on several groups at a time shares a device: each transfer holds a few of its processors until the
other end has begun it, too. A rank has groups for those ranks alone that it exchanges values with: two for each
neighbour, on a line four, and none holds more than one transfer at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.common.accelerators import entered_streams, use_here
from pipeline.transports.channel import ChannelError, PayloadReceiver, PayloadSender

_PAUSE = 0.001  # seconds between two looks at what is under way


class Carrier(ABC):
    """The carrier of the payloads of a rank, whose groups enqueue on streams of their own, as NCCL's do.

    Args:
        device: where they are.
        place: what no other rank has that can exchange payloads with this one: it stands for the device.
    """

    def __init__(self, device: torch.device, place: str) -> None:
        self.device = device
        self.place = place
        self._stream = torch.Stream(device)

    @abstractmethod
    def connect(self, store: dist.Store, rank: int, timeout: timedelta) -> Any:
        """A group of two ranks, for point-to-point transfers.

        Args:
            store: where the two find each other; nothing else is in it.
            rank: 0 sends, 1 receives.
            timeout: how long to wait for the other.
        """

    def takes(self, tensor: Tensor) -> bool:
        """Whether a message that holds this tensor goes as a payload."""
        return tensor.device.type == self.device.type

    def receive(self, group: Any, nbytes: int) -> tuple[Tensor, Any]:
        """Begin to receive from rank 0 of the group: a new buffer on the device, and what is under way."""
        with entered_streams(self._stream):
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            return buffer, group.recv([buffer], 0, 0)

    def take(self, buffer: Tensor, work: Any) -> Tensor:
        """The buffer when it has come, for use in the current stream."""
        work.wait()  # the current stream does
        use_here([buffer])
        return buffer


class Payloads(PayloadSender, PayloadReceiver):
    """One end of the payloads of a channel.

    Args:
        name: of the channel, for errors.
        carrier: what they travel over.
        store: where the two ranks find each other; nothing else is in it.
        rank: 0 sends, 1 receives.
        timeout: how long to wait for the other.

    Raises:
        ChannelError: the other did not connect in time.
    """

    def __init__(self, name: str, carrier: Carrier, store: dist.Store, rank: int, timeout: timedelta) -> None:
        self.device = carrier.device
        self._name = name
        self._carrier = carrier
        self.is_given_up = False
        self._under_way: list[tuple[Any, Tensor | None]] = []  # with what must be kept meanwhile
        try:
            self._group = carrier.connect(store, rank, timeout)
        except RuntimeError as error:
            raise ChannelError(f"{name} cannot be connected for payloads: {error}") from error
        try:
            if rank == 0:
                self.send(torch.zeros(1, dtype=torch.uint8, device=self.device))
            else:
                self.post(1)()
        except BaseException:
            self.close()
            raise

    def takes(self, tensor: Tensor) -> bool:
        return self._carrier.takes(tensor)

    def send(self, buffer: Tensor) -> None:
        group = self._alive()
        try:
            work = group.send([buffer], 1, 0)
        except RuntimeError as error:
            raise self.error() from error
        self._keep(work, buffer)

    def post(self, nbytes: int) -> Callable[[], Tensor]:
        group = self._alive()
        try:
            buffer, work = self._carrier.receive(group, nbytes)
        except RuntimeError as error:
            raise self.error() from error
        self._keep(work, None)
        return partial(self._take, buffer, work)

    def _take(self, buffer: Tensor, work: Any) -> Tensor:
        try:
            payload = self._carrier.take(buffer, work)
        except RuntimeError as error:
            raise self.error() from error
        if self.is_given_up:  # then it may hold anything: the stream waits, and would not raise
            raise self.error()
        return payload

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self.is_given_up or all([work.is_completed() for work, _ in self._under_way])

    def abort(self) -> None:
        """End what is under way. From any thread."""
        if not self.is_given_up and self._group is not None:
            self.is_given_up = True
            self._group.abort()

    def close(self) -> None:
        """End the group, and drop it."""
        self.abort()
        self._under_way = []
        self._group = None

    def error(self) -> ChannelError:
        """The error for which nothing travels here any more."""
        if self.is_given_up:
            return ChannelError(f"{self._name} was given up by this rank.")
        return ChannelError(f"{self._name} has died: its payloads travel no more.")

    def _alive(self) -> Any:
        if self.is_given_up:
            raise self.error()
        return self._group

    def _keep(self, work: Any, buffer: Tensor | None) -> None:
        """Keep a transfer until it has ended, which the header's arrival does not prove. They end in order."""
        under_way = enumerate(self._under_way)
        first = next((index for index, (earlier, _) in under_way if not earlier.is_completed()), None)
        remaining = [] if first is None else self._under_way[first:]
        self._under_way = [*remaining, (work, buffer)]  # a new list: other threads may be reading the old one


def drain(payloads: Iterable[Payloads], seconds: float) -> None:
    """Wait until nothing is under way on these, but no longer than that."""
    waiting, end = list(payloads), monotonic() + seconds
    while waiting and monotonic() < end:
        waiting = [busy for busy in waiting if not busy.is_idle]
        if waiting:
            sleep(_PAUSE)
