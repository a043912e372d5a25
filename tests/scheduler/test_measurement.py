"""Laws of measured costs: a timeline made from costs gives these costs back."""

from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import mean, median

import pytest
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_strategies import NAMED_RUNS, RUNS, TIMES

from scheduler import (
    Action,
    Costs,
    Event,
    Kind,
    ScheduleError,
    Timeline,
    by_name,
    compare,
    search,
    simulate,
)
from scheduler.measurement import measure

LAWS = settings(derandomize=True, deadline=None, max_examples=examples(60))


@LAWS
@given(NAMED_RUNS | RUNS)
def test_a_simulated_timeline_gives_its_costs_back(run):
    schedule, costs = run
    timeline = simulate(schedule, costs)
    again = Costs.measured(timeline)
    for action, lane, _, _ in timeline.events:
        assert again.of(action) == costs.of(action, lane)
    assert again.unit == costs.unit == timeline.unit
    assert [again.held(stage) for stage in range(schedule.stages)] == list(timeline.held)
    for boundary in waited_for(timeline):
        assert again.hop(boundary, boundary + 1) == costs.hop(boundary, boundary + 1)
    assert simulate(schedule, again) == timeline  # so where nobody waited, the bound on the way changes nothing


def waited_for(timeline):
    """Boundaries with a message that a lane did nothing but wait for."""
    lane_of = {event.action.stage: event.lane for event in timeline.events}
    for row in timeline.by_lane:
        for before, event in pairwise([None, *row]):
            stage, kind, _ = event.action
            source = stage - 1 if kind is Kind.F else stage + 1
            if lane_of.get(source, event.lane) != event.lane and (before.end if before else 0) < event.start:
                yield min(stage, source)


@LAWS
@given(NAMED_RUNS, st.integers(1, 3))
def test_steps_of_one_timeline_or_of_several_give_the_costs_of_one(run, count):
    schedule, costs = run
    one = simulate(schedule, costs)
    begins = [number * (one.makespan + 1) for number in range(count)]
    events = [Event(action, lane, start + at, end + at) for at in begins for action, lane, start, end in one.events]
    alone = Costs.measured(one)
    assert Costs.measured([one] * count) == alone
    joined = Costs.measured(Timeline(tuple(events), one.lanes, one.unit, one.held))
    assert replace(joined, link=0) == replace(alone, link=0)  # an earlier step's end may hide how long a way takes
    assert simulate(schedule, joined) == one


@LAWS
@given(NAMED_RUNS)
def test_costs_of_a_lane_are_the_sums_of_its_stages(run):
    schedule, costs = run
    timeline = simulate(schedule, costs)
    of_lanes, of_stages = Costs.measured(timeline, by="lane"), Costs.measured(timeline)
    for lane in range(schedule.lanes):
        stages = schedule.placement.stages_of(lane)
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
            assert of_lanes.of(Action(lane, kind, 0)) == sum(of_stages.of(Action(stage, kind, 0)) for stage in stages)
        assert of_lanes.held(lane).activation == sum(of_stages.held(stage).activation for stage in stages)
    if schedule.stages == schedule.lanes:
        (row,) = compare(schedule.lanes, schedule.chunks, of_lanes, [schedule.name])
        assert row.makespan == timeline.makespan


@LAWS
@given(st.lists(st.lists(st.integers(0, 99), min_size=1), min_size=1))
def test_an_action_takes_the_mean_of_a_step_and_the_median_of_these_over_steps(steps):
    timelines = []
    for times in steps:
        ends = list(accumulate([time + 1 for time in times], initial=0))
        forwards = [Event(Action(0, Kind.F, chunk), 0, *span) for chunk, span in enumerate(pairwise(ends))]
        backwards = [Event(Action(0, Kind.B, chunk), 0, ends[-1] + chunk, ends[-1] + chunk + 1)
                     for chunk in range(len(times))]
        timelines.append(Timeline((*forwards, *backwards), 1))
    costs = Costs.measured(timelines)
    assert costs.forward == (pytest.approx(1 + median(mean(times) for times in steps)),)
    assert costs.backward == (1,)


@LAWS
@given(NAMED_RUNS, st.lists(TIMES, min_size=8, max_size=8))
def test_measured_costs_keep_lanes_as_busy_where_the_times_of_chunks_differ(run, more):
    schedule, costs = run
    uneven = {what: (lambda stage, chunk, what=what: getattr(costs, what)[stage] + more[chunk])
              for what in ("forward", "input", "weight")}
    timeline = simulate(schedule, replace(costs, **uneven, backward=None, recompute=0))
    assert simulate(schedule, Costs.measured(timeline)).busy == timeline.busy


@pytest.mark.parametrize("scale", [2.0**-14, 2.0**20])
def test_a_search_in_seconds_is_the_one_in_slots(scale):
    """Of numbers far from 1, as measured seconds and bytes are."""
    costs = Costs(forward=(1, 2, 1), input=(2, 1, 1), weight=1, kept=0.5, link=0.25)
    times = {what: cost for what, cost in vars(costs).items() if cost is not None and what not in ("speed", "unit")}
    scaled = replace(costs, **{what: [part * scale for part in cost] if isinstance(cost, tuple) else cost * scale
                               for what, cost in times.items()})
    slots = search(costs, lanes=3, chunks=5, memory=3)
    seconds = search(replace(scaled, unit="s"), lanes=3, chunks=5, memory=3 * scale)
    assert seconds.schedule == slots.schedule
    assert (seconds.value, seconds.bound) == (slots.value * scale, pytest.approx(slots.bound * scale))
    assert seconds.timeline.unit == "s" and str(seconds).splitlines()[0].endswith("s")


def test_outside_of_steps_is_the_median_of_the_rest_of_their_times():
    events = [Event(Action.parse(name), 0, at, at + 1) for at, name in ((3, "0F0"), (5, "0B0"))]
    steps = [Timeline.measured(events, 1, (), call) for call in ((2, 9), (0, 6), (3, 6), None)]
    assert [step.outside for step in steps] == [4, 3, 0, 0]
    assert [step.step for step in steps] == [7, 6, 3, 3]
    assert measure(steps).outside == 1.5


def clocked(text, lanes=2, turns=()):
    """A measured timeline: for each lane a line of actions, each with its start and its end."""
    events = []
    for lane, line in enumerate(text.split("\n")):
        words = iter(line.split())
        events += [Event(Action.parse(name), lane, float(next(words)), float(next(words))) for name in words]
    return Timeline.measured(events, lanes, turns)


def test_a_message_to_a_lane_that_was_busy_says_nothing_of_its_way():
    timeline = clocked("0F0 0 1    0F1 1 2  0B0 8 9  0B1 14 15\n1F0 1.5 4  1F1 4 6  1B0 6 7  1B1 9 13.5")
    assert measure(timeline).messages == (0.5,)  # not that of 1F1, which lay there for 2


def test_where_no_lane_was_free_in_time_the_shortest_way_is_an_upper_bound():
    timeline = clocked("0F0 0 1  0F1 1 5  3F0 5 6   3B0 6 9    0B0 12 13\n"
                       "1F0 1 2  2F0 2 3  1F1 5 10  2B0 10 11  1B0 11 12")
    assert measure(timeline).messages == (0, 0, 1)


def test_lanes_that_take_turns_hand_over_in_memory():
    text = "0F0 0 1  0B0 5 6\n1F0 3 4  1B0 4 4.5"
    assert Costs.measured(clocked(text)).link == (1.25,)
    assert Costs.measured(clocked(text, turns=[[0, 1]])).link == (0,)


def test_a_message_that_is_read_before_its_sender_has_ended_takes_no_time():
    assert Costs.measured(clocked("0F0 0 1  0B0 5 6\n1F0 0.75 4  1B0 4 5")).link == (0,)


def test_recomputations_are_costs_of_their_own():
    costs = Costs.measured(clocked("0F0 0 1  0F1 1 2  0R0 7 9  0B0 9 10  0B1 11 12\n"
                                   "1F0 3 4  1B0 4 5  1F1 5 6  1B1 6 7"))
    assert (costs.recompute, costs.backward, costs.link) == ((2, 0), (1, 1), (2,))


def test_halves_of_whole_backwards_have_the_share_that_is_given():
    timeline = simulate(by_name("1f1b", 2, 4), Costs(backward=8))
    costs = Costs.measured(timeline, halves=0.75, activation=100, link=3)
    assert (costs.input, costs.weight, costs.backward) == ((6, 6), (2, 2), (8, 8))
    assert (costs.activation, costs.link) == (100, 3)
    for share in (-0.1, 1.5, "half", True):
        with pytest.raises(ScheduleError, match=f"halves is {share!r}, but must be Costs, or the share of I"):
            Costs.measured(timeline, halves=share)


@LAWS
@given(NAMED_RUNS)
def test_halves_are_to_a_backward_as_in_the_costs_that_are_given(run):
    schedule, costs = run
    costs = replace(costs, recompute=0)
    thrice = {what: [3 * time for time in getattr(costs, what)] for what in ("input", "weight", "backward")
              if getattr(costs, what) is not None}
    again = Costs.measured(simulate(schedule, costs), halves=replace(costs, recompute=7, **thrice))
    for stage, lane in enumerate(schedule.placement.lane_of):
        if costs.of(Action(stage, Kind.B, 0)):
            for kind in (Kind.I, Kind.W):
                assert again.of(Action(stage, kind, 0)) == costs.of(Action(stage, kind, 0), lane)
    for more in (-1, 1):
        words = f"input lists {schedule.stages + more} costs but there are {schedule.stages} stages"
        with pytest.raises(ScheduleError, match=words):
            Costs.measured(simulate(schedule, costs), halves=Costs(input=[1] * (schedule.stages + more)))


def forwards(timeline):
    return replace(timeline, events=tuple(event for event in timeline.events if event.action.kind is Kind.F))


@pytest.mark.parametrize("timelines, words", [
    ([], "nothing to measure: the timelines have no events"),
    (Timeline((), lanes=2), "nothing to measure"),
    (forwards(simulate(by_name("1f1b", 2, 2))), "stage 0 ran F, which is no whole step"),
    ([simulate(by_name("1f1b", 2, 2)), simulate(by_name("1f1b", 3, 2))], "not of one Pipe: their lanes"),
    ([simulate(by_name("1f1b", 2, 2)), simulate(by_name("1f1b", 2, 2), Costs(unit="s"))], "their units"),
    ([simulate(by_name("zb-v", 2, 4)), simulate(by_name("interleaved", 2, 4))], "the lanes of their stages differ"),
    (clocked("\n1F0 0 1  1B0 1 2"), "only stages \\[1\\] ran"),
])
def test_what_is_no_step_of_one_pipe_is_refused(timelines, words):
    with pytest.raises(ScheduleError, match=words):
        Costs.measured(timelines)


def test_lanes_without_a_message_between_them_need_a_link_that_is_given():
    timeline = simulate(by_name("1f1b", 3, 2))
    lanes = {0: 0, 1: 2, 2: 1}
    events = tuple(event._replace(lane=lanes[event.lane]) for event in timeline.events)
    other = Timeline(events, 3)
    with pytest.raises(ScheduleError, match="lanes 0 and 1 exchange no messages.*Give link="):
        Costs.measured(other, by="lane")
    assert Costs.measured(other, by="lane", link=2).link == 2


def test_an_unknown_unit_or_grouping_is_refused():
    with pytest.raises(ScheduleError, match="unit is 'ms'. Use"):
        Costs(unit="ms")
    with pytest.raises(ScheduleError, match="by is 'rank'. Use"):
        Costs.measured(simulate(by_name("gpipe", 1, 1)), by="rank")
