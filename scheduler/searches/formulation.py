"""The formulation of a search: costs, a placement and a cap of memory as a Problem in numbers.

    costs.of ────────────► how long each action takes, split and whole
    costs.held ──────────► what its lane holds while it runs and afterwards      ──pose──►  Problem
    requires, costs.hops ► what it waits for, and how long that is on its way
    memory ──────────────► the cap of each lane, refused where not even one chunk fits
"""

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from scheduler.action import Action, Kind
from scheduler.costs import Costs
from scheduler.dependencies import requires
from scheduler.errors import ScheduleError, one_each, refuse_unless_a, refuse_unless_finite, whole_number
from scheduler.memory_model import ChunkMemory
from scheduler.placement import Placement
from scheduler.searches.problem import MessageWaits, Objective, Problem, Times

Memory = float | Sequence[float] | None


def pose(
    costs: Costs, placement: Placement, chunks: int, memory: Memory = None, objective: Objective = "flush",
    split: bool = True,
) -> Problem:
    """The problem of finding the shortest schedule.

    Args:
        costs: what actions and messages cost, and what chunks hold
        placement: which lane hosts which stage
        chunks: of a step
        memory: what a lane may hold: a number, one for each lane, or None for as much as it likes
        objective: what is to be short
        split: whether a backward may be I and W

    Raises:
        ScheduleError: the costs are for another number of stages, there is no chunk or no such objective, or
            `memory` is no cap for each lane that one chunk fits.
    """
    chunks = whole_number("chunks", chunks, least=1)
    refuse_unless_a("costs", costs, Costs)
    costs.refuse_unless_for(placement)
    if objective not in ("flush", "span"):
        raise ScheduleError(f"objective is {objective!r}, but what can be made short is the 'flush' or the 'span'.")
    held = tuple(map(costs.held, range(placement.stages)))
    kinds = 3 if split else 2
    return Problem(
        placement, chunks, kinds, *_waits(costs, placement, chunks, kinds),
        split=_times(costs, placement, chunks, kinds, held, whole=not split),
        together=_times(costs, placement, chunks, kinds, held, whole=True),
        caps=_caps(memory, placement, held), held=held,
        offset=_offsets(costs, placement, objective), objective=objective,
    )


def one_chunk_peak(stages: Iterable[int], held: Sequence[ChunkMemory]) -> float:
    """The most that a lane holds if it takes one chunk all the way forward and back before the next."""
    below = peak = 0.0
    for stage in stages:
        peak = max(peak, below + held[stage].activation)
        below += held[stage].checkpoint
    return peak


def _each(placement: Placement, chunks: int, kinds: int, whole: bool) -> Iterator[Action]:
    for kind in (Kind.F, Kind.B if whole else Kind.I, Kind.W)[:kinds]:
        for stage in range(placement.stages):
            for chunk in range(chunks):
                yield Action(stage, kind, chunk)


def _waits(
    costs: Costs, placement: Placement, chunks: int, kinds: int
) -> tuple[list[int], MessageWaits, list[frozenset[int]]]:
    actions = list(_each(placement, chunks, kinds, whole=False))
    numbers = {action: number for number, action in enumerate(actions)}
    split = frozenset((action.stage, action.chunk) for action in actions)
    lane_of, hop = placement.lane_of, costs.hops(placement)
    count = len(actions)
    lane = [lane_of[action.stage] for action in actions]
    sender, receiver = [count] * (count + 1), [count] * (count + 1)
    travel: list[float] = [0] * (count + 1)
    near: list[frozenset[int]] = []
    for number, action in enumerate(actions):
        needs = [numbers[need] for need in requires(action, placement.stages, split)]
        for need in needs:
            if lane[need] != lane[number]:
                sender[number], receiver[need] = need, number
                travel[number] = hop(actions[need].stage, action.stage)
        before = [number - 1] if action.chunk else []
        near.append(frozenset([*before, *(need for need in needs if lane[need] == lane[number])]))
    return lane, MessageWaits(sender, travel, receiver), near


def _times(
    costs: Costs, placement: Placement, chunks: int, kinds: int, held: Sequence[ChunkMemory], whole: bool
) -> Times:
    times = Times([], [], [])
    for action in _each(placement, chunks, kinds, whole):
        first, then = held[action.stage].changes()[action.kind]
        if whole and action.kind is Kind.W:  # B has done all of it
            times.duration.append(0)
            then = 0
        else:
            times.duration.append(costs.of(action, placement.lane_of[action.stage]))
        times.need.append(first)
        times.change.append(first + then)
    return times


def _caps(memory: Memory, placement: Placement, held: Sequence[ChunkMemory]) -> tuple[float, ...]:
    caps = one_each("memory", memory, placement.lanes)
    for lane, cap in enumerate(caps):
        least = one_chunk_peak(placement.stages_of(lane), held)
        if cap is None or cap == inf:
            caps[lane] = inf
            continue
        refuse_unless_finite("memory", cap)
        if cap < least * _BELOW:
            raise ScheduleError(
                f"memory of lane {lane} is {cap}, but one chunk alone holds {least} there, so that no schedule fits. "
                f"Allow {least} or more, or recompute (checkpoint=)."
            )
    return tuple(cap * _ABOVE for cap in caps if cap is not None)


def _offsets(costs: Costs, placement: Placement, objective: Objective) -> list[float]:
    """For a span, minus when a lane starts: as soon as the first chunk can be there."""
    if objective == "flush":
        return [0] * placement.lanes
    hop, time, offset = costs.hops(placement), 0.0, [inf] * placement.lanes
    firsts = [placement.stages_of(lane)[0] for lane in range(placement.lanes)]
    for stage, lane in enumerate(placement.lane_of[:max(firsts) + 1]):
        if stage not in firsts:
            raise ScheduleError(
                f"lane {lane} runs stage {stage} before the first chunk is on all lanes, so that when they start "
                f"depends on the order (lane_of: {placement.lane_of}). Make the 'flush' short, or place one stage on "
                "each lane before the next round."
            )
        if stage:
            time += hop(stage - 1, stage)
        offset[lane] = -time
        time += costs.of(Action(stage, Kind.F, 0), lane)
    return offset


_ABOVE, _BELOW = 1 + 1e-9, 1 - 1e-9  # sums of floats round: a cap of 3 holds 0.1 thirty times
