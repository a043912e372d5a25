"""The memory of devices under a schedule: replayed action by action, in bytes.

    state      parameters, gradients, optimizer state, buffers with two copies: all the time
    saved      what autograd holds: of a kept chunk from F to B or I, of a recomputed one during its B or I; of a
               backward in halves from I to W: the inputs of products, and the gradients of their outputs
    inputs     of a recomputed chunk its input, from F to B
    waiting    values and gradients that have arrived and are not read yet; the output of the last stage, until its B

What operators allocate and free within themselves is not in it, nor are gradients on their way (of a layer's output
and input, of one weight until it is added to the sum), nor what the allocator loses between blocks. `saved` is exact
but for these. What two neighbours on one device both save counts twice. Where buffers are written (BatchNorm's running
statistics), each chunk that will be recomputed has a copy; and calls 1, 2, 4, 8, ... hold all buffers six times.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, chain
from operator import itemgetter, le
from typing import NamedTuple

from partition.cuts.windows import HeldChunks
from partition.profiles.profile import Profile, StageProfile
from scheduler import Action, Event, Kind, Placement, Timeline


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


def values_between(profile: Profile, balance: Sequence[int]) -> list[StageValue]:
    """The values that pass between stages: each stage's output to the next, and skips to where they are read."""
    stage_of = [stage for stage, size in enumerate(balance) for _ in range(size)]
    ends = [sum(balance[: stage + 1]) - 1 for stage in range(len(balance))]
    values = [StageValue(stage, stage + 1, profile.layers[end].output) for stage, end in enumerate(ends[:-1])]
    values += [
        StageValue(stage_of[stash], stage_of[pop], size) for stash, pop, size in profile.skips
        if stage_of[stash] != stage_of[pop]
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
    changes = [[(0.0, 0, 0, 0)] for _ in range(timeline.lanes)]  # by device: time; of what is saved, is an input, waits
    forward, backward = dict[tuple[int, int], Event](), dict[tuple[int, int], Event]()
    for event in timeline.events:
        (stage, kind, chunk), lane, start, end = event
        held, is_recomputed = stages[stage], (stage, chunk) in recomputes
        if kind is Kind.F:
            forward[stage, chunk] = event
            changes[lane].append((start, 0, held.read, 0) if is_recomputed else (start, held.saved, 0, 0))
        elif kind is Kind.W:
            changes[lane].append((end, -held.late, 0, 0))
        else:
            backward[stage, chunk] = event
            is_half, more = kind is Kind.I, loss if stage == len(stages) - 1 else 0
            more = max(more, held.split - held.saved) if is_half else more
            changes[lane].append((start, held.saved * is_recomputed + more, 0, 0))
            changes[lane].append((end, held.late * is_half - held.saved - more, -held.read * is_recomputed, 0))
    for chunk in range(1 + max(chunk for _, chunk in forward)):
        for producer, reader, size in values:
            taken = backward if producer == reader else forward  # the output of the last stage waits until its loss
            waits = [(reader, forward[producer, chunk], taken[reader, chunk])]
            if producer != reader:
                waits.append((producer, backward[reader, chunk], backward[producer, chunk]))
            for stage, maker, taker in waits:
                of_lane = changes[placement.lane_of[stage]]
                of_lane += [(maker.end, 0, 0, size), (taker.start, 0, 0, -size)]
    device_peaks = []
    for lane, of_lane in enumerate(changes):
        ordered = sorted(of_lane, key=itemgetter(0))  # actions of a lane stay in order, also those without a time
        saved, inputs, waiting = [list(accumulate(column)) for column in list(zip(*ordered))[1:]]
        state = sum(stages[stage].state for stage in placement.stages_of(lane))
        most = max(map(sum, zip(saved, inputs, waiting)))
        device_peaks.append(DevicePeak(state, max(saved), max(inputs), state + most))
    return tuple(device_peaks)
