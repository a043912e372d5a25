"""Models that `to_sequential` has cut, trained over ranks: what each rank knows afterwards."""

from __future__ import annotations

from typing import Any

import torch
from block_models import MIXING, MODELS, Moods, doubled
from families import of_family
from one_and_many import Found, Make, state_of
from rank_models import even
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partition import to_sequential
from pipeline import meta_parameters


def squared(out: object, target: Tensor) -> Tensor:
    return ((tree_leaves(out)[0] - target) ** 2).mean()


def trained(make: Make, name: str, stages: int, schedule: str, checkpoint: str) -> Found:
    torch.manual_seed(3)
    kind, inputs = MODELS[name]
    model = kind().double().train()
    sample = doubled(inputs(4))
    batches = [doubled(inputs(rows)) for rows in (7, 5)]
    layers = to_sequential(model, sample)
    with torch.no_grad():
        targets = [torch.randn_like(tree_leaves(layers(batch))[0]) for batch in batches]
    options = {"schedule": schedule, "checkpoint": checkpoint, "mixes_rows": name in MIXING}
    pipe = make(layers, even(len(layers), stages), 3, **options)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    found: Found = {}
    for turn, (batch, target) in enumerate(zip(batches, targets, strict=True)):
        step = pipe.step(batch, target, loss_fn=squared, optimizer=optimizer)
        found[f"loss {turn}"] = step.loss
    return {**found, **state_of(pipe)}


def loaded(make: Make, family: str, folder: str, stages: int) -> Found:
    """One step of a model that was built on the meta device, and loaded from a folder."""
    torch.manual_seed(3)
    with meta_parameters():
        model, inputs = of_family(family)
    layers = to_sequential(model.train(), inputs(4))
    batch = inputs(5)
    pipe = make(layers, even(len(layers), stages), 3, materialize=folder)
    with_memory = {id(parameter) for parameter in model.parameters() if not parameter.is_meta}
    assert with_memory == {id(parameter) for parameter in pipe.parameters()}
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    step = pipe.step(
        batch, batch["input_ids"], loss_fn=lambda out, _: (out["logits"] ** 2).mean(), optimizer=optimizer
    )
    return {"loss": step.loss, **state_of(pipe)}


def told_modes(make: Make, is_cut: bool, stages: int) -> Found:
    """The outputs of a Pipe in modes of which the model is told, or the Pipe."""
    torch.manual_seed(3)
    model = Moods().double().train()
    x = torch.randn(6, 4).double()
    layers: Any = to_sequential(model, x) if is_cut else nn.Sequential(model.often, *model.body.inner)
    pipe = make(layers, even(len(layers), stages), 2)
    told: Any = model if is_cut else layers
    found: Found = {}
    for number, tell in enumerate([told.eval, pipe.train, told.eval, told.train, pipe.eval, told.train]):
        tell()
        found[f"loss {number}"] = pipe(x).square().mean().detach()
    return found
