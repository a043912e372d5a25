"""The outermost eigenvalues of a matrix that is known by its products only, and their eigenvectors.

    top_eigenpairs --> LanczosRun (lanczos.py): steps until done, or until max_products --> k vectors
                   --> one more product of each: the residuals that are reported --> Eigenpairs
                   <--> Resumable (resume.py): a run that was interrupted goes on
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.common.arguments import check_count, check_number, shown
from pipeline.curvature.estimates.lanczos import EigenpairGoal, LanczosRun
from pipeline.curvature.estimates.resume import Resumable
from pipeline.curvature.estimates.ritz import WHICH, wanted
from pipeline.curvature.estimates.sampling import check_tol
from pipeline.curvature.linear import LinearMap, products_of
from pipeline.curvature.results.result import Result
from pipeline.curvature.results.tables import table
from pipeline.curvature.space import HOST, add_
from scheduler.errors import whole


@dataclass(frozen=True, eq=False)
class Eigenpairs(Result):
    """Some eigenvalues of a symmetric matrix, with their vectors.

    Attributes:
        matrix: the matrix's name.
        which: "LM", "LA", "SA" or "BE".
        values: [k], the most wanted first; for "BE" the largest first. Each is x'Ax of its vector.
        vectors: for each value this process's entries by the parameters' names, in their shapes, on the CPU. Of norm 1
            and at right angles, over all processes.
        residuals: `|A x - value x| / scale`, [k], of products that were made for this and for nothing else. There is an
            eigenvalue of A within `residuals * scale` of each value, whatever else is true.
        scale: the largest magnitude of an eigenvalue that was seen: the norm of A, or little less for "LA" and "SA".
        products: how many were spent, those for the residuals among them.
        converged: all residuals are at most `tol`, and a last random start showed no eigenvalue that is missing.
        why: if not, for what reason; else empty.
        tol: what was asked for.
    """

    matrix: str
    which: str
    values: Tensor
    vectors: list[dict[str, Tensor]]
    residuals: Tensor
    scale: float
    products: int
    converged: bool
    why: str
    tol: float

    @property
    def error_bounds(self) -> Tensor:
        """[k], in units of eigenvalue: some eigenvalue of the matrix is no further from each value."""
        return self.residuals.double() * self.scale

    def lines(self) -> Iterator[str]:
        """Each value with its residual."""
        plural = "s" if len(self.values) > 1 else ""
        heading = f"{len(self.values)} eigenvalue{plural} of the {self.matrix}, {WHICH[self.which]}"
        yield f"{heading}; {self.products} products"
        pairs = enumerate(zip(self.values.tolist(), self.residuals.tolist(), strict=True), 1)
        yield from table(
            [[f"{place:>3}", f"{value:+.7e}", f"residual {residual:.1e}"] for place, (value, residual) in pairs]
        )
        yield "  residuals: |A x - value x|, relative to the largest magnitude seen, " + f"{self.scale:.3e}"
        if not self.converged:
            yield f"  NOT CONVERGED: {self.why}"

    def draw(self, ax: Any) -> None:
        """A stem for each value."""
        ax.stem(range(1, len(self.values) + 1), self.values.numpy())
        ax.set_xlabel(f"eigenvalues {WHICH[self.which]}")
        ax.set_ylabel("eigenvalue")
        ax.set_title(f"{self.matrix}" + ("" if self.converged else " (not converged)"))


def top_eigenpairs(
    A: LinearMap,
    k: int = 1,
    *,
    which: str = "LM",
    tol: float = 1e-6,
    max_products: int | None = None,
    seed: int = 0,
    block: int | None = None,
    max_basis: int | None = None,
    miss: float = 1e-4,
    show: bool | None = None,
    resume: str | os.PathLike[str] | None = None,
    save_every: float = 300.0,
) -> Eigenpairs:
    """The outermost eigenpairs of a symmetric matrix, by block Lanczos with full reorthogonalisation.

    Repeated eigenvalues come as often as they are: after k pairs have converged, Lanczos begins again from a random
    block at right angles to them, and ends when that start would have shown another one.

    Args:
        k: how many.
        which: "LM" largest magnitude, "LA" largest, "SA" smallest (most negative), "BE" both ends (of an odd k one
            more from the upper end).
        tol: for the residuals `|A x - value x|`, relative to the largest magnitude of an eigenvalue. An eigenvalue's
            error is about the square of it over its distance to the others.
        max_products: end there, converged or not; at least 2 k. None: as many as are needed.
        seed: of the random starts.
        block: vectors that are multiplied together; None: as many as suit A best. A larger block needs more products
            in all and fewer steps.
        max_basis: vectors to be held; the space is cut down to its best part when it is full (thick restart), which
            costs products. At least 2 k + 3 block; far better twice that. None: one for each product of a round.
        miss: how probable it may be, for each start, that an eigenvalue is missed that is more wanted than the last
            one found by more than max(tol, 1e-6, square root of the dtype's eps) of the largest (rounding aside; with
            `max_basis` it is a guide only). 1: do not look for any, which halves the products and shows `block` copies
            of an eigenvalue at most.
        show: a progress bar, on one process. None: where it goes to a terminal.
        resume: a file (over several processes one each, `.rank{r}of{n}` before the suffix). The state is saved there
            every `save_every` seconds, at an exception, and at `max_products`. If there is such a file already, the
            run goes on from it, and gives to the bit what it would have given without the interruption. A run that
            is done deletes its file; one that ended at `max_products` keeps it, to go on with a larger number.
        save_every: seconds.

    Raises:
        ValueError: k, which, tol or another argument makes no sense; ResumeError: the file is another run's.
        FloatingPointError: a product is not finite.

    Memory, in vectors: the basis, which is one for each product of a round, or `max_basis`; and `block` products. At
    the end k more. Time: the products; with each the basis is read four times, and there are three all-reduces, of as
    many numbers as it has rows.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> model = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
        >>> x, y = torch.diag(torch.tensor([3.0, 1.0, 3.0])).double(), torch.zeros(3, 1).double()
        >>> H = Hessian(model, (x, y), nn.MSELoss(reduction="sum"))  # diag(18, 2, 18)
        >>> top = top_eigenpairs(H, 3)
        >>> [round(value, 6) for value in top.values.tolist()], top.converged
        ([18.0, 18.0, 2.0], True)
    """
    goal = EigenpairGoal(k, which, tol, seed, A.block if block is None else block, max_basis, miss)
    goal = _checked(A, goal, max_products)
    title, settings = f"eigenpairs of the {A.name}", {"file": "eigenpairs 4", **vars(goal)}
    if max_products is not None:  # the settings are those of a call that goes on with more
        goal = replace(goal, block=min(goal.block, max_products - 2 * goal.k + 1))
    with Resumable(A, title, max_products, settings, show, resume, save_every) as resumable:
        run = LanczosRun(A, goal, resumable.saved_state)
        _advance(run, max_products, resumable.record)
        resumable.is_done = run.current.done
        return _measured(run, resumable.advance)


def _checked(A: LinearMap, goal: EigenpairGoal, max_products: int | None) -> EigenpairGoal:
    """The goal with numbers that fit the matrix.

    Raises:
        TypeError: an argument is no number, or no whole one.
        ValueError: it makes no sense.
    """
    size, k = A.space.size, whole(goal.k)
    if k is None:
        raise TypeError(f"k is {shown(goal.k)}. Give a whole number.")
    for name, count in ("max_products", max_products), ("max_basis", goal.most):
        if count is not None:
            check_count(name, count)
    if not 1 <= k <= size:
        raise ValueError(f"k is {k}: the {A.name} has {size} eigenvalues; ask for 1 to {size}.")
    if goal.which not in WHICH:
        words = ", ".join(f"{key!r} ({words})" for key, words in WHICH.items())
        raise ValueError(f"which is {goal.which!r}: use {words}.")
    check_tol(goal.tol)
    if not 0 < check_number("miss", goal.miss) <= 1:
        raise ValueError(f"miss is {goal.miss}: it is a probability, above 0; use 1 to look for no missing eigenvalue.")
    if max_products is not None and max_products < 2 * k:
        raise ValueError(
            f"max_products is {max_products}: {k} eigenpairs take {2 * k} at least, {k} to find directions and {k} to "
            "measure the residuals."
        )
    block = min(check_count("block", goal.block), size)
    most = None if goal.most is not None and goal.most >= size else goal.most  # it cannot be full
    if most is not None and most < 2 * k + 3 * block:
        raise ValueError(
            f"max_basis is {most}: {k} eigenpairs with blocks of {block} need 2 k + 3 block = {2 * k + 3 * block} "
            "vectors at least, and converge faster with more. Raise it, or lower block."
        )
    return replace(goal, k=k, block=block, most=most)


def _advance(run: LanczosRun, max_products: int | None, on_progress: Callable[..., None]) -> None:
    """Steps until the run is done, or the next one would leave too few products for the residuals."""
    note = ""
    while True:
        current = run.current
        on_progress(current.products, run.state(), note)
        least = current.products + current.waiting + run.goal.k  # after the next step
        if current.done or (max_products is not None and least > max_products):
            return
        note = f"{run.converged()} of {run.goal.k}, largest {run.current.largest:.4g}"
        run.step()  # and noted at once, so that an interrupt finds a state of these products


def _measured(run: LanczosRun, advance: Callable[..., None]) -> Eigenpairs:
    """The k best pairs, with residuals of new products."""
    goal, A = run.goal, run.map
    vecs = run.best()
    values, squares = [], []  # x'Ax of each x, and |A x - x (x'Ax)|^2
    for group, images in products_of(A, vecs):
        pairs = list(zip(group, images, strict=True))
        group_values = A.space.paired_dots(pairs).tolist()
        for (vec, image), value in zip(pairs, group_values, strict=True):
            add_(image, vec, -value)
        values += group_values
        squares += A.space.paired_dots(zip(images, images)).clamp(min=0.0).tolist()
        advance(len(images))
    order = wanted(torch.tensor(values, **HOST), goal.k, goal.which)
    scale = max(run.current.largest, *(abs(value) for value in values))
    residuals = torch.tensor(squares, **HOST)[order].sqrt() / max(scale, torch.finfo(A.space.dtype).tiny)
    why = _failure_reason(run, residuals)
    return Eigenpairs(
        matrix=A.name,
        which=goal.which,
        values=torch.tensor(values, **HOST)[order],
        vectors=[A.space.on_host(vecs[place]) for place in order],
        residuals=residuals,
        scale=scale,
        products=run.current.products + goal.k,
        converged=not why,
        why=why,
        tol=goal.tol,
    )


def _failure_reason(run: LanczosRun, residuals: Tensor) -> str:
    """The reason why the pairs are not converged."""
    worst = float(residuals.max())
    if not run.current.done:
        state = f"the worst residual is {worst:.1e}" if worst > run.goal.tol else "that none is missing is not sure yet"
        products = run.current.products + run.goal.k
        return f"stopped at max_products with {products} products; {state}. Raise max_products."
    if worst > run.goal.tol:
        return (
            f"rounding in {str(run.map.space.dtype).removeprefix('torch.')}: more products do not bring the worst "
            f"residual from {worst:.1e} down to {run.goal.tol:.1e}."
        )
    return ""
