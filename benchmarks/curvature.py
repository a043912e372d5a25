"""What does a curvature product cost beside a checkpointed training step, and beside others' products?

    python benchmarks/curvature.py            about five minutes
    python benchmarks/curvature.py --quick    one process, one round

Pre-LN MLP blocks (LayerNorm, Linear(64, 256), GELU, Linear(256, 64), residual), mean squared error over 512 rows,
float32, one thread, all stages on one CPU device, so that no time is won by stages that run at once. And GPT-2 of
transformers with eager attention, cut by `to_sequential`: width 256, 128 tokens, 4 rows.

    step       pipe.step(x, y, loss_fn=loss), checkpoint="always", 1F1B: the gradient, every forward computed twice
    ours       products through the same Pipe; four at once: per product
    others     on the plain module, see curvature_peers.py

Each row is checked first: the Hessian products against the double backward of the plain module, the Gauss-Newton
products against each other. The column "error" says what that found.

Times: contenders run in turns, in another order each round. A ratio is that of two times of one round; a process gives
the median over its rounds, the table the median over processes, with the smallest and largest. The first round does not
count. Bytes are those of one call, after enough others: a Pipe looks at more in calls number 1, 2, 4, 8, ...

    saved   storages that autograd's nodes hold, each once, at the most, seen by saved-tensor hooks; parameters, x, y
            and the vectors aside. Inputs that a Pipe keeps to recompute are not there, nor what curvlinops holds:
            torch.func allows no hooks.
    alive   storages that operators have made since the call began and that are not freed yet, at the most, seen by a
            dispatch mode. It holds all of saved, inputs kept to recompute, tangents, gradients and products; not what
            an operator allocates and frees within itself.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from counted_bytes import Bytes, Living, saving
from curvature_peers import peers
from models import hugging_face
from torch import Tensor, nn
from torch.nn import functional

from pipeline import Pipe
from pipeline.curvature import EmpiricalFisher, GaussNewton, Hessian
from pipeline.curvature.operators import Operator

WIDTH, ROWS = 64, 512
STEP, ONE, FOUR, DOUBLE = "checkpointed step", "Hessian", "Hessian, four at once", "Hessian, double backward"
SETTLED = 17  # calls of a Pipe; with those whose bytes are counted fewer than 32
BUDGET_TIME, BUDGET_GAUSS, BUDGET_FOUR, BUDGET_MEMORY, BUDGET_WHOLE = 3.5, 2.2, 2.2, 2.5, 3.0


class Block(nn.Module):
    """x + MLP(LayerNorm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(functional.gelu(self.wide(self.norm(x))))


class Setting(NamedTuple):
    """What is measured."""

    blocks: int
    stages: int
    chunks: int
    others: bool = False  # whether all of them are measured too, or just the double backward
    is_gpt: bool = False

    def __str__(self) -> str:
        what = "blocks of GPT-2" if self.is_gpt else "blocks"
        return f"{self.blocks} {what}, {self.stages} stages, {self.chunks} chunk{'s' * (self.chunks > 1)}"


class Contender(NamedTuple):
    """Makes what runs; what runs returns a product, or nothing; how many products it computes."""

    make: Callable[[], Callable[[], Any]]
    products: int = 1


class Row(NamedTuple):
    """What was measured of one contender in one process; bytes and error in the first alone."""

    seconds: list[float]  # by round
    saved: int | None = None
    alive: int = 0
    error: float | None = None


SETTINGS = [
    Setting(12, 4, 4, True), Setting(48, 4, 4, True), Setting(48, 12, 1), Setting(48, 12, 4),
    Setting(4, 4, 4, is_gpt=True),
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- contenders


class Problem:
    """One model with its data and vectors."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(0)
        balance = [setting.blocks // setting.stages] * setting.stages
        if setting.is_gpt:
            built = hugging_face.build("hf-gpt2", "large", setting.blocks, setting.chunks, attention="eager")
            _, self.model, self.x, self.y = built
            balance[0] += 1  # the embedding
            balance[-1] += 1  # norm and head
        else:
            self.model = nn.Sequential(*[Block() for _ in range(setting.blocks)])
            self.x, self.y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        self.pipe = Pipe(self.model.eval(), balance, setting.chunks, checkpoint="always")
        self.loss = nn.MSELoss()
        self.params = list(self.model.parameters())
        self.flat = torch.randn(4, sum(parameter.numel() for parameter in self.params))
        sizes = [parameter.numel() for parameter in self.params]
        parts = zip(self.flat[0].split(sizes), self.params, strict=True)
        self.vector = [part.view_as(parameter) for part, parameter in parts]

    @property
    def aside(self) -> list[Tensor]:
        """What was there before."""
        return [*self.params, self.x, self.y, self.flat]

    def contenders(self, others: bool) -> dict[str, Contender]:
        found = {STEP: Contender(lambda: self._step)}
        found[ONE] = Contender(lambda: self._product(Hessian, 1))
        found[FOUR] = Contender(lambda: self._product(Hessian, 4), 4)
        found["Gauss-Newton"] = Contender(lambda: self._product(GaussNewton, 1))
        found["empirical Fisher"] = Contender(lambda: self._product(EmpiricalFisher, 1))
        for name, make in peers(self.model, self.x, self.y, self.loss, self.vector).items():
            if others or name == DOUBLE:
                found[name] = Contender(make)
        return found

    def _step(self) -> None:
        self.pipe.step(self.x, self.y, loss_fn=self.loss)

    def _product(self, matrix: type[Operator], count: int) -> Callable[[], list[Tensor]]:
        op = matrix(self.pipe, (self.x, self.y), self.loss)
        vectors = [[row] for row in self.flat[:count]]  # one shard: one device
        return lambda: op.products(vectors)[0]

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)


# ---------------------------------------------------------------------------------------------------------------- bytes


def peak(problem: Problem, contender: Contender, kind: Callable[[Bytes], AbstractContextManager[object]]) -> int:
    """The most bytes that one call holds, with what is made before it and kept."""
    gc.collect()  # what PyHessian's gradients held
    count = Bytes(problem.aside)
    with kind(count):
        run = contender.make()
        run()
    problem.clear()
    return count.peak


# ---------------------------------------------------------------------------------------------------------------- times


def measure(rounds: int, is_first: bool) -> list[dict[str, Row]]:
    """All contenders of all settings, in this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return [measured(setting, rounds, is_first) for setting in SETTINGS]


def measured(setting: Setting, rounds: int, is_first: bool) -> dict[str, Row]:
    problem = Problem(setting)
    contenders = problem.contenders(setting.others)
    rows: dict[str, Row] = {}
    for _ in range(SETTLED if is_first else 33):
        problem.contenders(False)[STEP].make()()
    problem.clear()
    if is_first:
        errors = compared(problem, contenders)
        for name, each in contenders.items():
            saved = None if "curvlinops" in name else peak(problem, each, saving)
            rows[name] = Row([], saved, peak(problem, each, Living), errors[name])
    times = timed(problem, contenders, rounds)
    return {name: rows.get(name, Row([]))._replace(seconds=seconds) for name, seconds in times.items()}


def timed(problem: Problem, contenders: dict[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Seconds of each product, by round."""
    runs = {name: contender.make() for name, contender in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for number in range(-1, rounds):  # the first does not count
        for name, run in order.sample(list(runs.items()), len(runs)):
            start = time.perf_counter()
            run()
            if number >= 0:
                times[name].append((time.perf_counter() - start) / contenders[name].products)
            if "kept" not in name:  # its gradients are part of its graph
                problem.clear()
    return times


def compared(problem: Problem, contenders: dict[str, Contender]) -> dict[str, float | None]:
    """How far each product is from the first of its matrix here that is made by torch alone, or by us."""
    found: dict[str, Tensor] = {}
    for name, contender in contenders.items():
        if name != STEP:
            found[name] = torch.cat([part.detach().flatten() for part in contender.make()()]).double()
            problem.clear()
    errors: dict[str, float | None] = {STEP: None}
    for name, product in found.items():
        matrix = name.split(",")[0]
        wanted = found[DOUBLE if matrix == ONE else matrix]
        errors[name] = None if wanted is product else float((product - wanted).norm() / wanted.norm())
    return errors


# --------------------------------------------------------------------------------------------------------------- tables


def ratios(rows: list[dict[str, Row]], name: str, other: str) -> list[float]:
    """Of one contender's time to another's in the same round: the median of each process, sorted."""
    return sorted(
        statistics.median(a / b for a, b in zip(row[name].seconds, row[other].seconds, strict=True)) for row in rows
    )


def report(setting: Setting, rows: list[dict[str, Row]]) -> None:
    """Print one table and the budgets."""
    first = rows[0]
    print(f"\n{setting}: {len(rows)} process(es), each {len(first[STEP].seconds)} rounds\n")
    print("| | ms | time over the step's | saved, MiB | alive, MiB | alive over the step's | error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, row in first.items():
        ms = statistics.median(statistics.median(each[name].seconds) for each in rows) * 1e3
        each = ratios(rows, name, STEP)
        spread = f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})" if name != STEP else "1"
        saved = "-" if row.saved is None else f"{row.saved / 2**20:.1f}"
        error = "-" if row.error is None else f"{row.error:.0e}"
        share = row.alive / first[STEP].alive
        print(f"| {name} | {ms:.0f} | {spread} | {saved} | {row.alive / 2**20:.1f} | {share:.2f} | {error} |")
    verdicts(setting, rows)


def verdicts(setting: Setting, rows: list[dict[str, Row]]) -> None:
    """The budgets, and what was found."""
    first = rows[0]
    saved = [first[name].saved for name in (STEP, ONE, DOUBLE)]
    assert all(saved)  # hooks see all three
    step, one, double = (float(each or 0) for each in saved)
    print()
    for name, most in (ONE, BUDGET_TIME), ("Gauss-Newton", BUDGET_GAUSS), (FOUR, BUDGET_FOUR):
        slower = statistics.median(ratios(rows, name, STEP))
        _line(f"time, {name} over a step", slower, slower <= most, f"at most {most}")
    share = first[ONE].alive / first[STEP].alive
    _line("alive, one product over a step", share, share <= BUDGET_MEMORY, f"at most {BUDGET_MEMORY}")
    _line("saved, one product over a step", one / step, one / step <= BUDGET_MEMORY, f"at most {BUDGET_MEMORY}")
    share = first[DOUBLE].alive / first[ONE].alive
    _line("alive, double backward over one product", share, share >= BUDGET_WHOLE, f"at least {BUDGET_WHOLE}")
    _line("saved, double backward over one product", double / one, double / one >= BUDGET_WHOLE,
          f"at least {BUDGET_WHOLE}")


def _line(what: str, found: float, holds: bool, budget: str) -> None:
    print(f"- {what}: {found:.2f}, {budget}: {'held' if holds else 'NOT HELD'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one process, one round")
    parser.add_argument("--processes", type=int, default=2, help="how many to take the median of (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="in each process (default: 3)")
    options = parser.parse_args()
    processes, rounds = (1, 1) if options.quick else (options.processes, options.rounds)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread, {ROWS} rows, float32")
    found = []
    for number in range(processes):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found.append(pool.submit(measure, rounds, number == 0).result())
    for setting, *rows in zip(SETTINGS, *found, strict=True):
        report(setting, rows)


if __name__ == "__main__":
    main()
