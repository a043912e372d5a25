"""Train a small BERT to fill in masked characters of lines of different lengths, with padding and labels of -100.

    python examples/bert_padding.py [--steps 30]

Each chunk has another number of masked places. The loss is the mean over all of them, as without a Pipe: its first
value is compared with the plain model's.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForMaskedLM

from pipeline import Pipe

PAD, MASK, ROWS = 0, 1, 16
CONFIG = BertConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=60, pad_token_id=PAD,
)  # fmt: skip


def batch(lines: list[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Lines as the model is called with them, and labels: the characters that were masked, -100 elsewhere."""
    chosen = [lines[number] for number in torch.randint(len(lines), (ROWS,))]
    words = pad_sequence(chosen, batch_first=True, padding_value=PAD)
    is_masked = (torch.rand(words.shape) < 0.15) & (words != PAD)
    x = {"input_ids": words.masked_fill(is_masked, MASK), "attention_mask": (words != PAD).long()}
    return x, words.masked_fill(~is_masked, -100)


def loss_fn(out: dict[str, Tensor], labels: Tensor) -> Tensor:
    return functional.cross_entropy(out["logits"].flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    text = [line.strip() for topic in topics.values() for line in topic.splitlines()]
    lines = [torch.tensor(list(line.encode("ascii", "replace"))) for line in text if 20 < len(line) <= 60]
    model = BertForMaskedLM(CONFIG).eval()  # without dropout first, to compare
    x, labels = batch(lines)
    pipe = Pipe(model, balance=[2, 1, 2], chunks=4, sample=x)
    with torch.no_grad():
        plain = loss_fn(model(**x), labels)
    first = pipe.evaluate(x, labels, loss_fn=loss_fn).loss
    assert torch.allclose(first, plain, rtol=1e-6)

    pipe.train()
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for _ in range(options.steps):
        x, labels = batch(lines)
        loss = pipe.step(x, labels, loss_fn=loss_fn, optimizer=optimizer).loss
    print(f"bert: loss {first:.3f} -> {loss:.3f} nats per masked character in {options.steps} steps")
    assert loss < first - 0.5


if __name__ == "__main__":
    main()
