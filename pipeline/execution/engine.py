"""The engine: one order in which all lanes run, and the actions that each action waits for.

    order of lane 0:  0F0 0F1 0B0 ...  --requires-->  needs --+--> merged_order    all lanes in the calling thread
    order of lane 1:  1F0 1B0 1F1 ...                         `--> threads.py      its part of that, in each thread

The engine does no mathematics. The needs of an action come from `scheduler.requires`. Where no lane can go on, an error
says what each lane waits for.

A round is a wave up the lanes, in which they run forwards, and a wave down, in which they run the rest. So a chunk goes
on to the next stage while it is in the caches, forwards and backwards. That is a fixed order for each schedule, which
the checkpoint policy and the memory bounds read. The plan holds it, and a call runs it as it stands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from pipeline.common.errors import StuckError
from scheduler import Action, Kind, requires

Needs: TypeAlias = Mapping[Action, tuple[Action, ...]]


def needs_of(
    orders: Sequence[Sequence[Action]],
    stages: int,
    split: frozenset[tuple[int, int]] = frozenset(),
    before: Collection[Action] = frozenset(),
) -> Needs:
    """The actions that each action waits for.

    Args:
        orders: the actions of each lane.
        stages: their number.
        split: the (stage, chunk) pairs whose backward is cut in two.
        before: actions that ran in an earlier phase of the same call (the F half of `pipe(x)`): none waits for these.
    """
    return {
        action: tuple([need for need in requires(action, stages, split) if need not in before])
        for order in orders
        for action in order
    }


def merged_order(orders: Sequence[Sequence[Action]], needs: Needs) -> tuple[Action, ...]:
    """The one order in which all lanes run.

    Args:
        orders: the actions of each lane.
        needs: what each action waits for.

    Raises:
        StuckError: no lane can go on; the message lists what each one waits for.

    Example:
        >>> from scheduler import by_name
        >>> schedule = by_name("gpipe", lanes=2, chunks=2)
        >>> order = merged_order(schedule.orders, needs_of(schedule.orders, stages=2))
        >>> " ".join(str(action) for action in order)
        '0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1'
    """
    merged: list[Action] = []
    done, lefts = set[Action](), [list(reversed(order)) for order in orders]
    while any(lefts):
        count = len(merged)
        for wave, is_forward in ((lefts, True), (reversed(lefts), False)):
            for left in wave:
                if left and (left[-1].kind is Kind.F) is is_forward and done.issuperset(needs[left[-1]]):
                    merged.append(left.pop())
                    done.add(merged[-1])
        if len(merged) == count:
            raise StuckError(_stuck([left[-1] if left else None for left in lefts], needs, done))
    return tuple(merged)


def _stuck(heads: Sequence[Action | None], needs: Needs, done: set[Action]) -> str:
    """A description of what every lane waits for."""
    waits = []
    for lane, head in enumerate(heads):
        missing = [] if head is None else [str(need) for need in needs[head] if need not in done]
        waits.append(f"lane {lane} " + ("is done" if head is None else f"waits at {head} for {' and '.join(missing)}"))
    return f"no lane can go on: {'; '.join(waits)}. Check the schedule with scheduler.verify(schedule)."
