"""`pipe.step(x, y, loss_fn=f)`: forward, loss and backward of all chunks in the order of the schedule.

    F(last, i) --output--> loss_fn --gradient of its part--> B(last, i) ... --> sums
    when all is done:  validating steps compare the loss with the un-pipelined one  -->  p.grad | GradStore | optimizer

Nothing reaches a parameter before everything has gone well: until then gradients are the call's own, and a failure puts
the buffers back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipeline.common.graph import MARK, Roots, edge, explore, gradients, owned, roots_of
from pipeline.common.torch_modes import without_autocast
from pipeline.data.loss import Loss
from pipeline.data.microbatch import Batch
from pipeline.data.pytrees import Activations, Grads, Tree, same_values
from pipeline.entry.loss_check import check_joined
from pipeline.execution.communicator import Pair
from pipeline.execution.execution import Execution
from pipeline.gradients.store import GradStore
from pipeline.stage.hooks import hooks_asleep
from scheduler import Timeline


@dataclass(frozen=True, eq=False)
class Step:
    """The result of a step.

    Attributes:
        loss: the un-pipelined loss of the mini-batch, a 0-d tensor.
        grads: the gradients, with grads="store"; else None.
        outputs: the joined outputs, with outputs=True; else None.
        timeline: when each action ran, with trace=True; else None.
        metrics: what loss_fn reported beside its loss, over the mini-batch, by name: 0-d tensors without gradient.
    """

    loss: Tensor
    grads: GradStore | None = None
    outputs: Any = None
    timeline: Timeline | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class LossEnd:
    """The loss behind the last stage: from the outputs of a chunk to where the backward begins.

    Usually that is the loss, and one run of autograd differentiates it with the last stage. Where outputs or their
    gradients are kept, the loss is differentiated by itself, on leaves.

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
        self._execution = execution
        self.compares = compares
        self._keeps_outputs = keeps_outputs
        self._is_checked = False
        self._loss = loss
        self._target = target
        self._scaler = scaler
        self.reads: set[int] = set()  # the ids of leaves that the loss reads
        self.sums: dict[int, Pair] = {}  # the gradients of those of them that do not come through a stage, by id
        self._first_grads: dict[tuple[float, torch.dtype, torch.device], list[Tensor]] = {}
        self._is_target_there: bool | None = None  # on the device of the output
        self._grads: dict[int, Grads] = {}  # by chunk, of the outputs; kept where they are compared
        self._writes = False  # loss_fn writes its output

    def __call__(self, chunk: int, tree: Tree) -> Roots:
        apart = self._keeps_outputs or not any([tensor.requires_grad for tensor in tree.tensors])
        tensors = given = tree.tensors
        if apart:
            tensors = given = tuple([tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors])
            if chunk == 0 or self._writes:  # chunk 0 shows whether loss_fn writes its output
                given = tuple([tensor.clone() for tensor in tensors])
        own = [tensor for tensor in tensors if tensor.requires_grad]
        ends = [edge(tensor) for tensor in own]
        loss, weight = self._loss.chunk(chunk, tree.build(given), self._target_of(chunk, tree))
        if apart and chunk == 0:
            self._writes = any(map(_is_written, given, tensors))
        if not loss.requires_grad:
            return Roots((), (), {})
        if self._scaler is not None:  # it may turn the loss into another type
            loss, weight = self._scaler.scale(loss * weight), 1.0
        foreign = explore([loss], until=ends).leaves
        if foreign:
            self.reads.update(foreign)
            self._execution.communicator.topology.refuse_external(foreign.values(), "loss_fn")
            for leaf in foreign.values():
                _refuse_ours(leaf)
        roots = Roots((loss,), (self._first_grad(loss, weight),), foreign)
        return self._differentiated(chunk, roots, own, tree) if apart else roots

    def _first_grad(self, loss: Tensor, weight: float) -> Tensor:
        """The gradient with which the backward begins: that of the loss times its weight."""
        left = self._first_grads.setdefault((weight, loss.dtype, loss.device), [])
        if type(loss) is not Tensor:
            return torch.ones_like(loss, requires_grad=False) * weight
        if not left:  # one for each chunk: its receiver may keep or write it
            left.extend(torch.full((self._target.chunks,), weight, dtype=loss.dtype, device=loss.device).unbind())
        return left.pop()

    def _target_of(self, chunk: int, tree: Tree) -> Any:
        value = self._target.value(chunk)
        device = tree.tensors[0].device if tree.tensors and not self._is_target_there else None
        if device is None:
            return value
        self._is_target_there = all([piece[chunk].device == device for piece in self._target.pieces])
        return value if self._is_target_there else tree_map_only(
            Tensor, partial(self._execution.carried, device=device), value
        )

    def _differentiated(self, chunk: int, roots: Roots, own: Sequence[Tensor], tree: Tree) -> Roots:
        """Go on from the outputs, and add the gradients of leaves that the loss reads to its sums."""
        foreign = list(roots.foreign.values())
        with hooks_asleep(foreign), without_autocast():
            found = gradients(roots.tensors, [*own, *foreign], roots.grads, retain=bool(foreign))
        for leaf, grad in zip(foreign, found[len(own) :], strict=True):
            if grad is not None:
                earlier = self.sums.get(id(leaf))
                self.sums[id(leaf)] = (leaf, owned(grad, leaf) if earlier is None else earlier[1] + grad)
        grads = iter(found)
        of_outputs = tuple([next(grads) if tensor.requires_grad else None for tensor in tree.tensors])
        if self.compares:
            self._grads[chunk] = of_outputs
        return roots_of(of_outputs, [tensor if tensor.requires_grad else None for tensor in tree.tensors])

    def check(self, outputs: Sequence[Activations]) -> None:
        """Raise if the chunks' losses do not combine to that of the mini-batch: all have been computed.

        A validating call computes it on the joined output; any other checks the divisors in the chunks' losses.
        """
        execution = self._execution
        if self._is_checked or not execution.has_last:
            return
        self._is_checked = True
        self._loss.check_counts()
        if not self.compares:
            if not self._loss.is_proven:
                raise self._loss.unproven()
            return
        with execution.generators:
            execution.seeder().seed(0, execution.layer_of_loss)
            scale = None if self._scaler is None else self._scaler.get_scale()
            check_joined(self._loss, self._target, outputs, self._grads, execution.setup.grad, scale)


def _is_written(clone: Tensor, tensor: Tensor) -> bool:
    return not same_values(clone, tensor) if clone.is_inference() else clone._version > 0


def _refuse_ours(leaf: Tensor) -> None:
    what = getattr(leaf, MARK, None)
    if what is not None:
        raise RuntimeError(
            f"loss_fn computes with a tensor that depends on {what} but did not come through its arguments. Its "
            "gradient would be lost. Return it from the last stage as part of the output."
        )
