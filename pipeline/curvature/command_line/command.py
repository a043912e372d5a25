"""The options of `penstock curvature`, and what a command leaves out.

    penstock curvature train.py:build --top 5  --click-->  options  --answers.py-->  stdout and files
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import click

from pipeline.curvature.command_line.answers import MATRICES, answer
from scheduler.command_line.running import CommandError

CurvatureCommand: TypeAlias = Callable[..., int]

_QUESTIONS = ("check", "top", "trace", "layers", "density")  # what can be asked; none of them stands for top and trace
_COUNT = click.IntRange(min=1)
_SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)
_FILE = click.Path(path_type=Path)
_AS_SAMPLES = "samples"


def _names(value: str) -> list[str]:
    """Names with commas between."""
    names = [name.strip() for name in value.split(",")]
    if not all(names):
        raise click.BadParameter(f"{value!r} is no list of names such as 0,3.weight.")
    return names


def _products(value: Any) -> int | str:
    """A number of products, or as many as --samples says."""
    return _AS_SAMPLES if value == _AS_SAMPLES else int(_COUNT.convert(value, None, None))


def _query(
    name: str, metavar: str, alone: object, **settings: Any
) -> Callable[[CurvatureCommand], CurvatureCommand]:
    """An option that may stand without a value, and means `alone` then."""
    return click.option(name, is_flag=False, flag_value=alone, metavar=f"[{metavar}]", **settings)


@click.command(context_settings={"max_content_width": 120}, short_help="Eigenvalues, trace, density of a Hessian.")
@click.argument("target")
@click.option("--matrix", type=click.Choice(list(MATRICES)), help="Default: hessian.")
@click.option("--params", type=_names, metavar="NAMES", help="Of layers or parameters: 0,3.weight; default: all that "
              "require a gradient.")
@click.option("--train-mode", is_flag=True, help="With dropout and the like; default: eval mode.")
@click.option("--check", is_flag=True, help="Try the laws of second derivatives first; if one is broken, compute "
              "nothing else and end with status 1.")
@_query("--top", "K", 1, type=_COUNT, help="K outermost eigenvalues; alone: 1.")
@_query("--trace", "N", _AS_SAMPLES, type=_products, help="The trace, by N products; alone: --samples.")
@_query("--layers", "K", 1, type=_COUNT, help="K eigenvalues (alone: 1) and the trace of each layer's own block.")
@_query("--density", "FILE", "", help="How the eigenvalues are spread; FILE (.png, .svg, .pdf) gets the picture.")
@click.option("--which", type=click.Choice(("LM", "LA", "SA", "BE")), default="LM", show_default=True,
              help="--top, --layers: largest magnitude, largest, smallest, both ends.")
@click.option("--tol", type=_SHARE, default=1e-4, show_default=True, metavar="X",
              help="--top, --layers: of the residuals, relative to the largest eigenvalue.")
@click.option("--max-products", type=_COUNT, metavar="N", help="--top: end there, converged or not.")
@click.option("--samples", type=_COUNT, default=100, show_default=True, metavar="N",
              help="--trace, --layers: products.")
@click.option("--rel", type=_SHARE, metavar="X",
              help="--trace: end where the standard error is this small, relative to the trace.")
@click.option("--steps", type=_COUNT, default=80, show_default=True, metavar="N",
              help="--density: Lanczos steps a run.")
@click.option("--runs", type=_COUNT, default=10, show_default=True, metavar="N", help="--density: runs.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N",
              help="Of random vectors; and of dropout, where the script does not say.")
@click.option("--save", type=_FILE, metavar="FOLDER", help="Write what was found there; Result.load reads it.")
@click.option("--resume", type=_FILE, metavar="FILE",
              help="--top: save the run there, and go on from it if it is there.")
@click.option("--quiet", is_flag=True, help="No progress bars.")
def curvature(**options: Any) -> int:
    """The curvature of a model's loss, for a model that is cut over devices or ranks as well as for a plain one.

    Questions are --check, --top, --trace, --layers and --density; none of them: --top 1 --trace.

    \b
    TARGET is FILE.py:NAME or MODULE:NAME: a function without arguments, in a script or a module. It returns one of
      (model, data, loss_fn)      model: a Pipe or a module; data: (x, target), or a list or DataLoader of such pairs
      {"model": ..., ...}         the arguments of pipeline.curvature.Hessian by name
      an operator                 Hessian(...), GaussNewton(...) or EmpiricalFisher(...)
    The script is imported: put what trains behind `if __name__ == "__main__"`.

    \b
    examples:
      penstock curvature train.py:build --check --top 5 --trace
      penstock curvature train.py:build --layers 2 --density spectrum.png --save results
      torchrun --nproc-per-node 4 -m pipeline curvature train.py:build --top 10 --tol 1e-4 --resume run.pt
    """
    if not any(options[question] not in (None, False) for question in _QUESTIONS):
        options.update(top=1, trace=_AS_SAMPLES)
    if options["trace"] == _AS_SAMPLES:
        options["trace"] = options["samples"]
    for option in ("resume", "max_products"):
        if options[option] is not None and options["top"] is None:
            raise CommandError(f"--{option.replace('_', '-')} is for --top. Add --top K, or leave it out.")
    if options["rel"] is not None and options["trace"] is None:
        raise CommandError("--rel is for --trace. Add --trace, or leave it out.")
    return answer(SimpleNamespace(**options))
