"""The report of a Pipe's traced steps: `scheduler.report`, with what the Pipe knows besides.

    timelines of steps, balance, peak bytes of the device of each lane (over ranks: each tells its own)  -->  Report
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.common.accelerators import peak_bytes
from pipeline.entry.runtime import Runtime
from pipeline.entry.step import Step
from scheduler import Costs, Report, Timeline, report
from scheduler.reporting import HasCosts


def reported(runtime: Runtime, steps: Sequence[Step | Timeline], planned: Costs | HasCosts | None) -> Report:
    """`pipe.report`. Over ranks all call it.

    Raises:
        ValueError: a step has no timeline.
        ScheduleError: the timelines are not of whole steps of one order.
    """
    timelines = []
    for number, step in enumerate(steps):
        timeline = step.timeline if isinstance(step, Step) else step
        if timeline is None:
            raise ValueError(f"step {number} of {len(steps)} has no timeline. Trace it: pipe.step(..., trace=True).")
        timelines.append(timeline)
    return report(timelines, planned, balance=runtime.settings.balance, peak_bytes=_peak_bytes(runtime))


def _peak_bytes(runtime: Runtime) -> list[int | None]:
    """Of the device of each lane. None: not counted there."""
    settings = runtime.settings
    lane_of = settings.schedule.placement.lane_of
    peaks: dict[int, int] = {}
    for stage, lane in enumerate(lane_of):
        is_here = runtime.topology is None or runtime.topology.has(stage)
        peak = peak_bytes(settings.layout.devices[stage]) if is_here else None
        if peak is not None:
            peaks[lane] = peak
    known = torch.zeros(2, settings.schedule.lanes, dtype=torch.float64, device="cpu")
    for lane, peak in peaks.items():
        known[:, lane] = torch.tensor([peak, 1], dtype=torch.float64, device="cpu")
    with runtime.communicator("report") as communicator:
        communicator.open(lambda values: {}, draws=False)
        known = communicator.exchange.sum_over(known)
    return [int(peak) if is_known else None for peak, is_known in known.T.tolist()]
