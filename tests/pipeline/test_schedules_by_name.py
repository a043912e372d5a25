"""Law 1 for schedules by name: those of whole backwards give the plain module's bits, on a lane for each stage or for
every two; the others are refused in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from law_check import AXES, differences, expect, observe
from law_cover import pairwise
from law_models import MODELS
from torch import nn

from pipeline import Pipe
from scheduler import Kind, ScheduleError, by_name, names

WHOLE = tuple(name for name in names() if not any(
    action.kind is Kind.I for action in by_name(name, lanes=2, chunks=4).actions
))
RUN_BY_NAME = {
    "schedule": WHOLE,
    "model": ("mlp", "convnet", "transformer", "inplace_middle"),
    "balance": ([1, 1, 1, 1], [1, 2]),
    "chunks": (1, 2, 4, 5),
    "rows": (5, 8),
    **{axis: AXES[axis] for axis in ("checkpoint", "train", "door", "drive", "input_grad")},
}


def layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rest of the model goes to the last stage."""
    count = len(MODELS[config["model"]]().model)
    first = config["balance"][:-1]
    return {**config, "balance": [*first, count - sum(first)]}


@pytest.mark.parametrize("config", pairwise(RUN_BY_NAME), ids=lambda config: ", ".join(map(str, config.values())))
def test_every_schedule_of_whole_backwards_gives_the_plain_modules_bits(config: dict[str, Any]) -> None:
    config = layers(config)
    assert not differences(observe(config), expect(config))


def net(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


@pytest.mark.parametrize("name", sorted({"interleaved", "looped-bfs", "1f1b-v"} & set(names())))
def test_where_a_lane_has_two_stages_an_odd_number_of_them_is_refused(name: str) -> None:
    words = f"schedule {name} has 2 stages a lane but the balance has 3, no multiple.*Use a balance of 4 stages, or"
    with pytest.raises(ScheduleError, match=words):
        Pipe(net(3), [1, 1, 1], 2, schedule=name)
    assert Pipe(net(4), [1, 1, 1, 1], 2, schedule=name).schedule == name


@pytest.mark.parametrize("name", sorted(set(names()) - set(WHOLE)))
def test_schedules_that_split_the_backward_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=rf"schedule {name} has actions of kind I, W. A Pipe runs F and B; use a"):
        Pipe(net(4), [1, 1, 1, 1], 8, schedule=name)
