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
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class TraceRecorder:
    """A recorder of the actions of one or several calls.

    Attributes:
        lanes: their number.
        turns: the groups of lanes that take turns, see Timeline.
        events: all actions so far, in seconds of `perf_counter`.
        steps: the span of each step so far, over the processes whose events these are.
    """

    lanes: int
    turns: Sequence[Sequence[int]] = ()
    events: list[Event] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)

    @property
    def timeline(self) -> Timeline:
        """All actions so far, in seconds since the first began."""
        step = self.steps[0] if len(self.steps) == 1 else None  # what is outside several nobody asks
        return Timeline.measured(self.events, self.lanes, self.turns, step)
