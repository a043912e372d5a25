"""Wrappers around a Pipe over ranks, and around its parameters. Scripts for test_rank_wrapped.py."""

from __future__ import annotations

import importlib
import warnings

import torch
from rank_stale import said
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from pipeline import Pipe


def piped() -> Pipe:
    """Stages of equal shapes: what mixes them raises nothing by itself."""
    torch.manual_seed(0)
    return Pipe(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double(), [2, 2], 2)


def wrapped(kind: str) -> str:
    """What is said of a call."""
    pipe, x = piped(), torch.ones(4, 4, dtype=torch.float64)
    if kind == "ddp":
        around = DistributedDataParallel(pipe)
        return said(lambda: around(x))
    if kind == "fsdp":
        importlib.import_module("torch.distributed.fsdp").fully_shard(pipe)
        return said(lambda: pipe(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its module scripts functions
        kind_of_optimizer = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    optimizer = kind_of_optimizer(pipe.parameters(), torch.optim.SGD, lr=0.1)
    return said(lambda: pipe.step(x, x, loss_fn=mse_loss, optimizer=optimizer))
