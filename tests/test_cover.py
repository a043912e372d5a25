"""The cover that the laws' tests use is one."""

from itertools import combinations

import pytest
from cover import pairwise


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 4, 5, 2), (9, 6, 5, 5, 4, 2, 2, 2), (1, 3), (7, 1, 7)])
def test_every_pair_of_values_stands_in_some_row_and_rows_are_few(sizes):
    axes = {f"axis {number}": [f"{number}:{value}" for value in range(size)] for number, size in enumerate(sizes)}
    rows = pairwise(axes)
    seen = {pair for row in rows for pair in combinations(row.values(), 2)}
    assert seen == {(a, b) for one, other in combinations(axes.values(), 2) for a in one for b in other}
    largest, second, *_ = sorted(sizes, reverse=True)
    assert len(rows) <= 1.6 * largest * second
