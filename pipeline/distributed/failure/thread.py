"""The monitor's thread: one turn of its exchange with the store.

    every 0.1 s, in a call    post own failures ─► look for a failure ─► deliver
    every beat                write this rank's beat ─► read the others' ─► detector ─► accuse: post, deliver

It alone uses the store. When a turn takes longer than `heartbeat` seconds, store_watchdog.py acts in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

import torch.distributed as dist

from pipeline.distributed.failure.detector import FailureDetector
from pipeline.distributed.failure.errors import silence
from pipeline.distributed.failure.heartbeat import Heartbeat
from pipeline.distributed.failure.local_status import LocalStatus
from pipeline.distributed.failure.store_keys import StoreKeys

PAUSE = 0.1  # seconds between two looks for a failure
SHORT_PAUSE = 0.02  # while the main thread waits for the verdict
BEAT = 1.0  # seconds between two signs of life, or a quarter of `heartbeat`
PARTING = 5.0  # seconds for which a rank that has ended waits at most for others, which may need the store it hosts
JOINING = 1.0  # seconds to wait for a thread's end: it may be held by a store that does not answer


class MonitorThread:
    """The thread of a monitor that uses the store.

    Args:
        status: of this rank.
        keys: the keys.
        detector: the rules.
        heartbeat: seconds.
    """

    def __init__(self, status: LocalStatus, keys: StoreKeys, detector: FailureDetector, heartbeat: float) -> None:
        self.turn_began: float | None = None  # of the turn under way
        self.detector = detector
        self._status = status
        self._keys = keys
        self._heartbeat = heartbeat
        self._period = min(BEAT, heartbeat / 4)
        self._wake = threading.Event()
        self._is_over = False
        self._lost: str | None = None
        self._awake = monotonic()
        self._next = 0.0
        self._said = Heartbeat(-1, -1, 0, "", False, "", 0, "")
        self._before = self._said
        self._parting: tuple[float, dict[int, int]] | None = None  # since when, and the others' beats then
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
            self._guarded(self._turn)
            self._wake.wait(SHORT_PAUSE if self._status.is_asking else min(PAUSE, self._period))
            self._wake.clear()
        if not self._said.ended:
            self._guarded(self._speak)
        self._status.part()
        self._at_end()

    def _guarded(self, work: Callable[[], object]) -> None:
        self.turn_began = monotonic()
        try:
            work() if self._lost is None else self._without_store(self._lost)
        except Exception as error:
            self._lost = _reason(error)
        self.turn_began = None

    def _turn(self) -> None:
        self._check_clock()
        self._post()
        asked = self._status.asked()
        failure = None if asked is None else self._keys.failure(asked)
        if asked is not None and failure is not None:
            self._status.deliver(asked, failure)
        self._status.wake()
        if self._is_due(self._status.beat(0)):
            self._post()  # before a beat that is of a later generation
            self._exchange(self._speak())

    def _post(self) -> None:
        while unposted := self._status.unposted():
            generation, failure = unposted[0]
            self._status.posted(generation, self._keys.post(generation, failure))

    def _is_due(self, own: Heartbeat) -> bool:
        """A beat is due in time; and early when this rank pauses after a call, since then others may part."""
        before, self._before = self._before, own
        pauses = not own.is_in and not before.is_in and own.order == before.order
        is_news = own.order != self._said.order or self._said.is_in
        return (pauses and is_news) or bool(own.ended) or monotonic() >= self._next

    def _speak(self) -> Heartbeat:
        self._said = self._status.beat(self._said.serial + 1)
        self._keys.say(self._said)
        return self._said

    def _exchange(self, own: Heartbeat) -> None:
        beats = self._keys.beats()
        self._keys.forget_before(own.generation)
        now = self._check_clock()
        self._next = now + self._period
        self.detector.see({**beats, self._status.rank: own}, now)
        accused = self.detector.accusation(now)
        if accused is not None and self._status.asked() == own.generation:
            self._status.deliver(own.generation, self._keys.post(own.generation, accused))
        if own.ended:
            self._part(beats, now)

    def _check_clock(self) -> float:
        """Now. If this thread has not run for long (stopped, or held by the store), missed beats prove nothing."""
        now = monotonic()
        if now - self._awake > self._heartbeat / 2:
            self.detector.restart(now)
        self._awake = now
        return now

    def _part(self, beats: dict[int, Heartbeat], now: float) -> None:
        if self._parting is None:
            self._parting = now, {rank: beat.serial for rank, beat in beats.items()}
        since, serials = self._parting
        if now - since > min(PARTING, self._heartbeat) or not self.detector.needy(serials, now, 3 * self._period):
            self._status.part()

    def _without_store(self, reason: str) -> None:
        rank, own = self._status.rank, self._status.beat(0)
        for generation, failure in self._status.unposted():
            self._status.posted(generation, failure)
        if self._status.asked() is not None:
            message = f"rank {rank} lost the store of torch.distributed: {reason} rank {rank} is {own.described()}."
            self._status.deliver(own.generation, silence(rank, own.call, message, self.detector.waits(but=rank)))
        self._status.wake()
        if own.ended:
            self._status.part()


def _reason(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, dist.DistError):
        text += ". The process that hosts it (rank 0, or torchrun's agent) has ended or was killed. Start again."
    return text
