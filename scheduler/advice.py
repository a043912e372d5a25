"""Advice on a step: changes to it, each with the time that the step would take by `simulate`.

    schedule, costs of a real step --Job--> its time as it is
           change one thing        --Job--> its time then      ──►  Change: what, step, gain

    a layer from the slowest stage to the one beside it    the stage's layers share its time evenly
    stages of equal work                                   what any balance can gain at most
    twice as many chunks                                   half a chunk takes half the time, a message the same
    no recomputation, links that take no time, another named schedule on the same stages
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from scheduler.costs import Costs
from scheduler.interruptions import interrupted
from scheduler.measurement import OF_ACTIONS
from scheduler.schedule import Schedule
from scheduler.schedules import by_name, for_placement
from scheduler.simulation import simulate
from scheduler.timeline import Timeline, in_flight


class Change(NamedTuple):
    """A change, and what it would gain.

    Args:
        what: to change, in words
        step: the time of a step after it, by `simulate`
        gain: the time that it saves, as a share of the step as it is, by `simulate`
        splits: whether backwards are split into I and W then
    """

    what: str
    step: float
    gain: float
    splits: bool = False


@dataclass(frozen=True)
class Job:
    """A step that runs, for `simulate`.

    Args:
        schedule: the order of each lane
        costs: of its stages; those that were measured are a number for each, and `recompute` of one recomputation
        recomputed: the (stage, chunk) pairs that are recomputed; None: `costs` say it of every chunk
        turns: groups of lanes that take turns
    """

    schedule: Schedule
    costs: Costs
    recomputed: frozenset[tuple[int, int]] | None
    turns: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def timeline(self) -> Timeline:
        """The step, simulated, as if all lanes ran at once."""
        pairs, times = self.recomputed, self.costs.recompute
        if pairs is None:
            return simulate(self.schedule, self.costs)
        assert isinstance(times, Sequence)  # measured
        costs = replace(
            self.costs, recompute=(lambda stage, chunk: times[stage] if (stage, chunk) in pairs else 0) if pairs else 0
        )
        return simulate(self.schedule, costs)

    @cached_property
    def step(self) -> float:
        """The time of the step: no less than what the lanes of a group, which take turns, work together."""
        timeline = self.timeline
        group_times = [sum(timeline.busy[lane] for lane in group) for group in self.turns]
        return float(max([timeline.makespan, *group_times]))

    def under(self, schedule: Schedule) -> "Job":
        """The same costs under another schedule, of as many chunks or of several parts of each.

        What is recomputed is what the new orders interrupt, where it was so of the old (checkpoint="except_last"); else
        it is the same chunks.
        """
        pairs, parts = self.recomputed, range(schedule.chunks // self.schedule.chunks)
        if pairs and pairs == interrupted(self.schedule.orders):
            pairs = interrupted(schedule.orders)
        elif pairs:
            pairs = frozenset((stage, len(parts) * chunk + part) for stage, chunk in pairs for part in parts)
        return replace(self, schedule=schedule, recomputed=pairs)


def advice(job: Job, balance: Sequence[int] | None, slowest: int) -> tuple[Change, ...]:
    """Changes that shorten the step by half a percent or more, the best first.

    Args:
        job: the step
        balance: the number of layers of each stage, where that is known
        slowest: the stage that is the bottleneck
    """
    current_step = job.step
    changes = [
        Change(words, changed.step, 1 - changed.step / current_step if current_step else 0.0,
               bool(changed.schedule.split))
        for words, changed in _changes(job, balance, slowest)
    ]  # fmt: skip
    return tuple(sorted((change for change in changes if change.gain >= _WORTH), key=lambda change: -change.gain))


def known_name(schedule: Schedule) -> tuple[str, dict[str, Any]]:
    """The name of the named schedule with these orders, and its options; "" if there is none."""
    named_schedules = for_placement(schedule.placement, schedule.chunks)
    return next(((name, options) for name, options, named in named_schedules if named.orders == schedule.orders),
                ("", {}))


def _changes(job: Job, balance: Sequence[int] | None, slowest: int) -> Iterator[tuple[str, Job]]:
    schedule, costs = job.schedule, job.costs
    stages = range(schedule.stages)
    for neighbour in (slowest - 1, slowest + 1):
        if balance is not None and balance[slowest] > 1 and neighbour in stages:
            layers = balance[slowest]
            moved: dict[str, Any] = {
                field: _moved(cost, slowest, neighbour, layers) for field, cost in _of_actions(costs)
            }
            words = f"move one of the {layers} layers of stage {slowest} to stage {neighbour}"
            yield words, replace(job, costs=replace(costs, **moved))
    yield "stages of equal work: the most that any balance gains", _even(job)
    name, options = known_name(schedule)
    if name:
        halved: dict[str, Any] = {field: [time / 2 for time in cost] for field, cost in _of_actions(costs)}
        doubled = by_name(name, schedule.lanes, 2 * schedule.chunks, **options)
        words = f"{doubled.chunks} chunks, where half a chunk takes half the time"
        yield words, replace(job.under(doubled), costs=replace(costs, **halved))
    if job.recomputed:
        yield "keep all activations: checkpoint='never'", replace(job, recomputed=frozenset())
    yield "links that take no time", replace(job, costs=replace(costs, link=0))
    tried = {schedule.orders}
    for schedule_name, options, named in for_placement(schedule.placement, schedule.chunks):
        if not options and named.orders not in tried:  # as a Pipe takes it by this name
            tried.add(named.orders)
            yield f"schedule={schedule_name!r}{_more_held(named, schedule)}", job.under(named)


def _more_held(schedule: Schedule, current: Schedule) -> str:
    """A remark on a schedule that holds more or fewer chunks than `current` on its fullest lane."""
    most, before = (max(max(in_flight(order), default=0) for order in orders)
                    for orders in (schedule.orders, current.orders))
    return "" if most == before else f" (holds {most} chunks on its fullest lane, now {before})"


def _even(job: Job) -> Job:
    """As much work, shared evenly by the stages, recomputations too."""
    stages, chunks = job.schedule.stages, job.schedule.chunks
    costs: dict[str, Any] = {field: [sum(cost) / stages] * stages for field, cost in _of_actions(job.costs)}
    times = dict(_of_actions(job.costs))["recompute"]
    costs["recompute"] = [sum(times[stage] for stage, _ in job.recomputed or ()) / (stages * chunks)] * stages
    return replace(job, costs=replace(job.costs, **costs), recomputed=None)


def _of_actions(costs: Costs) -> Iterator[tuple[str, Sequence[float]]]:
    """The costs that are a number for each stage."""
    for field in OF_ACTIONS:
        cost = getattr(costs, field)
        if isinstance(cost, Sequence):
            yield field, cost


def _moved(cost: Sequence[float], source: int, to: int, layers: int) -> list[float]:
    """The costs of stages when one layer of `source` goes to `to`."""
    changed = list(cost)
    changed[source] -= cost[source] / layers
    changed[to] += cost[source] / layers
    return changed


_WORTH = 0.005
