"""The failure monitor: it ends the waits of a rank when another has failed, went silent, or will not enter the call.

    main thread                        monitor's thread                         the others' threads
    enter, at, steps, leave ─state──►  a beat, once a second     ◄──store──►  beats
    fail(failure)           ────────►  the failure, first wins   ◄──store──►  looked for, ten times a second
    a wait ends, verdict()  ◄─abort()  there is a failure, or a silence that is one
                            ◄─abort()  watchdog thread: the store itself does not answer

The main thread never touches the store, which may hold its caller for as long as the process that hosts it is stopped.

A failure is first a record in the store, and then broken connections: a rank whose wait breaks reads the record
and raises its error.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from pipeline.distributed.failure.detector import FailureDetector
from pipeline.distributed.failure.errors import Failure
from pipeline.distributed.failure.local_status import LocalStatus
from pipeline.distributed.failure.store_exchange import PARTING, StoreExchange
from pipeline.distributed.failure.store_keys import StoreKeys
from pipeline.distributed.failure.store_watchdog import StoreWatchdog

POSTING = 2.0  # seconds that `fail` waits at most for its record


class FailureMonitor:
    """One rank's part in noticing failures. Every rank makes one, with the same prefix. Its threads end with it.

    The main thread assigns `at`, what it waits for or does, before each wait and action: a str, or a tuple whose parts
    are joined when they are read. It raises `steps` with each progress, and sets `has_met` once it has heard from all
    ranks in the call. These are plain attributes, since they are written often.

    Args:
        store: any store of torch.distributed; it is cloned.
        prefix: of every key; no two monitors in a store's life share one.
        rank: this rank.
        size: how many ranks there are.
        heartbeat: seconds after which a rank that gives no sign of life is given up. A library that holds Python's lock
            for longer than that looks the same.
        timeout: seconds after which a call is given up in which nothing moves on any rank.

    >>> monitor = FailureMonitor(dist.HashStore(), "doc", rank=0, size=1)
    >>> monitor.enter(0, "step 7", abort=lambda: None)
    >>> monitor.at = ("2B3", "for the gradient of", "h3")  # before each wait and action
    >>> monitor.steps += 1                                 # after it
    >>> monitor.leave()
    >>> monitor.stop()
    """

    def __init__(
        self, store: dist.Store, prefix: str, rank: int, size: int, heartbeat: float = 10.0, timeout: float = 300.0
    ) -> None:
        self.at: object = ""
        self.steps = 0
        self.has_met = True
        self._heartbeat = heartbeat
        self._status = status = LocalStatus(rank, weakref.ref(self))
        detector = FailureDetector(rank, size, heartbeat, timeout)
        self._thread = StoreExchange(status, StoreKeys(store, prefix, rank, size), detector, heartbeat)
        self._watchdog = StoreWatchdog(status, self._thread, detector, heartbeat)
        at_exit = partial(_end_with_script, status, self._thread, self._watchdog, os.getpid())
        self._drop = weakref.finalize(self, status.drop)  # the threads then end once no other rank needs them
        self._drop.atexit = False
        atexit.register(at_exit)
        self._thread.begin(at_end=partial(_forget, self._watchdog, at_exit))
        self._watchdog.start()

    def enter(self, generation: int, call: str, abort: Callable[[], None]) -> None:
        """Enter a call, as all ranks do.

        Args:
            generation: the number of earlier failures.
            call: its name ("step 7").
            abort: is called once, in another thread, when any rank fails: it must wake every wait of the main thread,
                and not wait itself.

        Raises:
            RuntimeError: this monitor was stopped.
            ValueError: there was a later generation.
        """
        self.at = ""
        number = self._status.enter(generation, call, abort)
        self.has_met = number == 1  # there is no call before, which others may be in

    def leave(self) -> None:
        """Leave the call, which succeeded on this rank. From here on its abort is not called, nor under way."""
        self._status.leave()

    def fail(self, failure: Failure) -> None:
        """Report a failure of this rank to the others. If another rank was first, its failure stays the one for all.

        The call is over then, and its abort is not called. What failed here before all ranks have met is posted when
        the others have left the call before (a few tenths of a second, five seconds at most): there they still read
        what this rank has sent, and the failure is none of that call. Where the store does not answer, this returns
        after two seconds more at most, and the record is posted when it answers again.
        """
        with self._status.changed:  # so that the thread looks after this
            self._thread.hurry()
            if failure.traceback and not self.has_met:
                self._status.withdraw(min(PARTING, self._heartbeat))
            self._status.leave()
            self._thread.hurry()
            self._status.tell(failure, min(POSTING, self._heartbeat))

    def verdict(self, grace: float) -> Failure | None:
        """The failure of this generation, or None if there is none after `grace` seconds.

        It is the same on all ranks (where the store did not answer: of the same kind). If there is one, the call is
        over.
        """
        with self._status.changed:
            self._thread.hurry()
            failure = self._status.ask(grace)
            if failure is not None:
                self._status.leave()
            return failure

    def farewell(self) -> None:
        """Note that this rank ends its script: the others need not wait for it. Runs at exit by itself.

        Waits for ranks that are still in a call that this one has left, five seconds at most: the store may live in
        this process, and they need it.
        """
        _part(self._status, self._thread)

    def stop(self) -> None:
        """End the threads at once, and report that to the others. May be called again."""
        self._drop()
        self._status.leave()
        _join(self._thread, self._watchdog)


def _part(status: LocalStatus, thread: StoreExchange) -> None:
    status.end("ended its script")
    thread.hurry()
    with status.changed:
        status.changed.wait_for(lambda: status.has_parted or not thread.is_alive(), PARTING)


def _forget(watchdog: StoreWatchdog, at_exit: Callable[[], None]) -> None:
    watchdog.end()
    atexit.unregister(at_exit)


def _join(thread: StoreExchange, watchdog: StoreWatchdog) -> None:
    watchdog.end()
    thread.end()
    watchdog.await_end()
    thread.await_end()


def _end_with_script(status: LocalStatus, thread: StoreExchange, watchdog: StoreWatchdog, process: int) -> None:
    if os.getpid() == process:  # and not in a fork of the rank, which has no threads, and is not the rank
        _part(status, thread)
        _join(thread, watchdog)
