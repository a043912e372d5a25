"""`pipe.step(x, y, loss_fn=f)`: forward, loss and backward of all chunks in the order of the schedule.

    F(last, i) --output--> loss_fn --gradient of its part--> B(last, i) ... --> sums
    when all is done:  validating steps compare the loss with the un-pipelined one  -->  p.grad | GradStore | optimizer

Nothing reaches a parameter before everything has gone well: until then gradients are the call's own, and a failure puts
the buffers back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipeline.common.graph import MARK, Roots, edge, explore, gradients, owned, roots_of
from pipeline.common.torch_modes import without_autocast
from pipeline.data.loss import Loss, divide_, divided
from pipeline.data.microbatch import Batch
from pipeline.data.pytrees import Activations, Grads, Tree, same_values
from pipeline.entry.loss_check import check_joined
from pipeline.execution.call import Call
from pipeline.execution.communicator import Communicator, Pair, Verdict
from pipeline.execution.execution import Execution
from pipeline.gradients.store import GradStore
from pipeline.stage.hooks import accumulate, grads_kept, has_hooks, hooked, hooks_asleep
from scheduler import Timeline


@dataclass(frozen=True, eq=False)
class Step:
    """The result of a step.

    Attributes:
        loss: the un-pipelined loss of the mini-batch, a 0-d tensor.
        grads: the gradients, with grads="store"; else None.
        outputs: the joined outputs, with outputs=True; else None.
        timeline: when each action ran, with trace=True; else None.
        metrics: what loss_fn reported beside its loss, over the mini-batch, by name: 0-d tensors without gradient.
    """

    loss: Tensor
    grads: GradStore | None = None
    outputs: Any = None
    timeline: Timeline | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class LossEnd:
    """The loss behind the last stage: from the outputs of a chunk to where the backward begins.

    Usually that is the loss, and one run of autograd differentiates it with the last stage. Where outputs or their
    gradients are kept, the loss is differentiated by itself, on leaves.

    A chunk's loss is computed at its B, on the output that was kept or recomputed, so that no chunk's loss graph waits.
    """

    def __init__(
        self,
        execution: Execution,
        loss: Loss,
        target: Batch,
        scaler: torch.amp.GradScaler | None,
        compares: bool,
        keeps_outputs: bool,
    ) -> None:
        self._execution = execution
        self.compares = compares
        self._keeps_outputs = keeps_outputs
        self._is_checked = False
        self._loss = loss
        self._target = target
        self._scaler = scaler
        self.reads: set[int] = set()  # the ids of leaves that the loss reads
        self.sums: dict[int, Pair] = {}  # the gradients of those of them that do not come through a stage, by id
        self._first_grads: dict[tuple[float, torch.dtype, torch.device], list[Tensor]] = {}
        self._is_target_there: bool | None = None  # on the device of the output
        self._grads: dict[int, Grads] = {}  # by chunk, of the outputs; kept where they are compared
        self._writes = False  # loss_fn writes its output

    def __call__(self, chunk: int, tree: Tree) -> Roots:
        apart = self._keeps_outputs or not any([tensor.requires_grad for tensor in tree.tensors])
        tensors = given = tree.tensors
        if apart:
            tensors = given = tuple([tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors])
            if chunk == 0 or self._writes:  # chunk 0 shows whether loss_fn writes its output
                given = tuple([tensor.clone() for tensor in tensors])
        own = [tensor for tensor in tensors if tensor.requires_grad]
        ends = [edge(tensor) for tensor in own]
        loss, weight = self._loss.chunk(chunk, tree.build(given), self._target_of(chunk, tree))
        if apart and chunk == 0:
            self._writes = any(map(_is_written, given, tensors))
        if not loss.requires_grad:
            return Roots((), (), {})
        if self._scaler is not None:  # it may turn the loss into another type
            loss, weight = self._scaler.scale(loss * weight), 1.0
        foreign = explore([loss], until=ends).leaves
        if foreign:
            self.reads.update(foreign)
            self._execution.communicator.refuse_external(foreign.values(), "loss_fn")
            for leaf in foreign.values():
                _refuse_ours(leaf)
        roots = Roots((loss,), (self._first_grad(loss, weight),), foreign)
        return self._differentiated(chunk, roots, own, tree) if apart else roots

    def _first_grad(self, loss: Tensor, weight: float) -> Tensor:
        """The gradient with which the backward begins: that of the loss times its weight."""
        left = self._first_grads.setdefault((weight, loss.dtype, loss.device), [])
        if type(loss) is not Tensor:
            return torch.ones_like(loss, requires_grad=False) * weight
        if not left:  # one for each chunk: its receiver may keep or write it
            left.extend(torch.full((self._target.chunks,), weight, dtype=loss.dtype, device=loss.device).unbind())
        return left.pop()

    def _target_of(self, chunk: int, tree: Tree) -> Any:
        value = self._target.value(chunk)
        device = tree.tensors[0].device if tree.tensors and not self._is_target_there else None
        if device is None:
            return value
        self._is_target_there = all([piece[chunk].device == device for piece in self._target.pieces])
        return value if self._is_target_there else tree_map_only(
            Tensor, partial(self._execution.carried, device=device), value
        )

    def _differentiated(self, chunk: int, roots: Roots, own: Sequence[Tensor], tree: Tree) -> Roots:
        """Go on from the outputs, and add the gradients of leaves that the loss reads to its sums."""
        foreign = list(roots.foreign.values())
        with hooks_asleep(foreign), without_autocast():
            found = gradients(roots.tensors, [*own, *foreign], roots.grads, retain=bool(foreign))
        for leaf, grad in zip(foreign, found[len(own) :], strict=True):
            if grad is not None:
                earlier = self.sums.get(id(leaf))
                self.sums[id(leaf)] = (leaf, owned(grad, leaf) if earlier is None else earlier[1] + grad)
        grads = iter(found)
        of_outputs = tuple([next(grads) if tensor.requires_grad else None for tensor in tree.tensors])
        if self.compares:
            self._grads[chunk] = of_outputs
        return roots_of(of_outputs, [tensor if tensor.requires_grad else None for tensor in tree.tensors])

    def check(self, outputs: Sequence[Activations]) -> None:
        """Raise if the chunks' losses do not combine to that of the mini-batch: all have been computed.

        A validating call computes it on the joined output; any other checks the divisors in the chunks' losses.
        """
        execution = self._execution
        if self._is_checked or not execution.has_last:
            return
        self._is_checked = True
        self._loss.check_counts()
        if not self.compares:
            if not self._loss.is_proven:
                raise self._loss.unproven()
            return
        with execution.generators:
            execution.seeder().seed(0, execution.layer_of_loss)
            scale = None if self._scaler is None else self._scaler.get_scale()
            check_joined(self._loss, self._target, outputs, self._grads, execution.setup.grad, scale)


class Collected(NamedTuple):
    """The results of a step before they are handed over.

    Attributes:
        pairs: (owner, whole gradient) of the parameters and of the input's tensors, each once; hooks have run.
        loss: of the mini-batch.
        hooks: whether any process has hooks on these.
        metrics: that loss_fn reported.
    """

    pairs: list[Pair]
    loss: Tensor
    hooks: bool
    metrics: Mapping[str, Tensor]


def collect(call: Call, loss: Loss) -> Collected:
    """After the run: whole gradients, and the loss, on which all processes agree.

    Tensor hooks are the user's code: if any process has some, all agree again after these have run.
    """
    inputs = [
        (tensor, grad)
        for tensor, grad in zip(call.batch.tree.tensors, call.input_grads(), strict=True)
        if grad is not None and tensor.requires_grad
    ]
    pairs = list(call.sums().values())
    reached, has_loss = bool(pairs or inputs), call.execution.has_last
    own = loss.divisor if has_loss else None
    pairs = call.communicator.average(pairs, own)
    hooks = any(has_hooks(owner) for owner, _ in [*inputs, *pairs])
    verdict = Verdict(loss.value if has_loss else None, own, reached, hooks, loss.metrics)
    value, divisor, reached, hooks, metrics = call.communicator.agree(verdict)
    assert value is not None  # the last stage's process has it
    check_reached(reached)
    for _, grad in [] if call.communicator.averages else pairs:  # means are of divided ones
        divide_(grad, divisor)
    inputs = [(tensor, divided(grad, divisor)) for tensor, grad in inputs]  # two may share one gradient
    found = summed([*inputs, *pairs])
    if hooks:
        if any(owner._backward_hooks for owner, _ in found):
            found = hooked(found)
        call.communicator.agree(Verdict(None, None, True))
    return Collected(found, value, hooks, metrics)


def check_reached(reached: bool) -> None:
    """Raise if no process has a gradient."""
    if not reached:
        raise RuntimeError(
            "the loss does not depend on anything that requires grad: every parameter is frozen, or the output is "
            "detached. Use pipe.evaluate(...) for a loss without gradients."
        )


def hand_over(
    pairs: list[Pair], inputs: Sequence[Tensor], to: str, named: Iterable[tuple[str, Tensor]]
) -> GradStore | None:
    """Give the gradients to `.grad`, or to a store; those of the input always to `.grad`. Empties `pairs`."""
    if to == "param":
        accumulate(pairs)
        return None
    known = {id(param): (name, param) for name, param in named}
    only_inputs = {id(tensor) for tensor in inputs} - known.keys()
    of_inputs = [pair for pair in pairs if id(pair[0]) in only_inputs]
    others = [pair for pair in pairs if id(pair[0]) not in only_inputs]
    pairs.clear()
    accumulate(of_inputs)
    known.update({id(owner): ("", owner) for owner, _ in others if id(owner) not in known})
    store = GradStore([param if not name else (name, param) for name, param in known.values()])
    for owner, grad in others:
        store.add_(owner, grad)
    return store


def summed(pairs: list[Pair]) -> list[Pair]:
    """Each owner once: a parameter may be given as input too."""
    found: dict[int, Pair] = {}
    for owner, grad in pairs:
        earlier = found.get(id(owner))
        found[id(owner)] = (owner, grad if earlier is None else earlier[1] + grad)
    return list(found.values())


@contextmanager
def undone(
    owners: Sequence[Tensor], optimizer: torch.optim.Optimizer | None, scaler: torch.amp.GradScaler | None
) -> Iterator[None]:
    """Within: a failure leaves `.grad`, and what a scaler notes of the optimizer, as they were found.

    Args:
        owners: tensors that get gradients, and may have hooks that fail.
        optimizer: steps with them. None: no optimizer does.
        scaler: unscales them first.
    """
    if optimizer is None and all(owner.is_leaf and not owner._post_accumulate_grad_hooks for owner in owners):
        yield
        return
    states = scaler._per_optimizer_states if scaler is not None and scaler.is_enabled() else {}
    found = dict(states[id(optimizer)]) if id(optimizer) in states else None
    try:
        with grads_kept([*owners, *_stepped(optimizer)]):
            yield
    except BaseException:
        states.pop(id(optimizer), None)  # else the next step would take gradients for unscaled ones
        if found is not None:
            states[id(optimizer)] = found
        raise


def _stepped(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    return [] if optimizer is None else [param for group in optimizer.param_groups for param in group["params"]]


def optimize(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    named: Sequence[tuple[str, Tensor]],
    clip: float | None,
    communicator: Communicator,
) -> None:
    """One optimizer step on `.grad`, as a training script would write it."""
    stepped = _stepped(optimizer)
    if scaler is not None and (clip is not None or not communicator.is_alone):
        unscale(scaler, optimizer, communicator)
    if clip is not None:  # of all that is stepped: a loss may have parameters of its own
        known = {id(param) for _, param in named}
        clip_grads([*named, *[("", param) for param in stepped if id(param) not in known]], clip, 2.0, communicator)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)


def optimized(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, named: Sequence[tuple[str, Tensor]]
) -> None:
    """Set every `.grad` to None after the optimizer's step."""
    optimizer.zero_grad(set_to_none=True)
    for _, parameter in named:
        parameter.grad = None
    if scaler is not None:
        scaler.update()


def clip_grads(
    named: Sequence[tuple[str, Tensor]],
    max_norm: float,
    norm_type: float,
    communicator: Communicator,
    finite: bool = False,
) -> Tensor:
    """Scale `.grad` of some parameters down to a norm of at most `max_norm`, over all processes; the norm before.

    Raises:
        RuntimeError: with `finite`, where the norm is not.
    """
    each = dict.fromkeys(param for _, param in named)
    names = {param: name for name, param in reversed(named)}
    grads = [(names[param], param.grad) for param in each if param.grad is not None]
    total = communicator.total_norm(grads, norm_type)
    if finite and not torch.isfinite(total):
        raise RuntimeError(f"the norm of the gradients is {total.item()}. Look for the step where they became so.")
    torch.nn.utils.clip_grads_with_norm_(list(each), max_norm, total)
    return total


def unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, communicator: Communicator) -> None:
    """Divide the gradients by the scale; where any process finds one that is not finite, all skip the step."""
    scaler.unscale_(optimizer)
    if communicator.is_alone or not scaler.is_enabled():
        return
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    overflowed = communicator.any(any(bool(each.item()) for each in found.values()))
    if not found:  # no gradient here: all is frozen, or there are no parameters
        found[torch.device("cpu")] = torch.zeros((), device="cpu")
    for each in found.values():
        each.fill_(float(overflowed))


def _is_written(clone: Tensor, tensor: Tensor) -> bool:
    return not same_values(clone, tensor) if clone.is_inference() else clone._version > 0


def _refuse_ours(leaf: Tensor) -> None:
    what = getattr(leaf, MARK, None)
    if what is not None:
        raise RuntimeError(
            f"loss_fn computes with a tensor that depends on {what} but did not come through its arguments. Its "
            "gradient would be lost. Return it from the last stage as part of the output."
        )
