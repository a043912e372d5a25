"""Lower bounds: a value that no schedule beats, whatever its order.

    heads, tails ──► each lane: no action before its head, after each still its tail, one at a time ──► LowerBound.value
    suppose a schedule were shorter ──► what has to go first then ──► heads, tails ──► ... ──► it cannot be: `prove`

The bound of a lane is that of one machine which may interrupt its work (Jackson's preemptive schedule; Carlier 1982,
"The one-machine sequencing problem"). It holds what the lane has to do, and what comes before its first and after its
last action; with memory, what appendix B of the zero-bubble papers bounds (arXiv 2401.10241), and more.

`prove` goes on by contradiction (Carlier and Pinson 1989). Where a schedule may take no longer than some value, of two
actions of a lane one often has to go first, because the other way round takes too long; that makes heads and tails
larger, which decides more pairs, and in the end there may be no room. The largest value for which this works out is
found by halving.

Chunks ascend in each kind of each stage here, forwards too. Where times do not depend on the chunk that is no loss: a
stage that runs its forwards in another order can give the first place to chunk 0, the second to chunk 1, and so on.
"""

from heapq import heappop, heappush
from math import ceil, floor, inf
from typing import NamedTuple

from scheduler.searches.precedence import PrecedenceGraph, graph_of, heads, mirror, mirrored
from scheduler.searches.problem import Problem


class LowerBound:
    """A bound that no plan beats; it grows as more is proven.

    Args:
        problem: what is searched for
        passes: how often heads and tails may be worked out for proofs, all of them together

    >>> from scheduler import Costs, Placement
    >>> from scheduler.searches.formulation import pose
    >>> LowerBound(pose(Costs(), Placement.vee(4), chunks=8)).value
    51
    """

    def __init__(self, problem: Problem, passes: int = 100) -> None:
        self._problem = problem
        self._graph = graph_of(problem)
        self._bounds = _bounds(problem, self._graph)
        self._passes = passes
        times = *problem.split.duration, *problem.together.duration, *problem.messages.travel
        self._integral = all(float(time).is_integer() for time in times)
        self.value = ceil(self._bounds.value * (1 - _BILLIONTH)) if self._integral else self._bounds.value

    def meets(self, value: float) -> bool:
        """Whether a plan of this value is the shortest, to a billionth."""
        return value <= self.value * (1 + _BILLIONTH)

    def prove(self, value: float, halvings: int = 0) -> None:
        """Tries to show that a plan of this value is the shortest; or else how short one may be at best.

        Args:
            value: of a plan
            halvings: how often the gap is halved where it is not the shortest
        """
        if self.meets(value) or self._raise(value * (1 - _BILLIONTH)):
            return
        high = value
        for _ in range(halvings):
            middle = (self.value + high) / 2
            if not self._raise(middle):
                high = middle

    def _raise(self, limit: float) -> bool:
        """Whether the bound rises to `limit`, or where all times are whole above it: no plan is that short."""
        bounds, decided = self._bounds, dict[tuple[int, int], int]()
        while bounds.value <= limit:
            decisions = _decided(self._graph, bounds, limit)
            decisions = {pair: first for pair, first in decisions.items() if decided.get(pair, -1) < first}
            if not decisions or not self._passes:
                return False
            self._passes -= 1
            decided |= decisions
            needs = [list(before) for before in self._graph.needs]
            for (action, _), first in decided.items():
                needs[action].append((first, 0))
            bounds = _bounds(self._problem, self._graph._replace(needs=needs), bounds)
        self.value = max(self.value, floor(limit) + 1 if self._integral else limit)
        return True


class _Bounds(NamedTuple):
    """The earliest start of each action, the least time from its end to the end of all, and the bound that follows."""

    head: list[float]
    tail: list[float]
    value: float


_BILLIONTH = 1e-9
_THOROUGH = 13000  # actions; beyond, what each needs is looked at, and not what its lane has to run before it


def _bounds(problem: Problem, graph: PrecedenceGraph, earlier: _Bounds | None = None) -> _Bounds:
    """The bounds that follow from the graph; infinite where it has a cycle."""
    thorough = problem.count <= _THOROUGH
    offsets = [problem.offset[lane] for lane in problem.lane]
    head = heads(graph, earlier.head if earlier else [0] * problem.count, thorough)
    back = heads(mirrored(graph), mirror(graph, earlier.tail) if earlier else offsets, thorough)
    if head is not None and thorough and graph.choices:
        head = heads(graph, head)  # now that heads of what may have run are known too
    if head is None or back is None:
        return _Bounds([], [], inf)
    tail = mirror(graph, back)
    lanes = [[action for chain in problem.chains(lane) for action in chain] for lane in range(problem.lanes)]
    values = [_preemptive([(head[action], graph.duration[action], tail[action]) for action in lane]) for lane in lanes]
    return _Bounds(head, tail, max(values))


def _preemptive(jobs: list[tuple[float, float, float]]) -> float:
    """The shortest that one machine needs for jobs with a head, a duration and a tail, if it may interrupt them: it
    works at what has the longest tail of all that is there."""
    jobs.sort()
    waiting: list[tuple[float, float]] = []  # minus the tail, and what is left to do
    time, longest = -inf, -inf
    for (head, duration, tail), until in zip(jobs, [*(job[0] for job in jobs[1:]), inf]):
        time = max(time, head)
        heappush(waiting, (-tail, duration))
        while waiting and time < until:
            negative_tail, remaining = heappop(waiting)
            done = min(remaining, until - time)
            time += done
            if done < remaining:
                heappush(waiting, (negative_tail, remaining - done))
            else:
                longest = max(longest, time - negative_tail)
    return longest


def _decided(graph: PrecedenceGraph, bounds: _Bounds, limit: float) -> dict[tuple[int, int], int]:
    """For an action and another chain of its lane, the last of that chain that has to run before the action."""
    decided: dict[tuple[int, int], int] = {}
    head, tail, duration, chunks = bounds.head, bounds.tail, graph.duration, graph.chunks
    for chains in graph.chains:
        for chain in chains:
            for other_chain in chains:
                first = other_chain * chunks
                for action in range(chain * chunks, (chain + 1) * chunks) if chain != other_chain else ():
                    end = head[action] + duration[action]
                    while first < (other_chain + 1) * chunks and end + duration[first] + tail[first] > limit:
                        first += 1
                    if first > other_chain * chunks:
                        decided[action, other_chain] = first - 1
    return decided
