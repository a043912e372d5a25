"""Loops of other libraries train a Pipe on a GPU to the numbers that they train the plain module to there.

    make test-gpu

Of test_loops.py and test_trainer.py, with the libraries' own devices. They move mini-batches, and must leave the Pipe.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_scripts import EXAMPLES
from test_loops import accelerated, by_autograd, by_step, data, piped, tied
from test_trainer import arguments
from test_trainer import data as texts
from test_trainer import gpt
from test_trainer import piped as piped_gpt
from torch import nn

from pipeline.common.places import Place

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # advice of the libraries, on their GPUs


def device() -> torch.device:
    return torch.device("cuda", 0)


PLACES: dict[str, Callable[[], list[Any]]] = {
    "one GPU": lambda: [device()] * 2,
    "as if two GPUs": lambda: [Place(device(), name) for name in "ab"],
}
# Of the library, where it has the choice.
ON_GPU: dict[str, dict[str, Any]] = {
    "accelerate": {"cpu": False}, "Lightning": {"accelerator": "gpu", "devices": 1}, "Trainer": {"use_cpu": False}
}  # fmt: skip


def assert_same(one: nn.Module, other: nn.Module, atol: float) -> None:
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=0, atol=atol)


def assert_is_there(module: nn.Module) -> None:
    assert {tensor.device for tensor in module.parameters()} == {device()}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("backward", [by_autograd, by_step])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_accelerate_trains_a_pipe(precision: str, backward: Callable[..., Any], where: str) -> None:
    pytest.importorskip("accelerate")
    settings = {"mixed_precision": precision, **ON_GPU["accelerate"]}
    kind = torch.float64 if precision == "no" else torch.float32
    _, plain = accelerated(tied().to(kind), by_autograd_of(kind), **settings)
    pipe = piped(devices=PLACES[where]()).to(kind)
    _, model = accelerated(pipe, by_autograd_of(kind) if backward is by_autograd else by_step_of(kind), **settings)
    assert model is pipe
    assert_is_there(plain)
    assert_is_there(pipe)
    assert_same(pipe, plain, 1e-11 if precision == "no" else 5e-2)


def by_autograd_of(kind: torch.dtype) -> Callable[..., Any]:
    return lambda accelerator, model, x, y: by_autograd(accelerator, model, x.to(kind), y)


def by_step_of(kind: torch.dtype) -> Callable[..., Any]:
    return lambda accelerator, model, x, y: by_step(accelerator, model, x.to(kind), y)


@pytest.mark.parametrize("where", PLACES)
def test_accelerate_saves_and_loads_a_pipe_with_tied_weights(where: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    accelerator, pipe = accelerated(piped(devices=PLACES[where]()), by_step, **ON_GPU["accelerate"])
    expected = {name: value.clone() for name, value in pipe.state_dict().items()}
    accelerator.save_state(str(tmp_path))
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path))
    assert_is_there(pipe)
    assert all(torch.equal(value, expected[name]) for name, value in pipe.state_dict().items())


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("by_hand", [False, True])
def test_lightning_trains_a_pipe(by_hand: bool, where: str, tmp_path: Path) -> None:
    """With a strategy that moves nothing, metrics neither."""
    pytest.importorskip("lightning")
    from classifier import Classifier, Settled, fitted

    plain, pipe = Classifier(tied()), Classifier(piped(devices=PLACES[where]()), by_hand)
    expected = fitted(plain, data(), tmp_path, **ON_GPU["Lightning"]).callback_metrics
    pipe.accuracy.to(device())
    found = fitted(pipe, data(), tmp_path, **ON_GPU["Lightning"], strategy=Settled(device=device())).callback_metrics
    assert_is_there(pipe.net)
    assert_same(pipe, plain, 1e-11)
    assert found["accuracy"] == expected["accuracy"]
    torch.testing.assert_close(found["loss"].cpu(), expected["loss"].cpu())


@pytest.mark.parametrize("where", PLACES)
def test_lightning_s_own_strategy_is_told_where_it_moves_the_pipe_to_the_host(where: str, tmp_path: Path) -> None:
    """At the end of a fit."""
    pytest.importorskip("lightning")
    from classifier import Classifier, fitted

    with pytest.raises(TypeError, match="a Pipe places its stages itself, so what it has on cuda:0 does not move to "):
        fitted(Classifier(piped(devices=PLACES[where]())), data(), tmp_path, **ON_GPU["Lightning"])


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("by_steps", [False, True])
def test_losses_norms_and_parameters_of_a_trainer_are_the_models(
    by_steps: bool, where: str, accumulated: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    example = runpy.run_path(os.fspath(EXAMPLES / "trainer.py"))
    given = {"train_dataset": texts(28), "eval_dataset": texts(9)}  # 6, 6, 6, 6 and 4 rows
    args = arguments(tmp_path, gradient_accumulation_steps=accumulated, **ON_GPU["Trainer"])
    plain, model = gpt(), gpt()
    pipe = piped_gpt(model, PLACES[where]())
    trainers = [transformers.Trainer(plain, args, compute_loss_func=example["loss_fn"], **given)]
    if by_steps:
        trainers.append(example["PipeTrainer"](pipe, model, args, **given))
    else:
        trainers.append(transformers.Trainer(pipe, args, compute_loss_func=example["loss_fn"], **given))
    logs = []
    for trainer in trainers:
        trainer.train()
        history = [log for log in trainer.state.log_history if "grad_norm" in log]
        logs.append([trainer.evaluate()["eval_loss"], *[log[key] for log in history for key in ("loss", "grad_norm")]])
    assert_is_there(plain)
    assert_is_there(pipe)
    assert logs[1] == pytest.approx(logs[0], rel=1e-3)
    assert_same(model, plain, 3e-2)  # where a gradient is nothing but rounding, Adam makes a whole step of it
