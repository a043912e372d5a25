"""`pipe.report`: what the Pipe adds to `scheduler.report`."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from partition import devices
from partition.hardware.gpus import Device
from partition.hardware.sampling import Usage
from pipeline import Pipe, Place, Step
from pipeline.common import accelerators
from pipeline.entry import reporting
from scheduler import Costs, ScheduleError, report


def pipe_of(balance: list[int], **settings: Any) -> Pipe:
    return Pipe(nn.Sequential(*[nn.Linear(8, 8) for _ in range(sum(balance))]), balance, 4, **settings)


def stepped(pipe: Pipe, trace: bool = True) -> Step:
    return pipe.step(torch.ones(8, 8), loss_fn=lambda y, _: y.square().sum(), loss_reduction="sum", trace=trace)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_pipe_reports_on_steps_and_on_timelines(schedule: str, checkpoint: str) -> None:
    pipe = pipe_of([1, 3], schedule=schedule, checkpoint=checkpoint)
    steps = [stepped(pipe) for _ in range(3)]
    timelines = [step.timeline for step in steps if step.timeline is not None]
    told = pipe.report(steps)
    assert told == pipe.report(timelines) == report(timelines, balance=[1, 3])
    assert pipe.report(steps[0]) == report(timelines[0], balance=[1, 3])
    assert (told.schedule, told.chunks, told.steps, told.unit) == (schedule, 4, 3, "s")
    assert told.step == sorted(timeline.makespan for timeline in timelines)[1]
    assert told.outside == sorted(timeline.outside for timeline in timelines)[1] > 0
    assert "and outside its actions " in str(told)
    assert any("checkpoint='never'" in change.what for change in told.changes) is (checkpoint == "always")
    planned = pipe.report(steps, Costs(forward=1, input=1, weight=1, unit="s"))
    assert [stage.planned_busy for stage in planned.stages] == [12, 12]


def test_what_is_outside_of_the_actions_of_a_step_is_the_rest_of_its_time() -> None:
    pipe = pipe_of([1, 1])
    with pipe.trace() as one:
        begun = perf_counter()
        step = stepped(pipe)
        time = perf_counter() - begun
    assert step.timeline is not None
    assert 0 < step.timeline.outside <= time - step.timeline.makespan
    assert one.timeline.outside == step.timeline.outside
    with pipe.trace() as two:
        for _ in range(2):
            stepped(pipe, trace=False)
    with pipe.trace() as none:
        pipe(torch.ones(8, 8)).sum().backward()
    assert two.timeline.outside == none.timeline.outside == 0  # of several nobody can say, and of a backward


def test_a_step_without_a_timeline_is_refused() -> None:
    pipe = pipe_of([1, 1])
    with pytest.raises(ValueError, match=r"step 1 of 2 has no timeline. Trace it: pipe.step\(..., trace=True\)."):
        pipe.report([stepped(pipe), stepped(pipe, trace=False)])
    with pytest.raises(ScheduleError, match="nothing to measure"):
        pipe.report([])


def test_bytes_are_those_of_the_device_of_each_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [Place(torch.device("cpu"), name) for name in "ab"]
    pipe = pipe_of([1, 1, 1, 1], schedule="interleaved", devices=[*places, *places])
    step = stepped(pipe)
    assert [stage.peak_bytes for stage in pipe.report(step).stages] == [None] * 4  # nobody counts on the host
    peaks = iter([2**40 + 1, None, 2**40 + 1, None])  # for each stage in order, as its device says
    monkeypatch.setattr(reporting, "peak_bytes", lambda device: next(peaks))
    assert [stage.peak_bytes for stage in pipe.report(step).stages] == [2**40 + 1, None] * 2


def test_joules_are_the_mean_power_of_what_was_sampled_times_the_step() -> None:
    pipe = pipe_of([1, 1], devices=["cpu", "cpu"])
    steps = [stepped(pipe) for _ in range(3)]
    usage = Usage(Device(None, 0), 4.0, 1000.0, 240.0, 300.0, 0.5, 9, "counter")
    for label, watts, busy in (("cpu", 250.0, 0.5), ("GPU 0", None, None)):
        device = cast(Any, SimpleNamespace(label=label))
        told = pipe.report(steps, sampling=cast(Any, SimpleNamespace(usage=[replace(usage, device=device)])))
        assert [stage.joules for stage in told.stages] == [None if watts is None else watts * told.step] * 2
        assert [stage.utilisation for stage in told.stages] == [busy] * 2
    for change in ({"joules": None}, {"seconds": 0.0}):
        unknown = replace(usage, device=cast(Any, SimpleNamespace(label="cpu")), **change)
        told = pipe.report(steps, sampling=cast(Any, SimpleNamespace(usage=[unknown])))
        assert [(stage.joules, stage.utilisation) for stage in told.stages] == [(None, 0.5)] * 2
    with devices().sampling(pipe.devices) as sampling:  # the host has no power that NVML tells
        steps = [stepped(pipe) for _ in range(3)]
    assert pipe.report(steps, sampling=sampling) == pipe.report(steps)


def test_peak_bytes_are_what_the_allocators_statistics_say(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("meta")
    assert accelerators.peak_bytes(torch.device("cpu")) is None
    monkeypatch.setattr(accelerators, "is_accelerator", lambda device: True)
    for stats, peak in (({}, None), ({"allocated_bytes.all.peak": 7}, 7)):
        monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device, stats=stats: stats)
        assert accelerators.peak_bytes(device) == peak

    def refuse(device: torch.device) -> None:
        raise RuntimeError("no statistics")

    monkeypatch.setattr(torch.accelerator, "memory_stats", refuse)
    assert accelerators.peak_bytes(device) is None


def test_times_of_a_host_that_only_launches_are_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipe_of([1, 1])
    step = stepped(pipe)
    assert not any("launches" in note for note in pipe.report(step).notes)
    monkeypatch.setattr(reporting, "is_accelerator", lambda device: True)
    notes = [note for note in pipe.report(step).notes if "launches work on cpu and does not wait for it" in note]
    assert len(notes) == 1
