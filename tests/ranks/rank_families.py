"""Families of transformers, trained over ranks, saved, loaded into another Pipe: what each rank knows afterwards."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from families import of_family
from one_and_many import Found, Make, state_of
from rank_cut import squared
from rank_models import even
from torch.utils._pytree import tree_leaves

from partition import to_sequential


def trained(make: Make, family: str, stages: int, schedule: str, checkpoint: str, dtype: torch.dtype | None) -> Found:
    """Dropout on; chunks of 3, 2 and 2 rows, then of 2, 2 and 1, each with padding of its own."""
    torch.manual_seed(3)
    model, inputs = of_family(family, 0.2)
    other, _ = of_family(family, 0.2)
    batches = [inputs(rows) for rows in (7, 5)]
    with torch.no_grad():
        targets = [torch.randn_like(tree_leaves(model(**batch))[0]) for batch in batches]
    found: Found = {}
    saved = None
    for turn, each in enumerate((model.train(), other.train())):
        layers = to_sequential(each, batches[0])
        pipe = make(layers, even(len(layers), stages), 3, schedule=schedule, checkpoint=checkpoint)
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
        if saved is not None:
            pipe.load_state_dict(saved[0])
            pipe.load_optimizer_state_dict(optimizer, saved[1])
        for number, (batch, target) in enumerate(zip(batches, targets, strict=True)):
            with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                step = pipe.step(batch, target, loss_fn=squared, optimizer=optimizer)
            found[f"loss {turn} {number}"] = step.loss
        saved = copy.deepcopy((pipe.state_dict(), pipe.optimizer_state_dict(optimizer)))
    return {**found, **state_of(pipe)}
