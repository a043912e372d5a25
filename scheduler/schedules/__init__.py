"""The named schedules: one file each; a new schedule is a new file here, and its tests.

    schedules/<file>.py: BUILDERS = {name: build(lanes, chunks, **options) -> Schedule}
                             │
                             ▼
    names(), by_name(name, lanes, chunks, **options)

The files are found by looking into this folder, so that no list has to be kept; one whose name begins with "_" has no
schedules of its own, but what several of them share. An option is a keyword of the builder, and has a default.
"""

from collections.abc import Callable, Hashable, Iterator
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib import import_module
from inspect import signature
from pkgutil import iter_modules

from scheduler.collecting import no_collecting
from scheduler.errors import ScheduleError, whole_number
from scheduler.placement import Placement
from scheduler.schedule import Schedule

__all__ = ["by_name", "for_placement", "names"]

Builder = Callable[..., Schedule]

_MOST = 2**18  # chunks of all lanes; some builders take a minute for four times as many


def by_name(name: str, lanes: int, chunks: int, **options: object) -> Schedule:
    """Builds the schedule of this name; the same call gives the same object.

    Args:
        name: one of `names()`
        lanes: how many lanes (ranks, or devices in one process) there are
        chunks: how many chunks a step has; fewer than lanes will do, unless the schedule says otherwise
        options: what the schedule's builder takes besides, such as stages_per_lane; a list counts as a tuple

    Raises:
        ScheduleError: there is no such schedule, it takes no such option, or a value cannot be: `lanes` or `chunks`
            is not a whole number of at least 1, both are so large that nobody could list all actions, the schedule is
            not defined for so few chunks, or an option is wrong.

    >>> print(by_name("1f1b", lanes=2, chunks=2))
    schedule 1f1b, chunks 2, stages on lanes 0 1
    lane 0: 0F0 0F1 0B0 0B1
    lane 1: 1F0 1B0 1F1 1B1
    >>> print(by_name("interleaved", lanes=2, chunks=1, stages_per_lane=2))
    schedule interleaved, chunks 1, stages on lanes 0 1 0 1
    lane 0: 0F0 2F0 2B0 0B0
    lane 1: 1F0 3F0 3B0 1B0
    """
    lanes, chunks = whole_number("lanes", lanes, least=1), whole_number("chunks", chunks, least=1)
    if name not in names():
        near = get_close_matches(str(name).lower(), names(), n=1, cutoff=0.0)[0]
        raise ScheduleError(f"there is no schedule {name!r}; there are {', '.join(names())}. Did you mean {near!r}?")
    if lanes * chunks > _MOST:
        raise ScheduleError(
            f"lanes is {lanes} and chunks {chunks}, but a schedule lists every action, so their product is at most "
            f"{_MOST}. Use fewer chunks."
        )
    options = {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}
    for option, value in options.items():
        try:
            hash(value)
        except TypeError:
            raise ScheduleError(f"{option} is {value!r}, but must be a number, a text, or a list of these.") from None
    return _build(name, lanes, chunks, repr(options), **options)


def names() -> tuple[str, ...]:
    """The names that `by_name` knows, sorted.

    >>> "1f1b" in names()
    True
    """
    return tuple(sorted(_builders()))


def for_placement(placement: Placement, chunks: int) -> Iterator[tuple[str, dict[str, object], Schedule]]:
    """The named schedules with this placement, with their options: first those that need none, then with so many stages
    a lane.

    >>> from scheduler.placement import Placement
    >>> [(name, options) for name, options, _ in for_placement(Placement.loop(2, 6), chunks=4)][0]
    ('interleaved', {'stages_per_lane': 3})
    """
    choices: tuple[dict[str, object], ...] = ({}, {"stages_per_lane": placement.stages // placement.lanes})
    for options in choices:
        for name in names():
            try:
                schedule = by_name(name, placement.lanes, chunks, **options)
            except ScheduleError:  # not for so few chunks, or without this option
                continue
            if schedule.placement == placement:
                yield name, options, schedule


@lru_cache(maxsize=64)
@no_collecting()
def _build(name: str, lanes: int, chunks: int, spelt: str, /, **options: Hashable) -> Schedule:
    # `spelt` is for the cache alone: (1, True) equals (1, 1), but only one of them is right
    build = _builders()[name]
    _refuse_unknown(options, name, build)
    return build(lanes, chunks, **options)


def _refuse_unknown(options: dict[str, Hashable], name: str, build: Builder) -> None:
    _, _, *parameters = signature(build).parameters.values()
    unknown = [option for option in options if option not in {parameter.name for parameter in parameters}]
    if unknown:
        takes = ", ".join(f"{parameter.name}={parameter.default!r}" for parameter in parameters) or "none"
        raise ScheduleError(
            f"{name} takes no option {', '.join(unknown)}; it takes {takes}{' by default' if parameters else ''}. "
            f"Drop {', '.join(unknown)}, or choose another schedule."
        )


@cache
def _builders() -> dict[str, Builder]:
    files = [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]
    modules = [import_module(f"{__name__}.{file}") for file in files]
    return {name: build for module in modules for name, build in module.BUILDERS.items()}
