"""Law: a forward that freezes, unfreezes or hooks a parameter is refused, where only an alias would get that."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pipeline import Pipe


class Sets(nn.Module):
    """A layer whose forward sets something of its weight."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.handle = what, None
        self.layer = nn.Linear(4, 4)
        self.layer.weight.requires_grad_(what not in ("unfrozen", "frozen again"))

    def forward(self, x):
        weight = self.layer.weight
        if self.what in ("frozen", "frozen again"):
            weight.requires_grad_(False)
        elif self.what in ("unfrozen", "unfrozen again"):
            weight.requires_grad_(True)
        elif self.handle is None:
            register = weight.register_hook if self.what == "hook" else weight.register_post_accumulate_grad_hook
            self.handle = register(lambda _: None)
        return self.layer(x).sin()


def piped(what, chunks, checkpoint):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Sets(what), nn.Linear(4, 4)).double()
    return model, copy.deepcopy(model), Pipe(model, [2, 1], chunks=chunks, checkpoint=checkpoint)


def train(how, pipe, x, y):
    if how == "step":
        pipe.step(x, y, loss_fn=nn.functional.mse_loss)
    else:
        nn.functional.mse_loss(pipe(x), y).backward()


def flags(model):
    hooks = [(parameter._backward_hooks, parameter._post_accumulate_grad_hooks) for parameter in model.parameters()]
    return [parameter.requires_grad for parameter in model.parameters()], [any(map(bool, pair)) for pair in hooks]


@pytest.mark.parametrize("how", ["step", "forward"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("what, words", [
    ("frozen", "set requires_grad to False of parameter '1.layer.weight'.*Do that once, before the call"),
    ("unfrozen", "set requires_grad to True of parameter '1.layer.weight'.*Do that once, before the call"),
    ("hook", "registered a hook on parameter '1.layer.weight'.*Do that once, before the call"),
    ("post hook", "registered a hook on parameter '1.layer.weight'.*Do that once, before the call"),
])  # fmt: skip
def test_what_only_an_alias_would_get_is_refused_and_nothing_is_left(what, words, chunks, checkpoint, how):
    model, plain, pipe = piped(what, chunks, checkpoint)
    x, y = torch.rand(2, 4, 4, dtype=torch.float64)
    found = flags(model)
    with pytest.raises(RuntimeError, match=words):
        train(how, pipe, x, y)
    assert flags(model) == found and all(parameter.grad is None for parameter in model.parameters())
    model, _, pipe = piped(what, chunks, checkpoint)
    with torch.no_grad():
        pipe.to_sequential()(x), plain(x)
    assert flags(model) == flags(plain) != found
    train(how, pipe, x, y)
    nn.functional.mse_loss(plain(x), y).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("what", ["frozen again", "unfrozen again"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_what_is_set_to_what_it_is_changes_nothing(what, chunks):
    model, _, pipe = piped(what, chunks, "always")
    x, y = torch.rand(2, 4, 4, dtype=torch.float64)
    found = flags(model)
    for _ in range(2):
        pipe.evaluate(x, y, loss_fn=nn.functional.mse_loss)
        train("step", pipe, x, y)
    assert flags(model) == found and (model[1].layer.weight.grad is None) == (what == "frozen again")
