"""Train a small GPT-2 with Hugging Face's Trainer, as a pipeline: one process, or one stage in each process.

    python examples/trainer.py [--epochs 2] [--out FOLDER] [--resume CHECKPOINT]
    torchrun --nproc-per-node 2 examples/trainer.py      # the same numbers

The model is built from a config, so nothing is downloaded. Its output layer is tied to its embedding.

    Trainer       data, optimizer, learning rate, logs, checkpoints: each process runs one, with the same data
    PipeTrainer   steps, norms and states go through the Pipe, which knows the ranks
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

from pipeline import Pipe, Saved, as_one_process

CONTEXT = 32
CONFIG = GPT2Config(n_layer=4, n_head=2, n_embd=32, vocab_size=128, n_positions=CONTEXT)


def loss_fn(outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """The mean over the tokens that count, or their part of it where the Trainer has counted several mini-batches'."""
    following = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = functional.cross_entropy(outputs["logits"].flatten(0, 1), following.flatten(), reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class PipeTrainer(Trainer):
    """A Trainer whose model is a Pipe.

    Args:
        pipe: to train.
        whole: the model that it was made of. Checkpoints are its `save_pretrained`.
        args: with remove_unused_columns=False and label_names=["labels"].
        others: as for a Trainer.
    """

    def __init__(self, pipe: Pipe, whole: PreTrainedModel, args: TrainingArguments, **others: Any) -> None:
        self.pipe, self.whole = pipe, whole
        super().__init__(pipe, args, compute_loss_func=loss_fn, **others)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of a mini-batch in the order of the schedule. Gradients are added to `.grad`."""
        self.pipe.train()
        inputs = dict(self._prepare_inputs(inputs))
        labels = inputs.pop("labels")
        loss = partial(loss_fn, num_items_in_batch=num_items_in_batch)
        with self.accelerator.autocast():
            return self.pipe.step(inputs, labels, loss_fn=loss, loss_reduction="sum").loss

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return super().get_decay_parameter_names(self.whole)  # a rank has modules of its own layers alone

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)  # of all ranks' gradients

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, as `from_pretrained` reads it."""
        folder = output_dir or self.args.output_dir
        os.makedirs(folder, exist_ok=True)
        state = self.pipe.full_state_dict()  # None on other ranks
        if state is not None:
            self.whole.save_pretrained(folder, state_dict=state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.pipe.load_state_dict(Saved(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        ranks = torch.distributed.is_initialized()
        has_saved = not ranks or torch.distributed.get_rank() == 0
        state = [dict(Saved(self.state.best_model_checkpoint)) if has_saved else {}]
        if ranks:
            torch.distributed.broadcast_object_list(state)
        self.pipe.load_state_dict(state[0], strict=False)  # save_pretrained writes a tied weight under one name

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        state = self.pipe.full_optimizer_state_dict(self.optimizer.optimizer)
        if state is not None:
            torch.save(state, os.path.join(output_dir, "optimizer.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state = torch.load(os.path.join(checkpoint, "optimizer.pt"), weights_only=True)
            self.pipe.load_optimizer_state_dict(self.optimizer.optimizer, state)
            scheduler = torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True)
            self.lr_scheduler.load_state_dict(scheduler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", help="a folder for checkpoints")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    options = parser.parse_args()
    torch.manual_seed(0)  # before the weights and the data: they are the same in every process
    model = GPT2LMHeadModel(CONFIG)
    text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))[: 128 * CONTEXT]
    data = [{"input_ids": piece, "labels": piece} for piece in text.view(-1, CONTEXT)]
    pipe = Pipe(model, balance=[3, 3], chunks=4, sample={"input_ids": data[0]["input_ids"][None]})
    with as_one_process() as rank, TemporaryDirectory() as temporary:
        args = TrainingArguments(
            options.out if options.out and rank == 0 else temporary, num_train_epochs=options.epochs,
            per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=1e-2, weight_decay=0.1,
            logging_steps=4, save_strategy="epoch", seed=0, remove_unused_columns=False, label_names=["labels"],
            report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        trainer = PipeTrainer(pipe, model, args, train_dataset=data, eval_dataset=data[:16])
        if rank:
            trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=options.resume)
        logs = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        evaluated = trainer.evaluate()["eval_loss"]
    if rank == 0:
        print(f"trainer: loss {logs[0]:.6f} -> {logs[-1]:.6f}, evaluated {evaluated:.6f}")


if __name__ == "__main__":
    main()
