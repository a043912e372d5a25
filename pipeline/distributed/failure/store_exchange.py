"""The exchange of a rank's monitor with the store, turn by turn, in a thread of its own.

    every 0.1 s, or when the main thread asks for it:
    every turn                post own failures ─► look for a failure ─► deliver
    every beat                write this rank's beat ─► read the others' ─► detector ─► accuse: post, deliver

That thread alone uses the store, until all ranks may part. When a turn takes longer than `heartbeat` seconds,
store_watchdog.py acts in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

import torch.distributed as dist

from pipeline.distributed.failure.detector import FailureDetector
from pipeline.distributed.failure.heartbeat import Heartbeat
from pipeline.distributed.failure.monitor import PARTING, FailureMonitor
from pipeline.distributed.failure.store_keys import StoreKeys

PAUSE = 0.1  # seconds between two looks for a failure
SHORT_PAUSE = 0.02  # while the main thread waits for the verdict
BEAT = 1.0  # seconds between two signs of life, or a quarter of `heartbeat`


class StoreExchange(threading.Thread):
    """The use that a monitor makes of the store, turn by turn.

    Args:
        monitor: of this rank.
        keys: the keys.
        detector: the rules.
    """

    def __init__(self, monitor: FailureMonitor, keys: StoreKeys, detector: FailureDetector) -> None:
        super().__init__(name="pipe monitor", daemon=True)
        self.turn_began: float | None = None  # of the turn under way
        self._loss_reason: str | None = None  # why the store is
        self._monitor = monitor
        self._keys = keys
        self._detector = detector
        self._pause = min(PAUSE, monitor.heartbeat / 4)
        self._period = min(BEAT, monitor.heartbeat / 4)
        self._last_awake = monotonic()
        self._next_beat = 0.0
        self._latest = Heartbeat(-1, -1, 0, "", False, "", 0, "")  # of this rank, in the store
        self._previous = self._latest  # at the turn before
        self._parting: tuple[float, dict[int, int]] | None = None  # since when, and the others' beats then

    def run(self) -> None:
        while not self._monitor.has_parted:
            self._guarded(self.turn)
            self._monitor.hurried.wait(SHORT_PAUSE if self._monitor.awaited == "verdict" else self._pause)
            self._monitor.hurried.clear()
        self._guarded(self._last_beat)
        self._monitor.part()

    def _guarded(self, work: Callable[[], object]) -> None:
        self.turn_began = monotonic()
        try:
            work() if self._loss_reason is None else self.judge_alone(self._loss_reason)
        except Exception as error:
            rank = self._detector.rank
            self._loss_reason = f"rank {rank} lost the store of torch.distributed: {type(error).__name__}: {error}"
            if isinstance(error, dist.DistError):
                self._loss_reason += (
                    ". The process that hosts it (rank 0, or torchrun's agent) has ended or was killed. Start again."
                )
        self.turn_began = None

    def _last_beat(self) -> None:
        """A beat that says how this rank ended, unless one has said so."""
        if not self._latest.ended:
            self._beat()

    def turn(self) -> None:
        """Post and look for failures; when a beat is due, exchange beats and judge by them."""
        self._check_clock()
        self._post()
        generation = self._monitor.asked()
        failure = None if generation is None else self._keys.failure(generation)
        if generation is not None and failure is not None:
            self._monitor.deliver(generation, failure)
        self._monitor.wake()
        if self._is_due(self._monitor.beat(0)):
            self._post()  # before a beat that is of a later generation
            self._exchange(self._beat())

    def _post(self) -> None:
        while self._monitor.unposted:
            generation, failure = self._monitor.unposted[0]
            first = self._keys.post(generation, failure)
            self._monitor.unposted.popleft()
            self._monitor.deliver(generation, first)

    def _is_due(self, own_beat: Heartbeat) -> bool:
        """A beat is due in time; and early when this rank pauses where it was not seen, since others may then part."""
        previous, self._previous = self._previous, own_beat
        pauses = own_beat.movement() == previous.movement()
        is_news = (own_beat.order, own_beat.is_in) != (self._latest.order, self._latest.is_in)
        return (pauses and is_news) or self._is_parting(own_beat) or monotonic() >= self._next_beat

    def _is_parting(self, own_beat: Heartbeat) -> bool:
        return bool(own_beat.ended) or self._monitor.awaited == "parting"

    def _beat(self) -> Heartbeat:
        self._latest = self._monitor.beat(self._latest.serial + 1)
        self._keys.say(self._latest)
        return self._latest

    def _exchange(self, own_beat: Heartbeat) -> None:
        beats = self._keys.beats()
        self._keys.forget_before(own_beat.generation)
        now = self._check_clock()
        self._next_beat = now + self._period
        self._detector.see({**beats, self._detector.rank: own_beat}, now)
        failure = self._detector.accusation(now)
        if failure is not None and self._monitor.asked() == own_beat.generation:
            self._monitor.deliver(own_beat.generation, self._keys.post(own_beat.generation, failure))
        if self._is_parting(own_beat):
            self._part(own_beat, beats, now)
        else:
            self._parting = None

    def _check_clock(self) -> float:
        """Now. If this thread has not run for long (stopped, or held by the store), missed beats prove nothing."""
        now = monotonic()
        if now - self._last_awake > self._monitor.heartbeat / 2:
            self._detector.restart(now)
        self._last_awake = now
        return now

    def _part(self, own_beat: Heartbeat, beats: dict[int, Heartbeat], now: float) -> None:
        if self._parting is None:
            self._parting = now, {rank: beat.serial for rank, beat in beats.items()}
        start, serials = self._parting
        left_call = own_beat if own_beat.ended else own_beat._replace(number=own_beat.number - 1)
        needy_ranks = self._detector.needy(left_call, serials, now, 3 * self._period)
        if now - start > min(PARTING, self._monitor.heartbeat) or not needy_ranks:
            self._monitor.part()

    def judge_alone(self, reason: str) -> None:
        """End the call under way for this reason: without the store this rank can only judge for itself."""
        own_beat = self._monitor.beat(0)
        if self._monitor.asked() is not None:
            self._monitor.lose(self._detector.failure(own_beat, self._detector.rank, reason))
        self._monitor.wake()
        if self._is_parting(own_beat):
            self._monitor.part()
