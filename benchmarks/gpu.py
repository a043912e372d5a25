"""What does a Pipe cost on a GPU? Overhead, launching inline against threads, memory, a GPT-2-small-size step.

    python benchmarks/gpu.py            on the GPUs that are there; one is enough
    python benchmarks/gpu.py --tiny     the same code with sizes for a try (also without a GPU: then on the CPU)

Times are wall-clock medians over rounds in which the contenders take turns, each round in another order, with a
synchronisation at both ends; ratios within the run. Bytes are the allocator's peak over what was there before.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Pipe
from pipeline.common.places import Place

MODES = ("never", "except_last", "always")
STAGES, CHUNKS = 4, 8


class Sizes(NamedTuple):
    """How large things are."""

    width: int
    rows: int  # of a chunk
    depth: int  # Linear-GELU pairs in a stage
    blocks: int  # of the transformer
    model: int
    context: int
    vocabulary: int
    batch: int
    rounds: int


FULL = Sizes(4096, 2048, 4, 12, 768, 1024, 50257, 16, 15)
TINY = Sizes(64, 8, 2, 4, 32, 16, 101, 8, 3)
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def measure(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each contender."""
    for run in runs.values():
        for _ in range(4):  # calls 1, 2 and 4 compare
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in range(rounds):
        for name, run in order.sample(list(runs.items()), len(runs)):
            wait()
            start = time.perf_counter()
            run()
            wait()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def perceptron(width: int, depth: int) -> nn.Sequential:
    pairs = range(STAGES * depth)
    return nn.Sequential(*(part for _ in pairs for part in (nn.Linear(width, width), nn.GELU())))


def overhead(sizes: Sizes, width: int, rows: int) -> None:
    """A step on one GPU against the hand-written loop over the same chunks."""
    model = perceptron(width, sizes.depth).to(DEVICE)
    x, y = torch.randn(rows * CHUNKS, width, device=DEVICE), torch.randn(rows * CHUNKS, width, device=DEVICE)

    def by_hand(twice: bool) -> None:
        model.zero_grad(set_to_none=True)
        for part, target in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
            if twice:
                with torch.no_grad():
                    model(part)
            (mean_square(model(part), target) / CHUNKS).backward()

    def step(pipe: Pipe) -> None:
        model.zero_grad(set_to_none=True)
        pipe.step(x, y, loss_fn=mean_square)

    runs: dict[str, Callable[[], object]] = {"hand": lambda: by_hand(False), "hand, twice": lambda: by_hand(True)}
    for mode in MODES:
        pipe = Pipe(model, [2 * sizes.depth] * STAGES, CHUNKS, devices=[DEVICE] * STAGES, checkpoint=mode)
        runs[mode] = lambda pipe=pipe: step(pipe)  # type: ignore[misc]
    medians = measure(runs, sizes.rounds)
    print(f"\n{STAGES} stages of {sizes.depth} x Linear({width})-GELU, {CHUNKS} chunks of {rows} rows, 1F1B\n")
    print("| checkpoint | ms | over the hand-written loop | us/action |")
    print("| --- | --- | --- | --- |")
    for mode in MODES:
        hand = medians["hand" if mode == "never" else "hand, twice"]
        cost = (medians[mode] - hand) / (2 * STAGES * CHUNKS) * 1e6
        print(f"| {mode} | {medians[mode] * 1e3:.2f} | {medians[mode] / hand:.3f} | {cost:.0f} |")


def launching(sizes: Sizes) -> None:
    """Small layers: the host is the bottleneck. One thread for all stages, or one for each."""
    width, rows = min(256, sizes.width), min(64, sizes.rows)
    model = perceptron(width, sizes.depth).to(DEVICE)
    x, y = torch.randn(rows * CHUNKS, width, device=DEVICE), torch.randn(rows * CHUNKS, width, device=DEVICE)
    runs: dict[str, Callable[[], object]] = {}
    apart = [Place(DEVICE, str(stage)) for stage in range(STAGES)]
    for name, workers, places in (
        ("inline", "inline", [DEVICE] * STAGES),
        ("inline, copies between places", "inline", apart),
        ("threads, copies between places", "threads", apart),
    ):
        pipe = Pipe(model, [2 * sizes.depth] * STAGES, CHUNKS, devices=places, checkpoint="never", workers=workers)
        runs[name] = lambda pipe=pipe: pipe.step(x, y, loss_fn=mean_square, grads="store")  # type: ignore[misc]
    medians = measure(runs, sizes.rounds)
    print(f"\nlaunching: {STAGES} stages of {sizes.depth} x Linear({width})-GELU, {CHUNKS} chunks of {rows} rows\n")
    print("| driver | ms | against inline |")
    print("| --- | --- | --- |")
    for name, seconds in medians.items():
        print(f"| {name} | {seconds * 1e3:.2f} | {seconds / medians['inline']:.2f} |")


def memory(sizes: Sizes) -> None:
    """The allocator's peak of a GPipe step against what the layers save: a Linear its input, a GELU its input."""
    if DEVICE.type != "cuda":
        print("\nmemory: needs a GPU")
        return
    width, rows, depth = sizes.width, sizes.rows, sizes.depth
    piece = rows * width * 4
    saved = {"never": (2 * depth * STAGES) * CHUNKS, "always": STAGES * CHUNKS + 2 * depth}
    print(f"\nmemory: GPipe, {STAGES} stages of {depth} x Linear({width})-GELU, {CHUNKS} chunks of {rows} rows\n")
    print("| checkpoint | peak, MiB | analytic count of activations, MiB |")
    print("| --- | --- | --- |")
    for mode in MODES:
        model = perceptron(width, depth)
        pipe = Pipe(
            model, [2 * depth] * STAGES, CHUNKS, devices=[DEVICE] * STAGES, schedule="gpipe", checkpoint=mode
        )
        x = torch.randn(rows * CHUNKS, width, device=DEVICE)
        weights = sum(param.numel() * 4 for param in model.parameters())
        peak = 0
        for _ in range(5):
            pipe.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            pipe.step(x, x, loss_fn=mean_square)
            peak = torch.cuda.max_memory_allocated() - before - weights  # the gradients are there at the end, too
        count = saved["always" if mode == "except_last" else mode] * piece
        print(f"| {mode} | {peak / 2**20:.0f} | {count / 2**20:.0f} |")


class Block(nn.Module):
    """A pre-norm transformer block (Radford et al. 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        heads = self.qkv(self.norm1(x_BTD)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        queries, keys, values = heads
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(B, T, D))
        added: Tensor = x_BTD + self.mlp(self.norm2(x_BTD))
        return added


class Embed(nn.Module):
    """Tokens and their positions."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)

    def forward(self, x_BT: Tensor) -> Tensor:
        found: Tensor = self.token(x_BT) + self.position(torch.arange(x_BT.shape[1], device=x_BT.device))
        return found


class Head(nn.Module):
    """From states to tokens, by the weights of the embedding."""

    def __init__(self, embed: Embed) -> None:
        super().__init__()
        self.weight = embed.token.weight

    def forward(self, x_BTD: Tensor) -> Tensor:
        return functional.linear(x_BTD, self.weight)


def tokens(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def language_model(sizes: Sizes) -> None:
    """Sizes of GPT-2 small, tied weights, bfloat16 autocast, AdamW."""
    torch.manual_seed(0)
    embed = Embed(sizes.vocabulary, sizes.context, sizes.model)
    blocks = [Block(sizes.model) for _ in range(sizes.blocks)]
    model = nn.Sequential(embed, *blocks, nn.LayerNorm(sizes.model), Head(embed)).to(DEVICE)
    each = sizes.blocks // STAGES
    balance = [1 + each, *[each] * (STAGES - 2), sizes.blocks - (STAGES - 1) * each + 2]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    x = torch.randint(sizes.vocabulary, (sizes.batch, sizes.context), device=DEVICE)

    def by_hand() -> None:
        optimizer.zero_grad(set_to_none=True)
        for part in x.chunk(CHUNKS):
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                loss = tokens(model(part), part) / CHUNKS
            loss.backward()
        optimizer.step()

    def step(pipe: Pipe) -> None:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            pipe.step(x, x, loss_fn=tokens, optimizer=optimizer)

    runs: dict[str, Callable[[], object]] = {"hand-written loop": by_hand}
    for mode in MODES:
        pipe = Pipe(model, balance, CHUNKS, devices=[DEVICE] * STAGES, checkpoint=mode)
        runs[mode] = lambda pipe=pipe: step(pipe)  # type: ignore[misc]
    medians = measure(runs, max(3, sizes.rounds // 2))
    count = sum(param.numel() for param in model.parameters())
    what = f"{count / 1e6:.0f} M parameters, {sizes.batch} x {sizes.context} tokens, bfloat16, balance {balance}"
    print(f"\nlanguage model: {what}\n")
    print("| | ms | tokens/s | against the loop |")
    print("| --- | --- | --- | --- |")
    for name, seconds in medians.items():
        rate = sizes.batch * sizes.context / seconds
        print(f"| {name} | {seconds * 1e3:.1f} | {rate:.0f} | {seconds / medians['hand-written loop']:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="sizes for a try")
    sizes = TINY if parser.parse_args().tiny else FULL
    if sizes is FULL and DEVICE.type != "cuda":
        parser.error("needs a GPU (with --tiny it runs without)")
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "no GPU"
    print(f"{datetime.date.today()}: {name}, torch {torch.__version__}, Python {platform.python_version()}")
    overhead(sizes, sizes.width, sizes.rows)
    overhead(sizes, min(64, sizes.width), min(16, sizes.rows))
    launching(sizes)
    memory(sizes)
    language_model(sizes)


if __name__ == "__main__":
    main()
