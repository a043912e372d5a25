"""Layers that may do something else in each call: a Pipe must not believe too long what it has learned of earlier ones.

    layer = Shifting(0, shared, captured)      its parameters, buffers, attributes, always the same numbers
    layer.ways = ("write_input", "dropout")    from now on its forward does the one, then the other
"""

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from law_models import normal
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 4
Way = Callable[["Shifting", Tensor], Any]
WAYS: dict[str, Way] = {}


class Shifting(nn.Module):
    """A layer of what the ways in `ways` need.

    Args:
        number: which: its numbers are others than those of another.
        shared: a layer that all have.
        captured: a leaf that no module knows.
    """

    def __init__(self, number: int, shared: nn.Module, captured: Tensor) -> None:
        super().__init__()
        self.w, self.u, self.b = (
            nn.Parameter(normal(*shape, seed=10 * number + place) / 2)
            for place, shape in enumerate([(WIDTH, WIDTH), (WIDTH,), (WIDTH,)])
        )
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            self.inner.weight.copy_(normal(WIDTH, WIDTH, seed=10 * number + 5) / 2)
            self.inner.bias.copy_(normal(WIDTH, seed=10 * number + 6) / 2)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.shared = shared
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.generator = torch.Generator().manual_seed(number)
        self.calls = 0
        self.last: Tensor | None = None
        self.held = [captured, self.w]  # where no swap of parameters can reach
        self.ways: tuple[str, ...] = ("linear",)

    def forward(self, value: Any) -> Any:
        x = value[0] + 0.5 * value[1] if isinstance(value, tuple) else value
        for way in self.ways:
            x = x[0] + 0.5 * x[1] if isinstance(x, tuple) else x
            x = WAYS[way](self, x)
        return x


def way(function: Way) -> Way:
    """A way to compute, by its name."""
    WAYS[function.__name__] = function
    return function


@way
def linear(layer: Shifting, x: Tensor) -> Tensor:
    return torch.tanh(x @ layer.w.t() + layer.b)


@way
def identity(layer: Shifting, x: Tensor) -> Tensor:
    return x


@way
def pair(layer: Shifting, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x * layer.u


@way
def same_twice(layer: Shifting, x: Tensor) -> tuple[Tensor, Tensor]:
    out = x * layer.u
    return out, out


# ---------------------------------------------------------------------------------------------------------- memory


@way
def write_input(layer: Shifting, x: Tensor) -> Tensor:
    return x.mul_(1.5)


@way
def write_input_and_return_another(layer: Shifting, x: Tensor) -> Tensor:
    x.add_(1.0)
    return x * layer.u


@way
def write_own(layer: Shifting, x: Tensor) -> Tensor:
    return (x * 2).relu_()


@way
def view(layer: Shifting, x: Tensor) -> Tensor:
    return x.view(-1).view(len(x), WIDTH)


@way
def with_gaps(layer: Shifting, x: Tensor) -> Tensor:
    return torch.cat([x, x], 1)[:, 1 : WIDTH + 1]


@way
def turned(layer: Shifting, x: Tensor) -> Tensor:
    return x.t().contiguous().t()


@way
def one_memory(layer: Shifting, x: Tensor) -> Tensor:
    return x + torch.stack([layer.u, layer.b]).sum(0)


@way
def row_of_a_parameter(layer: Shifting, x: Tensor) -> Tensor:
    return x + layer.u.view(1, WIDTH)


@way
def view_of_a_parameter(layer: Shifting, x: Tensor) -> Tensor:
    return x @ layer.w.view(-1).view(WIDTH, WIDTH)


# ------------------------------------------------------------------------------------------------- random numbers


@way
def dropout(layer: Shifting, x: Tensor) -> Tensor:
    return F.dropout(x, 0.3, layer.training)


@way
def noise(layer: Shifting, x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, dtype=x.dtype)


@way
def pythons_number(layer: Shifting, x: Tensor) -> Tensor:
    return x * random.random()


@way
def numpys_number(layer: Shifting, x: Tensor) -> Tensor:
    return x * float(numpy.random.rand())


@way
def forked(layer: Shifting, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=()):
        return x * torch.rand(x.shape, dtype=x.dtype)


@way
def own_generator(layer: Shifting, x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, generator=layer.generator, dtype=x.dtype)


# ---------------------------------------------------------------------------------------------------------- state


@way
def batch_norm(layer: Shifting, x: Tensor) -> Any:
    return layer.norm(x) if len(x) > 1 or not layer.training else x


@way
def count_in_a_buffer(layer: Shifting, x: Tensor) -> Tensor:
    layer.count += 1
    return x * (1 + 0.01 * layer.count)


@way
def running_mean(layer: Shifting, x: Tensor) -> Tensor:
    if layer.training:
        with torch.no_grad():
            layer.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - layer.mean


@way
def running_mean_unseen(layer: Shifting, x: Tensor) -> Tensor:
    layer.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - layer.mean


@way
def new_buffer(layer: Shifting, x: Tensor) -> Tensor:
    layer.mean = 0.9 * layer.mean + 0.1 * x.detach().mean(0)
    return x + layer.mean


@way
def count_in_an_attribute(layer: Shifting, x: Tensor) -> Tensor:
    layer.calls += 1
    return x * (1 + 0.01 * layer.calls)


@way
def keep_a_mean(layer: Shifting, x: Tensor) -> Tensor:
    out = x if layer.last is None else x + 0.1 * layer.last
    layer.last = x.detach().mean(0)
    return out


# ------------------------------------------------------------------------------------------------------- gradients


@way
def captured(layer: Shifting, x: Tensor) -> Tensor:
    return x * layer.held[0]


@way
def captured_parameter(layer: Shifting, x: Tensor) -> Tensor:
    return x @ layer.held[1]


@way
def tied(layer: Shifting, x: Tensor) -> Any:
    return layer.shared(x)


@way
def detached_input(layer: Shifting, x: Tensor) -> Tensor:
    return x.detach() * layer.u


@way
def no_gradient(layer: Shifting, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x @ layer.w


@way
def part_without_gradient(layer: Shifting, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = (x @ layer.w).sigmoid()
    return x * gate


@way
def routed(layer: Shifting, x: Tensor) -> Tensor:
    return torch.where(x[:, :1] > 0, x @ layer.w, x * layer.u)


@way
def checkpointed(layer: Shifting, x: Tensor) -> Any:
    return checkpoint(lambda value: F.dropout(layer.inner(value), 0.2, layer.training), x, use_reentrant=False)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * ctx.factor * x * grad, None


@way
def function(layer: Shifting, x: Tensor) -> Any:
    return Square.apply(x, 0.5 + 0.01 * layer.calls)


@way
def hooked(layer: Shifting, x: Tensor) -> Tensor:
    inner = x * 1.0
    if inner.requires_grad:
        inner.register_hook(lambda grad: grad * 2)
    return inner * layer.u


@way
def energy(layer: Shifting, x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x * 1.0 if x.requires_grad else x.detach().requires_grad_()
        (grad,) = torch.autograd.grad((leaf @ layer.w).sin().sum(), leaf, create_graph=True)
    return x + grad


@way
def own_backward(layer: Shifting, x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = torch.ones(WIDTH, requires_grad=True, dtype=x.dtype)
        leaf.square().sum().backward()
    assert leaf.grad is not None
    return x * leaf.grad


@way
def functional(layer: Shifting, x: Tensor) -> Any:
    return torch.func.functional_call(layer.inner, {"weight": layer.w, "bias": layer.b}, (x,))


@way
def complex_numbers(layer: Shifting, x: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.reshape(len(x), 2, 2).contiguous())
    return torch.view_as_real(numbers.square()).reshape(len(x), WIDTH)
