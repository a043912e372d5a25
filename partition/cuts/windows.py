"""Windows: the time and the bytes of runs of neighbouring layers, in each stage, for many of them at once.

    window (i, j)      layers i to j - 1
    time(s, i, j)      = ends[s, j] - begins[s, i]                              work and messages: prefix sums
    bytes(r, i, j)     = held_ends[r, j] - held_begins[r, i] + astride(r, i, j)             a row r for each limit

A stage has one row of bytes, or several: its device holds some chunks at one moment, others at another. What neighbours
share, and what layer 0 shares with the caller, is in the prefix sums. What layers farther apart share (a tied weight, a
skip) is taken off in the sums as if each window with the later layer had the earlier one as well; those that begin
between the two get it back: they are `astride`. So sums alone are never more than the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import numpy
from numpy.typing import NDArray

from partition.cuts.layers import Amounts, Layers
from partition.errors import PartitionError
from scheduler.errors import refuse_unless_finite

__all__ = ["DeviceStages", "HeldChunks", "Line", "Indices", "StageSpec", "Floats", "WindowBlock", "Windows", "placed",
           "slid"]  # fmt: skip

Floats: TypeAlias = NDArray[numpy.float64]
Mask: TypeAlias = NDArray[numpy.bool_]
Indices: TypeAlias = NDArray[numpy.intp]


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
        if not isinstance(self.memory, Real) or isnan(self.memory):
            raise PartitionError(f"memory is {self.memory!r}, but must be a number of bytes, or math.inf.")
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


class WindowBlock(NamedTuple):
    """Windows with ends in a range, and lengths in a range; a row for each length, a column for each end.

    Attributes:
        first, last: ends.
        short, long: lengths.
    """

    first: int
    last: int
    short: int
    long: int

    @classmethod
    def between(cls, starts: tuple[int, int], stops: tuple[int, int]) -> "WindowBlock":
        """All windows from one range of places to another."""
        return cls(*stops, max(1, stops[0] - starts[1]), stops[1] - starts[0])

    @property
    def is_empty(self) -> bool:
        """True for a block of no windows."""
        return self.first > self.last or self.short > self.long


class Line:
    """Numbers of all windows, as differences: ends[j] - begins[i] for layers i to j - 1.

    Attributes:
        ends, begins: of each place between layers, from before the first to behind the last.
        least_ends: of all ends from a place on the least.
        most_begins: of all beginnings up to a place the most. Both rise, so places can be searched for.
    """

    def __init__(self, ends: Floats, begins: Floats, missing: float) -> None:
        self.ends, self.begins = ends, begins
        self.least_ends = numpy.ascontiguousarray(numpy.minimum.accumulate(ends[::-1])[::-1])  # else each search copies
        self.most_begins = numpy.maximum.accumulate(begins)
        self._padded = numpy.concatenate([numpy.full(len(begins) - 1, missing), begins])

    def within(self, block: WindowBlock) -> Floats:
        """The numbers of the windows of a block; what is missing: with a beginning before layer 0."""
        table: Floats = self.ends[block.first : block.last + 1] - slid(self._padded, block)
        return table


class Windows:
    """All windows of some layers in some stages.

    Args:
        layers: all of them.
        specs: of the stages.
        messages: for each boundary of two stages, the time of a chunk's messages there at each cut; none: no time.
        lanes: devices, with the memory that their stages share.

    Attributes:
        layers, stages: how many.
        share: the time that each stage would take if all were equally long, without messages.
        lines: the times of windows in each stage.
        rounding: the most by which sums of times that are equal may differ.
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
        forward = _sums(layers.forward or [0.0] * self.layers)
        common = min(spec.recompute for spec in specs)
        common_work = _sums(layers.work) + common * forward
        extra, speed = (numpy.array(column).sum() for column in zip(*[(spec.work, spec.speed) for spec in specs]))
        self.share = float((common_work[-1] + extra) / speed)
        numbers = {id(times): numpy.asarray(times, dtype=float) for times in messages}
        none = numpy.zeros(self.layers + 1)
        between = [none, *([numbers[id(times)] for times in messages] or [none] * (self.stages - 1)), none]
        line_of: dict[tuple[Any, ...], Line] = {}
        self.lines = []
        for spec, before, after in zip(specs, between, between[1:]):
            kind = spec.speed, spec.work, spec.recompute, id(before), id(after)
            if kind not in line_of:
                work = common_work + (spec.recompute - common) * forward if spec.recompute > common else common_work
                ends, begins = (work + spec.work) / spec.speed + after, work / spec.speed - before
                line_of[kind] = Line(ends, begins, inf)
            self.lines.append(line_of[kind])
        self.rounding = 8 * float(numpy.finfo(float).eps) * max(
            float(numpy.abs(part).max()) for line in line_of.values() for part in (line.ends, line.begins))
        self._rows = _Rows(layers, specs, [lane for lane in lanes if lane.memory < inf])
        self.limits = self._rows.limits

    def furthest(self, caps: Floats, values: Floats) -> list[Indices]:
        """For each stage, and each time that a stage may take, no later end of it can be reached; 0: none can."""
        reached = numpy.zeros(len(values), dtype=numpy.intp)
        possible = numpy.ones(len(values), dtype=bool)
        furthest = []
        values = values + self.rounding
        for stage, line in enumerate(self.lines):
            ends = line.least_ends.searchsorted(values + line.most_begins[reached], "right")
            for row in self._rows.by_stage[stage]:
                byte_line = self._rows.lines[row]
                limits = byte_line.least_ends.searchsorted(byte_line.most_begins[reached] + caps[row], "right")
                ends = numpy.minimum(ends, limits)
            reached = numpy.minimum(ends - 1, self.layers - (self.stages - 1 - stage))
            possible &= reached > stage  # a layer for each stage
            reached *= possible
            furthest.append(reached)
        return furthest

    def ends_within(self, caps: Floats, value: float) -> list[tuple[int, int]]:
        """For each stage the first and the last place at which it may end, if none takes longer than this."""
        last = [int(reached[0]) for reached in self.furthest(caps, numpy.array([value]))]
        first = [self.layers]
        for stage in range(self.stages - 1, 0, -1):
            start = int(self._earliest(stage, caps, value, numpy.array([first[-1]]))[0])
            first.append(min(max(start, stage), self.layers))
        return list(zip(reversed(first), last, strict=True))

    def shorter(self, stage: int, caps: Floats, value: float, block: WindowBlock) -> WindowBlock:
        """A block without the lengths at which no window is so fast and small."""
        if block.long - block.short < _NARROW:
            return block
        stops = numpy.arange(block.first, block.last + 1)
        longest = int((stops - self._earliest(stage, caps, value, stops)).max())
        return block._replace(long=max(block.short, min(block.long, longest)))

    def _earliest(self, stage: int, caps: Floats, value: float, stops: Indices) -> Indices:
        """For each end, a window that begins before this takes longer or holds too much, in a stage."""
        line = self.lines[stage]
        starts = line.most_begins.searchsorted(line.least_ends[stops] - (value + self.rounding), "left")
        for row in self._rows.by_stage[stage]:
            byte_line = self._rows.lines[row]
            limits = byte_line.most_begins.searchsorted(byte_line.least_ends[stops] - caps[row], "left")
            starts = numpy.maximum(starts, limits)
        return starts

    def too_big(self, stage: int, caps: Floats, block: WindowBlock) -> Mask | None:
        """The windows that hold too much; None: nothing is too much."""
        full: Mask | None = None
        for row in self._rows.by_stage[stage]:
            over = self._rows.bytes(row, block) > caps[row]
            full = over if full is None else full | over
        return full

    def bytes(self, balance: Sequence[int]) -> Floats:
        """The bytes of each row, for the stages of a balance."""
        row_bytes, stop = numpy.zeros(len(self._rows.lines)), 0
        for rows, size in zip(self._rows.by_stage, balance, strict=True):
            stop += size
            for row in rows:
                row_bytes[row] = self._rows.bytes(row, WindowBlock(stop, stop, size, size))[0, 0]
        return row_bytes

    def over(self, row_bytes: Floats) -> float:
        """The bytes by which some rows exceed what they may have together, at the most; negative where none does."""
        return max((float(row_bytes[rows].sum()) - memory for memory, rows in self.limits), default=0.0)

    def least_bytes(self) -> Floats:
        """For each row the bytes of a window that holds as little as any that leaves the other stages a layer each."""
        least = numpy.zeros(len(self._rows.lines))
        for stage, rows in enumerate(self._rows.by_stage):
            starts = slice(stage, self.layers - (self.stages - 1 - stage)) if stage else slice(0, 1)
            for row in rows:
                line = self._rows.lines[row]
                stops = line.ends[1:][starts] if stage < self.stages - 1 else line.ends[-1]
                least[row] = (stops - line.begins[:-1][starts]).min()
        return least


class _Rows:
    """The bytes of windows: a row for each stage of a lane and each of its moments.

    Attributes:
        by_stage: the rows of each stage.
        lines: of each row.
        limits: (bytes, rows): what some rows may have together.
    """

    def __init__(self, layers: Layers, specs: Sequence[StageSpec], lanes: Sequence[DeviceStages]) -> None:
        none = Amounts([0] * len(layers.work))
        of_chunks = layers.saved, layers.read, layers.late
        sums = [_PrefixSums(amounts if len(amounts.sizes) else none) for amounts in (layers.state, *of_chunks)]
        state, *of_chunk = sums
        entry, tail = numpy.zeros(len(layers.work) + 1), numpy.zeros(len(layers.work) + 1)
        entry[: len(layers.entry)] = layers.entry
        tail[: len(layers.loss)] = layers.loss
        self.by_stage: list[list[int]] = [[] for _ in specs]
        self.lines: list[Line] = []
        self.limits: list[tuple[float, list[int]]] = []
        self._sizes: list[Floats] = []
        for lane in lanes:
            for moment in lane.moments:
                rows = list(range(len(self.lines), len(self.lines) + len(moment)))
                self.limits.append((lane.memory, rows))
                for stage, row, chunks in zip(lane.stages, rows, moment, strict=True):
                    self.by_stage[stage].append(row)
                    counts = chunks.kept, chunks.inputs, chunks.late
                    ends, begins = state.ends + specs[stage].state, state.begins
                    for count, amount in zip(counts, of_chunk):
                        if count:
                            ends, begins = ends + count * amount.ends, begins + count * amount.begins
                    begins = begins - chunks.inputs * entry - chunks.loss * tail
                    self.lines.append(Line(ends, begins, float(begins[0])))
                    sizes = [count * size for count, amount in zip((1, *counts), sums) for *_, size in amount.distant]
                    self._sizes.append(numpy.array(sizes, dtype=float))
        pairs = [(earlier, later) for amount in sums for earlier, later, _ in amount.distant]
        self._earlier, self._later = numpy.array(pairs, dtype=numpy.intp).reshape(-1, 2).T

    def bytes(self, row: int, block: WindowBlock) -> Floats:
        """The bytes of the windows of a block."""
        table = self.lines[row].within(block)
        return table + self._astride(row, block) if len(self._earlier) else table

    def _astride(self, row: int, block: WindowBlock) -> Floats:
        """The bytes of the later layer of two that share, in windows that begin between them."""
        first, last, short, long = block
        chosen = ((self._later < last) & (self._later > first - long) & (self._sizes[row] > 0)).nonzero()[0]
        later, earlier = self._later[chosen], self._earlier[chosen]
        stops = numpy.arange(first, last + 1)[:, None]
        columns = long - short + 2
        begin = numpy.clip(stops - later + 1 - short, 0, columns - 1)
        end = numpy.clip(stops - earlier - short, 0, columns - 1)
        sizes = numpy.where(stops > later, self._sizes[row][chosen], 0.0)
        lines = numpy.broadcast_to((stops - first) * columns, sizes.shape)
        spots = numpy.concatenate([(lines + begin).ravel(), (lines + end).ravel()])
        steps: Any = numpy.bincount(spots, numpy.concatenate([sizes.ravel(), -sizes.ravel()]), len(stops) * columns)
        table: Floats = numpy.cumsum(steps.reshape(-1, columns), axis=1)[:, :-1].T
        return table


class _PrefixSums:
    """Prefix sums of an amount: a window has ends[j] - begins[i], and what is astride."""

    def __init__(self, amounts: Amounts) -> None:
        sizes = numpy.array(amounts.sizes, dtype=float)
        later = numpy.zeros(len(sizes))
        self.distant: list[tuple[int, int, float]] = []
        for earlier, layer, size in amounts.shared:
            if earlier == layer:  # whoever has the one has the other
                sizes[layer] -= size
                continue
            later[layer] += size
            if layer - earlier > 1:
                self.distant.append((earlier, layer, size))
        sums, shared_sums = _sums(sizes), _sums(later)
        self.ends = sums - shared_sums
        self.begins = sums - numpy.append(shared_sums[1:], shared_sums[-1])


def slid(padded: Floats, block: WindowBlock) -> Floats:
    """For each length and end of a block, the value where the window begins, of a row as long as a Line pads it."""
    first, last, short, long = block
    origin = len(padded) // 2 + first - short
    shape = long - short + 1, last - first + 1
    size = padded.itemsize
    return numpy.ndarray(shape, float, padded, origin * size, (-size, size))


def placed(values: Floats, first: int, layers: int) -> Floats:
    """A row for `slid` with values at some places, and inf at the others."""
    row = numpy.full(2 * layers + 1, inf)
    row[layers + first : layers + first + len(values)] = values
    return row


def _sums(values: Sequence[float] | Floats) -> Floats:
    return numpy.concatenate([[0.0], numpy.cumsum(numpy.asarray(values, dtype=float))])


_NARROW = 32  # lengths: to find out which can be left out takes as long
