"""The longest tests, which `make test` leaves to `make test-long`: few functions that take most of the time.

    longest.txt       the names of test functions, the longest first
    make longest      measures all tests, and writes it anew
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_suffix(".txt")
SHARE = 2 / 3  # of the time of all tests


def function_of(nodeid: str) -> str:
    """The name of a test without that of the case."""
    return nodeid.partition("[")[0]


def names() -> frozenset[str]:
    """The longest test functions."""
    return frozenset(PATH.read_text().splitlines())


def longest(seconds: Mapping[str, float], share: float) -> list[str]:
    """The fewest names that take so large a share of the time, the longest first."""
    most = share * sum(seconds.values())
    found: list[str] = []
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        if most <= 0:
            break
        found.append(name)
        most -= seconds[name]
    return found


class Stopwatch:
    """A plugin of pytest that measures the tests of a run, and writes the names of the longest if all passed."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds[function_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if not exitstatus:
            PATH.write_text("".join([f"{name}\n" for name in longest(self._seconds, SHARE)]))
