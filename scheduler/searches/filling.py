"""The filling of weight gradients into a given order of F and I.

    warmups(problem)  ──►  turns  ──┐
                                    ├──►  F and I of each lane  ──filled──►  W where the lane waits, or is full
    a plan without its W  ──────────┘

On a line of lanes this finds what the heuristic of the zero-bubble papers finds (Qi et al. 2023, arXiv 2401.10241,
section 3.1): as many F before the first I as there is time and memory for, then I and F in turn; a W where it fits
into a wait, where memory is full, and where the lane would wait longer than it can afford. A lane can afford to wait
as long as it has idled less than the lane that idled most.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import floor, inf

from scheduler.searches.lane_state import LaneState
from scheduler.searches.problem import LaneOrders, Problem

__all__ = ["filled", "turns", "warmups", "without_weights"]

Orders = list[list[int]]


def warmups(problem: Problem) -> list[list[int]]:
    """The number of F that each lane could run before its first I, where each hosts one stage: those that end before
    the first I is there, or one more; or as many on the first lane, or fewer, and even steps down to the last lane."""
    lanes = problem.lanes
    if problem.stages != lanes:
        return []
    waiting = [_while_it_waits(problem, extra) for extra in (0, 1)]
    most = _limited(problem, waiting[0])[0]
    firsts = [most + round((lanes - most) * share / 4) for share in range(5)]
    choices = [*waiting, *([1 + round((first - 1) * after / max(lanes - 1, 1)) for after in range(lanes - 1, -1, -1)]
                           for first in firsts)]
    limited = [_limited(problem, counts) for counts in choices]
    return [counts for index, counts in enumerate(limited) if counts not in limited[:index]]


def turns(problem: Problem, counts: Sequence[int]) -> Orders:
    """So many F on each lane, then I and F in turn, where each lane hosts one stage."""
    orders = []
    for stage, count in enumerate(counts):
        forwards = list(range(stage * problem.chunks, (stage + 1) * problem.chunks))
        backwards = [problem.pairs + action for action in forwards]
        steady = [action for pair in zip(backwards, forwards[count:]) for action in pair]
        orders.append([*forwards[:count], *steady, *backwards[problem.chunks - count:]])
    return orders


def without_weights(problem: Problem, plan: LaneOrders) -> Orders:
    """The F and I of a plan."""
    return [[action for action in order if action < 2 * problem.pairs] for order in plan.orders]


def filled(problem: Problem, orders: Orders, eager: bool = False) -> LaneOrders | None:
    """A plan with these F and I in this order.

    Args:
        problem: what is searched for
        orders: the F and I of each lane
        eager: whether a lane never waits while it has a W

    Returns:
        The plan; None where memory does not go so far, or a lane waits for ever.
    """
    lanes = [_FilledLane(problem, lane, order) for lane, order in enumerate(orders)]
    end = [inf] * problem.count + [0]
    ahead: list[tuple[float, int]] = []  # when the next action of a lane can start, for the lanes that know it
    sleepers: dict[int, int] = {}  # an action, and the lane that waits for it
    idled = 0.0

    def look_ahead(at: int) -> None:
        lane = lanes[at]
        if lane.remaining:
            sender = problem.messages.sender[lane.remaining[-1]]
            if end[sender] == inf:
                sleepers[sender] = at
            else:
                heappush(ahead, (max(lane.free, end[sender] + problem.messages.travel[lane.remaining[-1]]), at))

    for at in range(problem.lanes):
        look_ahead(at)
    while ahead:
        lane = lanes[at := heappop(ahead)[1]]
        action = lane.remaining.pop()
        arrival = end[problem.messages.sender[action]] + problem.messages.travel[action]
        if not lane.make_room(action):
            return None
        lane.fill(arrival, -1 if eager else idled - lane.idled)
        lane.wait(arrival)
        lane.run(action)
        end[action], idled = lane.free, max(idled, lane.idled)
        look_ahead(at)
        if action in sleepers:
            look_ahead(sleepers.pop(action))
    return None if sleepers else LaneOrders([[*lane.order, *lane.weights] for lane in lanes])


class _FilledLane(LaneState):
    """A lane, its idle time since its first action, and the F and I that are left."""

    def __init__(self, problem: Problem, lane: int, order: list[int]) -> None:
        super().__init__(problem, lane)
        self.remaining = order[::-1]
        self.idled = 0.0

    def make_room(self, action: int) -> bool:
        """Runs as many W as it takes until memory allows an action; says whether it does."""
        while self._level + self._times.need[action] > self._cap:
            if not self.weights:
                return False
            self.run(self.weights.popleft())
        return True

    def fill(self, until: float, affordable: float) -> None:
        """Runs the W that end in time, and one more if the wait is longer than the lane can afford."""
        while self.weights and self.free < until:
            in_time = self.free + self._times.duration[self.weights[0]] <= until
            if not in_time and until - self.free <= affordable:
                return
            self.run(self.weights.popleft())

    def wait(self, until: float) -> None:
        """Idles, if it is not as late yet."""
        if self.free < until:
            self.idled += (until - self.free) * bool(self.order)
            self.free = until


def _while_it_waits(problem: Problem, extra: int) -> list[int]:
    """The number of F of each stage that end before its first I is there, and so many more; each makes the stages
    before it wait if it is not over in time."""
    chunks, duration = problem.chunks, problem.split.duration
    forwards = [stage * chunks for stage in range(problem.stages)]
    starts = [0.0]
    for action in forwards[1:]:
        starts.append(starts[-1] + duration[action - chunks] + problem.messages.travel[action])
    counts: list[int] = []
    end = 0.0
    for start, action in zip(reversed(starts), reversed(forwards)):
        backward = action + problem.pairs
        arrival = end + problem.messages.travel[backward] if counts else start + duration[action]
        ahead = (arrival - start) / duration[action] if duration[action] else inf
        counts.append(1 if not counts else chunks if ahead >= chunks else floor(ahead) + extra)
        end = max(arrival, start + counts[-1] * duration[action]) + duration[backward]
    return counts[::-1]


def _limited(problem: Problem, counts: Sequence[int]) -> list[int]:
    """As far as memory goes, fewer on each lane than on the one before, at least 1, and not more than there are."""
    limited: list[int] = []
    for count, memory, cap in zip(counts, problem.held, problem.caps):
        room = (cap - memory.activation) / memory.checkpoint + 1 if memory.checkpoint else inf
        fitting = min(count, floor(room) if room < count else count, *([limited[-1] - 1] if limited else []))
        limited.append(max(fitting, 1))
    return [min(count, problem.chunks) for count in limited]
