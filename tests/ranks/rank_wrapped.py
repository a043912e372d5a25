"""Wrappers around a Pipe over ranks, and around its parameters. Scripts for test_rank_wrapped.py."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from rank_stale import said
from torch import Tensor, distributed, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from pipeline import Pipe


def layers() -> nn.Sequential:
    """Layers of equal shapes: what mixes them raises nothing by itself."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()


def sharded(params: Iterable[Tensor], **options: Any) -> Any:
    """An optimizer of which each rank of a group steps a part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its module scripts functions
        module = importlib.import_module("torch.distributed.optim")
    return module.ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, **options)


def wrapped(kind: str) -> str:
    """What is said of a call."""
    model, x = layers(), torch.ones(4, 4, dtype=torch.float64)
    optimizer = sharded(model.parameters()) if kind == "zero-before" else None
    pipe = Pipe(model, [2, 2], 2)
    if kind == "ddp":
        around = DistributedDataParallel(pipe)
        return said(lambda: around(x))
    if kind == "fsdp":
        importlib.import_module("torch.distributed.fsdp").fully_shard(pipe)
        return said(lambda: pipe(x))
    optimizer = sharded(pipe.parameters()) if optimizer is None else optimizer
    if kind == "zero":
        return said(lambda: pipe.step(x, x, loss_fn=mse_loss, optimizer=optimizer))
    mse_loss(pipe(x), x).backward()
    return said(optimizer.step)


def sharded_over_replicas() -> float:
    """How far a step over replicas of one pipeline, each in one process, is from torch's own."""
    model, mine = layers(), layers()
    pipe = Pipe(mine, [2, 2], 2, devices=["cpu", "cpu"], replicas=distributed.group.WORLD)
    optimizer, plain = sharded(pipe.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(distributed.get_rank()))
    pipe.step(x, x, loss_fn=mse_loss, optimizer=optimizer)
    rows = [torch.empty_like(x) for _ in range(distributed.get_world_size())]
    distributed.all_gather(rows, x)
    torch.stack([mse_loss(model(row), row) for row in rows]).mean().backward()
    plain.step()
    return max((a - b).abs().max().item() for a, b in zip(pipe.parameters(), model.parameters()))


def sharded_beside() -> str:
    """What is said of a step for a model that every rank has, beside a Pipe over them."""
    pipe, model = Pipe(layers(), [2, 2], 2), layers()
    optimizer, x = sharded(model.parameters()), torch.ones(4, 4, dtype=torch.float64)
    pipe.step(x, x, loss_fn=mse_loss)
    mse_loss(model(x), x).backward()
    return said(optimizer.step)
