"""Layers that write down what runs in them: which action, for which chunk, and what they are told about it.

    x[:, 0] holds the number of the chunk that a row belongs to; every layer here passes that column on untouched, so a
    layer knows its chunk from its data and from nothing that the engine says.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from pipeline import is_checkpointing, is_recomputing

T = TypeVar("T")


def outside(value: T) -> Callable[[], T]:
    """A function that gives `value`: of what hangs on a module, a recomputation leaves no trace; of this it does."""
    return lambda: value


class Seen(NamedTuple):
    """What a layer saw: F, R (a forward that repeats one) or B, for (stage, chunk)."""

    kind: str
    stage: int
    chunk: int


class Probe(nn.Module):
    """tanh(weight * x), and a note of every forward and backward."""

    def __init__(self, stage: int, log: list[Seen]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 3, dtype=torch.float64))
        self.stage = stage
        told: list[tuple[bool, bool]] = []
        self.note, self.all_told = log.append, outside(told)

    @property
    def told(self) -> list[tuple[bool, bool]]:
        """(is_checkpointing, is_recomputing) of each forward."""
        return self.all_told()

    def forward(self, x: Tensor) -> Tensor:
        chunk = int(x.detach()[0, 0])
        self.note(Seen("R" if is_recomputing() else "F", self.stage, chunk))
        self.told.append((is_checkpointing(), is_recomputing()))
        y = torch.cat([x[:, :1], torch.tanh(x[:, 1:] * self.weight)], 1)
        return _Note.apply(y, self.note, Seen("B", self.stage, chunk))


class _Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[Seen], None], seen: Seen) -> Tensor:
        ctx.note, ctx.seen = note, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.note(ctx.seen)
        return grad, None, None


def probes(stages: int) -> tuple[nn.Sequential, list[Seen]]:
    """One probe a stage, and their common log."""
    log: list[Seen] = []
    return nn.Sequential(*(Probe(stage, log) for stage in range(stages))), log


def labelled(chunks: int, rows: int = 2, extra: int = 0) -> Tensor:
    """An input of `chunks` chunks whose first column names them; the first `extra` chunks have one row more."""
    torch.manual_seed(3)
    sizes = [rows + (chunk < extra) for chunk in range(chunks)]
    numbers = torch.cat([torch.full((size, 1), float(chunk)) for chunk, size in enumerate(sizes)])
    return torch.cat([numbers, torch.randn(sum(sizes), 3)], 1).double()


def sum_of(out: Tensor, target: Any = None) -> Tensor:
    """A loss that saves nothing for its backward."""
    return out.sum()


def run(pipe: nn.Module, x: Tensor, entry: str) -> None:
    """Forward and backward of `x` through an entry point."""
    if entry == "step":
        pipe.step(x, loss_fn=sum_of, loss_reduction="sum")
    else:
        pipe(x).sum().backward()


def pairs(log: Sequence[Seen], kind: str) -> list[tuple[int, int]]:
    """The (stage, chunk) pairs that were seen to run as `kind`, in order."""
    return [(seen.stage, seen.chunk) for seen in log if seen.kind == kind]


def interrupted(log: Sequence[Seen]) -> set[tuple[int, int]]:
    """The rule of `except_last`, read off what ran on one device: another backward stands between F and B."""
    ran = [seen for seen in log if seen.kind != "R"]
    found = set()
    for pair in pairs(ran, "F"):
        between = ran[ran.index(Seen("F", *pair)) + 1 : ran.index(Seen("B", *pair))]
        if any(seen.kind == "B" for seen in between):
            found.add(pair)
    return found


@contextmanager
def no_collector() -> Iterator[None]:
    """Within: what dies, dies because nothing refers to it; a cycle would live on."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
