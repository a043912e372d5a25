"""Messages that ran: who gave each and who read it, in measured or simulated events.

    lane 0: 0F0 0F1 0R0 0B0          0F0 --> 1F0    an F reads what F of the stage before gave
    lane 1: 1F0 1B0                  1B0 --> 0R0    what goes backward reads the B or I of the stage after; R before B
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import inf

from scheduler.action import Event, Kind


def exchanges(rows: Sequence[Sequence[Event]]) -> Iterator[tuple[Event, Event, float]]:
    """The messages between lanes. Where an action ran several times, in several steps, the first reads the first.

    Args:
        rows: the events of each lane, in order; clocks of lanes may differ

    Returns:
        The event that made each, the first one that reads it, and when the reader's lane ended what it ran before; -inf
        if that is nothing.

    >>> from scheduler import by_name, simulate
    >>> timeline = simulate(by_name("gpipe", lanes=2, chunks=2))
    >>> [f"{giver.action} {reader.action}" for giver, reader, _ in exchanges(timeline.by_lane)]
    ['1B0 0B0', '1B1 0B1', '0F0 1F0', '0F1 1F1']
    """
    givers: dict[tuple[int, bool, int], list[Event]] = defaultdict(list)
    recomputed = set()
    for row in rows:
        for event in row:
            stage, kind, chunk = event.action
            if kind is Kind.F or kind.is_backward:
                givers[stage, kind is Kind.F, chunk].append(event)
            elif kind is Kind.R:
                recomputed.add((stage, chunk))
    for row in rows:
        read: Counter[tuple[int, bool, int]] = Counter()
        free = -inf
        for event in row:
            stage, kind, chunk = event.action
            reads = kind in (Kind.F, Kind.R) or kind.is_backward and (stage, chunk) not in recomputed
            key = (stage - 1 if kind is Kind.F else stage + 1), kind is Kind.F, chunk
            if reads and read[key] < len(givers.get(key, ())):
                giver = givers[key][read[key]]
                read[key] += 1
                if giver.lane != event.lane:
                    yield giver, event, free
            free = event.end
