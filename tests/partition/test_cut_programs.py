"""Law: whatever a model does between its modules, its parts compute what it computes.

It is refused where what is drawn between blocks is used in several parts, or what a module computes there that is
called several times. A model is a list of instructions: blocks of several kinds, values kept for later, what is
computed between blocks, what Python is told.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from partition import PartitionError, to_sequential
from pipeline import Pipe

WIDTH = 3


class Pair(nn.Linear):
    """A block that returns two values."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x).tanh(), x.square()


class Given(nn.Module):
    """A block that is called with its hidden state and another value, of a list or not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor | list[Tensor]) -> Tensor:
        return self.linear(x).tanh() + (other.pop() if isinstance(other, list) else other)


class Noisy(nn.Linear):
    """A block that draws in eval mode, too, and returns what it has drawn."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.rand_like(x)
        return super().forward(x).tanh() * noise, noise


BLOCKS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH), "norm": lambda: nn.BatchNorm1d(WIDTH),
    "pair": lambda: Pair(WIDTH, WIDTH), "noisy": lambda: Noisy(WIDTH, WIDTH),
    "given": Given, "given kept": Given, "given a list": Given, "dropout": lambda: nn.Dropout(0.4),
}  # fmt: skip
BETWEEN = [
    "half", "drop", "drop always", "noise", "keep", "add kept", "add first", "add condition", "add aside", "shared",
    "fill where kept", "tell", "do as told",
]  # fmt: skip


class Program(nn.Module):
    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps = steps
        self.first, self.time, self.shared = nn.Linear(2, WIDTH), nn.Linear(2, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(BLOCKS[step]() for step in steps if step in BLOCKS)

    def forward(self, x: Tensor) -> Tensor:
        condition, first = self.time(x.flip(-1)), self.first(x)
        hidden, kept, aside, blocks = first, [first], torch.zeros(()).to(first), iter(self.blocks)
        told = False
        for step in self.steps:
            if step in BLOCKS:
                hidden = self.step(next(blocks), step, hidden, condition, kept)
                if isinstance(hidden, tuple):
                    hidden, aside = hidden
            elif step == "keep":
                kept.append(hidden)
            elif step == "tell":
                told = bool((hidden > 1).any())
            elif step == "do as told":
                hidden = -hidden if told else hidden
            else:
                hidden = self.between(step, hidden, condition, first, kept, aside)
        return hidden

    def step(self, block: nn.Module, step: str, hidden: Tensor, condition: Tensor, kept: list[Tensor]) -> object:
        others = {"given": condition, "given kept": kept[-1], "given a list": [condition, kept[-1]]}
        return block(hidden, others[step]) if step in others else block(hidden)

    def between(
        self, step: str, hidden: Tensor, condition: Tensor, first: Tensor, kept: list[Tensor], aside: Tensor
    ) -> Tensor:
        if step.startswith("drop"):
            return F.dropout(hidden, 0.3, self.training or step == "drop always")
        if step == "noise":
            return hidden + torch.randn_like(hidden)
        if step == "fill where kept":
            return hidden.masked_fill(kept[-1] > 1, 0.5)
        if step == "add kept":
            return hidden + (kept.pop() if len(kept) > 1 else kept[0])
        others = {"half": -hidden / 2, "add first": first, "add condition": condition, "add aside": aside}
        return hidden + others[step] if step in others else self.shared(hidden)


def numbers(model: nn.Module, compute: object, x: Tensor) -> list[Tensor]:
    """What comes out under one seed: output, gradients and buffers."""
    model.zero_grad()
    torch.manual_seed(7)
    out = compute(x)  # type: ignore[operator]
    out.square().sum().backward()
    return [out, *[each.grad if each.grad is not None else torch.zeros(()) for each in model.parameters()],
            *[buffer.clone() for buffer in model.buffers()]]  # fmt: skip


@example(["tell", "do as told", "given kept", "given", "shared", "pair", "do as told"], 0.1)
@example(["add condition", "keep", "pair", "given", "add kept", "add first", "add condition", "norm", "norm"], 0.1)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([*BLOCKS, *BETWEEN]), min_size=2, max_size=9), st.sampled_from([0.1, 1.0]))
def test_the_parts_of_any_program_compute_what_it_computes(steps: list[str], scale: float) -> None:
    """Nothing is above 1 on a small sample: of a mask, or of a branch, it shows nothing."""
    torch.manual_seed(0)
    model = Program(steps).double()
    try:
        layers = to_sequential(model, torch.randn(4, 2).double() * scale)
    except PartitionError as error:
        is_drawn = "drawn at random" in str(error) and {"drop", "drop always", "noise", "dropout"} & set(steps)
        assert is_drawn or "what 'shared' computes" in str(error) and steps.count("shared") > 1, error
        return
    start = copy.deepcopy(model.state_dict())
    for training in (False, True):
        model.train(training), layers.train(training)
        for rows in (3, 6):
            x, found = 2 * torch.randn(rows, 2).double(), []
            for compute in (model, layers):
                model.load_state_dict(start)
                found.append(numbers(model, compute, x))
            assert torch.equal(found[0][0], found[1][0])
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


ALWAYS_CUT = [["linear", *steps, "linear", "given", "norm"] for steps in (
    ["half"], ["add first"], ["add condition"], ["keep", "linear", "add kept"], ["pair", "linear", "add aside"],
    ["drop"], ["shared"], ["given a list"], ["given kept"], ["keep", "half", "linear", "given kept"],
    ["given kept", "norm", "pair", "pair", "given kept", "drop", "pair"],
    ["keep", "linear", "fill where kept"],
)]  # fmt: skip


@pytest.mark.parametrize("steps", ALWAYS_CUT, ids=" ".join)
def test_programs_that_are_cut_train_in_a_pipe_as_in_a_loop(steps: list[str]) -> None:
    torch.manual_seed(0)
    model, x, target = Program(steps).double().eval(), torch.randn(5, 2).double(), torch.randn(5, WIDTH).double()
    pipe = Pipe(model, sample=x, chunks=3, devices=["cpu"] * 3, checkpoint="always")
    for _ in range(2):
        model.zero_grad()
        step = pipe.step(x, target, loss_fn=F.mse_loss)
        grads = [each.grad for each in model.parameters()]
        model.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        torch.testing.assert_close(step.loss, loss.detach(), rtol=1e-12, atol=0)
        for one, each in zip(grads, model.parameters(), strict=True):
            assert (one is None) == (each.grad is None)
            if one is not None:
                torch.testing.assert_close(one, each.grad, rtol=1e-11, atol=1e-14)
