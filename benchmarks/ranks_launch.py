"""How do two processes do the same thing at once, each on a core of its own, and never for ever?

    with Pair() as pair:                  parent ---- TCPStore (as torchrun's agent has it)
        pair.call(work, ...)                |             |
                                          rank 0        rank 1      one core, one torch thread each; gloo
                                            |             |
                                          work(...)     work(...)   --> [result of rank 0, result of rank 1]

Whoever fails or does not answer in time ends both; the next call starts two anew.
"""

from __future__ import annotations

import os
import platform
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2


class Failed(Exception):
    """A rank failed, or both had to be stopped."""


class Pair:
    """Two rank processes that take calls. They start with the first call and end with `close`.

    Args:
        verbose: whether what they write to stderr is shown.
    """

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose
        self._ranks: list[tuple[Any, Connection]] = []
        self._store: dist.TCPStore | None = None

    def call(self, work: Callable[..., Any], *args: Any, seconds: float) -> list[Any]:
        """`work(*args)` on every rank at a time; what it returns, by rank.

        Args:
            work: a function of a module, with arguments that pickle.
            seconds: how long it may take, with the start of the processes.

        Raises:
            Failed: a rank raised, died or did not answer; the last lines of what it said.
        """
        deadline = time.monotonic() + seconds
        try:
            self._ranks = self._ranks or self._start()
            for _, connection in self._ranks:
                connection.send((work, args))
            return self._answers(deadline, seconds)
        except BaseException:
            self.close()
            raise

    def _start(self) -> list[tuple[Any, Connection]]:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < RANKS:
            raise Failed(f"this process may use {len(cores)} core(s) but each of {RANKS} ranks needs its own")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context, ranks = get_context("spawn"), []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._store.port, theirs, self._verbose), daemon=True)
            os.sched_setaffinity(0, {cores[rank]})  # inherited: no thread of the rank ever ran elsewhere
            try:
                process.start()
            finally:
                os.sched_setaffinity(0, cores)
            theirs.close()  # or the end of the process would not be seen
            ranks.append((process, ours))
        return ranks

    def _answers(self, deadline: float, seconds: float) -> list[Any]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        answers: list[Any] = [None] * RANKS
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            found = wait(list(waiting), left)
            ready = [connection for connection in waiting if connection in found]
            if not ready:
                raise Failed(f"no answer of rank {' and '.join(map(str, waiting.values()))} within {seconds:.0f} s")
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    error, answers[rank] = connection.recv()
                except EOFError:
                    raise Failed(f"rank {rank} died (exit code {self._exit_code(rank)})") from None
                if error:
                    raise Failed(f"rank {rank}: {error}")
        return answers

    def _exit_code(self, rank: int) -> int | None:
        process, _ = self._ranks[rank]
        process.join(2)
        code: int | None = process.exitcode
        return code

    def close(self) -> None:
        """End both processes."""
        for _, connection in self._ranks:
            connection.close()
        for process, _ in self._ranks:
            process.join(0.2)
            process.kill()
            process.join()
        self._ranks, self._store = [], None

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _serve(rank: int, port: int, connection: Connection, verbose: bool) -> None:
    """A rank: what torchrun would tell it, then calls until the parent closes."""
    if not verbose:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    try:
        while True:
            work, args = connection.recv()
            connection.send(_answer(work, args))
    except (EOFError, OSError):
        os._exit(0)  # the parent has what it wants; a good-bye to a peer that is gone could wait for ever


def _answer(work: Callable[..., Any], args: Any) -> tuple[str, Any]:
    """What went wrong, in a line, and the result."""
    try:
        return "", work(*args)
    except BaseException as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:300]}", None


def start_together() -> float:
    """Return on all ranks at the same moment, of `perf_counter`: Linux has one such clock for all processes."""
    latest = torch.tensor(time.perf_counter(), dtype=torch.float64)
    dist.all_reduce(latest, dist.ReduceOp.MAX)
    moment = float(latest) + 0.003
    while time.perf_counter() < moment:
        pass
    return moment


def machine() -> str:
    """What this was measured on, in a line."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}, gloo"
