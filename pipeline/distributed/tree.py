"""The tree over which the ranks of a group exchange what is no payload: each knows its parent and its children.

    9 ranks: 0 is the parent of 1 ... 8        73 ranks: 0 has 8 children, each the parent of the next 8 ranks

    all to all    rows go up, each rank's subtree as one message; the whole goes down      2 (n - 1) messages
    broadcast     from any rank outwards                                                     n - 1 messages

A message says how long it is, and buffers are posted for the longest, so ranks that exchange different things find that
out. Where a rank has more than 16 KB, the rest of all goes in a second turn. No rank waits for what it sends: the
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
import struct
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.distributed.connections import Connections

CHILDREN = 8  # the most that a rank has
ROOM = 2**14  # bytes of a rank that go at once
_LENGTH = struct.Struct("<q")


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


def all_to_all(connections: Connections, rank: int, size: int, data: bytes) -> list[bytes]:
    """The bytes that each rank gives, by rank.

    Raises:
        ChannelError: a channel died.
    """
    rows = _turn(connections, place_in_tree(rank, size), size, data, ROOM)
    longest = max(length for length, _ in rows)
    if longest <= ROOM:
        return [beginning for _, beginning in rows]
    rests = _turn(connections, place_in_tree(rank, size), size, data[ROOM:], longest - ROOM)
    return [beginning + rest for (_, beginning), (_, rest) in zip(rows, rests, strict=True)]


def _turn(connections: Connections, place: TreePlace, size: int, data: bytes, room: int) -> list[tuple[int, bytes]]:
    """For each rank how much it has, and the beginning of that: as much as there is room for."""
    buffers = [_buffer(len(child), room) for child in place.children]
    posted = [
        connections.incoming(child.start).post(buffer) for child, buffer in zip(place.children, buffers, strict=True)
    ]
    for handle in posted:
        handle.wait()
    content = b"".join([_LENGTH.pack(len(data)), data[:room], *map(_content, buffers)])
    if place.parent is not None:
        connections.outgoing(place.parent).tell(_message(content))
        buffer = _buffer(size, room)
        connections.incoming(place.parent).post(buffer).wait()
        content = _content(buffer)
    if place.children:
        message = _message(content)
        for child in place.children:
            connections.outgoing(child.start).tell(message)
    return _rows(content, room)


def _buffer(ranks: int, room: int) -> Tensor:
    return torch.empty(_LENGTH.size + ranks * (_LENGTH.size + room), dtype=torch.uint8, device="cpu")


def _message(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(_LENGTH.pack(len(content)) + content), dtype=torch.uint8)


def _content(message: Tensor) -> bytes:
    address = message.data_ptr()
    (length,) = _LENGTH.unpack(ctypes.string_at(address, _LENGTH.size))
    return ctypes.string_at(address + _LENGTH.size, length)


def _rows(content: bytes, room: int) -> list[tuple[int, bytes]]:
    rows, begin = [], 0
    while begin < len(content):
        (length,) = _LENGTH.unpack_from(content, begin)
        begin, end = begin + _LENGTH.size, begin + _LENGTH.size + min(length, room)
        rows.append((length, content[begin:end]))
        begin = end
    return rows
