"""Measured times: what actions and messages took in traced steps.

    Timeline of a step, or several  --measure-->  Measurement: for each stage and kind, and each boundary

An action's time is from when it had its inputs to its end, so no wait counts as work. Costs are means of a step,
medians over steps, so that lanes are as busy as they were. A message's time is from the end of the action that sent it
to the start of the one that reads it, where that lane was free when it was sent: then nothing else held the reader up.
Where a lane was never free in time, no message is known to have been waited for; the shortest such time is then an
upper bound, and no action of the step would have started earlier with less.

    lane 0 |F0 F1 .  .  B0 ==           F1 of lane 1 was sent when lane 1 was busy, F0 when it was free:
    lane 1 |.  F0 B0 == F1 B1 ==        so the way takes what lies between F0 of lane 0 and F0 of lane 1

Lanes that take turns in one thread hand over in memory: there a message takes no time.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import mean, median
from typing import Any, Literal

from scheduler.action import Kind
from scheduler.clocks import exchanges
from scheduler.errors import ScheduleError, refuse_unless_a
from scheduler.memory_model import ChunkMemory
from scheduler.placement import Placement
from scheduler.timeline import Timeline

OF_ACTIONS: tuple[str, ...] = ("forward", "input", "weight", "backward", "recompute")  # the costs of actions


@dataclass(frozen=True)
class Measurement:
    """The times of traced steps.

    Args:
        placement: which lane hosts which stage
        unit: of the times
        actions: for each stage, by kind: F, B, I, W, R (recomputation) and U (update), as far as they ran; the mean of
            a step, the median over the steps: so many actions take so many times this. The first chunk of a step,
            which finds nothing in the caches, is in it, and one step that was disturbed is not
        messages: for each boundary between stages, either way, the median; 0: there was none
        held: what a chunk holds in each stage, where the timelines say it
        outside: what a step took before its first action and after its last, the median over the steps
    """

    placement: Placement
    unit: Literal["slots", "s"]
    actions: tuple[Mapping[Kind, float], ...]
    messages: tuple[float, ...]
    held: tuple[ChunkMemory, ...]
    outside: float = 0


def measure(timelines: Timeline | Iterable[Timeline]) -> Measurement:
    """Measures the actions and messages of one or several steps of the same Pipe.

    Args:
        timelines: of whole steps; one may hold several

    Raises:
        ScheduleError: there is none, they are of different placements, or a stage ran no forward or no backward.

    >>> from scheduler import Costs, by_name, simulate
    >>> timeline = simulate(by_name("1f1b", lanes=2, chunks=3), Costs(forward=(2, 3), backward=5, link=1))
    >>> measured = measure(timeline)
    >>> measured.actions[1][Kind.F], Kind.I in measured.actions[1], measured.messages
    (3, False, (1,))
    """
    steps = steps_of(timelines)
    lanes = {(event.action.stage, event.lane) for step in steps for event in step.events}
    lane_of = dict(sorted(lanes))
    _check(steps, lanes, lane_of)
    durations: dict[tuple[int, Kind], list[list[float]]] = defaultdict(lambda: [[] for _ in steps])
    for number, step in enumerate(steps):
        for event in step.events:
            durations[event.action.stage, event.action.kind][number].append(event.duration)
    stages = range(len(lane_of))
    actions = tuple({kind: _typical(durations[stage, kind]) for kind in Kind if (stage, kind) in durations}
                    for stage in stages)
    _check_whole(actions)
    message_times: list[list[tuple[float, bool]]] = [[] for _ in stages]
    for boundary, time, was_free in chain.from_iterable(map(_messages, steps)):
        message_times[boundary].append((time, was_free))
    messages = tuple(map(_way, message_times[:-1]))
    held = next((step.held for step in steps if step.held), ())
    outside = median(step.outside for step in steps)
    return Measurement(Placement(tuple(lane_of.values())), steps[0].unit, actions, messages, held, outside)


def steps_of(timelines: Timeline | Iterable[Timeline]) -> list[Timeline]:
    """One timeline, or several, as a list.

    Raises:
        ScheduleError: it is something else.
    """
    steps = list(timelines) if isinstance(timelines, Iterable) and not isinstance(timelines, str) else [timelines]
    for step in steps:
        refuse_unless_a("timelines", step, Timeline)
    return steps


def costs_of(measurement: Measurement, of_lanes: bool, halves: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The arguments of `Costs` but the link, see `Costs.measured`. `halves`: what I and W of each stage take of B."""
    rows: list[tuple[float, ...]] = list(map(_times, measurement.actions, halves))
    names = OF_ACTIONS
    if measurement.held:
        names += ChunkMemory._fields
        rows = [row + held for row, held in zip(rows, measurement.held)]
    if of_lanes:
        rows = [tuple(map(sum, zip(*(rows[stage] for stage in measurement.placement.stages_of(lane)))))
                for lane in range(measurement.placement.lanes)]
    costs: dict[str, Any] = {name: tuple(column) for name, column in zip(names, zip(*rows))}
    if not any(Kind.B in kinds for kinds in measurement.actions):
        del costs["backward"]
    return costs | {"unit": measurement.unit}


def links_of(measurement: Measurement, of_lanes: bool) -> tuple[float, ...]:
    """The time of a message at each boundary of stages, or of neighbouring lanes: there the median of those between.

    Raises:
        ScheduleError: two neighbouring lanes exchange no messages.
    """
    if not of_lanes:
        return measurement.messages
    lane_of, links = measurement.placement.lane_of, []
    for lane in range(measurement.placement.lanes - 1):
        between = [time for time, *ends in zip(measurement.messages, lane_of, lane_of[1:])
                   if set(ends) == {lane, lane + 1}]
        if not between:
            raise ScheduleError(
                f"lanes {lane} and {lane + 1} exchange no messages, so nothing says how long one takes. "
                "Give link=..., one number for all."
            )
        links.append(median(between))
    return tuple(links)


def _times(time: Mapping[Kind, float], halves: tuple[float, float]) -> tuple[float, ...]:
    """F, I, W, B and R of one stage. What did not run follows from what did: B = I + W."""
    if Kind.I in time:
        first, second = time[Kind.I], time[Kind.W]
        backward = time.get(Kind.B, first + second)
    else:
        backward = time[Kind.B]
        first, second = (share * backward for share in halves)
    return time[Kind.F], first, second, backward, time.get(Kind.R, 0)


def _check(steps: Sequence[Timeline], lanes: Iterable[tuple[int, int]], lane_of: Mapping[int, int]) -> None:
    if not lane_of:
        raise ScheduleError("there is nothing to measure: the timelines have no events. Trace a step.")
    if len(list(lanes)) > len(lane_of) or len({(step.lanes, step.unit) for step in steps}) > 1:
        raise ScheduleError(
            "these timelines are not of one Pipe: their lanes, their units or the lanes of their stages differ "
            f"((stage, lane): {sorted(lanes)}). Measure those of one Pipe at a time."
        )
    if list(lane_of) != list(range(len(lane_of))):
        raise ScheduleError(f"only stages {list(lane_of)} ran. Measure timelines of all stages.")


def _check_whole(actions: Sequence[Mapping[Kind, float]]) -> None:
    for stage, kinds in enumerate(actions):
        if Kind.F not in kinds or Kind.B not in kinds and (Kind.I not in kinds or Kind.W not in kinds):
            raise ScheduleError(
                f"stage {stage} ran {', '.join(kinds)}, which is no whole step: its costs are those of F, and of B or "
                "of I and W. Trace pipe.step(...), or a forward with its backward."
            )


def _messages(step: Timeline) -> Iterator[tuple[int, float, bool]]:
    """The messages between lanes: (boundary, time, whether the reader's lane was free when it was sent)."""
    groups = [set(group) for group in step.turns]
    for giver, reader, free in exchanges(step.by_lane):
        in_turns = any({giver.lane, reader.lane} <= group for group in groups)
        time = 0 if in_turns else max(0, reader.start - giver.end)
        yield min(giver.action.stage, reader.action.stage), time, giver.end >= free


def _typical(steps: Iterable[Sequence[float]]) -> float:
    """The mean of a step, the median over the steps that have any."""
    return median(mean(times) for times in steps if times)


def _way(times: Sequence[tuple[float, bool]]) -> float:
    """The time of a message, from those of several and whether each was waited for."""
    waited = [time for time, was_free in times if was_free]
    return median(waited or [min((time for time, _ in times), default=0)])
