"""Law 1 for schedules by name: every one gives the plain module's bits, on a lane for each stage or for every two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from law_check import AXES, differences, expect, observe
from law_cover import pairwise
from law_models import MODELS
from torch import nn

from pipeline import Pipe
from scheduler import ScheduleError, by_name, names


def least_chunks(name: str) -> int:
    """How many chunks a schedule must have for four stages."""
    for chunks in range(1, 99):
        try:
            by_name(name, 4, chunks)
            return chunks
        except ScheduleError:
            pass
    raise AssertionError(name)


FILLED = tuple(name for name in names() if least_chunks(name) > 1)
RUN_BY_NAME = {
    "schedule": tuple(name for name in names() if name not in FILLED),
    "model": ("mlp", "convnet", "transformer", "inplace_middle"),
    "balance": ([1, 1, 1, 1], [1, 2]),
    "chunks": (1, 2, 4, 5),
    "rows": (5, 8),
    **{axis: AXES[axis] for axis in ("checkpoint", "train", "door", "drive", "input_grad")},
}
RUN_FILLED = {**RUN_BY_NAME, "schedule": FILLED, "chunks": (8, 9), "rows": (9, 16)}


def whole(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rest of the model goes to the last stage."""
    count = len(MODELS[config["model"]]().model)
    first = config["balance"][:-1]
    return {**config, "balance": [*first, count - sum(first)]}


@pytest.mark.parametrize(
    "config", [*pairwise(RUN_BY_NAME), *pairwise(RUN_FILLED)], ids=lambda config: ", ".join(map(str, config.values()))
)
def test_every_schedule_gives_the_plain_modules_bits(config: dict[str, Any]) -> None:
    config = whole(config)
    assert not differences(observe(config), expect(config))


def net(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


TWO_A_LANE = [name for name in names() if by_name(name, 2, 8).stages == 4]


@pytest.mark.parametrize("name", TWO_A_LANE)
def test_where_a_lane_has_two_stages_an_odd_number_of_them_is_refused(name: str) -> None:
    words = f"schedule {name} has 2 stages a lane but the balance has 3, no multiple.*Use a balance of 4 stages, or"
    with pytest.raises(ScheduleError, match=words):
        Pipe(net(3), [1, 1, 1], 8, schedule=name)
    assert Pipe(net(4), [1, 1, 1, 1], 8, schedule=name).schedule == name


@pytest.mark.parametrize("name", FILLED)
def test_too_few_chunks_for_a_schedule_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=rf"{name} .*Use chunks=\d+ or more"):
        Pipe(net(4), [1, 1, 1, 1], 2, schedule=name)
