import re

import pytest
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_strategies import depends, schedules

from scheduler import Action, Kind, Schedule, ScheduleError, by_name, from_csv, lower, simulate, verify
from scheduler.action import COMPUTE

law = settings(derandomize=True, deadline=None, max_examples=examples(60))


def words(schedule, cap=None):
    with pytest.raises(ScheduleError) as error:
        verify(schedule, cap)
    return str(error.value)


def with_order(schedule, lane, order):
    orders = (*schedule.orders[:lane], tuple(order), *schedule.orders[lane + 1:])
    return Schedule(schedule.name, schedule.placement, schedule.chunks, orders)


def lines(*orders, chunks=1, lanes="0 1"):
    rows = "\n".join(f"lane {lane}: {order}" for lane, order in enumerate(orders))
    return Schedule.parse(f"schedule mine, chunks {chunks}, stages on lanes {lanes}\n{rows}")


def somewhere(data, schedule):
    lane = data.draw(st.sampled_from([lane for lane, order in enumerate(schedule.orders) if order]))
    return lane, data.draw(st.integers(0, len(schedule.orders[lane]) - 1))


@law
@given(schedules())
def test_right_schedules_pass(schedule):
    verify(schedule)
    verify(schedule, cap=simulate(schedule).peak_in_flight)


@law
@given(schedules(), st.data())
def test_a_dropped_action_is_missed(schedule, data):
    lane, position = somewhere(data, schedule)
    order = list(schedule.orders[lane])
    dropped = order.pop(position)
    found = words(with_order(schedule, lane, order))
    missing = {"F": f"{dropped} is missing", "B": f"{dropped} is missing", "W": f"{dropped} is missing, the other half",
               "I": f"{dropped} is missing, the other half"}
    assert missing[dropped.kind] in found


@law
@given(schedules(), st.data())
def test_a_repeated_action_is_named(schedule, data):
    lane, position = somewhere(data, schedule)
    order = list(schedule.orders[lane])
    order.insert(data.draw(st.integers(position, len(order))), order[position])
    assert re.search(f"runs {order[position]}, which has run before: drop", words(with_order(schedule, lane, order)))


@law
@given(schedules(), st.data())
def test_an_action_on_a_wrong_lane_is_sent_to_its_own(schedule, data):
    if schedule.lanes == 1:
        return
    lane, position = somewhere(data, schedule)
    action = schedule.orders[lane][position]
    other = (lane + 1) % schedule.lanes
    moved = with_order(schedule, lane, schedule.orders[lane][:position] + schedule.orders[lane][position + 1:])
    moved = with_order(moved, other, (*moved.orders[other], action))
    assert f"lane {other} runs {action}, but lane {lane} hosts stage {action.stage}: move it there" in words(moved)


@law
@given(schedules(), st.sampled_from(COMPUTE), st.data())
def test_a_foreign_action_is_named_with_what_there_is(schedule, kind, data):
    beyond = [(schedule.stages, 0), (0, schedule.chunks), (-1, 0), (0, -1)]
    stage, chunk = data.draw(st.sampled_from(beyond))
    action = Action(stage, kind, chunk)
    found = words(with_order(schedule, 0, (*schedule.orders[0], action)))
    limits = f"{schedule.stages} stages and {schedule.chunks} chunks"
    assert f"lane 0 runs {action}, but there are {limits}, numbered from 0: drop it" in found


@law
@given(schedules(), st.data())
def test_an_action_before_what_it_needs_on_its_own_lane_cannot_end(schedule, data):
    lane, position = somewhere(data, schedule)
    order = list(schedule.orders[lane])
    action = order[position]
    needed = [other for other in order if depends(action, other, schedule.stages)]
    order.insert(0, order.pop(position))
    if needed:
        assert f"cannot end: lane {lane} waits at {action} for " in words(with_order(schedule, lane, order))


@law
@given(schedules(), st.data())
def test_swapped_backwards_of_a_stage_are_put_in_order(schedule, data):
    lane, _ = somewhere(data, schedule)
    order = list(schedule.orders[lane])
    kind = data.draw(st.sampled_from([Kind.B, Kind.I, Kind.W]))
    stage = data.draw(st.sampled_from(schedule.placement.stages_of(lane)))
    places = [position for position, action in enumerate(order) if action.kind is kind and action.stage == stage]
    if len(places) > 1:
        one, two = places[:2]
        order[one], order[two] = order[two], order[one]
        what = "weight gradients" if kind is Kind.W else "backwards"
        found = words(with_order(schedule, lane, order))
        assert f"but {what} of a stage ascend in chunks: put {order[two]} first" in found


@law
@given(schedules(), st.data())
def test_a_cap_below_the_peak_is_refused_for_that_lane_alone(schedule, data):
    lane, _ = somewhere(data, schedule)
    peaks = simulate(schedule).peak_in_flight
    caps = [peak - 1 if host == lane else peak for host, peak in enumerate(peaks)]
    if caps[lane]:
        found = words(schedule, cap=caps)
        assert f"lane {lane} holds up to {peaks[lane]} chunks in flight, " in found
        assert f"first above its cap of {caps[lane]} at " in found
        assert "has 1 fault:" in found


def test_a_cap_may_be_one_number_for_all_lanes():
    verify(by_name("1f1b", 4, 8), cap=4)
    found = words(by_name("1f1b", 4, 8), cap=3)
    assert "lane 0 holds up to 4 chunks in flight, first above its cap of 3 at 0F3: run a backward before it" in found
    assert "lane 0 |F0  F1  F2  F3! B0" in found


def test_caps_that_are_not_one_for_each_lane_are_refused():
    with pytest.raises(ScheduleError, match=r"cap lists 2 numbers but there are 3 lanes \(cap: \[4, 4\]\). List 3"):
        verify(by_name("1f1b", 3, 3), cap=[4, 4])
    with pytest.raises(ScheduleError, match="cap is 0, but must be a whole number of at least 1"):
        verify(by_name("1f1b", 3, 3), cap=0)


def test_a_whole_backward_before_the_weight_gradient_of_an_earlier_chunk_is_refused():
    """B1 would add to the weights' gradients before W0 does."""
    found = words(lines("0F0 0F1 0I0 0B1 0W0", chunks=2, lanes="0"))
    assert "lane 0 runs 0W0 after 0B1, but weight gradients of a stage ascend in chunks: put 0W0 first." in found
    found = words(lines("0F0 0F1 0I1 0W1 0B0", chunks=2, lanes="0"))
    assert "lane 0 runs 0B0 after 0I1, but backwards of a stage ascend" in found and "has 1 fault" in found
    verify(lines("0F0 0F1 0I0 0W0 0B1", chunks=2, lanes="0"))


def test_both_kinds_of_backward_for_one_pair_are_refused():
    assert "lane 0 runs 0B0 and also 0I0 and 0W0, a half of it" in words(lines("0F0 0B0 0I0 0W0", lanes="0"))
    assert "lane 0 runs 0B0 and also 0W0, a half of it" in words(lines("0F0 0B0 0W0", lanes="0"))


def test_all_faults_are_told_at_once_and_marked():
    found = words(lines("0F0 0F1 0B1 0B0", "1F0 1F1 1B0 1B1 1B1", chunks=2))
    assert found.splitlines() == [
        "schedule mine (lanes=2, chunks=2) has 2 faults:",
        "  lane 1 runs 1B1, which has run before: drop one of them.",
        "  lane 0 runs 0B0 after 0B1, but backwards of a stage ascend in chunks: put 0B0 first.",
        "lane 0 |F0  F1  B1  B0! .",
        "lane 1 |F0  F1  B0  B1  B1!",
    ]


def test_the_last_stage_without_its_forward_is_found_as_in_torch_2_13():
    """torch's own 1F1B table lacks F of chunk 0 on the last rank."""
    schedule = by_name("1f1b", 4, 6)
    found = words(with_order(schedule, 3, schedule.orders[3][1:]))
    assert "lane 3 waits at 3B0 for 3F0, which no lane runs: add 3F0, or drop chunk 0" in found
    assert "lane 2 waits at 2B0 for 3B0, where lane 3 waits too" in found


def test_a_cycle_through_two_lanes_names_both():
    found = words(lines("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", chunks=2))
    assert "lane 0 waits at 0B0 for 1B0, which lane 1 runs after 1F1." in found
    assert "lane 1 waits at 1F1 for 0F1, which lane 0 runs after 0B0." in found


def test_a_long_schedule_is_shown_around_its_first_failing_cell():
    schedule = by_name("gpipe", 2, 50)
    order = list(schedule.orders[1])
    order[70], order[71] = order[71], order[70]
    found = words(with_order(schedule, 1, order)).splitlines()
    assert found[-1] == "(actions 63 to 94 of 100)"
    assert "B21 B20! B22" in " ".join(found[-2].split())
    assert len(found[-2]) < 180


def test_an_empty_order_misses_everything():
    assert "0F0 is missing: add it to lane 0" in words(lines("", lanes="0"))
    assert "0B0 is missing: add it to lane 0, or 0I0 and 0W0" in words(lines("", lanes="0"))


def test_of_very_many_faults_a_hundred_are_named():
    with pytest.raises(ScheduleError, match="has 19996 faults") as caught:
        verify(from_csv("0F0,0B0,0F9999,0B9999"))
    assert len(str(caught.value).splitlines()) < 110 and "and 19896 more" in str(caught.value)


@pytest.mark.parametrize("use", [verify, simulate, lower])
def test_a_number_of_chunks_that_no_memory_holds_is_refused(use):
    schedule = Schedule.parse("schedule huge, chunks 99999999999999999999, stages on lanes 0 \n lane 0: 0F0 0B0")
    with pytest.raises(ScheduleError, match="huge has 9{20} chunks in 1 stages, which is too much .* at most 16777216"):
        use(schedule)
