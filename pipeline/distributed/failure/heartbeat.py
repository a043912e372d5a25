"""The heartbeat: a rank's report of where it is, by which others distinguish waiting from stopped.

    rank 2: Heartbeat(41, generation=0, number=7, call="step 7", is_in=True, at="2B3", ...)  --JSON-->  the store

`serial` rises with every beat: a rank whose beat does not change is stopped or cut off. Calls are compared by
generation and number, which all ranks count alike, since all make every call.
"""

from __future__ import annotations

from typing import NamedTuple


class Heartbeat(NamedTuple):
    """A sign of life.

    Args:
        serial: the number of earlier beats.
        generation: the generation of the latest call, -1 before the first.
        number: the number of calls of this generation that were entered.
        call: the latest ("step 7"), "" before the first.
        is_in: whether that is still under way.
        at: its wait or its action there.
        steps: counts its progress.
        ended: "", or how this rank ended.

    >>> Heartbeat(41, 0, 7, "step 7", True, "2B3", 120, "").described()
    'at 2B3 in step 7'
    """

    serial: int
    generation: int
    number: int
    call: str
    is_in: bool
    at: str
    steps: int
    ended: str

    @property
    def order(self) -> tuple[int, int]:
        """The position of the call, the same on all ranks."""
        return self.generation, self.number

    def has_entered(self, other: Heartbeat) -> bool:
        """Whether this rank has entered the call that the other is in."""
        return self.order >= other.order

    def has_left(self, other: Heartbeat) -> bool:
        """Whether this rank has left the call that the other is in."""
        return self.order > other.order or (self.order == other.order and not self.is_in)

    def movement(self) -> tuple[object, ...]:
        """A value that changes when the rank makes progress, and not by a beat alone."""
        return self.order, self.is_in, self.steps, self.ended

    def described(self) -> str:
        """A description of where the rank is."""
        if not self.call:
            place = "before its first call"
        elif not self.is_in:
            place = f"outside of calls, after {self.call}"
        else:
            place = f"at {self.at} in {self.call}" if self.at else f"in {self.call}"
        return f"{place} when it {self.ended}" if self.ended else place


def in_words(at: object) -> str:
    """The text of `FailureMonitor.at`: a wait or an action."""
    return " ".join(map(str, at)) if isinstance(at, tuple) else str(at)
