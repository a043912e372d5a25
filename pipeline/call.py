"""One call of a Pipe: the table kind -> work, over stages that exist for this call alone.

    caller --x--> Mailbox --take--> StageRun.forward --put--> Mailbox ... --y--> outputs
    caller --gradients of y (or the loss)--> StageRun.backward --put_grads--> ... --> sums, gradients of x

Both doors use it: the forward door runs its first phase in `Pipe.forward` and its second in `loss.backward()`, a step
runs its only phase at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from time import perf_counter

import torch
from torch import Tensor, nn

from pipeline.ambient import Ambient, weights_cast_anew
from pipeline.engine import drive_inline
from pipeline.graph import Gate
from pipeline.hooks import hooks_asleep
from pipeline.mailbox import Mailbox
from pipeline.microbatch import Batch
from pipeline.plan import Plan
from pipeline.randomness import Seeder, draw_seed, generators_kept
from pipeline.recall import Known
from pipeline.stage import StageRun
from pipeline.trace import Trace
from pipeline.trees import Grads, Message, Tree, add_grads, flatten
from pipeline.values import CALLER, Values
from scheduler import Action, Kind

LossGrads = Callable[[int, Tree], Grads]


class Call:
    """The state of one call.

    Args:
        stages: the layers of each stage.
        devices: the device of each stage.
        values: what crosses the stages.
        batch: the input, cut.
        plan: what runs.
        recompute: the (stage, chunk) pairs that are recomputed.
        grad: whether this call has gradients.
        compares: whether whole recomputations are compared with their forwards.
        known: what earlier calls have found out about the stages; this one adds to it.
        keep: whether every chunk may have to be recomputed later, kept ones too (the forward door's second order).
        traces: who records the actions.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[nn.Module]],
        devices: Sequence[torch.device],
        values: Values,
        batch: Batch,
        plan: Plan,
        recompute: frozenset[tuple[int, int]],
        grad: bool,
        keep: bool,
        compares: bool,
        known: Known,
        traces: Sequence[Trace],
    ) -> None:
        self.batch = batch
        self._live = [grad and tensor.requires_grad for tensor in batch.tree.tensors]
        self.grad = grad
        self.seeder = Seeder(draw_seed(), devices)
        self._ambient = Ambient.capture(dict.fromkeys(["cpu", *(device.type for device in devices)]))
        first_layers = accumulate((len(layers) for layers in stages), initial=0)
        self.stages = [
            StageRun(index, first, layers, grad, self.seeder, self._ambient, known, compares)
            for index, (first, layers) in enumerate(zip(first_layers, stages, strict=False))
        ]
        self.outputs: list[Message] = []
        self.loss_grads: LossGrads | None = None  # the loss stands behind the last stage: a step, an evaluation
        self.loss_sums: dict[int, tuple[Tensor, Tensor]] = {}  # what the loss itself depends on, by id
        self.keep_outputs = True
        self._devices = devices
        self._known = known
        self._values = values
        self._mailbox = Mailbox(values)
        self._plan = plan
        self._recompute = recompute
        self._keep = keep
        self._retain = False
        self._traces = traces
        self._lane_of = plan.schedule.placement.lane_of

    # ------------------------------------------------------------------------------------------------------ phases

    def run_forward(self) -> None:
        """Run the first phase. A failure leaves the buffers as they were."""
        for chunk in range(self.batch.chunks):
            self._mailbox.put(CALLER, chunk, {"x": self.batch.message(chunk, self.grad)})
        try:
            with generators_kept(self._devices), weights_cast_anew(self.grad):
                self._drive(0)
                for stage in self.stages:
                    stage.aliases.check_memory()
                    if stage.recall.draws_from_host:
                        self._known.draws_from_host.add(stage.index)
                    if self.batch.chunks > 1:
                        stage.recall.buffers.check_unseen(stage.name)
        except BaseException:
            self.abandon()
            raise

    def run_backward(self, grads: Sequence[Grads], retain: bool) -> None:
        """Run the second phase on the gradients of each chunk's outputs."""
        self._retain = retain
        self._resume()
        for chunk, chunk_grads in enumerate(grads):
            self._mailbox.put_grads(CALLER, chunk, {"y": chunk_grads})
        try:
            with generators_kept(self._devices), weights_cast_anew(self.grad):
                self._drive(1)
        except BaseException:
            for stage in self.stages:
                stage.drop_sums()
            self._mailbox = Mailbox(self._values)
            raise

    def _resume(self) -> None:
        now = self._ambient.now()
        for stage in self.stages:
            stage.recall.resume(now)

    def abandon(self) -> None:
        """Undo what a failed call did: the buffers are put back, what was kept goes."""
        for stage in self.stages:
            stage.recall.roll_back()
            stage.drop_sums()
        self.loss_sums = {}
        self.release()

    def release(self) -> None:
        """Forget what was kept for a backward."""
        for stage in self.stages:
            stage.release()
        self.outputs = []
        self.loss_grads = None  # it knows this call

    def _drive(self, number: int) -> None:
        phase = self._plan.phases[number]
        drive_inline(phase.orders, phase.needs, self._perform, phase.before)

    # ----------------------------------------------------------------------------------------------------- actions

    def _perform(self, action: Action) -> None:
        start = perf_counter()
        try:
            _WORK[action.kind](self, action.stage, action.chunk)
        except BaseException as error:
            error.add_note(f"{self.stages[action.stage].name}, chunk {action.chunk}, {action}")
            raise
        for trace in self._traces:
            trace.record(action, self._lane_of[action.stage], start)

    def _forward(self, stage: int, chunk: int) -> None:
        (message,) = self._mailbox.take(stage, chunk).values()
        message = _moved(message, self._devices[stage])
        recompute = self.grad and (stage, chunk) in self._recompute
        made = self.stages[stage].forward(chunk, message, recompute, self.grad and (self._keep or recompute))
        self._mailbox.put(stage, chunk, {row.name: made for row in self._values.made_by[stage]})
        if stage == len(self.stages) - 1:
            output = self._mailbox.take(CALLER, chunk)["y"]
            if self.keep_outputs:
                self.outputs.append(output)
            if self.loss_grads is not None and not any(output.needs_grad):
                self.loss_grads(chunk, output.tree)  # no backward will ask for it

    def _backward(self, stage: int, chunk: int) -> None:
        device = self._devices[stage]
        loss_grads = self.loss_grads
        if stage == len(self.stages) - 1 and loss_grads is not None:
            grads = self.stages[stage].backward(chunk, lambda tree: loss_grads(chunk, tree), True, self._retain)
        else:
            (readers,) = self._mailbox.take_grads(stage, chunk).values()
            given = _summed(readers, device)
            wanted = any([grad is not None for grad in given])
            grads = self.stages[stage].backward(chunk, lambda tree: given, wanted, self._retain)
        for row in self._values.read_by[stage]:
            self._mailbox.put_grads(stage, chunk, {row.name: grads or ()})

    # --------------------------------------------------------------------------------------------------- gradients

    def input_grads(self) -> Grads:
        """The gradients of the input's tensors, after a backward."""
        taken = [self._mailbox.take_grads(CALLER, chunk)["x"][0] for chunk in range(self.batch.chunks)]
        none: Grads = (None,) * len(self.batch.tree.tensors)
        return self.batch.join_grads([grads or none for grads in taken])

    def sums(self) -> dict[int, tuple[Tensor, Tensor]]:
        """By id of the owner: (owner, whole gradient), stage sums added in the order of the stages."""
        found, self.loss_sums = self.loss_sums, {}
        for stage in self.stages:
            for owner, grad in stage.take_sums():
                earlier = found.get(id(owner))
                found[id(owner)] = (owner, grad if earlier is None else earlier[1] + grad)
        return found

    def owners(self) -> list[Tensor]:
        """The parameters and foreign leaves that an output depends on, each once."""
        found = {id(each): each for stage in self.stages for each in stage.aliases.used_parameters}
        found.update({key: leaf for stage in self.stages for key, leaf in stage.foreign.items()})
        return list(found.values())

    # ------------------------------------------------------------------------------------------------ second order

    def differentiate(
        self, grads: Sequence[Grads], owners: Sequence[Tensor], create_graph: bool
    ) -> tuple[Grads, list[Tensor | None]]:
        """The gradients as functions of the input, the parameters and `grads` that can be differentiated again.

        Recomputes chunk after chunk as a plain composition of the stages, on the original input and parameters.

        Returns:
            Gradients of the input's tensors, and of `owners`.
        """
        self._resume()
        foreign = [leaf for stage in self.stages for leaf in stage.foreign.values()]
        apart = {id(leaf) for leaf in foreign}
        gate = Gate()
        with torch.enable_grad():
            targets = [owner if id(owner) in apart else _entered(owner, gate) for owner in owners]
        views = {id(owner): target for owner, target in zip(owners, targets, strict=True)}
        totals: list[Tensor | None] = [None] * len(owners)
        inputs: list[Grads] = []
        for chunk, chunk_grads in enumerate(grads):
            with generators_kept(self._devices), torch.enable_grad():
                pieces, tree = self._compose(chunk, views, gate)
            roots, root_grads = _paired(tree.tensors, chunk_grads)
            wanted = [piece for piece in pieces if piece.requires_grad]
            found: tuple[Tensor | None, ...] = (None,) * (len(wanted) + len(targets))
            if roots:
                with hooks_asleep(foreign), gate.closed(), ExitStack() as stack:
                    for stage in self.stages:  # a layer's own torch.utils.checkpoint runs its forward now
                        stack.enter_context(stage.on_views(views))
                    found = torch.autograd.grad(
                        roots, wanted + targets, root_grads, create_graph=create_graph, retain_graph=True,
                        allow_unused=True
                    )
            of_pieces = iter(found[: len(wanted)])
            inputs.append(tuple(next(of_pieces) if piece.requires_grad else None for piece in pieces))
            totals = [add_grads(one, other) for one, other in zip(totals, found[len(wanted) :], strict=True)]
        return self.batch.join_grads(inputs), totals

    def _compose(self, chunk: int, views: dict[int, Tensor], gate: Gate) -> tuple[list[Tensor], Tree]:
        pieces = [
            gate.enter(piece[chunk]) if live else piece[chunk].detach()
            for piece, live in zip(self.batch.pieces, self._live, strict=True)
        ]
        value = self.batch.tree.build(pieces)
        for stage, device in zip(self.stages, self._devices, strict=True):
            stage.check_unchanged(chunk)
            value = stage.compose(chunk, _on_device(value, device), views)
        return pieces, flatten(value, "the output")


_WORK = {Kind.F: Call._forward, Kind.B: Call._backward}  # not bound to a call, which would hold itself


def _entered(owner: Tensor, gate: Gate) -> Tensor:
    """Behind the gate; an owner that was frozen since the forward is a leaf of this call."""
    return gate.enter(owner) if owner.requires_grad else owner.detach().requires_grad_()


def _paired(tensors: Sequence[Tensor], grads: Grads) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [(t, g) for t, g in zip(tensors, grads, strict=True) if g is not None and t.requires_grad]
    return [tensor for tensor, _ in pairs], [grad for _, grad in pairs]


def _summed(readers: Sequence[Grads], device: torch.device) -> Grads:
    """The gradients of a value: its readers' contributions, added in their order."""
    total = readers[0]
    for more in readers[1:]:
        total = tuple(map(add_grads, total, more)) if total and more else total or more
    return tuple([grad if grad is None else grad.to(device) for grad in total])


def _moved(message: Message, device: torch.device) -> Message:
    tensors = message.tree.tensors
    if all([tensor.device == device for tensor in tensors]):
        return message
    return Message(Tree(tuple(tensor.to(device) for tensor in tensors), message.tree.skeleton), message.needs_grad)


def _on_device(value: object, device: torch.device) -> object:
    tree = flatten(value, "the input of a stage")
    return tree.build([tensor.to(device) for tensor in tree.tensors])
