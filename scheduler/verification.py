"""Is a schedule right: does every chunk go once through every stage and back, and do the lanes come to an end?

                ┌─► exist       every action exists, and is on the lane of its stage
                ├─► complete    every (stage, chunk) has one F, and one B or one I and one W; nothing runs twice
    schedule ───┼─► ascend      B or I ascend in chunks on every stage, and so do the W
                ├─► end         no lane waits for ever
                └─► fit         no lane holds more than `cap`            ──►  None, or one ScheduleError with all faults

Chunks ascend because floating-point sums depend on their order: this way the same chunks give bitwise the same
gradients under every schedule.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from scheduler.action import Action, Kind
from scheduler.errors import ScheduleError, refuse_unless_whole
from scheduler.faults import Fault, refusal
from scheduler.progress import progress
from scheduler.schedule import Schedule
from scheduler.timeline import in_flight

__all__ = ["verify"]


def verify(schedule: Schedule, cap: int | Sequence[int] | None = None) -> None:
    """Refuses a schedule that is wrong, naming all its faults at once.

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
    faults = [*_exist(schedule), *_complete(schedule), *_ascend(schedule), *_end(schedule)]
    faults += _fit(schedule, _cap_of_lanes(cap, schedule.lanes))
    if faults:
        raise refusal(schedule, faults)


def _exist(schedule: Schedule) -> Iterator[Fault]:
    for lane, position, action in _places(schedule):
        stage, _, chunk = action
        if not (0 <= stage < schedule.stages and 0 <= chunk < schedule.chunks):
            limits = f"{schedule.stages} stages and {schedule.chunks} chunks, numbered from 0"
            yield Fault(f"lane {lane} runs {action}, but there are {limits}: drop it.", lane, position)
        elif schedule.placement.lane_of[stage] != lane:
            host = schedule.placement.lane_of[stage]
            yield Fault(
                f"lane {lane} runs {action}, but lane {host} hosts stage {stage}: move it there.", lane, position
            )


def _complete(schedule: Schedule) -> Iterator[Fault]:
    seen: Counter[Action] = Counter()
    for lane, position, action in _places(schedule):
        seen[action] += 1
        if seen[action] > 1:
            yield Fault(f"lane {lane} runs {action}, which has run before: drop one of them.", lane, position)
    for stage, chunk in product(range(schedule.stages), range(schedule.chunks)):
        forward, backward, first, second = (Action(stage, kind, chunk) for kind in Kind)
        lane = schedule.placement.lane_of[stage]
        if not seen[forward]:
            yield Fault(f"{forward} is missing: add it to lane {lane}.")
        halves = [half for half in (first, second) if seen[half]]
        if seen[backward] and halves:
            also = " and ".join(map(str, halves))
            yield Fault(f"lane {lane} runs {backward} and also {also}, a half of it: drop one or the other.")
        elif not seen[backward] and not halves:
            yield Fault(f"{backward} is missing: add it to lane {lane}, or {first} and {second}.")
        elif not seen[backward] and len(halves) == 1:
            other = second if halves == [first] else first
            yield Fault(f"{other} is missing, the other half of {halves[0]}: add it to lane {lane}.")


def _ascend(schedule: Schedule) -> Iterator[Fault]:
    rows: list[tuple[str, Callable[[Kind], bool]]] = [
        ("backwards", lambda kind: kind.is_backward),
        ("weight gradients", lambda kind: kind is Kind.W),
    ]
    last: dict[tuple[int, int, str], Action] = {}
    for lane, position, action in _places(schedule):
        for words, belongs in rows:
            if belongs(action.kind):
                before = last.setdefault((lane, action.stage, words), action)
                if action.chunk < before.chunk:
                    yield Fault(
                        f"lane {lane} runs {action} after {before}, but {words} of a stage ascend in chunks: "
                        f"put {action} first.", lane, position,
                    )
                else:
                    last[lane, action.stage, words] = action


def _end(schedule: Schedule) -> list[Fault]:
    return progress(schedule, lambda lane, action, needs: None)


def _fit(schedule: Schedule, caps: Sequence[int]) -> Iterator[Fault]:
    for lane, (order, cap) in enumerate(zip(schedule.orders, caps)):
        held = list(in_flight(order))
        if max(held, default=0) > cap:
            position = next(position for position, count in enumerate(held) if count > cap)
            yield Fault(
                f"lane {lane} holds up to {max(held)} chunks in flight, first above its cap of {cap} at "
                f"{order[position]}: run a backward before it, or allow {max(held)}.", lane, position,
            )


def _places(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for lane, order in enumerate(schedule.orders):
        for position, action in enumerate(order):
            yield lane, position, action


def _cap_of_lanes(cap: int | Sequence[int] | None, lanes: int) -> Sequence[int]:
    if cap is None:
        return ()
    caps = cap if isinstance(cap, Sequence) else [cap] * lanes
    if len(caps) != lanes:
        raise ScheduleError(f"cap lists {len(caps)} numbers but there are {lanes} lanes (cap: {cap}). List {lanes}.")
    for number in caps:
        refuse_unless_whole("cap", number, least=1)
    return caps
