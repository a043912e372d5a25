"""torch.compile of the blocks of a pipeline: what a step gains, and what compiling takes.

    python benchmarks/compiled.py [--rounds 15] [--models gpt hf-llama ...] [--sizes small large]
    python benchmarks/compiled.py --device cuda:0 --blocks 4 --large-rows 1024

    eager       a step of a Pipe of two stages and four chunks, "never"
    compiled    the same where each block has been compiled: block.compile()
    loop        the hand-written loop over the same chunks, with the same compiled blocks
    first       seconds of the first step, which compiles
    graphs      compiled after one step, and after all: more would be compiled anew

Two stages on one device, in one process; medians of rounds in which the three take turns.
"""

from __future__ import annotations

import argparse
import copy
import sys
import traceback
import warnings
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch._dynamo.utils as dynamo
from models import blocks, hugging_face
from torch import Tensor, nn
from torch.nn import functional

from partition.models.parts import Block, Part
from pipeline import Pipe

MODELS = ("gpt", "llama", "hf-llama", "hf-gpt2")
CHUNKS = 4


class Setting(NamedTuple):
    """What is the same for all models."""

    device: torch.device
    blocks: int
    large_rows: int  # of a mini-batch of large blocks
    rounds: int


def built(name: str, size: str, setting: Setting) -> tuple[nn.Sequential, Tensor, Tensor]:
    rows = 16 if size == "small" else setting.large_rows
    if name in hugging_face.HUGGING_FACE:
        return hugging_face.build(name, size, setting.blocks, rows, device=setting.device)[1:]
    return blocks.build(name, size, setting.blocks, rows, setting.device)


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


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of a run, until the device has ended it."""
    wait(device)
    begun = perf_counter()
    run()
    wait(device)
    return perf_counter() - begun


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def row(name: str, size: str, setting: Setting) -> str:
    torch.compiler.reset()
    dynamo.counters.clear()
    torch.manual_seed(0)
    layers, x, target = built(name, size, setting)
    others = [copy.deepcopy(layers) for _ in range(2)]
    for one in others:
        compile_blocks(one)
    half = len(layers) // 2
    eager, compiled = [
        Pipe(one, [half, len(layers) - half], CHUNKS, devices=[setting.device] * 2, checkpoint="never")
        for one in (layers, others[0])
    ]
    ways: dict[str, Any] = {
        "eager": lambda: eager.step(x, target, loss_fn=functional.mse_loss),
        "compiled": lambda: compiled.step(x, target, loss_fn=functional.mse_loss),
        "loop": lambda: loop(others[1], x, target),
    }
    first, at_first = seconds(ways["compiled"], setting.device), graphs()
    for _ in range(8):  # the ninth step does not validate
        ways["eager"](), ways["compiled"]()
    after = graphs()
    ways["loop"]()
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(setting.rounds):
        for way, run in ways.items():
            times[way].append(seconds(run, setting.device))
    of = {way: median(values) for way, values in times.items()}
    return (
        f"| {name} | {size} | {1000 * of['eager']:.1f} | {1000 * of['compiled']:.1f} | "
        f"{of['compiled'] / of['eager']:.2f} | {of['compiled'] / of['loop']:.2f} | {first:.1f} | {at_first}, {after} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--sizes", nargs="*", default=("small", "large"))
    parser.add_argument("--device", type=torch.device, default="cpu", help="of both stages (default: cpu)")
    parser.add_argument("--blocks", type=int, default=6, help="of a model (default: 6)")
    parser.add_argument("--large-rows", type=int, default=8, help="of a mini-batch of large blocks (default: 8)")
    arguments = parser.parse_args()
    setting = Setting(arguments.device, arguments.blocks, arguments.large_rows, arguments.rounds)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print("| model | size | eager, ms | compiled, ms | compiled / eager | compiled / loop | first, s | graphs |")
    print("|" + " --- |" * 8, flush=True)
    failures = 0
    for name in arguments.models:
        for size in arguments.sizes:
            try:
                print(row(name, size, setting), flush=True)
            except Exception:
                traceback.print_exc(file=sys.stdout)
                failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
