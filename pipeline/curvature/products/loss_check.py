"""A check of the loss's own second derivative, by the output, against finite differences of its gradient.

    d random:   [g(y + e d) - g(y - e d)] / 2e   against   (d2L/dy2) d        g(y) = dL/dy, of one chunk
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from pipeline.common.twice import refuse_once_differentiable
from pipeline.curvature.products.finite_differences import Precision, compared, least, norm
from pipeline.data.pytrees import Grads
from pipeline.stage.stage_rule import gradients_of

GradientAt: TypeAlias = Callable[[Sequence[Tensor], bool], Grads]  # (output's tensors, create_graph)
LOSS = -1  # its index, where stages have theirs


def loss_error(output: Sequence[Tensor], gradient_at: GradientAt) -> tuple[float, Precision]:
    """The relative error of the loss's second derivative along a random direction, and its precision.

    Args:
        output: the tensors that it is computed on.
        gradient_at: its gradient at others like these.

    Raises:
        ValueError: it has an autograd.Function that is marked as not differentiable.
    """
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in output]
    live = [leaf for leaf in leaves if leaf.requires_grad]
    generator = torch.Generator("cpu").manual_seed(0)
    along = [torch.randn(leaf.shape, generator=generator, device="cpu").to(leaf) for leaf in live]
    grads = gradient_at(leaves, True)
    refuse_once_differentiable("loss_fn", grads)
    derivative = hessian_times(grads, live, along)
    precision = Precision.of([leaf.dtype for leaf in live])

    def values_at(step: float) -> list[Tensor | None]:
        directions = iter(along)
        moved = [leaf.detach() + step * next(directions) if leaf.requires_grad else leaf for leaf in leaves]
        points = [tensor.requires_grad_(leaf.requires_grad) for tensor, leaf in zip(moved, leaves, strict=True)]
        return [None if grad is None else grad.detach() for grad in gradient_at(points, False)]

    def error_at(step: float) -> tuple[float, float]:
        return compared(values_at(step), values_at(-step), derivative, step, precision.eps)

    return least(error_at, precision.step(norm(live), norm(along)), precision.limit), precision


def hessian_times(grads: Grads, leaves: Sequence[Tensor], tangents: Sequence[Tensor]) -> Grads:
    """The loss's own Hessian times tangents of the output.

    Args:
        grads: of the loss at the leaves, with their graph.
        leaves: the output's tensors that depend on a parameter.
        tangents: of these.
    """
    pairs = [
        (grad, tangent) for grad, tangent in zip(grads, tangents, strict=True)
        if grad is not None and grad.requires_grad
    ]
    # By symmetry the derivative of <grad, tangent> is the Hessian times the tangent.
    return gradients_of([grad for grad, _ in pairs], leaves, [tangent for _, tangent in pairs])
