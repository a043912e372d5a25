"""Costs of stages from costs of lanes, so that schedules that cut a model differently compare.

    Costs of lanes (a chunk through all that a lane hosts)  --of_stages(placement)-->  Costs of stages, for `simulate`

       lane 0 |   6   |    linear(2)  stage 0: 6  stage 1: 4        vee(2)  stage 0: 3  stage 3: 3
       lane 1 |   4   |                                                     stage 1: 2  stage 2: 2

A schedule with v stages a lane cuts the same model finer: each of them gets 1/v of what its lane takes and holds. A
message stays what it is: a boundary tensor does not get smaller, there are only more of them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from scheduler.costs import Costs
from scheduler.errors import ScheduleError
from scheduler.links import LinkCost
from scheduler.measurement import OF_ACTIONS
from scheduler.memory_model import ChunkMemory
from scheduler.placement import Placement


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
