"""The tree over which ranks exchange: its shape, what comes to all, and how many messages that takes."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack
from math import log
from typing import Any

import pytest
from in_process_channels import local_pair
from torch import Tensor

from pipeline.distributed.tree import CHILDREN, ROOM, all_to_all, place_in_tree, tree_pairs
from pipeline.transports.channel import Handle, OutgoingChannel

SIZES = [*range(1, 84), 512, 585, 586]


def levels(rank: int, size: int) -> int:
    parent = place_in_tree(rank, size).parent
    return 0 if parent is None else 1 + levels(parent, size)


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_but_the_first_is_the_child_of_one_other(size: int) -> None:
    places = [place_in_tree(rank, size) for rank in range(size)]
    children = [(rank, child.start) for rank, place in enumerate(places) for child in place.children]
    assert sorted(child for _, child in children) == list(range(1, size))
    assert all(places[child].parent == rank for rank, child in children)
    assert sorted(tree_pairs(size)) == sorted([*children, *[(child, rank) for rank, child in children]])
    for rank, place in enumerate(places):
        assert list(place.ranks) == [rank, *[other for child in place.children for other in child]]
        assert [places[child.start].ranks for child in place.children] == list(place.children)


@pytest.mark.parametrize("size", SIZES)
def test_it_grows_with_the_logarithm(size: int) -> None:
    deepest = max(levels(rank, size) for rank in range(size))
    assert deepest <= log(1 + size * (CHILDREN - 1), CHILDREN) + 1e-9 and deepest <= 4
    assert all(len(place_in_tree(rank, size).neighbours) <= CHILDREN + 1 for rank in range(size))


@pytest.mark.parametrize("size", [2, 9, 10, 30])
def test_a_message_goes_from_any_rank_to_any_other_on_one_way(size: int) -> None:
    for source in range(size):
        for target in range(size):
            way = [source]
            while (there := place_in_tree(way[-1], size).towards(target)) is not None:
                way.append(there)
            assert way[-1] == target and len(set(way)) == len(way) <= 2 * levels(size - 1, size) + 1


class Counted(OutgoingChannel):
    """Counts what is sent from one rank to another."""

    def __init__(self, outgoing: OutgoingChannel, sent: Counter[tuple[int, int]], pair: tuple[int, int]) -> None:
        self._outgoing, self._sent, self._pair = outgoing, sent, pair

    def send(self, buffer: Tensor, extra: bool = False) -> Handle:
        self._sent[self._pair] += 1
        return self._outgoing.send(buffer, extra)


class Links:
    """What a rank knows of the connections."""

    def __init__(self, rank, pairs, sent) -> None:
        self._rank, self._pairs, self._sent = rank, pairs, sent

    def outgoing(self, to):
        return Counted(self._pairs[self._rank, to].outgoing, self._sent, (self._rank, to))

    def incoming(self, source):
        return self._pairs[source, self._rank].incoming


def exchanged(data: list[Any]) -> tuple[list[list[Any]], Counter[tuple[int, int]]]:
    """What comes to each rank, and how many messages went along each pair."""
    size, sent, found = len(data), Counter[tuple[int, int]](), dict[int, list[Any]]()
    with ExitStack() as stack:
        pairs = {pair: stack.enter_context(local_pair()) for pair in tree_pairs(size)}

        def run(rank: int) -> None:
            found[rank] = all_to_all(Links(rank, pairs, sent), rank, size, data[rank])  # type: ignore[arg-type]

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    return [found[rank] for rank in range(size)], sent


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 9, 10, 11, 17, 64, 80])
def test_what_all_give_comes_to_all_in_one_message_up_and_one_down(size: int) -> None:
    data = [[rank, 0.1 * rank, "\0é" * (rank * 5 % 37), None] for rank in range(size)]
    found, sent = exchanged(data)
    assert found == [data] * size
    assert sent == dict.fromkeys(tree_pairs(size), 1)
    assert sum(sent.values()) == 2 * (size - 1)


def test_no_rank_waits_for_what_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Handle] = []
    monkeypatch.setattr(Counted, "send", lambda self, buffer, extra=False: Watched(waited, self, buffer))
    for data in (["1", "", "3"], ["." * ROOM] * 10):
        assert exchanged(data)[0] == [data] * len(data) and not waited


class Watched(Handle):
    """Sends, and notes who waits for that."""

    def __init__(self, waited: list[Handle], counted: Counted, buffer: Tensor) -> None:
        self._waited, self._handle = waited, counted._outgoing.send(buffer)

    def wait(self) -> None:
        self._waited.append(self)
        self._handle.wait()


LONG = [(ROOM, 2, 3), (ROOM + 1, 2, 3), (2, 3 * ROOM, 4, ROOM + 1), (7, *[2] * 9, ROOM * 2)]


@pytest.mark.parametrize("lengths", LONG)
def test_what_is_long_goes_in_a_second_turn(lengths: tuple[int, ...]) -> None:
    data = [str(rank) * (length - 2) for rank, length in enumerate(lengths)]  # and two quotes
    found, sent = exchanged(data)
    assert found == [data] * len(data)
    assert set(sent.values()) == {1 + (max(lengths) > ROOM)}
