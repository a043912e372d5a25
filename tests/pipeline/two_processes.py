"""What do two processes find that know of each other by gloo? Each saves it; the test reads both.

They are forked from a process that has imported torch, which takes each of them longer than the test.
"""

import faulthandler
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def two_processes(job: Callable[[int], Any], folder: Path) -> list[Any]:
    """Run `job(rank)` in two new processes of one thread each; what they return, by rank."""
    multiprocessing.set_forkserver_preload(["pipeline", "pytest"])
    arguments = job, f"file://{folder}/init", str(folder)
    context = mp.start_processes(_run, arguments, nprocs=2, join=False, start_method="forkserver")
    assert context is not None  # not joined yet
    while not context.join(timeout=120):
        pass
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def _run(rank: int, job: Callable[[int], Any], init_method: str, folder: str) -> None:
    faulthandler.dump_traceback_later(100, exit=True)  # with the stacks of all threads
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    torch.save(job(rank), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
