"""Tests on a GPU: `make test-gpu`. Under torch's sanitizer a failure is printed at once: the run may never end."""

import os
import sys
from pathlib import Path

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


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("TORCH_CUDA_SANITIZER"):
        config.pluginmanager.register(FailurePrinter(config))
