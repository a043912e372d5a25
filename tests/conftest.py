"""What all tests share: one thread (bitwise laws hold at equal thread counts), seeded hypothesis, a clean slate.

All run on the host, but those of `make test-gpu`: a Pipe that does not say where would take the GPUs of the machine.
Processes that tests start inherit that.

`make test` runs of each parametrized test some cases in which every value of every parameter occurs, `make soak` all
(`--whole`): see cover.py. The longest tests run in `make test-long`: see longest.py.
"""

import gc
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import pytest
import torch
from absent_devices import leave_absent_devices_unseeded
from cover import WHOLE, chosen, examples, is_whole
from hypothesis import HealthCheck, settings
from longest import Stopwatch, function_of, names
from nursery import ENVIRONMENT

torch.set_num_threads(1)
leave_absent_devices_unseeded()
os.environ.update(ENVIRONMENT)


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """Every test begins at the same seed and leaves torch's switches as it found them."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    assert torch.get_default_dtype() is dtype
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


@pytest.fixture(autouse=True, scope="module")
def _what_others_made_is_no_garbage() -> None:
    """What the files before have imported and keep is looked at once, not at each collection of this file."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="all cases of every table and law, as in make soak")
    parser.addoption("--longest", action="store_true", help="write the names of the longest tests to longest.txt")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported and collected, none of which is ever garbage
    if config.getoption("--whole"):
        os.environ[WHOLE] = "1"
    if config.getoption("--longest") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch())
    if "gpu" not in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    settings.register_profile(
        "laws",
        max_examples=examples(100),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("laws")


@pytest.hookimpl(tryfirst=True)  # pytest orders what is left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not _goes_first(item.nodeid))  # what would else be left for one process at the end
    longest = names()
    for item in items:
        if function_of(item.nodeid) in longest:
            item.add_marker("long")
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
    # Who names a case, or a test of his, gets it.
    if is_whole() or any("::" in argument for argument in config.args) or config.getoption("keyword"):
        return
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[function_of(item.nodeid)].append(item)
    kept = {id(group[place]) for group in groups.values() for place in chosen([(i.nodeid, _values(i)) for i in group])}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def pytest_collection_finish() -> None:
    """From here on the garbage collector looks at what tests make, not at what is imported, at each collection."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests over crews of ranks go to two processes, which start their crews once, those that wait most of their time
    to another; of others, those of a file."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            if file.endswith(WAITING):
                return "waiting"
            return f"crews {crc32(file.encode()) % 2}" if "/ranks/" in file else file

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


WAITING = "test_faults.py", "test_monitor.py"  # they start their ranks themselves
FIRST = (*WAITING, "test_families.py", "test_recipes.py")


def _goes_first(nodeid: str) -> bool:
    file = nodeid.partition("::")[0]
    return "/ranks/" in file or file.endswith(FIRST)


def _values(item: pytest.Item) -> dict[Any, Any]:
    """The values of a case's parameters, and those within one that is a table's row."""
    found: dict[Any, Any] = {}
    for name, value in item.callspec.params.items() if hasattr(item, "callspec") else ():
        row = value if isinstance(value, Mapping) else {"": value}
        found.update({(name, key): each for key, each in row.items()})
    return found
