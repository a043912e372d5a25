"""The failure monitor: it ends the waits of a rank when another has failed, went silent, or will not enter the call.

    main thread                        store_exchange.py's thread               the others' threads
    enter, at, steps, leave ─state──►  a beat, once a second     ◄──store──►  beats
    fail(failure)           ────────►  the failure, first wins   ◄──store──►  looked for, ten times a second
    a wait ends, verdict()  ◄─abort()  there is a failure, or a silence that is one
                            ◄─abort()  store_watchdog.py's thread: the store itself does not answer

The main thread never touches the store, which may hold its caller for as long as the process that hosts it is stopped.

A failure is first a record in the store, and then broken connections: a rank whose wait breaks reads the record
and raises its error.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.distributed.failure.errors import Failure
from pipeline.distributed.failure.heartbeat import Heartbeat, in_words

POSTING = 2.0  # seconds that `fail` waits at most for its record
PARTING = 5.0  # seconds for which a rank that has ended waits at most for others, which may need the store it hosts
JOINING = 1.0  # seconds to wait for the end of a thread, which may be held by a store that does not answer


@dataclass(eq=False)
class LatestCall:
    """The call that this rank entered last: its generation, its number there, its name.

    Attributes:
        abort: wakes the main thread. None: it has left the call.
        has_met: whether it has heard from all ranks in the call.
    """

    generation: int = -1
    number: int = 0
    call: str = ""
    abort: Callable[[], object] | None = None
    has_met: bool = True


class FailureMonitor:
    """One rank's part in noticing failures: where it is, and what is known; `store_watchdog.watch` starts its threads.

    The main thread assigns `at`, what it waits for or does, before each wait and action: a str, or a tuple whose parts
    are joined when they are read. It raises `steps` with each progress, and sets `latest.has_met`. These are plain
    attributes, since they are written often.

    Args:
        heartbeat: seconds after which a rank that gives no sign of life is given up. A library that holds Python's lock
            for longer than that looks the same.

    >>> monitor = FailureMonitor(heartbeat=10.0)
    >>> monitor.enter(0, "step 7", abort=lambda: None)
    >>> monitor.at = ("2B3", "for the gradient of", "h3")  # before each wait and action
    >>> monitor.steps += 1                                 # after it
    >>> monitor.leave()
    """

    def __init__(self, heartbeat: float) -> None:
        self.heartbeat = heartbeat
        self.at: object = ""
        self.steps = 0
        self.threads: Sequence[threading.Thread] = ()
        self.changed = threading.Condition()
        self.hurried = threading.Event()  # the thread takes its next turn now
        self.failure: Failure | None = None  # of this generation
        self.ended = ""
        self.awaited = ""  # by the main thread: a "verdict", or a "parting": no other rank is in the call before
        self.has_parted = False  # the threads end after their turn
        self.latest = LatestCall()
        self.unposted = deque[tuple[int, Failure]]()  # failures with their generations, oldest first

    # ------------------------------------------------------------------ what the main thread does

    def enter(self, generation: int, call: str, abort: Callable[[], None]) -> None:
        """Enter a call, as all ranks do.

        Args:
            generation: the number of earlier failures.
            call: its name ("step 7").
            abort: is called once, in another thread, when any rank fails: it must wake every wait of the main thread,
                and not wait itself.

        Raises:
            RuntimeError: this monitor has ended.
            ValueError: there was a later generation.
        """
        self.at = ""
        with self.changed:
            if self.ended:
                raise RuntimeError(f"this rank {self.ended}: it cannot enter {call}")
            number = self.next_number(generation)
            if generation < self.latest.generation:
                raise ValueError(f"generation {generation} is over: this rank is in {self.latest.generation}")
            if generation > self.latest.generation:
                self.failure = None
            has_met = number == 1  # there is no call before, which others may be in
            self.latest = LatestCall(generation, number, call, abort, has_met)

    def next_number(self, generation: int) -> int:
        """The number that the next call has in a generation."""
        return self.latest.number + 1 if generation == self.latest.generation else 1

    def leave(self) -> None:
        """Leave the call, which succeeded on this rank. From here on its abort is not called, nor under way."""
        with self.changed:
            self.latest.abort = None

    def fail(self, failure: Failure) -> None:
        """Report a failure of this rank to the others. If another rank was first, its failure stays the one for all.

        The call is over then, and its abort is not called. What failed here before all ranks have met is posted when
        the others have left the call before (a few tenths of a second, five seconds at most): there they still read
        what this rank has sent, and the failure is none of that call. Where the store does not answer, this returns
        after two seconds more at most, and the record is posted when it answers again.
        """
        with self.changed:  # so that the thread looks after this
            self.latest.abort = None
            self.hurried.set()
            if failure.traceback and not self.latest.has_met:
                self.awaited = "parting"
                self._wait(lambda: not self.awaited, min(PARTING, self.heartbeat))
                self.awaited = ""
                self.hurried.set()
            if self.failure is None:
                self.unposted.append((self.latest.generation, failure))
                self._wait(lambda: False, min(POSTING, self.heartbeat))
                self.failure = self.failure or failure

    def verdict(self, grace: float) -> Failure | None:
        """The failure of this generation, or None if there is none after `grace` seconds.

        It is the same on all ranks (where the store did not answer: of the same kind). If there is one, the call is
        over.
        """
        with self.changed:
            self.hurried.set()
            self.awaited = "verdict"
            try:
                self._wait(lambda: False, grace)
            finally:
                self.awaited = ""
            if self.failure is not None:
                self.latest.abort = None
            return self.failure

    def _wait(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Wait until it is done, a failure is known, or this rank has ended."""
        self.changed.wait_for(lambda: is_done() or self.failure is not None or self.ended, seconds)

    def farewell(self) -> None:
        """Note that this rank ends its script: the others need not wait for it.

        Waits for ranks that are still in a call that this one has left, five seconds at most: the store may live in
        this process, and they need it.
        """
        with self.changed:
            self.ended = self.ended or "ended its script"
            self.changed.notify_all()
            self.hurried.set()
            self.changed.wait_for(lambda: self.has_parted, PARTING)
        self.stop()

    def stop(self) -> None:
        """End the threads at once, and report that to the others. May be called again."""
        self.leave()
        self.ended = self.ended or "ended its script"
        self.has_parted = True
        self.hurried.set()
        for thread in self.threads:
            thread.join(JOINING)

    # ------------------------------------------------------------------ what the threads do

    def beat(self, serial: int) -> Heartbeat:
        """The present heartbeat of this rank."""
        with self.changed:
            latest, at = self.latest, in_words(self.at)
            is_in = latest.abort is not None
            return Heartbeat(serial, latest.generation, latest.number, latest.call, is_in, at, self.steps, self.ended)

    def asked(self) -> int | None:
        """The generation whose failure the main thread needs and does not have."""
        with self.changed:
            wants = (self.latest.abort is not None or self.awaited == "verdict") and self.failure is None
            return self.latest.generation if wants else None

    def lose(self, failure: Failure) -> None:
        """Record a failure that cannot be posted yet, since the store does not answer."""
        with self.changed:
            if self.failure is None:
                self.unposted.append((self.latest.generation, failure))
            self.deliver(self.latest.generation, failure)

    def deliver(self, generation: int, failure: Failure) -> None:
        """Give the main thread a failure, unless it has one."""
        with self.changed:
            if generation == self.latest.generation:
                self.failure = self.failure or failure
            self.wake()
            self.changed.notify_all()

    def wake(self) -> None:
        """If the main thread is in a call of a generation that has failed, abort that call, once."""
        with self.changed:  # held while aborting, so that no abort is under way when `leave` returns
            if self.failure is None or self.latest.abort is None:
                return
            abort, self.latest.abort = self.latest.abort, int  # nothing more: the main thread is still in the call
            try:
                abort()
            except Exception:
                traceback.print_exc()  # the thread must go on: without its beats this rank would be accused

    def part(self) -> None:
        """Note that no other rank needs this one any more: for good, or for the call before the one that failed."""
        with self.changed:
            self.has_parted = self.awaited != "parting"
            self.awaited = "" if self.awaited == "parting" else self.awaited
            self.changed.notify_all()
