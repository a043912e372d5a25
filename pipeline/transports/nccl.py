"""The NCCL transport: payloads from GPU to GPU.

    compute stream    ... pack ──event──┐                        ┌──event──► unpack ...
    NCCL's stream                       └──► send ~~~~~~► receive ┘
    own stream                                  (memory for it) ─┘

The host only enqueues. A send begins when the compute stream has packed; the compute stream never waits for one. A
receive begins at once, whatever the compute stream still has to do, since its memory comes from a stream of its own. It
occupies multiprocessors of the GPU until its payload has come, so a communicator may take few (`MOST_BLOCKS`).

Failures are noticed by `pipeline.distributed.failure`, which aborts the groups of all ranks. torch's own watchdog of a
group would end the process when a transfer fails or runs out of time, and its heartbeat monitor would in any case
(pytorch/pytorch#155916), before the error that names the reason; both are off for these groups. Communicators are
blocking ones, as torch makes them since 2.7.1: non-blocking ones hang at random with NCCL 2.26
(pytorch/pytorch#154055). What blocks is the connecting, which another thread can leave.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipeline.common.accelerators import entered
from pipeline.transports.payloads import Carrier

MOST_BLOCKS = 4  # thread blocks of a transfer, of up to 32; each occupies a multiprocessor
UNWATCHED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}  # a group reads them once


def nccl_of(group: Any, device: torch.device) -> Carrier | None:
    """The carrier of payloads between the ranks of a process group; None: they go through the host.

    Args:
        group: a ProcessGroup; NCCL is used where it is the group's backend for CUDA.
        device: of this rank.
    """
    if device.type != "cuda" or "cuda:nccl" not in dist.get_backend_config(group).split(","):
        return None
    return Nccl(device)


class Nccl(Carrier):
    """NCCL, for one GPU of this process.

    Two ranks that share a GPU have one place, and so no payloads between them: NCCL would refuse.

    Args:
        device: the GPU, with its index.

    Raises:
        RuntimeError: this torch was built without NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        self._backend = _backend()
        super().__init__(device, str(torch.cuda.get_device_properties(device).uuid))

    def connect(self, store: dist.Store, rank: int, timeout: timedelta) -> Any:
        options = self._backend.Options()
        options._timeout = timeout
        options.config.max_ctas = MOST_BLOCKS
        with entered(self.device), _environment(UNWATCHED):  # each thread has a current device of its own
            return self._backend(store, rank, 2, options)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Within: environment variables have these values."""
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _backend() -> Any:
    """The class of NCCL's process groups; a torch without NCCL has none."""
    backend: Any = getattr(dist, "ProcessGroupNCCL", None)
    if backend is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no NCCL, which the process group names for CUDA. Install a torch that was "
            'built with NCCL, or begin with torch.distributed.init_process_group("gloo").'
        )
    return backend
