"""Simulation of a schedule: the timeline of an order, for given costs of its actions.

    order of each lane  --progress-->  start = when the lane is free, and all that the action needs has arrived
                        --costs----->  end   = start + what the action costs      ──►  Timeline

A lane runs its order and overtakes nothing, so one pass over the actions gives all times. Messages between lanes take
`costs.hop` and occupy nobody.
"""

from itertools import chain, repeat
from operator import itemgetter
from typing import Literal

from scheduler.action import Event
from scheduler.collecting import no_collecting
from scheduler.columns import Columns
from scheduler.costs import Costs
from scheduler.errors import ScheduleError, refuse_unless_a
from scheduler.faults import refusal
from scheduler.progress import progress
from scheduler.schedule import Schedule
from scheduler.timeline import Timeline


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
    refuse_unless_a("schedule", schedule, Schedule)
    refuse_unless_a("costs", costs, Costs)
    if release not in ("early", "block"):
        raise ScheduleError(f"release is {release!r}, but outputs of a block are there 'early' or with the 'block'.")
    costs.refuse_unless_for(schedule.placement)
    columns = Columns(schedule)
    foreign = list(columns.foreign())
    if foreign:
        raise refusal(schedule, foreign)
    durations = [costs.of_order(lane, order) for lane, order in enumerate(schedule.orders)]
    blocks = schedule.blocks if release == "block" else ()
    lane_progress = progress(columns, durations, costs.hops(schedule.placement), blocks)
    if lane_progress.stuck:
        raise refusal(schedule, lane_progress.stuck)
    events = chain.from_iterable(
        map(Event._make, zip(order, repeat(lane), starts, ends))
        for lane, (order, starts, ends) in enumerate(zip(schedule.orders, lane_progress.starts, lane_progress.ends))
    )
    held = tuple(costs.held(stage) for stage in range(schedule.stages))
    return Timeline(tuple(sorted(events, key=itemgetter(2))), schedule.lanes, costs.unit, held)
