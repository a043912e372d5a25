"""A step or an evaluation: a call with the loss behind its last stage, and its result.

    StepArguments  -->  RunWithLoss.play  -->  a call whose sums a sink takes (sinks.py)  -->  Step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from pipeline.common.cadence import validates
from pipeline.data.loss import Loss
from pipeline.data.loss_proof import LossCount
from pipeline.data.microbatch import Batch, gather, tree_text
from pipeline.data.pytrees import Activations, flatten
from pipeline.entry.loss_end import LossEnd
from pipeline.entry.runtime import Runtime
from pipeline.entry.step_arguments import StepArguments
from pipeline.execution.call import Call
from pipeline.execution.communicator import share_output
from pipeline.execution.execution import Execution
from pipeline.execution.final_gradients import EarlyUse
from pipeline.gradients.store import GradStore
from scheduler import Timeline
from scheduler.summary import size_of

EarlyUseOf: TypeAlias = Callable[[Call, LossEnd, Loss], EarlyUse]  # of the gradients of a call that is to run


@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """The result of a step.

    Attributes:
        loss: the un-pipelined loss of the mini-batch, a 0-d tensor.
        grads: the gradients, with grads="store"; else None.
        outputs: the joined outputs, with outputs=True; else None.
        timeline: when each action ran, with trace=True; else None.
        metrics: what loss_fn reported beside its loss, over the mini-batch, by name: 0-d tensors without gradient.
        grad_norm: the norm of all gradients over all ranks, unscaled, before they were clipped, a 0-d tensor; with
            clip_grad_norm (inf measures, and clips nothing), or an EagerUpdate of two passes; else None.
    """

    loss: Tensor
    grads: GradStore | None = None
    outputs: Any = None
    timeline: Timeline | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    grad_norm: Tensor | None = None

    if not TYPE_CHECKING:  # a type checker names what there is

        def __getattr__(self, name: str) -> NoReturn:
            hint = " The loss is step.loss; a step has run its backward." if hasattr(Tensor, name) else ""
            raise AttributeError(f"a Step has no attribute {name!r}.{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        norm = [] if self.grad_norm is None else [f", gradient norm {self.grad_norm.item():.6g}"]
        lines = ["".join([f"Step: loss {self.loss.item():.6g}", *norm])]
        lines += [f"  {name} {value.item():.6g}" for name, value in self.metrics.items()]
        lines += [] if self.grads is None else [f"  grads: {self.grads!r}"]
        lines += [] if self.outputs is None else [f"  outputs: {_shapes(self.outputs)}"]
        if self.timeline is not None:
            lines += [f"  timeline: {size_of(self.timeline)}", "  print(step.timeline), print(pipe.report(step))"]
        return "\n".join(lines)


def _shapes(outputs: Any) -> str:
    return shorten(tree_text(flatten(outputs, "the output")), 100, placeholder=" ...")


@dataclass(eq=False)
class RunWithLoss:
    """A call that ends in a loss, which runs once, or once more from its beginning.

    Attributes:
        runtime: of the Pipe.
        execution: of the run under way, or of the next one.
        arguments: those of the call.
        target: of the mini-batch, cut.
    """

    runtime: Runtime
    execution: Execution
    arguments: StepArguments
    target: Batch

    def play(self, early_use_of: EarlyUseOf | None = None) -> tuple[Call, Loss]:
        """Run the call. Validating calls, and those of a new form of loss, compare it with the un-pipelined one.

        Args:
            early_use_of: gives the use of gradients while it runs. None: they wait for the end.
        """
        execution, arguments, counts = self.execution, self.arguments, self.runtime.history.losses
        rows = execution.batch.rows
        is_several, is_uneven = len(rows) > 1, len(set(rows)) > 1
        kind = is_uneven, str(arguments.loss_reduction)  # which may be anything, until Loss looks at it
        known = counts.of(arguments.loss_fn).get(kind, LossCount())
        loss = Loss(arguments.loss_fn, arguments.loss_reduction, rows, arguments.is_part, known)
        number = known.number + is_several
        compare = is_several and validates(number)
        end = LossEnd(execution, loss, self.target, arguments.scaler, compare, arguments.outputs)
        if arguments.scaler is not None and not execution.has_last:
            device = self.runtime.settings.layout.devices[0]
            arguments.scaler.scale(torch.zeros((), device=device))  # its scale exists from its first use on
        try:
            with Call(execution, end, arguments.outputs) as call:
                call.run_forward(None if early_use_of is None else early_use_of(call, end, loss))
                end.check()
        except BaseException:  # the next call validates
            counts.of(loss.loss_fn).clear()
            raise
        # Under its key after the call: a loss that counts its calls must not look new in each.
        counts.of(loss.loss_fn)[kind] = loss.known(0 if end.compares and end.is_flat else number, end.compares)
        return call, loss

    def ended(self, call: Call) -> Any:
        """End a call, which keeps nothing for a backward then. Returns its joined outputs, detached, on every rank.

        None: they are not wanted.
        """
        output = None
        if self.arguments.outputs and call.execution.has_last:
            trees = [message.tree for message in call.outputs]
            output = Activations(gather(trees, call.batch.rows, call.batch.batch_dim)[0], ())
        call.release()
        if not self.arguments.outputs:
            return None
        tree = share_output(call.communicator.exchange, output).tree
        return tree.build(tree.tensors)
