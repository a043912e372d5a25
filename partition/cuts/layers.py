"""Layers in numbers: what the layers of a profile take and hold, for a cut.

    Profile ──► Layers: work, state, saved, read, message; each a number for each layer, and what two layers share
                  └───► tables: the bytes of all runs of neighbouring layers

What layers share counts once in a stage that has both. So an amount says, beside the number of each layer alone, which
earlier layer has the same bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy
from numpy.typing import NDArray

from partition.profiles.amounts import Bytes
from partition.profiles.profile import Profile

Floats: TypeAlias = NDArray[numpy.float64]


class Amounts(NamedTuple):
    """Numbers of layers.

    Attributes:
        sizes: of each layer, alone.
        shared: (layer before, layer, number): what a window with both counts twice.
    """

    sizes: Sequence[float]
    shared: Sequence[tuple[int, int, float]] = ()


@dataclass(frozen=True)
class Layers:
    """The layers that are cut.

    Args:
        work: of a chunk in each; F and B.
        state, saved, read: bytes: held once; for each chunk whose activations are kept; for each input that is kept.
        entry: bytes of the input of a stage that begins at each layer, beside `read`.
        message: bytes of a chunk at each cut, before layer 0, 1, ... (the first and the last are not used).
        forward: of `work`, what a recomputation takes.
        loss: bytes that the loss saves in a last stage that begins at each layer, while its backward runs.
        late: bytes for each chunk of which gradients wait from I to W.
    """

    work: Sequence[float]
    state: Amounts = Amounts(())
    saved: Amounts = Amounts(())
    read: Amounts = Amounts(())
    entry: Sequence[float] = ()
    message: Sequence[float] = ()
    forward: Sequence[float] = ()
    loss: Sequence[float] = ()
    late: Amounts = Amounts(())

    @cached_property
    def tables(self) -> Floats:
        """The bytes of layers i to j - 1 at [., i, j]: of what `HeldChunks` counts, after `state`."""
        entry, loss = (numpy.pad(sizes, (0, len(self.work) + 1 - len(sizes)))[:, None]
                       for sizes in (self.entry, self.loss))
        state, saved, read, late = map(self._table, (self.state, self.saved, self.read, self.late))
        return numpy.stack([state, saved, read + entry, 0 * state + loss, late])

    @cached_property
    def least(self) -> Floats:
        """The same, but the fewest bytes of any run that has these layers and maybe more."""
        backwards: Floats = numpy.minimum.accumulate(self.tables, axis=1)[:, :, ::-1]
        return numpy.minimum.accumulate(backwards, axis=2)[:, :, ::-1]

    def _table(self, amounts: Amounts) -> Floats:
        """The same of one amount: what two layers share counts once where both are."""
        places = len(self.work) + 1
        if not len(amounts.sizes):
            return numpy.zeros((places, places))
        sums, twice = sums_of(amounts.sizes), numpy.zeros((places, places))
        for before, layer, size in amounts.shared:
            twice[before, layer + 1] += size
        table: Floats = sums - sums[:, None] - twice[::-1].cumsum(axis=0)[::-1].cumsum(axis=1)
        return table


def sums_of(numbers: Sequence[float]) -> Floats:
    """The sums of the first 0, 1, 2 ... numbers."""
    return numpy.append(0.0, numpy.cumsum(numbers, dtype=float))


def amounts_of(layers: Iterable[Bytes], first: Iterable[int] = ()) -> Amounts:
    """The bytes of layers.

    Args:
        layers: of each.
        first: numbers that a window from layer 0 does not count: they are someone else's there.

    Example:
        >>> amounts_of([Bytes(1, ((7, 4),)), Bytes(2), Bytes(0, ((7, 4),))])
        Amounts(sizes=[5, 2, 4], shared=[(0, 2, 4)])
    """
    layer_with = dict.fromkeys(first, 0)
    sizes, shared = [], []
    for index, amount in enumerate(layers):
        sizes.append(amount.total)
        for number, size in amount.shared:
            if number in layer_with:
                shared.append((layer_with[number], index, size))
            layer_with[number] = index
    return Amounts(sizes, shared)


def layers_of(profile: Profile) -> Layers:
    """The layers of a profile."""
    layers = profile.layers
    states = [
        Bytes(
            sum(amount.own for amount in layer.states) + layer.lasting,
            tuple([
                (3 * number + kind, size)
                for kind, amount in enumerate(layer.states)
                for number, size in amount.shared
            ]),
        )
        for layer in layers
    ]
    entry = [number for number, _ in profile.entry]
    return Layers(
        [layer.work.total for layer in layers],
        amounts_of(states),
        amounts_of([layer.saved for layer in layers], entry),
        Amounts([sum(size for _, size in layer.skips.pops) for layer in layers], profile.skips),
        [0, *(layer.output for layer in layers[:-1])],
        [0, *map(profile.message, range(1, len(layers))), 0],
        [layer.work.forward.median for layer in layers],
        list(map(profile.loss_bytes, range(len(layers)))),
        amounts_of([layer.waits.late for layer in layers], entry),
    )
