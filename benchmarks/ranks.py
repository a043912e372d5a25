"""How fast is a step over two ranks, beside torch.distributed.pipelining and beside what no schedule can beat?

    python benchmarks/ranks.py                 big and tiny layers under five schedules; some five minutes
    python benchmarks/ranks.py --quick         fewer rounds; under a minute
    python benchmarks/ranks.py --only torch    without us (or --only ours: without torch)
    python benchmarks/ranks.py --blocks small [--shapes gpt ...] [--schedules 1f1b ...] [--rounds 31]
                                               models as users write them, launch-bound (large: compute-bound)
    python benchmarks/ranks.py --profile       where does the time of a step of tiny layers go?

Two processes on one machine, each pinned to a core, with one torch thread, float32, gloo. In the same two processes
and with the same parameters, all contenders take turns; first each one's loss and gradients are compared with the plain
module's, to 1e-5. A step begins on both ranks at the same moment and ends when the later of them has its gradients; it
computes forwards, losses and backwards of one mini-batch, everything kept, nothing recomputed; no optimizer, and
gradients are let go between steps, outside the clock. A turn is several steps of which the first does not count (it
finds the caches as another left them) and the median of the others does; a ratio is of two turns of one round. Tables
have medians over rounds, with the first and third quartile. Every row has two processes of its own.

A step of ours does two things that one of torch's does not: all ranks agree that it went well before any gradient
reaches a parameter, and all know the loss. Steps number 1, 2, 4, 8, ... look at more; medians leave them out.

The bound: each rank computes only its own forwards and backwards, in its order, by a hand-written loop on given inputs
and gradients, without a message, both ranks at a time; the slower rank's time, times what the schedule must wait:
(chunks + 1) / chunks with GPipe and 1F1B on two ranks, where each waits at least for one forward and one backward of
the other. (For the other schedules as simulated with F, I and W of one length; the loop does not split backwards.)
While a rank waits, the other has the machine's memory and clock for itself, so slightly less is possible.

CPU: processor time of both processes during a step, gloo's threads among it. It says more than the clock where others
use the machine, but waiting costs none.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, before torch looks
os.environ.setdefault("RES_OPTIONS", "timeout:1")  # or reverse lookups by the store may hold up a start for seconds

from models.blocks import FAMILIES  # noqa: E402
from ranks_contenders import PEERS, Shape, contenders, idle_factor, prepared, zero_grad  # noqa: E402
from ranks_launch import RANKS, Failed, Pair, machine, start_together  # noqa: E402
from ranks_profile import report_profile  # noqa: E402

from scheduler import by_name  # noqa: E402

SHAPES = {
    "big": Shape(width=1024, depth=8, chunks=8, rows=32),
    "tiny": Shape(width=64, depth=4, chunks=32, rows=16),
    "large": Shape(width=1024, depth=8, chunks=8, rows=256),  # only by --shapes: some twenty minutes
}
BLOCKS = {
    size: {family: Shape(0, depth, 8, 2, family, size) for family in FAMILIES}
    for size, depth in (("small", 8), ("large", 4))
}


class Took(NamedTuple):
    """What a step took on a rank, in seconds."""

    clock: float  # from the common start until this rank was done
    cpu: float  # of all threads of the process


Times = dict[str, list[list[Took]]]  # contender -> rounds of steps


def measure(shape: Shape, schedule: str, names: list[str], rounds: int, steps: int) -> Times:
    """On a rank: what each step of each round took."""
    case, found = prepared(shape, schedule, names, warm=4)
    times: Times = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else names[::-1]:
            turn = []
            for _ in range(steps + 1):
                zero_grad(case)
                begin = start_together()
                cpu = time.process_time()
                found[name].step()
                turn.append(Took(time.perf_counter() - begin, time.process_time() - cpu))
            times[name].append(turn[1:])
    return times


def of_rounds(ranks: Sequence[Times], name: str) -> list[Took]:
    """A step in each round: until the later rank was done, and the processor time of both."""
    rounds = []
    for turns in zip(*(times[name] for times in ranks), strict=True):
        steps = [[*zip(*step, strict=True)] for step in zip(*turns, strict=True)]
        rounds.append(Took(statistics.median(max(clocks) for clocks, _ in steps),
                           statistics.median(sum(cpus) for _, cpus in steps)))  # fmt: skip
    return rounds


def spread(values: Sequence[float], digits: int = 3) -> str:
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def over(times: dict[str, list[float]], upper: str, lower: str) -> str:
    if upper not in times or lower not in times:
        return "-"
    return spread([one / other for one, other in zip(times[upper], times[lower], strict=True)])


def row(shape: Shape, schedule: str, ranks: Sequence[Times]) -> str:
    """The columns after the schedule's name."""
    found = {name: of_rounds(ranks, name) for name in ranks[0]}
    times = {name: [took.clock for took in rounds] for name, rounds in found.items()}
    cpus = {name: [took.cpu for took in rounds] for name, rounds in found.items()}
    factor = idle_factor(by_name(schedule, RANKS, shape.chunks))
    times["bound"] = [clock * factor for clock in times.pop("alone")]
    medians = {name: f"{statistics.median(each) * 1e3:.2f}" for name, each in times.items()}
    ms = [medians.get(name, "-") for name in ("ours", "torch", "bound")]
    ratios = [over(times, *each) for each in (("ours", "torch"), ("ours", "bound"), ("torch", "bound"))]
    return " | ".join([*ms, *ratios, over(cpus, "ours", "torch"), over(cpus, "ours", "alone")])


def report(
    name: str, shape: Shape, schedules: Sequence[str], rounds: int, steps: int, only: str | None, fresh: bool,
    verbose: bool,
) -> None:  # fmt: skip
    """Print the table of one shape."""
    print(f"\n{name} layers: {shape}; {rounds} rounds of {steps} steps\n")
    print("| schedule | ours, ms | torch, ms | bound, ms | ours / torch | ours / bound | torch / bound "
          "| CPU, ours / torch | CPU, ours / by hand |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with Pair(verbose) as pair:
        for schedule in schedules:
            names = contenders(only)
            try:
                columns = row(shape, schedule, pair.call(measure, shape, schedule, names, rounds, steps, seconds=600))
            except Failed as failure:
                columns = each_alone(pair, shape, schedule, names, rounds, steps)
                columns = f"{columns} | {failure}"
            print(f"| {schedule} | {columns} |", flush=True)
            if fresh:
                pair.close()


def each_alone(pair: Pair, shape: Shape, schedule: str, names: Sequence[str], rounds: int, steps: int) -> str:
    """Where they cannot run together: which of them can."""
    found = []
    for name in ("ours", "torch", "alone"):
        try:
            if name in names:
                ranks = pair.call(measure, shape, schedule, [name], rounds, steps, seconds=120)
                found.append(f"{statistics.median(took.clock for took in of_rounds(ranks, name)) * 1e3:.2f}")
            else:
                found.append("-")
        except Failed:
            found.append("cannot run")
    return " | ".join([*found, *"-----"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds; a table's rows share two processes")
    parser.add_argument("--rounds", type=int, help="how many (default: 31; 7 with --blocks)")
    parser.add_argument("--blocks", choices=BLOCKS, help="models as users write them, launch-bound or compute-bound")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, *FAMILIES], help="which layers (default: big and "
                        "tiny; with --blocks all kinds)")  # fmt: skip
    parser.add_argument("--schedules", nargs="+", choices=PEERS, help="which schedules (default: all)")
    parser.add_argument("--only", choices=("ours", "torch"), help="leave the other out")
    parser.add_argument("--profile", action="store_true", help="where the time goes (default: tiny, 1f1b)")
    parser.add_argument("--rank", type=int, choices=(0, 1), default=0, help="whose functions --profile tells")
    parser.add_argument("--verbose", action="store_true", help="show what the ranks write to stderr")
    options = parser.parse_args()
    print(machine())
    shapes = BLOCKS[options.blocks] if options.blocks else SHAPES
    names = options.shapes or (list(shapes) if options.blocks else ["big", "tiny"])
    if not shapes.keys() >= set(names):
        parser.error(f"--shapes: {' and '.join(FAMILIES)} are for --blocks, and {' and '.join(SHAPES)} without it")
    if options.profile:
        for name in options.shapes or names[-1:]:
            for schedule in options.schedules or ["1f1b"]:
                count = 40 if options.quick else 200
                report_profile(shapes[name], schedule, count, options.rank, 50, options.verbose)
        return
    rounds = options.rounds or (3 if options.quick else 7 if options.blocks else 31)
    steps = 1 if options.quick else 3
    for name in names:
        schedules = options.schedules or list(PEERS)
        report(name, shapes[name], schedules, rounds, steps, options.only, not options.quick, options.verbose)


if __name__ == "__main__":
    main()
