import pytest
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_strategies import schedules

from scheduler import Action, Costs, Event, Kind, ScheduleError, Timeline, by_name, simulate


def event(text, lane, start, end):
    return Event(Action.parse(text), lane, start, end)


@settings(derandomize=True, deadline=None, max_examples=examples(50))
@given(schedules(), st.floats(-1e3, 1e3), st.randoms(use_true_random=False))
def test_a_measured_timeline_is_the_simulated_one_whatever_the_clock_and_the_order(schedule, zero, random):
    simulated = simulate(schedule)
    events = [Event(action, lane, start + zero, end + zero) for action, lane, start, end in simulated.events]
    random.shuffle(events)
    measured = Timeline.measured(events, schedule.lanes)
    assert measured.unit == "s"
    assert measured.makespan == pytest.approx(simulated.makespan)
    assert measured.busy == pytest.approx(simulated.busy)
    assert measured.bubble == pytest.approx(simulated.bubble, abs=1e-9)
    assert measured.span_bubble == pytest.approx(simulated.span_bubble, abs=1e-9)
    assert measured.peak_in_flight == simulated.peak_in_flight
    assert measured.events[0].start == 0


@settings(derandomize=True, deadline=None, max_examples=examples(50))
@given(schedules())
def test_peak_in_flight_counts_pairs_from_the_start_of_f_to_the_end_of_b_or_w(schedule):
    timeline = simulate(schedule)
    spans = {}
    for action, lane, start, end in timeline.events:
        first, _ = spans.get((lane, action.stage, action.chunk), (start, end))
        spans[lane, action.stage, action.chunk] = first, end
    for lane, peak in enumerate(timeline.peak_in_flight):
        mine = [span for (host, _, _), span in spans.items() if host == lane]
        assert peak == max(sum(start <= time < end for start, end in mine) for time, _ in mine)


def test_busy_bubble_and_span_bubble_are_idle_shares():
    timeline = Timeline((event("0F0", 0, 0, 2), event("1F0", 1, 4, 5), event("1F1", 1, 7, 8)), lanes=2)
    assert timeline.makespan == 8
    assert timeline.busy == (2, 2)
    assert timeline.bubble == 1 - 4 / 16
    assert timeline.span_bubble == 1 - 4 / 8
    assert simulate(by_name("zb-h2", 3, 8), Costs(speed=2.5)).span_bubble >= 0
    assert timeline.events[0].duration == 2


@pytest.mark.parametrize("lanes", range(1, 7))
@pytest.mark.parametrize("chunks", range(1, 13))
def test_a_forward_only_timeline_holds_all_chunks(lanes, chunks):
    events = [event for event in simulate(by_name("gpipe", lanes, chunks)).events if event.action.kind is Kind.F]
    timeline = Timeline(tuple(events), lanes)
    assert timeline.makespan == lanes + chunks - 1
    assert timeline.bubble == pytest.approx((lanes - 1) / (lanes + chunks - 1))
    assert timeline.peak_in_flight == (chunks,) * lanes


def test_a_backward_only_timeline_holds_nothing_it_did_not_begin():
    assert Timeline.measured([event("0B0", 0, 3.0, 4.0)], lanes=1).peak_in_flight == (0,)


@pytest.mark.parametrize("timeline", [Timeline((), lanes=2), Timeline.measured([], lanes=2)])
def test_a_timeline_without_events_has_no_bubble(timeline):
    assert (timeline.makespan, timeline.busy, timeline.bubble, timeline.span_bubble) == (0, (0, 0), 0.0, 0.0)
    assert timeline.peak_in_flight == (0, 0)


def test_events_off_the_lanes_or_the_clock_are_refused():
    for lane, start, end in ((2, 0, 1), (-1, 0, 1), (0, 2, 1), (0, float("nan"), 1), (0, -1, 1), (0, 0, float("inf"))):
        with pytest.raises(ScheduleError, match=r"0F0 on lane .* cannot be: there are 2 lanes, numbered from 0"):
            Timeline((event("0F0", lane, start, end),), lanes=2)


def test_events_out_of_order_are_refused():
    with pytest.raises(ScheduleError, match="not sorted: 0F1 starts at 1, after one that starts at 2.*measured"):
        Timeline((event("0F0", 0, 2, 3), event("0F1", 0, 1, 2)), lanes=1)


def test_no_lanes_are_refused_in_a_timeline():
    with pytest.raises(ScheduleError, match="lanes is 0, but must be a whole number of at least 1"):
        Timeline((), lanes=0)


def test_actions_that_overlap_on_a_lane_are_refused():
    words = "0F1 on lane 0 starts at 1, but the action before it ends at 2: a lane runs one at a time"
    with pytest.raises(ScheduleError, match=words):
        Timeline((event("0F0", 0, 0, 2), event("0F1", 0, 1, 3)), lanes=1)
    Timeline((event("0F0", 0, 0, 2), event("1F0", 1, 1, 3), event("0F1", 0, 2, 3)), lanes=2)
