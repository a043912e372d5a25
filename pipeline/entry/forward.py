"""`out = pipe(x); loss(out).backward()`: a Pipe as a function that autograd differentiates, to any order.

    Pipe.forward      F half, then x, parameters in use --PipeFunction--> token --PipeOutput--> out
    loss.backward()   PipeOutput.backward: hands on the gradients of out, and the stream in which they are computed
                      PipeFunction.backward: [1] gradients only: B half, one whole gradient per parameter
                                             [2] create_graph: a differentiable recomputation (Call.differentiate)

The F half runs before `apply`, which shows the differentiable outputs and the parameters in use: the hooks of a
parameter that no output depends on must not run. (Over ranks all are leaves: those that watch its node do.)

The nodes are in nodes.py. Over ranks [2] is [1] and a node of its own behind the gradients, see second_backward.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from partition.process_lock import LockHold
from pipeline.common.accelerators import current_streams
from pipeline.common.graph import asks_for_all_leaves
from pipeline.common.torch_modes import outside_vmap
from pipeline.data.microbatch import gather, refuse_layouts
from pipeline.data.pytrees import Activations, Grads, Tree, unshared, versions
from pipeline.distributed.agreement import OPTIONS
from pipeline.entry.attached_call import AttachedCall
from pipeline.entry.nodes import OutputGrads, attach, is_batched, is_in_vmap
from pipeline.entry.second_backward import SecondBackward
from pipeline.execution.call import Call
from pipeline.execution.communicator import CommonTensors, Pair, Verdict, share_output
from pipeline.execution.final_gradients import EarlyUse
from pipeline.stage.hooks import add_hooked


def attached(call: Call, hold: LockHold, on_backward: Callable[[], None], everywhere: bool = True) -> Any:
    """The value of a call, attached to autograd's graph where a tensor of it needs a gradient.

    Args:
        call: the call to run.
        hold: its hold of the call lock.
        on_backward: called at the end of each backward.
        everywhere: whether all ranks get the output; else the last one, and the others a number in its place.
    """
    call.run_forward()
    with call:
        messages, call.outputs = call.outputs, []
        owners = call.owners() if call.execution.setup.grad else []
        output: Activations | None = None
        sizes: tuple[tuple[int, ...], ...] = ()
        if call.execution.has_last:
            tree, sizes = gather([message.tree for message in messages], call.batch.rows, call.batch.batch_dim)
            columns = zip(*[message.needs_grad for message in messages], strict=True)
            needs_grad = tuple([any(column) for column in columns])
            if call.batch.chunks > 1:
                refuse_layouts(compress(tree.tensors, needs_grad))
            else:  # they are not joined, in new memory
                tree = Tree(unshared(tree.tensors, [*call.batch.tensors, *owners]), tree.skeleton)
            output = Activations(tree, needs_grad)
        reached = call.communicator.agree(Verdict(None, None, output is not None and any(output.needs_grad))).reached
        if everywhere:
            output = share_output(call.communicator.exchange, output)
        tree, needs_grad, _, _ = output or Activations(Tree((torch.zeros((), device="cpu"),), None), (reached,))
    if not any(needs_grad):
        return tree.build(tree.tensors)
    tensors = call.batch.tree.tensors
    input_indices = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
    streams = current_streams(call.execution.devices)
    forward = AttachedCall(call, hold, sizes, everywhere, input_indices, owners, versions(tensors), streams)
    leaves = forward.leaves
    if forward.needs_leaf:
        leaves.append(call.communicator.topology.nothing.requires_grad_())
    return tree.build(attach(Backward(forward, on_backward), tree.tensors, list(needs_grad), leaves))


class Backward:
    """The backward of one forward.

    Args:
        forward: its call.
        on_backward: called at its end.

    Attributes:
        early_use: of whole gradients in the backward under way; over ranks, where all agree first, there is none.
    """

    def __init__(self, forward: AttachedCall, on_backward: Callable[[], None]) -> None:
        self._forward = forward
        self._call = forward.call
        self._on_backward = on_backward
        self.early_use: EarlyUse | None = None

    @property
    def is_alone(self) -> bool:
        """Whether this process runs every stage."""
        return self._call.communicator.is_alone

    def __call__(self, output_grads: OutputGrads, retain: bool) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs that need one, and of the owners. `output_grads`: those of the outputs."""
        with self._forward.going_back(lambda: self._call.communicator.again()) as communicator:
            grads = output_grads.received()
            options = {OPTIONS: f"create_graph={torch.is_grad_enabled()}"}
            communicator.open(lambda values: options, draws=False, tensors=self._compared(grads))
            result = self._compute(grads, retain)
            communicator.agree(Verdict(None, None, True))
        self._on_backward()
        self._forward.handed_on(result)
        result = (*result, torch.zeros(0, device="cpu")) if self._forward.needs_leaf else result
        if output_grads.link is None or self.is_alone:
            return result
        return SecondBackward(self._forward, communicator, grads).differentiable(result, grads, output_grads.link)

    def _compute(self, grads: Grads, retain: bool) -> tuple[Tensor | None, ...]:
        if self._call.is_released:  # where a backward has succeeded, autograd refuses the next one
            raise RuntimeError(
                "an earlier backward through this output of the Pipe failed part-way, and its chunks are spent. Run "
                "the forward again, or use retain_graph=True where a backward may fail."
            )
        if any(map(is_in_vmap, grads)):
            raise RuntimeError(
                "torch.func.vmap over torch.autograd.grad cannot go through a Pipe. Use torch.autograd.grad(..., "
                "is_grads_batched=True), which gives the same."
            )
        if self._call.execution.setup.compares or torch.is_grad_enabled() or not asks_for_all_leaves():
            self._forward.refuse_stray()  # else the stages' guards see what arrives
        batched = any(map(is_batched, grads))
        moved = any(stage.snapshot.buffers.moved() for stage in self._call.stages)
        parts = self._forward.parts(grads)
        create_graph = torch.is_grad_enabled()
        if batched or moved or create_graph and (self.is_alone or self._call.communicator.averager is not None):
            self._refuse_over_ranks(batched, moved)
            self._forward.check_input()
            with outside_vmap():
                inputs, totals = self._call.differentiate(parts, self._forward.owners, create_graph)
            if not retain:
                self._call.release()
            return *(inputs[index] for index in self._forward.input_indices), *totals
        with torch.no_grad():
            return self._gradients(parts, retain)

    def _gradients(self, parts: Sequence[Grads], retain: bool) -> tuple[Tensor | None, ...]:
        """The gradients alone: the B half."""
        try:
            self._call.run_backward(parts, retain, self.early_use if self.is_alone else None)
        except BaseException:
            if not retain:
                self._call.release()
            raise
        inputs = self._call.input_grads()
        sums = self._sums()
        if any([stage.aliases.are_held for stage in self._call.stages]):
            self._forward.refuse_stray()  # before autograd goes on in a graph that is spent, and says only that
        if not retain:
            self._call.release()
        input_indices, owners = self._forward.input_indices, self._forward.owners
        pairs = [sums.pop(id(owner), None) for owner in owners]
        add_hooked(list(sums.values()))  # of parameters missing in the graph: layers with torch's reentrant checkpoint
        return *(inputs[index] for index in input_indices), *(None if pair is None else pair[1] for pair in pairs)

    def _compared(self, grads: Grads) -> CommonTensors:
        """The gradients of the output, which must be the same on all ranks if all have it."""
        batched = any(is_in_vmap(grad) or is_batched(grad) for grad in grads)  # refused later
        return CommonTensors(output_grads=grads if self._forward.is_everywhere and not batched else ())

    def _sums(self) -> dict[int, Pair]:
        """By id of the owner: (owner, whole gradient); with replicas the mean of theirs."""
        sums, averager = self._call.sums(), self._call.communicator.averager
        if averager is None:
            return sums
        return {id(owner): (owner, grad) for owner, grad in averager.average(list(sums.values()), None)}

    def _refuse_over_ranks(self, batched: bool, moved: bool) -> None:
        """Raise over ranks: a recomputation of all stages needs them in this process."""
        if self.is_alone:
            return
        if moved and not batched:
            raise RuntimeError(
                "a buffer that the forward read was changed before its backward (a BatchNorm trained in between, "
                "say). Over ranks it cannot be recomputed: run the backward first."
            )
        if not batched:
            raise RuntimeError(
                "create_graph=True cannot go through a Pipe with replicas, whose gradients are means over other "
                "mini-batches. Use a Pipe without them (replicas=None) for what needs second derivatives."
            )
        raise RuntimeError(
            "is_grads_batched=True cannot go through a Pipe over ranks or with replicas. Take the gradients one by "
            "one, or use devices=[...] in one process; pipeline.curvature has products with several vectors at once."
        )
