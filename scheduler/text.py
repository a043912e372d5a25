"""The text form of schedules and programs: written and parsed.

    schedule NAME, chunks 2, stages on lanes 0 1
    lane 0: 0F0 0F1+0B0 0B1                         cells: words of actions, "+" within a block of two
    lane 1: ...

Blank lines and indentation do not count.
"""

import re
from collections.abc import Iterable

from scheduler.errors import ScheduleError
from scheduler.placement import Placement

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
