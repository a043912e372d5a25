"""The answers of `penstock curvature`.

    options --target.py--> operator --> check, top, trace, layers, density, in this order
                                                  each: words on rank 0's stdout, and a file in --save
    status: 0; 1 where --check finds something wrong

Over ranks every process computes; the eigenvectors are sharded, so each saves its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from pipeline.curvature.checking import Report
from pipeline.curvature.command_line.target import operator_of
from pipeline.curvature.estimates.eigenpairs import Eigenpairs
from pipeline.curvature.operators import Operator
from pipeline.curvature.results.plots import check_suffix
from pipeline.curvature.results.result import Result
from scheduler.command_line.running import CommandError
from scheduler.plotting import matplotlib


def answer(options: SimpleNamespace) -> int:
    """Answers all that a command asks.

    Args:
        options: the command's, by the names that it has in command.py; None: not asked for.

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
