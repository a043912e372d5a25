"""What do updates within the backward save in memory, and what do they cost in time?

    python benchmarks/eager.py            memory of a Pipe's step and of a plain module's; times
    python benchmarks/eager.py --quick    SGD alone, fewer rounds

The model is twelve stages on the CPU, each one Linear(1568, 1568) without bias: 9.4 MiB. Few rows, so activations are
small beside weights. The extra peak of a step is what it holds at the most beyond what is there before it: parameters,
optimizer state, the mini-batch. It is given as a fraction of the weights' bytes, found in two ways:

    bytes    storages that operators make within the step, each from then until it is freed, seen by a dispatch mode;
             the temporaries of the optimizer too, if they outlive an operator. The same number in each run.
    RSS      the process's own peak (VmHWM, reset through /proc/self/clear_refs) less what was resident before.
             Linux only. A process of its own for each case, in which malloc gives large blocks back as soon as they
             are free (MALLOC_MMAP_THRESHOLD_); else what it hoards is counted too.

Bytes are counted in step 5, and in step 4, in which a Pipe looks whether the loss is what it should be; RSS in step 3.

Times are medians of steps that run in turns, in another order each round, in one process. A ratio is the median of the
ratios within a round. Norms are far from clipping, but where updates are to be taken back.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import random
import statistics
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipeline import EagerUpdate, Pipe, eager_backward
from scheduler import Schedule, by_name

STAGES, WIDTH, ROWS = 12, 1568, 8
ORDERS = ("1f1b", "gpipe", "looped-bfs")
OPTIMIZERS = ("SGD", "AdamW", "AdamW, foreach")
Run: TypeAlias = Callable[[], object]


class Case(NamedTuple):
    """One row of a table of memory. `order`: of the chunks; or "plain", "checkpoint": a module without a Pipe."""

    order: str
    chunks: int
    optimizer: str
    eager: bool
    clip: str | None = None


class Extra(NamedTuple):
    """Extra peaks as fractions of the weights' bytes."""

    counted: float
    comparing: float  # counted, in a step that compares
    resident: float | None  # None: not on Linux


# ------------------------------------------------------------------------------------------------------------- problem


def linears(width: int = WIDTH) -> nn.Sequential:
    """One Linear for each stage."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(STAGES)))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """By its name here. On the CPU torch takes one parameter at a time, unless foreach says otherwise."""
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=name == "AdamW, foreach")


def schedule_of(order: str, chunks: int) -> str | Schedule:
    """Stage after stage on one lane; else an order by name, whose lanes take turns in one thread."""
    return by_name(order, 1, chunks, stages_per_lane=STAGES) if order == "looped-bfs" else order


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


CLIPS: dict[str | None, dict[str, Any]] = {  # norms that no gradient here reaches
    None: {},
    "value": {"clip": "value", "clip_value": 1.0},
    "per_parameter": {"clip": "per_parameter", "max_norm": 1e6},
    "two_pass": {"clip": "two_pass", "max_norm": 1e6},
}


def training(case: Case) -> tuple[nn.Sequential, torch.optim.Optimizer, Run]:
    """A model, its optimizer, and a step."""
    model = linears()
    optimizer = optimizer_of(case.optimizer, model)
    update = EagerUpdate(optimizer, **CLIPS[case.clip]) if case.eager else optimizer
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    if case.order in ("plain", "checkpoint"):
        return model, optimizer, partial(plain_step, model, update, x, y, case.order == "checkpoint")
    schedule = schedule_of(case.order, case.chunks)
    pipe = Pipe(model, [1] * STAGES, case.chunks, devices=["cpu"] * STAGES, schedule=schedule)
    return model, optimizer, lambda: pipe.step(x, y, loss_fn=mean_square, optimizer=update)


def plain_step(
    model: nn.Sequential, update: torch.optim.Optimizer | EagerUpdate, x: Tensor, y: Tensor, again: bool
) -> None:
    """A step without a Pipe; `again`: each layer computes again in the backward."""
    value = x
    for layer in model:
        value = checkpoint(layer, value, use_reentrant=False) if again else layer(value)
    loss = mean_square(value, y)
    if isinstance(update, EagerUpdate):
        eager_backward(loss, update)
        return
    loss.backward()
    update.step()
    update.zero_grad()


# -------------------------------------------------------------------------------------------------------------- memory


class Living(TorchDispatchMode):
    """Within: counts bytes of the storages that operators make; but for those of `aside`."""

    def __init__(self, aside: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = {tensor.untyped_storage().data_ptr() for tensor in aside}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self._hold(tensor.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or address in self._held:
            return
        self._held.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, address, size)

    def _free(self, address: int, size: int) -> None:
        self._held.discard(address)
        self.now -= size


def counted(model: nn.Module, optimizer: torch.optim.Optimizer, run: Run) -> int:
    """The most bytes alive that a step has made."""
    state = [each for of in optimizer.state.values() for each in of.values() if isinstance(each, Tensor)]
    living = Living([*model.parameters(), *state])
    with living:
        run()
    return living.peak


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def resident(run: Run) -> int | None:
    """By how much the process grows at the most."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def measure(case: Case) -> Extra:
    """In a process of its own."""
    torch.set_num_threads(1)
    model, optimizer, run = training(case)
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    for _ in range(2):
        run()
    rss = resident(run)
    comparing = counted(model, optimizer, run)
    return Extra(counted(model, optimizer, run) / weights, comparing / weights, None if rss is None else rss / weights)


def fresh(case: Case) -> Extra:
    """Measure in a fresh process, where malloc hoards nothing large. A server that has imported torch forks it off."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pipeline"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, case).result()


def report_steps(optimizers: tuple[str, ...]) -> None:
    """Memory of a Pipe's step."""
    print("\nPipe.step: extra peak over the weights' bytes\n")
    print("| order | chunks | optimizer | ordinary: bytes | eager: bytes | ordinary: RSS | eager: RSS", end=" ")
    print("| eager, step 4: bytes |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
    for order in ORDERS:
        for chunks in (1, 4):
            for optimizer in optimizers:
                ordinary, eager = [fresh(Case(order, chunks, optimizer, is_eager)) for is_eager in (False, True)]
                cells = f"{_pair(ordinary, eager)} | {eager.comparing:.2f}"
                print(f"| {order} | {chunks} | {optimizer} | {cells} |", flush=True)


def report_plain(optimizers: tuple[str, ...]) -> None:
    """Memory of a step without a Pipe."""
    print("\nA plain module, backward() and step(), or eager_backward: extra peak over the weights' bytes\n")
    print("| layers | optimizer | ordinary: bytes | eager: bytes | ordinary: RSS | eager: RSS |")
    print("| --- | --- | --- | --- | --- | --- |")
    for order, words in (("plain", "as they are"), ("checkpoint", "torch's checkpoint, not reentrant")):
        for optimizer in optimizers:
            ordinary, eager = [fresh(Case(order, 1, optimizer, is_eager)) for is_eager in (False, True)]
            print(f"| {words} | {optimizer} | {_pair(ordinary, eager)} |", flush=True)


def report_clips(optimizers: tuple[str, ...]) -> None:
    """Memory where gradients are clipped."""
    print("\nlooped-bfs, 4 chunks, with a clip: extra peak over the weights' bytes\n")
    print("| clip | optimizer | eager: bytes | eager: RSS |\n| --- | --- | --- | --- |")
    for optimizer in optimizers:
        for clip in CLIPS:
            found = fresh(Case("looped-bfs", 4, optimizer, True, clip))
            rss = "-" if found.resident is None else f"{found.resident:.2f}"
            print(f"| {clip} | {optimizer} | {found.counted:.2f} | {rss} |", flush=True)


def _pair(ordinary: Extra, eager: Extra) -> str:
    rss = [each.resident for each in (ordinary, eager)]
    cells = ["-" if each is None else f"{each:.2f}" for each in rss]
    return " | ".join([f"{ordinary.counted:.2f}", f"{eager.counted:.2f}", *cells])


# --------------------------------------------------------------------------------------------------------------- times


def contenders(width: int, rows: int, optimizer: str, order: str, chunks: int) -> dict[str, Run]:
    """Steps of the same kind, each on a model of its own. What follows a slash clips."""
    clips = {f"eager/{name}": options for name, options in CLIPS.items()}
    x, y = torch.randn(rows, width), torch.randn(rows, width)

    def step(update: Callable[[torch.optim.Optimizer], Any], **options: Any) -> Run:
        model = linears(width)
        pipe = Pipe(model, [1] * STAGES, chunks, devices=["cpu"] * STAGES, schedule=schedule_of(order, chunks))
        given = update(optimizer_of(optimizer, model))
        return lambda: pipe.step(x, y, loss_fn=mean_square, optimizer=given, **options)

    def eager(clip: dict[str, Any], optimizer: torch.optim.Optimizer) -> EagerUpdate:
        return EagerUpdate(optimizer, **clip)

    found = {"ordinary": step(lambda each: each), "ordinary/norm": step(lambda each: each, clip_grad_norm=1e6)}
    return found | {name: step(partial(eager, clip)) for name, clip in clips.items()}


def timed(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, a round at a time. Three steps go before: the steps 1, 2, 4, 8, ... compare."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for run in runs.values():
        for _ in range(3):
            run()
    for _ in range(rounds):
        for name, run in order.sample(list(runs.items()), len(runs)):
            run()  # finds the caches as another has left them
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def report_times(optimizers: tuple[str, ...], rounds: int) -> None:
    """Two sizes: where the optimizer's work is seen, and where what surrounds it is."""
    for width, rows in ((512, 64), (32, 32)):
        print(f"\n{STAGES} stages of Linear({width}), {rows} rows in 4 chunks; {rounds} rounds\n")
        print("| order | optimizer | ordinary, ms | eager, ms | eager over ordinary | value | per_parameter", end=" ")
        print("| two_pass | ordinary, clip_grad_norm |")
        print("| " + " | ".join(["---"] * 9) + " |")
        for order in ("1f1b", "looped-bfs"):
            for optimizer in optimizers:
                found = timed(contenders(width, rows, optimizer, order, 4), rounds)
                ordinary, norm = found.pop("ordinary"), found.pop("ordinary/norm")
                ratios = " | ".join(_ratio(each, ordinary) for each in [*found.values(), norm])
                ms = [f"{statistics.median(each) * 1e3:.1f}" for each in (ordinary, found["eager/None"])]
                print(f"| {order} | {optimizer} | {' | '.join(ms)} | {ratios} |", flush=True)


def _ratio(times: list[float], ordinary: list[float]) -> str:
    return f"{statistics.median(one / other for one, other in zip(times, ordinary, strict=True)):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="SGD alone, fewer rounds")
    parser.add_argument("--only", choices=("steps", "plain", "clips", "times"), help="one part (default: all)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, 1 thread")
    optimizers = OPTIMIZERS[:1] if options.quick else OPTIMIZERS
    parts: dict[str, Run] = {
        "steps": partial(report_steps, optimizers),
        "plain": partial(report_plain, optimizers),
        "clips": partial(report_clips, optimizers[:2]),
        "times": partial(report_times, optimizers[:2], 5 if options.quick else 15),
    }
    for name, report in parts.items():
        if options.only in (None, name):
            report()


if __name__ == "__main__":
    main()
