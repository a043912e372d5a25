"""A schedule or a timeline as a figure, drawn by matplotlib.

    Schedule --simulate, unit costs--> Timeline ─┬─► a row for each lane: bars to scale, a colour for each kind
                                                 ├─► what each lane holds, as a step line
                                                 └─► footer: makespan, bubbles, peak in flight
    plot ──► matplotlib Figure, to style, to put into a notebook or to save        svg ──► the same as text

Where a lane has so many actions that bars would be too narrow to see, each column of some pixels is shared out among
the kinds as its time is. matplotlib is imported when a figure is asked for, and not before.

    >>> from scheduler import by_name
    >>> figure = plot(by_name("1f1b", lanes=4, chunks=8))
    >>> lanes, memory = figure.axes
    >>> [label.get_text() for label in lanes.get_yticklabels()]
    ['lane 0', 'lane 1', 'lane 2', 'lane 3']
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from io import StringIO
from itertools import pairwise
from math import ceil, inf
from typing import Any, NamedTuple

import numpy

from scheduler.action import WORDS, Kind
from scheduler.drawing import duration, take_turns
from scheduler.errors import refuse_unless_a, whole_number
from scheduler.event import Event
from scheduler.memory_model import ChunkMemory
from scheduler.palette import IDLE_COLOUR, colour, ink
from scheduler.schedule import Schedule
from scheduler.simulation import simulate
from scheduler.timeline import Timeline

__all__ = ["matplotlib", "plot", "svg"]


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
    timeline = simulate(what) if isinstance(what, Schedule) else what
    longest = max([len(f"{float(peak):.4g}") for peak in timeline.peak_memory]) if memory else 0
    page = _Page(timeline, width, memory, max(48.0, 10.0 + 7 * longest))
    figure = matplotlib("figure").Figure(figsize=(width / _DPI, page.height / _DPI), dpi=_DPI, facecolor="white")
    lanes = figure.add_axes(page.box(page.top, page.rows))
    _draw_lanes(lanes, what, page)
    words = _title(what) if title is None else "".join(filter(str.isprintable, title))
    figure.text(page.left / width, 1 - 8 / page.height, words, va="top", fontsize=_points(15), fontweight="bold")
    if memory:
        _draw_memory(figure.add_axes(page.box(page.top + page.rows + 54, page.rows)), page)
    figure.text(page.left / width, 8 / page.height, _footer(page), va="bottom", fontsize=_points(11), wrap=True)
    return figure


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


class _Page(NamedTuple):
    """The positions of things on the page; all lengths are pixels."""

    timeline: Timeline
    width: int
    memory: bool
    right: float  # beside the lanes, for the most that each holds

    @property
    def left(self) -> float:
        return 26 + 7 * len(f"lane {self.timeline.lanes - 1}")

    @property
    def plot(self) -> float:
        return self.width - self.left - self.right

    @property
    def top(self) -> float:
        """Below the title and the legend."""
        return 36 + 18 * ceil((len(_kinds(self.timeline)) + 3) / self.legend_columns)

    @property
    def legend_columns(self) -> int:
        return int(self.plot / 130) if self.width < 900 else 7

    @property
    def row(self) -> float:
        """The height of a lane: the more lanes, the lower."""
        return max(9.0, min(27.0, 660 / self.timeline.lanes))

    @property
    def rows(self) -> float:
        return self.row * self.timeline.lanes

    @property
    def height(self) -> float:
        return self.top + self.rows + (54 + self.rows if self.memory else 0) + (58 if self.memory else 78)

    def box(self, top: float, height: float) -> tuple[float, float, float, float]:
        """Axes of this height, as matplotlib places them."""
        return (
            self.left / self.width, 1 - (top + height) / self.height, self.plot / self.width, height / self.height
        )

    @property
    def is_dense(self) -> bool:
        """Whether there are too many actions to draw one by one: on a lane, or in all."""
        longest = max(map(len, self.timeline.by_lane))
        return longest * _NARROWEST > self.plot or len(self.timeline.events) > _MOST

    @property
    def columns(self) -> int:
        """The number of columns into which a dense lane is divided."""
        return round(self.plot / _COLUMN)

    @property
    def scale(self) -> tuple[float, str]:
        """The factor of times on the axis, and their unit there."""
        if self.timeline.unit == "slots" or self.timeline.makespan >= 1:
            return 1, self.timeline.unit
        return (1e3, "ms") if self.timeline.makespan >= 1e-3 else (1e6, "us")

    @property
    def end(self) -> float:
        """The makespan in the axis's unit."""
        return float(self.timeline.makespan) * self.scale[0]


# ------------------------------------------------------------------------------------------------------------- lanes


def _draw_lanes(axes: Any, drawn: Schedule | Timeline, page: _Page) -> None:
    _bare(axes, page)
    timeline = page.timeline
    axes.xaxis.set_visible(True)
    axes.xaxis.set_major_locator(matplotlib("ticker").MaxNLocator(max(2, int(page.plot / 90)), steps=[1, 2, 5, 10]))
    axes.tick_params(axis="x", labelsize=_points(10), colors=_FAINT)
    axes.set_xlabel(page.scale[1], fontsize=_points(10), color=_FAINT, labelpad=1)
    for lane in range(timeline.lanes):
        axes.broken_barh([(0, page.end)], (lane + _GAP, 1 - 2 * _GAP), color=IDLE_COLOUR, linewidth=0)
    blocks = drawn.blocks if isinstance(drawn, Schedule) and not page.is_dense else frozenset()
    stages_per_lane = 1 if page.is_dense else max(map(len, map(_stages, timeline.by_lane)))
    for lane, row in enumerate(timeline.by_lane):
        if page.is_dense:
            _draw_shares(axes, lane, row, page)
        else:
            _draw_bars(axes, lane, row, stages_per_lane, page)
    for lane, position in sorted(blocks):
        first, second = timeline.by_lane[lane][position : position + 2]
        start, end = (float(time) * page.scale[0] for time in (first.start, second.end))
        axes.broken_barh([(start, end - start)], (lane + _GAP, 1 - 2 * _GAP), facecolor="none", edgecolor="#111111")
    _draw_legend(axes, stages_per_lane, bool(blocks), page)


def _draw_bars(axes: Any, lane: int, row: Sequence[Event], stages_per_lane: int, page: _Page) -> None:
    """A lane action by action, each with its chunk, and its stage in the corner, as far as there is room."""
    scale, _ = page.scale
    stages = _stages(row)
    bars: dict[str, list[tuple[float, float]]] = {}
    pixels = page.plot / page.end if page.end else 0.0
    for (stage, kind, chunk), _, start, end in row:
        fill = colour(kind, stages.index(stage), stages_per_lane)
        left, wide = float(start) * scale, float(end - start) * scale
        bars.setdefault(fill, []).append((left, wide))
        size = min(11.0, 0.5 * page.row, 1.1 * wide * pixels / len(str(chunk)))
        if size >= _SMALLEST:
            middle = left + wide / 2, lane + 0.53
            axes.text(*middle, str(chunk), fontsize=_points(size), color=ink(fill), ha="center", va="center")
            corner = 0.58 * (_SMALLEST * len(str(stage)) + size * len(str(chunk)) / 2)
            if stages_per_lane > 1 and corner < wide * pixels / 2:
                at = left + 1.5 / pixels, lane + 0.1
                axes.text(*at, str(stage), fontsize=_points(_SMALLEST), color=ink(fill), ha="left", va="top")
    for fill, spans in bars.items():
        axes.broken_barh(spans, (lane + _GAP, 1 - 2 * _GAP), facecolor=fill, edgecolor="white", linewidth=0.5)


def _draw_shares(axes: Any, lane: int, row: Sequence[Event], page: _Page) -> None:
    """A lane as shares of time: in each column the kinds are stacked, and what is left is idle."""
    edges = numpy.linspace(0, page.end, page.columns + 1)
    below = numpy.full(page.columns, lane + 1 - _GAP)
    for kind in _kinds(page.timeline):
        shares = _shares([event for event in row if event.action.kind is kind], page).round(2)
        above = below - (1 - 2 * _GAP) * shares
        left, bottoms, tops = _steps(edges, below, above)
        axes.fill_between(left, bottoms, tops, step="post", facecolor=colour(kind), linewidth=0)
        below = above


def _steps(edges: Any, *levels: Any) -> list[Any]:
    """Step lines over the columns between some edges, without the steps that change nothing."""
    changes = numpy.any([numpy.diff(level, prepend=numpy.nan) != 0 for level in levels], axis=0)
    kept_levels = [numpy.append(level[changes], level[-1]) for level in levels]
    return [numpy.append(edges[:-1][changes], edges[-1]), *kept_levels]


def _shares(row: Sequence[Event], page: _Page) -> Any:
    """The share of each column's time that some events take."""
    makespan = float(page.timeline.makespan)
    times = numpy.array([0.0, *(float(time) for event in row for time in (event.start, event.end))])
    work = numpy.diff(times, prepend=0.0)
    work[1::2] = 0.0  # before each start
    done = numpy.interp(numpy.linspace(0, makespan, page.columns + 1), times, numpy.cumsum(work))
    return numpy.diff(done) * page.columns / makespan


def _draw_legend(axes: Any, stages_per_lane: int, has_blocks: bool, page: _Page) -> None:
    patch = matplotlib("patches").Patch
    entries = [patch(color=colour(kind), label=f"{kind} {WORDS[kind]}") for kind in _kinds(page.timeline)]
    entries.append(patch(color=IDLE_COLOUR, label="idle"))
    if has_blocks:
        entries.append(patch(facecolor="none", edgecolor="#111111", label="one block"))
    if stages_per_lane > 1:
        entries.append(patch(alpha=0, label="the later the stage, the paler"))
    axes.legend(
        handles=entries, loc="lower left", bbox_to_anchor=(0, 1), ncols=page.legend_columns, frameon=False,
        fontsize=_points(11), handlelength=1, handleheight=1, handletextpad=0.4, columnspacing=1.2, borderaxespad=0.2,
        borderpad=0.2,
    )


# ------------------------------------------------------------------------------------------------------------ memory


def _draw_memory(axes: Any, page: _Page) -> None:
    _bare(axes, page)
    timeline = page.timeline
    noun = "chunks held" if set(timeline.held) <= {ChunkMemory()} else "held"
    axes.set_title(f"{noun} by each lane, and the maximum", loc="left", fontsize=_points(10), color=_FAINT, pad=3)
    peaks = [float(peak) for peak in timeline.peak_memory]
    most = max(peaks)
    size = _points(min(11.0, page.row + 1))
    row_transform = axes.get_yaxis_transform()  # shares of the width across, lanes down
    for lane, steps in enumerate(timeline.memory):
        axes.broken_barh([(0, page.end)], (lane + 0.15, 0.8), color="#f6f7f8", linewidth=0)
        axes.text(1.006, lane + 0.5, f"{peaks[lane]:.4g}", fontsize=size, va="center", transform=row_transform)
        if steps and most > 0:
            times, levels = _curve(steps, most, page)
            tops = lane + 0.95 - 0.8 * numpy.maximum(levels, 0) / most
            axes.fill_between(times, tops, lane + 0.95, step="post", facecolor="#c3cad4", linewidth=0)
            axes.step(times, tops, where="post", color="#4a5563", linewidth=0.7)
            peak = int(levels.argmax())
            axes.plot(times[peak], tops[peak], "o", color="#b3261e", markersize=min(3.5, page.row / 5))


def _curve(steps: Sequence[tuple[float, float]], most: float, page: _Page) -> tuple[Any, Any]:
    """From when on how much is held; where there are more steps than pixels, the most of each pixel."""
    scale, _ = page.scale
    lasting = [  # one chunk goes and the next comes at once: no notch; peaks stay
        step for step, after in pairwise([*steps, (inf, 0)]) if step[0] != after[0] or step[1] > after[1]
    ]
    times = numpy.array([float(time) * scale for time, _ in lasting])
    amounts = numpy.array([float(level) for _, level in lasting])
    pixels = int(page.plot)
    if len(times) > pixels:
        edges = numpy.linspace(0, page.end, pixels + 1)[:-1]
        begun = numpy.searchsorted(times, edges, side="right") - 1
        highest = numpy.where(begun >= 0, amounts[begun], 0.0)
        numpy.maximum.at(highest, numpy.searchsorted(edges, times, side="right") - 1, amounts)
        times, amounts = edges, (highest / most * 100).round() / 100 * most  # the eye sees no finer step
    line, levels = _steps(numpy.append(times, page.end), amounts)
    return line, levels


# --------------------------------------------------------------------------------------------------------- the page


def _bare(axes: Any, page: _Page) -> None:
    """Axes with a row for each lane, without a frame."""
    lanes = page.timeline.lanes
    axes.set(xlim=(0, page.end or 1), ylim=(lanes, 0))
    axes.set_yticks([lane + 0.5 for lane in range(lanes)], [f"lane {lane}" for lane in range(lanes)])
    axes.tick_params(axis="y", length=0, labelsize=_points(min(11.0, page.row + 1)))
    axes.xaxis.set_visible(False)
    axes.set_frame_on(False)


def _footer(page: _Page) -> str:
    timeline, peaks = page.timeline, page.timeline.peak_in_flight
    extremes = " to ".join(map(str, sorted({min(peaks), max(peaks)})))
    facts = [
        f"makespan {duration(float(timeline.makespan), timeline.unit)}",
        f"bubble {float(timeline.bubble):.1%} (flush), {float(timeline.span_bubble):.1%} (span)",
        f"peak in flight {' '.join(map(str, peaks)) if len(peaks) <= _LISTED else extremes}",
    ]
    if page.is_dense:
        column = float(f"{float(timeline.makespan) / page.columns:.3g}")
        facts.append(f"heights are shares of time, in columns of {duration(column, timeline.unit)}")
    return "\n".join([", ".join(facts), *take_turns(timeline)])


def _title(drawn: Schedule | Timeline) -> str:
    return f"{drawn.name}: {drawn.lanes} lanes, {drawn.chunks} chunks" if isinstance(drawn, Schedule) else ""


def _kinds(timeline: Timeline) -> list[Kind]:
    kinds = {event.action.kind for event in timeline.events}
    return [kind for kind in Kind if kind in kinds]


def _stages(row: Sequence[Event]) -> list[int]:
    return sorted({event.action.stage for event in row})


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
_NARROWEST, _COLUMN, _MOST = 2.5, 4, 4096  # pixels of a bar, pixels of a column, bars of a figure
_SMALLEST = 6.0  # text, in pixels
_LISTED = 16
