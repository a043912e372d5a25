"""Laws of clocks: whatever their zeros, no message is read before it is sent; ways as fast there and back are exact."""

from fractions import Fraction
from itertools import pairwise

import pytest
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_strategies import NAMED_RUNS, TIMES

from scheduler import Costs, Event, Kind, Placement, by_name, simulate
from scheduler.clocks import exchanges, on_one_clock

LAWS = settings(derandomize=True, deadline=None, max_examples=examples(60))
OFFSETS = st.lists(st.fractions(-1000, 1000), min_size=4, max_size=4)


def told(timeline, clock_of, offsets):
    """The events as clocks tell them."""
    clocks = [[] for _ in range(1 + max(clock_of))]
    for action, lane, start, end in timeline.events:
        clock = clock_of[lane]
        clocks[clock].append(Event(action, lane, start + offsets[clock], end + offsets[clock]))
    return clocks


@LAWS
@given(st.sampled_from(["1f1b", "gpipe", "zb-h1", "eager-1f1b"]), st.integers(1, 4), st.integers(1, 6), TIMES, TIMES,
       TIMES, OFFSETS, st.booleans())
def test_ways_as_fast_there_as_back_are_found_exactly(
    name, lanes, chunks, forward, backward, link, offsets, together
):
    """`together`: two lanes a machine."""
    timeline = simulate(by_name(name, lanes, chunks), Costs(forward=1 + forward, backward=backward, link=link))
    clock_of = [lane // 2 if together else lane for lane in range(lanes)]
    found = on_one_clock(told(timeline, clock_of, offsets))
    zero = offsets[0]
    assert sorted(found) == sorted(Event(action, lane, start + zero, end + zero)
                                   for action, lane, start, end in timeline.events)


@LAWS
@given(NAMED_RUNS, OFFSETS)
def test_no_message_between_neighbours_is_read_before_it_is_sent(run, offsets):
    schedule, costs = run
    timeline = simulate(schedule, costs)
    events = on_one_clock(told(timeline, range(schedule.lanes), offsets))
    rows = [sorted((event for event in events if event.lane == lane), key=lambda event: event[2:]) for lane in
            range(schedule.lanes)]
    for row, before in zip(rows, timeline.by_lane):  # a lane's own times keep their distances
        assert [later.start - event.start for event, later in pairwise(row)] == [
            later.start - event.start for event, later in pairwise(before)]
    for giver, reader, _ in exchanges(rows):
        if schedule.placement == Placement.linear(schedule.lanes):  # in a loop the clocks do not agree on one
            assert reader.start >= giver.end


@pytest.mark.parametrize("kind, giver", [(Kind.F, 0), (Kind.B, 1)])
def test_with_messages_one_way_the_fastest_takes_no_time(kind, giver):
    timeline = simulate(by_name("1f1b", 2, 3), Costs(link=5))
    told_of = [event for event in timeline.events if event.action.kind is kind]
    clocks = [[event for event in told_of if event.lane == 0],
              [event._replace(start=event.start + 70, end=event.end + 70) for event in told_of if event.lane == 1]]
    times = {(event.lane, event.action.chunk): event for event in on_one_clock(clocks)}
    assert times[1 - giver, 0].start == times[giver, 0].end


def test_a_clock_without_messages_is_left_alone():
    alone = [[event] for event in simulate(by_name("1f1b", 3, 1), Costs(forward=Fraction(1, 3))).events[::3]]
    assert on_one_clock(alone) == [event for (event,) in alone]
    assert on_one_clock([]) == []
