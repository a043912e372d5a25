"""What does a schedule look like?

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
too short to fill one still gets one, the next that is free.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import gcd, lcm
from numbers import Rational

from scheduler.action import Action
from scheduler.errors import refuse_unless_whole
from scheduler.grid import IDLE, grid, label_for
from scheduler.schedule import Schedule
from scheduler.simulation import simulate
from scheduler.timeline import Event, Timeline

__all__ = ["draw"]


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
        refuse_unless_whole("width", width, least=1)
    timeline = simulate(what) if isinstance(what, Schedule) else what
    slot = _slot(timeline, width)
    label = label_for([event.action for event in row] for row in timeline.by_lane)
    return "\n".join([grid([_cells(row, slot, label) for row in timeline.by_lane]), _footer(timeline)])


def _cells(row: Sequence[Event], slot: Fraction | float, label: Callable[[Action], str]) -> list[str]:
    cells: list[str] = []
    for event in row:
        first = max(len(cells), round(event.start / slot))
        after = max(first + 1, round(event.end / slot))
        cells += [IDLE] * (first - len(cells)) + [label(event.action)] + [_FURTHER] * (after - first - 1)
    return cells


def _footer(timeline: Timeline) -> str:
    peaks = " ".join(map(str, timeline.peak_in_flight))
    makespan, bubble = float(timeline.makespan), float(timeline.bubble)  # Fractions cannot be formatted in Python 3.11
    return f"makespan {_duration(makespan, timeline.unit)}, bubble {bubble:.1%}, peak in flight {peaks}"


def _duration(value: float, unit: str) -> str:
    """Slots as they are; seconds with three digits, in a unit that fits."""
    if unit != "s" or value == 0 or value >= 1:
        return f"{value:.6g} {unit}"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def _slot(timeline: Timeline, width: int | None) -> Fraction | float:
    whole = _whole_slot(timeline) if width is None and timeline.unit == "slots" else None
    return whole or timeline.makespan / (width or _WIDTH) or 1


def _whole_slot(timeline: Timeline) -> Fraction | None:
    """The longest slot that all times are whole multiples of, unless the shortest action would fill many of them."""
    times = {_exactly(time) for event in timeline.events for time in (event.start, event.end)}
    slot = Fraction(gcd(*(time.numerator for time in times)), lcm(*(time.denominator for time in times)))
    shortest = min((event.duration for event in timeline.events if event.duration), default=0)
    return slot if shortest <= _MANY * slot else None


def _exactly(time: float) -> Fraction:
    return Fraction(time) if isinstance(time, Rational) else Fraction(float(time))


_FURTHER = "=="
_WIDTH = 40
_MANY = 8
