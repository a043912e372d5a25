"""Entries of containers, read and written as Python's own classes do it, whatever their subclasses make of that.

    class Table(OrderedDict): `[]` builds an object    ─► a copy by its own methods would hold other entries
    class Config(dict):       `update` merges, refuses ─► nor would it get back what it held
    class Irreps(tuple):      `len` raises             ─► it could not be looked into
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import is_
from typing import Any

CONTAINERS = (OrderedDict, dict, list, set, deque, bytearray)
FIXED = (tuple, frozenset)  # they are read alone


@lru_cache(maxsize=4096)
def base_of(kind: type) -> Any:
    """Python's own class that a class of containers is derived from. None: they are no containers.

    Example:
        >>> from collections import Counter
        >>> base_of(Counter), base_of(int)
        (<class 'dict'>, None)
    """
    return next((base for base in (*CONTAINERS, *FIXED) if issubclass(kind, base)), None)


def length(holder: Any) -> int:
    """The number of entries of a container.

    Example:
        >>> length([5, 6])
        2
    """
    return int(base_of(type(holder)).__len__(holder))  # type: ignore[arg-type]  # a type is Hashable


def reader_of(kind: type) -> Callable[[Any], list[Any]]:
    """A function that reads the entries of such a container; of a dict all keys, then all values.

    Example:
        >>> reader_of(dict)({"a": 1, "b": 2})
        ['a', 'b', 1, 2]
    """
    base = base_of(kind)
    if kind in (list, tuple):
        return list
    entries, values = base.__iter__, getattr(base, "values", None)
    return (lambda holder: [*entries(holder)]) if values is None else lambda holder: [*entries(holder), *values(holder)]


def write(holder: Any, entries: Sequence[Any]) -> None:
    """Give a container these entries, as they were read, and no more. Entries that it holds already are not written.

    Example:
        >>> held = {"b": 2, "c": 3}
        >>> write(held, ["a", "b", 1, 2])
        >>> held
        {'a': 1, 'b': 2}
    """
    base, present = base_of(type(holder)), reader_of(type(holder))(holder)  # type: ignore[arg-type]  # Hashable
    if len(present) == len(entries) and all(map(is_, present, entries)):
        return
    if issubclass(base, dict):
        _write_dict(base, holder, dict(zip(entries, entries[len(entries) // 2 :])))
    elif issubclass(base, (list, bytearray)):
        base.__setitem__(holder, slice(None), entries)
    else:
        base.clear(holder)
        (set.update if base is set else deque.extend)(holder, entries)


def shorten(holder: Any, most: int) -> None:
    """Drop the last entries of a container that has more than `most`. A set has no last ones.

    Example:
        >>> held = {"b": 2, "c": 3}
        >>> shorten(held, 1)
        >>> held
        {'b': 2}
    """
    base = base_of(type(holder))  # type: ignore[arg-type]  # a type is Hashable
    while base is not set and length(holder) > most:
        if issubclass(base, dict):
            base.__delitem__(holder, next(base.__reversed__(holder)))
        else:
            base.pop(holder)


def _write_dict(base: Any, holder: Any, wanted: dict[Any, Any]) -> None:
    nothing = object()
    for name in [name for name in base.__iter__(holder) if name not in wanted]:
        base.__delitem__(holder, name)
    for name, value in wanted.items():
        if base.get(holder, name, nothing) is not value:
            base.__setitem__(holder, name, value)
    if [*base.__iter__(holder)] != [*wanted]:  # the order counts, too
        for name, value in wanted.items():
            base.__delitem__(holder, name)
            base.__setitem__(holder, name, value)
