"""Simulation of a schedule: the timeline of an order, for given costs of its actions.

    order of each lane  --progress-->  start = when the lane is free, and all that the action needs has arrived
                        --costs----->  end   = start + what the action costs      ──►  Timeline

A lane starts an action when it is free and all that the action needs has arrived; it overtakes nothing. So one pass
over the actions gives all times. Messages between lanes take `costs.hop` and occupy nobody. Whether orders can end
depends on the orders alone: `verify` asks `progress` who is stuck, where and for what.

The pass works on whole numbers (columns.py). What an action needs is looked up in a table that has a row for each
stage, kind and whether the backward of the stage after is split; the rows are asked of `requires`, once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Literal, NamedTuple

import numpy

from scheduler.action import COMPUTE, Action, Event
from scheduler.collecting import no_collecting
from scheduler.columns import KINDS, Columns
from scheduler.costs import Costs
from scheduler.dependencies import requires
from scheduler.errors import ScheduleError, refuse_unless_a
from scheduler.faults import Fault, refusal
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


HopTime = Callable[[int, int], float]
NeedRow = tuple[int, float, int, float]  # where the ends of the two needs of chunk 0 stand, and how long each travels


class LaneProgress(NamedTuple):
    """The starts and ends of the actions of each lane, as far as it gets; a fault for each lane that waits for ever."""

    starts: list[list[float]]
    ends: list[list[float]]
    stuck: list[Fault]


def progress(
    columns: Columns,
    durations: Sequence[Iterable[float]] | None = None,
    hop: HopTime = lambda sender, receiver: 0,
    blocks: Iterable[tuple[int, int]] = (),
) -> LaneProgress:
    """Runs every lane as far as it gets, in time proportional to the number of actions.

    Args:
        columns: of any schedule, right or wrong; an action that does not exist needs nothing, and nothing needs it
        durations: for each lane, how long its actions take; None: no time
        hop: how long a message takes from a stage to another on another lane
        blocks: the (lane, position) of actions whose end others see when the action after them ends

    Returns:
        The times, and the faults; none where the schedule ends.

    >>> wrong = Schedule.parse('''
    ...     schedule wrong, chunks 1, stages on lanes 0 1
    ...     lane 0: 0B0 0F0
    ...     lane 1: 1B0
    ... ''')
    >>> for fault in progress(Columns(wrong)).stuck:
    ...     print(fault.words)
    cannot end: lane 0 waits at 0B0 for 0F0, which lane 0 runs after 0B0.
    cannot end: lane 1 waits at 1B0 for 1F0, which no lane runs: add 1F0, or drop chunk 0.
    """
    schedule, lanes = columns.schedule, range(columns.schedule.lanes)
    rows = _rows(columns, hop)
    # by code; at last of those that do not exist, which ended at 0
    ends: list[float | None] = [*[None] * (columns.beyond + 1), *[0] * schedule.chunks]
    hidden = {columns.first[lane] + position for lane, position in blocks}
    also = {int(columns.code[index + 1]): int(columns.code[index]) for index in hidden}
    items = [_items(columns, lane, durations, hidden) for lane in lanes]
    heads = [next(lane_items, None) for lane_items in items]
    starts_of: list[list[float]] = [[] for _ in lanes]
    ends_of: list[list[float]] = [[] for _ in lanes]
    waiting_lanes: dict[int, list[int]] = {}  # where the end that is missing will stand -> the lanes that wait for it
    awake = list(reversed(lanes))
    while awake:
        lane = awake.pop()
        head, rest = heads[lane], items[lane]
        starts, finished = starts_of[lane], ends_of[lane]
        free = finished[-1] if finished else 0
        while head is not None:
            row, chunk, code, duration = head
            first_need, first_travel, second_need, second_travel = rows[row]
            first_end, second_end = ends[first_need + chunk], ends[second_need + chunk]
            if first_end is None or second_end is None:
                waiting_lanes.setdefault((first_need if first_end is None else second_need) + chunk, []).append(lane)
                break
            if first_end + first_travel > free:
                free = first_end + first_travel
            if second_end + second_travel > free:
                free = second_end + second_travel
            starts.append(free)
            free = free + duration
            finished.append(free)
            for done in (code, also[code]) if code in also else (code,):
                if ends[done] is None:  # a wrong schedule may run one twice: the first counts
                    ends[done] = free
                    if done in waiting_lanes:
                        awake += waiting_lanes.pop(done)
            head = next(rest, None)
        heads[lane] = head
    position = [len(lane_ends) for lane_ends in ends_of]
    waits = {lane: columns.action(code) for code, waiting in waiting_lanes.items() for lane in waiting}
    return LaneProgress(starts_of, ends_of, [_wait(schedule, position, lane, waits[lane]) for lane in sorted(waits)])


def _rows(columns: Columns, hop: HopTime) -> list[NeedRow]:
    """A row for each stage, kind and whether the backward of the stage after is split; at last one that needs nothing.

    An action with fewer than two needs also waits for what ended at 0.
    """
    schedule, nothing = columns.schedule, columns.beyond + 1
    stages, chunks, lane_of = schedule.stages, schedule.chunks, schedule.placement.lane_of
    rows = []
    for stage in range(stages):
        for kind in COMPUTE:
            for split in (frozenset[tuple[int, int]](), frozenset({(stage + 1, 0)})):
                row: list[float] = []
                for need in requires(Action(stage, kind, 0), stages, split):
                    travels = hop(need.stage, stage) if lane_of[need.stage] != lane_of[stage] else 0
                    row += [(need.stage * KINDS + COMPUTE.index(need.kind)) * chunks, travels]
                rows.append((*row, *[nothing, 0] * 2)[:4])
    return [*rows, (nothing, 0, nothing, 0)]  # type: ignore[list-item]  # even places are whole


def _items(
    columns: Columns, lane: int, durations: Sequence[Iterable[float]] | None, hidden: set[int]
) -> Iterator[tuple[int, int, int, float]]:
    """For each action of the lane: its row, its chunk, its code, how long it takes."""
    part = slice(columns.first[lane], columns.first[lane + 1])
    schedule, exists = columns.schedule, columns.exists[part]
    stage, chunk, code = columns.stage[part], numpy.where(exists, columns.chunk[part], 0), columns.code[part].copy()
    after = numpy.minimum(stage + 1, schedule.stages - 1)
    split = columns.split[numpy.where(exists, after, 0), chunk] & (stage + 1 < schedule.stages)
    row = numpy.where(exists, (stage * KINDS + columns.kind[part]) * 2 + split, schedule.stages * KINDS * 2)
    for index in hidden:
        if part.start <= index < part.stop:
            code[index - part.start] = columns.beyond
    times = repeat(0) if durations is None else durations[lane]
    return zip(row.data, chunk.data, code.data, times)


def _wait(schedule: Schedule, position: list[int], lane: int, need: Action) -> Fault:
    action = schedule.orders[lane][position[lane]]
    words = f"cannot end: lane {lane} waits at {action} for {need}, {_whereabouts(schedule, position, need)}"
    return Fault(words, lane, position[lane])


def _whereabouts(schedule: Schedule, position: list[int], need: Action) -> str:
    for lane, order in enumerate(schedule.orders):
        if need in order[position[lane]:]:
            action = order[position[lane]]
            return f"where lane {lane} waits too." if action == need else f"which lane {lane} runs after {action}."
        if need in order:
            return f"whose end shows when its block ends, on lane {lane}: no action of a block may need the other."
    return f"which no lane runs: add {need}, or drop chunk {need.chunk}."
