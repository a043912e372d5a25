"""Every law, also under other drivers: `pytest tests/pipeline --drive apart,threads`.

    inline     lanes that share a device take turns in the calling thread
    apart      each stage counts as having a device of its own: values are copied, shared weights travel
    threads    each lane has a thread

`make test` runs one in six tests apart and in threads, always the same ones, the others inline; `make soak` runs all
of them in both ways. Tests marked `inline` are about the one order in which the inline driver runs lanes.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from cover import is_whole
from probing import some_tests_probe  # noqa: F401 (a fixture)
from torch import nn

from pipeline import Pipe
from pipeline.common.places import Place

sys.path.append(str(Path(__file__).parents[1] / "scheduler"))  # scheduler_strategies.py

# What these are about has no lanes: they are left out where lanes are driven in another way.
NO_LANES = {
    "curvature": "*", "distributed": "*", "gradients": "*", "transports": "*",
    "data": ("microbatch", "pytrees"), "entry": ("meta_init", "saved", "state_dict"),
    "recompute": ("fingerprints_of_tensors", "generators_left"),
}  # fmt: skip
LANES = "forms", "products"  # of curvature


_DRIVEN = 6  # one of so many


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--drive", default="", help="inline, or apart,threads: how a Pipe runs that does not say how")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--drive") not in ("", "inline"):
        left = [item for item in items if not _has_lanes(item)]
        config.hook.pytest_deselected(items=left)
        gone = set(map(id, left))
        items[:] = [item for item in items if id(item) not in gone]


def _has_lanes(item: pytest.Item) -> bool:
    name = item.path.stem.removeprefix("test_")
    left = NO_LANES.get(item.path.parent.name, ())
    return (name in LANES or left != "*" and name not in left) and "inline" not in item.keywords


def _drive_of(item: pytest.Item) -> str:
    """How this test's Pipes run that do not say how."""
    named = str(item.config.getoption("--drive"))
    if named or is_whole() or not _has_lanes(item) or crc32(item.nodeid.encode()) % _DRIVEN:
        return named
    return "apart,threads"


@pytest.fixture(autouse=True)
def _drive(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    words = _drive_of(request.node)
    if words not in ("", "inline"):
        request.node.add_report_section("setup", "drive", f"driven: {words}")  # shown where the test fails
        init = Pipe.__init__

        def driven(self: Pipe, module: nn.Sequential, balance: Any = None, chunks: int = 1, **settings: Any) -> None:
            if "threads" in words:
                settings.setdefault("workers", "threads")
            is_told = settings.get("devices") is not None or "group" in settings
            if "apart" in words and not is_told and isinstance(balance, list):
                settings["devices"] = [Place(torch.device("cpu"), str(stage)) for stage in range(len(balance))]
            init(self, module, balance, chunks, **settings)

        monkeypatch.setattr(Pipe, "__init__", driven)
    yield
