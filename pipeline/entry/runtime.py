"""The runtime of a Pipe: all that its calls need, whether an entry point makes them or an analysis.

    settings, layers, history of earlier calls  -->  Runtime  --communicator(entry)-->  within it a call
                                                             --agreed(request, batch, ...)-->  its Setup

A Runtime is made for one operation and holds nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partition.modes import modes_of
from partition.names import begin_call, first_names_of
from pipeline.common.accelerators import is_capturing
from pipeline.common.cadence import Cadence
from pipeline.common.errors import PLAIN
from pipeline.common.module_tables import modules_of
from pipeline.common.profiling import named
from pipeline.data.loss_key import LossCounts
from pipeline.data.microbatch import Batch, described
from pipeline.distributed.agreement import (
    LOADS,
    MINI_BATCHES,
    MODES,
    OPTIONS,
    SCALES,
    SETTINGS,
    VALUES,
    values_in_words,
)
from pipeline.distributed.assignment import TiedParameter
from pipeline.distributed.communicator import DistributedCommunicator
from pipeline.distributed.data_parallel.communicator import DataParallelCommunicator
from pipeline.distributed.data_parallel.shards import layout_of
from pipeline.distributed.stale import StaleModules
from pipeline.distributed.topology import PipeTopology
from pipeline.distributed.wrapped import refuse_around
from pipeline.entry.plans import Planner
from pipeline.entry.probe.probe import Probe
from pipeline.entry.settings import Settings, layers_by_stage
from pipeline.entry.validation import refuse_transforms
from pipeline.execution.communicator import CommonTensors, Communicator
from pipeline.execution.drivers import lane_groups
from pipeline.execution.plan import plan_step
from pipeline.execution.setup import Setup
from pipeline.execution.trace import TraceRecorder
from pipeline.recompute.snapshot import StageTraits


@dataclass(frozen=True)
class Request:
    """The call that an operation asks for.

    Attributes:
        planner: makes the plan, see execution/plan.py.
        grad: whether the call has gradients.
        keep: whether every chunk may have to be recomputed later, kept ones too.
        draws: whether layers may draw: the call has a seed. So may they gather statistics of a chunk's rows in train
            mode, as BatchNorm does.
        options: its arguments, by name, on which all ranks must agree.
        scaler: scales the loss, on all ranks by the same.
    """

    planner: Planner
    grad: bool
    options: Mapping[str, object]
    keep: bool = False
    draws: bool = True
    scaler: torch.amp.GradScaler | None = None


@dataclass(eq=False)
class History:
    """The facts that earlier calls of a Pipe have shown.

    Attributes:
        traits: of the stages.
        losses: the number of mini-batches of each loss_fn.
        calls: those with gradients.
        probed: the mini-batches, by training flags, classes and hooks of modules, and failures over ranks.
        traces: the recorders of the calls under way.
        stale: over ranks, what its caller's model has of other ranks' layers.
        loaded: whether a state was loaded since the last call with gradients.
    """

    traits: StageTraits = field(default_factory=StageTraits)
    losses: LossCounts = field(default_factory=LossCounts)
    calls: Cadence = field(default_factory=Cadence)
    probed: Cadence = field(default_factory=Cadence)
    traces: list[TraceRecorder] = field(default_factory=list)
    stale: StaleModules = field(default_factory=StaleModules)
    loaded: bool = False


@dataclass(frozen=True, eq=False)
class Runtime:
    """The interface of a Pipe for code that runs calls over its stages: entry points, `pipeline.curvature`.

    Attributes:
        module: the Pipe.
        settings: its settings.
        history: what its earlier calls have shown; a call adds to it.
    """

    module: nn.Module
    settings: Settings
    history: History

    # -------------------------------------------------------------------------------------------------- who has what

    @property
    def topology(self) -> PipeTopology | None:
        """The assignment of stages to ranks. None: all stages are in this process."""
        return self.settings.processes.topology

    @property
    def has_replicas(self) -> bool:
        """Whether other pipelines train the same stages on other mini-batches."""
        return self.settings.processes.replicas is not None

    @property
    def rank(self) -> int:
        """The number of this process among the Pipe's."""
        return 0 if self.topology is None else self.topology.ranks.rank

    @property
    def ranks(self) -> int:
        """The number of the Pipe's processes."""
        return 1 if self.topology is None else self.topology.ranks.size

    @property
    def first_names(self) -> Mapping[str, str]:
        """For every name of a parameter of the whole model its first one, in order."""
        whole = {} if self.topology is None else self.topology.first_names
        return {**whole, **first_names_of(self.module)}

    def tied(self) -> dict[TiedParameter, Tensor]:
        """This rank's copies of the parameters that several ranks have."""
        return {} if self.topology is None else self.topology.assignment.copies_in(self.module)

    def stages(self) -> list[list[nn.Module]]:
        """The layers of each stage, as they are now.

        Raises:
            ValueError: their number has changed.
        """
        table: Mapping[str, Any] = self.module._modules
        return layers_by_stage(table.values(), self.settings.balance)

    # ------------------------------------------------------------------------------------------------------- a call

    def follow_model(self) -> None:
        """Give the layers what was set on the model of which they are parts: `model.eval()`, `model.drop.p = 0.2`."""
        self.settings.origin.modes.follow()
        begin_call(self.module.children())

    @property
    def world_ranks(self) -> Sequence[int]:
        """The ranks of the pipeline, as the world numbers them; in one process none."""
        return () if self.topology is None else self.topology.ranks.members

    def communicator(self, entry: str, averages: bool = False) -> Communicator:
        """The processes that run one operation, a context: within it a failure on one rank fails all.

        Args:
            entry: the name of the operation.
            averages: whether it averages gradients over replicas.
        """
        topology, replicas = self.topology, self.settings.processes.replicas
        refuse_around(self.module, self.world_ranks)
        tied = self.tied()
        inner = Communicator() if topology is None else DistributedCommunicator(topology, tied, entry)
        if replicas is None or not averages:
            return inner
        stages = {stage: layers for stage, layers in enumerate(self.stages()) if inner.topology.has(stage)}
        return DataParallelCommunicator(inner, replicas, layout_of(stages, set(map(id, tied.values()))), entry)

    def setup(
        self, batch: Batch, target: Batch, communicator: Communicator, options: Mapping[str, object]
    ) -> Setup:
        """The settings of a call with gradients, which runs the order of a step, seeds nothing, and keeps nothing."""
        return self.agreed(Request(plan_step, True, options, draws=False), batch, communicator, target)

    def agreed(
        self,
        request: Request,
        batch: Batch,
        communicator: Communicator,
        target: Batch | None = None,
        recorder: TraceRecorder | None = None,
    ) -> Setup:
        """The settings of a call, which all ranks have agreed to make.

        Args:
            request: what is asked of it.
            batch: the input, cut.
            communicator: the processes that run it.
            target: the target, cut alike.
            recorder: gets its trace, beside the recorders of the Pipe.
        """
        settings, history = self.settings, self.history
        self.follow_model()
        settings.origin.check()
        if self.topology is not None:
            self.topology.check_ties(settings.processes.copies, self.tied(), self.stages())
        refuse_transforms(lambda: [*batch.tensors, *self.module.parameters(), *self.module.buffers()])
        if is_capturing(settings.layout.devices):
            raise RuntimeError(
                "a Pipe was called while a graph was being captured (torch.cuda.graph), which would hold none of what "
                f"the Pipe decides and waits for on the host. Capture {PLAIN}, or call the Pipe outside."
            )
        batches = {"x": batch} if target is None else {"x": batch, "the target": target}
        tensors = [tensor for cut in batches.values() for tensor in cut.tensors]
        describe = partial(self._words, request, batches)
        common = CommonTensors(mini_batch=[*tensors, *_scales(request.scaler)])
        seed = communicator.open(describe, request.draws, common)
        history.loaded = history.loaded and not request.grad  # replicas evaluate when they like
        if request.grad and not torch.is_grad_enabled():
            raise RuntimeError(
                "pipe.step needs gradients, but they are switched off (no_grad). Use pipe.evaluate(...)."
            )
        plan = settings.plans.plan(batch.chunks, request.planner, settings.chunks * len(batch.mini_batches))
        setup = Setup(
            stages=self.stages(),
            layout=settings.layout,
            plan=plan,
            recompute=plan.recomputed(settings.checkpoint) if request.grad else frozenset(),
            grad=request.grad,
            keep=request.keep,
            compares=request.grad and history.calls.next(),
            traits=history.traits,
            defer=settings.deferred_batch_norm,
            traces=[*history.traces, *([] if recorder is None else [recorder])],
            communicator=communicator,
            seed=seed,
        )
        if batch.chunks > 1:
            self._probe(setup, batch, request.draws)
        return setup

    def _probe(self, setup: Setup, batch: Batch, gathers: bool) -> None:
        """Check whether this mini-batch may be cut: in validating calls, counted in each mode of the Pipe.

        In one process also by the modes of layers, the classes of modules, and which have hooks: what was put in since
        the last probe may mix rows. A failure over ranks fails all of them, and restarts the count on all.
        """
        layers = list(self.module.children()) if setup.communicator.is_alone else []
        kinds = tuple([
            (type(module).__qualname__, not module._forward_pre_hooks, not module._forward_hooks)
            for module in modules_of(layers)
        ])
        generation = 0 if self.topology is None else self.topology.ranks.generation
        key = (self.module.training, modes_of(layers), kinds, gathers, generation)
        if not self.history.probed.next(key):
            return
        try:
            plan = self.settings.plans.uncut(setup.plan.schedule)
            with named("probe"):
                Probe(replace(setup, plan=plan), batch, not self.settings.mixes_rows, gathers).check()
        except BaseException:
            self.history.probed.take_back(key)
            raise

    # -------------------------------------------------------------------------------------------------- descriptions

    def _words(self, request: Request, batches: Mapping[str, Batch], values: bool) -> dict[str, str]:
        """The descriptions on which all ranks must agree."""
        gradients = "on" if request.grad and torch.is_grad_enabled() else "off"
        options = {"gradients": gradients, **request.options}
        descriptions = {
            SETTINGS: self.settings.words,
            MODES: self._modes(),
            LOADS: "loaded since the last call with gradients" if self.history.loaded else "not loaded",
            OPTIONS: "\n".join([f"{name}={value}" for name, value in options.items()]),
            MINI_BATCHES: ", ".join([f"{name} {described(cut)}" for name, cut in batches.items()]),
        }
        if values:
            descriptions[VALUES] = values_in_words([tensor for cut in batches.values() for tensor in cut.tensors])
            descriptions[SCALES] = ", ".join([str(scale.item()) for scale in _scales(request.scaler)])
        return descriptions

    def _modes(self) -> str:
        """A description of the mode of the Pipe, and of autocast. A layer has the mode that it has on its own rank."""
        types = dict.fromkeys(["cpu", *(device.type for device in self.settings.layout.devices)])
        kinds = [(kind, torch.get_autocast_dtype(kind)) for kind in types if torch.is_autocast_enabled(kind)]
        return f"{'train' if self.module.training else 'eval'}, autocast {kinds or 'off'}"

    # -------------------------------------------------------------------------------------------------------- traces

    def recorder(self) -> TraceRecorder:
        """A recorder of the lanes of this Pipe."""
        schedule, layout = self.settings.schedule, self.settings.layout
        is_alone = self.settings.processes.ranks is None  # a rank has one lane
        turns = lane_groups(layout.workers, layout.places, schedule.placement.lane_of) if is_alone else ()
        return TraceRecorder(schedule.lanes, turns)


def _scales(scaler: torch.amp.GradScaler | None) -> list[Tensor]:
    """The scale of a scaler, if there is one, where it is: nobody waits for it."""
    if scaler is None:
        return []
    scale = getattr(scaler, "_scale", None)  # from its first use on, if it is enabled
    return [torch.tensor(scaler.get_scale(), dtype=torch.float32, device="cpu") if scale is None else scale]
