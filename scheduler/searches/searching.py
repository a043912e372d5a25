"""The search for the shortest schedule for given costs and memory.

    names() ───────────────────────────────┐
    lanes that take what is there ─────────┴─► the best that fits ──anneal──► Found: schedule, value, bound, best named
                                                                    prove ──►

    >>> from scheduler import Costs, draw
    >>> costs = Costs(forward=1, input=(1, 1, 2), weight=(1, 2, 1), kept=0.5)
    >>> found = search(costs, lanes=3, chunks=4, memory=3)
    >>> print(found)
    found (lanes=3, chunks=4): flush 18
    lower bound 18, none is shorter
    best named: zb-h1 20, 10.00% saved
    >>> print(draw(found.timeline))
    lane 0 |F0 F1 F2 .  .  .  B0 == F3 B1 == .  .  B2 == .  B3 ==
    lane 1 |.  F0 F1 F2 .  I0 W0 == I1 F3 W1 == I2 W2 == I3 W3 ==
    lane 2 |.  .  F0 I0 == F1 I1 == F2 I2 == F3 I3 == W0 W1 W2 W3
    makespan 18 slots, bubble 18.5%, peak in flight 3 3 4

flush: the makespan. span: the longest time from the first start of a lane to its last end, which counts where steps
may overlap. Every named schedule for the same stages is tried first, so what is found is at least as good. The bound
(bounds.py) often shows that nothing is better; the search stops there.

The papers' own search is one heuristic (dispatching.py) and no bound (Qi et al. 2023, arXiv 2401.10241, section 3.1).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isclose
from typing import NamedTuple

from scheduler.costs import Costs
from scheduler.drawing import duration
from scheduler.errors import ScheduleError, refuse_unless_a, whole_number
from scheduler.notebook import NotebookResult
from scheduler.placement import Placement
from scheduler.schedule import Schedule
from scheduler.schedules import for_placement
from scheduler.searches.annealing import anneal
from scheduler.searches.bounds import LowerBound
from scheduler.searches.dispatching import dispatch, in_flight_limits
from scheduler.searches.formulation import Memory, pose
from scheduler.searches.incremental_timing import IncrementalTiming, value_of
from scheduler.searches.problem import LaneOrders, Objective, Problem
from scheduler.simulation import simulate
from scheduler.summary import picture
from scheduler.timeline import Timeline
from scheduler.verification import verify


@dataclass(frozen=True, repr=False)
class Found(NotebookResult):
    """A schedule, and how good it is.

    Args:
        schedule: the shortest that was found; verified, and it fits
        timeline: of it
        objective: what was to be short, "flush" or "span"
        value: how long that is
        bound: no schedule whose chunks ascend is shorter
        best_named: the shortest named schedule that fits; None where none does
        named_value: how long that takes
    """

    schedule: Schedule
    timeline: Timeline
    objective: Objective
    value: float
    bound: float
    best_named: str | None
    named_value: float | None

    @property
    def gap(self) -> float:
        """The time by which the schedule exceeds the bound, as a share of the bound."""
        return float(self.value / self.bound) - 1 if self.bound else 0.0

    @property
    def gain(self) -> float:
        """The time by which it is shorter than the best named one, as a share of that."""
        return 1 - float(self.value / self.named_value) if self.named_value else 0.0

    def __str__(self) -> str:
        shortest = ", none is shorter" if self.gap < _SHORTEST else f", gap {self.gap:.2%}"
        named = "none fits"
        if self.named_value is not None:
            named = f"{self.best_named} {self._said(self.named_value)}, {self.gain:.2%} saved"
        return "\n".join([
            f"{self.schedule.name} (lanes={self.schedule.lanes}, chunks={self.schedule.chunks}): "
            f"{self.objective} {self._said(self.value)}",
            f"lower bound {self._said(self.bound)}{shortest}",
            f"best named: {named}",
        ])

    def _picture(self) -> str | None:
        return picture(self.timeline)

    def _said(self, value: float) -> str:
        return duration(value, self.timeline.unit).removesuffix(" slots")


def search(
    costs: Costs, lanes: int, chunks: int, memory: Memory = None, objective: Objective = "flush", *,
    placement: Placement | None = None, split: bool = True, seed: int = 0, effort: float = 1,
) -> Found:
    """Looks for the shortest schedule.

    Args:
        costs: what actions and messages cost, and what chunks hold, for each stage
        lanes: how many lanes there are
        chunks: of a step
        memory: what a lane may hold at once, in the unit of `costs.activation`: one number for all lanes, or one for
            each; None: as much as it likes
        objective: what is to be short, "flush" or "span"
        placement: which lane hosts which stage; None: stage s on lane s
        split: whether backwards may be split into I and W
        seed: of the random moves; the same seed gives the same schedule
        effort: how long to search, as a multiple of some seconds; it is not measured in time

    Returns:
        The best that was met; stops before where that is as short as the bound.

    Raises:
        ScheduleError: costs, lanes, chunks, memory or placement do not go together, no schedule fits the memory, or
            seed or effort are no numbers.
    """
    lanes, seed = whole_number("lanes", lanes, least=1), whole_number("seed", seed, least=0)
    if not isinstance(effort, (int, float)) or not 0 <= effort < inf:
        raise ScheduleError(f"effort is {effort!r}, but must be a number of at least 0. Use 1, or 10 for ten times.")
    placement = Placement.linear(lanes) if placement is None else placement
    refuse_unless_a("placement", placement, Placement)
    if placement.lanes != lanes:
        raise ScheduleError(
            f"lanes is {lanes}, but the placement has {placement.lanes} (lane_of: {placement.lane_of}). "
            f"Use lanes={placement.lanes}, or another placement."
        )
    problem = pose(costs, placement, chunks, memory, objective, split)
    named = list(_named(problem, costs))
    best = min(named, key=lambda candidate: candidate.value, default=None)
    bound = LowerBound(problem, int(_PASSES * effort / problem.count))
    if best is not None and bound.meets(best.value):
        result = best
    else:
        start = min(_starts(problem, named), key=lambda plan: value_of(problem, plan))
        plan = _improved(problem, start, bound, seed, effort)
        result = _Candidate.of(problem.schedule(plan, "found"), costs, objective)
        assert isclose(result.value, value_of(problem, plan))  # the search and simulate agree
        if best is not None and best.value <= result.value * (1 + _ROUNDING):
            result = best
    assert result.fits(problem)  # whatever is returned is right
    verify(result.schedule)
    return Found(
        result.schedule, result.timeline, objective, result.value, min(bound.value, result.value),
        best and best.schedule.name, best and best.value,
    )


class _Candidate(NamedTuple):
    """A schedule, and what `simulate` says of it."""

    schedule: Schedule
    timeline: Timeline
    value: float

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs, objective: Objective) -> "_Candidate":
        timeline = simulate(schedule, costs)
        spans = [row[-1].end - (row[0].start if objective == "span" else 0) for row in timeline.by_lane]
        return cls(schedule, timeline, max(spans))

    def fits(self, problem: Problem) -> bool:
        return all(peak <= cap for peak, cap in zip(self.timeline.peak_memory, problem.caps))


def _named(problem: Problem, costs: Costs) -> Iterator[_Candidate]:
    """The named schedules for the same stages that fit."""
    for _, _, schedule in for_placement(problem.placement, problem.chunks):
        verify(schedule)
        if problem.kinds == 3 or not schedule.split:
            candidate = _Candidate.of(schedule, costs, problem.objective)
            if candidate.fits(problem):
                yield candidate


def _starts(problem: Problem, named: list[_Candidate]) -> Iterator[LaneOrders]:
    """Plans that fit, to search from."""
    plans = [dispatch(problem, most, eager) for most in (None, *in_flight_limits(problem)) for eager in (False, True)]
    of_named = [problem.plan(candidate.schedule) for candidate in named]
    plans += [plan for plan in of_named if problem.allows(plan)]  # forwards may not ascend
    yield from plans
    yield from (problem.with_whole(plan) for plan in plans)


def _improved(problem: Problem, start: LaneOrders, bound: LowerBound, seed: int, effort: float) -> LaneOrders:
    """A plan that is as short or shorter, with halves joined where that costs nothing; raises the bound."""
    best, lowest = start, value_of(problem, start)
    runs = max(1, int(_WORK * effort / (_RUN * problem.count)))
    for run in range(runs):
        plan = anneal(problem, best if run % 2 else start, _WORK * effort / runs, seed=_SEEDS * seed + run,
                      enough=bound.value, hot=_HOT[run % len(_HOT)])
        if value_of(problem, plan) < lowest or not run:
            best, lowest = plan, value_of(problem, plan)
            bound.prove(lowest)
        if bound.meets(lowest):
            break
    bound.prove(lowest, halvings=_HALVINGS)
    assert bound.value <= lowest * (1 + _ROUNDING)  # nobody beats a bound
    return best._replace(whole=best.whole | IncrementalTiming(problem, best).joinable())


_WORK = 3e7  # some seconds
_RUN = 2e4  # for each action, before it pays to begin anew
_HOT = (0.05, 0.3, 1)  # the temperatures that runs begin with, in turn
_PASSES = 6e4  # for each action
_HALVINGS = 6
_SEEDS = 1000
_ROUNDING = 1e-9  # sums of floats round
_SHORTEST = 1e-8  # proofs leave a billionth open
