"""Verification of a schedule: every chunk goes once through every stage and back, and all lanes come to an end.

                ┌─► exist       every action exists, and is on the lane of its stage
                ├─► complete    every (stage, chunk) has one F, and one B or one I and one W; nothing runs twice
    schedule ───┼─► ascend      B or I ascend in chunks on every stage, and so do B or W
                ├─► end         no lane waits for ever
                └─► fit         no lane holds more than `cap`            ──►  None, or one ScheduleError with all faults

Chunks ascend because floating-point sums depend on their order: this way the same chunks give bitwise the same
gradients under every schedule.
"""

from collections.abc import Iterator, Sequence

import numpy

from scheduler.action import COMPUTE, Action, Kind
from scheduler.collecting import no_collecting
from scheduler.columns import KINDS, Booleans, Columns, Numbers
from scheduler.errors import one_each, refuse_unless_a, whole_number
from scheduler.faults import Fault, refusal
from scheduler.programs.message_checks import message_faults
from scheduler.programs.program import Program
from scheduler.schedule import Schedule
from scheduler.simulation import progress
from scheduler.timeline import in_flight


@no_collecting()
def verify(schedule: Schedule | Program, cap: int | Sequence[int] | None = None) -> None:
    """Refuses a schedule or a program that is wrong, naming all its faults at once.

    A program is also looked at for its messages (programs/message_checks.py). A right schedule needs no such look: the
    program that `lower` makes of it is free of deadlock (the lemma in programs/lowering.py).

    Args:
        schedule: what is to be run
        cap: the most (stage, chunk) pairs that a lane may hold in flight: one number for all lanes, or one for each

    Raises:
        ScheduleError: at least one fault, in words, with a grid in which "!" marks the failing cells.

    >>> verify(Schedule.parse('''
    ...     schedule wrong, chunks 2, stages on lanes 0
    ...     lane 0: 0F0 0F1 0B1 0B0
    ... '''))
    Traceback (most recent call last):
        ...
    scheduler.errors.ScheduleError: schedule wrong (lanes=1, chunks=2) has 1 fault:
      lane 0 runs 0B0 after 0B1, but backwards of a stage ascend in chunks: put 0B0 first.
    lane 0 |F0  F1  B1  B0!
    """
    refuse_unless_a("schedule", schedule, Schedule, Program)
    computed = schedule.schedule() if isinstance(schedule, Program) else schedule
    columns = Columns(computed)
    faults = [*_exist(columns), *_complete(columns), *_ascend(columns), *progress(columns).stuck]
    faults += _fit(columns, cap)
    if faults:
        raise refusal(computed, faults)
    if isinstance(schedule, Program):
        faults = message_faults(schedule)
        if faults:
            raise refusal(schedule, faults)


def _exist(columns: Columns) -> Iterator[Fault]:
    yield from columns.foreign()
    hosts = numpy.array(columns.schedule.placement.lane_of)[numpy.where(columns.exists, columns.stage, 0)]
    for index in numpy.flatnonzero(columns.exists & (hosts != columns.lane)):
        lane, position, action = columns.place(index)
        yield Fault(
            f"lane {lane} runs {action}, but lane {hosts[index]} hosts stage {action.stage}: move it there.",
            lane, position,
        )


def _complete(columns: Columns) -> Iterator[Fault]:
    for lane, position, action in map(columns.place, _repeated(columns)):
        yield Fault(f"lane {lane} runs {action}, which has run before: drop one of them.", lane, position)
    runs = columns.counts > 0
    forward, backward, first, second = (runs[:, kind] for kind in range(KINDS))
    whole = forward & (backward ^ (first & second)) & ~(backward & (first | second))
    for stage, chunk in numpy.argwhere(~whole).tolist():
        yield from _incomplete(columns, stage, chunk)


def _repeated(columns: Columns) -> Numbers:
    """The places of actions that ran before, in their own lane or in one with a lower number."""
    by_code = numpy.argsort(columns.code, kind="stable")
    same = columns.code[by_code][1:] == columns.code[by_code][:-1]
    return numpy.sort(by_code[1:][same & columns.exists[by_code][1:]])


def _incomplete(columns: Columns, stage: int, chunk: int) -> Iterator[Fault]:
    forward, backward, first, second = (Action(stage, kind, chunk) for kind in COMPUTE)
    lane = columns.schedule.placement.lane_of[stage]
    halves = [half for half in (first, second) if columns.has(half)]
    if not columns.has(forward):
        yield Fault(f"{forward} is missing: add it to lane {lane}.")
    if columns.has(backward) and halves:
        also = " and ".join(map(str, halves))
        yield Fault(f"lane {lane} runs {backward} and also {also}, a half of it: drop one or the other.")
    elif not columns.has(backward) and not halves:
        yield Fault(f"{backward} is missing: add it to lane {lane}, or {first} and {second}.")
    elif not columns.has(backward) and len(halves) == 1:
        missing = second if halves == [first] else first
        yield Fault(f"{missing} is missing, the other half of {halves[0]}: add it to lane {lane}.")


def _ascend(columns: Columns) -> Iterator[Fault]:
    backwards = numpy.isin(columns.kind, [COMPUTE.index(kind) for kind in COMPUTE if kind.is_backward])
    weights = numpy.isin(columns.kind, [COMPUTE.index(Kind.B), COMPUTE.index(Kind.W)])  # B makes both
    faults = {(fault.lane, fault.position): fault for fault in (
        *_descents(columns, weights, "weight gradients"), *_descents(columns, backwards, "backwards")
    )}
    yield from (faults[place] for place in sorted(faults))


def _descents(columns: Columns, which: Booleans, words: str) -> Iterator[Fault]:
    """The places of actions whose chunk is below one before it, of the same lane and stage."""
    indices = numpy.flatnonzero(which & columns.exists)
    indices = indices[numpy.lexsort((indices, columns.stage[indices], columns.lane[indices]))]
    group = columns.lane[indices] * columns.schedule.stages + columns.stage[indices]
    level = group * columns.schedule.chunks + columns.chunk[indices]  # ascends from group to group by itself
    highest = numpy.maximum.accumulate(level)
    for index in numpy.flatnonzero(level < highest):
        lane, position, action = columns.place(indices[index])
        before = columns.place(indices[numpy.flatnonzero(level == highest[index])[0]])[2]
        yield Fault(
            f"lane {lane} runs {action} after {before}, but {words} of a stage ascend in chunks: put {action} first.",
            lane, position,
        )


def _fit(columns: Columns, cap: int | Sequence[int] | None) -> Iterator[Fault]:
    caps = [] if cap is None else one_each("cap", cap, columns.schedule.lanes)
    caps = [whole_number("cap", lane_cap, least=1) for lane_cap in caps]
    for lane, (order, lane_cap) in enumerate(zip(columns.schedule.orders, caps)):
        counts = list(in_flight(order))
        if max(counts, default=0) > lane_cap:
            position = next(position for position, count in enumerate(counts) if count > lane_cap)
            yield Fault(
                f"lane {lane} holds up to {max(counts)} chunks in flight, first above its cap of {lane_cap} at "
                f"{order[position]}: run a backward before it, or allow {max(counts)}.", lane, position,
            )
