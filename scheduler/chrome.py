"""Timelines as JSON for trace viewers, chrome://tracing or Perfetto.

    Timeline  --chrome_trace-->  JSON: a process, a thread for each lane, a complete event for each action,
        ▲                              a counter for what each lane holds, arrows between lanes
        └──── timeline_from_chrome ──────────┘

The format is the Trace Event Format, which both viewers read. It counts in microseconds and keeps nanoseconds. Seconds
are what they are. A slot is one microsecond, so simulated times are read as they are; or 10, 100, ... of them, where an
action takes less than a slot, so that none vanishes. chrome://tracing takes the colours given here; Perfetto colours by
an action's name without its digits, so by its kind too.
"""

import json
from collections.abc import Iterator, Mapping
from math import ceil, log10
from operator import itemgetter
from typing import Any

from scheduler.action import Action, Event, Kind
from scheduler.clocks import exchanges
from scheduler.errors import ScheduleError, refuse_unless_a
from scheduler.memory_model import ChunkMemory
from scheduler.timeline import Timeline


def chrome_trace(timeline: Timeline, *, name: str = "pipeline", memory: bool = True, arrows: bool = False) -> str:
    """Writes a timeline for trace viewers.

    Args:
        timeline: simulated or measured
        name: of the process
        memory: whether to add a counter for each lane, with what it holds
        arrows: whether to add an arrow to each action from what it waited for on other lanes; this doubles the file

    Returns:
        JSON, an event on a line.

    >>> from scheduler import by_name, simulate
    >>> print(chrome_trace(simulate(by_name("gpipe", lanes=1, chunks=1)), memory=False))
    {"otherData": {"unit": "slots", "clocked": false, "lanes": 1, "held": [[1, 1, 1]]}, "displayTimeUnit": "ns", \
"traceEvents": [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "pipeline"}},
    {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "lane 0"}},
    {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": 0, "args": {"sort_index": 0}},
    {"ph": "X", "name": "0F0", "cat": "F", "ts": 0, "dur": 1, "pid": 0, "tid": 0, "cname": "rail_response", \
"args": {"stage": 0, "kind": "F", "chunk": 0}},
    {"ph": "X", "name": "0B0", "cat": "B", "ts": 1, "dur": 2, "pid": 0, "tid": 0, "cname": "rail_animation", \
"args": {"stage": 0, "kind": "B", "chunk": 0}}
    ]}
    """
    refuse_unless_a("timeline", timeline, Timeline)
    scale = _scale(timeline)
    events = [*_names(timeline, name), *_actions(timeline, scale)]
    events += _counters(timeline, scale) if memory else ()
    events += _arrows(timeline, scale) if arrows else ()
    held = [[_plain(height) for height in of_stage] for of_stage in timeline.held]
    about = {"unit": timeline.unit, "clocked": timeline.clocked, "lanes": timeline.lanes, "held": held}
    optional: dict[str, Any] = {"turns": timeline.turns, "outside": _written(timeline.outside, scale),
                                "scale": scale if scale > 1 and timeline.unit == "slots" else 0}
    head = json.dumps(about | {key: value for key, value in optional.items() if value})
    lines = ",\n".join(map(json.dumps, events))
    return f'{{"otherData": {head}, "displayTimeUnit": "ns", "traceEvents": [\n{lines}\n]}}'


def timeline_from_chrome(text: str) -> Timeline:
    """Reads what `chrome_trace` wrote.

    Args:
        text: of the trace; counters and arrows are not read

    Returns:
        The timeline; its times are what was written, to the nanosecond, or the thousandth of the shortest action.

    Raises:
        ScheduleError: this is not such a trace.
    """
    try:
        trace = json.loads(text)
        about = trace["otherData"]
        if about["unit"] not in _UNITS:
            raise ValueError(f"the unit is {about['unit']!r}, not one of {', '.join(_UNITS)}")
        scale = _PER_SECOND if about["unit"] == "s" else about.get("scale", 1)
        events = [_read(event, scale) for event in trace["traceEvents"] if event["ph"] == "X"]
        held = tuple(ChunkMemory(*heights) for heights in about["held"])
        turns = tuple(map(tuple, about.get("turns", ())))
        ordered = tuple(sorted(events, key=itemgetter(2)))
        outside = about.get("outside", 0) / scale
        return Timeline(ordered, about["lanes"], about["unit"], held, turns, bool(about["clocked"]), outside)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ScheduleError(
            f"this is not the trace of a timeline ({type(error).__name__}: {error}). Give what chrome_trace wrote."
        ) from None


def _names(timeline: Timeline, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": name}}
    for lane in range(timeline.lanes):
        thread = {"pid": 0, "tid": lane}
        yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": f"lane {lane}"}}
        yield {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": lane}}


def _actions(timeline: Timeline, scale: int) -> Iterator[dict[str, Any]]:
    for action, lane, start, end in timeline.events:
        first, last = _written(start, scale), _written(end, scale)
        yield {
            "ph": "X", "name": str(action), "cat": str(action.kind), "ts": first, "dur": _rounded(last - first),
            "pid": 0, "tid": lane, "cname": _COLOURS.get(action.kind, "grey"),
            "args": {"stage": action.stage, "kind": str(action.kind), "chunk": action.chunk},
        }


def _counters(timeline: Timeline, scale: int) -> Iterator[dict[str, Any]]:
    for lane, steps in enumerate(timeline.memory):
        for time, level in steps:
            yield {
                "ph": "C", "name": f"held, lane {lane}", "ts": _written(time, scale), "pid": 0,
                "args": {"held": _plain(level)},
            }


def _arrows(timeline: Timeline, scale: int) -> Iterator[dict[str, Any]]:
    """From what was waited for to what waited, between lanes; an arrow's ends stick to the actions that start there."""
    for number, (giver, taker, _) in enumerate(exchanges(timeline.by_lane)):
        same = {"cat": "needs", "name": str(giver.action), "id": number, "pid": 0}
        yield {"ph": "s", **same, "ts": _written(giver.start, scale), "tid": giver.lane}
        yield {"ph": "f", "bp": "e", **same, "ts": _written(taker.start, scale), "tid": taker.lane}


def _read(event: Mapping[str, Any], scale: float) -> Event:
    first, last = event["ts"], _rounded(event["ts"] + event["dur"])
    return Event(Action.parse(event["name"]), event["tid"], first / scale, last / scale)


def _scale(timeline: Timeline) -> int:
    """The microseconds that stand for a slot, or for a second."""
    if timeline.unit == "s":
        return _PER_SECOND
    shortest = min((event.duration for event in timeline.events if event.duration > 0), default=1)
    return int(10 ** max(0, ceil(-log10(shortest))))


def _written(time: float, scale: int) -> float:
    return _rounded(float(time) * scale)


def _rounded(time: float) -> float:
    """To the thousandth: the viewers keep nanoseconds."""
    return _plain(round(float(time), 3))


def _plain(value: float) -> float:
    """A number that JSON can write, whole numbers as such."""
    return int(value) if float(value).is_integer() else float(value)


_PER_SECOND = 10**6
_UNITS = ("slots", "s")
_COLOURS = {
    Kind.F: "rail_response",  # blue
    Kind.B: "rail_animation",  # red
    Kind.I: "thread_state_iowait",  # orange
    Kind.W: "yellow",
    Kind.R: "thread_state_runnable",  # pale blue
}
