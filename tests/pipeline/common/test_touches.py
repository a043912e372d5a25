"""What belongs to the process, or to modules of several stages: layers that change it while they compute, and put it
back or read it, have it for themselves."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline import Pipe
from pipeline.common.places import Place
from pipeline.common.torch_modes import switches
from pipeline.common.touches import Touches

WIDTH = 5


class Touching(nn.Module):
    """Adds a number that it computes within a change of the process's state, which must be as it set it.

    Twice within it waits until another one has come as far, or a moment where none does.
    """

    come: list[int] = []

    def __init__(self, change: Callable[[bool, Callable[[int], None]], Any], is_first: bool, calls: int = 0) -> None:
        super().__init__()
        self.change, self.is_first, self.calls = change, is_first, calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls -= 1
        return x if self.calls >= 0 else x + self.change(self.is_first, self.meet)

    @classmethod
    def meet(cls, point: int) -> None:
        cls.come.append(point)
        end = time.monotonic() + 0.01
        while cls.come.count(point) % 2 and time.monotonic() < end:
            time.sleep(0.001)
        if cls.come.count(point) % 2:  # alone
            cls.come.remove(point)


def seeds(first: bool, meet: Callable[[int], None]) -> float:
    with torch.random.fork_rng(devices=()):
        meet(0)
        torch.manual_seed(5)
        meet(1)
        return float(torch.rand(()))


def draws_as_python_and_numpy(first: bool, meet: Callable[[int], None]) -> float:
    states = random.getstate(), numpy.random.get_state()
    meet(0)
    random.seed(5)
    numpy.random.seed(6)
    meet(1)
    drawn = random.random() + float(numpy.random.rand())
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    return drawn


def chooses_kernels(first: bool, meet: Callable[[int], None]) -> float:
    with sdpa_kernel(SDPBackend.MATH if first else SDPBackend.FLASH_ATTENTION):
        meet(0)
        meet(1)
        return float(torch.backends.cuda.flash_sdp_enabled()) + 2 * float(torch.backends.cuda.math_sdp_enabled())


def chooses_libraries(first: bool, meet: Callable[[int], None]) -> float:
    with torch.backends.cudnn.flags(enabled=first):
        meet(0)
        meet(1)
        return float(torch.backends.cudnn.enabled)


@contextmanager
def double(is_on: bool) -> Iterator[None]:
    found = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if is_on else torch.float32)
    yield
    torch.set_default_dtype(found)


def chooses_a_dtype(first: bool, meet: Callable[[int], None]) -> float:
    with double(first):
        meet(0)
        meet(1)
        return float(torch.tensor(0.1).double())


class Shared:
    """An object that modules of several stages have, in which each finds what it has set."""

    number = 0.0

    def __call__(self, first: bool, meet: Callable[[int], None]) -> float:
        meet(0)
        self.number = 1.0 + first
        meet(1)
        return self.number


CHANGES = [seeds, draws_as_python_and_numpy, chooses_kernels, chooses_libraries, chooses_a_dtype, Shared()]


def built(change: Any, calls: int = 0) -> tuple[nn.Sequential, Pipe]:
    layers = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Touching(change, True, calls), nn.Linear(WIDTH, WIDTH), Touching(change, False, calls)
    )
    places: list[Any] = [Place(torch.device("cpu"), name) for name in "ab"]  # which may compute at the same time
    return layers.double(), Pipe(layers, [2, 2], chunks=3, devices=places, workers="threads")


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_stages_with_threads_change_the_process_one_at_a_time(change):
    layers, pipe = built(change)
    x, before = torch.randn(3, WIDTH).double(), switches()
    expected = torch.cat([layers(row) for row in x.split(1)])
    for _ in range(4):
        torch.testing.assert_close(pipe(x), expected)
        assert switches() == before


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_stage_may_begin_to_change_the_process_in_any_call(change):
    """Then the call runs once more, from the state in which it began: two threads have put back what they found."""
    layers, pipe = built(change, calls=9)  # calls 1 and 2 compare; in call 3 of three chunks a stage runs alone
    x, before = torch.randn(3, WIDTH).double(), switches()
    for _ in range(2):
        pipe(x)
    quiet = pipe(x)
    expected = layers[2](layers[0](x) + change(True, int)) + change(False, int)
    assert not torch.allclose(quiet, expected)
    for _ in range(3):
        torch.testing.assert_close(pipe(x), expected)
        assert switches() == before


@pytest.mark.parametrize("of_torch", [True, False])
def test_touches_are_counted_within_and_torchs_own_functions_stay(of_torch):
    own = (torch.set_rng_state, torch.random.set_rng_state, random.setstate, numpy.random.set_state)
    touches = Touches(of_torch)
    with pytest.raises(KeyError), touches.counted():
        seeds(True, int)
        random.setstate(random.getstate())
        raise KeyError
    assert touches.count == 1 + of_torch
    chooses_kernels(True, int)
    assert touches.count == 1 + of_torch
    assert own == (torch.set_rng_state, torch.random.set_rng_state, random.setstate, numpy.random.set_state)
