"""The covers that tests use are covers: each pair of values, or each value, stands in a row."""

from itertools import combinations, product

import pytest
from cover import WHOLE, either, examples, pairwise, some
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 4, 5, 2), (9, 6, 5, 5, 4, 2, 2, 2), (1, 3), (7, 1, 7)])
def test_every_pair_of_values_stands_in_some_row_and_rows_are_few(sizes):
    axes = {f"axis {number}": [f"{number}:{value}" for value in range(size)] for number, size in enumerate(sizes)}
    rows = pairwise(axes)
    seen = {pair for row in rows for pair in combinations(row.values(), 2)}
    assert seen == {(a, b) for one, other in combinations(axes.values(), 2) for a in one for b in other}
    largest, second, *_ = sorted(sizes, reverse=True)
    assert len(rows) <= 1.6 * largest * second


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.booleans()), min_size=1, unique=True))
def test_every_value_of_every_place_stands_in_some_case_that_is_run(cases):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(WHOLE, raising=False)
        found = some(cases)
        assert found == [case for case in cases if case in found]  # in their order
        for place in range(3):
            assert {case[place] for case in found} == {case[place] for case in cases}
        patch.setenv(WHOLE, "1")
        assert some(cases) == cases and examples(80) == 80 and either(5, 12) == 12


def test_of_a_large_product_few_cases_are_run_and_the_same_ones_in_any_order(monkeypatch):
    monkeypatch.delenv(WHOLE, raising=False)
    cases = [dict(zip("abc", values, strict=True)) for values in product(range(10), range(8), ([1], [2]))]
    found = some(cases)
    assert len(found) == 10
    assert sorted(map(str, some(cases[::-1]))) == sorted(map(str, found))
    assert {case["a"] for case in found} == set(range(10)) and {str(case["c"]) for case in found} == {"[1]", "[2]"}
    assert (examples(80), examples(12), examples(3)) == (8, 5, 3) and either(5, 12) == 5
