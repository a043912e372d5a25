"""The tree over which the ranks of a group exchange what is no payload: each knows its parent and its children.

    9 ranks: 0 is the parent of 1 ... 8        73 ranks: 0 has 8 children, each the parent of the next 8 ranks

    all to all    rows go up, each rank's subtree as one message; the whole goes down      2 (n - 1) messages
    broadcast     from any rank outwards                                                     n - 1 messages

A row is JSON: how long the value of a rank is, and the value. A message is rows with commas between them, and ends with
a zero byte. Buffers are posted for the longest, so ranks that exchange different things find that out. Where a rank has
more than 16 KB, it sends the length alone, and all send all in a second turn. No rank waits for what it sends: the
answer from above, or the next row from below, shows that it has come.

A subtree is a range of ranks that begins with its root, so rows that are joined on their way up are in the order of the
ranks. The root is rank 0, the first stage: it has heard of all when it begins the forward, and in a step it is the last
one to end its backward.

Of the ways that were tried over gloo (everyone to everyone, one hub, a binary tree, recursive doubling) a tree of eight
children costs least processor time and least time at 2 to 8 ranks: a message costs more than a turn more for whoever
sends several. Nothing that goes from all to all takes fewer than 2 (n - 1) messages. What a rank sends and waits for
grows with the logarithm of n: 512 ranks are four levels, no rank has more than nine neighbours.
"""

from __future__ import annotations

import ctypes
import json
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.transports.distributed import Channels

CHILDREN = 8  # the most that a rank has
ROOM = 2**14  # bytes of a rank that go at once
_FRAME = 32  # bytes of a row around its value, at most


class TreePlace(NamedTuple):
    """A rank's place in the tree.

    Attributes:
        parent: None at the root.
        ranks: those of its subtree: itself, then its children's.
        children: the ranks of each child's subtree, which begin with the child.
    """

    parent: int | None
    ranks: range
    children: tuple[range, ...]

    @property
    def neighbours(self) -> list[int]:
        """The ranks that it exchanges with, the parent first."""
        children = [ranks.start for ranks in self.children]
        return children if self.parent is None else [self.parent, *children]

    def towards(self, rank: int) -> int | None:
        """The neighbour through which a rank is reached. None: it is this one."""
        if rank not in self.ranks:
            return self.parent
        return next((ranks.start for ranks in self.children if rank in ranks), None)


@lru_cache(maxsize=None)
def place_in_tree(rank: int, size: int) -> TreePlace:
    """The place of a rank among so many.

    Example:
        >>> place_in_tree(0, 3)
        TreePlace(parent=None, ranks=range(0, 3), children=(range(1, 2), range(2, 3)))
        >>> place_in_tree(12, 73).parent, place_in_tree(10, 73).children[-1]
        (10, range(18, 19))
    """
    parent, ranks = None, range(size)
    while True:
        below = ranks[1:]
        count = min(CHILDREN, len(below))
        children = tuple([below[len(below) * i // count : len(below) * (i + 1) // count] for i in range(count)])
        if rank == ranks.start:
            return TreePlace(parent, ranks, children)
        parent, ranks = ranks.start, next(child for child in children if rank in child)


def tree_pairs(size: int) -> list[tuple[int, int]]:
    """The ordered pairs of ranks that exchange."""
    places = [place_in_tree(rank, size) for rank in range(size)]
    return [(rank, neighbour) for rank, place in enumerate(places) for neighbour in place.neighbours]


def all_to_all(channels: Channels, rank: int, size: int, value: Any) -> list[Any]:
    """The values that the ranks give, by rank: what JSON can hold.

    Raises:
        ChannelError: a channel died.
    """
    place, text = place_in_tree(rank, size), json.dumps(value).encode()
    row = b"[%d, %b]" % (len(text), text)
    rows = _turn(channels, place, size, row if len(text) <= ROOM else b"[%d]" % len(text), ROOM)
    longest = max(length for length, *_ in rows)
    if longest > ROOM:
        rows = _turn(channels, place, size, row, longest)
    return [row_value for _, row_value in rows]


def _turn(channels: Channels, place: TreePlace, size: int, row: bytes, room: int) -> list[Any]:
    """The rows of all ranks, in each of which there is room for a value of so many bytes."""
    buffers = [_buffer(len(child), room) for child in place.children]
    posted = [
        channels.incoming(child.start).post(buffer) for child, buffer in zip(place.children, buffers, strict=True)
    ]
    for handle in posted:
        handle.wait()
    rows = b",".join([row, *map(_received, buffers)])
    if place.parent is not None:
        channels.outgoing(place.parent).tell(_message(rows))
        buffer = _buffer(size, room)
        channels.incoming(place.parent).post(buffer).wait()
        rows = _received(buffer)
    if place.children:
        message = _message(rows)
        for child in place.children:
            channels.outgoing(child.start).tell(message)
    all_rows: list[Any] = json.loads(b"[%b]" % rows)
    return all_rows


def _buffer(ranks: int, room: int) -> Tensor:
    return torch.empty(ranks * (_FRAME + room), dtype=torch.uint8, device="cpu")


def _message(rows: bytes) -> Tensor:
    return torch.frombuffer(bytearray(rows + b"\0"), dtype=torch.uint8)


def _received(message: Tensor) -> bytes:
    return ctypes.string_at(message.data_ptr())
