"""The fastest cut with every stage within its limits: its slowest stage is as fast as can be; the evenest of these.

    slowest[s][j] = min over i of max(slowest[s - 1][i], time(s, i, j))     where bytes of (i, j) are allowed
    squares[s][j] = min over i of squares[s - 1][i] + time(s, i, j) ** 2    where no time is above the slowest

Dynamic programming is exact whatever times and bytes are; messages make them neither convex nor monotone. Few layers
are in a stage, so short windows come first, and longer ones only until all that are left out take longer than the
slowest stage that was found, or fit nowhere.
"""

from collections.abc import Callable, Iterable
from math import ceil, inf

import numpy

from partition.cuts.layers import Floats
from partition.cuts.windows import Windows, starts_of


def fastest(windows: Windows, caps: Floats) -> tuple[float, list[int]]:
    """The time of the slowest stage, as small as can be but for rounding; inf where nothing fits.

    And the balance with the smallest sum of squared times, of those in which no stage is slower.

    Args:
        windows: of the layers in the stages.
        caps: bytes that each row of bytes may have.
    """
    width = min(ceil(2 * windows.layers / windows.stages), windows.layers)
    while True:
        slowest, _ = _best(windows.times(caps, width), numpy.maximum)
        limit = slowest * (1 + 1e-12)  # sums of floats that are equal but for rounding
        beyond = windows.least_beyond(caps, width)
        if beyond == inf or beyond > limit:
            break
        width = min(2 * width, windows.layers)
    if slowest == inf:
        return inf, []

    def squares(times: Floats, before: Floats) -> Floats:
        return numpy.where(times <= limit, times * times + before, inf)

    return slowest, _best(windows.times(caps, width), squares)[1]


def furthest(windows: Windows, caps: Floats) -> list[int]:
    """For each stage the last layer before which it can end; 0: nowhere."""
    width = 1
    while windows.least_beyond(caps, width) < inf:
        width = min(2 * width, windows.layers)
    reached = numpy.arange(windows.layers + 1 + width) == 0
    ends = []
    for times in windows.times(caps, width):
        possible = (times < inf) & reached[starts_of(windows.layers, width)]
        reached[1:windows.layers + 1], reached[0] = possible.any(axis=0), False
        ends.append(int(reached.nonzero()[0].max(initial=0)))
    return ends


def _best(tables: Iterable[Floats], combined: Callable[[Floats, Floats], Floats]) -> tuple[float, list[int]]:
    """The least that the times of all stages make, and its balance; inf: there is none.

    Args:
        tables: the times of windows, stage after stage.
        combined: (times of a stage, what those before it make) -> what they make together.
    """
    before, lengths = numpy.zeros(1), []
    for times in tables:
        width, layers = times.shape
        padded = numpy.full(layers + 1 + width, inf)  # no stage begins before layer 0
        padded[:len(before)] = before
        results = combined(times, padded[starts_of(layers, width)])
        shortest = results.argmin(axis=0)
        before = numpy.append(inf, results[shortest, numpy.arange(layers)])
        lengths.append(1 + shortest)
    balance: list[int] = []
    stop = len(before) - 1
    for chosen in reversed(lengths):
        balance.append(int(chosen[stop - 1]))
        stop -= balance[-1]
    return float(before[-1]), balance[::-1]
