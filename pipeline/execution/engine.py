"""The engine: lanes as coroutines, and the driver that runs them in one thread.

    order of lane 0:  0F0 0F1 0B0 ...    a lane is a coroutine: it yields its next action with what that needs,
    order of lane 1:  1F0 1B0 1F1 ...    and performs it when it is resumed
              |
         drive_inline                    all lanes in the calling thread, one action a turn
         threads.drive_threads           a thread for each accelerator

The engine does no mathematics: `perform(action)` does the work. The needs of an action come from
`scheduler.requires`. When no lane can go on, the driver raises an error that says what each lane waits for.

A round of the inline driver is a wave up the lanes, in which they run forwards, and a wave down, in which they run the
rest. So a chunk goes on to the next stage while it is in the caches, forwards and backwards. That is a fixed order for
each schedule, `merged_order`, which the checkpoint policy and the memory bounds read. The plan holds it, and where one
thread has all lanes a call runs it as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TypeAlias

from pipeline.common.errors import StuckError
from scheduler import Action, Kind, requires

Needs: TypeAlias = Mapping[Action, tuple[Action, ...]]
Lane: TypeAlias = Generator[tuple[Action, tuple[Action, ...]], None, None]
Perform: TypeAlias = Callable[[Action], None]


def lane(order: Sequence[Action], needs: Needs, perform: Perform) -> Lane:
    """Walk an order: yield the next action with what it needs, perform it when resumed."""
    for action in order:
        yield action, needs[action]
        perform(action)


def needs_of(orders: Sequence[Sequence[Action]], stages: int, split: frozenset[tuple[int, int]] = frozenset()) -> Needs:
    """The actions that each action waits for."""
    return {action: requires(action, stages, split) for order in orders for action in order}


class Lanes:
    """The lanes that one thread drives: an order for each lane's number."""

    def __init__(self, orders: Mapping[int, Sequence[Action]], needs: Needs, perform: Perform) -> None:
        self._numbers = list(orders)
        self._lanes = [lane(order, needs, perform) for order in orders.values()]
        self._heads = [next(coroutine, None) for coroutine in self._lanes]
        self.remaining = sum(len(order) for order in orders.values())

    def sweep(self, done: set[Action]) -> bool:
        """A round: a wave up, in which lanes run forwards, and a wave down, in which they run the rest.

        Returns:
            Whether any lane went on.
        """
        remaining_before = self.remaining
        up, down = range(len(self._lanes)), range(len(self._lanes) - 1, -1, -1)
        for numbers, is_forward in ((up, True), (down, False)):
            for number in numbers:
                head = self._heads[number]
                if head is not None and (head[0].kind is Kind.F) is is_forward and done.issuperset(head[1]):
                    self._heads[number] = next(self._lanes[number], None)
                    self.remaining -= 1
        return self.remaining < remaining_before

    def can_go_on(self, done: set[Action]) -> bool:
        """Whether any lane has all that its next action needs."""
        return any(head is not None and done.issuperset(head[1]) for head in self._heads)

    def waits(self, done: set[Action]) -> dict[int, str]:
        """A description of what each lane waits for."""
        descriptions = {}
        for number, head in zip(self._numbers, self._heads, strict=True):
            if head is None:
                descriptions[number] = f"lane {number} is done"
            else:
                missing = " and ".join(str(need) for need in head[1] if need not in done)
                descriptions[number] = f"lane {number} waits at {head[0]} for {missing}"
        return descriptions


def drive_inline(
    orders: Sequence[Sequence[Action]], needs: Needs, perform: Perform, before: Iterable[Action] = ()
) -> None:
    """Run all orders in the calling thread.

    Args:
        orders: the actions of each lane.
        needs: what each action waits for.
        perform: does the work of one action.
        before: actions that ran in an earlier run of the same call (the F half of `pipe(x)`).

    Raises:
        StuckError: no lane can go on; the message lists what each one waits for.
    """
    done = set(before)

    def work(action: Action) -> None:
        perform(action)
        done.add(action)

    lanes = Lanes(dict(enumerate(orders)), needs, work)
    while lanes.remaining:
        if not lanes.sweep(done):
            raise StuckError(stuck([lanes], done))


def merged_order(orders: Sequence[Sequence[Action]], needs: Needs, before: Iterable[Action] = ()) -> tuple[Action, ...]:
    """The one order in which `drive_inline` runs all lanes.

    Example:
        >>> from scheduler import by_name
        >>> schedule = by_name("gpipe", lanes=2, chunks=2)
        >>> order = merged_order(schedule.orders, needs_of(schedule.orders, stages=2))
        >>> " ".join(str(action) for action in order)
        '0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1'
    """
    ran: list[Action] = []
    drive_inline(orders, needs, ran.append, before)
    return tuple(ran)


def stuck(driven: Iterable[Lanes], done: set[Action]) -> str:
    """A description of what every lane waits for."""
    waits = {number: words for lanes in driven for number, words in lanes.waits(done).items()}
    lines = "; ".join(waits[number] for number in sorted(waits))
    return f"no lane can go on: {lines}. Check the schedule with scheduler.verify(schedule)."
