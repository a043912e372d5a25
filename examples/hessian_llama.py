"""The spectrum of the Hessian of a small Llama's loss: largest eigenvalues, trace, density, and how exact they are.

    python examples/hessian_llama.py [--steps 10]
    torchrun --nproc-per-node 2 examples/hessian_llama.py

Torch's fused attention has no second derivative: attention is asked for by name, `attn_implementation="eager"`.
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
from pipeline.curvature import Hessian

CONTEXT, ROWS = 16, 8
CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=CONTEXT, attn_implementation="eager",
)  # fmt: skip


def batch(text: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    starts = torch.randint(len(text) - CONTEXT, (ROWS, 1))
    pieces = text[starts + torch.arange(CONTEXT + 1)]
    return {"input_ids": pieces[:, :-1]}, pieces[:, 1:]


def loss_fn(out: dict[str, Tensor], following: Tensor) -> Tensor:
    return functional.cross_entropy(out["logits"].flatten(0, 1), following.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
    x, y = batch(text)
    pipe = Pipe(LlamaForCausalLM(CONFIG), balance=[2, 2], chunks=2, sample=x)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    for _ in range(options.steps):
        pipe.step(*batch(text), loss_fn=loss_fn, optimizer=optimizer)

    H = Hessian(pipe, (x, y), loss_fn, seed=0)
    report = H.check()
    results = [H.top_eigenpairs(1, tol=0.05), H.trace(samples=4), H.density(steps=6, runs=1)]
    if os.environ.get("RANK", "0") == "0":
        print(H, report, *results, sep="\n")
    assert report.ok


if __name__ == "__main__":
    main()
