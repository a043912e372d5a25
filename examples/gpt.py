"""Train a small GPT whose token embedding is also its head, over three places, and hold its loss curve to one stage's.

    python examples/gpt.py [--steps 250]

    place a   tokens, positions, block     the weight lives here
    place b   block, block
    place c   norm, head                   computes with a copy of it, made for each call

The text is Python's own documentation (`pydoc_data.topics`), cut into words and signs. Three places on one processor
stand for three devices: what goes from one to the next is copied. On three GPUs say
devices=["cuda:0", "cuda:1", "cuda:2"].
"""

from __future__ import annotations

import argparse
import copy
import re
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from pipeline import Pipe, Place

# B sequences, T tokens of each, D features, V different tokens
VOCABULARY = 512
CONTEXT = 32
WIDTH = 64
HEADS = 4
BATCH = 16
CHUNKS = 4
HELD = 40  # how many steps the loss curves of other cuts are held to


class Embed(nn.Module):
    """Tokens and their positions, which are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(0.1)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x_BT: Tensor) -> Tensor:
        positions_T = torch.arange(x_BT.shape[1], device=x_BT.device)
        out: Tensor = self.dropout(self.token(x_BT) + self.position(positions_T))
        return out


class Block(nn.Module):
    """Attention to earlier tokens, then a small network; each reads a normed copy and is added to what was there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(self.norm1(x_BTD)).view(B, T, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.dropout(self.out(mixed.transpose(1, 2).reshape(B, T, D)))
        out: Tensor = x_BTD + self.dropout(self.mlp(self.norm2(x_BTD)))
        return out


class Head(nn.Module):
    """How well each token would go on from here: its own embedding says."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight  # the embedding's, not a copy

    def forward(self, x_BTD: Tensor) -> Tensor:
        return functional.linear(x_BTD, self.weight)


def gpt() -> nn.Sequential:
    embed = Embed()
    return nn.Sequential(embed, Block(), Block(), Block(), nn.LayerNorm(WIDTH), Head(embed.token.weight))


def tokens() -> Tensor:
    """The documentation as numbers of words and signs; 0 stands for those that are not among the most frequent."""
    words = re.findall(r"\w+|[^\w\s]|\s+", "\n".join(topics[name] for name in sorted(topics)))
    frequent = [word for word, _ in Counter(words).most_common(VOCABULARY - 1)]
    number = {word: index for index, word in enumerate(frequent, 1)}
    return torch.tensor([number.get(word, 0) for word in words])


def sample(encoded: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Some pieces of text, and the same shifted by one token."""
    starts = torch.randint(len(encoded) - CONTEXT - 1, (BATCH,), generator=generator)
    pieces = torch.stack([encoded[start : start + CONTEXT + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


def loss_fn(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
    return functional.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten())


def train(pipe: Pipe, encoded: Tensor, steps: int, bar: bool) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
    batches = torch.Generator().manual_seed(0)
    torch.manual_seed(0)  # dropout
    losses = []
    for _ in tqdm(range(steps), desc="gpt", leave=False, disable=not bar):
        x, y = sample(encoded, batches)
        step = pipe.step(x, y, loss_fn=loss_fn, optimizer=optimizer, clip_grad_norm=1.0)
        losses.append(step.loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=250)
    options = parser.parse_args()
    torch.manual_seed(0)
    encoded = tokens()
    split = len(encoded) * 9 // 10
    model = gpt()
    together, whole = copy.deepcopy(model), copy.deepcopy(model)  # a deep copy keeps the tie

    cpu = torch.device("cpu")
    places = [Place(cpu, "a"), Place(cpu, "b"), Place(cpu, "c")]
    pipe = Pipe(model, [2, 2, 2], CHUNKS, devices=places, schedule="1f1b", checkpoint="always")
    held_out = sample(encoded[split:], torch.Generator().manual_seed(1))
    before = pipe.evaluate(*held_out, loss_fn=loss_fn).loss.item()
    losses = train(pipe, encoded[:split], options.steps, bar=True)
    after = pipe.evaluate(*held_out, loss_fn=loss_fn).loss.item()

    held = min(HELD, options.steps)
    on_one_place = train(Pipe(together, [2, 2, 2], CHUNKS, devices=["cpu"] * 3), encoded[:split], held, bar=False)
    in_one_stage = train(Pipe(whole, [6], CHUNKS, devices=["cpu"]), encoded[:split], held, bar=False)
    assert losses[:held] == on_one_place  # the same bits: to be copied changes nothing
    apart = max(abs(one - other) for one, other in zip(losses, in_one_stage, strict=False))
    assert apart < 1e-4, apart  # one stage adds the parts of a gradient in another order, and rounds otherwise

    embed, head = model[0], model[5]
    assert isinstance(embed, Embed) and isinstance(head, Head)
    assert embed.token.weight is head.weight
    counted = sum(parameter.numel() for parameter in pipe.parameters())
    print(f"gpt: {len(encoded):,} tokens of text, {VOCABULARY} different")
    print(f"gpt: {counted:,} parameters, of which {head.weight.numel():,} are embedding and head at once: one object")
    print(f"gpt: the losses of {held} steps are those of one place bit for bit, those of one stage to {apart:.0e}")
    print("gpt: loss " + " ".join(f"{loss:.2f}" for loss in losses[:: max(1, options.steps // 8)]))
    print(f"gpt: held-out loss {before:.3f} -> {after:.3f} nats per token in {options.steps} steps")
    assert options.steps < 100 or after < before - 1.0


if __name__ == "__main__":
    main()
