"""Every law, also under other drivers: `pytest tests/pipeline --drive apart,threads`.

    apart      each stage counts as having a device of its own: values are copied, shared weights travel
    threads    each lane has a thread

`make test` runs every third of them so, `make soak` all.

Tests marked `inline` are about the one order in which the inline driver runs lanes that share a device.
"""

from collections.abc import Iterator
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import nn

from pipeline import Pipe
from pipeline.common.places import Place

# What these are about has no lanes: they are left out where lanes are driven in another way.
NO_LANES = (
    "agreement", "codec", "curvature_check", "curvature_command", "curvature_density", "curvature_diagonal",
    "curvature_gathered", "curvature_lanczos", "curvature_memory", "curvature_operators", "curvature_peers",
    "curvature_progress", "curvature_refusals", "curvature_results", "curvature_resume", "curvature_scipy",
    "curvature_solve", "curvature_trace", "ddp", "distributed_channels", "elsewhere", "failure_records",
    "gradstore", "gradstore_grads", "gradstore_ranks", "gradstore_slot", "law_cover", "link", "materialize",
    "meeting", "microbatch", "packing", "payloads", "rank_mailbox", "recall", "saved", "state", "traffic",
    "transport_suite", "trees", "watch",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--drive", default="", help="apart, threads, or both: how a Pipe runs that does not say how")
    parser.addoption("--every", type=int, default=1, help="with --drive: one test of so many, always the same ones")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--drive"):
        names = {f"test_{name}.py" for name in NO_LANES}
        every = config.getoption("--every")
        left = [item for item in items if item.path.name in names or crc32(item.nodeid.encode()) % every]
        config.hook.pytest_deselected(items=left)
        gone = set(map(id, left))
        items[:] = [item for item in items if id(item) not in gone]
        for item in items:
            if "inline" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="about the order of the inline driver"))


@pytest.fixture(autouse=True)
def _drive(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    words = request.config.getoption("--drive")
    if words:
        init = Pipe.__init__

        def driven(self: Pipe, module: nn.Sequential, balance: Any = None, chunks: int = 1, **settings: Any) -> None:
            if "threads" in words:
                settings.setdefault("workers", "threads")
            if "apart" in words and settings.get("devices") is None and isinstance(balance, list):
                settings["devices"] = [Place(torch.device("cpu"), str(stage)) for stage in range(len(balance))]
            init(self, module, balance, chunks, **settings)

        monkeypatch.setattr(Pipe, "__init__", driven)
    yield
