"""Which few configurations meet every pair of values? A greedy 2-way cover of some axes.

    pairwise({"a": (1, 2), "b": (3, 4), "c": (5, 6)})  -->  4 rows, not 8: each pair of values stands in one
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from random import Random
from typing import Any


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
