"""Greedy dispatching: a plan for any placement, costs and memory that one chunk fits.

    a lane is free ──► I or F that is ready and fits  ──►  else a W  ──►  else it waits for the next message

F is let in only where, with what the lane holds of later chunks, the oldest one can still go all the way forward and
back. So the oldest of all always can, and no lane waits for ever.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from scheduler.searches.formulation import one_chunk_peak
from scheduler.searches.lane_state import LaneState
from scheduler.searches.problem import LaneOrders, Problem

__all__ = ["dispatch"]


def dispatch(problem: Problem, forward_first: bool = False, patient: bool = False) -> LaneOrders:
    """Takes what is there, in the order of time.

    Args:
        problem: what is searched for
        forward_first: whether F goes before I where both are ready
        patient: whether W is put off where it would last beyond the next arrival that is known

    Returns:
        A plan that can end and fits.
    """
    lanes = [_DispatchedLane(problem, lane, forward_first, patient) for lane in range(problem.lanes)]
    end = [inf] * problem.count + [0]
    events: list[tuple[float, int]] = [(0, lane) for lane in range(problem.lanes)]
    while events:
        time, at = heappop(events)
        lane = lanes[at]
        if time < lane.free:
            continue  # an event at the end of what it runs is there too
        action, later = lane.choose(time, end)
        if action is None:
            if later < inf:
                heappush(events, (later, at))
            continue
        lane.start(action, time)
        end[action] = lane.free
        heappush(events, (lane.free, at))
        receiver = problem.messages.receiver[action]
        if receiver < problem.count:
            heappush(events, (lane.free + problem.messages.arrival[action], problem.lane[receiver]))
    return LaneOrders([lane.order for lane in lanes])


class _DispatchedLane(LaneState):
    """A lane, and the actions that could run next."""

    def __init__(self, problem: Problem, lane: int, forward_first: bool, patient: bool) -> None:
        super().__init__(problem, lane)
        self._patient = patient
        self._stages = problem.placement.stages_of(lane)
        self._one_chunk_peak = one_chunk_peak(self._stages, problem.held)
        memories = [problem.held[stage] for stage in self._stages]
        self._recomputes = any(memory.checkpoint < memory.activation for memory in memories)
        # F of late stages and I of early ones first: they are nearer to giving back what is held
        forwards, backwards = [(0, stage) for stage in reversed(self._stages)], [(1, stage) for stage in self._stages]
        self._chains = forwards + backwards if forward_first else backwards + forwards
        self._done = dict.fromkeys(self._chains, 0)

    def choose(self, time: float, end: Sequence[float]) -> tuple[int | None, float]:
        """The action to run at `time`, if any; and when the next is there, as far as that is known."""
        arrivals = [(self._arrival(action, end), action) for action in self._next()]
        ready = [action for arrival, action in arrivals if arrival <= time]
        later = min((arrival for arrival, _ in arrivals if arrival > time), default=inf)
        if ready:
            return ready[0], later
        if self.weights and not (self._patient and time + self._times.duration[self.weights[0]] > later < inf):
            return self.weights[0], later
        return None, later

    def start(self, action: int, time: float) -> None:
        """Runs an action at `time`."""
        kind, pair = divmod(action, self._problem.pairs)
        if kind == 2:
            self.weights.popleft()
        else:
            self._done[kind, pair // self._problem.chunks] += 1
        self.free = time
        self.run(action)

    def _next(self) -> Iterator[int]:
        """The next F and I of each stage that fit."""
        problem = self._problem
        for kind, stage in self._chains:
            chunk = self._done[kind, stage]
            if chunk < problem.chunks:
                action = (kind * problem.stages + stage) * problem.chunks + chunk
                is_safe = kind == 1 or self._leaves_room(stage, chunk)
                if is_safe and self._level + self._times.need[action] <= self._cap:
                    yield action

    def _leaves_room(self, stage: int, chunk: int) -> bool:
        """Whether, once the chunks before it are back, the first that has not gone all the way forward here can go; or
        where that is recomputed, and so takes room on its way back too, the oldest that is not back."""
        problem, forward, backward = self._problem, self._done_of(0), self._done_of(1)
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
