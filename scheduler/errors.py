"""ScheduleError, and the checks of numbers that make a schedule.

    wrong input  --validation-->  ScheduleError: what was wrong, the value, what to do

A fault inside a schedule also has a place, so `faults.py` adds the grid with the failing cells marked.
"""

import operator
import reprlib
import sys
from collections.abc import Iterable, Mapping, Set
from numbers import Real
from typing import Any


class ScheduleError(ValueError):
    """A schedule, or a number that one is made from, that cannot be right."""


def refuse_unless_a(name: str, value: object, *types: type) -> None:
    """Refuses what is of none of these types, such as the name of a schedule where a schedule is wanted.

    Raises:
        ScheduleError: with what makes such a value.

    >>> from scheduler import Schedule
    >>> refuse_unless_a("schedule", "1f1b", Schedule)
    Traceback (most recent call last):
        ...
    scheduler.errors.ScheduleError: schedule is '1f1b', but must be of type Schedule. \
Give by_name('1f1b', lanes=4, chunks=8), for example.
    """
    if not isinstance(value, types):
        wanted = [kind.__name__ for kind in types]
        raise ScheduleError(
            f"{name} is {reprlib.repr(value)}, but must be of type {' or '.join(wanted)}. "
            f"Give {' or '.join(map(_MADE.__getitem__, wanted))}, for example."
        )


def whole(value: object) -> int | None:
    """The int that `value` is (of Python, numpy or a 0-d tensor); None for floats, bools and all else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return None


def whole_number(name: str, value: object, least: int, error: type[ValueError] = ScheduleError) -> int:
    """A count as Python's int; refuses what is no whole number, or too small a one.

    Args:
        name: that the caller knows the number by
        value: the number
        least: the smallest value that makes sense
        error: what is raised

    Raises:
        ValueError: `value` is not `whole` (True and False are not either), or is below `least`.

    >>> import numpy
    >>> whole_number("chunks", numpy.int64(8), least=1)
    8
    >>> whole_number("chunks", 0, least=1)
    Traceback (most recent call last):
        ...
    scheduler.errors.ScheduleError: chunks is 0, but must be a whole number of at least 1. Use chunks=1 or more.
    """
    number = whole(value)
    if number is None or number < least:
        raise error(
            f"{name} is {value!r}, but must be a whole number of at least {least}. Use {name}={least} or more."
        )
    return number


def refuse_unless_finite(
    name: str, number: Any, above: bool = False, error: type[ValueError] = ScheduleError
) -> None:
    """Refuses what is not a time, a size or, with `above`, a speed.

    Args:
        name: that the caller knows the number by
        number: the number
        above: whether 0 is refused too
        error: what is raised

    Raises:
        ValueError: `number` is no finite real number, or below 0.

    >>> refuse_unless_finite("forward", -1)
    Traceback (most recent call last):
        ...
    scheduler.errors.ScheduleError: forward is -1, but must be a finite number that is not negative.
    """
    number = plain(number)  # numpy's float32 would overflow at the comparison
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if not is_number or not 0 <= number < sys.float_info.max or above and not number:  # times are shown as floats
        range_words = "above 0" if above else "that is not negative"
        raise error(f"{name} is {number!r}, but must be a finite number {range_words}.")


def refuse_unless_filled(name: str, parts: str, lanes: int, chunks: int, other: str) -> None:
    """Refuses fewer chunks than two a lane for a schedule that fills these parts of a step with them."""
    if chunks < 2 * lanes:
        raise ScheduleError(
            f"{name} fills {parts} with 2 chunks a lane, but there are {chunks} chunks for {lanes} lanes. "
            f"Use chunks={2 * lanes} or more, or {other}, which takes any number."
        )


def plain(number: Any) -> Any:
    """A number of numpy's, or a tensor of one, as Python's, which does not overflow; anything else as it is.

    >>> import numpy
    >>> plain(numpy.uint8(200)) + plain(numpy.uint8(100))
    300
    """
    is_number = isinstance(number, Real) or getattr(number, "ndim", 1) == 0
    return number.item() if is_number and hasattr(number, "item") else number


def is_list(value: Any) -> bool:
    """Whether a value lists others in an order. A tensor without dims is one number.

    >>> is_list((1, 2)), is_list({1, 2}), is_list("12"), is_list(1)
    (True, False, False, False)
    """
    has_order = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Set, Mapping))
    return has_order and getattr(value, "ndim", 1) > 0


def one_each(name: str, value: Any, lanes: int, error: type[ValueError] = ScheduleError) -> list[Any]:
    """The value of each lane, which is given once for all, or in a list.

    Args:
        name: that the caller knows it by
        value: what is given
        lanes: how many lanes there are
        error: what is raised

    Raises:
        ValueError: the list is for another number of lanes.

    >>> one_each("cap", 4, lanes=2), one_each("cap", (4, 3), lanes=2)
    ([4, 4], [4, 3])
    """
    listed = list(value) if is_list(value) else [value] * lanes
    if len(listed) != lanes:
        raise error(
            f"{name} lists {len(listed)} numbers but there are {lanes} lanes ({name}: {value}). List {lanes}."
        )
    return listed


_MADE = {
    "Costs": "Costs(forward=2)", "Placement": "Placement.linear(4)", "Program": "lower(schedule)",
    "Schedule": "by_name('1f1b', lanes=4, chunks=8)", "Timeline": "simulate(schedule)", "str": "a file's text",
}
