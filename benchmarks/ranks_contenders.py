"""Who trains the same model over two ranks, and do they all get the plain module's gradients?

    layers --+-- ours    Pipe(model, balance, chunks, schedule=...).step(x, y, loss_fn=...)
             +-- torch   the schedule of torch.distributed.pipelining that is nearest to ours
             +-- alone   this rank's forwards and backwards only, by hand, on given inputs and gradients: no message

They compute with the same parameters, in the same memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
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
from scheduler import Kind, Schedule, by_name

# ours -> torch's; InterleavedZeroBubble with one stage a rank is the paper's ZB-H1
PEERS: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}
BOUNDED = ("gpipe", "1f1b")  # two ranks of one stage each wait for one forward and one backward, whatever they do


class Shape(NamedTuple):
    """What is trained."""

    width: int
    pairs: int  # Linear-ReLU, in all
    chunks: int
    rows: int  # of a chunk

    def __str__(self) -> str:
        return f"{self.pairs} x Linear({self.width})-ReLU, {self.chunks} chunks of {self.rows} rows"


class Contender(NamedTuple):
    """Computes the gradients of a mini-batch; returns the loss on ranks that know it."""

    step: Callable[[], Tensor | None]
    whole: bool  # its gradients are the plain module's


class Case:
    """A model, a mini-batch and a schedule on this rank, for all who contend with them."""

    def __init__(self, shape: Shape, schedule: str) -> None:
        torch.manual_seed(0)
        pairs = range(shape.pairs)
        self.shape, self.schedule = shape, schedule
        self.layers = [part for _ in pairs for part in (nn.Linear(shape.width, shape.width), nn.ReLU())]
        rows = shape.chunks * shape.rows
        self.x, self.y = torch.randn(rows, shape.width), torch.randn(rows, shape.width)
        self.rank = dist.get_rank()
        self.orders: Schedule = by_name(schedule, RANKS, shape.chunks)
        stages = self.orders.stages
        if shape.pairs % stages:
            raise ValueError(f"{shape.pairs} pairs of layers make no {stages} equal stages")
        self.balance = [2 * shape.pairs // stages] * stages
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


def contenders(schedule: str, only: str | None = None) -> list[str]:
    """Who takes part under this schedule."""
    return [
        name
        for name in ("ours", "torch", "alone")
        if only in (None, name) or name == "alone"
        if name != "alone" or schedule in BOUNDED
    ]


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
    ((stage, module),) = case.stages.items()
    chunks = case.shape.chunks
    inputs, targets = case.x.tensor_split(chunks), case.y.tensor_split(chunks)
    first, last = stage == 0, stage == len(case.balance) - 1
    order = case.orders.orders[case.rank]

    def step() -> None:
        entries: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        for action in order:
            chunk = action.chunk
            if action.kind is Kind.F:
                entries[chunk] = inputs[chunk].detach().requires_grad_(not first)
                outputs[chunk] = module(entries[chunk])
            elif last:
                (mean_square(outputs.pop(chunk), targets[chunk]) / chunks).backward()
                del entries[chunk]
            else:
                outputs.pop(chunk).backward(targets[chunk])  # any gradient will do
                del entries[chunk]

    return step


def reference(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the plain module, on a copy of it."""
    plain = nn.Sequential(*copy.deepcopy(case.layers)).double()
    loss = mean_square(plain(case.x.double()), case.y.double())
    loss.backward()
    size = case.balance[0]
    grads = {
        f"{stage}.{name}": param.grad
        for stage in case.stages
        for name, param in nn.Sequential(*list(plain)[stage * size : (stage + 1) * size]).named_parameters()
        if param.grad is not None
    }
    return loss.detach(), grads


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
        if param.grad is None:
            raise AssertionError(f"{name}: no gradient of {key}")
        close(name, f"the gradient of {key}", param.grad, grads[key])


def close(name: str, what: str, found: Tensor, wanted: Tensor) -> None:
    error = float((found.double() - wanted).norm() / wanted.norm())
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
