"""Train a small U-Net, written as users write them, to take the noise off handwritten digits.

    python examples/unet_denoise.py [--epochs 2]

What the way down keeps for the way up passes the stages between by, straight to where it is read.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from partition import balance_by_size, to_sequential
from pipeline import Pipe

BATCH, WIDTH = 64, 16


class Block(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(given, made, 3, padding=1), nn.GroupNorm(4, made)

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 1, 3, padding=1)
        self.down = nn.ModuleList([Block(WIDTH, 2 * WIDTH), Block(2 * WIDTH, 4 * WIDTH)])
        self.middle = Block(4 * WIDTH, 4 * WIDTH)
        self.up = nn.ModuleList([Block(6 * WIDTH, 2 * WIDTH), Block(3 * WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            kept.append(x)
            x = functional.max_pool2d(block(x), 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([functional.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.last(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    model, test = UNet(), images[::5]
    noisy = test + torch.randn(test.shape)
    layers = to_sequential(model, noisy[:4])
    pipe = Pipe(layers, balance_by_size(3, layers, noisy[:4], chunks=2), chunks=2)
    print(f"unet: {len(layers)} layers in stages of {pipe.balance}")
    with torch.no_grad():
        torch.testing.assert_close(pipe(noisy), model(noisy))

    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for epoch in range(options.epochs):
        for rows in torch.randperm(len(images)).split(BATCH):
            clean = images[rows[rows % 5 != 0]]
            pipe.step(clean + torch.randn(clean.shape), clean, loss_fn=functional.mse_loss, optimizer=optimizer)
        left = pipe.evaluate(noisy, test, loss_fn=functional.mse_loss).loss
        print(f"unet: epoch {epoch + 1}, of the noise's variance of 1 {left:.3f} is left")
    assert left < 0.5


if __name__ == "__main__":
    main()
