"""No bound is above what all orders, tried one by one, can do; and where that is known in closed form, it is that."""

import random
from functools import cache
from math import inf, isclose

import pytest
from cover import either
from search_cases import shortest, tiny_cases, unequal

from scheduler import Costs, Placement
from scheduler.searches.annealing import anneal
from scheduler.searches.bounds import LowerBound
from scheduler.searches.dispatching import dispatch
from scheduler.searches.formulation import pose
from scheduler.searches.incremental_timing import value_of

CASES = tiny_cases(seed=1, count=either(12, 40))
SIZES = [(lanes, chunks) for lanes in range(1, 10) for chunks in (1, 2, 3, 5, 8, 13, 21, 30)]


@cache
def best_of_all_orders(number):
    return shortest(CASES[number][1], CASES[number][0])


def uniform(lanes, chunks, memory=None, objective="flush", **costs):
    return LowerBound(pose(Costs(**costs), Placement.linear(lanes), chunks, memory, objective)).value


@pytest.mark.parametrize("number", range(len(CASES)))
def test_no_bound_is_above_the_best_of_all_orders(number):
    best, bound = best_of_all_orders(number), LowerBound(CASES[number][1])
    assert bound.value <= best * (1 + 1e-9)
    bound.prove(best * 1.1, halvings=8)  # from a plan that is not the best
    assert bound.value <= best * (1 + 1e-9)
    bound.prove(best, halvings=8)
    assert bound.value <= best * (1 + 1e-9)


def test_bounds_are_met_by_the_best_of_all_orders_nearly_always():
    """A bound of 0 would pass the test above."""
    met = 0
    for number, (_, problem) in enumerate(CASES):
        best, bound = best_of_all_orders(number), LowerBound(problem)
        bound.prove(best)
        met += bound.meets(best)
    assert met >= 0.9 * len(CASES)


@pytest.mark.parametrize("lanes, chunks", SIZES)
def test_on_a_line_with_equal_times_the_flush_is_the_work_and_the_forwards_before_the_last_lane(lanes, chunks):
    """Section 2.1 of reference/schedules.md, law (i): with memory for all, ZB-H1's flush, where chunks >= lanes."""
    chain = 2 * lanes + 1 + 2 * (chunks - 1)
    assert uniform(lanes, chunks) == max(3 * chunks + lanes - 1, chain)


@pytest.mark.parametrize("lanes, chunks", SIZES)
def test_on_a_vee_with_equal_times_the_flush_is_at_least_the_work_and_the_way_to_the_last_lane(lanes, chunks):
    problem = pose(Costs(), Placement.vee(lanes), chunks)
    assert LowerBound(problem).value >= max(6 * chunks + lanes - 1, 4 * lanes + 1)


@pytest.mark.parametrize("memory", [1, 2, 3, 5, 8, 9, 12])
@pytest.mark.parametrize("lanes, chunks", [(2, 5), (4, 8), (5, 3), (8, 24)])
def test_the_span_is_at_least_that_of_appendix_b(lanes, chunks, memory):
    """Before the first I the first lane can run as many F as memory allows, and waits for the rest of the way there
    and back: arXiv 2401.10241, appendix B."""
    f, i, w, c = 5, 4, 3, 2
    wait = lanes * f + (lanes - 1) * (i + 2 * c) - min(memory, chunks) * f
    bound = uniform(lanes, chunks, memory, "span", forward=f, input=i, weight=w, link=c, kept=0.5)
    assert bound >= chunks * (f + i + w) + max(wait, 0)


def test_more_memory_never_makes_the_bound_larger():
    for seed in range(3):
        for objective in ("flush", "span"):
            problems = [pose(unequal(seed, 4), Placement.linear(4), 8, memory, objective)
                        for memory in (1, 1.5, 2, 3, 4, 5.5, 8, None)]
            values = [LowerBound(problem).value for problem in problems]
            assert values == sorted(values, reverse=True)
            assert values[0] > values[-1]


def test_with_memory_for_one_chunk_lanes_take_turns():
    """Down and back and W on the first lane, before it begins the next chunk."""
    assert uniform(3, 4, memory=1, forward=2, input=3, weight=5) == 4 * (3 * (2 + 3) + 5)


def test_bounds_of_whole_times_are_no_larger_than_a_plan_that_is_found():
    for seed in (9, 11, 14, 15, 20, 22, 57):  # where the first bound is not met
        rnd = random.Random(seed)
        costs = Costs(*([rnd.randint(3, 9) for _ in range(2)] for _ in range(3)), kept=0.5)
        problem = pose(costs, Placement.linear(2), 3, 2)
        value = value_of(problem, anneal(problem, dispatch(problem), 5e4, seed))
        for more in range(4):
            bound = LowerBound(problem)
            bound.prove(value + more, halvings=6)
            assert bound.value <= value


def test_bounds_of_whole_times_are_whole():
    for seed in range(5):
        costs = Costs(forward=(3, 5, 4), input=(2 + seed, 6, 5), weight=(3, 1 + seed, 4), kept=0.5)
        bound = LowerBound(pose(costs, Placement.linear(3), 5, 3))
        bound.prove(bound.value + 3, halvings=4)
        assert bound.value == int(bound.value)


def test_a_bound_without_passes_proves_nothing_more():
    problem = pose(unequal(0, 4), Placement.linear(4), 12, 4)
    with_none, with_many = LowerBound(problem, passes=0), LowerBound(problem)
    first = with_none.value
    with_none.prove(1118.52, halvings=3)
    with_many.prove(1118.52, halvings=3)
    assert with_none.value == first < with_many.value


def test_bounds_of_many_actions_look_at_less_and_are_no_larger(monkeypatch):
    problem = pose(unequal(2, 4), Placement.linear(4), 12, 4)
    thorough = LowerBound(problem).value
    monkeypatch.setattr("scheduler.searches.bounds._THOROUGH", 0)
    assert 0 < LowerBound(problem).value < thorough


def test_without_time_nothing_has_to_be_waited_for():
    assert LowerBound(pose(Costs(0, 0, 0), Placement.linear(2), 3)).value == 0
    assert isclose(LowerBound(pose(Costs(0, 0, 0.5), Placement.linear(2), 3)).value, 1.5)
    assert LowerBound(pose(Costs(), Placement.linear(1), 7, inf)).value == 21
