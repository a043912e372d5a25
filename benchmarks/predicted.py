"""Predicted beside measured: how near does `simulate` come to the time of a step on two CPU ranks?

    python benchmarks/predicted.py             five models
    python benchmarks/predicted.py --quick     fewer rounds
    python benchmarks/predicted.py --json FILE

Two stages of two blocks each, 8 chunks, each rank on a core of its own, gloo. Steps under one setting are traced (1F1B,
every chunk recomputed); `Costs.measured` takes F, B, recomputations and messages from these steps, and what I and W
are of a B from a profile of the layers, which each rank takes between its rounds. From them `simulate` predicts the
step under that setting and under others that were not traced:

    1f1b, always    the traced one: what the order explains
    1f1b, never     without the recomputations
    gpipe, never    another order
    zb-h1, never    another one, with B split in halves, which nobody traced
    1f1b, 3 + 1     one block more on the first stage, as if blocks were equal

`actions`: from the start of a step's first action to the end of its last. `step`: from when both ranks begin to when
both have ended, with what a step does besides: it cuts the batch, exchanges words with the other rank, hands out
gradients. That is predicted as it was in the traced steps (`timeline.outside`).

Settings take turns within a round. Where other processes use the cores, all times are theirs too, so of each setting
the fastest eighth of the rounds counts, of the traced one in its costs as well, and the median of these; and the
fastest of the profiles.
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

from partition import Profile, profile  # noqa: E402
from pipeline import Pipe  # noqa: E402
from scheduler import Costs, Timeline, by_name, simulate  # noqa: E402
from scheduler.measurement import measure  # noqa: E402

MODELS = ("gpt", "llama", "bottleneck", "experts", "hf-gpt2", "lstm")
STAGES, CHUNKS, ROWS, BLOCKS = 2, 8, 8, 4
PROFILES = 5  # of each rank, between rounds
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
    predicted_step: float
    actions: float
    predicted_actions: float


def measured(name: str, rounds: int) -> tuple[list[list[float]], list[list[Timeline]], list[Profile]]:
    """The step's times under each setting, its timelines, and profiles of the layers. On every rank."""
    pipes: list[Pipe] = []
    times: list[list[float]] = [[] for _ in SETTINGS]
    timelines: list[list[Timeline]] = [[] for _ in SETTINGS]
    profiles = []
    for setting in SETTINGS:
        torch.manual_seed(0)
        layers, x, y = built(name)
        pipes.append(Pipe(
            layers, balance(layers, setting), CHUNKS, schedule=setting.schedule, checkpoint=setting.checkpoint
        ))
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
        if counts and done % (rounds // PROFILES) == 0:
            start_together()
            profiles.append(profile(built(name)[0], x, chunks=CHUNKS, timeout=0.2))
    fastest = [sorted(of_setting, key=lambda timeline: timeline.makespan)[: rounds // 8] for of_setting in timelines]
    return [sorted(of_step)[: rounds // 8] for of_step in times], fastest, profiles


def balance(layers: nn.Sequential, setting: Setting) -> list[int]:
    """Equal blocks; a beginning and an end go with the first and the last."""
    per_stage = len(layers) // BLOCKS
    first = (BLOCKS // 2 + setting.moved) * per_stage + len(layers) % BLOCKS // 2
    return [first, len(layers) - first]


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
    """The actions of the step by `simulate`, from the costs of the traced setting."""
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


def halves(profiles: Sequence[Profile], layers: nn.Sequential) -> Costs:
    """I, W and B of both stages, each by the profile in which they were fastest."""
    first, _ = balance(layers, TRACED)
    stages = [
        min((each.stage(*ends) for each in profiles), key=lambda stage: stage.input + stage.weight + stage.backward)
        for ends in ((0, first), (first, len(layers)))
    ]
    return Costs(
        input=[stage.input for stage in stages], weight=[stage.weight for stage in stages],
        backward=[stage.backward for stage in stages],
    )


def rows_of(names: Sequence[str], rounds: int) -> list[Row]:
    """Each model under each setting."""
    rows = []
    with Pair() as pair:
        for name in names:
            answers = pair.call(measured, name, rounds, seconds=900)
            times, timelines, _ = answers[0]
            profiles = [profile for _, _, of_rank in answers for profile in of_rank]
            traced = timelines[SETTINGS.index(TRACED)]
            costs = Costs.measured(traced, halves=halves(profiles, built(name)[0]))
            outside = measure(traced).outside
            for setting, of_step, of_setting in zip(SETTINGS, times, timelines):
                actions = median(timeline.makespan for timeline in of_setting)
                makespan = predicted(costs, setting)
                rows.append(row := Row(name, str(setting), median(of_step), makespan + outside, actions, makespan))
                cells = [f"{time * 1e3:.1f}" for time in row[2:]]
                ratios = [f"{row.predicted_step / row.step:.2f}", f"{row.predicted_actions / row.actions:.2f}"]
                print("|", " | ".join([row.model, row.setting, *cells, *ratios]), "|", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--models", nargs="+", default=MODELS[:5], choices=MODELS)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    print(f"{machine()}\n")
    print("| model | setting | step, ms | predicted | actions, ms | predicted | of step | of actions |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = rows_of(arguments.models, 20 if arguments.quick else 80)
    for what in ("step", "actions"):
        off = sorted(abs(getattr(row, f"predicted_{what}") / getattr(row, what) - 1) for row in rows)
        within = sum(share <= 0.15 for share in off)
        words = f"off by {median(off):.1%} in the median of {len(off)}, {off[-1]:.1%} at most"
        print(f"\n{what}: {words}; {within} within 15 %")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([row._asdict() for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
