"""Pipes over ranks with a simulated accelerator each: one process's numbers, payloads on the devices, no missing wait.

Batches are given on the host. What is compared with what, and in which cases, is told in tests/ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from cover import is_whole, pairwise, some
from crew import PATH, Crew
from law_check import AXES
from law_models import MODELS
from nursery import Nursery
from one_and_many import check_all
from rank_between import ties
from rank_transparency import ROWS, STAGES, runnable
from skip_models import SKIPS

from scheduler import names

HERE = Path(__file__).parent
SIZES = (2, 3, 4)
NURSERY = Nursery(HERE / "sim_nursery.py", {"PYTHONPATH": f"{HERE}{os.pathsep}{PATH}", "SIMULATED_DEVICES": "4"})
# These compute with tensors of the host wherever they stand, or with attention of which the host has a kernel.
ON_THE_HOST = {"private_generator", "closure", "encoder_layers", "sparse_between"}
CAPTURED = {"captured"}  # a parameter that its module does not know, and does not move


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[int, Crew]]:
    found = {size: Crew(size, nurseries=[NURSERY]) for size in SIZES}
    yield found
    for crew in found.values():
        crew.stop()


def on_devices(crew: Crew, function: str, *args: Any, cases: list[Any]) -> None:
    """Each case gives what it gives in one process on the host, and payloads have travelled."""
    answers = crew.run("sim_ranks:job", function, *args, cases, timeout=240.0)
    check_all(cases, [compared for compared, _ in answers])
    assert all(payloads for _, payloads in answers), "no payload came to some rank"


def share(cases: list[Any], size: int) -> list[Any]:
    """Those of some cases (cover.py) that so many ranks run."""
    return cases if is_whole() else some(cases)[size - 2 :: 3]


COVER = {
    "schedule": names(),
    "model": tuple({*MODELS, *SKIPS} - ON_THE_HOST - CAPTURED),
    "stages": tuple(STAGES),
    "rows": tuple(ROWS),
    "chunks": (1, 2, 4, 5),
    **{axis: AXES[axis] for axis in ("checkpoint", "train", "entry", "input_grad")},
}


@pytest.mark.parametrize("size", SIZES)
def test_a_call_gives_the_bits_of_the_plain_module(crews: dict[int, Crew], size: int) -> None:
    """Skips, containers, BatchNorm, dropout; every schedule, checkpoint mode and entry point."""
    configs = pairwise({**COVER, "model": sorted(COVER["model"])})
    cases = [runnable(config, size) for config in share(configs, size)]
    on_devices(crews[size], "rank_transparency:compare_all", cases=cases)


@pytest.mark.parametrize("size", SIZES)
def test_every_schedule_gives_these_bits(crews: dict[int, Crew], size: int) -> None:
    fixed = {"model": "convnet", "stages": "one", "rows": "even", "chunks": 5, "entry": "step mean"}
    modes = cycle(AXES["checkpoint"])
    cases = [{**fixed, "schedule": name, "checkpoint": next(modes)} for name in names()]
    cases = [runnable({**case, "train": True, "input_grad": size == 3}, size) for case in cases]
    on_devices(crews[size], "rank_transparency:compare_all", cases=cases)


@pytest.mark.parametrize("size", SIZES)
def test_training_with_an_optimizer_clipping_and_metrics(crews: dict[int, Crew], size: int) -> None:
    cases = [(size, "momentum", "1f1b", "always"), (size, "adamw", "zb-h1", "never")]
    on_devices(crews[size], "one_and_many:compare_all", "rank_steps:everything", cases=cases)


@pytest.mark.parametrize("size", SIZES)
def test_tied_weights(crews: dict[int, Crew], size: int) -> None:
    cases = [case for case in ties(size) if case[0] != "recurrent"]  # whose cells are fused
    on_devices(crews[size], "one_and_many:compare_all", "rank_between:tied", cases=share(cases, size))


@pytest.mark.parametrize("size", SIZES)
def test_eager_updates(crews: dict[int, Crew], size: int) -> None:
    stepped = [
        (size, "1f1b", "mixed", "momentum", ("counted", "module", "mean"), True),
        (2 * size, "interleaved", "always", "adamw", ("counted",), False),
        (size, "zb-h1", "never", "adamw", ("mean",), False),
        (2 * size, "zb-v", "mixed", "adamw", ("mean",), True),
    ]
    on_devices(crews[size], "one_and_many:compare_all", "rank_eager:stepped", cases=stepped[: 5 - size])
    clipped = [(model, size, "two_pass", 0.05, "adamw", "counted") for model in ("many", "last bare")]
    on_devices(crews[size], "one_and_many:compare_all", "rank_eager:clipped", cases=clipped)


@pytest.mark.parametrize("size", SIZES)
def test_products_with_matrices_of_curvature(crews: dict[int, Crew], size: int) -> None:
    cases: list[Mapping[str, Any]] = [
        {"model": "dropping", "stages": size, "matrix": "F", "training": True, "counts": (9, 5)},
        {"model": "many", "stages": size, "matrix": "G", "loss": "counted", "checkpoint": "never"},
        {"model": "layered", "stages": size, "matrix": "H", "checkpoint": "mixed", "schedule": "1f1b"},
    ]
    cases = cases if is_whole() else cases[size - 2 :]
    on_devices(crews[size], "rank_curvature:compare_all", "multiplied", cases=cases)


def test_replicas(crews: dict[int, Crew]) -> None:
    """Two pipelines of two ranks."""
    on_devices(crews[4], "replica_training:compare", cases=[
        {"model": "mixed", "schedule": "1f1b", "entry": "param", "alone": True, "balance": (3, 5)},
        {"model": "mixed", "schedule": "zb-v", "entry": "store", "alone": False, "balance": (2, 2, 2, 2)},
        {"model": "tied", "schedule": "gpipe", "entry": "forward", "balance": (2, 2)},
        {"model": "plain", "entry": "param", "balance": (2, 3), "loss": "counted", "counts": (9, 1)},
    ])  # fmt: skip


@pytest.mark.parametrize("first", [True, False])
def test_a_failure_reaches_all_ranks_and_the_next_step_is_right(crews: dict[int, Crew], first: bool) -> None:
    for heard, waited, wrong in crews[3].run("sim_ranks:failing", first):
        assert "a layer's own" in heard and waited < 10 and wrong == []


def test_transfers_of_all_pairs_in_one_order_wait_for_ever(crews: dict[int, Crew]) -> None:
    """So each ordered pair has a communicator: a send waits until its reader comes to it, and may wait long."""
    for heard in crews[2].run("sim_ranks:in_one_order"):
        assert "its payloads travel no more" in heard, heard
