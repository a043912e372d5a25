"""The sinks of a step's gradients: `.grad`, a store, or an optimizer; and that of an evaluation, which has none.

    run --sums, gradients of the input--> collect: whole, divided, hooked, agreed by all processes --> sink

Nothing reaches a parameter before everything has gone well: until then gradients are the call's own, and a failure puts
the buffers back. An EagerUpdate is a sink of another kind, see entry/eager_step.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from math import inf
from typing import Any, TypeAlias

import torch
from torch import Tensor

from partition.precision import without_autocast
from pipeline.common.graph import explore
from pipeline.common.interrupts import firm
from pipeline.data.loss import Loss, divide_, divided
from pipeline.entry.step import RunWithLoss, Step
from pipeline.execution.call import Call
from pipeline.execution.communicator import Communicator, Pair, Verdict, joined_by_owner
from pipeline.gradients.clip import clip_factor
from pipeline.gradients.partial import shared_overflows
from pipeline.gradients.per_parameter import params_of
from pipeline.gradients.store import GradStore
from pipeline.stage.hooks import accumulate, grads_kept, has_hooks, hooked
from pipeline.transports.message import Message

NamedGrads: TypeAlias = Sequence[tuple[str, Tensor]]
StoreAndNorm: TypeAlias = tuple[GradStore | None, Tensor | None]


class Sink(ABC):
    """The receiver of the final gradients of a step."""

    @abstractmethod
    def run(self, run: RunWithLoss) -> Step:
        """Run a step, and take its gradients."""


class LossSink(Sink):
    """No gradients: the loss alone.

    Args:
        metrics: what is reported beside it, of a loss that all chunks have been added to.
    """

    def __init__(self, metrics: Callable[[Loss], Mapping[str, Tensor]] = lambda loss: loss.metrics.values) -> None:
        self._metrics = metrics

    def run(self, run: RunWithLoss) -> Step:
        call, loss = run.play()
        with call:
            value, metrics = (loss.value, self._metrics(loss)) if call.execution.has_last else (None, {})
            verdict = call.communicator.agree(Verdict(value, None, True, False, metrics))
            outputs = run.ended(call)
        return Step(verdict.value, None, outputs, None, verdict.metrics)


class GradSink(Sink):
    """`.grad` of the parameters, to which gradients are added as backward() does.

    Attributes:
        completes: parts of gradients that come from behind x are added too.
    """

    completes = True

    def run(self, run: RunWithLoss) -> Step:
        call, loss = run.play()
        with without_autocast():
            with call:
                firm()
                pairs, verdict = collect(call, loss, self.completes)
                outputs = run.ended(call)
                store, norm = self.take(pairs, call, run)
            self.finish(run)
            if verdict.hooks or run.arguments.optimizer is not None or call.communicator.averager is not None:
                call.communicator.close()
        return Step(verdict.value, store, outputs, None, verdict.metrics, norm)

    def take(self, pairs: list[Pair], call: Call, run: RunWithLoss) -> StoreAndNorm:
        """Take whole gradients. Empties `pairs`. A failure leaves everything that it writes as it was found.

        Args:
            pairs: (owner, gradient) of parameters, other leaves, and tensors of the input, each once.
            call: made them.
            run: of the step.

        Returns:
            The store that has them, if one has, and their norm, if it was asked for.
        """
        accumulate(pairs)
        return None, None

    def finish(self, run: RunWithLoss) -> None:
        """End a step that went well in this process."""


class StoreSink(GradSink):
    """A GradStore. Gradients of the input go to `.grad`."""

    completes = False

    def take(self, pairs: list[Pair], call: Call, run: RunWithLoss) -> StoreAndNorm:
        norm: Tensor | None = None
        module, max_norm = run.runtime.module, run.arguments.clip_grad_norm
        names = {id(param): name for name, param in module.named_parameters()}
        only_inputs = {id(tensor) for tensor in call.batch.tree.tensors} - names.keys()
        of_inputs = [pair for pair in pairs if id(pair[0]) in only_inputs]
        others = [pair for pair in pairs if id(pair[0]) not in only_inputs]
        pairs.clear()
        unnamed = [owner for owner, _ in others if id(owner) not in names]
        store = GradStore([*module.named_parameters(), *unnamed])
        others.reverse()
        while others:  # in order; the store has a copy
            store.add_(*others.pop())
        if max_norm is not None:
            grads = [(names.get(id(param), ""), grad) for param, grad in store.items()]
            norm = call.communicator.exchange.total_norm(grads, 2.0)
            store.scale_(clip_factor(max_norm, norm))
        accumulate(of_inputs)
        return store, norm


class OptimizerSink(GradSink):
    """An optimizer, which steps once; every `.grad` is None afterwards."""

    def take(self, pairs: list[Pair], call: Call, run: RunWithLoss) -> StoreAndNorm:
        norm: Tensor | None = None
        optimizer: Any = run.arguments.optimizer
        communicator, scaler, max_norm = call.communicator, run.arguments.scaler, run.arguments.clip_grad_norm
        stepped = params_of(optimizer)
        with _notes_kept(scaler), grads_kept([*[owner for owner, _ in pairs], *stepped]):
            accumulate(pairs)
            if scaler is not None and (max_norm is not None or not communicator.is_alone):
                _unscale(scaler, optimizer, communicator)
            if max_norm is not None:  # of all that is stepped: a loss may have parameters of its own
                named = [*run.runtime.module.named_parameters(), *[("", param) for param in stepped]]
                norm = clip_grads(named, max_norm, 2.0, communicator)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        return None, norm

    def finish(self, run: RunWithLoss) -> None:
        optimizer: Any = run.arguments.optimizer
        optimizer.zero_grad(set_to_none=True)
        for parameter in run.runtime.module.parameters():
            parameter.grad = None
        if run.arguments.scaler is not None:
            run.arguments.scaler.update()


@contextmanager
def _notes_kept(scaler: torch.amp.GradScaler | None) -> Iterator[None]:
    """Within: a failure leaves what a scaler notes of optimizers as it was found."""
    notes = getattr(scaler, "_per_optimizer_states", {})  # of a scaler that is enabled
    before = {key: dict(note) for key, note in notes.items()}
    try:
        yield
    except BaseException:
        notes.clear()  # else the next step would take gradients for unscaled ones
        notes.update(before)
        raise


def collect(call: Call, loss: Loss, completes: bool) -> tuple[list[Pair], Verdict]:
    """After the run: whole gradients, and the loss, on which all processes agree.

    Tensor hooks are the user's code: if any process has some, all agree again after these have run.

    Args:
        call, loss: of the run.
        completes: what comes to `.grad` from behind x joins these gradients.

    Returns:
        (owner, whole gradient) of the parameters and of the input's tensors, each once, whose hooks have run; and that
        on which all agree.
    """
    inputs = input_pairs(call)
    pairs = list(call.sums().values())
    reached, has_loss = bool(pairs or inputs), call.execution.has_last
    own_divisor = loss.divisor if has_loss else None
    takers = [owner for owner, _ in [*inputs, *pairs] if owner._backward_hooks]
    refuse_behind_x(call.batch.tensors, takers if completes else [*takers, *[owner for owner, _ in pairs]])
    averager = call.communicator.averager
    if averager is not None:
        message = Message((own_divisor,)) if has_loss else None
        pairs = averager.average(pairs, call.communicator.exchange.broadcast("the divisor", -1, message).tensors[0])
    hooks = any([has_hooks(owner) for owner, _ in [*inputs, *pairs]])
    verdict = Verdict(loss.value if has_loss else None, own_divisor, reached, hooks, loss.metrics.values)
    verdict = call.communicator.agree(verdict)
    check_reached(verdict.reached)
    for _, grad in pairs if averager is None and verdict.divisor is not None else []:  # means are of divided ones
        divide_(grad, verdict.divisor)
    inputs = [(tensor, divided(grad, verdict.divisor)) for tensor, grad in inputs]  # two may share one gradient
    whole = summed([*inputs, *pairs]) if inputs else pairs  # each owner of these is another
    if verdict.hooks:
        if any(owner._backward_hooks for owner, _ in whole):
            whole = hooked(whole)
        call.communicator.agree(Verdict(None, None, True))
    return whole, verdict


def input_pairs(call: Call) -> list[Pair]:
    """The gradients of the input's tensors, with these; only such as need one."""
    pairs = zip(call.batch.tree.tensors, call.input_grads(), strict=True)
    return [(tensor, grad) for tensor, grad in pairs if grad is not None and tensor.requires_grad]


def refuse_behind_x(inputs: Iterable[Tensor], owners: Iterable[Tensor]) -> None:
    """Raise if x was computed with one of these leaves: behind x is a part of its gradient, which comes to `.grad`."""
    leaves = explore([tensor for tensor in inputs if tensor.grad_fn is not None])
    for owner in owners:
        if id(owner) in leaves:
            raise RuntimeError(
                f"x was computed with a leaf of shape {list(owner.shape)} whose gradient the step gives too. It is "
                "whole only when the backward has gone on from x: a store, an EagerUpdate or a hook would get a part. "
                "Make what computes x a layer of the model, give x.detach(), or use pipe(x) and loss.backward()."
            )


def check_reached(reached: bool) -> None:
    """Raise if no process has a gradient."""
    if not reached:
        raise RuntimeError(
            "the loss does not depend on anything that requires grad: every parameter is frozen, or the output is "
            "detached. Use pipe.evaluate(...) for a loss without gradients."
        )


def summed(pairs: list[Pair]) -> list[Pair]:
    """Each owner once: a parameter may be given as input too."""
    return list(joined_by_owner([(-1, owner, grad) for owner, grad in pairs]).values())  # of no stage in particular


def clip_grads(
    named: NamedGrads,
    max_norm: float,
    norm_type: float,
    communicator: Communicator,
    finite: bool = False,
) -> Tensor:
    """Scale `.grad` of some parameters down to a norm of at most `max_norm`, over all processes; the norm before.

    Args:
        named: those parameters; of one that is there twice, the first name counts.

    Raises:
        RuntimeError: with `finite`, where the norm is not.
    """
    names: dict[Tensor, str] = {}
    for name, param in named:
        names.setdefault(param, name)
    grads = [(name, param.grad) for param, name in names.items() if param.grad is not None]
    total = communicator.exchange.total_norm(grads, norm_type)
    if finite and not torch.isfinite(total):
        raise RuntimeError(f"the norm of the gradients is {total.item()}. Look for the step where they became so.")
    if max_norm < inf:
        torch.nn.utils.clip_grads_with_norm_(list(names), max_norm, total)
    return total


def _unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, communicator: Communicator) -> None:
    """Divide the gradients by the scale; where any process finds one that is not finite, all skip the step."""
    with nullcontext() if communicator.is_alone else shared_overflows():
        scaler.unscale_(optimizer)
    if communicator.is_alone or not scaler.is_enabled():
        return
    overflows = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    overflowed = communicator.exchange.any(any(bool(overflow.item()) for overflow in overflows.values()))
    if not overflows:  # no gradient here: all is frozen, or there are no parameters
        overflows[torch.device("cpu")] = torch.zeros((), dtype=torch.float32, device="cpu")  # as the scaler asks
    for overflow in overflows.values():
        overflow.fill_(float(overflowed))
