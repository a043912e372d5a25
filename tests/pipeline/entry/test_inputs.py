"""The input of a call, from one value or from the arguments of a model's forward."""

import re
from collections import UserDict

import pytest
import torch
from torch import nn

from pipeline import NoChunk, Pipe


class Block(nn.Linear):
    fails = False

    def forward(self, x):
        if self.fails:
            raise ArithmeticError("burnt")
        return torch.tanh(super().forward(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList([Block(4, 4) for _ in range(3)])

    def forward(self, ids, scale=None):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.out(x) * (1.0 if scale is None else scale)


IDS, SCALE = torch.arange(12).view(6, 2) % 11, torch.rand(6, 1, 1)


@pytest.fixture
def plain():
    torch.manual_seed(0)
    return Model()


def test_a_model_that_was_cut_takes_its_own_arguments(plain):
    named = Pipe(plain, [2, 3], 2, sample={"ids": IDS, "scale": SCALE})
    batch, expected = {"scale": SCALE, "ids": IDS}, plain(IDS, SCALE)
    for out in (named(**batch), named(batch), named(UserDict(batch))):
        torch.testing.assert_close(out, expected)
    ordered = Pipe(plain, [2, 3], 2, sample=(IDS, SCALE))
    for out in (ordered(IDS, SCALE), ordered((IDS, SCALE))):
        torch.testing.assert_close(out, expected)
    one = Pipe(plain, [2, 3], 2, sample=IDS)
    torch.testing.assert_close(one(IDS), plain(IDS))
    alone = Pipe(plain, [2, 3], 2, sample=(IDS,))
    for out in (alone(IDS), alone((IDS,))):
        torch.testing.assert_close(out, plain(IDS))


class Renamed(Model):
    """As models of one input often call it."""

    def forward(self, input, scale=None):
        return super().forward(input, scale)


def test_an_argument_may_be_called_input():
    torch.manual_seed(0)
    plain = Renamed()
    pipe = Pipe(plain, [2, 3], 2, sample={"input": IDS})
    for out in (pipe(input=IDS), pipe({"input": IDS}), pipe(UserDict(input=IDS))):
        torch.testing.assert_close(out, plain(IDS))
    both = Pipe(plain, [2, 3], 2, sample={"input": IDS, "scale": SCALE})
    torch.testing.assert_close(both(input=IDS, scale=SCALE), plain(IDS, SCALE))
    layers, x = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)), SCALE[:, 0]
    torch.testing.assert_close(Pipe(layers, [1, 1], 2)(input=x), layers(x))


def test_a_sample_may_say_what_is_not_cut_as_calls_do(plain):
    batch = {"ids": IDS, "scale": NoChunk(SCALE[0, 0])}
    torch.testing.assert_close(Pipe(plain, [2, 3], 2, sample=batch)(**batch), plain(IDS, SCALE[0, 0]))
    pair = IDS, NoChunk(SCALE[0, 0])
    torch.testing.assert_close(Pipe(plain, [2, 3], 2, sample=pair)(*pair), plain(IDS, SCALE[0, 0]))


class Residual(nn.Sequential):
    """Sentence-transformers' models are like it: a Sequential, and a forward of its own."""

    def forward(self, x, scale=None):
        y = super().forward(x)
        return x + (y if scale is None else y * scale)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_sequential_with_a_forward_of_its_own_is_cut_by_a_sample(checkpoint):
    torch.manual_seed(0)
    plain = Residual(*[Block(4, 4) for _ in range(4)]).double()
    x, scale = torch.randn(6, 4, dtype=torch.float64), torch.rand(6, 1, dtype=torch.float64)
    pipe = Pipe(plain, [3, 3], 2, sample={"x": x, "scale": scale}, checkpoint=checkpoint)
    grads = torch.autograd.grad(pipe(x=x, scale=scale).square().sum(), list(pipe.parameters()))
    expected = torch.autograd.grad(plain(x, scale).square().sum(), list(plain.parameters()))
    torch.testing.assert_close(list(grads), list(expected), rtol=1e-12, atol=0)


def test_steps_and_evaluations_take_a_mapping(plain):
    pipe, target = Pipe(plain, [2, 3], 2, sample={"ids": IDS, "scale": SCALE}), torch.rand(6, 2, 2)
    batch, loss_fn = UserDict(ids=IDS, scale=SCALE), nn.MSELoss()
    expected = loss_fn(plain(IDS, SCALE), target)
    torch.testing.assert_close(pipe.step(batch, target, loss_fn=loss_fn).loss, expected.detach())
    torch.testing.assert_close(pipe.evaluate(batch, target, loss_fn=loss_fn).loss, expected.detach())


CALLS = {
    "two": (lambda pipe, x: pipe(x, x), r"called with 2 inputs, but .* pipe\(\(x, y\)\) hands it a tuple.*sample="),
    "named": (lambda pipe, x: pipe(x=x), r"called with x=, but .* pipe\(\{'x': \.\.\.\}\) hands it a dict.*sample="),
    "nothing": (lambda pipe, x: pipe(), r"is called with its input: pipe\(x\)"),
    "a mapping": (lambda pipe, x: pipe(UserDict(x=x)), r"holds a collections\.UserDict .*: make it a dict with dict\("),
}


@pytest.mark.parametrize("call", CALLS)
def test_other_pipes_say_how_to_call_them(call):
    call, words = CALLS[call]
    with pytest.raises(TypeError, match=f"(?s){words}"):
        call(Pipe(nn.Sequential(nn.Linear(4, 2)), [1]), torch.rand(2, 4))


def test_arguments_are_all_by_position_or_all_by_name(plain):
    pipe = Pipe(plain, [2, 3], 2, sample={"ids": IDS, "scale": SCALE})
    with pytest.raises(TypeError, match="1 inputs by position and with scale by name. Give all of them as the model's"):
        pipe(IDS, scale=SCALE)


@pytest.mark.parametrize("call", [lambda pipe: pipe(IDS), lambda pipe: pipe.step(IDS, loss_fn=lambda y, _: y.sum())])
def test_an_error_in_a_block_names_it_as_the_model_does(plain, call):
    pipe = Pipe(plain, [2, 3], 2, sample=IDS)
    plain.blocks[1].fails = True
    with pytest.raises(ArithmeticError) as caught:
        call(pipe)
    assert caught.value.__notes__ == ["layer 2 (blocks.1)", "stage 1 (layers 2..4), chunk 0, 1F0"]


def test_an_error_names_a_layer_by_its_number_and_type():
    pipe = Pipe(nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(5, 1))), [2])
    with pytest.raises(RuntimeError, match=re.escape("cannot be multiplied")) as caught:
        pipe(torch.rand(2, 4))
    assert caught.value.__notes__[0] == "layer 1 (Sequential)"


ZEROS = torch._efficientzerotensor  # as forward-mode AD makes them: they have no memory


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_zeros_that_torch_has_not_written_are_zeros(chunks, checkpoint):
    """Their address was asked for: "invalid python storage"."""

    class WithZeros(nn.Linear):
        def forward(self, x):
            return super().forward(x), ZEROS((len(x), 3))

    class Sum(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), WithZeros(4, 3), Sum()), [2, 1], chunks, checkpoint=checkpoint)
    plain, loss_fn = pipe.to_sequential(), nn.functional.mse_loss
    for _ in range(3):
        torch.testing.assert_close(pipe(ZEROS((6, 4))), plain(torch.zeros(6, 4)))
        loss = pipe.step(ZEROS((6, 4)), ZEROS((6, 3)), loss_fn=loss_fn).loss
        torch.testing.assert_close(loss, loss_fn(plain(torch.zeros(6, 4)), torch.zeros(6, 3)))
        pipe.zero_grad()
        pipe(torch.ones(6, 4)).backward(ZEROS((6, 3)))
        assert not any([param.grad.any() for param in pipe.parameters()])
