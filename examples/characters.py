"""Train a small causal character transformer on the text of Python's own documentation, with checkpointing.

    python examples/characters.py [--steps 900]

The text is what `help("for")` prints from, `pydoc_data.topics`: nearly half a million characters of English that every
Python has. Three stages, 4 chunks, 1F1B, every activation recomputed (`checkpoint="always"`).
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from pipeline import Pipe

CONTEXT = 64
WIDTH = 96
HEADS = 4
BATCH = 32


class Embed(nn.Module):
    """Characters and their positions."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)

    def forward(self, x_BT: Tensor) -> Tensor:
        return self.character(x_BT) + self.position[: x_BT.shape[1]]


class Block(nn.Module):
    """Attention to earlier characters, then a small network, each added to what was there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        heads = self.qkv(self.norm1(x_BTD)).view(B, T, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.mlp(self.norm2(x_BTD))


def text() -> tuple[Tensor, list[str]]:
    """The documentation as character numbers, and the characters."""
    whole = "\n".join(topics[name] for name in sorted(topics))
    characters = sorted(set(whole))
    number = {character: index for index, character in enumerate(characters)}
    return torch.tensor([number[character] for character in whole]), characters


def sample(encoded: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Some pieces of text, and the same shifted by one character."""
    starts = torch.randint(len(encoded) - CONTEXT - 1, (BATCH,), generator=generator)
    pieces = torch.stack([encoded[start : start + CONTEXT + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


def loss_fn(logits_BTC: Tensor, target_BT: Tensor) -> Tensor:
    return functional.cross_entropy(logits_BTC.flatten(0, 1), target_BT.flatten())


@torch.no_grad()
def continued(pipe: Pipe, prompt: str, characters: list[str], length: int) -> str:
    """The prompt and `length` more characters, drawn from what the network expects."""
    pipe.eval()
    line = torch.tensor([[characters.index(character) for character in prompt]])
    for _ in range(length):
        expected = pipe(line[:, -CONTEXT:])[0, -1].softmax(0)
        line = torch.cat([line, torch.multinomial(expected, 1)[None]], dim=1)
    pipe.train()
    return "".join(characters[index] for index in line[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=900)
    options = parser.parse_args()
    torch.manual_seed(0)
    encoded, characters = text()
    split = len(encoded) * 9 // 10
    model = nn.Sequential(
        Embed(len(characters)), Block(), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(characters))
    )
    pipe = Pipe(model, balance=[2, 1, 3], chunks=4, schedule="1f1b", checkpoint="always")
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=options.steps)

    batches = torch.Generator().manual_seed(0)
    held_out = sample(encoded[split:], torch.Generator().manual_seed(1))
    before = pipe.evaluate(*held_out, loss_fn=loss_fn).loss.item()
    progress = tqdm(range(options.steps), desc="characters", leave=False)
    for _ in progress:
        x, y = sample(encoded[:split], batches)
        step = pipe.step(x, y, loss_fn=loss_fn, optimizer=optimizer, clip_grad_norm=1.0)
        schedule.step()
        progress.set_postfix(loss=f"{step.loss.item():.3f}")
    after = pipe.evaluate(*held_out, loss_fn=loss_fn).loss.item()

    print(f"characters: {len(encoded):,} characters of text, {len(characters)} different")
    print(f"characters: held-out loss {before:.3f} -> {after:.3f} nats per character in {options.steps} steps")
    print(f"characters: {continued(pipe, 'The statement ', characters, 80)!r}")
    assert after < before - 1.0


if __name__ == "__main__":
    main()
