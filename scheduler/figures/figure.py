"""What does a schedule look like on paper?

    Schedule --simulate, unit costs--> Timeline ─┬─► a row for each lane: rectangles to scale, a colour for each kind
                                                 ├─► time axis
                                                 ├─► what each lane holds, as a step line
                                                 └─► footer: makespan, bubbles, peak in flight     ──►  SVG text

The picture is one text without references to anything else: it can be saved as a file, put into a page, and converted
for a paper. The same timeline gives the same bytes.

    >>> from scheduler import by_name
    >>> picture = svg(by_name("1f1b", lanes=4, chunks=8))
    >>> picture.startswith('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 322"')
    True
"""

from collections.abc import Sequence, Set
from math import ceil
from xml.etree.ElementTree import Element, indent, tostring

from scheduler.action import Kind
from scheduler.drawing import duration
from scheduler.errors import refuse_unless_whole
from scheduler.figures.axis import axis
from scheduler.figures.frame import Frame, add, wide
from scheduler.figures.palette import IDLE_COLOUR, colour
from scheduler.figures.rows import Look, densities, memory_curve, rectangles
from scheduler.held import Held
from scheduler.schedule import Schedule
from scheduler.simulation import simulate
from scheduler.timeline import Timeline

__all__ = ["svg"]


def svg(what: Schedule | Timeline, *, title: str | None = None, memory: bool = True, width: int = 960) -> str:
    """Draws a schedule or a timeline as a figure, in SVG.

    Rectangles carry their chunk (and small, in their corner, their stage where a lane has several) as far as there is
    room, and a tooltip with action, lane and times. Where a lane has so many actions that rectangles would be too
    narrow to see, each column of 4 pixels is shared out among the kinds as its time is. So a row has at most
    `width` / 2.5 rectangles, a figure at most 8192, and its size does not grow with the number of chunks: a larger
    `width` shows more.

    Args:
        what: a schedule, drawn with B = 2 slots and all other kinds 1; or a timeline, simulated or measured
        title: what stands above; None names a schedule, and leaves a timeline without
        memory: whether to draw what each lane holds
        width: of the figure, in pixels

    Returns:
        The text of an SVG file; it has a background of its own, so it reads in dark pages too.

    Raises:
        ScheduleError: the schedule cannot end, or `width` is not at least 300.
    """
    refuse_unless_whole("width", width, least=300)
    timeline = simulate(what) if isinstance(what, Schedule) else what
    blocks: Set[tuple[int, int]] = what.blocks if isinstance(what, Schedule) else frozenset()
    frame = Frame(timeline.lanes, timeline.makespan, width)
    page = Element("g")
    words = _title(what) if title is None else "".join(filter(str.isprintable, title))
    bottom = _head(page, words, timeline, frame, bool(blocks))
    bottom = _lanes(page, bottom, timeline, frame, blocks)
    bottom = axis(page, bottom, timeline, frame)
    if memory:
        bottom = _memory(page, bottom, timeline, frame)
    return _text(page, words, width, ceil(_footer(page, bottom, timeline, frame)))


def _text(page: Element, title: str, width: int, height: int) -> str:
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}")
    root.attrib |= {"width": str(width), "height": str(height), "role": "img", "font-size": "11", "fill": "#222222"}
    root.set("font-family", "Helvetica, Arial, sans-serif")
    add(root, "title", title or "timeline")
    add(root, "rect", width=width, height=height, fill="#ffffff")
    root.append(page)
    indent(root, space="")
    return tostring(root, encoding="unicode") + "\n"


def _title(what: Schedule | Timeline) -> str:
    return f"{what.name}: {what.lanes} lanes, {what.chunks} chunks" if isinstance(what, Schedule) else ""


def _head(page: Element, title: str, timeline: Timeline, frame: Frame, has_blocks: bool) -> float:
    """Title and legend; returns where they end."""
    top = 10.0
    if title:
        add(page, "text", title, x=frame.left, y=top + 16, font_size=15, font_weight="bold")
        top += 16
    dense = _is_dense(timeline, frame)
    several = 1 if dense else _most_stages(timeline)
    entries = [([colour(kind, at, several) for at in range(several)], f"{kind} {_WORDS[kind]}")
               for kind in _kinds(timeline)]
    entries.append(([IDLE_COLOUR], "idle"))
    if has_blocks and not dense:
        entries.append((["none"], "one block"))
    if several > 1:
        entries.append(([], "the later the stage, the paler"))
    x, top = frame.left, top + 8
    for fills, words in entries:
        length = (_SWATCH + 4 if fills else 0) + wide(words, 11)
        if x > frame.left and x + length > frame.width:
            x, top = frame.left, top + _SWATCH + 5
        _entry(page, fills, words, x, top)
        x += length + 14
    return top + _SWATCH + 8


def _entry(page: Element, fills: Sequence[str], words: str, x: float, top: float) -> None:
    """A swatch, shared out among its colours, and what it means."""
    for fill in fills:
        edge = {"stroke": "#111111", "stroke_width": "1.2"} if fill == "none" else {}
        add(page, "rect", x=x, y=top, width=_SWATCH / len(fills), height=_SWATCH, fill=fill, **edge)
        x += _SWATCH / len(fills)
    add(page, "text", words, x=x + 4 if fills else x, y=top + 9)


def _lanes(page: Element, top: float, timeline: Timeline, frame: Frame, blocks: Set[tuple[int, int]]) -> float:
    digits = len(str(max((event.action.chunk for event in timeline.events), default=0)))
    look = Look(_most_stages(timeline), digits, timeline.unit)
    dense, kinds = _is_dense(timeline, frame), _kinds(timeline)
    for lane, row in enumerate(timeline.by_lane):
        y = top + lane * frame.pitch
        if dense:
            densities(page, row, kinds, _columns(frame), y, frame)
        else:
            rectangles(page, row, {at for host, at in blocks if host == lane}, look, y, frame)
    _beside(page, _lane_names(frame), frame.left - 8, top, frame.row, frame.pitch, "end")
    return top + frame.lanes * frame.pitch


def _memory(page: Element, top: float, timeline: Timeline, frame: Frame) -> float:
    held = "chunks held" if set(timeline.held) <= {Held()} else "held"
    add(page, "text", f"{held} by each lane, and the maximum", x=frame.left, y=top + 14, fill=_FAINT, font_size=10)
    top += 20
    peaks, height = timeline.peak_memory, 0.8 * frame.row
    pitch = height + frame.gap
    for lane, steps in enumerate(timeline.memory):
        memory_curve(page, steps, max(peaks), top + lane * pitch, height, frame)
    _beside(page, _lane_names(frame), frame.left - 8, top, height, pitch, "end")
    _beside(page, [f"{float(peak):.4g}" for peak in peaks], frame.right + 5, top, height, pitch, "start")
    return top + frame.lanes * pitch


def _footer(page: Element, top: float, timeline: Timeline, frame: Frame) -> float:
    peaks = timeline.peak_in_flight
    extremes = " to ".join(map(str, sorted({min(peaks), max(peaks)})))
    shown = " ".join(map(str, peaks)) if len(peaks) <= _LISTED else extremes
    facts = [
        f"makespan {duration(float(timeline.makespan), timeline.unit)}",
        f"bubble {float(timeline.bubble):.1%} (flush), {float(timeline.span_bubble):.1%} (span)",
        f"peak in flight {shown}",
    ]
    if _is_dense(timeline, frame):
        column = float(f"{float(timeline.makespan) / _columns(frame):.3g}")
        facts.append(f"heights are shares of time, in columns of {duration(column, timeline.unit)}")
    lines = [facts[0]]
    for fact in facts[1:]:
        if frame.left + wide(f"{lines[-1]}, {fact}", 11) > frame.width:
            lines.append(fact)
        else:
            lines[-1] += f", {fact}"
    for at, line in enumerate(lines):
        add(page, "text", line, x=frame.left, y=top + 16 + 15 * at)
    return top + 13 + 15 * len(lines)


def _beside(
    page: Element, words: Sequence[str], x: float, top: float, height: float, pitch: float, anchor: str
) -> None:
    """A word beside each row, low enough not to touch the next."""
    size = min(11.0, height + 1)
    group = add(page, "g", text_anchor=anchor, font_size=size)
    for lane, word in enumerate(words):
        add(group, "text", word, x=x, y=top + lane * pitch + height / 2 + 0.36 * size)


def _kinds(timeline: Timeline) -> list[Kind]:
    there = {event.action.kind for event in timeline.events}
    return [kind for kind in Kind if kind in there]


def _most_stages(timeline: Timeline) -> int:
    return max(len({event.action.stage for event in row}) for row in timeline.by_lane)


def _is_dense(timeline: Timeline, frame: Frame) -> bool:
    """Whether there are too many actions to draw one by one: on a lane, or in all."""
    return max(map(len, timeline.by_lane)) * _NARROWEST > frame.plot or len(timeline.events) > _MOST


def _columns(frame: Frame) -> int:
    return round(frame.plot / _COLUMN)


def _lane_names(frame: Frame) -> list[str]:
    return [f"lane {lane}" for lane in range(frame.lanes)]


_WORDS = {
    Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient",
    Kind.SEND_F: "send", Kind.RECV_F: "receive", Kind.SEND_B: "send", Kind.RECV_B: "receive",
}
_NARROWEST = 2.5
_MOST = 8192
_COLUMN = 4
_SWATCH = 11.0
_LISTED = 16
_FAINT = "#444444"
