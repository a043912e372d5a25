"""What ranks do that have parts of an nn.Sequential, or of a Pipe: save together, load at another number, go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from state_training import CUTS, FRESH, make, names_of, net, train
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from pipeline import EagerUpdate, Pipe
from pipeline.distributed.remote_layer import RemoteLayer
from pipeline.entry.state.meta_init import materialize, reset_parameters
from pipeline.entry.state.meta_tensors import PlacedLayer
from pipeline.entry.state.optimizer_state import load_optimizer_state, optimizer_state, own_part
from pipeline.entry.state.saved import Saved

TIED = ("0.weight", "5.weight")


def own_layers() -> tuple[nn.Sequential, list[tuple[str, Any]]]:
    """This rank's part of the model, and its parameters by name."""
    cut, rank = CUTS[dist.get_world_size()][0], dist.get_rank()
    model = net()
    if len(cut) > 2:
        model[5].weight = nn.Parameter(model[5].weight.detach().clone())  # each rank has its own copy
    for index, (name, layer) in enumerate(list(model.named_children())):
        if not cut[rank] <= index < cut[rank + 1]:
            model._modules[name] = RemoteLayer(layer, index, stage=0, rank=0)
    return model, names_of(model)


def save(path: str, kind: str, steps: int) -> list[str]:
    """Train some steps and save; the keys that this rank gave."""
    model, named = own_layers()
    optimizer = make(kind, named)
    train(named, optimizer, range(steps))
    state = {"model": model.state_dict(), "optimizer": optimizer_state(named, optimizer), "steps": steps}
    dcp.save(state, checkpoint_id=path)
    return [*state["model"], *state["optimizer"]]


def go_on(path: str, kind: str, steps: int, how: str) -> dict[str, torch.Tensor]:
    """Load what other ranks saved, and train on; the parameters by name."""
    everything = [name for name, _ in names_of(net())]
    model, named = own_layers()
    optimizer = make(kind, named, turned=True, **FRESH)
    state: dict[str, Any]
    if how == "load":
        state = {"model": model.state_dict(), "optimizer": optimizer_state(named, optimizer), "steps": 0}
        dcp.load(state, checkpoint_id=path)
        assert state["steps"] == Saved(path)["steps"]
    else:
        state = {"model": Saved(path, "model"), "optimizer": Saved(path, "optimizer"), "steps": Saved(path)["steps"]}
    away = [f"{name}." for name, layer in model.named_children() if is_away(layer)]
    model.load_state_dict(own_part(state["model"], lambda key: key.startswith(tuple(away))))
    load_optimizer_state(named, optimizer, state["optimizer"], everything)
    train(named, optimizer, range(state["steps"], steps))
    return {name: param.detach() for name, param in named}


def is_away(layer: nn.Module) -> bool:
    return isinstance(layer, RemoteLayer)


def materialized(path: str | None) -> dict[str, torch.Tensor]:
    """This rank's values: initial ones, or from a directory; other layers stay without memory."""
    cut, rank = CUTS[dist.get_world_size()][0], dist.get_rank()
    with torch.device("meta"):
        model = net()
    table = list(enumerate(model.named_children()))[cut[rank] : cut[rank + 1]]
    own = [PlacedLayer(index, name, layer, torch.device("cpu")) for index, (name, layer) in table]
    materialize(own, reset_parameters if path is None else path, seed=4)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    here = {layer.name for layer in own}
    assert all(name.partition(".")[0] in here or tensor.is_meta or name in TIED for name, tensor in named)
    return {name: tensor.detach() for name, tensor in named if name.partition(".")[0] in here}


BALANCES = {1: [6], 2: [3, 3], 3: [2, 2, 2]}  # of three, one has nothing to train


def deep() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 4), nn.Linear(4, 2)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator)


def piped(start: str | None, steps: tuple[int, int], end: str | None, how: str = "load") -> Any:
    """Train a Pipe from a checkpoint, or from the beginning, to another; rank 0 gets the whole model's state."""
    torch.manual_seed(6)
    with torch.device("meta"):
        model = deep()
    pipe = Pipe(model, BALANCES[dist.get_world_size()], chunks=4, materialize=start or reset_parameters)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05 if start is None else 7.0)
    if start is not None:
        part: Any = Saved(start, "optimizer")
        if how == "load":
            state = {"model": pipe.state_dict(), "optimizer": pipe.optimizer_state_dict(optimizer)}
            dcp.load(state, checkpoint_id=start)
            part = state["optimizer"]
            pipe.load_state_dict(state["model"])
        pipe.load_optimizer_state_dict(optimizer, part)
    for step in range(*steps):
        torch.manual_seed(step)
        pipe.step(*batch(step), loss_fn=nn.functional.mse_loss, optimizer=optimizer)
    if end is not None:
        dcp.save({"model": pipe.state_dict(), "optimizer": pipe.optimizer_state_dict(optimizer)}, checkpoint_id=end)
    return pipe.full_state_dict()


def first_that_is_whole(folders: list[str]) -> Any:
    """Build a Pipe from the first of some checkpoints that can be read, then from others, which nothing reads.

    Rank 0 gets the whole model's state.
    """
    with torch.device("meta"):
        model = deep()
    state, words = None, []
    for folder in folders:
        try:
            state = Pipe(model, BALANCES[dist.get_world_size()], materialize=folder).full_state_dict()
        except (RuntimeError, ValueError) as error:
            words.append(str(error))
    assert "cannot be read" in words[0] and all("has values already, which stay" in others for others in words[1:])
    return state


def loaded(state: Any, lacks: str) -> str:
    """A whole state_dict loads on every rank; what nobody has is an error on every rank."""
    torch.manual_seed(0)
    pipe = Pipe(deep(), BALANCES[dist.get_world_size()], chunks=4)
    pipe.load_state_dict(state)
    own = pipe.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in own.items())
    try:
        pipe.load_state_dict({**state, lacks: torch.ones(1)})
    except RuntimeError as error:
        return str(error)
    return "no error"


# ------------------------------------------------------------------------------------- one file, as the plain module's

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.05, amsgrad=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05),
}


def tied_and_frozen() -> nn.Sequential:
    """Linear layers; the last has the first one's weight, one bias is frozen, one layer has no parameters."""
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model[4].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    return model


def groups_of(module: nn.Module, apart: bool) -> list[dict[str, Any]]:
    """One group of what is trained; or weights and biases apart."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad or not parameter.numel()]
    if not apart:
        return [{"params": trained}]
    matrices = [parameter for parameter in trained if parameter.ndim == 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": [one for one in trained if one.ndim != 2]}]


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
    return x, y


def whole(
    kind: str, apart: bool, start: tuple[Any, Any] | None, steps: tuple[int, int], of_model: bool = False
) -> list[tuple[Any, Any]]:
    """Train a Pipe over the ranks, from whole states or from the beginning; the whole states after each step.

    The optimizer is of this rank's parameters; or, made before the Pipe, of the model's, and steps eagerly in turns.
    """
    size, model = dist.get_world_size(), tied_and_frozen()
    optimizer = KINDS[kind](groups_of(model, apart))
    pipe = Pipe(model, {1: [5], 2: [2, 3], 3: [1, 1, 3]}[size], chunks=3)
    if not of_model:
        optimizer = KINDS[kind](groups_of(pipe, apart))
    if start is not None:
        pipe.load_state_dict(start[0])
        pipe.load_optimizer_state_dict(optimizer, start[1])
    found = []
    for step in range(*steps):
        stepper = EagerUpdate(optimizer) if of_model and step % 2 else optimizer
        pipe.step(*data(step), loss_fn=nn.functional.mse_loss, optimizer=stepper)
        found.append((pipe.full_state_dict(), pipe.full_optimizer_state_dict(optimizer)))  # not live: of this step
    return found


def by_name(of_model: bool) -> dict[str, Any]:
    """The state by name, after a step, of an optimizer of this rank's parameters or of the model's."""
    model = tied_and_frozen()
    pipe = Pipe(model, {1: [5], 2: [2, 3], 3: [1, 1, 3]}[dist.get_world_size()], chunks=3)
    optimizer = torch.optim.AdamW(groups_of(model if of_model else pipe, False))
    pipe.step(*data(0), loss_fn=nn.functional.mse_loss, optimizer=optimizer)
    return pipe.optimizer_state_dict(optimizer)


def renamed() -> list[Any]:
    """The whole state of an optimizer of parameters that got other names when the Pipe was there."""
    size, model = dist.get_world_size(), tied_and_frozen()
    pipe = Pipe(model, {1: [5], 2: [2, 3], 3: [1, 1, 3]}[size], chunks=3)
    for number in (2, 3):
        if isinstance(pipe[number], nn.Linear):
            weight_norm(pipe[number])
    optimizer = KINDS["adamw"](groups_of(pipe, False))
    pipe.step(*data(0), loss_fn=nn.functional.mse_loss, optimizer=optimizer)
    return [pipe.full_optimizer_state_dict(optimizer)]


def in_turn(frozen: bool) -> list[Any]:
    """A whole optimizer state, and what an optimizer with other options that has loaded it saves: on rank 0.

    Rank 0 has no parameters of a group, or none that is trained.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=frozen), nn.Linear(4, 4)).double()
    model[0].requires_grad_(not frozen)
    pipe = Pipe(model, [1, 1], chunks=3)
    matrices = [parameter for parameter in pipe.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in pipe.parameters() if parameter.ndim != 2]
    optimizer, other = (torch.optim.Adam([{"params": others}, {"params": matrices}], lr=lr) for lr in (0.05, 0.7))
    pipe.step(*data(0), loss_fn=nn.functional.mse_loss, optimizer=optimizer)
    states = [pipe.full_optimizer_state_dict(optimizer)]
    dist.broadcast_object_list(states)
    pipe.load_optimizer_state_dict(other, states[0])
    return [states[0], pipe.full_optimizer_state_dict(other)]


def from_file(path: str) -> dict[str, Any]:
    """This rank's state from a file that has the tied weight under one of its names, another in each half."""
    return from_state(Saved(path), strict=True)


def from_state(state: Any, strict: bool) -> dict[str, Any]:
    pipe = Pipe(tied_and_frozen(), {1: [5], 2: [2, 3], 3: [1, 1, 3]}[dist.get_world_size()], chunks=3)
    pipe.load_state_dict(state, strict=strict)
    return dict(pipe.state_dict())


def refused_whole(how: str) -> str:
    """What is said, on each rank, of groups from which no one optimizer's state can be made."""
    pipe = Pipe(tied_and_frozen(), [2, 3], chunks=3)
    parameters, rank = list(pipe.parameters()), dist.get_rank()
    tied = pipe.get_parameter("0.weight" if rank == 0 else "4.weight")
    halves = [{"params": [tied]}, {"params": [parameter for parameter in parameters if parameter is not tied]}]
    optimizer = torch.optim.SGD(
        {
            "order": parameters if rank == 0 else parameters[::-1],
            "one each": [{"params": [each], "lr": rank + 1.0} for each in parameters],
            "options": [{"params": parameters, "momentum": 0.5 + rank}],
            "tied": halves if rank == 0 else halves[::-1],
            "stranger": [*parameters, nn.Parameter(torch.ones(1))],
        }[how],
        lr=0.1,
    )
    try:
        pipe.full_optimizer_state_dict(optimizer)
    except ValueError as error:
        return str(error)
    return "no error"


def taken(state: Any) -> Any:
    """Names of this rank's parameters, and what the plain optimizer's state says of them; or why not."""
    torch.manual_seed(0)
    pipe = Pipe(deep(), [3, 3], chunks=4)
    optimizer = torch.optim.AdamW(pipe.parameters())
    try:
        pipe.load_optimizer_state_dict(optimizer, state)
    except ValueError as error:
        return str(error)
    assert optimizer.param_groups[0]["lr"] == 0.25
    named = dict(pipe.named_parameters())
    return list(named), [optimizer.state[parameter]["exp_avg"] for parameter in named.values()]
