"""The machine under the entry points: lanes, drivers, plans, the table of values, the mailbox, the trace."""

import re
from time import perf_counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline import StuckError
from pipeline.data.pytrees import Activations, Tree
from pipeline.data.values import CALLER, chain
from pipeline.execution.engine import merged_order, needs_of
from pipeline.execution.mailbox import Mailbox
from pipeline.execution.plan import plan_forward, plan_step
from pipeline.execution.trace import TraceRecorder
from pipeline.transports.local import Local
from scheduler import Action, Event, Kind, Schedule, by_name, draw, requires

SCHEDULES = ("gpipe", "1f1b")


def order(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(word) for word in text.split())


def words(actions: object) -> str:
    return " ".join(str(action) for action in actions)


# -------------------------------------------------------------------------------------------------------------- lanes


def test_an_empty_lane_is_done_at_once() -> None:
    assert merged_order([(), order("0F0")], needs_of([order("0F0")], stages=1)) == order("0F0")
    assert merged_order([], {}) == ()


def test_needs_are_those_of_the_scheduler() -> None:
    schedule = by_name("1f1b", 3, 4)
    needs = needs_of(schedule.orders, 3)
    assert needs == {action: requires(action, 3) for action in schedule.actions}
    split = frozenset({(1, 0)})
    assert needs_of([order("0B0")], 2, split) == {order("0B0")[0]: requires(order("0B0")[0], 2, split)}


# -------------------------------------------------------------------------------------------------------- the driver


@given(name=st.sampled_from(SCHEDULES), lanes=st.integers(1, 7), chunks=st.integers(1, 9))
def test_the_merged_order_has_each_action_once_after_its_needs_and_keeps_every_lane(
    name: str, lanes: int, chunks: int
) -> None:
    schedule = by_name(name, lanes, chunks)
    merged = merged_order(schedule.orders, needs_of(schedule.orders, lanes))
    assert sorted(merged) == sorted(schedule.actions)
    for each in schedule.orders:
        assert tuple(action for action in merged if action in set(each)) == each
    done: set[Action] = set()
    for action in merged:
        assert done.issuperset(requires(action, lanes))
        done.add(action)


@given(lanes=st.integers(1, 6), chunks=st.integers(1, 8))
def test_forwards_run_chunk_by_chunk_as_the_hand_written_loop_runs_them(lanes: int, chunks: int) -> None:
    """So what layers of different stages share (a generator, a counter) sees the order of the plain module's loop."""
    for name in SCHEDULES:
        schedule = by_name(name, lanes, chunks)
        merged = merged_order(schedule.orders, needs_of(schedule.orders, lanes))
        forwards = [(action.chunk, action.stage) for action in merged if action.kind is Kind.F]
        assert forwards == sorted(forwards)


def test_a_round_is_a_wave_of_forwards_up_and_a_wave_of_backwards_down() -> None:
    schedule = by_name("1f1b", 3, 3)
    merged = merged_order(schedule.orders, needs_of(schedule.orders, 3))
    assert words(merged) == "0F0 1F0 2F0 2B0 0F1 1F1 2F1 2B1 1B0 0F2 1F2 2F2 2B2 1B1 0B0 1B2 0B1 0B2"


def test_what_ran_before_counts_as_done() -> None:
    backwards = [order("0B0"), order("1B0")]
    assert words(merged_order(backwards, needs_of(backwards, 2, before=order("0F0 1F0")))) == "1B0 0B0"
    with pytest.raises(StuckError):
        merged_order(backwards, needs_of(backwards, 2))


def stuck(*orders: str, stages: int) -> str:
    """The words of the StuckError of some orders."""
    lanes = [order(each) for each in orders]
    with pytest.raises(StuckError) as caught:
        merged_order(lanes, needs_of(lanes, stages))
    return str(caught.value)


def test_a_stuck_pipeline_lists_what_each_lane_waits_for() -> None:
    found = stuck("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", stages=2)
    assert found == (
        "no lane can go on: lane 0 waits at 0B0 for 1B0; lane 1 waits at 1F1 for 0F1. "
        "Check the schedule with scheduler.verify(schedule)."
    )


@pytest.mark.parametrize(
    "orders, stages, expected",
    [
        (("0B0 0F0",), 1, "lane 0 waits at 0B0 for 0F0"),
        (("0F0 0B0", "1B0"), 2, "lane 0 waits at 0B0 for 1B0; lane 1 waits at 1B0 for 1F0"),
        (("0F0", "1F0 1F1"), 2, "lane 0 is done; lane 1 waits at 1F1 for 0F1"),
        (("0B0",), 2, "lane 0 waits at 0B0 for 0F0 and 1B0"),
        (("0F0 0W0",), 1, "lane 0 waits at 0W0 for 0I0"),
        (("0F0 0B0", "", "1F0"), 2, "lane 0 waits at 0B0 for 1B0; lane 1 is done; lane 2 is done"),
    ],
)
def test_a_bad_order_is_stuck_in_words(orders: tuple[str, ...], stages: int, expected: str) -> None:
    assert f"no lane can go on: {expected}. " in stuck(*orders, stages=stages)


@given(seed=st.randoms(use_true_random=False), lanes=st.integers(1, 4), chunks=st.integers(1, 4))
def test_a_shuffled_order_ends_or_is_stuck_and_says_so_of_every_lane(seed: object, lanes: int, chunks: int) -> None:
    schedule = by_name("1f1b", lanes, chunks)
    orders = [list(each) for each in schedule.orders]
    for each in orders:
        seed.shuffle(each)
    try:
        assert sorted(merged_order(orders, needs_of(orders, lanes))) == sorted(schedule.actions)
    except StuckError as error:
        parts = re.findall(r"lane (\d+) (waits at (\S+) for|is done)", str(error))
        assert [int(number) for number, _, _ in parts] == list(range(lanes))
        for number, what, action in parts:
            assert what == "is done" or action in map(str, orders[int(number)])
        assert any(action for _, _, action in parts)


# ---------------------------------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_is_one_phase_and_a_forward_two(name: str) -> None:
    schedule = by_name(name, 3, 4)
    lane_of = schedule.placement.lane_of

    def orders(merged: tuple[Action, ...]) -> tuple[tuple[Action, ...], ...]:
        return tuple(tuple(action for action in merged if lane_of[action.stage] == lane) for lane in range(3))

    (phase,) = plan_step(schedule, ["cpu"] * 3).phases
    assert orders(phase.merged) == schedule.orders
    first, second = plan_forward(schedule, ["cpu"] * 3).phases
    assert all(action.kind is Kind.F for action in first.merged)
    assert all(action.kind is Kind.B for action in second.merged)
    assert not {need for needs in second.needs.values() for need in needs} & set(first.merged)
    assert orders((*first.merged, *second.merged)) == tuple(
        tuple(sorted(each, key=lambda action: action.kind is not Kind.F)) for each in schedule.orders
    )


@pytest.mark.parametrize("planner", [plan_step, plan_forward])
def test_lanes_on_one_device_count_as_one_lane(planner: object) -> None:
    schedule = by_name("1f1b", 4, 5)
    devices = [torch.device(name) for name in ("cuda:0", "cuda:1", "cuda:0", "cuda:1")]
    plan = planner(schedule, devices)
    (merged,) = planner(schedule, ["cpu"] * 4).device_orders
    assert len(plan.device_orders) == 2
    for device, stages in zip(plan.device_orders, ((0, 2), (1, 3)), strict=True):
        assert device == tuple(action for action in merged if action.stage in stages)


def test_a_schedule_that_cannot_end_is_not_planned() -> None:
    bad = Schedule.parse("schedule bad, chunks 1, stages on lanes 0\nlane 0: 0B0 0F0")
    with pytest.raises(StuckError, match="lane 0 waits at 0B0 for 0F0"):
        plan_step(bad, ["cpu"])


# -------------------------------------------------------------------------------------------------- values and mailbox


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_a_chain_passes_one_value_from_each_stage_to_the_next(stages: int) -> None:
    values = chain(stages)
    assert len(values.rows) == stages + 1
    for stage in range(stages):
        (read,), (made,) = values.read_by[stage], values.made_by[stage]
        assert read.producer == stage - 1 and made.reader == (stage + 1 if stage < stages - 1 else CALLER)
    assert [row.name for row in values.made_by[CALLER]] == ["x"]
    assert [row.name for row in values.read_by[CALLER]] == ["y"]


def message(value: float) -> Activations:
    return Activations(Tree((torch.tensor(value),), None), (True,))


def test_a_value_is_put_once_and_taken_once() -> None:
    mailbox = Mailbox(chain(2), {}, Local())
    sent = message(1.0)
    mailbox.put(CALLER, 0, [sent])
    assert len(mailbox) == 1
    assert mailbox.take(0, 0) == [sent] and len(mailbox) == 0
    with pytest.raises(KeyError):
        mailbox.take(0, 0)
    with pytest.raises(KeyError):
        mailbox.take(1, 0)


def test_chunks_do_not_mix() -> None:
    mailbox = Mailbox(chain(2), {}, Local())
    sent = {chunk: message(float(chunk)) for chunk in range(3)}
    for chunk in (2, 0, 1):
        mailbox.put(0, chunk, [sent[chunk]])
    assert [mailbox.take(1, chunk)[0] for chunk in range(3)] == list(sent.values())


def test_a_skip_is_another_row_of_the_table_and_its_gradient_comes_straight_back() -> None:
    mailbox = Mailbox(chain(3, [("skip", 0, 2)]), {}, Local())
    h1, skip, h2 = message(1.0), message(2.0), message(3.0)
    mailbox.put(0, 0, [h1, skip])
    assert len(mailbox) == 2
    assert mailbox.take(1, 0) == [h1]
    mailbox.put(1, 0, [h2])
    assert mailbox.take(2, 0) == [h2, skip]
    of_h1, of_skip, of_h2 = [(torch.tensor(number),) for number in (1.0, 2.0, 3.0)]
    mailbox.put_grads(2, 0, [of_h2, of_skip])
    assert mailbox.take_grads(1, 0) == [of_h2]
    mailbox.put_grads(1, 0, [of_h1])
    assert mailbox.take_grads(0, 0) == [of_h1, of_skip]
    assert len(mailbox) == 0


# --------------------------------------------------------------------------------------------------------------- trace


def test_a_trace_begins_at_zero_and_keeps_the_order_of_the_actions() -> None:
    trace = TraceRecorder(lanes=2)
    start = perf_counter()
    for action, number in zip(order("0F0 1F0 1B0 0B0"), (0, 1, 1, 0), strict=True):
        start, before = perf_counter(), start
        trace.events.append(Event(action, number, before, start))
    timeline = trace.timeline
    assert words(event.action for event in timeline.events) == "0F0 1F0 1B0 0B0"
    assert timeline.unit == "s" and timeline.events[0].start == 0 and timeline.lanes == 2
    assert all(event.duration >= 0 for event in timeline.events)
    assert 0 < timeline.makespan and "lane 1 |" in draw(timeline)


def test_a_trace_without_actions_is_an_empty_timeline() -> None:
    assert TraceRecorder(lanes=3).timeline.events == () and TraceRecorder(lanes=3).timeline.lanes == 3
