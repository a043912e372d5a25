"""Loops of other libraries train a Pipe to the numbers that they train the plain module to.

The libraries are imported where they are used: it takes seconds, and each of the suite's processes reads this file.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from recipe_scripts import ran
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pipeline import Pipe

if TYPE_CHECKING:
    from accelerate import Accelerator


def tied() -> nn.Sequential:
    """Four layers; the third has the first one's weight."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)).double()
    model[2].weight = model[0].weight
    return model


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(20, 4, generator=generator).double(),
                         torch.randint(3, (20,), generator=generator))  # fmt: skip


def piped(**settings: Any) -> Pipe:
    return Pipe(tied(), [2, 2], chunks=3, **settings)


def assert_same(one: nn.Module, other: nn.Module, atol: float = 1e-13) -> None:
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


# ---------------------------------------------------------------------------------------------------------- accelerate


def accelerated(model: nn.Module, backward: Callable[..., Any], **settings: Any) -> tuple[Accelerator, nn.Module]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # one for each process
    accelerator = Accelerator(**{"cpu": True, **settings})
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is None:
        accelerator.scaler = torch.amp.GradScaler("cpu")  # as on GPUs
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=7))
    for inputs, target in loader:
        with accelerator.accumulate(model):
            backward(accelerator, model, inputs, target)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator, model


def by_autograd(accelerator: Accelerator, model: nn.Module, inputs: Tensor, target: Tensor) -> None:
    accelerator.backward(F.cross_entropy(model(inputs), target))


def by_step(accelerator: Accelerator, model: Pipe, inputs: Tensor, target: Tensor) -> None:
    with accelerator.autocast():
        model.step(inputs, target, loss_fn=F.cross_entropy, scaler=accelerator.scaler)


@pytest.mark.parametrize("backward", [by_autograd, by_step])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_accelerate_trains_a_pipe(backward: Callable[..., Any], precision: str) -> None:
    _, plain = accelerated(tied(), by_autograd, mixed_precision=precision)
    pipe = piped()
    _, model = accelerated(pipe, backward, mixed_precision=precision)
    assert model is pipe
    assert_same(pipe, plain, 1e-13 if precision == "no" else 5e-3)


def test_accelerate_accumulates_by_backward() -> None:
    _, plain = accelerated(tied(), by_autograd, gradient_accumulation_steps=2)
    assert_same(accelerated(piped(), by_autograd, gradient_accumulation_steps=2)[1], plain)


@pytest.mark.filterwarnings("ignore:Removed shared tensor")
def test_accelerate_saves_and_loads_a_pipe_with_tied_weights(tmp_path: Path) -> None:
    accelerator, pipe = accelerated(piped(), by_step)
    expected = copy.deepcopy(pipe.state_dict())
    accelerator.save_state(str(tmp_path))
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path))
    assert all(torch.equal(value, expected[name]) for name, value in pipe.state_dict().items())


def test_a_pipe_tells_where_its_layers_are() -> None:
    layers = OrderedDict(first=nn.Linear(2, 2), second=nn.Tanh(), third=nn.Linear(2, 2))
    devices = ["cpu", torch.device("cpu", 0)]
    pipe = Pipe(nn.Sequential(layers), [2, 1], devices=devices)
    assert [(name, str(device)) for name, device in pipe.hf_device_map.items()] == [
        ("first", str(pipe.devices[0])), ("second", str(pipe.devices[0])), ("third", str(pipe.devices[1]))
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- Lightning


ADVICE = ("ignore:The 'train_dataloader' does not have many workers", "ignore:.*LeafSpec",
          "ignore:.*isinstance.treespec", "ignore:.*log_every_n_steps")  # fmt: skip
quiet = pytest.mark.filterwarnings(*ADVICE)


@quiet
@pytest.mark.parametrize("by_hand", [False, True])
def test_lightning_trains_a_pipe_and_torchmetrics_sees_its_outputs(by_hand: bool, tmp_path: Path) -> None:
    from classifier import Classifier, fitted

    plain, pipe = Classifier(tied()), Classifier(piped(), by_hand)
    expected, found = [fitted(one, data(), tmp_path).callback_metrics for one in (plain, pipe)]
    assert_same(pipe, plain)
    assert found["accuracy"] == expected["accuracy"]
    torch.testing.assert_close(found["loss"], expected["loss"])


@quiet
def test_lightning_accumulates_by_backward_and_its_checkpoint_loads_at_another_balance(tmp_path: Path) -> None:
    from classifier import Classifier, fitted

    plain, pipe = Classifier(tied()), Classifier(piped())
    fitted(plain, data(), tmp_path, accumulate_grad_batches=2)
    trainer = fitted(pipe, data(), tmp_path, accumulate_grad_batches=2)
    assert_same(pipe, plain)
    trainer.save_checkpoint(tmp_path / "saved.ckpt", weights_only=True)
    loaded = Classifier.load_from_checkpoint(tmp_path / "saved.ckpt", net=Pipe(tied(), [1, 3]), weights_only=True)
    assert_same(loaded, pipe, 0)


# ------------------------------------------------------------------------------------------------------ data, scalars


def test_a_loader_with_workers_feeds_steps_and_evaluations() -> None:
    pipe = piped()
    loader = DataLoader(data(), batch_size=7, num_workers=1, multiprocessing_context="forkserver")
    step = pipe.step(loader, loss_fn=F.cross_entropy)
    whole = data().tensors
    torch.testing.assert_close(step.loss, F.cross_entropy(tied()(whole[0]), whole[1]).detach(), rtol=1e-12, atol=0)


def test_an_example_writes_scalars_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ran("finetune_llama", "--steps", "12", "--tensorboard", str(tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    losses, norms = [[event.value for event in events.Scalars(name)] for name in ("loss", "grad_norm")]
    assert len(losses) == len(norms) == 12 and losses[-1] < losses[0] - 0.5 and min(norms) > 0
