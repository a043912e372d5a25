"""A timeline: the events of a step, and the measures of a schedule that follow from them.

    simulate(schedule, costs) ──► unit "slots" ─┐
                                                ├─►  Timeline: makespan, busy, bubble, peak in flight  ──►  draw
    clocks of a real step ──────► unit "s" ─────┘

Simulated and measured timelines are the same thing, so what one can ask of one, one can ask of the other.

    >>> from scheduler import by_name, draw, simulate
    >>> timeline = simulate(by_name("1f1b", lanes=2, chunks=2))
    >>> print(draw(timeline))
    lane 0 |F0 F1 .  .  B0 == .  B1 ==
    lane 1 |.  F0 B0 == F1 B1 == .  .
    makespan 9 slots, bubble 33.3%, peak in flight 2 1
    >>> timeline.busy
    (6, 6)

bubble: idle share until the last lane is done. span: a lane's first start to its last end. in flight: F done, B (or
W) not; an F counts from its start, a B or W until its end.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf, isclose
from operator import attrgetter
from typing import Literal

from scheduler.action import Action, Event, Kind
from scheduler.errors import ScheduleError, refuse_unless_finite, whole_number
from scheduler.explanation import critical_path, why_idle
from scheduler.memory_model import ChunkMemory, steps


@dataclass(frozen=True, repr=False)
class Timeline:
    """The actions that ran, with their times.

    Args:
        events: sorted by start; the actions of one lane follow each other
        lanes: how many lanes there are, also those that nothing ran on
        unit: "slots" of simulated time, or "s" for seconds
        clocked: its times are those of clocks: an action starts a little after what it waited for, and what is
            recomputed has an R
        held: what a chunk holds in each stage; empty: every chunk holds 1, so that `memory` counts chunks
        turns: groups of lanes of which one runs at a time, since they share a thread or a device: their makespan and
            bubble are not those of lanes that run at once
        outside: what the step took before its first action and after its last: to cut the mini-batch, to agree with
            other ranks, to hand out gradients, to step an optimizer; 0 where that is not known, and of a simulation

    Raises:
        ScheduleError: an event ends before it starts, is on no lane, or is not in its place.
    """

    events: tuple[Event, ...]
    lanes: int
    unit: Literal["slots", "s"] = "slots"
    held: tuple[ChunkMemory, ...] = ()
    turns: tuple[tuple[int, ...], ...] = ()
    clocked: bool = False
    outside: float = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "lanes", whole_number("lanes", self.lanes, least=1))
        refuse_unless_finite("outside", self.outside)
        if any([lane not in range(self.lanes) for group in self.turns for lane in group]):
            raise ScheduleError(
                f"turns is {self.turns}, but there are {self.lanes} lanes, numbered from 0. Give groups of these."
            )
        latest: float = 0
        free: list[float] = [0] * self.lanes
        for action, lane, start, end in self.events:
            if not 0 <= lane < self.lanes or not 0 <= start <= end < inf:
                raise ScheduleError(
                    f"{action} on lane {lane} from {start} to {end} cannot be: there are {self.lanes} lanes, "
                    "numbered from 0, time begins at 0, and an action ends after it starts. Give lane, start and end "
                    "in this order."
                )
            if start < latest:
                raise ScheduleError(
                    f"the events are not sorted: {action} starts at {start}, after one that starts at {latest}. "
                    "Sort them by start, or use Timeline.measured, which does."
                )
            if start < free[lane] and not isclose(start, free[lane], abs_tol=1e-12):
                raise ScheduleError(
                    f"{action} on lane {lane} starts at {start}, but the action before it ends at {free[lane]}: a lane "
                    "runs one at a time. Give them to lanes of their own."
                )
            free[lane] = end
            latest = start

    def __str__(self) -> str:
        """The grid that `draw` makes where it fits into a terminal, else its size and how to see it (summary.py)."""
        from scheduler.summary import timeline_text  # which draws timelines, so it imports this file

        return timeline_text(self)

    def __repr__(self) -> str:
        from scheduler.summary import size_of

        return f"<Timeline: {size_of(self)}>"

    def _repr_svg_(self) -> str | None:
        from scheduler.summary import picture

        return picture(self)

    @classmethod
    def measured(
        cls, events: Iterable[Event], lanes: int, turns: Iterable[Iterable[int]] = (),
        call: tuple[float, float] | None = None,
    ) -> "Timeline":
        """A timeline from clocks: sorts the events, and counts time from the first start.

        Args:
            events: in any order; start and end in seconds of one clock, such as `time.perf_counter`
            lanes: how many lanes there are
            turns: groups of lanes that take turns; one lane alone is none
            call: when the step began and ended, by the same clock; None: not known

        Raises:
            ScheduleError: as the class does.
        """
        ordered = sorted(events, key=attrgetter("start", "end"))
        zero = ordered[0].start if ordered else 0
        shifted = (Event(action, lane, start - zero, end - zero) for action, lane, start, end in ordered)
        groups = tuple(group for group in map(tuple, turns) if len(group) > 1)
        outside = 0.0
        if call is not None and ordered:
            outside = max(0.0, call[1] - call[0] - (max(event.end for event in ordered) - zero))
        return cls(tuple(shifted), lanes, unit="s", turns=groups, clocked=True, outside=outside)

    @cached_property
    def by_lane(self) -> tuple[tuple[Event, ...], ...]:
        """The events of each lane."""
        rows: list[list[Event]] = [[] for _ in range(self.lanes)]
        for event in self.events:
            rows[event.lane].append(event)
        return tuple(map(tuple, rows))

    @cached_property
    def makespan(self) -> float:
        """The time at which the last action ends."""
        return max((event.end for event in self.events), default=0)

    @property
    def step(self) -> float:
        """The time of the whole step: the makespan, and what is outside of its actions."""
        return self.makespan + self.outside

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each lane, how long it worked."""
        return tuple(sum(end - start for _, _, start, end in row) for row in self.by_lane)

    @property
    def bubble(self) -> float:
        """The share of lanes x makespan in which a lane is idle (the flush rate of the papers)."""
        return self._idle_share(self.makespan)

    @property
    def span_bubble(self) -> float:
        """The same share, of lanes x the longest span of a lane: what is left where steps may overlap."""
        return self._idle_share(max(row[-1].end - row[0].start if row else 0 for row in self.by_lane))

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """For each lane, the most (stage, chunk) pairs that it holds at once."""
        return tuple(max(in_flight(event.action for event in row), default=0) for row in self.by_lane)

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """The (stage, chunk) pairs that have an R."""
        return frozenset((stage, chunk) for (stage, kind, chunk), *_ in self.events if kind is Kind.R)

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each lane, when what it holds changes and to how much: (time, held from then on), ascending in time."""
        recomputed = self.recomputed if self.clocked else None
        return tuple(tuple(steps(row, self.held, recomputed)) for row in self.by_lane)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """For each lane, the most that it holds at once."""
        return tuple(max((level for _, level in row), default=0) for row in self.memory)

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The chain of actions that makes the step as long as it is: each waits for the one before it, by order or by
        what it needs (explanation.py)."""
        return critical_path(self.by_lane, not self.clocked)

    def why_idle(self, lane: int, time: float) -> str:
        """A description of why a lane is idle (explanation.py).

        Args:
            lane: from 0
            time: from 0 to the makespan

        Raises:
            ScheduleError: there is no such lane or time.
        """
        lane = whole_number("lane", lane, least=0)
        if lane >= self.lanes or not 0 <= time <= self.makespan:
            raise ScheduleError(
                f"there is no lane {lane} at {time}: there are {self.lanes} lanes, numbered from 0, and the makespan "
                f"is {self.makespan}. Ask within these."
            )
        return why_idle(self.by_lane, not self.clocked, lane, time)

    def _idle_share(self, length: float) -> float:
        return max(0.0, 1 - sum(self.busy) / (self.lanes * length)) if length else 0.0  # sums of floats are rounded


def in_flight(actions: Iterable[Action]) -> Iterator[int]:
    """The number of (stage, chunk) pairs that a lane holds while it runs each of its actions.

    I frees nothing: what it leaves, W still needs.

    Args:
        actions: of one lane, in its order

    Returns:
        One number for each action: how many were held while it ran, itself included, at least 0.

    >>> list(in_flight(map(Action.parse, "0F0 0F1 0I0 0W0 0B1".split())))
    [1, 2, 2, 2, 1]
    """
    count = 0
    for action in actions:
        count += action.kind is Kind.F
        yield max(count, 0)
        count -= action.kind is Kind.B or action.kind is Kind.W
