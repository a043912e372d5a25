"""Taking what is there gives a right plan for every placement, memory and costs, and a good one on a line and a vee."""

from itertools import product

import pytest

from scheduler import Costs, Placement, ScheduleError, by_name, simulate, verify
from scheduler.searches.dispatching import dispatch, in_flight_limits
from scheduler.searches.formulation import pose
from scheduler.searches.incremental_timing import IncrementalTiming, value_of

PLACEMENTS = [Placement.linear(1), Placement.linear(3), Placement.linear(6), Placement.vee(1), Placement.vee(3),
              Placement.loop(2, 4), Placement.loop(3, 7), Placement((0, 0, 1, 2, 1))]


def dispatched(problem):
    return [dispatch(problem, most, eager) for most in (None, *in_flight_limits(problem)) for eager in (False, True)]


@pytest.mark.parametrize("chunks", [1, 2, 5, 9])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: "".join(map(str, placement.lane_of)))
def test_lanes_that_take_what_is_there_come_to_an_end_and_fit(placement, chunks):
    checked = 0
    for memory, checkpoint, split in product((None, 1, 1.5, 2, 3, 5), (None, 0.25), (True, False)):
        costs = Costs(2, 2.5, 1.5, recompute=0.3, link=0.25, kept=0.4, checkpoint=checkpoint)
        try:
            problem = pose(costs, placement, chunks, memory, split=split)
        except ScheduleError:  # not even one chunk fits
            continue
        for plan in dispatched(problem):
            schedule = problem.schedule(plan, "dispatched")
            verify(schedule)
            timeline = simulate(schedule, costs)
            assert timeline.makespan == pytest.approx(value_of(problem, plan))
            assert IncrementalTiming(problem, plan).fits() and problem.allows(plan)
            assert all(peak <= cap for peak, cap in zip(timeline.peak_memory, problem.caps))
            assert split or not schedule.split
            checked += 1
    assert checked >= 4


def test_room_is_left_for_what_is_recomputed_on_the_way_back():
    """Where the last stage of a lane holds much only while it is recomputed."""
    costs = Costs(activation=(2, 3, 3, 5, 2, 2), checkpoint=(0.5, 3, 0.75, 1.25, 1, 2), kept=(1, 0, 1.5, 0, 0, 1))
    problem = pose(costs, Placement.vee(3), 8, 10)
    for plan in dispatched(problem):
        verify(problem.schedule(plan, "dispatched"))


@pytest.mark.parametrize("lanes, chunks", [(4, 4), (8, 8), (16, 16), (8, 16), (4, 8)])
def test_on_a_vee_with_a_lanes_memory_the_flush_is_the_shortest_there_is(lanes, chunks):
    """Section 2.3: 6 m + p - 1 slots; torch's static table needs more where chunks < 2 lanes - 1."""
    problem = pose(Costs(), Placement.vee(lanes), chunks, 2 * lanes)
    assert min(value_of(problem, plan) for plan in dispatched(problem)) == 6 * chunks + lanes - 1


@pytest.mark.parametrize("lanes, chunks", [(2, 6), (4, 8), (4, 12), (8, 16)])
def test_zb_h1_is_found_where_memory_is_what_1f1b_takes(lanes, chunks):
    problem = pose(Costs(), Placement.linear(lanes), chunks, lanes)
    best = min(value_of(problem, plan) for plan in dispatched(problem))
    assert best == value_of(problem, problem.plan(by_name("zb-h1", lanes, chunks))) == 3 * chunks + lanes - 1


def test_chunks_in_flight_fall_from_stage_to_stage_and_are_never_more():
    for lanes in (1, 2, 5, 8):
        problem = pose(Costs(3, 3, 2), Placement.linear(lanes), 20)
        for most in in_flight_limits(problem):
            assert most == sorted(most, reverse=True) and most[-1] == 1 <= most[0] <= 2 * lanes
            timeline = simulate(problem.schedule(dispatch(problem, most), "one"), Costs(3, 3, 2, kept=0))
            assert all(peak <= count for peak, count in zip(timeline.peak_memory, most))


def test_an_eager_lane_never_waits_with_a_weight_at_hand():
    problem = pose(Costs(3, 3, 2), Placement.linear(3), 6, 3)
    eager, lazy = dispatch(problem, [3, 2, 1], eager=True), dispatch(problem, [3, 2, 1])
    assert eager.orders != lazy.orders
