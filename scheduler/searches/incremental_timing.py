"""The timing of a plan: its value, and incrementally that after one lane reorders a few neighbouring actions.

    orders, durations  --run-->  an order in which all could run one by one, and ends  --value-->  what is to be short

    IncrementalTiming(problem, plan) ──► start, tail of every action, value
           estimate(lane, first, actions)  ──►  the new value, without touching anything else
           change(lane, first, actions)    ──►  makes it so

    start  when an action starts
    tail   how long it is from then to the end, by the longest way: start + tail <= value, equal on a critical path

Every way through the plan that a change of one lane's `window` touches goes into the window from something that starts
as before, and out of it to something that has the same tail as before; so both need to be worked out in the window
only (heads and tails of the job shop: Taillard 1994, "Parallel taboo search techniques for the job shop"). It is exact
where no way leads from an action of the window to another one through other lanes; a window where one might is refused.

`simulate` says the same of a schedule, with all that one may ask of it. This is the inner loop of a search, where
there are only numbers and every plan is for the same problem.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from scheduler.searches.problem import LaneOrders, Problem


class _Clock(NamedTuple):
    """The start, the end and the tail of each action."""

    start: list[float]
    end: list[float]
    tail: list[float]


class IncrementalTiming:
    """A plan under way: it can end and fits, before and after every change.

    Args:
        problem: what is searched for
        plan: where to start; it is copied
    """

    def __init__(self, problem: Problem, plan: LaneOrders) -> None:
        self.problem = problem
        self.set(plan)

    def set(self, plan: LaneOrders) -> None:
        """Goes to another plan."""
        self.orders = [list(order) for order in plan.orders]
        self.whole = set(plan.whole)
        self.times = self.problem.times(plan.whole)
        self.near = [self.problem.near_of(action, self.whole) for action in range(self.problem.count)]
        self.rank = [0] * self.problem.count
        self._level: list[list[float]] = [[]] * self.problem.lanes
        self._refresh(range(self.problem.lanes))

    def plan(self) -> LaneOrders:
        """The plan as it is now."""
        return LaneOrders([list(order) for order in self.orders], frozenset(self.whole))

    def estimate(self, lane: int, first: int, window: Sequence[int]) -> float:
        """The value if `window` were the actions of `lane` from position `first` on.

        Args:
            lane: whose order would change
            first: the position of the first that changes
            window: the actions that are there now, in another order that `near` allows

        Returns:
            The new value where it is above the present one, and at most that where it is not; inf where the lane would
            hold too much, or where the window alone does not tell.
        """
        problem, order, (duration, need, change) = self.problem, self.orders[lane], self.times
        sender, travel, receiver = problem.messages
        (start, end, tail), nobody = self._clock, problem.count
        after = first + len(window)
        level, cap = self._level[lane][first], problem.caps[lane]
        for action in window:
            if level + need[action] > cap:
                return inf
            level += change[action]
        soonest = inf  # when what an action of the window sends may come back to the lane
        for action in order[first:after]:
            if sender[action] != nobody and start[sender[action]] >= soonest:
                return inf
            if receiver[action] != nobody:
                soonest = min(soonest, end[action] + travel[receiver[action]])
        time = end[order[first - 1]] if first else 0
        starts = []
        for action in window:
            arrival_time = end[sender[action]] + travel[action]
            if arrival_time > time:
                time = arrival_time
            starts.append(time)
            time += duration[action]
        rest = tail[order[after]] if after < len(order) else problem.offset[lane]
        longest = time + rest
        for action, time in zip(reversed(window), reversed(starts)):
            reader = receiver[action]
            remote = tail[reader] + travel[reader]
            if remote > rest:
                rest = remote
            rest += duration[action]
            if time + rest > longest:
                longest = time + rest
        return longest

    def change(self, lane: int, first: int, window: Sequence[int]) -> None:
        """Makes `window` the actions of `lane` from position `first` on; `estimate` did not say inf to it."""
        self.orders[lane][first:first + len(window)] = window
        self._refresh([lane])

    def flip(self, pair: int) -> bool:
        """Joins the backward of this pair, or splits it; says whether it may, or nothing happens."""
        problem, backward = self.problem, pair + self.problem.pairs
        near = problem.near_of(backward, self.whole ^ {pair})
        if any(self.rank[action] > self.rank[backward] for action in near):
            return False
        self.whole ^= {pair}
        self.near[backward] = near
        problem.set_whole(self.times, pair, pair in self.whole)
        self._refresh(range(self.problem.lanes))
        return True

    def fits(self) -> bool:
        """Whether no lane ever holds more than its cap."""
        need = self.times.need
        return all(
            level + need[action] <= cap for cap, order, levels in zip(self.problem.caps, self.orders, self._level)
            for action, level in zip(order, levels)
        )

    def slack(self, action: int) -> float:
        """The time by which this action could start later without making the value larger."""
        return self.value - self._clock.start[action] - self._clock.tail[action]

    def joinable(self) -> frozenset[int]:
        """The pairs that can be whole too and the value stays: W follows I at once, and who waits for I can wait."""
        problem, together, orders, rank = self.problem, self.problem.together.duration, self.orders, self.rank
        free, end = [0.0] * problem.lanes, list(self._clock.end)
        joined: set[int] = set()
        for action in self._topological:
            lane, weight = problem.lane[action], action + problem.pairs
            time = max(free[lane], end[problem.messages.sender[action]] + problem.messages.travel[action])
            free[lane] = end[action] = time + self.times.duration[action]
            after = rank[action] + 1
            if action // problem.pairs == 1 and after < len(orders[lane]) and orders[lane][after] == weight:
                whole, receiver = time + together[action], problem.messages.receiver[action]
                in_time = whole <= (free[lane] + self.times.duration[weight]) * _ROUNDING
                rest = problem.messages.travel[receiver] + self._clock.tail[receiver]
                if in_time and whole + rest <= self.value * _ROUNDING:
                    joined.add(action - problem.pairs)
                    end[action] = whole
        return frozenset(joined)

    def _refresh(self, lanes: Iterable[int]) -> None:
        """Works out the times and tails of the plan as it is now; and of these lanes, the ranks and levels."""
        problem, (duration, _, change) = self.problem, self.times
        (_, travel, receiver), lane_of = problem.messages, problem.lane
        self._topological, start, end = run_lanes(problem, self.orders, duration)
        assert len(self._topological) == problem.count  # a plan can end
        self.value = value(problem, self.orders, end)
        tail: list[float] = [0] * problem.count + [-inf]
        rest = list(problem.offset)
        for action in reversed(self._topological):
            lane = lane_of[action]
            reader = receiver[action]
            remote = tail[reader] + travel[reader]
            longest = rest[lane]
            if remote > longest:
                longest = remote
            tail[action] = rest[lane] = longest + duration[action]
        self._clock = _Clock(start, end, tail)
        for changed in lanes:
            self._level[changed] = list(accumulate(map(change.__getitem__, self.orders[changed]), initial=0.0))
            for rank, action in enumerate(self.orders[changed]):
                self.rank[action] = rank


_ROUNDING = 1 + 1e-12


def value_of(problem: Problem, plan: LaneOrders) -> float:
    """The value of a plan, which is to be small; infinite where a lane waits for ever."""
    order, _, end = run_lanes(problem, plan.orders, problem.times(plan.whole).duration)
    return value(problem, plan.orders, end) if len(order) == problem.count else inf


def value(problem: Problem, orders: Sequence[Sequence[int]], end: Sequence[float]) -> float:
    """The value of a plan, which is to be small: the latest end of a lane, plus its offset."""
    return max(end[order[-1]] + offset for order, offset in zip(orders, problem.offset))


def run_lanes(
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
