"""The watchdog of the store: it ends a wait when the store does not answer, since the process that hosts it is stopped.

    monitor:  |turn| |turn| |turn ........ held by the store
    watchdog:    .      .      .      .      .   heartbeat is over: the main thread is woken, without the store

A second thread, since the first one cannot look at a clock while the store holds it.
"""

from __future__ import annotations

from time import monotonic

from pipeline.distributed.failure.detector import FailureDetector
from pipeline.distributed.failure.local_status import LocalStatus
from pipeline.distributed.failure.store_exchange import BEAT, StoreExchange
from pipeline.distributed.failure.thread import WatchingThread


class StoreWatchdog(WatchingThread):
    """The thread that watches the monitor's thread.

    Args:
        status: of this rank.
        monitor: the monitor's thread, which uses the store.
        detector: knows where the others wait.
        heartbeat: seconds that a turn of that thread may take.
    """

    def __init__(
        self, status: LocalStatus, monitor: StoreExchange, detector: FailureDetector, heartbeat: float
    ) -> None:
        super().__init__("pipe watchdog", min(BEAT, heartbeat / 4))
        self._status = status
        self._monitor = monitor
        self._detector = detector
        self._heartbeat = heartbeat
        self._last_awake = self._counted_from = monotonic()

    def run(self) -> None:
        while not self._wake.wait(self._pause):  # nobody hurries it but to its end
            self._look(monotonic())

    def _look(self, now: float) -> None:
        if now - self._last_awake > self._heartbeat / 2:
            self._counted_from = now  # this process was stopped itself: the store had no time to answer
        self._last_awake = now
        start = self._monitor.turn_began
        turn_seconds = 0.0 if start is None else now - max(start, self._counted_from)
        if turn_seconds <= self._heartbeat:
            return
        if self._status.ended:
            self._status.part()
        if self._status.asked() is not None:
            reason = (
                f"the store of torch.distributed does not answer rank {self._status.rank} since {turn_seconds:.1f} s "
                f"(heartbeat={self._heartbeat}): the process that hosts it (rank 0, or torchrun's agent) is stopped, "
                "swapped out or cut off."
            )
            self._status.lose(self._detector.without_store(self._status.beat(0), reason))
