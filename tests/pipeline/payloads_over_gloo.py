"""A carrier of payloads for tests: a second gloo group stands in for NCCL, floating-point tensors for those on a GPU.

gloo cannot say whether a transfer has ended, so a thread waits for each.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.transports.payloads import Carrier


class Work:
    """A transfer, and whether it has ended."""

    def __init__(self, work: Any, carrier: OverGloo | None = None) -> None:
        self.error: RuntimeError | None = None
        self._carrier = carrier
        self._thread = threading.Thread(target=self._end, args=(work,), daemon=True)
        self._thread.start()

    def _end(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self.error = error

    def wait(self) -> None:
        self._thread.join()
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return not self._thread.is_alive() if self._carrier is None else self._carrier.has_ended(self._thread)


class Group:
    """Two ranks, as NCCL's group of two is used."""

    def __init__(self, store: dist.Store, rank: int, timeout: timedelta, carrier: OverGloo) -> None:
        self._group: Any = dist.ProcessGroupGloo(store, rank, 2, timeout)
        self._carrier = carrier
        self._other = 1 - rank

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        return Work(self._group.send(tensors, to, tag), self._carrier)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        return Work(self._group.recv(tensors, source, tag), self._carrier)

    def abort(self) -> None:
        self._carrier.aborted += 1
        try:
            nothing = torch.empty(1, dtype=torch.uint8)
            self._group.recv([nothing], self._other, 1).wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass


class OverGloo(Carrier):
    """Args: place: another one for each rank."""

    def __init__(self, place: str) -> None:
        super().__init__(torch.device("cpu"), place)
        self.received: list[int] = []  # how many bytes each
        self.connected = 0  # how many groups
        self.aborted = 0

    def connect(self, store: dist.Store, rank: int, timeout: timedelta) -> Any:
        self.connected += 1
        return Group(store, rank, timeout, self)

    def takes(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point()

    def receive(self, group: Any, nbytes: int) -> tuple[Tensor, Any]:
        self.received.append(nbytes)
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        return buffer, group.recv([buffer], 0, 0)

    def take(self, buffer: Tensor, work: Any) -> Tensor:
        work.wait()
        return buffer

    def has_ended(self, waiting: threading.Thread) -> bool:
        return not waiting.is_alive()
