"""The messages of a schedule: the results that travel between lanes.

    F of stage s  --0SEND_F0--> --1RECV_F0-->  F of stage s + 1         where the two stages are on different lanes
    B or I of s   --1SEND_B0--> --0RECV_B0-->  B or I of stage s - 1

Asked of `requires`: what an action needs from another lane is a message.
"""

from typing import NamedTuple

from scheduler.action import COMPUTE, Action, Kind
from scheduler.dependencies import requires
from scheduler.placement import Placement

__all__ = ["Messages", "Way", "messages"]


class Way(NamedTuple):
    """How a result travels.

    Args:
        send: how its lane sends it
        lane: where to
        receive: how it is received
        stage: by which stage
    """

    send: Kind
    lane: int
    receive: Kind
    stage: int


class Messages(NamedTuple):
    """What travels, for any chunk.

    Args:
        sent: (stage, kind) whose result another lane needs -> how it travels
        received: (stage, kind) that needs a result of another lane -> how that is received
    """

    sent: dict[tuple[int, Kind], Way]
    received: dict[tuple[int, Kind], Kind]


def messages(placement: Placement) -> Messages:
    """The messages between the lanes.

    Args:
        placement: which lane hosts which stage

    >>> sent, received = messages(Placement.linear(2))
    >>> print(*[f"{stage}{kind}: {way.stage}{way.receive}" for (stage, kind), way in sorted(sent.items())])
    0F: 1RECV_F 1B: 0RECV_B 1I: 0RECV_B
    """
    lane_of = placement.lane_of
    found = Messages({}, {})
    for stage in range(placement.stages):
        for kind in COMPUTE:
            for split in (frozenset[tuple[int, int]](), frozenset({(stage + 1, 0)})):
                for need in requires(Action(stage, kind, 0), placement.stages, split):
                    if lane_of[need.stage] != lane_of[stage]:
                        send, receive = _BOTH_ENDS[need.kind is Kind.F]
                        found.sent[need.stage, need.kind] = Way(send, lane_of[stage], receive, stage)
                        found.received[stage, kind] = receive
    return found


_BOTH_ENDS = {True: (Kind.SEND_F, Kind.RECV_F), False: (Kind.SEND_B, Kind.RECV_B)}
