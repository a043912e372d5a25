"""Law: each family of transformers trains in a Pipe as the plain model does in a loop over the chunks."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from cover import either, pairwise
from families import CHUNKS, FAMILIES, LAYERS, OUTPUTS, Plain, near, of_family, second_order

from partition import to_sequential
from pipeline import Pipe


def cut(family, sample, **settings):
    """A model, its layers, and a Pipe with its optimizer."""
    model, _ = of_family(family, 0.2)
    layers = to_sequential(model, sample, output=OUTPUTS.get(family))
    assert len(layers) == LAYERS.get(family, 5)
    return model, layers, *piped(layers, [2, len(layers) - 4, 2], **settings)


def piped(layers, balance, **settings):
    pipe = Pipe(layers, balance, CHUNKS, devices=["cpu"] * len(balance), **settings)
    return pipe, torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)


ROWS = pairwise({
    "family": list(FAMILIES),
    "training": (True, False),
    "autocast": (None, torch.bfloat16),
    "checkpoint": ("always", "except_last", "never"),
    "schedule": ("1f1b", "gpipe", "zb-h1"),
})  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_a_family_trains_as_the_plain_model_and_goes_on_after_loading(row):
    """Dropout on, or eval mode; uneven chunks, each with padding of its own; one step, then two of another Pipe.

    In `make test` the other Pipe comes with every third family.
    """
    family, training, dtype = row["family"], row["training"], row["autocast"]
    settings = {"checkpoint": row["checkpoint"], "schedule": row["schedule"]}
    # Its encoder's input is bfloat16 then, and the gradients of several readers are summed so.
    share = 1e-2 if dtype and family == "DetrForObjectDetection" else 1e-5

    def context():
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    _, inputs = of_family(family)
    model, layers, pipe, optimizer = cut(family, inputs(4), **settings)
    first = next(iter(pipe(inputs(1))))

    def loss_fn(out, target):
        return ((out[first] - target) ** 2).mean()

    pipe.train(training)
    model.train(training)
    plain = Plain(model, layers)
    others = torch.optim.SGD(plain.model.parameters(), 0.1, momentum=0.9)
    goes_on = either(list(FAMILIES).index(family) % 3 == 0, True)
    for turn, rows in enumerate((7, 5, 4) if goes_on else (7,)):
        if turn == 1:
            state, moments = copy.deepcopy((pipe.state_dict(), pipe.optimizer_state_dict(optimizer)))
            model, layers, pipe, optimizer = cut(family, inputs(4), schedule="1f1b", checkpoint="always")
            pipe.load_state_dict(state)
            pipe.load_optimizer_state_dict(optimizer, moments)
            pipe.train(training)
        x = inputs(rows)
        with torch.no_grad():
            target = torch.randn_like(model(**x)[first])
        optimizer.zero_grad()
        others.zero_grad()
        torch.manual_seed(turn)
        with context():
            loss = pipe.step(x, target, loss_fn=loss_fn).loss
        torch.manual_seed(turn)
        near([loss], [plain.step(x, target, loss_fn, context)])
        near([p.grad for p in model.parameters()], [p.grad for p in plain.model.parameters()], share)
        optimizer.step()
        others.step()
    near(*[[parameter.detach() for parameter in each.parameters()] for each in (model, plain.model)], share)


FEW = ["GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration"]


@pytest.mark.parametrize("family", either(FEW, list(FAMILIES)))
def test_second_derivatives_are_those_of_the_plain_model(family):
    """Of the loss of one mini-batch in chunks, with attention that has them."""
    model, inputs = of_family(family, attn_implementation="eager")
    model.eval()
    x = inputs(5)
    layers = to_sequential(model, x, output=OUTPUTS.get(family))
    pipe, _ = piped(layers, [2, LAYERS.get(family, 5) - 2], checkpoint="always")
    first = next(iter(pipe(x)))
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    near(*[second_order(lambda: call(x)[first], params) for call in (pipe, lambda x: model(**x))])
