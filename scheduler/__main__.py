"""python -m scheduler draw | compare | simulate | search | verify, as `penstock schedules`.

    $ python -m scheduler draw 1f1b --lanes 4 --chunks 8
    $ python -m scheduler --help
"""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the words after `python -m scheduler`; None takes those of this process

    Returns:
        The exit status: 0; 1 where a schedule is wrong (verify); 2 where the command is, or what it asks for cannot be.

    >>> main("draw gpipe --lanes 2 --chunks 2".split())
    lane 0 |F0 F1 .  .  .  B0 == B1 ==
    lane 1 |.  F0 F1 B0 == B1 == .  .
    makespan 9 slots, bubble 33.3%, peak in flight 2 2
    0
    """
    try:
        from scheduler.command_line.commands import schedules
        from scheduler.command_line.running import run
    except ImportError as error:
        print(f'the command line needs {error.name}: pip install "penstock-torch[cli]"', file=sys.stderr)
        return 2
    return run(schedules, "python -m scheduler", argv)


if __name__ == "__main__":
    sys.exit(main())
