"""The costs that a traced step tells are those of its layers, which move the clock and nothing else does."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Pipe
from pipeline.common.places import Place
from pipeline.execution import execution
from scheduler import Action, Costs, Kind, Timeline, by_name
from scheduler.measurement import measure


class Clock(threading.local):
    """The seconds that each thread has spent in layers. A recomputation would reset an attribute of a layer."""

    now = 0.0


CLOCK = Clock()


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        CLOCK.now += forward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        CLOCK.now += ctx.seconds
        return grad, None, None


class Works(nn.Module):
    """A stage that takes so many seconds forward and backward."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Work.apply(x * self.weight, *self.seconds)
        return made


FORWARD, BACKWARD = (0.5, 2.0, 1.0, 4.0), (3.0, 1.0, 0.25, 8.0)


def traced(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Timeline:
    """The third step of four stages that work for so long, five chunks."""
    monkeypatch.setattr(execution, "perf_counter", lambda: CLOCK.now)
    model = nn.Sequential(*map(Works, FORWARD, BACKWARD))
    pipe = Pipe(model, [1] * 4, 5, **settings)
    for number in range(3):  # in the first two, one thread drives all lanes
        step = pipe.step(torch.ones(5, 3), loss_fn=lambda y, _: y.sum(), loss_reduction="sum", trace=number == 2)
    assert step.timeline is not None
    return step.timeline


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"])
@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_costs_of_a_traced_step_are_what_its_layers_took(
    schedule: str, workers: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [Place(torch.device("cpu"), str(number)) for number in range(4)]
    if schedule in ("interleaved", "zb-v"):
        lane_of = by_name(schedule, 2, 5).placement.lane_of
        places = [places[lane] for lane in lane_of]
    timeline = traced(monkeypatch, schedule=schedule, workers=workers, checkpoint=checkpoint, devices=places)
    costs = Costs.measured(timeline)
    assert (costs.unit, costs.forward) == ("s", FORWARD)
    again = {stage for stage, _ in timeline.recomputed}
    assert costs.recompute == tuple(FORWARD[stage] if stage in again else 0 for stage in range(4))
    assert checkpoint == "except_last" or len(timeline.recomputed) == (20 if checkpoint == "always" else 0)
    if costs.backward is None:
        assert (costs.input, costs.weight) == (BACKWARD, (0, 0, 0, 0))
    else:
        assert costs.backward == BACKWARD
        assert costs.input == costs.weight == tuple(seconds / 2 for seconds in BACKWARD)
    if workers == "inline":
        assert costs.link == (0, 0, 0)  # one thread hands over in memory


@pytest.mark.inline
def test_an_update_during_the_backward_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = traced(monkeypatch, schedule="1f1b", checkpoint="never")
    assert Kind.U not in measure(timeline).actions[0]
    events = [*timeline.events, timeline.events[-1]._replace(action=Action(0, Kind.U, 4), start=1e3, end=2e3)]
    longer = Timeline(tuple(events), timeline.lanes, "s", turns=timeline.turns, clocked=True)
    assert Costs.measured(longer) == Costs.measured(timeline)
    assert measure(longer).actions[0][Kind.U] == 1e3
