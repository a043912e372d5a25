"""The lowering of a schedule to a program: its sends and receives, placed such that no lane can wait for ever.

One order of all actions of all lanes is chosen in which they could run one by one: by when they end in a simulation.
Along it, where an action has run whose result another lane needs, its lane gets the SEND and at once the other lane the
RECV, before whatever that lane runs next:

    all     ... 0F0             1F0              1B0 ...
    lane 0      0F0 0SEND_F0                         0RECV_B0
    lane 1          1RECV_F0    1F0              1B0 1SEND_B0

Lemma. (1) Both ends of a channel see its messages in one order: the SENDs of a lane stand in the order of its actions,
and so do the RECVs that stand for them. (2) Nobody waits for ever, even if a RECV waited for its message too: going
along the one order, each action finds what it needs, and each SEND its RECV. What waits only for what is there, and
never chooses, comes to the same end in any order.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import numpy

from scheduler.action import Action, Kind
from scheduler.collecting import no_collecting
from scheduler.columns import Columns
from scheduler.costs import Costs
from scheduler.errors import refuse_unless_a
from scheduler.faults import refusal
from scheduler.programs.messages import messages
from scheduler.programs.program import Program
from scheduler.schedule import Schedule
from scheduler.simulation import progress


@no_collecting()
def lower(schedule: Schedule) -> Program:
    """The program that runs this schedule.

    Args:
        schedule: one that can end

    Raises:
        ScheduleError: a lane waits for ever.

    >>> from scheduler import by_name
    >>> print(lower(by_name("1f1b", lanes=2, chunks=2)))
    program 1f1b, chunks 2, stages on lanes 0 1
    lane 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    lane 1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    refuse_unless_a("schedule", schedule, Schedule)
    routes = messages(schedule.placement).sent
    orders: list[list[Action]] = [[] for _ in schedule.orders]
    append = [order.append for order in orders]
    for lane, action in _one_order(schedule):
        append[lane](action)
        stage, kind, chunk = action
        for route in routes.get((stage, kind), ()):
            append[lane](_action((stage, route.send, chunk)))
            append[route.lane](_action((route.stage, route.receive, chunk)))
    return Program(schedule.name, schedule.placement, schedule.chunks, tuple(map(tuple, orders)))


def _one_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """All actions with their lanes, by when they end if F, I and W take one slot and B two."""
    columns = Columns(schedule)
    foreign = list(columns.foreign())
    lane_progress = progress(columns, [Costs().of_order(lane, order) for lane, order in enumerate(schedule.orders)])
    if foreign or lane_progress.stuck:
        raise refusal(schedule, [*foreign, *lane_progress.stuck])
    by_end = numpy.argsort(list(chain.from_iterable(lane_progress.ends)), kind="stable").tolist()
    lanes, actions = columns.lane.tolist(), schedule.actions
    return ((lanes[index], actions[index]) for index in by_end)


# What Action._make does, without its Python: there are two messages for each action.
_action: Callable[[tuple[int, Kind, int]], Action] = partial(tuple.__new__, Action)
