"""The watchdog of the store: it ends a wait when the store does not answer, since the process that hosts it is stopped.

    monitor:  |turn| |turn| |turn ........ held by the store
    watchdog:    .      .      .      .      .   heartbeat is over: the main thread is woken, without the store

A second thread, since the first one cannot look at a clock while the store holds it.
"""

from __future__ import annotations

import threading
from time import monotonic

import torch.distributed as dist

from pipeline.distributed.failure.detector import FailureDetector
from pipeline.distributed.failure.monitor import FailureMonitor
from pipeline.distributed.failure.store_exchange import BEAT, StoreExchange
from pipeline.distributed.failure.store_keys import StoreKeys


def watch(monitor: FailureMonitor, store: dist.Store, prefix: str, rank: int, size: int, timeout: float) -> None:
    """Start the threads of a monitor, as every rank does. They end with its `farewell`.

    Args:
        store: any store of torch.distributed; it is cloned.
        prefix: of every key; no two monitors of a rank in a store's life share one.
        rank: this rank.
        size: how many ranks there are.
        timeout: seconds after which a call is given up in which nothing moves on any rank.

    >>> monitor = FailureMonitor(heartbeat=10.0)
    >>> watch(monitor, dist.HashStore(), "doc", rank=0, size=1, timeout=300.0)
    >>> monitor.farewell()
    """
    detector = FailureDetector(rank, size, monitor.heartbeat, timeout)
    exchange = StoreExchange(monitor, StoreKeys(store, prefix, rank, size), detector)
    monitor.threads = exchange, StoreWatchdog(monitor, exchange, rank)
    for thread in monitor.threads:
        thread.start()


class StoreWatchdog(threading.Thread):
    """The thread that watches the monitor's thread, and ends with it.

    Args:
        monitor: of this rank.
        exchange: the thread that uses the store. A turn of it may take `heartbeat` seconds.
        rank: this rank.
    """

    def __init__(self, monitor: FailureMonitor, exchange: StoreExchange, rank: int) -> None:
        super().__init__(name="pipe watchdog", daemon=True)
        self._monitor = monitor
        self._exchange = exchange
        self._rank = rank
        self._last_awake = self._counted_from = monotonic()

    def run(self) -> None:
        while self._exchange.is_alive() and not self._monitor.has_parted:
            self._look(monotonic())
            self._exchange.join(min(BEAT, self._monitor.heartbeat / 4))

    def _look(self, now: float) -> None:
        heartbeat = self._monitor.heartbeat
        if now - self._last_awake > heartbeat / 2:
            self._counted_from = now  # this process was stopped itself: the store had no time to answer
        self._last_awake = now
        start = self._exchange.turn_began
        turn_seconds = 0.0 if start is None else now - max(start, self._counted_from)
        if turn_seconds > heartbeat:
            self._exchange.judge_alone(
                f"the store of torch.distributed does not answer rank {self._rank} since {turn_seconds:.1f} s "
                f"(heartbeat={heartbeat}): the process that hosts it (rank 0, or torchrun's agent) is stopped, "
                "swapped out or cut off."
            )
