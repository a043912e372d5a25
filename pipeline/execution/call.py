"""One call of a Pipe: the table kind -> work, over stages that exist for this call alone.

    caller --x--> Mailbox --take--> StageRun.forward --put--> Mailbox ... --y--> outputs
    caller --gradients of y (or the loss)--> StageRun.backward --put_grads--> ... --> sums, gradients of x

All entry points use it: `pipe(x)` runs the first phase in `Pipe.forward` and the second in `loss.backward()`, a step
runs its only phase at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from pipeline.common.errors import CheckpointError
from pipeline.common.graph import Gate, Roots, roots_of
from pipeline.common.interrupts import deliver
from pipeline.common.places import Place
from pipeline.common.torch_modes import Ambient, weights_cast_anew, within_torchs_checkpoint, without_autocast
from pipeline.data.microbatch import Batch
from pipeline.data.pytrees import Activations, Bundle, Grads, Tree, add_grads, sum_grads
from pipeline.data.values import CALLER, Values
from pipeline.execution.communicator import Communicator
from pipeline.execution.drivers import Driver
from pipeline.execution.mailbox import Post, check_alone
from pipeline.execution.placement import ParameterPlacement
from pipeline.execution.plan import Plan
from pipeline.execution.trace import TraceRecorder
from pipeline.recompute.randomness import KeptGenerators, Seeder
from pipeline.recompute.snapshot import StageTraits, check_shared, generators_elsewhere
from pipeline.skip import Key
from pipeline.stage.hooks import hooks_asleep
from pipeline.stage.records import OutputEdges
from pipeline.stage.stage import Shared, StageRun
from pipeline.transports.local import Local
from scheduler import Action, Kind

LossEnd = Callable[[int, Tree], Roots]
Listener: TypeAlias = Callable[[StageRun, list[tuple[Tensor, Tensor]]], None]


class Setup(NamedTuple):
    """The settings that a Pipe gives to a call.

    Attributes:
        stages: the layers of each stage.
        places: the place of each stage.
        values: the table of values that cross stages.
        transport: moves tensors between places.
        workers: how lanes run, see execution/drivers.py.
        plan: the orders that run.
        recompute: the (stage, chunk) pairs that are recomputed.
        grad: whether this call has gradients.
        keep: whether every chunk may have to be recomputed later, kept ones too (second order of `pipe(x)`).
        compares: whether whole recomputations are compared with their forwards.
        known: the traits of the stages that earlier calls have observed; this call adds to them.
        defer: whether batch norms update their running statistics once, at the end.
        traces: the recorders of its actions.
        communicator: reaches the other processes that run this call.
        seed: of the call.
    """

    stages: Sequence[Sequence[nn.Module]]
    places: Sequence[Place]
    values: Values
    transport: Local
    workers: str | None
    plan: Plan
    recompute: frozenset[tuple[int, int]]
    grad: bool
    keep: bool
    compares: bool
    known: StageTraits
    defer: bool
    traces: Sequence[TraceRecorder]
    communicator: Communicator
    seed: int


class Call:
    """The state of one call.

    Args:
        setup: the settings.
        batch: the input, cut.
    """

    def __init__(self, setup: Setup, batch: Batch) -> None:
        self.batch = batch
        self.grad = setup.grad
        self._setup = setup
        self.devices = [place.device for index, place in enumerate(setup.places) if setup.communicator.has(index)]
        self.communicator = setup.communicator
        self._live = [setup.grad and tensor.requires_grad for tensor in batch.tree.tensors]
        self.generators = KeptGenerators(self.devices)
        self.seeder = Seeder(setup.seed, self.devices, self.generators)
        self._ambient = Ambient.capture(dict.fromkeys(["cpu", *(device.type for device in self.devices)]))
        self._lane_of = setup.plan.schedule.placement.lane_of
        self._driver = Driver(setup.places, setup.stages, self._lane_of, setup.workers)
        self._placement = ParameterPlacement(setup.stages, setup.places, setup.transport)
        shared = Shared(
            setup.values, setup.grad, self._ambient, setup.known, setup.compares, setup.defer, self._driver.has_threads,
            threading.Lock(), setup.keep, setup.seed, self.generators
        )
        first_layers = accumulate((len(layers) for layers in setup.stages), initial=0)
        self.stages = [
            StageRun(index, first, layers, place.device, partial(self._placement.bring, place), shared)
            for index, (first, layers, place) in enumerate(zip(first_layers, setup.stages, setup.places, strict=False))
            if setup.communicator.has(index)
        ]
        if not all([stage.is_quiet for stage in self.stages]):  # a user's layer may write another's parameters unseen
            for stage in self.stages:
                stage.snapshot.samples = True
        self._run = {stage.index: stage for stage in self.stages}
        self._last = len(setup.stages) - 1
        for index, chunk in setup.plan.schedule.split:
            if index in self._run:
                self._run[index].split.add(chunk)
        if any([stage.may_draw for stage in self.stages]):
            for stage in self.stages:
                stage.learn_draws()
        self.outputs: list[Activations] = []
        self._loss_end: LossEnd | None = None
        self.loss_sums: dict[int, tuple[Tensor, Tensor]] = {}  # gradients of leaves that the loss itself reads, by id
        self.keep_outputs = True
        self._mailbox = self._new_mailbox()
        self._retain = False
        self._last_of: frozenset[Action] = frozenset()  # the last backward of each stage, where a listener waits for it
        self._settled: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by stage: sums that are final
        self._listener: Listener | None = None  # gets these sums, if there is one
        self._is_checked = False
        self._recorded = [len(trace) for trace in setup.traces]
        self._ready: dict[int, float] = {}  # by stage: when the action under way had its inputs, where that is traced

    def carried(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A tensor of the caller's (a part of the target), on a device of a stage."""
        return self._setup.transport.carry(tensor, Place(tensor.device), Place(device))

    @property
    def is_accelerated(self) -> bool:
        """Whether a stage computes on an accelerator."""
        return any(place.is_accelerator for place in self._setup.places)

    def _new_mailbox(self) -> Post:
        return self.communicator.mailbox(self._setup.values, dict(enumerate(self._setup.places)), self._setup.transport)

    def go_on_with(self, communicator: Communicator) -> None:
        """From now on this communicator carries messages, agrees and reports failures."""
        if communicator is not self.communicator:
            self.communicator = communicator
            self._mailbox = self._new_mailbox()

    @property
    def has_first(self) -> bool:
        """Whether stage 0, which takes the input, runs in this process."""
        return 0 in self._run

    @property
    def last(self) -> StageRun | None:
        """The last stage, which makes the output. None: another process runs it."""
        return self._run.get(self._last)

    def end_in(self, loss_end: LossEnd) -> None:
        """Put a loss behind the last stage: a step, an evaluation."""
        self._loss_end = loss_end
        if self.last is not None:
            self.last.ends_in_loss = True

    def listen(self, listener: Listener | None) -> None:
        """From now on `listener` gets the sums of each stage as soon as its last backward has run.

        What it does with them cannot be undone, so this call runs no phase twice: all stages get their seeds.
        """
        self._listener = listener
        for stage in self.stages if listener is not None else ():
            stage.learn_draws()

    def once_more(self) -> Call:
        """The same call, from its beginning. This one must be abandoned first; its traces are removed."""
        for trace, number in zip(self._setup.traces, self._recorded, strict=True):
            trace.forget_from(number)
        for stage in self.stages:
            stage.snapshot.roll_attributes_back()
        return Call(self._setup._replace(compares=False), self.batch)

    @property
    def is_driven_by_threads(self) -> bool:
        """Whether lanes have threads."""
        return self._driver.has_threads

    @property
    def compares(self) -> bool:
        """Whether this call runs the expensive checks."""
        return self._setup.compares

    # ------------------------------------------------------------------------------------------------------ phases

    def run_forward(self) -> None:
        """Run the first phase. A failure leaves the buffers as they were."""
        try:
            with self.generators, weights_cast_anew(self.grad):
                recorded = [len(trace) for trace in self._setup.traces]
                try:
                    self._begin()
                    self._drive(0)
                except DrewError:  # a stage drew for the first time: run again, each stage with its seeds
                    self._rewind()
                    for trace, number in zip(self._setup.traces, recorded, strict=True):
                        trace.forget_from(number)
                    self._begin()
                    self._drive(0)
                self.check_forwards(memory=self._listener is None)
                for stage in self.stages:
                    stage.commit()
        except BaseException:
            self.abandon()
            raise

    def check_forwards(self, memory: bool = True) -> None:
        """Raise if a forward made numbers depend on the order of the chunks. Called after all forwards.

        Args:
            memory: check the parameters too. A listener has done so already.
        """
        if self._is_checked:
            return
        self._is_checked = True
        for stage in self.stages:
            if memory:
                stage.aliases.check_memory()
            self.communicator.refuse_external(stage.foreign.values(), stage.name, stage.index)
        elsewhere = generators_elsewhere(self._setup.stages, self._run)
        check_shared([(stage.name, stage.snapshot) for stage in self.stages], elsewhere)
        for stage in self.stages:
            if self.batch.chunks > 1:
                stage.snapshot.buffers.check_unseen(stage.name)

    def _rewind(self) -> None:
        """Return to the state before the first action. From now on every stage holds the host's generators."""
        for stage in self.stages:
            stage.rewind()
            stage.snapshot.roll_attributes_back()
            stage.learn_draws()
        self.loss_sums = {}
        self.outputs = []
        self._mailbox = self._new_mailbox()

    def _begin(self) -> None:
        if not self.has_first:
            return
        for chunk in range(self.batch.chunks):
            self._mailbox.put(CALLER, chunk, [self.batch.message(chunk, self.grad)])

    def run_backward(self, grads: Sequence[Grads], retain: bool) -> None:
        """Run the second phase on the gradients of each chunk's outputs, which the process of the last stage has."""
        self._retain = retain
        self._resume()
        if self.last is not None:
            for chunk, chunk_grads in enumerate(grads):
                self._mailbox.put_grads(CALLER, chunk, [chunk_grads])
        try:
            with self.generators, weights_cast_anew(self.grad):
                self._drive(1)
        except DrewError:
            self._drop()
            raise RuntimeError(
                "a backward drew from a default generator (torch's for the CPU, Python's or numpy's), which none did "
                "in earlier calls. Run forward and backward again: from now on it gets its seed."
            ) from None
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        for stage in self.stages:
            stage.drop_sums()
        self._settled.clear()
        self._mailbox = self._new_mailbox()

    def _resume(self) -> None:
        now = self._ambient.now()
        for stage in self.stages:
            stage.snapshot.resume(now)

    def abandon(self) -> None:
        """Undo a failed call: restore the buffers, and drop what was kept."""
        for stage in self.stages:
            stage.rewind()
        self.loss_sums = {}
        self._settled.clear()
        self.release()

    def release(self) -> None:
        """Drop what was kept for a backward."""
        for stage in self.stages:
            stage.release()
        self.outputs = []
        self._loss_end = self._listener = None  # they refer to this call

    def _drive(self, number: int) -> None:
        phase = self._setup.plan.phases[number]
        now = self._ambient.now()
        in_turns = self._driver.has_threads and (
            now.switches != self._ambient.switches or within_torchs_checkpoint() or self._setup.compares
        )
        draws = any([stage.may_draw for stage in self.stages])
        for stage in self.stages:
            stage.begin()
        if not draws:
            self.generators.keep_all()
        runs_once = not self._driver.has_threads  # without threads a stage's first draw is noticed in time
        self._last_of = frozenset()
        if self._listener is not None or (self.communicator.averages and runs_once):
            self._last_of = _last_backwards(phase.orders)
        is_watched = self._setup.traces or self._last_of or self.communicator.follows
        self.communicator.begin(number)
        try:
            self._driver.run(phase, self._perform_and_tell if is_watched else self._perform, draws, now, in_turns)
            self.communicator.end()
        except CheckpointError:  # an unseeded draw may be the reason why a recomputation differs
            self._check_untouched(draws)
            raise
        self._check_untouched(draws)
        for stage in self.stages:
            stage.note_draws()

    def _check_untouched(self, draws: bool) -> None:
        """Raise if the host's generators are not as they were, though no stage was to draw from them."""
        if not draws and not self.generators.is_host_untouched:
            self._setup.known.draws_nothing.clear()
            raise DrewError

    # ----------------------------------------------------------------------------------------------------- actions

    def _perform(self, action: Action) -> None:
        deliver()
        stage, kind, chunk = action
        try:
            _WORK[kind](self, stage, chunk)
        except BaseException as error:
            error.add_note(f"{self._run[stage].name}, chunk {chunk}, {action}")
            raise

    def _perform_and_tell(self, action: Action) -> None:
        """The same, with reports to a trace, to other ranks, and to a listener of a stage's sums."""
        stage = action.stage
        traces = self._setup.traces
        start = perf_counter() if traces else 0.0
        self.communicator.at(action)
        self._perform(action)
        if traces:
            start = self._ready.pop(stage, start)
            for trace in traces:
                trace.record(action, self._lane_of[stage], start)
        if action in self._last_of:
            start = perf_counter()
            self._settle(stage)
            if self._listener is not None:
                self.note_update(stage, start)

    def _note_ready(self, stage: int) -> None:
        """Note when an action has its inputs: the time before, a wait for another rank, is no work."""
        if self._setup.traces:
            self._ready[stage] = perf_counter()

    def note_update(self, stage: int, start: float) -> None:
        """Record an update of parameters after a stage's last backward, from `start` until now."""
        for trace in self._setup.traces:
            trace.record(Action(stage, Kind.U, self.batch.chunks - 1), self._lane_of[stage], start)

    def _settle(self, stage: int) -> None:
        """Announce that a stage's sums are final, unless the loss reads its parameters too."""
        if self._listener is not None:
            with nullcontext() if self._setup.keep else without_autocast():
                self._listener(self._run[stage], self._taken(self._run[stage]))
            return
        self._settled[stage] = pairs = self._taken(self._run[stage])
        if not any([id(owner) in self.loss_sums for owner, _ in pairs]):
            self.communicator.settled(stage, pairs)

    def _forward(self, stage: int, chunk: int) -> None:
        run = self._run[stage]
        inbox = self._mailbox.take(stage, chunk)
        self._note_ready(stage)
        recompute = self.grad and (stage, chunk) in self._setup.recompute
        made = run.forward(chunk, inbox, recompute, self.grad and (self._setup.keep or recompute))
        if run.writes_input:
            check_alone(run.index, run.name, inbox, self._mailbox.under_way(chunk))
        if stage != self._last:
            self._mailbox.put(stage, chunk, made)
        else:
            (output,) = made
            if self.keep_outputs:
                self.outputs.append(output)
            if self._loss_end is not None and True not in output.needs_grad:
                self._loss_end(chunk, output.tree)  # no backward needs it

    def _backward(self, stage: int, chunk: int) -> None:
        run = self._run[stage]
        if run.ends_in_loss:
            assert self._loss_end is not None  # end_in
            grads = run.backward(chunk, partial(_at_loss, self._loss_end, chunk), True, self._retain)
        else:
            taken = self._mailbox.take_grads(stage, chunk)
            self._note_ready(stage)
            given = [readers[0] if len(readers) == 1 else sum_grads(readers) for readers in taken]
            grads = run.backward(chunk, partial(_at_outputs, given), _has_any(given), self._retain)
        self._mailbox.put_grads(stage, chunk, grads)

    def _weights(self, stage: int, chunk: int) -> None:
        self._run[stage].weights(chunk, self._retain)

    # --------------------------------------------------------------------------------------------------- gradients

    def input_grads(self) -> Grads:
        """The gradients of the input's tensors, after a backward. Empty: no tensor needs one."""
        if not any(self._live):
            return (None,) * len(self._live)
        shared = self.communicator.share_input_grads(self._own_input_grads() if self.has_first else None)
        return self._at_home(shared)  # from another rank they come to the device of this one

    def _own_input_grads(self) -> Grads:
        taken = [self._at_home(self._mailbox.take_grads(CALLER, chunk)[0][0]) for chunk in range(self.batch.chunks)]
        none: Grads = (None,) * len(self.batch.tree.tensors)
        return self.batch.join_grads([grads or none for grads in taken])

    def _at_home(self, grads: Grads) -> Grads:
        """Gradients of the input, on the input's devices."""
        carry = self._setup.transport.carry
        return tuple([
            grad if grad is None or grad.device == tensor.device else carry(grad, None, Place(tensor.device))
            for grad, tensor in zip(grads, self.batch.tree.tensors, strict=False)
        ])

    def sums(self) -> dict[int, tuple[Tensor, Tensor]]:
        """By id of the owner: (owner, whole gradient), stage sums added in the order of the stages."""
        settled, self._settled = self._settled, {}
        parts = [
            (stage.index, owner, grad)
            for stage in self.stages
            for owner, grad in settled.get(stage.index) or self._taken(stage)
        ]
        of_loss, self.loss_sums = self.loss_sums, {}
        return self.communicator.join_sums([*((-1, owner, grad) for owner, grad in of_loss.values()), *parts])

    def _taken(self, stage: StageRun) -> list[tuple[Tensor, Tensor]]:
        place = self._setup.places[stage.index]
        return [(owner, self._placement.to_owner(owner, grad, place)) for owner, grad in stage.take_sums()]

    def owners(self) -> list[Tensor]:
        """The parameters and foreign leaves that an output depends on, each once."""
        found = {id(each): each for stage in self.stages for each in stage.aliases.used_parameters}
        found.update({key: leaf for stage in self.stages for key, leaf in stage.foreign.items()})
        return self.communicator.share_owners(list(found.values()))

    # ------------------------------------------------------------------------------------------------ second order

    def differentiate(
        self, grads: Sequence[Grads], owners: Sequence[Tensor], create_graph: bool
    ) -> tuple[Grads, list[Tensor | None]]:
        """The gradients as differentiable functions of the input, the parameters and `grads`.

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
            deliver()
            with self.generators, torch.enable_grad():
                pieces, tree = self._compose(chunk, views, gate)
            given = zip(tree.tensors, chunk_grads, strict=True)
            pairs = [(tensor, grad) for tensor, grad in given if grad is not None and tensor.requires_grad]
            roots, root_grads = [tensor for tensor, _ in pairs], [grad for _, grad in pairs]
            wanted = [piece for piece in pieces if piece.requires_grad]
            found: tuple[Tensor | None, ...] = (None,) * (len(wanted) + len(targets))
            if roots:
                with hooks_asleep(foreign), gate.closed(), ExitStack() as stack:
                    for stage in self.stages:  # a layer's own torch.utils.checkpoint runs its forward now
                        stack.enter_context(stage.on_views(views))
                        stack.enter_context(stage.differentiating())
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
        under_way: dict[Key | str, Tree] = {"x": Tree(tuple(pieces), self.batch.tree.skeleton)}
        for stage, device in zip(self.stages, self.devices, strict=True):
            stage.check_unchanged(chunk)
            values = self._setup.values
            trees = [under_way.pop(row.name) for row in values.read_by[stage.index]]
            placed = [Tree(tuple([t.to(device) for t in tree.tensors]), tree.skeleton) for tree in trees]
            made = stage.compose(chunk, Bundle.of(tuple(placed)), views)
            under_way.update(zip([row.name for row in values.made_by[stage.index]], made.trees, strict=True))
        return pieces, under_way["y"]


class DrewError(Exception):
    """A stage drew from a default generator of the host that had never done so."""


_WORK = {  # unbound methods: bound ones would make a call refer to itself
    Kind.F: Call._forward,
    Kind.B: Call._backward,
    Kind.I: Call._backward,
    Kind.W: Call._weights,
}


def _entered(owner: Tensor, gate: Gate) -> Tensor:
    """An owner behind the gate. One that was frozen since the forward is a leaf of this call."""
    return gate.enter(owner) if owner.requires_grad else owner.detach().requires_grad_()


def _last_backwards(orders: Sequence[Sequence[Action]]) -> frozenset[Action]:
    """For each stage the action after which its sums are final."""
    found = {action.stage: action for order in orders for action in order if action.kind is not Kind.F}
    return frozenset(found.values())


def _has_any(given: Sequence[Grads]) -> bool:
    for grads in given:
        for grad in grads:
            if grad is not None:
                return True
    return False


def _at_loss(loss_end: LossEnd, chunk: int, exits: OutputEdges) -> Roots:
    assert exits.outputs is not None  # the last stage keeps them for the loss
    return loss_end(chunk, exits.outputs.trees[0])


def _at_outputs(given: Sequence[Grads], exits: OutputEdges) -> Roots:
    if len(given) == 1:
        return roots_of(given[0], exits.edges)
    grads = [grad for each, size in zip(given, exits.sizes, strict=True) for grad in each or (None,) * size]
    return roots_of(grads, exits.edges)
