"""The cost of a Pipe on a GPU: each section is a comparison of its own, and prints a table.

    python benchmarks/gpu.py                         all sections, on the GPU that is there
    python benchmarks/gpu.py --only blocks memory    some of them
    python benchmarks/gpu.py --rounds 6              shorter: fewer rounds of each comparison than 15
    python benchmarks/gpu.py --traces FOLDER         beside them one run of each contender in torch's profiler: kernels,
                                                     how long they take, and a trace for Perfetto
    python benchmarks/gpu.py --tiny                  the same code with sizes for a try, also without a GPU: on the CPU

    overhead          a step of layers of one kind against the hand-written loop, large and small
    launching         one thread for all stages against one for each
    memory            the allocator's peak
    language_model    a step of GPT-2 small's size
    blocks            a step of models as users write them against the loop, and torchgpipe where it is installed
    compiled          compiled.py on the GPU
    curvature         curvature_size.py on the GPU

Times are wall-clock medians over rounds in which the contenders take turns, each round in another order, with a
synchronisation at both ends; ratios within the run. Bytes are the allocator's peak over what was there before. A
section that fails prints its error, and the others run; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import platform
import random
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from models import hugging_face
from models.blocks import FAMILIES, build
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
    large: int  # rows of a chunk of large blocks


FULL = Sizes(4096, 2048, 4, 12, 768, 1024, 50257, 16, 15, 256)
TINY = Sizes(64, 8, 2, 4, 32, 16, 101, 8, 3, 1)
TRACES: list[Path] = []  # the folder of traces, if they are wanted
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
    for name, run in runs.items() if TRACES else ():
        trace(name, run, TRACES[0])
    return {name: statistics.median(each) for name, each in times.items()}


def trace(name: str, run: Callable[[], object], folder: Path) -> None:
    """One run in torch's profiler: a line about its kernels, and a file for Perfetto."""
    wait()
    with torch.profiler.profile() as profile:
        run()
        wait()
    kernels = [
        event for event in profile.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]  # fmt: skip
    busy = sum(event.self_device_time_total for event in kernels) / 1e3
    path = folder / f"{len(list(folder.glob('*.json.gz'))):03d} {name}.json.gz".replace(" ", "-").replace(",", "")
    profile.export_chrome_trace(str(path))
    print(f"{name}: {len(kernels)} kernels and copies, {busy:.1f} ms ({path})", flush=True)


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


HALVES = 2  # stages of blocks
BLOCK_MODES = ("never", "always")


def blocks(sizes: Sizes) -> bool:
    """Models as users write them, launch-bound and compute-bound. Whether all could be measured."""
    shapes = {"small": (2, 4), "large": (sizes.large, 1)}  # rows of a chunk, blocks of a stage
    each = [f"{size}: {rows} rows a chunk, {depth} blocks a stage" for size, (rows, depth) in shapes.items()]
    print(f"\nblocks: {HALVES} stages, {CHUNKS} chunks, step, 1F1B; {'; '.join(each)}\n")
    print("| model | size | checkpoint | ms | over the loop | us/action | torchgpipe's time over ours |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    models = [*FAMILIES, *(["hf-llama", "hf-gpt2"] if importlib.util.find_spec("transformers") else [])]
    rows, rounds = [(name, size) for size in shapes for name in models], max(3, 2 * sizes.rounds // 3)
    return all([guarded(partial(block_rows, name, size, *shapes[size], rounds)) for name, size in rows])


def block_rows(name: str, size: str, rows: int, depth: int, rounds: int) -> None:
    """The rows of one model."""
    torch.manual_seed(0)
    if name in FAMILIES:
        layers, x, y = build(name, size, HALVES * depth, rows * CHUNKS, DEVICE)
        plain: nn.Module = layers
        balance = [depth] * HALVES
    else:
        plain, layers, x, y = hugging_face.build(name, size, HALVES * depth, rows * CHUNKS, device=DEVICE)
        balance = [1 + depth, depth + 1]  # with a beginning and an end
    parts = list(zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True))

    def by_hand(twice: bool) -> None:
        for part, target in parts:
            if twice:
                with torch.no_grad():
                    plain(part)
            (mean_square(plain(part), target) / CHUNKS).backward()

    runs: dict[str, Callable[[], object]] = {"loop": lambda: by_hand(False), "loop, twice": lambda: by_hand(True)}
    for mode in BLOCK_MODES:
        pipe = Pipe(layers, balance, CHUNKS, devices=[DEVICE] * HALVES, checkpoint=mode)
        runs[mode] = partial(pipe.step, x, y, loss_fn=mean_square)
        if plain is layers and importlib.util.find_spec("torchgpipe"):  # which takes tensors between its layers
            runs |= torchgpipe(layers, balance, mode, x, y)

    def fresh(run: Callable[[], object]) -> None:
        layers.zero_grad(set_to_none=True)
        run()

    medians = measure({contender: partial(fresh, run) for contender, run in runs.items()}, rounds)
    for mode in BLOCK_MODES:
        ours, hand = medians[mode], medians["loop" if mode == "never" else "loop, twice"]
        cost = (ours - hand) / (2 * HALVES * CHUNKS) * 1e6
        peer = medians.get(f"torchgpipe, {mode}")
        ratio = "-" if peer is None else f"{peer / ours:.2f}"
        times = f"{ours * 1e3:.2f} | {ours / hand:.3f} | {cost:.0f}"
        print(f"| {name} | {size} | {mode} | {times} | {ratio} |", flush=True)


def torchgpipe(
    layers: nn.Sequential, balance: list[int], mode: str, x: Tensor, y: Tensor
) -> dict[str, Callable[[], object]]:
    """Forward, loss and backward through torchgpipe; nothing if it cannot run them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchgpipe import GPipe

            pipe = GPipe(layers, balance, devices=[DEVICE] * HALVES, chunks=CHUNKS, checkpoint=mode)

        def run() -> None:
            mean_square(pipe(x), y).backward()

        run()
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return {}
    return {f"torchgpipe, {mode}": run}


def compiled(sizes: Sizes) -> None:
    """Steps of compiled blocks, in a process of its own."""
    print("\ncompiled: 2 stages, 4 chunks, 4 blocks\n", flush=True)
    rows = 4 * sizes.large
    beside("compiled.py", f"--device={DEVICE}", "--blocks=4", f"--large-rows={rows}", "--models", "gpt", "hf-llama")


def curvature(sizes: Sizes) -> None:
    """Products and estimates with GPT-2's Hessian, in processes of their own."""
    print("\ncurvature: the Hessian of a model of GPT-2's shape\n", flush=True)
    beside("curvature_size.py", "--gpu", *(["--tiny"] if sizes.width == TINY.width else []))


def beside(script: str, *arguments: str) -> None:
    """Run another benchmark, which prints what it finds."""
    subprocess.run([sys.executable, str(Path(__file__).with_name(script)), *arguments], check=True, timeout=400)


def guarded(run: Callable[[], object]) -> bool:
    """Whether it ran to its end, and did not return False; an error is printed. The device's memory is free then."""
    try:
        return run() is not False
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return False
    finally:
        sys.stdout.flush()
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def both_overheads(sizes: Sizes) -> None:
    overhead(sizes._replace(rounds=min(5, sizes.rounds)), sizes.width, sizes.rows)  # seconds a round, of kernels alone
    overhead(sizes, min(64, sizes.width), min(16, sizes.rows))


SECTIONS: dict[str, Callable[[Sizes], object]] = {
    "overhead": both_overheads,
    "launching": launching,
    "memory": memory,
    "language_model": language_model,
    "blocks": blocks,
    "compiled": compiled,
    "curvature": curvature,
}


def main() -> int:
    sys.path.append(sys.path.pop(0))  # behind the packages: the torchgpipe.py beside this file is not the one meant
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="sizes for a try")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="these sections")
    parser.add_argument("--rounds", type=int, help=f"of each comparison (default: {FULL.rounds})")
    parser.add_argument("--traces", type=Path, help="a folder for traces of torch's profiler")
    options = parser.parse_args()
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
        TRACES.append(options.traces)
    sizes = TINY if options.tiny else FULL
    sizes = sizes._replace(rounds=options.rounds or sizes.rounds)
    if not options.tiny and DEVICE.type != "cuda":
        parser.error("needs a GPU (with --tiny it runs without)")
    if DEVICE.type == "cpu":
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "no GPU"
    version = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{datetime.date.today()}: {name}, {version}", flush=True)
    ended = True
    for section in options.only:
        begun = time.perf_counter()
        ended = guarded(partial(SECTIONS[section], sizes)) and ended
        print(f"\n({section}: {time.perf_counter() - begun:.0f} s)", flush=True)
    return 0 if ended else 1


if __name__ == "__main__":
    sys.exit(main())
