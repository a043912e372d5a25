"""The monitor's thread: it takes turn after turn of the exchange with the store.

    every 0.1 s, or when the main thread asks for it:  StoreExchange.turn  ─► until all ranks may part

It alone uses the store. When a turn takes longer than `heartbeat` seconds, store_watchdog.py acts in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

import torch.distributed as dist

from pipeline.distributed.failure.local_status import LocalStatus
from pipeline.distributed.failure.store_exchange import StoreExchange

PAUSE = 0.1  # seconds between two looks for a failure
SHORT_PAUSE = 0.02  # while the main thread waits for the verdict
JOINING = 1.0  # seconds to wait for a thread's end: it may be held by a store that does not answer


class MonitorThread:
    """The thread of a monitor that uses the store.

    Args:
        status: of this rank.
        exchange: its turns.
        heartbeat: seconds.
    """

    def __init__(self, status: LocalStatus, exchange: StoreExchange, heartbeat: float) -> None:
        self.turn_began: float | None = None  # of the turn under way
        self._status = status
        self._exchange = exchange
        self._pause = min(PAUSE, heartbeat / 4)
        self._wake = threading.Event()
        self._is_over = False
        self._loss_reason: str | None = None  # why the store is
        self._at_end: Callable[[], object] = int  # nothing
        self._thread = threading.Thread(target=self._run, name="pipe monitor", daemon=True)

    def start(self, at_end: Callable[[], object]) -> None:
        """Begin; the thread does that at its end."""
        self._at_end = at_end
        self._thread.start()

    def hurry(self) -> None:
        """Make the next turn begin now."""
        self._wake.set()

    def end(self) -> None:
        """End the thread, after a last beat."""
        self._is_over = True
        self._wake.set()

    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for its end, unless it is held by the store."""
        if threading.current_thread() is not self._thread:
            self._thread.join(JOINING)

    def _run(self) -> None:
        while not (self._is_over or self._status.has_parted):
            self._guarded(self._exchange.turn)
            self._wake.wait(SHORT_PAUSE if self._status.is_asking else self._pause)
            self._wake.clear()
        self._guarded(self._exchange.last_beat)
        self._status.part()
        self._at_end()

    def _guarded(self, work: Callable[[], object]) -> None:
        self.turn_began = monotonic()
        try:
            work() if self._loss_reason is None else self._exchange.without_store(self._loss_reason)
        except Exception as error:
            self._loss_reason = _reason(error)
        self.turn_began = None


def _reason(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, dist.DistError):
        text += ". The process that hosts it (rank 0, or torchrun's agent) has ended or was killed. Start again."
    return text
