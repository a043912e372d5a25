"""Time and bytes beside torchgpipe 0.0.7, on small versions of the models it was measured with, in the same run.

    python benchmarks/torchgpipe.py            about six minutes
    python benchmarks/torchgpipe.py --quick    under a minute: one process, one run, fewer settings

U-Net with skips (models/unet.py) and AmoebaNet-D's cells with pairs (models/amoebanet.py), all stages on one CPU
device, so that no time is won by stages that run at once. First outputs and gradients of every contender are compared
with a loop over the chunks through the plain module, in float64, without dropout.

    forward   loss_fn(pipe(x), y).backward()           step   pipe.step(x, y, loss_fn=loss_fn), 1F1B
    peer      loss_fn(gpipe(x), y).backward()          loop   the plain module, chunk by chunk, as GPipe orders it

Times: contenders run in turns, in another order each round, and the first run of a turn does not count, nor do the
first calls (a Pipe looks at more in calls number 1, 2, 4, 8, ...). A process gives medians and their ratios; the tables
give the median over processes, and the smallest and largest. Bytes are those of the third call:

    saved   storages that autograd's nodes hold, each once, at the most, seen by saved-tensor hooks; parameters,
            buffers, x and y aside. Hooks belong to a thread, and torchgpipe computes in threads of its own: there they
            are set round each layer's forward. So the layers' own nodes are counted for both, wherever they run; inputs
            that torchgpipe's Checkpoint node saves are not (a Pipe keeps those outside of autograd).
    live    storages made since the call began that are still alive, at the most: each operator's outputs, seen by a
            dispatch mode in the same threads, until their storages are freed. It holds all of saved, inputs kept to
            recompute, skips, outputs and gradients; not what an operator allocates and frees within itself.
            (Against torch's profiler, with torchgpipe's work moved to the caller's thread: within 4 per cent.)
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import random
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeVar

import torch
from counted_bytes import Bytes, Living, saving
from models.amoebanet import amoebanet
from models.unet import unet
from torch import Tensor, nn
from torch.nn import functional

import pipeline.skip
from partition import balance_by_size
from pipeline import Pipe
from pipeline.execution.plan import plan_forward
from scheduler import by_name

MODES = ("never", "except_last", "always")
STAGES, CHUNKS = (2, 4), (2, 8)
NAMES = ("U-Net", "AmoebaNet-D")
CONTENDERS = ("forward", "step", "peer")
Run = Callable[[], object]
Result = TypeVar("Result")


class Problem(NamedTuple):
    """A model, built the same for either skip module, and what it is trained on."""

    build: Callable[[Any], nn.Sequential]
    x: Tensor
    y: Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor]

    def model(self, skip: Any) -> nn.Sequential:
        """With the same weights each time."""
        torch.manual_seed(0)
        return self.build(skip)


def problem(name: str, rows: int = 16) -> Problem:
    torch.manual_seed(1)
    if name == "U-Net":
        x, y = torch.randn(rows, 3, 48, 48), torch.rand(rows, 1, 48, 48).round()
        return Problem(lambda skip: unet(skip, levels=3, channels=8), x, y, functional.binary_cross_entropy_with_logits)
    x, y = torch.randn(rows, 3, 64, 64), torch.randint(10, (rows,))
    return Problem(lambda skip: amoebanet(repeats=1, channels=8), x, y, functional.cross_entropy)


class Setting(NamedTuple):
    """What the contenders of one comparison share."""

    name: str
    balance: tuple[int, ...]
    chunks: int

    @property
    def stages(self) -> int:
        return len(self.balance)


def settings(name: str) -> list[Setting]:
    """All of one model. The balance is chosen by bytes, which are the same in every process."""
    chosen = problem(name)
    model = chosen.model(pipeline.skip)
    balances = [(stages, chunks) for stages in STAGES for chunks in CHUNKS]
    return [
        Setting(name, tuple(balance_by_size(stages, model, chosen.x, chunks=chunks)), chunks)
        for stages, chunks in balances
    ]


# ---------------------------------------------------------------------------------------------------- the contenders


def peer(model: nn.Sequential, setting: Setting, mode: str) -> nn.Module:
    from torchgpipe import GPipe

    devices = ["cpu"] * setting.stages
    return GPipe(model, list(setting.balance), devices=devices, chunks=setting.chunks, checkpoint=mode)


def theirs(given: Problem) -> nn.Sequential:
    """The model with torchgpipe's own skips."""
    from torchgpipe import skip

    return given.model(skip)


def by_hand(model: nn.Sequential, given: Problem, chunks: int) -> Tensor:
    """A loop over the chunks: all forwards, one loss on the joined output, all backwards. Returns the output."""
    outputs = [model(part) for part in given.x.tensor_split(chunks)]
    joined = torch.cat([output.detach() for output in outputs]).requires_grad_()
    (grad,) = torch.autograd.grad(given.loss_fn(joined, given.y), joined)
    for output, part in zip(outputs, grad.tensor_split(chunks), strict=True):
        output.backward(part)
    return joined.detach()


def contenders(
    given: Problem, setting: Setting, mode: str, schedule: str = "1f1b"
) -> dict[str, tuple[nn.Sequential, Run]]:
    """Each with the model that it computes on; it leaves the gradients of one mini-batch there."""
    model, other = given.model(pipeline.skip), theirs(given)
    pipe, stepping = (
        Pipe(model, setting.balance, setting.chunks, checkpoint=mode, schedule=schedule) for _ in range(2)
    )
    gpipe = peer(other, setting, mode)

    def forward() -> Tensor:
        output: Tensor = pipe(given.x)
        given.loss_fn(output, given.y).backward()
        return output.detach()

    def torchgpipe() -> Tensor:
        output: Tensor = gpipe(given.x)
        given.loss_fn(output, given.y).backward()
        return output.detach()

    def step() -> None:
        stepping.step(given.x, given.y, loss_fn=given.loss_fn)

    return {"forward": (model, forward), "step": (model, step), "peer": (other, torchgpipe)}


# --------------------------------------------------------------------------------------------------- do they agree?


def check(setting: Setting) -> float:
    """The largest difference of an output or gradient from the loop, over the largest number there; float64."""
    worst = 0.0
    given = problem(setting.name, rows=8)
    given = given._replace(x=given.x.double(), y=given.y.double() if given.y.is_floating_point() else given.y)
    exact = given._replace(build=lambda skip: undropped(problem(setting.name).build(skip)).double())
    plain = exact.model(pipeline.skip)
    expected = [by_hand(plain, exact, setting.chunks), *gradients(plain)]
    for mode in MODES:
        for name, (model, run) in contenders(exact, setting, mode).items():
            model.zero_grad(set_to_none=True)
            output = run()
            found = [output if isinstance(output, Tensor) else expected[0], *gradients(model)]  # a step has none here
            for one, other in zip(found, expected, strict=True):
                worst = max(worst, difference := float((one - other).abs().max() / other.abs().max()))
                if not difference < 1e-9:
                    raise AssertionError(f"{name}, checkpoint={mode!r}, {setting}: off by {difference:.1e} of the loop")
    return worst


def gradients(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def undropped(model: nn.Sequential) -> nn.Sequential:
    """Without dropout: torchgpipe draws its masks in another order."""
    for module in model.modules():
        if isinstance(module, nn.Dropout2d):
            module.p = 0.0
    return model


# -------------------------------------------------------------------------------------------------------------- bytes


@contextmanager
def in_all_threads(model: nn.Sequential, context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Within a context, in this thread; in any other, round the forward of each layer."""
    home = threading.get_ident()
    entered: list[AbstractContextManager[object]] = []

    def enter(*_: object) -> None:
        if threading.get_ident() != home:
            entered.append(context())
            entered[-1].__enter__()

    def leave(*_: object) -> None:
        if threading.get_ident() != home:
            entered.pop().__exit__(None, None, None)

    handles = [layer.register_forward_pre_hook(enter) for layer in model]
    handles += [layer.register_forward_hook(leave, always_call=True) for layer in model]
    try:
        with context():
            yield
    finally:
        for handle in handles:
            handle.remove()


def count_bytes(setting: Setting) -> dict[str, tuple[int, int]]:
    """For each contender: the most bytes saved, and the most alive."""
    given = problem(setting.name)
    return {
        f"{name}/{mode}": (measured(given, setting, mode, name, saving), measured(given, setting, mode, name, Living))
        for mode in MODES
        for name in CONTENDERS
    }


def measured(
    given: Problem, setting: Setting, mode: str, name: str, kind: Callable[[Bytes], AbstractContextManager[object]]
) -> int:
    """The peak of one count in the third call of a contender."""
    model, run = contenders(given, setting, mode)[name]
    for _ in range(2):
        run()
    model.zero_grad(set_to_none=True)
    count = Bytes([*model.parameters(), *model.buffers(), given.x, given.y])
    with in_all_threads(model, lambda: kind(count)):
        run()
    model.zero_grad(set_to_none=True)
    assert count.now == 0, f"{name}, checkpoint={mode!r}, {setting}: {count.now} bytes are still held after the call"
    return count.peak


# --------------------------------------------------------------------------------------------------------------- times


class Turns(NamedTuple):
    """How long to measure."""

    rounds: int
    runs: int  # in a turn; the first does not count
    warm: int  # runs before


def timed(runs: dict[str, tuple[nn.Sequential, Run]], turns: Turns) -> dict[str, float]:
    """Median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _, run in [pair for pair in runs.values() for _ in range(turns.warm)]:
        run()
    for _ in range(turns.rounds):
        for name, (model, run) in order.sample(list(runs.items()), len(runs)):
            for number in range(turns.runs):
                model.zero_grad(set_to_none=True)
                start = time.perf_counter()
                run()
                if number:
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def all_modes(setting: Setting, turns: Turns) -> dict[str, float]:
    """Every contender in every mode: "forward/never" and so on."""
    given = problem(setting.name)
    runs = {f"{name}/{mode}": pair for mode in MODES for name, pair in contenders(given, setting, mode).items()}
    return timed(runs, turns)


def two_chunks(setting: Setting, turns: Turns) -> dict[str, float]:
    """What checkpointing costs in GPipe's order; and what share of F and B the plain module has."""
    given = problem(setting.name)
    model = given.model(pipeline.skip)
    runs: dict[str, tuple[nn.Sequential, Run]] = {}
    for mode in MODES[:2]:
        for name, pair in contenders(given, setting, mode, "gpipe").items():
            runs[f"{name}/{mode}"] = pair
    runs["loop"] = model, lambda: by_hand(model, given, setting.chunks)
    runs["loop, F"] = model, lambda: [model(part) for part in given.x.tensor_split(setting.chunks)]
    return timed(runs, turns)


# ------------------------------------------------------------------------------------------------------------- tables


def spread(values: list[float]) -> str:
    around = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.3f}{around}"


def print_times(name: str, every: list[Setting], found: list[dict[Setting, dict[str, float]]]) -> None:
    print(f"\n{name}: ms of a mini-batch, and torchgpipe's time over ours\n")
    print("| stages | chunks | checkpoint | ours, forward | ours, step | torchgpipe | over forward | over step |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for setting in every:
        for mode in MODES:
            each = [process[setting] for process in found]
            ms = [f"{statistics.median(one[f'{who}/{mode}'] for one in each) * 1e3:.0f}" for who in CONTENDERS]
            over = [spread([one[f"peer/{mode}"] / one[f"{entry}/{mode}"] for one in each]) for entry in CONTENDERS[:2]]
            print(f"| {setting.stages} | {setting.chunks} | {mode} | {' | '.join([*ms, *over])} |")


def print_bytes(name: str, found: dict[Setting, dict[str, tuple[int, int]]]) -> None:
    print(f"\n{name}: KiB at the most, saved for the backward by autograd and alive in all\n")
    print("| stages | chunks | checkpoint | saved: ours, forward | ours, step | torchgpipe", end=" ")
    print("| alive: ours, forward | ours, step | torchgpipe |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for setting, counts in found.items():
        for mode in MODES:
            cells = [f"{counts[f'{who}/{mode}'][which] / 1024:.0f}" for which in (0, 1) for who in CONTENDERS]
            print(f"| {setting.stages} | {setting.chunks} | {mode} | {' | '.join(cells)} |")


def share(setting: Setting) -> float:
    """The share of (stage, chunk) pairs that a Pipe's except_last recomputes in `pipe(x)`."""
    plan = plan_forward(by_name("gpipe", setting.stages, setting.chunks), ["cpu"] * setting.stages)
    return len(plan.recomputed("except_last")) / (setting.stages * setting.chunks)


def print_ratio(found: list[dict[Setting, dict[str, float]]]) -> None:
    print("\nSpeed of except_last over that of never, two chunks, GPipe's order; torchgpipe reports 0.858 (U-Net) and\n"
          "0.853 (ResNet-101) on a GPU against the plain module. Arithmetic: 3 / (3 + share) where B costs twice F.\n")
    print("| model | stages | contender | recomputed | arithmetic | with this model's F and B | measured |", end="")
    print(" against the plain loop |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    for setting in found[0]:
        each = [process[setting] for process in found]
        for who, part in (("forward", share(setting)), ("step", share(setting)), ("peer", 1 / setting.chunks)):
            label = {"forward": "ours, forward", "step": "ours, step", "peer": "torchgpipe"}[who]
            own = statistics.median(one["loop"] / (one["loop"] + part * one["loop, F"]) for one in each)
            never = spread([one[f"{who}/never"] / one[f"{who}/except_last"] for one in each])
            loop = spread([one["loop"] / one[f"{who}/except_last"] for one in each])
            cells = (f"{part:.0%}", f"{3 / (3 + part):.3f}", f"{own:.3f}", never, loop)
            print(f"| {setting.name} | {setting.stages} | {label} | {' | '.join(cells)} |")


def in_process(threads: int, work: Callable[..., Result], *args: Any) -> Result:
    """The result of a function, run in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=prepare, initargs=(threads,)) as pool:
        return pool.submit(work, *args).result()


def prepare(threads: int) -> None:
    warnings.simplefilter("ignore")  # torchgpipe is older than what it runs on
    torch.set_num_threads(threads)


def checked(every: list[Setting]) -> float:
    """How far any contender is from the loop."""
    return max(check(setting) for setting in every)


def counted(every: list[Setting]) -> dict[Setting, dict[str, tuple[int, int]]]:
    return {setting: count_bytes(setting) for setting in every}


def times(
    every: list[Setting], work: Callable[[Setting, Turns], dict[str, float]], turns: Turns
) -> dict[Setting, dict[str, float]]:
    return {setting: work(setting, turns) for setting in every}


def main() -> None:
    sys.path.append(sys.path.pop(0))  # behind the packages: this file is not the torchgpipe that is meant
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one process, one round")
    parser.add_argument("--processes", type=int, default=3, help="how many to take the median of (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    options = parser.parse_args()
    if importlib.util.find_spec("torchgpipe") is None:
        parser.exit(1, "torchgpipe is not installed: pip install torchgpipe==0.0.7\n")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # also for threads that do not ask torch: torchgpipe's
    processes = 1 if options.quick else options.processes
    turns = Turns(rounds=1, runs=2, warm=1) if options.quick else Turns(rounds=2, runs=3, warm=3)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {options.threads} thread(s);", end=" ")
    print(f"{processes} process(es), each {turns.rounds} round(s) of {turns.runs - 1} run(s)")
    for name in NAMES:
        every = settings(name)[:: 3 if options.quick else 1]
        balances = ", ".join(f"{list(setting.balance)} for {setting.chunks} chunks" for setting in every)
        print(f"\n## {name}\n\n{len(problem(name).model(pipeline.skip))} layers; balances {balances}.", end=" ")
        print(f"Furthest from the loop over chunks, in float64: {in_process(options.threads, checked, every):.0e}")
        found = [in_process(options.threads, times, every, all_modes, turns) for _ in range(processes)]
        print_times(name, every, found)
        print_bytes(name, in_process(options.threads, counted, every[:1] if options.quick else every))
    print("\n## What checkpointing costs")
    pairs = []
    for name in NAMES:
        given = problem(name)
        model = given.model(pipeline.skip)
        for stages in (1,) if options.quick else (1, 2):
            pairs.append(Setting(name, tuple(balance_by_size(stages, model, given.x, chunks=2)), 2))
    print_ratio([in_process(options.threads, times, pairs, two_chunks, turns) for _ in range(processes)])


if __name__ == "__main__":
    main()
