"""How much memory does a rank take to build a model, cut it and load its own blocks from a folder of shards?

    python benchmarks/loading.py

A Llama of 8 blocks is saved in shards. Then torchrun starts 4 ranks, which run the lines of docs/models.md:

    with meta_parameters():
        model = LlamaForCausalLM(config)
    pipe = Pipe(model, sample=words, chunks=4, materialize=folder)    in two steps: to_sequential, and Pipe

    share      the bytes of the rank's parameters and buffers
    build      the most bytes that were resident while the model was built and cut, less those before it: nothing is
               loaded yet, and the activations of the sample are there
    load       the same while the Pipe was built, from the layers that the model was cut into
    bound      the share, and the bytes of the largest shard

Resident is what the kernel counts (VmHWM): memory, and pages of files that are mapped. What libraries keep that are
called for the first time is there before: a small model goes first.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from partition import to_sequential
from pipeline import Pipe, meta_parameters

RANKS, BLOCKS, MIB = 4, 8, 2**20
LARGE = LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=BLOCKS, num_attention_heads=16,
                    vocab_size=8000)  # fmt: skip
SMALL = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=BLOCKS, num_attention_heads=2,
                    vocab_size=100)  # fmt: skip


def resident(which: str = "VmRSS") -> int:
    """The bytes that are resident now, or that were at the most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{which}:"))


class Peak:
    """The most bytes that were resident within, less those before."""

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak begins here
        self._before = resident()
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = resident("VmHWM") - self._before


def loaded(config: LlamaConfig, folder: str) -> tuple[Pipe, Peak, Peak]:
    """The Pipe over the ranks, and what the two halves of the way to it took."""
    words: dict[str, Tensor] = {"input_ids": torch.randint(config.vocab_size, (1, 16))}
    with Peak() as build:
        with meta_parameters():
            model = LlamaForCausalLM(config)
        layers = to_sequential(model, words)
    with Peak() as load:
        pipe = Pipe(layers, chunks=4, materialize=folder)
    return pipe, build, load


def rank(folder: Path) -> None:
    """One rank: what it took."""
    dist.init_process_group("gloo")
    loaded(SMALL, str(folder / "small"))
    pipe, build, load = loaded(LARGE, str(folder / "large"))
    share = sum(tensor.nbytes for tensor in (*pipe.parameters(), *pipe.buffers()))
    shard = max(file.stat().st_size for file in (folder / "large").glob("*.safetensors"))
    figures: list[float] = [share, build.bytes, load.bytes, share + shard]
    rows: list[list[float]] = [[]] * RANKS
    dist.all_gather_object(rows, figures)
    if dist.get_rank() == 0:
        for number, row in enumerate(rows):
            print(f"| {number} | {' | '.join(f'{figure / MIB:.0f}' for figure in row)} |")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for config, size in ((SMALL, "small"), (LARGE, "large")):
            LlamaForCausalLM(config).save_pretrained(folder / size, max_shard_size="300MB")
        files = [file.stat().st_size / MIB for file in (folder / "large").glob("*.safetensors")]
        print(f"torch {torch.__version__}; {BLOCKS} blocks, {RANKS} ranks; all in MiB")
        print(f"{sum(files):.0f} in {len(files)} shards, the largest of {max(files):.0f}\n")
        print("| rank | share | build | load | bound |\n| --- | --- | --- | --- | --- |", flush=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__]
        subprocess.run(command, check=True, env={**os.environ, "FOLDER": name, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "FOLDER" in os.environ:
        rank(Path(os.environ["FOLDER"]))
    else:
        main()
