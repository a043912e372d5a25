"""The messages of a schedule: the results that travel between lanes.

    F of stage s  --0SEND_F0--> --1RECV_F0-->  F of stage s + 1         where the two stages are on different lanes
    B or I of s   --1SEND_B0--> --0RECV_B0-->  B or I of stage s - 1

Asked of `requires`: what an action needs from another lane is a message. A value that skips stages, from s to any later
t, travels as one between neighbours does.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from scheduler.action import COMPUTE, Action, Kind
from scheduler.dependencies import requires
from scheduler.placement import Placement


class MessageRoute(NamedTuple):
    """The way of a result from one action to another.

    Args:
        send: how its lane sends it
        lane: where to
        receive: how it is received
        stage: by which stage
        kinds: which actions of that stage need it
        edge: the number of the edge that it travels along
    """

    send: Kind
    lane: int
    receive: Kind
    stage: int
    kinds: tuple[Kind, ...]
    edge: int


class Messages(NamedTuple):
    """The messages of any chunk.

    Args:
        sent: (stage, kind) whose result another lane needs -> how it travels, along each edge
        received: (stage, kind) that needs a result of another lane -> how that is received
    """

    sent: dict[tuple[int, Kind], list[MessageRoute]]
    received: dict[tuple[int, Kind], Kind]


def messages(placement: Placement, edges: Iterable[tuple[int, int]] | None = None) -> Messages:
    """The messages between the lanes.

    Args:
        placement: which lane hosts which stage
        edges: for each value the stage that makes it, and one that reads it; None: one from every stage to the next

    >>> sent, received = messages(Placement.linear(2))
    >>> print(*[f"{stage}{kind}: {route.stage}{route.receive}" for (stage, kind), (route,) in sorted(sent.items())])
    0F: 1RECV_F 1B: 0RECV_B 1I: 0RECV_B
    """
    lane_of = placement.lane_of
    table = Messages({}, {})
    for number, edge in enumerate(pairwise(range(placement.stages)) if edges is None else edges):
        if lane_of[edge[0]] == lane_of[edge[1]]:
            continue
        for (end, kind), needed_by in _ALONG_AN_EDGE.items():
            stage, reader = edge[end], edge[1 - end]
            send, receive = _BOTH_ENDS[kind is Kind.F]
            route = MessageRoute(send, lane_of[reader], receive, reader, needed_by, number)
            table.sent.setdefault((stage, kind), []).append(route)
            table.received.update({(reader, needing): receive for needing in needed_by})
    return table


def _along_an_edge() -> dict[tuple[int, Kind], tuple[Kind, ...]]:
    """Of two stages, one after the other: (stage, kind) whose result the other one needs -> which kinds need it."""
    readers: dict[tuple[int, Kind], list[Kind]] = {}
    for stage in range(2):
        for kind in COMPUTE:
            for split in (frozenset[tuple[int, int]](), frozenset({(1, 0)})):
                for need in requires(Action(stage, kind, 0), 2, split):
                    kinds = readers.setdefault((need.stage, need.kind), [])
                    if need.stage != stage and kind not in kinds:
                        kinds.append(kind)
    return {action: tuple(kinds) for action, kinds in readers.items() if kinds}


_ALONG_AN_EDGE = _along_an_edge()
_BOTH_ENDS = {True: (Kind.SEND_F, Kind.RECV_F), False: (Kind.SEND_B, Kind.RECV_B)}
