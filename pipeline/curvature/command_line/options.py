"""What can be asked about curvature on the command line?

    python -m pipeline curvature train.py:build --top 5  --parse-->  Namespace (target, and the options by name)

What the target stands for is in target.py, what is answered in answers.py.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from scheduler.command_line.arguments import CommandError

__all__ = ["MATRICES", "parse"]

MATRICES = ("hessian", "gauss-newton", "fisher")
ASKED = ("check", "top", "trace", "layers", "density")  # what can be asked; none of them stands for top and trace


def parse(argv: Sequence[str] | None = None) -> Namespace:
    """Reads a command.

    Args:
        argv: the words after `python -m pipeline`; None takes those of this process

    Returns:
        The options by name.

    Raises:
        CommandError: there is no such command or option, or a value is none.
        SystemExit: help was asked for, and printed.

    >>> args = parse("curvature train.py:build --trace".split())
    >>> args.target, args.top, args.trace
    ('train.py:build', None, 100)
    """
    parser = _Parser(prog="python -m pipeline", description="Tools beside the library.", **_HOW)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    about = commands.add_parser(
        "curvature", help="eigenvalues, trace, density of a model's Hessian", description=_ABOUT, epilog=_EPILOG, **_HOW
    )
    _add_matrix(about)
    _add_questions(about)
    _add_numbers(about)
    _add_outputs(about)
    return _checked(parser.parse_args(argv))


class _Parser(ArgumentParser):
    """Says what is wrong in a sentence, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message}. See {self.prog} --help.")


def _add_matrix(parser: ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="FILE.py:NAME or MODULE:NAME; see below")
    parser.add_argument("--matrix", choices=MATRICES, help="default: hessian")
    parser.add_argument("--params", type=_names, metavar="NAMES", help="of layers or parameters: 0,3.weight; default: "
                        "all that require a gradient")
    parser.add_argument("--train-mode", action="store_true", help="with dropout and the like; default: eval mode")


def _add_questions(parser: ArgumentParser) -> None:
    asked = parser.add_argument_group("questions", "None of them: --top 1 --trace.")
    asked.add_argument("--check", action="store_true", help="try the laws of second derivatives first; if one is "
                       "broken, compute nothing else and end with status 1")
    asked.add_argument("--top", type=_count, nargs="?", const=1, metavar="K", help="outermost eigenvalues; "
                       "default: 1")
    asked.add_argument("--trace", type=_count, nargs="?", const=-1, metavar="N", help="the trace, by N products; "
                       "default: --samples")
    asked.add_argument("--layers", type=_count, nargs="?", const=1, metavar="K", help="K eigenvalues (default: 1) and "
                       "the trace of each layer's own block")
    asked.add_argument("--density", nargs="?", const="", metavar="FILE", help="how the eigenvalues are spread; FILE "
                       "(.png, .svg, .pdf) gets the picture")


def _add_numbers(parser: ArgumentParser) -> None:
    numbers = parser.add_argument_group("numbers")
    which = "--top, --layers: largest magnitude (LM, the default), largest (LA), smallest (SA), both ends (BE)"
    numbers.add_argument("--which", choices=("LM", "LA", "SA", "BE"), default="LM", help=which)
    tol = "--top, --layers: of the residuals, relative to the largest eigenvalue; default: 1e-4"
    numbers.add_argument("--tol", type=_share, default=1e-4, metavar="X", help=tol)
    numbers.add_argument("--max-products", type=_count, metavar="N", help="--top: end there, converged or not")
    samples = "--trace, --layers: products; default: 100"
    numbers.add_argument("--samples", type=_count, default=100, metavar="N", help=samples)
    rel = "--trace: end where the standard error is this small, relative to the trace"
    numbers.add_argument("--rel", type=_share, metavar="X", help=rel)
    steps = "--density: Lanczos steps in a run; default: 80"
    numbers.add_argument("--steps", type=_count, default=80, metavar="N", help=steps)
    numbers.add_argument("--runs", type=_count, default=10, metavar="N", help="--density: runs; default: 10")
    seed = "of random vectors; and of dropout, where the script does not say; default: 0"
    numbers.add_argument("--seed", type=_whole, default=0, metavar="N", help=seed)


def _add_outputs(parser: ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    files.add_argument("--save", type=Path, metavar="FOLDER", help="write what was found there; Result.load reads it")
    files.add_argument("--resume", type=Path, metavar="FILE", help="--top: save the run there, and go on from it if it "
                       "is there")
    files.add_argument("--quiet", action="store_true", help="no progress bars")


def _checked(args: Namespace) -> Namespace:
    """With what the command leaves out put in."""
    if not any(getattr(args, what) not in (None, False) for what in ASKED):
        args.top, args.trace = 1, -1
    if args.trace == -1:
        args.trace = args.samples
    for option, value in ("--resume", args.resume), ("--max-products", args.max_products):
        if value is not None and args.top is None:
            raise CommandError(f"{option} is for --top. Add --top K, or leave it out.")
    if args.rel is not None and args.trace is None:
        raise CommandError("--rel is for --trace. Add --trace, or leave it out.")
    return args


def _names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise ArgumentTypeError(f"{text!r} is no list of names such as 0,3.weight")
    return found


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None


def _count(text: str) -> int:
    if (found := _whole(text)) < 1:
        raise ArgumentTypeError(f"{text} is less than 1")
    return found


def _share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0.0 < found < 1.0:
        raise ArgumentTypeError(f"{text} is not between 0 and 1")
    return found


_HOW: Any = {"formatter_class": RawDescriptionHelpFormatter, "allow_abbrev": False}
_ABOUT = """\
The curvature of a model's loss, for a model that is cut over devices or ranks as well as for a plain one."""
_EPILOG = """\
TARGET names a function without arguments, in a script or a module. It returns one of
  (model, data, loss_fn)      model: a Pipe or a module; data: (x, target), or a list or DataLoader of such pairs
  {"model": ..., ...}         the arguments of pipeline.curvature.Hessian by name
  an operator                 Hessian(...), GaussNewton(...) or EmpiricalFisher(...)
The script is imported: put what trains behind `if __name__ == "__main__"`.

examples:
  python -m pipeline curvature train.py:build --check --top 5 --trace
  python -m pipeline curvature train.py:build --layers 2 --density spectrum.png --save results
  torchrun --nproc-per-node 4 -m pipeline curvature train.py:build --top 10 --tol 1e-4 --resume run.pt"""
