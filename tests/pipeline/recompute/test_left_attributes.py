"""Law: a hook of the backward, or an autograd.Function, finds in its module what the forward of its chunk left."""

from __future__ import annotations

import copy
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipeline import CheckpointError, Pipe

CHUNKS = 3


class Keeps(nn.Module):
    """A layer whose backward multiplies by what its forward kept of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.backwards, self.log = 0, []
        self.kept = {"seen": None}

    def keep(self, seen: torch.Tensor) -> None:
        self.seen = seen

    def read(self) -> torch.Tensor:
        return self.seen

    def back(self, grad: torch.Tensor) -> torch.Tensor:
        self.backwards += 1
        self.log.append(len(grad))
        return grad * (1 + self.read().detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keep(x.mean(1, keepdim=True) * 2)  # in autograd's graph, which does not save it
        y = self.inner(x).tanh()
        if y.requires_grad:
            y.register_hook(self.back)
        return y


class KeepsInADict(Keeps):
    def keep(self, seen: torch.Tensor) -> None:
        self.kept["seen"] = seen

    def read(self) -> torch.Tensor:
        return self.kept["seen"]


class CountsInADict(KeepsInADict):
    """Its backward counts in the dict in which its forward keeps."""

    def back(self, grad: torch.Tensor) -> torch.Tensor:
        self.kept["backwards"] = self.kept.get("backwards", 0) + 1
        return super().back(grad)


class CountsInAnObject(KeepsInADict):
    """In an object."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = SimpleNamespace(seen=None, backwards=0)

    def keep(self, seen: torch.Tensor) -> None:
        self.kept.seen = seen

    def read(self) -> torch.Tensor:
        return self.kept.seen

    def back(self, grad: torch.Tensor) -> torch.Tensor:
        self.kept.backwards += 1
        return super().back(grad)


class KeepsInAList(Keeps):
    def keep(self, seen: torch.Tensor) -> None:
        self.log.append(seen)

    def read(self) -> torch.Tensor:
        return [entry for entry in self.log if isinstance(entry, torch.Tensor)][-1]


class KeepsInPlace(Keeps):
    """A tensor that every forward writes."""

    def keep(self, seen: torch.Tensor) -> None:
        if not hasattr(self, "seen"):
            self.seen = torch.zeros_like(seen.detach())
        self.seen.copy_(seen.detach())


class KeepsByHooks(nn.Module):
    """Hooks of modules, as libraries for gradients of single samples set them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.register_forward_hook(lambda module, inputs, _: setattr(module, "seen", inputs[0].detach()))
        self.inner.register_full_backward_hook(
            lambda module, grads, _: (grads[0] * (1 + module.seen.square().mean(1, keepdim=True)),)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()


class ByModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + ctx.module.seen), None


class KeepsForAFunction(Keeps):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keep(x.detach().mean(1, keepdim=True))
        return ByModule.apply(self.inner(x).tanh(), self)


class RemovesItsHook(Keeps):
    """A hook that removes itself, by an attribute that the next forward overwrites (deep equilibrium models)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).tanh()
        if y.requires_grad:
            self.hook = y.register_hook(self.back)
        return y

    def back(self, grad: torch.Tensor) -> torch.Tensor:
        self.hook.remove()
        self.hook = None
        return grad * 2


LAYERS = (
    Keeps, KeepsInADict, CountsInADict, CountsInAnObject, KeepsInAList, KeepsInPlace, KeepsByHooks, KeepsForAFunction,
    RemovesItsHook,
)  # fmt: skip


def model_of(layer: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), layer(), nn.Tanh(), layer(), nn.Linear(4, 2)).double()


def by_hand(model: nn.Module, x: torch.Tensor, y: torch.Tensor, chunks: int) -> None:
    for rows, target in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
        (nn.functional.mse_loss(model(rows), target) / chunks).backward()


def assert_same_gradients(
    pipe: Pipe, plain: nn.Module, how: str, turn: int, rtol: float = 1e-12, atol: float = 1e-14
) -> None:
    """Those of a mini-batch through a Pipe and of the loop by hand."""
    torch.manual_seed(turn)
    rows = 2 * pipe.chunks
    x, y = torch.randn(rows, 4, dtype=torch.float64), torch.randn(rows, 2, dtype=torch.float64)
    for each in (plain, pipe):
        each.zero_grad()
    by_hand(plain, x, y, pipe.chunks)
    if how == "step":
        pipe.step(x, y, loss_fn=nn.functional.mse_loss)
    else:
        outputs = pipe(x)
        nn.functional.mse_loss(outputs, y.to(outputs.device)).backward()
    for mine, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), other.grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("how", ["step", "forward"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_backward_finds_what_its_forward_left(layer, checkpoint, schedule, how, workers):
    if how == "forward" and schedule == "zb-h1":
        pytest.skip("for step alone")
    if layer is KeepsInPlace and checkpoint != "never":
        pytest.skip("a recomputation that writes an attribute in place is refused")
    plain = model_of(layer)
    model = copy.deepcopy(plain) if layer is not KeepsByHooks else model_of(layer)
    pipe = Pipe(model, [2, 3], CHUNKS, checkpoint=checkpoint, schedule=schedule, workers=workers)
    for turn in range(5):
        assert_same_gradients(pipe, plain, how, turn)
        for mine, other in zip(model.modules(), plain.modules(), strict=True):
            if type(mine) in (Keeps, KeepsInADict, KeepsInPlace):  # what backwards change stays
                assert mine.backwards == other.backwards == (turn + 1) * CHUNKS
                assert mine.log == other.log
                torch.testing.assert_close(mine.read(), other.read())
            if type(mine) is CountsInADict:
                assert mine.kept["backwards"] == other.kept["backwards"] == (turn + 1) * CHUNKS
            if type(mine) is CountsInAnObject:
                assert mine.kept.backwards == other.kept.backwards == (turn + 1) * CHUNKS
            if type(mine) is RemovesItsHook:
                assert mine.hook is other.hook is None


class KeepsOfSomeChunks(Keeps):
    """Other chunks find what an earlier one left, maybe in the call before."""

    seen = torch.zeros(1, 1, dtype=torch.float64)

    def __init__(self) -> None:
        super().__init__()
        self.detaches = False

    def keep(self, seen: torch.Tensor) -> None:
        if seen.sum() > 0:
            self.seen = seen.detach() if self.detaches else seen


@pytest.mark.parametrize("how", ["step", "forward"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("detaches", [True, False])
def test_a_backward_finds_what_another_chunk_left_or_is_refused_where_that_is_freed(
    detaches, checkpoint, schedule, how
):
    plain = model_of(KeepsOfSomeChunks)
    for layer in plain[1], plain[3]:
        layer.detaches = detaches
    pipe = Pipe(copy.deepcopy(plain), [2, 3], 8, checkpoint=checkpoint, schedule=schedule)
    for turn in range(9):
        try:
            assert_same_gradients(pipe, plain, how, turn)
        except CheckpointError as error:
            assert "a tensor in autograd's graph that the forward of another chunk had left in an" in str(error)
            assert not detaches and checkpoint != "never"
            assert type(pipe[1].seen) is type(pipe[3].seen) is torch.Tensor  # no stand-in is left behind
            return
        for mine, other in (pipe[1], plain[1]), (pipe[3], plain[3]):
            torch.testing.assert_close(mine.seen, other.seen)
    assert detaches or checkpoint == "never"


class Stack(Keeps):
    kind = list

    def __init__(self) -> None:
        super().__init__()
        self.stack = self.kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).tanh()
        if y.requires_grad:
            self.stack.append(x.detach().mean(1, keepdim=True))
            y.register_hook(lambda grad: grad * self.stack.pop())
        return y


class Queue(Stack):
    kind = deque


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("layer", [Stack, Queue])
def test_a_stack_of_several_chunks_is_refused(layer, checkpoint):
    pipe = Pipe(model_of(layer), [2, 3], CHUNKS, checkpoint=checkpoint, schedule="gpipe")
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    words = r"took something out of a list, a set or a deque of a module to which forw.* pipe.to_sequential\(\)"
    with pytest.raises(RuntimeError, match=words):
        pipe.step(x, y, loss_fn=nn.functional.mse_loss)
    nn.functional.mse_loss(pipe.to_sequential()(x), y).backward()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_dict_keeps_its_order_where_some_chunks_have_gone_backward(checkpoint):
    class Numbers(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.numbers = nn.Linear(4, 4), {}

        def forward(self, x):
            self.numbers[len(self.numbers)] = None
            assert list(self.numbers) == sorted(self.numbers)
            return self.inner(x)

    pipe = Pipe(nn.Sequential(*[Numbers() for _ in range(4)]), [1, 1, 1, 1], 6, checkpoint=checkpoint, schedule="1f1b")
    pipe.step(torch.randn(6, 4), loss_fn=lambda output, _: output.mean())
    assert all(list(layer.numbers) == sorted(layer.numbers) for layer in pipe)


def test_what_a_caller_sets_between_forward_and_backward_counts():
    class Scaled(Keeps):
        factor = 1.0

        def back(self, grad):
            return super().back(grad) * self.factor

    plain = model_of(Scaled)
    pipe = Pipe(copy.deepcopy(plain), [2, 3], CHUNKS, checkpoint="never")
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    outputs = pipe(x)
    for each in (plain, pipe):
        for module in each.modules():
            if isinstance(module, Scaled):
                module.factor = 0.25
    by_hand(plain, x, y, CHUNKS)
    nn.functional.mse_loss(outputs, y).backward()
    for mine, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_a_log_of_several_stages_keeps_what_they_add_and_take(checkpoint, workers):
    class Logs(nn.Module):
        def __init__(self, log, waiting):
            super().__init__()
            self.log, self.waiting = log, waiting

        def forward(self, x):
            self.log.append("F")
            self.waiting.append(len(x))
            return ByLog.apply(x, self)

    class ByLog(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.module = module
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            ctx.module.log.append("B")
            assert ctx.module.waiting.pop() == len(grad)
            return grad, None

    log, waiting = [], []
    layers = [layer for _ in range(2) for layer in (nn.Linear(4, 4), Logs(log, waiting))]
    pipe = Pipe(nn.Sequential(*layers), [2, 2], CHUNKS, checkpoint=checkpoint, schedule="gpipe", workers=workers)
    for turn in range(1, 5):
        pipe.step(torch.ones(6, 4), loss_fn=lambda out, _: out.sum(), loss_reduction="sum")
        assert log.count("B") == 2 * CHUNKS * turn


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_bounded_log_keeps_the_newest(checkpoint):
    class Bounded(Keeps):
        def __init__(self) -> None:
            super().__init__()
            self.log = deque(maxlen=2)

        def keep(self, seen):
            self.log.append("F")
            super().keep(seen)

    pipe = Pipe(model_of(Bounded), [2, 3], CHUNKS, checkpoint=checkpoint, schedule="gpipe")
    for _ in range(4):
        x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
        pipe.step(x, y, loss_fn=nn.functional.mse_loss)
    assert [len(module.log) for module in pipe.modules() if isinstance(module, Bounded)] == [2, 2]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("chunks", [2, 6])
def test_a_log_of_forwards_and_backwards_has_all_entries(chunks, schedule):
    """Words and small numbers, each one object wherever it stands."""

    class Logs(Keeps):
        def keep(self, seen):
            self.log.append("F")
            super().keep(seen)

    class Takes(Logs):
        def back(self, grad):
            self.log.remove("F")
            return grad

    x, y = torch.randn(12, 4, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    pipe = Pipe(model_of(Logs), [2, 3], chunks, checkpoint="never", schedule=schedule)
    for turn in range(1, 5):
        pipe.step(x, y, loss_fn=nn.functional.mse_loss)
        for log in [module.log for module in pipe.modules() if isinstance(module, Logs)]:
            assert (log.count("F"), log.count(12 // chunks)) == (turn * chunks, turn * chunks)
    pipe = Pipe(model_of(Takes), [2, 3], chunks, checkpoint="never", schedule=schedule)
    with pytest.raises(RuntimeError, match="took something out of a list"):
        pipe.step(x, y, loss_fn=nn.functional.mse_loss)


class Sometimes(Keeps):
    """Every second forward keeps what it sees, in autograd's graph; the next one finds that."""

    turns = 0

    def keep(self, seen: torch.Tensor) -> None:
        if self.turns % 2 == 0:
            self.seen = seen
        self.turns += 1


class Seldom(Keeps):
    """Some forwards keep what they see, and write in place what all have; others change nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.written = torch.zeros(1, dtype=torch.float64)

    def keep(self, seen: torch.Tensor) -> None:
        if seen.sum() > 0 or not hasattr(self, "seen"):
            self.seen = seen.detach().mean()
            self.written += self.seen

    def read(self) -> torch.Tensor:
        return self.seen + self.written


@pytest.mark.parametrize("layer", [Sometimes, Seldom])
def test_what_some_forwards_leave_alone_is_kept_alive_for_them(layer):
    plain = model_of(layer)
    pipe = Pipe(copy.deepcopy(plain), [2, 3], 8, checkpoint="never", schedule="gpipe")
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    for _ in range(5):
        for each in (plain, pipe):
            each.zero_grad()
        for rows, target in zip(x.chunk(8), y.chunk(8), strict=True):
            (nn.functional.mse_loss(plain(rows), target) / 8).backward()
        pipe.step(x, y, loss_fn=nn.functional.mse_loss)
        for mine, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-14)
