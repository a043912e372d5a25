"""How does a lane become a row of a figure?

    events of a lane ─┬─ few ───►  rectangles: to scale, with number and tooltip
                      └─ many ──►  densities: each column's height is shared out as its time is among the kinds

    steps of memory  ──────────►  a step line, its maximum marked

Rectangles too narrow to be seen would be many, and say less than the share of time that they stand for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from xml.etree.ElementTree import Element

from scheduler.action import Action, Kind
from scheduler.drawing import duration
from scheduler.figures.frame import Frame, add, number, wide
from scheduler.figures.palette import IDLE_COLOUR, colour, ink
from scheduler.timeline import Event

__all__ = ["Look", "densities", "memory_curve", "rectangles"]


@dataclass(frozen=True)
class Look:
    """What the rectangles of all lanes have in common.

    Args:
        stages: how many a lane has at most; where several, each has a shade, and its number in the corner
        digits: how many the largest chunk has
        unit: of the times, for the tooltips
    """

    stages: int
    digits: int
    unit: str


def rectangles(
    parent: Element, row: Sequence[Event], blocks: Iterable[int], look: Look, top: float, frame: Frame
) -> None:
    """Draws a lane action by action.

    Args:
        parent: what the row is added to
        row: the events of the lane
        blocks: the positions of the actions that run as one block with the next: a line is drawn around both
        look: what all lanes have in common
        top: where the row begins
        frame: the page
    """
    _idle(parent, top, frame)
    cells = add(parent, "g", stroke="#ffffff", stroke_width=_STROKE)
    names = add(parent, "g", text_anchor="middle")
    stages = sorted({event.action.stage for event in row})
    for event in row:
        x, width = frame.x(event.start), frame.x(event.end) - frame.x(event.start)
        fill = colour(event.action.kind, stages.index(event.action.stage), look.stages)
        edge = {} if width >= 4 * _STROKE else {"stroke": "none"}
        cell = add(cells, "rect", x=x, y=top, width=width, height=frame.row, fill=fill, **edge)
        add(cell, "title", _tooltip(event, look.unit))
        _names(names, event.action, x, top, width, frame.row, look, ink(fill))
    for position in sorted(blocks):
        x, end = frame.x(row[position].start), frame.x(row[position + 1].end)
        add(parent, "rect", x=x, y=top, width=end - x, height=frame.row, fill="none", stroke="#111111",
            stroke_width=1.2)


def densities(
    parent: Element, row: Sequence[Event], kinds: Sequence[Kind], columns: int, top: float, frame: Frame
) -> None:
    """Draws a lane as shares of time: in each column the kinds are stacked, and what is left is idle.

    Args:
        parent: what the row is added to
        row: the events of the lane
        kinds: what is stacked, from the bottom
        columns: how many there are
        top: where the row begins
        frame: the page
    """
    _idle(parent, top, frame)
    lane = add(parent, "g")
    shares = _shares(row, kinds, columns, frame.makespan)
    tops = accumulate(shares, lambda below, share: [sum(both) for both in zip(below, share)])
    for kind, heights in reversed(list(zip(kinds, tops))):  # from the top: what is below is painted over it
        edges = [(frame.left + frame.plot * at / columns, frame.row * share) for at, share in enumerate(heights)]
        add(lane, "path", d=_area(edges, top + frame.row, frame.right), fill=colour(kind))
    counts = (f"{sum(event.action.kind is kind for event in row)} {kind}" for kind in kinds)
    add(lane, "title", ", ".join(counts))


def memory_curve(
    parent: Element, steps: Sequence[tuple[float, float]], most: float, top: float, height: float, frame: Frame
) -> None:
    """Draws what a lane holds, as a step line, with its maximum marked.

    Args:
        parent: what the curve is added to
        steps: from when on how much is held, ascending in time
        most: what is drawn `height` high
        top: where the curve's row begins
        height: how high it is
        frame: the page
    """
    add(parent, "rect", x=frame.left, y=top, width=frame.plot, height=height, fill="#f6f7f8")
    if not steps or most <= 0:
        return
    edges = [(frame.x(time), max(0.0, height * float(held / most))) for time, held in _settled(steps)]
    edges = _envelope(edges) if len(edges) > frame.plot else edges
    path = _area(edges, top + height, frame.right)
    add(parent, "path", d=path, fill="#c3cad4", stroke="#4a5563", stroke_width=_STROKE, stroke_linejoin="round")
    at, peak = max(edges, key=lambda edge: edge[1])
    add(parent, "circle", cx=at, cy=top + height - peak, r=min(2.5, height / 4), fill="#b3261e")


def _idle(parent: Element, top: float, frame: Frame) -> None:
    add(parent, "rect", x=frame.left, y=top, width=frame.plot, height=frame.row, fill=IDLE_COLOUR)


def _names(
    parent: Element, action: Action, x: float, top: float, width: float, height: float, look: Look, fill: str
) -> None:
    """The chunk in the middle, and the stage in the corner; each only where it can be read."""
    size = min(_LARGEST, 0.55 * height, 0.7 * width / wide("0" * look.digits, 1))
    if size < _SMALLEST:
        return
    add(parent, "text", str(action.chunk), x=x + width / 2, y=top + height / 2 + 0.36 * size, font_size=size, fill=fill)
    corner = (width - wide("0" * look.digits, size)) / 2
    if look.stages > 1 and corner >= wide(str(action.stage), _SMALLEST):
        add(parent, "text", str(action.stage), x=x + 1 + corner / 2, y=top + _SMALLEST + 1, font_size=_SMALLEST,
            fill=fill)


def _tooltip(event: Event, unit: str) -> str:
    start, end = (duration(float(time), unit) for time in (event.start, event.end))
    return f"{event.action} on lane {event.lane}, from {start} to {end}"


def _shares(row: Sequence[Event], kinds: Iterable[Kind], columns: int, makespan: float) -> list[list[float]]:
    """For each kind, which share of each column's time it takes."""
    shares = {kind: [0.0] * columns for kind in kinds}
    for (_, kind, _), _, start, end in row:
        first, last = (columns * float(time) / float(makespan) if makespan else 0.0 for time in (start, end))
        for column in range(int(first), min(columns, int(last) + 1)):
            shares[kind][column] += min(last, column + 1) - max(first, column)
    return list(shares.values())


def _area(edges: Sequence[tuple[float, float]], base: float, right: float) -> str:
    """The area under steps: from each x on so high above `base`, until the next x."""
    parts, before = [f"M{number(edges[0][0])} {number(base)}"], number(base)
    for x, height in edges:
        level = number(base - height)
        if level != before:
            parts.append(f"H{number(x)}V{level}")
        before = level
    return "".join([*parts, f"H{number(right)}V{number(base)}Z"])


def _settled(steps: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without the steps that take no time, as where one chunk goes and the next comes at once; peaks stay."""
    return [step for step, after in pairwise([*steps, (float("inf"), 0)]) if step[0] != after[0] or step[1] > after[1]]


def _envelope(edges: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The highest step of each pixel, to a tenth of one: no more steps than pixels, and the same maximum."""
    highest: dict[int, float] = {}
    before = 0.0
    for x, height in edges:
        highest[int(x)] = max(height, highest.get(int(x), before))
        highest[int(x) + 1] = before = height  # goes on, unless the next pixel says more
    return [(float(x), round(height, 1)) for x, height in highest.items()]


_STROKE = 0.7
_LARGEST = 11.0
_SMALLEST = 6.0
