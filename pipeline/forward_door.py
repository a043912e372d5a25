"""`out = pipe(x); loss(out).backward()`: a Pipe as a function that autograd differentiates, to any order.

    Pipe.forward          F half, then PipeFunction.apply(x, parameters in use) -> out
    loss.backward()       PipeFunction.backward: [1] gradients only: B half, one whole gradient per parameter
                                                 [2] create_graph: a differentiable recomputation (Call.differentiate)

The F half runs before `apply`, so that which outputs are differentiable and which parameters are in use is known: the
hooks of a parameter that no output depends on must not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeline.call import Call
from pipeline.errors import CheckpointError
from pipeline.graph import refuse_tangents
from pipeline.hooks import deliver, skip_none
from pipeline.microbatch import gather
from pipeline.trees import Grads, Tree, versions
from pipeline.turns import Turn, turn


def run(call: Call, now: Turn) -> Any:
    """The value of `pipe(x)`, attached to autograd's graph where something in it wants a gradient; `now`: its turn."""
    call.run_forward()
    messages, call.outputs = call.outputs, []
    try:
        joined, sizes = gather([message.tree for message in messages], call.batch.rows)
    except BaseException:
        call.abandon()
        raise
    needs_grad = [any(column) for column in zip(*(message.needs_grad for message in messages), strict=True)]
    if not any(needs_grad):
        return joined.build(joined.tensors)
    return joined.build(_attach(call, now, joined, sizes, needs_grad))


def _attach(
    call: Call, now: Turn, joined: Tree, sizes: Sequence[tuple[int, ...]], needs_grad: list[bool]
) -> Sequence[Tensor]:
    tensors = call.batch.tree.tensors
    wanted = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
    backward = Backward(call, now, sizes, wanted, call.owners())
    outputs: Sequence[Tensor] = attach(
        backward, joined.tensors, needs_grad, *(tensors[index] for index in wanted), *backward.owners
    )
    return outputs


class Backward:
    """What the backward of one forward needs: the call, and whose gradients are returned in which order."""

    def __init__(
        self, call: Call, then: Turn, sizes: Sequence[tuple[int, ...]], wanted: Sequence[int], owners: Sequence[Tensor]
    ) -> None:
        self.owners = owners
        self._then = then
        self._call = call
        self._sizes = sizes
        self._wanted = wanted
        self._input_versions = versions(call.batch.tree.tensors)
        self._is_spent = False  # a backward failed part-way

    def __call__(self, grads: Grads, retain: bool) -> tuple[Tensor | None, ...]:
        """The gradients of the wanted inputs and of the owners."""
        with turn(self._then, may_wait=not self._call.is_accelerated):
            result = self._compute(grads, retain)
        tensors = self._call.batch.tree.tensors
        receivers = [*(tensors[index] for index in self._wanted), *self.owners]
        skip_none([leaf for leaf, grad in zip(receivers, result, strict=True) if grad is None])
        return result

    def _compute(self, grads: Grads, retain: bool) -> tuple[Tensor | None, ...]:
        if self._is_spent:
            raise RuntimeError(
                "an earlier backward through this output of the Pipe failed part-way, and its chunks are spent. Run "
                "the forward again, or use retain_graph=True where a backward may fail."
            )
        if any(grad is not None and torch._C._functorch.is_batchedtensor(grad) for grad in grads):
            raise RuntimeError(
                "torch.func.vmap over torch.autograd.grad cannot go through a Pipe. Use torch.autograd.grad(..., "
                "is_grads_batched=True), which gives the same."
            )
        parts = self._parts(grads)
        batched = any(grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads)
        moved = any(stage.recall.buffers.moved() for stage in self._call.stages)
        if torch.is_grad_enabled() or batched or moved:
            self._check_input()
            with _outside_vmap(batched):
                inputs, totals = self._call.differentiate(parts, self.owners, torch.is_grad_enabled())
            if not retain:
                self._call.release()
            return *(inputs[index] for index in self._wanted), *totals
        try:
            self._call.run_backward(parts, retain)
        except BaseException:
            self._is_spent = not retain
            if self._is_spent:
                self._call.release()
            raise
        inputs = self._call.input_grads()
        sums = self._call.sums()
        if not retain:
            self._call.release()
        found = [sums.pop(id(owner), None) for owner in self.owners]
        deliver(list(sums.values()))  # what the graph did not show: layers that run torch's reentrant checkpoint
        return *(inputs[index] for index in self._wanted), *(None if pair is None else pair[1] for pair in found)

    def _parts(self, grads: Grads) -> list[Grads]:
        """The gradients of each chunk's outputs."""
        columns = [
            (None,) * len(sizes) if grad is None else _cut(grad, sizes)
            for grad, sizes in zip(grads, self._sizes, strict=True)
        ]
        return [tuple(column[chunk] for column in columns) for chunk in range(self._call.batch.chunks)]

    def _check_input(self) -> None:
        if versions(self._call.batch.tree.tensors) != self._input_versions:
            raise CheckpointError(
                "the input of the pipe was changed in place between the forward and the recomputation that "
                "create_graph=True needs. Change it after the backward, or give the pipe a clone."
            )


def _cut(grad: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return (grad,) if len(sizes) == 1 else torch.split(grad, list(sizes))


class PipeFunction(torch.autograd.Function):
    """The node that stands in autograd's graph for a whole pipe."""

    @staticmethod
    def forward(
        ctx: Any, backward: Backward, outputs: tuple[Tensor, ...], needs_grad: list[bool], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.backward_call = backward
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.empty(0, device="cpu"))  # so that a second backward gets autograd's own words
        ctx.mark_non_differentiable(*(out for out, needs in zip(outputs, needs_grad, strict=True) if not needs))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pragma: no cover
        ctx.saved_tensors
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        return None, None, None, *ctx.backward_call(grads, retain)


attach: Callable[..., tuple[Tensor, ...]] = PipeFunction.apply


@contextmanager
def _outside_vmap(batched: bool) -> Iterator[None]:
    """Batched gradients run the backward within vmap, where layers may draw no random numbers; the layers are not
    batched, only the gradients are, so the recomputation steps outside."""
    levels = 0
    if batched:
        levels = 1
        while torch._C._vmapmode_decrement_nesting() > 0:
            levels += 1
    try:
        yield
    finally:
        for _ in range(levels):
            torch._C._vmapmode_increment_nesting()


def refuse_transforms(tensors: Callable[[], Sequence[Tensor]]) -> None:
    """Raise where the derivatives asked for do not go through autograd's graph, the only way that a Pipe offers.

    Args:
        tensors: gives the input, the parameters and the buffers; asked only where forward-mode AD is on.

    Raises:
        RuntimeError: within torch.func transforms, or with forward-mode tangents.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "torch.func transforms (grad, vmap, jvp, jacrev ...) cannot see through a Pipe. Use torch.autograd.grad "
            "with create_graph=True, which is exact to any order, or pipe.to_sequential() for the plain module."
        )
    if torch.autograd.forward_ad._current_level >= 0:
        refuse_tangents(tensors())
