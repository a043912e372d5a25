"""May a mini-batch be cut? Layers that mix rows, outputs without rows and values that go round a stage are refused.

Each law goes over the entry points, and what is legal goes on working: the same numbers, and no trace of the probe.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import EagerUpdate, NoChunk, Pipe, is_recomputing
from pipeline.curvature import Hessian

WIDTH = 4
ENTRIES: dict[str, Callable[[Pipe, Tensor], object]] = {
    "forward": lambda pipe, x: pipe(x),
    "no_grad": lambda pipe, x: torch.no_grad()(pipe)(x),
    "inference_mode": lambda pipe, x: torch.inference_mode()(pipe)(x),
    "step": lambda pipe, x: pipe.step(x, loss_fn=square),
    "evaluate": lambda pipe, x: pipe.evaluate(x, loss_fn=square, outputs=False),
    "eager": lambda pipe, x: pipe.step(x, loss_fn=square, optimizer=EagerUpdate(lambda param, grad: None)),
    "Hessian": lambda pipe, x: Hessian(pipe, (x, None), square) @ torch.ones(
        sum(param.numel() for param in pipe.parameters()), dtype=torch.float64
    ),
}  # fmt: skip


pytestmark = pytest.mark.probes


def square(output: Any, target: None) -> Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([each.square().mean() for each in outputs]).sum()


class Calls(nn.Module):
    """A function of (itself, what `inner` makes of x)."""

    def __init__(self, function: Callable[[Any, Any], Any], inner: nn.Module | None = None, **own: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH) if inner is None else inner
        self.function = function
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return self.function(self, self.inner(x))


def calls(function: Callable[[Any], Any], inner: nn.Module | None = None) -> Calls:
    return Calls(lambda self, h: function(h), inner)


def around(*middle: nn.Module) -> nn.Sequential:
    """Not by the first layer, nor by the last alone."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle).double()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def flat(rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64)


def deep(rows: int = 6, length: int = 3) -> Tensor:
    return torch.randn(rows, length, WIDTH, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------ layers that mix rows

MIXES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "LSTM": (lambda: calls(lambda made: made[0], nn.LSTM(WIDTH, WIDTH)), deep),
    "GRU": (lambda: calls(lambda made: made[0], nn.GRU(WIDTH, WIDTH)), deep),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8), deep),
    "Softmax": (lambda: nn.Softmax(0), flat),
    "LayerNorm of everything": (lambda: calls(lambda h: (h - h.mean()) / h.std()), flat),
    "x - x.mean(0)": (lambda: calls(lambda h: h - h.mean(0)), flat),
    "cumsum": (lambda: calls(lambda h: h.cumsum(0)), flat),
    "a sum from the last row": (lambda: calls(lambda h: h.flip(0).cumsum(0).flip(0)), flat),
    "attention between rows": (lambda: calls(lambda h: (h @ h.t()).softmax(1) @ h), flat),
    "rows among [rows * time]": (lambda: calls(lambda h: h.transpose(0, 1).flatten(0, 1)), deep),
}


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("entry", ["forward", "step"])
def test_layers_that_mix_rows_are_refused_by_name(name: str, entry: str) -> None:
    build, x = MIXES[name]
    for chunks, extra in ((2, [nn.Identity()]), (3, [])):
        layer = build()
        pipe = Pipe(around(layer, *extra), [1, 1 + len(extra)], chunks)
        for _ in range(2):  # not only the first time
            words = rf"layer 1 \({type(layer).__name__}\) mixes the rows.*batch_dim=1.*batch_first=True.*chunks=1"
            with pytest.raises(ValueError, match=words):
                ENTRIES[entry](pipe, x())


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("training", [True, False])
def test_every_entry_point_refuses_them(entry: str, training: bool) -> None:
    for schedule in ("gpipe", "1f1b"):
        layer = MIXES["GRU" if schedule == "gpipe" else "x - x.mean(0)"]
        pipe = Pipe(around(layer[0]()), [1, 1], 3, schedule=schedule).train(training)
        with pytest.raises(ValueError, match=r"layer 1 \(Calls\) mixes the rows"):
            ENTRIES[entry](pipe, layer[1]())
        ENTRIES[entry](Pipe(around(layer[0]()), [1, 1], 1, schedule=schedule), layer[1]())  # nothing is cut


def test_chunks_of_one_row_are_refused_too() -> None:
    for rows in (2, 3):
        with pytest.raises(ValueError, match="mixes the rows"):
            Pipe(around(calls(lambda h: h.cumsum(0))), [1, 1], rows)(flat(rows))


class Masked(nn.Module):
    """Attention of x [rows, positions, width] under a mask [positions, positions], which goes on with it."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = pair
        return (x @ x.mT + mask).softmax(-1) @ x, mask


@pytest.mark.parametrize("entry", ["forward", "step", "Hessian"])
@pytest.mark.parametrize("positions", [2, 3, 5])
def test_a_mask_that_is_as_long_as_the_batch_is_refused_where_chunks_of_one_row_broadcast_it(
    positions: int, entry: str
) -> None:
    first = calls(lambda pair: pair[0], nn.Identity())
    model = nn.Sequential(Masked(), Masked(), first, nn.Linear(WIDTH, 1)).double()
    pipe = Pipe(model, [1, 3], chunks=positions)
    x, mask = deep(positions, positions), torch.ones(positions, positions).triu(1).double() * -9
    with pytest.raises(ValueError, match=r"layer 0 \(Masked\) mixes the rows.*no rows.*mark it: NoChunk\(mask\)"):
        ENTRIES[entry](pipe, cast(Any, (x, mask)))
    torch.testing.assert_close(pipe((x, NoChunk(mask))), model((x, mask)))


class OwnBatchNorm(nn.Module):
    """Divides by statistics of the rows in train mode, without a buffer for them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = x.detach().mean(0)
        return x - self.mean


@pytest.mark.parametrize("entry", ["forward", "step"])
def test_layers_that_mix_rows_in_train_mode_alone_are_refused(entry: str) -> None:
    for layers in ([OwnBatchNorm()], [nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), OwnBatchNorm()]):
        pipe = Pipe(around(*layers), [1, len(layers)], 2)
        with pytest.raises(ValueError, match=rf"layer {len(layers)} \(OwnBatchNorm\) mixes the rows .* in train mode"):
            ENTRIES[entry](pipe, flat())
        ENTRIES[entry](pipe.eval(), flat())


def test_a_layer_whose_draws_depend_on_values_is_not_judged_where_later_layers_enlarge_the_change() -> None:
    """Beside rows that saturate the tanh, the small noise changes by more than a thousandth of what they change."""
    def noisy(layer: Calls, h: Tensor) -> Tensor:
        if layer.training:
            torch.rand(int((h[0] > 50).sum()))
            h = h + 0.02 * torch.rand_like(h)
        return h

    layers = nn.Sequential(nn.Identity(), Calls(noisy, nn.Identity()), nn.Tanh())
    rows = torch.tensor([100.0, 0.1, 200.0, 0.2], dtype=torch.float64)[:, None].expand(4, WIDTH)
    for seed in range(5):
        torch.manual_seed(seed)
        Pipe(layers, [1, 2], 2)(rows)


def test_noise_that_is_small_until_a_later_layer_enlarges_it_is_no_place_of_a_row() -> None:
    noise = calls(lambda h: 1 + 1e-3 * torch.randn_like(h))
    place = calls(lambda h: h * torch.arange(1, len(h) + 1)[:, None])
    enlarge = nn.LayerNorm(WIDTH, eps=1e-12).double()
    for seed in range(5):
        torch.manual_seed(seed)
        Pipe(around(noise, enlarge).eval(), [1, 2], 2)(flat())
        with pytest.raises(ValueError, match=r"layer 1 \(Calls\) reads the number or the places"):
            Pipe(around(place, noise, enlarge).eval(), [1, 3], 2)(flat())


def test_a_batch_norm_that_keeps_no_statistics_mixes_rows_in_eval_mode() -> None:
    layers = around(nn.BatchNorm1d(WIDTH, track_running_stats=False))
    pipe = Pipe(layers, [1, 1], 2)
    pipe.step(flat(), loss_fn=square)
    with pytest.raises(ValueError, match=r"layer 1 \(BatchNorm1d\) mixes the rows.*as BatchNorm does in train mode"):
        pipe.evaluate(flat(), loss_fn=square)
    Pipe(layers.eval(), [1, 1], 2, mixes_rows=True)(flat())


def test_float32_and_bfloat16_and_integers_are_told_apart_from_rounding() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (8, 64):
            x = flat(rows).to(dtype)
            Pipe(around(nn.LayerNorm(WIDTH), nn.Softmax(1)).to(dtype), [1, 2], 2)(x)
            with pytest.raises(ValueError, match="mixes the rows"):
                Pipe(around(nn.Softmax(0)).to(dtype), [1, 1], 2)(x)
    with pytest.raises(ValueError, match="mixes the rows"):
        Pipe(around(calls(lambda h: h.argsort(0))), [1, 1], 2)(flat())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_that_are_divided_by_frequencies_are_refused_with_chunks(kind: type[nn.Module]) -> None:
    layer = kind(5, 4, scale_grad_by_freq=True)
    module = nn.Sequential(layer, nn.Flatten(), nn.Linear(8 if kind is nn.Embedding else 4, 2))
    ids = torch.randint(5, (6, 2))
    with pytest.raises(ValueError, match=rf"{kind.__name__}\(scale_grad_by_freq=True\).*mixes_rows=True.*chunks=1"):
        Pipe(module, [1, 2], chunks=3).step(ids, loss_fn=square)
    assert Pipe(module, [1, 2], chunks=3).evaluate(ids, loss_fn=square).loss.isfinite()
    for chunks, mixes_rows in ((1, False), (3, True)):
        Pipe(module, [1, 2], chunks=chunks, mixes_rows=mixes_rows).step(ids, loss_fn=square)


def test_layers_may_mix_rows_where_that_is_said() -> None:
    """As BatchNorm does: numbers are those of a loop over the chunks."""
    model, x = around(calls(lambda h: h - h.mean(0))), flat()
    expected = torch.cat([model(piece) for piece in x.tensor_split(3)])
    assert torch.equal(Pipe(model, [1, 1], 3, mixes_rows=True)(x), expected)
    with pytest.raises(TypeError, match="mixes_rows is 1. Use True or False"):
        Pipe(model, [1, 1], 3, mixes_rows=1)  # type: ignore[arg-type]


def test_what_begins_later_is_found_in_one_of_the_next_calls() -> None:
    layer = Calls(lambda self, h: h - h.mean(0) if self.mixes else h)
    layer.mixes = False
    pipe = Pipe(around(layer), [1, 1], 2)
    for _ in range(2):
        pipe(flat())
    layer.mixes = True
    pipe(flat())
    with pytest.raises(ValueError, match="mixes the rows"):
        pipe(flat())


def _centred(h: Tensor) -> Tensor:
    return h - h.mean(0)


PUT_IN: dict[str, Callable[[Calls], object]] = {
    "a module": lambda layer: setattr(layer, "inner", calls(_centred)),
    "one more": lambda layer: setattr(layer, "inner", nn.Sequential(layer.inner, calls(_centred))),
    "a forward hook": lambda layer: layer.inner.register_forward_hook(lambda module, args, h: _centred(h)),
    "a hook before it": lambda layer: layer.inner.register_forward_pre_hook(lambda module, args: (_centred(args[0]),)),
}


@pytest.mark.parametrize("name", PUT_IN)
def test_what_is_put_in_later_is_found_in_the_next_call(name: str) -> None:
    layer = calls(torch.tanh)
    pipe = Pipe(around(layer), [1, 1], 2)
    for _ in range(4):
        pipe(flat())
    PUT_IN[name](layer)
    layer.double()
    with pytest.raises(ValueError, match="mixes the rows"):
        pipe(flat())


# ---------------------------------------------------------------------------------- layers that count or number rows


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "x * len(x)": lambda h: h * len(h),
    "x / len(x)": lambda h: h / h.shape[0],
    "positions along the rows": lambda h: h * torch.arange(len(h))[:, None],
    "every second row": lambda h: h * (1 - 2 * (torch.arange(len(h)) % 2))[:, None],
    "the first row": lambda h: torch.cat([h[:1] * 2, h[1:]]),
    "the second row": lambda h: torch.cat([h[:1], h[1:2] * 2, h[2:]]),
    "the last row": lambda h: torch.cat([h[:-1], h[-1:] * 2]),
    "to the first row": lambda h: h + h[:1],
    "to the last row": lambda h: h + h[-1:],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_layers_that_read_the_number_or_the_place_of_a_row_are_refused(name: str) -> None:
    words = r"layer 1 \(Calls\) (reads the number or the places of|mixes) the rows.*use Pipe\(..., mixes_rows=True\)"
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for rows, chunks in ((3, 2), (4, 2), (5, 2), (6, 2), (8, 3), (12, 2), (66, 2)):
            model, x = around(calls(NUMBERS[name]), nn.Tanh()).to(dtype), flat(rows).to(dtype)
            with pytest.raises(ValueError, match=words):
                Pipe(model, [1, 2], chunks)(x)
    Pipe(model, [1, 2], 2, mixes_rows=True)(x)


def test_they_are_refused_in_chunks_of_one_row() -> None:
    for name in ("x * len(x)", "positions along the rows", "to the first row"):
        with pytest.raises(ValueError, match="the rows of the mini-batch"):
            Pipe(around(calls(NUMBERS[name])), [1, 1], 2)(flat(2))


class Tie(nn.Module):
    """One row lies at a near tie, which is decided otherwise among fewer rows."""

    def __init__(self, row: Tensor) -> None:
        super().__init__()
        self.row = row

    def forward(self, x: Tensor) -> Tensor:
        return torch.where((x == self.row).all(1, keepdim=True) & (len(x) < 5), 2 * x, x)


def test_what_rounds_otherwise_for_another_number_of_rows_is_no_such_layer() -> None:
    """The change of one row that does not show for other rows; small changes that do."""
    x = flat(12)
    Pipe(nn.Sequential(Tie(x[1]), nn.Tanh()), [1, 1], 2)(x)
    small = calls(lambda h: h * (1 + 1e-2 * len(h) / 12))
    for dtype in (torch.float32, torch.bfloat16):
        Pipe(around(small).to(dtype), [1, 1], 2)(x.to(dtype))


# ------------------------------------------------------------------------------------------------ outputs without rows

NO_ROWS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "h_n": (lambda: calls(lambda made: made[1], nn.GRU(WIDTH, WIDTH, 2, batch_first=True)), lambda: deep(6)),
    "(out, h_n)": (lambda: nn.GRU(WIDTH, WIDTH, 2, batch_first=True), lambda: deep(6)),
    "[time, rows, ...]": (lambda: calls(lambda h: h.transpose(0, 1)), lambda: deep(6, 4)),
    "a Gram matrix": (lambda: calls(lambda h: h.t() @ h), flat),
    "batch statistics": (lambda: calls(lambda h: h.var(0)), flat),
    "a table": (lambda: Calls(lambda self, h: (h, self.inner.weight)), flat),
}


@pytest.mark.parametrize("name", NO_ROWS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_outputs_without_rows_are_refused_where_their_sizes_fit_too(name: str, entry: str) -> None:
    build, make_input = NO_ROWS[name]
    x = make_input()
    for chunks in sorted({2, 3, len(x) // 2}):
        with pytest.raises(ValueError, match=r"dim 0|mixes the rows"):
            ENTRIES[entry](Pipe(around(build()), [1, 1], chunks), x)
    if entry in ("forward", "step"):
        ENTRIES[entry](Pipe(around(build()), [1, 1], 1), x)  # nothing is cut


def test_the_shapes_are_told() -> None:
    with pytest.raises(ValueError, match=r"\[\[2, 3, 4\], \[2, 4, 4\]\], which do not grow.*h_n.transpose\(0, 1\)"):
        Pipe(around(NO_ROWS["h_n"][0]()), [1, 1], 2)(deep())
    h_n_first = calls(lambda made: (made[0], made[1].transpose(0, 1)), nn.GRU(WIDTH, WIDTH, 2, batch_first=True))
    model, x = around(h_n_first), deep()
    for one, other in zip(Pipe(model, [1, 1], 2)(x), model(x), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-14)


# ------------------------------------------------------------------------------------- what goes round a stage boundary

ELSEWHERE: dict[str, Any] = {}


def through_a_dict() -> list[nn.Module]:
    place: dict[str, Tensor] = {}

    def put(h: Tensor) -> Tensor:
        place["mask"] = (h > 0).detach()
        return h

    return [calls(put), nn.Tanh(), calls(lambda h: h * place["mask"]), nn.Tanh()]


def through_a_global() -> list[nn.Module]:
    def put(h: Tensor) -> Tensor:
        ELSEWHERE["mask"] = (h > 0).detach()
        return h

    return [calls(put), nn.Tanh(), calls(lambda h: h * ELSEWHERE["mask"]), nn.Tanh()]


def through_an_attribute() -> list[nn.Module]:
    def put(self: Any, h: Tensor) -> Tensor:
        self.mask = (h > 0).detach()
        return h

    first = Calls(put, mask=torch.ones(()))
    return [first, nn.Tanh(), calls(lambda h: h * first.mask), nn.Tanh()]


def through_a_queue() -> list[nn.Module]:
    place: deque[Tensor] = deque()

    def put(h: Tensor) -> Tensor:
        place.append((h > 0).detach())
        return h

    return [calls(put), nn.Tanh(), calls(lambda h: h * place.popleft()), nn.Tanh()]


def in_train_mode_alone() -> list[nn.Module]:
    place: dict[str, Any] = {"mask": 1}

    def put(self: Any, h: Tensor) -> Tensor:
        if self.training:
            place["mask"] = (h > 0).detach()
        return h

    return [Calls(put), nn.Tanh(), Calls(lambda self, h: h * place["mask"] if self.training else h), nn.Tanh()]


ROUND = (through_a_dict, through_a_global, through_an_attribute, through_a_queue, in_train_mode_alone)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-v")  # one of each kind


@pytest.mark.parametrize("build", ROUND)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_value_that_goes_round_a_stage_boundary_is_refused(
    build: Callable[[], list[nn.Module]], schedule: str
) -> None:
    entry = list(ENTRIES)[(SCHEDULES.index(schedule) + ROUND.index(build)) % 4]
    pipe = Pipe(nn.Sequential(*build()).double(), [1, 1, 1, 1], 4, schedule=schedule, checkpoint="never")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"stage 2 \(layer 2\) gives other values, or raises.*another.*skip"):
            ENTRIES[entry](pipe, flat())


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_point_refuses_it_and_threads_do(entry: str) -> None:
    for how in ({}, {"workers": "threads"}):
        pipe = Pipe(nn.Sequential(*through_a_dict()).double(), [1, 1, 1, 1], 4, schedule="interleaved", **how)
        with pytest.raises(RuntimeError, match="stage 2 .*gives other values"):
            ENTRIES[entry](pipe, flat())


def test_within_one_stage_a_value_may_take_any_way() -> None:
    for build in ROUND:
        model, x = nn.Sequential(*build()).double(), flat()
        expected = model(x)
        for balance in ([4], [3, 1]):
            found = Pipe(model, balance, 4, schedule="gpipe", checkpoint="never")(x)
            assert torch.allclose(found, expected, rtol=0, atol=1e-14)


def test_what_is_the_same_for_every_chunk_may_lie_anywhere() -> None:
    """A table of positions that the first stage makes and others read."""
    place: dict[str, Tensor] = {}
    table = Calls(lambda self, h: h, made=None)

    def put(h: Tensor) -> Tensor:
        place.setdefault("table", torch.arange(WIDTH).double())
        return h

    def made(h: Tensor) -> Tensor:
        table.made = torch.arange(WIDTH).double()
        return h

    model = nn.Sequential(calls(put), calls(made), calls(lambda h: h + place["table"] + table.made)).double()
    for entry in ("forward", "step", "evaluate"):
        ENTRIES[entry](Pipe(model, [1, 1, 1], 4), flat())


# ------------------------------------------------------------------------------------------------------ what is legal

PYTHONS, NUMPYS, BITS, TORCHS = random.Random(0), numpy.random.default_rng(0), numpy.random.PCG64(0), torch.Generator()
WORD = {"scale": 2.0}


class First(nn.Module):
    def forward(self, value: Any) -> Tensor:
        return value[0] if isinstance(value, tuple) else value


class Experts(nn.Module):
    """Each row goes to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        choice, out = self.gate(x).argmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out[choice == number] = expert(x[choice == number])
        return out


LEGAL: dict[str, Callable[[], nn.Module]] = {
    "dropout in eval mode": lambda: calls(lambda h: dropout(h, 0.5, training=True)),
    "noise": lambda: calls(lambda h: h + torch.randn_like(h)),
    "noise for all rows": lambda: calls(lambda h: h * torch.rand(()).double()),
    "Python's random numbers": lambda: calls(lambda h: h * random.random()),
    "a coin": lambda: calls(lambda h: h if random.random() < 0.5 else 2 * h),
    "numpy's random numbers": lambda: calls(lambda h: h * numpy.random.rand()),
    "a generator of Python's own": lambda: calls(lambda h: h * PYTHONS.random()),
    "the system's random numbers": lambda: Calls(lambda self, h: h * self.rng.random(), rng=random.SystemRandom()),
    "a generator of numpy's own": lambda: calls(lambda h: h * NUMPYS.random()),
    "a coin of numpy's own": lambda: Calls(lambda self, h: h * self.rng.integers(2), rng=numpy.random.default_rng(1)),
    "a generator of torch's own": lambda: Calls(
        lambda self, h: h * torch.rand(1, generator=self.own).double(), own=torch.Generator()
    ),
    "rows of a fixed number": lambda: calls(lambda h: h.view(4, 2, 2).flatten(1)),
    "squeeze": lambda: calls(lambda h: h.unsqueeze(2).squeeze()),
    "experts": Experts,
    "rounded": lambda: calls(lambda h: (h * 3).round() + h),
    "by rows": lambda: calls(lambda h: h - h.mean(1, keepdim=True)),
    "BatchNorm": lambda: nn.BatchNorm1d(WIDTH),
    "BatchNorm without statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "transposed inside": lambda: calls(lambda h: (h.t() * 2).t()),
    "in place": lambda: nn.ReLU(inplace=True),
    "several rows of one": lambda: calls(lambda h: h.repeat_interleave(3, 0)),
    "a number beside": lambda: calls(lambda h: (h, 3.0)),
    "zeros": lambda: calls(lambda h: h * 0),
    "nan": lambda: calls(lambda h: (h - 10).log()),
    "an attribute that grows": lambda: Calls(lambda self, h: grown(self, h), seen=0),
    "a tensor that is written and has a history": lambda: Calls(
        lambda self, h: written(self, h), kept=torch.zeros(4, WIDTH, dtype=torch.float64)
    ),
    "an error in eval mode": lambda: Calls(lambda self, h: h if self.training else 1 / 0),
}


def grown(self: Any, h: Tensor) -> Tensor:
    self.seen += not is_recomputing()
    return h * WORD["scale"]


def written(self: Any, h: Tensor) -> Tensor:
    self.kept = self.kept.detach()
    return h if len(h) != 4 else h + 0 * self.kept.copy_(h).clone()


@pytest.mark.parametrize("name", LEGAL)
def test_legal_layers_go_on_working(name: str) -> None:
    for balance in ([1, 1, 1], [3]):
        model = around(LEGAL[name](), First())
        pipe = Pipe(model, balance, 2, checkpoint="never")
        for _ in range(2):  # probes in calls 1, 2 and 4
            pipe(flat())
            pipe.step(flat(), loss_fn=square)
        if name not in ("an error in eval mode", "BatchNorm without statistics"):  # which mixes rows there
            pipe.evaluate(flat(), loss_fn=square)


# ------------------------------------------------------------------------------------------------------------ no trace


class Watches(nn.Module):
    """Keeps state in every way there is."""

    of_class: dict[str, int] = {}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.number, self.log, self.by_name, self.plain = 0, [0], {"number": 0}, torch.zeros(())
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        self.log.append(len(x))
        self.by_name["number"] += 1
        self.by_name.setdefault(f"rows {len(x)}", 0)
        self.plain += 1
        self.count += 1
        self.last = x.detach()
        LOG.append(len(x))
        self.write_elsewhere(len(x))
        factor = random.random() * numpy.random.rand() * (BITS.random_raw() % 7)
        return self.linear(x) + torch.rand(1, generator=TORCHS).double() * factor

    @classmethod
    def write_elsewhere(cls, rows: int) -> None:
        cls.of_class[f"rows {rows}"] = rows
        BY_METHOD.append(rows)
        write_global(rows)
        kept(0)

    def state(self) -> list[Any]:
        tensors = [self.plain.item(), self.count.item(), self.count._version]
        elsewhere = [dict(self.of_class), list(BY_METHOD), list(BY_FUNCTION), kept(0)]
        return [self.number, list(self.log), dict(self.by_name), *tensors, *elsewhere]


LOG: list[int] = []
BY_METHOD: list[int] = []
BY_FUNCTION: list[int] = []


def write_global(rows: int) -> None:
    BY_FUNCTION.append(rows)


@lru_cache
def kept(_: int) -> list[bool]:
    return [is_recomputing()]


def seen_by(probes: bool, entry: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What two calls leave, with and without a probe."""
    for generator in (TORCHS, torch.default_generator):
        generator.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    BITS.state = numpy.random.PCG64(5).state
    for written in (LOG, BY_METHOD, BY_FUNCTION, Watches.of_class):
        written.clear()
    kept.cache_clear()
    kept(1)  # of another layer
    layer, recorded = Watches(), []
    layer.register_forward_hook(lambda module, args, made: recorded.append(made.detach()))
    model = around(layer, nn.Dropout(0.5), nn.BatchNorm1d(WIDTH))
    if not probes:
        monkeypatch.setattr("pipeline.entry.probe.probe.Probe.check", lambda self: None)
    pipe, x = Pipe(model, [1, 2, 1], 2, checkpoint="never"), torch.linspace(-1, 1, 24).double().reshape(6, WIDTH)
    for _ in range(2):
        made = ENTRIES[entry](pipe, x)
        yield [made if isinstance(made, Tensor) else getattr(made, "loss"), *recorded, layer.last]
        yield [param.grad for param in pipe.parameters()]
        yield [*layer.state(), list(LOG), random.getstate(), repr(numpy.random.get_state()), BITS.state]
        yield [TORCHS.get_state(), torch.get_rng_state(), *pipe.buffers()]
        yield [module.training for module in pipe.modules()]


@pytest.mark.parametrize("entry", ["forward", "no_grad", "step", "evaluate", "eager"])
def test_a_probe_leaves_no_trace(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in a module, nor in what hooks record, in globals, generators or buffers."""
    with_probe = [*seen_by(True, entry, monkeypatch)]
    without = [*seen_by(False, entry, monkeypatch)]
    for ones, others in zip(with_probe, without, strict=True):
        assert len(ones) == len(others)
        for one, other in zip(ones, others, strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


class Builds(OrderedDict[str, Any]):
    """Its values are classes, and `[]` makes objects of them, as in a library's table of activations."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


ACTIVATIONS = Builds(tanh=nn.Tanh, relu=nn.ReLU)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_table_whose_own_methods_give_something_else_than_it_holds_is_left_as_it_is(entry: str) -> None:
    def activated(h: Tensor) -> Tensor:
        return cast(Tensor, ACTIVATIONS["tanh"](h))

    pipe = Pipe(around(calls(activated)), [1, 1], 2, checkpoint="never")
    for _ in range(2):
        ENTRIES[entry](pipe, flat())
    assert [*ACTIVATIONS.items()] == [("tanh", nn.Tanh), ("relu", nn.ReLU)]


def test_a_graph_that_waits_for_its_backward_is_not_touched() -> None:
    """The probe of another call runs in between, in train mode: a buffer that the graph has saved stays unwritten."""
    model = around(nn.BatchNorm1d(WIDTH))
    pipe = Pipe(model, [1, 1], 2, checkpoint="never").eval()
    out = pipe(flat())
    with torch.no_grad():
        pipe(flat())
    out.sum().backward()


def test_layers_are_told_that_a_probe_is_no_forward_of_its_own() -> None:
    layer, queue = calls(lambda h: h), SimpleQueue()  # which nobody can put back
    layer.register_forward_hook(lambda module, args, made: queue.put(is_recomputing()))
    Pipe(around(layer), [1, 1], 2, checkpoint="never")(flat())
    told = [queue.get() for _ in range(queue.qsize())]
    assert told[-2:] == [False, False] and all(told[:-2]) and len(told) > 2


def test_unchanged_modes_count_nothing_of_it() -> None:
    class Counts(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += func is torch.ops.aten.addmm.default
            return func(*args, **(kwargs or {}))

    pipe = Pipe(around(nn.Linear(WIDTH, WIDTH)), [1, 1], 2, checkpoint="never")
    with Counts() as counts, torch.no_grad():
        pipe(flat())
    assert counts.number == 4


class Writes(nn.Module):
    """Its forward writes its weight."""

    def __init__(self, how):
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.ones(4, dtype=torch.float64)), how

    def forward(self, x):
        with torch.no_grad():
            if self.how == "in place":
                self.weight.mul_(0.5)
            elif self.how == "copied":
                self.weight.copy_(self.weight * 0.5 + 1)
            elif self.how == "a part":
                self.weight[1:3].add_(1.0)
            elif self.how == "out":
                torch.mul(self.weight, 0.5, out=self.weight)
            elif self.how == "set":
                self.weight.data = self.weight.data * 0.5
        return x * self.weight


@pytest.mark.parametrize("how", ["in place", "copied", "a part", "out"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("balance", [[2], [1, 1]])
def test_a_parameter_is_written_as_often_as_the_layer_runs_on_a_chunk(how, chunks, balance):
    model = nn.Sequential(Writes(how), nn.Linear(4, 4).double())
    plain = copy.deepcopy(model)
    pipe = Pipe(model, balance, chunks, checkpoint="never", devices=["cpu"] * len(balance))
    for number in range(9):  # calls 1, 2, 4 and 8 are looked at more closely
        x = torch.randn(6, 4, dtype=torch.float64)
        expected = torch.cat([plain(rows) for rows in x.tensor_split(chunks)])
        assert torch.equal(pipe(x), expected), number
        assert torch.equal(model[0].weight, plain[0].weight), number


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_call_that_is_refused_leaves_parameters_as_they_were(chunks):
    model = nn.Sequential(Writes("set"), nn.Linear(4, 4).double())
    pipe = Pipe(model, [1, 1], chunks, checkpoint="never", devices=["cpu"] * 2)
    with pytest.raises(RuntimeError, match=r"got new data within the forward \(param\.data = \.\.\.\)"):
        pipe(torch.randn(6, 4, dtype=torch.float64))
    assert torch.equal(model[0].weight, torch.ones(4, dtype=torch.float64))


class KeepsFirst(nn.Module):
    """Its first batch says what its bias is."""

    def __init__(self):
        super().__init__()
        self.bias, self.done = nn.Parameter(torch.zeros(4)), False

    def forward(self, x):
        if not self.done:
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
            self.done = True
        return x + self.bias


def test_a_layer_that_keeps_its_first_batch_is_refused_where_that_would_be_a_chunk():
    model, x = nn.Sequential(KeepsFirst(), nn.Linear(4, 4)), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    words = "gives other values, or raises, for the same input when other chunks .* call the model with one before"
    for balance in ([1, 1], [2]):
        with pytest.raises(RuntimeError, match=words):
            Pipe(model, balance, 2, devices=["cpu"] * len(balance))(x)
        assert not model[0].done and torch.equal(model[0].bias, torch.zeros(4))
    assert torch.equal(Pipe(model, [1, 1], 1, checkpoint="never", devices=["cpu"] * 2)(x), plain(x))
    torch.testing.assert_close(Pipe(model, [1, 1], 2, devices=["cpu"] * 2)(x), plain(x))


class Cache(nn.Module):
    """Keeps rows from one call to the next, by their places, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(8, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        earlier = self.kept[: len(x)].clone()
        self.kept[: len(x)] = x.detach()
        return x + earlier


def test_a_cache_of_rows_is_refused_in_eval_mode_where_chunks_would_overwrite_it() -> None:
    """A buffer that a layer writes is one of statistics in train mode alone."""
    x = flat()
    with torch.no_grad():
        model = around(Cache()).eval()
        whole, pipe = Pipe(copy.deepcopy(model), [1, 1]), Pipe(copy.deepcopy(model), [1, 1], chunks=2)
        assert all([torch.equal(whole(rows), model(rows)) for rows in (x, x + 1, x.flip(0))])
        with pytest.raises(RuntimeError, match=r"stage 1 \(layer 1\) .* keeps something of its rows .*chunks=1"):
            pipe(x)


def test_a_batch_norm_that_a_script_puts_into_train_mode_alone_gathers_statistics() -> None:
    model = around(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Tanh())).eval()
    model[1][0].train()
    Pipe(model, [1, 1], chunks=2)(flat())
