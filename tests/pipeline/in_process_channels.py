"""Channels within one process, for tests of a transport's users.

    local_pair        a send is done at once: the bytes are kept until they are received
    rendezvous_pair   a send is done when its receive has been posted: until then whoever waits for it waits

    apart_pair        a rendezvous_pair with payloads, which are matched in that way as well

All match what is sent with what is posted strictly in order, and are errors where more is sent than was posted, or
another payload than was expected. Their ends may be used by one thread or by several. There is one device only: tensors
of floating-point numbers stand for those on a GPU.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from pipeline.transports.channel import (
    ChannelError,
    Handle,
    IncomingChannel,
    OutgoingChannel,
    PayloadReceiver,
    PayloadSender,
)
from pipeline.transports.testing import ChannelEnds

_STREAM, _EXTRA, _PAYLOADS = range(3)


def local_pair() -> AbstractContextManager[ChannelEnds]:
    """A channel within this process. It keeps what is sent until it is received."""
    return _in_process(rendezvous=False)


def rendezvous_pair() -> AbstractContextManager[ChannelEnds]:
    """A channel within this process on which a send is done when its receive has been posted, as NCCL's are."""
    return _in_process(rendezvous=True)


def apart_pair() -> AbstractContextManager[ChannelEnds]:
    """A channel within this process with payloads, whose bytes are read when their receive is posted."""
    return _in_process(rendezvous=True, has_payloads=True)


@contextmanager
def _in_process(rendezvous: bool, has_payloads: bool = False) -> Iterator[ChannelEnds]:
    channel = _InProcessChannel(rendezvous)
    yield ChannelEnds(_InProcessEnd(channel, has_payloads), _InProcessEnd(channel, has_payloads), channel.abort)
    channel.abort()


class _Transfer(Handle):
    """A buffer that is sent or posted; None: it has gone, or come."""

    def __init__(self, channel: _InProcessChannel, buffer: Tensor | None) -> None:
        self.buffer = buffer
        self.mismatch: str | None = None
        self._channel = channel

    def wait(self) -> None:
        changed = self._channel.changed
        with changed:
            changed.wait_for(lambda: self.buffer is None or self.mismatch or self._channel.is_dead)
            if self.mismatch:
                raise RuntimeError(self.mismatch)
            if self.buffer is not None:
                raise ChannelError("the channel was given up.")


class _InProcessChannel:
    """Three streams; on each the first that was sent goes where the first posted receive says."""

    def __init__(self, rendezvous: bool) -> None:
        self.changed = threading.Condition()
        self.is_dead = False
        self._rendezvous = rendezvous
        self._sent: tuple[deque[_Transfer], ...] = (deque(), deque(), deque())
        self._posted: tuple[deque[_Transfer], ...] = (deque(), deque(), deque())

    def send(self, buffer: Tensor, stream: int) -> Handle:
        if self._rendezvous:
            return self._begun(self._sent, buffer, stream)
        self._begun(self._sent, buffer.clone(), stream)
        return _Transfer(self, None)

    def post(self, buffer: Tensor, stream: int) -> Handle:
        return self._begun(self._posted, buffer, stream)

    def abort(self) -> None:
        with self.changed:
            self.is_dead = True
            self.changed.notify_all()

    def _begun(self, queues: tuple[deque[_Transfer], ...], buffer: Tensor, stream: int) -> _Transfer:
        transfer = _Transfer(self, buffer)
        with self.changed:
            if self.is_dead:
                raise ChannelError("the channel was given up.")
            queues[stream].append(transfer)
            if self._sent[stream] and self._posted[stream]:
                _transfer(self._sent[stream].popleft(), self._posted[stream].popleft(), stream == _PAYLOADS)
                self.changed.notify_all()
        return transfer


class _InProcessEnd(OutgoingChannel, IncomingChannel):
    """Either end of a channel."""

    payloads: _InProcessPayloads | None

    def __init__(self, channel: _InProcessChannel, has_payloads: bool) -> None:
        self._channel = channel
        self.payloads = _InProcessPayloads(channel) if has_payloads else None

    def send(self, buffer: Tensor, extra: bool = False) -> Handle:
        return self._channel.send(buffer, _EXTRA if extra else _STREAM)

    def post(self, buffer: Tensor, extra: bool = False) -> Handle:
        return self._channel.post(buffer, _EXTRA if extra else _STREAM)


class _InProcessPayloads(PayloadSender, PayloadReceiver):
    device = torch.device("cpu")

    def __init__(self, channel: _InProcessChannel) -> None:
        self._channel = channel

    def takes(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point()

    def send(self, buffer: Tensor) -> None:
        self._channel.send(buffer, _PAYLOADS)

    def post(self, nbytes: int) -> Callable[[], Tensor]:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        handle = self._channel.post(buffer, _PAYLOADS)

        def take() -> Tensor:
            handle.wait()
            return buffer

        return take


def _transfer(sent: _Transfer, posted: _Transfer, exactly: bool) -> None:
    source, target = sent.buffer, posted.buffer
    assert source is not None and target is not None  # neither has been matched before
    nbytes = source.numel()
    if nbytes > target.numel() or exactly and nbytes < target.numel():
        sent.mismatch = posted.mismatch = f"{nbytes} bytes were sent where {target.numel()} were expected."
        return
    target.numpy()[:nbytes] = source.numpy()  # whatever inference mode either was made in
    sent.buffer = posted.buffer = None
