"""Messages that ran, and events of several clocks, brought to one: machines count from different zeros.

    clock 0:  0F0 sent at 5     0B0 read at 30      nothing is read before it is sent, so by 1F0 clock 1 is at most
    clock 1:  1F0 read at 103   1B0 sent at 110     98 ahead, by 0B0 at least 80. As fast there as back: it is 89

The fastest message each way bounds how far one clock is ahead of another; the middle is taken, as the Network Time
Protocol does (Mills, RFC 5905, section 8). It errs by half of what the two differ in. With messages one way only, the
fastest takes no time. A clock that exchanges none, not even through others, is left as it is.

    lane 0: 0F0 0F1 0R0 0B0          0F0 --> 1F0    an F reads what F of the stage before gave
    lane 1: 1F0 1B0                  1B0 --> 0R0    what goes backward reads the B or I of the stage after; R before B
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from math import inf
from operator import attrgetter

from scheduler.action import Action, Event, Kind
from scheduler.dependencies import requires


def on_one_clock(clocks: Sequence[Sequence[Event]]) -> list[Event]:
    """The events of several clocks, in the time of the first.

    Args:
        clocks: for each clock the events whose times it told, of all lanes that it serves

    >>> from scheduler import Action
    >>> first = [Event(Action.parse("0F0"), 0, 0, 5), Event(Action.parse("0B0"), 0, 30, 40)]
    >>> other = [Event(Action.parse("1F0"), 1, 103, 108), Event(Action.parse("1B0"), 1, 108, 110)]
    >>> for event in on_one_clock([first, other]):
    ...     print(event.action, event.start, event.end)
    0F0 0 5
    0B0 30 40
    1F0 14.0 19.0
    1B0 19.0 21.0
    """
    ahead = ahead_of_first(clocks)
    return [
        Event(action, lane, start - ahead[clock], end - ahead[clock])
        for clock, events in enumerate(clocks) for action, lane, start, end in events
    ]


def ahead_of_first(clocks: Sequence[Sequence[Event]]) -> list[float]:
    """By how much each clock is ahead of the first.

    Args:
        clocks: as for `on_one_clock`
    """
    fastest = _fastest(clocks)
    ahead: dict[int, float] = {}
    for root in range(len(clocks)):
        ahead.setdefault(root, 0)
        reached = deque([root])
        while reached:
            clock = reached.popleft()
            for other in range(len(clocks)):
                to_other, from_other = fastest.get((clock, other), inf), fastest.get((other, clock), inf)
                if other not in ahead and min(to_other, from_other) < inf:
                    ahead[other] = ahead[clock] + _middle(to_other, from_other)
                    reached.append(other)
    return [ahead[clock] for clock in range(len(clocks))]


def _middle(to_other: float, from_other: float) -> float:
    """By how far the other clock is ahead, where the fastest messages take so long by the difference of the two."""
    if to_other == inf:
        return -from_other
    return to_other if from_other == inf else (to_other - from_other) / 2


def _fastest(clocks: Sequence[Sequence[Event]]) -> dict[tuple[int, int], float]:
    """The shortest time from the end of a giver to the start of its reader, from clock to clock."""
    lanes = sorted({event.lane for events in clocks for event in events})
    clock_of = {event.lane: clock for clock, events in enumerate(clocks) for event in events}
    rows = [sorted((event for event in clocks[clock_of[lane]] if event.lane == lane), key=_START) for lane in lanes]
    fastest: dict[tuple[int, int], float] = {}
    for giver, reader, _ in exchanges(rows):
        pair = clock_of[giver.lane], clock_of[reader.lane]
        fastest[pair] = min(fastest.get(pair, inf), reader.start - giver.end)
    return fastest


_START = attrgetter("start", "end")


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
    unread: dict[Action, deque[Event]] = defaultdict(deque)
    for row in rows:
        for event in row:
            unread[event.action].append(event)
    split = frozenset((stage, chunk) for stage, kind, chunk in unread if kind is Kind.I)
    recomputed = {(stage, chunk) for stage, kind, chunk in unread if kind is Kind.R}
    stages = 1 + max((action.stage for action in unread), default=0)
    for row in rows:
        free = -inf
        for event in row:
            stage, kind, chunk = event.action
            reads = kind in (Kind.F, Kind.R) or kind.is_backward and (stage, chunk) not in recomputed
            for need in requires(event.action, stages, split) if reads else ():
                if need.stage != stage and unread[need]:
                    giver = unread[need].popleft()
                    if giver.lane != event.lane:
                        yield giver, event, free
            free = event.end
