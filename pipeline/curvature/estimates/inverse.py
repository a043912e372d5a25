"""The inverse of a matrix, as a matrix that estimators take.

    vectors --products--> (A + damping I)^-1 times each: linear systems, solved together (systems.py)

So its density, trace or eigenpairs are found as those of any matrix: each product costs some tens of A's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.common.arguments import check_count
from pipeline.curvature.estimates.arguments import check_tol
from pipeline.curvature.estimates.recurrences import LinearSystem
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
        system: the system that its products solve.

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
        limit = 1000 if max_products is None else max_products
        check_count("max_products", limit, least=2)  # a step and a check
        scales = None if preconditioner is None else scales_of(A, preconditioner, damping)
        self._map, self.space, self.block = A, A.space, A.block
        self.system = LinearSystem(A.name, float(damping), A.space.dtype, scales, float(tol), limit, method)
        self.name = f"inverse of ({A.name} + {self.system.damping:g} I)"

    def products(self, vectors: Sequence[Vec]) -> list[Vec]:
        """The solution for each of some right-hand sides.

        Raises:
            ConvergenceError: a system was not solved to the tolerance; the result would be another matrix.
            IndefiniteError, FloatingPointError: see `solve`.
        """
        results = solved(self._map, self.system, vectors)
        worst = max((result.residual for result in results), default=0.0)
        if not worst <= self.system.tol:
            raise ConvergenceError(
                f"{self.name}: relative residual {worst:.2g} after {max(result.products for result in results)} "
                f"products, tol {self.system.tol:.2g}, max_products {self.system.limit}. "
                "Use more damping, more products, a preconditioner or a larger tol."
            )
        return [result.x for result in results]

    def fingerprint(self) -> str:
        scales = self.system.scales
        weight = "none" if scales is None else repr(self.space.norm(scales))
        settings = f"{self.system.damping!r} {self.system.tol!r} {self.system.limit} {self.system.method}"
        return f"inverse {settings} {weight} of {self._map.fingerprint()}"
