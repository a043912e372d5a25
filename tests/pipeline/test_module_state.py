"""What modules hold beside buffers, and what a forward does to it: right in every mode, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import EagerUpdate, Pipe

DOUBLE = torch.float64
POLICIES = ("never", "except_last", "always")
DOORS = ("forward", "step", "eager", "create_graph")


def linear() -> nn.Linear:
    return nn.Linear(3, 3, dtype=DOUBLE)


def rows(count: int = 6) -> Tensor:
    return torch.linspace(-1, 1, 3 * count, dtype=DOUBLE).reshape(count, 3)


def loss_of(out: Tensor, target: object = None) -> Tensor:
    return out.square().mean()


def run(pipe: Pipe, x: Tensor, door: str) -> None:
    """One pass through a door. The gradients are in `.grad`, or with "eager" in the parameters."""
    if door == "step":
        pipe.step(x, loss_fn=loss_of)
    elif door == "eager":
        pipe.step(x, loss_fn=loss_of, optimizer=EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=0.1)))
    elif door == "create_graph":
        loss = loss_of(pipe(x))
        for param, grad in zip(pipe.parameters(), torch.autograd.grad(loss, [*pipe.parameters()], create_graph=True)):
            param.grad = grad.detach()
    else:
        loss_of(pipe(x)).backward()


# ----------------------------------------------------------------------------------------- parameters within a forward


class Within(nn.Module):
    """Does something to the parameters of a layer of its own in each forward, beginning with `start`."""

    def __init__(self, does: Callable[[nn.Linear], Any], start: int) -> None:
        super().__init__()
        self.linear = linear()
        self.does = does
        self.left = start

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            self.does(self.linear)
        return functional.linear(x, self.linear.weight, getattr(self.linear, "bias", None))


def replaces(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def deletes(layer: nn.Linear) -> None:
    del layer.bias


def sets_to_none(layer: nn.Linear) -> None:
    layer.bias = None


@pytest.mark.parametrize("does, words", [
    (replaces, r"'1.linear.weight' was replaced"), (deletes, r"'1.linear.bias' was deleted"),
    (sets_to_none, r"'1.linear.bias' was replaced"),
])  # fmt: skip
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("start", [0, 1, 13])
def test_a_forward_that_takes_a_parameter_out_of_its_module_is_refused_and_leaves_what_was_there(
    does: Callable[[nn.Linear], None], words: str, door: str, start: int
) -> None:
    pipe = Pipe(nn.Sequential(linear(), Within(does, start)), [1, 1], 3, checkpoint="never")
    params = dict(pipe.named_parameters())
    with pytest.raises(RuntimeError, match=rf"parameter {words} by a forward of stage 1 \(layer 1\)"):
        for _ in range(5):
            run(pipe, rows(), door)
    assert all(pipe.get_parameter(name) is param for name, param in params.items())


def test_a_parameter_that_the_first_forward_makes_is_the_modules_as_ever() -> None:
    class Lazily(nn.Module):
        def __init__(self, *others: str) -> None:
            super().__init__()
            for name in others:
                self.register_parameter(name, nn.Parameter(torch.ones(3, dtype=DOUBLE)))

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(torch.full((3,), 2.0, dtype=DOUBLE))
            return x * self.scale

    for others in ((), ("shift",)):
        plain = nn.Sequential(linear(), Lazily(*others))
        ours = nn.Sequential(linear(), Lazily(*others))
        ours.load_state_dict(plain.state_dict())
        pipe = Pipe(ours, [1, 1], 3, checkpoint="never")
        for _ in range(3):
            loss_of(plain(rows())).backward()
            run(pipe, rows(), "step")
        scale, expected = pipe.get_parameter("1.scale").grad, plain.get_parameter("1.scale").grad
        assert scale is not None and expected is not None and torch.allclose(scale, expected, rtol=1e-14)
