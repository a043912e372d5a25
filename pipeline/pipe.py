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
from typing import Any

import torch
from torch import nn

from partition import Plan, split
from partition.generators import same_state
from partition.hardware.sampling import DeviceSampling
from partition.models.sequential import to_sequential
from partition.names import sequential
from partition.rows import bare
from partition.splitting import check_module, runs_in_order
from pipeline.common.arguments import check_count, check_flags, shown
from pipeline.common.places import Place, places_for
from pipeline.common.torch_modes import eagerly
from pipeline.data.loss import LossFn
from pipeline.data.values import chain
from pipeline.distributed.agreement import shapes_in_words
from pipeline.distributed.data_parallel.replicas import Replicas, check_where, find_replicas
from pipeline.distributed.topology import PipeTopology
from pipeline.distributed.wrapped import check_over_ranks, check_wrapped
from pipeline.entry import data_set, entry_points, inner_product
from pipeline.entry.inputs import input_of, takes_arguments
from pipeline.entry.joining import join_ranks
from pipeline.entry.minibatches import is_loader
from pipeline.entry.origin import Origin
from pipeline.entry.reporting import reported
from pipeline.entry.runtime import History, Runtime
from pipeline.entry.settings import Processes, Settings, check_deferred, plans_of
from pipeline.entry.settled import FixedModule, refuse_recorders
from pipeline.entry.state.meta_init import ValueSource
from pipeline.entry.state.meta_tensors import emptied_again
from pipeline.entry.state.state_dict import StateDictMixin
from pipeline.entry.step import Step
from pipeline.entry.step_arguments import StepArguments
from pipeline.entry.validation import (
    StageView,
    check_plain,
    check_shared_buffers,
    choose_balance,
    choose_places,
    find_ranks,
    settle_stages,
)
from pipeline.execution.drivers import check_workers
from pipeline.execution.setup import Layout
from pipeline.execution.trace import TraceRecorder
from pipeline.gradients.eager import EagerUpdate
from pipeline.gradients.partial import is_part
from pipeline.recompute.policy import Policy, check_policy
from pipeline.recompute.randomness import default_generators, draw_seed
from pipeline.skip import routes, verify_skippables
from pipeline.transports.local import Local
from scheduler import Costs, Report, Schedule, Timeline
from scheduler.reporting import HasCosts


class Pipe(FixedModule, StateDictMixin):
    """An `nn.Sequential` cut into stages, each on its device, that computes a mini-batch in chunks.

    Outputs, losses, gradients to any order and buffers are the plain module's; what layers compute of all rows that
    they get, as BatchNorm does in train mode, and buffers that each forward updates, are those of a loop over the
    chunks. Parameters, buffers and state_dict keep its names. The layers are the module's own, not copies.

    Args:
        module: the model, an nn.Sequential; or, with `sample`, any that `partition.to_sequential` can cut.
        balance: layers per stage. None: cut so that parameter bytes are even over the devices or ranks.
        chunks: the largest number of micro-batches that a mini-batch is cut into; min(chunks, rows) run.
        sample: what a module that is no nn.Sequential, or one with a forward of its own, is called with, as the Pipe
            will be (with `NoChunk(...)`, too): the model is `to_sequential(module, sample)`.
            One on the meta device is built under `pipeline.meta_parameters()`, and gets its values by `materialize`.
        batch_dim: the dim that counts the rows of the mini-batch, of inputs, targets and outputs alike: 0, or 1 for
            time-first data [time, rows, ...]. Tensors with fewer dims (lengths, class labels) are cut along dim 0.
        mixes_rows: layers may look at all rows of a chunk (a mixture of experts with a capacity, say), as BatchNorm
            does in train mode: numbers are then those of a loop over the chunks. False: such a layer is an error.
        devices: the device of each stage, repeats allowed: all stages in this process. None: over the ranks of
            torch.distributed where there are several (under torchrun); else all accelerators, or the CPU.
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
            state_dict, the path of a torch.distributed.checkpoint directory or of a folder of safetensors files, of
            which each rank reads its own entries, or (callable, state).

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

    accepts_loss_kwargs = False  # for transformers' Trainer: forward takes no num_items_in_batch

    def __init__(
        self,
        module: nn.Module,
        balance: Iterable[int] | None = None,
        chunks: int = 1,
        *,
        sample: Any = None,
        devices: Iterable[Place | torch.device | str | int] | None = None,
        schedule: str | Schedule = "1f1b",
        checkpoint: Policy = "except_last",
        deferred_batch_norm: bool = False,
        workers: str | None = None,
        group: Any = None,
        replicas: Any = None,
        timeout: float = 300.0,
        heartbeat: float = 10.0,
        materialize: ValueSource = None,
        batch_dim: int = 0,
        mixes_rows: bool = False,
    ) -> None:
        super().__init__()
        check_flags(mixes_rows=mixes_rows)
        if sample is not None and isinstance(module, nn.Module) and not runs_in_order(module):
            module = to_sequential(module, bare(sample))
        module = check_module(module)
        check_wrapped(module)
        check_plain(module)
        check_workers(workers)
        given_places = places_for(devices)
        check_where(replicas, group, given_places)
        ranks = find_ranks(group, given_places, workers, heartbeat, timeout)
        replica_ranks = find_replicas(replicas, ranks, heartbeat, timeout)
        parameters = ""
        if ranks is not None or replica_ranks is not None:
            check_over_ranks(module)
            parameters = shapes_in_words(module.named_parameters())
        layers_per_stage = tuple(choose_balance(module, balance, given_places, ranks))
        places = choose_places(given_places, len(layers_per_stage), ranks)
        verify_skippables(module)
        stages = split(module, layers_per_stage)
        check_shared_buffers(stages, [place.device for place in places])
        layout = Layout(places, chain(len(stages), routes(stages)), Local(), workers)
        processes = Processes(ranks, parameters)
        count = check_count("chunks", chunks)
        plans = plans_of(schedule, layers_per_stage, count, layout, processes)
        if ranks is not None:
            topology = PipeTopology(stages, plans.resolved(count).placement.lane_of, ranks)
            processes = replace(processes, topology=topology)
        self._settings = Settings(
            layout, processes, layers_per_stage, count, plans, check_policy(checkpoint),
            check_count("batch_dim", batch_dim, least=0), mixes_rows, check_deferred(deferred_batch_norm, module),
            takes_arguments(list(module)), Origin(module),
        )
        self._history = History()
        self.training = module.training
        layers: Mapping[str, Any] = module._modules
        self._modules.update(layers)
        with emptied_again(module):
            if ranks is None:
                settle_stages(stages, range(len(stages)), self.devices, materialize, draw_seed)
            else:
                processes = replace(processes, copies=join_ranks(self.runtime, stages, materialize))
                self._settings = replace(self._settings, processes=processes)
                is_part(self, self.runtime.world_ranks)
            if replica_ranks is not None:
                pipe_replicas = Replicas(replica_ranks, ranks)
                self._settings = replace(self._settings, processes=replace(processes, replicas=pipe_replicas))
                pipe_replicas.join(self, self._settings.words)

    @classmethod
    def from_plan(cls, module: nn.Module, plan: Plan, **settings: Any) -> Pipe:
        """The Pipe that `partition.plan(module, ...)` has planned.

        Args:
            module: the model that was planned for.
            plan: its balance, chunks, schedule, batch_dim, checkpoint, and devices where it names them; without names
                the stages go to the ranks, under torchrun, or to all accelerators.
            settings: other arguments of `Pipe`, or in the place of the plan's. `devices` are those of the plan, by
                their numbers there.

        Raises:
            TypeError: `plan` is none.
            ValueError: `devices` are not as many as the plan's.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from partition import plan
            >>> from pipeline import Pipe
            >>> model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), torch.rand(32, 64)
            >>> planned = plan(model, x, devices=["cpu", "cpu"], device="meta", schedules=["1f1b"], chunks=[4])
            >>> Pipe.from_plan(model, planned).balance
            [3, 3]
        """
        if not isinstance(plan, Plan):
            raise TypeError(f"plan is {shown(plan)}. Give what partition.plan(model, x, ...) returned.")
        return cls(module, **plan.settings_with(settings))

    def __init_subclass__(cls) -> None:
        if cls.forward is not Pipe.forward or cls.__call__ is not Pipe.__call__:
            raise TypeError(
                f"{cls.__name__} has a forward of its own, which step, evaluate and operators of curvature would not "
                "run: they run the layers. Make what it does a layer, or a module around the Pipe that calls pipe(x)."
            )

    def train(self, mode: bool = True) -> Pipe:
        """As nn.Module's, and as that of the model which the layers are parts of; this is told, too."""
        modes = self._settings.origin.modes
        modes.tell(self.children(), mode)
        self.training = mode
        modes.lead(mode)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A copy, whose layers are of no model, begins as the model is now."""
        self.runtime.follow_model()
        return vars(self)

    def apply(self, fn: Callable[[nn.Module], None]) -> Pipe:
        """As nn.Module's; over ranks to this rank's modules, by a function that draws no random numbers.

        Raises:
            RuntimeError: over ranks it drew some.
        """
        if self.runtime.topology is None:
            return super().apply(fn)
        generators = default_generators(self.devices)
        states = [generator.get_state() for generator in generators]
        super().apply(fn)
        if not all(
            same_state(state, generator.get_state()) for generator, state in zip(generators, states, strict=True)
        ):
            raise RuntimeError(
                "the function given to pipe.apply drew random numbers. Over ranks each has its own layers, and the "
                "ranks' generators are alike, so layers of different ranks got the same numbers, and not those of one "
                "process. Initialise the model before Pipe(...): model.apply(fn). Or build it on the meta device, with "
                "Pipe(..., materialize=...)."
            )
        return self

    def __setstate__(self, state: Any) -> None:
        """Restore a copy, which has parameters of its own."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.runtime.topology is not None:
            is_part(self, self.runtime.world_ranks)

    # ---------------------------------------------------------------------------------------------------- settings

    @property
    def balance(self) -> list[int]:
        """The number of layers of each stage."""
        return list(self._settings.balance)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage."""
        return self._settings.layout.devices

    @property
    def hf_device_map(self) -> dict[str, torch.device]:
        """The device of each layer, by its name: accelerate and transformers do not move what has such a map.

        Empty over ranks, where each has one device.
        """
        if self.runtime.topology is not None:
            return {}
        devices = [device for device, size in zip(self.devices, self.balance, strict=True) for _ in range(size)]
        return dict(zip(self._modules, devices, strict=True))

    @property
    def batch_dim(self) -> int:
        """The dim that counts the rows of a mini-batch."""
        return self._settings.batch_dim

    @property
    def chunks(self) -> int:
        """The largest number of chunks that a mini-batch is cut into."""
        return self._settings.chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._settings = replace(self._settings, chunks=check_count("chunks", chunks))

    @property
    def schedule(self) -> str | Schedule:
        """The order that `step` runs."""
        return self._settings.plans.given

    @schedule.setter
    def schedule(self, schedule: str | Schedule) -> None:
        old = self._settings
        self._settings = replace(old, plans=plans_of(schedule, old.balance, old.chunks, old.layout, old.processes))

    @property
    def checkpoint(self) -> Policy:
        """The policy that says which activations are computed again in the backward."""
        return self._settings.checkpoint

    @checkpoint.setter
    def checkpoint(self, policy: Policy) -> None:
        self._settings = replace(self._settings, checkpoint=check_policy(policy))

    @property
    def mixes_rows(self) -> bool:
        """Whether layers may look at all rows of a chunk."""
        return self._settings.mixes_rows

    @mixes_rows.setter
    def mixes_rows(self, mixes_rows: bool) -> None:
        check_flags(mixes_rows=mixes_rows)
        self._settings = replace(self._settings, mixes_rows=mixes_rows)

    @property
    def deferred_batch_norm(self) -> bool:
        """Whether running statistics of BatchNorm layers are updated once for each mini-batch."""
        return self._settings.deferred_batch_norm

    @deferred_batch_norm.setter
    def deferred_batch_norm(self, deferred: bool) -> None:
        deferred = check_deferred(deferred, self.to_sequential())
        self._settings = replace(self._settings, deferred_batch_norm=deferred)

    # -------------------------------------------------------------------------------------------- like a Sequential

    @property
    def partitions(self) -> list[nn.Sequential]:
        """The stages, as Sequentials of the same layers. For inspection: the Pipe runs the layers, not these."""
        return [StageView(stage) for stage in split(self.to_sequential(), self.balance)]

    def to_sequential(self) -> nn.Sequential:
        """The plain module back: the same layers under the same names."""
        plain = sequential(self._modules, self._settings.origin.modes)
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

    def forward(self, *input: Any, output: str = "all", **named: Any) -> Any:
        """Compute `module(input)`.

        Args:
            input: any pytree of tensors and plain values; tensors are cut along `batch_dim`, `NoChunk(value)` and
                plain values go to every chunk. Over ranks, the same on every rank. A model that `to_sequential` has
                cut takes its own arguments, as its sample had them: `pipe(ids, mask)`, `pipe(**batch)`, or a mapping.
            named: such arguments by name.
            output: over ranks, the ranks that get the output: "all" ranks, so that each computes the same loss and
                calls its backward; or the "last", which has the last stage, while the others get a number in its place,
                whose backward they call.

        Returns:
            What the plain module returns, on the last device. In one process differentiable to any order; over ranks
            to the second, where each rank differentiates a number of its own (docs/ranks.md, Second derivatives).

        Raises:
            MismatchError: over ranks, which do not make the same call.
            TypeError: no input, or several where the first layer takes one.
        """
        return eagerly(Pipe._forward, self, input, named, output)

    def _forward(self, positional: tuple[Any, ...], named: dict[str, Any], output: str) -> Any:
        refuse_recorders()
        return entry_points.forward(self.runtime, input_of(positional, named, self._settings.takes_arguments), output)

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

        The loss and the gradients are the un-pipelined ones. A failure leaves parameters, buffers and `.grad` as they
        were; but not the parameters that an EagerUpdate has updated by then: it says so, and refuses further steps.

        Of a loader in the place of x: of all its mini-batches, as of one, with one optimizer step. Each is cut into
        chunks, and all chunks run in one order: activations are held as for one mini-batch, and idle time is paid once.
        Losses are weighted by rows, or by what loss_fn counts. The mini-batches are read before the first one runs;
        they may differ in rows and in the lengths of sequences.

        Args:
            x: the input, as for `forward`; or an iterable that is no container, of pairs (x, target), such as
                `itertools.islice(batches, 4)`. Over ranks it is the same on every rank.
            target: any pytree with one row for each row of x; each chunk's rows go to loss_fn. None: loss_fn gets None.
            loss_fn: (output, target) -> a loss of one number, or (sum, count); either with a dict of metrics behind it,
                {name: (sum, count)}, for `step.metrics`.
            optimizer: makes one step with the gradients, added to a `.grad` that is there already; every `.grad` is
                None afterwards. An EagerUpdate updates each parameter while the backward still runs. None: the
                gradients are added to `.grad`, as backward() would.
            outputs: also return the joined outputs, detached.
            trace: also return when each action ran.
            loss_reduction: whether loss_fn is a "mean" or a "sum" over rows. None: its own `.reduction`, else "mean".
            clip_grad_norm: with an optimizer or grads="store": clip the gradients to this norm, over all parameters;
                `step.grad_norm` is the one before. inf measures, and clips nothing.
            scaler: a GradScaler: scales the loss; with an optimizer also unscales, steps and updates.
            grads: "param", or "store": the gradients stay in the returned `grads`, a GradStore.

        Raises:
            ValueError: loss_fn is neither a mean nor a sum over rows (the first steps compare, all see what it divides
                by), or arguments that exclude each other.
            RuntimeError: gradients are switched off, or nothing requires one.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from pipeline import Pipe
            >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 1, bias=False), nn.Identity()), [1, 1], chunks=2)
            >>> pairs = [(torch.ones(4, 2), torch.zeros(4, 1)), (torch.zeros(1, 2), torch.ones(1, 1))]
            >>> step = pipe.step(iter(pairs), loss_fn=nn.MSELoss())  # one mean over five rows
            >>> bool(step.loss.isclose((4 * pipe[0].weight.sum() ** 2 + 1) / 5))
            True
        """
        arguments = StepArguments(
            x, target, loss_fn, loss_reduction, outputs, trace, optimizer, clip_grad_norm, scaler, grads
        )
        return eagerly(entry_points.step, self.runtime, arguments)

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

        Of a loader in the place of x: the loss and the metrics of all its mini-batches, as of one. Means are weighted
        by rows, or by what loss_fn counts; the last mini-batch may be smaller. (With chunks=1, or mini-batches of one
        row, nothing is compared: of a loss that is no mean over rows, such as a norm, it may be the mean by rows.)

        Args:
            x: as for `step`; or a DataLoader, or another iterable that is no container, of pairs (x, target). It
                is the same on every rank.
            target, loss_fn, outputs, trace, loss_reduction: as for `step`. Of a loader outputs are not kept, and trace
                is refused.

        Raises:
            ValueError: a loader gives no mini-batch, or no pairs; others see `step`.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from torch.utils.data import DataLoader, TensorDataset
            >>> from pipeline import Pipe
            >>> pipe = Pipe(nn.Sequential(nn.Identity()), [1])
            >>> loader = DataLoader(TensorDataset(torch.arange(5.0), torch.zeros(5)), batch_size=2)
            >>> pipe.evaluate(loader, loss_fn=nn.functional.l1_loss).loss
            tensor(2.)
        """
        arguments = StepArguments(x, target, loss_fn, loss_reduction, outputs, trace)
        if is_loader(x):
            return eagerly(data_set.evaluate_loader, self.runtime, x, arguments)
        return eagerly(entry_points.evaluate, self.runtime, arguments)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of all parameters down to a norm of at most `max_norm`; return the norm before.

        As `torch.nn.utils.clip_grad_norm_` on the plain module's parameters. Over ranks that function would see one
        rank's; this one sees all, a tied parameter once, and is called on every rank.

        Args:
            max_norm: the largest norm.
            norm_type: which norm, above 0, such as 2.0 or float("inf").
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
        return entry_points.clip_grad_norm_(self.runtime, max_norm, norm_type, error_if_nonfinite)

    def dot(self, one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The inner product of two sequences of tensors, one for each parameter; over ranks, of all parameters.

        It is differentiable, to any order, and the same number on every rank; all ranks call it. A tied parameter
        counts once. So does the number itself, which all ranks differentiate (docs/ranks.md, Second derivatives).

        Args:
            one, other: a tensor for each of `list(pipe.parameters())`, of its shape, or for each that requires a
                gradient, in this order: gradients, directions. None stands for zeros.

        Returns:
            A number, float64 if a tensor is, else float32; of complex tensors the real part of conj(one) other.

        Raises:
            ValueError: there are more or fewer tensors, or one has another shape.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from pipeline import Pipe
            >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 1, bias=False)), [1])
            >>> pipe.dot([torch.tensor([[3.0, 4.0]])], [torch.tensor([[1.0, 2.0]])])
            tensor(11.)
        """
        return inner_product.dot(self.runtime, one, other)

    def grad_norm(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The norm of all gradients as one vector: the root of `pipe.dot(grads, grads)`, differentiable as that is.

        Args:
            grads: a gradient for each of `list(pipe.parameters())`, or for each that requires one. None: zeros.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from pipeline import Pipe
            >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 1, bias=False)), [1])
            >>> loss = pipe(torch.tensor([[3.0, 4.0]])).sum()
            >>> grads = torch.autograd.grad(loss, pipe.parameters(), create_graph=True)
            >>> pipe.grad_norm(grads).item()
            5.0
        """
        return inner_product.grad_norm(self.runtime, grads)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As nn.Module's; over ranks, those of this rank.

        A rank without any, or with none that is trained, has an empty one besides: its optimizer wants one.
        """
        return iter([*super().parameters(recurse), *self._for_its_optimizer()])

    @contextmanager
    def trace(self) -> Iterator[TraceRecorder]:
        """Record when each action of the calls within runs; their backward too, if it runs within.

        Over ranks all enter and leave together, and each gets the actions of all, on one clock (scheduler/clocks.py).

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from pipeline import Pipe
            >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
            >>> with pipe.trace() as trace:
            ...     pipe(torch.ones(4, 2)).sum().backward()
            >>> " ".join(str(event.action) for event in trace.timeline.events)
            '0F0 1F0 0F1 1F1 1B0 0R0 0B0 1R1 1B1 0R1 0B1'
        """
        recorder = self.runtime.recorder()
        self._history.traces.append(recorder)
        try:
            yield recorder
        finally:
            self._history.traces.remove(recorder)
        with self.runtime.communicator("trace") as communicator:
            communicator.open(lambda values: {}, draws=False)
            recorder.events, recorder.steps = communicator.exchange.share_events(recorder.events, recorder.steps)

    def report(
        self, steps: Step | Timeline | Iterable[Step | Timeline], planned: Costs | HasCosts | None = None,
        sampling: DeviceSampling | None = None,
    ) -> Report:  # fmt: skip
        """Report on traced steps: measured beside planned for each stage, the bottleneck, and what to change.

        Over ranks all call it.

        Args:
            steps: what `step(..., trace=True)` returned, or timelines of whole steps. Of several, medians are taken;
                calls 1, 2, 4, 8, ... compare, so they take longer.
            planned: what the actions of each stage were to cost: Costs, or something with `.costs`. None: as measured.
            sampling: `partition.devices().sampling(pipe.devices)` that was on while such steps ran: adds the joules of
                a step and the utilisation of each lane's device. Over ranks each gives its own, or None.

        Returns:
            A Report, see `scheduler.report`. It prints as a table.

        Raises:
            TypeError: `steps` or `sampling` is none.
            ValueError: a step has no timeline.
            ScheduleError: the timelines are not of whole steps of one order.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from pipeline import Pipe
            >>> pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), [1, 1], chunks=2)
            >>> step = pipe.step(torch.ones(4, 4), loss_fn=lambda out, _: out.mean(), trace=True)
            >>> report = pipe.report(step)
            >>> report.schedule, report.chunks, [stage.stage for stage in report.stages]
            ('1f1b', 2, [0, 1])
        """
        return reported(self.runtime, [steps] if isinstance(steps, (Step, Timeline)) else steps, planned, sampling)

    @property
    def runtime(self) -> Runtime:
        """The interface for analyses such as `pipeline.curvature`: who has what, and what a call of their own needs."""
        return Runtime(self, self._settings, self._history)
