"""What is a schedule? Data: an order of actions for each lane, and a placement of the stages.

    Placement: stage -> lane ─┐
                              ├─►  Schedule  --str-->  text  --Schedule.parse-->  the same Schedule
    orders: lane -> actions ──┘

Only the order is stated. When an action runs follows from `requires` (dependencies.py) and from what actions cost
(simulation.py); whether the order is right is for `verify` to say (verification.py). Half a schedule, or a wrong one,
is a Schedule too, or nobody could draw what is wrong with it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from scheduler.action import Action, Kind
from scheduler.errors import ScheduleError, refuse_unless_whole
from scheduler.placement import Placement

__all__ = ["Order", "Schedule"]

Order = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """The order of every lane.

    Args:
        name: what `by_name` calls it: letters, digits, "-", "+", "." and "_"
        placement: which lane hosts which stage
        chunks: how many chunks every stage works on
        orders: for each lane its actions, in the order in which it runs them

    Raises:
        ScheduleError: the name cannot be printed and read back, there is no chunk, the orders are not tuples of
            actions, or there is not one for each lane.

    >>> first = Schedule.parse('''
    ...     schedule mine, chunks 1, stages on lanes 0 1
    ...     lane 0: 0F0 0B0
    ...     lane 1: 1F0 1I0 1W0
    ... ''')
    >>> first.split
    frozenset({(1, 0)})
    >>> print(first)
    schedule mine, chunks 1, stages on lanes 0 1
    lane 0: 0F0 0B0
    lane 1: 1F0 1I0 1W0
    """

    name: str
    placement: Placement
    chunks: int
    orders: tuple[Order, ...]

    def __post_init__(self) -> None:
        if not re.fullmatch(_NAME, self.name):
            raise ScheduleError(
                f"{self.name!r} cannot name a schedule. Use letters, digits, '-', '+', '.' and '_', as in zb-h1."
            )
        refuse_unless_whole("chunks", self.chunks, least=1)
        if not isinstance(self.orders, tuple) or not all(map(_is_order, self.orders)):
            raise ScheduleError(
                f"orders is {self.orders!r}, but must be a tuple with a tuple of actions for each lane. "
                "Use tuple(...) on lists, and Action.parse('2F0') on text."
            )
        if len(self.orders) != self.lanes:
            raise ScheduleError(
                f"there are {len(self.orders)} orders but {self.lanes} lanes (lane_of: {self.placement.lane_of}). "
                "Give each lane one order, () where it does nothing."
            )

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Reads what `str` wrote; blank lines and indentation do not count.

        Args:
            text: a head, then one line of actions for each lane, in the order of the lanes

        Returns:
            The schedule, such that `Schedule.parse(str(schedule)) == schedule`.

        Raises:
            ScheduleError: a line is none of these, or the schedule it makes is refused.
        """
        head, *rows = [line.strip() for line in text.strip().splitlines() if line.strip()] or [""]
        match = _HEAD.fullmatch(head)
        if match is None:
            raise ScheduleError(
                f"{head!r} does not begin a schedule. Write 'schedule NAME, chunks 2, stages on lanes 0 1', "
                "then a line 'lane 0: 0F0 0B0 ...' for each lane."
            )
        name, chunks, lanes = match.groups()
        placement = Placement(tuple(map(int, lanes.split())))
        return cls(name, placement, int(chunks), tuple(_parse_row(lane, row) for lane, row in enumerate(rows)))

    def __str__(self) -> str:
        lane_of = " ".join(map(str, self.placement.lane_of))
        head = f"schedule {self.name}, chunks {self.chunks}, stages on lanes {lane_of}"
        rows = (" ".join([f"lane {lane}:", *map(str, order)]) for lane, order in enumerate(self.orders))
        return "\n".join([head, *rows])

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.placement.stages

    @property
    def lanes(self) -> int:
        """How many lanes there are."""
        return self.placement.lanes

    @property
    def actions(self) -> Order:
        """All actions, lane after lane."""
        return tuple(chain.from_iterable(self.orders))

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The (stage, chunk) pairs whose backward is I and W instead of B."""
        return frozenset((stage, chunk) for stage, kind, chunk in self.actions if kind is Kind.I)

    def forward_half(self) -> tuple[Order, ...]:
        """Every order without its backward work: what a call of the model runs."""
        return self._only(lambda action: action.kind is Kind.F)

    def backward_half(self) -> tuple[Order, ...]:
        """Every order without its forward work: what `loss.backward()` runs."""
        return self._only(lambda action: action.kind is not Kind.F)

    def _only(self, wanted: Callable[[Action], bool]) -> tuple[Order, ...]:
        return tuple(tuple(filter(wanted, order)) for order in self.orders)


_NAME = r"[\w.+-]+"
_HEAD = re.compile(rf"schedule ({_NAME}), chunks ([0-9]+), stages on lanes ([0-9]+(?: [0-9]+)*)")


def _is_order(order: object) -> bool:
    return isinstance(order, tuple) and all(
        isinstance(action, Action) and isinstance(action.kind, Kind) for action in order
    )


def _parse_row(lane: int, row: str) -> Order:
    label, colon, actions = row.partition(":")
    if label != f"lane {lane}" or not colon:
        raise ScheduleError(f"{row!r} is not the order of lane {lane}. Write 'lane {lane}: 0F0 0B0 ...'.")
    return tuple(map(Action.parse, actions.split()))
