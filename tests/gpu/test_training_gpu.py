"""A user's training loop on a GPU: optimizers, loss scaling, loaders, state, kernels of cuDNN, atomics and inductor.

    make test-gpu

The reference is the plain module on the same GPU, in a loop over the chunks; what no chunk can change is compared with
the plain module on the whole mini-batch. In float64 where the law is equality.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from pipeline import EagerUpdate, Pipe, checkpoint_blocks, layer_seed
from pipeline.common.places import Place

pytestmark = pytest.mark.gpu

CHUNKS, ROWS = 3, 8
MODES = ("never", "except_last", "always")


def device() -> torch.device:
    return torch.device("cuda", 0)


PLACES: dict[str, Callable[[], list[Any]]] = {
    "one GPU": lambda: [device()] * 3,
    "as if three GPUs": lambda: [Place(device(), name) for name in "abc"],
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "SGD, fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW, capturable": lambda params: torch.optim.AdamW(params, lr=0.01, capturable=True),
}
uncaptured = pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")


def network(dropout: float = 0.2) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]
    return nn.Sequential(*layers).double()


def tied(dropout: float = 0.2) -> nn.Sequential:
    """The last layer, in the last stage, has the weight of the first one."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    layers[5].weight = layers[0].weight
    return nn.Sequential(*layers).double()


def batch(seed: int, rows: int = ROWS, width: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = [torch.randn(rows, columns, generator=generator, dtype=torch.float64) for columns in (6, width)]
    return x.to(device()), y.to(device())


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def by_chunks(
    model: nn.Sequential,
    x: Tensor,
    y: Tensor,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = mean_square,
    seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> float:
    """The loop that `pipe.step` is compared with: the draws, the loss and the gradients that it has after this seed."""
    torch.manual_seed(seed)
    drawn, total = int(torch.empty((), dtype=torch.int64).random_()), 0.0
    for chunk, (value, target) in enumerate(zip(x.tensor_split(CHUNKS), y.tensor_split(CHUNKS), strict=True)):
        with within():
            for layer, module in enumerate(model):
                torch.manual_seed(layer_seed(drawn, chunk, layer))
                value = module(value)
            loss = loss_fn(value, target) * (len(target) / len(y))
        (loss if scaler is None else scaler.scale(loss)).backward()
        total += loss.item()
    return total


def assert_same_parameters(one: nn.Module, other: nn.Module, rtol: float = 1e-8, atol: float = 1e-10) -> None:
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=rtol, atol=atol)


# ----------------------------------------------------------------------------------------------------------- optimizers


@uncaptured
@pytest.mark.parametrize("how", ["optimizer", "store", "eager"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("build", [network, tied])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_with_an_optimizer_train_as_the_loop_with_the_same_optimizer(
    name: str, build: Callable[[], nn.Sequential], where: str, how: str
) -> None:
    plain, model = build().to(device()), build()
    width = model[-1].out_features
    pipe = Pipe(model, [2, 2, 2], CHUNKS, devices=PLACES[where]())
    theirs, ours = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](pipe.parameters())
    update = EagerUpdate(ours)
    for number in range(5):
        x, y = batch(number, width=width)
        expected = by_chunks(plain, x, y, seed=number)
        theirs.step()
        theirs.zero_grad()
        torch.manual_seed(number)
        if how == "store":
            step = pipe.step(x, y, loss_fn=mean_square, grads="store")
            assert step.grads is not None
            step.grads.apply(ours)
        else:
            step = pipe.step(x, y, loss_fn=mean_square, optimizer=ours if how == "optimizer" else update)
        assert step.loss.item() == pytest.approx(expected, rel=1e-9)
        assert all(param.grad is None for param in pipe.parameters())
        assert_same_parameters(pipe, plain)


@uncaptured
@pytest.mark.parametrize("how", ["optimizer", "store", "eager", "by hand"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", ["SGD", "AdamW, foreach", "AdamW, fused", "AdamW, capturable"])
def test_a_clip_is_that_of_torch_and_the_norm_is_the_one_before(name: str, where: str, how: str) -> None:
    plain, pipe = tied().to(device()), Pipe(tied(), [2, 2, 2], CHUNKS, devices=PLACES[where]())
    theirs, ours = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](pipe.parameters())
    update = EagerUpdate(ours, clip="two_pass", max_norm=0.1)
    for number in range(4):
        x, y = batch(number, width=6)
        by_chunks(plain, x, y, seed=number)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert expected > 0.1
        theirs.step()
        theirs.zero_grad()
        torch.manual_seed(number)
        norm: Any = None
        if how == "optimizer":
            norm = pipe.step(x, y, loss_fn=mean_square, optimizer=ours, clip_grad_norm=0.1).grad_norm
        elif how == "store":
            step = pipe.step(x, y, loss_fn=mean_square, grads="store")
            assert step.grads is not None
            norm = step.grads.clip_(0.1)
            step.grads.apply(ours)
        elif how == "eager":
            pipe.step(x, y, loss_fn=mean_square, optimizer=update)
        else:
            pipe.step(x, y, loss_fn=mean_square)
            norm = pipe.clip_grad_norm_(0.1)
            ours.step()
            ours.zero_grad()
        assert norm is None or float(norm) == pytest.approx(float(expected), rel=1e-9)
        assert_same_parameters(pipe, plain)


@pytest.mark.parametrize("eager", [False, True], ids=["ordinary", "eager"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", ["SGD", "AdamW, fused"])
def test_a_step_over_several_mini_batches_is_one_over_all_their_rows(name: str, where: str, eager: bool) -> None:
    plain, pipe = tied(0.0).to(device()), Pipe(tied(0.0), [2, 2, 2], CHUNKS, devices=PLACES[where]())
    theirs, ours = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](pipe.parameters())
    update = EagerUpdate(ours)
    for number in range(3):
        pairs = [batch(10 * number + index, rows, width=6) for index, rows in enumerate((8, 8, 5))]
        x, y = [torch.cat(parts) for parts in zip(*pairs, strict=True)]
        expected = mean_square(plain(x), y)
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        step = pipe.step(iter(pairs), loss_fn=mean_square, optimizer=update if eager else ours)
        torch.testing.assert_close(step.loss, expected.detach(), rtol=1e-9, atol=0.0)
        assert_same_parameters(pipe, plain)


# --------------------------------------------------------------------------------------------------------- loss scaling


def half() -> AbstractContextManager[Any]:
    return torch.autocast(device().type, dtype=torch.float16)


def float_mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


@pytest.mark.parametrize("overflow", [3, 4], ids=["in a call that does not validate", "in a call that validates"])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW, fused"])
def test_a_step_with_a_scaler_scales_skips_and_grows_as_the_loop(
    name: str, where: str, clip: float | None, overflow: int
) -> None:
    plain, pipe = network().float().to(device()), Pipe(network().float(), [2, 2, 2], CHUNKS, devices=PLACES[where]())
    theirs, ours = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](pipe.parameters())
    one, other = [torch.amp.GradScaler(device().type, init_scale=2.0**10, growth_interval=3) for _ in range(2)]
    for number in range(1, 9):
        x, y = [part.float() for part in batch(number)]
        if number == overflow:
            y = y * float("inf")
        before, scale = copy.deepcopy(list(pipe.parameters())), other.get_scale()
        expected = by_chunks(plain, x, y, float_mean_square, number, one, half)
        if clip is not None:
            one.unscale_(theirs)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        one.step(theirs)
        one.update()
        theirs.zero_grad()
        torch.manual_seed(number)
        with half():
            step = pipe.step(x, y, loss_fn=float_mean_square, optimizer=ours, scaler=other, clip_grad_norm=clip)
        assert step.loss.item() == pytest.approx(expected, rel=1e-3, nan_ok=True)
        assert other.get_scale() == one.get_scale()
        unchanged = all(torch.equal(old, new) for old, new in zip(before, pipe.parameters(), strict=True))
        assert unchanged is (number == overflow)
        assert not unchanged or other.get_scale() == scale / 2
        assert_same_parameters(pipe, plain, rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------------- loaders, metrics, state


def with_accuracy(output: Tensor, target: Tensor) -> Any:
    hits = (output.argmax(1) == target).sum()
    return functional.cross_entropy(output, target), {"accuracy": (hits, len(target))}


def classes() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(4, (20,), generator=generator))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_pins_feeds_steps_and_evaluations(workers: int, where: str) -> None:
    """The last mini-batch is smaller. The metrics are those of the whole data set."""
    loader = DataLoader(
        classes(), batch_size=8, pin_memory=True, num_workers=workers,
        multiprocessing_context="forkserver" if workers else None, persistent_workers=workers > 0,
        generator=torch.Generator()
    )  # fmt: skip
    assert all(part.is_pinned() for pair in loader for part in pair)
    plain, pipe = network(0.0).to(device()), Pipe(network(0.0), [2, 2, 2], CHUNKS, devices=PLACES[where]())
    x, y = [part.to(device()) for part in classes().tensors]
    theirs, ours = OPTIMIZERS["SGD"](plain.parameters()), OPTIMIZERS["SGD"](pipe.parameters())
    for entry, options in ((pipe.evaluate, {}), (pipe.step, {"optimizer": ours}), (pipe.evaluate, {})):
        loss, metrics = with_accuracy(plain(x), y)
        step = entry(loader, loss_fn=with_accuracy, **options)
        torch.testing.assert_close(step.loss.cpu(), loss.detach().cpu(), rtol=1e-9, atol=0.0)
        hits, count = metrics["accuracy"]
        assert float(step.metrics["accuracy"]) == pytest.approx(float(hits) / count)
        if options:
            loss.backward()
            theirs.step()
            theirs.zero_grad()
    assert_same_parameters(pipe, plain)


def test_single_mini_batches_of_a_loader_that_pins_train_as_the_loop() -> None:
    loader = DataLoader(classes(), batch_size=8, pin_memory=True)
    plain, pipe = network().to(device()), Pipe(network(), [2, 2, 2], CHUNKS, devices=PLACES["one GPU"]())
    theirs, ours = OPTIMIZERS["AdamW"](plain.parameters()), OPTIMIZERS["AdamW"](pipe.parameters())
    for number, (x, y) in enumerate([pair for _ in range(3) for pair in loader]):
        by_chunks(plain, x.to(device()), y.to(device()), functional.cross_entropy, number)
        theirs.step()
        theirs.zero_grad()
        torch.manual_seed(number)
        pipe.step(x, y, loss_fn=functional.cross_entropy, optimizer=ours)
        assert_same_parameters(pipe, plain)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW, foreach", "AdamW, fused"])
@pytest.mark.parametrize("whole", [False, True], ids=["where it is", "on the host"])
def test_training_goes_on_from_the_gpu_on_the_host_and_back(whole: bool, name: str) -> None:
    plain = tied(0.0)
    theirs = OPTIMIZERS[name](plain.parameters())
    saved: io.BytesIO | None = None
    for number, devices in enumerate([PLACES["one GPU"](), ["cpu"] * 3, PLACES["as if three GPUs"](), ["cpu"] * 3]):
        pipe = Pipe(tied(0.0), [[2, 2, 2], [1, 3, 2], [3, 1, 2]][number % 3], CHUNKS, devices=devices)
        ours = OPTIMIZERS[name](pipe.parameters())
        if saved is not None:
            state, optimizer_state = torch.load(saved, weights_only=True)
            pipe.load_state_dict(state)
            pipe.load_optimizer_state_dict(ours, optimizer_state)
        for index in range(2):
            x, y = [part.cpu() for part in batch(10 * number + index, width=6)]
            mean_square(plain(x), y).backward()
            theirs.step()
            theirs.zero_grad()
            pipe.step(x, y, loss_fn=mean_square, optimizer=ours)
        assert_same_parameters(pipe, plain, rtol=1e-7)
        found = (
            (pipe.full_state_dict(), pipe.full_optimizer_state_dict(ours))
            if whole
            else (pipe.state_dict(), pipe.optimizer_state_dict(ours))
        )
        saved = io.BytesIO()
        torch.save(found, saved)
        saved.seek(0)


# -------------------------------------------------------------------------------------- kernels that round as they like


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return output


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
        nn.ReLU(), nn.Flatten(), nn.Linear(8 * 8 * 8, 4)
    )  # fmt: skip


def recurrent() -> nn.Sequential:
    return nn.Sequential(Recurrent(), nn.Tanh(), nn.Flatten(), nn.Linear(5 * 8, 4))


class Experts(nn.Module):
    """Each row goes to four of eight experts; what they return is added up by atomics, in any order."""

    def __init__(self, width: int, scatters: bool) -> None:
        super().__init__()
        self.gate, self.scatters = nn.Linear(width, 8), scatters
        self.weights = nn.Parameter(torch.randn(8, width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).softmax(-1).topk(4)
        rows = torch.arange(len(x), device=x.device).repeat_interleave(4)
        made = torch.einsum("rw,rwv->rv", x[rows], self.weights[chosen.indices.flatten()])
        made = torch.tanh(made) * chosen.values.flatten()[:, None]
        if self.scatters:
            return x + torch.zeros_like(x).scatter_add(0, rows[:, None].expand_as(made), made)
        return x + torch.zeros_like(x).index_add_(0, rows, made)


class Enlarge(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.interpolate(x, scale_factor=3.7, mode="bilinear")


class Repeated(nn.Module):
    """512 numbers a row of which there are three: the backward adds them up by atomics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 16)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.embedding(x).mean(1)
        return output


def experts(scatters: bool) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), Experts(32, scatters), nn.Tanh(), Experts(32, scatters), nn.Linear(32, 4))


def enlarging() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), Enlarge(), nn.Tanh(), nn.Conv2d(4, 4, 3, stride=2), nn.Flatten(),
        nn.Linear(4 * 14 * 14, 4)
    )  # fmt: skip


def embedding() -> nn.Sequential:
    return nn.Sequential(Repeated(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


MODELS: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], Tensor], list[int]]] = {
    "convolutions": (convolutions, lambda: torch.randn(ROWS, 3, 8, 8), [3, 3, 2]),
    "LSTM": (recurrent, lambda: torch.randn(ROWS, 5, 6), [1, 2, 1]),
    "index_add": (lambda: experts(False), lambda: torch.randn(96, 32), [2, 2, 1]),
    "scatter_add": (lambda: experts(True), lambda: torch.randn(96, 32), [2, 2, 1]),
    "bilinear": (enlarging, lambda: torch.randn(ROWS, 3, 8, 8), [2, 2, 2]),
    "embedding": (embedding, lambda: torch.randint(3, (ROWS, 512)), [1, 2, 1]),
}


def floats(name: str, number: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 + number)
    x = MODELS[name][1]()
    return x.to(device()), torch.randn(len(x), 4).to(device())


def losses_of_nine_steps(name: str, mode: str, where: str = "one GPU") -> list[float]:
    """Of a Pipe; calls 1, 2, 4 and 8 validate."""
    build, _, balance = MODELS[name]
    torch.manual_seed(0)
    pipe = Pipe(build(), balance, CHUNKS, devices=PLACES[where](), checkpoint=mode)
    optimizer, losses = torch.optim.SGD(pipe.parameters(), lr=0.01), []
    for number in range(9):
        x, y = floats(name, number)
        torch.manual_seed(number)
        losses.append(pipe.step(x, y, loss_fn=mean_square, optimizer=optimizer).loss.item())
    return losses


def losses_of_the_loop(name: str) -> list[float]:
    torch.manual_seed(0)
    plain = MODELS[name][0]().to(device())
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.01), []
    for number in range(9):
        losses.append(by_chunks(plain, *floats(name, number), seed=number))
        optimizer.step()
        optimizer.zero_grad()
    return losses


scattered = pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk of memory")


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("deterministic", [False, True], ids=["any", "deterministic"])
@pytest.mark.parametrize("benchmark", [False, True], ids=["heuristics", "benchmark"])
def test_convolutions_of_cudnn_train_alike_in_every_checkpoint_mode(
    benchmark: bool, deterministic: bool, mode: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", deterministic)
    expected = losses_of_nine_steps("convolutions", "never")
    assert losses_of_nine_steps("convolutions", mode, where) == pytest.approx(expected, rel=1e-5)
    assert losses_of_the_loop("convolutions") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_the_weights_of_an_lstm_stay_in_one_piece_for_cudnn(mode: str, where: str) -> None:
    """It warns where they do not, and copies them together in each forward."""
    pipe = Pipe(recurrent(), [1, 2, 1], CHUNKS, devices=PLACES[where](), checkpoint=mode)
    x, y = floats("LSTM", 0)
    for _ in range(3):
        pipe.step(x, y, loss_fn=mean_square)
    lstm = pipe[0].lstm
    assert len({weight.untyped_storage().data_ptr() for weight in lstm.parameters()}) == 1


@scattered
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_an_lstm_of_cudnn_with_dropout_between_its_layers_is_not_refused(mode: str, where: str) -> None:
    assert all(0 < loss < 10 for loss in losses_of_nine_steps("LSTM", mode, where))


@scattered
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("mode", MODES)
def test_an_lstm_of_cudnn_has_the_masks_of_the_loop_where_a_seed_repeats_them(mode: str) -> None:
    """cuDNN draws them from a state of its own, beside torch's generators."""
    expected = losses_of_the_loop("LSTM")
    if losses_of_the_loop("LSTM") != pytest.approx(expected, rel=1e-5):
        pytest.skip("no seed repeats the masks of the plain module")
    assert losses_of_nine_steps("LSTM", mode) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_an_lstm_with_dropout_trains_as_the_loop_without_cudnn(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert losses_of_nine_steps("LSTM", mode) == pytest.approx(losses_of_the_loop("LSTM"), rel=1e-5)


@scattered
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("mode", MODES)
def test_an_lstm_without_dropout_trains_as_the_loop(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_dropout() -> nn.Sequential:
        model = recurrent()
        model[0].lstm.dropout = 0.0
        return model

    monkeypatch.setitem(MODELS, "LSTM", (without_dropout, *MODELS["LSTM"][1:]))
    assert losses_of_nine_steps("LSTM", mode) == pytest.approx(losses_of_the_loop("LSTM"), rel=1e-5)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["index_add", "scatter_add", "bilinear", "embedding"])
def test_sums_in_another_order_each_time_are_no_reason_to_refuse(name: str, mode: str, where: str) -> None:
    assert losses_of_nine_steps(name, mode, where) == pytest.approx(losses_of_the_loop(name), rel=1e-4)


# ------------------------------------------------------------------------------------------------------------ attention


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.projection, self.out, self.dropout = nn.Linear(64, 192), nn.Linear(64, 64), dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = self.projection(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, dropout_p=self.dropout if self.training else 0.0)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def attention_gradients(mode: str, where: str, seed: int) -> list[list[Tensor]]:
    """Of three steps; the third one does not validate."""
    torch.manual_seed(0)
    pipe = Pipe(nn.Sequential(*[Attention() for _ in range(3)]), [1, 1, 1], 2, devices=PLACES[where](), checkpoint=mode)
    x, y = torch.randn(4, 32, 64).to(device()), torch.randn(4, 32, 64).to(device())
    found = []
    for number in range(3):
        pipe.zero_grad()
        torch.manual_seed(seed + number)
        with torch.autocast(device().type, dtype=torch.bfloat16):
            pipe.step(x, y, loss_fn=float_mean_square)
        found.append([param.grad.clone() for param in pipe.parameters() if param.grad is not None])
    return found


KERNELS = {
    "as torch chooses": nullcontext,
    "flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "efficient": lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
    "mathematics": lambda: sdpa_kernel(SDPBackend.MATH),
}


def distance(one: list[list[Tensor]], other: list[list[Tensor]]) -> float:
    """The largest difference of two gradients, over the norm of one."""
    pairs = [pair for step in zip(one, other, strict=True) for pair in zip(*step, strict=True)]
    return max(float((left - right).norm() / right.norm()) for left, right in pairs)


@pytest.mark.parametrize("mode", ["except_last", "always"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_masks_of_fused_attention_repeat_under_bfloat16(kernel: str, where: str, mode: str) -> None:
    with KERNELS[kernel]():
        kept, again = attention_gradients("never", "one GPU", 5), attention_gradients(mode, where, 5)
        others = attention_gradients("never", "one GPU", 50)
    assert distance(again, kept) < 0.02 < distance(others, kept)


# ------------------------------------------------------------------------------------------------------ compiled layers


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16), dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(self.norm(x)))
        return x + functional.dropout(self.down(hidden), self.drop, self.training)


def blocks(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(dropout) for _ in range(3)])


@pytest.mark.filterwarnings("ignore")  # of inductor: precision of products, sizes of the GPU
@pytest.mark.parametrize("mode", MODES)
def test_compiled_blocks_train_as_eager_ones_and_are_compiled_once(mode: str) -> None:
    torch.compiler.reset()
    counted = torch._dynamo.utils.counters
    counted.clear()
    plain, model, graphs = blocks().to(device()), blocks(), []
    for block in model:
        block.compile()
    pipe = Pipe(model, [1, 1, 1], CHUNKS, devices=PLACES["one GPU"](), checkpoint=mode)
    for number in range(9):
        torch.manual_seed(100 + number)
        x, y = torch.randn(9, 16).to(device()), torch.randn(9, 16).to(device())
        expected = by_chunks(plain, x, y)
        assert pipe.step(x, y, loss_fn=mean_square).loss.item() == pytest.approx(expected, rel=1e-4)
        for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
        pipe.zero_grad()
        plain.zero_grad()
        graphs.append(counted["stats"]["unique_graphs"])
    assert 0 < graphs[-1] <= graphs[0]


@pytest.mark.filterwarnings("ignore")
def test_masks_of_compiled_blocks_repeat_in_every_checkpoint_mode() -> None:
    torch.compiler.reset()
    found = []
    for mode in MODES:
        model = blocks(0.3)
        for block in model:
            block.compile()
        pipe = Pipe(model, [1, 1, 1], CHUNKS, devices=PLACES["one GPU"](), checkpoint=mode)
        torch.manual_seed(4)
        x, y = torch.randn(9, 16).to(device()), torch.randn(9, 16).to(device())
        for number in range(3):
            torch.manual_seed(number)
            pipe.step(x, y, loss_fn=mean_square)
        found.append([[param.grad.clone() for param in pipe.parameters() if param.grad is not None]])
    assert max(distance(each, found[0]) for each in found[1:]) < 1e-4


# -------------------------------------------------------------------------------------------------- graphs and profiles


def test_within_the_capture_of_a_graph_calls_are_refused_and_the_capture_goes_on() -> None:
    pipe = Pipe(network(0.0), [2, 2, 2], CHUNKS, devices=PLACES["one GPU"]())
    x, y = batch(0)
    expected = pipe.step(x, y, loss_fn=mean_square).loss
    words = "while a graph was being captured.*Capture the plain module"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = x * 2
        with pytest.raises(RuntimeError, match=words):
            pipe(x)
        with pytest.raises(RuntimeError, match=words):
            pipe.step(x, y, loss_fn=mean_square)
        with pytest.raises(RuntimeError, match=words):
            pipe.evaluate(x, y, loss_fn=mean_square)
    graph.replay()
    assert torch.equal(doubled, x * 2)
    assert torch.equal(pipe.step(x, y, loss_fn=mean_square).loss, expected)


def test_the_plain_module_of_a_pipe_is_captured() -> None:
    pipe = Pipe(network(0.0), [2, 2, 2], CHUNKS, devices=PLACES["one GPU"]())
    plain, x = pipe.to_sequential(), batch(0)[0]
    expected = pipe(x).detach()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        plain(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = plain(x)
    graph.replay()
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore")  # of the profiler's own
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_profile_has_the_actions_by_name_and_their_kernels(checkpoint: str) -> None:
    pipe = Pipe(network(0.0), [2, 2, 2], CHUNKS, devices=PLACES["one GPU"](), checkpoint=checkpoint)
    x, y = batch(0)
    for _ in range(2):  # the third call does not validate
        pipe.step(x, y, loss_fn=mean_square)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        pipe.step(x, y, loss_fn=mean_square)
        torch.cuda.synchronize()
    names = {event.name for event in trace.events()}
    kinds = {"F": "forward", "B": "backward", **({"R": "recomputation"} if checkpoint == "always" else {})}
    for stage in range(3):
        for chunk in range(CHUNKS):
            for kind, words in kinds.items():
                assert f"{stage}{kind}{chunk}: {words}, stage {stage}, chunk {chunk}" in names
    assert any("recomputation" in name for name in names) is (checkpoint == "always")
    on_gpu = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert any(", stage " not in event.name for event in on_gpu)


# -------------------------------------------------------------------------------------------------------------- threads


class Forks(nn.Module):
    """Draws from a generator that it seeds and puts back."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return x + torch.rand(x.shape[1:], device=x.device).to(x) + torch.rand(x.shape[1:]).to(x)


class Chooses(nn.Module):
    """Computes with kernels that it chooses; which ones, it adds."""

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            mixed = functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
            return x + mixed + float(torch.backends.cuda.flash_sdp_enabled()) + float(torch.backends.cudnn.enabled)


def loss_and_gradients(touching: type[nn.Module], workers: str, mode: str) -> list[Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), touching(), nn.Dropout(0.2))]
    pipe = Pipe(nn.Sequential(*layers).double(), [3, 3, 3], CHUNKS, devices=PLACES["as if three GPUs"](),
                checkpoint=mode, workers=workers)  # fmt: skip
    x = torch.randn(ROWS, 5, 6, dtype=torch.float64).to(device())
    found = []
    for number in range(5):
        torch.manual_seed(number)
        pipe.zero_grad()
        loss = pipe.step(x, torch.zeros_like(x), loss_fn=mean_square).loss
        found += [loss, *[param.grad.clone() for param in pipe.parameters() if param.grad is not None]]
    return [tensor.cpu() for tensor in found]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("touching", [Forks, Chooses])
def test_stages_with_threads_change_the_process_one_at_a_time(touching: type[nn.Module], mode: str) -> None:
    before = torch.backends.cudnn.enabled, torch.backends.cuda.flash_sdp_enabled()
    inline, threads = [loss_and_gradients(touching, workers, mode) for workers in ("inline", "threads")]
    assert before == (torch.backends.cudnn.enabled, torch.backends.cuda.flash_sdp_enabled())
    for one, other in zip(inline, threads, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)


# -------------------------------------------------------------------------------------------------- checkpointed blocks


@pytest.mark.parametrize("every", [1, 2])
def test_checkpointed_blocks_have_the_models_bits(every: int) -> None:
    model = blocks(0.3).to(device())
    x = torch.randn(9, 16).to(device())

    def run() -> Iterator[Tensor]:
        torch.manual_seed(6)
        model.zero_grad()
        output = model(x)
        output.square().mean().backward()
        yield output
        yield from (param.grad.clone() for param in model.parameters() if param.grad is not None)
        yield torch.rand(3, device=device())  # the generator is where it would be

    expected = list(run())
    with checkpoint_blocks(model, Block, every=every):
        for _ in range(3):
            assert all(torch.equal(one, other) for one, other in zip(run(), expected, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_checkpointed_blocks_within_a_pipe_have_its_bits(mode: str) -> None:
    found = []
    for checkpointed in (False, True):
        model = blocks(0.3)
        if checkpointed:
            checkpoint_blocks(model, Block, nested=True)
        pipe = Pipe(model, [1, 1, 1], CHUNKS, devices=PLACES["one GPU"](), checkpoint=mode)
        torch.manual_seed(3)
        x, y = torch.randn(9, 16).to(device()), torch.randn(9, 16).to(device())
        for number in range(3):
            torch.manual_seed(number)
            pipe.step(x, y, loss_fn=mean_square)
        found.append([param.grad.clone() for param in pipe.parameters() if param.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
