"""Pipes on simulated accelerators: the host's numbers, bit for bit, without a missing wait, in the memory foretold.

Kernels of the simulated accelerator are the host's, so what a Pipe computes on any devices must be what the plain
module computes on the host. That nothing raised a race is a part of every test here (conftest.py).
"""

from __future__ import annotations
import __future__

import gc
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import law_check
import parameter_kinds
import pytest
import torch
from cover import pairwise
from device_programs import BALANCE, PROGRAMS, batch, left, name_of, network, on_host, pipe_of, training
from law_check import AXES, Result, differences, expect, observe
from law_models import MODELS, Apply
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from pipeline import Pipe
from pipeline.common.places import Place
from pipeline.entry import attached_call
from pipeline.execution import drivers
from pipeline.transports.local import Local
from scheduler import by_name, simulate

# These compute with tensors of the host wherever they stand, with sparse ones, or by a kernel that only the host has.
ON_THE_HOST = {"private_generator", "closure", "encoder_layers", "sparse_between"}


def sim(index: int) -> torch.device:
    return torch.device("sim", index)


PLACEMENTS: dict[str, Callable[[int], list[Any]]] = {
    "one": lambda stages: [sim(1)] * stages,
    "two": lambda stages: [sim(2 * (2 * stage // stages)) for stage in range(stages)],
    "three": lambda stages: [sim(stage % 3) for stage in range(stages)],
    "zigzag": lambda stages: [sim((0, 1, 2, 1)[stage % 4]) for stage in range(stages)],
    "host between": lambda stages: [(sim(0), "cpu", sim(2))[stage % 3] for stage in range(stages)],
    "host first": lambda stages: ["cpu", *(sim(stage % 2) for stage in range(stages - 1))],
    "host last": lambda stages: [*(sim(stage % 2) for stage in range(stages - 1)), "cpu"],
    "named": lambda stages: [Place(sim(0), str(stage)) for stage in range(stages)],
    "named on two": lambda stages: [Place(sim(stage // 2 % 2), str(stage)) for stage in range(stages)],
}
WORKERS = (None, "inline", "threads")


@contextmanager
def side_streams() -> Iterator[None]:
    """Within: on each device another stream than the default one is current, for which no other waits."""
    before = [torch.accelerator.current_stream(index) for index in range(3)]
    for index in range(3):
        torch.accelerator.set_stream(torch.Stream(sim(index)))
    torch.accelerator.set_device_index(0)
    try:
        yield
    finally:
        for stream in before:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(0)
    for index in range(3):
        torch.accelerator.synchronize(index)


STREAMS: dict[str, Callable[[], AbstractContextManager[None]]] = {"default": nullcontext, "others": side_streams}


# --------------------------------------------------------------------------------------- what the plain module computes

LAWS: dict[str, Sequence[Any]] = {
    **AXES,
    "model": [model for model in MODELS if model not in ON_THE_HOST],
    "drive": tuple(PLACEMENTS),
    "workers": WORKERS,
    "streams": tuple(STREAMS),
    "own hosts": (False, True),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # of torch's reentrant checkpoint
@pytest.mark.parametrize("config", pairwise(LAWS), ids=name_of)
def test_a_pipe_on_accelerators_gives_what_the_plain_module_gives(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def placed(stages: int) -> dict[str, Any]:
        return {"devices": PLACEMENTS[config["drive"]](stages), "workers": config["workers"]}

    monkeypatch.setitem(law_check.DRIVES, config["drive"], placed)
    with STREAMS[config["streams"]](), torch.sim.own_hosts() if config["own hosts"] else nullcontext():
        found = Result(**on_host(vars(observe(config))))
    assert not differences(found, expect(config))


# ------------------------------------------------------------------------------------- what a Pipe on the host computes

# torch's own sums over devices have another order: of norms, and of what autograd's threads add to one gradient.
ROUNDED = {"clipped", "second order"}
AROUND = {"place": tuple(PLACEMENTS), "workers": WORKERS, "streams": tuple(STREAMS)}


@pytest.mark.parametrize("case", pairwise({"program": tuple(PROGRAMS), **AROUND}), ids=name_of)
def test_a_pipe_on_accelerators_gives_what_one_on_the_host_gives(case: dict[str, Any]) -> None:
    program = PROGRAMS[case["program"]]

    def made(
        place: Callable[[int], list[Any]], model: nn.Sequential, balance: list[int], chunks: int, **settings: Any
    ) -> Pipe:
        return Pipe(model, balance, chunks, devices=place(len(balance)), workers=case["workers"], **settings)

    torch.manual_seed(7)
    with STREAMS[case["streams"]]():
        found = on_host(program(partial(made, PLACEMENTS[case["place"]])))
    torch.manual_seed(7)
    expected = on_host(program(partial(made, lambda stages: ["cpu"] * stages)))
    if case["program"] in ROUNDED:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    else:
        assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(expected)


# ------------------------------------------------------------------------------------------------------- missing waits


def several_places(made: Callable[..., Pipe]) -> list[Tensor]:
    """A value whose tensors are on several devices goes to one."""
    local, parts = Local(), [torch.ones(100, device=sim(0)), torch.ones(100, device=sim(1))]
    return [part + 1 for part in local.receive(local.send(parts, None, Place(torch.device("cpu")))) if part is not None]


def on_current_device(made: Callable[..., Pipe]) -> list[Tensor]:
    """Layers that compute on the current device."""
    layers = [Apply(lambda x: x * torch.full((4,), 2.0, device=x.device.type)) for _ in range(4)]
    return [made(nn.Sequential(*layers), [1] * 4, 2)(torch.ones(4, 4))]


def backward_on_other_streams(made: Callable[..., Pipe]) -> list[Tensor]:
    """Other streams than in the forward are current where the backward begins."""
    pipe, found = pipe_of(made), []
    before = [torch.accelerator.current_stream(index) for index in range(3)]
    for seed in range(3):
        x, y = batch(seed)
        out = pipe(x)
        loss = mse_loss(out, y.to(out.device))
        with side_streams():
            for index, stream in enumerate(before):
                torch.accelerator.current_stream(index).wait_stream(stream)
            found += [2 * grad for grad in torch.autograd.grad(3 * loss, list(pipe.parameters()))]
        del out, loss
    return found


def overwritten(made: Callable[..., Pipe]) -> list[Tensor]:
    """The caller writes his own pinned batch as soon as the step has returned."""
    pipe = pipe_of(made)
    for seed in range(3):
        x, y = [part.pin_memory() for part in batch(seed)]
        pipe.step(x, y, loss_fn=mse_loss)
        x.fill_(7.0)
        y.fill_(7.0)
    for index in range(3):
        torch.accelerator.synchronize(index)
    return left(pipe)


class Missing(NamedTuple):
    """A wait taken out of the source, and a run in which that is a race, or wrong numbers."""

    owner: Any
    function: str
    line: str
    program: Callable[..., list[Tensor]]
    place: str
    workers: str = "inline"
    streams: str = "default"
    instead: str = "pass"


HOST, ZIGZAG = "host between", "zigzag"
OF_COPY = "torch.accelerator.current_stream(tensor.device)"
MISSING = {
    "the reader does not wait": Missing(Local, "receive", "reader.wait_event(arrival)", training, ZIGZAG),
    "what arrives is not recorded": Missing(Local, "receive", "use_in(reader, tensor)", training, ZIGZAG),
    "the host does not wait": Missing(Local, "receive", "arrival.synchronize()", training, HOST),
    "no event is recorded": Missing(
        Local, "send", "stream.record_event()", training, "named", instead="torch.Event(stream.device)"
    ),
    "one of two copies is not waited for": Missing(
        Local, "send", "for stream in streams])", several_places, HOST, instead="for stream in streams][:1])"
    ),
    "the copy to the host begins early": Missing(
        Local, "_moved", "stream.wait_stream(torch.accelerator.current_stream(source_device))", training, HOST
    ),
    "the caller's batch is copied later": Missing(
        Local, "_moved", "torch.empty_like(tensor, pin_memory=True).copy_(tensor)", overwritten, ZIGZAG,
        instead="tensor if tensor.is_pinned() else tensor.pin_memory()",
    ),
    "what the host gets is freed early": Missing(Local, "_moved", "tensor.record_stream(stream)", training, HOST),
    "the copy begins early": Missing(
        Local, "_between_accelerators", f"reading.wait_stream({OF_COPY})", training, ZIGZAG
    ),
    "what is sent is freed early": Missing(
        Local, "_between_accelerators", "use_in(reading, tensor)", training, ZIGZAG
    ),
    "threads have streams of their own": Missing(
        drivers, "_thread_like_this", "stack.enter_context(entered_streams(*streams))", training, ZIGZAG, "threads",
        "others",
    ),
    "threads have no device": Missing(
        drivers.Driver, "_on_device", "with entered(self._places[action.stage].device)", on_current_device, ZIGZAG,
        "threads", instead="if True",
    ),
    "gradients are not recorded": Missing(
        attached_call, "use_here", f"use_in({OF_COPY}, tensor)", backward_on_other_streams, ZIGZAG
    ),
}  # fmt: skip


def without(function: Callable[..., Any], line: str, instead: str) -> Callable[..., Any]:
    """The function whose source has one line less."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{line} stands {source.count(line)} times in {function.__qualname__}"
    made: dict[str, Any] = {}
    code = compile(source.replace(line, instead), "<without a wait>", "exec", __future__.annotations.compiler_flag)
    exec(code, inspect.unwrap(function).__globals__, made)
    found: Callable[..., Any] = made[function.__name__]
    return found


def numbers(missing: Missing) -> list[Tensor]:
    """What the run gives, all of which has been freed on the device."""

    def made(model: nn.Sequential, balance: list[int], chunks: int, **settings: Any) -> Pipe:
        devices = PLACEMENTS[missing.place](len(balance))
        return Pipe(model, balance, chunks, devices=devices, workers=missing.workers, **settings)

    torch.manual_seed(7)
    with STREAMS[missing.streams]():
        found: list[Tensor] = on_host(missing.program(made))
    torch.sim.check()
    return found


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node.s stream does not match")  # where other streams go back
@pytest.mark.parametrize("name", MISSING)
def test_a_wait_taken_out_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = MISSING[name]
    right = numbers(missing)
    assert not any(tensor.isnan().any() for tensor in right)
    function = getattr(missing.owner, missing.function)
    crippled: Any = without(function, missing.line, missing.instead)
    is_static = isinstance(inspect.getattr_static(missing.owner, missing.function), staticmethod)
    monkeypatch.setattr(missing.owner, missing.function, staticmethod(crippled) if is_static else crippled)
    try:
        found = [torch.equal(one, other) for one, other in zip(numbers(missing), right, strict=True)]
    except RuntimeError as error:
        assert re.match("race: |Expected all tensors to be on the same device|Expected .* on sim", str(error))
    else:
        assert not all(found), "a missing wait went unseen"
    with torch.sim.unchecked():  # what the error has left
        gc.collect()
    with suppress(RuntimeError):
        torch.sim.check()


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("place", PLACEMENTS)
def test_layers_find_their_device_current(place: str, workers: str | None) -> None:
    """In the call and in its probe."""

    def made(model: nn.Sequential, balance: list[int], chunks: int) -> Pipe:
        return Pipe(model, balance, chunks, devices=PLACEMENTS[place](len(balance)), workers=workers)

    (out,) = on_host(on_current_device(made))
    assert out.eq(16).all()


# ------------------------------------------------------------------------------------------- waiting hosts, late copies


@pytest.mark.parametrize("where", ["pinned", "sim:0"])
@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("place", ["one", "two", "three", "zigzag", "named"])
def test_the_host_waits_for_no_device_in_calls_that_do_not_validate(place: str, mode: str, where: str) -> None:
    pipe = Pipe(network(), BALANCE, 4, devices=PLACEMENTS[place](4), checkpoint=mode)
    x, y = [part.pin_memory() if where == "pinned" else part.to(where) for part in batch(1)]
    for number in range(1, 8):
        with torch.sim.no_synchronisation() if number in (3, 5, 6, 7) else nullcontext():
            pipe.step(x, y, loss_fn=mse_loss)


def test_a_pinned_batch_may_be_overwritten_after_the_call() -> None:
    """Torch's own copies would be written over: see what the simulated device says of them."""

    def made(model: nn.Sequential, balance: list[int], chunks: int) -> Pipe:
        return Pipe(model, balance, chunks, devices=PLACEMENTS[ZIGZAG](4), checkpoint="never")

    torch.manual_seed(7)
    found = on_host(overwritten(made))
    torch.manual_seed(7)
    pipe = pipe_of(made)
    for seed in range(3):
        pipe.step(*batch(seed), loss_fn=mse_loss)
    assert all(torch.equal(one, other) for one, other in zip(found, on_host(left(pipe)), strict=True))


# -------------------------------------------------------------------------------------------------------------- memory

LAYERS, WIDE, ROWS = 16, 128, 8  # of a stage; a chunk
BYTES = 8 * ROWS * WIDE  # of one value of a chunk


def peak_of(schedule: str, stages: int, chunks: int, mode: str) -> list[int]:
    """The most bytes on each device during a step beyond what was there before it; a stage on each of three devices."""
    model = nn.Sequential(*[nn.Tanh() for _ in range(LAYERS * stages)])
    pipe = Pipe(model, [LAYERS] * stages, chunks, devices=[sim(i) for i in range(stages)], schedule=schedule,
                checkpoint=mode, workers="inline")  # fmt: skip
    x = torch.randn(ROWS * chunks, WIDE, dtype=torch.float64, requires_grad=True)
    peaks = []
    for _ in range(3):  # the last does not validate
        gc.collect()
        before = [torch.accelerator.memory_allocated(index) for index in range(stages)]
        for index in range(stages):
            torch.accelerator.reset_peak_memory_stats(index)
        pipe.step(x, None, loss_fn=lambda out, _: out.square().mean())
        peaks = [torch.accelerator.max_memory_allocated(index) - before[index] for index in range(stages)]
    return peaks


@pytest.mark.parametrize("chunks", [4, 7])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_peaks_are_what_the_schedule_says(mode: str, schedule: str, chunks: int) -> None:
    """To within four values: kept is what each Tanh has made, for each chunk in flight; with "always" only inputs, and
    the values of one chunk. On the first device the rest of the mini-batch waits. Besides, a gradient that came, its
    product with a derivative, and what is sent."""
    in_flight = simulate(by_name(schedule, 3, chunks)).peak_in_flight
    for stage, peak in enumerate(peak_of(schedule, 3, chunks, mode)):
        held = LAYERS * in_flight[stage] if mode == "never" else LAYERS + in_flight[stage]
        waiting = chunks - in_flight[0] if stage == 0 else 0
        assert 2 <= peak // BYTES - held - waiting <= 4, f"stage {stage}: {peak / BYTES} values"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("place", ["one", "zigzag", "host between"])
def test_a_loader_that_pins_feeds_steps_and_evaluations(place: str, workers: int) -> None:
    """It pins each mini-batch anew, where it has workers in a thread of its own."""
    data = [batch(seed) for seed in range(3)]
    loader = DataLoader(
        TensorDataset(*map(torch.cat, zip(*data, strict=True))), batch_size=8, pin_memory=True, num_workers=workers,
        multiprocessing_context="forkserver" if workers else None, generator=torch.Generator()
    )
    assert all(part.is_pinned() for pair in loader for part in pair)
    found = []
    for mini_batches, devices in ((lambda: iter(data), ["cpu"] * 4), (lambda: loader, PLACEMENTS[place](4))):
        torch.manual_seed(7)
        pipe = Pipe(network(), BALANCE, 4, devices=devices)
        losses = [entry(mini_batches(), loss_fn=mse_loss).loss for entry in (pipe.evaluate, pipe.step)]
        found.append(on_host([*losses, *left(pipe)]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Decays(nn.Module):
    """Its forward writes its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x * self.weight


@pytest.mark.parametrize("place", ["one", "two", "named on two", "host between"])
@pytest.mark.parametrize("workers", WORKERS)
def test_a_parameter_that_a_forward_writes_is_written_once_for_each_chunk(place: str, workers: str | None) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4).double(), Decays()) for _ in range(3)])
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4).double(), Decays()) for _ in range(3)])
    plain.load_state_dict(model.state_dict())
    pipe = Pipe(model, [1] * 3, 2, devices=PLACEMENTS[place](3), checkpoint="never", workers=workers)
    for _ in range(5):  # calls 1, 2 and 4 send some rows through the layers first
        x = torch.randn(4, 4, dtype=torch.float64)
        expected = torch.cat([plain(rows) for rows in x.chunk(2)])
        assert torch.equal(pipe(x).cpu(), expected)
        assert all(torch.equal(one.cpu(), other) for one, other in zip(pipe.parameters(), plain.parameters()))


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("place", ["one", "two", "named on two", "host between"])
@pytest.mark.parametrize("workers", WORKERS)
def test_quantised_weights_are_where_they_are_used(place: str, workers: str | None, is_tied: bool) -> None:
    """What a parameter wraps is moved, and waited for, as a tensor is."""
    models = [parameter_kinds.adapted("wraps").eval() for _ in range(2)]
    for model in models if is_tied else ():
        model[3].base.weight = model[0].base.weight
    model, plain = models
    pipe = Pipe(model, [1, 2, 2], 2, devices=PLACEMENTS[place](3), workers=workers)
    x, y = parameter_kinds.rows()
    for _ in range(3):
        pipe.zero_grad()
        pipe.step(x, y, loss_fn=mse_loss)
    grads = [None if grad is None else grad.cpu() for grad in (parameter.grad for parameter in model.parameters())]
    parameter_kinds.same(grads, parameter_kinds.looped(plain, x, y))
