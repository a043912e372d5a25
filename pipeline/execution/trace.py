"""The trace of a call: a measured Timeline, of the type that `scheduler.simulate` returns.

    with pipe.trace() as trace:            step = pipe.step(x, y, loss_fn=f, trace=True)
        f(pipe(x), y).backward()           step.timeline
    print(draw(trace.timeline))

An action begins when its inputs are there: a rank's wait for them is a gap, to unpack them is work. A recomputation is
an event of its own, R, right before its B or I. What a step takes outside its actions is known as well: from when the
first process begins it to when the last one ends it. Over machines, whose clocks have different zeros, the messages of
the trace bring the events to one clock (scheduler/clocks.py). On an accelerator the times are those of the host, which
launches.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from scheduler import Event, Timeline

Span: TypeAlias = tuple[float, float]  # begun, ended


def clock_name() -> str:
    """The name of the clock of `perf_counter`: all processes of a machine have the same one, since it started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux
        return socket.gethostname()


class TraceRecorder:
    """A recorder of the actions of one or several calls.

    Args:
        lanes: their number.
        turns: the groups of lanes that take turns, see Timeline.

    Attributes:
        events: all actions so far.
        steps: the span of each step so far, over the processes that `join` has brought together.
    """

    def __init__(self, lanes: int, turns: Sequence[Sequence[int]] = ()) -> None:
        self.lanes = lanes
        self._turns = turns
        self.events: list[Event] = []
        self.steps: list[Span] = []

    def record(self, event: Event) -> None:
        """Note what ran, in seconds of `perf_counter`."""
        self.events.append(event)

    def __len__(self) -> int:
        """The number of recorded actions."""
        return len(self.events)

    def forget_from(self, number: int) -> None:
        """Forget the actions from this number on, which run again."""
        del self.events[number:]

    def join(self, events: Sequence[Event], steps: Sequence[Span]) -> None:
        """Replace the events, and the spans of steps, by those of all processes."""
        self.events = list(events)
        self.steps = list(steps)

    @property
    def timeline(self) -> Timeline:
        """All actions so far, in seconds since the first began."""
        step = self.steps[0] if len(self.steps) == 1 else None  # what is outside several nobody asks
        return Timeline.measured(self.events, self.lanes, self._turns, step)
