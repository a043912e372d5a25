"""Laws of the memory of a lane over time."""

from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_strategies import schedules

from scheduler import Action, Costs, Event, Kind, Timeline, plot, simulate

LAWS = settings(derandomize=True, deadline=None, max_examples=examples(50))


def with_own_recomputations(timeline, takes):
    """The same run as clocks tell it: the first part of each B and I is an R."""
    events = []
    for event in timeline.events:
        if event.action.kind.is_backward:
            again = event._replace(action=event.action._replace(kind=Kind.R), end=event.start + takes)
            event = event._replace(start=again.end)
            events.append(again)
        events.append(event)
    return events


@LAWS
@given(schedules())
def test_a_measured_recomputation_holds_what_a_simulated_backward_does(schedule):
    costs = Costs(recompute=1, activation=5, kept=3, checkpoint=2)
    simulated = simulate(schedule, costs)
    held = simulated.held
    measured = Timeline.measured(with_own_recomputations(simulated, 1), schedule.lanes)
    measured = Timeline(measured.events, measured.lanes, "s", held, clocked=True)
    assert measured.recomputed == {event.action[::2] for event in simulated.events}
    assert measured.memory == simulated.memory


@LAWS
@given(schedules(), st.randoms(use_true_random=False))
def test_a_chunk_holds_its_checkpoint_from_f_to_r_if_it_has_an_r_and_all_of_it_if_not(schedule, random):
    simulated = simulate(schedule, Costs(recompute=1, activation=5, kept=3, checkpoint=2))
    gone = {pair for pair in sorted({event.action[::2] for event in simulated.events}) if random.random() < 0.5}
    events = [event for event in with_own_recomputations(simulated, 1)
              if event.action.kind is not Kind.R or event.action[::2] not in gone]
    ordered = Timeline.measured(events, schedule.lanes).events
    timeline = Timeline(ordered, schedule.lanes, "s", simulated.held, clocked=True)
    times = {event.action: (event.start, event.end) for event in events}
    for lane, row in enumerate(timeline.memory):
        for time in {time for event in timeline.by_lane[lane] for time in event[2:]}:
            level = next((level for at, level in reversed(row) if at <= time), 0)
            assert level == sum(
                holds(times, stage, chunk, time) for stage, kind, chunk in times
                if kind is Kind.F and schedule.placement.lane_of[stage] == lane
            )


def holds(times, stage, chunk, time):
    """What one chunk holds in one stage, right after `time`."""
    def of(kind):
        return times.get(Action(stage, kind, chunk), (float("inf"),) * 2)

    if time < of(Kind.F)[0]:
        return 0
    if of(Kind.F)[1] <= time < of(Kind.R)[0] < float("inf"):
        return 2
    if time >= min(of(Kind.B)[1], of(Kind.W)[1]):
        return 0
    return 3 if time >= of(Kind.I)[1] else 5


def test_an_update_holds_nothing_and_is_drawn():
    events = [Event(Action.parse(text), 0, time, time + 1) for time, text in enumerate(["0F0", "0B0", "0U0"])]
    timeline = Timeline.measured(events, lanes=1)
    assert timeline.memory == (((0, 1), (2, 0)),)
    words = [text.get_text() for text in plot(timeline).axes[0].get_legend().get_texts()]
    assert words == ["F forward", "B backward", "U update", "idle"]
