"""Train a convolutional network on handwritten digits in three stages, beside the plain module in a loop by hand.

    python examples/digits.py [--epochs 16]

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships (Alpaydin and Kaynak, 1998). The pipe cuts each
mini-batch into 4 chunks over three stages; the hand-written loop runs the plain module over the same chunks, with
the dropout masks of the public rule. The two loss curves are the same, bit for bit.
"""

from __future__ import annotations

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from pipeline import Pipe, layer_seed

CHUNKS = 4
BATCH = 64


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(64, 10),
    )


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, then those for the test: every fifth image."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    test = torch.arange(len(images)) % 5 == 0
    return images[~test], labels[~test], images[test], labels[test]


def loss_by_hand(plain: nn.Sequential, x: Tensor, y: Tensor, seed: int) -> float:
    """One forward per chunk, the gradient of the joined loss, then the chunks backward in ascending order."""
    outputs = []
    for chunk, part in enumerate(x.tensor_split(CHUNKS)):
        for layer, module in enumerate(plain):
            torch.manual_seed(layer_seed(seed, chunk, layer))
            part = module(part)
        outputs.append(part)
    joined = torch.cat([output.detach() for output in outputs]).requires_grad_()
    loss = functional.cross_entropy(joined, y)
    (grad,) = torch.autograd.grad(loss, joined)
    for output, part in zip(outputs, grad.tensor_split(CHUNKS), strict=True):
        output.backward(part)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels, test_images, test_labels = data()
    model = network()
    plain = copy.deepcopy(model)

    pipe = Pipe(model, balance=[3, 5, 5], chunks=CHUNKS)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-3)
    optimizer_by_hand = torch.optim.Adam(plain.parameters(), lr=1e-3)

    order = torch.Generator().manual_seed(0)
    differences = []
    for epoch in range(options.epochs):
        batches = torch.randperm(len(images), generator=order).split(BATCH)
        progress = tqdm(batches, desc=f"epoch {epoch + 1}/{options.epochs}", leave=False)
        for number, batch in enumerate(progress):
            x, y = images[batch], labels[batch]

            torch.manual_seed(epoch * len(batches) + number)
            loss = functional.cross_entropy(pipe(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            torch.manual_seed(epoch * len(batches) + number)
            seed = int(torch.empty((), dtype=torch.int64).random_())  # what the pipe drew: its one number a call
            optimizer_by_hand.zero_grad()
            by_hand = loss_by_hand(plain, x, y, seed)
            optimizer_by_hand.step()

            differences.append(abs(loss.item() - by_hand))
            progress.set_postfix(loss=f"{loss.item():.3f}")

    result = pipe.evaluate(test_images, test_labels, loss_fn=functional.cross_entropy)
    accuracy = (result.outputs.argmax(1) == test_labels).float().mean().item()
    print(f"digits: {len(differences)} steps, largest difference of the two loss curves {max(differences)}")
    print(f"digits: test loss {result.loss.item():.3f}, test accuracy {accuracy:.1%}")
    assert max(differences) == 0.0
    assert accuracy >= 0.95


if __name__ == "__main__":
    main()
