"""The matrices, by what B does: Hessian, Gauss-Newton and empirical Fisher.

    HessianProduct       H = d2L                            B sends l and its tangents l'[k]
    GaussNewtonProduct   G = J^T (d2L/dy2) J                B sends u[k] = (d2L/dy2) y'[k]
    FisherProduct        F = (1/c) sum_n g_n g_n^T          B sends u_n[k] = (dL_n/dy . y'_n[k]) dL_n/dy, row by row

Schraudolph (2002) for the second; for the third the loss of row n is L_n, its gradient g_n, and c what the mini-batch's
loss divides by: the rows of a mean, the count of (sum, count), 1 for a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from pipeline.curvature.products.product import ProductCall
from pipeline.curvature.products.stage_check import hessian_times, of_gradient, of_output
from pipeline.data.pytrees import Grads, Tree
from pipeline.data.tangents import Inbox, LeafGrads
from pipeline.stage.stage_rule import ProductGraph, StageRule, gradients_of


class HessianProduct(ProductCall):
    """The Hessian of the loss by the parameters, times vectors."""

    name = "Hessian"
    sends_gradient = True

    def at_end(self, run: StageRule, chunk: int, graph: ProductGraph, inbox: Inbox) -> LeafGrads:
        (tree,) = graph.outputs.trees
        # Through views, so that the gradient at an output from which another is made is its own part.
        ends = [tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in tree.tensors]
        loss, initial_grad = self.loss_end(chunk, tree, ends)
        if not loss.requires_grad:
            return self._no_grads(graph)
        self._reached = True
        self._rule_check.check_loss(chunk, loss, ends, tree.tensors, partial(self.loss_end.gradient_at, chunk, tree))
        compared_ends = [end for end in ends if end.requires_grad] if self.loss_end.compares else []
        targets = [*run.targets(graph), *compared_ends]
        initial_grad.requires_grad_(self._task.number > 0)
        with run.parameters.hooks_asleep():
            grads = gradients_of([loss], targets, [initial_grad], self._task.number > 0)
        target_count = len(targets) - len(compared_ends)
        self.loss_end.note_output(chunk, tree, _detached(grads[target_count:]))
        back = run.differentiated(graph, inbox.tangents, grads[:target_count], (), self._task.gradient)
        self._rule_check.confirm(run, chunk, inbox, partial(self._gradient_at, chunk), back.derivative)
        return back

    def pull(self, run: StageRule, chunk: int, graph: ProductGraph, inbox: Inbox, groups: list[Grads]) -> LeafGrads:
        first, *seconds = groups
        back = run.pull_second(graph, inbox.tangents, first, seconds, self._task.gradient)
        if seconds:
            self._rule_check.confirm(run, chunk, inbox, of_gradient(first, seconds[0]), back.derivative)
        return back

    def _gradient_at(
        self, chunk: int, graph: ProductGraph, targets: Sequence[Tensor], step: float
    ) -> Sequence[Tensor | None]:
        """The last stage's gradient of the loss, for `error_along`."""
        (tree,) = graph.outputs.trees
        loss, initial_grad = self.loss_end.aside(chunk, tree, tree.tensors)
        return gradients_of([loss], targets, [initial_grad])


class GaussNewtonProduct(ProductCall):
    """The generalized Gauss-Newton matrix J^T A J: the output's tangents, A times them by the loss alone, and plain
    backwards of these. A is the loss's own Hessian by the output."""

    name = "Gauss-Newton"
    is_linear = False  # whether A needs no second derivative of the loss

    def at_end(self, run: StageRule, chunk: int, graph: ProductGraph, inbox: Inbox) -> LeafGrads:
        (tree,) = graph.outputs.trees
        outputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tree.tensors]
        leaves = [leaf for leaf in outputs if leaf.requires_grad]
        loss, initial_grad = self.loss_end(chunk, tree, [output.view_as(output) for output in outputs])  # no leaves
        if not loss.requires_grad:
            return self._no_grads(graph)
        self._reached = True
        if not self.is_linear:
            self._rule_check.check_loss(
                chunk, loss, outputs, tree.tensors, partial(self.loss_end.gradient_at, chunk, tree)
            )
        initial_grad.requires_grad_(not self.is_linear)
        grads = gradients_of([loss], leaves, [initial_grad], not self.is_linear)
        first = _detached(grads)
        self.loss_end.note_output(chunk, tree, first)
        tangents = run.push(graph, inbox.tangents) if graph.roots else []
        self._rule_check.confirm(run, chunk, inbox, of_output, tangents[0] if tangents else ())
        cotangents = self.cotangents(chunk, tree, leaves, grads, tangents)
        return run.pull_first(graph, [first, *cotangents] if self._task.gradient else cotangents)

    def pull(self, run: StageRule, chunk: int, graph: ProductGraph, inbox: Inbox, groups: list[Grads]) -> LeafGrads:
        return run.pull_first(graph, groups)

    def cotangents(
        self, chunk: int, tree: Tree, leaves: Sequence[Tensor], grads: Grads, tangents: Sequence[Sequence[Tensor]]
    ) -> list[Grads]:
        """A times the output's tangents.

        Args:
            chunk: which.
            tree: the output.
            leaves: its tensors that depend on a parameter, where the loss begins.
            grads: of the loss, at the leaves.
            tangents: at the leaves, for each direction.
        """
        return [hessian_times(grads, leaves, direction) for direction in tangents]


class FisherProduct(GaussNewtonProduct):
    """The empirical Fisher, J^T A J as well: A is the outer product of each row's gradient with itself."""

    name = "empirical Fisher"
    is_linear = True

    def cotangents(
        self, chunk: int, tree: Tree, leaves: Sequence[Tensor], grads: Grads, tangents: Sequence[Sequence[Tensor]]
    ) -> list[Grads]:
        first = list(_detached(grads))
        per_row = self._per_row(chunk, first)
        if self._execution.setup.compares:
            self.loss_end.check_rows(chunk, tree, first)
        share = self.loss_end.share(per_row)
        return [tuple(_row_by_row(first, direction, share)) for direction in tangents]

    def _per_row(self, chunk: int, grads: Sequence[Tensor | None]) -> int:
        """The number of rows of the output for one of the input. `grads`: of the loss, at each of its tensors.

        Raises:
            ValueError: tensors that the loss depends on have different numbers of rows, or none.
        """
        rows = self._execution.batch.rows[chunk]
        shapes = [list(grad.shape) for grad in grads if grad is not None]
        counts = {shape[0] if shape else 0 for shape in shapes}
        if len(counts) != 1 or min(counts) % rows or min(counts) == 0:
            raise ValueError(
                f"the output has shapes {shapes} for {rows} rows of input. The empirical Fisher is a sum over the rows "
                "of the output: return tensors whose dim 0 counts them."
            )
        return counts.pop() // rows


def _detached(grads: Grads) -> Grads:
    return tuple([None if grad is None else grad.detach() for grad in grads])


def _row_by_row(grads: Sequence[Tensor | None], tangents: Sequence[Tensor], share: float) -> list[Tensor | None]:
    """The Fisher's cotangents.

    Args:
        grads: of the loss, at each tensor of the output; each row's is `share` times that of its own loss.
        tangents: of the same tensors.
    """
    live = [(grad, tangent) for grad, tangent in zip(grads, tangents, strict=True) if grad is not None]
    along: Tensor | float = 0.0
    for grad, tangent in live:  # a row may have parts in several tensors
        along = along + (grad.conj() * tangent).real.reshape(len(grad), -1).sum(1)
    assert isinstance(along, Tensor)  # a loss that depends on nothing has been left out
    factors = along / share
    return [None if grad is None else grad * factors.view(-1, *[1] * (grad.dim() - 1)) for grad in grads]
