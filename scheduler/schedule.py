"""A schedule: an order of actions for each lane, and a placement of the stages.

    Placement: stage -> lane ─┐
                              ├─►  Schedule  --str-->  text  --Schedule.parse-->  the same Schedule
    orders: lane -> actions ──┘

Only the order is stated. When an action runs follows from `requires` (dependencies.py) and from what actions cost
(simulation.py); whether the order is right is for `verify` to say (verification.py). Half a schedule, or a wrong one,
is a Schedule too, or nobody could draw what is wrong with it.

    schedule NAME, chunks 2, stages on lanes 0 1
    lane 0: 0F0 0F1+0B0 0B1                         cells: words of actions, "+" within a block of two
    lane 1: ...

Blank lines and indentation of a text do not count.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from scheduler.action import COMPUTE, Action, Kind
from scheduler.errors import ScheduleError, refuse_unless_a, whole_number
from scheduler.placement import HasPlacement, Placement

Order = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule(HasPlacement):
    """The order of every lane.

    Args:
        name: what `by_name` calls it: letters, digits, "-", "+", "." and "_"
        placement: which lane hosts which stage
        chunks: how many chunks every stage works on
        orders: for each lane its actions (F, B, I, W), in the order in which it runs them
        blocks: the (lane, position) of an action that its lane runs together with the next as one block (an F and a
            backward whose work overlaps, as in DualPipeV); written 0F1+1B0. A lane may as well run the two in turn.

    Raises:
        ScheduleError: the name cannot be printed and read back, there is no chunk, the orders are not tuples of
            actions, there is not one for each lane, or a block is no pair of neighbours.

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
    blocks: frozenset[tuple[int, int]] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(NAME, self.name):
            raise ScheduleError(
                f"{self.name!r} cannot name a schedule. Use letters, digits, '-', '+', '.' and '_', as in zb-h1."
            )
        object.__setattr__(self, "chunks", whole_number("chunks", self.chunks, least=1))
        if not isinstance(self.orders, tuple) or not all(map(_is_order, self.orders)):
            raise ScheduleError(
                f"orders is {self.orders!r}, but must be a tuple with a tuple of actions for each lane, all of them F, "
                "B, I or W. Use tuple(...) on lists, Action.parse('2F0') on text, and Program for what sends and "
                "receives."
            )
        refuse_unless_one_each(self.orders, self.placement)
        object.__setattr__(self, "blocks", frozenset(map(tuple, self.blocks)))  # from here on: nobody else's set
        self._refuse_unless_blocks()

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
        name, chunks, placement, cells = read("schedule", text)
        rows = [[tuple(map(Action.parse, cell.split("+"))) for cell in row] for row in cells]
        return cls.of_cells(name, placement, chunks, rows)

    @classmethod
    def of_cells(
        cls, name: str, placement: Placement, chunks: int, rows: Iterable[Iterable[Sequence[Action]]]
    ) -> "Schedule":
        """A schedule from a table.

        Args:
            name, placement, chunks: as of the class
            rows: for each lane its cells: an action, the two of a block, or nothing
        """
        orders: list[Order] = []
        blocks: set[tuple[int, int]] = set()
        for lane, row in enumerate(rows):
            order: list[Action] = []
            for cell in row:
                order += cell
                blocks.update((lane, position) for position in range(len(order) - len(cell), len(order) - 1))
            orders.append(tuple(order))
        return cls(name, placement, chunks, tuple(orders), frozenset(blocks))

    def cells(self) -> list[list[Order]]:
        """The rows that `of_cells` takes: for each lane its actions, the two of a block together."""
        rows: list[list[Order]] = [[] for _ in self.orders]
        for lane, order in enumerate(self.orders):
            for position, action in enumerate(order):
                if (lane, position - 1) in self.blocks:
                    rows[lane][-1] += (action,)
                else:
                    rows[lane].append((action,))
        return rows

    def __str__(self) -> str:
        rows = (" ".join("+".join(map(str, cell)) for cell in row) for row in self.cells())
        return written("schedule", self.name, self.chunks, self.placement, rows)

    def _repr_svg_(self) -> str | None:
        from scheduler.summary import picture  # which draws schedules, so it imports this file

        return picture(self)

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

    def first(self, chunks: int) -> "Schedule":
        """The same orders for fewer chunks: without the actions of the others.

        What is left waits for nothing that went, so it ends as the whole does, and holds no more.

        Args:
            chunks: how many are left, from chunk 0

        Raises:
            ScheduleError: it is no whole number from 1 to those there are.

        >>> from scheduler import by_name
        >>> print(by_name("zb-h2", lanes=2, chunks=4).first(2))
        schedule zb-h2, chunks 2, stages on lanes 0 1
        lane 0: 0F0 0F1 0I0 0W0 0I1 0W1
        lane 1: 1F0 1I0 1F1 1I1 1W0 1W1
        """
        chunks = whole_number("chunks", chunks, least=1)
        if chunks > self.chunks:
            raise ScheduleError(
                f"schedule {self.name} has {self.chunks} chunks, so it has no first {chunks}. Make it for {chunks}."
            )
        rows = [[[action for action in cell if action.chunk < chunks] for cell in row] for row in self.cells()]
        return Schedule.of_cells(self.name, self.placement, chunks, rows)

    def _refuse_unless_blocks(self) -> None:
        for lane, position in sorted(self.blocks):
            is_first_of_two = 0 <= lane < self.lanes and 0 <= position < len(self.orders[lane]) - 1
            if not is_first_of_two or (lane, position + 1) in self.blocks:
                raise ScheduleError(
                    f"block ({lane}, {position}) is not the first of two neighbours in the order of lane {lane} that "
                    "are in no other block. Give (lane, position) of the first of each pair."
                )

    def _only(self, wanted: Callable[[Action], bool]) -> tuple[Order, ...]:
        return tuple(tuple(filter(wanted, order)) for order in self.orders)


def refuse_unless_one_each(orders: Sequence[Order], placement: Placement) -> None:
    """Raise ScheduleError unless there is an order for each lane."""
    refuse_unless_a("placement", placement, Placement)
    if len(orders) != placement.lanes:
        raise ScheduleError(
            f"there are {len(orders)} orders but {placement.lanes} lanes (lane_of: {placement.lane_of}). "
            "Give each lane one order, () where it does nothing."
        )


def _is_order(order: object) -> bool:
    if not isinstance(order, tuple):
        return False
    if not set(map(type, order)) <= {Action}:
        return False
    kinds = {action.kind for action in order}
    return kinds <= set(COMPUTE) and set(map(type, kinds)) <= {Kind}


NAME = r"[\w.+-]+"


def written(kind: str, name: str, chunks: int, placement: Placement, rows: Iterable[str]) -> str:
    """The text.

    Args:
        kind: "schedule" or "program"
        name: as `by_name` has it
        chunks: how many
        placement: which lane hosts which stage
        rows: the cells of each lane, with spaces between
    """
    lanes = " ".join(map(str, placement.lane_of))
    head = f"{kind} {name}, chunks {chunks}, stages on lanes {lanes}"
    return "\n".join([head, *(f"lane {lane}: {row}".rstrip() for lane, row in enumerate(rows))])


def read(kind: str, text: str) -> tuple[str, int, Placement, list[list[str]]]:
    """The inverse of `written`: the name, the number of chunks, the placement, and the cells of each lane, as strings.

    Args:
        kind: "schedule" or "program"
        text: a head, then one line of cells for each lane, in the order of the lanes

    Raises:
        ScheduleError: a line is none of these.

    >>> read("schedule", "schedule mine, chunks 1, stages on lanes 0 \\n lane 0: 0F0 0B0")[-1]
    [['0F0', '0B0']]
    """
    refuse_unless_a("text", text, str)
    head, *rows = [line.strip() for line in text.strip().splitlines() if line.strip()] or [""]
    match = re.fullmatch(rf"{kind} ({NAME}), chunks ([0-9]+), stages on lanes ([0-9]+(?: [0-9]+)*)", head)
    if match is None:
        raise ScheduleError(
            f"{head!r} does not begin a {kind}. Write '{kind} NAME, chunks 2, stages on lanes 0 1', "
            "then a line 'lane 0: 0F0 0B0 ...' for each lane."
        )
    name, chunks, lanes = match.groups()
    cells = [_cells(lane, row) for lane, row in enumerate(rows)]
    return name, int(chunks), Placement(tuple(map(int, lanes.split()))), cells


def _cells(lane: int, row: str) -> list[str]:
    label, colon, cells = row.partition(":")
    if label != f"lane {lane}" or not colon:
        raise ScheduleError(f"{row!r} is not the order of lane {lane}. Write 'lane {lane}: 0F0 0B0 ...'.")
    return cells.split()
