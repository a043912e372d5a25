"""Models that `to_sequential` has cut, saved and loaded over ranks by the names of the model, and trained on.

    alone(...)   the plain model and its own optimizer; a Pipe in this process only computes the gradients
    over(...)    a Pipe over the ranks, and each rank's optimizer
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from block_models import MODELS, doubled
from rank_models import even
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partition import to_sequential
from pipeline import Pipe, Saved

States = tuple[Any, Any]  # of the model, of the optimizer


def built(name: str) -> tuple[nn.Module, nn.Sequential]:
    """A model and its layers."""
    torch.manual_seed(3)
    kind, inputs = MODELS[name]
    model = kind().double().train()
    return model, to_sequential(model, doubled(inputs(4)))


def squares(out: object, _: None) -> Tensor:
    return tree_leaves(out)[0].square().mean()


def step(pipe: Pipe, name: str, number: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    torch.manual_seed(number)
    pipe.step(doubled(MODELS[name][1](4)), loss_fn=squares, optimizer=optimizer)


def alone(name: str, start: States | None, steps: tuple[int, int]) -> States:
    model, layers = built(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05 if start is None else 7.0)
    if start is not None:
        model.load_state_dict(start[0])
        optimizer.load_state_dict(start[1])
    pipe = Pipe(layers, even(len(layers), 2), chunks=3, devices=["cpu"] * 2)
    for number in range(*steps):
        step(pipe, name, number)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()


def over(name: str, start: States | str | None, steps: tuple[int, int], end: str | None = None) -> States:
    """Train from whole states, a directory, or the beginning; save in a directory. The whole states, on rank 0."""
    _, layers = built(name)
    pipe = Pipe(layers, even(len(layers), dist.get_world_size()), chunks=3)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05 if start is None else 7.0)
    if isinstance(start, str):
        state = {"model": pipe.state_dict(), "optimizer": pipe.optimizer_state_dict(optimizer)}
        dcp.load(state, checkpoint_id=start)
        start = state["model"], Saved(start, "optimizer")
    if start is not None:
        pipe.load_state_dict(start[0])
        pipe.load_optimizer_state_dict(optimizer, start[1])
    for number in range(*steps):
        step(pipe, name, number, optimizer)
    if end is not None:
        dcp.save({"model": pipe.state_dict(), "optimizer": pipe.optimizer_state_dict(optimizer)}, checkpoint_id=end)
    return pipe.full_state_dict(), pipe.full_optimizer_state_dict(optimizer)


def named(name: str) -> tuple[list[str], list[str], list[str], str]:
    """Names of this rank's parameters, state and versions; and what it says of keys that do not fit."""
    model, layers = built(name)
    pipe = Pipe(layers, even(len(layers), dist.get_world_size()), chunks=3)
    state = pipe.state_dict()
    assert all(pipe.get_parameter(key) is parameter for key, parameter in pipe.named_parameters())
    wrong = {**model.state_dict(), "no.such": torch.ones(1), f"{list(model.state_dict())[-1]}.more": torch.ones(1)}
    try:
        pipe.load_state_dict(wrong)
    except RuntimeError as error:
        words = str(error)
    return [key for key, _ in pipe.named_parameters()], list(state), list(state._metadata), words


def materialized(name: str, source: Any) -> dict[str, Tensor]:
    """This rank's values of a model without memory."""
    _, layers = built(name)
    return Pipe(layers.to("meta"), even(len(layers), dist.get_world_size()), materialize=source).state_dict()
