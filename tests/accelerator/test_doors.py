"""The backward of `pipe(x)` on accelerators: where it runs, what it waits for, and that it never waits for ever."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline import Pipe, is_recomputing
from pipeline.common.accelerators import entered_streams
from pipeline.common.places import Place

PATIENCE = 20.0  # seconds, after which a call that should have ended is called stuck
CALLS = 3  # the first two run in one thread
ROWS, WIDE = 8, 4
CHECKPOINTS = ("always", "never")


def sim(index: int) -> torch.device:
    return torch.device("sim", index)


PLACES: dict[str, Callable[[], list[Any]]] = {
    "one device": lambda: [sim(0)] * 4,
    "parts of one": lambda: [Place(sim(0), name) for name in "abcd"],
    "two and two": lambda: [sim(0), sim(0), sim(1), sim(1)],
    "in turns": lambda: [sim(0), sim(1), sim(0), sim(1)],
    "with the host": lambda: ["cpu", sim(1), "cpu", sim(1)],
    "three": lambda: [sim(2), sim(0), sim(1), sim(2)],
}


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """A thread in which autograd waits cannot be ended: the process is, and says where it stood."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def network(seed: int = 0, noise: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    stage = [[nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Dropout(noise)] for _ in range(4)]
    return nn.Sequential(*[layer for layers in stage for layer in layers]).double()


def rows(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def piped(where: str, model: Any = None, workers: str | None = "threads", mode: str = "always") -> Pipe:
    places = PLACES[where]()
    return Pipe(model or network(), [3] * 4, 4, devices=places, workers=workers, checkpoint=mode)


def loss_of(out: Tensor) -> Tensor:
    return out.square().sum().to("cpu")


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-12, atol=1e-12)


def grads_of(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss_of(module(x)), list(module.parameters()))


@pytest.mark.parametrize("mode", CHECKPOINTS)
@pytest.mark.parametrize("workers", ["threads", "inline", None])
@pytest.mark.parametrize("where", PLACES)
def test_every_backward_ends_with_the_gradients_of_the_plain_module(where: str, workers: str, mode: str) -> None:
    pipe, expected = piped(where, workers=workers, mode=mode), grads_of(network(), rows())
    for _ in range(CALLS):
        assert_close(grads_of(pipe, rows()), expected)


class Noise(nn.Module):
    """Draws from its device's generator, some time after that was seeded for it."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.002)
        return x * torch.rand_like(x)


@pytest.mark.parametrize("mode", CHECKPOINTS)
@pytest.mark.parametrize("where", PLACES)
def test_layers_draw_the_same_numbers_in_threads_as_in_one(where: str, mode: str) -> None:
    found = []
    for workers in ("threads", "inline"):
        model = network()
        for place in (2, 5, 8, 11):
            model[place] = Noise()
        pipe = piped(where, model, workers, mode)
        for call in range(CALLS):
            torch.manual_seed(call)
            grads = grads_of(pipe, rows())
        found.append([grad.cpu() for grad in grads])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("mode", CHECKPOINTS)
@pytest.mark.parametrize("where", PLACES)
def test_second_derivatives_are_those_of_the_plain_module(where: str, mode: str) -> None:
    found = []
    for module in (piped(where, mode=mode), network()):
        params = list(module.parameters())
        for _ in range(CALLS if isinstance(module, Pipe) else 1):
            x = rows().requires_grad_()
            grads = torch.autograd.grad(loss_of(module(x)), [x, *params], create_graph=True)
            loss = torch.stack([grad.square().sum().cpu() for grad in grads]).sum()
            products = torch.autograd.grad(loss, [x, *params])
        found.append(products)
    assert_close(*found)


@pytest.mark.parametrize("in_another_thread", [False, True])
@pytest.mark.parametrize("where", PLACES)
def test_the_last_stage_recomputes_in_the_thread_that_asks_for_a_backward(where: str, in_another_thread: bool) -> None:
    seen: set[int] = set()

    class Note(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if is_recomputing():
                seen.add(threading.get_ident())
            return x

    model = network()
    model[9] = Note()
    pipe = piped(where, model)
    for _ in range(CALLS):
        loss = loss_of(pipe(rows()))
        seen.clear()
        asked: list[int] = []

        def ask() -> None:
            asked.append(threading.get_ident())
            loss.backward()

        if in_another_thread:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        else:
            ask()
        assert seen == set(asked)


@pytest.mark.parametrize("mode", CHECKPOINTS)
@pytest.mark.parametrize("where", [("two and two", "in turns"), ("three", "with the host"), ("in turns", "one device")])
def test_pipes_with_different_last_devices_are_parts_of_one_loss(where: tuple[str, str], mode: str) -> None:
    one = piped(where[0], network(0), None, mode)
    other = Pipe(network(1), [3] * 4, 4, devices=PLACES[where[1]]()[::-1], checkpoint=mode)
    expected = grads_of(network(0), rows()) + grads_of(network(1), rows())
    for _ in range(CALLS):
        loss = loss_of(one(rows())) + loss_of(other(rows()))
        assert_close(torch.autograd.grad(loss, [*one.parameters(), *other.parameters()]), expected)


@pytest.mark.parametrize("mode", CHECKPOINTS)
@pytest.mark.parametrize("workers", ["threads", "inline"])
def test_a_pipe_in_a_pipe_over_two_devices_ends(workers: str, mode: str) -> None:
    inner = piped("two and two", workers=workers, mode=mode)

    class Inside(nn.Module):
        """Not a child: a Pipe is not moved by others."""

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = inner(x)
            return out.to(x.device)

    model = network(1)
    plain = nn.Sequential(*model[:6], network(), *model[6:])
    expected = dict(zip(dict(plain.named_parameters()), grads_of(plain, rows()), strict=True))
    model = nn.Sequential(*model[:6], Inside(), *model[6:])
    outer = Pipe(model, [3, 4, 6], 2, devices=[sim(0), sim(1), sim(0)], checkpoint=mode, mixes_rows=True)
    for _ in range(CALLS):
        loss = loss_of(outer(rows()))
        inside = torch.autograd.grad(loss, list(inner.parameters()), retain_graph=True)
        assert_close(inside, [grad for name, grad in expected.items() if name.startswith("6.")])
        outside = torch.autograd.grad(loss, list(outer.parameters()))
        assert_close(outside, [grad for name, grad in expected.items() if not name.startswith("6.")])


@pytest.fixture
def _may_mismatch() -> Iterator[None]:
    """Autograd warns, once in a process, where leaves and their gradients are on different streams, and waits."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    yield
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)


@contextmanager
def streams(number: int) -> Iterator[None]:
    """Within: on every device another stream is the current one. 0: the default streams."""
    with ExitStack() as stack:
        if number:
            made = [torch.Stream(device=sim(index)) for index in range(torch.accelerator.device_count())]
            stack.enter_context(entered_streams(*made))
        yield


def wait_for_all() -> None:
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


@pytest.mark.usefixtures("_may_mismatch")
@pytest.mark.parametrize("mode", CHECKPOINTS)
@pytest.mark.parametrize("workers", ["threads", "inline"])
@pytest.mark.parametrize("ways", [(1, 0), (0, 1), (1, 2)])
@pytest.mark.parametrize("where", PLACES)
def test_a_backward_on_other_streams_than_its_forward_waits_for_all_that_it_reads(
    where: str, ways: tuple[int, int], workers: str, mode: str
) -> None:
    """What is not waited for is a race, which the device raises."""
    pipe, expected = piped(where, workers=workers, mode=mode), grads_of(network(), rows())
    for _ in range(CALLS):
        with streams(ways[0]):
            out = pipe(rows())
        wait_for_all()  # what the caller does with the output is the caller's
        with streams(ways[1]):
            grads = torch.autograd.grad(loss_of(out), list(pipe.parameters()))
            assert_close([grad * 1 for grad in grads], expected)


@pytest.mark.usefixtures("_may_mismatch")
@pytest.mark.parametrize("ways", [(0, 0), (1, 2)])
def test_outputs_on_two_devices_wait_for_each_gradient(ways: tuple[int, int]) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x.to(sim(0)) * 3 if x.is_sim else x * 3

    def loss_of_both(one: Tensor, other: Tensor) -> Tensor:
        return loss_of(one.sin()) + loss_of(other.cos())

    found = []
    for devices in ([sim(0), sim(1)], ["cpu", "cpu"]):
        pipe = Pipe(nn.Sequential(*network(), Both()), [6, 7], 2, devices=devices)
        for _ in range(CALLS):
            with streams(ways[0]):
                outputs = pipe(rows())
            wait_for_all()
            with streams(ways[1]):
                grads = torch.autograd.grad(loss_of_both(*outputs), list(pipe.parameters()))
                ours = [grad.cpu() for grad in grads]
        found.append(ours)
    assert_close(*found)


@pytest.mark.parametrize("where", PLACES)
def test_a_backward_that_autograd_asks_for_in_a_thread_of_its_own_ends(where: str) -> None:
    """A reentrant checkpoint goes backward in the thread of its output's device, in which no lane may be waited for."""
    pipe, expected = piped(where), grads_of(network(), rows())
    for _ in range(CALLS):
        x = rows().requires_grad_()
        pipe.zero_grad()
        out = checkpoint(lambda x: pipe(x), x, use_reentrant=True)
        loss_of(out).backward()
        assert_close([param.grad for param in pipe.parameters()], expected)


@pytest.mark.parametrize("where", PLACES)
def test_batched_gradients_are_those_of_the_plain_module(where: str) -> None:
    found = []
    directions = torch.randn(3, ROWS, WIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for module in (piped(where), network()):
        out, params = module(rows()), list(module.parameters())
        found.append(torch.autograd.grad(out, params, directions.to(out.device), is_grads_batched=True))
    assert_close(*found)


@pytest.mark.parametrize("mode", CHECKPOINTS)
@pytest.mark.parametrize("where", PLACES)
def test_backwards_of_several_threads_take_turns(where: str, mode: str) -> None:
    pipes, expected = [piped(where, mode=mode), piped("in turns", mode=mode)], grads_of(network(), rows())
    owners = [list(pipe.parameters()) for pipe in pipes]
    ended: list[bool] = []

    def work(number: int) -> None:
        for _ in range(CALLS):
            out = pipes[number](rows())
            assert_close(torch.autograd.grad(loss_of(out), owners[number]), expected)
        ended.append(True)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 3


@pytest.mark.parametrize("mode", CHECKPOINTS)
@pytest.mark.parametrize("where", PLACES)
def test_hooks_act_once_in_each_backward_and_a_third_one_is_refused_in_torchs_words(where: str, mode: str) -> None:
    found = []
    for module in (piped(where, mode=mode), network()):
        for _ in range(CALLS - 1 if isinstance(module, Pipe) else 0):
            grads_of(module, rows())
        calls: list[Any] = []
        params, x = list(module.parameters()), rows().requires_grad_()
        params[0].register_hook(lambda grad, calls=calls: calls.append("whole") or grad * 2)
        params[-1].register_post_accumulate_grad_hook(lambda param, calls=calls: calls.append("added"))
        out = module(x)
        out.retain_grad()
        out.register_hook(lambda grad, calls=calls: calls.append("output") or grad * 3)
        loss = loss_of(out)
        loss.backward(retain_graph=True)
        loss.backward()
        assert sorted(calls) == ["added"] * 2 + ["output"] * 2 + ["whole"] * 2
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            loss.backward()
        found.append([tensor.grad for tensor in [x, out, *params] if tensor.grad is not None])
    assert_close(*found)
