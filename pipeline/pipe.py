"""The public class: a module like the plain one, cut into stages and fed in chunks.

    Pipe(module, balance, chunks)            stages on devices, layers under the plain module's names
    pipe(x)                                  differentiable by autograd, to any order      entry/forward.py
    pipe.step(x, y, loss_fn=f)               the schedule's order, F and B interleaved     entry/step.py
    pipe.evaluate(x, y, loss_fn=f)           eval mode, no gradients

A `Call` holds all state of one call; a Pipe holds settings and the plain module's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from partition import split
from partition.contiguous import whole
from partition.splitting import check_module
from pipeline.common.arguments import check_flag, check_flags, check_limit, check_norm_type, shown
from pipeline.common.cadence import validates
from pipeline.common.call_lock import turn
from pipeline.common.interrupts import firm
from pipeline.common.places import Place, places_of
from pipeline.common.torch_modes import eagerly, without_autocast
from pipeline.data.loss import Loss, LossFn
from pipeline.data.loss_key import LossCounts
from pipeline.data.microbatch import Batch, described, gather, scatter, scatter_like
from pipeline.data.values import chain
from pipeline.distributed.agreement import MINI_BATCHES, MODES, OPTIONS, SETTINGS, VALUES, values_in_words
from pipeline.distributed.communicator import DistributedCommunicator
from pipeline.distributed.data_parallel.communicator import DataParallelCommunicator
from pipeline.distributed.data_parallel.replicas import Replicas, check_where, find_replicas
from pipeline.distributed.data_parallel.shards import layout_of
from pipeline.distributed.group import RankGroup
from pipeline.distributed.topology import PipeTopology, topology_of
from pipeline.distributed.wrapped import check_over_ranks, check_wrapped
from pipeline.entry import eager_step as eager_entry
from pipeline.entry import forward as forward_entry
from pipeline.entry import step as step_entry
from pipeline.entry.eager_step import Listens
from pipeline.entry.plans import Planner, Plans
from pipeline.entry.probe import Probe
from pipeline.entry.runtime import Runtime
from pipeline.entry.settled import Settled, refuse_recording
from pipeline.entry.state.meta_init import How
from pipeline.entry.state.state_dict import Stateful
from pipeline.entry.step import LossEnd, Step
from pipeline.entry.validation import (
    StageView,
    check_batch_dim,
    check_holds,
    check_placement,
    check_plain,
    check_schedule,
    check_shared,
    check_step,
    choose_balance,
    choose_places,
    find_ranks,
    parameters_of,
    settle,
)
from pipeline.execution.call import Call
from pipeline.execution.communicator import Communicator, LocalCommunicator, Output, Verdict
from pipeline.execution.drivers import check_workers, in_turns
from pipeline.execution.execution import Execution
from pipeline.execution.plan import plan_forward, plan_step
from pipeline.execution.setup import Setup
from pipeline.execution.trace import TraceRecorder
from pipeline.gradients.clip import clip_factor
from pipeline.gradients.eager import EagerUpdate
from pipeline.gradients.partial import is_part
from pipeline.gradients.store import GradStore
from pipeline.recompute.policy import Policy, check_policy
from pipeline.recompute.randomness import draw_seed
from pipeline.recompute.snapshot import StageTraits
from pipeline.skip import routes, verify_skippables
from pipeline.stage.batchnorm import check_deferrable
from pipeline.transports.local import Local
from scheduler import Schedule, Timeline, verify


class Pipe(Settled, Stateful):
    """An `nn.Sequential` cut into stages, each on its device, that computes a mini-batch in chunks.

    Outputs, losses, gradients to any order and buffers are the plain module's. Parameters, buffers and state_dict keep
    its names. The layers are the module's own, not copies.

    Args:
        module: the model.
        balance: layers per stage. None: cut so that parameter bytes are even over the devices or ranks.
        chunks: the largest number of micro-batches that a mini-batch is cut into; min(chunks, rows) run.
        batch_dim: the dim that counts the rows of the mini-batch, of inputs, targets and outputs alike: 0, or 1 for
            time-first data [time, rows, ...]. Tensors with fewer dims (lengths, class labels) are cut along dim 0.
        mixes_rows: layers may look at all rows of a chunk (a mixture of experts with a capacity, say), as BatchNorm
            does in train mode: numbers are then those of a loop over the chunks. False: such a layer is an error.
        devices: the device of each stage, repeats allowed: all stages in this process. None: over the ranks of
            torch.distributed where there are several (under torchrun); else all CUDA devices, or the CPU.
        schedule: a name of `scheduler.names()`, or a Schedule; what `step` runs. By name there are as many lanes as
            `balance` has stages, or half as many where a lane has two (interleaved, the V schedules); over ranks, a
            lane for each rank.
        checkpoint: "always", "except_last", "never", or a callable (stage, chunk) -> bool: which activations are
            computed again in the backward instead of kept. On iff gradients are, in train and eval mode.
        deferred_batch_norm: update the running statistics of BatchNorm layers once for each mini-batch, with those of
            the whole mini-batch, as the plain module does; not once for each chunk.
        workers: "inline": one thread drives all stages; "threads": one for each. None: threads where stages are on
            several accelerators.
        group: the ranks to run over, a ProcessGroup or a DeviceMesh of one dimension. None: all.
        replicas: the ranks that have the same stages in other pipelines, which train on other mini-batches: a
            ProcessGroup or a DeviceMesh of one dimension, with `group` or `devices`. Gradients are averaged over them.
        timeout: over ranks, seconds after which a call is given up in which nothing moves on any rank.
        heartbeat: over ranks, seconds after which a rank that gives no sign of life is given up.
        materialize: how layers on the meta device get their values: a callable that fills a layer in place, a
            state_dict, the path of a torch.distributed.checkpoint directory, or (callable, state).

    Raises:
        TypeError: not an nn.Sequential, or one with a forward of its own; skips that do not match.
        ValueError: the balance, devices, chunks, schedule or checkpoint is invalid; the message says why and what is
            valid.
        MismatchError: over ranks, which build different Pipes.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipeline import Pipe
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        >>> x = torch.randn(6, 4).double()
        >>> pipe = Pipe(model, balance=[2, 1], chunks=3)
        >>> torch.allclose(pipe(x), model(x), rtol=0, atol=1e-15)
        True
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        chunks: int = 1,
        *,
        devices: Iterable[Place | torch.device | str | int] | None = None,
        schedule: str | Schedule = "1f1b",
        checkpoint: Policy = "except_last",
        deferred_batch_norm: bool = False,
        workers: str | None = None,
        group: Any = None,
        replicas: Any = None,
        timeout: float = 300.0,
        heartbeat: float = 10.0,
        materialize: How = None,
        batch_dim: int = 0,
        mixes_rows: bool = False,
    ) -> None:
        super().__init__()
        self._batch_dim = check_batch_dim(batch_dim)
        check_flags(mixes_rows=mixes_rows)
        self.mixes_rows = mixes_rows
        check_module(module)
        check_wrapped(module)
        check_plain(module)
        check_workers(workers)
        check_flag("deferred_batch_norm", deferred_batch_norm)
        places = places_of(devices)
        check_where(replicas, group, places)
        ranks = find_ranks(group, places, workers, heartbeat, timeout)
        others = find_replicas(replicas, ranks, heartbeat, timeout)
        if ranks is not None or others is not None:
            check_over_ranks(module)
        self._balance = choose_balance(module, balance, places, ranks)
        self._places = choose_places(places, len(self.balance), ranks)
        self._workers = workers
        self._transport = Local()
        verify_skippables(module)
        if deferred_batch_norm:
            check_deferrable(module)
        self._deferred_batch_norm = deferred_batch_norm
        stages = split(module, self.balance)
        self._values = chain(len(self.balance), routes(stages))
        self._traces: list[TraceRecorder] = []
        self._calls = 0  # the number of calls with gradients
        self._known = StageTraits()
        self._probed: dict[tuple[tuple[bool, ...], int], int] = {}  # by training flags and failures over ranks
        self._losses = LossCounts()  # the number of mini-batches of each loss_fn
        self._ranks = ranks
        self._told: tuple[object, str] | None = None  # the settings in words, and what they are made of
        self._topology: PipeTopology | None = None
        self._replicas: Replicas | None = None
        self.checkpoint = checkpoint
        self.chunks = chunks
        self.schedule = schedule
        self.training = module.training
        check_shared(stages)
        layers: Mapping[str, Any] = module._modules
        self._modules.update(layers)
        if ranks is None:
            settle(stages, range(len(stages)), self.devices, materialize, draw_seed)
        else:
            self._join(stages, ranks, materialize)
        if others is not None:
            self._replicas = Replicas(others, ranks, self)
            self._replicas.join(self, self._settings())

    def _join(self, stages: Sequence[nn.Sequential], ranks: RankGroup, materialize: How) -> None:
        """Join the Pipes that the other ranks build now into one. Their layers become placeholders here."""
        rank_of = self._plans.resolved(self.chunks).placement.lane_of
        self._topology = topology = topology_of(stages, rank_of, ranks, self._values)
        elsewhere = dict(topology.elsewhere(stages))
        with DistributedCommunicator(topology, (), f"Pipe({len(self)} layers)") as communicator:
            seed = communicator.open(lambda values: {SETTINGS: self._settings()}, draws=materialize is not None)
            ranks.connect(topology.pairs)
            settle(stages, topology.hosting.own, self.devices, materialize, lambda: seed)
            self._modules.update(elsewhere)
            communicator.share_ties(topology.hosting.tied(self))
            communicator.agree(Verdict(None, None, True))
        is_part(self)

    def __setstate__(self, state: Any) -> None:
        """Restore a copy, which has parameters of its own."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self._topology is not None:
            is_part(self)

    # ---------------------------------------------------------------------------------------------------- settings

    @property
    def balance(self) -> list[int]:
        """The number of layers of each stage."""
        return list(self._balance)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage."""
        return [place.device for place in self._places]

    @property
    def deferred_batch_norm(self) -> bool:
        """Whether running statistics of BatchNorm layers are updated once for each mini-batch."""
        return self._deferred_batch_norm

    @deferred_batch_norm.setter
    def deferred_batch_norm(self, deferred: bool) -> None:
        check_flag("deferred_batch_norm", deferred)
        if deferred:
            check_deferrable(self.to_sequential())
        self._deferred_batch_norm = deferred

    @property
    def chunks(self) -> int:
        """The largest number of chunks that a mini-batch is cut into."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        count = whole(chunks)
        if count is None:
            raise TypeError(f"chunks is {chunks!r}. Give a whole number, at least 1.")
        if count < 1:
            raise ValueError(f"chunks is {count}. A mini-batch is cut into at least 1 chunk.")
        self._chunks = count

    @property
    def batch_dim(self) -> int:
        """The dim that counts the rows of a mini-batch."""
        return self._batch_dim

    @property
    def checkpoint(self) -> Policy:
        """The policy that says which activations are computed again in the backward."""
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, policy: Policy) -> None:
        check_policy(policy)
        self._checkpoint = policy

    @property
    def schedule(self) -> str | Schedule:
        """The order that `step` runs."""
        return self._plans.given

    @schedule.setter
    def schedule(self, schedule: str | Schedule) -> None:
        if not isinstance(schedule, str | Schedule):
            raise TypeError(f"schedule is {shown(schedule)}. Give a name of scheduler.names(), or a Schedule.")
        if isinstance(schedule, Schedule):
            verify(schedule)
            check_schedule(schedule, len(self.balance))
        ranks = None if self._ranks is None else (self._ranks.size, self._ranks.rank)
        plans = Plans(schedule, self._places, self._values, ranks)
        found = plans.resolved(self.chunks)
        check_schedule(found, len(self.balance))
        if self._topology is not None:
            check_placement(found, self._topology.hosting.rank_of)
        self._plans = plans

    # -------------------------------------------------------------------------------------------- like a Sequential

    @property
    def partitions(self) -> list[nn.Sequential]:
        """The stages, as Sequentials of the same layers. For inspection: the Pipe runs the layers, not these."""
        return [StageView(stage) for stage in split(self.to_sequential(), self.balance)]

    def to_sequential(self) -> nn.Sequential:
        """The plain module back: the same layers under the same names."""
        plain = nn.Sequential()
        layers: Mapping[str, Any] = self._modules
        plain._modules.update(layers)
        plain.training = self.training
        return plain

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: Any) -> Any:
        return self.to_sequential()[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.to_sequential())

    def extra_repr(self) -> str:
        devices = ", ".join(str(device) for device in self.devices)
        return f"balance={self.balance}, chunks={self.chunks}, checkpoint={self.checkpoint!r}, devices=[{devices}]"

    # ------------------------------------------------------------------------------------------------ entry points

    def forward(self, input: Any, *, output: str = "all") -> Any:
        """Compute `module(input)`.

        Args:
            input: any pytree of tensors and plain values; tensors are cut along `batch_dim`, `NoChunk(value)` and
                plain values go to every chunk. Over ranks, the same on every rank.
            output: over ranks, the ranks that get the output: "all" ranks, so that each computes the same loss and
                calls its backward; or the "last", which has the last stage, while the others get a number in its place,
                whose backward they call.

        Returns:
            What the plain module returns, on the last device. In one process differentiable to any order; over ranks
            once, see `pipeline.curvature` for more.

        Raises:
            MismatchError: over ranks, which do not make the same call.
        """
        return eagerly(Pipe._forward, self, input, output)

    def _forward(self, input: Any, output: str) -> Any:
        if output not in ("all", "last"):
            raise ValueError(f"output is {output!r}. Use 'all' or 'last': which ranks get the output.")
        if torch.jit.is_tracing():
            refuse_recording("torch.jit.trace")
        with turn() as now, self._communicator("forward", torch.is_grad_enabled()) as communicator:
            batch = scatter(input, self.chunks, batch_dim=self._batch_dim)
            grad = torch.is_grad_enabled()
            self._refuse_transforms(batch)
            execution = self._execution(batch, plan_forward, grad, True, communicator, {"output": output})
            return forward_entry.run(Call(execution), now, everywhere=output == "all")

    def step(
        self,
        x: Any,
        target: Any = None,
        *,
        loss_fn: LossFn,
        optimizer: torch.optim.Optimizer | EagerUpdate | None = None,
        outputs: bool = False,
        trace: bool = False,
        loss_reduction: str | None = None,
        clip_grad_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        grads: str = "param",
    ) -> Step:
        """Forward, loss and backward of one mini-batch, in the order of the schedule.

        The loss and the gradients are the un-pipelined ones. A failure leaves parameters, buffers, `.grad` and
        generators as they were.

        Args:
            x: the input, as for `forward`.
            target: any pytree with one row for each row of x; each chunk's rows go to loss_fn. None: loss_fn gets None.
            loss_fn: (output, target) -> a loss of one number, or (sum, count); either with a dict of metrics behind it,
                {name: (sum, count)}, for `step.metrics`.
            optimizer: makes one step with the gradients, added to a `.grad` that is there already; every `.grad` is
                None afterwards. An EagerUpdate updates each parameter while the backward still runs. None: the
                gradients are added to `.grad`, as backward() would.
            outputs: also return the joined outputs, detached.
            trace: also return when each action ran.
            loss_reduction: whether loss_fn is a "mean" or a "sum" over rows. None: its own `.reduction`, else "mean".
            clip_grad_norm: with an optimizer or grads="store": clip the gradients to this norm, over all parameters.
            scaler: a GradScaler: scales the loss; with an optimizer also unscales, steps and updates.
            grads: "param", or "store": the gradients stay in the returned `grads`, a GradStore.

        Raises:
            ValueError: loss_fn is neither a mean nor a sum over rows (the first steps compare, all see what it divides
                by), or arguments that exclude each other.
            RuntimeError: gradients are switched off, or nothing requires one.
        """
        stepper = optimizer if isinstance(optimizer, EagerUpdate) else type(optimizer).__name__
        options = {
            "loss_reduction": loss_reduction, "clip_grad_norm": clip_grad_norm, "grads": grads, "outputs": outputs,
            "trace": trace, "optimizer": stepper, "scaler": type(scaler).__name__,
        }  # fmt: skip
        with turn(), self._communicator("step", averages=True) as communicator:
            check_flags(outputs=outputs, trace=trace)
            check_step(optimizer, clip_grad_norm, scaler, grads)
            batch = scatter(x, self.chunks, "x", self._batch_dim)
            if optimizer is not None:
                check_holds(optimizer, list(self.named_parameters()), [*batch.tree.tensors, *parameters_of(loss_fn)])
            self._refuse_transforms(batch)
            recorder = self._recorder() if trace else None
            aim = scatter_like(target, batch, "the target")
            execution = self._execution(batch, plan_step, True, False, communicator, options, recorder, aim)
            if isinstance(optimizer, EagerUpdate):
                new_loss = partial(Loss, loss_fn, loss_reduction, batch.rows)
                value, joined, metrics = self._eager_step(optimizer, execution, new_loss, aim, outputs)
                timeline = None if recorder is None else self._timeline(recorder, communicator)
                return Step(value, None, joined, timeline, metrics)
            loss = Loss(loss_fn, loss_reduction, batch.rows)
            call = self._run_with_loss(execution, loss, aim, outputs, scaler)
            with without_autocast():
                return self._finish(call, loss, optimizer, outputs, recorder, clip_grad_norm, scaler, grads)

    def evaluate(
        self,
        x: Any,
        target: Any = None,
        *,
        loss_fn: LossFn,
        outputs: bool = True,
        trace: bool = False,
        loss_reduction: str | None = None,
    ) -> Step:
        """The loss and the outputs of one mini-batch in eval mode, without gradients; modes are restored.

        Args:
            x, target, loss_fn, outputs, trace, loss_reduction: as for `step`.
        """
        with turn(), self._communicator("evaluate") as communicator:
            check_flags(outputs=outputs, trace=trace)
            batch = scatter(x, self.chunks, "x", self._batch_dim)
            aim = scatter_like(target, batch, "the target")
            flags = [(module, module.training) for module in self.modules()]
            try:
                self.eval()
                with torch.no_grad():
                    recorder = self._recorder() if trace else None
                    options = {"loss_reduction": loss_reduction, "outputs": outputs, "trace": trace}
                    execution = self._execution(
                        batch, plan_forward, False, False, communicator, options, recorder, aim
                    )
                    loss = Loss(loss_fn, loss_reduction, batch.rows)
                    with self._run_with_loss(execution, loss, aim, outputs, None) as call:
                        value = loss.value if execution.has_last else None
                        verdict = communicator.agree(Verdict(value, None, True, False, loss.metrics))
                        joined = self._joined(call) if outputs else None
            finally:
                for module, training in flags:
                    module.training = training
            call.release()
            assert verdict.loss is not None  # the last stage's process has it
            timeline = None if recorder is None else self._timeline(recorder, communicator)
            return Step(verdict.loss, None, joined, timeline, verdict.metrics)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of all parameters down to a norm of at most `max_norm`; return the norm before.

        As torch.nn.utils.clip_grad_norm_ on the plain module's parameters. Over ranks that function would see one
        rank's; this one sees all, a tied parameter once, and is called on every rank.

        Args:
            max_norm: the largest norm.
            norm_type: which norm, such as 2.0 or float("inf").
            error_if_nonfinite: raise a RuntimeError where the norm is inf or nan.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from pipeline import Pipe
            >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 1, bias=False)), [1])
            >>> pipe(torch.tensor([[3.0, 4.0]])).sum().backward()
            >>> pipe.clip_grad_norm_(1.0)
            tensor(5.)
        """
        with turn(), self._communicator("clip_grad_norm_") as communicator:
            check_limit("max_norm", max_norm)
            check_norm_type(norm_type)
            check_flags(error_if_nonfinite=error_if_nonfinite)
            communicator.open(lambda values: {"the arguments": f"{max_norm}, {norm_type}"}, draws=False)
            return step_entry.clip_grads(
                list(self.named_parameters()), max_norm, norm_type, communicator, error_if_nonfinite
            )

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As nn.Module's; over ranks, those of this rank. A rank without any gives an empty one, for its optimizer."""
        found = list(super().parameters(recurse))
        return iter(found or ([] if self._topology is None else [self._topology.nothing]))

    @contextmanager
    def trace(self) -> Iterator[TraceRecorder]:
        """Record when each action of the calls within runs; their backward too, if it runs within.

        Over ranks all enter and leave together, and each gets the actions of all; clocks of machines may differ.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from pipeline import Pipe
            >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
            >>> with pipe.trace() as trace:
            ...     pipe(torch.ones(4, 2)).sum().backward()
            >>> " ".join(str(event.action) for event in trace.timeline.events)
            '0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1'
        """
        recorder = self._recorder()
        self._traces.append(recorder)
        try:
            yield recorder
        finally:
            self._traces.remove(recorder)
        with self._communicator("trace") as communicator:
            communicator.open(lambda values: {}, draws=False)
            recorder.join(communicator.share_events(recorder.events))

    @property
    def runtime(self) -> Runtime:
        """What analyses such as `pipeline.curvature` build on: who has what, and all that a call of their own needs."""

        def setup(batch: Batch, target: Batch, communicator: Communicator, options: Mapping[str, object]) -> Setup:
            self._refuse_transforms(batch)
            return self._setup(batch, plan_step, True, False, communicator, options, None, target, draws=False)

        return Runtime(self, self._topology, self._replicas is not None, self._stages, self._communicator, setup)

    # ------------------------------------------------------------------------------------------------ how they run

    def _finish(
        self,
        call: Call,
        loss: Loss,
        optimizer: torch.optim.Optimizer | None,
        outputs: bool,
        recorder: TraceRecorder | None,
        clip: float | None,
        scaler: torch.amp.GradScaler | None,
        grads: str,
    ) -> Step:
        """Finish a step that ran: hand over its gradients."""
        communicator = call.communicator
        with call:
            firm()
            pairs, value, hooks, metrics = step_entry.collect(call, loss)
            joined = self._joined(call) if outputs else None
            call.release()
            named = list(self.named_parameters())
            owners = [owner for owner, _ in pairs] if grads == "param" else call.batch.tree.tensors
            with step_entry.undone(owners, optimizer, scaler):
                store = step_entry.hand_over(pairs, call.batch.tree.tensors, grads, named)
                if store is not None and clip is not None:
                    self._clip_store(store, clip, communicator)
                if optimizer is not None:
                    step_entry.optimize(optimizer, scaler, named, clip, communicator)
        if optimizer is not None:
            step_entry.optimized(optimizer, scaler, named)
        if hooks or optimizer is not None or communicator.averages:
            communicator.close()
        return Step(value, store, joined, None if recorder is None else self._timeline(recorder, communicator), metrics)

    def _clip_store(self, store: GradStore, max_norm: float, communicator: Communicator) -> None:
        names = {id(param): name for name, param in self.named_parameters()}
        total = communicator.total_norm([(names.get(id(param), ""), grad) for param, grad in store.items()], 2.0)
        store.scale_(clip_factor(max_norm, total))

    def _communicator(self, entry: str, averages: bool = False) -> Communicator:
        """The communicator of a call: local, or over ranks; with replicas where gradients are averaged."""
        topology = self._topology
        tied = [] if topology is None else topology.hosting.tied(self)
        own: Communicator = LocalCommunicator() if topology is None else DistributedCommunicator(topology, tied, entry)
        if self._replicas is None or not averages:
            return own
        stages = {stage: layers for stage, layers in enumerate(self._stages()) if own.has(stage)}
        return DataParallelCommunicator(own, self._replicas, layout_of(stages, {id(copy) for copy in tied}), entry)

    def _execution(
        self,
        batch: Batch,
        planner: Planner,
        grad: bool,
        keep: bool,
        communicator: Communicator,
        options: Mapping[str, object],
        trace: TraceRecorder | None = None,
        aim: Batch | None = None,
    ) -> Execution:
        return Execution(self._setup(batch, planner, grad, keep, communicator, options, trace, aim), batch)

    def _setup(
        self,
        batch: Batch,
        planner: Planner,
        grad: bool,
        keep: bool,
        communicator: Communicator,
        options: Mapping[str, object],
        trace: TraceRecorder | None = None,
        aim: Batch | None = None,
        draws: bool = True,
    ) -> Setup:
        """The settings of a call, on which all ranks have agreed."""
        tensors = [tensor for each in (batch, aim) if each is not None for tensor in each.tree.tensors]
        seed = communicator.open(lambda values: self._words(batch, aim, grad, options, values), draws, tensors)
        if grad and not torch.is_grad_enabled():
            raise RuntimeError(
                "pipe.step needs gradients, but they are switched off (no_grad). Use pipe.evaluate(...)."
            )
        plan = self._plans.plan(batch.chunks, planner, self.chunks)
        recompute = plan.recomputed(self.checkpoint) if grad else frozenset()
        stages = self._stages()
        traces = [*self._traces, *([] if trace is None else [trace])]
        self._calls += grad
        compares = grad and validates(self._calls)
        setup = Setup(
            stages=stages, places=self._places, values=self._values, transport=self._transport, workers=self._workers,
            plan=plan, recompute=recompute, grad=grad, keep=keep, compares=compares, known=self._known,
            defer=self.deferred_batch_norm, traces=traces, communicator=communicator, seed=seed
        )
        if batch.chunks > 1:
            self._probe(setup, batch)
        communicator.prepare(lambda: self._plans.traffic(batch.chunks, planner, self.chunks))
        return setup

    def _probe(self, setup: Setup, batch: Batch) -> None:
        """Check whether this mini-batch may be cut: in validating calls, counted in each of the modes.

        A failure over ranks fails all of them, and restarts the count on all.
        """
        flags = tuple([layer.training for layer in self._modules.values() if layer is not None])
        key = (flags, setup.communicator.failures)
        number = self._probed.get(key, 0) + 1
        self._probed[key] = number
        if not validates(number):
            return
        try:
            plan, traffic = self._plans.uncut(setup.plan.schedule.placement)
            setup.communicator.prepare(lambda: traffic)
            Probe(replace(setup, plan=plan), batch, not self.mixes_rows).check()
        except BaseException:
            self._probed[key] = number - 1
            raise

    def _words(
        self, batch: Batch, aim: Batch | None, grad: bool, options: Mapping[str, object], values: bool
    ) -> dict[str, str]:
        """The descriptions on which all ranks must agree."""
        given = {"x": batch} if aim is None else {"x": batch, "the target": aim}
        shapes = [f"{name} {described(each)}" for name, each in given.items()]
        more = {"gradients": "on" if grad and torch.is_grad_enabled() else "off", **options}
        words = {
            SETTINGS: self._settings(), MODES: self._modes(),
            OPTIONS: "\n".join([f"{name}={value}" for name, value in more.items()]), MINI_BATCHES: ", ".join(shapes),
        }  # fmt: skip
        if values:
            tensors = [tensor for each in given.values() for tensor in each.tree.tensors]
            words[VALUES] = values_in_words(tensors)
        return words

    def _modes(self) -> str:
        """A description of the layers in train mode and of autocast."""
        flags = [layer.training for layer in self._modules.values() if layer is not None]
        some = f"layers {[index for index, flag in enumerate(flags) if flag]} in train mode, the others in eval mode"
        training = "train" if all(flags) else some if any(flags) else "eval"
        kinds = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        return f"{training}, autocast {kinds or 'off'}"

    def _settings(self) -> str:
        """A description of this Pipe's settings, in lines."""
        joint = self._topology or self._replicas
        assert joint is not None  # only called over ranks
        key = (self.chunks, self.checkpoint, self._plans)
        if self._told is not None and self._told[0] == key:
            return self._told[1]
        checkpoint = self.checkpoint if isinstance(self.checkpoint, str) else "a function of (stage, chunk)"
        text = (
            f"balance {self.balance}\nchunks {self.chunks}\nbatch_dim {self.batch_dim}\nmixes_rows {self.mixes_rows}\n"
            f"schedule {self.schedule}\ncheckpoint {checkpoint}\n"
            f"deferred_batch_norm {self.deferred_batch_norm}\n{joint.parameters}"
        )
        self._told = (key, text)
        return text

    def _recorder(self) -> TraceRecorder:
        schedule = self._plans.resolved(self.chunks)
        lane_of = schedule.placement.lane_of
        alone = self._ranks is None  # a rank has one lane
        return TraceRecorder(schedule.lanes, in_turns(self._workers, self._places, lane_of) if alone else ())

    def _timeline(self, recorder: TraceRecorder, communicator: Communicator) -> Timeline:
        recorder.join(communicator.share_events(recorder.events))
        return recorder.timeline

    def _stages(self) -> list[list[nn.Module]]:
        layers: list[Any] = list(self._modules.values())
        if len(layers) != sum(self.balance):
            raise ValueError(
                f"the Pipe has {len(layers)} layers but its balance is {self.balance}: one was added or removed "
                "since. Change the nn.Sequential first and wrap it anew: Pipe(module, balance, chunks)."
            )
        ends = [sum(self.balance[: stage + 1]) for stage in range(len(self.balance))]
        return [layers[end - size : end] for size, end in zip(self.balance, ends, strict=True)]

    def _eager_step(
        self, update: EagerUpdate, execution: Execution, new_loss: Callable[[], Loss], aim: Batch, outputs: bool
    ) -> tuple[torch.Tensor, Any, Mapping[str, torch.Tensor]]:
        """The loss, the joined outputs if they are wanted, and metrics; the parameters are updated."""

        def play(execution: Execution, loss: Loss, listens: Listens | None) -> Call:
            return self._run_with_loss(execution, loss, aim, outputs, None, listens)

        named = dict(self.named_parameters())
        call, value, _, metrics = eager_entry.run(update, execution, new_loss, play, named)
        with call:
            joined = self._joined(call) if outputs else None
        call.release()
        call.communicator.close()
        return value, joined, metrics

    def _run_with_loss(
        self,
        execution: Execution,
        loss: Loss,
        aim: Batch,
        outputs: bool,
        scaler: torch.amp.GradScaler | None,
        listens: Listens | None = None,
    ) -> Call:
        """Run a call with the loss behind the last stage. Validating calls compare it with the un-pipelined one."""
        several = execution.batch.chunks > 1
        number = self._losses.get(loss.loss_fn) + several
        compare = several and validates(number)
        keeps_outputs = outputs or compare
        end = LossEnd(execution, loss, aim, scaler, compare, keeps_outputs)
        if scaler is not None and not execution.has_last:
            scaler.scale(torch.zeros((), device=self.devices[0]))  # its scale exists from its first use on
        try:
            with Call(execution, end, keeps_outputs) as call:
                call.run_forward(None if listens is None else listens(call, end))
                end.check(call.outputs)
        except BaseException:  # the next call validates
            self._losses.set(loss.loss_fn, 0)
            raise
        # Under its key after the call: a loss that counts its calls must not look new in each.
        self._losses.set(loss.loss_fn, number if loss.is_proven else 0)
        return call

    def _joined(self, call: Call) -> Any:
        output = None
        if call.execution.has_last:
            trees = [message.tree for message in call.outputs]
            output = Output(gather(trees, call.batch.rows, call.batch.batch_dim)[0], ())
        tree, _ = call.communicator.share_output(output)
        return tree.build(tree.tensors)

    def _refuse_transforms(self, batch: Batch) -> None:
        forward_entry.refuse_transforms(lambda: [*batch.tree.tensors, *self.parameters(), *self.buffers()])
