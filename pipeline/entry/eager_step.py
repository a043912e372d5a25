"""`pipe.step(x, y, loss_fn=f, optimizer=EagerUpdate(...))`: parameters are updated while the backward still runs.

    one process    stage s settled --GradientFinalizer--> whole gradient / divisor --hooks--> EagerStep.take
    over ranks     this rank's actions have run --> the divisor, from the last rank --> take; then all agree
    two runs       norms only --> factor --> everything put back --> once more, with the same seed

All checks that can refuse the step run before the first update, except those of other ranks.

Two runs are two calls of one seed. The first is abandoned like a failed call, which restores buffers and
generators. So the second computes the same gradients, and only the factor is new.

A schedule's order (looped-bfs) makes the gradients of some stages whole early; there is no second mechanism for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor

from pipeline.common.graph import saved
from pipeline.common.torch_modes import without_autocast
from pipeline.data.loss import Loss, divide_, divided
from pipeline.data.pytrees import span_of
from pipeline.distributed.wrapped import OF_PARTS, refuse_parts
from pipeline.entry.loss_end import LossEnd
from pipeline.entry.sinks import Sink, check_reached, input_pairs, refuse_behind_x, summed
from pipeline.entry.step import RunWithLoss, Step
from pipeline.execution.call import Call, Listener
from pipeline.execution.communicator import Pair, Verdict, joined
from pipeline.execution.final_gradients import GradientFinalizer
from pipeline.gradients.eager import EagerStep, EagerUpdate, check_free, factor_of
from pipeline.recompute.reachable import ReachableState
from pipeline.stage.hooks import accumulate, grads_kept, hooked

# Of a run that succeeded: the call, which still has its outputs; the loss; (leaf, gradient) for `.grad`, of leaves
# outside the Pipe and of the input; the metrics.
EagerRunResult: TypeAlias = tuple[Call, Tensor, list[Pair], Mapping[str, Tensor]]


class EagerSink(Sink):
    """An EagerUpdate, which gets each gradient as soon as it is whole."""

    def __init__(self, update: EagerUpdate) -> None:
        self.optimizer: EagerUpdate = update

    def run(self, run: RunWithLoss) -> Step:
        """A step; with a norm over all gradients, of two runs."""
        update, named = self.optimizer, dict(run.runtime.module.named_parameters())
        update.get_ready()
        refuse_behind_x(run.execution.batch.tensors, named.values())
        refuse_parts(named.items(), "a step with an EagerUpdate", OF_PARTS)
        others = [(f"a parameter of shape {list(param.shape)}", param) for param in update.params]
        stages = enumerate(run.execution.setup.stages)
        params = [(stage, param) for stage, layers in stages for layer in layers for param in layer.parameters()]
        refuse_shared_memory([(stage, param) for stage, param in params if update.holds(param)], "stage")
        check_free([*((f"'{name}'", param) for name, param in named.items() if update.holds(param)), *others])
        norm: Tensor | None = None
        if update.needs_two_runs:
            norms = EagerStep(update, only_norms=True)
            state = ReachableState.of_loss(run.arguments.loss_fn, run.execution.setup.stages)
            trial = EagerRun(update, norms, named).play(run)[0]
            norm = _norm(norms, trial, named)
            run.execution = trial.once_more()
            state.put_back()  # what loss_fn counts and keeps
        step = EagerStep(update, None if norm is None else factor_of(update, norm))
        with update.guarded(step, run.execution.communicator.is_alone):
            call, loss, external, metrics = EagerRun(update, step, named).play(run)
            with call:
                refuse_behind_x(call.batch.tensors, [owner for owner, _ in external if owner._backward_hooks])
                _finish(update, step, external)
        with call:
            outputs = run.joined(call)
        call.release()
        call.communicator.close()
        return Step(loss, None, outputs, None, metrics, norm)


def _finish(update: EagerUpdate, step: EagerStep, external: list[Pair]) -> None:
    """Add to `.grad` of external leaves; update the parameters with which the input was computed."""
    with without_autocast(), grads_kept([*[owner for owner, _ in external], *update.params]):
        accumulate(external)
        step.take_grads(update.params)
    step.finish()


def _norm(step: EagerStep, call: Call, named: Mapping[str, Tensor]) -> Tensor:
    """The norm of all gradients, as torch.nn.utils.clip_grad_norm_ computes it."""
    names = {id(param): name for name, param in named.items()}
    others = dict.fromkeys([key for key in step.norms if key not in names], "")
    norms = [(name, step.norms[key][1]) for key, name in {**names, **others}.items() if key in step.norms]
    return call.communicator.exchange.joined_norm(norms, 2.0)


class EagerRun:
    """One run of forward and backward whose gradients go to an EagerStep."""

    def __init__(self, update: EagerUpdate, step: EagerStep, named: Mapping[str, Tensor]) -> None:
        self.step = step
        self._update = update
        self._names = {id(param): name for name, param in named.items()}
        self._external: list[Pair] = []  # leaves outside the Pipe, whose gradients are for `.grad`

    def play(self, run: RunWithLoss) -> EagerRunResult:
        """Run forward and backward, and take the whole gradients of this process."""
        finalizer: GradientFinalizer | None = None

        def make_listener(call: Call, end: LossEnd, loss: Loss) -> Listener:
            nonlocal finalizer
            finalizer = self._finalizer(call, end, loss)
            return finalizer.settled

        call, loss = run.play(make_listener if run.execution.communicator.is_alone else None)
        with call, without_autocast():
            return self._ended(call, loss, finalizer)

    def _ended(self, call: Call, loss: Loss, finalizer: GradientFinalizer | None) -> EagerRunResult:
        """End the run: take the remaining gradients, and agree. `finalizer`: took gradients while it ran."""
        inputs, averager = input_pairs(call), call.communicator.averager
        divisor = call.communicator.share_divisor(loss.divisor if call.execution.has_last else None)
        sums = call.sums() if finalizer is None else joined([*call.parts_of_loss(), *finalizer.rest()])
        pairs = list(sums.values())
        if averager is not None:
            pairs = averager.average(pairs, divisor, waits=True)
        else:
            pairs = [(owner, divide_(grad, divisor)) for owner, grad in pairs]
        reached = bool(pairs or inputs or self.step.updated or self.step.norms)
        inputs = [(tensor, divided(grad, divisor)) for tensor, grad in inputs]
        self._take_all(summed([*inputs, *pairs]), call, is_all=finalizer is None)  # two inputs may share one gradient
        is_trial = self.step.only_norms
        verdict = Verdict(loss.value if call.execution.has_last else None, None, reached, is_trial, loss.metrics.values)
        value, _, reached, _, metrics = call.communicator.agree(verdict)
        check_reached(reached)
        assert value is not None  # the last stage's process has it
        return call, value, self._external, metrics

    def _finalizer(self, call: Call, end: LossEnd, loss: Loss) -> GradientFinalizer:
        """The finalizer that takes gradients while the backward runs."""
        by_threads, compares = call.execution.has_threads, call.execution.setup.compares
        waits = by_threads and (compares or end.compares)
        divisor = cache(lambda: loss.divisor)  # all losses are known by then

        def take(owner: Tensor, grad: Tensor) -> None:
            self._take(owner, divide_(grad, divisor()))

        def ready() -> None:
            if compares:  # one thread drives all lanes then
                self._refuse_later_weights(call)
            if waits:
                return
            if not by_threads:  # with threads, buffers are swapped during recomputations
                call.check_forwards(memory=False)
            end.check()

        def late() -> set[int]:
            """The parameters whose gradients have parts from outside the stages."""
            return {*end.sums, *end.reads, *map(id, call.batch.tree.tensors)}

        return GradientFinalizer(call.stages, take, ready, late, waits)

    def _refuse_later_weights(self, call: Call) -> None:
        """Raise where a stage still needs a weight, past autograd, that will be updated before its backward."""
        later: dict[int, str] = {}  # names of later stages' parameters, by address
        for stage in reversed(call.stages):
            stage_params = {_memory(param): param for param, _ in stage.aliases.trained}
            for tensor in saved(stage.kept_graphs) if later else ():
                name = later.get(_memory(tensor))
                if name is not None and _memory(tensor) not in stage_params:
                    raise RuntimeError(
                        f"{stage.layers.name} computes with parameter '{name}' of a later stage, past autograd (.data, "
                        "detach()). It is updated before this stage has gone backward, whose gradients would be "
                        "computed from the new values. Use a copy (.detach().clone()), pass the value on through the "
                        "stages, or step with the optimizer itself."
                    )
            later.update({
                address: self._names.get(id(param), "")
                for address, param in stage_params.items() if self._update.holds(param)
            })  # fmt: skip

    def _take(self, owner: Tensor, grad: Tensor) -> None:
        if owner._backward_hooks:
            ((owner, grad),) = hooked([(owner, grad)])
        if self._update.holds(owner):
            name = self._names.get(id(owner))
            self.step.take(owner, grad, "" if name is None else f"'{name}'")
            return
        if id(owner) in self._names:
            self.step.note(owner, grad)
            return
        if self.step.only_norms and owner.grad_fn is not None:
            raise RuntimeError(
                "x was computed from something that requires a gradient, whose norm is known only when the backward "
                f"goes on from x; clip={self._update.clip!r} needs all norms before. Make what computes x a layer of "
                "the model, give x.detach(), or step with the optimizer itself."
            )
        self._external.append((owner, grad))

    def _take_all(self, pairs: list[Pair], call: Call, is_all: bool) -> None:
        """`is_all`: nothing was taken while the backward ran."""
        start = perf_counter()
        while pairs:
            self._take(*pairs.pop(0))
        if is_all and call.stages:
            call.execution.record_update(call.stages[-1].layers.index, start)


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
