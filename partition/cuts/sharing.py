"""The exact cut where several stages share the memory of a device: a search over the ways to split it.

    limits of stages ──► fastest slowest stage, evenest balance ──► all devices keep their memory? ──► done
          ▲                                                                      │ no
          └── one limit for each stage of a device that does not, less than what the stage holds ◄──┘

    a + b <= memory     only if  a <= c  or  b <= memory - c

A stage has at first what is left of its device's memory when all others of the device hold as little as they can. A cut
under these limits is at least as fast as any under the memory of devices, so if devices keep it, none is faster. If one
does not, its stages hold too much together. Let c1, c2, ... make up its memory, each less than what a stage holds now:
of any balance that fits, at least one stage keeps its c. So the search goes on from as many sets of limits, each of
which leaves out this balance, and always from the set with the fastest slowest stage: branch and bound. It ends with a
cut that no other one beats, or when no set is left: then nothing fits. The number of sets is bounded, since it may grow
exponentially; beyond the bound, the fastest cut that fits of those that the search has come upon counts, if any.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import numpy

from partition.cuts.fastest import fastest
from partition.cuts.layers import Floats
from partition.cuts.windows import Windows


class _LimitedCut(NamedTuple):
    """A cut under limits of stages; those with the fastest slowest stage come first, then the nearest to fit.

    Attributes:
        slowest: the time of the slowest stage.
        over: the bytes by which some device exceeds its memory, at the most.
        number: of the node.
        caps: bytes that each row of bytes may have.
        row_bytes: bytes that it has.
        balance: layers of each stage.
    """

    slowest: float
    over: float
    number: int
    caps: Floats
    row_bytes: Floats
    balance: tuple[int, ...]


class Cut(NamedTuple):
    """A cut, and how good it is.

    Attributes:
        balance: layers of each stage; empty: none fits, or none is known that does.
        bound: no cut that fits has a faster slowest stage; inf: none fits.
    """

    balance: tuple[int, ...]
    bound: float


def shared(windows: Windows, splits: int) -> Cut:
    """The fastest cut under the memory of all devices.

    Args:
        windows: of the layers in the stages.
        splits: how many sets of limits to cut under, before the best that is known is taken.
    """
    first = _cut_under(windows, loosest_caps(windows), 0)
    if first is None:
        return Cut((), inf)
    best = first if first.over <= 0 else _cut_under(windows, _even_caps(windows), 0)
    if best is not None and best.over > 0:
        best = None
    queue, tried = [first], 1
    while queue and (best is None or queue[0].slowest < best.slowest):
        if tried >= splits:
            return Cut(best.balance if best else (), queue[0].slowest)
        for caps in _narrower(windows, heappop(queue)):
            tried += 1
            child = _cut_under(windows, caps, tried)
            if child is not None and (best is None or child.slowest < best.slowest):
                if child.over <= 0:
                    best = child
                else:
                    heappush(queue, child)
    return Cut(best.balance, best.slowest) if best else Cut((), inf)


def loosest_caps(windows: Windows) -> Floats:
    """For each row of bytes what is left where the other stages of its device hold as little as they can."""
    least, caps = windows.least_bytes(), numpy.zeros(sum(len(rows) for _, rows in windows.limits))
    for memory, rows in windows.limits:
        caps[rows] = memory - (least[rows].sum() - least[rows])
    return caps


def _even_caps(windows: Windows) -> Floats:
    """For each row of bytes an equal part of its device's memory."""
    caps = numpy.zeros(sum(len(rows) for _, rows in windows.limits))
    for memory, rows in windows.limits:
        caps[rows] = memory / len(rows)
    return caps


def _cut_under(windows: Windows, caps: Floats, number: int) -> _LimitedCut | None:
    """The cut under limits of stages; None where nothing fits."""
    slowest, balance = fastest(windows, caps)
    if slowest == inf:
        return None
    row_bytes = windows.bytes(balance)
    return _LimitedCut(slowest, windows.over(row_bytes), number, caps, row_bytes, tuple(balance))


def _narrower(windows: Windows, node: _LimitedCut) -> Iterator[Floats]:
    """Limits of which any cut that fits keeps some, and the cut of a node none; of the device that holds too much."""
    memory, rows = max(windows.limits, key=lambda limit: float(node.row_bytes[limit[1]].sum()) - limit[0])
    over = float(node.row_bytes[rows].sum()) - memory
    for row in rows:
        caps = node.caps.copy()
        caps[row] = node.row_bytes[row] - over / len(rows)
        yield caps
