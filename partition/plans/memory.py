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
from operator import itemgetter, le
from typing import NamedTuple

from partition.cuts.windows import HeldChunks
from partition.profiles.profile import Profile, StageProfile
from scheduler import Action, Kind, Placement, Timeline

__all__ = ["StageValue", "DevicePeak", "moments_of", "peaks", "values_of"]


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
    waiting = _waiting(timeline, placement, values)
    device_peaks = []
    for lane, row in enumerate(timeline.by_lane):
        state = sum(stages[stage].state for stage in placement.stages_of(lane))
        changes = list(chain.from_iterable(_changes(event.action, event.start, event.end, stages, recomputes, loss)
                                           for event in row))  # fmt: skip
        saved = inputs = waiting_bytes = most_saved = most_inputs = most = 0
        # Sorting is stable: actions of a lane stay in their order, also those that take no time.
        for _, of_saved, of_inputs, of_waiting in sorted([*changes, *waiting[lane]], key=itemgetter(0)):
            saved, inputs, waiting_bytes = saved + of_saved, inputs + of_inputs, waiting_bytes + of_waiting
            most_saved, most_inputs = max(most_saved, saved), max(most_inputs, inputs)
            most = max(most, saved + inputs + waiting_bytes)
        device_peaks.append(DevicePeak(state, most_saved, most_inputs, state + most))
    return tuple(device_peaks)


MemoryChange = tuple[float, int, int, int]  # time, and the change of saved, inputs and waiting bytes


def _changes(
    action: Action, start: float, end: float, stages: Sequence[StageProfile], recomputes: Collection[tuple[int, int]],
    loss: int,
) -> Iterator[MemoryChange]:  # fmt: skip
    """The changes that one action makes on its device."""
    stage, kind, chunk = action
    profile = stages[stage]
    is_recomputed, of_loss = (stage, chunk) in recomputes, loss if stage == len(stages) - 1 else 0
    if kind is Kind.F:
        yield (start, 0, profile.read, 0) if is_recomputed else (start, profile.saved, 0, 0)
    elif kind is Kind.W:
        yield end, -profile.late, 0, 0
    else:
        extra, late = (max(of_loss, profile.split - profile.saved), profile.late) if kind is Kind.I else (of_loss, 0)
        yield start, profile.saved * is_recomputed + extra, 0, 0
        yield end, late - profile.saved - extra, -profile.read * is_recomputed, 0


def _waiting(timeline: Timeline, placement: Placement, values: Sequence[StageValue]) -> list[list[MemoryChange]]:
    """For each device the changes of what waits there: values until F of their reader begins, gradients until B."""
    forward = {e.action[::2]: e for e in timeline.events if e.action.kind is Kind.F}
    backward = {e.action[::2]: e for e in timeline.events if e.action.kind in (Kind.B, Kind.I)}
    changes: list[list[MemoryChange]] = [[] for _ in range(timeline.lanes)]
    for chunk in {chunk for _, chunk in forward}:
        for producer, reader, size in values:
            reader_lane, producer_lane = placement.lane_of[reader], placement.lane_of[producer]
            start, end = forward[producer, chunk].end, forward[reader, chunk].start
            if producer == reader:  # the output of the last stage, until its loss
                end = backward[reader, chunk].start
            changes[reader_lane] += [(start, 0, 0, size), (end, 0, 0, -size)]
            if producer != reader and backward:
                start, end = backward[reader, chunk].end, backward[producer, chunk].start
                changes[producer_lane] += [(start, 0, 0, size), (end, 0, 0, -size)]
    return changes
