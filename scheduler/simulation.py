"""Simulation of a schedule: the timeline of an order, for given costs of its actions.

    order of each lane  --progress-->  start = when the lane is free, and all that the action needs has arrived
                        --costs----->  end   = start + what the action costs      ──►  Timeline

A lane runs its order and overtakes nothing, so one pass over the actions gives all times. Messages between lanes take
`costs.hop` and occupy nobody.
"""

from collections.abc import Sequence
from itertools import chain, repeat
from math import isclose
from operator import itemgetter
from typing import Literal

import numpy

from scheduler.action import Action, Kind
from scheduler.collecting import no_collecting
from scheduler.columns import Columns
from scheduler.costs import Costs
from scheduler.errors import ScheduleError
from scheduler.faults import refusal
from scheduler.progress import progress
from scheduler.schedule import Schedule
from scheduler.timeline import Event, Timeline

__all__ = ["simulate"]


@no_collecting()
def simulate(
    schedule: Schedule, costs: Costs = Costs(), release: Literal["early", "block"] = "early"
) -> Timeline:
    """The times at which each action would run.

    Args:
        schedule: the order of each lane; half a schedule will do, as long as it can end
        costs: what actions and messages cost and hold, for as many stages
        release: when others have what an action of a block (Schedule.blocks) gives: "early", when it has run; "block",
            when both actions of the block have

    Returns:
        The timeline, in the unit of the costs.

    Raises:
        ScheduleError: a lane waits for ever (each such lane is named), or runs what does not exist, or the costs are
            for another number of stages.

    >>> from scheduler import by_name
    >>> simulate(by_name("gpipe", lanes=4, chunks=8)).makespan
    33
    >>> simulate(by_name("1f1b", lanes=4, chunks=8), Costs(forward=10, backward=20)).peak_in_flight
    (4, 3, 2, 1)
    """
    if release not in ("early", "block"):
        raise ScheduleError(f"release is {release!r}, but outputs of a block are there 'early' or with the 'block'.")
    costs.refuse_unless_for(schedule.placement)
    columns = Columns(schedule)
    foreign = list(columns.foreign())
    if foreign:
        raise refusal(schedule, foreign)
    durations = [costs.of_order(lane, order) for lane, order in enumerate(schedule.orders)]
    blocks = schedule.blocks if release == "block" else ()
    replayed = progress(columns, durations, costs.hops(schedule.placement), blocks)
    if replayed.stuck:
        raise refusal(schedule, replayed.stuck)
    events = chain.from_iterable(
        map(Event._make, zip(order, repeat(lane), starts, ends))
        for lane, (order, starts, ends) in enumerate(zip(schedule.orders, replayed.starts, replayed.ends))
    )
    held = tuple(costs.held(stage) for stage in range(schedule.stages))
    timeline = Timeline(tuple(sorted(events, key=itemgetter(2))), schedule.lanes, costs.unit, held)
    _assert_lower_bounds(timeline, columns, costs)
    return timeline


def _assert_lower_bounds(timeline: Timeline, columns: Columns, costs: Costs) -> None:
    """Nobody beats what a lane has to do, after the way of its first chunk to it and before the way of its last one
    back; nor the way of a chunk through all stages."""
    schedule = columns.schedule
    if (columns.lane != numpy.array(schedule.placement.lane_of)[columns.stage]).any():
        return  # a wrong schedule is simulated for what it is
    ways = _Ways(columns, costs)
    bounds = [ways.there(schedule.stages, chunk=0) + ways.back(schedule.stages, chunk=0)]
    for lane, order in enumerate(schedule.orders):
        if order:
            first, last = order[0], order[-1]
            after = ways.back(last.stage, last.chunk) if ways.is_backward(last) else 0
            bounds.append(ways.there(first.stage, first.chunk) + timeline.busy[lane] + after)
    assert timeline.makespan >= max(bounds) or isclose(timeline.makespan, max(bounds))  # sums of floats round


class _Ways:
    """The time of a chunk on its way where nothing makes it wait; 0 where some of the actions on it are missing."""

    def __init__(self, columns: Columns, costs: Costs) -> None:
        self._columns, self._costs = columns, costs
        self._lane_of = columns.schedule.placement.lane_of

    def there(self, stage: int, chunk: int) -> float:
        """From stage 0 to the start of this stage's F."""
        return self._way([Action(before, Kind.F, chunk) for before in range(stage)], step=1)

    def back(self, stage: int, chunk: int) -> float:
        """From the end of this stage's B or I to the end of stage 0's."""
        return self._way([Action(before, self._backward(before, chunk), chunk) for before in range(stage)], step=-1)

    def is_backward(self, action: Action) -> bool:
        """Whether the stage before waits for this action."""
        return action.kind is self._backward(action.stage, action.chunk)

    def _backward(self, stage: int, chunk: int) -> Kind:
        return Kind.I if self._columns.split[stage, chunk] else Kind.B

    def _way(self, actions: Sequence[Action], step: int) -> float:
        if not all(map(self._columns.has, actions)):
            return 0
        ends = [(action.stage, action.stage + 1)[::step] for action in actions]
        work = sum(self._costs.of(action, self._lane_of[action.stage]) for action in actions)
        return work + sum(self._hop(*pair) for pair in ends)

    def _hop(self, sender: int, receiver: int) -> float:
        """Nothing from or to what would come after the last stage."""
        if max(sender, receiver) == len(self._lane_of):
            return 0
        lanes = self._lane_of[sender], self._lane_of[receiver]
        return self._costs.hop(sender, receiver, lanes) if lanes[0] != lanes[1] else 0
