"""The command `penstock curvature`: its options, and its answers.

    penstock curvature train.py:build --top 5  --click--> options

    options --operator_of--> operator --> check, top, trace, layers, density, in this order
                                                  each: words on rank 0's stdout, and a file in --save
    status: 0; 1 where --check finds something wrong

    FILE.py:NAME or MODULE:NAME  --import-->  what NAME is  --called, if it can be-->  (model, data, loss_fn), a dict of
                                                                                       arguments, or an operator

Over ranks every process computes; the eigenvectors are sharded, so each saves its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from torch import nn

from pipeline.curvature.checking import Report
from pipeline.curvature.estimates.eigenpairs import Eigenpairs
from pipeline.curvature.operators import EmpiricalFisher, GaussNewton, Hessian, Operator
from pipeline.curvature.results.plots import check_suffix
from pipeline.curvature.results.result import Result
from pipeline.pipe import Pipe
from scheduler.command_line.running import CommandError
from scheduler.command_line.targets import value_at
from scheduler.plotting import matplotlib


def answer(options: SimpleNamespace) -> int:
    """Answers all that a command asks.

    Args:
        options: the command's, by their names; None: not asked for.

    Returns:
        The exit status.

    Raises:
        CommandError: what is asked cannot be.
    """
    _check_files(options)
    A = operator_of(options)
    space, folder, is_right = A.space, options.save, True
    is_speaking = space.rank == 0
    about = _about(A)
    if is_speaking:
        print(about, flush=True)
    for name, result in _results(A, options):
        if is_speaking:
            print(f"\n{result}", flush=True)
        if folder is not None and isinstance(result, Eigenpairs) and space.ranks > 1:  # each rank has a part of them
            result.save(folder / f"{name}.rank{space.rank}.npz")
        elif folder is not None and is_speaking:
            result.save(folder / f"{name}.npz")
        if name == "density" and options.density and is_speaking:
            result.plot(options.density)
            print(f"  picture in {options.density}", flush=True)
        is_right = not isinstance(result, Report) or result.ok
        if not is_right:
            break
    if space.ranks > 1:  # rank 0 has said all: a rank that ends with a status ends the others under torchrun
        space.rows(None)
    return 0 if is_right else 1


def _results(A: Operator, options: SimpleNamespace) -> Iterator[tuple[str, Result]]:
    """The results that are asked for, one after the other, by the names of their files."""
    seed, show = options.seed, False if options.quiet else None
    if options.check:
        yield "check", A.check(seed=seed)
    if options.top is not None:
        yield "top", A.top_eigenpairs(
            options.top, which=options.which, tol=options.tol, max_products=options.max_products, seed=seed,
            resume=options.resume, show=show,
        )
    if options.trace is not None:
        yield "trace", A.trace(options.trace, rel=options.rel, seed=seed, show=show)
    if options.layers is not None:
        yield "layers", A.per_layer(
            options.layers, samples=options.samples, which=options.which, tol=options.tol, seed=seed, show=show
        )
    if options.density is not None:
        yield "density", A.density(steps=options.steps, runs=options.runs, seed=seed, show=show)


def _check_files(options: SimpleNamespace) -> None:
    """Raise now for files that could not be written after hours."""
    picture = options.density
    if picture:
        check_suffix(picture)
        matplotlib("figure")
        if not Path(picture).resolve().parent.is_dir():
            raise CommandError(f"cannot write {picture}: its folder is not there. Make it first.")
    if options.save is not None:
        try:
            options.save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"cannot make the folder {options.save}: {error.strerror}. Give another.") from None


def _about(A: Operator) -> str:
    ranks = f" over {A.space.ranks} ranks" if A.space.ranks > 1 else ""
    gradient_norm = A.space.norm(A.space.vec(A.gradient()))
    return (
        f"{A!r}, {A.stages} stage{'s' if A.stages > 1 else ''}{ranks}\n"
        f"loss {A.loss().item():.6g}, norm of the gradient {gradient_norm:.3g}"
    )


MATRICES: dict[str, type[Operator]] = {
    "hessian": Hessian, "gauss-newton": GaussNewton, "fisher": EmpiricalFisher
}  # fmt: skip


def operator_of(options: SimpleNamespace) -> Operator:
    """The operator that a command names.

    Raises:
        CommandError: there is no such file, module or name; or it is nothing to make an operator from.
    """
    value = value_at(options.target, (Operator,))
    if isinstance(value, Operator):
        return _unchanged(options, value)
    arguments: dict[str, Any] = _arguments_of(options.target, value)
    if options.params is not None:
        arguments["params"] = options.params
    if options.train_mode:
        arguments["training"] = True
    arguments.setdefault("seed", options.seed)
    _refuse_unsharded(options.target, arguments.get("model"))
    try:
        signature(Operator).bind(**arguments)
    except TypeError as error:
        raise CommandError(f"{options.target} gives a dict that does not fit: {error}. Its keys are arguments of "
                           "pipeline.curvature.Hessian: model, data, loss_fn, params, training, ...") from error
    return MATRICES[options.matrix or "hessian"](**arguments)


def _unchanged(options: SimpleNamespace, operator: Operator) -> Operator:
    settings = {"--matrix": options.matrix, "--params": options.params, "--train-mode": options.train_mode or None}
    conflicts = [option for option, setting in settings.items() if setting is not None]
    if conflicts:
        raise CommandError(
            f"{options.target} gives an operator, {operator!r}, which leaves nothing to say for "
            f"{', '.join(conflicts)}. Drop them, or return (model, data, loss_fn)."
        )
    _refuse_unsharded(options.target, operator.pipe)
    return operator


def _arguments_of(target: str, value: Any) -> dict[str, Any]:
    """The arguments of an operator."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, tuple) and len(value) == 3:
        return dict(zip(("model", "data", "loss_fn"), value, strict=True))
    description = f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple) else "")
    raise CommandError(
        f"{target} gives {description}. Return (model, data, loss_fn), a dict of an operator's arguments, or an "
        "operator."
    )


def _refuse_unsharded(target: str, model: Any) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    is_cut = isinstance(model, Pipe) and model.runtime.topology is not None
    if ranks > 1 and isinstance(model, nn.Module) and not is_cut:
        raise CommandError(
            f"there are {ranks} processes, and {target} gives a model that each of them has whole. Return a Pipe, "
            "Pipe(model, balance, chunks), without devices=; or run it without torchrun."
        )


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


_query = partial(click.option, is_flag=False)  # an option that may stand without a value: it has `flag_value` then


@click.command(context_settings={"max_content_width": 120}, short_help="Eigenvalues, trace, density of a Hessian.")
@click.argument("target")
@click.option("--matrix", type=click.Choice(list(MATRICES)), help="Default: hessian.")
@click.option("--params", type=_names, metavar="NAMES", help="Of layers or parameters: 0,3.weight; default: all that "
              "require a gradient.")
@click.option("--train-mode", is_flag=True, help="With dropout and the like; default: eval mode.")
@click.option("--check", is_flag=True, help="Try the laws of second derivatives first; if one is broken, compute "
              "nothing else and end with status 1.")
@_query("--top", metavar="[K]", flag_value=1, type=_COUNT, help="K outermost eigenvalues; alone: 1.")
@_query("--trace", metavar="[N]", flag_value=_AS_SAMPLES, type=_products, help="The trace, by N products; alone: "
        "--samples.")
@_query("--layers", metavar="[K]", flag_value=1, type=_COUNT, help="K eigenvalues (alone: 1) and the trace of each "
        "layer's own block.")
@_query("--density", metavar="[FILE]", flag_value="", help="How the eigenvalues are spread; FILE (.png, .svg, .pdf) "
        "gets the picture.")
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
    for option, question in {"resume": "top", "max_products": "top", "rel": "trace"}.items():
        if options[option] is not None and options[question] is None:
            raise CommandError(f"--{option.replace('_', '-')} is for --{question}. Add --{question}, or leave it out.")
    return answer(SimpleNamespace(**options))
