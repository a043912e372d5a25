"""What does one process of a crew do? It waits for a job, runs it as one rank of a torchrun would, and answers.

    crew.py --Job--> [ environment, seed, process group ] function(*args) --Returned | Raised--> crew.py
            --CLEAN--> group destroyed, garbage collected                --what was left behind--> crew.py

A rank cleans up only when every rank has answered: a group that goes early is a failure to those who still use it.
Warnings are errors. What only reached a hook (an exception in a thread or in a destructor) is told with the rest.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy
import probing
import torch
import torch.distributed as dist
from nursery import raise_warnings

CLEAN = b"clean"


@dataclass(frozen=True)
class Job:
    """What a rank is asked to do.

    Attributes:
        function: "module:function"; the module is found in tests/ranks and tests/pipeline.
        args: its arguments.
        environment: variables that are set while the job runs.
        init: whether torch.distributed is initialised (gloo) before the function runs.
    """

    function: str
    args: tuple[Any, ...]
    environment: dict[str, str]
    init: bool


@dataclass(frozen=True)
class Returned:
    """A rank's result."""

    rank: int
    value: Any


@dataclass(frozen=True)
class Raised:
    """A rank's exception: names of its type and those above, its words, notes, stack; seconds from the job's begin."""

    rank: int
    types: tuple[str, ...]
    message: str
    notes: tuple[str, ...]
    traceback: str
    seconds: float

    def isa(self, kind: type[BaseException]) -> bool:
        return name_of(kind) in self.types

    def __str__(self) -> str:
        return f"rank {self.rank} raised {self.types[0]}: {self.message}"


def name_of(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def main(rank_and_size: tuple[int, int], connection: int) -> None:
    """Serve jobs until the other end closes, as one of so many ranks."""
    rank, size = rank_and_size
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    os.environ.update({name: str(number) for name, number in ranks.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    random.seed()  # or all ranks would draw what the nursery would have drawn
    numpy.random.seed()
    asides: list[str] = []
    _hook(asides)
    crew = Connection(connection)
    crew.send_bytes(b"ready")
    while True:
        try:
            job = pickle.loads(crew.recv_bytes())
        except EOFError:
            return
        crew.send_bytes(_answer(rank, job))
        if crew.recv_bytes() == CLEAN:
            crew.send_bytes(pickle.dumps(_clean(asides)))


def _answer(rank: int, job: Job) -> bytes:
    """Returned or Raised, pickled: a value that cannot be is an exception too."""
    begun = time.monotonic()
    try:
        with _as_rank(rank, job), warnings.catch_warnings():
            raise_warnings()
            return pickle.dumps(Returned(rank, _found(job.function)(*job.args)))
    except BaseException as error:
        notes = tuple(getattr(error, "__notes__", ()))
        types = tuple(name_of(kind) for kind in type(error).__mro__)
        seconds = time.monotonic() - begun
        return pickle.dumps(Raised(rank, types, str(error), notes, traceback.format_exc(), seconds))


def _found(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


@contextmanager
def _as_rank(rank: int, job: Job) -> Iterator[None]:
    """As a script finds the process: torch's default seed differs from rank to rank."""
    kept = dict(os.environ)
    os.environ.update(job.environment)
    probing.follow(os.environ)
    torch.manual_seed(1000 + rank)
    dtype = torch.get_default_dtype()
    try:
        if job.init:
            dist.init_process_group("gloo")
        yield
    finally:
        torch.set_default_dtype(dtype)
        os.environ.clear()
        os.environ.update(kept)


def _clean(asides: list[str]) -> tuple[list[str], list[str]]:
    """Leave nothing to the next job: (what only hooks saw, threads that would not end)."""
    gc.collect()
    if "pipeline.distributed.group" in sys.modules:
        sys.modules["pipeline.distributed.group"]._farewell()  # as at the end of a script
    if dist.is_initialized():
        dist.destroy_process_group()
    _freeze()
    until = time.monotonic() + 2
    while _threads() and time.monotonic() < until:
        time.sleep(0.01)
    seen = list(asides)
    asides.clear()
    return seen, _threads()


def _freeze(modules: set[int] = set()) -> None:  # noqa: B006 (how many modules there were, kept between jobs)
    """What a newly imported module holds stays: without it, collecting takes 1 ms instead of 80."""
    gc.collect()
    if len(sys.modules) not in modules:
        modules.add(len(sys.modules))
        gc.freeze()


def _threads() -> list[str]:
    """Threads besides the main one, those aside that torch began in C++."""
    return [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
    ]


def _hook(asides: list[str]) -> None:
    """Note what nobody can catch."""

    def told(what: str, error: BaseException | None) -> None:
        asides.append(f"{what}: {''.join(traceback.format_exception(error)) if error else 'no exception'}")

    def in_thread(args: threading.ExceptHookArgs) -> None:
        told(f"in thread {args.thread.name if args.thread else '?'}", args.exc_value)

    threading.excepthook = in_thread
    sys.unraisablehook = lambda args: told(f"in {args.object!r}", args.exc_value)
