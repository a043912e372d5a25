"""What does the engine cost over a loop that one would write by hand? Ratios, measured in turns within one run.

    python benchmarks/overhead.py            tiny and big layers, entry points, torchgpipe where it is installed
    python benchmarks/overhead.py --quick    fewer rounds, one process
    python benchmarks/overhead.py --blocks small [--table gpt ...]    models as users write them, launch-bound
    python benchmarks/overhead.py --blocks large [--table gpt ...]    the same, compute-bound
    python benchmarks/overhead.py --blocks small --table hf-llama     a model of transformers that to_sequential has cut
    python benchmarks/overhead.py --blocks small --table checkpoint_blocks    without a Pipe, over torch's checkpoint

The hand-written loops compute exactly what the pipe computes over the same chunks: for `pipe(x)` one joined
loss, for a step one loss per chunk; for "always" they run each chunk's forward twice. "in its order" is over a loop by
hand that runs the stages' forwards and backwards in the order in which the pipe runs them, with a cut between the
stages: what is left there is the engine's, the rest is what another order costs in the processor's caches. "us/action"
is the difference to the first, divided by the number of actions (2 x stages x chunks).

A pipe, its loops by hand and torchgpipe run in turns, in another order each round. A round's ratio is that of two
turns' medians, which lie seconds apart; a process gives the median over its rounds, the table the median over several
processes (where memory lies differs from one to the next, and with it the ratio, by a per cent or two), and the
smallest and largest.

The tables hf-* are of models of Hugging Face's transformers, where it is installed, as `to_sequential` cuts them: the
loops by hand call the whole model on each chunk. Their layers hand on more than a tensor, which torchgpipe and the loop
in order do not take.

"checkpoint_blocks" compares a forward and backward of all blocks, each checkpointed, with torch's own checkpoint called
by hand around each: single runs in turns, in CPU time, for blocks as they are and with a dropout behind each.

glibc gives free memory at the end of the heap back to the system, and each page of it costs a fault of microseconds
when it is used again. Which contender that hits depends on what the others have left, so the processes keep what
they have; with --malloc default they do not.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import platform
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

import torch
from models import hugging_face
from models.blocks import FAMILIES, build
from models.hugging_face import HUGGING_FACE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline import Pipe, checkpoint_blocks
from pipeline.execution.plan import plan_forward, plan_step
from scheduler import Action, Kind, by_name

STAGES = 2
CHUNKS = 8
KEEPING = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0"}  # glibc's own words for it
BLOCK = 4  # runs in a turn
WARM = 8  # calls 1, 2, 4, 8, ... of a Pipe compare more than others


class Shape(NamedTuple):
    """What is measured, and for how long."""

    width: int  # of Linear-ReLU pairs; 0: of the model's own blocks
    rows: int  # of a chunk
    depth: int  # pairs, or blocks, in a stage
    rounds: int
    threads: int
    family: str = ""  # of models/blocks.py or models/hugging_face.py
    size: str = ""

    @property
    def described(self) -> str:
        return f"{self.size} {self.family} blocks" if self.family else f"Linear({self.width})-ReLU"


class Model(NamedTuple):
    """A model with a mini-batch."""

    plain: nn.Module  # what the loops by hand call
    layers: nn.Sequential
    balance: list[int]  # of two stages
    x: Tensor
    y: Tensor


def built(shape: Shape) -> Model:
    """The model of a shape."""
    rows = shape.rows * CHUNKS
    if shape.family in HUGGING_FACE:
        plain, layers, x, y = hugging_face.build(shape.family, shape.size, STAGES * shape.depth, rows)
        return Model(plain, layers, [1 + shape.depth, shape.depth + 1], x, y)  # with a beginning and an end
    if shape.family:
        model, x, y = build(shape.family, shape.size, STAGES * shape.depth, rows)
        return Model(model, model, [shape.depth] * STAGES, x, y)
    pairs = range(STAGES * shape.depth)
    model = nn.Sequential(*(part for _ in pairs for part in (nn.Linear(shape.width, shape.width), nn.ReLU())))
    x, y = torch.randn(rows, shape.width), torch.randn(rows, shape.width)
    return Model(model, model, [2 * shape.depth] * STAGES, x, y)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def contenders(shape: Shape) -> dict[str, Callable[[], object]]:
    """Each computes the gradients of one mini-batch."""
    plain, model, balance, x, y = built(shape)
    hands_on_tensors = plain is model
    rows = len(x)
    xs, ys = x.tensor_split(CHUNKS), y.tensor_split(CHUNKS)

    def joined(outputs: list[Tensor]) -> tuple[Tensor, ...]:
        whole = torch.cat([output.detach() for output in outputs]).requires_grad_()
        (grad,) = torch.autograd.grad(mean_square(whole, y), whole)
        return grad.tensor_split(CHUNKS)

    def by_hand() -> None:
        outputs = [plain(part) for part in xs]
        for output, grad in zip(outputs, joined(outputs), strict=True):
            output.backward(grad)

    def by_hand_twice() -> None:
        with torch.no_grad():
            outputs = [plain(part) for part in xs]
        for part, grad in zip(xs, joined(outputs), strict=True):
            plain(part).backward(grad)

    def loop() -> None:
        for part, target in zip(xs, ys, strict=True):
            (mean_square(plain(part), target) * (len(part) / rows)).backward()

    def loop_twice() -> None:
        for part, target in zip(xs, ys, strict=True):
            with torch.no_grad():
                plain(part)
            (mean_square(plain(part), target) * (len(part) / rows)).backward()

    stages = [model[: balance[0]], model[balance[0]:]]

    def in_order(forwards: Sequence[Action], rest: Sequence[Action], twice: bool, losses: bool) -> None:
        kept: dict[tuple[int, int], Tensor] = {}
        outputs: dict[tuple[int, int], Tensor] = {}
        grads: dict[tuple[int, int], Tensor | None] = {}
        for action in (*forwards, None, *rest):
            if action is None:  # all forwards have run
                if forwards:
                    whole = joined([outputs[1, chunk] for chunk in range(CHUNKS)])
                    grads.update({(1, chunk): grad for chunk, grad in enumerate(whole)})
                continue
            stage, kind, chunk = action
            at = stage, chunk
            if kind is Kind.F:
                kept[at] = xs[chunk] if stage == 0 else outputs[0, chunk].detach().requires_grad_()
                with torch.set_grad_enabled(not twice):
                    outputs[at] = stages[stage](kept[at])
                continue
            output = stages[stage](kept[at]) if twice else outputs.pop(at)
            if losses and stage == 1:
                (mean_square(output, ys[chunk]) * (len(ys[chunk]) / rows)).backward()
            else:
                output.backward(grads.pop(at))
            outputs.pop(at, None)
            grads[0, chunk] = kept.pop(at).grad

    (of_step,) = plan_step(by_name("1f1b", STAGES, CHUNKS), ["cpu"] * STAGES).device_orders
    (of_forward,) = plan_forward(by_name("1f1b", STAGES, CHUNKS), ["cpu"] * STAGES).device_orders
    half = len(of_forward) // 2
    found: dict[str, Callable[[], object]] = {
        "forward/hand": by_hand,
        "forward/hand, twice": by_hand_twice,
        "step/hand": loop,
        "step/hand, twice": loop_twice,
    }
    if hands_on_tensors:
        found |= {
            "forward/order": partial(in_order, of_forward[:half], of_forward[half:], False, False),
            "forward/order, twice": partial(in_order, of_forward[:half], of_forward[half:], True, False),
            "step/order": partial(in_order, (), of_step, False, True),
            "step/order, twice": partial(in_order, (), of_step, True, True),
        }
    for mode in ("never", "except_last", "always"):
        pipe = Pipe(model, balance, CHUNKS, checkpoint=mode)
        found[f"forward/{mode}"] = lambda pipe=pipe: mean_square(pipe(x), y).backward()  # type: ignore[misc]
        found[f"step/{mode}"] = lambda pipe=pipe: pipe.step(x, y, loss_fn=mean_square)  # type: ignore[misc]
        if hands_on_tensors and importlib.util.find_spec("torchgpipe"):
            found[f"torchgpipe/{mode}"] = torchgpipe(model, balance, mode, x, y)
    return {name: cleared(model, run) for name, run in found.items()}


def torchgpipe(model: nn.Sequential, balance: list[int], mode: str, x: Tensor, y: Tensor) -> Callable[[], object]:
    """The same forward and backward through torchgpipe."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchgpipe import GPipe

        pipe = GPipe(model, balance, devices=["cpu"] * STAGES, chunks=CHUNKS, checkpoint=mode)
    return lambda: mean_square(pipe(x), y).backward()


def cleared(model: nn.Module, run: Callable[[], object]) -> Callable[[], object]:
    def fresh() -> None:
        model.zero_grad(set_to_none=True)
        run()

    return fresh


class Cost(NamedTuple):
    """What one process has found of one row: an entry point and a mode. Medians over its rounds."""

    seconds: float  # of a mini-batch through the pipe
    more: float  # seconds than the loop by hand
    hand: float  # ratio to the loop by hand
    order: float | None  # ratio to the loop by hand in the pipe's order
    peer: float | None  # torchgpipe's time over ours


ROWS = [f"{entry}/{mode}" for entry in ("forward", "step") for mode in ("never", "except_last", "always")]


def measure(shape: Shape, rows: Sequence[str]) -> list[Cost]:
    """What each row costs beside what it is compared with."""
    torch.set_num_threads(shape.threads)
    runs = contenders(shape)
    order = random.Random(0)
    return [cost(row, shape.rounds, runs, order) for row in rows]


def cost(row: str, rounds: int, runs: dict[str, Callable[[], object]], order: random.Random) -> Cost:
    entry, mode = row.split("/")
    twice = "" if mode == "never" else ", twice"
    ours, hand, ordered, peer = row, f"{entry}/hand{twice}", f"{entry}/order{twice}", f"torchgpipe/{mode}"
    with_order = ordered in runs and mode != "except_last"
    names = [ours, hand, *([ordered] if with_order else []), *([peer] if peer in runs else [])]
    found: list[dict[str, float]] = []
    for _ in range(WARM):
        runs[ours]()
    for _ in range(rounds):
        found.append({name: turn(runs[name]) for name in order.sample(names, len(names))})

    def ratio(one: str, other: str) -> float | None:
        return statistics.median(each[one] / each[other] for each in found) if {one, other} <= set(names) else None

    by_hand = ratio(ours, hand)
    assert by_hand is not None  # both are among them
    more = statistics.median(each[ours] - each[hand] for each in found)
    return Cost(statistics.median(each[ours] for each in found), more, by_hand, ratio(ours, ordered), ratio(peer, ours))


def turn(run: Callable[[], object]) -> float:
    """The median seconds of some runs. The first does not count: it finds the caches as another contender left them."""
    run()
    times = []
    for _ in range(BLOCK - 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def report(title: str, shape: Shape, processes: int, rows: Sequence[str]) -> None:
    """Print one table."""
    found: list[list[Cost]] = []
    for _ in range(processes):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found.append(pool.submit(measure, shape, rows).result())
    actions = 2 * STAGES * CHUNKS
    stages = f"{STAGES} stages of {shape.depth} x {shape.described}, {CHUNKS} chunks of {shape.rows} rows"
    print(f"\n{title}: {stages}; {processes} processes, each {shape.rounds} rounds of {BLOCK - 1} runs\n")
    print("| call | checkpoint | ms | over the loop by hand | in its order | us/action | torchgpipe's time over ours |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row, costs in zip(rows, zip(*found, strict=True), strict=True):
        ratios = sorted(each.hand for each in costs)
        spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        more = statistics.median(each.more for each in costs) / actions * 1e6
        ordered = _median([each.order for each in costs], 3)
        peer = _median([each.peer for each in costs], 2)
        ms = statistics.median(each.seconds for each in costs) * 1e3
        print(f"| {row.replace('/', ' | ')} | {ms:.2f} | {spread} | {ordered} | {more:.0f} | {peer} |", flush=True)


class Checkpointed(NamedTuple):
    """What checkpointing costs, in one process: medians over pairs of runs."""

    ours: float  # seconds of a forward and backward
    torchs: float
    ratio: float


def checkpointed(shape: Shape, dropout: float) -> Checkpointed:
    """A forward and backward of blocks that are checkpointed, by us and by torch."""
    torch.set_num_threads(shape.threads)
    blocks, x, y = build(shape.family, shape.size, shape.depth, shape.rows)
    model = nn.Sequential(*[nn.Sequential(block, nn.Dropout(dropout)) if dropout else block for block in blocks])
    ours = copy.deepcopy(model)
    checkpoint_blocks(ours, lambda name, _: name.isdigit())

    def by_hand() -> None:
        value = x
        for block in model:
            value = checkpoint(block, value, use_reentrant=False)
        mean_square(value, y).backward()

    runs = cleared(ours, lambda: mean_square(ours(x), y).backward()), cleared(model, by_hand)
    pairs = []
    for number in range(WARM + shape.rounds):
        first = number % 2
        pair = {which: cpu_time(runs[which]) for which in (first, 1 - first)}
        pairs.append((pair[0], pair[1]))
    found = pairs[WARM:]
    one, other = (statistics.median(seconds) for seconds in zip(*found, strict=True))
    return Checkpointed(one, other, statistics.median(one / other for one, other in found))


def cpu_time(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def report_checkpointed(shapes: Sequence[Shape], processes: int) -> None:
    """Print the table of checkpointed blocks."""
    rounds, depth = shapes[0].rounds, shapes[0].depth
    print(f"\ncheckpoint_blocks: {depth} {shapes[0].size} blocks, {processes} processes, each {rounds} pairs of runs\n")
    print("| blocks | dropout | ms | torch's checkpoint, ms | over torch's checkpoint |")
    print("| --- | --- | --- | --- | --- |")
    for shape in shapes:
        for dropout in (0.0, 0.1):
            found = []
            for _ in range(processes):
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                    found.append(pool.submit(checkpointed, shape, dropout).result())
            ratios = sorted(each.ratio for each in found)
            spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            ours, torchs = (statistics.median(times) * 1e3 for times in list(zip(*found, strict=True))[:2])
            print(f"| {shape.family} | {dropout or '-'} | {ours:.2f} | {torchs:.2f} | {spread} |", flush=True)


def _median(ratios: Sequence[float | None], digits: int) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{statistics.median(known):.{digits}f}" if known else "-"


def main() -> None:
    sys.path.append(sys.path.pop(0))  # behind the packages: the torchgpipe.py beside this file is not the one meant
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, one process")
    parser.add_argument("--processes", type=int, default=5, help="how many to take the median of (default: 5)")
    parser.add_argument("--malloc", choices=("keeps", "default"), default="keeps", help="free memory (default: keeps)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--blocks", choices=("small", "large"), help="models as users write them")
    families = [*FAMILIES, *HUGGING_FACE]
    tables = ("tiny", "one", "four", *families, "checkpoint_blocks")
    parser.add_argument("--table", choices=tables, action="append", help="only this table")
    parser.add_argument("--row", choices=ROWS, action="append", help="only this row of each")
    parser.add_argument("--rounds", type=int, help="how many, where the table's own number is too noisy")
    options = parser.parse_args()
    if "checkpoint_blocks" in (options.table or ()) and not options.blocks:
        parser.error("--table checkpoint_blocks is one of --blocks small or large")
    warnings.simplefilter("ignore")
    if options.malloc == "keeps":
        os.environ.update(KEEPING)  # for the processes that are started from here
    kept = f"malloc {options.malloc}" + " what is free" * (options.malloc == "keeps")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {options.threads} thread(s), {kept}")
    quick, threads = options.quick, options.threads
    processes = 1 if quick else options.processes
    shapes = {
        "tiny": ("tiny layers", Shape(64, 16, 1, 20 if quick else 60, threads)),
        "one": ("big layers, one in a stage", Shape(1024, 128, 1, 4 if quick else 13, threads)),
        "four": ("big layers, four in a stage", Shape(1024, 128, 4, 2 if quick else 5, threads)),
    }
    if options.blocks:
        rows, depth, rounds = (2, 4, 20) if options.blocks == "small" else (2, 1, 5)
        shapes = {
            family: ("as users write them", Shape(0, rows, depth, rounds, threads, family, options.blocks))
            for family in families
        }
    for name in options.table or shapes:
        if name == "checkpoint_blocks":
            depth, rounds = (8, 200) if options.blocks == "small" else (2, 15)
            own = [shapes[family][1] for family in FAMILIES]
            timed = [shape._replace(depth=depth, rounds=options.rounds or rounds) for shape in own]
            report_checkpointed(timed, processes)
            continue
        if name in HUGGING_FACE and not importlib.util.find_spec("transformers"):
            print(f"\n{name}: transformers is not installed")
            continue
        title, shape = shapes[name]
        report(title, shape._replace(rounds=options.rounds or shape.rounds), processes, options.row or ROWS)


if __name__ == "__main__":
    main()
