"""The losses of the chunks behind the last stage, and the check that they combine to the loss of the mini-batch.

    output of a chunk --loss_fn, with its rows of the target--> its part of the loss
    outputs of two chunks, one after the other --join--> loss_fn --> the same value, and the same gradient there?

The gradient too: the values of a surrogate (a policy gradient, loss / loss.detach()) may agree by construction. Each
chunk is compared with the one before, so that no more than two outputs are held: those of a language model are its
largest tensors. If the chunks' weights are right in each pair, they are right in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map_only

from pipeline.common.graph import explore, gradients
from pipeline.common.torch_modes import without_autocast, without_function_modes
from pipeline.data.loss import Loss, Verdict
from pipeline.data.microbatch import Batch, are_joinable, gather
from pipeline.data.pytrees import Activations, Grads, Tree, detached
from pipeline.execution.execution import Execution


class ChunkLosses:
    """The losses of one call: what a step and a product of curvature do alike.

    Args:
        execution: of the call.
        loss: adds up the chunks'.
        target: cut like the input.
        compares: whether to compare with the un-pipelined loss.
    """

    def __init__(self, execution: Execution, loss: Loss, target: Batch, compares: bool) -> None:
        self.loss = loss
        self.compares = compares
        self._execution = execution
        self._target = target
        self._before: _ChunkEnd | None = None
        self._verdicts: list[Verdict] = []
        self._has_gaps = False  # two chunks, one after the other, could not be joined

    def computed(
        self, loss: Loss, chunk: int, tree: Tree, given: Sequence[Tensor], ends: Sequence[Tensor | GradientEdge]
    ) -> tuple[Tensor, float, dict[int, Tensor]]:
        """Compute the loss of a chunk.

        Args:
            loss: adds it up.
            chunk: which.
            tree: its output.
            given: the tensors on which loss_fn computes, in the place of the output's.
            ends: where their graph ends.

        Returns:
            The tensor to differentiate, the factor that makes it the chunk's part of the whole, and the leaves that it
            depends on besides the output, by id.
        """
        target = self._target.value(chunk)
        device = tree.tensors[0].device if tree.tensors else None
        if any([piece[chunk].device != device for piece in self._target.pieces]):
            target = self.beside(target, tree)
        value, weight = loss.chunk(chunk, tree.build(given), target)
        return value, weight, explore([value], until=ends) if value.requires_grad else {}

    def beside(self, target: Any, tree: Tree) -> Any:
        """A part of the target on the device of an output."""
        if not tree.tensors:
            return target
        device = tree.tensors[0].device
        return tree_map_only(Tensor, partial(self._execution.carried, device=device), target)

    def compare(self, chunk: int, tree: Tree, grads: Grads, scale: float | None = None) -> None:
        """Compare a chunk with the one before: with loss_fn on both. `check_all` has the result.

        Args:
            chunk: which. Its loss has been computed.
            tree: its output.
            grads: of its loss, at the output's tensors.
            scale: of a GradScaler: what these are multiplied by, and may have overflowed with. None: there is none.
        """
        needs_grad = tuple([tensor.requires_grad for tensor in tree.tensors])
        output = Activations(Tree(detached(tree.tensors), tree.skeleton), needs_grad)
        now, before = _ChunkEnd(chunk, output, grads, self.loss.is_empty(chunk)), self._before
        if before is not None and not (before.is_empty and now.is_empty):
            ends = sorted((before, now), key=lambda end: end.chunk)
            if self._can_compare(ends):
                self._verdicts.append(self._compared(ends, scale))
            else:
                self._has_gaps = True
        if before is None or before.is_empty or not now.is_empty:  # what counts nothing shows nothing
            self._before = now

    def _can_compare(self, ends: Sequence[_ChunkEnd]) -> bool:
        """Whether two chunks can be joined. Those of two mini-batches may differ in more than their rows."""
        if not self._target.parts:
            return True
        columns = zip(*[end.output.tree.tensors for end in ends], strict=False)
        alike = all([are_joinable(column, self._target.batch_dim) for column in columns if column[0].dim()])
        return alike and self._target.is_joinable([end.chunk for end in ends])

    def _compared(self, ends: Sequence[_ChunkEnd], scale: float | None) -> Verdict:
        chunks = [end.chunk for end in ends]
        loss, weight = self.loss.of(chunks)
        leaves = [_leaves(end.output) for end in ends]
        with torch.set_grad_enabled(self._execution.setup.grad):
            trees = [Tree(own, end.output.tree.skeleton) for own, end in zip(leaves, ends, strict=True)]
            joined, _ = gather(trees, [self._target.rows[chunk] for chunk in chunks], self._target.batch_dim)
            whole = loss.whole(joined.build(joined.tensors), self.beside(self._target.joined(chunks), joined))
        wanted = [leaf for own in leaves for leaf in own if leaf.requires_grad]
        if not wanted or not whole.requires_grad:
            return loss.verdict(whole, ())
        with without_autocast():
            whole_grads = iter(gradients([whole], wanted, [torch.ones_like(whole).mul_(weight)], retain=True))
        whole = whole.detach()
        del trees, joined  # and with them the graph
        expected = [[next(whole_grads) if leaf.requires_grad else None for leaf in own] for own in leaves]
        pairs = [
            (_or_zeros(ours, leaf, scale), _or_zeros(theirs, leaf, None))
            for end, own, of_whole in zip(ends, leaves, expected, strict=True)
            for leaf, ours, theirs in zip(own, end.grads or (None,) * len(own), of_whole, strict=True)
            if leaf.requires_grad
        ]
        return loss.verdict(whole, pairs, _size(whole, weight, wanted), scale is not None)

    def forget(self) -> None:
        """Forget what was compared: the chunks are computed anew."""
        self._before = None
        self._has_gaps = False
        self._verdicts.clear()

    def check_all(self) -> None:
        """Raise ValueError if the chunks' losses, which have been computed, do not combine to that of the mini-batch.

        A validating call has compared; any other, and one that could not, checks the divisors in the chunks' losses.
        """
        self.loss.check_counts()
        if (self._has_gaps or not self.compares) and not self.loss.is_proven:
            raise self.loss.unproven()
        self._before = None
        self.loss.check(self._verdicts)


class _ChunkEnd(NamedTuple):
    """A chunk's output, detached, and the gradients of its loss there."""

    chunk: int
    output: Activations
    grads: Grads
    is_empty: bool  # it counts nothing


def _leaves(message: Activations) -> tuple[Tensor, ...]:
    given = zip(message.tree.tensors, message.needs_grad, strict=True)
    return tuple([tensor.detach().requires_grad_(need) for tensor, need in given])


def _size(loss: Tensor, weight: Tensor | float, outputs: Sequence[Tensor]) -> Tensor:
    """The size of a loss over that of the output."""
    with without_function_modes():
        largest = [leaf.detach().abs().amax().to(loss.device, torch.float64) for leaf in outputs if leaf.numel()]
        return loss.abs().double() * weight / (torch.stack(largest).amax() if largest else 1.0)


def _or_zeros(grad: Tensor | None, leaf: Tensor, scale: float | None) -> Tensor:
    """A gradient at a leaf, unscaled."""
    own = torch.zeros_like(leaf, requires_grad=False) if grad is None else grad
    return own if scale is None else own / scale
