"""The backward of a backward over ranks: what `create_graph=True` puts behind the gradients of `pipe(x)`.

    x, this rank's parameters, gradients g of the output, link --PipeFunction, PipeOutput--> gradients
    cotangents c of the gradients --one pass of tangents over all ranks--> derivatives by x, the parameters and g

With phi = <c, gradients>, added up over all parameters of all ranks, each rank gets the derivatives of phi by its own
parameters, by x and by g. A rank's parameters are its own; x, g and a tied parameter are the same on several ranks and
count once. All ranks run this node as a whole, or none does: they agree on which backward it belongs to.

The link is an output of the node behind the output of `pipe(x)`. So that node's backward, which all ranks run together
too, follows on every rank, whatever the graph of the loss is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pipeline.common.errors import CheckpointError
from pipeline.data.pytrees import Grads, versions
from pipeline.distributed.agreement import OPTIONS
from pipeline.entry.attached_call import AttachedCall
from pipeline.entry.nodes import OutputGrads, attach, is_batched, is_in_vmap
from pipeline.execution.communicator import CommonTensors, Communicator, Verdict
from pipeline.transports.message import Message

_DIFFER = (
    "the second backward begins with other gradients on one rank than on another, at the gradient of the input's "
    "tensor {}: {}. Gradients of x are the same on all ranks and count once: compute the same from them on every rank"
)


class SecondBackward:
    """The backward of one backward.

    Args:
        forward: the call whose gradients these are.
        first: the communicator of the first backward.
        grads: those of the output, with which the first backward began.
    """

    def __init__(self, forward: AttachedCall, first: Communicator, grads: Grads) -> None:
        self._forward = forward
        self._call = forward.call
        self._leaves = forward.leaves
        self._first = first
        has_output = forward.is_everywhere or forward.call.execution.has_last
        self._bends = [has_output and grad is not None and grad.requires_grad for grad in grads]
        self._grads = tuple([None if grad is None else grad.detach() for grad in grads])
        self._versions = self._versions_of_grads()
        self._present: list[bool] = []  # which of the leaves have a gradient

    def differentiable(self, result: Sequence[Tensor | None], grads: Grads, link: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the leaves, as functions of these, of `grads` and of the link.

        Args:
            result: the gradients. One more than leaves in a process that has none: of the leaf that stands for them.
            grads: those of the output, with their graphs.
            link: see above.
        """
        self._present = [grad is not None for grad in result]
        nothing = [] if len(result) == len(self._leaves) else [self._call.communicator.topology.nothing]
        bent = [grad for grad, bends in zip(grads, self._bends, strict=True) if grad is not None and bends]
        present = [grad for grad in result if grad is not None]
        attached = iter(attach(self, present, [True] * len(present), [*self._leaves, *nothing, *bent, link]))
        return tuple([None if grad is None else next(attached) for grad in result])

    def __call__(self, grads: OutputGrads, retain: bool) -> tuple[Tensor | None, ...]:
        """The derivatives by all that the gradients are functions of. `grads`: the cotangents of the gradients."""
        with self._forward.going_back(partial(self._first.again, "second backward")) as communicator:
            remaining = iter(grads.received())
            cotangents = [next(remaining) if is_present else None for is_present in self._present]
            batched = any([is_batched(grad) or is_in_vmap(grad) for grad in cotangents])
            of_input = () if batched else tuple(cotangents[: len(self._forward.input_indices)])
            options = {OPTIONS: self._options()}
            communicator.open(lambda values: options, draws=False, tensors=CommonTensors((), of_input, _DIFFER))
            self._refuse(batched)
            self._forward.refuse_stray()
            self._forward.check_input()
            with torch.no_grad():
                of_leaves, of_grads = self._compute(cotangents)
            communicator.agree(Verdict(None, None, True))
        self._forward.handed_on([*of_leaves, *of_grads])
        nothing = [None] * (len(self._present) - len(self._leaves))
        bent = [grad for grad, bends in zip(of_grads, self._bends, strict=True) if bends]
        return *of_leaves, *nothing, *bent, None

    def _options(self) -> str:
        """The description on which all ranks agree."""
        bends = f"\nloss with a curvature={self._bends}" if self._forward.is_everywhere else ""
        return f"create_graph={torch.is_grad_enabled()}{bends}"

    def _refuse(self, batched: bool) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a third derivative cannot go through a Pipe over ranks: gradients that were taken with "
                "create_graph=True are differentiated with create_graph=True again. Leave it out of the second "
                "torch.autograd.grad or backward(), or use devices=[...] in one process, which has every order."
            )
        if batched:
            raise RuntimeError(
                "is_grads_batched=True and torch.func.vmap cannot go through a Pipe over ranks. Take one vector at a "
                "time, or H @ vectors of pipeline.curvature."
            )
        if self._call.is_released:
            raise RuntimeError(
                "gradients through a Pipe are differentiated a second time, but the graph of its output was freed: a "
                "backward through it ran without retain_graph=True. Give that to each backward but the last."
            )
        if self._versions_of_grads() != self._versions:
            raise CheckpointError(
                "a gradient of the pipe's output (grad_outputs) was changed in place between the backward that used it "
                "and the one that differentiates this. Give torch.autograd.grad a clone."
            )

    def _versions_of_grads(self) -> tuple[int, ...]:
        return versions([grad for grad in self._grads if grad is not None])

    def _compute(self, cotangents: Sequence[Tensor | None]) -> tuple[list[Tensor | None], Grads]:
        call, input_indices, owners = self._call, self._forward.input_indices, self._forward.owners
        owner_cotangents = cotangents[len(input_indices) :]
        pairs = zip(owners, owner_cotangents, strict=False)  # a process without owners has the leaf for nothing
        owner_pairs = {id(owner): (owner, grad) for owner, grad in pairs if grad is not None}
        of_owners = call.communicator.gradients.shared(owner_pairs)
        of_input: list[Tensor | None] = [None] * len(call.batch.tree.tensors)
        for index, grad in zip(input_indices, cotangents, strict=False):
            of_input[index] = grad
        parts = self._forward.parts(self._grads)
        inputs, products, tangents = call.differentiate_gradients(parts, tuple(of_input), of_owners)
        of_leaves = [inputs[index] for index in input_indices]
        of_leaves += [products[id(owner)][1] if id(owner) in products else None for owner in owners]
        return of_leaves, self._of_grads(tangents)

    def _of_grads(self, tangents: Sequence[Grads]) -> Grads:
        """The tangents of the output, which are the derivatives by its gradients, where these depend on anything."""
        if not any(self._bends):
            return (None,) * len(self._bends)
        message = Message(self._forward.join(tangents, self._grads)) if self._call.execution.has_last else None
        if not self._forward.is_everywhere:
            assert message is not None  # gradients of a number in the output's place do not bend
            return message.tensors
        return self._call.communicator.exchange.broadcast("the tangents of the output", -1, message).tensors
