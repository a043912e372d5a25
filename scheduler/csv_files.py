"""CSV files of schedules: a row for each lane, a cell for each action.

    Schedule  --to_csv-->  0F0,0F1,0B0,0B1     lane 0     --from_csv-->  the same Schedule
                           1F0,1B0,1F1,1B1     lane 1

This is the format of torch.distributed.pipelining: its `_dump_csv` writes it, its `_load_csv` reads it, and both write
an action as we do. `(0F4;3B0)OVERLAP_F_B` is a block: two actions that the lane runs as one. An empty cell is idle.

A table says less than a schedule: no name, and placement and chunks only through the actions that are there. So they
are read off: a stage is on the lane in whose row its actions stand, and the largest chunk is the last.
"""

import csv
import re
from io import StringIO
from itertools import count

from scheduler.action import Action
from scheduler.errors import ScheduleError, refuse_unless_a
from scheduler.placement import Placement
from scheduler.schedule import Order, Schedule


def to_csv(schedule: Schedule) -> str:
    """Writes the orders of a schedule as a table, as torch does.

    Args:
        schedule: any schedule, right or wrong

    Returns:
        A row for each lane, without idle cells; torch's `_load_csv` reads it with format "compute_only".

    >>> from scheduler import by_name
    >>> print(to_csv(by_name("1f1b", lanes=2, chunks=2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    refuse_unless_a("schedule", schedule, Schedule)
    table = StringIO()
    csv.writer(table, lineterminator="\n").writerows(map(_written, row) for row in schedule.cells())
    return table.getvalue()


def from_csv(text: str, name: str = "csv", placement: Placement | None = None, chunks: int | None = None) -> Schedule:
    """Reads what `to_csv` wrote, or torch's `_dump_csv` in either of its formats.

    Of torch's "compute_comms" format the cells that do not compute (SEND_F, RECV_F, WAIT_SEND_F, SEND_B, RECV_B,
    WAIT_SEND_B, UNSHARD, RESHARD, REDUCE_GRAD, WAIT_REDUCE_GRAD) are dropped: what is sent follows from the placement.
    Whether the orders are right is for `verify`: torch sends the chunks of its looped BFS back in descending order, for
    example.

    Args:
        text: a row for each lane; empty cells, and empty rows at the end, carry no meaning
        name: what the schedule is to be called
        placement: which lane hosts which stage; None reads it off the rows
        chunks: how many chunks there are; None takes one more than the largest

    Returns:
        The schedule, such that `from_csv(to_csv(schedule), schedule.name, schedule.placement, schedule.chunks)` is
        equal to `schedule`; the last two can go where every stage and the last chunk have an action.

    Raises:
        ScheduleError: a cell is no action (its row, its column and what would be one are named), a stage has no row
            or two, nothing is there, or the schedule that this makes is refused.

    >>> print(from_csv("0F0,,0RECV_B0,0B0\\n,1F0,1B0", name="mine"))
    schedule mine, chunks 1, stages on lanes 0 1
    lane 0: 0F0 0B0
    lane 1: 1F0 1B0
    """
    refuse_unless_a("text", text, str)
    table = [[_read(cell, lane, column) for column, cell in enumerate(row)] for lane, row in enumerate(_rows(text))]
    if placement is not None:
        refuse_unless_a("placement", placement, Placement)
    table += [[]] * (placement.lanes - len(table) if placement else 0)
    if (placement is None or chunks is None) and not any(cell for row in table for cell in row):
        raise ScheduleError(
            f"there is no action in the table. {_ALLOWED} Or, from Python, give placement= and chunks=."
        )
    return Schedule.of_cells(
        name,
        _placement(table) if placement is None else placement,
        1 + max(action.chunk for row in table for cell in row for action in cell) if chunks is None else chunks,
        table,
    )


def _written(cell: Order) -> str:
    return f"({';'.join(map(str, cell))})OVERLAP_F_B" if len(cell) > 1 else str(*cell)


def _rows(text: str) -> list[list[str]]:
    lines = StringIO(text.removeprefix("\ufeff"), newline=None)  # spreadsheets write a mark first
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines, strict=True)]
    except csv.Error as error:
        raise ScheduleError(f"this is no table: {error}. {_ALLOWED}") from None
    while rows and not any(rows[-1]):
        rows.pop()
    return rows


def _read(cell: str, lane: int, column: int) -> Order:
    """The actions of one cell: none where it is idle or does not compute, two where it is a block."""
    if not cell or _NO_WORK.fullmatch(cell):
        return ()
    block = _BLOCK.fullmatch(cell)
    try:
        return tuple(map(Action.parse, block.groups() if block else (cell,)))
    except ValueError:  # also numbers of thousands of digits, which int refuses
        short = cell if len(cell) <= _LONG else f"{cell[:_LONG]}..."
        raise ScheduleError(f"{_place(lane, column)}: {short!r} is not an action. {_ALLOWED}") from None


def _placement(table: list[list[Order]]) -> Placement:
    places: dict[int, tuple[int, int]] = {}
    for lane, row in enumerate(table):
        for column, cell in enumerate(row):
            for action in cell:
                host, first_column = places.setdefault(action.stage, (lane, column))
                if host != lane:
                    raise ScheduleError(
                        f"{_place(lane, column)}: {action} is of stage {action.stage}, which "
                        f"{_place(host, first_column)} has put on another lane. Keep each stage in one row, or, "
                        "from Python, give placement=."
                    )
    if len(places) <= max(places):
        gap = next(stage for stage in count() if stage not in places)
        raise ScheduleError(
            f"no row has an action of stage {gap}, but stage {max(places)} is there. "
            "Number the stages from 0 without a gap, or, from Python, give placement=."
        )
    return Placement(tuple(places[stage][0] for stage in range(len(places))))


def _place(lane: int, column: int) -> str:
    return f"row {lane + 1} (lane {lane}), column {column + 1}"


_NO_WORK = re.compile(r"[0-9]+(?:(?:SEND|RECV|WAIT_SEND)_[FB][0-9]+|UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)")
_BLOCK = re.compile(r"\(([0-9]+[FBIW][0-9]+);([0-9]+[FBIW][0-9]+)\)OVERLAP_F_B")
_ALLOWED = (
    "Write a row for each lane, its cells between commas: an action such as 2F0 (stage, kind, chunk; the kinds are "
    "F, B, I, W), a block such as (0F4;3B0)OVERLAP_F_B, torch's 0SEND_F1 and the like, or nothing."
)
_LONG = 40
