"""The estimators as methods of a matrix that is known by its products.

    H.top_eigenpairs(5)  H.trace()  H.layer_traces()  H.diagonal()  H.frobenius_squared()  H.density()
    H.solve(b)  H.inverse(damping=1e-3) @ v  H.to_scipy()

Each is a function of its own module, of which the matrix is the first argument.
"""

from __future__ import annotations

from pipeline.curvature.by_layers import layer_densities, per_layer
from pipeline.curvature.estimates.density import density
from pipeline.curvature.estimates.diagonal import diagonal
from pipeline.curvature.estimates.eigenpairs import top_eigenpairs
from pipeline.curvature.estimates.frobenius import frobenius_squared
from pipeline.curvature.estimates.inverse import Inverse
from pipeline.curvature.estimates.layer_traces import layer_traces
from pipeline.curvature.estimates.scipy_operator import to_scipy
from pipeline.curvature.estimates.solve import solve
from pipeline.curvature.estimates.systems import VecLike
from pipeline.curvature.estimates.trace import trace
from pipeline.curvature.linear import LinearMap


class Analysis(LinearMap):
    """A matrix with estimators. Over ranks every process makes the same calls."""

    top_eigenpairs = top_eigenpairs
    trace = trace
    layer_traces = layer_traces
    per_layer = per_layer
    layer_densities = layer_densities
    diagonal = diagonal
    frobenius_squared = frobenius_squared
    density = density
    solve = solve
    to_scipy = to_scipy

    def inverse(
        self,
        damping: float = 0.0,
        *,
        tol: float = 1e-6,
        max_products: int | None = None,
        preconditioner: VecLike | None = None,
        method: str = "cg",
    ) -> Inverse:
        """(A + damping I)^-1, whose products with vectors are linear systems: `H.inverse(1e-3) @ v`.

        Args:
            damping, tol, max_products, preconditioner, method; see `solve`.
        """
        return Inverse(
            self, damping=damping, tol=tol, max_products=max_products, preconditioner=preconditioner, method=method
        )
