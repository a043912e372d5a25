"""The answers of `penstock curvature`.

    options --target.py--> operator --> check, top, trace, layers, density, in this order
                                                  each: words on rank 0's stdout, and a file in --save
    status: 0; 1 where --check finds something wrong

Over ranks every process computes; the eigenvectors are sharded, so each saves its own.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import torch

from pipeline.curvature.command_line.target import operator_of
from pipeline.curvature.estimates.eigenpairs import Eigenpairs
from pipeline.curvature.operators import Operator
from pipeline.curvature.results.result import Result
from pipeline.curvature.space import HOST
from scheduler.command_line.running import CommandError

__all__ = ["answer"]

ResultT = TypeVar("ResultT", bound=Result)


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
    output = _CommandOutput(A, options)
    output.say(_about(A))
    if options.check and not output.give("check", A.check(seed=options.seed)).ok:
        output.wait()
        return 1
    seed, show = options.seed, False if options.quiet else None
    if options.top is not None:
        pairs = A.top_eigenpairs(
            options.top, which=options.which, tol=options.tol, max_products=options.max_products, seed=seed,
            resume=options.resume, show=show,
        )
        output.give("top", pairs)
    if options.trace is not None:
        output.give("trace", A.trace(options.trace, rel=options.rel, seed=seed, show=show))
    if options.layers is not None:
        spectra = A.per_layer(
            options.layers, samples=options.samples, which=options.which, tol=options.tol, seed=seed, show=show
        )
        output.give("layers", spectra)
    if options.density is not None:
        spectrum = A.density(steps=options.steps, runs=options.runs, seed=seed, show=show)
        output.give("density", spectrum)
        output.picture(spectrum, options.density)
    output.wait()
    return 0


class _CommandOutput:
    """The output of a command: text on rank 0's stdout, results in a folder."""

    def __init__(self, A: Operator, options: SimpleNamespace) -> None:
        self._space, self._folder = A.space, options.save
        self._speaks = A.space.rank == 0

    def say(self, words: str) -> None:
        if self._speaks:
            print(words, flush=True)

    def give(self, name: str, result: ResultT) -> ResultT:
        """Show a result, and save it; the result."""
        self.say(f"\n{result}")
        if self._folder is not None:
            self._save(self._folder, name, result)
        return result

    def picture(self, result: Result, path: str) -> None:
        if path and self._speaks:
            result.plot(path)
            print(f"  picture in {path}", flush=True)

    def wait(self) -> None:
        """For rank 0 to have said all: a rank that ends with a status ends the others under torchrun."""
        if self._space.ranks > 1:
            self._space.sum_over(torch.zeros(1, **HOST))

    def _save(self, folder: Path, name: str, result: Result) -> None:
        if isinstance(result, Eigenpairs) and self._space.ranks > 1:  # each has its part of the vectors
            result.save(folder / f"{name}.rank{self._space.rank}.npz")
        elif self._speaks:
            result.save(folder / f"{name}.npz")


def _check_files(options: SimpleNamespace) -> None:
    """Raise now for files that could not be written after hours."""
    picture = options.density
    if picture:
        if Path(picture).suffix.lower() not in (".png", ".svg", ".pdf"):
            raise CommandError(f"a picture goes to a file named *.png, *.svg or *.pdf (--density {picture}).")
        if importlib.util.find_spec("matplotlib") is None:
            raise CommandError(
                'pictures need matplotlib, which is not installed: pip install "penstock-torch[curvature]"'
            )
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
