"""The matrices, Hessian, Gauss-Newton and Fisher, by the cotangents that the last stage sends back.

    Hessian          H = d2L                       l = dL/dy and its tangent l'
    GaussNewton      G = J^T (d2L/dy2) J           u = (d2L/dy2) y'
    EmpiricalFisher  F = (1/c) sum_n g_n g_n^T     u_n = (dL_n/dy . y'_n) dL_n/dy, row by row

Schraudolph (2002) for the second; for the third the loss of row n is L_n, its gradient g_n, and c what the mini-batch's
loss divides by: the rows of a mean, the count of (sum, count), 1 for a sum.
"""

from __future__ import annotations

from enum import Enum

from torch import Tensor


class Rule(Enum):
    """The matrices, with their names."""

    HESSIAN = "Hessian"
    GAUSS_NEWTON = "Gauss-Newton"
    FISHER = "empirical Fisher"


def row_by_row(grads: list[Tensor | None], tangents: list[Tensor], share: float) -> list[Tensor | None]:
    """The Fisher's cotangents.

    Args:
        grads: of the loss, at each tensor of the output; each row's is `share` times that of its own loss.
        tangents: of the same tensors.
    """
    live = [(grad, tangent) for grad, tangent in zip(grads, tangents, strict=True) if grad is not None]
    along: Tensor | float = 0.0
    for grad, tangent in live:  # a row may have parts in several tensors
        along = along + (grad * tangent).flatten(1).sum(1) if grad.dim() > 1 else along + grad * tangent
    assert isinstance(along, Tensor)  # a loss that depends on nothing has been left out
    factors = along / share
    return [None if grad is None else grad * factors.view(-1, *[1] * (grad.dim() - 1)) for grad in grads]
