"""What does each command answer?

    options.py: argv --> Namespace --COMMANDS[command]-->  words on stdout, files  ──►  exit status: 0, or 1 where a
                                                                                       schedule is wrong (verify)
"""

import csv
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from io import StringIO
from itertools import groupby
from operator import attrgetter
from shutil import get_terminal_size

from scheduler.chrome import chrome_trace
from scheduler.command_line.arguments import costs_of, placement_of, read, schedule_of, write
from scheduler.command_line.tables import show
from scheduler.comparison import Row, compare
from scheduler.costs import Costs
from scheduler.csv_files import to_csv
from scheduler.drawing import draw, duration
from scheduler.errors import ScheduleError
from scheduler.plotting import svg
from scheduler.schedule import Schedule
from scheduler.searches.searching import search
from scheduler.simulation import simulate
from scheduler.timeline import Timeline
from scheduler.verification import verify

__all__ = ["COMMANDS"]


def _draw(args: Namespace) -> int:
    schedule, costs = schedule_of(args), costs_of(args)
    timeline = simulate(schedule, costs, args.release)
    what = schedule if costs == Costs() and args.release == "early" else timeline  # a schedule also shows its blocks
    _show_grid(what, args.width)
    _write_files(args, what, schedule, timeline)
    return 0


def _compare(args: Namespace) -> int:
    costs = costs_of(args)
    rows = sorted(compare(args.lanes, args.chunks, costs, args.names or None, args.release), key=_ORDERS[args.sort])
    fits = [args.memory is None or row.fits(args.memory) for row in rows]
    defined = [(row, fit) for row, fit in zip(rows, fits) if not row.reason]
    print(f"{args.lanes} lanes, {args.chunks} chunks; a chunk on a lane: {_spelt(costs)}\n")
    columns = ["schedule", "stages", "step", "bubble", "span", "in flight", "memory"]
    columns += [] if args.memory is None else [f"fits {_listed(args.memory)}"]
    cells = [[*_cells(row), *([] if args.memory is None else [_YES_NO[fit]])] for row, fit in defined]
    if defined:
        show(columns, cells, ["" if fit else "dim" for _, fit in defined])
    for row in rows[len(defined):]:
        print(f"{row.name}: {row.reason}")
    if args.to_csv is not None:
        write(args.to_csv, _table(rows, None if args.memory is None else fits))
    return 0


def _simulate(args: Namespace) -> int:
    schedule = schedule_of(args)
    timeline = simulate(schedule, costs_of(args), args.release)
    why = "" if args.why is None else timeline.why_idle(*args.why)
    print(_about(schedule))
    print(f"makespan      {duration(timeline.makespan, timeline.unit)}")
    print(f"flush bubble  {timeline.bubble:.2%} of lanes x makespan")
    print(f"span bubble   {timeline.span_bubble:.2%} of lanes x the longest time from a lane's start to its end\n")
    show(["lane", "start", "end", "busy", "idle", "pairs in flight", "memory"], list(_lanes(timeline)))
    print(f"\n{_path(timeline)}")
    if why:
        print(f"\n{why}")
    return 0


def _search(args: Namespace) -> int:
    found = search(
        costs_of(args), args.lanes, args.chunks, args.memory, args.objective,
        placement=placement_of(args), split=not args.whole, seed=args.seed, effort=args.effort,
    )
    print(f"{found}\n")
    _show_grid(found.timeline, args.width)
    _write_files(args, found.timeline, found.schedule, found.timeline)
    return 0


def _verify(args: Namespace) -> int:
    schedule = read(args.file)
    try:
        verify(schedule)
    except ScheduleError as error:
        print(error)
        return 1
    print(f"{_about(schedule)}: right")
    return 0


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "draw": _draw, "compare": _compare, "simulate": _simulate, "search": _search, "verify": _verify,
}


def _show_grid(what: Schedule | Timeline, width: int | None) -> None:
    """The grid; on a terminal that is too narrow for it, also what to do."""
    text = draw(what, width)
    print(text)
    columns, room = max(map(len, text.splitlines())), get_terminal_size().columns
    if sys.stdout.isatty() and columns > room:
        print(f"The grid has {columns} columns, this terminal {room}: say --width N or --svg FILE, or pipe it into "
              "less -S.", file=sys.stderr)


def _write_files(args: Namespace, what: Schedule | Timeline, schedule: Schedule, timeline: Timeline) -> None:
    title = f"{schedule.name}: {schedule.lanes} lanes, {schedule.chunks} chunks"
    if args.svg is not None:
        write(args.svg, svg(what, title=title))
    if args.chrome is not None:
        write(args.chrome, chrome_trace(timeline, name=title))
    if args.to_csv is not None:
        write(args.to_csv, to_csv(schedule))


def _about(schedule: Schedule) -> str:
    lanes = " ".join(map(str, schedule.placement.lane_of))
    return f"schedule {schedule.name}, chunks {schedule.chunks}, stages on lanes {lanes}"


def _spelt(costs: Costs) -> str:
    """Forward, input and weight, and what else is not as it is by default."""
    values = {field.name: getattr(costs, field.name) for field in fields(Costs)}
    given = [what for what in values if what in _ALWAYS or values[what] != getattr(Costs(), what)]
    return ", ".join(f"{what} {_listed(values[what])}" for what in given)


def _listed(numbers: float | Sequence[float]) -> str:
    return ",".join(f"{number:.6g}" for number in (numbers if isinstance(numbers, Sequence) else [numbers]))


def _cells(row: Row) -> list[str]:
    return [row.name, str(row.stages_per_lane), f"{row.makespan:.6g}", f"{row.bubble:.1%}", f"{row.span_bubble:.1%}",
            f"{row.peak_in_flight:.6g}", f"{row.peak_memory:.6g}"]


def _table(rows: Sequence[Row], fits: Sequence[bool] | None) -> str:
    """What `compare` shows as CSV, unrounded; numbers are empty where a schedule is not defined."""
    text = StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*_COLUMNS, *([] if fits is None else ["fits"]), "reason"])
    for number, row in enumerate(rows):
        cells = [getattr(row, what) if what == "name" or not row.reason else "" for what in _COLUMNS]
        table.writerow([*cells, *([] if fits is None else [_YES_NO[fits[number]]]), row.reason])
    return text.getvalue()


def _lanes(timeline: Timeline) -> Iterator[list[str]]:
    for lane, row in enumerate(timeline.by_lane):
        ends = (row[0].start, row[-1].end) if row else (0, 0)
        busy, peak, held = timeline.busy[lane], timeline.peak_in_flight[lane], timeline.peak_memory[lane]
        numbers = (*ends, busy, timeline.makespan - busy, peak, held)
        yield [str(lane), *(f"{number:.6g}" for number in numbers)]


def _path(timeline: Timeline) -> str:
    """The critical path, a word for what a lane runs of it in one go."""
    path = timeline.critical_path
    work = sum(event.end - event.start for event in path)
    words = []
    for _, group in groupby(path, key=attrgetter("lane")):
        first, *more = [str(event.action) for event in group]
        words.append(f"{first}..{more[-1]} ({1 + len(more)})" if more else first)
    if len(words) > 2 * _ENDS:
        words[_ENDS:-_ENDS] = [f"({len(words) - 2 * _ENDS} more)"]
    waits = f"{work:.6g} at work, {timeline.makespan - work:.6g} between them"
    return f"critical path of {len(path)} actions, {waits}:\n  {' > '.join(words)}"


_ORDERS: dict[str, Callable[[Row], tuple[object, ...]]] = {
    "bubble": attrgetter("bubble", "makespan", "peak_memory", "name"),
    "memory": attrgetter("peak_memory", "bubble", "makespan", "name"),
    "step": attrgetter("makespan", "bubble", "peak_memory", "name"),
}
_COLUMNS = ("name", "stages_per_lane", "makespan", "bubble", "span_bubble", "peak_in_flight", "peak_memory")
_ALWAYS = ("forward", "input", "weight")
_YES_NO = {True: "yes", False: "no"}
_ENDS = 6  # how many words of a long path are shown at either end
