"""Predicted beside measured: how near does `simulate` come to the time of a step on two CPU ranks?

    python benchmarks/predicted.py             five models
    python benchmarks/predicted.py --quick     fewer rounds
    python benchmarks/predicted.py --json FILE

Two stages of two blocks each, 8 chunks, each rank on a core of its own, gloo. Steps under one setting are traced (1F1B,
every chunk recomputed); `Costs.measured` takes medians of F, B, recomputations and messages over these steps. From
them `simulate` predicts the step under that setting and under others that were not traced:

    1f1b, always    the traced one: what the order explains
    1f1b, never     without the recomputations
    gpipe, never    another order
    zb-h1, never    another one, with B split in halves, which nobody measured
    1f1b, 3 + 1     one block more on the first stage, as if blocks were equal

Two measured times: `actions` from the start of a step's first action to the end of its last, which is what `simulate`
predicts; and `step` from when both ranks begin to when both have ended, with what a step does besides: it cuts the
batch, exchanges words with the other rank at its begin and its end, and hands out gradients. That is some milliseconds
here, the more the more other processes use the cores, and predicted by nobody.

Settings take turns within a round. Where other processes use the cores, all times are theirs too, so of each setting
the three fastest rounds count, of the traced one in its costs as well, and the median of these.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, before torch looks

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from models import blocks, hugging_face  # noqa: E402
from ranks_launch import Pair, machine, start_together  # noqa: E402
from torch import nn  # noqa: E402

from pipeline import Pipe  # noqa: E402
from scheduler import Costs, Timeline, by_name, simulate  # noqa: E402

MODELS = ("gpt", "llama", "bottleneck", "lstm", "hf-gpt2")
STAGES, CHUNKS, ROWS, BLOCKS = 2, 8, 8, 4
FASTEST = 3  # rounds
VALIDATING = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # these calls compare more, and take longer


class Setting(NamedTuple):
    """How a step is run."""

    schedule: str
    checkpoint: str
    moved: int  # blocks from the second stage to the first

    def __str__(self) -> str:
        balance = f"{BLOCKS // 2 + self.moved} + {BLOCKS // 2 - self.moved}"
        return f"{self.schedule}, {balance if self.moved else self.checkpoint}"


TRACED = Setting("1f1b", "always", 0)
SETTINGS = (
    TRACED, Setting("1f1b", "never", 0), Setting("gpipe", "never", 0), Setting("zb-h1", "never", 0),
    Setting("1f1b", "never", 1),
)


class Row(NamedTuple):
    """One model under one setting, in seconds."""

    model: str
    setting: str
    step: float
    actions: float
    predicted: float


def measured(name: str, rounds: int) -> tuple[list[float], list[list[Timeline]]]:
    """The step's time under each setting, and timelines of its fastest steps. On every rank."""
    pipes: list[Pipe] = []
    times: list[list[float]] = [[] for _ in SETTINGS]
    timelines: list[list[Timeline]] = [[] for _ in SETTINGS]
    for setting in SETTINGS:
        torch.manual_seed(0)
        layers, x, y = built(name)
        per_stage = len(layers) // BLOCKS  # equal blocks; a beginning and an end go with the first and the last
        first = (BLOCKS // 2 + setting.moved) * per_stage + len(layers) % BLOCKS // 2
        balance = [first, len(layers) - first]
        pipes.append(Pipe(layers, balance, CHUNKS, schedule=setting.schedule, checkpoint=setting.checkpoint))
    number, done = 0, 0
    while done < rounds:
        number += 1
        counts = number > 4 and number not in VALIDATING
        done += counts
        for place, pipe in enumerate(pipes):
            with pipe.trace() as trace:  # whose exchange comes after the step
                start = start_together()
                pipe.step(x, y, loss_fn=nn.functional.mse_loss)
                time = ended() - start
            if counts:
                times[place].append(time)
                timelines[place].append(trace.timeline)
            pipe.zero_grad()
    fastest = [sorted(of_setting, key=lambda timeline: timeline.makespan)[:FASTEST] for of_setting in timelines]
    return [median(sorted(column)[:FASTEST]) for column in times], fastest


def built(name: str) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """Layers, an input and a target."""
    if name in hugging_face.HUGGING_FACE:
        return hugging_face.build(name, "small", BLOCKS, CHUNKS * ROWS)[1:]
    return blocks.build(name, "small", BLOCKS, CHUNKS * ROWS)


def ended() -> float:
    """The moment at which the last rank came here, of `perf_counter`."""
    latest = torch.tensor(perf_counter(), dtype=torch.float64)
    dist.all_reduce(latest, dist.ReduceOp.MAX)
    return float(latest)


def predicted(costs: Costs, setting: Setting) -> float:
    """The step by `simulate`, from the costs of the traced setting."""
    if setting.checkpoint == "never":
        costs = replace(costs, recompute=0)
    if setting.moved:
        share = setting.moved / (BLOCKS // 2)
        moved: dict[str, Any] = {}
        for what in ("forward", "input", "weight", "backward"):
            first, second = getattr(costs, what)
            moved[what] = (first + share * second, (1 - share) * second)
        costs = replace(costs, **moved)
    return float(simulate(by_name(setting.schedule, STAGES, CHUNKS), costs).makespan)


def rows_of(names: Sequence[str], rounds: int) -> list[Row]:
    """Each model under each setting."""
    rows = []
    with Pair() as pair:
        for name in names:
            times, timelines = pair.call(measured, name, rounds, seconds=600)[0]
            costs = Costs.measured(timelines[SETTINGS.index(TRACED)])
            for setting, time, of_setting in zip(SETTINGS, times, timelines):
                actions = median(timeline.makespan for timeline in of_setting)
                rows.append(row := Row(name, str(setting), time, actions, predicted(costs, setting)))
                cells = [f"{time * 1e3:.1f}" for time in (row.step, row.actions, row.predicted)]
                ratios = [f"{row.predicted / time:.2f}" for time in (row.actions, row.step)]
                print("|", " | ".join([row.model, row.setting, *cells, *ratios]), "|", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    print(f"{machine()}\n")
    print("| model | setting | step, ms | actions, ms | predicted, ms | of actions | of step |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    rows = rows_of(arguments.models, 20 if arguments.quick else 80)
    for what in ("actions", "step"):
        off = sorted(abs(row.predicted / getattr(row, what) - 1) for row in rows)
        within = sum(share <= 0.15 for share in off)
        words = f"off by {median(off):.1%} in the median of {len(off)}, {off[-1]:.1%} at most"
        print(f"\n{what}: {words}; {within} within 15 %")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([row._asdict() for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
