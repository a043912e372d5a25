"""What a call and each of its chunks cost: the engine's function calls for one more parameter, buffer or module."""

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pipeline_probes import no_collector
from torch import Tensor, nn

from pipeline import Pipe


class Parameters(nn.Module):
    """Many parameters, all of which it uses."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for number in range(count):
            self.register_parameter(f"p{number}", nn.Parameter(torch.ones(())))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.stack(tuple(self._parameters.values())).mean()


class Buffers(nn.Module):
    """Many buffers that it reads, and one parameter."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        for number in range(count):
            self.register_buffer(f"b{number}", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Modules(nn.Module):
    """Many modules within one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.inner = nn.ModuleList(nn.Identity() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Lists(nn.Module):
    """Many lists, and one of its parameters, made anew in the first forward of a call: torch's RNNs have such ones."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        for number in range(count):
            setattr(self, f"l{number}", [number])
        self.weights: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not any(weight is self.weight for weight in self.weights):
            self.weights = [self.weight]
        return x * self.weight


def function_calls(run: Callable[[], object]) -> int:
    """How many functions are called, of Python and of C."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with no_collector():  # finalizers of what others left would count
        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
    return count


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def calls_of(make: Callable[[int], nn.Module], count: int, chunks: int, mode: str, entry: str) -> int:
    """How many functions a call that does not validate calls."""
    x = torch.ones(4, 1)
    model = nn.Sequential(make(count), nn.Linear(1, 1))
    pipe = Pipe(model, [1, 1], chunks, checkpoint=mode)
    parameters = list(pipe.parameters())

    def run() -> None:
        if entry == "step":
            pipe.step(x, x, loss_fn=mean_square)
        else:
            mean_square(pipe(x), x).backward()
        for parameter in parameters:
            parameter.grad = None

    for _ in range(4):  # call 5 does not validate
        run()
    return function_calls(run)


@pytest.mark.inline
@pytest.mark.parametrize("entry", ["step", "forward"])
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize(
    ("make", "limit"), [(Parameters, 24), (Buffers, 40), (Modules, 13)], ids=["parameter", "buffer", "module"]
)
def test_one_more_costs_few_calls_of_functions(
    make: Callable[[int], nn.Module], limit: float, mode: str, entry: str
) -> None:
    """Time moves with the machine; the number of calls does not."""
    first, second = (calls_of(make, count, 2, mode, entry) for count in (40, 80))
    assert (second - first) / 40 <= limit


@pytest.mark.inline
@pytest.mark.parametrize("entry", ["step", "forward"])
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize(
    ("make", "limit"),
    [(Parameters, 0), (Buffers, 6), (Modules, 0), (Lists, 0)],
    ids=["parameter", "buffer", "module", "list"],
)
def test_one_more_costs_a_further_chunk_few_calls_of_functions(
    make: Callable[[int], nn.Module], limit: float, mode: str, entry: str
) -> None:
    """None for a parameter: where its alias stands in the graph, and in a module, is compared within C."""
    few, many = (calls_of(make, count, 4, mode, entry) - calls_of(make, count, 2, mode, entry) for count in (40, 80))
    assert (many - few) / (2 * 40) <= limit


class NotCompared(torch.Tensor):
    """One that nothing asks whether it equals something, which takes torch 30 microseconds, also for `None in [x]`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        raise AssertionError(f"a tensor is compared with {other!r}")

    __hash__ = torch.Tensor.__hash__


@pytest.mark.parametrize("mode", ["never", "always"])
def test_no_buffer_is_asked_whether_it_equals_something(mode: str) -> None:
    layer = Buffers(2)
    layer.register_buffer("b0", torch.ones(()).as_subclass(NotCompared))
    layer.register_buffer("empty", None)
    x, pipe = torch.ones(4, 1), Pipe(nn.Sequential(layer, nn.Linear(1, 1)), [1, 1], 2, checkpoint=mode)
    for _ in range(3):
        pipe.step(x, x, loss_fn=mean_square)


class Long(nn.Module):
    """Its graph has many nodes. It notes whether Python's garbage collector is on, and may fail."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        was_on: set[bool] = set()
        self.was_on, self.note = lambda: was_on, was_on.add  # a failed call puts back a set on a module
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.note(gc.isenabled())
        for _ in range(500):
            x = x * self.weight
        if self.fails:
            raise ZeroDivisionError
        return x


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_on", [True, False])
def test_no_garbage_is_collected_while_a_call_runs(is_on: bool, fails: bool) -> None:
    """Each node of a graph that is walked has an object in Python until the backward: no collection looks at them.

    Nor at the objects of the call, which are gone when it ends; those of a failure stay, in its traceback.
    """
    layer, x, times = Long(fails), torch.ones(8, 1), []
    pipe = Pipe(nn.Sequential(layer, nn.Identity()), [1, 1], 8, checkpoint="never")

    def step() -> None:
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            pipe.step(x, x, loss_fn=mean_square)

    def note(phase: str, of: dict[str, int]) -> None:
        times.append(phase)

    step()  # torch imports what it uses, and makes garbage
    gc.collect()
    (gc.enable if is_on else gc.disable)()
    gc.callbacks.append(note)
    try:
        step()
        assert gc.isenabled() is is_on and layer.was_on() == {False}
        assert len(times) <= (2 * 3 if fails else 0)
    finally:
        gc.callbacks.remove(note)
        gc.enable()
