"""The local status: this rank's progress and the known failure, shared by the main thread and the monitor's threads.

    main thread: enter ... at, steps ... leave         monitor thread: beat(), asked(), unposted()  ──► store
                 ask, fail ◄── the generation's failure, abort() ── posted(), deliver() ◄── store
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import NamedTuple, Protocol

from pipeline.distributed.failure.errors import Failure
from pipeline.distributed.failure.heartbeat import Heartbeat, in_words


class ProgressMarks(Protocol):
    """The marks that the main thread writes often, and so without the lock."""

    at: object
    steps: int


class LatestCall(NamedTuple):
    """The call that this rank entered last: its generation, its number there, its name."""

    generation: int
    number: int
    call: str


class LocalStatus:
    """The state of one rank. Its methods may be called by any thread.

    Args:
        rank: this rank.
        marks: gives the main thread's marks; None when their owner is gone. (The threads refer to this object and not
            to the monitor, so that a monitor without other references ends.)
    """

    def __init__(self, rank: int, marks: Callable[[], ProgressMarks | None]) -> None:
        self.rank = rank
        self.is_asking = False  # whether the main thread is in `ask`
        self.changed = threading.Condition()
        self.failure: Failure | None = None  # of this generation
        self.ended = ""
        self.has_parted = False
        self.is_withdrawing = False  # whether the main thread is in `withdraw`
        self._latest = LatestCall(-1, 0, "")
        self._abort: Callable[[], object] | None = None  # None: outside of calls
        self._unposted: list[tuple[int, Failure]] = []
        self._get_marks = marks
        self._last_marks: tuple[object, int] = ("", 0)  # what these were when they were last read

    # ------------------------------------------------------------------ what the main thread does

    def enter(self, generation: int, call: str, abort: Callable[[], None]) -> int:
        """Enter a call. Returns its number."""
        with self.changed:
            if self.ended:
                raise RuntimeError(f"rank {self.rank} {self.ended}: it cannot enter {call}")
            current, number, _ = self._latest
            if generation < current:
                raise ValueError(f"generation {generation} is over: rank {self.rank} is in {current}")
            if generation > current:
                number, self.failure = 0, None
            self._latest = LatestCall(generation, number + 1, call)
            self._abort = abort
            return number + 1

    def leave(self) -> None:
        """Leave the call. No abort is under way when this returns."""
        with self.changed:
            self._abort = None

    def ask(self, seconds: float) -> Failure | None:
        """Wait for the failure of this generation and return it."""
        with self.changed:
            self.is_asking = True
            try:
                self.changed.wait_for(lambda: self.failure is not None or self.ended, seconds)
            finally:
                self.is_asking = False
            return self.failure

    def withdraw(self, seconds: float) -> None:
        """Leave the call, and wait until no other rank is in the one before, or any has failed."""
        with self.changed:
            self.leave()
            self.is_withdrawing = True
            self.changed.wait_for(lambda: not self.is_withdrawing or self.failure is not None or self.ended, seconds)
            self.is_withdrawing = False

    def tell(self, failure: Failure, seconds: float) -> None:
        """Give the monitor's thread a failure to post, and wait for that."""
        with self.changed:
            if self.failure is None:
                self._unposted.append((self._latest.generation, failure))
                self.changed.wait_for(lambda: self.failure is not None or self.ended, seconds)
                self.failure = self.failure or failure

    def end(self, ending: str) -> None:
        """Note that this rank enters no further call."""
        with self.changed:
            self.ended = self.ended or ending
            self.changed.notify_all()

    def drop(self) -> None:
        """Note that the monitor is gone. Without the lock: a finalizer may run anywhere, in any thread."""
        self._abort = None
        self.ended = self.ended or "dropped its Pipe"

    # ------------------------------------------------------------------ what the threads do

    def beat(self, serial: int) -> Heartbeat:
        """The present heartbeat of this rank."""
        with self.changed:
            marks = self._get_marks()
            if marks is not None:
                self._last_marks = marks.at, marks.steps
            at, steps = self._last_marks
            return Heartbeat(serial, *self._latest, self._abort is not None, in_words(at), steps, self.ended)

    def asked(self) -> int | None:
        """The generation whose failure the main thread needs and does not have."""
        with self.changed:
            wants = (self._abort is not None or self.is_asking) and self.failure is None
            return self._latest.generation if wants else None

    def unposted(self) -> list[tuple[int, Failure]]:
        """The failures to be posted, with their generations, oldest first."""
        with self.changed:
            return list(self._unposted)

    def posted(self, generation: int, first: Failure) -> None:
        """Note that the oldest of these was posted. The failure of that generation is `first`."""
        with self.changed:
            del self._unposted[0]
            self.deliver(generation, first)

    def lose(self, failure: Failure) -> None:
        """Record a failure that cannot be posted yet, since the store does not answer."""
        with self.changed:
            if self.failure is None:
                self._unposted.append((self._latest.generation, failure))
            self.deliver(self._latest.generation, failure)

    def deliver(self, generation: int, failure: Failure) -> None:
        """Give the main thread a failure, unless it has one."""
        with self.changed:
            if generation == self._latest.generation:
                self.failure = self.failure or failure
            self.wake()
            self.changed.notify_all()

    def wake(self) -> None:
        """If the main thread is in a call of a generation that has failed, abort that call, once."""
        with self.changed:  # held while aborting, so that no abort is under way when `leave` returns
            if self.failure is None or self._abort is None:
                return
            abort, self._abort = self._abort, int  # nothing more: the main thread is still in the call
            try:
                abort()
            except Exception:
                traceback.print_exc()  # the thread must go on: without its beats this rank would be accused

    def part(self) -> None:
        """Note that no other rank needs this one any more: for good, or for the call before the one that failed."""
        with self.changed:
            self.has_parted = not self.is_withdrawing
            self.is_withdrawing = False
            self.changed.notify_all()
