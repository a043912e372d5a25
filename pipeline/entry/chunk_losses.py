"""The losses of the chunks behind the last stage, and the check that they combine to the loss of the mini-batch.

    output of a chunk --loss_fn, with its rows of the target--> its part of the loss
    outputs of all chunks --join--> loss_fn --> the same value, and the same gradient at the output?

The gradient too: the values of a surrogate (a policy gradient, loss / loss.detach()) may agree by construction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map_only

from pipeline.common.graph import explore, gradients
from pipeline.common.torch_modes import without_autocast
from pipeline.data.loss import Loss
from pipeline.data.microbatch import Batch, gather
from pipeline.data.pytrees import Activations, Grads, Tree
from pipeline.execution.execution import Execution


class ChunkLosses:
    """The losses of one call: what a step and a product of curvature do alike.

    Args:
        execution: of the call.
        loss: adds up the chunks'.
        target: cut like the input.
        compares: whether to compare with the un-pipelined loss at the end.
    """

    def __init__(self, execution: Execution, loss: Loss, target: Batch, compares: bool) -> None:
        self.loss = loss
        self.compares = compares
        self._execution = execution
        self._target = target
        self._grads: dict[int, Grads] = {}  # by chunk, of the outputs; kept where they are compared

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
        return value, weight, explore([value], until=ends).leaves if value.requires_grad else {}

    def beside(self, target: Any, tree: Tree) -> Any:
        """A part of the target on the device of an output."""
        if not tree.tensors:
            return target
        device = tree.tensors[0].device
        return tree_map_only(Tensor, partial(self._execution.carried, device=device), target)

    def note(self, chunk: int, tree: Tree, grads: Iterable[Tensor | None]) -> Grads:
        """Keep the gradients of a chunk's outputs for `check`.

        Args:
            chunk: which.
            tree: its output.
            grads: of those of its tensors that require one.

        Returns:
            One for each of its tensors.
        """
        left = iter(grads)
        of_outputs = tuple([next(left) if tensor.requires_grad else None for tensor in tree.tensors])
        if self.compares:
            self._grads[chunk] = of_outputs
        return of_outputs

    def check_all(self, outputs: Sequence[Activations], scale: float | None = None) -> None:
        """Raise ValueError if the chunks' losses, which have been computed, do not combine to that of the mini-batch.

        A validating call computes it on the joined output; any other checks the divisors in the chunks' losses.

        Args:
            outputs: of the chunks, where they are compared.
            scale: what the gradients are multiplied by, see `check_joined`.
        """
        execution = self._execution
        self.loss.check_counts()
        if self.compares:
            with execution.generators:
                execution.seeder().seed(0, execution.layer_of_loss)
                check_joined(self.loss, self._target, outputs, self._grads, execution.setup.grad, scale)
        elif not self.loss.is_proven:
            raise self.loss.unproven()


def check_joined(
    loss: Loss,
    target: Batch,
    outputs: Sequence[Activations],
    grads: Mapping[int, Grads],
    needs_grad: bool,
    scale: float | None,
) -> None:
    """Compare with loss_fn on the whole.

    Args:
        loss: has seen all chunks.
        target: of the mini-batch.
        outputs: of the chunks, detached.
        grads: by chunk, at its outputs.
        needs_grad: whether to compare gradients.
        scale: of a GradScaler: what `grads` are multiplied by, and may have overflowed with. None: there is none.

    Raises:
        ValueError: they disagree, so loss_fn is neither a mean nor a sum over rows.
    """
    whole_target = target.tree.build(target.tree.tensors)
    leaves = [_leaves(message) for message in outputs]
    with torch.set_grad_enabled(needs_grad):
        trees = [Tree(own, message.tree.skeleton) for own, message in zip(leaves, outputs, strict=True)]
        joined, _ = gather(trees, target.rows, target.batch_dim)
        device = joined.tensors[0].device if joined.tensors else None
        whole = loss.check(joined.build(joined.tensors), _moved(whole_target, device))
    if not whole.requires_grad:
        return
    wanted = [leaf for own in leaves for leaf in own if leaf.requires_grad]
    with without_autocast():
        whole_grads = iter(gradients([whole], wanted, [torch.ones_like(whole)], retain=True) if wanted else ())
    expected = [tuple([next(whole_grads) if leaf.requires_grad else None for leaf in own]) for own in leaves]
    for index in range(len(joined.tensors)):
        pairs = [
            _pair(own[index], grads.get(chunk, (None,) * (index + 1))[index], expected[chunk][index], scale)
            for chunk, own in enumerate(leaves)
            if own[index].requires_grad  # of a chunk that needs none there is none to compare
        ]
        # An overflow is the scaler's affair.
        if scale is None or all([torch.isfinite(ours).all() for ours, _ in pairs]):
            loss.check_grads(pairs)


def _leaves(message: Activations) -> tuple[Tensor, ...]:
    given = zip(message.tree.tensors, message.needs_grad, strict=True)
    return tuple([tensor.detach().requires_grad_(need) for tensor, need in given])


def _pair(leaf: Tensor, ours: Tensor | None, expected: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """The chunk's own gradient of an output, unscaled, and that of the whole."""
    own = torch.zeros_like(leaf, requires_grad=False) if ours is None else ours if scale is None else ours / scale
    return own, torch.zeros_like(own) if expected is None else expected


def _moved(value: Any, device: torch.device | None) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value) if device else value
