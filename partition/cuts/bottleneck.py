"""The bottleneck: the time of the slowest stage, as small as it can be with every stage within its limits.

    windows ──► relaxed: no cut is faster ──► slowest[s][j], for ends that can matter ──► the least

    slowest[s][j] = min over i of max(slowest[s - 1][i], time(s, i, j) where the bytes of (i, j) fit)

Dynamic programming is exact whatever times and bytes are; messages make them neither convex nor monotone. It is short,
since a relaxation comes first: a stage may begin anywhere up to the furthest end of the one before. The furthest ends
for one time are a few steps for each stage; the slowest stage on the way to them is a shorter time, and so on down,
until the last layer is out of reach. No cut is faster, and nearly always there is one that is as fast. Of ends that no
stage can have in that time, on its way from the first layer or to the last, none is looked at; and what takes no longer
than the relaxation is not compared.
"""

import sys
from math import inf

import numpy

from partition.cuts.windows import Floats, Indices, WindowBlock, Windows, placed, slid

__all__ = ["ANY_TIME", "bottleneck"]


def bottleneck(windows: Windows, caps: Floats) -> float:
    """The time of the slowest stage, as small as can be but for rounding; inf where nothing fits.

    Args:
        windows: of the layers in the stages.
        caps: bytes that each row of bytes may have.
    """
    least = _relaxed(windows, caps)
    for value in (least, least * 1.001, least * 1.02):
        slowest = _slowest(windows, caps, least, value)
        if slowest < inf:
            return slowest
    if _slowest(windows, caps, ANY_TIME, ANY_TIME) == inf:
        return inf
    for value in (least * 1.3, least * 4, ANY_TIME):
        slowest = _slowest(windows, caps, least, value)
        if slowest < inf:
            break
    return slowest


def _relaxed(windows: Windows, caps: Floats) -> float:
    """The time of the slowest stage, if each stage may begin wherever the furthest end before it is not passed.

    No cut is faster. Where no time is enough it is what some layer takes alone.
    """
    layer_times = [line.least_ends[1:] - line.most_begins[:-1] for line in windows.kinds]  # with each layer, the least
    share = (windows.work[-1] + windows.extra.sum()) / windows.speeds.sum()
    least = max(float(numpy.minimum.reduce(layer_times).max()), float(share) - windows.rounding, 0.0)
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


def _slowest(windows: Windows, caps: Floats, least: float, value: float) -> float:
    """The least time of the slowest stage that is neither below `least` nor above `value`; inf where there is none."""
    starts, before = (0, 0), numpy.full(1, least)
    for stage, stops in enumerate(windows.ends_within(caps, value)):
        block = WindowBlock.between(starts, stops)
        if block.is_empty:
            return inf
        best = numpy.full(stops[1] - stops[0] + 1, least)
        chosen = _undecided(windows, stage, caps, least, (starts[0], before), block)
        if len(chosen):
            block = windows.shorter(stage, caps, value, block, chosen)
            times = windows.lines[stage].within(block, chosen)
            numpy.maximum(times, slid(placed(before, starts[0], windows.layers), block)[:, chosen], out=times)
            full = windows.too_big(stage, caps, block, chosen)
            if full is not None:
                numpy.copyto(times, inf, where=full)
            best[chosen] = times.min(axis=0)
        within = (best <= value).nonzero()[0]
        if not len(within):
            return inf
        before = numpy.where(best <= value, best, inf)[within[0] : within[-1] + 1]
        starts = stops[0] + int(within[0]), stops[0] + int(within[-1])
    return float(before[-1])


def _undecided(
    windows: Windows, stage: int, caps: Floats, least: float, before: tuple[int, Floats], block: WindowBlock
) -> Indices:
    """The columns of a block but those in which the latest start has a window that takes no longer than `least`."""
    stops = numpy.arange(block.first, block.last + 1)
    if block.size < _FEW:
        return stops - block.first
    line, (first, times) = windows.lines[stage], before
    begins = numpy.where(times <= least, line.begins[first : first + len(times)], -inf)
    latest = numpy.maximum.accumulate(begins)
    places = numpy.maximum.accumulate(numpy.where(begins == latest, numpy.arange(len(begins)), 0))
    at = numpy.clip(stops - 1 - first, 0, len(begins) - 1)
    sure = (stops > first) & (latest[at] > -inf) & (line.ends[stops] - latest[at] <= least)
    sure &= windows.surely_fit(stage, caps, first + places[at], stops)
    return (~sure).nonzero()[0]


ANY_TIME = sys.float_info.max  # a time that no stage takes
_FEW = 2048  # windows: as many are looked at as fast as they are told apart
