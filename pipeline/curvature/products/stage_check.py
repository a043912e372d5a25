"""Checks of a stage's rule, and of the loss, against finite differences of what they compute.

    along (h', v, l'):   [G(h + e h', w + e v, l + e l') - G(h - e h', w - e v, l - e l')] / 2e   against the rule's
    J^T A J:             [y(h + e h', w + e v) - y(h - e h', w - e v)] / 2e                       against y'
    loss, d random:      [g(y + e d) - g(y - e d)] / 2e       against (d2L/dy2) d      g(y) = dL/dy, of one chunk

G is the stage's plain first-order backward. Central differences, the longest step the cube root of the
precision in which the stage computes, relative to the sizes of point and direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from pipeline.common.twice import refuse_once_differentiable
from pipeline.curvature.known_bad import refuse_nodes
from pipeline.curvature.products.finite_differences import Precision, error_of, norm
from pipeline.curvature.products.task import ProductTask
from pipeline.data.pytrees import Bundle, Grads, Tree
from pipeline.data.tangents import Inbox
from pipeline.stage.layers import StageLayers
from pipeline.stage.stage_rule import ProductGraph, StageRule, gradients_of

FunctionAt: TypeAlias = Callable[[ProductGraph, Sequence[Tensor], float], Sequence[Tensor | None]]


class RuleCheck:
    """The check of the stages of one product: of those with an autograd.Function of the user's, or of all.

    Args:
        task: of the product.
        compares: whether stages that were confirmed earlier are checked again.
    """

    def __init__(self, task: ProductTask, compares: bool) -> None:
        self._task, self._compares = task, compares
        self._doubtful: dict[int, int] = {}  # stages, and the loss, that must be checked, and for which chunk

    def inspect(self, layers: StageLayers, chunk: int, graph: ProductGraph) -> bool:
        """Look at a chunk's graph, and note the first chunk of a stage that must be checked.

        Returns:
            Whether the stage has an autograd.Function of the user's.

        Raises:
            ValueError: an operation has a wrong second derivative.
        """
        return self._note(layers.index, chunk, refuse_nodes(layers.name, graph.roots))

    def _note(self, index: int, chunk: int, is_doubtful: bool) -> bool:
        is_confirmed = index in self._task.checks.confirmed
        if is_doubtful and self._task.checks.verify and (self._compares or not is_confirmed):
            self._doubtful.setdefault(index, chunk)
        return is_doubtful

    def is_asked(self, stage: int, chunk: int) -> bool:
        """Whether this chunk of a stage, or of the loss, is compared."""
        compared = 0 if self._task.on_result is not None else self._doubtful.get(stage)
        return chunk == compared and self._task.number > 0

    def confirm(
        self,
        stage: StageRule,
        chunk: int,
        inbox: Inbox,
        function_at: FunctionAt,
        derivative: Sequence[Tensor | None],
    ) -> None:
        """Compare a derivative with finite differences if `is_asked`. The arguments are those of `error_along`."""
        if not self.is_asked(stage.layers.index, chunk) or not derivative:  # nothing depends on a parameter
            return
        error, precision = error_along(stage, chunk, inbox, function_at, derivative)
        order = "" if function_at is of_output else "second "
        self._judge(stage.layers.index, stage.layers.name, error, precision, order)

    def check_loss(
        self, chunk: int, loss: Tensor, ends: Sequence[Tensor], output: Sequence[Tensor], gradient_at: GradientAt
    ) -> None:
        """Look at the graph of a chunk's loss, and compare its second derivative if `is_asked`.

        Args:
            chunk: which.
            loss: of it.
            ends: where its graph ends.
            output, gradient_at: see `loss_error`.
        """
        self._note(LOSS, chunk, refuse_nodes("loss_fn", [loss], [end for end in ends if end.requires_grad]))
        if self.is_asked(LOSS, chunk):
            self._judge(LOSS, "loss_fn", *loss_error(output, gradient_at))

    def _judge(self, index: int, name: str, error: float, precision: Precision, order: str = "second ") -> None:
        """Report the error of a stage's derivative, or of the loss's; raise ValueError if it is wrong.

        `order`: the word for which derivative it is; "" for the first.
        """
        if self._task.on_result is not None:
            self._task.on_result(index, error, precision)
        elif not error <= precision.limit:
            hint = " In float32 kinks (ReLU) may look like that: try a copy in float64 first."
            if precision.is_half:
                hint = " In half precision rounding may look like that: try it in float32, without autocast, first."
            raise ValueError(
                f"{name} has an autograd.Function of its own, and its {order}derivative differs from finite "
                f"differences by {error:.1e} of its size (at most {precision.limit:.0e} is rounding). Its backward "
                "forgets what it depends on (a tensor kept on ctx instead of save_for_backward), or is not the "
                "derivative of its forward (a straight-through estimator, a backward hook that changes gradients). "
                "Write it with differentiable operations; "
                f"verify=False takes what autograd says.{'' if precision.is_double else hint}"
            )
        else:
            self._task.checks.confirmed.add(index)


def error_along(
    stage: StageRule, chunk: int, inbox: Inbox, function_at: FunctionAt, derivative: Sequence[Tensor | None]
) -> tuple[float, Precision]:
    """The distance of a derivative along direction 0 from finite differences.

    Args:
        stage: the stage, within its `stand_in`.
        chunk: a chunk that has run.
        inbox: the values that it read.
        function_at: (graph, targets, step) -> the function that was differentiated, at `step` along the direction.
        derivative: along the direction.

    Returns:
        The relative error, less what rounding explains; and the precision in which the stage computes.
    """
    tangents = inbox.tangents[0] if inbox.tangents else []
    aliases, parts = stage.parameters.aliases, stage.parameters.parts
    trained = [(owner, alias, parts(owner, alias)[0]) for owner, alias in aliases.trained]
    owners = [(owner, alias, part) for owner, alias, part in trained if part is not None]  # all are
    live = [tensor for tensor, needs in zip(inbox.values.tensors, inbox.needs, strict=True) if needs]
    size = norm([*live, *[alias for _, alias, _ in owners]])
    along = norm([*tangents, *[part for _, _, part in owners]])
    precision = Precision.of([tensor.dtype for tensor in [alias for _, alias, _ in owners] or live] or [torch.float64])
    if along == 0.0 or stage.parameters.captured:  # a captured parameter cannot be moved
        return 0.0, precision

    def values_at(step: float) -> list[Tensor | None]:
        nonlocal precision
        views = {id(owner): (alias + step * part).detach().requires_grad_() for owner, alias, part in owners}
        moved = _moved(inbox, tangents, step)
        with stage.forwards.as_at_forward(chunk), aliases.stand_back(views):
            graph = stage.computed(chunk, moved)
            precision = max(precision, Precision.within(graph.roots))
            values = function_at(graph, [*graph.leaves, *views.values()], step)
        return [None if value is None else value.detach() for value in values]

    values_at(0.0)  # in which precision
    return error_of(derivative, values_at, precision.step(size, along), precision, norm), precision


def _moved(inbox: Inbox, tangents: Sequence[Tensor], step: float) -> Inbox:
    """The values that were read, further along their tangents."""
    directions = iter(tangents)
    pairs = zip(inbox.values.tensors, inbox.needs, strict=True)
    tensors = [tensor + step * next(directions) if needs else tensor for tensor, needs in pairs]
    parts = inbox.values.split(tensors)
    trees = tuple([Tree(tuple(part), tree.skeleton) for tree, part in zip(inbox.values.trees, parts, strict=True)])
    return inbox._replace(values=Bundle.of(trees))


def of_gradient(first: Grads, second: Grads) -> FunctionAt:
    """The stage's backward of l + step l', for `error_along`."""

    def at(graph: ProductGraph, targets: Sequence[Tensor], step: float) -> Sequence[Tensor | None]:
        pairs = [
            (root, grad if tangent is None else grad + step * tangent)
            for root, grad, tangent in zip(graph.roots, first, second, strict=True)
            if grad is not None
        ]
        return gradients_of([root for root, _ in pairs], targets, [grad for _, grad in pairs])

    return at


def of_output(graph: ProductGraph, targets: Sequence[Tensor], step: float) -> Sequence[Tensor | None]:
    """The values that the stage makes, for `error_along`."""
    return graph.roots


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
    kinds = [torch.complex64 if leaf.is_complex() else torch.float32 for leaf in live]
    along = [
        torch.randn(leaf.shape, generator=generator, dtype=kind, device="cpu").to(leaf)
        for leaf, kind in zip(live, kinds, strict=True)
    ]
    grads = gradient_at(leaves, True)
    refuse_once_differentiable("loss_fn", grads)
    derivative = hessian_times(grads, live, along)
    precision = Precision.of([leaf.dtype for leaf in live])

    def values_at(step: float) -> list[Tensor | None]:
        directions = iter(along)
        moved = [leaf.detach() + step * next(directions) if leaf.requires_grad else leaf for leaf in leaves]
        points = [tensor.requires_grad_(leaf.requires_grad) for tensor, leaf in zip(moved, leaves, strict=True)]
        return [None if grad is None else grad.detach() for grad in gradient_at(points, False)]

    return error_of(derivative, values_at, precision.step(norm(live), norm(along)), precision, norm), precision


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
