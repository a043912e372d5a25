"""Who trains the same model over two ranks, and do they all get the plain module's gradients?

    layers --+-- ours    Pipe(model, balance, chunks, schedule=...).step(x, y, loss_fn=...)
             +-- torch   the schedule of torch.distributed.pipelining that is nearest to ours
             +-- alone   this rank's forwards and backwards only, by hand, on given inputs and gradients: no message

They compute with the same parameters, in the same memory. The plain module, too, runs chunk by chunk: BatchNorm's
statistics are those of a chunk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from models.blocks import build
from ranks_launch import RANKS
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from pipeline import Pipe
from scheduler import Costs, Kind, Schedule, by_name, simulate

# ours -> torch's; InterleavedZeroBubble with one stage a rank is the paper's ZB-H1
PEERS: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}


class Shape(NamedTuple):
    """What is trained."""

    width: int  # of Linear-ReLU pairs; 0: of the model's own blocks
    depth: int  # pairs, or blocks, in all
    chunks: int
    rows: int  # of a chunk
    family: str = ""  # of models/blocks.py
    size: str = ""

    def __str__(self) -> str:
        described = f"{self.size} {self.family} blocks" if self.family else f"Linear({self.width})-ReLU"
        return f"{self.depth} x {described}, {self.chunks} chunks of {self.rows} rows"

    def built(self) -> tuple[list[nn.Sequential], Tensor, Tensor]:
        """The layers, each pair or block as one, an input and a target."""
        rows = self.chunks * self.rows
        if self.family:
            model, x, y = build(self.family, self.size, self.depth, rows)
            return [nn.Sequential(block) for block in model], x, y
        pairs = [nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(self.depth)]
        return pairs, torch.randn(rows, self.width), torch.randn(rows, self.width)


def idle_factor(orders: Schedule) -> float:
    """How much longer than the work of a rank a schedule takes that waits for nothing but its order."""
    timeline = simulate(orders, Costs(forward=1, input=1, weight=1))
    return float(timeline.makespan / max(timeline.busy))


class Contender(NamedTuple):
    """Computes the gradients of a mini-batch; returns the loss on ranks that know it."""

    step: Callable[[], Tensor | None]
    whole: bool  # its gradients are the plain module's


class Case:
    """A model, a mini-batch and a schedule on this rank, for all who contend with them."""

    def __init__(self, shape: Shape, schedule: str) -> None:
        torch.manual_seed(0)
        self.shape, self.schedule = shape, schedule
        parts, self.x, self.y = shape.built()
        self.layers = [layer for part in parts for layer in part]
        self.rank = dist.get_rank()
        self.orders: Schedule = by_name(schedule, RANKS, shape.chunks)
        stages = self.orders.stages
        if shape.depth % stages:
            raise ValueError(f"{shape.depth} pairs or blocks make no {stages} equal stages")
        self.balance = [len(self.layers) // stages] * stages
        self.stages = {
            stage: nn.Sequential(*self.layers[stage * size : (stage + 1) * size])
            for stage, size in enumerate(self.balance)
            if self.orders.placement.lane_of[stage] == self.rank
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of this rank."""
        return {
            f"{stage}.{name}": param
            for stage, module in self.stages.items()
            for name, param in module.named_parameters()
        }

    def contender(self, name: str) -> Contender:
        """One of `contenders`."""
        makers: dict[str, Callable[[Case], Callable[[], Tensor | None]]] = {"ours": ours, "torch": peer, "alone": alone}
        return Contender(makers[name](self), name != "alone")


def contenders(only: str | None = None) -> list[str]:
    """Who takes part."""
    return [name for name in ("ours", "torch", "alone") if only in (None, name) or name == "alone"]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def make_pipe(case: Case) -> Pipe:
    """Every activation is kept, as torch does."""
    return Pipe(
        nn.Sequential(*case.layers), case.balance, case.shape.chunks, schedule=case.schedule, checkpoint="never"
    )


def ours(case: Case) -> Callable[[], Tensor | None]:
    pipe = make_pipe(case)
    return lambda: pipe.step(case.x, case.y, loss_fn=mean_square).loss


def peer(case: Case) -> Callable[[], Tensor | None]:
    device, last = torch.device("cpu"), len(case.balance) - 1
    stages = [PipelineStage(module, stage, last + 1, device) for stage, module in case.stages.items()]
    single = case.schedule in ("gpipe", "1f1b")
    schedule = PEERS[case.schedule](stages[0] if single else stages, case.shape.chunks, loss_fn=mean_square)
    given = (case.x,) if 0 in case.stages else ()
    target = case.y if last in case.stages else None

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        schedule.step(*given, target=target, losses=losses, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    return step


def alone(case: Case) -> Callable[[], Tensor | None]:
    """What W would do is done with I."""
    chunks, last = case.shape.chunks, len(case.balance) - 1
    inputs, targets = case.x.tensor_split(chunks), case.y.tensor_split(chunks)
    order = [action for action in case.orders.orders[case.rank] if action.kind is not Kind.W]

    def step() -> None:
        entries: dict[tuple[int, int], Tensor] = {}
        outputs: dict[tuple[int, int], Tensor] = {}
        for stage, kind, chunk in order:
            at = stage, chunk
            if kind is Kind.F:
                entries[at] = inputs[chunk].detach().requires_grad_(stage > 0)
                outputs[at] = case.stages[stage](entries[at])
            elif stage == last:
                (mean_square(outputs.pop(at), targets[chunk]) / chunks).backward()
                del entries[at]
            else:
                outputs.pop(at).backward(targets[chunk])  # any gradient will do
                del entries[at]

    return step


def reference(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the plain module, on a copy of it."""
    plain, chunks = nn.Sequential(*copy.deepcopy(case.layers)), case.shape.chunks
    total = torch.zeros(())
    for x, y in zip(case.x.tensor_split(chunks), case.y.tensor_split(chunks), strict=True):
        loss = mean_square(plain(x), y) / chunks
        loss.backward()
        total += loss.detach()
    size = case.balance[0]
    grads = {
        f"{stage}.{name}": param.grad
        for stage in case.stages
        for name, param in nn.Sequential(*list(plain)[stage * size : (stage + 1) * size]).named_parameters()
        if param.grad is not None
    }
    return total, grads


def check(case: Case, name: str, contender: Contender, wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    """One step; raise where its loss or a gradient is not the plain module's, to 1e-5."""
    loss, grads = wanted
    zero_grad(case)
    found = contender.step()
    if not contender.whole:
        return
    if found is not None:
        close(name, "the loss", found, loss)
    for key, param in case.parameters().items():
        if (param.grad is None) != (key not in grads):
            raise AssertionError(f"{name}: a gradient of {key} only with it, or only without")
        if param.grad is not None:
            close(name, f"the gradient of {key}", param.grad, grads[key])


def close(name: str, what: str, found: Tensor, wanted: Tensor) -> None:
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    if not error <= 1e-5:
        raise AssertionError(f"{name}: {what} is off by {error:.1e} of its size")


def zero_grad(case: Case) -> None:
    for layer in case.layers:
        layer.zero_grad(set_to_none=True)


def prepared(shape: Shape, schedule: str, names: list[str], warm: int) -> tuple[Case, dict[str, Contender]]:
    """All contenders, checked and warm."""
    case = Case(shape, schedule)
    wanted = reference(case)
    found = {name: case.contender(name) for name in names}
    for name, contender in found.items():
        check(case, name, contender, wanted)
        for _ in range(warm):
            contender.step()
    return case, found
