"""Fine-tune a small Llama of Hugging Face's transformers on the text of Python's own documentation.

    python examples/finetune_llama.py [--steps 30] [--out FOLDER] [--tensorboard FOLDER]
    torchrun --nproc-per-node 2 examples/finetune_llama.py      # one stage in each process: the same numbers

The model is built from a config, so nothing is downloaded; with `LlamaForCausalLM.from_pretrained(...)` and its
tokenizer nothing else changes.
"""

from __future__ import annotations

import argparse
import os
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline import Pipe

CONTEXT, ROWS = 64, 8
CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=CONTEXT,
)  # fmt: skip


def batch(text: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Some pieces of text as the model is called with them, and the characters that follow each."""
    starts = torch.randint(len(text) - CONTEXT, (ROWS, 1))
    pieces = text[starts + torch.arange(CONTEXT + 1)]
    return {"input_ids": pieces[:, :-1]}, pieces[:, 1:]


def loss_fn(out: dict[str, Tensor], following: Tensor) -> Tensor:
    return functional.cross_entropy(out["logits"].flatten(0, 1), following.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", help="a folder for the trained model")
    parser.add_argument("--tensorboard", help="a folder for loss and gradient norm: tensorboard --logdir FOLDER")
    options = parser.parse_args()
    torch.manual_seed(0)  # before the weights and the batches: they are the same in every process
    text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
    model = LlamaForCausalLM(CONFIG)
    x, y = batch(text)
    with torch.no_grad():
        plain = loss_fn(model(**x), y)

    pipe = Pipe(model, balance=[3, 3], chunks=4, sample=x)  # [embedding, 2 blocks], [2 blocks, norm and head]
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    writer = None
    if options.tensorboard and os.environ.get("RANK", "0") == "0":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(options.tensorboard)
    losses = []
    for number in range(options.steps):
        step = pipe.step(x, y, loss_fn=loss_fn, optimizer=optimizer, clip_grad_norm=1.0)
        losses.append(step.loss.item())
        if writer is not None:
            writer.add_scalar("loss", losses[-1], number)
            writer.add_scalar("grad_norm", step.grad_norm, number)
        x, y = batch(text)

    if writer is not None:
        writer.close()
    assert abs(losses[0] - plain.item()) < 1e-5  # the plain model's, on the whole mini-batch
    assert losses[-1] < losses[0] - 0.5
    state = pipe.full_state_dict()  # of all stages, on the first rank; None on others
    if state is not None:
        print(f"llama: loss {losses[0]:.6f} -> {losses[-1]:.6f} nats per character in {options.steps} steps")
        model.load_state_dict(state)
        if options.out:
            model.save_pretrained(options.out)


if __name__ == "__main__":
    main()
