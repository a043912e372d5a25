"""Teach a small Llama another text by LoRA, with peft: only the adapters have gradients and optimizer state.

    python examples/lora.py [--steps 30]

The Llama first learns Python's documentation; then it is frozen, and adapters in its last two blocks and its head learn
Python's source.
"""

from __future__ import annotations

import argparse
import inspect
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline import Pipe

CONTEXT, ROWS = 48, 8
CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    max_position_embeddings=CONTEXT,
)  # fmt: skip


def batch(text: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    starts = torch.randint(len(text) - CONTEXT, (ROWS, 1))
    pieces = text[starts + torch.arange(CONTEXT + 1)]
    return {"input_ids": pieces[:, :-1]}, pieces[:, 1:]


def loss_fn(out: dict[str, Tensor], following: Tensor) -> Tensor:
    return functional.cross_entropy(out["logits"].flatten(0, 1), following.flatten())


def train(pipe: Pipe, text: Tensor, steps: int, lr: float) -> torch.optim.Optimizer:
    """Train, and return the optimizer. It is given all parameters: frozen ones have no state in it."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=lr)
    for _ in range(steps):
        x, y = batch(text)
        pipe.step(x, y, loss_fn=loss_fn, optimizer=optimizer)
    return optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    documentation, source = "\n".join(topics.values()), inspect.getsource(argparse)
    documentation, source = (torch.tensor(list(text.encode("ascii", "replace"))) for text in (documentation, source))
    model = LlamaForCausalLM(CONFIG)
    x, y = batch(source)
    pipe = Pipe(model, balance=[3, 3], chunks=2, sample=x)
    train(pipe, documentation, options.steps, 1e-2)
    state = [pipe.full_state_dict()]
    if torch.distributed.is_initialized():  # over ranks each has trained a part, and the model is cut again
        torch.distributed.broadcast_object_list(state)
    model.load_state_dict(state[0])

    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=r".*layers\.[23]\..*_proj|lm_head"))
    pipe = Pipe(adapted, balance=[3, 3], chunks=2, sample=x, checkpoint="always")  # the first stage is wholly frozen
    before = pipe.evaluate(x, y, loss_fn=loss_fn).loss
    optimizer = train(pipe, source, options.steps, 1e-2)
    after = pipe.evaluate(x, y, loss_fn=loss_fn).loss
    trained = {parameter for parameter in pipe.parameters() if parameter.requires_grad and parameter.numel()}
    print("lora: {:,} of {:,} numbers are trained".format(*adapted.get_nb_trainable_parameters()))
    print(f"lora: loss on source code {before:.3f} -> {after:.3f} in {options.steps} steps")
    assert set(optimizer.state) == trained  # of this rank's stages
    assert after < before - 0.02


if __name__ == "__main__":
    main()
