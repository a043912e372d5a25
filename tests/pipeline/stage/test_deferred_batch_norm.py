"""Pipe(..., deferred_batch_norm=True): are the running statistics those of the whole mini-batch?

    norm first, or behind layers that know no rows   the un-pipelined module, fed the whole mini-batch
    any norm                                         by hand: run the chunks, keep what each norm is given, join it,
                                                     and take its mean and its unbiased variance

Outputs and gradients are those of deferred_batch_norm=False, bit for bit: only what is kept for eval mode differs.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cover import pairwise
from law_models import Apply, normal
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint

from pipeline import Pipe, is_recomputing
from pipeline.common.errors import CheckpointError
from pipeline.common.places import Place

DOUBLE = torch.float64
CHECKPOINTS = ("always", "except_last", "never")
KINDS: dict[str, tuple[type[_BatchNorm], tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d, ()),
    "1d of sequences": (nn.BatchNorm1d, (5,)),
    "2d": (nn.BatchNorm2d, (3, 2)),
    "3d": (nn.BatchNorm3d, (2, 1, 2)),
}
CHANNELS = 3
TOO_FEW = "Expected more than 1 value per channel when training"

# ---------------------------------------------------------------------------------------------- models, entry points


def by_value(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def randomised(module: nn.Module) -> nn.Module:
    """In float64, with weights and statistics that are not those of a new one."""
    generator = torch.Generator().manual_seed(5)
    module.double()
    with torch.no_grad():
        for value in [*module.parameters(), *module.buffers()]:
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape, generator=generator, dtype=DOUBLE) + 0.5)
            else:
                value.fill_(4)
    return module


def norm_first(kind: str, momentum: float | None = 0.1, affine: bool = True) -> nn.Sequential:
    norm, space = KINDS[kind]
    size = CHANNELS * torch.Size(space).numel()
    layers = norm(CHANNELS, momentum=momentum, affine=affine), nn.Flatten(), nn.Tanh(), nn.Linear(size, 2)
    return randomised(nn.Sequential(*layers))


def input_of(kind: str, rows: int, seed: int = 1) -> Tensor:
    return 3 * normal(rows, CHANNELS, *KINDS[kind][1], seed=seed) + 2


class Residual(nn.Module):
    """Norms in containers in containers; one of them is used twice, one not at all."""

    def __init__(self, width: int, momentum: float | None) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({
            "twice": nn.BatchNorm1d(width, momentum=momentum),
            "list": nn.ModuleList([nn.Sequential(nn.BatchNorm1d(width, momentum=momentum))]),
            "unused": nn.BatchNorm1d(width),
        })
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(torch.tanh(self.norms["twice"](x)))
        return x + self.norms["list"][0](self.norms["twice"](hidden))


def deep(momentum: float | None = 0.3) -> nn.Sequential:
    """Five layers; every norm but the first is given what norms before it have normalised chunk by chunk."""
    return randomised(nn.Sequential(
        nn.BatchNorm1d(4, momentum=momentum),
        nn.Linear(4, 6),
        Residual(6, momentum),
        nn.Sequential(nn.Tanh(), nn.BatchNorm1d(6, affine=False, momentum=0.7), nn.Linear(6, 4)),
        nn.BatchNorm1d(4, track_running_stats=False),
    ))


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, 4, 2))


def convnet() -> nn.Sequential:
    tail = nn.Sequential(nn.BatchNorm2d(4, momentum=None), nn.ReLU(inplace=True), nn.Flatten())
    return randomised(nn.Sequential(Convolutions(), tail, nn.Linear(16, 3), nn.BatchNorm1d(3)))


def deferred(model: nn.Sequential, balance: list[int] | None = None, chunks: int = 3, **settings: Any) -> Pipe:
    cut = [1, len(model) - 1] if balance is None else balance
    return Pipe(model, cut, chunks, deferred_batch_norm=True, **settings)


def square(out: Tensor, _: Any = None) -> Tensor:
    return out.square().sum()


def run(pipe: nn.Module, x: Tensor, entry: str) -> Tensor | None:
    """One call through an entry point; a backward where the entry point has one. Returns the outputs."""
    if entry == "no_grad":
        with torch.no_grad():
            return pipe(x)
    if entry == "inference":
        with torch.inference_mode():
            return pipe(x)
    if entry == "step":
        return pipe.step(x, loss_fn=square, loss_reduction="sum", outputs=True).outputs
    out = pipe(x)
    if entry == "create_graph":
        found = torch.autograd.grad(square(out), list(pipe.parameters()), create_graph=True, allow_unused=True)
        sum(square(grad) for grad in found if grad is not None).backward()
    else:
        square(out).backward()
    return out.detach()


ENTRIES = ("forward", "step", "no_grad", "inference", "create_graph")

# ---------------------------------------------------------------------------------------------------- the references


def close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        assert value.dtype is expected[name].dtype
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")


def by_hand(model: nn.Sequential, x: Tensor, chunks: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The outputs of the chunks, joined, and what the buffers are afterwards. The model stays as it is."""
    model = copy.deepcopy(model)
    before = by_value(model)
    given: dict[tuple[str, int], list[Tensor]] = {}  # norm and number of its use in a chunk -> a tensor a chunk
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    outs = []
    for piece in torch.tensor_split(x.detach(), min(chunks, len(x))):
        uses: dict[str, list[Tensor]] = {}
        handles = [
            norm.register_forward_hook(lambda _, args, out, to=uses.setdefault(name, []): to.append(args[0].clone()))
            for name, norm in norms.items()
        ]
        with torch.no_grad():
            outs.append(model(piece.clone()))
        for handle in handles:
            handle.remove()
        for name, tensors in uses.items():
            for use, tensor in enumerate(tensors):
                given.setdefault((name, use), []).append(tensor)
    for (name, _), tensors in sorted(given.items(), key=lambda item: item[0][1]):
        if norms[name].training and norms[name].track_running_stats:
            _update(before, name, norms[name].momentum, torch.cat(tensors))
    return torch.cat(outs), before


def _update(buffers: dict[str, Tensor], name: str, momentum: float | None, given: Tensor) -> None:
    """The documented rule of torch's batch norm."""
    count = buffers[f"{name}.num_batches_tracked"].add_(1)
    share = 1.0 / float(count) if momentum is None else momentum
    rows = given.double().transpose(0, 1).flatten(1)
    mean = rows.mean(1)
    variance = (rows - mean[:, None]).square().sum(1) / (rows.shape[1] - 1)
    for key, fresh in (("running_mean", mean), ("running_var", variance)):
        running = buffers[f"{name}.{key}"]
        running.copy_((1 - share) * running.double() + share * fresh)


def too_few(kind: str, rows: int, chunks: int) -> bool:
    """Whether some chunk has one value a channel."""
    return rows // min(chunks, rows) == 1 and torch.Size(KINDS[kind][1]).numel() == 1


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """After the block: the same buffers with the same values, momenta, flags and hooks."""
    before = _state(model)
    yield
    after = _state(model)
    for one, other in zip(before, after, strict=True):
        assert one[:-1] == other[:-1]
        assert one[-1].keys() == other[-1].keys()
        for name, (tensor, value) in one[-1].items():
            assert other[-1][name][0] is tensor and torch.equal(other[-1][name][1], value), name


def _state(model: nn.Module) -> list[tuple[Any, ...]]:
    return [
        (
            type(module),
            module.training,
            getattr(module, "momentum", 0.0),
            list(module._forward_hooks.items()),
            list(module._forward_pre_hooks.items()),
            [dict(table) for table in _other_tables(module)],
            {name: (each, each.clone()) for name, each in module._buffers.items() if each is not None},
        )
        for module in model.modules()
    ]


def _other_tables(module: nn.Module) -> list[dict[int, Any]]:
    return [
        module._forward_hooks_with_kwargs, module._forward_hooks_always_called, module._forward_pre_hooks_with_kwargs,
        module._backward_hooks, module._backward_pre_hooks,
    ]


# --------------------------------------------------------------------------------------------- the whole mini-batch

FIRST = pairwise({
    "kind": tuple(KINDS),
    "momentum": (0.1, 0.7, None, 0.0, 1.0),
    "affine": (True, False),
    "chunks": (1, 2, 3, 4, 8),
    "rows": (1, 2, 3, 5, 7, 8, 13, 16),
    "checkpoint": CHECKPOINTS,
    "schedule": ("gpipe", "1f1b"),
    "entry": ENTRIES,
    "workers": ("inline", "threads"),
})


@pytest.mark.parametrize("config", FIRST, ids=lambda config: "-".join(str(value) for value in config.values()))
def test_statistics_of_a_norm_that_comes_first_equal_the_plain_modules(config: dict[str, Any]) -> None:
    model = norm_first(config["kind"], config["momentum"], config["affine"])
    plain = copy.deepcopy(model)
    pipe = deferred(
        model, [1, 2, 1], config["chunks"], checkpoint=config["checkpoint"], schedule=config["schedule"],
        devices=[Place(torch.device("cpu"), name) for name in "abc"], workers=config["workers"],
    )
    for step in range(3):
        x = input_of(config["kind"], config["rows"], seed=step)
        if too_few(config["kind"], config["rows"], config["chunks"]):
            with untouched(model), pytest.raises(ValueError, match=TOO_FEW):
                run(pipe, x, config["entry"])
        else:
            with torch.no_grad():
                plain(x)
            run(pipe, x, config["entry"])
            close(by_value(model), by_value(plain))
            assert by_value(model)["0.num_batches_tracked"] == 5 + step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_any_number_of_rows_gives_the_statistics_of_all_of_them(kind: str, chunks: int) -> None:
    model = norm_first(kind)
    plain = copy.deepcopy(model)
    pipe = deferred(model, chunks=chunks)
    for rows in range(1, 18):
        x = input_of(kind, rows, seed=rows)
        if too_few(kind, rows, chunks):
            with untouched(model), pytest.raises(ValueError, match=TOO_FEW):
                run(pipe, x, "forward")
        else:
            plain(x)
            run(pipe, x, "forward")
            close(by_value(model), by_value(plain))


def test_one_value_a_channel_in_one_chunk_is_torchs_own_error_with_the_chunk_named() -> None:
    model = norm_first("1d")
    pipe = deferred(model, chunks=3)
    with untouched(model), pytest.raises(ValueError, match=TOO_FEW) as caught:
        pipe(input_of("1d", 4))  # chunks of 2, 1 and 1 rows
    assert "stage 0 (layer 0), chunk 1, 0F1" in caught.value.__notes__


@pytest.mark.parametrize("is_deferred", [True, False])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, lambda width: nn.Sequential(nn.BatchNorm1d(width))])
@pytest.mark.parametrize("chunks, rows", [(4, 4), (3, 4), (1, 1)])
def test_a_chunk_of_one_row_is_an_error_that_says_to_use_fewer_chunks_and_that_helps(
    chunks: int, rows: int, norm: Any, is_deferred: bool
) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), norm(4), nn.Linear(4, 1)), torch.rand(max(rows, 2), 4)
    with untouched(model), pytest.raises(ValueError, match=f"(?s){TOO_FEW}.*fewer chunks.*drop_last=True"):
        Pipe(model, [1, 2], chunks, deferred_batch_norm=is_deferred)(x[:rows])
    Pipe(model, [1, 2], min(chunks, len(x) // 2), deferred_batch_norm=is_deferred)(x)


@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_statistics_behind_linear_layers_equal_the_plain_modules(chunks: int) -> None:
    model = randomised(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)))
    plain = copy.deepcopy(model)
    pipe = deferred(model, [1, 2, 2], chunks)
    for step in range(3):
        x = normal(11, 4, seed=step)
        plain(x)
        run(pipe, x, "forward")
        close(by_value(model), by_value(plain))


DEEP = pairwise({
    "model": ("deep", "deep, mean of all", "convnet"),
    "balance": ("whole", "first alone", "halves", "each alone"),
    "chunks": (1, 2, 3, 4, 8),
    "rows": (4, 5, 11, 16),
    "checkpoint": CHECKPOINTS,
    "schedule": ("gpipe", "1f1b"),
    "entry": ENTRIES,
})


def deep_model(name: str, rows: int, seed: int = 1) -> tuple[nn.Sequential, Tensor]:
    if name == "convnet":
        return convnet(), normal(rows, 2, 4, 4, seed=seed)
    return deep(None if name == "deep, mean of all" else 0.3), normal(rows, 4, seed=seed)


def balance_of(kind: str, layers: int) -> list[int]:
    half = layers // 2
    return {
        "whole": [layers], "first alone": [1, layers - 1], "halves": [half, layers - half], "each alone": [1] * layers
    }[kind]


@pytest.mark.parametrize("config", DEEP, ids=lambda config: "-".join(str(value) for value in config.values()))
def test_statistics_of_any_norm_are_those_of_all_that_it_was_given(config: dict[str, Any]) -> None:
    model, _ = deep_model(config["model"], 1)
    pipe = deferred(
        model, balance_of(config["balance"], len(model)), config["chunks"], checkpoint=config["checkpoint"],
        schedule=config["schedule"],
    )
    for step in range(2):
        _, x = deep_model(config["model"], config["rows"], seed=step)
        if config["rows"] // min(config["chunks"], config["rows"]) == 1:
            with untouched(model), pytest.raises(ValueError, match=TOO_FEW):
                run(pipe, x, config["entry"])
            continue
        outputs, buffers = by_hand(model, x, config["chunks"])
        found = run(pipe, x, config["entry"])
        assert torch.equal(found, outputs)
        close(by_value(model), buffers)


@pytest.mark.parametrize("config", DEEP[::2], ids=lambda config: "-".join(str(value) for value in config.values()))
def test_outputs_and_gradients_are_those_without_deferring_bit_for_bit(config: dict[str, Any]) -> None:
    if config["rows"] // min(config["chunks"], config["rows"]) == 1:
        config = {**config, "rows": 2 * config["chunks"]}
    found = []
    for defers in (False, True):
        model, x = deep_model(config["model"], config["rows"])
        x.requires_grad_(config["entry"] not in ("no_grad", "inference"))
        pipe = Pipe(
            model, balance_of(config["balance"], len(model)), config["chunks"], checkpoint=config["checkpoint"],
            schedule=config["schedule"], deferred_batch_norm=defers,
        )
        outputs = [run(pipe, x, config["entry"]) for _ in range(2)]
        found.append([*outputs, x.grad, *(param.grad for param in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_the_mean_of_the_chunks_variances_would_not_do() -> None:
    """What these laws must tell apart: chunks of other means, and several updates for one."""
    x = torch.cat([normal(4, CHANNELS), normal(4, CHANNELS, seed=2) + 100])
    model = norm_first("1d")
    apart, whole = copy.deepcopy(model), copy.deepcopy(model)
    Pipe(apart, [1, 3], 2)(x)
    deferred(model, chunks=2)(x)
    whole(x)
    close(by_value(model), by_value(whole))
    assert (model[0].running_var > 100 * apart[0].running_var).all()


# ------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mean, deviation", [(1e6, 1.0), (1e6, 1e-3), (1e3, 10.0), (0.0, 1e-6)])
@pytest.mark.parametrize("chunks", [2, 7, 8])
def test_a_large_mean_costs_the_variance_eps_times_mean_over_deviation_and_not_its_square(
    dtype: torch.dtype, mean: float, deviation: float, chunks: int
) -> None:
    x = (normal(64, CHANNELS) * deviation + mean).to(dtype)
    centred = x.double() - mean  # exact: both are near
    if not centred.square().sum():
        return
    model = norm_first("1d", momentum=1.0).to(dtype)
    deferred(model, chunks=chunks)(x)
    lost = torch.finfo(dtype).eps * (4 + 2 * mean / deviation)
    expected = centred.var(0) if dtype is DOUBLE else (x.double() - x.double().mean(0)).var(0)
    torch.testing.assert_close(model[0].running_var.double(), expected, rtol=lost, atol=0)
    torch.testing.assert_close(model[0].running_mean.double(), x.double().mean(0), rtol=4 * lost, atol=lost * deviation)


def test_in_float32_statistics_are_float32_and_the_plain_modules() -> None:
    model = norm_first("2d")
    plain = copy.deepcopy(model).float()
    pipe = deferred(model).to(torch.float32)
    for step in range(3):
        x = input_of("2d", 10, seed=step).float()
        plain(x)
        run(pipe, x, "forward")
        close(by_value(model), by_value(plain), 1e-6)


@pytest.mark.parametrize("entry", ["forward", "step", "no_grad"])
def test_under_autocast_bfloat16_inputs_give_float32_statistics_of_what_the_norm_was_given(entry: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    pipe = deferred(model, [1, 2])
    seen = []
    model[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    x = normal(10, 4).float() + 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, buffers = by_hand(model, x, 3)
        run(pipe, x, entry)
    assert set(seen) == {torch.bfloat16}
    close(by_value(model), buffers, 1e-6)


def test_a_bfloat16_modules_statistics_are_combined_in_more_digits_than_they_are_kept_in() -> None:
    """Each chunk's are rounded once, and the sum once more: seldom another bfloat16 than the exact one's, and then the
    next one."""
    others = 0
    for seed in range(20):
        model = norm_first("1d").bfloat16()
        x = input_of("1d", 96, seed=seed).bfloat16()
        _, buffers = by_hand(model, x, 16)
        run(deferred(model, chunks=16), x, "no_grad")
        close(by_value(model), buffers, 2**-7)
        others += sum(int((value != buffers[name]).sum()) for name, value in model.named_buffers())
    assert others <= 12  # of 120; a sum in bfloat16 gives four times as many


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_statistics_that_are_not_finite_become_what_the_plain_modules_become(bad: float) -> None:
    model = norm_first("1d")
    model[0].running_mean[0] = bad
    plain = copy.deepcopy(model)
    x = input_of("1d", 9)
    x[4, 1] = bad
    plain(x)
    run(deferred(model), x, "no_grad")
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer.isfinite(), plain.get_buffer(name).isfinite()), name


# ------------------------------------------------------------------------------------- one update for each forward


@pytest.mark.parametrize("policy", CHECKPOINTS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_forwards_before_their_backwards_count_once_each(policy: str, order: tuple[int, ...]) -> None:
    model, apart = deep(), deep()
    pipe, other = deferred(model, [2, 3], checkpoint=policy), Pipe(apart, [2, 3], 3, checkpoint=policy)
    xs = [normal(9, 4, seed=seed) for seed in range(3)]
    outs, others = [], []
    for x in xs:
        _, buffers = by_hand(model, x, 3)
        outs.append(pipe(x))
        others.append(other(x))
        close(by_value(model), buffers)
    for index in order:
        with untouched(model):
            square(outs[index]).backward()
        square(others[index]).backward()
    for one, two in zip(model.parameters(), apart.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None) and (one.grad is None or torch.equal(one.grad, two.grad))


@pytest.mark.parametrize("policy", CHECKPOINTS)
def test_a_backward_between_two_forwards_changes_no_statistics(policy: str) -> None:
    model = deep()
    pipe = deferred(model, [2, 3], checkpoint=policy)
    first = pipe(normal(9, 4))
    second = pipe(normal(7, 4, seed=2))
    with untouched(model):
        square(first).backward()
    _, buffers = by_hand(model, normal(8, 4, seed=3), 3)
    third = pipe(normal(8, 4, seed=3))
    close(by_value(model), buffers)
    with untouched(model):
        square(third).backward()
        square(second).backward()


@pytest.mark.parametrize("policy", CHECKPOINTS)
def test_repeated_and_differentiated_backwards_change_no_statistics(policy: str) -> None:
    results = []
    for defers in (False, True):
        model = deep()
        pipe = Pipe(model, [2, 3], 3, checkpoint=policy, deferred_batch_norm=defers)
        out = pipe(normal(9, 4))
        params = list(pipe.parameters())
        with untouched(model):
            once = torch.autograd.grad(square(out), params, retain_graph=True, allow_unused=True)
            twice = torch.autograd.grad(square(out), params, create_graph=True, allow_unused=True)
            used = [grad for grad in twice if grad is not None]
            second = torch.autograd.grad(sum(map(square, used)), params, allow_unused=True)
        results.append([*once, *twice, *second])
    assert sum(grad is not None for grad in results[1]) > 20
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))


def test_statistics_are_updated_when_the_forward_is_over_and_not_before() -> None:
    seen: list[tuple[int, float]] = []
    model = norm_first("1d")
    norm = model[0]
    model[3].register_forward_pre_hook(
        lambda *_: None if is_recomputing() else seen.append((int(norm.num_batches_tracked), float(norm.momentum)))
    )
    out = deferred(model, chunks=3)(input_of("1d", 9))
    assert seen == [(4, 0.1)] * 3 and norm.num_batches_tracked == 5
    square(out).backward()
    assert norm.num_batches_tracked == 5


# --------------------------------------------------------------------------------------------------- modes and flags


@pytest.mark.parametrize("model", [deep, convnet])
def test_in_eval_mode_outputs_are_the_plain_modules_and_nothing_is_updated(
    model: Callable[[], nn.Sequential]
) -> None:
    ours = model()
    pipe = deferred(ours, [2, len(ours) - 2])
    x = normal(9, 4) if model is deep else normal(9, 2, 4, 4)
    run(pipe, x, "step")
    assert list(pipe.state_dict()) == list(model().state_dict())
    plain = model()
    plain.load_state_dict(pipe.state_dict())
    plain.eval()
    for module in (plain, ours):
        for each in module.modules():  # it has no statistics: chunks would normalise by themselves
            if isinstance(each, _BatchNorm) and not each.track_running_stats:
                each.forward = lambda value: value
    with untouched(ours):
        evaluated = pipe.evaluate(x, loss_fn=square, loss_reduction="sum")
    pipe.eval()
    with untouched(ours):
        torch.testing.assert_close(pipe(x), plain(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(evaluated.outputs, plain(x), rtol=1e-12, atol=1e-12)
        run(pipe, x, "forward")


@pytest.mark.parametrize("policy", CHECKPOINTS)
@pytest.mark.parametrize("frozen", [("0",), ("2.norms.twice",), ("0", "2.norms.list.0.0", "3.1")])
def test_norms_in_eval_mode_among_others_stay_as_they_are(policy: str, frozen: tuple[str, ...]) -> None:
    model, apart = deep(), deep()
    for name in frozen:
        model.get_submodule(name).eval()
        apart.get_submodule(name).eval()
    before = by_value(model)
    x = normal(9, 4)
    outputs, buffers = by_hand(model, x, 3)
    assert torch.equal(run(deferred(model, [2, 3], checkpoint=policy), x, "forward"), outputs)
    run(Pipe(apart, [2, 3], 3, checkpoint=policy), x, "forward")
    close(by_value(model), buffers)
    for name in frozen:
        assert torch.equal(model.get_buffer(f"{name}.running_mean"), before[f"{name}.running_mean"])
    for one, other in zip(model.parameters(), apart.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None) and (one.grad is None or torch.equal(one.grad, other.grad))


@pytest.mark.parametrize("policy", CHECKPOINTS)
def test_a_backward_in_eval_mode_is_of_the_statistics_that_its_forward_read(policy: str) -> None:
    model = norm_first("1d")
    plain = copy.deepcopy(model).eval()
    pipe = deferred(model, checkpoint=policy)
    x = input_of("1d", 9)
    pipe.eval()
    out = pipe(x)
    pipe.train()
    run(pipe, x, "no_grad")  # writes the statistics that the forward has read
    square(out).backward()
    square(plain(x)).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_norms_without_statistics_or_without_a_count_do_as_the_plain_ones() -> None:
    model = randomised(nn.Sequential(
        nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4, momentum=0.5), nn.BatchNorm1d(4, momentum=None)
    ))
    model[1].num_batches_tracked = model[2].num_batches_tracked = None
    plain = copy.deepcopy(model)
    run(deferred(model, [1, 2], chunks=1), normal(6, 4), "no_grad")
    plain(normal(6, 4))
    close(by_value(model), by_value(plain))
    assert [name for name, _ in model.named_buffers()] == [
        "1.running_mean", "1.running_var", "2.running_mean", "2.running_var"
    ]


def test_changing_the_momentum_or_switching_off_takes_effect_at_the_next_call() -> None:
    model = norm_first("1d")
    plain = copy.deepcopy(model)
    pipe = deferred(model)
    for momentum in (0.1, None, 0.9):
        model[0].momentum = plain[0].momentum = momentum
        run(pipe, input_of("1d", 9), "step")
        plain(input_of("1d", 9))
        close(by_value(model), by_value(plain))
        assert model[0].momentum == momentum
    pipe.deferred_batch_norm = False
    run(pipe, input_of("1d", 9), "step")
    assert model[0].num_batches_tracked == plain[0].num_batches_tracked + 3


def test_update_bn_of_torchs_weight_averaging_gives_the_plain_modules_statistics() -> None:
    model = norm_first("2d")
    plain = copy.deepcopy(model)
    batches = [input_of("2d", rows, seed=rows) for rows in (8, 8, 5)]
    update_bn(batches, deferred(model))
    update_bn(batches, plain)
    close(by_value(model), by_value(plain))
    assert model[0].momentum == 0.1


# ---------------------------------------------------------------------------------- what may be done to the modules


def test_hooks_of_the_user_on_a_norm_act_as_ever_and_see_its_own_buffers() -> None:
    model = norm_first("1d")
    norm = model[0]
    before, own = float(norm.running_mean[0]), norm.running_mean
    seen = []

    def look(module: nn.Module, *_: Any) -> None:
        seen.append((module.momentum, module.running_mean is own, float(module.running_mean[0]) == before))

    norm.register_forward_pre_hook(look)
    norm.register_forward_pre_hook(lambda _, args: (args[0] * 2 + 1,))
    norm.register_forward_hook(lambda _, args, out: out * 3)
    norm.register_forward_hook(lambda _, args, kwargs, out: out - 1, with_kwargs=True)
    norm.register_forward_hook(look, prepend=True)
    norm.register_forward_hook(look, always_call=True)
    plain = copy.deepcopy(model)
    for hooks in (plain[0]._forward_hooks, plain[0]._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "__name__", "") == "look"]:
            del hooks[key]
    x = input_of("1d", 9)
    outputs, buffers = by_hand(plain, x, 3)
    tables = list(norm._forward_hooks.items()), list(norm._forward_pre_hooks.items())
    pipe = deferred(model, checkpoint="never")
    assert torch.equal(run(pipe, x, "no_grad"), outputs)
    close(by_value(model), buffers)
    assert seen == [(0.1, True, True)] * 9
    assert (list(norm._forward_hooks.items()), list(norm._forward_pre_hooks.items())) == tables


@pytest.mark.parametrize("entry", ENTRIES)
def test_no_hook_is_left_on_a_module_after_a_call(entry: str) -> None:
    model = deep()
    pipe = deferred(model, [2, 3])
    run(pipe, normal(9, 4), entry)
    for module in model.modules():
        assert not any([module._forward_hooks, module._forward_pre_hooks, *_other_tables(module)])


def test_functional_call_updates_the_buffers_that_it_was_given_and_no_others() -> None:
    model = norm_first("1d")
    pipe = deferred(model)
    given = {name: buffer.clone() for name, buffer in pipe.named_buffers()}
    plain, plain_given = copy.deepcopy(model), {name: buffer.clone() for name, buffer in given.items()}
    x = input_of("1d", 9)
    with untouched(model):
        out = functional_call(pipe, given, (x,))
        square(out).backward()
    functional_call(plain, plain_given, (x,))
    close(given, plain_given)
    assert not torch.equal(given["0.running_mean"], model[0].running_mean)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_statistics_between_steps_goes_on_from_those(assign: bool) -> None:
    model = norm_first("1d", momentum=None)
    plain = copy.deepcopy(model)
    pipe = deferred(model)
    run(pipe, input_of("1d", 9), "step")
    loaded = {name: value.clone() for name, value in norm_first("1d").state_dict().items()}
    loaded["0.running_mean"] += 7
    pipe.load_state_dict(copy.deepcopy(loaded), assign=assign)
    plain.load_state_dict(copy.deepcopy(loaded))
    run(pipe, input_of("1d", 7), "step")
    plain(input_of("1d", 7))
    close(by_value(model), by_value(plain))


def test_a_deep_copy_defers_too_and_shares_nothing() -> None:
    model = norm_first("1d")
    pipe = deferred(model)
    out = pipe(input_of("1d", 9))
    twin = copy.deepcopy(pipe)
    plain = copy.deepcopy(model)
    with untouched(model):
        run(twin, input_of("1d", 7), "step")
    plain(input_of("1d", 7))
    close(by_value(twin), by_value(plain))
    with untouched(twin):
        square(out).backward()


class Half(nn.BatchNorm2d):
    """A subclass with another default and no forward of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=0.5)


def test_a_subclass_of_a_norm_is_a_norm() -> None:
    model = randomised(nn.Sequential(Half(3), nn.Flatten(), nn.Linear(18, 2)))
    plain = copy.deepcopy(model)
    run(deferred(model), input_of("2d", 8), "step")
    plain(input_of("2d", 8))
    close(by_value(model), by_value(plain))


def test_a_norm_that_stands_in_two_layers_of_a_stage_is_updated_by_each_in_turn() -> None:
    norm = nn.BatchNorm1d(4, momentum=0.4)
    model = randomised(nn.Sequential(norm, nn.Linear(4, 4), norm, nn.Linear(4, 2)))
    x = normal(11, 4)
    outputs, buffers = by_hand(nn.Sequential(nn.Sequential(norm), model[1], model[2], model[3]), x, 3)
    assert torch.equal(run(deferred(model, [3, 1]), x, "forward"), outputs)
    found = by_value(model)
    assert found["0.num_batches_tracked"] == 6
    close({name.replace("0.", "0.0.", 1): value for name, value in found.items()}, buffers)


def test_statistics_are_released_with_the_call() -> None:
    """What is kept of the chunks goes when they are combined; nothing needs the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        model = norm_first("1d")
        pipe = deferred(model)
        run(pipe, input_of("1d", 9), "step")
        before = sum(type(each) is Tensor for each in gc.get_objects())
        for _ in range(3):
            run(pipe, input_of("1d", 9), "no_grad")
        assert sum(type(each) is Tensor for each in gc.get_objects()) <= before
    finally:
        gc.enable()


def test_a_pipe_in_a_pipe_defers_by_its_own_setting() -> None:
    """The inner one is called once for each chunk of the outer one, so that is how often it updates."""
    for inner_defers, counts in ((True, 3), (False, 3 * 2)):
        inner = norm_first("1d")
        by_calls = copy.deepcopy(inner)
        middle = Pipe(inner, [1, 3], 2, deferred_batch_norm=inner_defers)
        model = nn.Sequential(nn.BatchNorm1d(3, dtype=DOUBLE), middle, nn.BatchNorm1d(2, dtype=DOUBLE))
        first = copy.deepcopy(model[0])
        x = input_of("1d", 12)
        run(deferred(model, [1, 2], 3), x, "forward")
        for piece in x.tensor_split(3):
            by_calls(copy.deepcopy(first)(piece))
        first(x)
        close(by_value(model[0]), by_value(first))
        assert (model[2].num_batches_tracked, inner[0].num_batches_tracked) == (1, 4 + counts)
        if inner_defers:
            close(by_value(inner), by_value(by_calls))


# ------------------------------------------------------------------------------------------------------- failures


class Bomb(nn.Module):
    """Raises in the forward of a chunk, or in its backward, while it is armed."""

    def __init__(self, kind: str, chunk: int) -> None:
        super().__init__()
        self.kind, self.chunk, self.armed = kind, chunk, True
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        number, self.forwards = self.forwards, self.forwards + (not is_recomputing())
        if self.armed and number == self.chunk and not is_recomputing():
            if self.kind == "F":
                raise OSError("no luck")
            if x.requires_grad and self.kind == "B":
                x = x * 1
                x.register_hook(self._fail)
        return x

    def _fail(self, grad: Tensor) -> Tensor:
        if self.armed:
            raise OSError("no luck")
        return grad


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("entry", ["forward", "step", "no_grad"])
@pytest.mark.parametrize("chunk", [0, 2])
@pytest.mark.parametrize("place", [0, 1, 2, 5])
def test_after_a_failing_forward_all_is_as_it_was_and_the_next_call_is_right(
    place: int, chunk: int, entry: str, workers: str
) -> None:
    bomb = Bomb("F", chunk)
    model = deep()
    model.insert(place, bomb)
    places = [Place(torch.device("cpu"), name) for name in "ab"]
    pipe = deferred(model, [3, 3], devices=places, workers=workers)
    with untouched(model), pytest.raises(OSError, match="no luck"):
        run(pipe, normal(9, 4), entry)
    bomb.armed = False
    _, buffers = by_hand(model, normal(9, 4, seed=2), 3)
    run(pipe, normal(9, 4, seed=2), entry)
    close(by_value(model), buffers)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("policy", ["never", "except_last"])
@pytest.mark.parametrize("chunk", [0, 1])
def test_a_step_whose_backward_or_loss_fails_updates_no_statistics(policy: str, schedule: str, chunk: int) -> None:
    for kind in ("B", "loss"):
        bomb = Bomb(kind, chunk)
        model = deep()
        model.append(bomb)
        pipe = deferred(model, [2, 4], checkpoint="never" if kind == "B" else policy, schedule=schedule)
        losses = iter(range(9))

        def loss_fn(out: Tensor, _: Any, kind: str = kind, losses: Iterator[int] = losses) -> Tensor:
            if kind == "loss" and next(losses) == chunk:
                raise OSError("no luck")
            return square(out)

        with untouched(model), pytest.raises(OSError, match="no luck"):
            pipe.step(normal(9, 4), loss_fn=loss_fn, loss_reduction="sum")
        bomb.armed = False
        _, buffers = by_hand(model, normal(9, 4), 3)
        run(pipe, normal(9, 4), "step")
        close(by_value(model), buffers)


def test_a_backward_that_fails_after_the_forward_entry_point_leaves_the_statistics_of_the_forward() -> None:
    bomb = Bomb("B", 1)
    model = deep()
    model.append(bomb)
    pipe = deferred(model, [2, 4], checkpoint="never")
    _, buffers = by_hand(model, normal(9, 4), 3)
    bomb.armed = True
    out = pipe(normal(9, 4))
    with untouched(model), pytest.raises(OSError, match="no luck"):
        square(out).backward()
    close(by_value(model), buffers)


def test_outputs_that_cannot_be_joined_leave_the_statistics_as_they_were() -> None:
    model = norm_first("1d").append(Apply(lambda x: x.sum()))
    pipe = deferred(model)
    with untouched(model), pytest.raises(ValueError, match="0-d"):
        pipe(input_of("1d", 9))


@pytest.mark.parametrize("kind", ["pre-hook", "hook"])
def test_a_hook_of_the_user_that_raises_leaves_all_as_it_was(kind: str) -> None:
    model = norm_first("1d")
    pipe = deferred(model)

    def fail(*_: Any) -> None:
        raise OSError("no luck")

    register = model[0].register_forward_pre_hook if kind == "pre-hook" else model[0].register_forward_hook
    handle = register(fail)
    with untouched(model), pytest.raises(OSError, match="no luck"):
        pipe(input_of("1d", 9))
    handle.remove()
    plain = copy.deepcopy(model)
    plain(input_of("1d", 9))
    pipe(input_of("1d", 9))
    close(by_value(model), by_value(plain))


# ----------------------------------------------------------------------------------------------- refused, or right


def test_a_sync_batch_norm_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.ModuleDict({"norm": nn.SyncBatchNorm(4)})))
    with pytest.raises(TypeError, match=r"cannot put off layer '1\.1\.norm', a SyncBatchNorm: .*several processes"):
        deferred(model)
    Pipe(model, [1, 1], deferred_batch_norm=False)


class Uses(nn.Module):
    """Computes with a norm in a way of its own."""

    def __init__(self, norm: nn.Module, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = norm
        self.linear = nn.Linear(3, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.norm, self.linear(x))


def right_or_refused(
    layer: nn.Module, entry: str = "forward", steps: int = 3, policy: str = "never", chunks: int = 3
) -> None:
    """A batch norm that is used oddly: statistics are the plain module's, outputs those without deferring; or an error
    by its words, and the statistics are as they were, or as the plain module's after its forward where a backward of
    the forward entry point fails."""
    model = randomised(nn.Sequential(layer, nn.Linear(3, 2)))
    plain, apart = copy.deepcopy(model), copy.deepcopy(model)
    try:
        pipe = deferred(model, checkpoint=policy, chunks=chunks)
    except TypeError as error:
        assert "deferred_batch_norm=True" in str(error)
        return
    other = Pipe(apart, [1, 1], chunks, checkpoint=policy)
    for step in range(steps):
        x = input_of("1d", 13, seed=step)
        started = _state(model)
        try:
            out = run(pipe, x, entry)
        except (CheckpointError, TypeError) as error:
            assert "deferred_batch_norm" in str(error)
            if "in the backward" in str(error) and entry != "step":
                plain(x)
            close(by_value(model), by_value(plain))
            assert [one[:-1] for one in started] == [two[:-1] for two in _state(model)]
            return
        assert torch.equal(out, run(other, x, entry)), "outputs are not those without deferring"
        square(plain(x)).backward()
        close(by_value(model), by_value(plain))


def functional_norm(norm: nn.Module, x: Tensor) -> Tensor:
    norm.num_batches_tracked.add_(1)
    return functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, True, 0.1)


def tries_again(norm: nn.Module, x: Tensor) -> Tensor:
    try:
        norm(x[:, :, None, None])  # images, to a norm of vectors
    except ValueError:
        pass
    return norm(x)


@pytest.mark.parametrize("entry", ["forward", "no_grad", "step"])
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda norm, x: norm(x), id="called"),
        pytest.param(lambda norm, x: norm(input=x), id="called by keyword"),
        pytest.param(lambda norm, x: norm.forward(x), id="forward called"),
        pytest.param(functional_norm, id="its buffers in functional.batch_norm"),
        pytest.param(
            tries_again, id="called again after an error",
        ),
        pytest.param(
            lambda norm, x: [norm.eval()(x), norm.train()(x)][1], id="both modes in one forward"
        ),
    ],
)
def test_a_norm_that_is_used_oddly_is_right_or_refused(
    function: Callable[[nn.Module, Tensor], Tensor], entry: str
) -> None:
    right_or_refused(Uses(nn.BatchNorm1d(3), function), entry)


@pytest.mark.parametrize(
    "kind, shape, words",
    [
        pytest.param("1d", (9,), "expected 2D or 3D input"),
        ("1d", (9, CHANNELS, 1, 1), "expected 2D or 3D input"),
        ("2d", (9, CHANNELS), "expected 4D input"),
        ("3d", (9, CHANNELS, 3, 2), "expected 5D input"),
    ],
)
def test_an_input_of_another_shape_is_torchs_own_error(kind: str, shape: tuple[int, ...], words: str) -> None:
    model = norm_first(kind)
    with untouched(model), pytest.raises(ValueError, match=words):
        deferred(model)(normal(*shape))


class Scaled(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x) + 1


class Written(nn.BatchNorm1d):
    """A forward written out, as fused norms have it."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        made = functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, share)
        return torch.relu(made)


class Ghost(nn.BatchNorm1d):
    """Normalises parts of what it is given, each by itself: the plain module updates once for each part."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(Ghost, self).forward(part) for part in x.tensor_split(2)])


class ByRunning(nn.BatchNorm1d):
    """Normalises by the running statistics in train mode too."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return functional.batch_norm(x, self.running_mean.clone(), self.running_var.clone(), self.weight, self.bias)


class OwnShare(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, 0.3)


class Padded(nn.BatchNorm1d):
    """Counts other rows than it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x, x]))[: len(x)]


@pytest.mark.parametrize(
    "norm",
    [
        Scaled,
        Written,
        pytest.param(Ghost),
        pytest.param(ByRunning),
        pytest.param(OwnShare),
        pytest.param(Padded),
    ],
)
def test_a_norm_with_a_forward_of_its_own_is_right_or_refused(norm: type[nn.BatchNorm1d]) -> None:
    right_or_refused(norm(3))


def test_statistics_written_by_another_layer_within_a_forward_are_an_error_with_words() -> None:
    class Resets(nn.Module):
        def __init__(self, norm: nn.BatchNorm1d) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            self.norm.running_mean.mul_(0.5)
            return x

    model = norm_first("1d")
    model.insert(1, Resets(model[0]))
    pipe = deferred(model, [2, 3])
    words = (
        r"a batch norm of stage 0 \(layers 0\.\.1\) wrote its running statistics \('running_mean', .*\) within a "
        "forward, where deferred_batch_norm=True puts them off"
    )
    with untouched(model), pytest.raises(CheckpointError, match=words):
        pipe(input_of("1d", 9))


@pytest.mark.parametrize("chunks", [1, 3])
def test_norms_that_share_their_statistics_are_updated_in_the_order_of_their_calls(chunks: int) -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late, self.early = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
            self.late._buffers = self.early._buffers

        def forward(self, x: Tensor) -> Tensor:
            return self.early(x) + self.late(5 * x)

    right_or_refused(Backwards(), chunks=chunks)


@pytest.mark.parametrize("policy", CHECKPOINTS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "entry",
    [
        pytest.param("forward"),
        pytest.param("create_graph"),
        "no_grad",
        "step",  # refused, where a forward follows a backward
    ],
)
def test_a_norm_in_torchs_own_checkpoint_is_right_or_refused(reentrant: bool, entry: str, policy: str) -> None:
    """The plain module updates twice: in the forward, and when the backward computes it again."""
    if reentrant and entry == "create_graph":
        entry = "forward"  # torch refuses the other
    layer = Uses(nn.BatchNorm1d(3), lambda norm, x: checkpoint(norm, x, use_reentrant=reentrant))
    if entry == "no_grad":
        reentrant = False  # it warns that there is nothing to differentiate
        model = randomised(nn.Sequential(layer, nn.Linear(3, 2)))
        plain = copy.deepcopy(model)
        with torch.no_grad():
            plain(input_of("1d", 13))
            deferred(model, checkpoint=policy)(input_of("1d", 13))
        close(by_value(model), by_value(plain))
    else:
        right_or_refused(layer, entry, policy=policy)


def test_a_compiled_norm_is_right_or_refused() -> None:
    """Code that was compiled where no hooks stood is found again, and knows of none."""
    try:
        right_or_refused(torch.compile(nn.BatchNorm1d(3), backend="eager"))
    finally:
        torch._dynamo.reset()
