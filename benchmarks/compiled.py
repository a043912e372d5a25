"""torch.compile of the blocks of a pipeline: what a step gains, and what compiling takes.

    python benchmarks/compiled.py [--rounds 15] [--models gpt hf-llama ...] [--sizes small large]

    eager       a step of a Pipe of two stages and four chunks, "never"
    compiled    the same where each block has been compiled: block.compile()
    loop        the hand-written loop over the same chunks, with the same compiled blocks
    first       seconds of the first step, which compiles
    graphs      compiled after one step, and after all: more would be compiled anew

Two stages in one process; medians of rounds in which the three take turns.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch._dynamo.utils as dynamo
from models import blocks, hugging_face
from torch import Tensor, nn
from torch.nn import functional

from partition.models.parts import Block, Part
from pipeline import Pipe

MODELS = ("gpt", "llama", "hf-llama", "hf-gpt2")
CHUNKS = 4


def built(name: str, size: str) -> tuple[nn.Sequential, Tensor, Tensor]:
    rows = 16 if size == "small" else 8
    if name in hugging_face.HUGGING_FACE:
        return hugging_face.build(name, size, 6, rows)[1:]
    return blocks.build(name, size, 6, rows)


def compile_blocks(layers: nn.Sequential) -> None:
    for layer in layers:
        if isinstance(layer, Block):  # of a model that has been cut
            layer.block.compile()
        elif not isinstance(layer, Part):
            layer.compile()


def loop(layers: nn.Sequential, x: Tensor, target: Tensor) -> None:
    """Forward and backward, chunk by chunk."""
    for own, of in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
        (functional.mse_loss(layers(own), of) / CHUNKS).backward()


def graphs() -> int:
    return int(dynamo.counters["stats"]["unique_graphs"])


def row(name: str, size: str, rounds: int) -> str:
    torch.compiler.reset()
    dynamo.counters.clear()
    torch.manual_seed(0)
    layers, x, target = built(name, size)
    others = [copy.deepcopy(layers) for _ in range(2)]
    for one in others:
        compile_blocks(one)
    half = len(layers) // 2
    eager, compiled = [
        Pipe(one, [half, len(layers) - half], CHUNKS, devices=["cpu"] * 2, checkpoint="never")
        for one in (layers, others[0])
    ]
    ways: dict[str, Any] = {
        "eager": lambda: eager.step(x, target, loss_fn=functional.mse_loss),
        "compiled": lambda: compiled.step(x, target, loss_fn=functional.mse_loss),
        "loop": lambda: loop(others[1], x, target),
    }
    begun = perf_counter()
    ways["compiled"]()
    first, at_first = perf_counter() - begun, graphs()
    for _ in range(8):  # the ninth step does not validate
        ways["eager"](), ways["compiled"]()
    after = graphs()
    ways["loop"]()
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            begun = perf_counter()
            run()
            times[way].append(perf_counter() - begun)
    of = {way: median(values) for way, values in times.items()}
    return (
        f"| {name} | {size} | {1000 * of['eager']:.1f} | {1000 * of['compiled']:.1f} | "
        f"{of['compiled'] / of['eager']:.2f} | {of['compiled'] / of['loop']:.2f} | {first:.1f} | {at_first}, {after} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--sizes", nargs="*", default=("small", "large"))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print("| model | size | eager, ms | compiled, ms | compiled / eager | compiled / loop | first, s | graphs |")
    print("|" + " --- |" * 8)
    for name in arguments.models:
        for size in arguments.sizes:
            print(row(name, size, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
