"""How long does it take to plan a step? Beside torch, at growing sizes, and for a thousand lanes.

    python benchmarks/planning.py            all three tables, about ten minutes
    python benchmarks/planning.py --quick    smaller sizes, fewer rounds

    ours     build the orders of all lanes  ->  verify  ->  lower: place the messages
    torch    build the orders of all ranks  ->  _add_unshard_reshard, _add_reduce_grad  ->  _add_send_recv

Both make interleaved 1F1B with two stages a lane, for all lanes, as torch does on every rank when a schedule is
constructed. torch's functions are private; they are called on an object made without its constructor, which would want
real stages. Its own check of the orders (_validate_schedule) is left out, ours is in. Its actions for sharded stages
(UNSHARD, RESHARD, REDUCE_GRAD) have no counterpart here, so the last column leaves the time for them out. Orders and
messages are first compared: they are the same.

Seconds are those of the processor: nothing here waits or uses a second core, and machines are shared. The two run in
turns, in one process, another first each round, each after a garbage collection. Growth and the large steps are
measured in fresh processes without torch.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeVar

from scheduler import Program, by_name, lower, simulate, verify
from scheduler.schedules.interleaved import build

STAGES_PER_LANE = 2
SIZES = [(8, 64), (16, 128), (32, 256), (64, 512)]
GROWING = [(8, 64), (16, 128), (32, 256), (64, 512), (128, 1024), (8, 4096), (512, 64)]
STEPS = [("1f1b", 1024, 4096), ("zb-h1", 1024, 4096)]

Result = TypeVar("Result")


class Planned(NamedTuple):
    """A plan, and the seconds that each of the three phases took."""

    seconds: tuple[float, float, float]
    orders: list[Sequence[Any]]


class Step(NamedTuple):
    """One simulated step: seconds to build and to simulate it, and the most memory of the process."""

    actions: int
    build: float
    simulate: float
    peak_gib: float
    bubble: float


def ours(lanes: int, chunks: int) -> Planned:
    """Build, verify, lower; `build` is what `by_name` calls, which keeps what it has built."""
    clock = Clock()
    schedule = build(lanes, chunks, STAGES_PER_LANE)
    clock.lap()
    verify(schedule)
    clock.lap()
    program: Program = lower(schedule)
    clock.lap()
    return Planned(clock.laps(), list(program.orders))


def torchs(lanes: int, chunks: int) -> Planned:
    """What ScheduleInterleaved1F1B and _PipelineScheduleRuntime do in their constructors, without their checks."""
    from torch.distributed.pipelining import schedules

    schedule = object.__new__(schedules.ScheduleInterleaved1F1B)
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = lanes, STAGES_PER_LANE, chunks
    schedule.number_of_rounds = max(1, chunks // lanes)
    schedule.microbatches_per_round = chunks // schedule.number_of_rounds
    clock = Clock()
    orders: dict[int, Any] = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(lanes)}
    clock.lap()
    for rank in orders:
        sharded: list[Any] = schedules._add_unshard_reshard(orders[rank])
        orders[rank] = schedules._add_reduce_grad(sharded, chunks)
    clock.lap()
    with_messages = schedules._add_send_recv(orders, lambda stage: stage % lanes, lanes * STAGES_PER_LANE)
    clock.lap()
    return Planned(clock.laps(), [with_messages[rank] for rank in range(lanes)])


class Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        gc.collect()
        self._times = [time.process_time()]

    def lap(self) -> None:
        self._times.append(time.process_time())

    def laps(self) -> tuple[float, float, float]:
        first, second, third = (after - before for before, after in zip(self._times, self._times[1:]))
        return first, second, third


def refuse_unless_same(lanes: int, chunks: int) -> int:
    """Compares what the two have made: what each lane computes, in order, and which messages it sends and receives.

    Returns:
        How many actions there are, messages included.
    """
    actions = 0
    for mine, theirs in zip(ours(lanes, chunks).orders, torchs(lanes, chunks).orders, strict=True):
        words = [list(map(str, order)) for order in (mine, theirs)]
        words[1] = [word for word in words[1] if not any(extra in word for extra in ("SHARD", "REDUCE_GRAD"))]
        computed = [[word for word in each if "_" not in word] for each in words]
        if computed[0] != computed[1] or sorted(words[0]) != sorted(words[1]):
            raise AssertionError(f"the plans for {lanes} lanes and {chunks} chunks are not the same")
        actions += len(mine)
    return actions


def beside_torch(sizes: Iterable[tuple[int, int]], rounds: int) -> None:
    """Print the first table."""
    print(f"\nInterleaved 1F1B, {STAGES_PER_LANE} stages a lane, all lanes; median (range) of {rounds} round(s)\n")
    print("| lanes x chunks | actions | ours, ms | build, verify, lower | torch, ms | build, shard, send | "
          "torch's time over ours | without shard |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for lanes, chunks in sizes:
        actions = refuse_unless_same(lanes, chunks)
        taken: dict[Callable[[int, int], Planned], list[tuple[float, float, float]]] = {ours: [], torchs: []}
        for number in range(rounds):
            for contender in (ours, torchs)[:: 1 if number % 2 else -1]:
                taken[contender].append(contender(lanes, chunks).seconds)
        pairs = list(zip(taken[ours], taken[torchs], strict=True))
        cells = [
            f"{lanes} x {chunks}", f"{actions}",
            spread([sum(each) * 1e3 for each in taken[ours]]), phases(taken[ours]),
            spread([sum(each) * 1e3 for each in taken[torchs]]), phases(taken[torchs]),
            spread([sum(theirs) / sum(mine) for mine, theirs in pairs]),
            spread([(theirs[0] + theirs[2]) / sum(mine) for mine, theirs in pairs]),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def growth(sizes: Iterable[tuple[int, int]], rounds: int) -> None:
    """Print the second table."""
    print("\nOurs at growing sizes, each in a fresh process\n")
    print("| lanes x chunks | chunks x stages | actions | ms | us an action | without garbage collection |")
    print("| --- | --- | --- | --- | --- | --- |")
    for lanes, chunks in sizes:
        actions, seconds = fresh(planned, lanes, chunks, rounds, True)
        _, bare = fresh(planned, lanes, chunks, rounds, False)
        cells = (
            f"{lanes} x {chunks}", f"{chunks * lanes * STAGES_PER_LANE}", f"{actions}",
            spread([each * 1e3 for each in seconds]),
            *(spread([each / actions * 1e6 for each in which]) for which in (seconds, bare)),
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def planned(lanes: int, chunks: int, rounds: int, collect: bool) -> tuple[int, list[float]]:
    """How many actions there are, and the seconds of each round."""
    if not collect:
        gc.disable()
    seconds = [sum(ours(lanes, chunks).seconds) for _ in range(rounds)]
    return sum(map(len, ours(lanes, chunks).orders)), seconds


def steps(which: Iterable[tuple[str, int, int]], rounds: int) -> None:
    """Print the third table."""
    print("\nOne step, built and simulated, each time in a fresh process\n")
    print("| schedule | lanes x chunks | actions | build, s | simulate, s | peak memory, GiB | bubble |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, lanes, chunks in which:
        found = [fresh(step, name, lanes, chunks) for _ in range(rounds)]
        cells = (
            name, f"{lanes} x {chunks}", f"{found[0].actions}", spread([each.build for each in found]),
            spread([each.simulate for each in found]), f"{max(each.peak_gib for each in found):.2f}",
            f"{found[0].bubble:.4f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def step(name: str, lanes: int, chunks: int) -> Step:
    start = time.process_time()
    schedule = by_name(name, lanes, chunks)
    built = time.process_time()
    timeline = simulate(schedule)
    bubble, after = timeline.bubble, time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    return Step(len(timeline.events), built - start, after - built, peak, bubble)


def fresh(work: Callable[..., Result], *given: object) -> Result:
    """The result of `work`, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def spread(values: Sequence[float]) -> str:
    """Median, and the smallest and largest."""
    middle, least, most = map(short, (statistics.median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({least} to {most})"


def phases(seconds: Sequence[tuple[float, float, float]]) -> str:
    """The median of each phase, in ms."""
    return ", ".join(short(statistics.median(phase) * 1e3) for phase in zip(*seconds))


def short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer rounds")
    parser.add_argument("--rounds", type=int, default=5, help="how many to take the median of (default: 5)")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy"))
    print(f"{packages}, Python {platform.python_version()}, one process on a machine with {os.cpu_count()} cores")
    beside_torch(SIZES[:3] if options.quick else SIZES, rounds)
    growth(GROWING[:3] if options.quick else GROWING, rounds)
    steps([("1f1b", 256, 1024)] if options.quick else STEPS, min(rounds, 3))


if __name__ == "__main__":
    main()
