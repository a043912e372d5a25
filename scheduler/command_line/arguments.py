"""What do the words of a command stand for? Texts become a schedule, costs and numbers.

    options.py: argv --> Namespace ─┬─ schedule_of ──►  Schedule, by name or from a file
                                    ├─ costs_of ─────►  Costs
                                    └─ placement_of ─►  Placement

What is wrong with a command is a CommandError, what is wrong with a schedule a ScheduleError: both are words, and
`python -m scheduler` prints them and ends with status 2.
"""

import re
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

from scheduler.costs import Costs
from scheduler.csv_files import from_csv
from scheduler.errors import refuse_unless_whole
from scheduler.placement import Placement
from scheduler.schedule import Schedule
from scheduler.schedules import by_name, names

__all__ = ["CommandError", "costs_of", "placement_of", "read", "schedule_of", "write"]


class CommandError(Exception):
    """What is wrong with a command, and what to do."""


def schedule_of(args: Namespace) -> Schedule:
    """The schedule that a command names, or that is in the file it gives.

    Raises:
        CommandError: there is a name and a file, or neither, or a number is missing or has no meaning.
        ScheduleError: the schedule cannot be built, or the file holds none.
    """
    numbers = {"--lanes": args.lanes, "--chunks": args.chunks}
    if args.csv is not None:
        _refuse_beside_file(args, numbers)
        return read(args.csv)
    if args.name is None:
        raise CommandError(f"which schedule? Name one ({', '.join(names())}), or read one with --csv FILE.")
    missing = [what for what, number in numbers.items() if number is None]
    if missing:
        raise CommandError(f"{args.name} is made for a number of lanes and of chunks. Add {' and '.join(missing)}.")
    options = dict(args.option)
    if args.stages_per_lane is not None:
        options["stages_per_lane"] = args.stages_per_lane
    return by_name(args.name, args.lanes, args.chunks, **options)


def read(path: str) -> Schedule:
    """The schedule in a file: a table with a row for each lane, or what `print(schedule)` writes.

    Raises:
        CommandError: the file cannot be read.
        ScheduleError: what is in it is no schedule.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise CommandError(f"cannot read {path}: it is not text (UTF-8). Give a table, as --to-csv writes.") from None
    if text.lstrip().startswith("schedule "):
        return Schedule.parse(text)
    return from_csv(text, name=re.sub(r"[^A-Za-z0-9+._-]", "_", Path(path).stem))


def write(path: str, text: str) -> None:
    """Writes a file, whatever was there.

    Raises:
        CommandError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}. Give a file in a folder that is there.") from None


def costs_of(args: Namespace) -> Costs:
    """The costs that a command gives; what it does not say is as in `Costs()`.

    Raises:
        ScheduleError: a number is no cost.
    """
    given = {field.name: getattr(args, field.name, None) for field in fields(Costs)}
    return Costs(**{what: cost for what, cost in given.items() if cost is not None})


def placement_of(args: Namespace) -> Placement | None:
    """Where a search puts the stages; None where the command leaves it open.

    Raises:
        CommandError: a number of stages is given for a placement that has its own.
        ScheduleError: a number is too small.
    """
    if args.placement == "loop" or args.placement is None and args.stages_per_lane is not None:
        several = 2 if args.stages_per_lane is None else args.stages_per_lane
        refuse_unless_whole("stages_per_lane", several, least=1)
        return Placement.loop(args.lanes, args.lanes * several)
    if args.stages_per_lane is not None:
        raise CommandError(f"--placement {args.placement} says how many stages a lane has. Drop --stages-per-lane.")
    return None if args.placement is None else getattr(Placement, args.placement)(args.lanes)


def _refuse_beside_file(args: Namespace, numbers: dict[str, int | None]) -> None:
    given = {"the name": args.name, **numbers, "--stages-per-lane": args.stages_per_lane}
    given["--option"] = args.option or None
    others = [what for what, value in given.items() if value is not None]
    if others:
        raise CommandError(
            f"--csv {args.csv} reads a whole schedule, which leaves nothing to say for {', '.join(others)}. "
            "Drop one or the other. (To write a table, say --to-csv FILE.)"
        )
