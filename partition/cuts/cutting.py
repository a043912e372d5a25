"""The exact cut: stages on devices of their own speed and memory, with messages between them.

    layers: work, state, saved, read, message ─┐
    stages: speed, memory, chunks held ────────┼─► slowest stage as fast as can be ─► of these the evenest ─► balance
    links between them ────────────────────────┘

    time(s, i, j)  = work(i, j) / speed[s] + message at cut i + message at cut j
    bytes(s, i, j) = state(i, j) + kept[s] x saved(i, j) + inputs[s] x read(i, j)            <= memory[s]

Dynamic programming over stages and ends of stages:

    slowest[s][j] = min over i of max(slowest[s - 1][i], time(s, i, j) where bytes(s, i, j) fit)

which is exact whatever the times and bytes are; messages make them neither convex nor monotone. Only windows that can
be in a cut as good as one that is known need be looked at: no longer ones, since work only grows with length, and none
that ends where the layers before or behind it have more work than their stages can do in that time. A second pass, over
those that were looked at and are no slower, takes the smallest sum of squared times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy

from partition.contiguous import balance_costs, check_stages
from partition.cuts.windows import Amounts, Table, amounts_of, shifted, table_of
from partition.errors import PartitionError
from partition.profiles.amounts import Bytes
from partition.profiles.profile import Profile

__all__ = ["Layers", "StageSpec", "cut", "cut_layers", "layers_of", "slowest"]


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
    """

    speed: float = 1.0
    memory: float = inf
    kept: int = 1
    inputs: int = 0
    work: float = 0.0
    state: int = 0
    recompute: float = 0.0


class Layers(NamedTuple):
    """The layers that are cut.

    Attributes:
        work: of a chunk in each; F and B.
        state, saved, read: bytes: held once; for each chunk whose activations are kept; for each input that is kept.
        entry: bytes of the input of a stage that begins at each layer, beside `read`.
        message: bytes of a chunk at each cut, before layer 0, 1, ... (the first and the last are not used).
        forward: of `work`, what a recomputation takes.
    """

    work: Sequence[float]
    state: Amounts = Amounts(())
    saved: Amounts = Amounts(())
    read: Amounts = Amounts(())
    entry: Sequence[float] = ()
    message: Sequence[float] = ()
    forward: Sequence[float] = ()


def layers_of(profile: Profile) -> Layers:
    """The layers of a profile."""
    layers = profile.layers
    states = [
        Bytes(
            layer.parameters.own + layer.gradients.own + layer.optimizer + layer.buffers + layer.constants,
            tuple([(number, size) for number, size in layer.parameters.shared])
            + tuple([(-1 - number, size) for number, size in layer.gradients.shared]),
        )
        for layer in layers
    ]
    stashed_at = {number: place for place, layer in enumerate(layers) for number, _ in layer.stashes}
    pops = [(stashed_at[number], place, size) for place, layer in enumerate(layers) for number, size in layer.pops]
    return Layers(
        [layer.work.total for layer in layers],
        amounts_of(states),
        amounts_of([layer.saved for layer in layers], [number for number, _ in profile.entry]),
        Amounts([sum(size for _, size in layer.pops) for layer in layers], pops),
        [0, *(layer.output for layer in layers[:-1])],
        [0, *map(profile.message, range(1, len(layers))), 0],
        [layer.work.forward.median for layer in layers],
    )


def cut(profile: Profile, stages: int | Sequence[StageSpec], latency: float = 0.0, bandwidth: float = inf) -> list[int]:
    """Cut profiled layers so that the slowest stage is as fast as can be, and each fits its device.

    A stage takes F and B of a chunk, and the messages at its two ends, there and back.

    Args:
        profile: of the layers, for one chunk.
        stages: how many, or a StageSpec for each.
        latency: of a message, in the unit of the profile.
        bandwidth: bytes of a message in one unit of time.

    Returns:
        Layers per stage. No other balance that fits has a faster slowest stage; where several are as fast, it is one
        whose stages are even.

    Raises:
        PartitionError: there are fewer layers than stages, or no balance fits; the words say which stage cannot hold
            what.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from partition import StageSpec, cut, profile
        >>> model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(9)])
        >>> layers = profile(model, torch.rand(8, 64), device="meta")
        >>> cut(layers, 3), cut(layers, [StageSpec(speed=2), StageSpec(), StageSpec()])
        ([3, 3, 3], [5, 2, 2])
    """
    specs = [StageSpec()] * check_stages(stages, len(profile.layers)) if isinstance(stages, int) else list(stages)
    layers = layers_of(profile)
    messages = [2 * (latency + size / bandwidth) for size in layers.message]
    return cut_layers(layers, specs, [messages] * (len(specs) - 1))


def cut_layers(layers: Layers, specs: Sequence[StageSpec], messages: Sequence[Sequence[float]] = ()) -> list[int]:
    """Cut layers so that the slowest stage is as fast as can be.

    Args:
        layers: all of them.
        specs: of the stages.
        messages: for each boundary of two stages, the time of a chunk's messages there at each cut; none: no time.

    Returns:
        Layers per stage.

    Raises:
        PartitionError: there are fewer layers than stages, or no balance fits.
    """
    count, total = check_stages(len(specs), len(layers.work)), len(layers.work)
    work = numpy.asarray(layers.work, dtype=float)
    fastest = max(spec.speed for spec in specs)
    bound = float(numpy.diff(numpy.concatenate([[0.0], numpy.cumsum(work)])).max()) / fastest  # one layer alone
    value = slowest(layers, specs, messages, balance_costs(work, count))
    longest, wanted = 0, min(total, 2 * -(-total // count) + 2) if value == inf else _longest(work, specs, value)
    while longest < wanted:
        longest = wanted
        times = _Times(layers, specs, messages, longest)
        if value > bound:
            value = min(value, _slowest(times, _ends(work, specs, value)))
        wanted = min(total, 2 * longest) if value == inf else _longest(work, specs, value)
    if value == inf:
        raise PartitionError(_unfit(layers, specs))
    return _evenest(times, _ends(work, specs, value), value)


def _longest(work: Table, specs: Sequence[StageSpec], value: float) -> int:
    """The most layers that a stage can do in a time."""
    sums = numpy.concatenate([[0.0], numpy.cumsum(work)])
    most = value * max(spec.speed for spec in specs) * _ROOM
    return int((numpy.arange(len(sums)) - numpy.searchsorted(sums, sums - most)).max())


def _ends(work: Table, specs: Sequence[StageSpec], value: float) -> list[slice]:
    """For each stage where it may end, if none takes longer than this time."""
    total = len(work)
    sums = numpy.concatenate([[0.0], numpy.cumsum(work)])
    most = [value * spec.speed * _ROOM for spec in specs]
    first, last = [total], [0]
    for stage in range(len(specs) - 1, 0, -1):
        first.append(max(stage, int(numpy.searchsorted(sums, sums[first[-1]] - most[stage]))))
    for stage, spent in enumerate(most):
        behind = len(specs) - 1 - stage
        last.append(min(total - behind, int(numpy.searchsorted(sums, sums[last[-1]] + spent, "right")) - 1))
    return [slice(low, high + 1) for low, high in zip(reversed(first), last[1:], strict=True)]


def slowest(
    layers: Layers, specs: Sequence[StageSpec], messages: Sequence[Sequence[float]], balance: Sequence[int]
) -> float:
    """The time of the slowest stage of a balance; inf where one does not fit."""
    times = _Times(layers, specs, messages, max(balance))
    ends = numpy.cumsum(balance)
    return max(float(times.of(s)[end, size - 1]) for s, (end, size) in enumerate(zip(ends, balance)))


class _Times:
    """The times of all windows in each stage; inf where one does not fit."""

    def __init__(
        self, layers: Layers, specs: Sequence[StageSpec], messages: Sequence[Sequence[float]], longest: int
    ) -> None:
        self.specs = specs
        self.longest = longest
        self.layers = len(layers.work)
        none = numpy.zeros(self.layers + 1)
        given = [numpy.asarray(each, dtype=float) for each in messages] or [none] * (len(specs) - 1)
        self._messages = [none, *given, none]
        self._work = table_of(Amounts(layers.work), longest)
        self._forward = table_of(Amounts(layers.forward), longest) if layers.forward else None
        self._bytes: list[Table] = []
        if any(spec.memory < inf for spec in specs):
            zeros = Amounts([0] * self.layers)
            tables = [table_of(each if len(each.each) else zeros, longest)
                      for each in (layers.state, layers.saved, layers.read)]  # fmt: skip
            entry = numpy.zeros(self.layers + 1)
            entry[: len(layers.entry)] = layers.entry
            self._bytes = [*tables, shifted(entry, longest, 0)]
        self._timed: Callable[[StageSpec], Table] = lru_cache(maxsize=4)(self._of_spec)

    def of(self, stage: int, ends: slice = slice(None)) -> Table:
        """The times in a stage, of windows that end in some places."""
        table = self._timed(self.specs[stage])[ends]
        before, behind = self._messages[stage], self._messages[stage + 1]
        if before.any():
            table = table + shifted(before, self.longest, 0)[ends]
        return table + behind[ends, None] if behind.any() else table

    def _of_spec(self, spec: StageSpec) -> Table:
        table = self._work
        if spec.recompute and self._forward is not None:
            table = table + spec.recompute * self._forward
        if spec.speed != 1 or spec.work:
            table = (table + spec.work) / spec.speed
        if spec.memory == inf:
            return table
        state, saved, read, entry = self._bytes
        held = state + spec.kept * saved
        if spec.inputs:
            held += spec.inputs * (read + entry)
        return numpy.where(held <= spec.memory - spec.state, table, inf)


def _slowest(times: _Times, ends: Sequence[slice]) -> float:
    """The time of the slowest stage, as small as can be with stages that end there; inf where nothing fits."""
    best = numpy.full(times.layers + 1, inf)
    best[0] = 0
    for stage, there in enumerate(ends):
        before, best = best, numpy.full(times.layers + 1, inf)
        best[there] = numpy.maximum(shifted(before, times.longest, inf)[there], times.of(stage, there)).min(axis=1)
    return float(best[-1])


def _evenest(times: _Times, ends: Sequence[slice], value: float) -> list[int]:
    """Of the cuts into stages no slower than `value` the one with the smallest sum of squared times."""
    best = numpy.full(times.layers + 1, inf)
    best[0] = 0
    lengths = []
    for stage, there in enumerate(ends):
        table = times.of(stage, there)
        sums = shifted(best, times.longest, inf)[there] + numpy.where(table <= value, table, inf) ** 2
        lengths.append(sums.argmin(axis=1))
        best = numpy.full(times.layers + 1, inf)
        best[there] = sums.min(axis=1)
    balance: list[int] = []
    stop = times.layers
    for chosen, there in zip(reversed(lengths), reversed(ends), strict=True):
        balance.append(int(chosen[stop - there.start]) + 1)
        stop -= balance[-1]
    return balance[::-1]


def _unfit(layers: Layers, specs: Sequence[StageSpec]) -> str:
    """The reason that nothing fits, in words."""
    times = _Times(layers, specs, (), len(layers.work))
    reach, words = {0}, ""
    for stage, spec in enumerate(specs):
        table = times.of(stage)
        ends = {stop for stop in range(1, times.layers + 1) for start in reach
                if start < stop and table[stop, stop - start - 1] < inf}  # fmt: skip
        if not ends:
            first = min(reach)
            alone = first == times.layers or table[first + 1, 0] == inf
            words = f"stage {stage} cannot hold layer {first} alone" if alone else f"stage {stage} gets no layer"
            return f"no balance fits: {words} in {spec.memory:.0f} bytes. {_REMEDY}"
        reach = ends
    return (
        f"no balance fits: {len(specs)} stages as long as their memory allows ({max(specs, key=_memory).memory:.0f} "
        f"bytes at the most) end at layer {max(reach)} of {times.layers}. {_REMEDY}"
    )


def _memory(spec: StageSpec) -> float:
    return spec.memory


_ROOM = 1 + 1e-12  # sums of floats that are equal but for rounding
_REMEDY = "Recompute activations, take more chunks or more devices, or an optimizer that keeps less."
