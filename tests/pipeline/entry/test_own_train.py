"""Modules whose `train` does more than set a flag: what they keep for eval mode is never that of other weights."""

import copy

import pytest
import torch
from torch import nn

from partition import to_sequential
from pipeline import Pipe
from pipeline.curvature import Hessian

X = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).view(6, 4).sin()


class Keeps(nn.Module):
    """Keeps in eval mode what it computes of its weight, until train mode: as LeViT its attention biases."""

    def __init__(self):
        super().__init__()
        self.weight, self.linear, self.kept = nn.Parameter(torch.rand(4)), nn.Linear(4, 4), {}

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self.kept = {}
        return self

    def forward(self, x):
        if self.training:
            return self.linear(x).tanh() + self.weight.sin()
        if "bias" not in self.kept:
            self.kept["bias"] = self.weight.sin()
        return self.linear(x).tanh() + self.kept["bias"]


class Merges(nn.Linear):
    """Adds a product of its factors to its weight for eval mode: as loralib's Linear."""

    def __init__(self):
        super().__init__(4, 4)
        self.first, self.second = nn.Parameter(torch.rand(2, 4)), nn.Parameter(torch.rand(4, 2))
        self.weight.requires_grad_(False)
        self.is_merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.is_merged:
            self.weight.data += (self.second @ self.first) * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x):
        out = nn.functional.linear(x, self.weight, self.bias)
        return out if self.is_merged else out + x @ self.first.T @ self.second.T


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(4, 4), nn.ModuleList(kind() for _ in range(3)), nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(output, target):
    return output.square().mean()


def piped(kind, is_cut):
    torch.manual_seed(2)
    model = Model(kind).double().train()
    plain = copy.deepcopy(model)
    if is_cut:
        return plain, Pipe(model, [2, 3], 2, sample=X)
    return plain, Pipe(nn.Sequential(model.first, *model.blocks, model.head), [2, 3], 2)


@pytest.mark.parametrize("kind", [Keeps, Merges])
@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("with_product", [True, False])
def test_what_is_evaluated_between_steps_is_what_the_plain_model_returns(kind, is_cut, with_product):
    plain, pipe = piped(kind, is_cut)
    optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], 0.3) for each in (plain, pipe)]
    for _ in range(3):
        plain.eval()
        with torch.no_grad():
            expected = loss_fn(plain(X), None)
        plain.train()
        found = pipe.evaluate(X, loss_fn=loss_fn)
        torch.testing.assert_close(found.loss, expected, check_dtype=False)
        assert all(module.training for module in pipe.modules())
        if with_product:
            hessian = Hessian(Pipe(pipe.to_sequential(), [5]), (X, X), loss_fn)
            hessian @ torch.ones(hessian.shape[0], dtype=torch.float64)
        optimizers[0].zero_grad()
        loss_fn(plain(X), None).backward()
        optimizers[0].step()
        pipe.step(X, loss_fn=loss_fn, optimizer=optimizers[1])


@pytest.mark.parametrize("training", [True, False])
def test_a_product_finds_nothing_that_one_before_it_kept_nor_a_chunk(training):
    _, pipe = piped(Keeps, False)
    pipe.train(training)
    hessian = Hessian(pipe, (X, X), loss_fn)
    vector = torch.linspace(-1.0, 1.0, hessian.shape[0], dtype=torch.float64)
    whole = Hessian(Pipe(pipe.to_sequential(), [5]), (X, X), loss_fn)
    fresh = Hessian(Pipe(copy.deepcopy(pipe.to_sequential()), [5]), (X, X), loss_fn, training=True)
    expected = fresh @ vector  # in train mode nothing is kept
    for _ in range(2):
        torch.testing.assert_close(whole @ vector, expected)
        torch.testing.assert_close(hessian @ vector, expected)


@pytest.mark.parametrize("kind", [Keeps, Merges])
def test_a_model_that_was_cut_in_train_mode_keeps_nothing_for_eval_mode(kind):
    torch.manual_seed(2)
    model = Model(kind).double().train()
    plain = copy.deepcopy(model)
    to_sequential(model, X)
    for each in (model, plain):
        with torch.no_grad():
            for parameter in each.blocks[0].parameters():
                parameter.mul_(1.5)
    torch.testing.assert_close(model(X), plain(X))
    torch.testing.assert_close(model.eval()(X), plain.eval()(X))


class Freezes(nn.Module):
    """Some of it stays in eval mode: its normalisation, and its first block."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()) for _ in range(3))

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        self.blocks[0].eval()
        self.blocks[1][2].train()
        return self

    def forward(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by_name(layers):
    return {name: module.training for layer in layers for name, module in layer.named_modules()}


def test_what_a_model_keeps_in_another_mode_its_pipe_does():
    torch.manual_seed(2)
    model = Freezes().double()
    assert model.train().norm.training is False
    for parameter in model.norm.parameters():
        nn.init.uniform_(parameter)
    model.norm.running_mean.uniform_()
    plain = copy.deepcopy(model)
    layers = to_sequential(model, X)
    pipe = Pipe(model, [2, 3], 2, sample=X)
    for each in (layers, pipe, copy.deepcopy(pipe), copy.deepcopy(layers), pipe.to_sequential()):
        for training in (True, False, True):
            each.train(training), plain.train(training)
            expected = {name: module.training for name, module in plain.named_modules()}
            found = by_name(each.children())
            assert found == {name: expected[name] for name in found} and set(expected) == set(found)
    pipe.evaluate(X, loss_fn=loss_fn)
    assert by_name(pipe.children()) == by_name([plain])
    states = []
    for each in (pipe, plain):
        torch.manual_seed(3)
        each.train()
        for _ in range(2):
            each.zero_grad()
            loss_fn(each(X), None)
        states.append({name: value.clone() for name, value in each.state_dict().items()})
    torch.testing.assert_close(states[0], states[1])
    del model
    assert by_name(pipe.train().children()) == by_name([plain])
