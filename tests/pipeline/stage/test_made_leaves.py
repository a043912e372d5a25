"""Law: a leaf that a forward makes and something keeps has the plain module's gradient, or the call is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pipeline import CheckpointError, Pipe


class BuildsItself(nn.Module):
    """A layer that makes a leaf when it is first called, and keeps it as a parameter, in a list or as a tensor."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept, self.made = kept, None
        self.outer = nn.Linear(4, 4)

    def forward(self, x):
        if self.made is None:
            leaf = torch.full((4,), 2.0, dtype=x.dtype)
            self.made = nn.Parameter(leaf) if self.kept == "parameter" else leaf.requires_grad_()
            self.made = [self.made] if self.kept == "list" else self.made
        return self.outer(x).tanh() + x * (self.made[0] if self.kept == "list" else self.made)


class Energy(nn.Module):
    """A layer that differentiates by a leaf of its own, which nothing keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(4, 4)

    def forward(self, x):
        with torch.enable_grad():
            place = self.outer(x).detach().requires_grad_()
            (force,) = torch.autograd.grad((place**3).sum(), place, create_graph=True)
        return x.sin() + force + self.outer(x)


def leaves(model):
    made = [layer.made for layer in model.modules() if isinstance(layer, BuildsItself) and layer.made is not None]
    others = [leaf for each in made for leaf in (each if isinstance(each, list) else [each])]
    return list(dict.fromkeys([*model.parameters(), *others]))


def train(how, module, model, x, y):
    """A backward of first or of second order."""
    if how == "step":
        return module.step(x, y, loss_fn=nn.functional.mse_loss)
    loss = nn.functional.mse_loss(module(x), y)
    if how == "forward":
        return loss.backward()
    grads = torch.autograd.grad(loss, leaves(model), create_graph=True, allow_unused=True)
    sum(grad.square().sum() for grad in grads if grad is not None).backward()


def twins(layer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), layer(), layer(), nn.Linear(4, 4)).double()
    return model, copy.deepcopy(model), *torch.rand(2, 6, 4, dtype=torch.float64)


def assert_same_grads(model, plain):
    for one, other in zip(leaves(model), leaves(plain), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-14)


ENTRIES = ("step", "forward", "create_graph")
CHECKPOINTS = ("never", "except_last", "always")


@pytest.mark.parametrize("how", ENTRIES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("kept", ["parameter", "list", "tensor"])
def test_what_a_forward_makes_and_keeps_has_its_gradient_or_is_refused(kept, checkpoint, how):
    model, plain, x, y = twins(lambda: BuildsItself(kept))
    pipe = Pipe(model, [2, 2], chunks=3, checkpoint=checkpoint)
    train("forward" if how == "step" else how, plain, plain, x, y)
    if checkpoint == "never" and how != "create_graph":
        train(how, pipe, model, x, y)
    else:
        words = r"chunk \d, made a tensor that needs a gradient \(shape \[4\]\) anew.*with torch.no_grad\(\): model"
        with pytest.raises(CheckpointError, match=words):
            train(how, pipe, model, x, y)
        for leaf in leaves(model):
            leaf.grad = None
        with torch.no_grad():
            pipe.to_sequential()(x)
        train(how, pipe, model, x, y)
    assert_same_grads(model, plain)


@pytest.mark.parametrize("how", ENTRIES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_what_nothing_keeps_is_the_forwards_own_affair(checkpoint, how):
    model, plain, x, y = twins(Energy)
    train(how, Pipe(model, [2, 2], chunks=3, checkpoint=checkpoint), model, x, y)
    train("forward" if how == "step" else how, plain, plain, x, y)
    assert_same_grads(model, plain)


@pytest.mark.parametrize("how", ENTRIES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("balance", [[1, 2], [2, 1]])
def test_a_leaf_that_a_stage_returns_is_the_forwards_own_affair(balance, checkpoint, how):
    """`enable_input_require_grads` of transformers and peft sets it behind a frozen embedding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4).requires_grad_(False), nn.Linear(4, 4), nn.Tanh()).double()
    model[0].register_forward_hook(lambda layer, args, out: out.requires_grad_())
    plain, x, y = copy.deepcopy(model), torch.randint(7, (6,)), torch.rand(6, 4, dtype=torch.float64)
    train(how, Pipe(model, balance, chunks=3, checkpoint=checkpoint), model[1:], x, y)
    train("forward" if how == "step" else how, plain, plain[1:], x, y)
    assert model[0].weight.grad is None
    assert_same_grads(model[1:], plain[1:])
