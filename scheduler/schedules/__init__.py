"""Which schedules are there? One file each; a new schedule is a new file here, and its tests.

    schedules/<file>.py: BUILDERS = {name: build(lanes, chunks) -> Schedule}  ──►  names(), by_name(name, lanes, chunks)

The files are found by looking into this folder, so that no list has to be kept.
"""

from collections.abc import Callable
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib import import_module
from pkgutil import iter_modules

from scheduler.errors import ScheduleError, refuse_unless_whole
from scheduler.schedule import Schedule

__all__ = ["by_name", "names"]

Builder = Callable[[int, int], Schedule]


@lru_cache(maxsize=64, typed=True)
def by_name(name: str, lanes: int, chunks: int) -> Schedule:
    """Builds the schedule of this name; the same call gives the same object.

    Args:
        name: one of `names()`
        lanes: how many lanes (ranks, or devices in one process) there are
        chunks: how many chunks a step has; fewer than lanes will do

    Raises:
        ScheduleError: there is no such schedule, or `lanes` or `chunks` is not a whole number of at least 1.

    >>> print(by_name("1f1b", lanes=2, chunks=2))
    schedule 1f1b, chunks 2, stages on lanes 0 1
    lane 0: 0F0 0F1 0B0 0B1
    lane 1: 1F0 1B0 1F1 1B1
    """
    refuse_unless_whole("lanes", lanes, least=1)
    refuse_unless_whole("chunks", chunks, least=1)
    if name not in names():
        near = get_close_matches(str(name).lower(), names(), n=1, cutoff=0.0)[0]
        raise ScheduleError(
            f"there is no schedule {name!r}; there are {', '.join(names())}. Did you mean {near!r}?"
        )
    return _builders()[name](lanes, chunks)


def names() -> tuple[str, ...]:
    """The names that `by_name` knows, sorted.

    >>> "1f1b" in names()
    True
    """
    return tuple(sorted(_builders()))


@cache
def _builders() -> dict[str, Builder]:
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    return {name: build for module in modules for name, build in module.BUILDERS.items()}
