"""Train a small T5, an encoder and a decoder, to write dates as numbers: "5 May 1980" -> "1980-05-05".

    python examples/t5_dates.py [--steps 60]

The encoder's blocks and the decoder's are two runs of layers of one nn.Sequential. The decoder's input belongs to the
sample, as it does to the model's call.
"""

from __future__ import annotations

import argparse
from datetime import date

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import T5Config, T5ForConditionalGeneration

from pipeline import Pipe

ROWS = 16
CONFIG = T5Config(
    vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0, dropout_rate=0.0
)


def encoded(words: list[str]) -> Tensor:
    return pad_sequence([torch.tensor(list(word.encode())) for word in words], batch_first=True)


def decoded(words: Tensor) -> str:
    return bytes(words.tolist()).decode("ascii", "replace").strip("\0")


def batch(model: T5ForConditionalGeneration) -> tuple[dict[str, Tensor], Tensor]:
    """Dates in words as the model is called with them, and as numbers."""
    dates = [date.fromordinal(day) for day in torch.randint(700_000, 740_000, (ROWS,)).tolist()]
    words, labels = encoded([f"{each:%-d %B %Y}" for each in dates]), encoded([each.isoformat() for each in dates])
    before = model.prepare_decoder_input_ids_from_labels(labels)
    return {"input_ids": words, "attention_mask": (words != 0).long(), "decoder_input_ids": before}, labels


def loss_fn(out: dict[str, Tensor], labels: Tensor) -> Tensor:
    return functional.cross_entropy(out["logits"].flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(CONFIG)
    x, labels = batch(model)
    with torch.no_grad():
        plain = loss_fn(model(**x), labels)

    pipe = Pipe(model, balance=[3, 1, 3], chunks=4, sample=x)  # the encoder; what is between; the decoder
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=5e-3)
    losses = []
    for _ in range(options.steps):
        losses.append(pipe.step(x, labels, loss_fn=loss_fn, optimizer=optimizer).loss)
        x, labels = batch(model)
    given, made = (decoded(words[0]) for words in (x["input_ids"], pipe.eval()(x)["logits"].argmax(-1)))
    print(f"t5: loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per character in {options.steps} steps")
    print(f"t5: {given!r} is {made!r}")
    assert torch.allclose(losses[0], plain, rtol=1e-6)
    assert losses[-1] < losses[0] - 1.0


if __name__ == "__main__":
    main()
