"""The loss behind the last stage of a step or an evaluation.

    F(last, i) --output--> loss_fn --gradient of its part--> B(last, i) ...
    when all is done:  validating calls compare the loss with the un-pipelined one
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partition.precision import without_autocast
from pipeline.common.graph import Roots, gradients, refuse_marked, roots_of, sum_with
from pipeline.data.loss import Loss
from pipeline.data.microbatch import Batch, refuse_layouts
from pipeline.data.pytrees import Tree, versions
from pipeline.entry.chunk_losses import ChunkLosses
from pipeline.execution.communicator import Pair
from pipeline.execution.execution import Execution
from pipeline.stage.hooks import hooks_asleep


class LossEnd(ChunkLosses):
    """The loss behind the last stage: from the outputs of a chunk to where the backward begins.

    Usually that is the loss, and one run of autograd differentiates it with the last stage. Where outputs or their
    gradients are kept, or a layer has set hooks on an output, the loss is differentiated by itself, on leaves.

    A chunk's loss is computed at its B, on the output that was kept or recomputed, so that no chunk's loss graph waits.
    """

    def __init__(
        self,
        execution: Execution,
        loss: Loss,
        target: Batch,
        scaler: torch.amp.GradScaler | None,
        compares: bool,
        keeps_outputs: bool,
    ) -> None:
        super().__init__(execution, loss, target, compares)
        self._is_apart = keeps_outputs or compares
        self._scaler = scaler
        self.reads: set[int] = set()  # the ids of leaves that the loss reads
        self.sums: dict[int, Pair] = {}  # the gradients of those of them that do not come through a stage, by id
        has_all = all([execution.communicator.topology.has(stage) for stage in range(len(execution.setup.stages))])
        self._buffers = {} if has_all else _buffers_of(loss.loss_fn)
        self._state = self.state_of_loss() if execution.has_threads else None  # for a call that runs a second time

    def __call__(self, chunk: int, tree: Tree) -> Roots:
        tensors = tree.tensors
        is_apart = self._is_apart or not any([tensor.requires_grad for tensor in tensors])
        is_apart = is_apart or any([tensor._backward_hooks for tensor in tensors])
        if is_apart:
            tensors = tuple([tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors])
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        refuse_layouts(differentiable)
        loss, weight, external = self.computed(self.loss, chunk, tree, tensors, is_apart)
        if is_apart and any([tensor.grad is not None for tensor in differentiable]):  # else the stage's guard sees it
            raise RuntimeError(
                "loss_fn runs a backward of its own through the output, whose gradients would be lost. Add that term "
                "to the loss that it returns."
            )
        if not self.compares and self.loss.is_new:
            if self.writes_output:
                raise RuntimeError(
                    "loss_fn computes in another way in this step than in those before, so its chunks are to be "
                    "compared with their outputs joined; but it has written the output in place. Write to a copy "
                    "(x * 2 instead of x.mul_(2)), or call step again: the next one compares from the beginning."
                )
            self.compares = self._is_apart = is_apart = True
        if not loss.requires_grad:
            if self.compares:
                self.compare(chunk, tree, ())
            return Roots((), (), {})
        if self._scaler is not None:  # it may turn the loss into another type
            loss, weight = self._scaler.scale(loss * weight), 1.0
        if external:
            self.reads.update(external)
            self._execution.communicator.topology.refuse_external(external.values(), "loss_fn")
            for leaf in external.values():
                remedy = "Return it from the last stage as part of the output."
                refuse_marked(leaf, "loss_fn", through="arguments", remedy=remedy)
        first_grad = torch.full_like(loss, weight, requires_grad=False)  # its own: the receiver may keep or write it
        roots = Roots((loss,), (first_grad,), external)
        return self._differentiated(chunk, roots, differentiable, tree) if is_apart else roots

    def _differentiated(self, chunk: int, roots: Roots, differentiable: Sequence[Tensor], tree: Tree) -> Roots:
        """Go on from the outputs, and add the gradients of leaves that the loss reads to its sums."""
        external = list(roots.foreign.values())
        with hooks_asleep(external), without_autocast():
            grads = gradients(roots.tensors, [*differentiable, *external], roots.grads, retain=bool(external))
        for tensor in differentiable:
            if tensor._backward_hooks:  # of loss_fn: they have acted
                tensor._backward_hooks.clear()
        for leaf, grad in zip(external, grads[len(differentiable) :], strict=True):
            if grad is not None:
                _, total = self.sums.get(id(leaf), (leaf, None))
                self.sums[id(leaf)] = leaf, sum_with(total, grad, leaf)
        of_outputs = grads[: len(differentiable)]
        if self.compares:
            self.compare(chunk, tree, of_outputs, None if self._scaler is None else self._scaler.get_scale())
        return roots_of(of_outputs, [tensor for tensor in tree.tensors if tensor.requires_grad])

    def forget(self) -> None:
        super().forget()
        self.sums.clear()
        if self._state is not None:
            self._state.put_back()

    def check(self) -> None:
        """Check the losses of all chunks, in the process that has them."""
        if self._execution.has_last:
            self.check_all()
            buffers = _buffers_of(self.loss.loss_fn) if self._buffers else {}
            written = [name for name, before in self._buffers.items() if not _is_as_before(before, buffers.get(name))]
            if written:
                raise RuntimeError(
                    f"loss_fn wrote its buffers {written}. Over ranks only the last one computes the loss, so the "
                    "copies of the others stay as they were. Return what is to be counted as a metric, (loss, {name: "
                    "(sum, count)}), which every rank gets in step.metrics; or compute the loss on every rank: "
                    "loss_fn(pipe(x), target)."
                )


def _buffers_of(loss_fn: object) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """The buffers of a loss, where it is a module, and their versions. They are held: no other gets the id of one."""
    if not isinstance(loss_fn, nn.Module):
        return {}
    return {name: (buffer, versions([buffer])) for name, buffer in loss_fn.named_buffers()}


def _is_as_before(before: tuple[Tensor, tuple[int, ...]], after: tuple[Tensor, tuple[int, ...]] | None) -> bool:
    return after is not None and after[0] is before[0] and after[1] == before[1]
