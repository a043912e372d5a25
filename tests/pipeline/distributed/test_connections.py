"""Which ranks are connected, for what, and in which order: topologies of 64 ranks, without a process."""

from __future__ import annotations

import random
import threading
from collections import Counter
from datetime import timedelta
from itertools import permutations, product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from payloads_over_gloo import OverGloo
from torch import nn

from pipeline.data.values import chain
from pipeline.distributed.assignment import schedule_over
from pipeline.distributed.connections import Connections
from pipeline.distributed.group import RankGroup
from pipeline.distributed.topology import PipeTopology
from pipeline.distributed.tree import CHILDREN, tree_pairs
from pipeline.execution.p2p_plan import P2PPlan
from pipeline.skip import Key
from pipeline.transports.channel import ChannelError
from pipeline.transports.distributed import Channels
from scheduler import ScheduleError, by_name, names

RANKS = 64
CPU = torch.device("cpu")


class Counted:
    """Stands for the channels, and counts what is connected."""

    def __init__(self, store: dist.Store, pairs, rank: int) -> None:
        self.pairs, self.carried, self.rank = [], Counter(), rank
        self.connect(store, pairs)

    def connect(self, store: dist.Store, pairs) -> None:
        self.pairs += [pair for pair in pairs if self.rank in pair and pair not in self.pairs]

    def carry(self, store: dist.Store, pair: tuple[int, int]) -> None:
        assert pair in self.pairs
        self.carried[pair] += 1


class Together:
    """A rendezvous to which all others have come."""

    is_given_up = False

    def __init__(self, store: dist.Store | None = None) -> None:
        self.store, self.keys = store or dist.HashStore(), []

    def build(self, key, make):
        self.keys.append(key)
        return make(dist.PrefixStore(key, self.store))


class OneOf:
    """What a Pipe knows of the ranks, one of which it is."""

    def __init__(self, rank: int, places: list[str]) -> None:
        self.rank, self.size, self.pipes, self.exchanges = rank, len(places), 0, 0
        self.places, self.payload_place, self.rendezvous = places, places[rank], Together()
        monitor = SimpleNamespace(at="")
        self.connections = Connections(rank, CPU, self.rendezvous, monitor, self.channels)  # type: ignore[arg-type]
        self.connections.connect(tree_pairs(self.size))

    def channels(self, store, pairs):
        self.made = Counted(store, pairs, self.rank)
        return self.made

    def exchange(self, text: str) -> list[str]:
        assert text == self.places[self.rank]
        self.exchanges += 1
        return self.places

    def connect(self, pairs) -> None:
        RankGroup.connect(self, pairs)  # type: ignore[arg-type]  # it has what that needs

    @property
    def channel_count(self) -> int:
        return len(self.made.pairs)

    @property
    def carried(self) -> list[tuple[int, int]]:
        return sorted(self.made.carried.elements())


GPUS = [f"GPU {rank}" for rank in range(RANKS)]


def on_64_ranks(name: str):
    """A schedule on 64 ranks, of as many stages and chunks as it takes."""
    for stages, chunks in product((RANKS, 2 * RANKS), (RANKS, 2 * RANKS)):
        try:
            return schedule_over(name, stages, chunks, RANKS)
        except ScheduleError:
            continue
    raise AssertionError(f"{name} has no form for {RANKS} ranks")


def model_of(stages: int, tied: bool) -> list[nn.Sequential]:
    layers = [nn.Linear(1, 1) for _ in range(stages)]
    if tied:
        layers[-1].weight = layers[0].weight
    return [nn.Sequential(layer) for layer in layers]


def connected(schedule, skips=(), tied: bool = False, places=GPUS, halves: bool = True) -> list[OneOf]:
    """The ranks after an evaluation, a step, and the ties of its gradients."""
    values = chain(schedule.stages, skips)
    stages, rank_of = model_of(schedule.stages, tied), schedule.placement.lane_of
    orders = [schedule.forward_half(), schedule.orders] if halves else [schedule.orders]
    plans = [P2PPlan(order, values, schedule.placement, 0).pairs for order in orders]
    ranks = []
    for rank in range(schedule.lanes):
        one = OneOf(rank, places)
        topology = PipeTopology(stages, rank_of, one)  # type: ignore[arg-type]
        for pairs in (*plans, topology.assignment.tied_pairs, *plans):
            one.connect(pairs)
        ranks.append(one)
    return ranks


@pytest.mark.parametrize("name", names())
def test_of_64_ranks_none_has_more_than_four_communicators(name: str) -> None:
    """With a skip from the first stage to the last, and a weight that both have."""
    schedule = on_64_ranks(name)
    skips = [(Key(None, "far"), 0, schedule.stages - 1)]
    ranks = connected(schedule, skips, tied=True)
    assert max(len(one.carried) for one in ranks) <= 4
    lane_of = schedule.placement.lane_of
    both = {(lane_of[stage], lane_of[stage + 1]) for stage in range(schedule.stages - 1)} | {(lane_of[0], lane_of[-1])}
    expected = {pair for one, other in both if one != other for pair in ((one, other), (other, one))}
    assert {pair for one in ranks for pair in one.carried} == expected
    for rank, one in enumerate(ranks):
        assert one.carried == sorted(pair for pair in expected if rank in pair)  # each once
        assert one.channel_count <= 2 * (CHILDREN + 1) + 4


def test_the_pairs_of_a_plan_are_the_same_on_all_ranks_and_only_those_that_send() -> None:
    schedule = by_name("1f1b", 8, 4)
    values = chain(8, [(Key(None, "far"), 1, 6)])
    forward = {*[(rank, rank + 1) for rank in range(7)], (1, 6)}
    for orders, expected in (
        (schedule.forward_half(), forward),
        (schedule.backward_half(), {(other, one) for one, other in forward}),
        (schedule.orders, forward | {(other, one) for one, other in forward}),
    ):
        plans = [P2PPlan(orders, values, schedule.placement, rank) for rank in range(8)]
        assert {plan.pairs for plan in plans} == {frozenset(expected)}
        assert all(set(plan.channels) == {pair for pair in expected if rank in pair} for rank, plan in enumerate(plans))


def test_an_evaluation_connects_no_way_back() -> None:
    schedule = by_name("1f1b", 4, 4)
    values = chain(4)
    one = OneOf(1, GPUS[:4])
    assert one.carried == []
    one.connect(P2PPlan(schedule.forward_half(), values, schedule.placement, 1).pairs)
    assert one.carried == [(0, 1), (1, 2)] and one.exchanges == 1
    one.connect(P2PPlan(schedule.orders, values, schedule.placement, 1).pairs)
    one.connect(P2PPlan(schedule.orders, values, schedule.placement, 1).pairs)
    assert one.carried == [(0, 1), (1, 0), (1, 2), (2, 1)] and one.exchanges == 2


def test_what_is_connected_is_not_connected_again() -> None:
    one = OneOf(1, [""] * 4)
    one.connect([(1, 2), (2, 1)])
    before = one.channel_count
    one.connect([(2, 1), (1, 2)])
    assert one.exchanges == 1 and one.rendezvous.keys == ["0/1", "0/2"]
    one.connect([(2, 1), (0, 1), (1, 2), (1, 3)])
    assert one.made.pairs[-1] == (1, 3) and one.channel_count == before + 1 and one.exchanges == 2


def test_ranks_without_a_device_of_their_own_have_no_payloads() -> None:
    schedule = by_name("1f1b", 4, 4)
    for one in connected(schedule, places=["", "", "", ""], halves=False):
        assert one.carried == [] and one.exchanges == 1
        assert one.rendezvous.keys == ["0/1", "0/2"]  # the tree's, and the phase's
    mixed = connected(schedule, places=["a", "a", "b", ""], halves=False)
    assert [one.carried for one in mixed] == [[], [(1, 2), (2, 1)], [(1, 2), (2, 1)], []]
    assert {tuple(one.rendezvous.keys) for one in mixed} == {("0/1", "0/2")}


def test_after_a_failure_what_was_connected_is_connected_again() -> None:
    schedule = by_name("1f1b", 4, 4)
    (one,) = connected(schedule, places=GPUS[:4])[1:2]
    before = one.carried
    one.rendezvous.give_up = one.made.abort = one.made.close = lambda: None
    one.connections.close()
    assert one.connections.are_closed
    one.connections.connect(tree_pairs(4))
    one.connect(before)
    assert one.carried == before != [] and one.rendezvous.keys[-2:] == ["1/1", "1/2"]


# ------------------------------------------------------------------------------------------------ no one waits for ever


def carrying(ranks: int, pairs, seed: int) -> tuple[list[OverGloo], list[Connections], list[str]]:
    """All ranks connect at once, over carriers that block until the other end comes; each has the pairs shuffled."""
    store, wrong = dist.HashStore(), []
    carriers = [OverGloo(f"GPU {rank}") for rank in range(ranks)]
    found: dict[int, Connections] = {}

    def connect(rank: int) -> None:
        chance = random.Random(100 * seed + rank)
        monitor = SimpleNamespace(at="")

        def channels(store: dist.Store, pairs) -> Channels:
            return Channels(store, rank, pairs, timedelta(seconds=10), carriers[rank])

        found[rank] = Connections(rank, CPU, Together(store), monitor, channels)  # type: ignore[arg-type]
        found[rank].connect(pairs)
        threading.Event().wait(chance.random() / 20)
        try:
            found[rank].connect(pairs, chance.sample(pairs, len(pairs)))
        except ChannelError as error:
            wrong.append(str(error))

    threads = [threading.Thread(target=connect, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return carriers, [found[rank] for rank in range(ranks)], wrong


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_that_each_need_the_other_first_do_not_wait_for_each_other(ranks: int) -> None:
    pairs = list(permutations(range(ranks), 2))
    carriers, connections, wrong = carrying(ranks, pairs, ranks)
    assert wrong == [] and [len(carrier.received) for carrier in carriers] == [ranks - 1] * ranks
    for one, other in pairs:
        connections[one].channels.outgoing(other).payloads.send(torch.full((3,), one, dtype=torch.uint8))
        assert connections[other].channels.incoming(one).payloads.post(3)().tolist() == [one] * 3
    for each in connections:
        each.drain(5)
    for each in connections:
        each._channels.close()
