"""The losses of the chunks behind the last stage, and the check that they combine to the loss of the mini-batch.

    output of a chunk --loss_fn, with its rows of the target--> its part of the loss
    outputs of all chunks --join--> loss_fn --> the same value, and the same gradient there?

The gradient too: the values of a surrogate (a policy gradient, loss / loss.detach()) may agree by construction. Where
all outputs are more than 16 MiB, as those of a language model are, its largest tensors, as many as these hold are
compared together, or two, and one of them with the next ones. If the chunks' weights are right in each of these, they
are right in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from partition.precision import without_autocast
from pipeline.common.graph import edge, explore, gradients
from pipeline.common.torch_modes import without_function_modes
from pipeline.data.loss import Loss
from pipeline.data.loss_comparison import are_rounding, are_same_grads
from pipeline.data.microbatch import Batch, are_joinable, gather
from pipeline.data.pytrees import Grads, Tree, versions
from pipeline.entry.loss_inputs import LossInputs
from pipeline.execution.execution import Execution
from pipeline.recompute.reachable import ReachableState


class ChunkLosses:
    """The losses of one call: what a step and a product of curvature do alike.

    Args:
        execution: of the call.
        loss: adds up the chunks'.
        target: cut like the input.
        compares: whether to compare with the un-pipelined loss.

    Attributes:
        is_flat: whether no comparison has met a gradient, or without gradients a loss. On the flat side of a hinge any
            loss is a mean.
        writes_output: whether loss_fn has written an output in place.
    """

    def __init__(self, execution: Execution, loss: Loss, target: Batch, compares: bool) -> None:
        self.loss = loss
        self.compares = compares
        self.is_flat = True
        self._execution = execution
        self._target = target
        self._held: list[_ChunkEnd] = []  # to be compared together
        self._left = target.chunks  # so many are to come
        self._differences: list[str] = []
        self._has_gaps = False  # two chunks, one after the other, could not be joined
        self.writes_output = False
        self._target_versions = versions(target.tensors)

    def computed(
        self, loss: Loss, chunk: int, tree: Tree, tensors: Sequence[Tensor], is_apart: bool = True
    ) -> tuple[Tensor, float, dict[int, Tensor]]:
        """Compute the loss of a chunk.

        Args:
            loss: adds it up.
            chunk: which.
            tree: its output.
            tensors: where the loss begins, in the place of the output's.
            is_apart: whether these have to stay as they are, though loss_fn may write what it gets.

        Returns:
            The tensor to differentiate, the factor that makes it the chunk's part of the whole, and the leaves that it
            depends on besides the output, by id.

        Raises:
            RuntimeError: loss_fn writes one of two outputs that share memory.
        """
        target = self._target.value(chunk)
        device = tree.tensors[0].device if tree.tensors else None
        if any([piece[chunk].device != device for piece in self._target.pieces]):
            target = self.beside(target, tree)
        ends = [edge(tensor) for tensor in tensors if tensor.requires_grad]
        is_copied = is_apart and (chunk == 0 or self.writes_output)  # chunk 0 shows whether loss_fn writes its output
        inputs = LossInputs(tensors, is_copied)
        value, weight = loss.chunk(chunk, tree.build(inputs.tensors), target, self._target.batch_dim)
        self.writes_output |= inputs.check_written()
        return value, weight, explore([value], until=ends) if value.requires_grad else {}

    def beside(self, target: Any, tree: Tree) -> Any:
        """A part of the target on the device of an output."""
        if not tree.tensors:
            return target
        device = tree.tensors[0].device
        return tree_map_only(Tensor, partial(self._execution.carried, device=device), target)

    def compare(self, chunk: int, tree: Tree, grads: Grads, scale: float | None = None) -> None:
        """Compare a chunk with those before: with loss_fn on all. `check_all` has the result.

        Args:
            chunk: which. Its loss has been computed.
            tree: its output.
            grads: of its loss, at those of the output's tensors that require one. Empty: it has none.
            scale: of a GradScaler: what these are multiplied by, and may have overflowed with. None: there is none.
        """
        with without_function_modes():
            leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tree.tensors]
        live = [leaf for leaf in leaves if leaf.requires_grad]
        filled = [_or_zeros(*pair, scale) for pair in zip(grads or (None,) * len(live), live, strict=True)]
        chunk_end = _ChunkEnd(chunk, Tree(tuple(leaves), tree.skeleton), filled, self.loss.is_empty(chunk))
        if not self._can_compare([*self._held, chunk_end]):
            self._compare_held(scale is not None)
            self._held.clear()
            self._has_gaps = True
        self._held.append(chunk_end)
        self._left -= 1
        held = [tensor for end in (*self._held, chunk_end) for tensor in end.output.tensors]
        sizes = [tensor.numel() * tensor.itemsize for tensor in held]
        if not self._left or len(self._held) > 1 and sum(sizes) > _HELD:
            self._compare_held(scale is not None)
            # The next ones are compared with one that counts something: beside what is 0 they are right by themselves.
            self._held = [max(self._held, key=self._counts)] if self._left else []

    def _counts(self, end: _ChunkEnd) -> tuple[bool, bool]:
        """Whether a chunk counts something, and whether it adds something to the loss. The host waits."""
        return not end.is_empty, not self.loss.is_zero(end.chunk) or any([bool(grad.any()) for grad in end.grads])

    def _compare_held(self, is_scaled: bool) -> None:
        if len(self._held) > 1 and not all([end.is_empty for end in self._held]):  # what counts nothing shows nothing
            difference = self._difference(sorted(self._held, key=lambda end: end.chunk), is_scaled)
            self._differences += [] if difference is None else [difference]

    def _can_compare(self, ends: Sequence[_ChunkEnd]) -> bool:
        """Whether chunks can be joined. Those of two mini-batches may differ in more than their rows."""
        if not self._target.parts:
            return True
        columns = zip(*[end.output.tensors for end in ends], strict=False)
        joinable = all([are_joinable(column, self._target.batch_dim) for column in columns if column[0].dim()])
        return joinable and self._target.is_joinable([end.chunk for end in ends])

    def _difference(self, ends: Sequence[_ChunkEnd], is_scaled: bool) -> str | None:
        """The difference between the losses of chunks, combined, and that of all, in words. The host waits."""
        loss, weight = self.loss.of([end.chunk for end in ends])
        whole, expected = self._whole(loss, weight, ends)
        with without_function_modes():
            self.is_flat &= not any([bool(shown.any()) for shown in ([whole] if expected is None else expected)])
        difference = loss.difference(whole)
        if difference is not None or expected is None:
            return difference
        pairs = list(zip([grad for end in ends for grad in end.grads], expected, strict=True))
        if are_same_grads(pairs, is_scaled):
            return None
        moved = [self._whole(loss, weight, ends, move)[1] or expected for move in _MOVES]
        if are_rounding(pairs, moved):
            return None
        return f"{loss.in_words} the loss of their outputs joined, but their gradients do not combine to its gradient"

    def _whole(
        self, loss: Loss, weight: Tensor | float, ends: Sequence[_ChunkEnd], move: float = 0.0
    ) -> tuple[Tensor, list[Tensor] | None]:
        """The loss of the joined outputs, and the gradients there. None: there are none.

        What loss_fn counts and keeps is put back: it is called beside the chunks. At the end, as its graph may have
        saved that.

        Args:
            move: how far the outputs are moved, relative to them, in units of the last place.
        """
        chunks = [end.chunk for end in ends]
        trees = [Tree(tuple([_moved(leaf, move) for leaf in end.output.tensors]), end.output.skeleton) for end in ends]
        with ExitStack() as undo:
            undo.callback(self.state_of_loss().put_back)
            with torch.set_grad_enabled(self._execution.setup.grad):
                joined, _ = gather(trees, [self._target.rows[chunk] for chunk in chunks], self._target.batch_dim)
                whole = loss.whole(joined.build(joined.tensors), self.beside(self._target.joined(chunks), joined))
            live = [leaf for tree in trees for leaf in tree.tensors if leaf.requires_grad]
            if not live or not whole.requires_grad:
                return whole, None
            with without_autocast():
                grads = gradients([whole], live, [torch.ones_like(whole).mul_(weight)], retain=True)
        return whole.detach(), [_or_zeros(grad, leaf) for grad, leaf in zip(grads, live, strict=True)]

    def state_of_loss(self) -> ReachableState:
        """The state of loss_fn, as it is now: what it counts and keeps."""
        return ReachableState.of_loss(self.loss.loss_fn, self._execution.setup.stages)

    def forget(self) -> None:
        """Forget what was compared: the chunks are computed anew."""
        self._held.clear()
        self._left = self._target.chunks
        self._has_gaps = False
        self._differences.clear()

    def check_all(self) -> None:
        """Raise ValueError if the chunks' losses, which have been computed, do not combine to that of the mini-batch.

        A validating call has compared; any other, and one that could not, checks the divisors in the chunks' losses.
        """
        self.loss.check_counts()
        if not self.compares and not self.loss.is_proven or self._has_gaps and not self.loss.is_weighed:
            raise self.loss.unproven()
        for difference in self._differences:
            if versions(self._target.tensors) != self._target_versions:
                raise RuntimeError(
                    f"{difference}: loss_fn has written its target in place, and the comparison calls it once more on "
                    "what it wrote. Write to a copy (target - 1 instead of target.sub_(1))."
                )
            raise self.loss.neither(difference)


class _ChunkEnd(NamedTuple):
    """A chunk's output, of leaves, and the gradients of its loss where these need one, unscaled."""

    chunk: int
    output: Tree
    grads: Sequence[Tensor]
    is_empty: bool  # it counts nothing


_HELD = 2**24  # bytes of outputs that are compared together
_MOVES = (1.0, -2.0)


def _moved(leaf: Tensor, move: float) -> Tensor:
    """A leaf, moved by so many units in the last place where it needs a gradient."""
    if not (move and leaf.requires_grad):
        return leaf
    with without_function_modes():
        return (leaf.detach() * (1.0 + move * torch.finfo(leaf.dtype).eps)).requires_grad_()


def _or_zeros(grad: Tensor | None, leaf: Tensor, scale: float | None = None) -> Tensor:
    """A gradient at a leaf, unscaled."""
    filled = torch.zeros_like(leaf, requires_grad=False) if grad is None else grad
    return filled if scale is None else filled / scale
