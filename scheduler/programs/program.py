"""A program: what each lane computes, sends and receives, in order.

    Schedule  --lower (lowering.py)-->  Program

    lane 0: 0F0 0SEND_F0 0RECV_B0 0B0
    lane 1: 1RECV_F0 1F0 1B0 1SEND_B0

    SEND    waits until the RECV of its message is posted on the other lane, however small the message (rendezvous)
    RECV    posts a buffer for the next message of its channel; does not wait
    F B I   wait for the messages that they need

A channel leads from one lane to another; messages do not overtake each other in it. No transport is stricter than
this: one that buffers what is sent, or posts receives earlier, waits for less.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.action import COMPUTE, Action, Kind
from scheduler.errors import ScheduleError, whole_number
from scheduler.placement import HasPlacement, Placement
from scheduler.schedule import Order, Schedule, read, refuse_unless_one_each, written


class Channel(NamedTuple):
    """The messages from one lane to another, at both ends: `sends` and `receives` belong together one by one."""

    sends: tuple[Action, ...]
    receives: tuple[Action, ...]


@dataclass(frozen=True)
class Program(HasPlacement):
    """The program of every lane.

    Args:
        name: of the schedule
        placement: which lane hosts which stage
        chunks: how many chunks every stage works on
        orders: for each lane what it computes, sends and receives, in order

    Raises:
        ScheduleError: there are not as many orders as lanes, or what they hold are no actions.

    >>> program = Program.parse('''
    ...     program mine, chunks 1, stages on lanes 0 1
    ...     lane 0: 0F0 0SEND_F0 0RECV_B0 0B0
    ...     lane 1: 1RECV_F0 1F0 1B0 1SEND_B0
    ... ''')
    >>> [str(action) for action in program.channels()[1, 0].receives]
    ['0RECV_B0']
    >>> print(program.schedule())
    schedule mine, chunks 1, stages on lanes 0 1
    lane 0: 0F0 0B0
    lane 1: 1F0 1B0
    """

    name: str
    placement: Placement
    chunks: int
    orders: tuple[Order, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", whole_number("chunks", self.chunks, least=1))
        refuse_unless_one_each(self.orders, self.placement)
        if not all(isinstance(order, tuple) and set(map(type, order)) <= {Action} for order in self.orders):
            raise ScheduleError(
                f"orders is {self.orders!r}, but must be a tuple with a tuple of actions for each lane. "
                "Use tuple(...) on lists, and Action.parse('0SEND_F0') on text."
            )

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Reads what `str` wrote.

        Raises:
            ScheduleError: a line is not as above.
        """
        name, chunks, placement, cells = read("program", text)
        return cls(name, placement, chunks, tuple(tuple(map(Action.parse, row)) for row in cells))

    def __str__(self) -> str:
        rows = (" ".join(map(str, order)) for order in self.orders)
        return written("program", self.name, self.chunks, self.placement, rows)

    def schedule(self) -> Schedule:
        """The schedule of the program: its actions without the messages."""
        orders = (tuple(action for action in order if action.kind in COMPUTE) for order in self.orders)
        return Schedule(self.name, self.placement, self.chunks, tuple(orders))

    def channels(self) -> dict[tuple[int, int], Channel]:
        """The messages of each channel (from lane, to lane), in the order of either end."""
        sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
        receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
        for lane, order in enumerate(self.orders):
            for action in order:
                if action.kind.is_send:
                    sends[lane, self._host(other_end(action).stage)].append(action)
                elif action.kind.is_receive:
                    receives[self._host(other_end(action).stage), lane].append(action)
        return {lanes: Channel(tuple(sends[lanes]), tuple(receives[lanes])) for lanes in sorted({*sends, *receives})}

    def _host(self, stage: int) -> int:
        if not 0 <= stage < self.placement.stages:
            raise ScheduleError(
                f"a message of stage {stage} cannot be: there are {self.placement.stages} stages, numbered from 0. "
                "The first stage receives no input, and the last sends no output."
            )
        return self.placement.lane_of[stage]


def other_end(message: Action) -> Action:
    """The RECV of a SEND, and the SEND of a RECV.

    >>> print(other_end(Action.parse("1RECV_F3")), other_end(Action.parse("1SEND_B3")))
    0SEND_F3 0RECV_B3
    """
    stage, kind, chunk = message
    other_kind, step = _OTHER_END[kind]
    return Action(stage + step, other_kind, chunk)


_OTHER_END = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
