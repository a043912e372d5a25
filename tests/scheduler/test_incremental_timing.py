"""Incremental timing: the estimate of a change, before it is made, is what `simulate` computes afterwards."""

import random
from math import inf, isclose

import pytest
from search_cases import length, unequal

from scheduler import Costs, Placement, verify
from scheduler.searches.dispatching import dispatch
from scheduler.searches.formulation import pose
from scheduler.searches.incremental_timing import IncrementalTiming

CASES = [
    (unequal(0, 4), Placement.linear(4), 6, 4, "flush"),
    (unequal(1, 3), Placement.linear(3), 7, (3, 2.5, 2), "span"),
    (unequal(2, 6), Placement.vee(3), 5, 7, "flush"),
    (unequal(3, 6), Placement.loop(3, 6), 5, None, "span"),
    (Costs(2, 1, 1, backward=1.5, link=0.25, checkpoint=0.25, recompute=1, kept=0.5), Placement.vee(2), 6, 3, "flush"),
    (Costs(0, 1, 0, link=1), Placement.linear(3), 5, 3, "flush"),  # what takes no time starts when it ends
]


def moves(timing, rnd):
    """Random changes that `near` allows: an action past up to six others."""
    while True:
        lane = rnd.randrange(timing.problem.lanes)
        order = timing.orders[lane]
        first, last = sorted(rnd.sample(range(len(order)), 2))
        window = order[first:min(last, first + 6) + 1]
        moved = [*window[1:], window[0]] if rnd.random() < 0.5 else [window[-1], *window[:-1]]
        if all(moved.index(need) < moved.index(action) for action in moved for need in timing.near[action]
               if need in moved):
            yield lane, first, moved


def in_pairs(problem):
    """A plan in which every W follows its I at once, and none is whole yet."""
    return problem.with_whole(dispatch(problem))._replace(whole=frozenset())


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("costs, placement, chunks, memory, objective", CASES)
def test_an_estimate_is_exact_above_the_present_value_and_a_limit_below(
    costs, placement, chunks, memory, objective, split
):
    problem = pose(costs, placement, chunks, memory, objective, split)
    rnd, timing = random.Random(0), IncrementalTiming(problem, dispatch(problem))
    larger = smaller = refused = 0
    for (lane, first, window), _ in zip(moves(timing, rnd), range(300)):
        before, estimate = timing.value, timing.estimate(lane, first, window)
        if estimate == inf:
            refused += 1
            continue
        timing.change(lane, first, window)
        after = length(problem.schedule(timing.plan(), "changed"), costs, problem)
        assert isclose(timing.value, after)
        assert isclose(after, estimate) if after > before * (1 + 1e-9) else estimate <= before * (1 + 1e-9)
        larger, smaller = larger + (after > before), smaller + (after < before)
        if rnd.random() < 0.1:
            timing.set(dispatch(problem))  # or values drift to where nothing gets worse
    assert larger and smaller and refused < 250


@pytest.mark.parametrize("costs, placement, chunks, memory, objective", CASES)
def test_changes_keep_times_tails_and_levels_as_a_new_course_has_them(costs, placement, chunks, memory, objective):
    problem = pose(costs, placement, chunks, memory, objective)
    timing = IncrementalTiming(problem, dispatch(problem))
    for (lane, first, window), _ in zip(moves(timing, random.Random(1)), range(100)):
        if timing.estimate(lane, first, window) < inf:
            timing.change(lane, first, window)
            fresh = IncrementalTiming(problem, timing.plan())
            assert timing.value == pytest.approx(fresh.value)
            assert [timing.slack(action) for action in range(problem.count)] == pytest.approx(
                [fresh.slack(action) for action in range(problem.count)])
            assert fresh.fits()


def test_what_a_lane_cannot_hold_is_refused():
    problem = pose(Costs(), Placement.linear(2), 3, memory=1)
    timing = IncrementalTiming(problem, dispatch(problem))
    order = timing.orders[0]
    assert [problem.schedule(timing.plan(), "one").orders[0][at].chunk for at in (2, 3)] == [0, 1]  # W0, then F1
    assert timing.estimate(0, 2, [order[3], order[2]]) == inf


def test_some_action_has_no_slack_and_none_has_less():
    problem = pose(unequal(0, 4), Placement.linear(4), 6, 4)
    timing = IncrementalTiming(problem, dispatch(problem))
    slacks = [timing.slack(action) for action in range(problem.count)]
    assert min(slacks) == pytest.approx(0, abs=1e-9) and max(slacks) > 1


def test_a_flip_joins_a_backward_and_a_second_one_splits_it():
    problem = pose(Costs(backward=1.5), Placement.linear(2), 3)
    timing = IncrementalTiming(problem, in_pairs(problem))
    before = timing.value, timing.plan()
    pair = 3 + 2  # the last lane's last chunk
    assert timing.flip(pair)
    schedule = problem.schedule(timing.plan(), "joined")
    assert "1B2" in map(str, schedule.orders[1]) and "1W2" not in map(str, schedule.orders[1])
    verify(schedule)
    assert timing.flip(pair) and (timing.value, timing.plan()) == before


def test_a_backward_is_not_joined_before_the_weight_gradient_of_the_chunk_before():
    """Weight gradients of a stage ascend, those within a whole backward too."""
    problem = pose(Costs(backward=1.5), Placement.linear(1), 2)
    f0, f1, i0, i1, w0, w1 = range(6)
    timing = IncrementalTiming(problem, dispatch(problem)._replace(orders=[[f0, f1, i0, i1, w0, w1]]))
    assert not timing.flip(1) and timing.whole == set()
    assert timing.flip(0)


@pytest.mark.parametrize("costs, placement, chunks, memory, objective", CASES)
def test_joining_what_is_joinable_costs_nothing(costs, placement, chunks, memory, objective):
    problem = pose(costs, placement, chunks, memory, objective)
    timing = IncrementalTiming(problem, in_pairs(problem))
    joined = timing.plan()._replace(whole=timing.joinable())
    assert joined.whole
    assert problem.allows(joined) and IncrementalTiming(problem, joined).fits()
    schedule = problem.schedule(joined, "joined")
    verify(schedule)
    assert length(schedule, costs, problem) <= timing.value * (1 + 1e-9)
    assert len(schedule.actions) == problem.count - len(joined.whole)


def test_a_whole_backward_that_takes_longer_is_not_joinable():
    problem = pose(Costs(backward=2.5), Placement.linear(2), 3)
    assert IncrementalTiming(problem, dispatch(problem)).joinable() == frozenset()
