"""W go where a lane waits or is full: the plans are right, and on equal stages those of the zero-bubble papers."""

import pytest

from scheduler import Costs, Placement, by_name, verify
from scheduler.searches.dispatching import dispatch
from scheduler.searches.filling import filled, turns, warmups, without_weights
from scheduler.searches.formulation import pose
from scheduler.searches.timing import value_of


def plans(problem):
    return [plan for counts in warmups(problem) for eager in (False, True)
            if (plan := filled(problem, turns(problem, counts), eager)) is not None]


@pytest.mark.parametrize("memory", [1, 1.4, 2, 3, 4.5, None])
@pytest.mark.parametrize("lanes, chunks", [(1, 1), (1, 4), (2, 1), (2, 5), (4, 3), (4, 9), (6, 13)])
def test_turns_with_weights_filled_in_are_right_and_fit(lanes, chunks, memory):
    problem = pose(Costs(3, 2, 2, link=0.5, kept=0.4), Placement.linear(lanes), chunks, memory)
    found = plans(problem)
    for plan in found:
        verify(problem.schedule(plan, "filled"))
        assert problem.fits(plan)
    assert found or memory == 1  # where every chunk has to be done with before the next, F in turn come too early


def test_warmups_fall_from_lane_to_lane_and_stay_within_memory():
    for lanes, memory in [(4, 2.5), (4, 4), (4, 6), (8, 8), (8, 12), (8, None)]:
        for counts in warmups(pose(Costs(3, 3, 2), Placement.linear(lanes), 20, memory)):
            assert all(before > after or after == 1 for before, after in zip(counts, counts[1:]))
            assert 1 <= counts[0] <= (memory or 20)


@pytest.mark.parametrize("forward, backward, link", [
    ((3, 3, 3, 3), (3, 3, 3, 3), 0), ((2, 3, 4, 5), (6, 4, 5, 6), 1), ((5, 7, 6), (5, 9, 2), 0.5), ((2, 2), (1, 9), 0),
])
def test_the_first_choice_of_warmups_is_what_ends_before_the_first_backward_is_there(forward, backward, link):
    """Lane r waits for F of all lanes from r on, I of all after r, and the messages there and back."""
    lanes = range(len(forward))
    problem = pose(Costs(forward, backward, 2, link=link), Placement.linear(len(lanes)), 40)
    waits = [sum(forward[lane:]) + sum(backward[lane + 1:]) + 2 * link * (lanes[-1] - lane) for lane in lanes]
    assert warmups(problem)[0] == [int(wait / one) for wait, one in zip(waits, forward)]


def test_there_are_no_warmups_where_lanes_host_several_stages():
    assert warmups(pose(Costs(), Placement.vee(3), 4)) == []


@pytest.mark.parametrize("lanes, chunks", [(2, 6), (4, 8), (4, 12), (8, 16)])
def test_zb_h1_is_found_where_memory_is_what_1f1b_takes(lanes, chunks):
    problem = pose(Costs(), Placement.linear(lanes), chunks, lanes)
    best = min(value_of(problem, plan) for plan in plans(problem))
    assert best == value_of(problem, problem.plan(by_name("zb-h1", lanes, chunks))) == 3 * chunks + lanes - 1


def test_filling_puts_back_what_was_taken_out():
    problem = pose(Costs(3, 3, 2, link=0.5, kept=0.5), Placement.vee(3), 7, 6)
    orders = without_weights(problem, dispatch(problem))
    plan = filled(problem, orders)
    assert without_weights(problem, plan) == orders
    assert sorted(map(len, plan.orders)) == [3 * 2 * 7] * 3


def test_an_order_that_memory_does_not_go_to_is_not_filled():
    problem = pose(Costs(), Placement.linear(2), 4, memory=2)
    assert filled(problem, turns(problem, [4, 1])) is None
    assert filled(problem, turns(problem, [2, 1])) is not None


def test_an_order_in_which_a_lane_waits_for_ever_is_not_filled():
    problem = pose(Costs(), Placement.linear(2), 2)
    f0, f1, i0, i1 = 0, 1, 4, 5
    assert filled(problem, [[f0, i0, f1, i1], [f + 2 for f in (f0, f1, i0, i1)]]) is None


def test_an_eager_lane_never_waits_with_a_weight_at_hand():
    problem = pose(Costs(3, 3, 2), Placement.linear(3), 6, 3)
    orders = turns(problem, [3, 2, 1])
    eager, lazy = filled(problem, orders, eager=True), filled(problem, orders)
    assert eager.orders != lazy.orders
