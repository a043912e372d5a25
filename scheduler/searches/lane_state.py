"""The state of a lane while a plan is made, one action after the other: what has run, what it holds, which W are left.

    I runs ──► its W may     F, I, W run ──► memory, and when the lane is free
"""

from collections import deque

from scheduler.searches.problem import Problem

__all__ = ["LaneState"]


class LaneState:
    """A lane on which nothing has run.

    Args:
        problem: what is searched for
        lane: its number

    Attributes:
        order: the actions that have run
        weights: the W that may run, the oldest first
        free: when the lane has done what it runs
    """

    def __init__(self, problem: Problem, lane: int) -> None:
        self._problem, self._times, self._cap = problem, problem.split, problem.caps[lane]
        self._level = self.free = 0.0
        self.weights: deque[int] = deque()
        self.order: list[int] = []

    def run(self, action: int) -> None:
        """Runs an action when the lane is free."""
        self._level += self._times.change[action]
        self.free += self._times.duration[action]
        self.order.append(action)
        if self._problem.kinds == 3 and action // self._problem.pairs == 1:
            self.weights.append(action + self._problem.pairs)
