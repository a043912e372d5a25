"""Python's and numpy's generators get no seeds where nothing draws from them; what begins to draw has its own numbers.

The reference is a Pipe whose first call it is: there every layer is seeded.
"""

import random
from collections.abc import Callable
from random import getstate, setstate
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from partition.generators import NumpyGenerator, PythonGenerator
from pipeline import Pipe
from pipeline.common.places import Place

ENTRIES = ("forward", "step", "evaluate")
MODES = ("never", "except_last", "always")


def put_back() -> float:
    """Drawn, and put back: nobody sees afterwards that it was."""
    state = random.getstate()
    number = random.random()
    random.setstate(state)
    return number


def numpys_put_back() -> float:
    state = numpy.random.get_state()
    number = numpy.random.random()
    numpy.random.set_state(state)
    return number


SOURCES: tuple[Callable[[], float], ...] = (random.random, numpy.random.random, put_back, numpys_put_back)


class Scaled(nn.Module):
    """Multiplies by a number, drawn where there is a source. Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.source: Callable[[], float] | None = None
        self.drawn: list[float] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.source is None:
            return x
        number = self.source()
        self.drawn.append(number)
        return x * (1.0 + number)


def total(out: Tensor, target: object = None) -> Tensor:
    return out.square().sum()


def made() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), Scaled(), nn.BatchNorm1d(4), nn.Linear(4, 4), Scaled(), nn.Tanh()).double()


def piped(model: nn.Sequential, mode: str, workers: str = "inline") -> Pipe:
    places = [Place(torch.device("cpu"), "a"), Place(torch.device("cpu"), "b")]
    return Pipe(model, [3, 3], 3, devices=places, checkpoint=mode, workers=workers)


def called(pipe: Pipe, entry: str, seed: int) -> list[Tensor]:
    """A call: its output and all gradients. The caller draws before it, and between forward and backward."""
    torch.manual_seed(seed)
    random.seed(seed + 100)
    numpy.random.seed(seed + 200)
    x = torch.linspace(-1, 1, 28, dtype=torch.float64).reshape(7, 4)
    pipe.zero_grad()
    if entry == "forward":
        out = pipe(x)
        random.random()
        numpy.random.random()
        total(out).backward()
    else:
        out = getattr(pipe, entry)(x, loss_fn=total, loss_reduction="sum", outputs=True).outputs
    return [out.detach(), *[parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("source", SOURCES)
def test_a_layer_that_begins_to_draw_later_has_its_seeds_numbers_and_runs_once_for_what_it_counts(
    source: Callable[[], float], entry: str, mode: str, workers: str
) -> None:
    fresh, model = made(), made()
    reference, pipe = piped(fresh, mode, workers), piped(model, mode, workers)
    for number in range(2):
        called(pipe, entry, number)
    if entry == "evaluate":
        fresh.load_state_dict(model.state_dict())  # running statistics
    for layers in (fresh, model):
        layers[4].source = source
    expected = called(reference, entry, 9)
    assert len(set(fresh[4].drawn)) > 1  # another number for each chunk
    assert same(called(pipe, entry, 9), expected)
    assert same(called(pipe, entry, 9), expected)  # all are seeded again
    assert model[4].calls == 4 * 3
    assert int(model[2].num_batches_tracked) == (0 if entry == "evaluate" else 4 * 3)


@pytest.mark.parametrize("mode", MODES)
def test_a_generator_that_is_put_back_unseen_gives_a_recomputation_what_it_gave_the_forward(mode: str) -> None:
    """By a function that nobody counts: all chunks get the number that the caller's generator has next, as by hand."""
    model = made()
    pipe = piped(model, mode)
    for number in range(2):
        called(pipe, "forward", number)

    def unseen() -> float:
        state = getstate()
        number = random.random()
        setstate(state)
        return number

    model[4].source = unseen
    called(pipe, "forward", 9)
    assert set(model[4].drawn) == {random.Random(109).random()} and len(model[4].drawn) >= 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", SOURCES)
def test_a_backward_that_begins_to_draw_later_goes_on_in_one_thread(source: Callable[[], float], mode: str) -> None:
    """From the next call on it has its seeds' numbers."""
    fresh, model = made(), made()
    reference, pipe = piped(fresh, mode), piped(model, mode)
    for number in range(2):
        called(pipe, "forward", number)
    for layers in (fresh, model):
        layers[3].register_full_backward_hook(lambda module, grads, _: tuple([grad * source() for grad in grads]))
    called(pipe, "forward", 9)
    assert same(called(pipe, "forward", 9), called(reference, "forward", 9))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", [PythonGenerator, NumpyGenerator])
def test_what_nothing_draws_from_gets_no_seeds(kind: Any, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third call on; calls number 4, 8, ... compare, and look again."""
    seeds: list[int] = []
    seed = kind.manual_seed
    monkeypatch.setattr(kind, "manual_seed", lambda self, number: (seeds.append(number), seed(self, number))[1])
    pipe = piped(made(), "always")
    counts = []
    for number in range(9):
        seeds.clear()
        called(pipe, entry, number)
        counts.append(len(seeds))
    assert counts[0] >= 3 * 2  # those of the layers that may draw, in three chunks
    assert [counts[number - 1] for number in (3, 5, 6, 7, 9)] == [0] * 5


@pytest.mark.parametrize("source", SOURCES)
def test_layers_that_draw_keep_their_seeds(source: Callable[[], float]) -> None:
    fresh, model = made(), made()
    for layers in (fresh, model):
        layers[1].source = source
    pipe = piped(model, "except_last")
    for number in range(7):
        found = called(pipe, "step", number)
    assert same(found, called(piped(fresh, "except_last"), "step", 6))
