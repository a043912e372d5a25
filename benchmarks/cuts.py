"""The slowest stage over the best possible one, and the time to find it, beside torchgpipe's and DeepSpeed's way.

    python benchmarks/cuts.py             some two minutes
    python benchmarks/cuts.py --quick

    torchgpipe   torchgpipe.balance.blockpartition.solve (0.0.7; fairscale has the same file)
    DeepSpeed    the smallest difference of the largest and the smallest part, by dynamic programming over parts and
                 ends, as partition_balanced in its runtime/utils.py; written anew, as it comes with all of DeepSpeed

Layer costs are random: uniform, nearly equal as the blocks of a transformer are, and heavy-tailed. The best possible is
that of `balance_costs`, exact integer arithmetic; in the second table that of all balances. That one has memory caps,
with as many chunks in flight in a stage as 1F1B has there, and says how many of the balances of each fit. Seconds are
those of the processor.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations

from partition import StageSpec, balance_costs
from partition.cuts.cutting import cut_layers
from partition.cuts.layers import Layers, amounts_of
from partition.cuts.windows import DeviceStages, HeldChunks
from partition.profiles.amounts import Bytes

Solver = Callable[[Sequence[float], int], list[int]]

COSTS: dict[str, Callable[[random.Random], float]] = {
    "uniform 1 to 100": lambda source: source.uniform(1, 100),
    "nearly equal, 95 to 105": lambda source: source.uniform(95, 105),
    "heavy tail, Pareto 1.2": lambda source: source.paretovariate(1.2),
    "equal": lambda source: 1.0,
}
SIZES = [(24, 4), (48, 8), (100, 8)]


def ours(costs: Sequence[float], stages: int) -> list[int]:
    return cut_layers(Layers(costs), [StageSpec()] * stages)


def torchgpipes(costs: Sequence[float], stages: int) -> list[int]:
    from torchgpipe.balance.blockpartition import solve

    return [len(block) for block in solve(list(costs), stages)]


def deepspeeds(costs: Sequence[float], stages: int) -> list[int]:
    """(largest - smallest part, largest, smallest, balance) of the first layers, for one part more each time."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    layers = len(costs)
    best = [(0.0, total, total, [stop]) for stop, total in enumerate(sums)]
    for part in range(2, stages + 1):
        new = []
        for stop in range(layers + 1):
            found = (float("inf"), 0.0, 0.0, list[int]())
            for start in range(part - 1, stop):
                _, most, least, balance = best[start]
                size = sums[stop] - sums[start]
                spread = max(most, size) - min(least, size)
                if spread < found[0]:
                    found = spread, max(most, size), min(least, size), [*balance, stop - start]
            new.append(found)
        best = new
    return best[layers][3]


def slowest(balance: Sequence[int], costs: Sequence[float], fits: Callable[[int, slice], bool] | None = None) -> float:
    """The time of the slowest stage; inf where one does not fit."""
    ends = list(accumulate(balance))
    parts = [slice(stop - size, stop) for stop, size in zip(ends, balance)]
    if fits is not None and not all(fits(stage, part) for stage, part in enumerate(parts)):
        return float("inf")
    return max(sum(costs[part]) for part in parts)


def quality(rounds: int) -> None:
    """Print the first table."""
    print("\nSlowest stage over the best: mean / worst / share of instances where it is the best; median ms\n")
    print("| layer costs | layers, stages | ours | torchgpipe | DeepSpeed |\n| --- | --- | --- | --- | --- |")
    for name, draw in COSTS.items():
        for layers, stages in SIZES:
            source = random.Random(0)
            instances = [[draw(source) for _ in range(layers)] for _ in range(1 if name == "equal" else rounds)]
            cells = []
            for solver in (ours, torchgpipes, deepspeeds):
                ratios, seconds = [], []
                for costs in instances:
                    begun = time.process_time()
                    balance = solver(costs, stages)
                    seconds.append(time.process_time() - begun)
                    ratios.append(slowest(balance, costs) / slowest(balance_costs(costs, stages), costs))
                share = sum(ratio < 1 + 1e-12 for ratio in ratios) / len(ratios)
                cells.append(f"{statistics.mean(ratios):.3f} / {max(ratios):.3f} / {share:.0%}; "
                             f"{statistics.median(seconds) * 1e3:.2f}")
            print(f"| {name} | {layers}, {stages} | {' | '.join(cells)} |", flush=True)


def capped(rounds: int, layers: int = 12, stages: int = 4, chunks: int = 8) -> None:
    """Print the second table: beside all balances, under memory caps."""
    source = random.Random(1)
    fits, optimal, possible = {solver.__name__: 0 for solver in (ours, torchgpipes, deepspeeds)}, 0, 0
    for _ in range(rounds):
        costs = [source.uniform(1, 100) for _ in range(layers)]
        state, saved = ([source.randint(1, most) for _ in costs] for most in (50, 20))
        cap = (sum(state) + 2.5 * sum(saved)) / stages * source.uniform(0.9, 1.5)
        kept = [min(chunks, stages - stage) for stage in range(stages)]
        lanes = [DeviceStages((stage,), cap, ((HeldChunks(count),),)) for stage, count in enumerate(kept)]
        given = Layers(costs, *(amounts_of(list(map(Bytes, sizes))) for sizes in (state, saved)))

        def fits_in(stage: int, part: slice) -> bool:
            return sum(state[part]) + kept[stage] * sum(saved[part]) <= cap

        every = [[b - a for a, b in zip((0, *cuts), (*cuts, layers))]
                 for cuts in combinations(range(1, layers), stages - 1)]  # fmt: skip
        best = min(slowest(balance, costs, fits_in) for balance in every)
        if best == float("inf"):
            continue
        possible += 1
        found = slowest(cut_layers(given, [StageSpec()] * stages, (), lanes), costs, fits_in)
        optimal += found <= best * (1 + 1e-12)
        fits["ours"] += found < float("inf")
        for solver in (torchgpipes, deepspeeds):
            fits[solver.__name__] += slowest(solver(costs, stages), costs, fits_in) < float("inf")
    print(f"\n{layers} layers, {stages} stages, {chunks} chunks under 1F1B, memory caps: {rounds} instances, "
          f"{possible} that fit at all\n")
    print("| | ours | torchgpipe | DeepSpeed |\n| --- | --- | --- | --- |")
    print(f"| balances that fit | {' | '.join(f'{count} of {possible}' for count in fits.values())} |")
    print(f"| the best of all balances | {optimal} of {possible} | | |")


def large(rounds: int, layers: int = 1000, stages: int = 64) -> None:
    """Print the third table."""
    print(f"\n{layers} layers over {stages} stages, median ms (range) of {rounds}\n")
    print("| layer costs | ours | ours, with messages and memory caps | torchgpipe |\n| --- | --- | --- | --- |")
    for name, draw in list(COSTS.items())[:3]:
        source = random.Random(2)
        costs = [draw(source) for _ in range(layers)]
        saved = amounts_of([Bytes(6, ((i, 3), (i + 1, 3))) for i in range(layers)])
        given = Layers(costs, amounts_of([Bytes(5)] * layers), saved)
        room = 3 * layers // stages
        specs = [StageSpec()] * stages
        lanes = [DeviceStages((stages - kept,), room * (5 + 9.0 * kept), ((HeldChunks(kept),),))
                 for kept in range(stages, 0, -1)]  # fmt: skip
        messages = [[source.uniform(0, 5) for _ in range(layers + 1)]] * (stages - 1)
        cells = []
        for run in (lambda: ours(costs, stages), lambda: cut_layers(given, specs, messages, lanes),
                    lambda: torchgpipes(costs, stages)):  # fmt: skip
            seconds = []
            for _ in range(rounds):
                begun = time.process_time()
                run()
                seconds.append((time.process_time() - begun) * 1e3)
            cells.append(f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    sys.path.append(sys.path.pop(0))  # behind the packages: a file beside this one is called torchgpipe, too
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer instances")
    rounds = 3 if parser.parse_args().quick else 60
    if importlib.util.find_spec("torchgpipe") is None:
        parser.exit(1, "torchgpipe is not installed: pip install torchgpipe==0.0.7\n")
    quality(rounds)
    capped(5 * rounds)
    large(max(3, rounds // 6))


if __name__ == "__main__":
    main()
