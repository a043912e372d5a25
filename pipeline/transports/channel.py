"""What must a way to move bytes between two ranks be able to do?

    rank a                                              rank b
    Outgoing.send(buffer) -> Handle   ~~ in order ~~>   Incoming.post(buffer) -> Handle
    Outgoing.send(buffer, extra=True) ~~ in order ~~>   Incoming.post(buffer, extra=True)

A channel is one ordered pair of ranks and two streams: the usual one and an extra one. On each stream the first buffer
sent fills the first buffer posted, the second the second; what happens on one stream never waits for the other.
Buffers are one-dimensional, contiguous, of dtype uint8 and on the host. A posted buffer has the size of the one that
is sent into it: `pipeline.transports.link` sees to that, since not every channel could tell. `check_transport` of
`pipeline.transports.testing` tries whether a channel keeps to this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class ChannelError(RuntimeError):
    """A channel has died: the other rank is gone, or one of the two gave the channel up. It stays dead."""


class Handle(ABC):
    """One buffer under way."""

    @abstractmethod
    def wait(self) -> None:
        """Block until a sent buffer may be given away, or a posted one holds what was sent.

        Further calls return at once.

        Raises:
            ChannelError: the channel died before.
        """


class Outgoing(ABC):
    """Where a channel begins."""

    @abstractmethod
    def send(self, buffer: Tensor, extra: bool = False) -> Handle:
        """Begin to send a buffer, and return at once.

        Args:
            buffer: [bytes] uint8. It is kept, and must not change, until its handle has been waited for.
            extra: on the extra stream.

        Raises:
            ChannelError: the channel is dead.
        """


class Incoming(ABC):
    """Where a channel ends."""

    @abstractmethod
    def post(self, buffer: Tensor, extra: bool = False) -> Handle:
        """Say where the next buffer of a stream shall go that has no place yet, and return at once.

        Args:
            buffer: [bytes] uint8, exactly as long as what will be sent. It is kept until its handle is waited for.
            extra: on the extra stream.

        Raises:
            ChannelError: the channel is dead.
        """
