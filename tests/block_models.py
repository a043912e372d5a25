"""Models as users write them: what they are called with, and how they are cut."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class DiffusionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(condition)).chunk(3, -1)
        return x + gate[:, None] * self.mlp(self.norm(x) * (1 + scale[:, None]) + shift[:, None])


class DiffusionTransformer(nn.Module):
    """Every block, and the end, are given what the beginning computes of the time and the class."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.patch, self.position = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.randn(1, 4, width))
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.kind = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(DiffusionBlock(width) for _ in range(depth))
        self.final, self.scale = nn.Linear(width, 48), nn.Linear(width, width)

    def forward(self, x: Tensor, time: Tensor, kind: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        condition = self.time(time[:, None]) + self.kind(kind)
        for block in self.blocks:
            x = block(x, condition)
        return self.final(x * (1 + self.scale(condition))[:, None])


class Residual(nn.Module):
    def __init__(self, given: int, made: int, stride: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(given, made, 3, stride, 1), nn.BatchNorm2d(made)
        self.short = nn.Conv2d(given, made, 1, stride) if given != made else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + self.short(x))


class ResNet(nn.Module):
    """Blocks in several containers, which change the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 8, 2), Residual(8, 8))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(torch.flatten(self.pool(self.layer2(self.layer1(x))), 1))


class Gpt(nn.Module):
    """Dropout before and after the blocks, a padding mask, and a head that reads the embedding's weight."""

    def __init__(self, width: int = 8, words: int = 11) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(words, width), "wpe": nn.Embedding(16, width), "drop": nn.Dropout(0.3),
            "h": nn.ModuleList(
                nn.TransformerEncoderLayer(width, 2, 16, dropout=0.2, batch_first=True) for _ in range(3)
            ),
            "ln_f": nn.LayerNorm(width),
        })  # fmt: skip
        self.last_drop = nn.Dropout(0.4)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        parts = self.transformer
        positions = torch.arange(ids.size(1), device=ids.device)
        x = parts["drop"](parts["wte"](ids) + F.dropout(parts["wpe"](positions), 0.1, self.training))
        mask = torch.ones(ids.size(1), ids.size(1), dtype=torch.bool, device=ids.device).triu(1)
        for block in parts["h"]:
            x = block(x, src_mask=mask, src_key_padding_mask=padding)
        return F.linear(self.last_drop(parts["ln_f"](x)), parts["wte"].weight)


class LlamaBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(width, 16), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        given = self.norm1(x)
        query, key = rotated(self.q(given), *rotary), rotated(self.k(given), *rotary)
        scores = (query @ key.transpose(1, 2)) / key.size(-1) ** 0.5
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        x = x + self.o(scores.masked_fill(later, -torch.inf).softmax(-1) @ self.v(given))
        given = self.norm2(x)
        return x + self.down(F.silu(self.gate(given)) * self.up(given))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


class Llama(nn.Module):
    """Rotary tables that the model makes for all blocks, of a buffer that is not saved."""

    def __init__(self, width: int = 8, words: int = 11) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers, self.norm = nn.ModuleList(LlamaBlock(width) for _ in range(3)), nn.RMSNorm(width)
        self.register_buffer("speeds", 10.0 ** -torch.arange(width // 2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        angles = torch.arange(ids.size(1), device=ids.device)[:, None] * self.speeds
        for layer in self.layers:
            x = layer(x, rotary=(angles.cos(), angles.sin()))
        return self.head(self.norm(x))


class Adapter(nn.Module):
    """LoRA by hand: a linear layer that is frozen, and a product of two thin matrices that is trained."""

    def __init__(self, frozen: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.frozen = frozen
        self.down, self.drop = nn.Linear(frozen.in_features, rank, bias=False), nn.Dropout(0.2)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(self.drop(x)))


def adapted(first: int = 1) -> Llama:
    """A Llama that is frozen, but for adapters in its blocks from a number on."""
    model = Llama().requires_grad_(False)
    for layer in model.layers[first:]:
        layer.q, layer.v = Adapter(layer.q), Adapter(layer.v)
    return model


class Lstm(nn.Module):
    """Blocks that return more than the model uses."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, width), nn.Linear(width, 11)
        self.rnns = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for rnn in self.rnns:
            x, _ = rnn(x)
        return self.head(x)


class Experts(nn.Module):
    """Blocks whose routing depends on the data; a weight that all of them share."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.bias = nn.Embedding(11, width), nn.Parameter(torch.randn(width))
        self.blocks = nn.ModuleList(Routed(width) for _ in range(4))
        self.unused = nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> dict[str, Tensor | None]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.bias)
        return {"hidden": x, "cache": None}


class Routed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        choice = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out[choice == number] = expert(x[choice == number])
        return x + out * bias


def ids(rows: int, length: int = 6) -> Tensor:
    return torch.randint(0, 11, (rows, length))


def padded(rows: int, length: int = 6) -> dict[str, Tensor]:
    padding = torch.arange(length) >= torch.randint(2, length + 1, (rows, 1))
    return {"ids": ids(rows, length), "padding": padding}


def doubled(x: Any) -> Any:
    """The same inputs in float64."""
    return tree_map_only(Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, x)


# By name: the model, and inputs of so many rows.
MODELS = {
    "diffusion": (
        DiffusionTransformer, lambda rows: (torch.randn(rows, 3, 8, 8), torch.rand(rows), torch.randint(0, 10, (rows,)))
    ),
    "resnet": (ResNet, lambda rows: torch.randn(rows, 3, 8, 8)),
    "gpt": (Gpt, padded),
    "gpt without a mask": (Gpt, ids),
    "llama": (Llama, ids),
    "llama with adapters": (adapted, ids),
    "lstm": (Lstm, ids),
    "experts": (Experts, ids),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------ not to be cut


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.finish(x, ids)

    def finish(self, x: Tensor, ids: Tensor) -> Tensor:
        return x


class Skips(Chain):
    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x + first


class Collects(Chain):
    def forward(self, ids: Tensor) -> Tensor:
        x, found = self.embed(ids), []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return torch.stack(found, 1)


class Between(Chain):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) + 0.1
        return x


class Repeats(Chain):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


class OnTheHost(Chain):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        scale = float(x.detach().abs().sum())
        for block in self.blocks:
            x = block(x)
        return x * scale


class Noted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.size = x.detach().abs().mean()
        return super().forward(x)


class ReadsBlocks(Chain):
    """The end reads what blocks keep on themselves: on a stand-in it would be that of another call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noted(4, 4) for _ in range(3))

    def finish(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + 0 * sum(block.size for block in self.blocks)


class ReadsBlocksInTraining(ReadsBlocks):
    def finish(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().finish(x, ids) if self.training else x


class Listing(nn.Linear):
    def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
        if self.training:
            found.append(x.abs().mean())
        return super().forward(x)


class ListsInTraining(Chain):
    """In train mode blocks hand a penalty over in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Listing(4, 4) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x, found = self.embed(ids), []
        for block in self.blocks:
            x = block(x, found)
        return x + sum(found)


class Adding(nn.Linear):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        if self.training:
            bias += 1
        return super().forward(x) + bias


class WritesShared(Chain):
    """In train mode blocks write into a tensor that all are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adding(4, 4) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x, bias = self.embed(ids), torch.zeros(4)
        for block in self.blocks:
            x = block(x, bias)
        return x


class Counts(Chain):
    """The model counts its calls, which its parts would do again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def finish(self, x: Tensor, ids: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x


class Loss(Chain):
    def finish(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.mean()


REFUSED = {
    Skips: "its end uses a value that the beginning or a block computes beside the hidden state",
    Collects: "its end uses a value that the beginning or a block computes beside the hidden state",
    OnTheHost: "its end uses a value that the beginning or a block computes beside the hidden state",
    Between: "Between has no chain of blocks: no module whose children are called once each, one after the other",
    Repeats: "Repeats has no chain of blocks",
    ReadsBlocks: "forward does not run without its blocks: AttributeError: 'StandIn' object has no attribute 'size'",
    ReadsBlocksInTraining: "AttributeError: 'StandIn' object has no attribute 'size'",
    ListsInTraining: "does not return in train mode what its parts return",
    WritesShared: "a block has written into a tensor that the model hands to several blocks",
    Counts: "the forward of Counts, which contains blocks, writes its buffer 'calls', and each part would write it aga",
    Loss: "Loss returns a single number, a loss say, and those of chunks cannot be joined. Leave labels out of the",
}
