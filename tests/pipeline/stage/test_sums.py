"""A stage's sums of gradients have memory of their own, whatever else autograd gave that memory to.

Autograd takes the first gradient of a leaf as it is, and adds the others to it in place: two gradients in one memory
become each other's sums (https://github.com/pytorch/pytorch/issues/34082). The reference is the plain module on the
whole mini-batch, where nothing is added.
"""

import copy

import pytest
import torch
from law_models import Apply, normal
from torch import nn

from pipeline import EagerUpdate, Pipe
from pipeline.data.pytrees import share_memory


class With(nn.Module):
    """A layer that computes with parameters of its own."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.own = nn.ParameterList(normal(*shape, seed=number) for number, shape in enumerate(shapes))
        self.function = function

    def forward(self, x):
        return self.function(torch.tanh(x), *self.own)


class Both(torch.autograd.Function):
    """Their sum; its backward returns the same memory twice."""

    @staticmethod
    def forward(ctx, one, other):
        return one + other

    @staticmethod
    def backward(ctx, grad):
        return grad.view(-1)[:], grad.view(-1)[:]


LAYERS = {
    "stacked": lambda: With(lambda x, u, w: x + torch.stack([u, w]).sum(0), (4,), (4,)),
    "three, one in part": lambda: With(
        lambda x, u, w, v: x + torch.stack([u, w, torch.cat([v.new_zeros(2), v])]).sum(0), (4,), (4,), (2,)
    ),
    "rows of one": lambda: With(lambda x, u: x + u.view(1, 4), (4,)),
    "rows of one, turned": lambda: With(lambda x, u: x + u.t(), (4, 1)),
    "rows of one, in parts": lambda: With(lambda x, u, w: x + torch.cat([u, w])[None], (1,), (3,)),
    "a Function's": lambda: With(lambda x, u, w: x + Both.apply(u, w), (4,), (4,)),
}


def model_of(name):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), LAYERS[name](), nn.Linear(4, 4), LAYERS[name](), nn.Linear(4, 4)).double()


def mean_square(out, target):
    return (out - target).square().mean()


def expected(model, x, target):
    twin = copy.deepcopy(model)
    mean_square(twin(x), target).backward()
    return [param.grad for param in twin.parameters()]


def assert_right(model, wanted):
    for (name, param), grad in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: name + text)
        assert share_memory([param.grad]) == [False], name


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_in_one_memory_are_summed_apart(name, checkpoint, schedule, workers):
    model = model_of(name)
    x, target = normal(4, 4), normal(4, 4, seed=2)
    wanted = expected(model, x, target)
    balance = [1, 1, 2, 1] if schedule == "zb-v" else [2, 2, 1]
    for chunks in (1, 4):
        pipe = Pipe(model, balance, chunks, checkpoint=checkpoint, schedule=schedule, workers=workers)
        pipe.zero_grad()
        mean_square(pipe(x), target).backward()
        assert_right(model, wanted)
        pipe.zero_grad()
        pipe.step(x, target, loss_fn=mean_square)
        assert_right(model, wanted)
        store = pipe.step(x, target, loss_fn=mean_square, grads="store").grads
        for (key, grad), other in zip(store.items(), wanted, strict=True):
            torch.testing.assert_close(grad.to(other.dtype), other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_eager_updates_of_gradients_in_one_memory_are_those_of_an_optimizer(name):
    model, x, target = model_of(name), normal(4, 4), normal(4, 4, seed=2)
    twin = copy.deepcopy(model)
    mean_square(twin(x), target).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    pipe = Pipe(model, [2, 2, 1], 4, schedule="1f1b")
    update = EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=0.1))
    pipe.step(x, target, loss_fn=mean_square, optimizer=update)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives_add_gradients_in_one_memory_apart(name, checkpoint):
    model = model_of(name)
    x, target = normal(4, 4), normal(4, 4, seed=2)
    params = list(model.parameters())

    def penalty(function):
        grads = torch.autograd.grad(mean_square(function(x), target), params, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), params)

    pipe = Pipe(model, [2, 2, 1], 4, checkpoint=checkpoint)
    for ours, theirs in zip(penalty(pipe), penalty(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_a_gradient_that_the_caller_or_a_hook_holds_is_not_added_to():
    kept = []

    def keeping(x):
        if x.requires_grad:
            x.register_hook(kept.append)
        return x

    model = nn.Sequential(nn.Linear(4, 4), Apply(lambda x: keeping(x * 2)), LAYERS["rows of one"]()).double()
    pipe = Pipe(model, [2, 1], 3)
    grad = normal(3, 4, seed=5)
    before = grad.clone()
    pipe(normal(3, 4)).backward(grad)
    assert torch.equal(grad, before)
    assert len(kept) == 3
    torch.testing.assert_close(model[2].own[0].grad, before.sum(0))
    again = [each.clone() for each in kept]
    pipe(normal(3, 4)).backward(grad)
    assert all(map(torch.equal, kept, again))
