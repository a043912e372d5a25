"""What only a GPU shows: streams and events, host synchronisation, the allocator, half precision, autograd's threads.

    make test-gpu

References are the plain module on the same device, chunk by chunk. On one GPU several stages share a place; that values
are copied between GPUs is tried on one, too, by places of other names (pipeline.common.places).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from synchronisation import no_synchronisation
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Pipe
from pipeline.common.accelerators import entered_streams
from pipeline.common.places import Place
from pipeline.transports.local import Local

pytestmark = pytest.mark.gpu

CYCLES = 20_000_000  # about 10 ms on a GPU of 2 GHz
MODES = ("never", "except_last", "always")


def cuda(index: int = 0) -> torch.device:
    return torch.device("cuda", index)


PLACES: dict[str, Callable[[], list[Any]]] = {
    "one GPU": lambda: ["cuda:0"] * 3,
    "host and GPU": lambda: ["cpu", "cuda:0", "cuda:0"],
    "GPU, host, GPU": lambda: ["cuda:0", "cpu", "cuda:0"],
    "as if three GPUs": lambda: [Place(cuda(), name) for name in "abc"],
    "all GPUs": lambda: [cuda(stage % torch.cuda.device_count()) for stage in range(3)],
}


class Noise(nn.Module):
    """Draws from the generator of the device that it computes on."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Dropout(0.0), nn.ReLU(), nn.Linear(16, 4)
    ).double()


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def by_hand(model: nn.Sequential, x: Tensor, y: Tensor, chunks: int) -> tuple[float, list[Tensor]]:
    """Loss and gradients of the plain module, chunk by chunk."""
    model.zero_grad()
    total = 0.0
    for part, target in zip(x.tensor_split(chunks), y.tensor_split(chunks), strict=True):
        loss = mean_square(model(part), target) * (len(part) / len(x))
        loss.backward()
        total += loss.item()
    return total, [param.grad.clone() for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("entry", ["forward", "step"])
def test_loss_gradients_and_buffers_equal_the_plain_module(entry: str, where: str, mode: str, workers: str) -> None:
    plain, model = network().cuda(), network()
    pipe = Pipe(model, [2, 2, 3], 3, devices=PLACES[where](), checkpoint=mode, workers=workers)
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randn(8, 6).double(), torch.randn(8, 4).double()
        expected, grads = by_hand(plain, x.cuda(), y.cuda(), 3)
        pipe.zero_grad()
        if entry == "step":
            loss = pipe.step(x, y, loss_fn=mean_square).loss
        else:
            loss = mean_square(pipe(x), y.to(pipe.devices[-1]))
            loss.backward()
        torch.testing.assert_close(loss.item(), expected, rtol=1e-10, atol=0.0)
        for param, grad in zip(pipe.parameters(), grads, strict=True):
            assert param.grad is not None
            torch.testing.assert_close(param.grad.cpu(), grad.cpu(), rtol=1e-9, atol=1e-12)
        for ours, theirs in zip(pipe.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", PLACES)
def test_hessian_vector_products_equal_the_plain_module(where: str, mode: str) -> None:
    plain, model = network().cuda().eval(), network().eval()
    pipe = Pipe(model, [2, 2, 3], 3, devices=PLACES[where](), checkpoint=mode)
    x, y = torch.randn(8, 6).double(), torch.randn(8, 4).double()
    products = []
    for module, device in ((plain, cuda()), (pipe, pipe.devices[-1])):
        params = list(module.parameters())
        given = x.to(device) if module is plain else x
        grads = torch.autograd.grad(mean_square(module(given), y.to(device)), params, create_graph=True)
        inner = sum((grad.square().sum().to("cpu") for grad in grads), torch.zeros((), dtype=torch.float64))
        products.append([each.cpu() for each in torch.autograd.grad(inner, params)])
    for one, other in zip(*products, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("where", ["one GPU", "as if three GPUs", "all GPUs"])
def test_masks_repeat_whatever_the_checkpoint_mode_and_generators_are_left_as_found(where: str, workers: str) -> None:
    found = []
    for mode in MODES:
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), Noise(), nn.Linear(8, 8), nn.Dropout(0.5))
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.1)
        pipe = Pipe(model, [2, 1, 2], 3, devices=PLACES[where](), checkpoint=mode, workers=workers)
        torch.manual_seed(5)
        states = [torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())]
        pipe(torch.ones(7, 6)).square().sum().backward()
        after = [torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())]
        assert all(torch.equal(one, other) for one, other in zip(states, after, strict=True))
        found.append([param.grad.cpu() for param in model.parameters() if param.grad is not None])
    assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))


@pytest.mark.parametrize("on_host", [True, False], ids=["batch on the host", "batch on the GPU"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["one GPU", "as if three GPUs", "all GPUs"])
def test_the_host_never_waits_in_a_step(where: str, mode: str, on_host: bool) -> None:
    """Calls 1, 2, 4, 8 ... compare values, and wait for them; the calls between do not."""
    pipe = Pipe(network(), [2, 2, 3], 4, devices=PLACES[where](), checkpoint=mode)
    device = "cpu" if on_host else "cuda:0"
    x, y = torch.randn(16, 6, device=device).double(), torch.randn(16, 4, device=device).double()
    if on_host:
        x, y = x.pin_memory(), y.pin_memory()
    for number in range(1, 8):
        pipe.zero_grad()
        if number in (3, 5, 6, 7):
            with no_synchronisation():
                pipe.step(x, y, loss_fn=mean_square)
        else:
            pipe.step(x, y, loss_fn=mean_square)


@pytest.mark.parametrize("mode", MODES)
def test_the_host_never_waits_in_forward_and_backward(mode: str) -> None:
    pipe = Pipe(network(), [2, 2, 3], 4, devices=["cuda:0"] * 3, checkpoint=mode)
    x, y = torch.randn(16, 6, device="cuda").double(), torch.randn(16, 4, device="cuda").double()
    for number in range(1, 8):
        pipe.zero_grad()
        if number in (3, 5, 6, 7):
            with no_synchronisation():
                mean_square(pipe(x), y).backward()
        else:
            mean_square(pipe(x), y).backward()


# --------------------------------------------------------------------------------------------------------- streams


class Slow(nn.Module):
    """Keeps its stream busy before it computes: whoever does not wait for the stream reads too early."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            torch.cuda._sleep(CYCLES)
        return torch.tanh(x) * 2.0


class LateCopies(Local):
    """A transport whose copies begin late: whoever does not wait for the copy reads too early."""

    def _stream(self, device: torch.device, other: torch.device) -> torch.Stream:
        stream = super()._stream(device, other)
        with entered_streams(stream):
            torch.cuda._sleep(CYCLES)
        return stream


@pytest.mark.parametrize("late", [False, True], ids=["slow layers", "slow layers and late copies"])
@pytest.mark.parametrize("where", PLACES)
def test_every_stream_waits_for_what_it_reads(where: str, late: bool) -> None:
    model = nn.Sequential(Slow(), nn.Linear(64, 64), Slow(), nn.Linear(64, 64), Slow(), nn.Linear(64, 64)).double()
    plain = copy.deepcopy(model).cuda()
    pipe = Pipe(model, [2, 2, 2], 3, devices=PLACES[where]())
    if late:
        settings = pipe._settings
        pipe._settings = replace(settings, layout=replace(settings.layout, transport=LateCopies()))
    x, y = torch.randn(12, 64).double(), torch.randn(12, 64).double()
    expected, grads = by_hand(plain, x.cuda(), y.cuda(), 3)  # type: ignore[arg-type]
    for _ in range(3):
        pipe.zero_grad()
        assert pipe.step(x, y, loss_fn=mean_square).loss.item() == pytest.approx(expected, rel=1e-10)
        for param, grad in zip(pipe.parameters(), grads, strict=True):
            torch.testing.assert_close(param.grad.cpu(), grad.cpu(), rtol=1e-9, atol=1e-12)  # type: ignore[union-attr]


@pytest.mark.parametrize("there", ["another place", "host"])
def test_memory_under_way_is_not_given_away(there: str) -> None:
    """The sender forgets its tensor while the copy has not begun; what is allocated then must not write into it."""
    transport = LateCopies()
    target = Place(cuda(), "b") if there == "another place" else Place(torch.device("cpu"))
    sent = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    expected = sent.cpu()
    parcel = transport.send([sent], Place(cuda(), "a"), target)
    del sent
    for _ in range(8):
        torch.full((1 << 20,), float("nan"), device="cuda")
    (arrived,) = transport.receive(parcel)
    assert arrived is not None and torch.equal(arrived.cpu(), expected)


# --------------------------------------------------------------------------------------------------- autograd's threads


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("where", PLACES)
def test_backward_ends(where: str, workers: str) -> None:
    """A lane's thread that waits while another asks autograd for work on its device would wait for ever."""
    pipe = Pipe(network(), [2, 2, 3], 4, devices=PLACES[where](), workers=workers)
    x = torch.randn(16, 6).double()
    ended = threading.Event()

    def work() -> None:
        for _ in range(5):
            pipe(x).square().sum().backward()
        ended.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert ended.is_set()


# ------------------------------------------------------------------------------------------------- precision and memory


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_seen_in_forward_recomputation_and_backward(dtype: torch.dtype, mode: str) -> None:
    seen: list[torch.dtype] = []

    class See(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return x

    model = nn.Sequential(nn.Linear(8, 8), See(), nn.Linear(8, 8), See(), nn.Linear(8, 8))
    pipe = Pipe(model, [2, 2, 1], 2, devices=["cuda:0"] * 3, checkpoint=mode)
    with torch.autocast("cuda", dtype=dtype):
        output = pipe(torch.randn(8, 8, device="cuda"))
    output.float().sum().backward()
    assert set(seen) == {dtype}


@pytest.mark.parametrize("mode", MODES)
def test_a_grad_scaler_steps_as_with_the_plain_module(mode: str) -> None:
    losses = []
    for piped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
        module = Pipe(model, [1, 1, 1], 1, devices=["cuda:0"] * 3, checkpoint=mode) if piped else model
        optimizer, scaler = torch.optim.SGD(module.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
        x, y = torch.randn(16, 8, device="cuda"), torch.randn(16, 1, device="cuda")
        for _ in range(10):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = functional.mse_loss(module(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_checkpointing_lowers_the_allocators_peak() -> None:
    """Four stages of four wide layers: 'always' keeps one input a chunk and stage, 'never' every activation."""
    peaks = {}
    for mode in MODES:
        torch.manual_seed(0)
        model = nn.Sequential(*(part for _ in range(16) for part in (nn.Linear(256, 256), nn.Tanh())))
        pipe = Pipe(model, [8] * 4, 8, devices=["cuda:0"] * 4, schedule="gpipe", checkpoint=mode)
        x, y = torch.randn(8 * 4096, 256, device="cuda"), torch.randn(8 * 4096, 256, device="cuda")
        for _ in range(3):
            pipe.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            pipe.step(x, y, loss_fn=mean_square)
            peaks[mode] = torch.cuda.max_memory_allocated() - before
    assert peaks["always"] < 0.4 * peaks["never"]
    assert peaks["except_last"] <= 1.02 * peaks["always"]
