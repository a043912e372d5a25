"""Law: a buffer that a forward fills or registers is what it is in a loop over the chunks, recomputed or not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pipeline import Pipe


class Fills(nn.Module):
    """A mean that begins with the first rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", None)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        mean = x.detach().mean(0)
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        self.count += 1
        return self.layer(x) - self.mean * self.count


class Registers(nn.Module):
    """The same, whose buffers its first forward registers: neither is there before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        mean = x.detach().mean(0)
        if not hasattr(self, "mean"):
            self.register_buffer("mean", mean)
            self.register_buffer("count", torch.zeros((), dtype=torch.float64), persistent=False)
        self.mean = 0.9 * self.mean + 0.1 * mean
        self.count = self.count + 1
        return self.layer(x) - self.mean * self.count


def first_order(module, model, x, y):
    nn.functional.mse_loss(module(x), y).backward()


def in_a_step(module, model, x, y):
    if isinstance(module, Pipe):
        module.step(x, y, loss_fn=nn.functional.mse_loss)
    else:
        first_order(module, model, x, y)


def second_order(module, model, x, y):
    grads = torch.autograd.grad(nn.functional.mse_loss(module(x), y), list(model.parameters()), create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()


@pytest.mark.parametrize("train", [first_order, in_a_step, second_order])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("layer", [Fills, Registers])
def test_a_buffer_that_a_forward_fills_is_that_of_a_loop_over_the_chunks(layer, schedule, checkpoint, train):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), layer(), nn.Linear(4, 4), layer()).double()
    plain = copy.deepcopy(model)
    pipe = Pipe(model, [2, 2], chunks=3, checkpoint=checkpoint, schedule=schedule)
    x, y = torch.rand(2, 6, 4, dtype=torch.float64)
    for _ in range(3):
        train(pipe, model, x, y)
        train(lambda x: torch.cat([plain(chunk) for chunk in x.chunk(3)]), plain, x, y)
        assert list(model.state_dict()) == list(plain.state_dict())
        for (_, value), (_, expected) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-14)


def test_a_failure_leaves_it_empty():
    model = nn.Sequential(Fills(), nn.Linear(4, 4)).double()
    pipe, x = Pipe(model, [1, 1], chunks=2, checkpoint="always"), torch.rand(4, 4, dtype=torch.float64)
    with pytest.raises(ZeroDivisionError):
        pipe.step(x, loss_fn=lambda *_: 1 / 0)
    assert model[0].mean is None and model[0].count == 0
    pipe = Pipe(nn.Sequential(Registers(), nn.Linear(4, 4)).double(), [1, 1], chunks=2, checkpoint="always")
    with pytest.raises(ZeroDivisionError):
        pipe.step(x, loss_fn=lambda *_: 1 / 0)
    assert not list(pipe.buffers())
