import json
from collections import Counter
from fractions import Fraction

import pytest
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_strategies import depends, schedules

from scheduler import Action, Costs, Event, ScheduleError, Timeline, by_name, simulate
from scheduler.chrome import chrome_trace, timeline_from_chrome

LAWS = settings(derandomize=True, deadline=None, max_examples=examples(50))


def events(timeline, phase, **options):
    return [event for event in json.loads(chrome_trace(timeline, **options))["traceEvents"] if event["ph"] == phase]


@LAWS
@given(schedules(), st.sampled_from([1, 2, 0, Fraction(1, 8), 0.125]))
def test_a_simulated_timeline_is_read_back_as_it_was(schedule, forward):
    timeline = simulate(schedule, Costs(forward=forward, link=forward, activation=3, kept=Fraction(1, 2)))
    assert timeline_from_chrome(chrome_trace(timeline)) == timeline
    assert timeline_from_chrome(chrome_trace(timeline, memory=False, arrows=True)) == timeline


@LAWS
@given(schedules(), st.floats(1e-9, 1))
def test_a_simulated_timeline_of_short_actions_is_read_back_to_a_thousandth_of_the_shortest(schedule, short):
    """A trace has thousandths of a slot: what takes less would be read as nothing."""
    timeline = simulate(schedule, Costs(forward=short, input=2 * short, weight=5 * short / 3, link=short / 7))
    again = timeline_from_chrome(chrome_trace(timeline))
    times, read = ([time for row in step.by_lane for event in row for time in event[2:]] for step in (timeline, again))
    assert read == pytest.approx(times, abs=short / 1e3)
    starts = {event.action: event.start for row in timeline.by_lane for event in row}  # there may be several paths
    path = [starts[event.action] for event in again.critical_path]
    assert path[0] == 0 and path == sorted(path)
    assert again.critical_path[-1].end == pytest.approx(timeline.makespan, abs=short / 1e3)


@LAWS
@given(schedules(), st.floats(1e-7, 10))
def test_a_measured_timeline_is_read_back_to_the_nanosecond(schedule, scale):
    slots = simulate(schedule, Costs(forward=1 / 3, link=0.1)).events
    timeline = Timeline.measured([Event(a, lane, start * scale, end * scale) for a, lane, start, end in slots],
                                 schedule.lanes, [range(schedule.lanes)], (-scale, 100 * scale))
    again = timeline_from_chrome(chrome_trace(timeline))
    assert (again.lanes, again.unit, again.turns, again.clocked) == (timeline.lanes, "s", timeline.turns, True)
    assert again.outside == pytest.approx(101 * scale - timeline.makespan, rel=0, abs=0.6e-9)
    for before, after in zip(timeline.by_lane, again.by_lane):
        assert [event.action for event in before] == [event.action for event in after]
        times = [time for event in before for time in event[2:]]
        assert [time for event in after for time in event[2:]] == pytest.approx(times, rel=0, abs=0.6e-9)


@LAWS
@given(schedules(), st.floats(1e-7, 10))
def test_no_two_actions_of_a_thread_overlap_in_whole_nanoseconds(schedule, scale):
    """Perfetto drops what it takes for wrongly nested; it rounds ts and dur to nanoseconds, each by itself."""
    slots = simulate(schedule, Costs(forward=1 / 3, link=0.1)).events
    timeline = Timeline.measured([Event(a, lane, start * scale, end * scale) for a, lane, start, end in slots],
                                 schedule.lanes)
    free = Counter()
    for event in events(timeline, "X"):
        start, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
        assert start >= free[event["tid"]] and duration >= 0
        free[event["tid"]] = start + duration


def test_a_slot_is_a_microsecond_and_a_second_a_million():
    timeline = simulate(by_name("gpipe", 1, 1), Costs(forward=1.5, backward=3))
    assert [(event["ts"], event["dur"]) for event in events(timeline, "X")] == [(0, 1.5), (1.5, 3)]
    measured = Timeline.measured([Event(Action.parse("0F0"), 0, 7.0, 7.25)], 1)
    assert [(event["ts"], event["dur"]) for event in events(measured, "X")] == [(0, 250_000)]


def test_every_lane_is_a_thread_with_its_name_in_its_place():
    named = events(simulate(by_name("1f1b", 3, 2)), "M", name="mine")
    assert [event["args"] for event in named if event["name"] == "process_name"] == [{"name": "mine"}]
    for lane in range(3):
        about = {event["name"]: event["args"] for event in named if event.get("tid") == lane}
        assert about == {"thread_name": {"name": f"lane {lane}"}, "thread_sort_index": {"sort_index": lane}}


@LAWS
@given(schedules())
def test_every_action_says_what_it_is_and_has_the_colour_of_its_kind(schedule):
    timeline = simulate(schedule)
    found = events(timeline, "X")
    assert [(event["name"], event["tid"]) for event in found] == [(str(e.action), e.lane) for e in timeline.events]
    for event, (action, *_) in zip(found, timeline.events):
        assert event["args"] == {"stage": action.stage, "kind": action.kind, "chunk": action.chunk}
        assert event["cat"] == action.kind
    assert len({event["cname"] for event in found}) == len({event["cat"] for event in found})


@LAWS
@given(schedules(), st.sampled_from([1, 0.0004, 12345678901]))
def test_counters_are_what_lanes_hold(schedule, activation):
    timeline = simulate(schedule, Costs(activation=activation))
    counted = events(timeline, "C")
    for lane, steps in enumerate(timeline.memory):
        own = [event for event in counted if event["name"] == f"held, lane {lane}"]
        assert [(event["ts"], event["args"]["held"]) for event in own] == list(steps)
    assert not events(timeline, "C", memory=False)


@LAWS
@given(schedules())
def test_arrows_go_between_lanes_from_what_is_needed_to_what_needs_it(schedule):
    timeline = simulate(schedule)
    at = {(event.lane, event.start): event.action for event in timeline.events}
    lane_of = schedule.placement.lane_of
    ends = {}
    for event in events(timeline, "s", arrows=True) + events(timeline, "f", arrows=True):
        ends.setdefault(event["id"], []).append(at[event["tid"], event["ts"]])
    wanted = [[one, other] for one in schedule.actions for other in schedule.actions
              if depends(other, one, schedule.stages) and lane_of[one.stage] != lane_of[other.stage]]
    assert sorted(ends.values()) == sorted(wanted)
    assert not events(timeline, "s")


def test_arrows_of_several_steps_stay_within_their_step():
    once = simulate(by_name("1f1b", 2, 2))
    later = [event._replace(start=event.start + 100, end=event.end + 100) for event in once.events]
    twice = Timeline((*once.events, *later), 2)
    starts = [event["ts"] for event in events(once, "s", arrows=True)]
    assert sorted(event["ts"] for event in events(twice, "s", arrows=True)) == sorted(
        [*starts, *(start + 100 for start in starts)])


@pytest.mark.parametrize("text, words", [
    ("", "JSONDecodeError"), ("[]", "TypeError"), ("{}", "KeyError: 'otherData'"), ("3", "TypeError"),
    ('{"otherData": {"unit": "ms", "lanes": 1, "held": []}, "traceEvents": []}', "the unit is 'ms', not one of slots"),
    ('{"otherData": {"unit": "s", "clocked": true, "lanes": 0, "held": []}, "traceEvents": []}', "lanes is 0"),
    ('{"otherData": {"unit": "s", "clocked": true, "lanes": 2, "held": [], "turns": [[0, 2]]}, "traceEvents": []}',
     "turns is ..0, 2.,., but there are 2 lanes"),
    ('{"otherData": {"unit": "s", "clocked": true, "lanes": 2, "held": [], "turns": ["ab"]}, "traceEvents": []}',
     "turns is ..'a', 'b'.,., but there are 2 lanes"),
])
def test_what_is_no_trace_of_a_timeline_is_refused(text, words):
    with pytest.raises(ScheduleError, match=f"this is not the trace of a timeline .*{words}.*what chrome_trace wrote"):
        timeline_from_chrome(text)


@pytest.mark.parametrize("wrong", [{"name": "0F"}, {"name": 3}, {"ts": "0"}, {"dur": None}, {"tid": 1}, {"tid": "0"},
                                   {"dur": -1}])
def test_an_event_that_is_no_action_is_refused(wrong):
    trace = json.loads(chrome_trace(simulate(by_name("gpipe", 1, 1))))
    next(event for event in trace["traceEvents"] if event["ph"] == "X").update(wrong)
    with pytest.raises(ScheduleError, match="this is not the trace of a timeline"):
        timeline_from_chrome(json.dumps(trace))


def test_nothing_that_ran_is_a_trace_too():
    assert timeline_from_chrome(chrome_trace(Timeline((), 2, "s"), arrows=True)) == Timeline((), 2, "s")
