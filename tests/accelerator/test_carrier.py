"""Payloads between simulated accelerators: what NCCL promises, and that what it does not promise is found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from carrier import Simulated, Work
from torch import Tensor

from pipeline.common.accelerators import use_here
from pipeline.transports.channel import ChannelError, PayloadsIn, PayloadsOut
from pipeline.transports.distributed import Channels
from pipeline.transports.payloads import Payloads
from pipeline.transports.testing import Pair, check_transport

SIZE = 100  # bytes


@contextmanager
def channels(*carriers: Simulated) -> Iterator[Sequence[Channels]]:
    """The channels of two ranks, both in this process."""
    store, found = dist.HashStore(), dict[int, Channels]()

    def connect(rank: int) -> None:
        found[rank] = Channels(store, "it", rank, [(0, 1), (1, 0)], timedelta(seconds=30), carriers[rank])

    threads = [threading.Thread(target=connect, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2, "the two ranks did not connect"
    try:
        yield [found[0], found[1]]
    finally:
        for each in found.values():
            each.close()


def two(kind: type[Simulated] = Simulated, **how: Any) -> list[Simulated]:
    return [kind(torch.device("sim", 1 + rank), **how) for rank in range(2)]


@contextmanager
def pair() -> Iterator[Pair]:
    with channels(*two()) as both:

        def abort() -> None:
            for each in both:
                each.abort()

        yield Pair(both[0].outgoing(1), both[1].incoming(0), abort)


def ends(both: Sequence[Channels], source: int, to: int) -> tuple[PayloadsOut, PayloadsIn]:
    out, into = both[source].outgoing(to).payloads, both[to].incoming(source).payloads
    assert out is not None and into is not None
    return out, into


def payload(value: int, device: int = 1) -> Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8, device=f"sim:{device}")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_channels_pass_every_check() -> None:
    check_transport(pair)


def test_a_send_ends_when_its_receive_is_posted_and_what_is_behind_it_begins_then() -> None:
    carriers = two()
    store, groups = dist.HashStore(), dict[int, Any]()

    def connect(rank: int) -> None:
        groups[rank] = carriers[rank].connect(store, rank, timedelta(seconds=30))

    thread = threading.Thread(target=connect, args=(0,))
    thread.start()
    connect(1)
    thread.join()
    sends = [groups[0].send([payload(value)], 1, 0) for value in range(3)]
    sends.append(groups[0].recv([payload(9)], 1, 0))
    behind = groups[1].send([payload(7, 2)], 0, 0)  # nor does it come past what stands before its receive
    for begun in range(3):
        time.sleep(0.05)
        assert [settled(work, False) for work in sends] == [True] * begun + [False] * (4 - begun)
        groups[1].recv([payload(9, 2)], 0, 0) if begun else None
        if not begun:
            assert not settled(behind, False)
            break
    for group in groups.values():
        group.abort()


def settled(work: Work, expected: bool) -> bool:
    """Whether it has ended, if need be soon."""
    until = time.monotonic() + 10
    while (found := work.is_completed()) != expected and expected and time.monotonic() < until:
        time.sleep(0.001)
    return found
