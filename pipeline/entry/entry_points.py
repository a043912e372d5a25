"""The entry points of a Pipe: what each of its methods does, given its runtime.

    forward     x --scatter--> chunks --call--> outputs, joined, with one node in autograd's graph
    step        x, target --scatter--> chunks --call with the loss behind it--> sums of gradients --sink--> Step
    evaluate    the same in eval mode, without gradients
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.common.arguments import check_flags, check_limit, check_norm_type
from pipeline.common.call_lock import turn
from pipeline.common.module_tables import training_flags
from pipeline.data.loss import Loss, LossFn
from pipeline.data.microbatch import scatter, scatter_like
from pipeline.entry.eager_step import EagerSink
from pipeline.entry.forward import attached
from pipeline.entry.runtime import Request, Runtime
from pipeline.entry.settled import refuse_recording
from pipeline.entry.sinks import GradSink, OptimizerSink, Sink, StoreSink, clip_grads
from pipeline.entry.step import RunWithLoss, Step
from pipeline.entry.validation import check_holds, check_step, parameters_of
from pipeline.execution.call import Call
from pipeline.execution.communicator import Verdict
from pipeline.execution.plan import plan_forward, plan_step
from pipeline.gradients.eager import EagerUpdate


def sink_of(
    optimizer: torch.optim.Optimizer | EagerUpdate | None,
    max_norm: float | None,
    scaler: torch.amp.GradScaler | None,
    grads: str,
) -> Sink:
    """The sink that the arguments of a step ask for.

    Raises:
        TypeError, ValueError: arguments that are invalid, or that exclude each other.
    """
    check_step(optimizer, max_norm, scaler, grads)
    if isinstance(optimizer, EagerUpdate):
        return EagerSink(optimizer)
    if optimizer is not None:
        return OptimizerSink(optimizer, max_norm, scaler)
    return GradSink(scaler) if grads == "param" else StoreSink(max_norm, scaler)


def forward(runtime: Runtime, input: Any, output: str) -> Any:
    """`pipe(input)`: the value, differentiable by autograd."""
    if output not in ("all", "last"):
        raise ValueError(f"output is {output!r}. Use 'all' or 'last': which ranks get the output.")
    if torch.jit.is_tracing():
        refuse_recording("torch.jit.trace")
    grad, settings = torch.is_grad_enabled(), runtime.settings
    with turn() as now, runtime.communicator("forward", averages=grad) as communicator:
        batch = scatter(input, settings.chunks, batch_dim=settings.batch_dim)
        runtime.refuse_transforms(batch)
        request = Request(plan_forward, grad, {"output": output}, keep=True)
        execution = runtime.execution(request, batch, communicator)
        return attached(Call(execution), now, everywhere=output == "all")


def step(
    runtime: Runtime,
    x: Any,
    target: Any,
    loss_fn: LossFn,
    loss_reduction: str | None,
    outputs: bool,
    trace: bool,
    optimizer: torch.optim.Optimizer | EagerUpdate | None,
    clip_grad_norm: float | None,
    scaler: torch.amp.GradScaler | None,
    grads: str,
) -> Step:
    """`pipe.step`: forward, loss and backward of one mini-batch in the order of the schedule."""
    options = {
        "loss_reduction": loss_reduction, "clip_grad_norm": clip_grad_norm, "grads": grads, "outputs": outputs,
        "trace": trace, "optimizer": optimizer if isinstance(optimizer, EagerUpdate) else type(optimizer).__name__,
        "scaler": type(scaler).__name__,
    }  # fmt: skip
    settings, module = runtime.settings, runtime.module
    with turn(), runtime.communicator("step", averages=True) as communicator:
        check_flags(outputs=outputs, trace=trace)
        sink = sink_of(optimizer, clip_grad_norm, scaler, grads)
        batch = scatter(x, settings.chunks, "x", settings.batch_dim)
        if sink.optimizer is not None:
            beside = [*batch.tree.tensors, *parameters_of(loss_fn)]
            check_holds(sink.optimizer, list(module.named_parameters()), beside)
        runtime.refuse_transforms(batch)
        recorder = runtime.recorder() if trace else None
        aim = scatter_like(target, batch, "the target")
        execution = runtime.execution(Request(plan_step, True, options), batch, communicator, aim, recorder)
        new_loss = partial(Loss, loss_fn, loss_reduction, batch.rows)
        made = sink.run(RunWithLoss(runtime, execution, new_loss, aim, outputs, sink.scaler))
        return replace(made, timeline=runtime.timeline(recorder, communicator))


def evaluate(
    runtime: Runtime,
    x: Any,
    target: Any,
    loss_fn: LossFn,
    loss_reduction: str | None,
    outputs: bool,
    trace: bool,
) -> Step:
    """`pipe.evaluate`: the loss and the outputs of one mini-batch in eval mode, without gradients."""
    options = {"loss_reduction": loss_reduction, "outputs": outputs, "trace": trace}
    settings = runtime.settings
    with turn(), runtime.communicator("evaluate") as communicator:
        check_flags(outputs=outputs, trace=trace)
        batch = scatter(x, settings.chunks, "x", settings.batch_dim)
        aim = scatter_like(target, batch, "the target")
        modules = list(runtime.module.modules())
        with training_flags(modules, [module.training for module in modules]), torch.no_grad():
            runtime.module.eval()
            recorder = runtime.recorder() if trace else None
            execution = runtime.execution(Request(plan_forward, False, options), batch, communicator, aim, recorder)
            run = RunWithLoss(runtime, execution, partial(Loss, loss_fn, loss_reduction, batch.rows), aim, outputs)
            call, loss = run.play()
            with call:
                value = loss.value if execution.has_last else None
                verdict = communicator.agree(Verdict(value, None, True, False, loss.metrics))
                joined = run.joined(call)
        call.release()
        assert verdict.loss is not None  # the last stage's process has it
        timeline = runtime.timeline(recorder, communicator)
        return Step(verdict.loss, None, joined, timeline, verdict.metrics)


def clip_grad_norm_(runtime: Runtime, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """`pipe.clip_grad_norm_`: clip `.grad` of all parameters, over all ranks."""
    with turn(), runtime.communicator("clip_grad_norm_") as communicator:
        check_limit("max_norm", max_norm)
        check_norm_type(norm_type)
        check_flags(error_if_nonfinite=error_if_nonfinite)
        communicator.open(lambda values: {"the arguments": f"{max_norm}, {norm_type}"}, draws=False)
        named = list(runtime.module.named_parameters())
        return clip_grads(named, max_norm, norm_type, communicator, error_if_nonfinite)
