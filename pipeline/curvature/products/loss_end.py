"""The loss behind the last stage, differentiated twice, and checked against the loss of the whole mini-batch.

    output of a chunk --loss_fn--> its part of the loss, and where the gradient begins
    all chunks --entry/chunk_losses.py--> the un-pipelined loss and gradient, or an error
    one chunk, beside other mini-batches --its halves, as two chunks--> the same
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partition.rows import row_dim
from pipeline.curvature.space import HOST
from pipeline.data.loss import Loss, LossFn
from pipeline.data.microbatch import Batch, halved
from pipeline.data.pytrees import Grads, Tree
from pipeline.entry.chunk_losses import ChunkLosses
from pipeline.execution.execution import Execution
from pipeline.stage.stage_rule import gradients_of

_ROWS = 4  # so many are looked at beside the first and the last: those of the largest gradients


class LossProduct(ChunkLosses):
    """The loss of one product's mini-batch.

    Args:
        execution: of the product.
        loss_fn: as in `Pipe.step`.
        reduction: as in `Pipe.step`.
        target: cut like the input.
        first: of the first of several mini-batches, whose parts add up by their rows or counts. None: it is this one.
        compares: whether to compare with the un-pipelined loss at the end.
    """

    def __init__(
        self,
        execution: Execution,
        loss_fn: LossFn,
        reduction: str | None,
        target: Batch,
        first: Loss | None,
        compares: bool,
    ) -> None:
        super().__init__(
            execution, Loss(loss_fn, reduction, target.rows, True), target, compares and target.chunks > 1
        )
        self._first = first or self.loss
        self._first_rows, self._rows = self._first.all_rows, self.loss.all_rows
        self._compares_halves = compares and first is not None and target.chunks == 1 < self._rows
        self._is_apart = compares or execution.setup.compares  # outputs are read again behind the loss
        self._seeder = execution.seeder()

    def __call__(self, chunk: int, tree: Tree, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """A chunk's loss on `tensors`, and what its gradient begins with.

        Raises:
            RuntimeError: it computes with something else that requires a gradient.
        """
        return self._evaluate(self.loss, chunk, tree, tensors)

    def aside(self, chunk: int, tree: Tree, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The same at another point, which does not count."""
        return self._evaluate(self.loss.anew(self._target.rows), chunk, tree, tensors)

    def gradient_at(self, chunk: int, tree: Tree, tensors: Sequence[Tensor], create_graph: bool) -> Grads:
        """The gradient of a chunk's loss at `tensors` that require one. It does not count."""
        loss, initial_grad = self.aside(chunk, tree, tensors)
        live = [tensor for tensor in tensors if tensor.requires_grad]
        return gradients_of([loss], live, [initial_grad.requires_grad_(create_graph)], create_graph)

    def _evaluate(self, loss_sum: Loss, chunk: int, tree: Tree, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        self._seed(chunk)
        loss, weight, external = self.computed(loss_sum, chunk, tree, tensors, self._is_apart)
        for leaf in external.values():
            raise RuntimeError(
                f"loss_fn computes with a tensor of shape {list(leaf.shape)} that requires a gradient and is no "
                "output of the model: its part of the curvature would be lost. Detach it; for a penalty on "
                "parameters add its own curvature (that of c/2 |w|^2 is c times the vector)."
            )
        return loss, torch.full_like(loss, weight * self._relative, requires_grad=False)

    def _seed(self, chunk: int) -> None:
        self._seeder.seed(chunk, self._execution.layer_of_loss)

    @property
    def _relative(self) -> float:
        """The factor of this mini-batch's gradients, with which those of several add up."""
        return self.loss.factor(self._rows, self._first_rows) / self.loss.factor(self._rows)

    @property
    def total(self) -> Tensor:
        """The part of this mini-batch in the sum of the losses, which the sum of the divisors divides."""
        return self.loss.total * self.loss.factor(1, self._first_rows)

    @property
    def divisor(self) -> Tensor | None:
        """The part of this mini-batch in the divisor of the sums. None: of a "sum", added as it is."""
        if self.loss.rule == "sum":
            return None
        return torch.tensor(float(self.loss.weight) * self.loss.factor(1, self._first_rows), **HOST)

    def note_output(self, chunk: int, tree: Tree, grads: Grads) -> None:
        """Compare a chunk's loss, and its gradients at those of the output's tensors that require one."""
        if self.compares:
            self.compare(chunk, tree, tuple([None if grad is None else grad / self._relative for grad in grads]))
        elif self._compares_halves and (self.loss.is_counted or self.loss.rule == "mean"):
            self._compare_halves(tree)

    def _compare_halves(self, tree: Tree) -> None:
        """Raise ValueError if the loss of the only chunk is not the mean that gives it its weight beside others."""
        target = halved(self._target)
        dims = [row_dim(tensor, target.batch_dim) for tensor in tree.tensors]
        sizes = [tensor.shape[dim] if tensor.dim() else 1 for tensor, dim in zip(tree.tensors, dims, strict=True)]
        if any([size % self._rows for size in sizes]):  # it has no rows to compare
            return
        halves = ChunkLosses(self._execution, self.loss.anew(target.rows), target, compares=True)
        split = [
            torch.split(tensor.detach(), [rows * size // self._rows for rows in target.rows], dim)
            for tensor, size, dim in zip(tree.tensors, sizes, dims, strict=True)
        ]
        for half, tensors in enumerate(zip(*split, strict=True)):
            pairs = zip(tensors, tree.tensors, strict=True)
            leaves = [tensor.detach().requires_grad_(whole.requires_grad) for tensor, whole in pairs]
            wanted = [tensor for tensor in leaves if tensor.requires_grad]
            loss, weight, _ = halves.computed(halves.loss, half, tree, leaves)
            grads = gradients_of([loss], wanted, [torch.full_like(loss, weight)])
            halves.compare(half, Tree(tuple(leaves), tree.skeleton), grads)
        halves.check_all()

    def check(self) -> None:
        """Check the losses of all chunks, and their weights beside other mini-batches."""
        if self._first is not self.loss and not self.loss.is_proven_beside(self._first):
            raise self.loss.unproven()
        if not self.compares or float(self.loss.weight):
            self.check_all()
        else:  # the loss of nothing is 0 / 0, which no other can be compared with
            self.loss.check_counts()

    def check_rows(self, chunk: int, tree: Tree, grads: Sequence[Tensor | None]) -> None:
        """Raise ValueError if the loss of a row is not its own: the gradient at some rows must not need the others.

        All are looked at in halves, by each bit of their numbers, so that any two are once apart; and some alone.

        Args:
            grads: of the loss at the chunk's output tensors that require one.
        """
        rows = self._target.rows[chunk]
        sizes = sum([grad.abs().double().cpu().reshape(rows, -1).sum(1) for grad in grads if grad is not None])
        assert isinstance(sizes, Tensor)  # a loss that depends on nothing has been left out
        numbers = torch.arange(rows, device="cpu")
        halves = [numbers[(numbers >> bit) % 2 == half] for bit in range((rows - 1).bit_length()) for half in (0, 1)]
        alone = {0, rows - 1, *sizes.topk(min(_ROWS, rows)).indices.tolist()}
        for part in [*halves, *[numbers[row : row + 1] for row in alone]]:
            self._check_part(chunk, tree, grads, part)

    def _check_part(self, chunk: int, tree: Tree, grads: Sequence[Tensor | None], rows: Tensor) -> None:
        def of_rows(tensor: Tensor) -> Tensor:
            """The part of an output that belongs to these rows; all of one that has none for each."""
            per_row, rest = divmod(len(tensor), self._target.rows[chunk]) if tensor.dim() else (0, 1)
            return tensor if rest else tensor[(rows[:, None] * per_row + torch.arange(per_row, device="cpu")).flatten()]

        leaves = [of_rows(tensor.detach()).requires_grad_(tensor.requires_grad) for tensor in tree.tensors]
        self._seed(chunk)
        own_loss, copies = self.loss.anew([len(rows)]), [leaf.clone() for leaf in leaves]  # which loss_fn may write
        loss, _ = own_loss.chunk(0, tree.build(copies), self._rows_of(chunk, tree, rows))  # their mean, or sum
        wanted = [tensor for tensor in leaves if tensor.requires_grad]
        row_grads = gradients_of([loss], wanted, [torch.ones_like(loss)])
        share = self.loss.factor(len(rows)) * self._relative
        for row_grad, whole in zip(row_grads, grads, strict=True):
            computed = torch.zeros((), device="cpu") if row_grad is None else row_grad * share
            expected = torch.zeros((), device="cpu") if whole is None else of_rows(whole)
            scale = 0.0 if whole is None or not expected.numel() else float(whole.abs().amax())
            near = max(1e-3, 4 * torch.finfo(expected.dtype).eps)
            if not torch.allclose(computed.to(expected), expected, rtol=near, atol=near * scale):
                raise ValueError(
                    "the loss of a row depends on other rows: its gradient alone is not its part of the mini-batch's. "
                    "The empirical Fisher is a sum over rows, so it needs a loss that is a sum or a mean of the rows' "
                    "own losses."
                )

    def share(self, per_row: int) -> float:
        """The factor of the gradient of one row's loss where those of the rows are added."""
        return self.loss.factor(1) * self._relative / (per_row if self.loss.rule == "mean" else 1)

    def _rows_of(self, chunk: int, tree: Tree, rows: Tensor) -> Any:
        pieces = zip(self._target.pieces, self._target.cut, strict=True)
        row_pieces = [piece[chunk][rows] if is_cut else piece[chunk] for piece, is_cut in pieces]
        return self.beside(self._target.tree.build(row_pieces), tree)
