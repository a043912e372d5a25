"""Law: a model that was cut computes in any later call what it computes, or the call is refused.

    a model   -> steps before its blocks, which may be called twice, what these are called with and return, steps behind
    later     -> another length, a mask or none, other scales; numbers, weights and modes that are set meanwhile
    the law   -> outputs, gradients and buffers of the parts are the model's; PartitionError; or nan, which shows

What the parts cannot know are numbers that the model reads in none but later calls (docs/models.md, Limits): here no
step reads whole numbers of another part.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cover import either
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from partition import PartitionError, to_sequential
from pipeline import Pipe

WIDTH = 4
BEFORE = {
    "position": lambda m, v: v.h + m.shift[: v.h.shape[1]],
    "in place": lambda m, v: v.h.mul_(1.5),
    "dropout": lambda m, v: m.drop(v.h),
    "function": lambda m, v: F.dropout(v.h, 0.3, m.training),
    "norm": lambda m, v: m.norms[0](v.h.flatten(0, 1)).view_as(v.h),
    "factor": lambda m, v: v.h * m.factor,
    "buffer": lambda m, v: v.h * m.slopes,
    "long": lambda m, v: v.h * 2 if v.h.shape[1] > 4 else v.h,
    "condition": lambda m, v: v.h + m.condition(v.x).mean(1, keepdim=True),
}  # fmt: skip
BEHIND = {
    **{name: step for name, step in BEFORE.items() if name != "norm"},
    "norm": lambda m, v: m.norms[1](v.h.flatten(0, 1)).view_as(v.h),
    "first": lambda m, v: v.h + v.first,
    "collected": lambda m, v: v.h + sum(v.collected),
    "beside": lambda m, v: v.h if v.beside is None else v.h * v.beside,
    "masked": lambda m, v: v.h if v.mask is None else v.h * v.mask[..., None],
    "masked sums": lambda m, v: v.h if v.mask is None or v.mask.sum() < 9 else v.h + v.first,
    "table": lambda m, v: v.h + m.waves(v.h.shape[1]),
    "if large": lambda m, v: -v.h if v.x.sum() > 1 else v.h,
    "wide": lambda m, v: v.h + m.wide(v).mean(1, keepdim=True),
}  # fmt: skip
GIVEN = {
    "nothing": lambda m, v: {},
    "mask": lambda m, v: {"mask": v.mask},
    "waves": lambda m, v: {"other": m.waves(v.h.shape[1])},
    "waves and length": lambda m, v: {"other": (m.waves(v.h.shape[1]), v.h.shape[1])},
    "condition": lambda m, v: {"other": m.condition(v.x), "mask": v.mask},
    "mean": lambda m, v: {"other": [v.h.mean(1, keepdim=True), 2]},
    "slice": lambda m, v: {"other": m.wide(v)[:, : v.h.shape[1]]},
    "parameter": lambda m, v: {"other": m.shift[:1].exp()},
    "number": lambda m, v: {"scale": m.factor},
    "mode": lambda m, v: {"scale": 2.0 if m.training else 1.0},
    "count": lambda m, v: {"scale": float((v.x > 0).sum() % 3)},
}
KINDS = ("one", "pair", "dict", "also")  # what goes from block to block, or is returned beside it
BETWEEN = ("nothing", "nothing", "nothing", "double", "dropout", "first", "long")
CHANGES = {
    "factor": lambda m: setattr(m, "factor", 0.9),
    "slopes": lambda m: m.slopes.mul_(2),
    "waves": lambda m: setattr(m.waves, "speed", 3.0),
    "table": lambda m: setattr(m.waves, "table", torch.rand(WIDTH, dtype=torch.float64)),
    "weights": lambda m: m.load_state_dict({k: v * 1.25 for k, v in m.state_dict().items()}),
    "frozen": lambda m: m.embed.requires_grad_(not m.embed.weight.requires_grad),
    "dropout": lambda m: setattr(m.drop, "p", 0.6),
    "one mode": lambda m: m.drop.train(not m.drop.training),
    "eval": lambda m: m.eval(),
    "train": lambda m: m.train(),
}


class Waves(nn.Module):
    """A module without parameters."""

    speed = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(WIDTH), persistent=False)

    def forward(self, length: int) -> Tensor:
        return (torch.arange(length)[:, None] * self.table * self.speed).cos()


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Any, mask: Tensor | None = None, other: Any = None, scale: float = 1.0) -> Any:
        h = {"pair": lambda: state[0], "dict": lambda: state["h"]}.get(self.kind, lambda: state)()
        y = (self.linear(h) * 1.7).sin() * scale
        y = y if mask is None else y * mask[..., None]
        y = y if other is None else y + (other[0] if isinstance(other, tuple | list) else other)
        returned: dict[str, Any] = {"pair": lambda: (h + y, state[1] + y.mean(-1, keepdim=True))}
        returned["dict"] = lambda: {"h": h + y, "n": state["n"] + 1}
        returned["also"] = lambda: (h + y, y.mean(-1, keepdim=True))
        return returned.get(self.kind, lambda: h + y)()


class Model(nn.Module):
    def __init__(
        self, before: list[str], given: str, kind: str, between: str, behind: list[str], loops: int = 1
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps = [BEFORE[each] for each in before], GIVEN[given], [BEHIND[each] for each in behind]
        self.kind, self.between, self.loops, self.factor = kind, between, loops, 0.7
        self.embed, self.condition, self.head = nn.Linear(2, WIDTH), nn.Linear(2, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))
        self.shift, self.drop, self.waves = nn.Parameter(torch.randn(9, WIDTH)), nn.Dropout(0.2), Waves()
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))
        self.register_buffer("slopes", torch.rand(WIDTH))
        self.double()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        v = SimpleNamespace(x=x, mask=mask, h=self.embed(x), collected=[])
        before, given, behind = self.steps
        for step in before:
            v.h = step(self, v)
        v.first, others = v.h, given(self, v)
        v.beside = others.get("other") if isinstance(others.get("other"), Tensor) else None
        states = {"pair": (v.h, v.h.mean(-1, keepdim=True)), "dict": {"h": v.h, "n": torch.zeros(()).to(v.h)}}
        state: Any = states.get(self.kind, v.h)
        for number, block in enumerate([*self.blocks] * self.loops):
            returned = block(state, **others)
            state = returned[0] if self.kind == "also" else returned
            v.collected += [returned[1]] if self.kind == "also" else []
            if number == 1 and self.kind in ("one", "also"):
                state = self.apart(state, v)
        v.h = {"pair": lambda: state[0] * state[1], "dict": lambda: state["h"] * state["n"]}.get(
            self.kind, lambda: state
        )()
        for step in behind:
            v.h = step(self, v)
        return self.head(v.h)

    def wide(self, v: Any) -> Tensor:
        """A table of eight rows that the beginning computes: with fewer, blocks have a slice of it."""
        if not hasattr(v, "wide"):
            v.wide = self.condition(v.x).mean(1, keepdim=True) * torch.arange(8.0, dtype=v.x.dtype)[:, None]
        return v.wide

    def apart(self, h: Tensor, v: Any) -> Tensor:
        """What is computed between two blocks."""
        return {
            "double": lambda: h * 2, "dropout": lambda: F.dropout(h, 0.3, self.training), "first": lambda: h + v.first,
            "long": lambda: h * 2 if h.shape[1] > 4 else h,
        }.get(self.between, lambda: h)()  # fmt: skip


def numbers(compute: Any, module: nn.Module, x: tuple[Tensor, Tensor | None]) -> dict[str, Tensor]:
    """What comes out under one seed: output, gradients, and the buffers after it."""
    module.zero_grad()
    torch.manual_seed(7)
    leaf = x[0].clone().requires_grad_()
    output = compute(leaf, x[1])
    output.square().sum().backward()
    grads = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return {"output": output.detach(), "x.grad": leaf.grad, **state, **{f"{k}.grad": v for k, v in grads.items()}}


def batch(length: int, scale: float, is_masked: bool, rows: int = 4) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(rows, length, 2, generator=generator, dtype=torch.float64) * abs(scale) + (scale < 0)
    return x, (torch.rand(rows, length, generator=generator) > 0.3).double() if is_masked else None


MODELS = st.tuples(
    st.lists(st.sampled_from(sorted(BEFORE)), max_size=3, unique=True), st.sampled_from(sorted(GIVEN)),
    st.sampled_from(KINDS), st.sampled_from(BETWEEN),
    st.lists(st.sampled_from(sorted(BEHIND)), max_size=3, unique=True), st.sampled_from([1, 1, 2]),
)  # fmt: skip
BATCHES = st.tuples(st.sampled_from([2, 3, 5, 8]), st.sampled_from([1.0, 0.1, 3.0, -2.0]), st.booleans())
CALLS = st.lists(st.tuples(st.lists(st.sampled_from(sorted(CHANGES)), max_size=2), BATCHES), min_size=1, max_size=3)


@settings(max_examples=either(20, 600), deadline=None)
@given(MODELS, BATCHES, CALLS, st.sampled_from(["layers", "copy", "pipe"]))
def test_later_calls_compute_what_the_model_computes_or_are_refused(
    kind: Any, sample: Any, calls: Any, way: str
) -> None:
    model = Model(*kind)
    before = copy.deepcopy(model.state_dict())
    try:
        layers = to_sequential(model, batch(*sample))
    except PartitionError as error:
        assert is_known(str(error), kind), error
        return
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    pipe = Pipe(model, sample=batch(*sample), chunks=1, devices=["cpu"] * 3) if way == "pipe" else None
    for changes, other in calls:
        with torch.no_grad():
            for change in changes:
                if not (way == "pipe" and change == "factor"):  # refused: an attribute beside the layers
                    CHANGES[change](model)
        if way == "pipe":
            model.eval()  # a Pipe's dropout draws other numbers
        check(model, copy.deepcopy(layers) if way == "copy" else pipe or layers, batch(*other), way)


def check(model: nn.Module, parts: nn.Module, x: tuple[Tensor, Tensor | None], way: str) -> None:
    start = copy.deepcopy(model.state_dict())
    expected = numbers(model, model, x)
    model.load_state_dict(start)
    try:
        found = numbers(lambda *given: parts(given), parts if way == "copy" else model, x)
    except PartitionError:
        model.load_state_dict(start)
        return
    if found["output"].isnan().any():
        return
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=lambda text: f"{name}: {text}")


def is_known(words: str, kind: Any) -> bool:
    """Whether words say of a model what is known to stand in its way."""
    before, given, _, between, behind, _ = kind
    reads = {*before, given, *behind}
    return (
        given == "mode"  # blocks' arguments are made in eval mode
        or "what 'condition' computes" in words and "condition" in reads
        or "drawn at random" in words and bool({"dropout", "function"} & {*before, between, *behind})
    )


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output[..., 0] - target).square().sum()


@pytest.mark.parametrize("kind", ["pair", "dict"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_blocks_that_hand_on_several_values_in_one_argument_train_in_a_pipe(kind: str, checkpoint: str) -> None:
    model, (x, mask) = Model(["position"], "mask", kind, "nothing", ["masked"]), batch(3, 1.0, True)
    pipe = Pipe(model, sample=(x, mask), chunks=2, devices=["cpu"] * 3, checkpoint=checkpoint)
    assert len(pipe) == 5
    for _ in range(2):
        model.zero_grad()
        pipe.step((x, mask), x[..., 0], loss_fn=squares, loss_reduction="sum")
        grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        model.zero_grad()
        for half in (slice(2), slice(2, 4)):
            squares(model(x[half], mask[half]), x[half][..., 0]).backward()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=1e-11, atol=1e-13)


def test_a_block_that_is_called_with_fewer_values_than_on_the_sample_is_refused() -> None:
    class Shortens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(2, WIDTH)
            self.blocks = nn.ModuleList(Block("pair") for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            state = (h, h.mean()) if x.shape[1] < 4 else (h,)
            for block in self.blocks:
                state = block(state)
            return state[0]

    layers = to_sequential(Shortens().double(), batch(3, 1.0, False)[0])
    with pytest.raises(PartitionError, match="argument 0 of a block holds 1 values, and held 2 or more on the sample"):
        layers(batch(5, 1.0, False)[0])


def test_a_slice_of_what_was_whole_on_the_sample_is_refused_where_the_end_reads_the_rest() -> None:
    wide, narrow = batch(8, 1.0, False)[0], batch(5, 1.0, False)[0]
    model = Model([], "slice", "one", "nothing", ["wide"])
    with pytest.raises(PartitionError, match="argument 'other' of block 'blocks.0' is a slice of what was computed"):
        to_sequential(model, wide)(narrow)
    layers = to_sequential(model, narrow)
    for x in (narrow, wide):
        check(model, lambda given: layers(given[0]), (x, None), "layers")
    only_blocks_read_it = Model([], "slice", "one", "nothing", [])
    assert torch.equal(to_sequential(only_blocks_read_it, wide)(narrow), only_blocks_read_it(narrow))


def test_a_model_that_cannot_be_trained_is_told_so() -> None:
    class Writes(Model):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            h = self.embed(x).sin()
            for block in self.blocks:
                h = block(h).exp()
            h.add_(1)
            return self.head(h)

    model = Writes([], "nothing", "one", "nothing", [])
    with pytest.raises(PartitionError, match="Writes itself has no gradients on the sample: one of the variables"):
        to_sequential(model, batch(3, 1.0, False))
