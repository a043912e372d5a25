"""The public class: a module like the plain one, cut into stages and fed in chunks.

    Pipe(module, balance, chunks)            stages on devices, layers under the plain module's names
    pipe(x)                                  the forward door: autograd does the rest      forward_door.py
    pipe.step(x, y, loss_fn=f)               the schedule's order, F and B interleaved     step_door.py
    pipe.evaluate(x, y, loss_fn=f)           eval mode, no gradients

Everything about one call lives in a `Call` and goes with it; a Pipe holds settings and the plain module's layers.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from partition import split
from partition.contiguous import whole
from partition.splitting import check_module
from pipeline import forward_door, step_door
from pipeline.ambient import eagerly
from pipeline.batchnorm import batch_norms, check_deferrable
from pipeline.call import Call, Setup
from pipeline.checkpoint import Policy, check_policy
from pipeline.driver import check_workers
from pipeline.edge import (
    StageView,
    cannot_move,
    check_plain,
    check_schedule,
    check_shared,
    check_step,
    choose_balance,
    choose_places,
    schedule_named,
)
from pipeline.loss import Loss, LossFn
from pipeline.microbatch import Batch, gather, scatter, scatter_like
from pipeline.places import Place, place_of
from pipeline.plan import Plan, plan_forward, plan_step
from pipeline.randomness import generators_kept
from pipeline.recall import Known
from pipeline.skip import Enclosed, routes, verify_skippables
from pipeline.step_door import LossEnd, Step
from pipeline.trace import Trace
from pipeline.transports.local import Local
from pipeline.turns import turn
from pipeline.values import chain
from scheduler import Schedule, ScheduleError, verify


class Pipe(Enclosed):
    """An `nn.Sequential` cut into stages, each on its device, that computes a mini-batch in chunks.

    Outputs, losses, gradients to any order and buffers are the plain module's. Parameters, buffers and state_dict keep
    its names. The layers are the module's own, not copies.

    Args:
        module: the model.
        balance: layers per stage. None: cut so that parameter bytes are even over the devices.
        chunks: how many micro-batches a mini-batch is cut into, at most; min(chunks, rows) run.
        devices: the device of each stage, repeats allowed. None: all CUDA devices, or the CPU for every stage.
        schedule: a name of `scheduler.names()`, or a Schedule; what `step` runs. By name there are as many lanes as
            `balance` has stages, or half as many where a lane has two (interleaved, the V schedules).
        checkpoint: "always", "except_last", "never", or a callable (stage, chunk) -> bool: which activations are
            computed again in the backward instead of kept. On iff gradients are, in train and eval mode.
        deferred_batch_norm: update the running statistics of BatchNorm layers once for each mini-batch, with those of
            the whole mini-batch, as the plain module does; not once for each chunk.
        workers: "inline": one thread drives all stages; "threads": one for each. None: threads where stages are on
            several accelerators.

    Raises:
        TypeError: not an nn.Sequential, or one with a forward of its own; skips that do not match.
        ValueError: the balance, devices, chunks, schedule or checkpoint cannot be; the message says why and what can.

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
    ) -> None:
        super().__init__()
        check_module(module)
        check_plain(module)
        check_workers(workers)
        places = None if devices is None else [place_of(device) for device in devices]
        self.balance = choose_balance(module, balance, places)
        self._places = choose_places(places, len(self.balance))
        self.devices = [place.device for place in self._places]
        self._workers = workers
        self._transport = Local()
        verify_skippables(module)
        if deferred_batch_norm:
            check_deferrable(module)
        self.deferred_batch_norm = deferred_batch_norm
        self._values = chain(len(self.balance), routes(split(module, self.balance)))
        self._plans: dict[tuple[int, Any], Plan] = {}  # by chunks and door
        self._traces: list[Trace] = []
        self._calls = 0  # how many calls had gradients: recomputations of the first, second, fourth, ... are compared
        self._known = Known()
        self._losses: dict[str, int] = {}  # how many of a loss_fn were cut: number 1, 2, 4, ... is compared
        self.checkpoint = checkpoint
        self.chunks = chunks
        self.schedule = schedule
        self.training = module.training
        layers: Mapping[str, Any] = module._modules
        self._modules.update(layers)
        check_shared(self.partitions)
        for stage, device in zip(reversed(self.partitions), reversed(self.devices), strict=True):
            stage.to(device)  # what several stages share ends up with the first

    # ---------------------------------------------------------------------------------------------------- settings

    @property
    def chunks(self) -> int:
        """How many chunks a mini-batch is cut into, at most."""
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
    def checkpoint(self) -> Policy:
        """Which activations are computed again in the backward."""
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, policy: Policy) -> None:
        check_policy(policy)
        self._checkpoint = policy

    @property
    def schedule(self) -> str | Schedule:
        """The order that `step` runs."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: str | Schedule) -> None:
        if isinstance(schedule, Schedule):
            verify(schedule)
            check_schedule(schedule, len(self.balance))
        else:
            check_schedule(schedule_named(schedule, len(self.balance), self.chunks), len(self.balance))
        self._schedule = schedule
        self._plans.clear()

    # -------------------------------------------------------------------------------------------- like a Sequential

    @property
    def partitions(self) -> list[nn.Sequential]:
        """The stages, as Sequentials of the same layers. To look at: the Pipe runs the layers, not these."""
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

    # ------------------------------------------------------------------------------------------------------- doors

    def forward(self, input: Any) -> Any:
        """Compute `module(input)`.

        Args:
            input: any pytree of tensors and plain values; tensors are cut along dim 0, `NoChunk(value)` and plain
                values go to every chunk.

        Returns:
            What the plain module returns, on the last device. Differentiable to any order.
        """
        return eagerly(Pipe._forward, self, input)

    def _forward(self, input: Any) -> Any:
        batch = scatter(input, self.chunks)
        grad = torch.is_grad_enabled()
        self._refuse_transforms(batch)
        with turn() as now:
            return forward_door.run(self._call(batch, plan_forward, grad, keep=True), now)

    def step(
        self,
        x: Any,
        target: Any = None,
        *,
        loss_fn: LossFn,
        optimizer: torch.optim.Optimizer | None = None,
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
            loss_fn: (output, target) -> a loss of one number, or (sum, count).
            optimizer: makes one step with the gradients; every `.grad` is None afterwards. None: the gradients are
                added to `.grad`, as backward() would.
            outputs: also return the joined outputs, detached.
            trace: also return when each action ran.
            loss_reduction: whether loss_fn is a "mean" or a "sum" over rows. None: its own `.reduction`, else "mean".
            clip_grad_norm: with an optimizer or grads="store": clip the gradients to this norm, over all parameters.
            scaler: a GradScaler: scales the loss; with an optimizer also unscales, steps and updates.
            grads: "param", or "store": the gradients stay in the returned `grads`, a GradStore.

        Raises:
            ValueError: loss_fn is neither a mean nor a sum over rows (the first steps compare), or arguments that
                exclude each other.
            RuntimeError: gradients are switched off, or nothing requires one.
        """
        check_step(optimizer, clip_grad_norm, scaler, grads)
        batch = scatter(x, self.chunks, "x")
        self._refuse_transforms(batch)
        recorder = Trace(self._schedule_for(self.chunks).lanes) if trace else None
        with turn():
            call = self._call(batch, plan_step, grad=True, keep=False, trace=recorder)
            loss = Loss(loss_fn, loss_reduction, batch.rows)
            self._run_with_loss(call, loss, target, outputs, scaler)
            try:
                pairs, inputs = step_door.collect(call, loss)
                joined = self._joined(call) if outputs else None
                call.release()
                store = step_door.hand_over(pairs, inputs, grads, self.named_parameters())
            except BaseException:
                call.abandon()
                raise
            if store is not None and clip_grad_norm is not None:
                store.clip_(clip_grad_norm)
            if optimizer is not None:
                step_door.optimize(optimizer, scaler, list(self.parameters()), clip_grad_norm)
        return Step(loss.value, store, joined, None if recorder is None else recorder.timeline)

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
        batch = scatter(x, self.chunks, "x")
        with turn():
            flags = [(module, module.training) for module in self.modules()]
            self.eval()
            try:
                with torch.no_grad():
                    recorder = Trace(self._schedule_for(self.chunks).lanes) if trace else None
                    call = self._call(batch, plan_forward, grad=False, keep=False, trace=recorder)
                    loss = Loss(loss_fn, loss_reduction, batch.rows)
                    self._run_with_loss(call, loss, target, outputs, None)
                    try:
                        joined = self._joined(call) if outputs else None
                    except BaseException:
                        call.abandon()
                        raise
            finally:
                for module, training in flags:
                    module.training = training
        call.release()
        return Step(loss.value, None, joined, None if recorder is None else recorder.timeline)

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record when each action of the calls within runs; their backward too, if it runs within.

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
        recorder = Trace(self._schedule_for(self.chunks).lanes)
        self._traces.append(recorder)
        try:
            yield recorder
        finally:
            self._traces.remove(recorder)

    # ------------------------------------------------------------------------------------------------ how they run

    def _call(self, batch: Batch, planner: Any, grad: bool, keep: bool, trace: Trace | None = None) -> Call:
        if grad and not torch.is_grad_enabled():
            raise RuntimeError(
                "pipe.step needs gradients, but they are switched off (no_grad). Use pipe.evaluate(...)."
            )
        plan = self._plan(batch.chunks, planner)
        recompute = plan.recomputed(self.checkpoint) if grad else frozenset()
        stages = self._stages()
        traces = [*self._traces, *([] if trace is None else [trace])]
        self._calls += grad
        compares = grad and self._calls & (self._calls - 1) == 0
        setup = Setup(
            stages, self._places, self._values, self._transport, self._workers, plan, recompute, grad, keep, compares,
            self._known, self.deferred_batch_norm, traces
        )
        return Call(setup, batch)

    def _stages(self) -> list[list[nn.Module]]:
        layers: list[Any] = list(self._modules.values())
        if len(layers) != sum(self.balance):
            raise ValueError(
                f"the Pipe has {len(layers)} layers but its balance is {self.balance}: one was added or removed "
                "since. Change the nn.Sequential first and wrap it anew: Pipe(module, balance, chunks)."
            )
        ends = [sum(self.balance[: stage + 1]) for stage in range(len(self.balance))]
        return [layers[end - size : end] for size, end in zip(self.balance, ends, strict=True)]

    def _plan(self, chunks: int, planner: Any) -> Plan:
        key = (chunks, planner)
        if key not in self._plans:
            self._plans[key] = planner(self._schedule_for(chunks), self._places)
        return self._plans[key]

    def _schedule_for(self, chunks: int) -> Schedule:
        if isinstance(self._schedule, str):
            return schedule_named(self._schedule, len(self.balance), chunks)
        if self._schedule.chunks != chunks:
            raise ScheduleError(
                f"the schedule is made for {self._schedule.chunks} chunks but this mini-batch gives {chunks} "
                f"(chunks={self.chunks}; fewer rows than chunks give fewer chunks). Give a schedule by name, which "
                "fits any number."
            )
        return self._schedule

    def _run_with_loss(
        self, call: Call, loss: Loss, target: Any, outputs: bool, scaler: torch.amp.GradScaler | None
    ) -> None:
        """Run the call with the loss behind the last stage; now and then compare it with the un-pipelined one."""
        number = self._losses.get(loss.key, 0) + (call.batch.chunks > 1)
        compare = call.batch.chunks > 1 and number & (number - 1) == 0
        end = LossEnd(call, loss, scatter_like(target, call.batch, "the target"), len(self), scaler, compare)
        call.end_in(end)
        call.keep_outputs = outputs or compare
        try:
            call.run_forward()
            if compare:
                with generators_kept(self.devices):
                    end.check()
        except BaseException:  # not counted: the next call compares in its place
            call.abandon()
            raise
        self._losses[loss.key] = number

    def _joined(self, call: Call) -> Any:
        tree, _ = gather([message.tree for message in call.outputs], call.batch.rows)
        return tree.build(tree.tensors)

    def _refuse_transforms(self, batch: Batch) -> None:
        forward_door.refuse_transforms(lambda: [*batch.tree.tensors, *self.parameters(), *self.buffers()])

    # --------------------------------------------------------------------------------------------- moving and loading

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """Cast parameters and buffers, as `nn.Module.to(dtype)`. Devices are the Pipe's own affair.

        Raises:
            TypeError: a device was given.
        """
        given = kwargs.get("device", args[0] if args else None)
        # Without an accelerator torch fails on a number: it has no device to stand for.
        device = given if isinstance(given, int) else torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None:
            raise TypeError(cannot_move(f"to({device})"))
        super().to(*args, **kwargs)
        return self

    def cuda(self, device: Any = None) -> Pipe:
        """Refused: see `to`."""
        raise TypeError(cannot_move("cuda()"))

    def cpu(self) -> Pipe:
        """Refused: see `to`."""
        raise TypeError(cannot_move("cpu()"))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's. torchgpipe's keys are read too, with the versions of their layers."""
        versions = getattr(state_dict, "_metadata", None)
        if versions is not None and "partitions" not in self._modules:
            renamed = OrderedDict(state_dict)
            names = {key: key.split(".", 2)[-1] for key in versions if re.match(r"partitions\.\d+\.", key)}
            setattr(renamed, "_metadata", OrderedDict((names.get(key, key), value) for key, value in versions.items()))
            state_dict = renamed
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Read torchgpipe's keys too: `partitions.<stage>.<layer>...` names the layer as the plain module does."""
        old = f"{prefix}partitions."
        if "partitions" not in self._modules:
            norms = {path for path, _ in batch_norms(self.to_sequential())}
            for key in [key for key in state_dict if key.startswith(old)]:
                value = state_dict.pop(key)
                _, _, name = key[len(old) :].partition(".")
                layer, _, last = name.rpartition(".")
                if layer in norms and last in ("sum", "sum_squares"):
                    continue  # what its DeferredBatchNorm has of an unfinished mini-batch
                state_dict[prefix + name] = value
        super()._load_from_state_dict(state_dict, prefix, *args)
