"""Train a small ResNet on handwritten digits, with BatchNorm statistics of whole mini-batches.

    python examples/resnet_digits.py [--epochs 2]

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional
from transformers import ResNetConfig, ResNetForImageClassification

from pipeline import Pipe

BATCH = 64
CONFIG = ResNetConfig(
    num_channels=1, embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=10
)


def data() -> tuple[Tensor, Tensor]:
    """Images, twice as large, and labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return functional.interpolate(images, scale_factor=2), torch.tensor(digits.target)


def loss_fn(out: dict[str, Tensor], labels: Tensor) -> Tensor:
    return functional.cross_entropy(out["logits"], labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels = data()
    test = torch.arange(len(images)) % 5 == 0
    model = ResNetForImageClassification(CONFIG)
    pipe = Pipe(model, balance=[3, 3], chunks=4, sample=images[:4], deferred_batch_norm=True)
    with torch.no_grad():
        torch.testing.assert_close(pipe.eval()(images[test])["logits"], model.eval()(images[test]).logits)

    pipe.train()
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for epoch in range(options.epochs):
        for rows in torch.randperm(int((~test).sum())).split(BATCH):
            step = pipe.step(images[~test][rows], labels[~test][rows], loss_fn=loss_fn, optimizer=optimizer)
        result = pipe.evaluate(images[test], labels[test], loss_fn=loss_fn)
        accuracy = (result.outputs["logits"].argmax(-1) == labels[test]).float().mean().item()
        print(f"resnet: epoch {epoch + 1}, loss {step.loss:.3f}, test accuracy {accuracy:.1%}")
    assert accuracy > 0.25  # by chance 0.1


if __name__ == "__main__":
    main()
