"""What the harness's own tests ask of a crew: jobs that return, raise, hang, die, warn and litter."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def identity(value: Any) -> tuple[int, Any]:
    return dist.get_rank(), value


def summed() -> list[float]:
    """The sum of all ranks' numbers, 1, 2, ..., as each rank gets it."""
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    return number.tolist()


def environment(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def process() -> tuple[int, int, bool, int]:
    return os.getpid(), torch.get_num_threads(), dist.is_initialized(), torch.initial_seed()


def initialised_here() -> list[float]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    return summed()


def raise_on(rank: int) -> str:
    if dist.get_rank() == rank:
        error = ValueError(f"rank {rank} was asked to")
        error.add_note("a note")
        raise error
    return "fine"


def wait_on(rank: int) -> None:
    """This rank waits for ever, Python's lock released, in C++."""
    if dist.get_rank() == rank:
        dist.recv(torch.empty(1), (rank + 1) % dist.get_world_size())


def spin_on(rank: int) -> None:
    """This rank never comes back to Python's loop over bytecodes, and holds its lock for long."""
    while dist.get_rank() == rank:
        sum(range(10**7))


def signal_on(rank: int, number: int) -> str:
    """This rank gets a signal when all have begun; the others answer a little later."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"begun/{dist.get_rank()}", "")  # before that, another may still connect to this one
    if dist.get_rank() == rank:
        store.wait([f"begun/{other}" for other in range(dist.get_world_size())])
        os.kill(os.getpid(), number)
    time.sleep(0.3)
    return "fine"


def kill_and_wait(rank: int) -> None:
    """This rank dies when all have begun, and the next one waits for it."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"begun/{dist.get_rank()}", "")
    if dist.get_rank() == rank:
        store.wait([f"begun/{other}" for other in range(dist.get_world_size())])
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == (rank + 1) % dist.get_world_size():
        sleep()


def raise_while_others_sleep(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ZeroDivisionError
    sleep()


def sleep() -> None:
    time.sleep(60)


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def unpicklable() -> Any:
    return lambda: None


def raise_in_thread() -> None:
    thread = threading.Thread(target=lambda: 1 / 0, name="short-lived")
    thread.start()
    thread.join()


class Bad:
    def __del__(self) -> None:
        raise RuntimeError("from a destructor")


def raise_in_destructor() -> None:
    Bad()


def leave_a_thread() -> int:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return os.getpid()


def print_and_raise() -> None:
    print("some words of this rank", flush=True)
    raise KeyError("missing")
