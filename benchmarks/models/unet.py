"""U-Net as a flat Sequential: what goes down is stashed at each level and popped on the way up.

    level 0   convs - stash - down                                       up - pop, join - convs - head
    level 1             convs - stash - down               up - pop, join - convs
    bottom                          convs - - - - - - - - convs

Ronneberger, Fischer, Brox 2015 (arXiv 1505.04597), with padded convolutions, a normalisation behind each, and dropout,
as in the U-Net that torchgpipe was measured with (Kim et al. 2020, arXiv 2004.09910, section 4.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def unet(
    skip: Any, levels: int = 3, convs: int = 2, channels: int = 8, colours: int = 3, classes: int = 1, drop: float = 0.1
) -> nn.Sequential:
    """Build it.

    Args:
        skip: the module whose `skippable`, `stash`, `pop` and `Namespace` to use: `pipeline.skip`, `torchgpipe.skip`.
        levels: how often the image is halved, and how many skips there are.
        convs: convolutions in a row, at each level and at the bottom.
        channels: of level 0; each level below has twice as many.
        colours, classes: channels of the input [batch, colours, height, width] and of the output.
        drop: the probability that a channel is dropped.
    """
    stashing, joining = skip_layers(skip)
    spaces = [skip.Namespace() for _ in range(levels)]
    width = [channels * 2**level for level in range(levels + 1)]
    layers: list[nn.Module] = []
    for level in range(levels):
        layers += convolutions(colours if level == 0 else width[level - 1], width[level], convs, drop)
        layers += [stashing().isolate(spaces[level]), nn.MaxPool2d(2)]
    layers += convolutions(width[levels - 1], width[levels], convs, drop)
    for level in reversed(range(levels)):
        layers += [nn.ConvTranspose2d(width[level + 1], width[level], 2, stride=2), joining().isolate(spaces[level])]
        layers += convolutions(2 * width[level], width[level], convs, drop)
    return nn.Sequential(*layers, nn.Conv2d(width[0], classes, 1))


def convolutions(before: int, after: int, count: int, drop: float) -> Iterator[nn.Module]:
    """Some 3x3 convolutions that keep the image's size, with what stands behind each."""
    for number in range(count):
        yield nn.Conv2d(before if number == 0 else after, after, 3, padding=1, bias=False)
        yield nn.Dropout2d(drop)
        yield nn.InstanceNorm2d(after, affine=True)
        yield nn.LeakyReLU(0.01)


def skip_layers(skip: Any) -> tuple[Any, Any]:
    """The layer that stashes what it is given, and the layer that joins it to what came up from below."""

    class Stash(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield skip.stash("across", x)
            return x

    class Join(nn.Module):
        def forward(self, x: Tensor) -> Any:
            across = yield skip.pop("across")
            return torch.cat([across, x], dim=1)

    return skip.skippable(stash=["across"])(Stash), skip.skippable(pop=["across"])(Join)
