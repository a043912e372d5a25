"""The carrier between simulated accelerators: it promises what NCCL does, and no more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from carrier import Communicator, Simulated, Work
from torch import Tensor

from pipeline.common.accelerators import use_here
from pipeline.transports.channel import ChannelError
from pipeline.transports.payloads import Payloads

SOON = timedelta(seconds=30)
Made = TypeVar("Made")


def at_once(make: Callable[[int], Made]) -> list[Made]:
    """What a function makes of 0 and of 1, each in a thread. Raises what one of them raises."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(make, range(2)))


def carriers(kind: type[Simulated] = Simulated, **how: Any) -> list[Simulated]:
    return [kind(torch.device("sim", 1 + rank), **how) for rank in range(2)]


@contextmanager
def communicators() -> Iterator[list[Communicator]]:
    store, both = dist.HashStore(), carriers()
    found = at_once(lambda rank: both[rank].connect(store, rank, SOON))
    with torch.sim.unchecked():  # nobody keeps what is sent
        yield found
        at_once(lambda rank: found[rank].abort())


@contextmanager
def ends(kind: type[Simulated] = Simulated, pairs: Any = ((0, 1),), **how: Any) -> Iterator[list[list[Payloads]]]:
    """For each of the pairs the end that sends, and the one that receives."""
    store, both = dist.HashStore(), carriers(kind, **how)

    def connected(rank: int) -> list[Payloads]:
        stores = [dist.PrefixStore(str(pair), store) for pair in pairs]
        return [Payloads(str(p), both[rank], s, p.index(rank), SOON) for p, s in zip(pairs, stores, strict=True)]

    found = at_once(connected)
    try:
        yield [[found[pair[0]][number], found[pair[1]][number]] for number, pair in enumerate(pairs)]
    finally:
        at_once(lambda rank: [each.close() for each in found[rank]])


def payload(value: int, rank: int = 0) -> Tensor:
    return torch.full((100,), value, dtype=torch.uint8, device=torch.device("sim", 1 + rank))


def has_ended(work: Work) -> bool:
    """Whether it has, or does within a moment."""
    until = time.monotonic() + 0.2
    while not (found := work.is_completed()) and time.monotonic() < until:
        time.sleep(0.001)
    return found


# ------------------------------------------------------------------------------------------------ what NCCL promises


def test_a_transfer_ends_when_its_other_end_has_begun_and_the_next_one_waits_for_it() -> None:
    with communicators() as (one, other):
        ways = [one.send([payload(5)], 1, 0), one.recv([payload(0)], 1, 0), one.send([payload(6)], 1, 0)]
        answers: list[Callable[[], Work]] = [
            lambda: other.recv([payload(0, 1)], 0, 0), lambda: other.send([payload(7, 1)], 0, 0),
            lambda: other.recv([payload(0, 1)], 0, 0),
        ]  # fmt: skip
        for count, answer in enumerate(answers):
            assert [has_ended(work) for work in ways[count:]] == [False] * (3 - count)
            answer()
            assert has_ended(ways[count])


def test_two_ends_that_begin_in_another_order_wait_for_ever() -> None:
    with communicators() as (one, other):
        sends = [one.send([payload(5)], 1, 0), other.send([payload(6, 1)], 0, 0)]
        receives = [one.recv([payload(0)], 1, 0), other.recv([payload(0, 1)], 0, 0)]
        assert not any([has_ended(work) for work in sends + receives])
        at_once(lambda rank: (one, other)[rank].abort())
        for work in sends + receives:
            with pytest.raises(RuntimeError):
                work.wait()


@pytest.mark.parametrize("in_one", [False, True])
def test_both_ranks_may_send_before_they_receive_where_each_way_has_a_communicator(in_one: bool) -> None:
    with ends(pairs=((0, 1), (1, 0)), in_one=in_one, seconds=1.0) as ways:
        for rank, (out, _) in enumerate(ways):
            out.send(payload(rank, rank))
        expected = [into.post(100) for _, into in ways]
        if in_one:
            with pytest.raises(ChannelError, match="has died"):  # of that whose send is given up first
                [each() for each in expected]
        else:
            assert [each().tolist() for each in expected] == [[rank] * 100 for rank in range(2)]


# ------------------------------------------------------------------------------------------------------ missing waits


class WaitsForNothing(Simulated):
    """The thread waits for the data, the stream for nothing."""

    def take(self, buffer: Tensor, work: Work) -> Tensor:
        work.performed.wait()
        use_here([buffer])
        return buffer


class TellsNobody(Simulated):
    """The allocator does not hear that the current stream reads the buffer."""

    def take(self, buffer: Tensor, work: Work) -> Tensor:
        work.wait()
        return buffer


def receive(kind: type[Simulated]) -> None:
    with ends(kind) as ((out, into),):
        out.send(payload(3))
        found = into.post(100)()
        assert found.add(1).eq(4).all()
        del found
        torch.sim.check()


def send(then: Callable[[Tensor], object]) -> None:
    with ends() as ((out, into),):
        buffer = payload(3)
        out.send(buffer)
        then(buffer)
        assert into.post(100)().eq(3).all()


PROGRAMS: dict[str, tuple[Callable[..., None], Any, Any]] = {
    "the stream does not wait for what comes": (receive, Simulated, WaitsForNothing),
    "memory is given away while it is read": (receive, Simulated, TellsNobody),
    "what is sent is changed": (send, lambda buffer: buffer.sum(), lambda buffer: buffer.add_(1)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_missing_wait_is_a_race(name: str) -> None:
    program, right, wrong = PROGRAMS[name]
    program(right)
    with pytest.raises(RuntimeError, match="race"):
        program(wrong)


def test_a_payload_that_is_not_kept_until_it_has_gone_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(keep: Callable[..., None]) -> None:
        with ends() as ((out, into),):  # which send something, too, as they connect
            with monkeypatch.context() as patch:
                patch.setattr(Payloads, "_keep", keep)
                out.send(payload(3))
            torch.sim.check()
            into.post(100)()

    program(Payloads._keep)
    with pytest.raises(RuntimeError, match="race"):
        program(lambda *_: None)
