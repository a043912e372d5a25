"""The fastest cut with every stage within its limits: its slowest stage is as fast as can be; the evenest of these.

    windows ──► relaxed: no cut is faster ──► slowest stage, as fast as can be ──► smallest sum of squared times

    slowest[s][j] = min over i of max(slowest[s - 1][i], time(s, i, j))     where time and bytes of (i, j) are allowed
    squares[s][j] = min over i of squares[s - 1][i] + time(s, i, j) ** 2

Dynamic programming is exact whatever times and bytes are; messages make them neither convex nor monotone. It is short,
since a relaxation comes first: a stage may begin anywhere up to the furthest end of the one before. The furthest ends
for one time are a few steps for each stage; the slowest stage on the way to them is a shorter time, and so on down,
until the last layer is out of reach. No cut is faster, and nearly always there is one that is as fast. Of ends that no
stage can have in that time, on its way from the first layer or to the last, none is looked at.
"""

import sys
from collections.abc import Callable
from math import inf

import numpy

from partition.cuts.windows import Floats, WindowBlock, Windows, placed, slid

__all__ = ["ANY_TIME", "fastest"]


def fastest(windows: Windows, caps: Floats) -> tuple[float, list[int]]:
    """The time of the slowest stage, as small as can be but for rounding; inf where nothing fits.

    And the balance with the smallest sum of squared times, of those in which no stage is slower.

    Args:
        windows: of the layers in the stages.
        caps: bytes that each row of bytes may have.
    """
    least = _relaxed(windows, caps)
    for value in (least, least * 1.001, least * 1.02, least * 1.3, least * 4, ANY_TIME):
        slowest, _ = _best(windows, caps, value, least, numpy.maximum)
        if slowest < inf:
            rounded = slowest * (1 + 1e-12)  # sums of floats that are equal but for rounding
            return slowest, _best(windows, caps, rounded, 0.0, lambda times, before: times * times + before)[1]
    return inf, []


def _relaxed(windows: Windows, caps: Floats) -> float:
    """The time of the slowest stage, if each stage may begin wherever the furthest end before it is not passed.

    No cut is faster. Where no time is enough it is what some layer takes alone.
    """
    layer_times = [line.least_ends[1:] - line.most_begins[:-1] for line in set(windows.lines)]  # at least, with each
    least = max(float(numpy.minimum.reduce(layer_times).max()), windows.share - windows.rounding, 0.0)
    values = least + (least or 1.0) * numpy.concatenate([[0.0], numpy.geomspace(1e-4, 1e9, 60)])
    low = high = least
    while True:
        reached = numpy.stack(windows.furthest(caps, values))
        enough = (reached[-1] == windows.layers).nonzero()[0]
        if len(enough):  # as long as the slowest stage on the way
            stops = reached[:, enough[0]]
            spans = zip(windows.lines, [0, *stops], stops)
            high = max(least, *(float(line.least_ends[stop] - line.most_begins[start]) for line, start, stop in spans))
            low = float(values[enough[0] - 1]) if enough[0] else low
        if not len(enough) or high - 4 * windows.rounding <= low:
            return high + 4 * windows.rounding
        values = numpy.linspace(low, high - 4 * windows.rounding, 17)[1:]


def _best(
    windows: Windows, caps: Floats, value: float, start: float, combined: Callable[[Floats, Floats], Floats]
) -> tuple[float, list[int]]:
    """The least that the times of all stages make, none of them above `value`, and its balance; inf: there is none.

    Args:
        start: what no stage makes.
        combined: (times of a stage, what those before it make) -> what they make together.
    """
    starts, before = (0, 0), numpy.full(1, start)
    lengths = []
    for stage, stops in enumerate(windows.ends_within(caps, value)):
        block = WindowBlock.between(starts, stops)
        if block.is_empty:
            return inf, []
        block = windows.shorter(stage, caps, value, block)
        times = windows.lines[stage].within(block)
        results = combined(times, slid(placed(before, starts[0], windows.layers), block))
        results[times > value] = inf
        full = windows.too_big(stage, caps, block)
        if full is not None:
            results[full] = inf
        shortest = results.argmin(axis=0)
        best = results[shortest, numpy.arange(len(shortest))]
        places = (best < inf).nonzero()[0]
        if not len(places):
            return inf, []
        lengths.append((stops[0], block.short + shortest))
        before = best[places[0] : places[-1] + 1]
        starts = stops[0] + int(places[0]), stops[0] + int(places[-1])
    balance: list[int] = []
    stop = windows.layers
    for first, chosen in reversed(lengths):
        balance.append(int(chosen[stop - first]))
        stop -= balance[-1]
    return float(before[-1]), balance[::-1]


ANY_TIME = sys.float_info.max  # a time that no stage takes
