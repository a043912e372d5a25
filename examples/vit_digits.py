"""Train a small ViT on handwritten digits, and look at how many it gets right.

    python examples/vit_digits.py [--epochs 4]

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships; a patch is 2 x 2 of them.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification

from pipeline import Pipe

BATCH = 32
CONFIG = ViTConfig(
    image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=64, intermediate_size=128,
    num_hidden_layers=3, num_attention_heads=4,
)  # fmt: skip


def data() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(digits.target)


def loss_fn(out: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, int]]]:
    """The loss, and the share of images that are right: the sum and the count of each chunk are enough."""
    right = (out["logits"].argmax(-1) == labels).sum()
    return functional.cross_entropy(out["logits"], labels), {"accuracy": (right, len(labels))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels = data()
    test = torch.arange(len(images)) % 5 == 0
    model = ViTForImageClassification(CONFIG)
    x = {"pixel_values": images[test]}
    pipe = Pipe(model, balance=[2, 1, 2], chunks=2, sample={"pixel_values": images[:4]})
    with torch.no_grad():
        torch.testing.assert_close(pipe(x)["logits"], model(**x).logits)

    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
    for epoch in range(options.epochs):
        for rows in torch.randperm(int((~test).sum())).split(BATCH):
            x = {"pixel_values": images[~test][rows]}
            step = pipe.step(x, labels[~test][rows], loss_fn=loss_fn, optimizer=optimizer)
        result = pipe.evaluate({"pixel_values": images[test]}, labels[test], loss_fn=loss_fn)
        print(f"vit: epoch {epoch + 1}, loss {step.loss:.3f}, test accuracy {result.metrics['accuracy']:.1%}")
    assert result.metrics["accuracy"] > 0.2  # by chance 0.1


if __name__ == "__main__":
    main()
