"""What are the tests of search about, and what do they compare with? All orders of tiny problems, one by one."""

import random
from itertools import combinations, product
from math import inf

from scheduler import Costs, Placement, ScheduleError, simulate
from scheduler.searches.formulation import pose
from scheduler.searches.problem import LaneOrders


def tiny_cases(seed, count):
    """Random (costs, problem), small enough to try all orders."""
    rnd = random.Random(seed)
    cases = []
    while len(cases) < count:
        placement, chunks = rnd.choice([
            (Placement.linear(2), 2), (Placement.linear(2), 3), (Placement.linear(3), 2), (Placement.vee(2), 1),
        ])
        each = [[rnd.randint(low, 9) for _ in range(placement.stages)] for low in (1, 1, 0)]
        recompute = rnd.random() < 0.3
        costs = Costs(
            *each, link=rnd.choice([0, 0, 1, 2.5]), speed=rnd.choice([1, 1, 0.7]),
            backward=rnd.choice([None, None, rnd.randint(1, 16)]) if chunks * placement.stages < 6 else None,
            kept=rnd.choice([None, 0.4, 0.7, 0]), recompute=2 * recompute, checkpoint=0.25 if recompute else None,
        )
        least = placement.stages // placement.lanes
        memory, objective = rnd.choice([None, 1, 1.4, 2, 2.5, 3, 4]), rnd.choice(["flush", "span"])
        memory = None if memory is None else max(memory, least)
        cases.append((costs, pose(costs, placement, chunks, memory, objective, split=rnd.random() < 0.8)))
    return cases


def unequal(seed, lanes, spread=0.2):
    """The 6.2B model of the zero-bubble paper, each time of each stage made up to 20 % longer or shorter."""
    rnd = random.Random(seed)
    return Costs(*([time * (1 + spread * (2 * rnd.random() - 1)) for _ in range(lanes)]
                   for time in (29.718, 29.444, 19.927)), link=0.527, kept=0.43)


def words(problem, lane):
    """All orders of a lane in which everything comes after what it needs there."""
    chains = problem.chains(lane)
    total = sum(map(len, chains))

    def longer(order, done):
        if len(order) == total:
            yield list(order)
        for chain in chains:
            action = next((action for action in chain if action not in done), None)
            if action is not None and problem.near[action] <= done:
                yield from longer([*order, action], done | {action})

    return list(longer([], frozenset()))


def shortest(problem, costs):
    """The value of the best plan: all orders, with every choice of whole backwards, simulated; inf if none fits."""
    wholes = [frozenset()]
    if problem.kinds == 3 and costs.backward is not None:
        wholes = [frozenset(some) for count in range(problem.pairs + 1)
                  for some in combinations(range(problem.pairs), count)]
    best = inf
    lanes = [words(problem, lane) for lane in range(problem.lanes)]
    for whole in wholes:
        at_once = [[order for order in orders if is_at_once(problem, order, whole)] for orders in lanes]
        for orders in product(*at_once):
            best = min(best, length(problem.schedule(LaneOrders(list(orders), whole), "one"), costs, problem))
    return best


def is_at_once(problem, order, whole):
    """Whether every whole backward has its W right after its I, so that each schedule is tried once."""
    return all(order[order.index(pair + problem.pairs) + 1] == pair + 2 * problem.pairs
               for pair in whole if pair + problem.pairs in order)


def length(schedule, costs, problem):
    """The objective, from `simulate`; inf where the schedule cannot end or does not fit."""
    try:
        timeline = simulate(schedule, costs)
    except ScheduleError:
        return inf
    if any(peak > cap for peak, cap in zip(timeline.peak_memory, problem.caps)):
        return inf
    return max(row[-1].end - (row[0].start if problem.objective == "span" else 0) for row in timeline.by_lane)
