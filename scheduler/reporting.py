"""A report of traced steps: measured beside planned for each stage, the bottleneck, and what to change.

    timelines of steps ─┬─► busy, waiting, idle of each stage        (medians over the steps)
                        ├─► measured costs ──► advice.py ──► changes, with the time that each gains by `simulate`
    planned Costs ──────┴─► simulate ──► busy and step as planned

    lane 0 |F0 F1 .  .  B0 == .  B1 ==       busy     an action runs
    lane 1 |.  F0 B0 == F1 B1 == .  .        waiting  between two actions, for the one that comes: its stage waits
                                             idle     before a lane's first action and after its last
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Protocol

from scheduler.action import COMPUTE
from scheduler.advice import Change, Job, advice, known_name
from scheduler.aligning import aligned
from scheduler.collecting import no_collecting
from scheduler.costs import Costs
from scheduler.drawing import duration, take_turns
from scheduler.errors import ScheduleError, is_list, one_each, refuse_unless_a, whole_number
from scheduler.measurement import measure, steps_of
from scheduler.memory_model import ChunkMemory
from scheduler.notebook import NotebookResult
from scheduler.placement import Placement
from scheduler.schedule import Schedule
from scheduler.timeline import Timeline


class HasCosts(Protocol):
    """Something with costs, such as a plan."""

    @property
    def costs(self) -> Costs: ...


@dataclass(frozen=True)
class StageReport:
    """One stage of a report. Times are in the unit of the report, of one step.

    Args:
        stage: its number
        lane: that runs it
        busy: how long its actions ran
        planned_busy: how long they would by the planned costs
        waiting: how long its lane waited, after other actions, for its next one to have what it needs
        idle: of its lane: before its first action and after its last
        held: the most that its lane held of what costs say that chunks hold; None: they say nothing
        planned_held: the same of the planned step
        peak_bytes: the most that was allocated on its lane's device; None: not known
        joules: that its lane's device drew; None: not known
        utilisation: the share of the time in which its lane's device computed, 0 to 1; None: not known
    """

    stage: int
    lane: int
    busy: float
    planned_busy: float
    waiting: float
    idle: float
    held: float | None = None
    planned_held: float | None = None
    peak_bytes: float | None = None
    joules: float | None = None
    utilisation: float | None = None


@dataclass(frozen=True, repr=False)
class Report(NotebookResult):
    """Measured beside planned. Prints as a table.

    Args:
        schedule: the name of the schedule that ran, or another name of the same orders (zb-v is v-min on two lanes);
            "" where it is none of those with a name
        chunks: of a step
        unit: of all times, "s" or "slots"
        steps: how many were measured
        step: how long its actions took, from the start of the first to the end of the last, the median
        planned: how long these take by `simulate`, with the planned costs, or else with those that were measured
        stages: a row for each
        bottleneck: the stage with the most work on the lane with the most work
        changes: what would shorten the step, the best first, by `simulate` with the measured costs
        notes: what is to be known of these numbers
        outside: how long a step took outside its actions, the median; 0: not known
    """

    schedule: str
    chunks: int
    unit: str
    steps: int
    step: float
    planned: float
    stages: tuple[StageReport, ...]
    bottleneck: int
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    outside: float = 0

    def as_dict(self) -> dict[str, Any]:
        """The report as plain dicts, lists, numbers and strings."""
        return {**asdict(self), "changes": [change._asdict() for change in self.changes]}

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.as_dict(), indent=1, default=float)

    def __str__(self) -> str:
        plural = "s" if self.steps > 1 else ""
        name = self.schedule or "a schedule of one's own"
        head = f"{name}, {self.chunks} chunks: a step took {self._said(self.step)} ({self.steps} step{plural} measured)"
        lines = [f"{head}, planned {self._said(self.planned)} ({self._share(self.planned)} of it)"]
        if self.outside:
            lines.append(f"and outside its actions {self._said(self.outside)}, before the first and after the last")
        lines.append("")
        lines += aligned(self._rows(), left=0)
        bottleneck = self.stages[self.bottleneck]
        share = self._share(bottleneck.busy)
        lines += ["", f"bottleneck: stage {bottleneck.stage} on lane {bottleneck.lane}, busy {share} of the step"]
        lines += [f"  {change.what}: {self._said(change.step)}, saves {change.gain:.1%}" for change in self.changes]
        if not self.changes:
            lines.append("  no change that was tried saves half a percent")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _rows(self) -> Iterator[list[str]]:
        columns = ["stage", "lane", "busy", "planned", "waiting", "idle"]
        optional = [name for name in _MORE if any(getattr(row, name) is not None for row in self.stages)]
        yield columns + [name.replace("_", " ") for name in optional]
        for row in self.stages:
            times = (row.busy, row.planned_busy, row.waiting, row.idle)
            extra = [(getattr(row, name), _MORE[name]) for name in optional]
            yield [str(row.stage), str(row.lane), *map(self._said, times),
                   *("-" if value is None else spell(value) for value, spell in extra)]

    def _said(self, time: float) -> str:
        return duration(time, self.unit)

    def _share(self, time: float) -> str:
        return f"{time / self.step if self.step else 0:.0%}"


@no_collecting()
def report(
    timelines: Timeline | Iterable[Timeline],
    planned: Costs | HasCosts | None = None,
    *,
    balance: Sequence[int] | None = None,
    peak_bytes: Sequence[float | None] | None = None,
    watts: Sequence[float | None] | None = None,
    utilisation: Sequence[float | None] | None = None,
) -> Report:
    """Reports on traced steps.

    Args:
        timelines: a whole step each, of the same Pipe
        planned: what its actions were to cost, as Costs of stages, or something with `.costs`, such as a plan; None: as
            measured, so that `planned` says what the order of actions alone explains
        balance: the number of layers of each stage: with it, moves of layers are tried
        peak_bytes: the most that was allocated on the device of each lane
        watts: the mean power of the device of each lane while such steps ran
        utilisation: the share of that time in which it computed

    Raises:
        ScheduleError: the timelines are not of one whole step each, or of different orders, or the costs, the balance
            or the numbers of devices are for another number of stages or lanes; planned costs of another unit, or
            watts with slots, which are no seconds.

    >>> from scheduler import by_name, simulate
    >>> costs = Costs(forward=(1, 1, 2), backward=(2, 2, 4))
    >>> print(report(simulate(by_name("1f1b", lanes=3, chunks=4), costs), balance=[2, 2, 4]))
    1f1b, 4 chunks: a step took 30 slots (1 step measured), planned 30 slots (100% of it)
    <BLANKLINE>
    stage  lane      busy   planned   waiting     idle
        0     0  12 slots  12 slots  18 slots  0 slots
        1     1  12 slots  12 slots  15 slots  3 slots
        2     2  24 slots  24 slots   0 slots  6 slots
    <BLANKLINE>
    bottleneck: stage 2 on lane 2, busy 80% of the step
      stages of equal work: the most that any balance gains: 24 slots, saves 20.0%
      move one of the 4 layers of stage 2 to stage 1: 25.5 slots, saves 15.0%
      schedule='zb-h1': 26 slots, saves 13.3%
      8 chunks, where half a chunk takes half the time: 27 slots, saves 10.0%
    note: how B splits into I and W was not seen, and is taken as halves: trace a step of schedule='zb-h1'
    """
    steps = steps_of(timelines)
    measurement = measure(steps)
    balance = _checked(balance, measurement.placement.stages)
    schedule = _schedule(steps, measurement.placement)
    planned_costs: Any = getattr(planned, "costs", planned)
    if planned_costs is not None:
        refuse_unless_a("planned", planned_costs, Costs)
        planned_costs.refuse_unless_for(measurement.placement)
        if planned_costs.unit != measurement.unit:
            raise ScheduleError(
                f"planned costs are in {planned_costs.unit}, but the timelines in {measurement.unit}. Give costs in "
                f'{measurement.unit}: Costs(unit="{measurement.unit}"), or of a plan on "meta" one with flops=.'
            )
    costs = Costs.measured(steps, halves=0.5 if planned_costs is None else planned_costs)
    job = Job(schedule, costs, steps[0].recomputed, steps[0].turns)
    plan = job if planned_costs is None else replace(job, costs=planned_costs, recomputed=None)
    planned_timeline = plan.timeline
    step = float(median(step.makespan for step in steps))
    if watts is not None and measurement.unit != "s":
        raise ScheduleError(f"watts are given, but the timelines count {measurement.unit}. Trace steps, in seconds.")
    joules = watts and [None if power is None else power * step for power in watts]
    devices = {"peak_bytes": peak_bytes, "joules": joules, "utilisation": utilisation}
    rows = _rows(steps, planned_timeline, _held(planned_costs, steps[0]), devices, measurement.placement)
    slowest = _bottleneck(rows)
    changes = advice(job, balance, slowest)
    return Report(
        known_name(schedule)[0], schedule.chunks, measurement.unit, len(steps),
        step, plan.step, rows, slowest, changes,
        tuple(_notes(steps[0], rows, job, changes, planned_costs is not None)), measurement.outside,
    )


def _times(timeline: Timeline, stages: int) -> list[list[float]]:
    """For each stage, how long in one step it is busy and waiting, and its lane idle."""
    times = [[0.0, 0.0, 0.0] for _ in range(stages)]
    for row in timeline.by_lane:
        last = row[0].start if row else 0
        for event in row:
            of_stage = times[event.action.stage]
            of_stage[0] += float(event.duration)
            of_stage[1] += float(max(0, event.start - last))
            of_stage[2] = float(row[0].start + timeline.makespan - row[-1].end)
            last = event.end
    return times


def _rows(
    steps: Sequence[Timeline], planned: Timeline, held: tuple[ChunkMemory, ...],
    devices: Mapping[str, Sequence[float | None] | None], placement: Placement,
) -> tuple[StageReport, ...]:  # fmt: skip
    none: list[float | None] = [None] * placement.lanes
    peaks = [replace(step, held=held).peak_memory for step in (steps[0], planned)] if held else [none, none]
    given = {name: numbers for name, numbers in devices.items() if numbers is not None}
    listed = {name: one_each(name, numbers, placement.lanes) for name, numbers in given.items()}
    measured = [_times(step, placement.stages) for step in steps]
    planned_times = _times(planned, placement.stages)
    rows = []
    for stage, lane in enumerate(placement.lane_of):
        busy, waiting, idle = (median(column) for column in zip(*(times[stage] for times in measured)))
        rows.append(StageReport(
            stage, lane, busy, planned_times[stage][0], waiting, idle, peaks[0][lane], peaks[1][lane],
            **{name: numbers[lane] for name, numbers in listed.items()},
        ))
    return tuple(rows)


def _schedule(steps: Sequence[Timeline], placement: Placement) -> Schedule:
    """The orders that ran."""
    ran = [tuple(tuple(event.action for event in row if event.action.kind in COMPUTE) for row in step.by_lane)
           for step in steps]
    twice = [action for order in ran[0] for action, times in Counter(order).items() if times > 1]
    if twice:
        raise ScheduleError(f"{twice[0]} ran several times: this timeline is of several steps. Give one for each step.")
    if any(orders != ran[0] for orders in ran):
        raise ScheduleError("the steps ran in different orders. Report on steps of one schedule and number of chunks.")
    chunks = 1 + max(action.chunk for order in ran[0] for action in order)
    return Schedule("measured", placement, chunks, ran[0])


def _checked(balance: Sequence[int] | None, stages: int) -> list[int] | None:
    if balance is None:
        return None
    if not is_list(balance):
        raise ScheduleError(f"balance is {balance!r}. List the layers of each stage.")
    if len(balance) != stages:
        raise ScheduleError(
            f"balance lists {len(balance)} stages but {stages} ran (balance: {list(balance)}). List the layers of each."
        )
    return [whole_number(f"balance[{stage}]", layers, least=1) for stage, layers in enumerate(balance)]


def _held(planned_costs: Costs | None, step: Timeline) -> tuple[ChunkMemory, ...]:
    """The memory of a chunk in each stage, where costs or the timeline say it."""
    if planned_costs is None or planned_costs.activation == Costs.activation:
        return step.held if any(memory != ChunkMemory() for memory in step.held) else ()
    return tuple(planned_costs.held(stage) for stage in sorted({event.action.stage for event in step.events}))


def _bottleneck(rows: Sequence[StageReport]) -> int:
    """The stage with the most work on the lane with the most work."""
    work = {lane: sum(row.busy for row in rows if row.lane == lane) for lane in {row.lane for row in rows}}
    return max(rows, key=lambda row: (work[row.lane], row.busy)).stage


def _notes(
    step: Timeline, rows: Sequence[StageReport], job: Job, changes: Sequence[Change], is_planned: bool
) -> Iterator[str]:
    yield from take_turns(step)
    if any(row.held is not None for row in rows):
        yield "held: activations, counted over the order that ran from what costs say that a chunk holds"
    if any(row.peak_bytes is not None for row in rows):
        yield "peak bytes: allocated on a lane's device since its statistics began, see torch.accelerator.memory_stats"
    if any(row.joules is not None for row in rows):
        yield "joules: of a lane's device as a whole, its mean power while it was sampled times a step"
    if not job.schedule.split and any(change.splits for change in changes):
        assumption = "as it was planned" if is_planned else "as halves"
        yield f"how B splits into I and W was not seen, and is taken {assumption}: trace a step of schedule='zb-h1'"


def _spelt(size: float) -> str:
    """Bytes as a whole number; few chunks, or shares of one, as they are."""
    return f"{float(size):,.0f}" if size >= 1000 else f"{float(size):.6g}"


_MORE: dict[str, Callable[[float], str]] = {  # columns for what is not known of every step
    "held": _spelt, "planned_held": _spelt, "peak_bytes": _spelt,
    "joules": lambda joules: f"{joules:.4g} J", "utilisation": lambda share: f"{share:.0%}",
}  # fmt: skip
