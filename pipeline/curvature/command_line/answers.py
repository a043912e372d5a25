"""What does `python -m pipeline curvature` answer?

    Namespace --target.py--> operator --> check, top, trace, layers, density, in this order
                                                  each: words on rank 0's stdout, and a file in --save
    status: 0; 1 where --check finds something wrong

Over ranks every process computes; the eigenvectors are sharded, so each saves its own.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from pipeline.curvature.command_line.target import operator_of
from pipeline.curvature.estimates.eigenpairs import Eigenpairs
from pipeline.curvature.estimates.ritz import WHICH
from pipeline.curvature.operators import Operator
from pipeline.curvature.results.layers import LayerSpectra
from pipeline.curvature.results.result import Result
from pipeline.curvature.results.tables import aligned, with_error
from scheduler.command_line.arguments import CommandError
from scheduler.command_line.tables import show as show_with_rich

__all__ = ["curvature"]

Found = TypeVar("Found", bound=Result)


def curvature(args: Namespace) -> int:
    """Answers all that a command asks.

    Returns:
        The exit status.

    Raises:
        CommandError: what is asked cannot be.
    """
    _check_files(args)
    A = operator_of(args)
    answers = _Answers(A, args)
    answers.say(_about(A))
    if args.check and not answers.give("check", A.check(seed=args.seed)).ok:
        answers.wait()
        return 1
    show = False if args.quiet else None
    if args.top is not None:
        found = A.top_eigenpairs(
            args.top, which=args.which, tol=args.tol, max_products=args.max_products, seed=args.seed,
            resume=args.resume, show=show,
        )
        answers.give("top", found, _show_eigenvalues)
    if args.trace is not None:
        answers.give("trace", A.trace(args.trace, rel=args.rel, seed=args.seed, show=show))
    if args.layers is not None:
        blocks = A.per_layer(
            args.layers, samples=args.samples, which=args.which, tol=args.tol, seed=args.seed, show=show
        )
        answers.give("layers", blocks, _show_layers)
    if args.density is not None:
        spectrum = A.density(steps=args.steps, runs=args.runs, seed=args.seed, show=show)
        answers.give("density", spectrum)
        answers.picture(spectrum, args.density)
    answers.wait()
    return 0


class _Answers:
    """Where answers go: words to rank 0's stdout, results into a folder."""

    def __init__(self, A: Operator, args: Namespace) -> None:
        self._space, self._folder = A.space, args.save
        self._speaks = A.space.rank == 0

    def say(self, words: str) -> None:
        if self._speaks:
            print(words, flush=True)

    def give(self, name: str, found: Found, show: Callable[[Found], None] | None = None) -> Found:
        """Show a result, and save it; the result."""
        self.say("")
        if self._speaks and show is not None:
            show(found)
            sys.stdout.flush()
        elif self._speaks:
            print(found, flush=True)
        if self._folder is not None:
            self._save(name, found)
        return found

    def picture(self, found: Result, path: str) -> None:
        if path and self._speaks:
            found.plot(path)
            print(f"  picture in {path}", flush=True)

    def wait(self) -> None:
        """For rank 0 to have said all: a rank that ends with a status ends the others under torchrun."""
        if self._space.ranks > 1:
            self._space.sum_over(torch.zeros(1, dtype=torch.float64))

    def _save(self, name: str, found: Result) -> None:
        if isinstance(found, Eigenpairs) and self._space.ranks > 1:  # each has its part of the vectors
            found.save(self._folder / f"{name}.rank{self._space.rank}.npz")
        elif self._speaks:
            found.save(self._folder / f"{name}.npz")


def _check_files(args: Namespace) -> None:
    """What would fail after hours fails now."""
    if args.density:
        if Path(args.density).suffix.lower() not in (".png", ".svg", ".pdf"):
            raise CommandError(f"a picture goes to a file named *.png, *.svg or *.pdf (--density {args.density}).")
        if importlib.util.find_spec("matplotlib") is None:
            raise CommandError(
                'pictures need matplotlib, which is not installed: pip install "penstock-torch[curvature]"'
            )
        if not Path(args.density).resolve().parent.is_dir():
            raise CommandError(f"cannot write {args.density}: its folder is not there. Make it first.")
    if args.save is not None:
        try:
            args.save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"cannot make the folder {args.save}: {error.strerror}. Give another.") from None


def _about(A: Operator) -> str:
    ranks = f" over {A.space.ranks} ranks" if A.space.ranks > 1 else ""
    steepness = A.space.norm(A.space.vec(A.gradient()))
    return (
        f"{A!r}, {A.stages} stage{'s' if A.stages > 1 else ''}{ranks}\n"
        f"loss {A.loss().item():.6g}, norm of the gradient {steepness:.3g}"
    )


def _show_eigenvalues(found: Eigenpairs) -> None:
    print(f"{len(found.values)} of the {found.matrix}'s eigenvalues, {WHICH[found.which]}; {found.products} products")
    pairs = list(zip(found.values.tolist(), found.residuals.tolist(), strict=True))
    cells = [
        [str(place), f"{value:+.6g}", f"{residual * found.scale:.1e}", f"{residual:.1e}"]
        for place, (value, residual) in enumerate(pairs, 1)
    ]
    _show(["", "eigenvalue", "error at most", "relative residual"], cells,
          ["" if residual <= found.tol else "dim" for _, residual in pairs])
    if not found.converged:
        print(f"NOT CONVERGED: {found.why}")


def _show_layers(found: LayerSpectra) -> None:
    print(f"{found.matrix} by layers: each layer's own block")
    heads = ["layer", "rows", *(f"eigenvalue {place + 1}" for place in range(found.values.shape[1]))]
    columns = [*zip(found.values.T.tolist(), found.value_errors.T.tolist(), strict=True)]
    if found.traces is not None and found.trace_errors is not None:
        heads += ["trace", "mean eigenvalue"]
        means = [value / size for value, size in zip(found.traces.tolist(), found.sizes, strict=True)]
        columns += [(found.traces.tolist(), found.trace_errors.tolist()), (means, [math.inf] * len(means))]
    cells = [
        [name, f"{size:,}", *(with_error(values[row], errors[row]) for values, errors in columns)]
        for row, (name, size) in enumerate(zip(found.names, found.sizes, strict=True))
    ]
    _show(heads, cells)


def _show(columns: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """A table; without rich a plain one."""
    try:
        show_with_rich(columns, rows, styles)
    except CommandError:
        print(*aligned([columns, *rows]), sep="\n")
