"""The reason why an action did not start earlier: the lane's action before it, or a need, whichever ended last.

    lane 0 |F0 F1 .  .  B0          B0 of lane 0 waits for B0 of lane 1, that for F0 of lane 1, that for F0 of lane 0
    lane 1 |.  F0 B0 == F1                ▲ this chain, from the end of the step back to its start, is the critical path

Holds for simulated and for measured timelines: it reads the events and `requires`, no costs.
"""

from collections import Counter
from collections.abc import Sequence

from scheduler.action import Event, Kind
from scheduler.dependencies import requires
from scheduler.errors import ScheduleError

EventRows = Sequence[Sequence[Event]]


def critical_path(rows: EventRows, exact: bool) -> tuple[Event, ...]:
    """From an action that waits for nothing to the one that ends last.

    Args:
        rows: the events of each lane, in order
        exact: whether an action starts at the very time at which the last that it waits for is there, as in a
            simulation; by clocks it starts a little later

    Returns:
        The events, ascending in time; none where nothing ran.

    >>> from scheduler import by_name, simulate
    >>> timeline = simulate(by_name("1f1b", lanes=2, chunks=2))
    >>> " ".join(str(event.action) for event in timeline.critical_path)
    '0F0 1F0 1B0 1F1 1B1 0B1'
    """
    causes = _causes(rows, exact)
    last = max((row[-1] for row in rows if row), key=lambda event: event.end, default=None)
    path: list[Event] = []
    while last is not None:
        path.append(last)
        last = causes.of(last)
    return tuple(reversed(path))


def why_idle(rows: EventRows, exact: bool, lane: int, time: float) -> str:
    """A description of `lane` at `time`: it works, or it waits for an action, which something holds up.

    Args:
        rows: the events of each lane, in order
        exact: as above
        lane: which lane
        time: any time

    >>> from scheduler import by_name, simulate
    >>> timeline = simulate(by_name("1f1b", lanes=3, chunks=3))
    >>> print(timeline.why_idle(lane=0, time=4))
    lane 0 is idle from 3 to 7: 0B0 waits for 1B0, which runs on lane 1 from 5 to 7; 1B0 waits for 2B0, which runs on \
lane 2 from 3 to 5.
    >>> print(timeline.why_idle(lane=0, time=8))
    lane 0 runs 0B0 from 7 to 9.
    """
    row = rows[lane]
    number = next((number for number, event in enumerate(row) if event.end > time), len(row))
    if number == len(row):
        return f"lane {lane} is done at {_short(row[-1].end if row else 0)}: it has nothing more to run."
    event = row[number]
    if event.start <= time:
        return f"lane {lane} runs {event.action} from {_short(event.start)} to {_short(event.end)}."
    since = row[number - 1].end if number else 0
    words = _chain(_causes(rows, exact), event, time)
    return f"lane {lane} is idle from {_short(since)} to {_short(event.start)}: {words}."


def _causes(rows: EventRows, exact: bool) -> "Causes":
    """The causes of each event in a timeline of one step; of several the way back could go round for ever.

    Raises:
        ScheduleError: an action runs more than once.
    """
    counts = Counter([event.action for row in rows for event in row])
    twice = [action for action, count in counts.items() if count > 1]
    if twice:
        raise ScheduleError(f"{twice[0]} runs more than once: what waited for what can be told of one step at a time.")
    return Causes(rows, exact)


def _chain(causes: "Causes", event: Event, time: float) -> str:
    """Back along what held it up, to what ran or travelled at that time."""
    words = []
    while event.start > time:
        cause = causes.of(event)
        if cause is None:
            words.append(f"{event.action} waits for nothing that was recorded")
            break
        if cause.lane == event.lane:
            words.append(f"{event.action} has its turn after {cause.action}, {_when(cause)}")
        else:
            words.append(f"{event.action} waits for {cause.action}, {_when(cause)}")
            if cause.end < event.start and cause.end <= time:
                words[-1] += f" and arrives at {_short(event.start)}"
        event = cause
    return "; ".join(words)


def _when(event: Event) -> str:
    return f"which runs on lane {event.lane} from {_short(event.start)} to {_short(event.end)}"


def _short(time: float) -> str:
    return f"{float(time):.6g}"


class Causes:
    """The events that each event waited for.

    Args:
        rows: the events of each lane, in order
        exact: as of `critical_path`
    """

    def __init__(self, rows: EventRows, exact: bool) -> None:
        self._exact = exact
        self._events = {event.action: event for row in rows for event in row}
        self._previous = {after.action: event for row in rows for event, after in zip(row, row[1:])}
        self._split = frozenset((stage, chunk) for stage, kind, chunk in self._events if kind is Kind.I)
        self._stages = 1 + max((action.stage for action in self._events), default=0)

    def elsewhere(self, event: Event) -> list[Event]:
        """The events on other lanes that an event needs."""
        needs = (self._events.get(need) for need in requires(event.action, self._stages, self._split))
        return [need for need in needs if need is not None and need.lane != event.lane]

    def of(self, event: Event) -> Event | None:
        """The event that ended last of those that it waited for. Where messages take time it is the one sent last,
        unless the lane itself was not free before."""
        previous = self._previous.get(event.action)
        if previous is not None and previous.end == event.start:
            return previous
        remote = [need for need in self.elsewhere(event) if self._ended(need, event)]
        causes = remote if remote and self._exact or previous is None else [previous, *remote]
        return max(causes, key=lambda need: need.end, default=None)

    def _ended(self, need: Event, event: Event) -> bool:
        """Whether `event` can have waited for it. By clocks it may end a little later: what it makes is sent first."""
        return need.end <= event.start or not self._exact and need.start < event.start
