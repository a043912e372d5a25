"""Where are the ticks of a figure's time axis?

    makespan  --unit that fits-->  33 slots, 4.13 ms  --round steps-->  0  5  10 ...
"""

from math import floor, log10
from xml.etree.ElementTree import Element

from scheduler.figures.frame import Frame, add, number
from scheduler.timeline import Timeline

__all__ = ["axis", "ticks"]


def axis(page: Element, top: float, timeline: Timeline, frame: Frame) -> float:
    """Draws the axis of a timeline, with about one tick each 90 pixels; returns where it ends.

    Args:
        page: what the axis is added to
        top: where it begins
        timeline: what is drawn above it
        frame: the page
    """
    scale, unit = _unit(timeline)
    last = float(timeline.makespan) * scale
    line = add(page, "g", stroke="#888888", stroke_width=1)
    words = add(page, "g", text_anchor="middle", fill="#444444", font_size=10)
    add(line, "path", d=f"M{number(frame.left)} {number(top + 2)}H{number(frame.right)}")
    for tick in ticks(last, frame.plot / 90):
        x = frame.x(tick / scale)
        add(line, "path", d=f"M{number(x)} {number(top + 2)}v4")
        add(words, "text", f"{tick:g}", x=x, y=top + 16)
    add(page, "text", unit, x=frame.left - 8, y=top + 16, text_anchor="end", fill="#444444", font_size=10)
    return top + 24


def ticks(last: float, about: float) -> list[float]:
    """Round numbers from 0 to `last`: multiples of 1, 2 or 5 times a power of ten.

    Args:
        last: the end of the axis
        about: how many there should be

    >>> ticks(33, about=9)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if last <= 0:
        return [0.0]
    power = 10.0 ** floor(log10(last / about))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= last / about)
    return [step * at for at in range(floor(last / step + 1e-9) + 1)]


def _unit(timeline: Timeline) -> tuple[float, str]:
    """What times are multiplied by to be written on the axis, and in which unit they are then."""
    if timeline.unit == "slots" or timeline.makespan >= 1:
        return 1, timeline.unit
    return (1e3, "ms") if timeline.makespan >= 1e-3 else (1e6, "us")
