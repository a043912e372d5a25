"""How long do ranks take to connect, with how many threads and sockets, and how does that grow?

    python benchmarks/ranks_build.py                          16 ranks: building a Pipe, and a step
    python benchmarks/ranks_build.py --beside ../before       the same, taking turns with another checkout
    python benchmarks/ranks_build.py --count                  connections, messages and communicators to 512 ranks

All ranks are processes of one machine, forked from one that has imported the package, over gloo. Building is what the
first Pipe of a process group does: the monitor, the connections, the agreement on the settings. It is repeated with new
ranks in the same processes (another `timeout`), and a step of one small layer a rank is run many times. A time is that
of the slowest rank; processor time is the sum over the ranks, and says more where they share a few cores. Threads and
sockets are those that the first Pipe adds to a process, the most of any rank. Medians over all repetitions.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RES_OPTIONS", "timeout:1")  # or reverse lookups by the store may hold up a start for seconds

ROOT = Path(__file__).parent.parent
STEPS = 20


def measured(rank: int, ranks: int, port: int, builds: int) -> list[dict[str, float]]:
    """On a rank: what each building took, and a step after it."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from pipeline import Pipe

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timedelta(seconds=300))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    x, y = torch.randn(ranks, 4), torch.randn(ranks, 4)
    pipes, found = [], []
    for build in range(builds):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(ranks)])
        dist.barrier()
        before = threads(), sockets()
        wall, cpu = timed(lambda: pipes.append(Pipe(model, [1] * ranks, 2, timeout=300.0 + build)))
        now = threads(), sockets()
        step = lambda: pipes[-1].step(x, y, loss_fn=nn.functional.mse_loss)  # noqa: E731
        step()
        dist.barrier()
        step_wall, step_cpu = timed(lambda: [step() for _ in range(STEPS)])
        found.append({
            "build, s": wall, "build, CPU s": cpu, "step, ms": step_wall / STEPS * 1e3,
            "step, CPU ms": step_cpu / STEPS * 1e3, "threads": now[0] - before[0], "sockets": now[1] - before[1],
        })  # fmt: skip
    dist.barrier()
    return found


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and seconds of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def sockets() -> int:
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))


def all_ranks(ranks: int, builds: int) -> list[dict[str, float]]:
    """In a process of its own: fork the ranks, and join what they measured."""
    import pipeline  # noqa: F401 (once for all ranks)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context, ends = multiprocessing.get_context("fork"), []
    for rank in range(ranks):
        here, there = context.Pipe()
        ends.append(here)
        context.Process(target=_rank, args=(there, rank, ranks, port, builds), daemon=True).start()
    found = [end.recv() for end in ends]
    for end in ends:
        end.send("all are done")
    rows = []
    for build in zip(*found, strict=True):
        sums = {name: sum(one[name] for one in build) for name in build[0] if "CPU" in name}
        rows.append({name: max(one[name] for one in build) for name in build[0]} | sums)
    return rows


def _rank(end: Any, *args: int) -> None:
    end.send(measured(*args))
    end.recv()
    os._exit(0)


def turn(root: Path, ranks: int, builds: int) -> list[dict[str, float]]:
    """One turn of a checkout."""
    command = [sys.executable, __file__, "--inside", "--ranks", str(ranks), "--builds", str(builds)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(root)}, cwd=root, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise SystemExit(f"{root} failed:\n{done.stderr[-2000:]}")
    rows: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def report(roots: dict[str, Path], ranks: int, turns: int, builds: int) -> None:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in roots}
    for number in range(turns):
        for name in [*roots] if number % 2 else [*roots][::-1]:
            rows = turn(roots[name], ranks, builds)
            for row in rows[1:]:
                row.update(threads=rows[0]["threads"], sockets=rows[0]["sockets"])  # later ones find some
            found[name] += rows
    columns = list(next(iter(found.values()))[0])
    print(f"{ranks} ranks, {turns} turns of {builds} buildings; medians\n")
    print(f"| | {' | '.join(columns)} |")
    print(f"| --- |{' --- |' * len(columns)}")
    for name, rows in found.items():
        medians = [statistics.median(row[column] for row in rows) for column in columns]
        print(f"| {name} | {' | '.join(f'{median:.3g}' for median in medians)} |")


def count() -> None:
    """Print what a line of n ranks has, from the tree and the plan alone."""
    from pipeline.distributed.tree import place_in_tree, tree_pairs

    print("| ranks | channels, all | channels, most of a rank | messages of a step, all "
          "| sends of a step, most of a rank | turns of an exchange | communicators, most of a rank |")  # fmt: skip
    print(f"| --- |{' --- |' * 6}")
    for ranks in (2, 4, 8, 16, 64, 512):
        line = {pair for rank in range(ranks - 1) for pair in ((rank, rank + 1), (rank + 1, rank))}
        ends = [(rank, end) for rank in range(ranks) for end in (0, ranks - 1) if rank != end]
        hub = line | {pair for one, other in ends for pair in ((one, other), (other, one))}
        tree, deepest = line | set(tree_pairs(ranks)), ranks - 1
        levels = 0
        while (parent := place_in_tree(deepest, ranks).parent) is not None:
            deepest, levels = parent, levels + 1
        direct = ranks <= 3
        before = (ranks * (ranks - 1) if direct else 2 * (ranks - 1)) * 2, 2 * (ranks - 1), 1 if direct else 2
        sends = 2 * max(len(place_in_tree(rank, ranks).neighbours) for rank in range(ranks))
        after = 4 * (ranks - 1), sends, 2 * levels
        for name, pairs, (all_sent, most_sent, turns), carried in (
            ("a hub", hub, before, hub), ("the tree", tree, after, line)
        ):  # fmt: skip
            print(f"| {ranks}, {name} | {len(pairs)} | {most(pairs, ranks)} | {all_sent} | {most_sent} | {turns} | "
                  f"{most(carried, ranks)} |")  # fmt: skip


def most(pairs: set[tuple[int, int]], ranks: int) -> int:
    """The most pairs that one rank is in."""
    counts = [0] * ranks
    for one, other in pairs:
        counts[one] += 1
        counts[other] += 1
    return max(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=16, help="how many (default: 16)")
    parser.add_argument("--turns", type=int, default=5, help="processes are started anew so often (default: 5)")
    parser.add_argument("--builds", type=int, default=3, help="in each turn (default: 3)")
    parser.add_argument("--beside", type=Path, help="another checkout, which takes turns with this one")
    parser.add_argument("--count", action="store_true", help="count instead of measuring")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(all_ranks(options.ranks, options.builds)), flush=True)
        return
    if options.count:
        count()
        return
    roots = {"this checkout": ROOT}
    if options.beside is not None:
        roots = {str(options.beside): options.beside.resolve(), **roots}
    report(roots, options.ranks, options.turns, options.builds)


if __name__ == "__main__":
    main()
