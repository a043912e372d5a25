"""The execution of one call: it runs the phases of a plan, action by action, with a table kind -> work.

    caller --feed--> Mailbox --take--> work[F](stage, chunk) --put--> Mailbox ... --take_grads--> work[B](stage, chunk)
    around each action: an interrupt that waits is raised, an error is told where it arose, a trace gets its time

A user of it (a step, a product, a probe) brings its stages and its table of work. What all share stands here: the
driver, the mailbox, the copies of parameters on other devices, the generators that are put back at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor

from partition.generators import OF_HOST, OUTSIDE_TORCH, Generator
from partition.precision import weights_cast_anew
from pipeline.common.interrupts import deliver
from pipeline.common.places import Place
from pipeline.common.profiling import named
from pipeline.common.torch_modes import Ambient, within_checkpoint
from pipeline.data.microbatch import Batch
from pipeline.data.pytrees import Activations, Grads
from pipeline.data.values import CALLER
from pipeline.execution.communicator import Communicator
from pipeline.execution.drivers import Driver
from pipeline.execution.mailbox import Mailbox
from pipeline.execution.placement import ParameterPlacement
from pipeline.execution.setup import Setup
from pipeline.execution.threads import Perform
from pipeline.recompute.randomness import GeneratorGuard, Seeder
from pipeline.recompute.snapshot import ForwardSnapshot, check_shared_state, remote_objects
from pipeline.stage.layers import StageLayers
from scheduler import Action, Event, Kind

WorkTable: TypeAlias = Mapping[Kind, Callable[[int, int], None]]  # kind -> what it does, called with (stage, chunk)


class Execution:
    """The run of one call.

    Args:
        setup: the settings.
        batch: the input, cut.

    Attributes:
        communicator: reaches the other processes. A later backward has another one than the forward.
        generators: the default generators; a context that leaves them as it found them.
        ambient: torch's switches at the call.
        placement: brings parameters to the places of the stages, and their gradients back.
        mailbox: the values under way.
        layers: those of each stage in this process.
    """

    def __init__(self, setup: Setup, batch: Batch) -> None:
        self.setup = setup
        self.batch = batch
        self.communicator = setup.communicator
        first_layers = accumulate((len(layers) for layers in setup.stages), initial=0)
        self.layers = {
            index: StageLayers(index, first, layers, setup.layout.values)
            for index, (first, layers) in enumerate(zip(first_layers, setup.stages, strict=False))
            if setup.communicator.topology.has(index)
        }
        self.ambient = Ambient.capture(dict.fromkeys(["cpu", *(device.type for device in self.devices)]))
        self.placement = ParameterPlacement(setup.stages, setup.layout.places, setup.layout.transport)
        self.mailbox = self._new_mailbox()
        self._driver = Driver(setup.layout.places, setup.stages, self._lane_of, setup.layout.workers)
        self.generators = GeneratorGuard(self.devices, self._spared)
        self._recorded = [(trace.events, len(trace.events)) for trace in setup.traces]  # a trace that ends has another
        self._ready: dict[int, float] = {}  # by stage: when the action under way, or what is left of it, could begin

    # ---------------------------------------------------------------------------------------------------- settings

    @property
    def devices(self) -> list[torch.device]:
        """The devices of the stages in this process."""
        return [self.setup.layout.places[index].device for index in self.layers]

    @property
    def last(self) -> int:
        """The index of the last stage, which makes the output."""
        return len(self.setup.stages) - 1

    @property
    def has_last(self) -> bool:
        """Whether the last stage is in this process."""
        return self.last in self.layers

    @property
    def layer_of_loss(self) -> int:
        """The index under which a loss draws its random numbers: it is one more layer."""
        return sum([len(layers) for layers in self.setup.stages])

    @property
    def has_threads(self) -> bool:
        """Whether lanes have threads."""
        return self._driver.has_threads

    @property
    def _spared(self) -> Sequence[Generator]:
        """The host's generators that get no seeds as long as nothing draws from them: seeds of these take longest.

        torch's own gets them: in one thread that costs little, and a layer often begins to draw from it later. Where
        other processes take part, no call can run once more if something begins to draw.
        """
        if self.has_threads:
            return OF_HOST
        return OUTSIDE_TORCH if self.communicator.is_alone else ()

    @property
    def _lane_of(self) -> Sequence[int]:
        return self.setup.plan.schedule.placement.lane_of

    def seeder(self) -> Seeder:
        """A seeder of the generators of all stages in this process."""
        return Seeder(self.setup.seed, self.devices, self.generators)

    def bring(self, stage: int) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        """From parameters to their values at the place of a stage: themselves, or copies."""
        return partial(self.placement.bring, self.setup.layout.places[stage])

    def carried(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A tensor of the caller's (a part of the target), on a device of a stage."""
        return self.setup.layout.transport.carry(tensor, Place(tensor.device), Place(device))

    # ---------------------------------------------------------------------------------------------- values under way

    def _new_mailbox(self) -> Mailbox:
        layout = self.setup.layout
        return self.communicator.exchange.mailbox(layout.values, dict(enumerate(layout.places)), layout.transport)

    def feed(self, grad: bool) -> None:
        """Post the chunks of the input. `grad`: as tensors that may need a gradient."""
        if 0 in self.layers:
            for chunk in range(self.batch.chunks):
                self.mailbox.put(CALLER, chunk, [self.batch.message(chunk, grad)])

    def take(self, stage: int, chunk: int) -> list[Activations]:
        """Take the values that a stage reads. The action begins when they have arrived: a wait is no work."""
        inbox = self.mailbox.take(stage, chunk)
        self._begin_when_arrived(stage)
        return inbox

    def take_grads(self, stage: int, chunk: int) -> list[Grads]:
        """The same for the gradients of the values that a stage made."""
        grads = self.mailbox.take_grads(stage, chunk)
        self._begin_when_arrived(stage)
        return grads

    def _begin_when_arrived(self, stage: int) -> None:
        if self.setup.traces:
            self._ready[stage] = max(self._ready[stage], self.mailbox.arrived)

    def check_snapshots(self, snapshots: Mapping[int, ForwardSnapshot]) -> None:
        """Raise if a forward changed state of the stages so that numbers depend on the order of the chunks.

        Args:
            snapshots: of the stages in this process, after all forwards.
        """
        named = [(self.layers[index].name, snapshot) for index, snapshot in snapshots.items()]
        check_shared_state(named, remote_objects(self.setup.stages, self.layers))
        for name, snapshot in named if self.batch.chunks > 1 else ():
            snapshot.buffers.check_unseen(name)

    def drop_values(self) -> None:
        """Forget the values under way: the run has failed."""
        self.mailbox = self._new_mailbox()

    def forget(self) -> None:
        """Forget all that has run: it runs again."""
        self.drop_values()
        for events, number in self._recorded:
            del events[number:]

    def go_on_with(self, communicator: Communicator) -> None:
        """From now on this communicator carries messages, agrees and reports failures."""
        if communicator is not self.communicator:
            self.communicator = communicator
            self.drop_values()

    # ----------------------------------------------------------------------------------------------------- actions

    def run(self, number: int, work: WorkTable, draws: bool, on_final: Callable[[int], None] | None = None) -> None:
        """Run a phase. Called within `generators`.

        Args:
            number: the phase.
            work: what an action does.
            draws: whether a stage may draw from a default generator of the host.
            on_final: called with each stage after its last backward.
        """
        phase = self.setup.plan.phases[number]
        ambient = self.ambient if number == 0 else self.ambient.now()  # a call begins with its first phase
        in_turns = ambient.switches != self.ambient.switches or within_checkpoint() or self.setup.compares
        perform: Perform = partial(self._perform, work)
        if self.setup.traces or not self.communicator.is_alone:
            perform = partial(self._perform_and_tell, perform)
        if on_final is not None:
            perform = partial(_then_final, perform, _last_backwards(phase.merged), on_final)
        with weights_cast_anew(self.setup.grad):
            self.mailbox.begin(number, phase.messages)
            self._driver.run(phase, perform, draws, ambient, in_turns)
            self.communicator.at(None)
            self.mailbox.end()

    def _perform(self, work: WorkTable, action: Action) -> None:
        deliver()
        stage, kind, chunk = action
        try:
            with named(action):
                work[kind](stage, chunk)
        except BaseException as error:
            error.add_note(f"{self.layers[stage].name}, chunk {chunk}, {action}")
            raise

    def _perform_and_tell(self, perform: Perform, action: Action) -> None:
        """The same, with reports to a trace and to other ranks."""
        self._ready[action.stage] = perf_counter()
        self.communicator.at(action)
        perform(action)
        self.record(action, self._ready.pop(action.stage))

    def record(self, action: Action, start: float) -> float:
        """Record in the traces that an action ran from `start` until now. Returns now."""
        end = perf_counter()
        for events, _ in self._recorded:
            events.append(Event(action, self._lane_of[action.stage], start, end))
        return end

    def record_recomputation(self, stage: int, chunk: int) -> None:
        """Record that the backward under way has recomputed what it needs; the rest of it begins now."""
        self._ready[stage] = self.record(Action(stage, Kind.R, chunk), self._ready[stage])

    def record_update(self, stage: int, start: float) -> None:
        """Record an update of parameters after a stage's last backward, from `start` until now."""
        self.record(Action(stage, Kind.U, self.batch.chunks - 1), start)


def _then_final(
    perform: Perform, last: frozenset[Action], on_final: Callable[[int], None], action: Action
) -> None:
    """Perform an action, and announce that it was the last backward of its stage."""
    perform(action)
    if action in last:
        on_final(action.stage)


def _last_backwards(order: Sequence[Action]) -> frozenset[Action]:
    """For each stage the action after which its sums are final."""
    last = {action.stage: action for action in order if action.kind is not Kind.F}
    return frozenset(last.values())
