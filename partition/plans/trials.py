"""Trials: one schedule, number of chunks and choice of recomputation, cut and simulated on the given devices.

    profile, schedule ──► chunks held by each stage ──► cut under the memory caps ──► simulate ──► step, memory
                              ▲                                                            │
                              └── recompute the stages of devices that hold too much ◄─────┘
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, combinations
from math import comb, inf, isfinite
from typing import NamedTuple

from partition.contiguous import check_stages
from partition.cuts.layers import layers_of
from partition.cuts.sharing import shared
from partition.cuts.windows import DeviceStages, StageSpec, Windows
from partition.errors import PartitionError
from partition.plans.memory import DevicePeak, moments_of, peaks, values_between
from partition.plans.plan import RecomputedStages
from partition.profiles.profile import Profile, StageProfile, WorkUnit
from scheduler import Costs, Link, Schedule, Timeline, simulate
from scheduler.collecting import no_collecting
from scheduler.costs import between
from scheduler.interruptions import interrupted

Checkpoint = str | RecomputedStages
StageChunks = frozenset[tuple[int, int]]
PlanLinks = float | Link | Mapping[tuple[int, int], float | Link]


class Machine(NamedTuple):
    """The devices of a plan.

    Attributes:
        speeds: of each; 2 takes half the time.
        caps: bytes that each may hold.
        link: the time of a message, as in `scheduler.Costs`.
        rate: of work in a unit of time: 1 where work is in seconds.
        overhead: the time that an action takes beside its layers.
        unit: of times.
    """

    speeds: tuple[float, ...]
    caps: tuple[float, ...]
    link: PlanLinks
    rate: float
    overhead: float
    unit: WorkUnit


class TrialSetup(NamedTuple):
    """The part of a choice that is given.

    Attributes:
        profile: of one chunk.
        machine: the devices, as given.
        label: the schedule, in words.
        pipe_schedule: what `Pipe` takes as its schedule.
        schedule: of all chunks.
    """

    profile: Profile
    machine: Machine
    label: str
    pipe_schedule: str | Schedule
    schedule: Schedule


@dataclass(frozen=True)
class Trial:
    """One choice, simulated.

    Attributes:
        setup: what was given.
        balance, checkpoint: chosen here.
        stages: what each takes and holds.
        timeline: of a step.
        peaks: of the devices.
        over: for each device the bytes by which it exceeds its cap, or a negative number.
    """

    setup: TrialSetup
    balance: tuple[int, ...]
    checkpoint: Checkpoint
    stages: Sequence[StageProfile]
    timeline: Timeline
    peaks: tuple[DevicePeak, ...]
    over: tuple[float, ...]

    @property
    def fits(self) -> bool:
        """Whether no device holds more than it may."""
        return max(self.over) <= 0

    @property
    def rank(self) -> tuple[float, ...]:
        """The order of choices: what fits before what does not, then the faster, then what holds less."""
        step = float(f"{self.timeline.makespan:.9g}")  # sums of floats round
        return max(*self.over, 0), step, max(peak.total for peak in self.peaks), self.setup.schedule.chunks

    @property
    def words(self) -> str:
        """The choice, in words."""
        suffixes = {"never": "", "except_last": ", recomputed"}
        suffix = suffixes[self.checkpoint] if isinstance(self.checkpoint, str) else ", partly recomputed"
        return f"{self.setup.label} with {self.setup.schedule.chunks} chunks{suffix}"


def tried(setup: TrialSetup) -> list[Trial]:
    """Choices of balance and recomputation; the best of them has the least `rank`.

    First nothing is recomputed. Where that does not fit at once, all is; and the stages of the devices that hold too
    much, more of them each time.

    Raises:
        PartitionError: there are fewer layers than stages.
    """
    schedule, free = setup.schedule, simulated(setup, "never", _cut(setup, "never"))
    trials = [free]
    if free.fits:
        return trials
    stages: set[int] = set()
    while len(stages) < schedule.stages:
        checkpoint: Checkpoint = RecomputedStages(tuple(sorted(stages))) if stages else "never"
        last = _fitted(setup, checkpoint)
        trials.append(last)
        if last.fits:
            break
        lanes = [lane for lane in range(schedule.lanes) if not stages.issuperset(schedule.placement.stages_of(lane))]
        fullest = max(lanes, key=last.over.__getitem__)
        for lane in lanes:
            if lane == fullest or last.over[lane] > 0:
                stages.update(schedule.placement.stages_of(lane))
    return [*trials, _fitted(setup, "except_last")]


def polished(trial: Trial) -> Trial:
    """The best that small moves lead to: one cut by one layer, or one stage more or fewer that recomputes.

    The cut makes the slowest stage fast; what a step takes depends on the way of the first chunk in and of the last one
    out as well, so an uneven balance may be a little better.
    """
    while True:
        best = min([trial, *_neighbours(trial)], key=lambda neighbour: neighbour.rank)
        if best is trial:
            return trial
        trial = best


def _neighbours(trial: Trial) -> Iterator[Trial]:
    moved = [trial.balance, *_moved(trial.balance)]
    for checkpoint in _toggled(trial):
        yield _fitted(trial.setup, checkpoint)
        for balance in moved if len(moved) <= _FEW else moved[:1]:
            yield simulated(trial.setup, checkpoint, balance)
    for balance in moved[1:]:
        yield simulated(trial.setup, trial.checkpoint, balance)


def _moved(balance: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Balances with one layer on the other side of a cut."""
    for cut in range(len(balance) - 1):
        for move in (-1, 1):
            if balance[cut] + move and balance[cut + 1] - move:
                yield (*balance[:cut], balance[cut] + move, balance[cut + 1] - move, *balance[cut + 2:])


def _toggled(trial: Trial) -> Iterator[Checkpoint]:
    """Choices with one stage more or fewer that recomputes; all of them recompute as "except_last" does."""
    stages = trial.setup.schedule.stages
    recomputing = set(trial.checkpoint.stages) if isinstance(trial.checkpoint, RecomputedStages) else set[int]()
    if trial.checkpoint == "except_last":
        recomputing = set(range(stages))
    for stage in range(stages if isfinite(max(trial.over)) else 0):
        chosen = tuple(sorted(recomputing ^ {stage}))
        yield "never" if not chosen else "except_last" if len(chosen) == stages else RecomputedStages(chosen)


def _fitted(setup: TrialSetup, checkpoint: Checkpoint) -> Trial:
    """A trial whose balance is cut under the caps; without them, where no balance fits.

    The cut knows what devices hold of their stages at once; what waits to be read shows in the replay, and is taken off
    the caps.
    """
    best = simulated(setup, checkpoint, _cut(setup, checkpoint))
    caps = list(setup.machine.caps)
    for _ in range(_ROUNDS):
        if best.fits:
            break
        try:
            trial = simulated(setup, checkpoint, _cut(setup, checkpoint, caps))
        except PartitionError:
            break
        best = min(best, trial, key=lambda trial: trial.rank)
        caps = [cap - max(over, 0) for cap, over in zip(caps, trial.over)]
    return best


_layers = lru_cache(maxsize=16)(layers_of)
_SPLITS = 50  # of the memory of devices with several stages
_ROUNDS = 3
_FEW = 16  # moves of cuts that are tried with every other choice of stages to recompute


def _cut(setup: TrialSetup, checkpoint: Checkpoint, caps: Sequence[float] | None = None) -> Sequence[int]:
    """The balance whose slowest stage is the fastest."""
    balance = shared(_windows(setup, checkpoint, caps), _SPLITS).balance
    if not balance:
        raise PartitionError("no balance is known to fit")
    return balance


def _windows(setup: TrialSetup, checkpoint: Checkpoint, caps: Sequence[float] | None) -> Windows:
    """The stages of a schedule on its devices, for the cut; without caps they hold what they like."""
    profile, machine, _, _, schedule = setup
    recomputes = recomputed_pairs(checkpoint, schedule)
    chunks = _chunks_of(recomputes)
    lane_of, last = schedule.placement.lane_of, schedule.stages - 1
    check_stages(schedule.stages, len(profile.layers))
    loss = profile.loss
    specs = [
        StageSpec(
            machine.speeds[lane],
            work=loss.work.total if loss is not None and stage == last else 0.0,
            recompute=chunks[stage] / schedule.chunks,
        )
        for stage, lane in enumerate(lane_of)
    ]  # fmt: skip
    lanes = [
        DeviceStages(stages, cap, moments_of(order, stages, recomputes, last))
        for lane, (cap, order) in enumerate(zip(caps or (), schedule.orders))
        for stages in [schedule.placement.stages_of(lane)]
    ]
    layers = _layers(profile)
    messages = [
        [0 if lane == next_lane else 2 * machine.rate * between(machine.link, stage, stage + 1, (lane, next_lane), size)
         for size in layers.message]
        for stage, (lane, next_lane) in enumerate(zip(lane_of, lane_of[1:])) if machine.link
    ]  # fmt: skip
    return Windows(layers, specs, messages, lanes)


def enumerated(setup: TrialSetup, budget: int) -> tuple[Trial | None, int]:
    """A trial that fits, of all balances and all stages that may recompute; and what is left of a budget.

    Those whose devices hold too much of their stages alone are left out, also by the cut, all at once; others are
    replayed, since what waits to be read counts as well.

    Args:
        budget: cuts and balances to look at; less than 0 is left where that was not enough to look at all.
    """
    stages = range(setup.schedule.stages)
    subsets = chain.from_iterable(combinations(stages, size) for size in stages)
    choices: list[Checkpoint] = ["never", "except_last"]
    for checkpoint in chain(choices, (RecomputedStages(some) for some in subsets if some)):
        windows = _windows(setup, checkpoint, setup.machine.caps)
        budget -= 1 + windows.layers * windows.stages // 64  # a cut of many takes longer
        if budget < 0:
            break
        if shared(windows, _SPLITS).bound == inf:
            continue
        budget -= comb(windows.layers - 1, windows.stages - 1)
        if budget < 0:
            break
        for cuts in combinations(range(1, windows.layers), windows.stages - 1):
            balance = [stop - start for start, stop in zip((0, *cuts), (*cuts, windows.layers))]
            if windows.over(windows.bytes(balance)) > 0:
                continue
            trial = simulated(setup, checkpoint, balance)
            if trial.fits:
                return trial, budget
    return None, budget


@no_collecting()
def simulated(setup: TrialSetup, checkpoint: Checkpoint, balance: Sequence[int]) -> Trial:
    """The trial of one balance: simulated, and its memory counted."""
    profile, machine, _, _, schedule = setup
    recomputes = recomputed_pairs(checkpoint, schedule)
    stages = stages_of_balance(profile, balance)
    costs = action_costs(setup, stages, balance, recomputes)
    timeline = simulate(schedule, costs)
    begins = len(profile.layers) - balance[-1]
    values, loss = values_between(profile, balance), profile.loss_bytes(begins)
    device_peaks = peaks(timeline, schedule.placement, stages, values, recomputes, loss)
    over = tuple([peak.total - cap for peak, cap in zip(device_peaks, machine.caps)])
    return Trial(setup, tuple(balance), checkpoint, stages, timeline, device_peaks, over)


def recomputed_pairs(checkpoint: Checkpoint, schedule: Schedule) -> StageChunks:
    """The (stage, chunk) pairs that are recomputed, where each lane has a device of its own."""
    if checkpoint == "never":
        return frozenset()
    if checkpoint == "except_last":
        return interrupted(schedule.orders)
    assert isinstance(checkpoint, RecomputedStages)
    return frozenset((stage, chunk) for stage in checkpoint.stages for chunk in range(schedule.chunks))


def _chunks_of(recomputes: StageChunks) -> Counter[int]:
    """The number of chunks that each stage recomputes."""
    return Counter(stage for stage, _ in recomputes)


def stages_of_balance(profile: Profile, balance: Sequence[int]) -> list[StageProfile]:
    """The stages of a balance."""
    ends = list(accumulate(balance))
    return [profile.stage(end - size, end) for end, size in zip(ends, balance)]


def action_costs(
    setup: TrialSetup, stages: Sequence[StageProfile], balance: Sequence[int], recomputes: StageChunks
) -> Costs:
    """The costs of actions and messages; the loss is a part of the last stage's backward."""
    profile, machine = setup.profile, setup.machine
    rate, overhead = machine.rate, machine.overhead
    forward = tuple([stage.forward / rate + overhead for stage in stages])
    inputs = [stage.input / rate + overhead for stage in stages]
    backward = [stage.backward / rate + overhead for stage in stages]
    if profile.loss is not None:
        inputs[-1] += profile.loss.work.total / rate
        backward[-1] += profile.loss.work.total / rate

    def recompute(stage: int, chunk: int) -> float:
        return forward[stage] if (stage, chunk) in recomputes else 0.0

    is_whole = set(_chunks_of(recomputes).values()) <= {setup.schedule.chunks}  # numbers are looked up sooner
    cuts = list(accumulate(balance))[:-1]
    return Costs(
        forward=forward, input=tuple(inputs), weight=tuple([stage.weight / rate + overhead for stage in stages]),
        backward=tuple(backward), link=machine.link,
        recompute=tuple([recompute(stage, 0) for stage in range(len(stages))]) if is_whole else recompute,
        message=tuple([profile.message(cut) for cut in cuts]),
        speed=machine.speeds, unit="s" if machine.unit == "s" else "slots",
    )  # fmt: skip
