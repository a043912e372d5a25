import pickle
import re
from pathlib import Path

import pytest
from cover import examples
from hypothesis import given, settings
from scheduler_strategies import schedules

from scheduler import Action, Kind, Placement, Program, Schedule, ScheduleError, by_name, lower, names, simulate, verify


@settings(derandomize=True, deadline=None, max_examples=examples(50))
@given(schedules())
def test_a_schedule_is_printed_as_it_is_parsed(schedule):
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("name", names())
def test_named_schedules_are_printed_as_they_are_parsed(name):
    for lanes in range(1, 7):
        for chunks in range(1, 13):
            try:
                schedule = by_name(name, lanes, chunks)
            except ScheduleError:
                assert chunks < 2 * lanes  # none is undefined from there on
            else:
                assert Schedule.parse(str(schedule)) == schedule


def test_equal_schedules_are_one_key_and_survive_pickling():
    schedule = by_name("1f1b", 3, 4)
    assert {schedule: "found"}[Schedule.parse(str(schedule))] == "found"
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@settings(derandomize=True, deadline=None, max_examples=examples(50))
@given(schedules())
def test_split_is_where_the_backward_is_an_i_and_a_w(schedule):
    for stage in range(schedule.stages):
        for chunk in range(schedule.chunks):
            halves = {kind for kind in (Kind.B, Kind.I, Kind.W) if Action(stage, kind, chunk) in schedule.actions}
            assert halves == ({Kind.I, Kind.W} if (stage, chunk) in schedule.split else {Kind.B})


@settings(derandomize=True, deadline=None, max_examples=examples(50))
@given(schedules())
def test_the_halves_are_the_orders_without_the_other_half(schedule):
    for order, forward, backward in zip(schedule.orders, schedule.forward_half(), schedule.backward_half()):
        assert all(action.kind is Kind.F for action in forward)
        assert all(action.kind is not Kind.F for action in backward)
        assert sorted(forward + backward) == sorted(order)
        assert [action for action in order if action in forward] == list(forward)
        assert [action for action in order if action in backward] == list(backward)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
def test_the_first_chunks_of_a_named_schedule_are_a_right_schedule_that_holds_no_more(name, lanes):
    whole = by_name(name, lanes, 2 * lanes + 2)
    held = simulate(whole).peak_in_flight
    for chunks in range(1, whole.chunks + 1):
        short = whole.first(chunks)
        verify(short)
        verify(lower(short))
        assert short.chunks == chunks and {action.chunk for action in short.actions} == set(range(chunks))
        assert all(few <= many for few, many in zip(simulate(short).peak_in_flight, held, strict=True))
        assert Schedule.parse(str(short)) == short
        pairs = [(short.orders[lane][at], short.orders[lane][at + 1]) for lane, at in short.blocks]
        assert set(pairs) <= {(whole.orders[lane][at], whole.orders[lane][at + 1]) for lane, at in whole.blocks}
    assert whole.first(whole.chunks) == whole


def test_more_first_chunks_than_there_are_are_refused():
    with pytest.raises(ScheduleError, match="schedule gpipe has 2 chunks, so it has no first 3. Make it for 3."):
        by_name("gpipe", 2, 2).first(3)
    with pytest.raises(ScheduleError, match="chunks is 0, but must be a whole number of at least 1"):
        by_name("gpipe", 2, 2).first(0)


def test_a_lane_may_do_nothing():
    text = "schedule forward-only, chunks 1, stages on lanes 0 1\nlane 0: 0F0\nlane 1:"
    assert Schedule.parse(text).orders == ((Action(0, Kind.F, 0),), ())
    assert str(Schedule.parse(text)) == text


@pytest.mark.parametrize("name", ["", "two words", "new\nline", "comma,", None, 3, b"mine"])
def test_a_name_that_cannot_be_read_back_is_refused(name):
    with pytest.raises(ScheduleError, match="cannot name a schedule. Use letters"):
        Schedule(name, Placement.linear(1), 1, ((),))


def test_no_chunks_are_refused():
    with pytest.raises(ScheduleError, match="chunks is 0, but must be a whole number of at least 1"):
        Schedule("mine", Placement.linear(1), 0, ((),))


@pytest.mark.parametrize("orders", [[()], ([],), (("0F0",),), ((Action(0, "F", 0),),)])
def test_orders_that_are_not_tuples_of_actions_are_refused(orders):
    with pytest.raises(ScheduleError, match="must be a tuple with a tuple of actions for each lane"):
        Schedule("mine", Placement.linear(1), 1, orders)


def test_orders_for_another_number_of_lanes_are_refused():
    with pytest.raises(ScheduleError, match=r"there are 1 orders but 2 lanes \(lane_of: \(0, 1\)\). Give each"):
        Schedule("mine", Placement.linear(2), 1, ((),))


@pytest.mark.parametrize("text", ["", "lane 0: 0F0", "schedule x, chunks one, stages on lanes 0"])
def test_text_without_a_head_is_refused(text):
    with pytest.raises(ScheduleError, match="does not begin a schedule. Write 'schedule NAME, chunks 2"):
        Schedule.parse(text)


@pytest.mark.parametrize("kind", [Schedule, Program])
@pytest.mark.parametrize("text", [None, Path("mine.txt"), b"schedule mine"])
def test_what_is_no_text_is_not_parsed(kind, text):
    with pytest.raises(ScheduleError, match=r"text is .*, but must be of type str. Give a file's text, for example"):
        kind.parse(text)


@pytest.mark.parametrize("row", ["lane 1: 0F0", "0F0 0B0", "lane 0 0F0", "lane 0"])
def test_text_with_a_row_of_another_lane_is_refused(row):
    with pytest.raises(ScheduleError, match="is not the order of lane 0. Write 'lane 0: "):
        Schedule.parse("schedule mine, chunks 1, stages on lanes 0\n" + row)


def test_text_with_a_wrong_action_is_refused():
    with pytest.raises(ScheduleError, match="'0G0' is not an action"):
        Schedule.parse("schedule mine, chunks 1, stages on lanes 0\nlane 0: 0F0 0G0")


def test_blocks_are_written_with_a_plus_and_are_pairs_of_neighbours():
    text = "schedule mine, chunks 2, stages on lanes 0\nlane 0: 0F0 0F1+0B0 0B1"
    assert Schedule.parse(text).blocks == {(0, 1)}
    assert str(Schedule.parse(text)) == text
    orders = Schedule.parse(text).orders
    for wrong in [(0, 3), (0, -1), (1, 0)]:
        with pytest.raises(ScheduleError, match=re.escape(f"block {wrong} is not the first of two neighbours in")):
            Schedule("mine", Placement.linear(1), 2, orders, frozenset({wrong}))
    with pytest.raises(ScheduleError, match=r"block \(0, 0\) is not the first of two .* in no other block"):
        Schedule("mine", Placement.linear(1), 2, orders, frozenset({(0, 0), (0, 1)}))


@pytest.mark.parametrize("kind, pair", [(set, tuple), (list, tuple), (list, list)])
def test_blocks_may_be_listed_in_any_collection(kind, pair):
    schedule = by_name("dualpipev", 2, 4)
    listed = kind(map(pair, schedule.blocks))
    other = Schedule(schedule.name, schedule.placement, schedule.chunks, schedule.orders, listed)
    assert other == schedule and hash(other) == hash(schedule) and str(other) == str(schedule)


@pytest.mark.parametrize("row", ["0F0+", "+0F0", "0F0++0B0"])
def test_half_a_block_is_refused(row):
    with pytest.raises(ScheduleError, match="'' is not an action"):
        Schedule.parse(f"schedule mine, chunks 1, stages on lanes 0\nlane 0: {row}")


def test_what_sends_and_receives_is_no_schedule():
    with pytest.raises(ScheduleError, match="and Program for what sends and receives"):
        Schedule("mine", Placement.linear(1), 1, ((Action(0, Kind.SEND_F, 0),),))
