"""Law: a table in a module that grows with the longest text so far, and a number that says how long it is, agree.

As rotary embeddings are written: in a forward, `if length > self.length`, they make a longer table, in a buffer or in
an attribute. Whatever an engine puts back (after a probe, after a failed call) it puts back both.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partition import to_sequential
from pipeline import Pipe
from pipeline.curvature import Hessian

WAYS = ("registered", "assigned", "attribute")  # how the table is kept
CHECKPOINTS = ("never", "always")
FIRST, WIDE, WORDS = 4, 6, 7  # rows of the table at first


class Positions(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.length = way, 0
        if way == "assigned":
            self.register_buffer("table", torch.zeros(0, WIDE, dtype=torch.float64), persistent=False)
        self.grow(FIRST)

    def grow(self, length: int) -> None:
        self.length = length
        table = torch.outer(torch.arange(1, length + 1, dtype=torch.float64), torch.arange(WIDE, dtype=torch.float64))
        if self.way == "registered":
            self.register_buffer("table", table.sin(), persistent=False)
        else:
            self.table = table.sin()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.length:
            self.grow(x.shape[1])
        return self.table[: x.shape[1]]


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.positions, self.linear = Positions(way), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x * self.positions(x)).tanh()


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDE)
        self.blocks = nn.ModuleList(Block(way) for _ in range(4))
        self.head = nn.Linear(WIDE, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def layers_of(model: Model, is_cut: bool) -> nn.Sequential:
    return to_sequential(model, text(FIRST)[0]) if is_cut else nn.Sequential(model.embed, *model.blocks, model.head)


def text(length: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(4 * length).view(4, length) * 5
    return ids % WORDS, (ids + 3) % WORDS


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def errors(pipe: Pipe, reference: nn.Module, lengths: tuple[int, ...]) -> Iterator[float]:
    """How far loss and gradients are from the plain model's, for texts of some lengths."""
    for length in lengths:
        ids, target = text(length)
        pipe.zero_grad()
        reference.zero_grad()
        step = pipe.step(ids, target, loss_fn=loss_of)
        loss = loss_of(reference(ids), target)
        loss.backward()
        yield abs(float(step.loss.detach()) - float(loss.detach()))
        for ours, theirs in zip(pipe.parameters(), reference.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            yield float((ours.grad - theirs.grad).abs().max())


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [FIRST - 1, FIRST + 5])
@pytest.mark.probes
def test_texts_of_any_length_are_those_of_the_plain_model(first, way, checkpoint, is_cut):
    torch.manual_seed(0)
    model = Model(way).double()
    reference = copy.deepcopy(model)
    pipe = Pipe(layers_of(model, is_cut), [3, 3], 2, checkpoint=checkpoint)
    assert max(errors(pipe, reference, (first, 6, 12, 5, 20, 7))) < 1e-12


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("way", WAYS)
def test_after_a_call_that_has_failed_too(way, checkpoint):
    """The table is again as short as its number says."""
    torch.manual_seed(0)
    model = Model(way).double()
    reference = copy.deepcopy(model)
    pipe = Pipe(layers_of(model, False), [3, 3], 2, checkpoint=checkpoint)

    def burnt(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("burnt")

    for before in range(3):  # of validating calls and others
        ids, target = text(FIRST - 1)
        for _ in range(before):
            pipe.step(ids, target, loss_fn=loss_of)
        with pytest.raises(ValueError, match="burnt"):
            pipe.step(*text(12 + before), loss_fn=burnt)
        assert max(errors(pipe, reference, (9, 5))) < 1e-12


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [FIRST - 1, FIRST + 5])
def test_a_hessian_is_that_of_the_plain_model_and_leaves_the_table(length, way):
    torch.manual_seed(0)
    model = Model(way).double()
    reference = copy.deepcopy(model)
    pipe = Pipe(layers_of(model, False), [3, 3], 2, checkpoint="always")
    ids, target = text(length)
    v = {name: torch.randn_like(parameter) for name, parameter in pipe.named_parameters()}
    product = Hessian(pipe, (ids, target), loss_of) @ v
    parameters = list(reference.parameters())
    gradients = torch.autograd.grad(loss_of(reference(ids), target), parameters, create_graph=True)
    slope = torch.stack([(gradient * part).sum() for gradient, part in zip(gradients, v.values())]).sum()
    expected = torch.autograd.grad(slope, parameters)
    assert max(float((product[name] - part).abs().max()) for name, part in zip(v, expected)) < 1e-12
    assert all(block.positions.length == len(block.positions.table) == FIRST for block in model.blocks)
