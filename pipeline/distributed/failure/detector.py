"""The failure detector: the rules of silence, as a function of heartbeats and this rank's own clock.

    beats of all ranks --see--> when did each last change, when did anything last move --accusation--> Failure, or None

    ended      a rank ended its script without the call that this rank is in                 at once
    given up   a rank is in a later generation: this rank's call was given up                at once
    silent     a rank's beat stays as it is                                                  after `heartbeat` seconds
    stuck      all are alive, nothing moves on any rank: some did not enter, or all wait     after `timeout` seconds

Clocks of different machines are never compared: a change counts from when this rank saw it.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.distributed.failure.errors import Failure, silence
from pipeline.distributed.failure.heartbeat import Heartbeat


class FailureDetector:
    """One rank's view of the others.

    Args:
        rank: this rank.
        size: the number of ranks.
        heartbeat: seconds that a rank may go without a beat.
        timeout: seconds that a call may go on while nothing moves on any rank.
    """

    def __init__(self, rank: int, size: int, heartbeat: float, timeout: float) -> None:
        self.rank = rank
        self._size = size
        self._heartbeat = heartbeat
        self._timeout = timeout
        self._beats: dict[int, Heartbeat] = {}
        self._changed_at: dict[int, float] = {}
        self._moved_at = 0.0

    def restart(self, now: float) -> None:
        """Count from now: this rank itself was not running, so missed beats say nothing about the others."""
        self._changed_at = dict.fromkeys(self._beats, now)
        self._moved_at = now

    def see(self, beats: Mapping[int, Heartbeat], now: float) -> None:
        """Take note of the beats of all ranks that have one, this one's own included."""
        for rank, beat in beats.items():
            previous = self._beats.get(rank)
            if previous is None or beat.serial != previous.serial:
                self._changed_at[rank] = now
            if previous is None or beat.movement() != previous.movement():
                self._moved_at = now
            self._beats[rank] = beat

    def accusation(self, now: float) -> Failure | None:
        """The failure of the call that this rank is in, or None."""
        own_beat = self._beats.get(self.rank)
        if own_beat is None or not own_beat.is_in:
            return None
        verdict = (
            self._ended(own_beat)
            or self._given_up(own_beat)
            or self._silent(own_beat, now)
            or self._stuck(own_beat, now)
        )
        return None if verdict is None else self.failure(own_beat, *verdict)

    def failure(self, own_beat: Heartbeat, rank: int, message: str) -> Failure:
        """The failure of a rank in the call that this one is in, with where every rank is."""
        beats = {**self._beats, self.rank: own_beat}
        places = [f"rank {other} {_place(beats.get(other))}" for other in range(self._size)]
        return silence(rank, own_beat.call, message, "; ".join(places) + ".")

    def needy(self, call: Heartbeat, serials: Mapping[int, int], now: float, patience: float) -> list[int]:
        """The ranks that may still need this one for a call that it has left.

        Args:
            call: a beat of this rank in that call.
            serials: of the beats when this rank parted; what such a beat says may be outdated.
            now: of this rank's clock.
            patience: seconds after which a rank without a beat is not waited for.
        """
        return [
            rank
            for rank, beat in self._others().items()
            if not beat.ended
            and not beat.has_left(call)
            and (beat.is_in or beat.serial == serials.get(rank))
            and now - self._changed_at[rank] < patience
        ]

    def _others(self) -> dict[int, Heartbeat]:
        return {rank: beat for rank, beat in self._beats.items() if rank != self.rank}

    def _ended(self, own_beat: Heartbeat) -> tuple[int, str] | None:
        for rank, beat in self._others().items():
            if beat.ended and not beat.has_left(own_beat):
                return rank, f"rank {rank} {beat.ended} while rank {self.rank} waits in {own_beat.call} for it."
        return None

    def _given_up(self, own_beat: Heartbeat) -> tuple[int, str] | None:
        if all([beat.generation <= own_beat.generation for beat in self._others().values()]):
            return None
        return self.rank, f"{own_beat.call} was given up by the others while rank {self.rank} was not heard of."

    def _silent(self, own_beat: Heartbeat, now: float) -> tuple[int, str] | None:
        needed = [rank for rank, beat in self._others().items() if not beat.has_left(own_beat)]
        silent_seconds = {rank: now - self._changed_at[rank] for rank in needed}
        rank = max(silent_seconds, key=silent_seconds.__getitem__, default=self.rank)
        if silent_seconds.get(rank, 0.0) <= self._heartbeat:
            return None
        return rank, (
            f"rank {rank} does not answer since {silent_seconds[rank]:.1f} s (heartbeat={self._heartbeat}): stopped, "
            "swapped out or cut off."
        )

    def _stuck(self, own_beat: Heartbeat, now: float) -> tuple[int, str] | None:
        if now - self._moved_at <= self._timeout:
            return None
        entered = [rank for rank, beat in self._beats.items() if beat.has_entered(own_beat)]
        absent = [rank for rank in range(self._size) if rank not in entered]
        limit = f"for {self._timeout:g} s (timeout={self._timeout})"
        if not absent:
            return self.rank, (
                f"nothing moves on any rank {limit} in {own_beat.call}, though all ranks are alive. If one action may "
                "take that long, give a larger timeout."
            )
        return absent[0], (
            f"{', '.join([f'rank {rank}' for rank in absent])} did not enter {own_beat.call} {limit}. Every rank must "
            "make the same calls; if one may stay away for that long, give a larger timeout. (A pipeline in one "
            "process is Pipe(..., devices=[...]).)"
        )


def _place(beat: Heartbeat | None) -> str:
    return "has not been heard of yet" if beat is None else f"was {beat.described()}"
