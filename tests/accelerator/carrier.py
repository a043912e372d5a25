"""A carrier of payloads between simulated accelerators, as strict about order as NCCL may be; the bytes go over gloo.

    compute stream     ... pack ──event──┐                                    ┌──event──► unpack ...
    the communicator's                   └─► send ~~ until it is received ~~► receive

What it has of NCCL:

* The transfers of a communicator are one after the other, as they were begun, on a stream of its own.
* Each waits for the stream that was current when it was begun.
* A send ends when its receive has begun and got it: nothing is buffered. A receive ends when its data has come.
* `wait` makes the current stream wait, and the host knows no more than before. So a missing wait is a race: the
  transfer is not ordered before what the compute stream does next, and freed memory counts as written.
* `abort` ends what is under way, and returns when the device has left it.

Kernels of these devices run at once, so `wait` also blocks the thread until the data is there, of which the clocks of
the streams know nothing. A rank that waits begins less than it would on NCCL, hence what ends here ends there, too; an
order of transfers that waits for ever there does so here, until the time is over: an error.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.common.accelerators import entered_streams
from pipeline.transports.payloads import Carrier


class Transfers:
    """Transfers of a device, one after the other, on a stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._last: Work | None = None

    def begin(self, kernel: Callable[[], object], transfer: Callable[[], None]) -> Work:
        """Begin a transfer.

        Args:
            kernel: does on the stream what the transfer does to the device's memory: for the order alone.
            transfer: moves the bytes.
        """
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with entered_streams(self._stream):
            kernel()
        self._last = Work(transfer, self._device, self._stream.record_event(), self._last)
        return self._last

    def synchronize(self) -> None:
        """The host waits."""
        if self._last is not None:
            self._last.performed.wait()
        self._stream.synchronize()


class Work:
    """A transfer under way."""

    def __init__(self, transfer: Callable[[], None], device: torch.device, end: torch.Event, last: Work | None) -> None:
        self._device = device
        self._end = end
        self.performed = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._perform, args=(transfer, last), daemon=True).start()

    def _perform(self, transfer: Callable[[], None], last: Work | None) -> None:
        if last is not None:
            last.performed.wait()
        try:
            transfer()
        except RuntimeError as error:
            self._error = error
        self.performed.set()

    def wait(self) -> None:
        """The current stream waits.

        Raises:
            RuntimeError: the other end is gone, or the time over. On NCCL the watchdog says so.
        """
        self.performed.wait()
        if self._error is not None:
            raise self._error
        torch.accelerator.current_stream(self._device).wait_event(self._end)

    def is_completed(self) -> bool:
        return self.performed.is_set() and self._end.query()


class Communicator:
    """Two ranks.

    Args:
        store: where they find each other.
        rank: 0 or 1.
        timeout: of a transfer, too.
        transfers: in whose order it takes part.
    """

    def __init__(self, store: dist.Store, rank: int, timeout: timedelta, transfers: Transfers) -> None:
        self._group: Any = dist.ProcessGroupGloo(store, rank, 2, timeout)
        self._other = 1 - rank
        self._transfers = transfers

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        (buffer,) = tensors
        sent = torch.empty(buffer.numel(), dtype=torch.uint8)

        def read() -> None:
            buffer.any()
            ctypes.memmove(sent.data_ptr(), buffer.data_ptr(), sent.numel())  # who changes it later races

        return self._transfers.begin(read, lambda: self._group.send([sent], to, tag).wait())

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        (buffer,) = tensors

        def transfer() -> None:
            came = torch.empty(buffer.numel(), dtype=torch.uint8)
            self._group.recv([came], source, tag).wait()
            ctypes.memmove(buffer.data_ptr(), came.data_ptr(), came.numel())

        return self._transfers.begin(lambda: buffer.fill_(255), transfer)

    def abort(self) -> None:
        try:
            self._group.recv([torch.empty(1, dtype=torch.uint8)], self._other, 1).wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass  # as it must: the wait ran out, and the group with it
        self._transfers.synchronize()


class Simulated(Carrier):
    """Over one simulated accelerator of this process.

    Args:
        device: with its index.
        in_one: all communicators of this rank have one order.
        seconds: of a transfer, after which nobody waits for it any more; None: as long as for others to connect.
    """

    def __init__(self, device: torch.device, in_one: bool = False, seconds: float | None = None) -> None:
        super().__init__(device, str(device))
        self._all = Transfers(device) if in_one else None
        self._seconds = seconds
        self.received: list[int] = []  # how many bytes each

    def connect(self, store: dist.Store, rank: int, timeout: timedelta) -> Communicator:
        patience = timeout if self._seconds is None else timedelta(seconds=self._seconds)
        return Communicator(store, rank, patience, self._all or Transfers(self.device))

    def receive(self, group: Communicator, nbytes: int) -> tuple[Tensor, Work]:
        self.received.append(nbytes)
        return super().receive(group, nbytes)
