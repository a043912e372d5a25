"""Which ranks does a Pipe run on? All of torch.distributed's, those of a group, or those that torchrun started.

    ranks 0 1 2 3, group=[0, 1] on some, group=[2, 3] on others   two Pipes side by side, each on its own mini-batches
"""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from one_and_many import Found, Make, differences, in_one_process, over_ranks, state_of
from rank_models import even, layered, rows, square
from torch import Tensor

from pipeline import Pipe
from pipeline.distributed.group import _device


def initialised_by_the_pipe() -> tuple[bool, str, list[str]]:
    """(whether someone had initialised torch.distributed before, its backend now, what differs from one process)"""
    before = dist.is_initialized()
    results = []
    for make in over_ranks, in_one_process:
        pipe = make(layered(8), even(8, 2), 3)
        results.append({"loss": pipe.step(rows(7), rows(7), loss_fn=square).loss, **state_of(pipe)})
    return before, dist.get_backend(), differences(*results)


def side_by_side(members: list[list[int]]) -> tuple[int, list[str]]:
    """(this rank's group, what differs from one process): each group trains on mini-batches of its own."""
    groups = [dist.new_group(ranks) for ranks in members]
    mine = next(index for index, ranks in enumerate(members) if dist.get_rank() in ranks)
    size = len(members[mine])
    results = [_trained(make, size, mine, **settings) for make, settings in _both(groups[mine])]
    return mine, differences(*results)


def _both(group: Any) -> list[tuple[Make, dict[str, Any]]]:
    return [(over_ranks, {"group": group}), (in_one_process, {})]


def _trained(make: Make, size: int, data: int, **settings: Any) -> Found:
    pipe = make(layered(8), even(8, size), 3, **settings)
    torch.manual_seed(5)  # the group's rank 0 is not the world's
    stepper = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    found: Found = {}
    for step in range(3):
        loss = square(pipe(rows(7, seed=10 * data + step)), rows(7))
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        found[f"loss {step}"] = loss.detach()
    return {**found, **state_of(pipe)}


def refused_on_one() -> tuple[str, list[str]]:
    """(what rank 0 alone is told of its first Pipe, what differs from one process in the one that all build then)"""
    told = ""
    if dist.get_rank() == 0:
        try:
            Pipe(layered(8), even(8, dist.get_world_size()), 3, batch_dim=-1)
        except ValueError as error:
            told = str(error)
    return told, differences(*[_trained(make, dist.get_world_size(), 0) for make in (over_ranks, in_one_process)])


def averaged() -> tuple[list[Tensor], list[Tensor]]:
    """Two replicas of two ranks: gradients averaged over replicas after each step; and both batches in one process."""
    rank = dist.get_rank()
    pipes = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    pipe = Pipe(layered(8).eval(), even(8, 2), 2, group=pipes[rank // 2])
    pipe.step(rows(6, seed=rank // 2), rows(6), loss_fn=square)
    for parameter in pipe.parameters():
        dist.all_reduce(parameter.grad, group=replicas[rank % 2])
        parameter.grad /= 2
    plain = layered(8).eval()
    for seed in range(2):
        (square(plain(rows(6, seed=seed)), rows(6)) / 2).backward()
    names = dict(plain.named_parameters())
    found = dict(pipe.named_parameters())
    return [found[name].grad for name in found], [names[name].grad for name in found]


def outside() -> str:
    """What a rank hears that is not in the group it gives; the others build theirs."""
    group = dist.new_group([0, 1])
    try:
        Pipe(layered(8), even(8, 2), group=group)
    except ValueError as error:
        return str(error)
    return ""


def alone() -> tuple[list[str], list[str]]:
    """A group of one, and devices=: each rank by itself, no other rank takes part."""
    rank = dist.get_rank()
    groups = [dist.new_group([member]) for member in range(dist.get_world_size())]
    names = []
    for settings in ({"group": groups[rank]}, {"devices": ["cpu", "cpu"]}):
        pipe = Pipe(layered(8), [4, 4], 2, **settings)
        for step in range(rank + 1):  # another number on each rank
            pipe.step(rows(6, seed=rank), rows(6), loss_fn=square)
        names.append([name for name, parameter in pipe.named_parameters() if parameter.grad is not None])
    return names[0], names[1]


def again() -> list[str]:
    """torch.distributed is shut down, which a Pipe outlasts, and initialised anew for a second one."""
    found = []
    for run in range(2):
        pipe = Pipe(layered(8), even(8, dist.get_world_size()), 3)
        torch.manual_seed(3)
        found.append(pipe.step(rows(7), rows(7), loss_fn=square).loss.item().hex())
        if run == 0:
            dist.barrier()
            dist.destroy_process_group()
            torch.manual_seed(3)
            found.append(pipe.step(rows(7), rows(7), loss_fn=square).loss.item().hex())  # its ranks stay connected
            store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size)
    return found


def many_chunks(make: Make, stages: int, schedule: str, chunks: int, each: int, width: int) -> Found:
    """Many messages under way, or large ones, of `each` rows."""
    model = layered(8, width).eval()
    pipe = make(model, even(8, stages), chunks, schedule=schedule, checkpoint="never")
    x = rows(chunks * each, width)
    step = pipe.step(x, x.flip(0), loss_fn=square)
    return {"loss": step.loss, **state_of(pipe)}


def on_devices(names: list[str], hosts: list[str]) -> str:
    """What building a Pipe says, and then a second one, where ranks have devices of these names."""
    rank = dist.get_rank()
    with patch("pipeline.distributed.group.device_identity", lambda device: names[rank]):
        with patch("socket.gethostname", lambda: hosts[rank]):
            try:
                Pipe(layered(8), even(8, dist.get_world_size()), 3)
            except ValueError as error:
                said = str(error)
            else:
                said = ""
    Pipe(layered(8), even(8, dist.get_world_size()), 3)(rows(7))  # after an error, too
    return said


def device_with_backend(backend: str) -> str:
    """The device of a rank whose group has this backend, as if there were XPUs."""
    group = dist.new_group(backend=backend)
    with patch("pipeline.distributed.group.device_of_rank", lambda: torch.device("xpu", 3)):
        return str(_device(group))


def device_that_is_bound() -> str:
    group = dist.new_group()
    with patch("pipeline.distributed.group.device_of_rank", lambda: torch.device("xpu", 3)):
        group.bound_device_id = torch.device("xpu", 1)
        try:
            return str(_device(group))
        finally:
            group.bound_device_id = None
