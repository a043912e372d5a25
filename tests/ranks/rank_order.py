"""Which actions run on a rank, and how many chunks does it hold? Seen by layers that note what runs in them.

    pipe over ranks of probes (pipeline_probes.py) --step--> this rank's log: F, B of (stage, chunk)
"""

from __future__ import annotations

from typing import Any

import torch
from pipeline_probes import labelled, probes, run, sum_of

from pipeline import Pipe
from scheduler import Schedule


def logs(stages: int, cases: list[tuple[str, int, str, str]]) -> list[list[str]]:
    """For each (schedule, chunks, checkpoint, door): what this rank ran, as `2F0`, in order; R is a repeated F."""
    found = []
    for schedule, chunks, checkpoint, door in cases:
        model, log = probes(stages)
        pipe = Pipe(model, [1] * stages, chunks, schedule=schedule, checkpoint=checkpoint)
        run(pipe, labelled(chunks), door)
        found.append([f"{seen.stage}{seen.kind}{seen.chunk}" for seen in log])
    return found


def timelines(stages: int, schedule: str, chunks: int) -> list[Any]:
    """The recorded timeline of a step, as this rank has it: (action, lane, end - start > 0)."""
    model, _ = probes(stages)
    pipe = Pipe(model, [1] * stages, chunks, schedule=schedule, checkpoint="never")
    timeline = pipe.step(labelled(chunks), loss_fn=sum_of, loss_reduction="sum", trace=True).timeline
    assert timeline is not None
    return sorted((str(event.action), event.lane, event.end >= event.start) for event in timeline.events)


def evaluation(stages: int, schedule: str, chunks: int) -> list[str]:
    model, log = probes(stages)
    pipe = Pipe(model, [1] * stages, chunks, schedule=schedule)
    pipe.evaluate(labelled(chunks), loss_fn=sum_of, loss_reduction="sum")
    return [f"{seen.stage}{seen.kind}{seen.chunk}" for seen in log]


def given(text: str) -> list[str]:
    """The same under a schedule that is given as data."""
    schedule = Schedule.parse(text)
    model, log = probes(schedule.stages)
    pipe = Pipe(model, [1] * schedule.stages, schedule.chunks, schedule=schedule, checkpoint="never")
    run(pipe, labelled(schedule.chunks), "step")
    assert torch.distributed.get_world_size() == schedule.lanes
    return [f"{seen.stage}{seen.kind}{seen.chunk}" for seen in log]
