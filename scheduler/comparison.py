"""A comparison of schedules: the same model under each, with step time and memory.

    Costs of lanes ─split_costs─► Costs of stages ┐
    names ──by_name──► Schedule ──────────────────┴─simulate──► Timeline ──► Row: step, bubbles, peaks
                  └──► ScheduleError ──────────────────────────────────────► Row: why it is not defined

    >>> for row in compare(lanes=4, chunks=6, names=["1f1b", "interleaved-zb", "zb-h2"]):
    ...     print(row.name, row.reason or (row.makespan, row.peak_in_flight))
    1f1b (27, 4.0)
    interleaved-zb (19.5, 5.0)
    zb-h2 zb-h2 fills its warm-up with 2 chunks a lane, but there are 6 chunks for 4 lanes. Use chunks=8 or more, or \
zb-h1, which takes any number.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from scheduler import schedules
from scheduler.costs import Costs
from scheduler.errors import ScheduleError, one_each, refuse_unless_a, refuse_unless_finite, whole_number
from scheduler.placement import Placement
from scheduler.simulation import simulate
from scheduler.split_costs import of_stages


@dataclass(frozen=True)
class Row:
    """The time and memory of one schedule. Where it is not defined, its numbers are inf.

    Args:
        name: of the schedule
        stages_per_lane: into how many stages it cuts the share of a lane; 0 where it is not defined
        makespan: how long a step takes
        bubble: the idle share of lanes x makespan (the flush rate of the papers)
        span_bubble: the idle share of lanes x the longest span of a lane
        peak_in_flight: what the fullest lane holds at once, in whole shares: 1.5 are 3 chunks on half of its stages
        memory: the most that each lane holds at once
        reason: why the schedule is not defined; "" where it is
    """

    name: str
    stages_per_lane: int = 0
    makespan: float = inf
    bubble: float = inf
    span_bubble: float = inf
    peak_in_flight: float = inf
    memory: tuple[float, ...] = (inf,)
    reason: str = ""

    @property
    def peak_memory(self) -> float:
        """The most that the fullest lane holds at once."""
        return max(self.memory)

    def fits(self, cap: float | Sequence[float]) -> bool:
        """Whether no lane ever holds more than `cap`: one number for all lanes, or one for each.

        Raises:
            ScheduleError: `cap` has not one number for each lane, or one that is no size.
        """
        if self.reason:
            return False
        caps = one_each("memory", cap, len(self.memory))
        for most in caps:
            refuse_unless_finite("memory", most)
        return all(peak <= most * _ROUNDED for peak, most in zip(self.memory, caps))


def compare(
    lanes: int,
    chunks: int,
    costs: Costs = Costs(),
    names: Iterable[str] | None = None,
    release: Literal["early", "block"] = "early",
) -> tuple[Row, ...]:
    """Simulates the same model under several schedules.

    Args:
        lanes: how many lanes there are
        chunks: how many chunks a step has
        costs: of lanes: what a chunk takes and holds in all stages of a lane together. A schedule with v stages a lane
            gets 1/v of it for each stage (shares.py). Lists have a number for each lane.
        names: of the schedules; None takes all of `scheduler.names()`
        release: as in `simulate`

    Returns:
        A row for each name, in this order.

    Raises:
        ScheduleError: there is no such schedule, `lanes` or `chunks` is not a whole number of at least 1, or the costs
            are for another number of lanes. A schedule that is not defined for these is no error, but a reason.
    """
    lanes, chunks = whole_number("lanes", lanes, least=1), whole_number("chunks", chunks, least=1)
    refuse_unless_a("costs", costs, Costs)
    costs.refuse_unless_for(Placement.linear(lanes))  # wrong for every schedule, so no reason of one
    all_names = schedules.names()
    chosen = all_names if names is None else tuple(names)
    for name in chosen:
        if name not in all_names:
            schedules.by_name(name, lanes, chunks)  # says which there are
    return tuple(_row(name, lanes, chunks, costs, release) for name in chosen)


def _row(name: str, lanes: int, chunks: int, costs: Costs, release: Literal["early", "block"]) -> Row:
    try:
        schedule = schedules.by_name(name, lanes, chunks)
        shared = of_stages(costs, schedule.placement)
    except ScheduleError as error:
        return Row(name, reason=str(error))
    timeline = simulate(schedule, shared, release)
    stages_per_lane = schedule.stages // lanes
    return Row(
        name, stages_per_lane, timeline.makespan, timeline.bubble, timeline.span_bubble,
        max(timeline.peak_in_flight) / stages_per_lane, timeline.peak_memory,
    )


_ROUNDED = 1 + 1e-9  # sums of floats round: a cap of 3 holds 0.1 thirty times
