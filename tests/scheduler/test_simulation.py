import random
from fractions import Fraction

import pytest
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_strategies import depends, schedules

from scheduler import Action, Costs, Kind, Link, Placement, Schedule, ScheduleError, by_name, draw, simulate, verify
from scheduler.action import COMPUTE


def slow_times(schedule, costs):
    """Longest paths by fixed point: start everything at 0, and push starts until nothing moves."""
    starts = {action: 0 for action in schedule.actions}
    lane_of = schedule.placement.lane_of
    while True:
        before = dict(starts)
        for order in schedule.orders:
            for position, action in enumerate(order):
                lane = lane_of[action.stage]
                ready = [starts[order[position - 1]] + costs.of(order[position - 1], lane)] if position else [0]
                for other in schedule.actions:
                    if depends(action, other, schedule.stages):
                        ways = lane_of[other.stage], lane
                        hop = costs.hop(other.stage, action.stage, ways) if ways[0] != ways[1] else 0
                        ready.append(starts[other] + costs.of(other, ways[0]) + hop)
                starts[action] = max(ready)
        if starts == before:
            return starts


def any_costs(schedule, dice):
    """Whole numbers and fractions: times are exact."""
    lanes = range(schedule.lanes)
    links = [
        0, 2, [dice.randrange(4) for _ in range(schedule.stages - 1)], Link(1, Fraction(2)),
        {(one, other): dice.choice([dice.randrange(4), Link(1, Fraction(4))]) for one in lanes for other in lanes},
        lambda sender, receiver: (sender + 2 * receiver) % 3,
    ]
    turn = dice.randrange(7)
    return Costs(
        forward=lambda stage, chunk: (3 * stage + 5 * chunk + turn) % 7,
        input=[dice.randrange(5) for _ in range(schedule.stages)],
        weight=dice.randrange(5),
        backward=dice.choice([None, 6]),
        recompute=lambda stage, chunk: (stage + chunk) % 2,
        link=dice.choice(links),
        message=dice.choice([3, [Fraction(dice.randrange(9)) for _ in range(schedule.stages - 1)]]),
        speed=dice.choice([1, [Fraction(dice.randrange(1, 4)) for _ in lanes]]),
    )


@settings(derandomize=True, deadline=None, max_examples=examples(150))
@given(schedules(), st.integers(0, 2**32))
def test_simulate_gives_the_longest_paths_for_any_order_and_any_costs(schedule, seed):
    costs = any_costs(schedule, random.Random(seed))
    timeline = simulate(schedule, costs)
    assert {event.action: event.start for event in timeline.events} == slow_times(schedule, costs)
    assert all(event.duration == costs.of(event.action, event.lane) for event in timeline.events)
    assert all(schedule.placement.lane_of[event.action.stage] == event.lane for event in timeline.events)
    assert len(timeline.events) == len(schedule.actions)


@settings(derandomize=True, deadline=None, max_examples=examples(30))
@given(schedules())
def test_events_are_sorted_by_start_and_each_lane_keeps_its_order(schedule):
    timeline = simulate(schedule)
    starts = [event.start for event in timeline.events]
    assert starts == sorted(starts)
    for lane, order in enumerate(schedule.orders):
        assert tuple(event.action for event in timeline.by_lane[lane]) == order


def test_links_count_between_lanes_only():
    """In a vee the last lane hosts both middle stages: nothing travels there."""
    turn = Schedule.parse("schedule v, chunks 1, stages on lanes 0 1 1 0\nlane 0: 0F0 3F0\nlane 1: 1F0 2F0")
    assert simulate(turn, Costs(link=10)).makespan == 4 + 2 * 10


def test_whole_numbers_stay_whole():
    assert isinstance(simulate(by_name("1f1b", 3, 4)).makespan, int)


def test_floats_give_the_closed_form_but_for_rounding():
    assert simulate(by_name("1f1b", 3, 7), Costs(0.1, 0.2, 0.7)).makespan == pytest.approx(9 * 1.0)


def test_costs_for_another_number_of_stages_are_refused_by_simulate():
    with pytest.raises(ScheduleError, match="forward lists 2 costs but there are 3 stages"):
        simulate(by_name("gpipe", 3, 2), Costs(forward=[1, 2]))


def test_what_cannot_end_is_refused_with_each_stuck_lane_and_its_cell():
    wrong = Schedule.parse(
        """
        schedule wrong, chunks 2, stages on lanes 0 1
        lane 0: 0F0 0B0 0F1 0B1
        lane 1: 1F0 1F1 1B0 1B1
        """
    )
    with pytest.raises(ScheduleError) as error:
        simulate(wrong)
    assert str(error.value).splitlines() == [
        "schedule wrong (lanes=2, chunks=2) has 2 faults:",
        "  cannot end: lane 0 waits at 0B0 for 1B0, which lane 1 runs after 1F1.",
        "  cannot end: lane 1 waits at 1F1 for 0F1, which lane 0 runs after 0B0.",
        "lane 0 |F0  B0! F1  B1",
        "lane 1 |F0  F1! B0  B1",
    ]


def test_half_a_schedule_that_can_end_is_simulated():
    schedule = by_name("1f1b", 3, 5)
    forward = Schedule("forward", schedule.placement, 5, schedule.forward_half())
    assert simulate(forward).makespan == 3 + 5 - 1


wrong_actions = st.builds(Action, st.integers(-1, 2), st.sampled_from(COMPUTE), st.integers(-1, 1))
wrong_orders = st.lists(wrong_actions, max_size=6).map(tuple)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(st.tuples(wrong_orders, wrong_orders))
def test_any_wrong_schedule_is_simulated_and_drawn_or_refused_in_words(orders):
    schedule = Schedule("wrong", Placement.linear(2), 1, orders)
    with pytest.raises(ScheduleError, match="has [0-9]+ faults?:"):
        verify(schedule)
    try:
        assert draw(simulate(schedule)).count("lane") == 2
    except ScheduleError as error:
        assert "cannot end: lane" in str(error) or "but there are 2 stages and 1 chunks" in str(error)


def test_a_split_and_a_whole_backward_of_one_pair_are_simulated_for_what_they_are():
    both = Schedule.parse("schedule both, chunks 1, stages on lanes 0 1\nlane 0: 0F0 0B0\nlane 1: 1F0 1I0 1B0")
    assert simulate(both).makespan == 5


def test_a_schedule_that_runs_an_action_twice_is_simulated_for_what_it_is():
    twice = Schedule.parse("schedule twice, chunks 1, stages on lanes 0 1\nlane 0: 0F0 0F0 0B0\nlane 1: 1F0 1B0")
    assert simulate(twice).makespan == 6


def test_what_a_block_gives_is_there_early_or_with_the_block():
    text = "schedule mine, chunks 2, stages on lanes 0 1\nlane 0: 0F0 0F1+0B0 0B1\nlane 1: 1F0 1B0 1F1 1B1"
    schedule = Schedule.parse(text)
    early, block = (starts(simulate(schedule, release=release)) for release in ("early", "block"))
    assert early["1F1"] == 4 and block["1F1"] == 6  # 0F1 from 1 to 2, 0B0 from 4 to 6, 1B0 from 2 to 4
    assert {name for name in early if early[name] != block[name]} == {"1F1", "1B1", "0B1"}


def starts(timeline):
    return {str(event.action): event.start for event in timeline.events}


def test_without_blocks_the_release_makes_no_difference():
    schedule = by_name("1f1b", 4, 8)
    assert simulate(schedule, release="block") == simulate(schedule)


def test_an_unknown_release_is_refused():
    with pytest.raises(ScheduleError, match="release is 'late', but outputs of a block are there 'early' or with the"):
        simulate(by_name("1f1b", 2, 2), release="late")


def test_a_block_whose_second_action_needs_its_first_cannot_end_where_both_are_released_together():
    wrong = Schedule.parse("schedule mine, chunks 1, stages on lanes 0\nlane 0: 0F0+0B0")
    assert simulate(wrong).makespan == 3
    with pytest.raises(ScheduleError, match="cannot end: lane 0 waits at 0B0 for 0F0"):
        simulate(wrong, release="block")


def test_what_does_not_exist_is_not_simulated():
    with pytest.raises(ScheduleError, match="lane 0 runs 7F0, but there are 1 stages and 1 chunks, numbered from 0"):
        simulate(Schedule.parse("schedule mine, chunks 1, stages on lanes 0\nlane 0: 7F0"))
    huge = Schedule.parse("schedule mine, chunks 1, stages on lanes 0\nlane 0: 99999999999999999999F0")
    with pytest.raises(ScheduleError, match="lane 0 runs 99999999999999999999F0, but there are"):
        simulate(huge)


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(schedules(), st.integers(0, 2**32))
def test_no_lane_ends_before_the_way_to_it_its_work_and_the_way_back(schedule, seed):
    """For one chunk the way there and back is all there is."""
    costs = any_costs(schedule, random.Random(seed))
    one = Schedule("one", schedule.placement, 1, tuple(
        tuple(action for action in order if action.chunk == 0) for order in schedule.orders
    ))
    if not any(action.kind is Kind.W for action in one.actions):
        lane_of = schedule.placement.lane_of
        way = sum(costs.of(action, lane_of[action.stage]) for action in one.actions)
        for stage in range(schedule.stages - 1):
            ways = lane_of[stage], lane_of[stage + 1]
            if ways[0] != ways[1]:
                way += costs.hop(stage, stage + 1, ways) + costs.hop(stage + 1, stage, ways[::-1])
        assert simulate(one, costs).makespan == way
