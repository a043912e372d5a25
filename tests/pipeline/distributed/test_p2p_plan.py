"""Traffic: the messages of each channel are those of `scheduler.lower`, in its order; what is called delivered is."""

from __future__ import annotations

import pytest

from pipeline.data.values import chain
from pipeline.distributed.assignment import on_ranks, schedule_over
from pipeline.execution.p2p_plan import P2PPlan
from pipeline.skip import Key
from scheduler import Kind, Placement, Schedule, ScheduleError, by_name, lower, names, verify

SENT = {Kind.SEND_F: False, Kind.SEND_B: True}


def schedules(ranks: int, chunks: int) -> list[Schedule]:
    """Every named schedule on so many ranks, with a stage a rank and with several."""
    found = []
    for name in names():
        for stages in (ranks, 2 * ranks, 3 * ranks):
            try:
                found.append(schedule_over(name, stages, chunks, ranks))
            except ScheduleError:
                continue  # it is not made for so many stages, or for so few chunks
    return found


def plans_of(schedule: Schedule, orders, skips=()):
    placement = schedule.placement
    values = chain(schedule.stages, skips)
    return [P2PPlan(orders, values, placement, rank) for rank in range(placement.lanes)]


@pytest.mark.parametrize("chunks", [1, 2, 5, 8])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_channels_have_the_messages_of_the_lowered_program_in_its_order(ranks: int, chunks: int) -> None:
    tried = schedules(ranks, chunks)
    assert {schedule.name for schedule in tried} >= {"gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"}
    for schedule in tried:
        program = lower(schedule)
        rows = {row.name: row for row in chain(schedule.stages).rows}
        verify(program)
        rank_of = schedule.placement.lane_of
        expected: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}
        for rank, order in enumerate(program.orders):
            for stage, kind, chunk in order:
                if kind in SENT:
                    other = stage - 1 if SENT[kind] else stage + 1
                    expected.setdefault((rank, rank_of[other]), []).append((stage, chunk, SENT[kind]))
        for rank, plan in enumerate(plans_of(schedule, schedule.orders)):
            found = {}
            for channel, messages in plan.channels.items():
                keys = [message.key for message in messages]
                found[channel] = [(rows[name].reader - (not grad), chunk, grad) for name, chunk, grad in keys]
            assert found == {channel: sent for channel, sent in expected.items() if rank in channel}


@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_both_ends_of_a_channel_expect_the_same_messages(ranks: int, chunks: int) -> None:
    for schedule in schedules(ranks, chunks):
        skips = [(Key(None, "a"), 0, schedule.stages - 1), (Key(None, "b"), 0, 1)]
        for orders in (schedule.orders, schedule.forward_half(), schedule.backward_half()):
            ends = plans_of(schedule, orders, skips)
            for rank, plan in enumerate(ends):
                for (source, to), messages in plan.channels.items():
                    assert rank in (source, to)
                    assert ends[source].channels[source, to] == ends[to].channels[source, to] == messages
                    names_of = [message.name for message in messages]
                    assert len(set(names_of)) == len(names_of)


def test_skips_of_one_name_in_two_namespaces_have_two_names() -> None:
    from pipeline.skip import Namespace

    skips = [(Key(Namespace(), "x"), 0, 1), (Key(Namespace(), "x"), 0, 1)]
    orders = by_name("gpipe", 2, 1).orders
    plan = P2PPlan(orders, chain(2, skips), Placement((0, 1)), 0)
    assert [message.name for message in plan.channels[0, 1]] == [
        "h1 of chunk 0 for stage 1",
        "skip 'x' (value 3) of chunk 0 for stage 1",
        "skip 'x' (value 4) of chunk 0 for stage 1",
    ]


@pytest.mark.parametrize("chunks", [1, 4, 7])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_a_message_proves_delivered_had_been_taken_before_it_was_sent(ranks: int, chunks: int) -> None:
    """By hand: of the messages of the opposite channel, those that the sender's earlier actions took, and no more."""
    proved = 0
    for schedule in schedules(ranks, chunks):
        skips = [(Key(None, "a"), 0, schedule.stages - 1)]
        for rank, plan in enumerate(plans_of(schedule, schedule.orders, skips)):
            for (source, to), messages in plan.channels.items():
                if to != rank:
                    continue
                ours = plan.channels.get((to, source), [])
                for count in range(len(messages) + 1):
                    sent_at = messages[count - 1].sent_at if count else -1
                    taken = {message.name for message in ours if message.taken_at <= sent_at}
                    found = plan.delivered[source, to][count]
                    assert {message.name for message in ours[:found]} <= taken
                    in_order = next((i for i, message in enumerate(ours) if message.name not in taken), len(ours))
                    assert found == in_order
                    proved += found
    assert proved or chunks == 1


def test_a_rank_with_several_lanes_runs_them_in_an_order_that_can_end() -> None:
    for name in names():
        for ranks in (2, 3):
            for chunks in (2, 4, 6):
                try:
                    schedule = schedule_over(name, 2 * ranks, chunks, ranks)
                except ScheduleError:
                    continue
                verify(schedule)
                assert schedule.lanes == ranks
                assert sorted(schedule.actions) == sorted(by_same_actions(name, 2 * ranks, chunks, schedule))


def by_same_actions(name: str, stages: int, chunks: int, schedule: Schedule):
    """F and B, or F, I and W, of every stage and chunk."""
    from scheduler import Action

    for stage in range(stages):
        for chunk in range(chunks):
            kinds = "FIW" if (stage, chunk) in schedule.split else "FB"
            for kind in kinds:
                yield Action(stage, Kind(kind), chunk)


def test_fewer_lanes_than_ranks_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"2 lanes for 3 ranks, so 1 would have nothing to do. Use at least 3"):
        on_ranks(by_name("1f1b", 2, 4), 3)
    with pytest.raises(ScheduleError, match=r"zb-v has 1 lanes for 2 ranks, .* Use at least 4 stages"):
        on_ranks(by_name("zb-v", 1, 4), 2)
    with pytest.raises(ScheduleError, match=r"interleaved has as many stages on one rank .* 5 stages for 2 ranks"):
        schedule_over("interleaved", 5, 4, 2)
    with pytest.raises(ScheduleError, match=r"zb-v has 2 stages a lane but the balance has 3"):
        schedule_over("zb-v", 3, 8, 3)
