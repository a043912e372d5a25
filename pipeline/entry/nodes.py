"""Nodes of autograd's graph that stand for a computation outside it: a forward of the stages, or their backward.

    leaves --PipeFunction--> token --PipeOutput--> outputs

There are two nodes since autograd runs each in the thread of its output's device. A Pipe whose backward ran in the
thread of an accelerator would wait there for lanes that wait for autograd's work in that thread. The token is on the
host, so the backward runs in the thread that called `loss.backward()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipeline.common.accelerators import is_accelerator, use_here
from pipeline.common.torch_modes import eagerly
from pipeline.data.pytrees import Grads


class OutputGrads(NamedTuple):
    """The gradients of the outputs.

    Attributes:
        grads: with their graph, where this backward is to be differentiated.
        stream: in which they are computed. None: on the host.
        link: where this backward is to be differentiated, an output of the node behind the outputs: what depends on it
            has this node's backward, and with it that of the stages, run again. It has no values.
    """

    grads: Grads
    stream: torch.Stream | None
    link: Tensor | None

    def received(self) -> Grads:
        """The gradients, for use in the streams that are current now on their devices."""
        for grad in self.grads:
            if self.stream is not None and grad is not None and is_accelerator(grad.device):
                reader = torch.accelerator.current_stream(grad.device)
                if reader != self.stream:  # of several devices, autograd has seen to one
                    reader.wait_stream(self.stream)
                    use_here([grad])
        return self.grads


BackwardCall: TypeAlias = Callable[[OutputGrads, bool], tuple[Tensor | None, ...]]


class PipeFunction(torch.autograd.Function):
    """The node that stands in autograd's graph for all stages. Its output is a token on the host."""

    @staticmethod
    def forward(ctx: Any, backward: BackwardCall, *inputs: Tensor) -> Tensor:
        ctx.backward_call = backward
        token = torch.empty(0, dtype=torch.float32, device="cpu")
        ctx.save_for_backward(token.detach())  # so that a second backward raises autograd's own error
        return token

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:  # pragma: no cover
        ctx.saved_tensors
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        grads = eagerly(_call, ctx.backward_call, getattr(token, _OUTPUT_GRADS), retain)
        if not retain:
            ctx.backward_call = None  # a loss that is kept would keep the mini-batch
        return None, *grads


def _call(backward: BackwardCall, *arguments: Any) -> tuple[Tensor | None, ...]:  # pragma: no cover
    return backward(*arguments)


class PipeOutput(torch.autograd.Function):
    """The node behind the outputs. Its backward runs in autograd's thread for their device, and waits for nothing."""

    @staticmethod
    def forward(
        ctx: Any, outputs: tuple[Tensor, ...], needs_grad: list[bool], token: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(out for out, needs in zip(outputs, needs_grad, strict=True) if not needs))
        link = torch.empty(0, dtype=torch.float32, device="cpu")
        ctx.save_for_backward(link)  # an output that is saved makes no cycle of references
        return (*outputs, link)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pragma: no cover
        *grads, _ = output_grads
        (link,) = ctx.saved_tensors if torch.is_grad_enabled() else (None,)
        on_host = not any([grad is not None and is_accelerator(grad.device) for grad in grads])
        token = torch.empty(0, dtype=torch.float32, device="cpu")  # else autograd would hand on another one
        stream = None if on_host else torch.accelerator.current_stream()
        setattr(token, _OUTPUT_GRADS, OutputGrads(tuple(grads), stream, link))
        return None, None, token


_OUTPUT_GRADS = "_penstock_given"  # set on the gradient of a token
# Function.apply without its Python part, which looks at each parameter.
_apply_pipe_function: Callable[..., Tensor] = super(torch.autograd.Function, PipeFunction).apply
_apply_pipe_output: Callable[..., tuple[Tensor, ...]] = PipeOutput.apply


def attach(
    backward: BackwardCall, outputs: Sequence[Tensor], needs_grad: Sequence[bool], leaves: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Outputs as functions of `leaves`, whose gradients `backward` computes.

    Args:
        backward: called with the gradients of the outputs, and whether another backward may come.
        outputs: without a graph.
        needs_grad: of which of them.
        leaves: at least one requires a gradient.
    """
    *attached, _ = _apply_pipe_output(tuple(outputs), list(needs_grad), _apply_pipe_function(backward, *leaves))
    return tuple(attached)


def is_in_vmap(grad: Tensor | None) -> bool:
    """Whether a gradient comes from within torch.func.vmap."""
    return grad is not None and torch._C._functorch.is_batchedtensor(grad)


def is_batched(grad: Tensor | None) -> bool:
    """Whether a gradient stands for several: is_grads_batched=True."""
    return grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad)
