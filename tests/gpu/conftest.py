"""Tests on a GPU: `make test-gpu`. Under torch's sanitizer a failure is printed at once: the run may never end."""

import os
import sys
import threading
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("pipeline", "ranks")]


class FailurePrinter:
    """Prints failures as they come, in the process that prints."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None and "PYTEST_XDIST_WORKER" not in os.environ:
            terminal.write_line(f"\n{report.nodeid}\n{report.longreprtext}")


def number_kernels_one_by_one() -> None:
    """Let torch's sanitizer see the kernels of one thread at a time.

    It reads its counter of kernels again when it notes what a kernel accesses. If another thread counted on meanwhile,
    the kernel seems to be later than the event that was recorded behind it, and who waited for that is told off.
    """
    from torch.cuda._sanitizer import EventHandler

    lock, handle = threading.RLock(), EventHandler._handle_kernel_launch

    @wraps(handle)
    def handle_alone(*args: Any) -> Any:
        with lock:
            return handle(*args)

    EventHandler._handle_kernel_launch = handle_alone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip under torch's sanitizer what it cannot run: its hook for freed memory fails where an exception is raised,
    as StopIteration is by a generator that ends and has the last reference to a tensor.
    """
    if os.environ.get("TORCH_CUDA_SANITIZER"):
        for item in items:
            if "[skips, " in item.name or "[checkpoint_nonreentrant, " in item.name:
                item.add_marker(pytest.mark.skip("torch's sanitizer fails where a generator frees a tensor"))


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("TORCH_CUDA_SANITIZER"):
        config.pluginmanager.register(FailurePrinter(config))
        number_kernels_one_by_one()
