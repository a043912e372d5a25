"""`pipe.step(x, y, loss_fn=f, optimizer=EagerUpdate(...))`: parameters are updated while the backward still runs.

    one process    stage s settled --GradientFinalizer--> whole gradient / divisor --hooks--> EagerStep.take
    over ranks     this rank's actions have run --> the divisor, from the last rank --> take; then all agree
    two runs       norms only --> EagerStep.clip_to --> everything put back --> once more, with the same seed

All checks that can refuse the step run before the first update, except those of other ranks.

Two runs are two calls of one seed. The first is abandoned like a failed call, which restores buffers and
generators. So the second computes the same gradients, and only the factor is new.

A schedule's order (looped-bfs) makes the gradients of some stages whole early; there is no second mechanism for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor

from partition.precision import without_autocast
from pipeline.common.graph import saved
from pipeline.data.loss import Loss, divide_, divided
from pipeline.data.pytrees import span_of
from pipeline.distributed.wrapped import OF_PARTS, refuse_parts
from pipeline.entry.loss_end import LossEnd
from pipeline.entry.sinks import Sink, check_reached, input_pairs, refuse_behind_x, summed
from pipeline.entry.step import RunWithLoss, Step
from pipeline.execution.call import Call
from pipeline.execution.communicator import Verdict
from pipeline.execution.final_gradients import EarlyUse
from pipeline.gradients.eager import EagerStep, EagerUpdate, check_free
from pipeline.recompute.reachable import ReachableState
from pipeline.stage.hooks import accumulate, grads_kept, hooked


class EagerSink(Sink):
    """An EagerUpdate, which gets each gradient as soon as it is whole."""

    def run(self, run: RunWithLoss) -> Step:
        """A step; with a norm over all gradients, of two runs."""
        update, named = run.arguments.optimizer, list(run.runtime.module.named_parameters())
        assert isinstance(update, EagerUpdate)  # or this is not its sink
        update.get_ready()
        _check(update, run, named)
        step = EagerStep(update, {id(param): name for name, param in named})
        norm: Tensor | None = None
        if step.only_norms:
            state = ReachableState.of_loss(run.arguments.loss_fn, run.execution.setup.stages)
            call, _ = _play(run, step)
            norm = call.communicator.exchange.joined_norm(step.norms, 2.0)
            step.clip_to(norm)
            run.execution = call.once_more()
            state.put_back()  # what loss_fn counts and keeps
        with update.guarded(step, run.execution.communicator.is_alone):
            call, verdict = _play(run, step)
            with call, without_autocast():
                owners = [owner for owner, _ in step.external]
                refuse_behind_x(call.batch.tensors, [owner for owner in owners if owner._backward_hooks])
                with grads_kept([*owners, *update.params]):
                    accumulate(step.external)
                    step.take_grads(update.params)  # of those with which the input was computed
                step.finish()
        with call:
            outputs = run.ended(call)
        call.communicator.close()
        return Step(verdict.value, None, outputs, None, verdict.metrics, norm)


def _check(update: EagerUpdate, run: RunWithLoss, named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise if parameters cannot be updated one by one."""
    refuse_behind_x(run.execution.batch.tensors, [param for _, param in named])
    refuse_parts(named, "a step with an EagerUpdate", OF_PARTS)
    stages = enumerate(run.execution.setup.stages)
    params = [(stage, param) for stage, layers in stages for layer in layers for param in layer.parameters()]
    refuse_shared_memory([(stage, param) for stage, param in params if update.holds(param)], "stage")
    is_elsewhere = run.execution.communicator.topology.is_elsewhere
    others = [
        (f"a parameter of shape {list(param.shape)}", param) for param in update.params if not is_elsewhere(param)
    ]
    used = [pair for pair in named if update.holds(pair[1]) or pair[1]._post_accumulate_grad_hooks]
    check_free([*[(f"'{name}'", param) for name, param in used], *others])


def _play(run: RunWithLoss, step: EagerStep) -> tuple[Call, Verdict]:
    """Run forward and backward, take the whole gradients of this process, and agree with the others."""
    is_alone = run.execution.communicator.is_alone
    call, loss = run.play(partial(_early_use, step) if is_alone else None)
    with call, without_autocast():
        inputs, averager = input_pairs(call), call.communicator.averager
        divisor = call.communicator.share_divisor(loss.divisor if call.execution.has_last else None)
        pairs = list(call.sums().values())
        if averager is not None:
            pairs = averager.average(pairs, divisor, waits=True)
        else:
            pairs = [(owner, divide_(grad, divisor)) for owner, grad in pairs]
        inputs = [(tensor, divided(grad, divisor)) for tensor, grad in inputs]  # two may share one gradient
        pairs = summed([*inputs, *pairs])
        reached = bool(pairs or step.updated or step.external or step.norms)
        start = perf_counter()
        while pairs:
            _take(step, *pairs.pop(0))
        if call.stages and not is_alone:  # else most were taken, and recorded, while the backward ran
            call.execution.record_update(call.stages[-1].layers.index, start)
        value = loss.value if call.execution.has_last else None
        verdict = call.communicator.agree(Verdict(value, None, reached, step.only_norms, loss.metrics.values))
        check_reached(verdict.reached)
        return call, verdict


def _take(step: EagerStep, owner: Tensor, grad: Tensor) -> None:
    """Let hooks act, and take what `.grad` would be then: a copy, if hooks keep the gradient, which a clip writes."""
    if owner._backward_hooks:
        ((owner, grad),) = hooked([(owner, grad)])
        if step.update.holds(owner) and owner.grad is None:
            accumulate([(owner, grad)])
            step.take_grads([owner])
            return
    step.take(owner, grad)


def _early_use(step: EagerStep, call: Call, end: LossEnd, loss: Loss) -> EarlyUse:
    """The use of gradients while the backward runs, where all stages are in this process."""
    by_threads, compares = call.execution.has_threads, call.execution.setup.compares
    divisor = cache(lambda: loss.divisor)  # all losses are known by then

    def take(owner: Tensor, grad: Tensor) -> None:
        _take(step, owner, divide_(grad, divisor()))

    def begin() -> Callable[[int], bool]:
        if compares:  # one thread drives all lanes then
            _refuse_later_weights(step, call)
        if by_threads and (compares or end.compares):
            return lambda key: False
        if not by_threads:  # with threads, buffers are swapped during recomputations
            call.check_forwards(memory=False)
        end.check()
        late = {*end.sums, *end.reads, *map(id, call.batch.tree.tensors)}
        return lambda key: key not in late

    return EarlyUse(begin, take)


def _refuse_later_weights(step: EagerStep, call: Call) -> None:
    """Raise where a stage still needs a weight, past autograd, that will be updated before its backward."""
    later: dict[int, str] = {}  # names of later stages' parameters, by address
    for stage in reversed(call.stages):
        stage_params = {_memory(param): param for param, _ in stage.aliases.trained}
        waits = {*stage_params, *map(_memory, stage.external.leaves.values())}  # for this stage's backward
        for tensor in saved(stage.kept_graphs) if later else ():
            name = later.get(_memory(tensor))
            if name is not None and _memory(tensor) not in waits:
                raise RuntimeError(
                    f"{stage.layers.name} computes with parameter '{name}' of a later stage, past autograd (.data, "
                    "detach()). It is updated before this stage has gone backward, whose gradients would be "
                    "computed from the new values. Use a copy (.detach().clone()), pass the value on through the "
                    "stages, or step with the optimizer itself."
                )
        held = {address: param for address, param in stage_params.items() if step.update.holds(param)}
        later.update({address: step.names.get(id(param), "") for address, param in held.items()})


def refuse_shared_memory(placed: Iterable[tuple[int, Tensor]], where: str) -> None:
    """Raise if parameters lie in the same memory: one is updated before the other's gradient is whole.

    Args:
        placed: (the place that a parameter has, it): those of one place are updated together.
        where: what places are called.

    Raises:
        RuntimeError: two of different places do.
    """
    spans: list[tuple[int, int, int, Tensor]] = []
    for place, param in placed:
        if _memory(param) and param.numel():
            start, numbers = param.data_ptr(), span_of(param.shape, param.stride())
            spans.append((start, start + numbers * param.element_size(), place, param))
    spans.sort(key=lambda span: span[:3])
    for before, after in pairwise(spans):
        if after[0] < before[1] and before[2] != after[2] and before[3] is not after[3]:
            raise RuntimeError(
                f"parameters of shapes {list(before[3].shape)} ({where} {before[2]}) and {list(after[3].shape)} "
                f"({where} {after[2]}) lie in the same memory. An EagerUpdate updates one before the other's gradient "
                "is whole. Tie them as one Parameter (a.weight = b.weight), or step with the optimizer itself."
            )


def _memory(tensor: Tensor) -> int:
    """The address of a tensor's values. 0: it has none, as the zeros of forward-mode AD."""
    has_values = tensor.layout is torch.strided and not torch._is_zerotensor(tensor)
    return tensor.untyped_storage().data_ptr() if has_values else 0
