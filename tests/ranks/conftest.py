"""The crews: processes that are started when a test first asks for them, and serve all tests of the session."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from probing import some_tests_probe  # noqa: F401 (a fixture)

sys.path.insert(0, str(Path(__file__).parent.parent / "pipeline"))  # law_models.py and its like

from crew import Crew  # noqa: E402 (its folder is on the path, as that of every conftest.py)


def _crew(size: int) -> Iterator[Crew]:
    crew = Crew(size)
    yield crew
    crew.stop()


@pytest.fixture
def crew(request: pytest.FixtureRequest) -> Crew:
    """One of them, of as many ranks as a test is parametrized by: parametrize("crew", [2, 3], indirect=True)."""
    found: Crew = request.getfixturevalue(f"crew{request.param}")
    return found


@pytest.fixture(scope="session")
def crew2() -> Iterator[Crew]:
    yield from _crew(2)


@pytest.fixture(scope="session")
def crew3() -> Iterator[Crew]:
    yield from _crew(3)


@pytest.fixture(scope="session")
def crew4() -> Iterator[Crew]:
    yield from _crew(4)
