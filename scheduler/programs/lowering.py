"""The lowering of a schedule to a program: its sends, and receives that are posted ahead.

    schedule  --messages-->  program  --ahead-->  program: receives posted earlier, so that sends wait less

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

Posting a RECV earlier lets its SEND wait for less and keeps both; a RECV must not wait for its message then.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest

import numpy

from scheduler.action import COMPUTE, Action, Kind
from scheduler.collecting import no_collecting
from scheduler.columns import Columns
from scheduler.costs import Costs
from scheduler.errors import refuse_unless_a, whole_number
from scheduler.faults import refusal
from scheduler.programs.messages import messages
from scheduler.programs.program import Program
from scheduler.schedule import Schedule
from scheduler.simulation import progress


@no_collecting()
def lower(schedule: Schedule, ahead: int = 0) -> Program:
    """The program that runs this schedule.

    Args:
        schedule: one that can end
        ahead: how many actions before its place a receive is posted, so that a send need not wait for the lane to come
            there; each costs a buffer. 1 is enough for a message to arrive while the lane works.

    Raises:
        ScheduleError: a lane waits for ever, or `ahead` is no whole number of at least 0.

    >>> from scheduler import by_name
    >>> print(lower(by_name("1f1b", lanes=2, chunks=2)))
    program 1f1b, chunks 2, stages on lanes 0 1
    lane 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    lane 1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    refuse_unless_a("schedule", schedule, Schedule)
    ahead = whole_number("ahead", ahead, least=0)
    orders = tuple(tuple(_posted_ahead(order, ahead)) for order in _with_messages(schedule))
    return Program(schedule.name, schedule.placement, schedule.chunks, orders)


def _with_messages(schedule: Schedule) -> list[list[Action]]:
    """The orders with each SEND after what it sends, each RECV where the lane is by then."""
    routes = messages(schedule.placement).sent
    orders: list[list[Action]] = [[] for _ in schedule.orders]
    append = [order.append for order in orders]
    for lane, action in _one_order(schedule):
        append[lane](action)
        stage, kind, chunk = action
        for route in routes.get((stage, kind), ()):
            append[lane](_action((stage, route.send, chunk)))
            append[route.lane](_action((route.stage, route.receive, chunk)))
    return orders


def _posted_ahead(order: Sequence[Action], ahead: int) -> Iterator[Action]:
    """Each RECV `ahead` actions earlier; both ends of a channel keep its order.

    Cut before each action that computes: the RECVs of a piece go to the piece `ahead` before it, or to the first.

    >>> print(*_posted_ahead(list(map(Action.parse, ["0F0", "0RECV_B0", "0B0"])), ahead=1))
    0RECV_B0 0F0 0B0
    """
    receives: list[list[Action]] = [[]]
    rest: list[list[Action]] = [[]]
    for action in order:
        if action.kind in COMPUTE:
            receives.append([])
            rest.append([])
        (receives if action.kind.is_receive else rest)[-1].append(action)
    early = chain.from_iterable(receives[: ahead + 1])
    for piece, posted in zip_longest(rest, [early, *receives[ahead + 1:]], fillvalue=()):
        yield from piece
        yield from posted


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
