"""Tests on the simulated accelerator: `make test-accelerator`, in processes of their own."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import simulated
import torch

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("pipeline", "ranks")]


@pytest.fixture(scope="session", autouse=True)
def _loaded() -> None:
    if simulated.compiler() is None:
        pytest.skip("needs a C++ compiler, which builds the simulated accelerator: set CXX, or install g++")
    simulated.load()
    torch.set_warn_always(True)  # what torch says once in a process is an error of each test that causes it


@pytest.fixture(autouse=True)
def _no_race_is_left(_loaded: None) -> Iterator[None]:
    """Memory that a test frees too early is its error. Each test begins on default streams, which are not in use."""
    torch.accelerator.synchronize()
    yield
    torch.sim.check()
    assert torch.accelerator.current_device_index() == 0
    assert [torch.accelerator.current_stream(index).stream_id for index in range(torch.sim.device_count())] == [0] * 3
