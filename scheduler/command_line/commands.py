"""The commands of schedules: draw, compare, simulate, search, verify.

    words --click, options.py--> schedule, costs, numbers --> a grid or a table on stdout, files
    exit status: 0; 1 where a schedule is wrong (verify)
"""

import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from operator import attrgetter
from shutil import get_terminal_size
from textwrap import fill
from typing import Any, Literal, TextIO

import click

from scheduler import csv_files, drawing, simulation, verification
from scheduler.aligning import aligned, columns_of
from scheduler.chrome import chrome_trace
from scheduler.command_line.options import (
    INPUT,
    OUTPUT,
    number,
    numbers,
    read_schedule,
    with_all,
    with_costs,
    with_release,
    with_schedule,
    with_sizes,
)
from scheduler.command_line.running import CommandError
from scheduler.comparison import Row
from scheduler.comparison import compare as compared
from scheduler.costs import Costs
from scheduler.drawing import duration
from scheduler.errors import ScheduleError, whole_number
from scheduler.placement import Placement
from scheduler.plotting import svg
from scheduler.schedule import Schedule
from scheduler.schedules import names
from scheduler.searches import searching
from scheduler.timeline import Timeline

Caps = float | tuple[float, ...] | None
Release = Literal["early", "block"]


@click.group(
    context_settings={"max_content_width": 120},
    epilog="""\b
A schedule has lanes (ranks, or devices in one process), each with one or more stages of the model, and cuts a batch
into chunks. 2F0 is the forward of stage 2 on chunk 0; B is its backward, or I its input and W its weight gradient.
Exit status: 0; 1 where a schedule is wrong (verify); 2 where the command is, or what it asks for cannot be."""
)
def schedules() -> None:
    """Pipeline schedules: what they look like, how long a step takes, how much each lane holds, and which is best.

    \b
    examples:
      penstock schedules draw 1f1b --lanes 4 --chunks 8
      penstock schedules compare --lanes 8 --chunks 32
      penstock schedules COMMAND --help
    """


# --width, and the files that a schedule can be written to
_with_files = with_all(
    click.option("--width", type=int, metavar="N", help="Cut the makespan into N columns."),
    click.option("--svg", "picture", type=OUTPUT, metavar="FILE", help="Write a figure."),
    click.option("--chrome", type=OUTPUT, metavar="FILE", help="Write a trace for chrome://tracing or Perfetto."),
    click.option("--to-csv", type=OUTPUT, metavar="FILE", help="Write a table with a row for each lane."),
)


@schedules.command(short_help="Draw a schedule as a grid.")
@with_schedule
@with_release
@_with_files
@with_costs("stage")
def draw(schedule: Schedule, release: Release, costs: Costs, **files: Any) -> int:
    """Draws a schedule: a row for each lane, a cell for each slot of time.

    NAMES

    \b
    examples:
      penstock schedules draw 1f1b --lanes 4 --chunks 8
      penstock schedules draw interleaved --lanes 4 --chunks 8 --stages-per-lane 3 --svg interleaved.svg
      penstock schedules draw zb-h1 --lanes 4 --chunks 8 --forward 1,1,1,2 --width 60
      penstock schedules draw --csv mine.csv
    """
    timeline = simulation.simulate(schedule, costs, release)
    drawn = schedule if costs == Costs() and release == "early" else timeline  # a schedule also shows its blocks
    _show_grid(drawn, schedule, timeline, **files)
    return 0


@schedules.command(short_help="Compare schedules in a table.")
@click.argument("schedule_names", nargs=-1, metavar="[NAME]...")
@with_sizes(required=True)
@click.option("--memory", type=numbers, metavar="CAP", help="Say which hold at most this: a number, or one a lane.")
@click.option("--sort", type=click.Choice(("bubble", "memory", "step")), default="bubble", show_default=True)
@click.option("--to-csv", type=OUTPUT, metavar="FILE", help="Write the table, unrounded.")
@with_release
@with_costs("lane")
def compare(
    schedule_names: tuple[str, ...], lanes: int, chunks: int, memory: Caps, sort: str, to_csv: TextIO | None,
    release: Release, costs: Costs,
) -> int:  # fmt: skip
    """Simulates the same model under several schedules, all of them if none is named.

    NAMES

    Costs are of a chunk in all stages of a lane together; where it has several, they share it evenly.

    \b
    stages     how many a lane has
    step       how long a step takes
    bubble     the share of all lanes' time, until the last is done, in which they are idle (the papers' flush rate)
    span       the same of the longest time from a lane's first start to its last end: what is left where the next
               step may begin on some lanes while others end this one
    in flight  how many chunks the fullest lane holds, in whole shares: a chunk in half of its stages counts 0.5
    memory     what the fullest lane holds, in units of --activation

    \b
    examples:
      penstock schedules compare --lanes 8 --chunks 32
      penstock schedules compare 1f1b zb-h1 interleaved --lanes 8 --chunks 32 --link 0.1 --sort step
      penstock schedules compare --lanes 4 --chunks 16 --forward 3,3,3,4 --input 3 --weight 2 --kept 0.4 --memory 4
    """
    rows = sorted(compared(lanes, chunks, costs, schedule_names or None, release), key=_ORDERS[sort])
    verdicts = [[] if memory is None else [_YES_NO[row.fits(memory)]] for row in rows]
    defined = [(row, verdict) for row, verdict in zip(rows, verdicts) if not row.reason]
    print(f"{lanes} lanes, {chunks} chunks; a chunk on a lane: {_spelt(costs)}\n")
    columns = ["schedule", "stages", "step", "bubble", "span", "in flight", "memory"]
    columns += [] if memory is None else [f"fits {_listed(memory)}"]
    if defined:
        cells = [[*_cells(row), *verdict] for row, verdict in defined]
        show(columns, cells, dim=[verdict == ["no"] for _, verdict in defined])
    for row in rows[len(defined):]:
        print(f"{row.name}: {row.reason}")
    if to_csv is not None:
        _write_table(to_csv, rows, verdicts)
    return 0


@schedules.command(short_help="How long a step takes, and why.")
@with_schedule
@click.option("--why", nargs=2, type=number, metavar="LANE TIME", help="What that lane does then, or waits for.")
@with_release
@with_costs("stage")
def simulate(schedule: Schedule, why: tuple[int, float] | None, release: Release, costs: Costs) -> int:
    """Says how long a step takes, what each lane does and holds, and which chain of actions makes it take so long.

    NAMES

    \b
    examples:
      penstock schedules simulate 1f1b --lanes 4 --chunks 8 --link 0.2
      penstock schedules simulate zb-h1 --lanes 4 --chunks 8 --kept 0.5 --why 0 9
      penstock schedules simulate --csv mine.csv --forward 1,1.2,0.9,1
    """
    timeline = simulation.simulate(schedule, costs, release)
    reason = "" if why is None else timeline.why_idle(*why)
    print(_about(schedule))
    print(f"makespan      {duration(timeline.makespan, timeline.unit)}")
    print(f"flush bubble  {timeline.bubble:.2%} of lanes x makespan")
    print(f"span bubble   {timeline.span_bubble:.2%} of lanes x the longest time from a lane's start to its end\n")
    show(["lane", "start", "end", "busy", "idle", "pairs in flight", "memory"], list(_lanes(timeline)))
    print(f"\n{_path(timeline)}")
    if reason:
        print(f"\n{reason}")
    return 0


@schedules.command(short_help="Look for a better schedule.")
@with_sizes(required=True)
@click.option("--objective", type=click.Choice(("flush", "span")), default="flush", show_default=True,
              help="What is to be short: the step, or the longest time from a lane's first start to its last end.")
@click.option("--memory", type=numbers, metavar="CAP", help="What a lane may hold, in units of --activation: for all "
              "lanes, or a list; none: any amount.")
@click.option("--placement", type=click.Choice(("linear", "loop", "vee")), help="One stage a lane (linear, the "
              "default), several (loop), or two, there and back (vee).")
@click.option("--stages-per-lane", type=int, metavar="N", help="Of a loop; default: 2.")
@click.option("--whole", is_flag=True, help="Split no backward into I and W.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of the random moves.")
@click.option("--effort", type=number, default=1, show_default=True, metavar="X", help="2 searches twice as long.")
@_with_files
@with_costs("stage")
def search(
    lanes: int, chunks: int, objective: Literal["flush", "span"], memory: Caps, placement: str | None,
    stages_per_lane: int | None, whole: bool, seed: int, effort: float, costs: Costs, **files: Any,
) -> int:  # fmt: skip
    """Looks for the order of actions that is shortest under these costs and fits the memory.

    Says what no order can be below, and what the best named schedule takes.

    \b
    examples:
      penstock schedules search --lanes 4 --chunks 12 --forward 1,1.2,0.9,1 --memory 4
      penstock schedules search --lanes 4 --chunks 8 --placement vee --svg found.svg --to-csv found.csv
    """
    stage_placement = _placement(placement, lanes, stages_per_lane)
    result = searching.search(
        costs, lanes, chunks, memory, objective, placement=stage_placement, split=not whole, seed=seed, effort=effort
    )
    print(f"{result}\n")
    _show_grid(result.timeline, result.schedule, result.timeline, **files)
    return 0


@schedules.command(short_help="Say whether a schedule in a file is right.")
@click.argument("file", type=INPUT)
def verify(file: TextIO) -> int:
    """Says that a schedule is right (exit status 0), or all that is wrong with it (exit status 1).

    FILE is a table with a row for each lane, or a printed schedule.

    \b
    examples:
      penstock schedules verify mine.csv
    """
    schedule = read_schedule(file)
    try:
        verification.verify(schedule)
    except ScheduleError as error:
        print(error)
        return 1
    print(f"{_about(schedule)}: right")
    return 0


_NAMES = fill(f"NAME is one of {', '.join(names())}.", 72, subsequent_indent="    ", break_on_hyphens=False)
for _command in schedules.commands.values():
    _command.help = (_command.help or "").replace("NAMES", f"\b\n    {_NAMES}")


def _placement(kind: str | None, lanes: int, stages_per_lane: int | None) -> Placement | None:
    """The placement of a search; None where the command leaves it open."""
    if kind == "loop" or kind is None and stages_per_lane is not None:
        count = 2 if stages_per_lane is None else stages_per_lane
        whole_number("stages_per_lane", count, least=1)
        return Placement.loop(lanes, lanes * count)
    if stages_per_lane is not None:
        raise CommandError(f"--placement {kind} says how many stages a lane has. Drop --stages-per-lane.")
    return None if kind is None else getattr(Placement, kind)(lanes)


def _show_grid(
    drawn: Schedule | Timeline, schedule: Schedule, timeline: Timeline, width: int | None, picture: TextIO | None,
    chrome: TextIO | None, to_csv: TextIO | None,
) -> None:  # fmt: skip
    """The grid, on a terminal that is too narrow for it also what to do; and the files of `_with_files`."""
    text = drawing.draw(drawn, width)
    print(text)
    columns, room = max(map(len, text.splitlines())), get_terminal_size().columns
    if sys.stdout.isatty() and columns > room:
        print(f"The grid has {columns} columns, this terminal {room}: say --width N or --svg FILE, or pipe it into "
              "less -S.", file=sys.stderr)
    title = f"{schedule.name}: {schedule.lanes} lanes, {schedule.chunks} chunks"
    if picture is not None:
        picture.write(svg(drawn, title=title))
    if chrome is not None:
        chrome.write(chrome_trace(timeline, name=title))
    if to_csv is not None:
        to_csv.write(csv_files.to_csv(schedule))


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], dim: Sequence[bool] = ()) -> None:
    """Prints a table: words to the left in the first column, numbers to the right in the others.

    Args:
        columns: the head of each
        rows: the cells of each row
        dim: for each row whether it is dim; none is, where nothing is given

    >>> show(["schedule", "step", "bubble"], [["zb-h1", "27", "11.1%"], ["1f1b", "33", "27.3%"]])
    schedule  step  bubble
    ──────────────────────
    zb-h1       27   11.1%
    1f1b        33   27.3%
    """
    head, *lines = aligned([columns, *rows])
    click.echo(head)
    click.echo("─" * max(map(columns_of, [head, *lines])))
    for line, is_dim in zip(lines, dim or [False] * len(lines)):
        click.echo(click.style(line, dim=True) if is_dim else line)


def _about(schedule: Schedule) -> str:
    return str(schedule).splitlines()[0]


def _spelt(costs: Costs) -> str:
    """Forward, input and weight, and what else is not as it is by default."""
    values = {field.name: getattr(costs, field.name) for field in fields(Costs)}
    shown = [name for name in values if name in _ALWAYS or values[name] != getattr(Costs(), name)]
    return ", ".join(f"{name} {_listed(values[name])}" for name in shown)


def _listed(cost: float | Sequence[float]) -> str:
    return ",".join(f"{value:.6g}" for value in (cost if isinstance(cost, Sequence) else [cost]))


def _cells(row: Row) -> list[str]:
    return [row.name, str(row.stages_per_lane), f"{row.makespan:.6g}", f"{row.bubble:.1%}", f"{row.span_bubble:.1%}",
            f"{row.peak_in_flight:.6g}", f"{row.peak_memory:.6g}"]


def _write_table(file: TextIO, rows: Sequence[Row], verdicts: Sequence[Sequence[str]]) -> None:
    """The CSV of `compare`, unrounded; numbers are empty where a schedule is not defined."""
    table = csv.writer(file, lineterminator="\n")
    table.writerow([*_COLUMNS, *["fits" for _ in verdicts[0]], "reason"])
    for row, verdict in zip(rows, verdicts):
        cells = [getattr(row, column) if column == "name" or not row.reason else "" for column in _COLUMNS]
        table.writerow([*cells, *verdict, row.reason])


def _lanes(timeline: Timeline) -> Iterator[list[str]]:
    for lane, row in enumerate(timeline.by_lane):
        ends = (row[0].start, row[-1].end) if row else (0, 0)
        busy, peak, memory = timeline.busy[lane], timeline.peak_in_flight[lane], timeline.peak_memory[lane]
        cells = (*ends, busy, timeline.makespan - busy, peak, memory)
        yield [str(lane), *(f"{cell:.6g}" for cell in cells)]


def _path(timeline: Timeline) -> str:
    """The critical path, a word for what a lane runs of it in one go."""
    path = timeline.critical_path
    work = sum(event.end - event.start for event in path)
    words = []
    for _, group in groupby(path, key=attrgetter("lane")):
        first, *rest = [str(event.action) for event in group]
        words.append(f"{first}..{rest[-1]} ({1 + len(rest)})" if rest else first)
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
