"""Which tests probe their mini-batches (pipeline/entry/probe/): in `make soak` all, in `make test` every fourth.

A probe is four forwards of the whole model or more, in every first and second call of a Pipe: a quarter of the time of
all tests. Tests that fail without it are marked: `pytest.mark.probes`.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import pytest
from cover import is_whole

import pipeline.entry.runtime as runtime

PROBES = "PENSTOCK_TEST_PROBES"  # in the environment, so that ranks know it too
Probe = runtime.Probe


_PROBED = 4  # one of so many


class NoProbe:
    """Finds nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def check(self) -> None:
        pass


def follow(environment: Mapping[str, str]) -> None:
    """Probe in this process as the environment says, from here on."""
    runtime.Probe = NoProbe if environment.get(PROBES) == "no" else Probe


@pytest.fixture(autouse=True)
def some_tests_probe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    item = request.node
    probes = is_whole() or item.get_closest_marker("probes") or crc32(f"probe {item.nodeid}".encode()) % _PROBED == 0
    monkeypatch.setenv(PROBES, "yes" if probes else "no")
    follow(os.environ)
    yield
    follow({})
