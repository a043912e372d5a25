"""Amounts: bytes of which some may be those of another layer, and numbers with their spread.

    Bytes(own=64, shared=((3, 16),))      64 that no other layer has, and the 16 of storage or parameter number 3
    sum_of_bytes([Bytes(...), Bytes(...)])    what several layers have together: what they share counts once
"""

import statistics
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple


class Bytes(NamedTuple):
    """Bytes of one layer.

    Attributes:
        own: of what no other layer has.
        shared: (number, bytes) of what other layers may have as well, under the same number.
    """

    own: int
    shared: tuple[tuple[int, int], ...] = ()

    @property
    def total(self) -> int:
        """All of them, of this layer alone."""
        return self.own + sum(size for _, size in self.shared)

    def without(self, numbers: Container[int]) -> "Bytes":
        """Those that are not shared under one of these numbers."""
        return self._replace(shared=tuple([pair for pair in self.shared if pair[0] not in numbers]))


def sum_of_bytes(amounts: Iterable[Bytes]) -> int:
    """The bytes of several layers together.

    >>> sum_of_bytes([Bytes(8, ((0, 4),)), Bytes(2, ((0, 4), (1, 1)))])
    15
    """
    own, shared = 0, dict[int, int]()
    for amount in amounts:
        own += amount.own
        shared.update(amount.shared)
    return own + sum(shared.values())


class MedianSpread(NamedTuple):
    """A number that was measured several times.

    Attributes:
        median: of the passes.
        spread: the range of the middle half of the passes, from quartile to quartile; 0 for one pass, or a count.
    """

    median: float
    spread: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> "MedianSpread":
        """The median and the spread of some values."""
        if len(values) == 1:
            return cls(values[0])
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, high - low)


def spelt_bytes(size: float) -> str:
    """Bytes in words."""
    return spelt_work(size, "B")


def spelt_work(amount: float, unit: str) -> str:
    """Seconds ("s"), bytes ("B") or FLOPs in words.

    >>> spelt_work(0.00123, "s"), spelt_work(1536, "B"), spelt_work(1.5e9, "FLOP"), spelt_work(12, "FLOP")
    ('1.23 ms', '1.50 KiB', '1.50 GFLOP', '12 FLOP')
    """
    if not amount:
        return f"0 {unit}"
    prefixes = _PREFIXES.get(unit, _DECIMAL)
    scale, prefix = next((pair for pair in prefixes if amount >= pair[0]), prefixes[-1])
    number = amount / scale
    digits = 2 if number < 10 or unit == "B" else 1 if number < 100 else 0
    return f"{number:.{0 if scale == 1 and unit != 's' else digits}f} {prefix}{unit}"


_DECIMAL = tuple((1000**power, "kMGTPE"[power - 1 : power]) for power in range(6, -1, -1))
_PREFIXES = {
    "s": ((1, ""), (1e-3, "m"), (1e-6, "u")),
    "B": ((2**40, "Ti"), (2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki"), (1, "")),
}
