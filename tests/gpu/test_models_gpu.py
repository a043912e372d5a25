"""Models as users write them on a GPU: cut, trained and differentiated twice, as the plain model is there.

    make test-gpu

What kernels round, or add up in another order each time, may differ; a recomputation that is right is never refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from block_models import MIXING, MODELS, called, doubled
from cover import pairwise
from families import CHUNKS, FAMILIES, LAYERS, OUTPUTS, Plain, near, of_family, second_order
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partition import to_sequential
from pipeline import Pipe
from pipeline.common.places import Place

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
MODES = ("never", "except_last", "always")
PLACES: dict[str, Callable[[int], list[Any]]] = {
    "one": lambda stages: [GPU] * stages,
    "named": lambda stages: [Place(GPU, str(stage)) for stage in range(stages)],
    "host first": lambda stages: ["cpu", *[GPU] * (stages - 1)],
}


def moved(x: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(GPU), x)


ROWS = pairwise({
    "family": list(FAMILIES),
    "training": (True, False),
    "autocast": (None, torch.bfloat16),
    "checkpoint": MODES,
    "schedule": ("1f1b", "gpipe", "zb-h1"),
    "place": ("one", "named"),
    "cut": ("on the host", "on the GPU"),
})  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_a_family_trains_as_the_plain_model(row: dict[str, Any]) -> None:
    """Dropout on, or eval mode; uneven chunks, each with padding of its own; four steps, three of which validate."""
    family, training, dtype = row["family"], row["training"], row["autocast"]
    model, inputs = of_family(family, 0.2)
    sample = inputs(4)
    if row["cut"] == "on the GPU":
        model, sample = model.to(GPU), moved(sample)
    layers = to_sequential(model, sample, output=OUTPUTS.get(family))
    assert len(layers) == LAYERS.get(family, 5)
    pipe = Pipe(
        layers, [2, len(layers) - 4, 2], CHUNKS, devices=PLACES[row["place"]](3), checkpoint=row["checkpoint"],
        schedule=row["schedule"],
    )  # fmt: skip
    first = next(iter(pipe(inputs(1))))
    pipe.train(training)
    model.train(training)
    plain = Plain(model, layers)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (pipe, plain.model)]

    def loss_fn(out: Any, target: Tensor) -> Tensor:
        return ((out[first] - target) ** 2).mean()

    def context() -> Any:
        return nullcontext() if dtype is None else torch.autocast("cuda", dtype)

    for turn, rows in enumerate((7, 5, 4, 6)):
        x = moved(inputs(rows))
        with torch.no_grad():
            target = torch.randn_like(plain.model(**x)[first])
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.manual_seed(turn)
        with context():
            loss = pipe.step(x, target, loss_fn=loss_fn).loss
        torch.manual_seed(turn)
        share = 1e-4 if dtype is None else 3e-2
        near([loss], [plain.step(x, target, loss_fn, context)], share)
        near([p.grad for p in model.parameters()], [p.grad for p in plain.model.parameters()], share)
        for optimizer in optimizers:
            optimizer.step()
        if dtype is not None:  # what is rounded otherwise is not to add up
            with torch.no_grad():
                for mine, other in zip(model.parameters(), plain.model.parameters(), strict=True):
                    mine.copy_(other)
                for mine, other in zip(model.buffers(), plain.model.buffers(), strict=True):
                    mine.copy_(other)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_second_derivatives_are_those_of_the_plain_model(family: str) -> None:
    """Of the loss of one mini-batch in chunks, with attention that has them."""
    model, inputs = of_family(family, attn_implementation="eager")
    model = model.eval().to(GPU)
    x = moved(inputs(5))
    layers = to_sequential(model, x, output=OUTPUTS.get(family))
    stages = [2, LAYERS.get(family, 5) - 2]
    pipe = Pipe(layers, stages, CHUNKS, devices=[GPU] * 2, checkpoint="always")
    first = next(iter(pipe(x)))
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    near(*[second_order(lambda: call(x)[first], params) for call in (pipe, lambda x: model(**x))], share=1e-3)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_the_plain_one(name: str, mode: str, place: str) -> None:
    """In eval mode, so that the host's generator and the GPU's make no difference; float64."""
    kind, inputs = MODELS[name]
    model = kind().double().eval()
    plain = copy.deepcopy(model).to(GPU)
    layers = to_sequential(model, doubled(inputs(4)))
    stages = 2 if len(layers) < 3 else 3
    balance = [1] * (stages - 1) + [len(layers) - stages + 1]
    pipe = Pipe(layers, balance, 2, devices=PLACES[place](stages), checkpoint=mode, mixes_rows=name in MIXING).eval()
    for recurrent in [part for each in (pipe, plain) for part in each.modules() if isinstance(part, nn.RNNBase)]:
        recurrent.train()  # it draws nothing, and cuDNN differentiates it in train mode only
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (pipe, plain)]
    for turn in range(4):
        x = doubled(inputs(6))
        torch.manual_seed(turn)
        expected, weight = [], None
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rows in torch.arange(6).tensor_split(2):
            out = called(plain, pytree.tree_map_only(Tensor, lambda leaf, rows=rows: leaf[rows].to(GPU), x))
            expected.append(hidden(out))
        whole = torch.cat(expected)
        weight = torch.randn(whole.shape, dtype=torch.float64).to(GPU)
        (whole * weight).sum().backward()
        ours = hidden(pipe(x))
        (ours * weight.to(ours.device)).sum().backward()
        torch.testing.assert_close(ours.to(GPU), whole, rtol=1e-8, atol=1e-10)
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None and other.grad is not None:
                torch.testing.assert_close(mine.grad.to(GPU), other.grad, rtol=1e-7, atol=1e-9)
        for optimizer in optimizers:
            optimizer.step()


def hidden(out: Any) -> Tensor:
    found: Tensor = pytree.tree_leaves(out)[0]
    return found
