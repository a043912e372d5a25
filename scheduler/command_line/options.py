"""What can be asked on the command line?

    python -m scheduler COMMAND ...  --parse-->  Namespace (command, and its options by name)

One function a command, one for each group of options that several of them share. What the words stand for is in
arguments.py, what is answered in commands.py.
"""

from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from scheduler.command_line.arguments import CommandError
from scheduler.schedules import names

__all__ = ["parse"]


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Reads a command.

    Args:
        argv: the words after `python -m scheduler`; None takes those of this process

    Returns:
        The options by name; `command` is one of draw, compare, simulate, search and verify.

    Raises:
        CommandError: there is no such command or option, or a value is none.
        SystemExit: help was asked for, and printed.
    """
    parser = _Parser(prog="python -m scheduler", description=_ABOUT, epilog=_EXAMPLES, **_HOW)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, add in _COMMANDS.items():
        words, usage, about, examples = _WORDS[name]
        epilog = f"examples:\n{examples}"
        add(commands.add_parser(name, help=words, usage=usage, description=about, epilog=epilog, **_HOW))
    return parser.parse_args(argv)


class _Parser(ArgumentParser):
    """Says what is wrong in a sentence, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message}. See {self.prog} --help.")


def _draw(parser: ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument("--width", type=_whole, metavar="N", help="cut the makespan into N columns")
    _add_release(parser)
    _add_files(parser)
    _add_costs(parser, "stage")


def _compare(parser: ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(names())}; none: all")
    _add_sizes(parser, required=True)
    parser.add_argument("--memory", type=_numbers, metavar="CAP", help="say which hold at most this: for all lanes, "
                        "or a list with a number for each")
    parser.add_argument("--sort", choices=("bubble", "memory", "step"), default="bubble", help="default: bubble")
    parser.add_argument("--to-csv", "--csv", metavar="FILE", help="write the table, unrounded")
    _add_release(parser)
    _add_costs(parser, "lane")


def _simulate(parser: ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument("--why", nargs=2, type=_number, metavar=("LANE", "TIME"), help="what that lane does then, or "
                        "what it waits for")
    _add_release(parser)
    _add_costs(parser, "stage")


def _search(parser: ArgumentParser) -> None:
    _add_sizes(parser, required=True)
    parser.add_argument("--objective", choices=("flush", "span"), default="flush", help="what is to be short: the "
                        "step (flush, the default), or the longest time from a lane's first start to its last end")
    parser.add_argument("--memory", type=_numbers, metavar="CAP", help="what a lane may hold, in units of "
                        "--activation: for all lanes, or a list; none: any amount")
    parser.add_argument("--placement", choices=("linear", "loop", "vee"), help="one stage a lane (linear, the "
                        "default), several (loop), or two, there and back (vee)")
    parser.add_argument("--stages-per-lane", type=_whole, metavar="N", help="of a loop; default: 2")
    parser.add_argument("--whole", action="store_true", help="split no backward into I and W")
    parser.add_argument("--seed", type=_whole, default=0, metavar="N", help="of the random moves; default: 0")
    parser.add_argument("--effort", type=_number, default=1, metavar="X", help="2 searches twice as long; default: 1")
    parser.add_argument("--width", type=_whole, metavar="N", help="cut the makespan into N columns")
    _add_files(parser, "--csv")
    _add_costs(parser, "stage")


def _verify(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a table with a row for each lane, or a printed schedule")


def _add_source(parser: ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(names()))
    _add_sizes(parser, required=False)
    parser.add_argument("--stages-per-lane", type=_whole, metavar="N", help="of a schedule that has several")
    parser.add_argument("--option", type=_option, action="append", default=[], metavar="WHAT=VALUE", help="another "
                        "option of the schedule, such as warmup=3,2,1")
    parser.add_argument("--csv", metavar="FILE", help="read the schedule instead of NAME: a table with a row for each "
                        "lane, or a printed schedule")


def _add_sizes(parser: ArgumentParser, required: bool) -> None:
    parser.add_argument("--lanes", type=_whole, required=required, metavar="N", help="how many ranks or devices")
    parser.add_argument("--chunks", type=_whole, required=required, metavar="N", help="how many chunks a step has")


def _add_files(parser: ArgumentParser, *also: str) -> None:
    files = parser.add_argument_group("files to write")
    files.add_argument("--svg", metavar="FILE", help="a figure")
    files.add_argument("--chrome", metavar="FILE", help="a trace for chrome://tracing or Perfetto")
    files.add_argument("--to-csv", *also, metavar="FILE", help="a table with a row for each lane")


def _add_costs(parser: ArgumentParser, place: str) -> None:
    about = f"A number, or a list with a number for each {place}: 1,1.2,0.9,1."
    if place == "lane":
        about += "\nThey are of a chunk in all stages of a lane together; where it has several, they share it evenly."
    costs = parser.add_argument_group("costs", about)
    for what, words in _COSTS.items():
        costs.add_argument(f"--{what}", type=_numbers, metavar="X", help=words)


def _add_release(parser: ArgumentParser) -> None:
    parser.add_argument("--release", choices=("early", "block"), default="early", help="when the outputs of two "
                        "actions that run as one block are there: early, each after its own (default), or with the "
                        "block")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a number") from None


def _numbers(text: str) -> float | tuple[float, ...]:
    """A number, or a list of several."""
    try:
        found = tuple(map(_number, text.split(",")))
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}, nor a list such as 1,1.2,0.9 ({text})" if "," in text else error) from None
    return found if "," in text else found[0]


def _option(text: str) -> tuple[str, object]:
    what, equals, value = text.partition("=")
    if not what or not equals:
        raise ArgumentTypeError(f"{text!r} is not of the form WHAT=VALUE")
    try:
        return what, _numbers(value)
    except ArgumentTypeError:
        return what, value


_HOW: Any = {"formatter_class": RawDescriptionHelpFormatter, "allow_abbrev": False}
_COMMANDS: dict[str, Callable[[ArgumentParser], None]] = {
    "draw": _draw, "compare": _compare, "simulate": _simulate, "search": _search, "verify": _verify,
}
_COSTS = {
    "forward": "of a forward; default: 1",
    "input": "of an input gradient, I; default: 1",
    "weight": "of a weight gradient, W; default: 1",
    "backward": "of a whole backward, B; default: input + weight",
    "recompute": "of a forward that is run once more before B or I; default: 0",
    "link": "of a message between lanes; in a list, one for each boundary; default: 0",
    "speed": "of each lane, 2 takes half the time; default: 1",
    "activation": "what a chunk holds from F to B or I (M_B of the papers); default: 1",
    "kept": "how much of that is still held from I to W (M_W); default: all",
    "checkpoint": "how much of that is held until it is recomputed; default: not recomputed",
}
_ABOUT = """\
Pipeline schedules: what they look like, how long a step takes, how much each lane holds, and which is the best."""
_EXAMPLES = """\
examples:
  python -m scheduler draw 1f1b --lanes 4 --chunks 8
  python -m scheduler compare --lanes 8 --chunks 32
  python -m scheduler COMMAND --help

A schedule has lanes (ranks, or devices in one process), each with one or more stages of the model, and cuts a batch
into chunks. 2F0 is the forward of stage 2 on chunk 0; B is its backward, or I its input and W its weight gradient.
Exit status: 0; 1 where a schedule is wrong (verify); 2 where the command is, or what it asks for cannot be."""
_OF_ONE = """%(prog)s NAME --lanes N --chunks N [options]
       %(prog)s --csv FILE [options]"""
_WORDS = {  # in a list of commands, how to write it, what it does, examples
    "draw": ("draw a schedule as a grid", _OF_ONE, """\
Draws a schedule: a row for each lane, a cell for each slot of time.""", """\
  python -m scheduler draw 1f1b --lanes 4 --chunks 8
  python -m scheduler draw interleaved --lanes 4 --chunks 8 --stages-per-lane 3 --svg interleaved.svg
  python -m scheduler draw zb-h1 --lanes 4 --chunks 8 --forward 1,1,1,2 --width 60
  python -m scheduler draw --csv mine.csv"""),
    "compare": ("compare schedules in a table", "%(prog)s [NAME ...] --lanes N --chunks N [options]", """\
Simulates the same model under several schedules.

  stages     how many a lane has
  step       how long a step takes
  bubble     the share of all lanes' time, until the last is done, in which they are idle (the papers' flush rate)
  span       the same of the longest time from a lane's first start to its last end: what is left where the next step
             may begin on some lanes while others end this one
  in flight  how many chunks the fullest lane holds, in whole shares: a chunk in half of its stages counts 0.5
  memory     what the fullest lane holds, in units of --activation""", """\
  python -m scheduler compare --lanes 8 --chunks 32
  python -m scheduler compare 1f1b zb-h1 interleaved --lanes 8 --chunks 32 --link 0.1 --sort step
  python -m scheduler compare --lanes 4 --chunks 16 --forward 3,3,3,4 --input 3 --weight 2 --kept 0.4 --memory 4"""),
    "simulate": ("how long a step takes, and why", _OF_ONE, """\
Says how long a step takes, what each lane does and holds, and which chain of actions makes it take so long.""", """\
  python -m scheduler simulate 1f1b --lanes 4 --chunks 8 --link 0.2
  python -m scheduler simulate zb-h1 --lanes 4 --chunks 8 --kept 0.5 --why 0 9
  python -m scheduler simulate --csv mine.csv --forward 1,1.2,0.9,1"""),
    "search": ("look for a better schedule", "%(prog)s --lanes N --chunks N [options]", """\
Looks for the order of actions that is shortest under these costs and fits the memory. Says what no order can be below,
and what the best named schedule takes.""", """\
  python -m scheduler search --lanes 4 --chunks 12 --forward 1,1.2,0.9,1 --memory 4
  python -m scheduler search --lanes 4 --chunks 8 --placement vee --svg found.svg --to-csv found.csv"""),
    "verify": ("say whether a schedule in a file is right", "%(prog)s FILE", """\
Says that a schedule is right (exit status 0), or all that is wrong with it (exit status 1).""", """\
  python -m scheduler verify mine.csv"""),
}
