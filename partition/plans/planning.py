"""The planner: tries schedules, numbers of chunks, cuts and recomputation by simulating them, and takes the fastest.

    module, sample ──profile, for each number of chunks──► Profile ─┐
    devices: how many, speed, memory, links ────────────────────────┼─► trials ─► the fastest that fits ─► Plan
    names of schedules ─────────────────────────────────────────────┘
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from partition.errors import PartitionError
from partition.hardware.selection import Choice
from partition.plans.device_orders import fitting_trial, tried_in_orders
from partition.plans.memory import DevicePeak
from partition.plans.plan import ExpectedStep, Plan
from partition.plans.trials import (
    Machine,
    PlanLinks,
    Trial,
    TrialSetup,
    action_costs,
    polished,
    recomputed_pairs,
    tried,
)
from partition.profiles.amounts import spelt_bytes, spelt_work
from partition.profiles.optimizer_state import OptimizerLike
from partition.profiles.profile import Profile
from partition.profiles.profiling import profile
from partition.profiles.sandbox import DeviceLike, device_named
from partition.rows import rows_of, with_rows
from partition.splitting import check_module
from scheduler import Costs, Link, Schedule, ScheduleError, by_name, names, search
from scheduler.errors import one_each, plain, refuse_unless_finite, whole, whole_number
from scheduler.searches.bounds import LowerBound
from scheduler.searches.formulation import pose


def plan(
    module: nn.Sequential,
    sample: Any,
    *,
    devices: int | Sequence[torch.device | str] | Choice,
    memory: float | Sequence[float] | None = None,
    rows: int | None = None,
    chunks: int | Iterable[int] | None = None,
    batch_dim: int = 0,
    schedules: Iterable[str] | None = None,
    optimizer: OptimizerLike = 2.0,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    speed: float | Sequence[float] = 1.0,
    link: PlanLinks | None = None,
    flops: float | None = None,
    overhead: float = 1e-4,
    device: DeviceLike = None,
    timeout: float = 2.0,
    effort: float = 0.0,
    reorder: bool | None = None,
) -> Plan:
    """Choose balance, chunks, schedule and what to recompute, for the shortest step that fits the devices.

    Each layer is profiled for a chunk, for each number of chunks; then every schedule is cut and simulated.

    Args:
        module: the layers in order; its parameters may be on the meta device.
        sample: a mini-batch of any number of rows, as for `profile`: its rows are repeated or left out to make chunks.
        devices: how many (ranks), or their names, or a Choice of `partition.devices()`. Rank k is device k of the plan.
        memory: bytes that each may hold: a number for all, or one for each. None: a Choice's free memory, or any.
        rows: of the mini-batch to plan for (default: the sample's).
        chunks: the number, or those to choose from (default: some of those that divide the rows).
        batch_dim: the dim that counts the rows of sample and target, as for `Pipe`.
        schedules: names to choose from (default: all).
        optimizer: what keeps state, as for `profile`. The default is two numbers for each parameter, as Adam keeps.
        loss_fn, target: as for `profile`. Without them the plan counts neither the loss's time nor its memory.
        speed: of each device relative to the one that is profiled: a number, or one for each.
        link: the time of a message, as in `scheduler.Costs`: seconds, a `scheduler.Link(latency, bandwidth)`, or a dict
            {(device, device): ...} by numbers. None: a Choice's bandwidths, where NVML tells them all; else messages
            take no time.
        flops: FLOPs that a device does in a second, for a profile on "meta". None: times are in FLOPs.
        overhead: seconds that an action takes beside its layers; of times in seconds.
        device: where to profile; "meta" runs nothing.
        timeout: seconds to measure for, in all.
        effort: how long to search for a better schedule than the named ones, as for `scheduler.search`; 0: not.
        reorder: whether stages may go to devices in another order than the given one, where these differ in speed or
            memory. None: they may, but not with a Choice or links by pairs: those are in an order for their links.

    Returns:
        The plan. `Pipe.from_plan(module, plan)` carries it out.

    Raises:
        PartitionError: nothing fits: the words say what comes nearest, and what to change; or an argument is wrong.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
        >>> best = plan(model, torch.rand(64, 512), devices=3, memory=17e6, device="meta", schedules=["gpipe", "1f1b"])
        >>> best.balance, best.schedule, best.chunks, best.checkpoint
        ((4, 4, 4), '1f1b', 16, 'never')
    """
    check_module(module)
    for name, number in ("timeout", timeout), ("overhead", overhead), ("effort", effort):
        refuse_unless_finite(name, number, error=PartitionError)
    if flops is not None:
        refuse_unless_finite("flops", flops, above=True, error=PartitionError)
    labels, speeds, caps, messages = _devices(devices, memory, speed, link)
    batch_dim = whole_number("batch_dim", batch_dim, least=0, error=PartitionError)
    sample_rows = rows_of(sample, batch_dim)
    count = sample_rows if rows is None else whole_number("rows", rows, least=1, error=PartitionError)
    chunk_counts = _chunks(chunks, count, len(speeds))
    schedule_names = _names(schedules, len(speeds))

    def profile_of(rows: int) -> Profile:
        """The profile for chunks of so many rows."""
        return profile(
            module, with_rows(sample, rows, sample_rows, batch_dim), batch_dim=batch_dim, device=device,
            optimizer=optimizer, loss_fn=loss_fn, target=with_rows(target, rows, sample_rows, batch_dim),
            timeout=timeout / len(chunk_counts),
        )  # fmt: skip

    profiles, failed = _profiles(profile_of, chunk_counts, count)
    unit = next(iter(profiles.values())).unit
    rate = 1.0 if unit == "s" else flops
    if rate is not None:
        machine = Machine(speeds, caps, messages, rate, overhead, "s")
    elif link:
        raise PartitionError(
            "link is in seconds, but a profile without a run counts FLOPs. Give flops=, what a device does in a second."
        )
    else:
        machine = Machine(speeds, caps, 0.0, 1.0, 0.0, unit)  # links of a Choice are in seconds
    setups = [
        TrialSetup(profiles[number], machine, *named)
        for number in profiles for named in _schedules(schedule_names, len(speeds), number, len(module))
    ]  # fmt: skip
    if not setups:
        raise PartitionError(
            f"none of {', '.join(schedule_names)} is defined for {len(speeds)} devices, {len(module)} layers "
            f"and {', '.join(map(str, profiles))} chunks. Ask for fewer devices, or other schedules or chunks."
        )
    if reorder is None:
        reorder = not isinstance(devices, Choice) and not isinstance(machine.link, Mapping)
    trials, orders, is_all = tried_in_orders(setups, reorder)
    best = polished(min(trials, key=lambda trial: trial.rank))
    if not best.fits:
        best, is_complete = fitting_trial(best, setups, orders)
        is_all = is_all and is_complete
    if best.fits and effort > 0:
        best = _searched(best, effort)
    if not best.fits:
        raise PartitionError(_nearest(best, labels, is_all))
    free = [_FREE] if link is None and not machine.link and isinstance(devices, Choice) else []
    notes = [*_notes(best, trials), *free, *(_failure(number, error) for number, error in failed.items())]
    schedule = best.setup.schedule
    return Plan(
        best.balance, schedule.chunks, best.setup.pipe_schedule, schedule.placement.lane_of, best.checkpoint, count,
        labels, caps if min(caps) < math.inf else (), _expected(best), _costs(best),
        tuple(notes), batch_dim,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- arguments


_FREE = "messages between devices count as free: NVML did not tell all bandwidths, or times are no seconds. Give link="


def _devices(
    devices: Any, memory: Any, speed: Any, link: Any
) -> tuple[tuple[str, ...], tuple[float, ...], tuple[float, ...], PlanLinks]:
    """The names of the devices, where they have some; their speeds; their memory; the links between them."""
    labels: tuple[str, ...] = ()
    if isinstance(devices, Choice):
        labels, count = tuple(devices.names), len(devices.devices)
        memory = devices.caps() if memory is None else memory
        link = devices.messages if link is None else link
    elif whole(devices) is not None:
        count = int(devices)
    else:
        names = [devices] if isinstance(devices, str) else devices if isinstance(devices, Iterable) else []
        labels = tuple([str(device_named(device)) for device in names])
        count = len(labels)
    if count < 1:
        raise PartitionError(f"devices is {devices!r}, but there must be one or more. Give a number, or their names.")
    link = 0.0 if link is None else link
    for cost in link.values() if isinstance(link, Mapping) else [link]:
        if not isinstance(cost, Link):
            refuse_unless_finite("link", cost, error=PartitionError)
    caps = _each("memory", math.inf if memory is None else memory, count, "a number of bytes, such as 2**30,")
    return labels, _each("speed", speed, count, "a number"), caps, link


def _each(name: str, setting: Any, count: int, kind: str) -> tuple[float, ...]:
    values = tuple(map(plain, one_each(name, setting, count, PartitionError)))
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise PartitionError(f"{name} is {setting!r}, but must be {kind} above 0, or one for each device.")
    return values


def _chunks(chunks: int | Iterable[int] | None, rows: int, lanes: int) -> list[int]:
    """The numbers of chunks to try: those given, or divisors of the rows, each at least 1.4 times the one before."""
    if chunks is not None:
        given = list(chunks) if isinstance(chunks, Iterable) else [chunks]
        chunk_counts = {whole(number) or 0 for number in given}
        if not chunk_counts or min(chunk_counts) < 1 or max(chunk_counts) > rows:
            raise PartitionError(f"chunks is {given}, but must list whole numbers from 1 to {rows}, the rows.")
        return sorted(chunk_counts)
    divisors = [1]
    for number in range(2, min(rows, _MOST * lanes) + 1):
        if rows % number == 0 and number >= _APART * divisors[-1]:
            divisors.append(number)
    return divisors


def _names(schedules: Any, lanes: int) -> tuple[str, ...]:
    """The names of the schedules to choose from."""
    if schedules is None:
        return names()
    if isinstance(schedules, str) or not isinstance(schedules, Iterable):
        raise PartitionError(f"schedules is {schedules!r}. Give a list of names, such as ['1f1b', 'zb-h1'], or None.")
    schedule_names = tuple(schedules)
    for name in set(schedule_names) - set(names()):
        by_name(name, lanes, 1)  # says which there are
    return schedule_names


def _profiles(
    profile_of: Callable[[int], Profile], chunk_counts: Iterable[int], rows: int
) -> tuple[dict[int, Profile], dict[int, Exception]]:
    """The profile for each number of chunks, and the errors of those that cannot be profiled.

    Raises:
        Exception: the first of these, if there is no profile.
    """
    profiles, failed = dict[int, Profile](), dict[int, Exception]()
    for number in chunk_counts:
        try:
            profiles[number] = profile_of(math.ceil(rows / number))
        except Exception as error:
            failed[number] = error
    if not profiles:
        raise next(iter(failed.values()))
    return profiles, failed


def _schedules(
    schedule_names: Sequence[str], lanes: int, chunks: int, layers: int
) -> Iterator[tuple[str, str | Schedule, Schedule]]:
    """(words, what Pipe takes, the schedule) of each that is defined for these, with its options."""
    for name in schedule_names:
        options: list[dict[str, Any]] = [{}]
        if name == "eager-1f1b":
            depths = [[max(1, lanes - lane + extra) for lane in range(lanes)] for extra in (-1, 1, 2)]
            options += [{"warmup": depth} for depth in depths]
        elif name in ("interleaved", "interleaved-zb", "looped-bfs"):
            options += [{"stages_per_lane": count} for count in (3, 4)]
        for option in options:
            try:
                schedule = by_name(name, lanes, chunks, **option)
            except ScheduleError:  # not for so few chunks
                continue
            if schedule.stages <= layers:
                words = ", ".join(f"{option_name}={value}" for option_name, value in option.items())
                yield f"{name} ({words})" if words else name, schedule if option else name, schedule


_MOST = 8  # chunks a device; more of them are smaller, and their bubble is small already
_APART = 1.4


# ------------------------------------------------------------------------------------------------------------ answers


def _costs(best: Trial) -> Costs:
    """The costs of a trial in numbers for each stage, also what a chunk holds."""
    stages, costs = best.stages, action_costs(best.setup, best.stages, best.balance, frozenset())
    recomputes = recomputed_pairs(best.checkpoint, best.setup.schedule)
    shares = [sum(s == stage for s, _ in recomputes) / best.setup.schedule.chunks for stage in range(len(stages))]
    assert isinstance(costs.forward, tuple)  # a number for each stage
    return replace(
        costs,
        recompute=tuple([share * forward for share, forward in zip(shares, costs.forward)]),
        activation=tuple([max(stage.saved, 1) for stage in stages]),
        checkpoint=tuple([
            min(stage.read, max(stage.saved, 1)) if share else max(stage.saved, 1)
            for stage, share in zip(stages, shares)
        ]),
    )  # fmt: skip


def _expected(best: Trial) -> ExpectedStep:
    timeline, schedule = best.timeline, best.setup.schedule
    costs = action_costs(best.setup, best.stages, best.balance, frozenset())
    bound = LowerBound(pose(costs, schedule.placement, schedule.chunks)).value
    return ExpectedStep(
        timeline.makespan, timeline.bubble, min(bound, timeline.makespan), best.setup.machine.unit, timeline.busy,
        best.peaks,
    )  # fmt: skip


def _searched(best: Trial, effort: float) -> Trial:
    """A schedule that is searched for, for the same stages, if it is shorter and fits."""
    placement = best.setup.schedule.placement
    room = [cap - peak.state for cap, peak in zip(best.setup.machine.caps, best.peaks)]
    try:
        result = search(
            _costs(best), placement.lanes, best.setup.schedule.chunks, room,
            placement=placement, effort=effort,
        )  # fmt: skip
    except ScheduleError:  # none fits the room, as the search counts it
        return best
    trials = tried(best.setup._replace(label="searched", pipe_schedule=result.schedule, schedule=result.schedule))
    return min([best, *trials], key=lambda trial: trial.rank)


def _notes(best: Trial, trials: Sequence[Trial]) -> Iterator[str]:
    step, unit = best.timeline.makespan, best.setup.machine.unit
    others = [trial for trial in trials if trial.fits and trial.setup.label != best.setup.label]
    if others:
        second = min(others, key=lambda trial: trial.rank)
        longer = f"({second.timeline.makespan / step - 1:.1%} longer)"
        seconds = spelt_work(second.timeline.makespan, unit)
        yield f"runner-up: {second.words}, {seconds} {longer.replace('(-0.0%', '(0.0%')}: {_why(second, best)}"
    faster = [trial for trial in trials if not trial.fits and trial.timeline.makespan < step]
    if faster:
        first = min(faster, key=lambda trial: trial.timeline.makespan)
        lane = max(range(len(first.over)), key=first.over.__getitem__)
        yield (
            f"faster, but does not fit: {first.words}, {spelt_work(first.timeline.makespan, unit)}; it needs "
            f"{spelt_bytes(first.peaks[lane].total)} on device {lane}, {spelt_bytes(first.over[lane])} too much"
        )


def _why(second: Trial, best: Trial) -> str:
    """The reason that one trial is worse than another, in words."""
    most, least = [spelt_bytes(max(peak.total for peak in trial.peaks)) for trial in (second, best)]
    if second.rank[1] <= best.rank[1]:
        return f"as fast, and its fullest device holds {most}{' too' if most == least else f' instead of {least}'}"
    work = sum(second.timeline.busy) / sum(best.timeline.busy) - 1
    if work > (second.timeline.makespan / best.timeline.makespan - 1) / 2:
        return f"its devices have {work:.1%} more to do"
    return f"its devices are idle for {second.timeline.bubble:.1%} of the step instead of {best.timeline.bubble:.1%}"


def _nearest(best: Trial, labels: Sequence[str], is_all: bool) -> str:
    """The words that say why nothing fits, and what to change."""
    lane = max(range(len(best.over)), key=best.over.__getitem__)
    peak: DevicePeak = best.peaks[lane]
    name = labels[lane] if labels else f"device {lane}"
    cap, words = best.setup.machine.caps[lane], []
    if peak.state > cap / 2:
        words.append("an optimizer that keeps less, or parameters of a smaller dtype")
    if peak.total - peak.state > cap / 10:
        words.append("more chunks of fewer rows, or a smaller mini-batch")
    words.append("more devices")
    fault = "no plan fits" if is_all else "no plan was found that fits, of those that were tried"
    return (
        f"{fault}. The nearest, {best.words}, balance {list(best.balance)}, needs {spelt_bytes(peak.total)} on "
        f"{name}, which may hold {spelt_bytes(cap)}: {spelt_bytes(peak.state)} are parameters, gradients, optimizer "
        f"state and buffers, {spelt_bytes(peak.total - peak.state)} activations. Take {'; or '.join(words)}; or "
        f"{spelt_bytes(best.over[lane])} more of memory."
    )


def _failure(number: int, error: Exception) -> str:
    notes = "".join(f", {note}" for note in getattr(error, "__notes__", []))
    return f"not tried: {number} chunks ({type(error).__name__}: {error}{notes})"
