"""Law: in the order in which ranks post their transfers none waits for ever, on a transport that buffers nothing.

    rank 0's host    run 0F0, send a, run 0F1, send b, receive c, wait c, run 0B0 ...
    communicators    0 to 1: a, b        1 to 0: c

A send and a receive are posted, and the host goes on. A transfer begins when it is the first one left at both ends of
its communicator, each of which performs its transfers in the order of their posts. A receive is posted when the header
of the message has come, which is sent with it, past the communicators; then the host waits for the data.
(A GPU's host waits for no data, and so posts no later than this one.) Recomputing changes no message.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import pytest
from cover import either, examples, is_whole
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scheduler_strategies import schedules as any_schedules
from test_p2p_plan import plans_of, schedules

from pipeline.data.values import chain
from pipeline.execution.engine import merged_order, needs_of
from pipeline.execution.p2p_plan import MessageKey, P2PPlan, RankPair
from pipeline.skip import Key as SkipKey
from scheduler import Action, Schedule, by_name, names

random_schedules = any_schedules().filter(lambda schedule: schedule.placement.lanes > 1)
Message = tuple[RankPair, MessageKey]
Communicator = Callable[[RankPair], Hashable]


class Step(NamedTuple):
    """What a host does: "run", "send", "receive" or "wait"."""

    does: str
    message: Message | None = None


Hosts = list[list[Step]]

COMMUNICATORS: dict[str, Communicator] = {
    "of a way": lambda channel: channel,  # what transports have
    "of a pair": lambda channel: frozenset(channel),
    "of a rank": lambda channel: "all",  # each rank's transfers, with whomever, have one order
}


def posted(plans: Sequence[P2PPlan], orders: Sequence[Sequence[Action]], stages: int, skips: Sequence[object]) -> Hosts:
    """What RankMailbox and Receiver do: a message is received when an action needs it, after all before it."""
    number = {row.name: place for place, row in enumerate(chain(stages, skips).rows)}  # type: ignore[arg-type]
    hosts: Hosts = []
    for rank, (plan, order) in enumerate(zip(plans, orders, strict=True)):
        left = {channel: list(messages) for channel, messages in plan.channels.items()}
        steps: list[Step] = []
        for place in range(len(order)):
            taken = [(c, m) for c, messages in plan.channels.items() for m in messages if m.taken_at == place]
            for channel, message in sorted(taken, key=lambda each: number[each[1].key[0]]):
                if channel[1] == rank:
                    while message in left[channel]:
                        steps.append(Step("receive", (channel, left[channel].pop(0).key)))
                    steps.append(Step("wait", (channel, message.key)))
            steps.append(Step("run"))
            made = [(c, m) for c, messages in plan.channels.items() for m in messages if m.sent_at == place]
            steps += [Step("send", (c, m.key)) for c, m in sorted(made, key=lambda each: number[each[1].key[0]])
                      if c[0] == rank]  # fmt: skip
        hosts.append(steps)
    return hosts


def lowered(plans: Sequence[P2PPlan], schedule: Schedule, orders: Sequence[Sequence[Action]]) -> Hosts:
    """What scheduler.lower does: along one order of all actions, a send is followed by its receive at once."""
    hosts: Hosts = [[] for _ in orders]
    place = {action: at for order in orders for at, action in enumerate(order)}
    before = set(schedule.actions) - set(place)  # of the phase before
    for action in merged_order(orders, needs_of(orders, schedule.stages, schedule.split, before)):
        rank = schedule.placement.lane_of[action.stage]
        for channel, messages in plans[rank].channels.items():
            for message in messages:
                if channel[1] == rank and message.taken_at == place[action]:
                    hosts[rank].append(Step("wait", (channel, message.key)))
        hosts[rank].append(Step("run"))
        for channel, messages in plans[rank].channels.items():
            for message in messages:
                if channel[0] == rank and message.sent_at == place[action]:
                    hosts[rank].append(Step("send", (channel, message.key)))
                    hosts[channel[1]].append(Step("receive", (channel, message.key)))
    return hosts


def stuck(hosts: Hosts, communicator: Communicator) -> list[str]:
    """Where hosts and communicators stand when nothing goes on; empty: all has ended."""
    at = [0] * len(hosts)
    queues: dict[tuple[int, Hashable], list[Message]] = {}
    sent, gone = set[Message](), set[Message]()

    def may_go(step: Step) -> bool:
        if step.does == "receive":
            return step.message in sent
        return step.does != "wait" or step.message in gone

    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(hosts):
            while at[rank] < len(steps) and may_go(step := steps[at[rank]]):
                at[rank] += 1
                moved = True
                if step.message is not None and step.does != "wait":
                    queues.setdefault((rank, communicator(step.message[0])), []).append(step.message)
                    if step.does == "send":
                        sent.add(step.message)
        for (_, key), queue in queues.items():
            while queue:
                (source, to), _ = message = queue[0]
                ends = queues.get((source, key)), queues.get((to, key))
                if not all(end and end[0] == message for end in ends):
                    break
                for end in ends:
                    assert end
                    end.pop(0)
                gone.add(message)
                moved = True
    waiting = [f"rank {rank} at {steps[at[rank]]}" for rank, steps in enumerate(hosts) if at[rank] < len(steps)]
    return waiting + [f"{queue[0]} on {key} of rank {rank}" for (rank, key), queue in queues.items() if queue]


def phases(schedule: Schedule) -> Iterator[Sequence[Sequence[Action]]]:
    """Of a step; of a forward and of its backward."""
    yield schedule.orders
    yield schedule.forward_half()
    yield schedule.backward_half()


def skips_of(stages: int) -> list[tuple[SkipKey, int, int]]:
    """From the first stage to the last, to the next one, and over half of them."""
    far = [(SkipKey(None, "far"), 0, stages - 1), (SkipKey(None, "near"), 0, 1)]
    return [*far, (SkipKey(None, "half"), stages // 2 - 1, stages - 1)]


def check(schedule: Schedule, skips: Sequence[tuple[SkipKey, int, int]]) -> None:
    for orders in phases(schedule):
        plans = plans_of(schedule, orders, skips)
        hosts = posted(plans, orders, schedule.stages, skips)
        assert not stuck(hosts, COMMUNICATORS["of a way"]), schedule.name
        ahead = lowered(plans, schedule, orders)
        for communicator in COMMUNICATORS.values():
            assert not stuck(ahead, communicator), schedule.name


@pytest.mark.parametrize("ranks", [*range(2, 8), pytest.param(8, marks=pytest.mark.soak)])
def test_no_named_schedule_waits_for_ever(ranks: int) -> None:
    tried = []
    for chunks in either((5,) if ranks < 8 else (16,), (1, 2, 5, 8, 16, 17)):
        tried += schedules(ranks, chunks)
    assert {schedule.name for schedule in tried} == set(names()) or (not is_whole() and ranks < 8)
    for schedule in tried:
        if is_whole():
            check(schedule, ())
        check(schedule, skips_of(schedule.stages))


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(random_schedules)
def test_no_schedule_waits_for_ever(schedule: Schedule) -> None:
    check(schedule, skips_of(schedule.stages))


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(random_schedules, st.data())
def test_two_posts_that_are_swapped_wait_for_ever(schedule: Schedule, data: st.DataObject) -> None:
    """Of one communicator, at one of its ends."""
    skips = skips_of(schedule.stages)
    hosts = posted(plans_of(schedule, schedule.orders, skips), schedule.orders, schedule.stages, skips)
    posts: dict[tuple[int, RankPair], list[int]] = {}
    for rank, steps in enumerate(hosts):
        for place, step in enumerate(steps):
            if step.message is not None and step.does != "wait":
                posts.setdefault((rank, step.message[0]), []).append(place)
    several = [key for key, places in posts.items() if len(places) > 1]
    assume(several)
    rank, channel = data.draw(st.sampled_from(several))
    places = posts[rank, channel]
    first = data.draw(st.integers(0, len(places) - 2))
    steps, one, other = hosts[rank], places[first], places[first + 1]
    steps[one], steps[other] = steps[other], steps[one]
    assert stuck(hosts, COMMUNICATORS["of a way"])


@pytest.mark.parametrize("communicator", ["of a pair", "of a rank"])
def test_posts_as_they_come_need_a_communicator_for_each_way(communicator: str) -> None:
    """0F1's result stands before 0B0's gradient on rank 0; on rank 1, which needs it later, behind it."""
    schedule = by_name("1f1b", 2, 4)
    hosts = posted(plans_of(schedule, schedule.orders), schedule.orders, schedule.stages, ())
    found = stuck(hosts, COMMUNICATORS[communicator])
    assert [words[:6] for words in found[:2]] == ["rank 0", "rank 1"], found
