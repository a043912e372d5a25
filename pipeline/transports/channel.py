"""The interface of a channel: the requirements on a way to move bytes between two ranks.

    rank a                                                     rank b
    OutgoingChannel.send(buffer) -> Handle   ~~ in order ~~>   IncomingChannel.post(buffer) -> Handle
    OutgoingChannel.send(buffer, extra=True) ~~ in order ~~>   IncomingChannel.post(buffer, extra=True)
    OutgoingChannel.payloads.send(buffer)    ~~ in order ~~>   IncomingChannel.payloads.post(nbytes) -> take()

A channel is one ordered pair of ranks and two streams: the usual one and an extra one. On each stream the first buffer
sent fills the first buffer posted, the second the second; what happens on one stream never waits for the other.
Buffers are one-dimensional, contiguous, of dtype uint8 and on the host. A posted buffer is as long as the one that is
sent into it, or longer, and what is sent fills its beginning: whoever posts sees to that, since not every channel could
tell. `check_transport` of `pipeline.transports.testing` tries whether a channel keeps to this.

A channel between two devices may have a third stream: payloads, which stay on the devices. The host waits for none of
them. Nothing is posted ahead there: a receive is begun when the header has come that says how long the payload is.
Either both ends have that stream, or neither; both may get it later, between two messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor


class ChannelError(RuntimeError):
    """A channel has died: the other rank is gone, or one of the two gave the channel up. It stays dead."""


class Handle(ABC):
    """One buffer under way."""

    @abstractmethod
    def wait(self) -> None:
        """Block until a sent buffer may be given away, or a posted one holds what was sent.

        On one stream, what was begun before has then ended, too. Further calls return at once.

        Raises:
            ChannelError: the channel died before.
        """

    def collect(self) -> None:
        """`wait`, for what is known to have ended: the other end has received it, or what was sent after it."""
        self.wait()


class PayloadSender(ABC):
    """The sending end of the payloads of a channel.

    Attributes:
        device: where buffers must be.
    """

    device: torch.device

    @abstractmethod
    def takes(self, tensor: Tensor) -> bool:
        """Whether a message that holds this tensor goes as a payload."""

    @abstractmethod
    def send(self, buffer: Tensor) -> None:
        """Begin to send a buffer when the current stream has written it, and return at once.

        Args:
            buffer: [bytes] uint8, not empty. It is the channel's from now on, which lets it go when it has gone.

        Raises:
            ChannelError: the channel is dead.
        """


class PayloadReceiver(ABC):
    """The receiving end of the payloads of a channel."""

    @abstractmethod
    def post(self, nbytes: int) -> Callable[[], Tensor]:
        """Begin to receive the next payload, and return at once.

        Args:
            nbytes: exactly as many as will be sent.

        Returns:
            What gives the payload, once: [bytes] uint8, on the device, for use in the stream that is current then.
            Where the device is a GPU, that stream waits for it, and the host does not. A ChannelError: the channel died
            before.

        Raises:
            ChannelError: the channel is dead.
        """


class OutgoingChannel(ABC):
    """The sending end of a channel.

    Attributes:
        payloads: the stream of payloads; None: everything goes through the host.
    """

    payloads: PayloadSender | None = None

    @abstractmethod
    def send(self, buffer: Tensor, extra: bool = False) -> Handle:
        """Begin to send a buffer, and return at once.

        Args:
            buffer: [bytes] uint8. It is kept, and must not change, until its handle has been waited for.
            extra: on the extra stream.

        Raises:
            ChannelError: the channel is dead.
        """

    def tell(self, buffer: Tensor) -> None:
        """`send` a buffer for which nobody waits: the other end has received it before the next one is told.

        Raises:
            ChannelError: the channel is dead.
        """
        self.send(buffer)


class IncomingChannel(ABC):
    """The receiving end of a channel.

    Attributes:
        payloads: the stream of payloads; None: everything goes through the host.
    """

    payloads: PayloadReceiver | None = None

    @abstractmethod
    def post(self, buffer: Tensor, extra: bool = False) -> Handle:
        """Say where the next buffer of a stream shall go that has no place yet, and return at once.

        Args:
            buffer: [bytes] uint8, at least as long as what will be sent, which fills its beginning. It is kept until
                its handle is waited for.
            extra: on the extra stream.

        Raises:
            ChannelError: the channel is dead.
        """
