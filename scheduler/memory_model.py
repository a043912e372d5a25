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

    def changes(self, is_within: bool = True) -> dict[Kind, tuple[float, float]]:
        """The changes at the start and at the end of an action of each kind.

        Args:
            is_within: whether a B or I recomputes within itself, or an R has done so before it

        >>> ChunkMemory(activation=8, kept=3, checkpoint=1).changes()[Kind.I]
        (7, -5)
        """
        whole, kept, low = self
        restored = whole - low
        within = restored if is_within else 0
        return {
            Kind.F: (whole, -restored), Kind.R: (restored, 0), Kind.B: (within, -whole), Kind.I: (within, kept - whole),
            Kind.W: (0, -kept),
        }


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
    tables: dict[tuple[int, bool], dict[Kind, tuple[float, float]]] = {}
    for (stage, kind, chunk), _, start, end in events:
        place = stage, recomputed is None or (stage, chunk) in recomputed
        if place not in tables:
            memory = held[stage] if held else ChunkMemory()
            low = memory.checkpoint if place[1] else memory.activation
            tables[place] = memory._replace(checkpoint=low).changes(recomputed is None)
        for time, change in zip((start, end), tables[place].get(kind, ())):
            if change:
                level += change
                yield time, level
