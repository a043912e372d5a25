"""Law: whatever a forward leaves in the attributes of its module, gradients and attributes are the plain loop's, or the
step is refused in words."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipeline import CheckpointError, Pipe


class WithSlots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = 0.0


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, Any], Any]]] = {  # make, read, write
    "dict": (lambda: {"v": 0.0}, lambda held: held["v"], lambda held, value: held.update(v=value)),
    "ordered": (lambda: OrderedDict(v=0.0), lambda held: held["v"], lambda held, value: held.update(v=value)),
    "list": (lambda: [0.0], lambda held: held[-1], lambda held, value: held.__setitem__(-1, value)),
    "log": (lambda: [0.0], lambda held: held[-1], lambda held, value: held.append(value)),
    "deque": (lambda: deque([0.0], maxlen=2), lambda held: held[-1], lambda held, value: held.append(value)),
    "object": (lambda: SimpleNamespace(v=0.0), lambda held: held.v, lambda held, value: setattr(held, "v", value)),
    "slots": (WithSlots, lambda held: held.value, lambda held, value: setattr(held, "value", value)),
    "nested": (
        lambda: ({"a": [[0.0]]},), lambda held: held[0]["a"][0][0],
        lambda held, value: held[0]["a"][0].__setitem__(0, value),
    ),
    "array": (
        lambda: numpy.zeros(1), lambda held: float(held[0]), lambda held, value: held.__setitem__(0, number_of(value)),
    ),
    "tensor": (lambda: torch.zeros(1).double(), lambda held: held[0], lambda held, value: held.fill_(number_of(value))),
    "module": (nn.Module, lambda held: vars(held).get("v", 0.0), lambda held, value: setattr(held, "v", value)),
}  # fmt: skip


def number_of(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Keeper) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.layer.scaled(grad), None


class Keeper(nn.Module):
    """A layer that keeps a number of some chunks, and reads the last one forward or backward.

    Args:
        holder: what it keeps the number in.
        kept: as a tensor in the graph, as a detached one, or as a float.
        chunks: the chunks of which it does: all, or those with a sum above or below 0.
        is_first: it keeps before it reads.
        reads: where it reads it: forward, or in a hook or a Function backward.
    """

    def __init__(self, holder: str, kept: str, chunks: str, is_first: bool, reads: str) -> None:
        super().__init__()
        make, self._read, self._write = HOLDERS[holder]
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.held, self.kept, self.chunks, self.is_first, self.reads = make(), kept, chunks, is_first, reads

    @property
    def number(self) -> Any:
        value = self._read(self.held)
        return value.detach() if isinstance(value, Tensor) else value

    def scaled(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * self.number)

    def _keep(self, x: Tensor) -> None:
        if self.chunks == "all" or (self.chunks == "above") == bool(x.sum() > 0):
            mean = x.mean()
            self._write(self.held, {"graph": mean, "tensor": mean.detach(), "float": float(mean.detach())}[self.kept])

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        if self.is_first:
            self._keep(y)
        y = (self.scaled(y) if self.reads == "forward" else y).tanh()
        if self.reads == "function":
            y = Scaled.apply(y, self)
        elif self.reads == "hook" and y.requires_grad:
            y.register_hook(self.scaled)
        if not self.is_first:
            self._keep(y)
        return y


KEEPERS = st.builds(
    Keeper, st.sampled_from([*HOLDERS]), st.sampled_from(["graph", "tensor", "float"]),
    st.sampled_from(["all", "above", "below"]), st.booleans(), st.sampled_from(["forward", "hook", "function"]),
)  # fmt: skip


@given(
    keepers=st.lists(KEEPERS, min_size=1, max_size=3),
    first=st.integers(1, 2),
    chunks=st.integers(2, 5),
    checkpoint=st.sampled_from(["never", "except_last", "always"]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    steps=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_forwards_keep_is_the_plain_loops_or_refused(
    keepers: list[Keeper], first: int, chunks: int, checkpoint: str, schedule: str, steps: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    plain = nn.Sequential(*[layer for keeper in keepers for layer in (keeper, nn.Linear(4, 4).double())])
    schedule = schedule if steps else "gpipe"
    pipe = Pipe(
        copy.deepcopy(plain), [first, len(plain) - first] if len(plain) > first else [first], chunks,
        checkpoint=checkpoint, schedule=schedule, mixes_rows=True,
    )  # fmt: skip
    for _ in range(4):
        x, y = torch.randn(2, 2 * chunks, 4, dtype=torch.float64)
        plain.zero_grad()
        pipe.zero_grad()
        try:
            if steps:
                pipe.step(x, y, loss_fn=mse_loss)
            else:
                mse_loss(pipe(x), y).backward()
        except (CheckpointError, RuntimeError) as error:
            words = ("when other chunks have run before it", "a tensor in autograd's graph that the forward of another",
                     "wrote a tensor in place that is an attribute", "gave other values than its forward")  # fmt: skip
            assert any(each in str(error) for each in words), error
            event("refused")
            return
        for rows, target in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
            (mse_loss(plain(rows), target) / chunks).backward()
        for mine, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12)
        for layer, keeper in zip(pipe.children(), plain, strict=True):
            if isinstance(layer, Keeper):
                assert abs(float(layer.number) - float(keeper.number)) < 1e-9
    event("right")
