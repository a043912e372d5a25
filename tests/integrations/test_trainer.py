"""transformers' Trainer trains a Pipe to the numbers that it trains the model to, over ranks too.

transformers is imported where it is used: it takes seconds, and each of the suite's processes reads this file.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from recipe_scripts import EXAMPLES, ran
from torch import nn
from under_torchrun import torchrun

from pipeline import Pipe, as_one_process

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, TrainingArguments

SCRIPT = EXAMPLES / "trainer.py"
LENGTH = 12


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def gpt() -> GPT2LMHeadModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        n_layer=3, n_head=2, n_embd=16, vocab_size=50, n_positions=LENGTH, attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0
    ))  # fmt: skip


def data(rows: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(50, (rows, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    return [{"input_ids": row, "labels": of} for row, of in zip(ids, labels, strict=True)]


def arguments(folder: Path, **others: Any) -> TrainingArguments:
    from transformers import TrainingArguments

    given = {"per_device_train_batch_size": 6, "learning_rate": 1e-2, "max_grad_norm": 0.3, "report_to": [], "seed": 0,
             "num_train_epochs": 2, "weight_decay": 0.5, "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
             "logging_steps": 1, "remove_unused_columns": False, "label_names": ["labels"]}  # fmt: skip
    return TrainingArguments(str(folder), **{**given, **others})


def piped(model: nn.Module, devices: Sequence[Any] = ("cpu", "cpu")) -> Pipe:
    return Pipe(model, [2, 3], chunks=4, sample={"input_ids": data(1)[0]["input_ids"][None]}, devices=devices)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("by_steps", [False, True])
def test_losses_norms_and_parameters_are_the_models(
    by_steps: bool, accumulated: int, example: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import Trainer

    given = {"train_dataset": data(28), "eval_dataset": data(9)}  # 6, 6, 6, 6 and 4 rows
    args = arguments(tmp_path, gradient_accumulation_steps=accumulated)
    plain, model = gpt(), gpt()
    trainers = [Trainer(plain, args, compute_loss_func=example["loss_fn"], **given)]
    if by_steps:
        trainers.append(example["PipeTrainer"](piped(model), model, args, **given))
    else:
        trainers.append(Trainer(piped(model), args, compute_loss_func=example["loss_fn"], **given))
    logs = []
    for trainer in trainers:
        trainer.train()
        history = [log for log in trainer.state.log_history if "grad_norm" in log]
        logs.append([trainer.evaluate()["eval_loss"], *[log[key] for log in history for key in ("loss", "grad_norm")]])
    assert len(logs[0]) == 1 + 2 * (10 if accumulated == 1 else 6)
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)  # Adam divides by small numbers, of float32


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize("option", [
    {"activation_checkpointing": True}, {"label_smoothing_factor": 0.1}, {"neftune_noise_alpha": 1.0},
])  # fmt: skip
def test_options_that_ask_a_pre_trained_model_raise_an_attribute_error(option: dict[str, Any], tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    if next(iter(option)) not in TrainingArguments.__dataclass_fields__:  # older versions name it otherwise
        option = {"gradient_checkpointing": True}
    with pytest.raises(AttributeError, match="'Pipe' object has no attribute"):
        Trainer(piped(gpt()), arguments(tmp_path, **option), train_dataset=data(6)).train()


def test_at_the_end_the_best_model_is_back(example: dict[str, Any], tmp_path: Path) -> None:
    from transformers import Trainer

    given = {"train_dataset": data(12), "eval_dataset": data(9)}
    often = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True,
             "greater_is_better": True}  # fmt: skip
    plain, model = gpt(), gpt()
    trainers = [
        Trainer(plain, arguments(tmp_path / "plain", **often), compute_loss_func=example["loss_fn"], **given),
        example["PipeTrainer"](piped(model), model, arguments(tmp_path / "piped", **often), **given),
    ]
    for trainer in trainers:
        trainer.train()
        losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        assert losses[0] > losses[1] and trainer.evaluate()["eval_loss"] == pytest.approx(losses[0])
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


def test_the_example_goes_on_from_its_checkpoint_which_from_pretrained_reads(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    whole = ran("trainer", "--out", str(tmp_path))
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-16")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert ran("trainer", "--resume", str(tmp_path / "checkpoint-8")).splitlines()[-1] == whole.splitlines()[-1]


@pytest.mark.soak  # tests/ranks/test_recipes_ranks.py runs it over ranks that have started already
def test_the_example_is_the_same_under_torchrun_and_so_are_its_checkpoints(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    folders = [tmp_path / "one", tmp_path / "two"]
    last = ran("trainer", "--out", str(folders[0])).splitlines()[-1]
    there = torchrun(SCRIPT, ["--out", str(folders[1])])
    assert there.code == 0, there.stderr
    assert there.stdout.splitlines()[-1] == last
    one, two = [GPT2LMHeadModel.from_pretrained(folder / "checkpoint-16").state_dict() for folder in folders]
    assert all(torch.equal(one[name], two[name]) for name in one)
    again = torchrun(SCRIPT, ["--resume", str(folders[0] / "checkpoint-8")])
    assert again.code == 0 and again.stdout.splitlines()[-1] == last


def test_within_the_context_the_environment_tells_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with as_one_process() as rank:
        assert rank == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(RuntimeError, match="before the ranks have joined.*Build the Pipe first"), as_one_process():
        pass
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    with pytest.raises(KeyError), as_one_process() as rank:
        assert rank == 1 and not {"WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID"} & set(os.environ)
        raise KeyError
    assert os.environ["WORLD_SIZE"] == "2" and os.environ["RANK"] == "1"
