"""The reason why an action did not start earlier: the lane's action before it, or a need, whichever ended last.

    lane 0 |F0 F1 .  .  B0          B0 of lane 0 waits for B0 of lane 1, that for F0 of lane 1, that for F0 of lane 0
    lane 1 |.  F0 B0 == F1                ▲ this chain, from the end of the step back to its start, is the critical path

Holds for simulated and for measured timelines: it reads the events and their messages (clocks.py), no costs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from scheduler.action import Event
from scheduler.clocks import exchanges
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
        last = causes[last]
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


def _causes(rows: EventRows, exact: bool) -> dict[Event, Event | None]:
    """For each event the one that ended last of those that it waited for, in a timeline of one step; of several the way
    back could go round for ever. Where messages take time it is what was sent, unless the lane was not free before.

    Raises:
        ScheduleError: an action runs more than once.
    """
    counts = Counter([event.action for row in rows for event in row])
    twice = [action for action, count in counts.items() if count > 1]
    if twice:
        raise ScheduleError(f"{twice[0]} runs more than once: what waited for what can be told of one step at a time.")
    sender_of = {
        reader: sender for sender, reader, _ in exchanges(rows)
        # By clocks a sender may end a little later: what it makes is sent first.
        if sender.end <= reader.start or not exact and sender.start < reader.start
    }
    causes: dict[Event, Event | None] = {}
    for row in rows:
        for previous, event in zip([None, *row], row):
            sender = sender_of.get(event)
            by_lane = previous is not None and (
                sender is None or previous.end == event.start or not exact and previous.end >= sender.end
            )
            causes[event] = previous if by_lane else sender
    return causes


def _chain(causes: Mapping[Event, Event | None], event: Event, time: float) -> str:
    """Back along what held it up, to what ran or travelled at that time."""
    words = []
    while event.start > time:
        cause = causes[event]
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
