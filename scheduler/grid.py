"""The house grid: rows of actions as text. No other file makes grids.

    lane -> cells  --grid-->  lane 0 |F0 F1 .  B0 ==
                              lane 1 |.  F0 B0 == .

A cell names kind and chunk, with the stage in front where a lane has several: `label_for` decides.
"""

from collections.abc import Callable, Iterable, Sequence

from scheduler.action import Action

IDLE = "."


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Draws one row of cells for each lane, in columns.

    Args:
        rows: the cells of each lane; shorter rows are idle at their end

    Returns:
        One line for each lane, without spaces at its end.

    >>> print(grid([["F0", "B0"], [".", "F0", "B0"]]))
    lane 0 |F0 B0 .
    lane 1 |.  F0 B0
    """
    columns = max(map(len, rows))
    width = max((len(cell) for row in rows for cell in row), default=1)
    number = len(str(len(rows) - 1))
    lines = []
    for lane, row in enumerate(rows):
        cells = [*row, *[IDLE] * (columns - len(row))]
        lines.append(f"lane {lane:>{number}} |" + " ".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def label_for(lanes: Iterable[Iterable[Action]]) -> Callable[[Action], str]:
    """The name of an action in a cell: short where every lane has one stage, else in full.

    Args:
        lanes: the actions of each lane

    >>> action = Action.parse("1F0")
    >>> label_for([[action]])(action), label_for([[action, Action.parse("0F0")]])(action)
    ('F0', '1F0')
    """
    if all(len({action.stage for action in actions}) <= 1 for actions in lanes):
        return lambda action: f"{action.kind}{action.chunk}"
    return str
