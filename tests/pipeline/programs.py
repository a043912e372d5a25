"""Programs: calls of a Pipe, between which its layers begin to do other things.

    a program -> [("ways", 1, ("dropout",)), ("forward", 5, True), ("freeze", 0, "w", False), ("step", 3, False), ...]

The layers are shifting_layers.py. test_programs.py compares the calls with the plain module, over ranks
test_rank_programs.py with the Pipe of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from law_check import DRIVES
from law_models import Case, normal, per_row
from shifting_layers import WAYS, WIDTH, Shifting
from torch import Tensor, nn

from pipeline import Pipe

CALLS = ("forward", "no_grad", "step", "evaluate")
PARAMETERS = ("w", "u", "b", "inner.weight", "shared.weight")
CHECKPOINTS = ("always", "never", "except_last")
Change = tuple[Any, ...]


class Program(NamedTuple):
    """What is done with one Pipe, and how that is built.

    Attributes:
        ways: of each layer, at first.
        balance: of the Pipe.
        chunks: of the Pipe.
        options: of the Pipe, by name.
        changes: calls, and what is done between them.
        drive: by which the Pipe runs, a name in DRIVES.
    """

    ways: tuple[tuple[str, ...], ...]
    balance: tuple[int, ...]
    chunks: int
    options: dict[str, str]
    changes: tuple[Change, ...]
    drive: str = "inline"


@st.composite
def programs(draw: st.DrawFn, ranks: int = 0, calls: Sequence[str] = CALLS) -> Program:
    """Programs of a Pipe in one process, in any way; or of one over so many ranks.

    Args:
        draw: hypothesis' own.
        ranks: 0: one process.
        calls: the calls to choose from.
    """
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", *(["interleaved", "zb-v"] if ranks else [])]))
    stages = ranks * (2 if schedule in ("interleaved", "zb-v") else 1)
    count = draw(st.integers(stages, stages + 2) if ranks else st.integers(2, 4))
    sizes = {"min_size": stages - 1, "max_size": stages - 1} if ranks else {"min_size": 1}
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), **sizes)))
    names = st.sampled_from(sorted(WAYS))
    layers = st.integers(0, count - 1)
    call = st.tuples(st.sampled_from(calls), st.integers(1, 7), st.booleans())
    change = st.one_of(
        st.tuples(st.just("ways"), layers, st.lists(names, min_size=1, max_size=3).map(tuple)),
        st.tuples(st.just("train"), st.booleans()),
        st.tuples(st.just("freeze"), layers, st.sampled_from(PARAMETERS), st.booleans()),
        st.tuples(st.just("descend")),
        st.tuples(st.just("replace"), layers),
        st.tuples(st.just("chunks"), st.integers(1, 4)),
        st.tuples(st.just("checkpoint"), st.sampled_from(CHECKPOINTS)),
    )
    options = {"checkpoint": draw(st.sampled_from(CHECKPOINTS)), "schedule": schedule}
    drive = "inline" if ranks else draw(st.sampled_from(sorted(DRIVES)))
    changes = draw(st.lists(st.one_of(call, call, change), min_size=1, max_size=12))
    balance = tuple([end - start for start, end in zip([0, *cuts], [*cuts, count], strict=True)])
    ways = tuple([("linear", *draw(st.lists(names, max_size=1))) for _ in range(count)])
    return Program(ways, balance, draw(st.integers(1, 4)), options, tuple(changes), drive)


def case_of(ways: Sequence[tuple[str, ...]]) -> Case:
    shared = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        shared.weight.copy_(normal(WIDTH, WIDTH, seed=90) / 2)
        shared.bias.zero_()
    captured = torch.full((WIDTH,), 0.7, dtype=torch.float64, requires_grad=True)
    layers = [Shifting(number, shared, captured) for number in range(len(ways))]
    for layer, own in zip(layers, ways, strict=True):
        layer.ways = own
    return Case(nn.Sequential(*layers), lambda rows: normal(rows, WIDTH), joined_loss, extras=(captured,))


def joined_loss(output: Any) -> Tensor:
    return per_row(output).sum()


def changed(model: nn.Sequential, change: Change, pipe: Pipe | None = None, extras: Iterable[Tensor] = ()) -> None:
    """Do something else than a call to a model, and to the Pipe of its layers, if there is one.

    Args:
        model: the model.
        change: what to do.
        pipe: is told its mode and settings, and its parameters descend, in the place of the model's.
        extras: descend as well.
    """
    kind, *what = change
    told = model if pipe is None else pipe
    if kind == "train":
        told.train(what[0])
    elif kind == "descend":
        with torch.no_grad():
            for param in [*told.parameters(), *extras]:
                if param.grad is not None:
                    param.sub_(0.05 * param.grad.clamp(-1, 1))
    elif kind in ("chunks", "checkpoint"):
        if pipe is not None:
            setattr(pipe, kind, what[0])
    else:
        layer: Any = model[what[0]]
        if kind == "ways":
            layer.ways = what[1]
        elif kind == "freeze":
            layer.get_parameter(what[1]).requires_grad_(what[2])
        else:
            layer.u = nn.Parameter(0.9 * layer.u.detach())


def near(one: Any, other: Any) -> bool:
    """Whether two values are the same to rounding."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and torch.allclose(one, other, rtol=1e-9, atol=1e-11, equal_nan=True)
    return type(one) is type(other) and bool(one == other)
