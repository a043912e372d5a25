"""Numbers say the same as words: plans and schedules, levels and `peak_memory`, waits and `requires`."""

import pytest
from search_cases import unequal

from scheduler import Costs, Kind, Placement, Schedule, ScheduleError, by_name, names, requires, simulate, verify
from scheduler.searches.dispatching import dispatch
from scheduler.searches.formulation import one_chunk_peak, pose
from scheduler.searches.incremental_timing import IncrementalTiming, value_of


def named(lanes, chunks):
    for name in names():
        try:
            yield by_name(name, lanes, chunks)
        except ScheduleError:  # not for so few chunks
            continue


@pytest.mark.parametrize("lanes, chunks", [(1, 1), (2, 3), (4, 8), (3, 12)])
def test_a_plan_has_the_value_of_its_schedule_and_fits_where_that_does(lanes, chunks):
    for schedule in named(lanes, chunks):
        costs = Costs(2, 3, 2, backward=6, link=0.5, kept=0.4, checkpoint=0.25, recompute=1)  # B is dear: all is split
        problem = pose(costs, schedule.placement, chunks, objective="span")
        plan = problem.plan(schedule)
        back = problem.schedule(plan, "back")
        verify(back)
        timeline = simulate(back, costs)
        spans = [row[-1].end - row[0].start for row in timeline.by_lane]
        assert value_of(problem, plan) == pytest.approx(max(spans))
        peaks = timeline.peak_memory
        assert IncrementalTiming(pose(costs, schedule.placement, chunks, peaks), plan).fits()
        for lane in range(lanes):
            less = [peak * 0.999 if lane == other else peak for other, peak in enumerate(peaks)]
            if less[lane] >= one_chunk_peak(schedule.placement.stages_of(lane), problem.held):
                assert not IncrementalTiming(pose(costs, schedule.placement, chunks, less), plan).fits()


def test_whole_backwards_stay_whole_where_halves_take_longer():
    for schedule in named(4, 8):
        problem = pose(Costs(1, 1, 1, backward=1.5), schedule.placement, 8)
        plan = problem.plan(schedule)
        assert problem.schedule(plan, schedule.name).orders == schedule.orders
        assert problem.allows(plan)
        assert problem.schedule(problem.with_whole(plan), "whole").split == frozenset()


@pytest.mark.parametrize("placement", [Placement.linear(3), Placement.vee(2), Placement.loop(2, 5)])
def test_every_need_is_on_the_lane_or_a_message(placement):
    problem = pose(Costs(link=2), placement, 3)
    plan = dispatch(problem)
    schedule = problem.schedule(plan, "one")
    for action in schedule.actions:
        number = problem.number(action)
        needs = {problem.number(need) for need in requires(action, placement.stages, schedule.split)}
        away = {need for need in needs if problem.lane[need] != problem.lane[number]}
        assert away == {problem.messages.sender[number]} - {problem.count}
        assert needs - away <= problem.near[number]
        assert all(problem.messages.receiver[need] == number for need in away)
        assert problem.messages.travel[number] == (2 if away else 0)


def test_forwards_that_do_not_ascend_are_no_plan():
    problem = pose(Costs(), Placement.linear(1), 2)
    schedule = Schedule.parse("schedule crossed, chunks 2, stages on lanes 0\nlane 0: 0F1 0F0 0B0 0B1")
    verify(schedule)
    assert not problem.allows(problem.plan(schedule))


def test_where_nothing_may_be_split_there_are_two_kinds():
    problem = pose(unequal(0, 3), Placement.linear(3), 4, split=False)
    assert problem.count == 2 * 3 * 4
    assert {action.kind for action in problem.schedule(dispatch(problem), "whole").actions} == {Kind.F, Kind.B}


def test_one_chunk_alone_holds_what_simulate_says():
    for placement in (Placement.linear(3), Placement.vee(2), Placement.loop(2, 6)):
        stages = range(placement.stages)
        for low in (None, [0.25 * (1 + stage) for stage in stages]):
            costs = Costs(activation=[2 + stage % 3 for stage in stages], checkpoint=low, kept=0.5)
            problem = pose(costs, placement, 1)
            peaks = simulate(problem.schedule(problem.with_whole(dispatch(problem)), "alone"), costs).peak_memory
            stages_of_lanes = map(placement.stages_of, range(placement.lanes))
            assert peaks == tuple(one_chunk_peak(stages, problem.held) for stages in stages_of_lanes)
