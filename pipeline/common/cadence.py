"""Validating calls: those that run the checks which the others leave out."""

from collections import Counter
from collections.abc import Hashable

__all__ = ["Cadence", "validates"]


def validates(number: int) -> bool:
    """Whether call `number`, counted from 1, is a validating one: 1, 2, 4, 8, ...

    What the first calls show is most of what there is to see, and the checks of a long run cost nothing in the end.

    >>> [number for number in range(1, 20) if validates(number)]
    [1, 2, 4, 8, 16]
    """
    return number & (number - 1) == 0


class Cadence:
    """A count of calls by kind, which says which of them validate.

    >>> cadence = Cadence()
    >>> [cadence.next() for _ in range(5)], cadence.next("another kind")
    ([True, True, False, True, False], True)
    """

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()

    def next(self, kind: Hashable = None) -> bool:
        """Count a call. Returns whether it validates."""
        self._counts[kind] += 1
        return validates(self._counts[kind])

    def take_back(self, kind: Hashable = None) -> None:
        """Take the last call, which failed, out of the count."""
        self._counts[kind] -= 1
