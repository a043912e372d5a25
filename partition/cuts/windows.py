"""Windows: sums over runs of neighbouring layers, for all of them up to a length at once.

    table[stop, length] = what layers stop - length to stop - 1 have together

What layers share counts once: an item that an earlier layer of the same window has is not counted again. So each item
says which layer has it before, and is taken off the windows that hold both. (Two prefix sums; no window is walked.)
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy
from numpy.typing import NDArray

from partition.profiles.amounts import Bytes

__all__ = ["Amounts", "Table", "amounts_of", "table_of", "shifted"]

Table: TypeAlias = NDArray[numpy.float64]


class Amounts(NamedTuple):
    """Numbers of layers.

    Attributes:
        each: of each layer, alone.
        again: (layer before, layer, number): what a window with both counts twice.
    """

    each: Sequence[float]
    again: Sequence[tuple[int, int, float]] = ()


def amounts_of(layers: Iterable[Bytes], first: Iterable[int] = ()) -> Amounts:
    """The bytes of layers.

    Args:
        layers: of each.
        first: numbers that a window from layer 0 does not count: they are someone else's there.

    Example:
        >>> amounts_of([Bytes(1, ((7, 4),)), Bytes(2), Bytes(0, ((7, 4),))])
        Amounts(each=[5, 2, 4], again=[(0, 2, 4)])
    """
    before = dict.fromkeys(first, 0)
    each, again = [], []
    for place, amount in enumerate(layers):
        each.append(amount.total)
        for number, size in amount.shared:
            if number in before:
                again.append((before[number], place, size))
            before[number] = place
    return Amounts(each, again)


def table_of(amounts: Amounts, longest: int) -> Table:
    """The table of some amounts.

    Args:
        amounts: of the layers.
        longest: the length of the longest windows; column 0 is of length 1.

    Returns:
        [layers + 1, longest]: row `stop`, column length - 1; inf where there are not so many layers before `stop`.

    Example:
        >>> table_of(Amounts([5, 2, 4], [(0, 2, 4)]), 3)[3]
        array([4., 6., 7.])
    """
    layers = len(amounts.each)
    sums = numpy.concatenate([[0.0], numpy.cumsum(numpy.asarray(amounts.each, dtype=float))])
    table = sums[:, None] - shifted(sums, longest, -numpy.inf)
    if amounts.again:
        before, later, sizes = (numpy.array(column) for column in zip(*amounts.again))
        # From row later + 1, where the window of length stop - before is the first that holds both.
        counts = numpy.maximum(numpy.minimum(layers, before + longest) - later, 0)
        offsets = numpy.arange(counts.sum()) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
        rows = numpy.repeat(later + 1, counts) + offsets
        columns = rows - numpy.repeat(before, counts) - 1
        weights = numpy.repeat(sizes.astype(float), counts)
        twice = numpy.bincount(rows * longest + columns, weights, (layers + 1) * longest)
        table -= numpy.cumsum(twice.reshape(layers + 1, longest), axis=1)
    return table


def shifted(values: Table, longest: int, missing: float) -> Table:
    """For each `stop` and length, the value at `stop - length`.

    >>> shifted(numpy.array([1.0, 2.0, 3.0]), 2, numpy.inf)
    array([[inf, inf],
           [ 1., inf],
           [ 2.,  1.]])
    """
    padded = numpy.concatenate([numpy.full(longest, missing), values[:-1]])
    windows: Table = numpy.lib.stride_tricks.sliding_window_view(padded, longest)[:, ::-1]
    return windows
