"""Tensor parallelism: each of the ranks has all stages, and a part of each weight. Scripts for test_rank_parts.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from pipeline import EagerUpdate, Pipe, eager_backward
from pipeline.curvature import Hessian


class Block(nn.Module):
    """x + MLP(LayerNorm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def built() -> tuple[nn.Sequential, nn.Sequential]:
    """A model, and the same in parts."""
    torch.manual_seed(3)
    whole = nn.Sequential(Block(), Block(), Block()).double()
    parts = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in parts:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return whole, parts


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
    return x, y


def trained(checkpoint: str, by_step: bool) -> tuple[list[float], float]:
    """The losses of three steps, ours and the plain module's, and how far apart the parameters are then."""
    whole, parts = built()
    x, y = data()
    pipe = Pipe(parts, [2, 1], 3, devices=["cpu", "cpu"], checkpoint=checkpoint)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (pipe, whole)]
    losses = []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = F.mse_loss(whole(x), y)
        expected.backward()
        if by_step:
            loss = pipe.step(x, y, loss_fn=F.mse_loss).loss
        else:
            loss = F.mse_loss(pipe(x), y)
            loss.backward()
        losses.append(float(loss.detach() - expected.detach()))
        for optimizer in optimizers:
            optimizer.step()
    pairs = zip(pipe.parameters(), whole.parameters(), strict=True)
    return losses, max(float((_whole(one.detach()) - other.detach()).abs().max()) for one, other in pairs)


def of_parts(entry: str, sharded_dim: int | None) -> list[float]:
    """How far the outputs or losses, and the gradients, of inputs that are DTensors are from the plain module's."""
    whole, _ = built()
    x, y = data()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts = distribute_module(copy.deepcopy(whole), mesh)
    placement = Replicate() if sharded_dim is None else Shard(sharded_dim)
    inputs, targets = distribute_tensor(x, mesh, [placement]), distribute_tensor(y, mesh, [Replicate()])
    expected = whole(x)
    F.mse_loss(expected, y).backward()
    distances = []
    for chunks in (2, 3, 4):
        pipe = Pipe(parts, [2, 1], chunks, devices=["cpu", "cpu"])
        pipe.zero_grad()
        if entry == "step":
            output = pipe.step(inputs, targets, loss_fn=F.mse_loss, outputs=True).outputs
        elif entry == "evaluate":
            output = pipe.evaluate(inputs, targets, loss_fn=F.mse_loss).outputs
        else:
            output = pipe(inputs)
            F.mse_loss(output, targets).backward()
        distances.append(float((_whole(output.detach()) - expected.detach()).abs().max()))
        for one, other in zip(pipe.parameters(), whole.parameters(), strict=True):
            if entry != "evaluate":
                distances.append(float((_whole(one.grad) - other.grad).abs().max()))
    return distances


def refused(how: str) -> str:
    """What is said where parts of parameters do not do."""
    _, parts = built()
    x, y = data()
    pipe = Pipe(parts, [2, 1], 3, devices=["cpu", "cpu"])
    update = EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=0.1))
    try:
        if how == "step":
            pipe.step(x, y, loss_fn=F.mse_loss, optimizer=update)
        elif how == "backward":
            eager_backward(F.mse_loss(pipe(x), y), update)
        else:
            Hessian(pipe, (x, y), F.mse_loss)
    except ValueError as error:
        return str(error)
    return ""


def _whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found
