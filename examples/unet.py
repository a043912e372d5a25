"""Train a small U-Net to find shapes in noise: its skip connections cross three stages.

    python examples/unet.py [--steps 60]

The script draws the data itself: discs and rectangles, in noise, with the mask of the shapes as the target. What each
level of the way down stashes goes straight to the level of the way up that pops it; the stages between neither see it
nor hold it. In eval mode pipe and plain module are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import trange

from pipeline import Pipe
from pipeline.skip import Namespace, Skippable, pop, skippable, stash

SIZE = 32
BATCH = 16
WIDTHS = [8, 16, 24, 32]  # channels at each level, from full size down to an eighth

Commands = Generator[Any, Any, Any]


@skippable(stash=["level"])
class Down(nn.Module):
    """Halve height and width; stash what was there before."""

    def forward(self, x: Tensor) -> Commands:
        yield stash("level", x)
        return functional.max_pool2d(x, 2)


@skippable(pop=["level"])
class Up(nn.Module):
    """Double height and width; put beside it what the same level stashed on the way down."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(channels, out, 2, stride=2)

    def forward(self, x: Tensor) -> Commands:
        level = yield pop("level")
        return torch.cat([self.conv(x), level], 1)


def block(channels: int, out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]


def network() -> nn.Sequential:
    """All levels stash under one name: a namespace for each keeps them apart."""

    def of(space: Namespace, layer: nn.Module) -> nn.Module:
        assert isinstance(layer, Skippable)  # what the decorator has made of it
        return layer.isolate(space)

    layers = block(1, WIDTHS[0])
    levels = [(Namespace(), narrow, wide) for narrow, wide in zip(WIDTHS, WIDTHS[1:], strict=False)]
    for space, narrow, wide in levels:
        layers += [of(space, Down()), *block(narrow, wide)]
    for space, narrow, wide in reversed(levels):
        layers += [of(space, Up(wide, narrow)), *block(2 * narrow, narrow)]
    return nn.Sequential(*layers, nn.Conv2d(WIDTHS[0], 1, 1))


def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images [count, 1, SIZE, SIZE] with a disc and a rectangle in noise, and their masks."""
    rows = torch.arange(SIZE)[:, None].expand(SIZE, SIZE)
    columns = rows.t()
    at = torch.randint(6, SIZE - 6, (count, 4, 1, 1), generator=generator)
    half = torch.randint(3, 7, (count, 3, 1, 1), generator=generator)
    disc = (rows - at[:, 0]) ** 2 + (columns - at[:, 1]) ** 2 <= half[:, 0] ** 2
    box = ((rows - at[:, 2]).abs() <= half[:, 1]) & ((columns - at[:, 3]).abs() <= half[:, 2])
    masks = (disc | box).float().unsqueeze(1)
    return masks + torch.randn(masks.shape, generator=generator), masks


def overlap(logits: Tensor, masks: Tensor) -> float:
    """Intersection over union of what is found and what is there."""
    found, there = logits > 0, masks > 0.5
    return ((found & there).sum() / (found | there).sum()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = network()

    # two levels down | the third, the bottom, and up from there | two levels up
    pipe = Pipe(model, balance=[8, 11, 9], chunks=4, checkpoint="always")
    optimizer = torch.optim.Adam(pipe.parameters(), lr=5e-3)
    loss_fn = functional.binary_cross_entropy_with_logits
    losses = []
    progress = trange(options.steps, leave=False)
    for number in progress:
        images, masks = draw(BATCH, generator)
        losses.append(pipe.step(images, masks, loss_fn=loss_fn, optimizer=optimizer).loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
        if number % 10 == 9:
            progress.write(f"unet: steps {number - 8:3d} to {number + 1:3d}, mean loss {sum(losses[-10:]) / 10:.3f}")

    images, masks = draw(64, generator)
    result = pipe.evaluate(images, masks, loss_fn=loss_fn)
    found = overlap(result.outputs, masks)
    state = pipe.full_state_dict()
    if state is None:  # under torchrun the first rank has it, and speaks for all
        return
    plain = network().eval()
    plain.load_state_dict(state)
    with torch.no_grad():
        expected = torch.cat([plain(part) for part in images.tensor_split(4)])
    difference = (result.outputs - expected).abs().max().item()
    print(f"unet: loss {losses[0]:.3f} at first, {result.loss.item():.3f} on new images, overlap {found:.1%}")
    print(f"unet: largest difference between pipe and plain module in eval mode {difference}")
    assert difference == 0.0
    assert found >= 0.7


if __name__ == "__main__":
    main()
