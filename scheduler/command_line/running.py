"""A click command run to its exit status, with errors as text on stderr.

    words --click--> the command's function ──► 0, or the status that it returns
      └── wrong ──────────┴── cannot be ──────► 2, in words on stderr          Ctrl-C ──► 130

What these packages raise themselves says what to do, and is told in its words alone; of all else there is a traceback.
"""

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from types import TracebackType

import click


class CommandError(click.ClickException):
    """A command that cannot run: the message says what is wrong, and what to do."""


def run(command: click.Command, name: str, argv: Sequence[str] | None) -> int:
    """Runs a command.

    Args:
        command: what to run
        name: how help calls it
        argv: the words after the name; None takes those of this process

    Returns:
        The exit status.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a letter that a terminal lacks costs no result
    try:
        with command.make_context(name, list(sys.argv[1:] if argv is None else argv)) as context:
            status = command.invoke(context)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        words = error.format_message()  # or all help, where there are no words at all
        if not words.startswith("Usage:"):
            stop = "" if words[-1] in ".?)" else "."
            words += f"{stop} See {error.ctx.command_path if error.ctx else name} --help."
        _say(words, error)
    except click.ClickException as error:
        _say(error.format_message(), error)
    except BrokenPipeError:  # who reads has enough, as head does
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # or Python flushes into the pipe once more
        return 0
    except KeyboardInterrupt as error:
        _say("interrupted", error)
        return 130
    except (ValueError, TypeError, ArithmeticError, ImportError, OSError) as error:
        if not _is_ours(error.__traceback__):
            raise
        _say(str(error), error)
    return 2


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether one of these packages has raised it: then where it was is of no use."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return str(name).partition(".")[0] in ("pipeline", "partition", "scheduler")


def _say(words: str, error: BaseException) -> None:
    """On stderr, with the error's notes (where a run was saved); over ranks each says who it is."""
    prefix = f"rank {os.environ.get('RANK', 0)}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    print("\n".join([prefix + words, *getattr(error, "__notes__", [])]), file=sys.stderr, flush=True)
