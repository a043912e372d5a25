"""The timing of a plan: the end of each of its actions, and its value.

    orders, durations  --run-->  an order in which all could run one by one, and ends  --value-->  what is to be short

`simulate` says the same of a schedule, with all that one may ask of it. This is the inner loop of a search, where
there are only numbers and every plan is for the same problem.
"""

from collections.abc import Sequence
from math import inf

from scheduler.searches.problem import LaneOrders, Problem


def value_of(problem: Problem, plan: LaneOrders) -> float:
    """The value of a plan, which is to be small; infinite where a lane waits for ever."""
    order, _, end = run(problem, plan.orders, problem.times(plan.whole).duration)
    return value(problem, plan.orders, end) if len(order) == problem.count else inf


def value(problem: Problem, orders: Sequence[Sequence[int]], end: Sequence[float]) -> float:
    """The value of a plan, which is to be small: the latest end of a lane, plus its offset."""
    return max(end[order[-1]] + offset for order, offset in zip(orders, problem.offset))


def run(
    problem: Problem, orders: Sequence[Sequence[int]], duration: Sequence[float]
) -> tuple[list[int], list[float], list[float]]:
    """Runs every lane as far as it gets: the actions in an order in which they could run, their starts and ends."""
    sender, travel, nobody = problem.messages.sender, problem.messages.travel, problem.count
    start, end = [inf] * (nobody + 1), [inf] * nobody + [0]
    sleeper = [-1] * (nobody + 1)  # the lane that waits for an action
    position, free = [0] * problem.lanes, [0.0] * problem.lanes
    done: list[int] = []
    awake = list(reversed(range(problem.lanes)))
    while awake:
        lane = awake.pop()
        order, time, at = orders[lane], free[lane], position[lane]
        while at < len(order):
            action = order[at]
            arrived = end[sender[action]] + travel[action]
            if arrived > time:
                if arrived == inf:
                    sleeper[sender[action]] = lane
                    break
                time = arrived
            start[action] = time
            time += duration[action]
            end[action] = time
            done.append(action)
            if sleeper[action] >= 0:
                awake.append(sleeper[action])
            at += 1
        position[lane], free[lane] = at, time
    return done, start, end
