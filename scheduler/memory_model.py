"""The memory model: what a chunk holds in a stage, from when to when.

    not recomputed                            recomputed
          ______                              _             ____
         |      |______                        |           |    |______
    _____|      |      |____             _____ |___________|    |      |___
         F     B I     W                      F           B I   I      W
      activation    kept                   checkpoint     activation  kept

F holds the activations from its start. B ends all of it, I leaves what W needs. A simulated B or I recomputes within
itself, a measured one has an R before it.
"""

from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple

from scheduler.action import Event, Kind
from scheduler.errors import ScheduleError


class ChunkMemory(NamedTuple):
    """The memory of a chunk in one stage: the three heights of the pictures above."""

    activation: float = 1
    kept: float = 1
    checkpoint: float = 1

    @classmethod
    def of(cls, activation: float | None, kept: float | None, checkpoint: float | None) -> "ChunkMemory":
        """None stands for all of the activations.

        Raises:
            ScheduleError: a part is more than the whole.
        """
        whole = 1 if activation is None else activation
        for name, part in (("kept", kept), ("checkpoint", checkpoint)):
            if part is not None and part > whole:
                raise ScheduleError(
                    f"{name} is {part}, but it is a part of the activations, which are {whole}. Give at most {whole}."
                )
        return cls(whole, whole if kept is None else kept, whole if checkpoint is None else checkpoint)


def steps(
    events: Iterable[Event], held: tuple[ChunkMemory, ...], recomputed: Set[tuple[int, int]] | None = None
) -> Iterator[tuple[float, float]]:
    """The times at which the memory of a lane changes, and its new amounts.

    Args:
        events: of one lane, in its order
        held: for each stage; none: every chunk holds 1
        recomputed: the (stage, chunk) pairs that have an R; None: all are recomputed, within their B or I

    Returns:
        (time, how much is held from then on), ascending in time; what it held before the first is 0.
    """
    level: float = 0
    for (stage, kind, chunk), _, start, end in events:
        whole, kept, low = held[stage] if held else ChunkMemory()
        if recomputed is not None and (stage, chunk) not in recomputed:
            low = whole
        restored = whole - low
        within = restored if recomputed is None else 0
        if kind is Kind.F:
            changes = (start, whole), (end, -restored)
        elif kind is Kind.R:
            changes = (start, restored), (end, 0)
        elif kind is Kind.B:
            changes = (start, within), (end, -whole)
        elif kind is Kind.I:
            changes = (start, within), (end, kept - whole)
        elif kind is Kind.W:
            changes = (start, 0), (end, -kept)
        else:
            continue
        for time, change in changes:
            if change:
                level += change
                yield time, level
