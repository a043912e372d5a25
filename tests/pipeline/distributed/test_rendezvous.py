"""Meetings: nothing is built before all have come, everyone builds it or no one, and who waits can be called off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from pipeline.distributed.rendezvous import LONGEST, AbortableRendezvous
from pipeline.transports.channel import ChannelError


def builders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pipe builder"]


class Rank(threading.Thread):
    """One that comes to a meeting, and what came of it."""

    def __init__(self, meeting: AbortableRendezvous, make: Callable[[dist.Store], Any], key: str = "it") -> None:
        super().__init__(daemon=True)
        self.meeting, self.make, self.key = meeting, make, key
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.meeting.build(self.key, self.make)
        except Exception as error:
            self.result = error

    def outcome(self) -> Any:
        self.join(10.0)
        assert not self.is_alive()
        return self.result


def meetings(size: int, store: dist.Store | None = None) -> list[AbortableRendezvous]:
    store = store or dist.HashStore()
    return [AbortableRendezvous(store, "test", size) for _ in range(size)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_nothing_is_built_before_all_have_come(size: int) -> None:
    came: list[int] = []
    seen: list[int] = []

    def make(store: dist.Store) -> str:
        seen.append(len(came))
        return "made"

    ranks = []
    for rank, meeting in enumerate(meetings(size)):
        time.sleep(0.02)
        came.append(rank)
        ranks.append(Rank(meeting, make))
    assert [rank.outcome() for rank in ranks] == ["made"] * size
    assert seen == [size] * size


def test_what_is_built_may_use_a_store_of_its_own_under_its_key() -> None:
    def make(store: dist.Store) -> int:
        return int(store.add("count", 1))

    both = meetings(2)
    for key, expected in (("one", [1, 2]), ("other", [1, 2])):
        ranks = [Rank(meeting, make, key) for meeting in both]
        assert sorted(rank.outcome() for rank in ranks) == expected


def test_who_waits_is_called_off_at_once_and_who_comes_later_is_told() -> None:
    first, second = meetings(2)
    made: list[object] = []
    rank = Rank(first, made.append)
    time.sleep(0.1)
    begun = time.monotonic()
    first.give_up()
    assert isinstance(rank.outcome(), ChannelError) and "not all ranks came" in str(rank.outcome())
    assert time.monotonic() - begun < 1.0
    assert "not all ranks came" in str(Rank(second, made.append).outcome())
    assert not made and not builders()


def test_one_that_is_given_up_stays_so_until_it_is_opened() -> None:
    first, second = meetings(2)
    first.give_up()
    assert isinstance(Rank(first, str, "a").outcome(), ChannelError)
    first.open()
    ranks = [Rank(first, lambda store: "made", "b")]
    time.sleep(0.1)
    ranks.append(Rank(second, lambda store: "made", "b"))
    assert [rank.outcome() for rank in ranks] == ["made", "made"]


def test_of_three_the_one_that_waits_is_told_that_another_gave_it_up() -> None:
    first, second, third = meetings(3)
    ranks = [Rank(first, str), Rank(second, str)]
    time.sleep(0.1)
    first.give_up()
    assert all("not all ranks came" in str(rank.outcome()) for rank in ranks)
    assert "not all ranks came" in str(Rank(third, str).outcome()) and not builders()


def test_who_gives_up_when_all_have_come_takes_part_or_the_others_would_wait() -> None:
    """Whatever the moment: what the others build is built by all, or by no one."""
    for number in range(40):
        both = meetings(2)
        built: list[int] = []
        ranks = [Rank(meeting, lambda store: built.append(1)) for meeting in both]
        time.sleep(0.0005 * number)
        both[0].give_up()
        other = ranks[1].outcome()
        ranks[0].outcome()
        until = time.monotonic() + 5.0
        while builders() and time.monotonic() < until:
            time.sleep(LONGEST / 10)
        assert len(built) == (0 if isinstance(other, ChannelError) else 2), number


def test_what_goes_wrong_in_the_making_is_told() -> None:
    def make(store: dist.Store) -> None:
        raise RuntimeError("no route to host")

    with pytest.raises(ChannelError, match="the ranks cannot connect: no route to host"):
        AbortableRendezvous(dist.HashStore(), "test", 1).build("it", make)


class Stopped(dist.Store):
    """One whose host is stopped: it holds its caller until that goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def clone(self) -> Stopped:
        return self

    def add(self, key: str, amount: int) -> int:
        self.goes_on.wait()
        raise RuntimeError("too late")


def test_who_waits_is_called_off_even_if_the_store_does_not_answer() -> None:
    store = Stopped()
    meeting = AbortableRendezvous(store, "test", 2)
    rank = Rank(meeting, str)
    time.sleep(0.1)
    begun = time.monotonic()
    meeting.give_up()
    assert "not all ranks came" in str(rank.outcome()) and time.monotonic() - begun < 1.0
    (helper,) = builders()
    store.goes_on.set()
    helper.join(5.0)
    assert not builders()


def test_a_store_that_is_gone_ends_the_wait() -> None:
    host = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, None, False, timeout=timedelta(seconds=30))
    rank = Rank(AbortableRendezvous(client, "test", 2), str)
    time.sleep(0.1)
    begun = time.monotonic()
    del host
    assert "the ranks cannot connect" in str(rank.outcome())
    assert time.monotonic() - begun < 5.0 and not builders()
