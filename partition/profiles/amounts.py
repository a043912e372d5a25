"""Amounts: bytes of which some may be those of another layer, and numbers with their spread.

    Bytes(own=64, shared=((3, 16),))      64 that no other layer has, and the 16 of storage or parameter number 3
    joined([Bytes(...), Bytes(...)])      what several layers have together: what they share counts once
"""

import statistics
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

__all__ = ["Bytes", "MedianSpread", "joined", "spelt_bytes", "spelt_count", "spelt_seconds", "spelt_work"]


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


def joined(amounts: Iterable[Bytes]) -> int:
    """The bytes of several layers together.

    >>> joined([Bytes(8, ((0, 4),)), Bytes(2, ((0, 4), (1, 1)))])
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
    """
    >>> spelt_bytes(1536), spelt_bytes(0), spelt_bytes(3 * 2**30)
    ('1.50 KiB', '0 B', '3.00 GiB')
    """
    unit = 0
    while size >= 1024 and unit < len(_BINARY) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.2f} {_BINARY[unit]}"


def spelt_seconds(seconds: float) -> str:
    """
    >>> spelt_seconds(0.00123), spelt_seconds(2), spelt_seconds(0)
    ('1.23 ms', '2.00 s', '0 s')
    """
    if not seconds:
        return "0 s"
    unit = 0 if seconds >= 1 else 1 if seconds >= 1e-3 else 2
    return f"{seconds * 1000**unit:.{_digits(seconds * 1000**unit)}f} {('s', 'ms', 'us')[unit]}"


def spelt_count(count: float, unit_name: str) -> str:
    """
    >>> spelt_count(1.5e9, "FLOP"), spelt_count(12, "FLOP")
    ('1.50 GFLOP', '12 FLOP')
    """
    unit = 0
    while count >= 1000 and unit < len(_DECIMAL) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {unit_name}" if unit == 0 else f"{count:.{_digits(count)}f} {_DECIMAL[unit]}{unit_name}"


def spelt_work(work: float, unit: str) -> str:
    """Seconds ("s") or FLOPs in words."""
    return spelt_seconds(work) if unit == "s" else spelt_count(work, unit)


def _digits(number: float) -> int:
    return 2 if number < 10 else 1 if number < 100 else 0


_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
