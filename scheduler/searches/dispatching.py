"""Greedy dispatching: a plan for any placement, costs and memory that one chunk fits.

    a lane is free ──► I or F that is ready and fits  ──►  else a W  ──►  else it waits for the next message

F is let in only where, with what the lane holds of later chunks, the oldest one can still go all the way forward and
back. So the oldest of all always can, and no lane waits for ever.

Where it is said how many chunks a stage may have in flight, F goes before I: a lane that holds so many runs one of each
in turn.

A lane that knows when the next message is there waits rather than begin a W that would last longer, as long as it can
afford to: as long as it has idled less than the lane that idled most. That is the rule of the zero-bubble papers (Qi et
al. 2023, arXiv 2401.10241, section 3.1); on a line of lanes this finds what their heuristic finds, or better.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from scheduler.searches.formulation import one_chunk_peak
from scheduler.searches.problem import LaneOrders, Problem


def in_flight_limits(problem: Problem) -> Iterator[list[int]]:
    """Numbers of chunks that each stage may have in flight: even steps from the first stage down to 1 on the last."""
    last = problem.stages - 1
    for share in range(_SHARES + 1):
        first = round(problem.stages * (1 + share / _SHARES))
        yield [1 + round((first - 1) * (last - stage) / max(last, 1)) for stage in range(problem.stages)]


def dispatch(problem: Problem, most: Sequence[int] | None = None, eager: bool = False) -> LaneOrders:
    """Takes what is there, in the order of time.

    Args:
        problem: what is searched for
        most: how many chunks each stage may have in flight; None: as many as fit
        eager: whether a lane never waits while it has a W

    Returns:
        A plan that can end and fits.
    """
    lanes = [_Lane(problem, lane, most) for lane in range(problem.lanes)]
    end = [inf] * problem.count + [0]
    events: list[tuple[float, int]] = [(0, lane) for lane in range(problem.lanes)]
    idled = 0.0  # by the lane that idled most
    while events:
        time, at = heappop(events)
        lane = lanes[at]
        if time < lane.free:
            continue  # an event at the end of what it runs is there too
        action, later = lane.choose(time, end, -1 if eager else idled - lane.idled)
        if action is None:
            if later < inf:
                heappush(events, (later, at))
            continue
        lane.start(action, time)
        end[action], idled = lane.free, max(idled, lane.idled)
        heappush(events, (lane.free, at))
        receiver = problem.messages.receiver[action]
        if receiver < problem.count:
            heappush(events, (lane.free + problem.messages.travel[receiver], problem.lane[receiver]))
    return LaneOrders([lane.order for lane in lanes])


class _Lane:
    """A lane, what it has run and holds, and the actions that could run next.

    Attributes:
        order: the actions that have run
        free: when the lane has done what it runs
        idled: how long it has waited since its first action
    """

    def __init__(self, problem: Problem, lane: int, most: Sequence[int] | None) -> None:
        self._problem, self._cap, self._most = problem, problem.caps[lane], most
        self.order: list[int] = []
        self.free = self.idled = self._level = 0.0
        self._weights: deque[int] = deque()  # the W that may run, the oldest first
        self._stages = problem.placement.stages_of(lane)
        self._one_chunk_peak = one_chunk_peak(self._stages, problem.held)
        memories = [problem.held[stage] for stage in self._stages]
        self._recomputes = any(memory.checkpoint < memory.activation for memory in memories)
        # F of late stages and I of early ones first: they are nearer to giving back what is held
        forwards, backwards = [(0, stage) for stage in reversed(self._stages)], [(1, stage) for stage in self._stages]
        self._done = dict.fromkeys(forwards + backwards if most else backwards + forwards, 0)

    def choose(self, time: float, end: Sequence[float], affordable: float) -> tuple[int | None, float]:
        """The action to run at `time`, if any; and when the next is there, as far as that is known."""
        arrivals = [(self._arrival(action, end), action) for action in self._next()]
        ready = [action for arrival, action in arrivals if arrival <= time]
        later = min((arrival for arrival, _ in arrivals if arrival > time), default=inf)
        if ready:
            return ready[0], later
        if self._weights:
            in_time = time + self._problem.split.duration[self._weights[0]] <= later
            if in_time or later - self.free > affordable:
                return self._weights[0], later
        return None, later

    def start(self, action: int, time: float) -> None:
        """Runs an action at `time`."""
        kind, pair = divmod(action, self._problem.pairs)
        if kind == 2:
            self._weights.popleft()
        else:
            self._done[kind, pair // self._problem.chunks] += 1
        if kind == 1 and self._problem.kinds == 3:
            self._weights.append(action + self._problem.pairs)
        self.idled += (time - self.free) * bool(self.order)
        self.free = time + self._problem.split.duration[action]
        self._level += self._problem.split.change[action]
        self.order.append(action)

    def _next(self) -> Iterator[int]:
        """The next F and I of each stage that fit."""
        problem = self._problem
        for (kind, stage), chunk in self._done.items():
            if chunk < problem.chunks:
                action = (kind * problem.stages + stage) * problem.chunks + chunk
                is_safe = kind == 1 or self._leaves_room(stage, chunk)
                if is_safe and self._level + self._problem.split.need[action] <= self._cap:
                    yield action

    def _leaves_room(self, stage: int, chunk: int) -> bool:
        """Whether, once the chunks before it are back, the first that has not gone all the way forward here can go; or
        where that is recomputed, and so takes room on its way back too, the oldest that is not back."""
        problem, forward, backward = self._problem, self._done_of(0), self._done_of(1)
        if self._most is not None and chunk - self._done[1, stage] >= self._most[stage]:
            return False
        first = backward[0] if self._recomputes else min(forward)
        if chunk == first or self._cap == inf:
            return True
        later = problem.held[stage].checkpoint
        for lane_stage, forwarded, returned in zip(self._stages, forward, backward):
            later += problem.held[lane_stage].checkpoint * max(0, forwarded - max(returned, first + 1))
        return later + self._one_chunk_peak <= self._cap

    def _done_of(self, kind: int) -> list[int]:
        return [self._done[kind, stage] for stage in self._stages]

    def _arrival(self, action: int, end: Sequence[float]) -> float:
        """The time at which all that an action needs is there; inf where it is not known yet."""
        problem = self._problem
        arrival = end[problem.messages.sender[action]] + problem.messages.travel[action]
        return max([arrival, *(end[need] for need in problem.near[action])])


_SHARES = 4
