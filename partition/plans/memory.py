"""The memory of devices under a schedule: replayed action by action, in bytes.

    state      parameters, gradients, optimizer state, buffers: all the time
    saved      what autograd holds: of a kept chunk from F to B or I, of a recomputed one during its B or I; of a
               backward in halves from I to W: the inputs of products, and the gradients of their outputs
    inputs     of a recomputed chunk its input, from F to B
    waiting    values and gradients that have arrived and are not read yet; the output of the last stage, until its B

What operators allocate and free within themselves is not in it, nor is what the allocator loses between blocks. `saved`
is exact but for these. What two neighbours on one device both save counts twice; and a recomputation has copies of the
buffers that it writes (BatchNorm's running statistics).
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from operator import le
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from partition.cuts.windows import HeldChunks
from partition.profiles.profile import Profile, StageProfile
from scheduler import Action, Kind, Placement, Timeline


class StageValue(NamedTuple):
    """A value that one stage computes and another reads, of one chunk; its gradient goes the other way.

    Attributes:
        producer, reader: stages; the reader of the last stage's output is the loss, there.
        size: bytes.
    """

    producer: int
    reader: int
    size: int


class DevicePeak(NamedTuple):
    """The most that a device holds, in bytes.

    Attributes:
        state: all the time.
        saved: the most that autograd, and backwards in halves, hold.
        inputs: the most inputs of recomputed chunks.
        total: the most of all together, `state` and what waits to be read among it.
    """

    state: int
    saved: int
    inputs: int
    total: int


def values_of(profile: Profile, balance: Sequence[int]) -> list[StageValue]:
    """The values that pass between stages: each stage's output to the next, and skips to where they are read."""
    stage_of = [stage for stage, size in enumerate(balance) for _ in range(size)]
    ends = [sum(balance[: stage + 1]) - 1 for stage in range(len(balance))]
    values = [StageValue(stage, stage + 1, profile.layers[end].output) for stage, end in enumerate(ends[:-1])]
    stashed = {number: stage for stage, layer in zip(stage_of, profile.layers) for number, _ in layer.skips.stashes}
    for stage, layer in zip(stage_of, profile.layers):
        values += [
            StageValue(stashed[number], stage, size) for number, size in layer.skips.pops if stashed[number] != stage
        ]
    if profile.loss is not None:
        values.append(StageValue(len(balance) - 1, len(balance) - 1, profile.layers[-1].output))
    return values


def moments_of(
    order: Sequence[Action], stages: Sequence[int], recomputes: Collection[tuple[int, int]], last: int
) -> tuple[tuple[HeldChunks, ...], ...]:
    """The moments at which a device may hold the most, each with what its stages hold then.

    One of them is its peak, whatever the stages' bytes are, but for moments within an I: at each other moment some of
    them has as much of all.

    Args:
        order: of the device's actions.
        stages: of the device.
        recomputes: the (stage, chunk) pairs that are recomputed.
        last: the stage that the loss is behind.

    Example:
        >>> moments_of([Action.parse(text) for text in "0F0 0F1 0B0 0B1".split()], [0], [(0, 1)], last=3)
        ((HeldChunks(kept=1, inputs=1, loss=0, late=0),),)
    """
    index_of = {stage: index for index, stage in enumerate(stages)}
    current = [HeldChunks(0)] * len(stages)
    moments: dict[tuple[HeldChunks, ...], None] = {}
    for stage, kind, chunk in order:
        index, is_recomputed = index_of[stage], (stage, chunk) in recomputes
        for current[index] in _course(current[index], kind, is_recomputed, stage == last):
            moments[tuple(current)] = None
    most: dict[tuple[HeldChunks, ...], list[int]] = {}  # a moment that has as much of all as another has more in sum
    for moment in sorted(moments, key=lambda moment: -sum(map(sum, moment))):
        counts = list(chain.from_iterable(moment))
        if not any(all(map(le, counts, more)) for more in most.values()):
            most[moment] = counts
    return tuple(most)


def _course(held: HeldChunks, kind: Kind, is_recomputed: bool, is_last: bool) -> Iterator[HeldChunks]:
    """The chunks of which a stage holds something, while an action runs and after it."""
    kept, inputs, _, late = held
    if kind is Kind.F:
        yield HeldChunks(kept, inputs + 1, 0, late) if is_recomputed else HeldChunks(kept + 1, inputs, 0, late)
    elif kind is Kind.W:
        yield HeldChunks(kept, inputs, 0, late - 1)
    else:
        yield HeldChunks(kept + is_recomputed, inputs, int(is_last), late)  # while it runs
        yield HeldChunks(kept + is_recomputed - 1, inputs - is_recomputed, 0, late + (kind is Kind.I))


def peaks(
    timeline: Timeline,
    placement: Placement,
    stages: Sequence[StageProfile],
    values: Sequence[StageValue],
    recomputes: Collection[tuple[int, int]],
    loss: int = 0,
) -> tuple[DevicePeak, ...]:
    """The most that each device holds.

    Args:
        timeline: of the step.
        placement: of the stages on devices.
        stages: what each takes and holds.
        values: that pass between them.
        recomputes: the (stage, chunk) pairs that are recomputed.
        loss: bytes that the loss saves while the last stage's backward runs.
    """
    ran = _Ran.of(timeline)
    changes = zip(_changes(ran, stages, recomputes, loss), _waiting(ran, placement, values))
    lanes, times, *held = map(numpy.concatenate, changes)
    order = numpy.argsort(times, kind="stable")  # actions of a lane stay in their order, also those that take no time
    device_peaks = []
    for lane in range(timeline.lanes):
        of_lane = order[lanes[order] == lane]
        saved, inputs, waiting = (column[of_lane].cumsum() for column in held)
        state = sum(stages[stage].state for stage in placement.stages_of(lane))
        most = [int(column.max(initial=0)) for column in (saved, inputs, saved + inputs + waiting)]
        device_peaks.append(DevicePeak(state, most[0], most[1], state + most[2]))
    return tuple(device_peaks)


EventColumn = NDArray[Any]


class _Ran(NamedTuple):
    """The actions of a timeline, in its order: a column for each thing that they say."""

    lane: EventColumn
    stage: EventColumn
    chunk: EventColumn
    start: EventColumn
    end: EventColumn
    is_forward: EventColumn
    is_half: EventColumn
    is_weight: EventColumn

    @classmethod
    def of(cls, timeline: Timeline) -> "_Ran":
        actions, *columns = zip(*timeline.events)
        stages, kinds, chunks = zip(*actions)
        lane, stage, chunk, start, end = map(numpy.array, (columns[0], stages, chunks, *columns[1:]))
        are = [numpy.array([kind is one for kind in kinds]) for one in (Kind.F, Kind.I, Kind.W)]
        return cls(lane, stage, chunk, start, end, *are)


def _changes(
    ran: _Ran, stages: Sequence[StageProfile], recomputes: Collection[tuple[int, int]], loss: int
) -> list[EventColumn]:
    """The changes that actions make, each as it starts and as it ends: lane, time, saved, inputs, waiting."""
    saved, read, split, late = numpy.array([(s.saved, s.read, s.split, s.late) for s in stages])[ran.stage].T
    again = numpy.array([pair in recomputes for pair in zip(ran.stage.tolist(), ran.chunk.tolist())])
    of_loss = numpy.where(ran.stage == len(stages) - 1, loss, 0)
    extra = numpy.where(ran.is_half, numpy.maximum(of_loss, split - saved), of_loss)
    kinds = [ran.is_forward, ran.is_weight]  # else B or I
    changes = [
        (ran.lane, ran.lane),
        (ran.start, ran.end),
        (numpy.select(kinds, [saved * ~again, 0], saved * again + extra),
         numpy.select(kinds, [0, -late], late * ran.is_half - saved - extra)),
        (numpy.select(kinds, [read * again, 0], 0), numpy.select(kinds, [0, 0], -read * again)),
        (0 * saved, 0 * saved),
    ]  # fmt: skip
    return [numpy.column_stack(change).ravel() for change in changes]


def _waiting(ran: _Ran, placement: Placement, values: Sequence[StageValue]) -> list[EventColumn]:
    """The changes of what waits: values until F of their reader begins, gradients until B; columns as above."""
    forward, backward = numpy.zeros((2, 2, placement.stages, ran.chunk.max() + 1))  # starts and ends
    for table, chosen in ((forward, ran.is_forward), (backward, ~ran.is_forward & ~ran.is_weight)):
        table[:, ran.stage[chosen], ran.chunk[chosen]] = ran.start[chosen], ran.end[chosen]
    lanes, sizes, times = [], [], []
    for producer, reader, size in values:
        taken = backward if producer == reader else forward  # the output of the last stage waits until its loss
        waits = [(reader, forward[1, producer], taken[0, reader])]
        if producer != reader and backward.any():
            waits.append((producer, backward[1, reader], backward[0, producer]))
        for stage, arrived, read in waits:
            lanes += [placement.lane_of[stage]] * 2
            sizes += [size, -size]
            times += [arrived, read]
    by_chunk = numpy.array(times).reshape(-1, forward.shape[-1]).T
    columns = numpy.broadcast_arrays(numpy.array(lanes), by_chunk, 0, 0, numpy.array(sizes))
    return [column.ravel() for column in columns]
