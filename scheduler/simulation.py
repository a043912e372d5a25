"""Order -> timeline: when would each action run, if actions cost this much?

    order of each lane  --progress-->  actions, each after all that it needs
                        --costs----->  start = when the lane is free, and all that it needs has arrived
                                       end   = start + what the action costs

A lane runs its order and overtakes nothing, so one pass over the steps gives all times. Messages between lanes take
`costs.link` and occupy nobody.
"""

from math import isclose
from operator import attrgetter

from scheduler.action import Action, Kind
from scheduler.costs import Costs
from scheduler.faults import refusal
from scheduler.progress import progress
from scheduler.schedule import Schedule
from scheduler.timeline import Event, Timeline

__all__ = ["simulate"]


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timeline:
    """When each action would run.

    Args:
        schedule: the order of each lane; half a schedule will do, as long as it can end
        costs: what actions and messages cost, for as many stages

    Returns:
        The timeline, in slots: in units of what `costs` counts in.

    Raises:
        ScheduleError: a lane waits for ever (each such lane is named), or the costs are for another number of stages.

    >>> from scheduler import by_name
    >>> simulate(by_name("gpipe", lanes=4, chunks=8)).makespan
    33
    >>> simulate(by_name("1f1b", lanes=4, chunks=8), Costs(forward=10, backward=20)).peak_in_flight
    (4, 3, 2, 1)
    """
    costs.refuse_unless_for(schedule.stages)
    lane_of = schedule.placement.lane_of
    ends: dict[Action, float] = {}
    free: list[float] = [0] * schedule.lanes
    events: list[Event] = []

    def run(lane: int, action: Action, needs: tuple[Action, ...]) -> None:
        start = free[lane]
        for need in needs:
            arrival = ends[need]
            if costs.link and lane_of[need.stage] != lane:
                arrival += costs.hop(need.stage, action.stage)
            if arrival > start:
                start = arrival
        free[lane] = end = start + costs.of(action)
        ends.setdefault(action, end)  # a wrong schedule may run one twice: the first counts
        events.append(Event(action, lane, start, end))

    stuck = progress(schedule, run)
    if stuck:
        raise refusal(schedule, stuck)
    timeline = Timeline(tuple(sorted(events, key=attrgetter("start"))), schedule.lanes)
    _assert_lower_bounds(timeline, schedule.split)
    return timeline


def _assert_lower_bounds(timeline: Timeline, split: frozenset[tuple[int, int]]) -> None:
    """Nobody beats the busiest lane, nor the way of one chunk, here the first, through all stages and back."""
    way = {
        event.action: event.duration  # once each, and in real stages: a wrong schedule is simulated for what it is
        for event in timeline.events
        if event.action.chunk == 0 and event.action.stage >= 0 and _is_on_the_way(event.action, split)
    }
    bound = max([*timeline.busy, sum(way.values())])
    assert timeline.makespan >= bound or isclose(timeline.makespan, bound)  # sums of floats round


def _is_on_the_way(action: Action, split: frozenset[tuple[int, int]]) -> bool:
    stage, kind, chunk = action
    return kind is Kind.F or kind is (Kind.I if (stage, chunk) in split else Kind.B)
