"""The few lines of a timeline in a terminal, and the picture of a schedule or timeline in a notebook.

    print(timeline) ──► the grid of `draw`, if it fits; else how large it is, and what shows it whole
    a notebook's cell ──► the figure of `svg`, if it can be drawn; else None, and the notebook shows text

    >>> from scheduler import by_name, simulate
    >>> print(simulate(by_name("1f1b", lanes=16, chunks=512)))
    Timeline: 16 lanes, 16384 actions, makespan 1581 slots, bubble 2.8%, peak in flight 1 to 16
    too long to draw here: scheduler.plot(timeline).savefig("timeline.png") draws it,
    scheduler.chrome_trace(timeline) is a trace for Perfetto, scheduler.draw(timeline, width=400) a grid of text
"""

from scheduler.drawing import draw, measures
from scheduler.errors import ScheduleError
from scheduler.plotting import svg
from scheduler.schedule import Schedule
from scheduler.timeline import Timeline


def timeline_text(timeline: Timeline) -> str:
    """At most 40 lines of at most 120 columns.

    Args:
        timeline: simulated or measured
    """
    if _may_fit(timeline):
        text = draw(timeline, _SHARES if timeline.unit == "s" else None)
        lines = text.splitlines()
        if len(lines) <= _LINES and max(map(len, lines)) <= _COLUMNS:
            return text
    return "\n".join([
        f"Timeline: {size_of(timeline)}",
        *[_TURNS for _ in timeline.turns[:1]],
        *_HOW_TO_SEE_IT,
    ])


def size_of(timeline: Timeline) -> str:
    """The numbers of lanes and actions, and what a step takes, in one line."""
    peaks = timeline.peak_in_flight
    extremes = measures(timeline, [f"{min(peaks)} to {max(peaks)}"])
    return f"{timeline.lanes} lanes, {len(timeline.events)} actions, {extremes}"


def picture(what: Schedule | Timeline) -> str | None:
    """The text of an SVG file; None without matplotlib, of a schedule that cannot end, and of what is very large.

    Args:
        what: as `svg` takes it
    """
    actions = len(what.actions) if isinstance(what, Schedule) else len(what.events)
    if what.lanes > _DRAWN_LANES or actions > _DRAWN_ACTIONS:
        return None
    try:
        return svg(what)
    except (ImportError, ScheduleError):
        return None


def _may_fit(timeline: Timeline) -> bool:
    """Without drawing it: an action takes a cell, of three columns at least, and so does the shortest one's time."""
    if timeline.lanes > _LINES or max(map(len, timeline.by_lane)) > _COLUMNS // 3:
        return False
    shortest = min((end - start for _, _, start, end in timeline.events if end != start), default=0)
    return timeline.unit == "s" or timeline.makespan <= _COLUMNS // 3 * shortest


_LINES, _COLUMNS = 40, 120
_SHARES = 24  # of the makespan: columns of a measured timeline
_DRAWN_LANES, _DRAWN_ACTIONS = 64, 20_000
_TURNS = "groups of lanes take turns (timeline.turns): no bubble of lanes that run at once"
_HOW_TO_SEE_IT = (
    'too long to draw here: scheduler.plot(timeline).savefig("timeline.png") draws it,',
    "scheduler.chrome_trace(timeline) is a trace for Perfetto, scheduler.draw(timeline, width=400) a grid of text",
)
