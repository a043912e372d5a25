"""What a rank's own model is after training over ranks. Scripts for test_rank_stale.py."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import torch
import torch.distributed as dist
from block_models import MODELS, doubled
from rank_models import even
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_leaves

from partition import to_sequential
from pipeline import Pipe


def built() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Layer 2 has the weights of layer 0, layer 3 those of nobody."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model[2].weight = model[0].weight
    return model, torch.randn(10, 4).double(), torch.randn(10, 1).double()


def trained(pipe: Any, x: Any, y: Tensor, how: str) -> None:
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    for _ in range(2):
        if how == "step":
            pipe.step(x, y, loss_fn=mse_loss, optimizer=optimizer)
        else:
            mse_loss(pipe(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def values_of_several_models(how: str) -> list[str]:
    """The warnings as a Pipe is built, where one rank has seeded its generator, loaded a state, or its own layers."""
    rank = dist.get_rank()
    torch.manual_seed(rank if how == "seed" else 0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    if how == "state" and rank == 0:
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    if how == "own":
        model[0 if rank else 2].to("meta")
        model[2 if rank else 0].weight.data.add_(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = Pipe(model, even(3, dist.get_world_size()), 2)
    pipe.step(torch.ones(4, 4).double(), loss_fn=lambda out, _: out.square().mean())
    return [str(warning.message) for warning in caught]


def said(call: Any) -> str:
    try:
        call()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return ""


def penalty(model: nn.Module) -> None:
    """A gradient for each parameter, from outside a Pipe."""
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    model.zero_grad()


class Waves(nn.Module):
    """A module without parameters, whose buffer lies in the first part."""

    scale: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("speeds", torch.rand(4))

    def forward(self, length: int) -> Tensor:
        waves = (torch.arange(length)[:, None] * self.speeds).cos()
        return waves if self.scale is None else waves * self.scale


class WaveBlock(nn.Linear):
    def forward(self, x: Tensor, waves: Tensor) -> Tensor:  # type: ignore[override]  # of a block
        return x + super().forward(x).sin() * waves


class Waving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.waves = nn.Linear(4, 4), Waves()
        self.blocks = nn.ModuleList(WaveBlock(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h, waves = self.embed(x), self.waves(x.shape[1])
        for block in self.blocks:
            h = block(h, waves)
        return h


def given() -> tuple[list[float], list[float]]:
    """The losses of steps, and those of the plain model, with another scale in each."""
    torch.manual_seed(0)
    model, x, losses, wanted = Waving().double(), torch.randn(4, 5, 4).double(), [], []
    plain = copy.deepcopy(model)
    pipe = Pipe(model, sample=x, chunks=2)
    ours, theirs = (torch.optim.SGD(module.parameters(), 0.1) for module in (pipe, plain))
    for scale in (None, 0.5, 2.0):
        model.waves.scale = plain.waves.scale = scale
        losses.append(float(pipe.step(x, x, loss_fn=mse_loss, optimizer=ours).loss))
        loss = mse_loss(plain(x), x)
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        wanted.append(float(loss.detach()))
    return losses, wanted


def refusals(how: str) -> dict[str, str]:
    """What is said before training, after it, of copies, and once the trained values are loaded."""
    model, x, y = built()
    pipe = Pipe(model, [2, 3], 2)
    before = said(lambda: [model(x), pipe(x), model(x), model.state_dict(), penalty(model)])
    trained(pipe, x, y, how)
    recut = [1, 4] if dist.get_rank() else [4, 1]
    found = {
        "before": before,
        "forward": said(lambda: model(x)),
        "state": said(model.state_dict),
        "recut": said(lambda: Pipe(model, recut, 2, devices=["cpu"] * 2)),
        "copy": said(lambda: copy.deepcopy(model)(x)),
        "file": said(lambda: torch.save(model, io.BytesIO())),
        "penalty": said(lambda: penalty(model)),
        "own_penalty": said(lambda: penalty(pipe)),
        "own": said(lambda: [model[i].state_dict() for i in ((0, 1), (2, 3, 4))[dist.get_rank()]]),
        "pipe": said(lambda: [pipe(x), pipe.state_dict()]),
    }
    state = [pipe.full_state_dict()]
    dist.broadcast_object_list(state)
    assert state[0] is not None
    model.load_state_dict(state[0])
    penalty(model)
    found["loaded"] = said(lambda: [model.state_dict(), torch.save(model, io.BytesIO()), Pipe(model, [4, 1], 2)])
    assert torch.allclose(model.eval()(x), pipe.eval()(x), rtol=0, atol=1e-12)
    trained(pipe.train(), x, y, how)
    return {**found, "later": said(lambda: model(x))}


def recut() -> dict[str, str]:
    """Another Pipe of the model, in which a layer goes to another rank, and one in which none does."""
    model, x, y = built()
    trained(Pipe(model, [2, 3], 2), x, y, "step")
    same = said(lambda: Pipe(model, [2, 3], 2))
    return {"same": same, "other": said(lambda: Pipe(model, [3, 2], 2))}


def refilled() -> dict[str, str]:
    """Pipes of one model on the meta device after the first: in the first of them no layer goes to another rank."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    first, second = ({f"{i}.{name}": torch.full(shape, value) for i in range(4) for name, shape in
                      (("weight", (2, 2)), ("bias", (2,)))} for value in (1.0, 2.0))  # fmt: skip
    Pipe(model, [1, 3], 2, materialize=first)
    same = Pipe(model, [1, 3], 4).full_state_dict()
    assert same is None or all(torch.equal(value, first[name]) for name, value in same.items())
    other = said(lambda: Pipe(model, [3, 1], 2, materialize=second))
    return {"other": other, "later": said(lambda: Pipe(model, [1, 3]))}


def cut(name: str) -> dict[str, str]:
    """A model that `to_sequential` has cut."""
    torch.manual_seed(3)
    kind, inputs = MODELS[name]
    model, batch = kind().double(), doubled(inputs(4))
    layers = to_sequential(model, batch)
    pipe = Pipe(layers, even(len(layers), 2), 2)
    for _ in range(2):
        pipe.step(batch, None, loss_fn=lambda out, _: tree_leaves(out)[0].square().mean())
    named = batch if isinstance(batch, dict) else {}
    args = batch if isinstance(batch, tuple) else () if named else (batch,)
    found = {"forward": said(lambda: model(*args, **named)), "state": said(model.state_dict)}
    state = pipe.full_state_dict()
    if state is not None:
        model.load_state_dict(state)
        penalty(model)
    found["loaded"] = said(lambda: [model.state_dict(), model(*args, **named)])
    return found
