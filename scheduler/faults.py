"""The faults of a schedule with their places, and the one error that shows them.

    Fault(words, lane, position) ...  --refusal-->  ScheduleError: every fault in words, then the grid

The columns of this grid are positions in the orders, not time: a wrong schedule may have no times. A failing cell ends
with "!".

    >>> schedule = Schedule.parse('''
    ...     schedule mine, chunks 1, stages on lanes 0 1
    ...     lane 0: 0F0 0B0
    ...     lane 1: 1B0 1F0
    ... ''')
    >>> print(refusal(schedule, [Fault("lane 1 waits at 1B0", lane=1, position=0)]))
    schedule mine (lanes=2, chunks=1) has 1 fault:
      lane 1 waits at 1B0
    lane 0 |F0  B0
    lane 1 |B0! F0
"""

from collections.abc import Sequence
from typing import NamedTuple

from scheduler.errors import ScheduleError
from scheduler.grid import grid, label_for
from scheduler.programs.program import Program
from scheduler.schedule import Schedule


class Fault(NamedTuple):
    """One thing that is wrong.

    Args:
        words: what is wrong, the value, what to do
        lane: the lane whose cell is marked, None where nothing that is there is wrong
        position: the cell's place in the order of that lane
    """

    words: str
    lane: int | None = None
    position: int = 0


def refusal(wrong: Schedule | Program, faults: Sequence[Fault]) -> ScheduleError:
    """The error that names `faults`, the first hundred of them, and shows them in the grid.

    Args:
        wrong: the schedule or program that is refused
        faults: at least one
    """
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    kind = type(wrong).__name__.lower()
    head = f"{kind} {wrong.name} (lanes={wrong.lanes}, chunks={wrong.chunks}) has {count}:"
    words = [f"  {fault.words}" for fault in faults[:_MOST]]
    more = [f"  and {len(faults) - _MOST} more"] if len(faults) > _MOST else []
    return ScheduleError("\n".join([head, *words, *more, _picture(wrong, faults)]))


def _picture(wrong: Schedule | Program, faults: Sequence[Fault]) -> str:
    marked = {(fault.lane, fault.position) for fault in faults if fault.lane is not None}
    longest = max(map(len, wrong.orders))
    first = max(0, min((position for _, position in marked), default=0) - _BEFORE) if longest > _COLUMNS else 0
    label = label_for(wrong.orders)
    rows = [
        [
            label(action) + "!" * ((lane, position) in marked)
            for position, action in enumerate(order[first : first + _COLUMNS], first)
        ]
        for lane, order in enumerate(wrong.orders)
    ]
    shown = [f"(actions {first} to {min(first + _COLUMNS, longest) - 1} of {longest})"] if longest > _COLUMNS else []
    return "\n".join([grid(rows), *shown])


# A grid wider than a screen hides what it should show: beyond this, only what is around the first failing cell.
_COLUMNS = 32
_BEFORE = 8
_MOST = 100
