"""A schedule or a timeline drawn as text.

    Schedule --simulate, unit costs--> Timeline --slots--> cells of each lane --grid--> text
                                           └────────────── footer: makespan, bubble, peak in flight

    >>> from scheduler import by_name
    >>> print(draw(by_name("1f1b", lanes=3, chunks=3)))
    lane 0 |F0 F1 F2 .  .  .  .  B0 == .  B1 == .  B2 ==
    lane 1 |.  F0 F1 .  .  B0 == F2 B1 == .  B2 == .  .
    lane 2 |.  .  F0 B0 == F1 B1 == F2 B2 == .  .  .  .
    makespan 15 slots, bubble 40.0%, peak in flight 3 2 1

A cell is a slot: `F0` an action's first, `==` its further ones, `.` idle. Where all times are whole multiples of one
duration, the slot is that duration. Measured times never are: there a slot is a share of the makespan, and what is
too short to fill one still gets one, the next that is free. `F4+` runs as one block with the action after it.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from fractions import Fraction
from math import gcd, lcm
from numbers import Rational

from scheduler.action import Event
from scheduler.errors import refuse_unless_a, whole_number
from scheduler.grid import IDLE, grid, label_for
from scheduler.schedule import Schedule
from scheduler.simulation import simulate
from scheduler.timeline import Timeline


def draw(what: Schedule | Timeline, width: int | None = None) -> str:
    """Draws a schedule or a timeline as the house grid.

    Args:
        what: a schedule, drawn with B = 2 slots and all other kinds 1; or a timeline, simulated or measured
        width: how many slots the makespan is cut into; None chooses

    Returns:
        A row for each lane, and a footer.

    Raises:
        ScheduleError: the schedule cannot end, or `width` is not at least 1.
    """
    if width is not None:
        width = whole_number("width", width, least=1)
    refuse_unless_a("what", what, Schedule, Timeline)
    timeline = simulate(what) if isinstance(what, Schedule) else what
    blocks: Set[tuple[int, int]] = what.blocks if isinstance(what, Schedule) else frozenset()
    column = _columns(timeline, width)
    label = label_for([event.action for event in row] for row in timeline.by_lane)
    names = [
        [label(event.action) + _BLOCK * ((lane, position) in blocks) for position, event in enumerate(row)]
        for lane, row in enumerate(timeline.by_lane)
    ]
    rows = [_cells(*lane, column) for lane in zip(timeline.by_lane, names)]
    return "\n".join([grid(rows), measures(timeline, map(str, timeline.peak_in_flight)), *take_turns(timeline)])


def duration(value: float, unit: str) -> str:
    """Slots as they are; seconds with three digits, in a unit that fits.

    >>> duration(33, "slots"), duration(0.004129, "s")
    ('33 slots', '4.13 ms')
    """
    value = float(value)  # Fractions cannot be formatted in Python 3.11
    if unit != "s" or value == 0 or value >= 1:
        return f"{value:.6g} {unit}"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def measures(timeline: Timeline, peaks: Iterable[str]) -> str:
    """Makespan, bubble and peaks in flight in a line, the peaks as they are given."""
    makespan, bubble = duration(timeline.makespan, timeline.unit), float(timeline.bubble)
    return f"makespan {makespan}, bubble {bubble:.1%}, peak in flight {' '.join(peaks)}"


def take_turns(timeline: Timeline) -> list[str]:
    """A remark on lanes that do not run at once, if there are any."""
    if not timeline.turns:
        return []
    lanes = ", and ".join(f"lanes {' '.join(map(str, group))}" for group in timeline.turns)
    return [f"{lanes} take turns (one thread or device): no bubble of lanes that run at once"]


def _cells(row: Sequence[Event], names: Sequence[str], column: Mapping[float, int]) -> list[str]:
    cells: list[str] = []
    for (_, _, start, end), name in zip(row, names):
        first = max(len(cells), column[start])
        after = max(first + 1, column[end])
        cells += [IDLE] * (first - len(cells)) + [name] + [_FURTHER] * (after - first - 1)
    return cells


def _columns(timeline: Timeline, width: int | None) -> dict[float, int]:
    """The slot of each time: once for each, because many actions start and end together."""
    times = {time for event in timeline.events for time in event[2:]}
    whole = _whole_slot(timeline, times) if width is None and timeline.unit == "slots" else None
    slot = whole or timeline.makespan / (width or _WIDTH) or 1
    return {time: round(time / slot) for time in times}


def _whole_slot(timeline: Timeline, times: Set[float]) -> Fraction | None:
    """The longest slot that all times are whole multiples of; not where the shortest action would fill many of them, or
    a lane more than a grid has."""
    exact = [_exactly(time) for time in times]
    slot = Fraction(gcd(*(time.numerator for time in exact)), lcm(*(time.denominator for time in exact)))
    shortest = min((end - start for _, _, start, end in timeline.events if end != start), default=0)
    return slot if shortest <= _MANY * slot and timeline.makespan <= _MOST * slot else None


def _exactly(time: float) -> Fraction:
    return Fraction(time) if isinstance(time, Rational) else Fraction(float(time))


_FURTHER = "=="
_BLOCK = "+"
_WIDTH = 40
_MANY = 8
_MOST = 100_000
