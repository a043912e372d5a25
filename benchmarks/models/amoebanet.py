"""A network of AmoebaNet-D's cells: each cell reads what the two cells before made, so pairs go from layer to layer.

    (last, one before) --squeeze to c channels--> states 0, 1 --five sums of two operations--> states 2 .. 6
                       --join some states--> (joined, last)

Real et al. 2018 (arXiv 1802.01548); depth and width as in GPipe (Huang et al. 2018, arXiv 1811.06965, section 3): three
groups of normal cells, a reduction cell between them, and a stem that makes the image eight times smaller. A normal
cell joins the states 0, 3, 4 and 6, as in the authors' program (github.com/tensorflow/tpu, models/official/amoeba_net),
not 4, 5 and 6 as in the paper. Two things are simpler: an input whose image is larger is halved by one 1x1 convolution
of stride 2, and the last pooling takes all that is left of the image, which may so be small.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

Pair: TypeAlias = tuple[Tensor, Tensor]


class Genes(NamedTuple):
    """A kind of cell: its sums of two "state:operation", and which states are joined."""

    sums: tuple[str, ...]
    joined: tuple[int, ...]

    def operations(self) -> list[tuple[int, str]]:
        """State and operation, in order; two make a sum."""
        pairs = [term.split(":") for each in self.sums for term in each.split(" + ")]
        return [(int(state), name) for state, name in pairs]


NORMAL = Genes(
    ("1:conv1 + 1:max3", "1:same + 0:conv7", "0:conv1 + 0:conv7", "2:max3 + 2:same", "1:mean3 + 5:conv1"),
    joined=(0, 3, 4, 6),
)
REDUCTION = Genes(
    ("0:max2 + 0:max3", "2:same + 1:conv3", "2:conv7 + 2:max3", "3:same + 1:max2", "2:mean3 + 3:conv1"),
    joined=(4, 5, 6),
)


def amoebanet(repeats: int = 1, channels: int = 8, classes: int = 10) -> nn.Sequential:
    """Build it.

    Args:
        repeats: normal cells in each of the three groups. GPipe's L is three times that.
        channels: that the first cells compute with; a reduction cell doubles them. GPipe's D is four times that.
        classes: how many the last layer tells apart.
    """
    kinds = [REDUCTION, REDUCTION, *[NORMAL] * repeats, REDUCTION, *[NORMAL] * repeats, REDUCTION, *[NORMAL] * repeats]
    layers: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels))]
    last = before = channels
    halved = False
    for kind in kinds:
        channels *= 2 if kind is REDUCTION else 1
        layers.append(Cell(kind, last, before, channels, halved))
        before, last, halved = last, channels * len(kind.joined), kind is REDUCTION
    return nn.Sequential(*layers, Head(last, classes))


class Cell(nn.Module):
    """One cell.

    Args:
        genes: which kind.
        last, before: channels of the two inputs.
        channels: that it computes with.
        halved: whether the last cell halved the image, so that what was before it is twice as large.
    """

    def __init__(self, genes: Genes, last: int, before: int, channels: int, halved: bool) -> None:
        super().__init__()
        self.genes = genes
        self.squeeze_last = convolution(last, channels, 1)
        same = before == channels and not halved
        self.squeeze_before = nn.Identity() if same else convolution(before, channels, 1, 2 if halved else 1)
        strides = [2 if genes is REDUCTION and state < 2 else 1 for state, _ in genes.operations()]
        self.operations = nn.ModuleList(
            operation(name, channels, stride) for stride, (_, name) in zip(strides, genes.operations(), strict=True)
        )

    def forward(self, pair: Pair | Tensor) -> Pair:
        last, before = (pair, pair) if isinstance(pair, Tensor) else pair
        states = [self.squeeze_last(last), self.squeeze_before(before)]
        terms = list(zip(self.operations, self.genes.operations(), strict=True))
        for (one, (state, _)), (other, (second, _)) in zip(terms[::2], terms[1::2], strict=True):
            states.append(one(states[state]) + other(states[second]))
        return torch.cat([states[state] for state in self.genes.joined], dim=1), last


class Head(nn.Module):
    """Mean over the image, and a Linear."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, pair: Pair) -> Tensor:
        found: Tensor = self.linear(pair[0].mean((2, 3)))
        return found


def operation(name: str, channels: int, stride: int) -> nn.Module:
    """What stands behind a name in the genes; conv3 and conv7 compute with a quarter of the channels."""
    if name == "same":
        return nn.Identity()
    if name == "mean3":
        return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
    if name.startswith("max"):
        return nn.MaxPool2d(3, stride, padding=1) if name == "max3" else nn.MaxPool2d(2, stride)
    if name == "conv1":
        return convolution(channels, channels, 1, stride)
    few = channels // 4
    middle = [convolution(few, few, 3, stride)]
    if name == "conv7":
        middle = [convolution(few, few, (1, 7), (1, stride)), convolution(few, few, (7, 1), (stride, 1))]
    return nn.Sequential(convolution(channels, few, 1), *middle, convolution(few, channels, 1))


def convolution(
    before: int, after: int, size: int | tuple[int, int], stride: int | tuple[int, int] = 1
) -> nn.Sequential:
    """ReLU, a convolution that keeps the image's size up to its stride, BatchNorm."""
    rows, columns = (size, size) if isinstance(size, int) else size
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(before, after, size, stride, (rows // 2, columns // 2), bias=False),
        nn.BatchNorm2d(after),
    )
