"""The report of a Pipe's traced steps: `scheduler.report`, with what the Pipe knows besides.

    timelines of steps, balance                                                    ──┐
    of each lane's device peak bytes, power, utilisation (each rank tells its own) ──┴──►  Report
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from partition.hardware.sampling import DeviceSampling, Usage
from pipeline.common.accelerators import is_accelerator, peak_bytes
from pipeline.common.arguments import shown
from pipeline.entry.runtime import Runtime
from pipeline.entry.step import Step
from scheduler import Costs, Report, Timeline, report
from scheduler.reporting import HasCosts


def reported(
    runtime: Runtime,
    steps: Iterable[Step | Timeline],
    planned: Costs | HasCosts | None,
    sampling: DeviceSampling | None,
) -> Report:
    """`pipe.report`. Over ranks all call it.

    Raises:
        TypeError: `steps` or `sampling` is none.
        ValueError: a step has no timeline.
        ScheduleError: the timelines are not of whole steps of one order.
    """
    if not isinstance(steps, Iterable):
        raise TypeError(f"steps is {shown(steps)}. Give what pipe.step(..., trace=True) returned, or a list of these.")
    if sampling is not None and not hasattr(sampling, "usage"):
        raise TypeError(f"sampling is {shown(sampling)}. Give partition.devices().sampling(pipe.devices), or None.")
    timelines = []
    several = list(steps)
    for number, step in enumerate(several):
        timeline = step.timeline if isinstance(step, Step) else step
        if timeline is None:
            raise ValueError(f"step {number} of {len(several)} has no timeline. Trace it: pipe.step(..., trace=True).")
        timelines.append(timeline)
    usage = {} if sampling is None else {usage.device.label: usage for usage in sampling.usage}
    peaks, watts, busy = _of_lanes(runtime, usage)
    plain_report = report(
        timelines, planned, balance=runtime.settings.balance,
        peak_bytes=[None if peak is None else int(peak) for peak in peaks],
        watts=watts if any(power is not None for power in watts) else None, utilisation=busy,
    )  # fmt: skip
    kinds = {device.type for device in runtime.settings.layout.devices if is_accelerator(device)}
    return replace(plain_report, notes=(*plain_report.notes, *map(_LAUNCHES.format, sorted(kinds))))


def _measured(device: torch.device, usage: Usage | None) -> list[float | None]:
    """Peak bytes, mean watts and utilisation of a device. None: not known."""
    if usage is None:
        return [peak_bytes(device), None, None]
    watts = None if usage.joules is None or not usage.seconds else usage.joules / usage.seconds
    return [peak_bytes(device), watts, usage.utilisation]


def _of_lanes(runtime: Runtime, usage: Mapping[str, Usage]) -> list[list[float | None]]:
    """Three numbers of the device of each lane, a list for each. Over ranks each tells of its own."""
    settings = runtime.settings
    stages = enumerate(zip(settings.schedule.placement.lane_of, settings.layout.devices, strict=True))
    own_numbers = [
        (lane, _measured(device, usage.get(str(device))))
        for stage, (lane, device) in stages if runtime.topology is None or runtime.topology.has(stage)
    ]  # fmt: skip
    with runtime.communicator("report") as communicator:
        communicator.open(lambda values: {}, draws=False)
        rows = communicator.exchange.rows(own_numbers)
    by_lane: dict[int, list[float | None]] = dict(pair for row in rows for pair in row)
    return [list(column) for column in zip(*[by_lane[lane] for lane in sorted(by_lane)], strict=True)]


_LAUNCHES = (
    "times are those of the host, which launches work on {} and does not wait for it: they are those of the device "
    "only where each launch blocks (CUDA_LAUNCH_BLOCKING=1)"
)
