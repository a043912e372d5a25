"""Means over replicas: each is the sum in the order of the replicas, and no order of transfers waits for ever."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from in_process_channels import local_pair

from pipeline.distributed.data_parallel import gradient_means
from pipeline.distributed.data_parallel.gradient_means import GradientReducer
from pipeline.distributed.data_parallel.shards import GradientBucket
from pipeline.transports.link import Receiver, Sender

Transfer = tuple[bool, tuple[int, int], str]  # does it send; from, to; the name


class Recorded:
    """An end of a link, whose transfers are noted in the order in which they are begun."""

    def __init__(self, link, pair, began: list[Transfer]) -> None:
        self.begin, self.finish, self._link, self._pair, self._began = link.begin, link.finish, link, pair, began

    def send(self, name, message) -> None:
        self._began.append((True, self._pair, name))
        self._link.send(name, message)

    def receive(self, name):
        message = self._link.receive(name)
        self._began.append((False, self._pair, name))
        return message


class Connections:
    def __init__(self, rank: int, pairs, began: list[Transfer]) -> None:
        others = [other for here, other in pairs if here == rank]
        self.sender = {
            to: Recorded(Sender(pairs[rank, to].outgoing, ""), (rank, to), began) for to in others
        }.__getitem__
        self.receiver = {
            source: Recorded(Receiver(pairs[source, rank].incoming, ""), (source, rank), began) for source in others
        }.__getitem__


def reduced(replicas: int, buckets: int):
    """The means of each replica, and the order in which each begins its transfers."""
    parameters = [torch.zeros(7, dtype=torch.float64) for _ in range(buckets)]
    layout = [GradientBucket((index,), (parameter,)) for index, parameter in enumerate(parameters)]
    began: list[list[Transfer]] = [[] for _ in range(replicas)]
    found: dict[int, list[torch.Tensor]] = {}
    with ExitStack() as stack:
        pairs = {pair: stack.enter_context(local_pair()) for pair in permutations(range(replicas), 2)}

        def run(rank: int) -> None:
            connections = Connections(rank, pairs, began[rank])
            ranks = SimpleNamespace(rank=rank, size=replicas, connections=connections, monitor=SimpleNamespace(at=""))
            ranks.connect = lambda pairs: None
            reducer = GradientReducer(ranks, "it", layout)  # type: ignore[arg-type]
            grads = {id(parameter): gradient(rank, index) for index, parameter in enumerate(parameters)}
            while reducer.unsent:
                reducer.send(grads)
            found[rank] = [mean for _, mean in reducer.means(reducer.receive(), [None] * replicas)]

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(replicas)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    return [found[rank] for rank in range(replicas)], began


def gradient(rank: int, index: int) -> torch.Tensor:
    return torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + index))


def left_waiting(began: list[list[Transfer]], room: int) -> int:
    """How many transfers never end, on devices that begin them in order and have room for so many at a time.

    Transfers of one connection run one after the other; each ends when both of its ends have begun.
    """
    queues, running = [list(each) for each in began], [list[Transfer]() for _ in began]
    moved = True
    while moved:
        moved = False
        for queue, now in zip(queues, running, strict=True):
            for transfer in list(queue):
                if len(now) == room:
                    break
                if all(other[:2] != transfer[:2] for other in now):
                    queue.remove(transfer)
                    now.append(transfer)
                    moved = True
        for now in running:
            for sends, (source, to), name in list(now):
                if sends and (False, (source, to), name) in running[to]:
                    now.remove((True, (source, to), name))
                    running[to].remove((False, (source, to), name))
                    moved = True
    return sum(map(len, [*queues, *running]))


@pytest.mark.parametrize("replicas, buckets", [(2, 1), (3, 3), (9, 2), (10, 3), (12, 2), (17, 1)])
def test_means_are_those_in_the_order_of_the_replicas_and_transfers_end_with_room_for_nine(
    replicas: int, buckets: int
) -> None:
    means, began = reduced(replicas, buckets)
    for index in range(buckets):
        total = gradient(0, index)
        for rank in range(1, replicas):
            total += gradient(rank, index)
        for of_replica in means:
            assert torch.equal(of_replica[index], total / replicas)
    assert left_waiting(began, min(replicas, 9)) == 0


def test_without_that_order_many_replicas_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_means, "_AT_ONCE", 1000)
    _, began = reduced(12, 2)
    assert left_waiting(began, 9) > 0 and left_waiting(began, 12) == 0
