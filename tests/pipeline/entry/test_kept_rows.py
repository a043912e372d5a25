"""Law: a layer that keeps something of its rows for its next call is refused, since chunks are such calls.

An LSTM that keeps its hidden state, a cache of keys, a mean of what it has seen: on the plain module the next mini-
batch finds it, in a Pipe the next chunk would. Layers that count their calls, or keep what is no row's, go on
working.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Pipe

WIDE = 4
ELSEWHERE: dict[str, Tensor] = {}
pytestmark = pytest.mark.probes


class Lstm(nn.Module):
    """Over streams, one for each row of a mini-batch: truncated back-propagation through time."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.state = nn.LSTM(WIDE, WIDE, batch_first=True), None

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.lstm(x, self.state)
        self.state = tuple([part.detach() for part in state])
        return output


class Previous(nn.Module):
    """Beside the rows of the call before, and of no call before that: a memory as of Transformer-XL."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.memory = nn.Linear(WIDE, WIDE), None

    def forward(self, x: Tensor) -> Tensor:
        earlier, self.memory = self.memory, x.detach()
        return self.linear(x) if earlier is None or len(earlier) != len(x) else self.linear(x) + earlier


class Cache(nn.Module):
    """Attention to what earlier calls had, in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x
        self.keys.append(x.detach())
        keys = torch.cat(self.keys, 1)
        return x + (x @ keys.mT).softmax(-1) @ keys


class Bank(nn.Module):
    """The same, of means in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(1, WIDE, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x
        output = x + (x @ self.bank.mT).softmax(-1) @ self.bank
        self.bank = torch.cat([self.bank, x.detach().mean((0, 1), keepdim=True)[0]])
        return output


class Mean(nn.Module):
    """Less a mean of what it has seen before, elsewhere than on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        earlier = ELSEWHERE.get("mean", torch.zeros(WIDE, dtype=x.dtype))
        ELSEWHERE["mean"] = 0.9 * earlier + 0.1 * x.detach().mean((0, 1))
        return self.linear(x) - earlier


class Grows(nn.Module):
    """By a factor for each call: a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Last(nn.Module):
    """Keeps its last rows, for a plot, and reads them never."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach().clone()
        return x.tanh()


class Statistics(nn.Module):
    """A running mean in a buffer, which it reads in train mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDE, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        output = x - self.mean
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return output


def model_of(kind: Callable[[], nn.Module], training: bool) -> nn.Sequential:
    ELSEWHERE.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), kind(), nn.Tanh(), nn.Linear(WIDE, WIDE), kind(), nn.Linear(WIDE, 2))
    return model.double().train(training)


def mini_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, WIDE, dtype=torch.float64, generator=generator)
    return x, torch.randn(4, 3, 2, dtype=torch.float64, generator=generator)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def by_hand(model: nn.Module, x: Tensor, target: Tensor, chunks: int) -> tuple[Tensor, list[Tensor]]:
    """The loss and gradients of a loop over chunks."""
    model.zero_grad()
    losses = []
    for rows, targets in zip(x.tensor_split(chunks), target.tensor_split(chunks), strict=True):
        loss = mean_square(model(rows), targets) / chunks
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_steps_as_by_hand(pipe: Pipe, model: nn.Module, plain: nn.Module, chunks: int) -> None:
    for number in range(5):  # validating calls and others
        x, target = mini_batch(number)
        elsewhere = dict(ELSEWHERE)
        pipe.zero_grad()
        loss = pipe.step(x, target, loss_fn=mean_square).loss
        ELSEWHERE.clear()
        ELSEWHERE.update(elsewhere)
        expected, gradients = by_hand(plain, x, target, chunks)
        torch.testing.assert_close(loss.detach(), expected, rtol=0, atol=1e-13)
        ours = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        torch.testing.assert_close(ours, gradients, rtol=0, atol=1e-13)


KEEP: dict[str, tuple[Callable[[], nn.Module], Sequence[bool]]] = {
    "LSTM": (Lstm, (True, False)), "cache": (Cache, (False,)), "bank": (Bank, (False,)), "mean": (Mean, (True, False)),
    "previous": (Previous, (True, False)),
}  # fmt: skip
ENTRIES: dict[str, Callable[[Pipe, Tensor, Tensor], Any]] = {
    "forward": lambda pipe, x, target: pipe(x),
    "step": lambda pipe, x, target: pipe.step(x, target, loss_fn=mean_square),
    "evaluate": lambda pipe, x, target: pipe.evaluate(x, target, loss_fn=mean_square),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("balance", [[6], [3, 3], [1, 4, 1]])
@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("name", KEEP)
def test_a_layer_that_keeps_rows_is_refused_in_the_first_call(name, chunks, balance, entry):
    kind, modes = KEEP[name]
    for training in modes:
        pipe = Pipe(model_of(kind, training), balance, chunks, devices=["cpu"] * len(balance))
        words = r"stage \d \(layers .*\) gives other values for the same input when chunks of other rows .*chunks=1"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=words):
                ENTRIES[entry](pipe, *mini_batch(0))


@pytest.mark.parametrize("name", KEEP)
def test_with_one_chunk_it_computes_what_the_plain_module_does(name):
    kind, modes = KEEP[name]
    for training in modes:
        model = model_of(kind, training)
        plain = copy.deepcopy(model)
        pipe = Pipe(model, [3, 3], 1, devices=["cpu"] * 2, checkpoint="never")
        assert_steps_as_by_hand(pipe, model, plain, 1)


@pytest.mark.parametrize("kind", [Grows, Last, Statistics])
@pytest.mark.parametrize("balance", [[6], [3, 3]])
def test_what_counts_calls_or_is_a_statistic_is_as_in_a_loop_by_hand(kind, balance):
    model = model_of(kind, True)
    plain = copy.deepcopy(model)
    assert_steps_as_by_hand(Pipe(model, balance, 2, devices=["cpu"] * len(balance)), model, plain, 2)


def test_mini_batches_of_one_step_find_what_the_one_before_left():
    """As in a loop over them."""
    model = model_of(Lstm, True)
    plain = copy.deepcopy(model)
    pipe = Pipe(model, [3, 3], 1, devices=["cpu"] * 2, checkpoint="never")
    for number in range(4):
        batches = [mini_batch(2 * number), mini_batch(2 * number + 1)]
        pipe.zero_grad()
        loss = pipe.step(iter(batches), loss_fn=mean_square).loss
        x, target = [torch.cat(parts) for parts in zip(*batches)]
        expected, gradients = by_hand(plain, x, target, 2)
        torch.testing.assert_close(loss.detach(), expected, rtol=0, atol=1e-13)
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], gradients, rtol=0, atol=1e-13)


@pytest.mark.parametrize("balance", [[6], [3, 3]])
@pytest.mark.parametrize("name", ["LSTM", "mean", "previous"])
def test_each_chunk_may_find_what_the_one_before_left_where_that_is_said(name, balance):
    if name == "mean" and len(balance) > 1:
        pytest.skip("its two layers share what they keep: stages must not")
    model = model_of(KEEP[name][0], True)
    plain = copy.deepcopy(model)
    pipe = Pipe(model, balance, 2, devices=["cpu"] * len(balance), mixes_rows=True)
    assert_steps_as_by_hand(pipe, model, plain, 2)
