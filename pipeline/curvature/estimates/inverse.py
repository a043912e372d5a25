"""The inverse of a matrix, as a matrix that estimators take.

    vectors --products--> (A + damping I)^-1 times each: linear systems, solved together (systems.py)

So its density, trace or eigenpairs are found as those of any matrix: each product costs some tens of A's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pipeline.common.arguments import check_count
from pipeline.curvature.estimates.arguments import check_tol
from pipeline.curvature.estimates.systems import METHODS, VecLike, scales_of, solved
from pipeline.curvature.linear import LinearMap
from pipeline.curvature.space import Vec


class ConvergenceError(RuntimeError):
    """A linear system was not solved to the tolerance that was asked for."""


class Inverse(LinearMap):
    """The inverse of A + damping I: each of its products is a linear system, solved when it is asked for.

    Args:
        A, damping, tol, max_products, preconditioner, method: see `solve`.

    Attributes:
        map: A.
        limit: on A's products, for each system.
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
        if method not in METHODS:
            raise ValueError(f"method must be 'cg' or 'minres' (method: {method!r})")
        if not math.isfinite(damping):
            raise ValueError(f"damping must be finite (damping: {damping})")
        check_tol(tol)
        self.limit = check_count("max_products", 1000 if max_products is None else max_products, least=2)
        self.map, self.space, self.block = A, A.space, A.block
        self.damping, self.tol, self.method = float(damping), float(tol), method
        self.scales = None if preconditioner is None else scales_of(A, preconditioner, damping)
        self.name = f"inverse of ({A.name} + {self.damping:g} I)"

    @property
    def eps(self) -> float:
        """Of the vectors' entries: what rounding leaves."""
        return torch.finfo(self.space.dtype).eps

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
        weight = "none" if self.scales is None else repr(self.space.norm(self.scales))
        settings = f"{self.damping!r} {self.tol!r} {self.limit} {self.method}"
        return f"inverse {settings} {weight} of {self.map.fingerprint()}"
