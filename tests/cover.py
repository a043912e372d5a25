"""The configurations that a run of the tests meets: in `make soak` all, in `make test` some with every value.

    pairwise({"a": (1, 2), "b": (3, 4), "c": (5, 6)})  -->  4 rows, not 8: each pair of values stands in one
    some(rows)     -->  all rows; in `make test` few in which every value of every place stands
    either(5, 12)  -->  12; in `make test` 5: how far a law goes, or any other choice
    examples(80)   -->  80 examples of a law; in `make test` a tenth, but 5

conftest.py takes `some` of the cases of every parametrized test.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from random import Random
from typing import Any, TypeVar
from zlib import crc32

WHOLE = "PENSTOCK_WHOLE_TABLES"  # set in the environment by --whole, so that processes of tests know it too
Case = TypeVar("Case")
Value = TypeVar("Value")


def is_whole() -> bool:
    """Whether this run meets all configurations."""
    return os.environ.get(WHOLE) == "1"


def examples(count: int) -> int:
    """How many examples of a law to draw, if `make soak` draws so many."""
    return either(max(count // 10, min(count, 5)), count)


def either(quick: Value, whole: Value) -> Value:
    """The first in `make test`, the second in `make soak`."""
    return whole if is_whole() else quick


def some(cases: Iterable[Case]) -> list[Case]:
    """Cases (tuples or dicts of values) in which every value of every place occurs; all of them in a whole run."""
    cases = list(cases)
    if is_whole():
        return cases
    kept = set(chosen([(str(_values(case)), _values(case)) for case in cases]))
    return [case for place, case in enumerate(cases) if place in kept]


def chosen(cases: Sequence[tuple[str, Mapping[Any, Any]]]) -> list[int]:
    """The places of the cases to run, each given by its name and its values.

    The next is the one that brings most new values. Among equals names decide, not the order of the cases.
    """
    new = {place: {(axis, _key(value)) for axis, value in values.items()} for place, (_, values) in enumerate(cases)}
    order = {place: crc32(name.encode()) for place, (name, _) in enumerate(cases)}
    found = [place for place, values in new.items() if not values]
    while any(new.values()):
        found.append(max(new, key=lambda place: (len(new[place]), order[place])))
        covered = new[found[-1]]
        new = {place: values - covered for place, values in new.items() if values - covered}
    return found


def _values(case: Any) -> dict[Any, Any]:
    if isinstance(case, Mapping):
        return dict(case)
    return dict(enumerate(case)) if isinstance(case, tuple) else {0: case}


def _key(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows, one value for each axis, so that any two values of any two axes stand together in some row."""
    names = sorted(axes, key=lambda name: -len(axes[name]))
    open_pairs = {
        ((one, i), (other, j))
        for one, other in combinations(names, 2)
        for i in range(len(axes[one]))
        for j in range(len(axes[other]))
    }
    rows = []
    draw = Random(0)
    while open_pairs:
        row = dict(min(open_pairs))  # at least this pair, so the loop ends

        def gain(cell: tuple[str, int], row: dict[str, int] = row) -> int:
            return sum((cell, other) in open_pairs or (other, cell) in open_pairs for other in row.items())

        for name in names:
            if name not in row:
                row[name] = max(range(len(axes[name])), key=lambda i: (gain((name, i)), draw.random()))
        open_pairs.difference_update(combinations([(name, row[name]) for name in names], 2))
        rows.append({name: axes[name][row[name]] for name in axes})
    return rows
