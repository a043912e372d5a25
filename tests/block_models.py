"""Models as users write them: what they are called with, and how they are cut."""

from __future__ import annotations

from collections import UserDict
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


class JointBlock(nn.Module):
    """Two streams, of words and of an image, which see each other; the last block returns the image's alone."""

    def __init__(self, width: int, is_last: bool) -> None:
        super().__init__()
        self.words, self.image, self.modulation = (nn.Linear(width, width) for _ in range(3))
        self.is_last = is_last

    def forward(self, words: Tensor, image: Tensor, condition: Tensor) -> tuple[Tensor | None, Tensor]:
        shift = self.modulation(F.silu(condition))[:, None]
        seen = words.mean(1, keepdim=True)
        changed = None if self.is_last else words + self.words(words * image.mean(1, keepdim=True)).tanh()
        return changed, image + self.image(image + seen + shift).tanh()


class JointTransformer(nn.Module):
    """As Stable Diffusion 3 is: a hidden state of two tensors, of which the last block returns one and None."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.patch, self.word, self.time = nn.Conv2d(3, width, 4, 4), nn.Embedding(11, width), nn.Linear(1, width)
        self.blocks = nn.ModuleList(JointBlock(width, number == depth - 1) for number in range(depth))
        self.scale, self.final = nn.Linear(width, width), nn.Linear(width, 48)

    def forward(self, x: Tensor, words: Tensor, time: Tensor) -> Tensor:
        image, stream, condition = self.patch(x).flatten(2).transpose(1, 2), self.word(words), self.time(time[:, None])
        for block in self.blocks:
            stream, image = block(stream, image, condition)
        return self.final(image * (1 + self.scale(F.silu(condition)))[:, None])


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
    """Blocks whose routing depends on the data, and how even it is; a weight that all of them share."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.bias = nn.Embedding(11, width), nn.Parameter(torch.randn(width))
        self.blocks = nn.ModuleList(Routed(width) for _ in range(4))
        self.unused = nn.Linear(3, 3)

    def forward(self, ids: Tensor) -> dict[str, Tensor | None]:
        x, unevenness = self.embed(ids), 0.0
        for block in self.blocks:
            x, of_block = block(x, self.bias)
            unevenness = unevenness + of_block
        return {"hidden": x, "unevenness": unevenness, "cache": None}


class Routed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x)
        choice = scores.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (choice == number).any():
                out[choice == number] = expert(x[choice == number])
        return x + out * bias, scores.softmax(-1).mean(1).square().sum(-1)


class Convs(nn.Sequential):
    def __init__(self, given: int, made: int) -> None:
        super().__init__(nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Each resolution on the way up reads that on the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.pool = Convs(3, 4), Convs(4, 8), nn.MaxPool2d(2)
        self.middle = Convs(8, 8)
        self.up2, self.conv2 = nn.ConvTranspose2d(8, 8, 2, 2), Convs(16, 4)
        self.up1, self.conv1 = nn.ConvTranspose2d(4, 4, 2, 2), Convs(8, 4)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        x = self.middle(self.pool(second))
        x = self.conv2(torch.cat([self.up2(x), second], 1))
        x = self.conv1(torch.cat([self.up1(x), F.dropout(first, 0.1, self.training)], 1))
        return torch.sigmoid(self.last(x))


class Down(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.convs, self.time = nn.ModuleList([Convs(given, made), Convs(made, made)]), nn.Linear(4, made)

    def forward(self, x: Tensor, time: Tensor) -> tuple[Tensor, list[Tensor]]:
        passing = []
        for conv in self.convs:
            x = conv(x) + self.time(time)[:, :, None, None]
            passing.append(x)
        return F.max_pool2d(x, 2), passing


class Up(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.convs, self.time = nn.ModuleList([Convs(2 * given, given), Convs(2 * given, made)]), nn.Linear(4, given)

    def forward(self, x: Tensor, passing: list[Tensor], time: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2.0) + self.time(time)[:, :, None, None]
        for conv in self.convs:
            x = conv(torch.cat([x, passing.pop()], 1))
        return x


class DiffusionUNet(nn.Module):
    """Blocks return lists for others far behind, and are called with an embedding of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.first = nn.Linear(1, 4), nn.Conv2d(3, 4, 3, padding=1)
        self.downs = nn.ModuleList([Down(4, 4), Down(4, 6)])
        self.ups = nn.ModuleList([Up(6, 4), Up(4, 4)])
        self.last = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        condition, passing = self.time(time[:, None]), []
        x = self.first(x)
        for down in self.downs:
            x, skips = down(x, condition)
            passing += skips
        for up in self.ups:
            x = up(x, passing[-len(up.convs):], condition)
            passing = passing[:-len(up.convs)]
        return self.last(x)


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
    """The end uses a value of the beginning."""

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x + first


class Collects(Chain):
    """The end uses what each block returns."""

    def forward(self, ids: Tensor) -> Tensor:
        x, found = self.embed(ids), []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return torch.stack(found, 1)


class Between(Chain):
    """Something is computed between blocks, with dropout and with a module that is called only there."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = F.dropout(block(x), 0.2, self.training) + 0.1
            if block is self.blocks[1]:
                x = self.scale(x)
        return x


class Biased(Chain):
    """A module is called before each block, for it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.bias = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(3)), nn.Embedding(11, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.bias(ids))
        return x


class Streams(Chain):
    """A residual stream that no module returns: tokens beside the rows, scales between blocks, an end that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turned(4, 4) for _ in range(4))
        self.token, self.rotated = nn.Parameter(torch.randn(4)), Rotation()
        self.scales = nn.ParameterList([nn.Parameter(torch.full((4,), 0.1)) for _ in range(4)])

    def forward(self, ids: Tensor) -> Tensor:
        tokens = self.token.expand(len(ids), 1, 4)
        x = torch.cat([tokens, self.embed(ids)], 1)
        first, rotation = x, self.rotated(x[:, 1:])
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = F.dropout(block(x, rotation).mul_(2), 0.2, self.training) * scale + x
        return x[:, 0] + first.mean(1)


class Modulated(nn.Linear):
    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        return super().forward(x) * (1 + modulation)


class Slices(Chain):
    """Each block, and the end, has a slice of its own of what a module has computed (as Chroma's transformer has)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Modulated(4, 4) for _ in range(3))
        self.modulation = nn.Linear(4, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        modulation = self.modulation(x.mean(1, keepdim=True)).unflatten(-1, (4, 4))
        for number, block in enumerate(self.blocks):
            x = block(x, modulation[:, :, number])
        return x * (1 + modulation[:, :, -1])


class Shifts(Chain):
    """Each block has one half of what is computed from a module's output, the end has both."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.scales = nn.ModuleList(Modulated(4, 4) for _ in range(3)), nn.Linear(4, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        shift, scale = F.silu(self.scales(x.mean(1, keepdim=True))).chunk(2, -1)
        for block in self.blocks:
            x = block(x, shift)
        return x * scale + shift


class Token(Chain):
    """The end reads a row that the beginning has made of a parameter, and blocks are not called with."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(ids), 1, 4), self.embed(ids)], 1)
        y = x[:, 1:]
        for block in self.blocks:
            y = block(y).tanh()
        return x[:, 0] + y.mean(1)


class Queries(Chain):
    """Both ends read what the beginning has made of a table, the weight of a module that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.scale = nn.Embedding(2, 4), nn.Parameter(torch.rand(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        queries = (self.queries.weight * self.scale).sin() * x.mean(1, keepdim=True)
        x = torch.cat([queries, x], 1)
        for block in self.blocks:
            x = block(x).tanh()
        return x[:, :2] * queries


class Latents(Chain):
    """The first block gets a parameter, expanded to all rows, and what it returns is added to that."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(2, 4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.latents.expand(len(ids), -1, -1)
        seen = self.embed(ids).mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x) * seen + x
        return x


class Attends(nn.Module):
    """What attention returns lies in memory by places, and so does the sum of it that later blocks are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.latents = nn.Embedding(11, 8), nn.Parameter(torch.randn(5, 8))
        self.attentions = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        seen, x = self.embed(ids), self.latents.expand(len(ids), -1, -1)
        for attention, linear in zip(self.attentions, self.linears):
            x = x + attention(x, seen, seen)[0]
            x = x + linear(x).relu()
        return x


class Gate(nn.Module):
    """A block whose parameters are its own, and none of its child's."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.randn(given, made)), nn.LeakyReLU(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x @ self.weight)


class Gates(nn.Module):
    """A few such blocks, of which each has half of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Gate(4, 6), Gate(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(self.second(F.elu(self.first(x))), -1)


class Expanded(Slices):
    """Each block, and the end, has what the beginning looks up in a table, expanded to all places."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.randn(11, 4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        modulation = self.modulation[ids[:, 0]][:, None].expand_as(x)
        for block in self.blocks:
            x = block(x, modulation)
        return x * (1 + modulation)


class Turned(nn.Linear):
    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        return super().forward((x * rotation).tanh())


class Rotation(nn.Module):
    """A module without parameters that reads the type of a part of the stream alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linspace(0, 1, 4).to(x)


class AddsInPlace(Chain):
    """What passes by, and the hidden state, are changed in place."""

    def forward(self, ids: Tensor) -> Tensor:
        passing = self.blocks[0](self.embed(ids))
        x = self.blocks[1](passing.add_(1) * 2)
        x += 1
        x = self.blocks[2](x)
        x *= 3
        return x + passing.mul_(2)


class OnTheHost(Chain):
    """The end uses a number that the beginning computes."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        scale = float(x.detach().abs().sum())
        for block in self.blocks:
            x = block(x)
        return x * scale


def compiled(module: nn.Module) -> nn.Module:
    return torch.jit.script(module)


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() / 2


class Neighbours(nn.Module):
    """A block with a module that torch.jit has compiled, called with a sparse buffer of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.halved = nn.Linear(4, 4), compiled(Halved())

    def forward(self, x: Tensor, adjacent: Tensor) -> Tensor:
        return x + self.halved(torch.stack([adjacent @ self.linear(row) for row in x]))


class Graph(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Neighbours() for _ in range(3))
        self.register_buffer("adjacent", (torch.eye(6) + torch.eye(6).roll(1, 0)).to_sparse())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.adjacent)
        return x


def ids(rows: int, length: int = 6) -> Tensor:
    return torch.randint(0, 11, (rows, length))


def padded(rows: int, length: int = 6) -> dict[str, Tensor]:
    padding = torch.arange(length) >= torch.randint(2, length + 1, (rows, 1))
    return {"ids": ids(rows, length), "padding": padding}


def doubled(x: Any) -> Any:
    """The same inputs in float64."""
    return tree_map_only(Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, x)


def called(model: nn.Module, x: Any) -> Any:
    """What a model returns for inputs, without what is None."""
    out = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
    return {name: value for name, value in out.items() if value is not None} if isinstance(out, dict) else out


class Conditioned(nn.Module):
    """A block that embeds what it is conditioned by, as those of a diffusion transformer do."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Sequential(nn.Embedding(11, 4), nn.Dropout(0.2))
        self.inner = nn.ModuleDict({"norm": nn.LayerNorm(4), "linear": nn.Linear(8, 4)})

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        given = torch.cat([self.inner["norm"](x), self.condition(ids)], -1)
        return x + self.inner["linear"](given)


class Borrows(Chain):
    """The beginning and the end call what is in blocks, as the DiT of diffusers does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Conditioned() for _ in range(3)), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks[2].inner["norm"](self.embed(ids))
        for block in self.blocks:
            x = block(x, ids)
        first, _, last = self.blocks
        return self.head(first.inner["norm"](x) * first.condition(ids) + last.condition(ids))


class Positioned(nn.Module):
    """A block with a module of another."""

    def __init__(self, position: nn.Module) -> None:
        super().__init__()
        self.position, self.linear = position, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.position(x).tanh())


class Positions(nn.Module):
    """The blocks, and the model between them, call one module, as CoaT of timm does; a value passes them by."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.position = nn.Embedding(11, 4), nn.Linear(4, 5), nn.Linear(4, 4)
        self.lower, self.upper = Positioned(self.position), Positioned(self.position)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.embed(ids)
        x = self.upper(self.position(self.lower(words)))
        return self.head(x * words)


def squashing(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count))


class Sees(nn.Module):
    """A language model that sees images, as Llava does: words are embedded before the images are, and written into."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.patch = nn.Embedding(11, 4), nn.Conv2d(3, 4, 4, 4)
        self.looks, self.blocks = squashing(2), squashing(3)
        self.project, self.head = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)), nn.Linear(4, 11)

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        x = self.words(ids)
        x *= 2
        y = self.patch(images).flatten(2).transpose(1, 2)
        for block in self.looks:
            y = block(y)
        x[:, :2] = x[:, :2] + self.project(y)[:, :2]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Towers(nn.Module):
    """Two towers, as CLIP has: what the first computes meets what the second computes at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.words = nn.Conv2d(3, 4, 4, 4), nn.Embedding(11, 4)
        self.looks, self.reads = squashing(3), squashing(3)
        self.of_image, self.of_text = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)

    def forward(self, images: Tensor, ids: Tensor) -> dict[str, Tensor]:
        y = self.patch(images).flatten(2).transpose(1, 2)
        for block in self.looks:
            y = block(y)
        image = F.normalize(self.of_image(y.mean(1)), dim=-1)
        x = self.words(ids)
        for block in self.reads:
            x = block(x)
        return {"image": image, "alike": (image * F.normalize(self.of_text(x.mean(1)), dim=-1)).sum(-1, True)}


class Tower(nn.Module):
    """It ends in a parameter of its own, as open_clip's do."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, squashing(3), nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).flatten(2)
        x = x.transpose(1, 2) if isinstance(self.first, nn.Conv2d) else x
        for block in self.blocks:
            x = block(x)
        return x.mean(1) @ self.last, x.amax(1)


class TowersOfModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.looks, self.reads = Tower(nn.Conv2d(3, 4, 4, 4)), Tower(nn.Embedding(11, 4))

    def forward(self, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        image, most = self.looks(images)
        image += 1
        text, _ = self.reads(ids)
        return F.normalize(image, dim=-1) * text, most


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"left": self.left(x), "rest": (self.right(x), x.size(-1))}


class Branches(nn.Module):
    """Of what one module returns a part is read before the blocks, another between two rows of them and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pair, self.between = nn.Embedding(11, 4), Pair(), nn.Linear(4, 4)
        self.first, self.second = squashing(2), squashing(2)

    def forward(self, ids: Tensor) -> Tensor:
        pair = self.pair(self.embed(ids))
        x = pair["left"]
        for block in self.first:
            x = block(x)
        between = self.between(x)
        x = between * pair["rest"][0].tanh()
        for block in self.second:
            x = block(x)
        return x * pair["rest"][0] + between


class Scaled(nn.Linear):
    def forward(self, x: Tensor, scale: complex) -> Tensor:
        return super().forward(x) * scale.real


class Numbers(Chain):
    """Blocks are called with a number that the beginning computes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled(4, 4) for _ in range(3))

    def number(self, x: Tensor) -> complex:
        return float(x.detach().abs().mean())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        scale = self.number(x)
        for block in self.blocks:
            x = block(x, scale)
        return x


class Masked(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if mask is None else y * mask


class Decides(Chain):
    """What the beginning computes decides whether its blocks, every other one, are called with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked(4, 4) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        mask = (x.detach() > 0).to(x.dtype) if x.sum() > 0 else None
        for number, block in enumerate(self.blocks):
            x = block(x, None if number % 2 else mask)
        return x


class Halving(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        y = super().forward(x)
        y = y[:, ::2] + y[:, 1::2] if x.shape[1] > 2 else y
        return y, y.shape[1]


class Sizes(nn.Module):
    """Blocks return the length that is left, which the end reads, and differs from one to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 4), nn.ModuleList(Halving(4, 4) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x, total = self.embed(torch.cat([ids, ids], 1)), 0
        for block in self.blocks:
            x, length = block(x)
            total += length
        return x * total


class Gathers(nn.Linear):
    def forward(self, levels: list[Tensor]) -> Tensor:
        return super().forward(torch.stack([level.mean(1) for level in levels]).sum(0))


class Levels(nn.Module):
    """Its modules follow each other, and the last one is called with a list of what some have returned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.down, self.wide = nn.Embedding(11, 4), nn.Linear(4, 6), nn.LSTM(6, 4, batch_first=True)
        self.norm, self.decoder = nn.LayerNorm(4), Gathers(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.embed(ids)
        second, _ = self.wide(self.down(first))
        return self.decoder([first, second, self.norm(second)])


class Lists(nn.Module):
    """A block with its layers in a list, that returns more than its hidden state, in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4), nn.Linear(4, 3)]
        for number, layer in enumerate(self.layers):
            self.add_module(str(number), layer)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.layers
        return x + first(x), second(x)


class Refers(nn.Module):
    """It finds its blocks, heads and parameters in lists and a dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(11, 4), nn.Parameter(torch.rand(4))
        self.weighed = []
        for number in range(3):
            block = Lists()
            self.add_module(f"block{number}", block)
            self.weighed.append((block, 0.5 + number))
        self.narrow, self.wide = nn.Linear(4, 2), nn.Linear(3, 2)
        self.heads = {"narrow": self.narrow, "others": (self.wide, [self.scale])}

    def forward(self, ids: Tensor) -> Tensor:
        wide, (scale,) = self.heads["others"]  # type: ignore[misc]  # a pair
        x, beside = self.embed(ids) * scale, []
        for block, weight in self.weighed:
            x, y = block(x * weight)
            beside.append(y)
        return self.heads["narrow"](x) + wide(sum(beside))  # type: ignore[operator, no-any-return]  # a module


class RefersWithin(Chain):
    """Its list holds what is in modules that are no blocks: a layer of its head, the numbers of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.ends = [self.head[0], self.embed.weight]

    def finish(self, x: Tensor, ids: Tensor) -> Tensor:
        layer, table = self.ends
        return layer(x) @ table.T


class TwoNames(nn.Module):
    """The module that contains its blocks has two names, and is called by the second."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(11, 4), nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        self.steps = nn.ModuleList([self.embed, self.body])

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = ids
        for step in self.steps:
            x = step(x)
        return x


class Nicknames(nn.Module):
    """Its blocks, what contains them and a head have other names too, by which it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 4)
        self.body, self.last, self.output = nn.Sequential(*self.blocks[:3]), self.blocks[-1], self.head
        self.inner = nn.ModuleDict({"all": self.body, "some": self.blocks[1:3]})

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.last(self.inner["all"](self.embed(ids))))  # type: ignore[no-any-return]  # a Tensor


class Repeats(Chain):
    """Its blocks are called again and again, each time with the first hidden state mixed in."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.embed(ids)
        for _ in range(2):
            x = self.mix(torch.cat([x, first], -1))
            for block in (*self.blocks, *self.blocks):
                x = block(x).sin()
        return x


class Siamese(Chain):
    """One tower, for two inputs."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * super().forward(ids.flip(1))


class WithState(nn.Linear):
    def forward(self, state: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        x, others = state
        x = super().forward(x).tanh() + others["sum"]
        return x, {"sum": others["sum"] + x.mean(-1, keepdim=True)}


class States(Chain):
    """Blocks hand a tuple on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WithState(4, 4) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        state = x, {"sum": x.sum(-1, keepdim=True)}
        for block in self.blocks:
            state = block(state)
        return state[0] * state[1]["sum"]


class AddsFirst(nn.Linear):
    def forward(self, x: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
        own = super().forward(x)
        return x + (own if value is None else own + value).tanh(), own


class FirstValues(Chain):
    """The first block's values go to all others (value residual learning), and none to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AddsFirst(4, 4) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x, first = self.embed(ids), None
        for block in self.blocks:
            x, value = block(1.5 * x, first)
            first = value if first is None else first
        return x


class Tables(Chain):
    """Its forward sees that a tensor beside its buffers is on the device of the input, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = torch.arange(40.0).view(10, 4).cos()
        self.register_buffer("scales", torch.arange(1.0, 5.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        self.angles, self.scales = self.angles.to(x.device), self.scales.to(x.device)
        for block in self.blocks:
            x = block(x * self.angles[: x.shape[1]])
        return x * self.scales + self.angles[: x.shape[1]]


class Codebook(nn.Module):
    """The nearest entries of a table, which the first batch sets where a buffer says so; how far they are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_set", torch.tensor(True))
        self.register_buffer("table", torch.randn(6, 4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_set:
            self.table.copy_(x.flatten(0, 1)[:6])
        entries = self.table[torch.cdist(x.flatten(0, 1), self.table).argmin(1)].view_as(x)
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x + (entries - x).detach(), (x - entries).square().mean(1)


class Codes(Chain):
    """An end that reads what a module without parameters has returned between blocks, which writes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.codebook = Codebook()

    def forward(self, ids: Tensor) -> Tensor:
        x, distance = self.codebook(self.blocks[0](self.embed(ids)))
        for block in self.blocks[1:]:
            x = block(x)
        return x + distance[:, None]


def pictured(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 8, 8), ids(rows)


# By name: the model, and inputs of so many rows.
MODELS = {
    "diffusion": (
        DiffusionTransformer, lambda rows: (torch.randn(rows, 3, 8, 8), torch.rand(rows), torch.randint(0, 10, (rows,)))
    ),
    "joint": (JointTransformer, lambda rows: (torch.randn(rows, 3, 8, 8), ids(rows), torch.rand(rows))),
    "resnet": (ResNet, lambda rows: torch.randn(rows, 3, 8, 8)),
    "gpt": (Gpt, padded),
    "gpt without a mask": (Gpt, ids),
    "llama": (Llama, ids),
    "llama with adapters": (adapted, ids),
    "lstm": (Lstm, ids),
    "experts": (Experts, ids),
    "unet": (UNet, lambda rows: torch.randn(rows, 3, 8, 8)),
    "unet of lists": (DiffusionUNet, lambda rows: (torch.randn(rows, 3, 8, 8), torch.rand(rows))),
    "skips": (Skips, ids),
    "collects": (Collects, ids),
    "between": (Between, ids),
    "biased": (Biased, ids),
    "streams": (Streams, ids),
    "slices": (Slices, ids),
    "shifts": (Shifts, ids),
    "expanded": (Expanded, ids),
    "latents": (Latents, ids),
    "attends": (Attends, ids),
    "gates": (Gates, lambda rows: torch.randn(rows, 3, 4)),
    "token": (Token, ids),
    "queries": (Queries, ids),
    "adds in place": (AddsInPlace, ids),
    "borrows": (Borrows, ids),
    "positions": (Positions, ids),
    "sees": (Sees, lambda rows: pictured(rows)[::-1]),
    "towers": (Towers, pictured),
    "towers of modules": (TowersOfModules, pictured),
    "branches": (Branches, ids),
    "numbers": (Numbers, ids),
    "decides": (Decides, ids),
    "sizes": (Sizes, ids),
    "levels": (Levels, ids),
    "refers": (Refers, ids),
    "refers within": (RefersWithin, ids),
    "two names": (TwoNames, ids),
    "nicknames": (Nicknames, ids),
    "repeats": (Repeats, ids),
    "siamese": (Siamese, ids),
    "states": (States, ids),
    "first values": (FirstValues, ids),
    "tables": (Tables, ids),
    "codes": (Codes, ids),
}  # fmt: skip
MIXING = {"numbers", "decides"}  # what one row computes may count for others


# ------------------------------------------------------------------------------------------------------ not to be cut


class Moody(nn.Module):
    """What each of its modules computes depends on the mode of that."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.inner:
            x = child(x)
        return (1.5 if self.training else 0.5) * x


class Moods(nn.Module):
    """Its beginning and its end call one module; some modules contain blocks, and some are in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.often = Moody(nn.Linear(4, 4), Moody())
        self.body = Moody(*[Moody(Moody(), nn.Linear(4, 4)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return (2.0 if self.training else 1.0) * self.often(self.body(self.often(x)))


class Telling(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return super().forward(x), float(x[0, 0].sign())


class Tells(nn.Module):
    """Blocks return a number beside the hidden state, which the end uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Telling(4, 4)] + [nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x, sign = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return x * sign


class ComplexNumbers(Numbers):
    """And such numbers do not travel."""

    def number(self, x: Tensor) -> complex:
        return complex(super().number(x), 0.5)


class DropsSkip(Chain):
    """What passes by goes through dropout before other random numbers are drawn, and is used after them."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        passing = F.dropout(x, 0.5, self.training)
        for block in self.blocks:
            x = F.dropout(block(x), 0.5, self.training)
        return x + passing


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


class WritesDict(Chain):
    """The first block writes into what others read, which is no pytree: as layers of Gemma 3n share keys and values."""

    class Block(nn.Linear):
        is_first = False

        def forward(self, x: Tensor, shared: UserDict[str, Tensor]) -> Tensor:
            if self.is_first:
                shared["keys"] = x.tanh()
            return super().forward(x) * shared["keys"]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(4, 4) for _ in range(3))
        self.blocks[0].is_first = True

    def forward(self, ids: Tensor) -> Tensor:
        x, shared = self.embed(ids), UserDict[str, Tensor]()
        for block in self.blocks:
            x = block(x, shared) + 1
        return x


class WritesWeights(Chain):
    """The model writes weights of its blocks, as RWKV-4 in eval mode."""

    def finish(self, x: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.blocks[0].weight.mul_(1)
        return x


class BorrowsStatistics(Chain):
    """The end calls a BatchNorm that is in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(2)) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :2])
        for block in self.blocks:
            x = block(x)
        return self.blocks[1][1](x)


class Counts(Chain):
    """The model counts its calls, which its parts would do again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def finish(self, x: Tensor, ids: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x


class Remembers(Chain):
    """The model saves what is in none of its parts."""

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        assert state == 3


class Compiled(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.last = compiled(nn.Linear(4, 4))

    def finish(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.last(x)


class CompiledAtTheEnd(Chain):
    """What it calls between blocks, or behind them, has neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.last = compiled(Halved())

    def finish(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.last(x)


class Packs(Chain):
    """A recurrent module is called with a packed sequence; it lies in one part, and others pack and unpack."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x, lengths = self.embed(ids), (ids > 2).sum(1).clamp(min=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        x, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=ids.shape[1])
        for block in self.blocks:
            x = block(x)
        return x


class Loss(Chain):
    def finish(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.mean()


REFUSED = {
    ComplexNumbers: "is called with a value that depends on the beginning of the model, and is no tensor: its arg",
    DropsSkip: "what is drawn at random is used behind block 'blocks.2', in another part of the model, and does not",
    ReadsBlocks: "computes beside what it returns is used behind block 'blocks.2', in another part of the model, and",
    ReadsBlocksInTraining: "computes beside what it returns is used behind block 'blocks.2', in another part of",
    ListsInTraining: "block 'blocks.1' is called with what block 'blocks.0' computes beside what it returns: its argum",
    WritesShared: "block 'blocks.1' is called with what block 'blocks.0' computes beside what it returns: its argument",
    WritesDict: "Modules of it are called with a collections.UserDict: what one writes there, others do not see",
    WritesWeights: "It writes blocks.0.weight in its forward: turn that off",
    BorrowsStatistics: "module 'blocks.1.1' is called in several parts of the model, and writes its buffer 'blocks",
    Counts: "the forward of Counts, which contains blocks, writes its buffer 'calls', and each part would write it aga",
    Remembers: "Remembers: its state_dict has _extra_state, which no part would save: a module that contains blocks",
    Compiled: "module 'last' is compiled by torch.jit and has parameters or buffers: nothing can stand in for it. Cut",
    CompiledAtTheEnd: "module 'last' is, or holds, one that is compiled by torch.jit, and it is in no block: the parts",
    Packs: "lstm returned a PackedSequence, whose lengths another part than its own does not have. Let one module pa",
    Loss: "Loss returns a single number, a loss say, and those of chunks cannot be joined. Leave labels out of the",
}
