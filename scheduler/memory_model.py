"""The memory model: what a chunk holds in a stage, from when to when.

    not recomputed                            recomputed
          ______                              _             ____
         |      |______                        |           |    |______
    _____|      |      |____             _____ |___________|    |      |___
         F     B I     W                      F           B I   I      W
      activation    kept                   checkpoint     activation  kept

F holds the activations from its start. B ends all of it, I leaves what W needs.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from scheduler.action import Kind
from scheduler.errors import ScheduleError
from scheduler.event import Event

__all__ = ["Held", "steps"]


class Held(NamedTuple):
    """The memory of a chunk in one stage: the three heights of the pictures above."""

    activation: float = 1
    kept: float = 1
    checkpoint: float = 1

    @classmethod
    def of(cls, activation: float | None, kept: float | None, checkpoint: float | None) -> "Held":
        """None stands for all of the activations.

        Raises:
            ScheduleError: a part is more than the whole.
        """
        whole = 1 if activation is None else activation
        for what, part in (("kept", kept), ("checkpoint", checkpoint)):
            if part is not None and part > whole:
                raise ScheduleError(
                    f"{what} is {part}, but it is a part of the activations, which are {whole}. Give at most {whole}."
                )
        return cls(whole, whole if kept is None else kept, whole if checkpoint is None else checkpoint)


def steps(events: Iterable[Event], held: tuple[Held, ...]) -> Iterator[tuple[float, float]]:
    """The times at which the memory of a lane changes, and its new amounts.

    Args:
        events: of one lane, in its order
        held: for each stage; none: every chunk holds 1

    Returns:
        (time, how much is held from then on), ascending in time; what it held before the first is 0.
    """
    level: float = 0
    for (stage, kind, _), _, start, end in events:
        whole, kept, low = held[stage] if held else Held()
        if kind is Kind.F:
            changes = (start, whole), (end, low - whole)
        elif kind is Kind.B:
            changes = (start, whole - low), (end, -whole)
        elif kind is Kind.I:
            changes = (start, whole - low), (end, kept - whole)
        else:
            changes = (start, 0), (end, -kept)
        for time, change in changes:
            if change:
                level += change
                yield time, level
