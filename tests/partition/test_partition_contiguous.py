"""Laws of partition.contiguous. The reference is the dynamic program over all splits, in exact ratios."""

import math
import re
import time
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate, combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from partition import PartitionError, balance_costs

law = settings(derandomize=True, deadline=None, max_examples=examples(300))
slow_law = settings(law, max_examples=examples(60))


def stage_sums(costs: Sequence[Any], balance: Sequence[int]) -> list[Fraction]:
    exact = iter([Fraction(cost) for cost in costs])
    return [sum((next(exact) for _ in range(length)), Fraction(0)) for length in balance]


def smallest_largest_sum(costs: Sequence[Any], stages: int) -> Fraction:
    """best[n] = the smallest largest sum of the first n layers over s stages."""
    sums = [Fraction(0), *accumulate(Fraction(cost) for cost in costs)]
    best: list[Any] = [0] + [math.inf] * len(costs)
    for _ in range(stages):
        best = [math.inf] + [
            min(max(best[start], sums[stop] - sums[start]) for start in range(stop)) for stop in range(1, len(sums))
        ]
    return Fraction(best[-1])


def layers_needed_under(costs: Sequence[int], cap: int) -> float:
    """How many stages a cap asks for: each as long as the cap allows."""
    if max(costs) > cap:
        return math.inf
    stages, held = 1, 0
    for cost in costs:
        if held + cost > cap:
            stages, held = stages + 1, 0
        held += cost
    return stages


def rows_of(costs: st.SearchStrategy[Any], longest: int = 14) -> st.SearchStrategy[tuple[list[Any], int]]:
    return st.lists(costs, min_size=1, max_size=longest).flatmap(
        lambda row: st.tuples(st.just(row), st.integers(1, len(row)))
    )


small_ints = st.integers(0, 6)
near_ties = st.sampled_from([0.1, 0.2, 0.3, 0.1 + 0.2, 0.6, 0.7, 0.1 + 0.6, 1e16, 1.0])
any_floats = st.floats(0, 1e308, allow_nan=False)
nearly_equal = st.integers(95, 105)
heavy_tail = st.integers(0, 40).map(lambda power: int(1.5**power))
mixed = st.one_of(small_ints, near_ties, st.fractions(0, 5))


@law
@given(st.one_of(*map(rows_of, [small_ints, st.integers(0, 10**30), nearly_equal, heavy_tail])))
def test_largest_stage_is_the_smallest_possible_for_ints(case: tuple[list[int], int]) -> None:
    costs, stages = case
    assert max(stage_sums(costs, balance_costs(costs, stages))) == smallest_largest_sum(costs, stages)


@law
@given(st.one_of(*map(rows_of, [near_ties, any_floats, st.floats(0, 1), mixed])))
def test_largest_stage_is_the_smallest_possible_for_floats_without_rounding(case: tuple[list[float], int]) -> None:
    costs, stages = case
    assert max(stage_sums(costs, balance_costs(costs, stages))) == smallest_largest_sum(costs, stages)


@slow_law
@given(rows_of(st.sampled_from([0, 0, 1, 2, 7, 100]), longest=9))
def test_no_split_of_all_splits_has_a_smaller_largest_stage(case: tuple[list[int], int]) -> None:
    costs, stages = case
    splits = (
        [stop - start for start, stop in pairwise((0, *cuts, len(costs)))]
        for cuts in combinations(range(1, len(costs)), stages - 1)
    )
    assert max(stage_sums(costs, balance_costs(costs, stages))) == min(max(stage_sums(costs, s)) for s in splits)


@law
@given(rows_of(mixed, longest=40))
def test_every_stage_has_a_layer_and_all_layers_have_a_stage(case: tuple[list[Any], int]) -> None:
    costs, stages = case
    balance = balance_costs(costs, stages)
    assert len(balance) == stages and sum(balance) == len(costs) and min(balance) >= 1


@law
@given(st.one_of(rows_of(mixed, longest=30), rows_of(heavy_tail, longest=30)))
def test_no_cut_can_move_and_make_the_two_stages_beside_it_more_even(case: tuple[list[Any], int]) -> None:
    costs, stages = case
    balance = balance_costs(costs, stages)
    start = 0
    for left, right in pairwise(balance):
        pair = costs[start : start + left + right]
        exact = [Fraction(cost) for cost in pair]
        gaps = {cut: abs(sum(exact[:cut]) - sum(exact[cut:])) for cut in range(1, len(pair))}
        assert gaps[left] == min(gaps.values())
        start += left


@law
@given(rows_of(st.integers(0, 50)), st.integers(1, 10**6), st.integers(-40, 40))
def test_the_unit_of_the_costs_does_not_matter(case: tuple[list[int], int], factor: int, power: int) -> None:
    costs, stages = case
    balance = balance_costs(costs, stages)
    assert balance_costs([cost * factor for cost in costs], stages) == balance
    assert balance_costs([cost * 2.0**power for cost in costs], stages) == balance


@pytest.mark.parametrize("layers", range(1, 34))
def test_equal_layers_are_shared_out_to_within_one(layers: int) -> None:
    for cost in (0, 1, 0.1):
        for stages in range(1, layers + 1):
            balance = balance_costs([cost] * layers, stages)
            assert max(balance) - min(balance) <= 1


@pytest.mark.parametrize("layers, stages", [(7, 4), (15, 8), (31, 16)])
def test_one_layer_short_of_two_a_stage_is_two_at_most(layers: int, stages: int) -> None:
    # torchgpipe puts all that is left over on the last stage: [1, 1, 1, 4], [1] * 7 + [8], [1] * 15 + [16].
    assert max(balance_costs([1] * layers, stages)) == 2
    assert max(balance_costs([0.7] * layers, stages)) == 2


@pytest.mark.parametrize(
    "costs, stages, balance",
    [
        ([1, 2, 3, 4, 5, 6], 2, [4, 2]),
        ([6, 5, 4, 3, 2, 1], 2, [2, 4]),
        ([0, 0], 2, [1, 1]),
        ([42], 1, [1]),
        ([0, 0, 0, 0, 0, 0], 3, [2, 2, 2]),
        ([100, 1, 1, 1, 1, 1, 1], 3, [1, 3, 3]),
        ([1, 1, 1, 1, 1, 1, 100], 3, [3, 3, 1]),
        ([1, 1, 1, 100, 1, 1, 1, 1], 4, [3, 1, 2, 2]),
        ([0.1, 0.2, 0.3], 2, [2, 1]),
        ([0.3, 0.1, 0.2, 0.3], 2, [2, 2]),
    ],
)
def test_small_rows(costs: list[float], stages: int, balance: list[int]) -> None:
    assert balance_costs(costs, stages) == balance


def test_sums_that_floats_would_round_together_are_told_apart() -> None:
    # As floats, 2**53 + 1.0 == 2**53: both cuts would look alike.
    assert balance_costs([2.0**53, 1.0, 2.0**53], 2) == [1, 2]
    assert balance_costs([2.0**53, 1.0, 2.0**53 - 1], 2) == [1, 2]
    assert balance_costs([2.0**53 - 2, 1.0, 2.0**53], 2) == [2, 1]


@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_layers_over_64_stages_are_optimal_by_certificate(seed: int) -> None:
    costs = np.random.default_rng(seed).integers(1, 10**9, 1000).tolist()
    if seed == 3:
        costs[500] = 10**12  # one layer above all shares
    largest = int(max(stage_sums(costs, balance_costs(costs, 64))))
    assert layers_needed_under(costs, largest) <= 64 < layers_needed_under(costs, largest - 1)


def test_a_thousand_layers_over_64_stages_take_milliseconds() -> None:
    costs = np.random.default_rng(0).random(1000).tolist()
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        balance_costs(costs, 64)
        seconds.append(time.perf_counter() - begun)
    assert min(seconds) < 0.05  # measured: 0.003


@pytest.mark.parametrize(
    "costs",
    [
        np.array([1, 2, 3, 4, 5, 6]),
        np.array([1, 2, 3, 4, 5, 6], dtype=np.float32),
        torch.tensor([1, 2, 3, 4, 5, 6]),
        torch.tensor([1.0, 2, 3, 4, 5, 6]),
        [np.uint8(200), np.uint8(200), torch.tensor(200, dtype=torch.uint8), 200.0, Decimal(400), Fraction(400)],
        (cost for cost in (1, 2, 3, 4, 5, 6)),
    ],
    ids=["numpy ints", "numpy floats", "tensor of ints", "tensor of floats", "a mixture", "a generator"],
)
def test_costs_may_be_any_numbers(costs: Any) -> None:
    assert balance_costs(costs, 2) == [4, 2]


def test_stages_may_be_a_numpy_int_or_a_tensor() -> None:
    two: list[Any] = [np.int64(2), torch.tensor(2)]
    assert [balance_costs([1, 1], stages) for stages in two] == [[1, 1], [1, 1]]


@pytest.mark.parametrize("bad", [-1, -0.5, math.nan, math.inf, -math.inf, "3", None, 1j, np.float32("nan"), [1]])
def test_a_cost_that_no_layer_has_is_refused_by_place_and_value(bad: Any) -> None:
    words = f"costs must be numbers, finite and not negative; costs[1] is {bad!r}. Measure again"
    with pytest.raises(PartitionError, match=re.escape(words)):
        balance_costs([1, bad, 2], 2)


def test_all_bad_costs_are_named_at_once() -> None:
    with pytest.raises(PartitionError, match=r"costs\[0\] is -2, costs\[2\] is nan\. .*that costs nothing is 0"):
        balance_costs([-2, 1, math.nan], 2)


@pytest.mark.parametrize("stages", [0, -1, 3])
def test_stages_that_cannot_all_have_a_layer_are_refused(stages: int) -> None:
    words = rf"cannot cut 2 layers into {stages} stages: every stage needs a layer\. Ask for 1 to 2 stages"
    with pytest.raises(PartitionError, match=words):
        balance_costs([1, 2], stages)


@pytest.mark.parametrize("stages", [2.0, True, "2", None])
def test_stages_that_are_no_whole_number_are_refused(stages: Any) -> None:
    with pytest.raises(PartitionError, match=rf"stages must be a whole number, 1 or more; got {stages!r} \("):
        balance_costs([1, 2], stages)


def test_a_row_without_layers_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"there are no layers to cut into stages \(stages: 1\)"):
        balance_costs([], 1)


@pytest.mark.parametrize("costs", [None, 3])
def test_costs_that_are_no_list_are_refused(costs):
    with pytest.raises(PartitionError, match=f"costs is {costs}. Give what each layer costs, such as"):
        balance_costs(costs, 2)
