"""A schedule or a timeline as a figure, drawn by matplotlib.

    Schedule --simulate, unit costs--> Timeline ─┬─► a row for each lane: bars to scale, a colour for each kind
                                                 ├─► what each lane holds, as a step line
                                                 └─► footer: makespan, bubbles, peak in flight
    plot ──► matplotlib Figure, to style, to put into a notebook or to save        svg ──► the same as text

Where a lane has so many actions that bars would be too narrow to see, each column of some pixels is shared out among
the kinds as its time is; this is drawn as pixels in an SVG too, so that no file grows with the number of actions.
matplotlib is imported when a figure is asked for, and not before.

    >>> from scheduler import by_name
    >>> figure = plot(by_name("1f1b", lanes=4, chunks=8))
    >>> lanes, memory = figure.axes
    >>> [label.get_text() for label in lanes.get_yticklabels()]
    ['lane 0', 'lane 1', 'lane 2', 'lane 3']
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from math import ceil, inf
from textwrap import wrap
from typing import Any

import numpy

from scheduler.action import WORDS, Event, Kind
from scheduler.drawing import duration, take_turns
from scheduler.errors import refuse_unless_a, whole_number
from scheduler.memory_model import ChunkMemory
from scheduler.palette import IDLE_COLOUR, colour, ink
from scheduler.schedule import Schedule
from scheduler.simulation import simulate
from scheduler.timeline import Timeline


def plot(what: Schedule | Timeline, *, title: str | None = None, memory: bool = True, width: int = 960) -> Any:
    """Draws a schedule or a timeline as a matplotlib figure.

    Args:
        what: a schedule, drawn with B = 2 slots and all other kinds 1; or a timeline, simulated or measured
        title: what stands above; None names a schedule, and leaves a timeline without
        memory: whether to draw what each lane holds, on axes of its own
        width: of the figure, in pixels at its 100 dots per inch

    Returns:
        A `matplotlib.figure.Figure`, made without pyplot: no window opens, and nothing has to be closed.

    Raises:
        ScheduleError: the schedule cannot end, or `width` is not at least 400.
        ImportError: matplotlib is not installed.
    """
    whole_number("width", width, least=400)
    refuse_unless_a("what", what, Schedule, Timeline)
    timeline = _in_floats(simulate(what) if isinstance(what, Schedule) else what)
    row = max(9.0, min(27.0, 660 / timeline.lanes))  # pixels: the more lanes, the lower
    legend_rows = ceil((len(_kinds(timeline)) + 3) / _legend_columns(width))
    height = (1 + memory) * (row * timeline.lanes + 40) + 18 * legend_rows + 110
    page = matplotlib("figure").Figure((width / _DPI, height / _DPI), _DPI, layout="constrained", facecolor="white")
    lanes, *below = page.subplots(1 + memory, squeeze=False).flat
    _draw_lanes(lanes, what, timeline, width, row)
    for axes in below:
        _draw_memory(axes, timeline, width, row)
    words = _title(what) if title is None else "".join(filter(str.isprintable, title))
    page.suptitle(words, x=0.01, ha="left", fontsize=11, fontweight="bold")
    page.supxlabel(_footer(timeline, width), x=0.01, ha="left", fontsize=8)
    return page


def svg(what: Schedule | Timeline, *, title: str | None = None, memory: bool = True, width: int = 960) -> str:
    """The figure that `plot` draws, in matplotlib's default style, as the text of an SVG file.

    The text refers to nothing else, so it can be saved, put into a page and converted for a paper. It has a background
    of its own. The same timeline gives the same text (under one release of matplotlib).

    Args:
        what, title, memory, width: as for `plot`

    Raises:
        ScheduleError, ImportError: as `plot` does.

    >>> from scheduler import by_name
    >>> svg(by_name("1f1b", lanes=4, chunks=8)).startswith("<?xml")
    True
    """
    text = StringIO()
    with matplotlib("style").context(["default", {"svg.fonttype": "none", "svg.hashsalt": "penstock"}]):
        plot(what, title=title, memory=memory, width=width).savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


# ------------------------------------------------------------------------------------------------------------- lanes


def _draw_lanes(axes: Any, drawn: Schedule | Timeline, timeline: Timeline, width: int, row: float) -> None:
    _bare(axes, timeline, row)
    ticker = matplotlib("ticker")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(max(2, width // 110), steps=[1, 2, 5, 10]))
    if timeline.unit == "s":
        axes.xaxis.set_major_formatter(ticker.EngFormatter("s"))
    else:
        axes.set_xlabel(timeline.unit, fontsize=7, color=_FAINT, labelpad=1)
    is_dense = _is_dense(timeline, width)
    blocks = drawn.blocks if isinstance(drawn, Schedule) and not is_dense else frozenset()
    stages_per_lane = 1 if is_dense else max(map(len, map(_stages, timeline.by_lane)))
    for lane, events in enumerate(timeline.by_lane):
        axes.broken_barh([(0, timeline.makespan)], (lane + _GAP, 1 - 2 * _GAP), color=IDLE_COLOUR, linewidth=0)
        if is_dense:
            _draw_shares(axes, lane, events, timeline, _columns(width))
        else:
            _draw_bars(axes, lane, events, stages_per_lane, 0.9 * width / (timeline.makespan or inf), row)
    for lane, position in sorted(blocks):
        first, second = timeline.by_lane[lane][position : position + 2]
        span = first.start, second.end - first.start
        axes.broken_barh([span], (lane + _GAP, 1 - 2 * _GAP), facecolor="none", edgecolor="#111111")
    _draw_legend(axes, timeline, stages_per_lane, bool(blocks), width)


def _draw_bars(
    axes: Any, lane: int, events: Sequence[Event], stages_per_lane: int, pixels: float, row: float
) -> None:
    """A lane action by action, each with its chunk, and its stage in the corner, as far as there is room."""
    stages = _stages(events)
    bars: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (stage, kind, chunk), _, start, end in events:
        fill = colour(kind, stages.index(stage), stages_per_lane)
        bars[fill].append((start, end - start))
        wide = (end - start) * pixels
        size = min(11.0, 0.5 * row, 1.1 * wide / len(str(chunk)))
        if size >= _SMALLEST:
            middle = (start + end) / 2, lane + 0.53
            axes.text(*middle, str(chunk), fontsize=_points(size), color=ink(fill), ha="center", va="center")
            corner = 0.58 * (_SMALLEST * len(str(stage)) + size * len(str(chunk)) / 2)
            if stages_per_lane > 1 and corner < wide / 2:
                at = start + 1.5 / pixels, lane + 0.1
                axes.text(*at, str(stage), fontsize=_points(_SMALLEST), color=ink(fill), ha="left", va="top")
    for fill, spans in bars.items():
        axes.broken_barh(spans, (lane + _GAP, 1 - 2 * _GAP), facecolor=fill, edgecolor="white", linewidth=0.5)


def _draw_shares(axes: Any, lane: int, events: Sequence[Event], timeline: Timeline, columns: int) -> None:
    """A lane as shares of time: in each column the kinds are stacked, and what is left is idle."""
    edges = numpy.linspace(0, timeline.makespan, columns + 1)
    below = numpy.full(columns + 1, lane + 1 - _GAP)
    for kind in _kinds(timeline):
        times = [time for event in events if event.action.kind is kind for time in (event.start, event.end)]
        work = numpy.diff(times, prepend=0.0)
        work[::2] = 0.0  # before each start
        done = numpy.interp(edges, [0.0, *times], [0.0, *numpy.cumsum(work)])
        above = below - (1 - 2 * _GAP) * numpy.diff(done, append=done[-1]) / (edges[1] or 1.0)
        axes.fill_between(edges, below, above, step="post", facecolor=colour(kind), linewidth=0, rasterized=True)
        below = above


def _draw_legend(axes: Any, timeline: Timeline, stages_per_lane: int, has_blocks: bool, width: int) -> None:
    patch = matplotlib("patches").Patch
    entries = [patch(color=colour(kind), label=f"{kind} {WORDS[kind]}") for kind in _kinds(timeline)]
    entries.append(patch(color=IDLE_COLOUR, label="idle"))
    if has_blocks:
        entries.append(patch(facecolor="none", edgecolor="#111111", label="one block"))
    if stages_per_lane > 1:
        entries.append(patch(alpha=0, label="the later the stage, the paler"))
    axes.legend(handles=entries, loc="lower left", bbox_to_anchor=(0, 1), ncols=_legend_columns(width), frameon=False,
                fontsize=8, handlelength=1, handleheight=1, columnspacing=1.2, borderaxespad=0.2, borderpad=0.2)


# ------------------------------------------------------------------------------------------------------------ memory


def _draw_memory(axes: Any, timeline: Timeline, width: int, row: float) -> None:
    _bare(axes, timeline, row)
    axes.xaxis.set_visible(False)
    noun = "chunks held" if set(timeline.held) <= {ChunkMemory()} else "held"
    axes.set_title(f"{noun} by each lane, and the maximum", loc="left", fontsize=7, color=_FAINT, pad=3)
    peaks = timeline.peak_memory
    most, is_dense = max(peaks), _is_dense(timeline, width)
    row_transform = axes.get_yaxis_transform()  # shares of the width across, lanes down
    for lane, steps in enumerate(timeline.memory):
        bottom = lane + 0.95
        axes.broken_barh([(0, timeline.makespan)], (lane + 0.15, 0.8), color="#f6f7f8", linewidth=0)
        axes.text(1.006, lane + 0.5, f"{peaks[lane]:.4g}", fontsize=_small(row), va="center", transform=row_transform)
        if steps and most > 0:
            # One chunk goes and the next comes at once: no notch; peaks stay.
            pairs = pairwise([*steps, (inf, 0)])
            lasting = [step for step, after in pairs if step[0] != after[0] or step[1] > after[1]]
            times = [*(time for time, _ in lasting), timeline.makespan]
            tops = [bottom - 0.8 * max(0.0, level) / most for _, level in [*lasting, lasting[-1]]]
            axes.fill_between(times, tops, bottom, step="post", facecolor="#c3cad4", linewidth=0, rasterized=is_dense)
            axes.step(times, tops, where="post", color="#4a5563", linewidth=0.7, rasterized=is_dense)
            peak = tops.index(min(tops))
            axes.plot(times[peak], tops[peak], "o", color="#b3261e", markersize=min(3.5, row / 5))


# --------------------------------------------------------------------------------------------------------- the page


def _bare(axes: Any, timeline: Timeline, row: float) -> None:
    """Axes with a row for each lane, without a frame."""
    lanes = timeline.lanes
    axes.set(xlim=(0, timeline.makespan or 1), ylim=(lanes, 0), frame_on=False)
    axes.set_yticks([lane + 0.5 for lane in range(lanes)], [f"lane {lane}" for lane in range(lanes)])
    axes.tick_params(axis="y", length=0, labelsize=_small(row))
    axes.tick_params(axis="x", labelsize=7, colors=_FAINT)


def _in_floats(timeline: Timeline) -> Timeline:
    """The same, in the one type of numbers that matplotlib takes: times and sizes may be Fractions."""
    events = tuple(Event(action, lane, float(start), float(end)) for action, lane, start, end in timeline.events)
    return replace(timeline, events=events, held=tuple(ChunkMemory(*map(float, each)) for each in timeline.held))


def _is_dense(timeline: Timeline, width: int) -> bool:
    """Whether there are too many actions to draw one by one: on a lane, or in all."""
    return max(map(len, timeline.by_lane)) * _NARROWEST > width or len(timeline.events) > _MOST


def _footer(timeline: Timeline, width: int) -> str:
    peaks = timeline.peak_in_flight
    extremes = " to ".join(map(str, sorted({min(peaks), max(peaks)})))
    facts = [
        f"makespan {duration(timeline.makespan, timeline.unit)}",
        f"bubble {timeline.bubble:.1%} (flush), {timeline.span_bubble:.1%} (span)",
        f"peak in flight {' '.join(map(str, peaks)) if len(peaks) <= _LISTED else extremes}",
    ]
    if _is_dense(timeline, width):
        column = duration(float(f"{timeline.makespan / _columns(width):.3g}"), timeline.unit)
        facts.append(f"heights are shares of time, in columns of {column}")
    return "\n".join([line for fact in [", ".join(facts), *take_turns(timeline)] for line in wrap(fact, width // 6)])


def _title(drawn: Schedule | Timeline) -> str:
    return f"{drawn.name}: {drawn.lanes} lanes, {drawn.chunks} chunks" if isinstance(drawn, Schedule) else ""


def _kinds(timeline: Timeline) -> list[Kind]:
    kinds = {event.action.kind for event in timeline.events}
    return [kind for kind in Kind if kind in kinds]


def _stages(row: Sequence[Event]) -> list[int]:
    return sorted({event.action.stage for event in row})


def _columns(width: int) -> int:
    """The number of columns into which a dense lane is divided."""
    return width // 4


def _legend_columns(width: int) -> int:
    return width // 170


def _small(row: float) -> float:
    """The size of a text that stands in a row."""
    return _points(min(11.0, row + 1))


def _points(pixels: float) -> float:
    """A size of text as matplotlib counts it."""
    return pixels * 72 / _DPI


def matplotlib(module: str) -> Any:
    """A module of matplotlib. ImportError, where there is none, says what installs it."""
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError('pictures need matplotlib: pip install "penstock-torch[plots]"') from error


_FAINT = "#444444"
_DPI = 100
_GAP = 0.06  # above and below a row, as a share of its height
_NARROWEST, _MOST = 2.5, 4096  # pixels of a bar, bars of a figure
_SMALLEST = 6.0  # text, in pixels
_LISTED = 16
