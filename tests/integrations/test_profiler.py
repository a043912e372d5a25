"""torch.profiler: each action stands in the trace under its name, around its operators."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from pipeline import Pipe
from scheduler import by_name

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "recomputation"}


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_profile_names_every_action_of_a_step_once_with_its_operators_within(
    schedule: str, checkpoint: str, tmp_path: Path
) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), [2, 1], chunks=3, schedule=schedule,
                checkpoint=checkpoint)  # fmt: skip
    for _ in range(2):  # the third call does not validate
        pipe.step(torch.ones(6, 4), loss_fn=lambda out, _: out.square().mean())
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        pipe.step(torch.ones(6, 4), loss_fn=lambda out, _: out.square().mean())
    trace.export_chrome_trace(str(tmp_path / "trace.json"))
    events = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if "dur" in event]
    spans = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events
             if re.fullmatch(r"\d+[A-Z]\d+: .*", event["name"])}  # fmt: skip
    actions = [action for order in by_name(schedule, 2, 3).orders for action in order]
    expected = {f"{a}: {KINDS[str(a.kind)]}, stage {a.stage}, chunk {a.chunk}" for a in actions}
    assert {name for name in spans if "recomputation" not in name} == expected
    assert sum("recomputation" in name for name in spans) == (6 if checkpoint == "always" else 0)
    products = [event["ts"] for event in events if event["name"] == "aten::addmm"]
    begun, ended = spans["0F2: forward, stage 0, chunk 2"]
    assert sum(begun <= time <= ended for time in products) == 1
    assert all(any(first <= time <= last for first, last in spans.values()) for time in products)


@pytest.mark.probes
def test_what_a_validating_call_runs_besides_is_a_probe() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], chunks=2)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        pipe.step(torch.ones(6, 4), loss_fn=lambda out, _: out.square().mean())
    (probe,) = [event for event in trace.events() if event.name == "probe"]
    own = [event for event in trace.events() if event.name == "0F0: forward, stage 0, chunk 0"]
    assert sum(event.time_range.start > probe.time_range.end for event in own) == 1 < len(own)
