"""Models as users write them: blocks of custom modules, in the usual shapes.

    small    launch-bound: a kernel takes about as long as its launch
    large    compute-bound

A model is a flat Sequential of equal blocks, so that it can be cut evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal attention of several heads; `rotary`: with rotated queries and keys (Su et al. 2021, arXiv 2104.09864)."""

    def __init__(self, width: int, heads: int, length: int, rotary: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.rotary = rotary
        angles = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, 1), persistent=False)
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, 1), persistent=False)

    def rotated(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * self.cos + torch.cat([-right, left], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        query, key, value = self.project(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.rotary:
            query, key = self.rotated(query), self.rotated(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))


class GPTBlock(nn.Module):
    """A block of GPT-2 (Radford et al. 2019)."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, length)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class RMSNorm(nn.Module):
    """A norm by the root of the mean square, written out as Llama's is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class LlamaBlock(nn.Module):
    """A block of Llama (Touvron et al. 2023, arXiv 2302.13971): RMSNorm, rotary positions, a gated layer."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, heads, length, rotary=True, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Bottleneck(nn.Module):
    """A bottleneck of ResNet (He et al. 2015, arXiv 1512.03385)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = channels // 4
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.conv3 = nn.Conv2d(inner, channels, 1, bias=False)
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(inner), nn.BatchNorm2d(inner), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(x + self.norm3(self.conv3(y)))


class InvertedResidual(nn.Module):
    """An inverted residual of MobileNet v2 (Sandler et al. 2018, arXiv 1801.04381)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.body = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Recurrent(nn.Module):
    """An LSTM and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.lstm(x)[0])


class Experts(nn.Module):
    """A mixture of experts: each token goes to one, by its router (Fedus et al. 2021, arXiv 2101.03961)."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (at,) = (chosen == number).nonzero(as_tuple=True)
            if len(at):
                mixed = mixed.index_add(0, at, expert(tokens[at]) * weights[at, None])
        return x + mixed.view_as(x)


class Family(NamedTuple):
    """A kind of model: its block for a width, and the shape of a row of its input, small and large."""

    block: Callable[[int], nn.Module]
    small: tuple[int, ...]
    large: tuple[int, ...]
    width_at: int  # where in the shape the width is


FAMILIES: dict[str, Family] = {
    "gpt": Family(lambda width: GPTBlock(width, 4, 16 if width < 256 else 128), (16, 64), (128, 256), 1),
    "llama": Family(lambda width: LlamaBlock(width, 4, 16 if width < 256 else 128), (16, 64), (128, 256), 1),
    "bottleneck": Family(Bottleneck, (32, 8, 8), (128, 28, 28), 0),
    "inverted": Family(InvertedResidual, (16, 8, 8), (32, 28, 28), 0),
    "lstm": Family(Recurrent, (8, 32), (64, 256), 1),
    "experts": Family(Experts, (16, 64), (128, 256), 1),
}


def build(
    name: str, size: str, blocks: int, rows: int, device: torch.device | str = "cpu"
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """The model of a family, an input and a target of `rows` rows. `size`: "small" or "large"."""
    family = FAMILIES[name]
    shape = family.small if size == "small" else family.large
    model = nn.Sequential(*[family.block(shape[family.width_at]) for _ in range(blocks)])
    return model.to(device), torch.randn(rows, *shape).to(device), torch.randn(rows, *shape).to(device)
