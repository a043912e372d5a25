"""The entry points of a Pipe: what each of its methods does, given its runtime.

    forward     x --scatter--> chunks --call--> outputs, joined, with one node in autograd's graph
    step        x, target --scatter--> chunks --call with the loss behind it--> sums of gradients --sink--> Step
    evaluate    the same in eval mode, whose sink takes the loss alone
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from partition.modes import modes_kept
from pipeline.common.arguments import check_flags, check_limit
from pipeline.common.call_lock import turn
from pipeline.common.module_tables import training_flags
from pipeline.data.microbatch import scatter
from pipeline.entry.eager_step import EagerSink
from pipeline.entry.forward import attached
from pipeline.entry.minibatches import cut_mini_batches, is_loader, noting_pairs, pairs, read_before
from pipeline.entry.runtime import Request, Runtime
from pipeline.entry.sinks import GradSink, LossSink, OptimizerSink, Sink, StoreSink, clip_grads
from pipeline.entry.step import RunWithLoss, Step
from pipeline.entry.step_arguments import StepArguments
from pipeline.entry.validation import check_hooks
from pipeline.execution.call import Call
from pipeline.execution.communicator import Communicator
from pipeline.execution.execution import Execution
from pipeline.execution.plan import plan_forward, plan_step
from pipeline.gradients.eager import EagerUpdate
from scheduler.collecting import no_collecting


def sink_of(arguments: StepArguments) -> Sink:
    """The sink that the arguments of a step ask for."""
    if isinstance(arguments.optimizer, EagerUpdate):
        return EagerSink()
    if arguments.optimizer is not None:
        return OptimizerSink()
    return GradSink() if arguments.grads == "param" else StoreSink()


def forward(runtime: Runtime, value: Any, output: str) -> Any:
    """`pipe(input)`: the value, differentiable by autograd."""
    if output not in ("all", "last"):
        raise ValueError(f"output is {output!r}. Use 'all' or 'last': which ranks get the output.")
    grad, settings = torch.is_grad_enabled(), runtime.settings
    with no_collecting(), turn() as hold, runtime.communicator("forward", averages=grad) as communicator:
        batch = scatter(value, settings.chunks, batch_dim=settings.batch_dim)
        request = Request(plan_forward, grad, {"output": output}, keep=True)
        execution = Execution(runtime.agreed(request, batch, communicator), batch)
        return attached(Call(execution), hold, runtime.history.stale.mark, everywhere=output == "all")


def step(runtime: Runtime, arguments: StepArguments) -> Step:
    """`pipe.step`: forward, loss and backward of one mini-batch in the order of the schedule."""
    if is_loader(arguments.x):
        pairs_read = read_before(runtime, "step", lambda: list(pairs(arguments.x, arguments.target, "step")))
        arguments = arguments._replace(x=iter(pairs_read))
    with no_collecting(), turn(), runtime.communicator("step", averages=True) as communicator:
        request = Request(plan_step, True, arguments.options, scaler=arguments.scaler)
        result = _run(runtime, communicator, arguments, request, sink_of(arguments))
        runtime.history.stale.mark()
        return result


def evaluate(runtime: Runtime, arguments: StepArguments, sink: LossSink | None = None) -> Step:
    """`pipe.evaluate`: the loss and the outputs of one mini-batch in eval mode, without gradients.

    Args:
        runtime: of the Pipe.
        arguments: of the call.
        sink: what the loss goes to.
    """
    with no_collecting(), turn(), runtime.communicator("evaluate") as communicator:
        request = Request(plan_forward, False, arguments.options)
        return _run(runtime, communicator, arguments, request, sink or LossSink(), _evaluating(runtime))


def _run(
    runtime: Runtime,
    communicator: Communicator,
    arguments: StepArguments,
    request: Request,
    sink: Sink,
    modes: AbstractContextManager[None] = nullcontext(),
) -> Step:
    """Run a mini-batch that ends in a loss. `modes`: those in which layers and loss compute."""
    start = perf_counter()
    arguments.check()
    check_hooks(runtime.module, "pipe.step" if request.grad else "pipe.evaluate")
    recorder = runtime.recorder() if arguments.trace else None
    with noting_pairs(arguments.x, arguments.target):
        batch, target = cut_mini_batches(runtime.settings, arguments.x, arguments.target)
        if arguments.optimizer is not None:
            arguments.check_holds(list(runtime.module.named_parameters()), batch.tensors)
        with modes:
            execution = Execution(runtime.agreed(request, batch, communicator, target, recorder), batch)
            result = sink.run(RunWithLoss(runtime, execution, arguments, target))
    end = perf_counter()
    for trace in execution.setup.traces:
        trace.steps.append((start, end))
    if recorder is None:
        return result
    recorder.events, recorder.steps = communicator.exchange.share_events(recorder.events, recorder.steps)
    return replace(result, timeline=recorder.timeline)


@contextmanager
def _evaluating(runtime: Runtime) -> Iterator[None]:
    """Within: eval mode, without gradients; at the end the modes are as they were."""
    runtime.follow_model()
    pipe = runtime.module
    layers = list(pipe.children())
    modules = [module for layer in layers for module in layer.modules()]
    with modes_kept(modules), training_flags([pipe], [False]), torch.no_grad():
        runtime.settings.origin.modes.tell(layers, False)
        yield


def clip_grad_norm_(runtime: Runtime, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """`pipe.clip_grad_norm_`: clip `.grad` of all parameters, over all ranks."""
    with turn(), runtime.communicator("clip_grad_norm_") as communicator:
        check_limit("max_norm", max_norm)
        check_limit("norm_type", norm_type)
        check_flags(error_if_nonfinite=error_if_nonfinite)
        words = f"{max_norm}, {norm_type}, error_if_nonfinite={error_if_nonfinite}"
        communicator.open(lambda values: {"the arguments": words}, draws=False)
        named = list(runtime.module.named_parameters())
        return clip_grads(named, max_norm, norm_type, communicator, error_if_nonfinite)
