"""Payloads from device to device."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from carrier import Simulated
from cover import pairwise
from crew import PATH as CREW_PATH, Crew
from law_check import AXES
from law_models import MODELS
from nursery import Nursery
from one_and_many import check_all
from rank_transparency import ROWS, STAGES, runnable

from scheduler import names

from pipeline.transports.distributed import Channels
from pipeline.transports.testing import CHECKS, Pair, check_transport


HERE = Path(__file__).parent
PATH = f"{HERE}{os.pathsep}{CREW_PATH}"
CAPTURED = "captured"
ON_THE_HOST = {"private_generator", "closure", "encoder_layers"}

@contextmanager
def channels(*carriers: Any) -> Iterator[list[Channels]]:
    store = dist.HashStore()
    pairs = [(0, 1), (1, 0)]
    found: dict[int, Channels] = {}

    def connect(rank: int) -> None:
        found[rank] = Channels(store, "it", rank, pairs, timedelta(seconds=30), carriers[rank])

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield [found[0], found[1]]
    for end in found.values():
        end.close()


@contextmanager
def pair() -> Iterator[Pair]:
    with channels(Simulated(torch.device("sim:1")), Simulated(torch.device("sim:2"))) as (one, other):
        assert one.outgoing(1).payloads is not None
        yield Pair(one.outgoing(1), other.incoming(0), lambda: (one.abort(), other.abort())[0])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_the_channel_passes_every_check() -> None:
    check_transport(pair)


NURSERY = Nursery(HERE / "sim_nursery.py", {"PYTHONPATH": PATH, "SIMULATED_DEVICES": "4"})


@pytest.fixture(scope="session")
def crews() -> Iterator[dict[int, Crew]]:
    found = {size: Crew(size, nurseries=[NURSERY]) for size in (2, 3, 4)}
    yield found
    for crew in found.values():
        crew.stop()


COVER = {
    "schedule": names(),
    "model": tuple(name for name in MODELS if name not in (CAPTURED, *ON_THE_HOST)),
    "stages": tuple(STAGES),
    "rows": tuple(ROWS),
    "chunks": (1, 2, 4, 5),
    **{axis: AXES[axis] for axis in ("checkpoint", "train", "entry", "input_grad")},
}


def on_devices(crew: Crew, function: str, cases: list[Any], *args: Any) -> None:
    answers = crew.run("sim_ranks:job", function, *args, cases, timeout=120.0)
    check_all(cases, [compared for compared, _ in answers])
    assert all(payloads for _, payloads in answers), answers


@pytest.mark.parametrize("size", [2, 3, 4])
def test_calls(crews: dict[int, Crew], size: int) -> None:
    configs = [runnable(config, size) for config in pairwise(COVER)[size - 2 :: 3]][:6]
    on_devices(crews[size], "rank_transparency:compare_all", configs)
