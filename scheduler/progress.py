"""How far do the lanes get if each runs its order and waits where it must, and what stops them?

    orders, requires ──►  run(lane, action, needs)   for every action that can run, after all that it needs
                     └─►  stuck                      for each lane that waits for ever: where, and for what

Time plays no part: whether orders can end depends on the orders alone. `verify` asks who is stuck; `simulate` gives
each action its time on the way.
"""

from collections.abc import Callable

from scheduler.action import Action
from scheduler.dependencies import requires
from scheduler.faults import Fault
from scheduler.schedule import Schedule

__all__ = ["Run", "progress"]

Run = Callable[[int, Action, tuple[Action, ...]], None]


def progress(schedule: Schedule, run: Run) -> list[Fault]:
    """Runs every lane as far as it gets, in time proportional to the number of actions.

    Args:
        schedule: any schedule, right or wrong
        run: called with lane, action and what the action needs, in an order in which they could run one by one

    Returns:
        A fault for each lane that is stuck; none where the schedule ends.

    >>> wrong = Schedule.parse('''
    ...     schedule wrong, chunks 1, stages on lanes 0 1
    ...     lane 0: 0B0 0F0
    ...     lane 1: 1B0
    ... ''')
    >>> for fault in progress(wrong, lambda lane, action, needs: None):
    ...     print(fault.words)
    cannot end: lane 0 waits at 0B0 for 0F0, which lane 0 runs after 0B0.
    cannot end: lane 1 waits at 1B0 for 1F0, which no lane runs: add 1F0, or drop chunk 0.
    """
    stages, split = schedule.stages, schedule.split
    done: set[Action] = set()
    position = [0] * schedule.lanes
    sleepers: dict[Action, list[int]] = {}  # what is missing -> the lanes that wait for it
    awake = list(reversed(range(schedule.lanes)))
    while awake:
        lane = awake.pop()
        order = schedule.orders[lane]
        while position[lane] < len(order):
            action = order[position[lane]]
            needs = requires(action, stages, split)
            if not done.issuperset(needs):
                sleepers.setdefault(next(need for need in needs if need not in done), []).append(lane)
                break
            run(lane, action, needs)
            done.add(action)
            position[lane] += 1
            if action in sleepers:
                awake += sleepers.pop(action)
    waits = {lane: need for need, lanes in sleepers.items() for lane in lanes}
    return [_wait(schedule, position, lane, waits[lane]) for lane in sorted(waits)]


def _wait(schedule: Schedule, position: list[int], lane: int, need: Action) -> Fault:
    action = schedule.orders[lane][position[lane]]
    words = f"cannot end: lane {lane} waits at {action} for {need}, {_whereabouts(schedule, position, need)}"
    return Fault(words, lane, position[lane])


def _whereabouts(schedule: Schedule, position: list[int], need: Action) -> str:
    for lane, order in enumerate(schedule.orders):
        if need in order[position[lane]:]:
            at = order[position[lane]]
            return f"where lane {lane} waits too." if at == need else f"which lane {lane} runs after {at}."
    return f"which no lane runs: add {need}, or drop chunk {need.chunk}."
