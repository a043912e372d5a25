"""What a timeline says about memory, about its critical path, and about idle lanes."""

import random
import re

import pytest
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_strategies import depends, schedules
from test_simulation import any_costs

from scheduler import Costs, Event, Kind, ScheduleError, Timeline, by_name, simulate

law = settings(derandomize=True, deadline=None, max_examples=examples(80))


# ------------------------------------------------------------------------------------------------------------- memory


def held_at(timeline, lane, time, costs):
    """Pair by pair, from the picture in held.py: what each chunk holds in each stage just after `time`."""
    spans = {}
    for action, host, start, end in timeline.events:
        if host == lane:
            spans.setdefault((action.stage, action.chunk), {})[action.kind] = start, end
    total = 0
    for (stage, _), by_kind in spans.items():
        whole, kept, low = costs.held(stage)
        start, end = by_kind[Kind.F]
        back = by_kind.get(Kind.B) or by_kind[Kind.I]
        last = by_kind[Kind.W][1] if Kind.W in by_kind else back[1]
        if start <= time < end or back[0] <= time < back[1]:
            total += whole
        elif end <= time < back[0]:
            total += low
        elif back[1] <= time < last:
            total += kept
    return total


@law
@given(schedules(), st.integers(0, 2**32))
def test_memory_is_what_all_chunks_hold_together(schedule, seed):
    dice = random.Random(seed)
    sizes = {what: [dice.randrange(3) for _ in range(schedule.stages)] for what in ("kept", "checkpoint")}
    costs = Costs(forward=2, input=[dice.randrange(1, 4) for _ in range(schedule.stages)], activation=3, **sizes)
    timeline = simulate(schedule, costs)
    times = sorted({time for event in timeline.events for time in (event.start, event.end)})
    for lane in range(schedule.lanes):
        steps = timeline.memory[lane]
        assert [time for time, _ in steps] == sorted(time for time, _ in steps)
        found = [next((level for at, level in reversed(steps) if at <= time), 0) for time in times]
        assert found == [held_at(timeline, lane, time, costs) for time in times]
        assert timeline.peak_memory[lane] >= max(found)
        assert steps[-1][1] == 0


@law
@given(schedules())
def test_by_default_memory_counts_what_is_in_flight(schedule):
    timeline = simulate(schedule)
    assert timeline.peak_memory == timeline.peak_in_flight
    again = Timeline.measured(timeline.events, schedule.lanes)
    assert again.peak_memory == timeline.peak_in_flight


def test_peaks_of_zb_h1_are_those_of_the_paper():
    """(p - r) M_B + r M_W, at the moment at which nothing runs but what is held stays."""
    lanes, activation, kept = 4, 10, 4
    timeline = simulate(by_name("zb-h1", lanes, 12), Costs(activation=activation, kept=kept))
    assert timeline.peak_memory == tuple((lanes - lane) * activation + lane * kept for lane in range(lanes))


def test_recomputed_activations_are_held_only_while_they_are_used():
    lanes, chunks = 4, 8
    timeline = simulate(by_name("gpipe", lanes, chunks), Costs(activation=100, checkpoint=1, recompute=1))
    assert timeline.peak_memory == (chunks - 1 + 100,) * lanes
    assert simulate(by_name("gpipe", lanes, chunks), Costs(activation=100)).peak_memory == (chunks * 100,) * lanes


# ------------------------------------------------------------------------------------------------------ critical path


@law
@given(schedules(), st.integers(0, 2**32))
def test_the_critical_path_leads_from_the_start_to_the_end_without_a_gap_but_for_messages(schedule, seed):
    costs = any_costs(schedule, random.Random(seed))
    timeline = simulate(schedule, costs)
    path = timeline.critical_path
    assert path[0].start == 0 and path[-1].end == timeline.makespan
    for event, after in zip(path, path[1:]):
        if event.lane == after.lane:
            assert event.end == after.start
        else:
            assert depends(after.action, event.action, schedule.stages)
            lanes = event.lane, after.lane
            assert after.start == event.end + costs.hop(event.action.stage, after.action.stage, lanes)


@law
@given(schedules(), st.data())
def test_an_action_of_the_critical_path_that_takes_longer_makes_the_step_longer(schedule, data):
    timeline = simulate(schedule)
    slow = data.draw(st.sampled_from(timeline.critical_path)).action
    longer = {kind: 1 for kind in Kind} | {Kind.B: 2}

    def cost(kind):
        return lambda stage, chunk: longer[kind] + 5 * ((stage, kind, chunk) == slow)

    costs = Costs(cost(Kind.F), cost(Kind.I), cost(Kind.W), cost(Kind.B))
    assert simulate(schedule, costs).makespan >= timeline.makespan + 5


def test_the_critical_path_of_a_measured_step_follows_what_ended_last():
    """Clocks show small gaps: lane 1 was busy until 3.9, its message was there at 2."""
    def event(text, lane, start, end):
        return Event(by_name("1f1b", 2, 2).orders[0][0].parse(text), lane, start, end)

    events = [event("0F0", 0, 0, 1), event("1F0", 1, 1.1, 3.9), event("0F1", 0, 1.1, 2), event("1F1", 1, 4, 5)]
    path = Timeline.measured(events, lanes=2).critical_path
    assert " ".join(str(each.action) for each in path) == "0F0 1F0 1F1"


def test_the_critical_path_of_a_measured_step_sees_what_was_still_noting_its_end_when_its_message_was_read():
    """What an action makes is sent before its end is noted; the reader may begin in between. Clocks tell 0.2 here."""
    def event(text, lane, start, end):
        return Event(by_name("1f1b", 2, 2).orders[0][0].parse(text), lane, start, end)

    events = [
        event("0F0", 0, 0, 1.2), event("1F0", 1, 1, 2.2), event("1B0", 1, 2.2, 4.2), event("0F1", 0, 1.2, 2),
        event("0B0", 0, 4, 6),
    ]  # fmt: skip
    timeline = Timeline.measured(events, lanes=2)
    assert " ".join(str(each.action) for each in timeline.critical_path) == "0F0 1F0 1B0 0B0"
    words = timeline.why_idle(0, 3)
    assert words == "lane 0 is idle from 2 to 4: 0B0 waits for 1B0, which runs on lane 1 from 2.2 to 4.2."


def test_of_two_steps_no_path_is_told():
    events = simulate(by_name("1f1b", 2, 2)).events
    later = [event._replace(start=event.start + 50, end=event.end + 50) for event in events]
    both = Timeline.measured([*events, *later], 2)
    words = "0F0 runs more than once: what waited for what can be told of one step at a time"
    with pytest.raises(ScheduleError, match=words):
        both.critical_path
    with pytest.raises(ScheduleError, match=words):
        both.why_idle(1, 0.5)


def test_nothing_has_no_critical_path():
    assert Timeline((), lanes=2).critical_path == ()


# --------------------------------------------------------------------------------------------------------- idle lanes


@law
@given(schedules(), st.integers(0, 2**32), st.data())
def test_a_lane_that_works_is_said_to_and_one_that_waits_is_told_what_for(schedule, seed, data):
    timeline = simulate(schedule, any_costs(schedule, random.Random(seed)))
    lane = data.draw(st.integers(0, schedule.lanes - 1))
    time = data.draw(st.floats(0, float(timeline.makespan)))
    if time > timeline.makespan:
        return
    words = timeline.why_idle(lane, time)
    row = timeline.by_lane[lane]
    runs = [event for event in row if event.start <= time < event.end]
    if runs:
        start, end = float(runs[0].start), float(runs[0].end)
        assert words == f"lane {lane} runs {runs[0].action} from {start:.6g} to {end:.6g}."
    elif all(event.end <= time for event in row):
        assert words.startswith(f"lane {lane} is done at ")
    else:
        after = next(event for event in row if event.start > time)
        assert words.startswith(f"lane {lane} is idle from ") and f": {after.action} " in words
        *_, last = re.findall(r"(\d+[FBIW]\d+), which runs on lane", words)
        cause = next(event for event in timeline.events if str(event.action) == last)
        assert cause.start <= time  # it runs at that time, or its message is on the way


def test_words_for_an_idle_lane_lead_to_what_runs_meanwhile():
    timeline = simulate(by_name("1f1b", lanes=3, chunks=3))
    assert timeline.why_idle(0, 4) == (
        "lane 0 is idle from 3 to 7: 0B0 waits for 1B0, which runs on lane 1 from 5 to 7; 1B0 waits for 2B0, "
        "which runs on lane 2 from 3 to 5."
    )
    assert timeline.why_idle(2, 0) == (
        "lane 2 is idle from 0 to 2: 2F0 waits for 1F0, which runs on lane 1 from 1 to 2; 1F0 waits for 0F0, "
        "which runs on lane 0 from 0 to 1."
    )


def test_words_for_an_idle_lane_say_when_a_message_is_on_its_way():
    timeline = simulate(by_name("gpipe", lanes=2, chunks=1), Costs(link=10))
    assert timeline.why_idle(1, 5) == (
        "lane 1 is idle from 0 to 11: 1F0 waits for 0F0, which runs on lane 0 from 0 to 1 and arrives at 11."
    )


def test_words_for_an_idle_lane_end_where_what_it_waited_for_was_not_recorded():
    events = [event for event in simulate(by_name("gpipe", lanes=2, chunks=1)).events if event.lane == 1]
    words = Timeline(tuple(events), 2).why_idle(1, 0)
    assert words == "lane 1 is idle from 0 to 1: 1F0 waits for nothing that was recorded."


def test_words_for_an_idle_lane_name_an_order_that_holds_it_up():
    """1B0 could run at 2, but lane 1 runs all forwards first."""
    words = simulate(by_name("gpipe", lanes=2, chunks=3)).why_idle(0, 3.5)
    assert words.endswith("1B0 has its turn after 1F2, which runs on lane 1 from 3 to 4.")


@pytest.mark.parametrize("lane, time", [(2, 0), (0, -1), (0, 99)])
def test_a_lane_or_a_time_that_is_not_there_is_refused(lane, time):
    with pytest.raises(ScheduleError, match=f"there is no lane {lane} at {time}: there are 2 lanes, numbered from 0"):
        simulate(by_name("1f1b", 2, 2)).why_idle(lane, time)
