"""Law 1 for schedules by name: every one gives the plain module's bits, on a lane for each stage or for every two."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from cover import pairwise
from law_check import AXES, apart, differences, expect, observe
from law_models import MODELS
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Pipe
from scheduler import ScheduleError, by_name, names


def least_chunks(name: str) -> int:
    """How many chunks a schedule must have for four stages."""
    for chunks in range(1, 99):
        try:
            by_name(name, 4, chunks)
            return chunks
        except ScheduleError:
            pass
    raise AssertionError(name)


FILLED = tuple(name for name in names() if least_chunks(name) > 1)
RUN_BY_NAME = {
    "schedule": tuple(name for name in names() if name not in FILLED),
    "model": ("mlp", "convnet", "transformer", "inplace_middle"),
    "balance": ([1, 1, 1, 1], [1, 2]),
    "chunks": (1, 2, 4, 5),
    "rows": (5, 8),
    **{axis: AXES[axis] for axis in ("checkpoint", "train", "entry", "drive", "input_grad")},
}
RUN_FILLED = {**RUN_BY_NAME, "schedule": FILLED, "chunks": (8, 9), "rows": (9, 16)}


def whole(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rest of the model goes to the last stage."""
    count = len(MODELS[config["model"]]().model)
    first = config["balance"][:-1]
    return {**config, "balance": [*first, count - sum(first)]}


@pytest.mark.parametrize(
    "config", [*pairwise(RUN_BY_NAME), *pairwise(RUN_FILLED)], ids=lambda config: ", ".join(map(str, config.values()))
)
def test_every_schedule_gives_the_plain_modules_bits(config: dict[str, Any]) -> None:
    config = whole(config)
    assert not differences(observe(config), expect(config))


def net(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


TWO_A_LANE = [name for name in names() if by_name(name, 2, 8).stages == 4]


@pytest.mark.parametrize("name", TWO_A_LANE)
def test_where_a_lane_has_two_stages_an_odd_number_of_them_is_refused(name: str) -> None:
    words = f"schedule {name} has 2 stages a lane but the balance has 3, no multiple.*Use a balance of 4 stages, or"
    with pytest.raises(ScheduleError, match=words):
        Pipe(net(3), [1, 1, 1], 8, schedule=name)
    for chunks in (4, 8):  # two lanes are filled by four
        assert Pipe(net(4), [1, 1, 1, 1], chunks, schedule=name).schedule == name


@pytest.mark.parametrize("name", FILLED)
def test_too_few_chunks_for_a_schedule_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=rf"{name} .*Use chunks=\d+ or more"):
        Pipe(net(4), [1, 1, 1, 1], 2, schedule=name)


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("schedule", [*FILLED, by_name("1f1b", 4, 8), by_name("v-min", 2, 8)], ids=str)
def test_a_short_mini_batch_runs_the_first_chunks_of_the_order_and_says_so_once(schedule: Any, workers: str) -> None:
    def losses(how: Any) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh()) for _ in range(4))).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        pipe = Pipe(model, [1, 1, 1, 1], 8, schedule=how, workers=workers, devices=apart(4))
        kept: list[Tensor] = []
        for rows in (16, 8, 5, 1, 3, 9):
            x = torch.arange(4.0 * rows).double().sin().reshape(rows, 4)
            kept.append(pipe.step(x, x.cos(), loss_fn=functional.mse_loss, optimizer=optimizer).loss)
            kept.append(pipe.evaluate(x, x.cos(), loss_fn=functional.mse_loss).outputs)
            out = pipe(x)
            kept += torch.autograd.grad(out.sum(), list(model.parameters()))
        return kept

    words = r"8 chunks but this mini-batch gives (\d), so its order for the first \1"
    with pytest.warns(UserWarning, match=words) as told:
        short = losses(schedule)
    assert len(told) == 1
    assert all(torch.equal(one, other) for one, other in zip(short, losses("1f1b"), strict=True))


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def language_model() -> nn.Sequential:
    """Tied weights over the first and the last stage, a convolution, both kinds of norm, dropout."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    head.weight = embedding.weight
    convolution = nn.Conv1d(8, 8, 3, padding=1)
    middle = (nn.Linear(8, 8), Transposed(), nn.BatchNorm1d(8), convolution, Transposed(), nn.Dropout(0.3))
    return nn.Sequential(embedding, *middle, nn.LayerNorm(8), head)


def token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    loss = functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=3, reduction="sum")
    return loss, (target != 3).sum()


@cache
def trained(schedule: str, checkpoint: str, workers: str) -> list[Tensor]:
    """The losses of some steps with clipping and a scaler, then all parameters and statistics."""
    model = language_model()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 1e-2), torch.amp.GradScaler("cpu")
    pipe = Pipe(
        model, [2, 2, 2, 3], 8, schedule=schedule, checkpoint=checkpoint, workers=workers, deferred_batch_norm=True,
        devices=apart(4),
    )
    x, y = torch.arange(96).reshape(16, 6) % 20, torch.arange(96).reshape(16, 6) % 19
    torch.manual_seed(4)
    losses = [
        pipe.step(x, y, loss_fn=token_loss, optimizer=optimizer, clip_grad_norm=0.5, scaler=scaler).loss
        for _ in range(4)
    ]
    return [*losses, *(parameter.detach() for parameter in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("name", names())
def test_training_with_all_that_a_step_can_do_gives_the_same_bits_under_every_schedule(
    name: str, workers: str, checkpoint: str
) -> None:
    found, wanted = trained(name, checkpoint, workers), trained("1f1b", "always", "inline")
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
