"""A link: messages over a channel whose receiver must know the length of each buffer before it arrives.

    Sender.send("2F0", message) --[header | tensors]-->  Receiver.receive("2F0")
                  as predicted     buffers as long as predicted are posted ahead

Both ends keep for each message of a series the spec with which it was last sent. A message with that spec, as nearly
every one has, goes as one buffer: a header of 64 bytes and its tensors. Any other one is announced:

    as predicted           stream        [header | tensors]
    any other              stream        [header | nothing, as long as predicted]
                           extra stream  [the spec of the message, as JSON | gap | tensors]

    Where the channel has payloads, tensors that are on the device go there instead, in both cases:
                           payloads      [tensors]

so a posted buffer always has the size of what is sent into it, and both ends know from then on. The header says which
message of which call it begins; one that is not what was expected is an error at once, never taken for another.

A message with a tensor on the device of the payloads goes there whole: its tensors on the host would be moved to the
receiver's device anyway. One that is all on the host, or has no bytes, goes as where there are no payloads.

Terms: a phase = the messages that one begin() announces, each under a name; series = phases that are alike, which have
a name too.

Nearly all messages are like the one before, so one buffer each. Any other costs one message more, with its tensors, and
no receive is ever posted for the wrong size.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.common.accelerators import is_accelerator
from pipeline.data.pytrees import LINE
from pipeline.transports.channel import Handle, IncomingChannel, OutgoingChannel, PayloadSender
from pipeline.transports.message import Message, MessageSpec, spec_text
from pipeline.transports.packing import Packing
from pipeline.transports.spec_cache import HEADER, MessageSeries, SpecCache
from pipeline.transports.tensor_spec import sendable

__all__ = ["Receiver", "Sender"]

_HOST = torch.device("cpu")


class Sender:
    """The end of a channel where messages are sent.

    Args:
        outgoing: the channel. Only this object sends on it.
        label: how errors name it: "rank 0 to rank 1".
    """

    def __init__(self, outgoing: OutgoingChannel, label: str) -> None:
        self._outgoing = outgoing
        self._label = label
        self._specs = SpecCache(label)
        self._series: MessageSeries | None = None
        self._sent: list[tuple[Handle, ...]] = []
        self._reaped = 0

    def begin(self, series: str, names: Sequence[str]) -> None:
        """Begin a phase: these messages will be sent, in this order. The receiver begins the same.

        Args:
            series: the name of phases that are alike, so that each predicts the next.
            names: those of the messages, each once.
        """
        assert self._series is None  # a phase ends before the next begins
        self._series = self._specs.begin(series, names)
        self._sent, self._reaped = [], 0

    def send(self, name: str, message: Message) -> None:
        """Send the next message. Never blocks; nothing of the message is kept, only a packed copy.

        Raises:
            TypeError: the message holds something that cannot be sent.
            ChannelError: the channel is dead.
        """
        series = self._series
        assert series is not None  # a phase has begun
        index = len(self._sent)
        assert series.index_of.get(name) == index  # its messages are sent in the order of the phase
        spec = series.predicted[index]
        tensors, payloads = message.tensors, self._outgoing.payloads
        fits = spec.packing.fits(tensors)
        if not fits:
            tensors = sendable(tensors, f"{name} from {self._label}")
            fits = spec.packing.fits(tensors)
        if fits and spec.as_payload == _goes_as_payload(spec.packing, tensors, payloads) and spec.says(message):
            buffer = _packed(spec, series.header(index), tensors, payloads)
            self._sent.append((self._outgoing.send(buffer),))
        else:
            self._announce(series, index, message._replace(tensors=tensors), payloads)

    def reap(self, count: int) -> None:
        """Free the first `count` messages of this phase, which are known to have been received.

        Raises:
            ChannelError: the channel is dead.
        """
        assert count <= len(self._sent)  # only what was sent is received
        while self._reaped < count:
            for handle in self._sent[self._reaped]:
                handle.collect()
            self._sent[self._reaped] = ()
            self._reaped += 1

    def finish(self) -> None:
        """End the phase: wait until all that was sent may be freed.

        Raises:
            ChannelError: the channel is dead.
        """
        assert self._series is not None and len(self._sent) == len(self._series.names)  # all have been sent
        for index in range(self._reaped, len(self._sent)):
            for extra in self._sent[index][1:]:
                extra.wait()
        if self._reaped < len(self._sent):
            self._sent[-1][0].wait()
        self.reap(len(self._sent))
        self._series = None

    def _announce(
        self, series: MessageSeries, index: int, message: Message, payloads: PayloadSender | None
    ) -> None:
        """Send a message that is not as predicted, and predict the next one by it."""
        packing = Packing.of(message.tensors)
        as_payload = _goes_as_payload(packing, message.tensors, payloads)
        text = spec_text(message, packing, f"{series.names[index]} from {self._label}", as_payload)
        padded = text + bytes(-len(text) % LINE)
        nbytes = len(padded) + (0 if as_payload else packing.nbytes)
        buffer = _tensor_of(series.header(index, len(text), nbytes) + bytes(series.predicted[index].beside_header))
        extra = _packed(series.learn(index, text), padded, message.tensors, payloads)  # learned as the receiver does
        self._sent.append((self._outgoing.send(buffer), self._outgoing.send(extra, extra=True)))


class Receiver:
    """The end of a channel where messages arrive.

    Args:
        incoming: the channel. Only this object receives on it.
        label: how errors name it: "rank 0 to rank 1".
        window: how many receives are posted when it waits for a message.
        device: where tensors shall be; None: on the host. Those of a payload are where payloads come.

    Attributes:
        position: the number of messages of this phase that have been received, in order.
        arrived: when the last message that was received was there, of `perf_counter`.
    """

    def __init__(
        self, incoming: IncomingChannel, label: str, window: int = 3, device: torch.device | None = None
    ) -> None:
        self._incoming = incoming
        self._label = label
        self._window = window
        self._device = device or _HOST
        self._pins = is_accelerator(self._device)
        self._specs = SpecCache(label)
        self._series: MessageSeries | None = None
        self._posted: deque[tuple[Tensor, Handle]] = deque()
        self._arrived: dict[int, _Arrival] = {}
        self.position = 0
        self.arrived = -inf

    def begin(self, series: str, names: Sequence[str]) -> None:
        """Begin a phase, as the sender does, and post the first receives.

        Raises:
            ChannelError: the channel is dead.
        """
        assert self._series is None  # a phase ends before the next begins
        self._series = self._specs.begin(series, names)
        self.position = 0
        self._post_ahead(self._series)

    def receive(self, name: str) -> Message:
        """Wait for a message. Those before it are received too, and kept until they are taken.

        Raises:
            RuntimeError: another one has arrived.
            ChannelError: the channel is dead.
        """
        series = self._series
        assert series is not None  # a phase has begun
        index = series.index_of[name]
        while self.position <= index:
            self._receive_next(series)
        spec, buffer, start, payload = self._arrived.pop(index)
        if payload is None:
            return spec.message(spec.packing.unpack(buffer, start, self._device))
        buffer = payload()
        return spec.message(spec.packing.unpack(buffer, 0, buffer.device))

    def finish(self) -> None:
        """End the phase."""
        assert self._series is not None and self.position == len(self._series.names)  # all have been received
        assert not self._arrived  # and taken
        self._series = None

    def _post_ahead(self, series: MessageSeries) -> None:
        for index in range(self.position + len(self._posted), min(self.position + self._window, len(series.names))):
            spec = series.predicted[index]
            buffer = self._buffer(HEADER.size + spec.beside_header)
            self._posted.append((buffer, self._incoming.post(buffer)))

    def _receive_next(self, series: MessageSeries) -> None:
        """Wait for the message at `position`, and read its header."""
        self._post_ahead(series)  # now, when this rank would wait anyway, not when it has just got what it waited for
        buffer, handle = self._posted.popleft()
        handle.wait()
        self.arrived = perf_counter()
        index = self.position
        header = ctypes.string_at(buffer.data_ptr(), HEADER.size)
        if header == series.header(index):
            self._arrived[index] = self._arrival(series.predicted[index], buffer, HEADER.size)
        else:
            *_, length, nbytes = numbers = HEADER.unpack(header)
            if length <= 0 or header != series.header(index, length, nbytes):
                raise RuntimeError(self._specs.mistaken(series, index, numbers))
            self._arrived[index] = self._receive_announced(series, index, length, nbytes)
        self.position += 1

    def _receive_announced(self, series: MessageSeries, index: int, length: int, nbytes: int) -> _Arrival:
        extra = self._buffer(nbytes)
        self._incoming.post(extra, extra=True).wait()
        self.arrived = perf_counter()
        try:
            spec = series.learn(index, ctypes.string_at(extra.data_ptr(), length))
        except LookupError as error:
            raise RuntimeError(f"{series.names[index]} from {self._label} cannot be read: {error.args[0]}") from error
        return self._arrival(spec, extra, length + -length % LINE)

    def _arrival(self, spec: MessageSpec, buffer: Tensor, start: int) -> _Arrival:
        """A message whose header has arrived, which says whether a payload follows, and its length."""
        if not spec.as_payload:
            return _Arrival(spec, buffer, start, None)
        payloads = self._incoming.payloads
        if payloads is None:
            raise RuntimeError(f"{self._label}: a payload is to come, and this end of the channel has no payloads.")
        return _Arrival(spec, buffer, start, payloads.post(spec.packing.nbytes))

    def _buffer(self, nbytes: int) -> Tensor:
        """Memory to receive into; where an accelerator copies from it, in pages that do not move."""
        return torch.empty(nbytes, dtype=torch.uint8, device=_HOST, pin_memory=self._pins)


class _Arrival(NamedTuple):
    """A message that has been received: its spec, and where its tensors begin in a buffer, or their payload."""

    spec: MessageSpec
    buffer: Tensor
    start: int
    payload: Callable[[], Tensor] | None


def _goes_as_payload(packing: Packing, tensors: Sequence[Tensor | None], payloads: PayloadSender | None) -> bool:
    """Whether these tensors go as a payload."""
    if payloads is None or packing.nbytes == 0:
        return False
    return any([tensor is not None and payloads.takes(tensor) for tensor in tensors])


def _packed(
    spec: MessageSpec, header: bytes, tensors: Sequence[Tensor | None], payloads: PayloadSender | None
) -> Tensor:
    """The buffer that goes through the host; a payload is sent at once."""
    if not spec.as_payload or payloads is None:
        return spec.packing.pack(header, tensors)
    payloads.send(spec.packing.pack_payload(tensors, payloads.device))
    return _tensor_of(header)


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
