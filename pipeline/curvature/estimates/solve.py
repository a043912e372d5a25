"""The solution x of (A + damping I) x = b, where A is known by its products only; and the inverse, as a matrix.

    b by name or as a vector --systems.py--> x, true residual, products --> Solution: x by name, how good, how dear
    vectors --Inverse.products--> (A + damping I)^-1 times each: linear systems, solved together

So the inverse's density, trace or eigenpairs are found as those of any matrix: each product costs some tens of A's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.common.arguments import check_count, check_number
from pipeline.curvature.estimates.resume import Resumable
from pipeline.curvature.estimates.sampling import check_tol
from pipeline.curvature.estimates.systems import METHODS, VecLike, scales_of, solved, vector_from
from pipeline.curvature.linear import LinearMap
from pipeline.curvature.results.result import Result
from pipeline.curvature.space import Space, Vec


class ConvergenceError(RuntimeError):
    """A linear system was not solved to the tolerance that was asked for."""


class Inverse(LinearMap):
    """The inverse of A + damping I: each of its products is a linear system, solved when it is asked for.

    Args:
        A, damping, tol, max_products, preconditioner, method: see `solve`.

    Attributes:
        map: A.
        limit: on A's products, for each system.
        eps: of the vectors' entries: what rounding leaves.
        scales: the preconditioner: about the inverse of the diagonal of A + damping I, all above 0.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> model = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
        >>> x, y = torch.diag(torch.tensor([1.0, 2.0, 3.0])).double(), torch.zeros(3, 1).double()
        >>> H = Hessian(model, (x, y), nn.MSELoss(reduction="sum"))  # diag(2, 8, 18)
        >>> (Inverse(H, damping=2.0) @ torch.ones(3)).round(decimals=6).tolist()
        [0.25, 0.1, 0.05]
    """

    def __init__(
        self,
        A: LinearMap,
        *,
        damping: float = 0.0,
        tol: float = 1e-6,
        max_products: int | None = None,
        preconditioner: VecLike | None = None,
        method: str = "cg",
    ) -> None:
        if method not in list(METHODS):
            raise ValueError(f"method must be 'cg' or 'minres' (method: {method!r})")
        if not math.isfinite(check_number("damping", damping)):
            raise ValueError(f"damping must be finite (damping: {damping})")
        check_tol(tol)
        self.limit = check_count("max_products", 1000 if max_products is None else max_products, least=2)
        self.map, self.space, self.block = A, A.space, A.block
        self.damping, self.tol, self.method = float(damping), float(tol), method
        self.eps = torch.finfo(self.space.dtype).eps
        self.scales = None if preconditioner is None else scales_of(A, preconditioner, damping)
        self.name = f"inverse of ({A.name} + {self.damping:g} I)"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by which its products are found, but for the preconditioner."""
        return {"damping": self.damping, "tol": self.tol, "max_products": self.limit, "method": self.method}

    def scaled(self, vec: Vec) -> Vec:
        """The preconditioner times a vector: a new one, or the same where there is none."""
        return vec if self.scales is None else [part * scale for part, scale in zip(vec, self.scales, strict=True)]

    def products(self, vectors: Sequence[Vec]) -> list[Vec]:
        """The solution for each of some right-hand sides.

        Raises:
            ConvergenceError: a system was not solved to the tolerance; the result would be another matrix.
            IndefiniteError, FloatingPointError: see `solve`.
        """
        results = solved(self, vectors)
        worst = max((result.residual for result in results), default=0.0)
        if not worst <= self.tol:
            raise ConvergenceError(
                f"{self.name}: relative residual {worst:.2g} after {max(result.products for result in results)} "
                f"products, tol {self.tol:.2g}, max_products {self.limit}. "
                "Use more damping, more products, a preconditioner or a larger tol."
            )
        return [result.x for result in results]

    def fingerprint(self) -> str:
        return f"inverse {self.settings} {_digest(self.space, self.scales)} of {self.map.fingerprint()}"


@dataclass(frozen=True, eq=False)
class Solution(Result):
    """The solution of one linear system, as far as it was found.

    Attributes:
        matrix: the name of the matrix A.
        x: by the parameters' names, in their shapes, on the CPU; over ranks those of this process.
        residual: `|b - (A + damping I) x| / |b|`, computed from x by a product.
        converged: whether the residual is at most tol.
        products: with the matrix, for this system.
        damping, tol: as they were given.
        method: "cg" or "minres".
    """

    matrix: str
    x: dict[str, Tensor]
    residual: float
    converged: bool
    products: int
    damping: float
    tol: float
    method: str

    def lines(self) -> Iterator[str]:
        yield f"solution of ({self.matrix} + {self.damping:g} I) x = b by {self.method}"
        yield f"  relative residual {self.residual:9.2g}   tol {self.tol:.2g}"
        yield f"  products          {self.products:9d}"
        if not self.converged:
            yield "  NOT CONVERGED: give it more damping, products (max_products) or a preconditioner, or a larger tol"


def solve(
    A: LinearMap,
    b: VecLike,
    *,
    start: VecLike | None = None,
    damping: float = 0.0,
    tol: float = 1e-6,
    max_products: int | None = None,
    preconditioner: VecLike | None = None,
    method: str = "cg",
    show: bool | None = None,
    resume: str | os.PathLike[str] | None = None,
    save_every: float = 300.0,
) -> Solution:
    """Solves (A + damping I) x = b.

    The true residual decides: where the recurrence has drifted away from it, it begins again from there, as long as
    that halves the residual at least. A result that is not `converged` says so; nothing is raised.

    Args:
        A: a symmetric matrix.
        b: the right-hand side: its entries by name, or in one process as a flat tensor; or a vector of A's space.
        damping: added to all eigenvalues of A; 0 by default.
        tol: of `|b - (A + damping I) x| / |b|`. 1e-6 by default; in float32 hardly less.
        max_products: with A, at least 2; 1000 if None.
        preconditioner: A's diagonal, about (damping is added to it here): one entry for each of b, such that
            entry + damping is above 0. Helps where the diagonal's entries differ much in size.
        start: a guess of x; zeros if None.
        method: "cg", the default, conjugate gradients, for A + damping I positive definite; "minres" for any that has
            an inverse; it leaves alone what lies along eigenvalues below about 3e-8 of the largest, in float32 below
            7e-4.
        show: a progress bar, on one process. None: where it goes to a terminal.
        resume, save_every: a file from which an interrupted run goes on, and seconds; see `top_eigenpairs`.

    Raises:
        IndefiniteError: by "cg", where A + damping I is not positive definite.
        FloatingPointError: a product, or b, has entries that are not finite.
        ValueError: an argument is out of its range, or a vector does not fit.
        ResumeError: the file is of another run, of another b or start among others, or cannot be read.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline.curvature import Hessian
        >>> model = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
        >>> x, y = torch.diag(torch.tensor([1.0, 2.0, 3.0])).double(), torch.zeros(3, 1).double()
        >>> H = Hessian(model, (x, y), nn.MSELoss(reduction="sum"))  # diag(2, 8, 18)
        >>> solution = solve(H, {"0.weight": torch.tensor([[4.0, 20.0, 20.0]])}, damping=2.0)
        >>> solution.converged, solution.x["0.weight"].round(decimals=6).tolist()
        (True, [[1.0, 2.0, 1.0]])
    """
    system = Inverse(
        A, damping=damping, tol=tol, max_products=max_products, preconditioner=preconditioner, method=method
    )
    vec, guess = vector_from(A.space, b, "b"), None if start is None else vector_from(A.space, start, "start")
    settings = {} if resume is None else _settings(system, vec, guess)
    title = f"solve with {A.name}"
    with Resumable(A, title, None, settings, show=show, resume=resume, save_every=save_every) as run:
        (result,) = solved(system, [vec], guess, run)
    return Solution(
        matrix=A.name,
        x=A.space.on_host(result.x),
        residual=result.residual,
        converged=result.residual <= system.tol,
        products=result.products,
        damping=system.damping,
        tol=system.tol,
        method=system.method,
    )


def _settings(system: Inverse, b: Vec, start: Vec | None) -> dict[str, Any]:
    """The traits that must be the same for a run to go on."""
    return {
        "file": "solve 5", **system.settings, "block": system.block, "b": _digest(system.space, b),
        "start": _digest(system.space, start), "preconditioner": _digest(system.space, system.scales),
    }  # fmt: skip


def _digest(space: Space, vec: Vec | None) -> list[float]:
    """Numbers that hardly two vectors have in common, the same on all processes: a norm, and a product with noise."""
    noise = space.random("normal", 0, 0)
    return [] if vec is None else space.paired_dots([(vec, vec), (vec, noise)]).tolist()
