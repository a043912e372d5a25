"""The evenest balance: of those with no stage slower than a time, the one with the smallest sum of squared times.

    squares[s][j] = min over i of squares[s - 1][i] + time(s, i, j) ** 2, where times and bytes of (i, j) fit

Many ends of stages may be in a balance with a fast slowest stage, and few in an even one. Which cannot is told by what
stages take at the least that share out some work: for any level h

    sum of x[s] ** 2  >=  sum of 2 h speed[s] x[s] - (h speed[s]) ** 2     and a layer that alone takes x more than its
                       =  2 h work - h ** 2 (sum of speed[s] ** 2)         level adds x ** 2

So ends from which the rest, or to which the layers before, take more than a sum are in no balance with that sum. A pass
that finds a balance below such a sum has found the evenest; if there is none, the sum was too small, and grows.
"""

from collections.abc import Sequence
from math import inf, sqrt

import numpy

from partition.cuts.windows import Floats, WindowBlock, Windows, placed, slid

__all__ = ["evenest"]


def evenest(windows: Windows, caps: Floats, value: float) -> list[int]:
    """The balance with the smallest sum of squared times, of those whose stages are within their limits.

    Args:
        windows: of the layers in the stages.
        caps: bytes that each row of bytes may have.
        value: no stage takes longer. There is such a balance.
    """
    value *= 1 + 1e-12  # sums of floats that are equal but for rounding
    ends = windows.ends_within(caps, value)
    floors = _Floors(windows)
    spare = floors.spare if sum(last - first for first, last in ends) > _FEW * windows.stages else inf
    balance = None
    while balance is None and spare < inf:
        balance = _fewest_squares(windows, caps, value, ends, floors, spare)
        spare = 2 * spare if spare < _MOST * floors.least else inf
    balance = balance or _fewest_squares(windows, caps, value, ends, floors, inf)
    assert balance is not None  # there is one
    return balance


class _Floors:
    """Lower bounds of the sum of squared times, for any layers that stages may have.

    Attributes:
        least: of all stages with all layers.
        spare: how much more an even balance may take: a guess, from how coarse layers are, and their messages.
    """

    def __init__(self, windows: Windows) -> None:
        speeds, work = windows.speeds, windows.work
        total = float((speeds**2).sum())
        fastest = float(speeds.max())
        layer_times = numpy.diff(work) / fastest
        levels = float(work[-1]) / total * numpy.geomspace(0.01, 1.5, 24)[:, None]
        over = numpy.cumsum(numpy.maximum(layer_times - levels * fastest, 0) ** 2, axis=1)
        extra = float(windows.extra.sum())
        least = 2 * levels[:, 0] * (work[-1] + extra) - levels[:, 0] ** 2 * total + over[:, -1]
        best = int(least.argmax())
        self.least = max(float(least[best]), 0.0)
        self._level = float(levels[best, 0]) * fastest
        trimmed = numpy.minimum(layer_times, self._level)
        self._trimmed = numpy.concatenate([[0.0], numpy.cumsum(trimmed)])
        self.spare = windows.stages * float((trimmed**2).mean()) / 2 + 8 * self._level * windows.light_messages
        levels_near = slice(max(0, best - 3), best + 4)
        levels = levels[levels_near]
        self._layers = 2 * levels * work + numpy.pad(over[levels_near], ((0, 0), (1, 0)))  # up to each place
        of_stages = levels**2 * speeds**2 - 2 * levels * windows.extra
        self._stages = numpy.pad(numpy.cumsum(of_stages, axis=1), ((0, 0), (1, 0)))  # up to each

    def before(self, stage: int, first: int, last: int) -> Floats:
        """Of the stages before this one, if they have the layers before each place."""
        return _highest(self._layers[:, first : last + 1] - self._stages[:, stage, None])

    def after(self, stage: int, first: int, last: int) -> Floats:
        """Of this stage and those behind it, if they have the layers from each place on."""
        layers = self._layers[:, -1:] - self._layers[:, first : last + 1]
        return _highest(layers - (self._stages[:, -1:] - self._stages[:, stage, None]))

    def longest(self, spare: float, first: int, last: int) -> int:
        """The length of the longest stage in a balance that takes so much more than the least."""
        stops = self._trimmed[first : last + 1]
        starts = self._trimmed.searchsorted((stops - self._level - sqrt(spare)) * (1 - 1e-12))
        return int((numpy.arange(first, last + 1) - starts).max())


def _highest(floors: Floats) -> Floats:
    """Of the floors by all levels the highest, for each place; none is below 0."""
    return numpy.asarray(numpy.maximum(floors.max(axis=0), 0))


def _fewest_squares(
    windows: Windows, caps: Floats, value: float, ends: Sequence[tuple[int, int]], floors: _Floors, spare: float
) -> list[int] | None:
    """The balance with the smallest sum of squares; None where it is more than so much above the floor."""
    limit = (floors.least + spare) * (1 + 1e-9)
    starts, before = (0, 0), numpy.zeros(1)
    lengths = []
    for stage, (first, last) in enumerate(ends):
        if first > last:
            return None
        if spare < inf:
            after = floors.after(stage + 1, first, last)
            near = (floors.before(stage + 1, first, last) + after <= limit).nonzero()[0]
            if not len(near):
                return None
            after = after[near[0] : near[-1] + 1]
            first, last = first + int(near[0]), first + int(near[-1])
        block = WindowBlock.between(starts, (first, last))
        if block.is_empty:
            return None
        if spare < inf and block.long - block.short > _FEW:
            block = block._replace(long=max(block.short, min(block.long, floors.longest(spare, first, last))))
        block = windows.shorter(stage, caps, value, block)
        squares = windows.lines[stage].within(block)
        slow = squares > value
        squares *= squares
        squares += slid(placed(before, starts[0], windows.layers), block)
        full = windows.too_big(stage, caps, block)
        numpy.copyto(squares, inf, where=slow if full is None else slow | full)
        shortest = squares.argmin(axis=0)
        best = squares[shortest, numpy.arange(len(shortest))]
        places = (best + after <= limit if spare < inf else best < inf).nonzero()[0]
        if not len(places):
            return None
        lengths.append((first, block.short + shortest))
        before = best[places[0] : places[-1] + 1]
        starts = first + int(places[0]), first + int(places[-1])
    balance: list[int] = []
    stop = windows.layers
    for first, chosen in reversed(lengths):
        balance.append(int(chosen[stop - first]))
        stop -= balance[-1]
    return balance[::-1]


_FEW = 16  # places or lengths: to look at them all is as fast as to know which can be left out
_MOST = 4  # times the floor: then all are looked at
