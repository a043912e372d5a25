"""Which actions run on a rank, and how many chunks does it hold? Seen by layers that note what runs in them.

    pipe over ranks of probes (pipeline_probes.py) --step--> this rank's log: F, B of (stage, chunk)
"""

from __future__ import annotations

import copy
import time
from typing import Any
from unittest import mock

import torch
from pipeline_probes import labelled, probes, run, sum_of
from torch import Tensor, nn

import partition
from pipeline import Pipe
from pipeline.distributed import exchange
from pipeline.entry import entry_points
from pipeline.execution import execution
from pipeline.transports import link
from scheduler import Costs, Schedule
from scheduler.clocks import exchanges


def logs(stages: int, cases: list[tuple[str, int, str, str]]) -> list[list[str]]:
    """For each (schedule, chunks, checkpoint, entry): what this rank ran, as `2F0`, in order; R is a repeated F."""
    found = []
    for schedule, chunks, checkpoint, entry in cases:
        model, log = probes(stages)
        pipe = Pipe(model, [1] * stages, chunks, schedule=schedule, checkpoint=checkpoint)
        run(pipe, labelled(chunks), entry)
        found.append([f"{seen.stage}{seen.kind}{seen.chunk}" for seen in log])
    return found


def timelines(stages: int, schedule: str, chunks: int) -> list[Any]:
    """The recorded timeline of a step, as this rank has it: (action, lane, end - start > 0)."""
    model, _ = probes(stages)
    pipe = Pipe(model, [1] * stages, chunks, schedule=schedule, checkpoint="never")
    timeline = pipe.step(labelled(chunks), loss_fn=sum_of, loss_reduction="sum", trace=True).timeline
    assert timeline is not None
    return sorted((str(event.action), event.lane, event.end >= event.start) for event in timeline.events)


def evaluation(stages: int, schedule: str, chunks: int) -> list[str]:
    model, log = probes(stages)
    pipe = Pipe(model, [1] * stages, chunks, schedule=schedule)
    pipe.evaluate(labelled(chunks), loss_fn=sum_of, loss_reduction="sum")
    return [f"{seen.stage}{seen.kind}{seen.chunk}" for seen in log]


def given(text: str) -> list[str]:
    """The same under a schedule that is given as data."""
    schedule = Schedule.parse(text)
    model, log = probes(schedule.stages)
    pipe = Pipe(model, [1] * schedule.stages, schedule.chunks, schedule=schedule, checkpoint="never")
    run(pipe, labelled(schedule.chunks), "step")
    assert torch.distributed.get_world_size() == schedule.lanes
    return [f"{seen.stage}{seen.kind}{seen.chunk}" for seen in log]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.backward_seconds)
        return grad, None, None


class Sleeping(nn.Module):
    """A stage that takes so many seconds."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(x * self.weight, *self.seconds)
        return out


class _Work(torch.autograd.Function):
    """Moves this process's clock, and nothing else does."""

    now = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        _Work.now += forward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _Work.now += ctx.backward_seconds
        return grad, None, None


class _Works(Sleeping):
    """A stage that takes so many seconds of this clock."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Work.apply(x * self.weight, *self.seconds)
        return out


def measured(schedule: str, forward: list[float], backward: list[float], checkpoint: str) -> Any:
    """The costs that a traced step tells, as every rank has them: of F, B (I and W), recomputation."""
    model = nn.Sequential(*map(_Works, forward, backward))
    pipe = Pipe(model, [1] * len(model), 5, schedule=schedule, checkpoint=checkpoint)
    with mock.patch.object(execution, "perf_counter", lambda: _Work.now), mock.patch.object(
        link, "perf_counter", lambda: _Work.now
    ):
        for _ in range(2):  # these compare more
            pipe.step(torch.ones(5, 3), loss_fn=sum_of, loss_reduction="sum")
        step = pipe.step(torch.ones(5, 3), loss_fn=sum_of, loss_reduction="sum", trace=True)
    costs, report = Costs.measured(step.timeline), pipe.report(step)
    return costs.forward, costs.backward or costs.input, costs.recompute, [stage.busy for stage in report.stages]


def slept(schedule: str, forward: list[float], backward: list[float], chunks: int, entry: str) -> Any:
    """What was recorded of stages that sleep, on rank 0: (action, lane, start, end), and the lanes that take turns."""
    model = nn.Sequential(*map(Sleeping, forward, backward))
    pipe = Pipe(model, [1] * len(model), chunks, schedule=schedule, checkpoint="never")
    x = torch.ones(2 * chunks, 3)
    pipe.step(x, loss_fn=sum_of, loss_reduction="sum")  # what only a first call does
    if entry == "step":
        timeline = pipe.step(x, loss_fn=sum_of, loss_reduction="sum", trace=True).timeline
    elif entry == "evaluate":
        timeline = pipe.evaluate(x, loss_fn=sum_of, loss_reduction="sum", trace=True).timeline
    else:
        with pipe.trace() as trace:
            pipe(x).sum().backward()
        timeline = trace.timeline
    assert timeline is not None
    return [(str(action), *rest) for action, *rest in timeline.events], timeline.turns


def on_clocks(schedule: str, ahead: float) -> Any:
    """A traced step of ranks whose clocks are so far apart: the makespan, what is outside, the times of messages."""
    torch.manual_seed(0)
    pipe = Pipe(nn.Sequential(*[nn.Linear(3, 3) for _ in range(2)]), [1, 1], 4, schedule=schedule)
    rank = pipe.runtime.rank

    def clock() -> float:
        return time.perf_counter() + ahead * rank

    with (
        mock.patch.object(execution, "perf_counter", clock), mock.patch.object(link, "perf_counter", clock),
        mock.patch.object(entry_points, "perf_counter", clock),
        mock.patch.object(exchange, "clock_name", lambda: f"machine {rank}"),
    ):
        timeline = pipe.step(torch.ones(4, 3), loss_fn=sum_of, loss_reduction="sum", trace=True).timeline
    assert timeline is not None
    ways = [reader.start - giver.start for giver, reader, _ in exchanges(timeline.by_lane)]
    return timeline.makespan, timeline.outside, ways


def planned(speed: list[float]) -> Any:
    """The layers of each stage of this rank, by a plan for ranks of these speeds, and whether its step is right."""
    torch.manual_seed(1)
    model, x = nn.Sequential(*[nn.Linear(16, 16) for _ in range(9)]), torch.rand(8, 16)
    plain = copy.deepcopy(model)
    plan = partition.plan(model, x, devices=len(speed), speed=speed, device="meta", schedules=["1f1b"], chunks=[4])
    pipe = Pipe.from_plan(model, plan)
    step = pipe.step(x, torch.zeros(8, 16), loss_fn=nn.functional.mse_loss)
    nn.functional.mse_loss(plain(x), torch.zeros(8, 16)).backward()
    whole = dict(plain.named_parameters())
    right = all(torch.allclose(p.grad, whole[name].grad) for name, p in pipe.named_parameters() if p.grad is not None)
    has = len({name.split(".")[0] for name, p in pipe.named_parameters() if p.grad is not None})
    return plan.balance, plan.lane_of, has, right, torch.allclose(step.loss, nn.functional.mse_loss(plain(x), x * 0))
