"""Windows: the time and the bytes of runs of neighbouring layers, in each stage, for many of them at once.

    window (i, j)      layers i to j - 1
    time(s, i, j)      = ends[s, j] - begins[s, i]                              work and messages: prefix sums
    bytes(r, i, j)     = held[r] · tables[:, i, j]                              a row r for each limit

A stage has one row of bytes, or several: its device holds some chunks at one moment, others at another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from partition.cuts.layers import Floats, Layers, sums_of
from partition.errors import PartitionError
from scheduler.errors import refuse_unless_finite


@dataclass(frozen=True)
class StageSpec:
    """The device of one stage, and what the stage holds there.

    Args:
        speed: 2 takes half the time.
        memory: bytes that fit.
        kept: how many chunks' activations it holds at the most.
        inputs: how many chunks' inputs it holds beside, to recompute their activations.
        work: time on top of its layers' (the loss of the last stage).
        state: bytes on top of its layers'.
        recompute: how often F of a chunk runs again: 1, or the share of the chunks that are recomputed.

    Raises:
        PartitionError: a number is negative, nan or infinite (memory may be infinite), or the speed 0.
    """

    speed: float = 1.0
    memory: float = inf
    kept: int = 1
    inputs: int = 0
    work: float = 0.0
    state: int = 0
    recompute: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.memory, Real) or not self.memory >= 0:
            raise PartitionError(f"memory is {self.memory!r}, but must be a number of bytes from 0, or math.inf.")
        for name, number in vars(self).items():
            if name != "memory":
                refuse_unless_finite(name, number, above=name == "speed", error=PartitionError)


class HeldChunks(NamedTuple):
    """The chunks of which a stage holds something, at one moment.

    Attributes:
        kept: chunks whose activations it has.
        inputs: chunks whose input it has, to recompute.
        loss: 1 while the backward of the loss runs.
        late: chunks of which gradients wait from I to W.
    """

    kept: int
    inputs: int = 0
    loss: int = 0
    late: int = 0


class DeviceStages(NamedTuple):
    """A device whose stages share its memory.

    Attributes:
        stages: its.
        memory: bytes that fit.
        moments: what its stages hold, each in turn, at the moments at which they may hold the most.
    """

    stages: tuple[int, ...]
    memory: float
    moments: tuple[tuple[HeldChunks, ...], ...]


class _StageBytes(NamedTuple):
    """The rows of bytes of a stage.

    Attributes:
        rows: their numbers.
        counts: for each how often it holds the bytes of each table of layers.
        more: bytes on top.
    """

    rows: list[int]
    counts: list[tuple[int, ...]]
    more: int

    def of(self, held: Floats) -> Floats:
        """The bytes of windows of which `held` are those of each table, in each row."""
        return numpy.tensordot(self.counts, held, 1) + self.more


class Windows:
    """All windows of some layers in some stages.

    Args:
        layers: all of them.
        specs: of the stages.
        messages: for each boundary of two stages, the time of a chunk's messages there at each cut; none: no time.
        lanes: devices, with the memory that their stages share.

    Attributes:
        layers, stages: how many.
        limits: (bytes, rows): what some rows of bytes may have together.
    """

    def __init__(
        self,
        layers: Layers,
        specs: Sequence[StageSpec],
        messages: Sequence[Sequence[float]],
        lanes: Sequence[DeviceStages],
    ) -> None:
        self.layers, self.stages = len(layers.work), len(specs)
        self._held = layers
        none = numpy.zeros(self.layers + 1)
        between = [none, *(map(numpy.asarray, messages) if messages else [none] * (self.stages - 1)), none]
        work, forward = sums_of(layers.work), sums_of(layers.forward or [0.0] * self.layers)
        self._lines: list[tuple[Floats, Floats]] = []  # ends and begins of each stage
        for spec, before, after in zip(specs, between, between[1:]):
            sums = work + spec.recompute * forward
            self._lines.append(((sums + spec.work) / spec.speed + after, sums / spec.speed - before))
        self.limits: list[tuple[float, list[int]]] = []
        self._bytes = [_StageBytes([], [], spec.state) for spec in specs]
        self._count = 0
        for lane in lanes:
            for moment in lane.moments if lane.memory < inf else ():
                self.limits.append((lane.memory, list(range(self._count, self._count + len(moment)))))
                for stage, held in zip(lane.stages, moment, strict=True):
                    self._bytes[stage].rows.append(self._count)
                    self._bytes[stage].counts.append((1, *held))
                    self._count += 1

    def times(self, caps: Floats, width: int) -> Iterator[Floats]:
        """For each stage the times of windows: a row for each length up to `width`, a column for each end from 1.

        What begins before layer 0, or has more bytes than its row may have, is inf.
        """
        starts, stops = starts_of(self.layers, width), numpy.arange(1, self.layers + 1)
        held = self._held.tables[:, starts, stops] if self._count else numpy.empty(0)
        for of_stage, (ends, begins) in zip(self._bytes, self._lines):
            table: Floats = ends[1:] - numpy.append(begins, numpy.full(width, -inf))[starts]
            if of_stage.rows:
                table[(of_stage.of(held) > caps[of_stage.rows, None, None]).any(axis=0)] = inf
            yield table

    def least_beyond(self, caps: Floats, width: int) -> float:
        """The time of the fastest window of more layers than that, in any stage that may hold one; inf: none may."""
        starts = numpy.arange(self.layers - width)
        held = self._held.least[:, starts, starts + width + 1] if self._count else numpy.empty(0)
        return min([
            float((ends[width + 1:] - numpy.maximum.accumulate(begins)[:-width - 1]).min())
            for of_stage, (ends, begins) in zip(self._bytes, self._lines) if len(starts)
            if not of_stage.rows or (of_stage.of(held) <= caps[of_stage.rows, None]).all(axis=0).any()
        ], default=inf)  # fmt: skip

    def bytes(self, balance: Sequence[int]) -> Floats:
        """The bytes of each row, for the stages of a balance."""
        row_bytes, stop = numpy.zeros(self._count), 0
        for of_stage, size in zip(self._bytes, balance, strict=True):
            stop += size
            if of_stage.rows:
                row_bytes[of_stage.rows] = of_stage.of(self._held.tables[:, stop - size, stop])
        return row_bytes

    def over(self, row_bytes: Floats) -> float:
        """The bytes by which some rows exceed what they may have together, at the most; negative where none does."""
        return max((float(row_bytes[rows].sum()) - memory for memory, rows in self.limits), default=0.0)

    def least_bytes(self) -> Floats:
        """For each row the bytes of a window that holds as little as any that leaves the other stages a layer each."""
        least = numpy.zeros(self._count)
        for stage, of_stage in enumerate(self._bytes):
            after = self.stages - 1 - stage
            starts = numpy.arange(stage, self.layers - after if stage else 1)
            if of_stage.rows:
                held = self._held.tables[:, starts, starts + 1 if after else self.layers]
                least[of_stage.rows] = of_stage.of(held).min(axis=1)
        return least


def starts_of(layers: int, width: int) -> NDArray[numpy.intp]:
    """The begin of the windows of each length from 1 on, up to each end from 1 on; before layer 0 it is negative."""
    return numpy.arange(1, layers + 1) - numpy.arange(1, width + 1)[:, None]
