"""A comparison of schedules: the same model under each, with step time and memory.

    Costs of lanes ─of_stages───► Costs of stages ┐
    names ──by_name──► Schedule ──────────────────┴─simulate──► Timeline ──► Row: step, bubbles, peaks
                  └──► ScheduleError ──────────────────────────────────────► Row: why it is not defined

    >>> for row in compare(lanes=4, chunks=6, names=["1f1b", "interleaved-zb", "zb-h2"]):
    ...     print(row.name, row.reason or (row.makespan, row.peak_in_flight))
    1f1b (27, 4.0)
    interleaved-zb (19.5, 5.0)
    zb-h2 zb-h2 fills its warm-up with 2 chunks a lane, but there are 6 chunks for 4 lanes. Use chunks=8 or more, or \
zb-h1, which takes any number.

Costs are of lanes, of a chunk through all that a lane hosts, so that schedules that cut a model differently compare:

       lane 0 |   6   |    linear(2)  stage 0: 6  stage 1: 4        vee(2)  stage 0: 3  stage 3: 3
       lane 1 |   4   |                                                     stage 1: 2  stage 2: 2

A schedule with v stages a lane cuts the same model finer: each of them gets 1/v of what its lane takes and holds. A
message stays what it is: a boundary tensor does not get smaller, there are only more of them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

from scheduler import schedules
from scheduler.costs import Costs, LinkCost
from scheduler.errors import ScheduleError, one_each, refuse_unless_a, refuse_unless_finite, whole_number
from scheduler.measurement import OF_ACTIONS
from scheduler.memory_model import ChunkMemory
from scheduler.placement import Placement
from scheduler.simulation import simulate


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
            gets 1/v of it for each stage. Lists have a number for each lane.
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
    if isinstance(names, str) or not isinstance(names, Iterable | None):
        raise ScheduleError(f"names is {names!r}. List names of schedules, such as ['1f1b', 'zb-h1'], or give None.")
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


def of_stages(costs: Costs, placement: Placement) -> Costs:
    """Shares out what lanes cost among their stages, evenly.

    Args:
        costs: of lanes: of a chunk through all stages of a lane, as if it hosted one. A list has a number for each lane
            (`link`: for each pair of neighbouring lanes), a function takes (lane, chunk) (`link`: lanes too).
        placement: which lane hosts which stage

    Returns:
        The costs of stages. Where every lane hosts one, in order, they are the same costs.

    Raises:
        ScheduleError: a list is for another number of lanes, or says nothing about a message of this placement.

    >>> of_stages(Costs(forward=(6, 4), weight=1), Placement.vee(2)).forward
    (3.0, 2.0, 2.0, 3.0)
    """
    one_each = Placement.linear(placement.lanes)
    costs.refuse_unless_for(one_each)
    if placement == one_each:
        return costs
    shares = {name: _shared(getattr(costs, name), placement) for name in OF_ACTIONS + ChunkMemory._fields}
    link = costs.link
    if isinstance(link, tuple):
        link = _by_lanes(link, placement)
    elif callable(link):
        link = _in_lanes(link, placement.lane_of)
    if isinstance(costs.message, tuple):
        raise ScheduleError(
            f"message lists the sizes at {len(costs.message)} boundaries, but with {placement.stages} stages there are "
            "others. Give one number for all."
        )
    return replace(costs, link=link, **shares)


def _shared(cost: Any, placement: Placement) -> Any:
    """A number for each stage, or a function of stages; None stays."""
    if cost is None:
        return None
    lane_of, stages = placement.lane_of, Counter(placement.lane_of)
    if callable(cost):
        return lambda stage, chunk: cost(lane_of[stage], chunk) / stages[lane_of[stage]]
    whole = cost if isinstance(cost, Sequence) else [cost] * placement.lanes
    return tuple(whole[lane] / stages[lane] for lane in lane_of)


def _by_lanes(lane_links: Sequence[LinkCost], placement: Placement) -> dict[tuple[int, int], LinkCost]:
    """A list says nothing about lanes that are not neighbours, such as the last and the first of a loop."""
    lane_of = placement.lane_of
    for stage, (lane, next_lane) in enumerate(zip(lane_of, lane_of[1:])):
        if abs(lane - next_lane) > 1:
            raise ScheduleError(
                f"link lists the ways between neighbouring lanes, but stage {stage} on lane {lane} sends to stage "
                f"{stage + 1} on lane {next_lane}. Give one number for all, or from Python a dict with one for each "
                "pair."
            )
    links = {(lane, lane + 1): link for lane, link in enumerate(lane_links)}
    return links | {(next_lane, lane): link for (lane, next_lane), link in links.items()}


def _in_lanes(link: Callable[[int, int], float], lane_of: Sequence[int]) -> Callable[[int, int], float]:
    return lambda sender, receiver: link(lane_of[sender], lane_of[receiver])
