"""python -m scheduler draw | compare | simulate | search | verify: what goes in, what comes out, and with which status?

    words  --options.py-->  Namespace  --commands.py-->  stdout and files ──► 0, or 1 where a schedule is wrong (verify)
       └─────────── wrong ──────┴──── cannot be ──────►  stderr, in words ──► 2

    $ python -m scheduler draw 1f1b --lanes 4 --chunks 8
    $ python -m scheduler --help
"""

import os
import sys
from collections.abc import Sequence

from scheduler.command_line.arguments import CommandError
from scheduler.command_line.commands import COMMANDS
from scheduler.command_line.options import parse
from scheduler.errors import ScheduleError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the words after `python -m scheduler`; None takes those of this process

    Returns:
        The exit status.

    >>> main("draw gpipe --lanes 2 --chunks 2".split())
    lane 0 |F0 F1 .  .  .  B0 == B1 ==
    lane 1 |.  F0 F1 B0 == B1 == .  .
    makespan 9 slots, bubble 33.3%, peak in flight 2 2
    0
    """
    try:
        args = parse(argv)
        status = COMMANDS[args.command](args)
        sys.stdout.flush()
        return status
    except (CommandError, ScheduleError) as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads has enough, as head does
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # or Python flushes into the pipe once more
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
