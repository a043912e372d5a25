"""Options that several commands share, and what their words stand for: a schedule, costs, numbers.

    @with_schedule   NAME --lanes --chunks ..., or --csv FILE   ──►  schedule
    @with_costs      --forward 1,1.2,0.9 ...                     ──►  costs
"""

import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import click

from scheduler.command_line.running import CommandError
from scheduler.costs import Costs
from scheduler.csv_files import from_csv
from scheduler.errors import ScheduleError
from scheduler.schedule import Schedule
from scheduler.schedules import by_name, names
from scheduler.verification import verify

Command: TypeAlias = Callable[..., int]

INPUT = click.File(encoding="utf-8", errors="replace")  # what is no text is refused as it is read
OUTPUT = click.File("w", encoding="utf-8")


def number(value: Any) -> float:
    """A whole number, or one with a point."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    raise click.BadParameter(f"{value!r} is not a number.")


def numbers(value: str) -> float | tuple[float, ...]:
    """A number, or a list of several."""
    if "," not in value:
        return number(value)
    try:
        return tuple(map(number, value.split(",")))
    except click.BadParameter as error:
        raise click.BadParameter(f"{error.message.rstrip('.')}, nor a list such as 1,1.2,0.9 ({value}).") from None


def _setting(value: str) -> tuple[str, object]:
    """WHAT=VALUE, where the value is a number, a list of numbers, or a word."""
    name, equals, text = value.partition("=")
    if not name or not equals:
        raise click.BadParameter(f"{value!r} is not of the form WHAT=VALUE.")
    try:
        return name, numbers(text)
    except click.BadParameter:
        return name, text


def with_all(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator; help lists the first one first."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def with_sizes(required: bool) -> Callable[[Command], Command]:
    """--lanes and --chunks."""
    return with_all(
        click.option("--lanes", type=int, required=required, metavar="N", help="How many ranks or devices."),
        click.option("--chunks", type=int, required=required, metavar="N", help="How many chunks a step has."),
    )


with_release = click.option(
    "--release", type=click.Choice(("early", "block")), default="early", show_default=True,
    help="When the outputs of two actions that run as one block are there: each after its own, or with the block.",
)  # fmt: skip


def with_costs(place: str) -> Callable[[Command], Command]:
    """An option for each cost, which become `costs`; what is not said is as in `Costs()`. Lists have one a `place`."""

    def decorate(command: Command) -> Command:
        @with_all(*[click.option(f"--{name}", type=numbers, metavar=f"X[,X of each {place}]", help=words)
                    for name, words in _COSTS.items()])
        @wraps(command)
        def gathered(**arguments: Any) -> int:
            costs = {name: arguments.pop(name) for name in _COSTS}
            return command(costs=Costs(**{name: cost for name, cost in costs.items() if cost is not None}), **arguments)

        return gathered

    return decorate


def with_schedule(command: Command) -> Command:
    """A name with sizes and options, or a file, which become `schedule`."""

    @click.argument("name", required=False, metavar="[NAME]")
    @with_sizes(required=False)
    @click.option("--stages-per-lane", type=int, metavar="N", help="Of a schedule that has several.")
    @click.option("--option", type=_setting, multiple=True, metavar="WHAT=VALUE",
                  help="Another option of the schedule, such as warmup=3,2,1.")
    @click.option("--csv", type=INPUT, metavar="FILE", help="Read the schedule instead of NAME: a table with a row for "
                  "each lane, or a printed schedule.")
    @wraps(command)
    def gathered(
        name: str | None, lanes: int | None, chunks: int | None, stages_per_lane: int | None,
        option: tuple[tuple[str, object], ...], csv: TextIO | None, **arguments: Any,
    ) -> int:  # fmt: skip
        sizes = {"--lanes": lanes, "--chunks": chunks, "--stages-per-lane": stages_per_lane}
        if csv is not None:
            _refuse_beside_file(csv.name, {"the name": name, **sizes, "--option": option or None})
            schedule = read_schedule(csv)
            try:
                verify(schedule)
            except ScheduleError:
                command_line = f"penstock schedules verify {csv.name}"
                click.echo(f"note: {csv.name} is no right schedule: {command_line} says why.", err=True)
            return command(schedule=schedule, **arguments)
        if name is None:
            raise CommandError(f"which schedule? Name one ({', '.join(names())}), or read one with --csv FILE.")
        if lanes is None or chunks is None:
            missing = " and ".join(flag for flag in ("--lanes", "--chunks") if sizes[flag] is None)
            raise CommandError(f"{name} is made for a number of lanes and of chunks. Add {missing}.")
        fixed = [setting for setting, _ in option if setting in ("name", "lanes", "chunks")]
        if fixed:
            raise CommandError(f"--option {fixed[0]}=... is no option of a schedule. Give NAME, --lanes and --chunks.")
        options = dict(option) | ({} if stages_per_lane is None else {"stages_per_lane": stages_per_lane})
        return command(schedule=by_name(name, lanes, chunks, **options), **arguments)

    return gathered


def read_schedule(file: TextIO) -> Schedule:
    """The schedule in a file: a table with a row for each lane, or what `print(schedule)` writes.

    Raises:
        ScheduleError: what is in it is no schedule.
    """
    text = file.read()
    if text.lstrip().startswith("schedule "):
        return Schedule.parse(text)
    return from_csv(text, name=re.sub(r"[^A-Za-z0-9+._-]", "_", Path(file.name).stem))


def _refuse_beside_file(path: str, options: dict[str, object]) -> None:
    refused = [option for option, value in options.items() if value is not None]
    if refused:
        raise CommandError(
            f"--csv {path} reads a whole schedule, which leaves nothing to say for {', '.join(refused)}. "
            "Drop one or the other. (To write a table, say --to-csv FILE.)"
        )


_COSTS = {
    "forward": "Of a forward; default: 1.",
    "input": "Of an input gradient, I; default: 1.",
    "weight": "Of a weight gradient, W; default: 1.",
    "backward": "Of a whole backward, B; default: input + weight.",
    "recompute": "Of a forward that is run once more before B or I; default: 0.",
    "link": "Of a message between lanes; in a list, one for each boundary; default: 0.",
    "speed": "Of each lane, 2 takes half the time; default: 1.",
    "activation": "What a chunk holds from F to B or I (M_B of the papers); default: 1.",
    "kept": "How much of that is still held from I to W (M_W); default: all.",
    "checkpoint": "How much of that is held until it is recomputed; default: not recomputed.",
}
