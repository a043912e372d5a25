from fractions import Fraction

import numpy as np
import pytest

from scheduler import Action, Costs, Kind, Link, Placement, ScheduleError, by_name, verify


def cost(costs, text):
    return costs.of(Action.parse(text))


def test_by_default_f_i_and_w_cost_one_slot_and_b_two():
    assert [cost(Costs(), text) for text in ("0F0", "0I0", "0W0", "0B0")] == [1, 1, 1, 2]


def test_b_costs_input_plus_weight_unless_it_is_given():
    assert cost(Costs(input=3, weight=4), "0B0") == 7
    assert cost(Costs(input=3, weight=4, backward=5), "0B0") == 5
    assert cost(Costs(backward=0), "0B0") == 0


def test_recompute_is_added_to_b_and_i_alone():
    costs = Costs(recompute=10)
    assert [cost(costs, text) for text in ("0F0", "0I0", "0W0", "0B0")] == [1, 11, 1, 12]
    assert cost(Costs(backward=5, recompute=10), "0B0") == 15


@pytest.mark.parametrize("what, kind", [("forward", "F"), ("input", "I"), ("weight", "W"), ("backward", "B")])
def test_a_cost_is_a_number_or_one_for_each_stage_or_a_function(what, kind):
    action = Action(1, Kind(kind), 3)
    assert Costs(**{what: 7}).of(action) == 7
    assert Costs(**{what: [5, 7]}).of(action) == 7
    assert Costs(**{what: lambda stage, chunk: 10 * stage + chunk}).of(action) == 13


def test_a_link_is_a_number_or_one_for_each_boundary_or_a_function():
    assert Costs(link=3).hop(0, 1) == 3
    assert [Costs(link=[3, 4]).hop(*way) for way in ((0, 1), (1, 0), (1, 2), (2, 1))] == [3, 3, 4, 4]
    assert Costs(link=lambda sender, receiver: 10 * sender + receiver).hop(2, 1) == 21


def test_lists_become_tuples_so_that_costs_are_a_key():
    assert {Costs(forward=[1, 2]): "found"}[Costs(forward=(1, 2))] == "found"


def test_any_real_number_is_a_cost():
    assert cost(Costs(forward=Fraction(1, 3)), "0F0") == Fraction(1, 3)


@pytest.mark.parametrize(
    "what", ["forward", "input", "weight", "backward", "recompute", "link", "message", "speed", "activation", "kept",
             "checkpoint"]
)
@pytest.mark.parametrize("number", [-1, float("nan"), float("inf"), 10**400, "1", 1j, True])
def test_what_is_not_a_cost_is_refused_with_its_name_and_value(what, number):
    with pytest.raises(ScheduleError, match=f"{what} is .*, but must be a finite number"):
        Costs(**{what: number})
    with pytest.raises(ScheduleError, match=f"{what} is "):
        Costs(**{what: [1, number]})


@pytest.mark.parametrize("what", ["forward", "input", "weight", "recompute", "link", "message", "speed", "activation"])
def test_only_what_may_be_left_open_is_none(what):
    assert Costs(backward=None, kept=None, checkpoint=None) == Costs()
    with pytest.raises(ScheduleError, match=f"{what} is None, but must be a finite number"):
        Costs(**{what: None})


@pytest.mark.parametrize("numbers", [{1, 2}, frozenset([1]), b"12", {1: 2}.keys(), {0: 1}])
def test_numbers_without_an_order_are_no_costs_of_stages(numbers):
    with pytest.raises(ScheduleError, match="forward is .*, but must be a finite number"):
        Costs(forward=numbers)


@pytest.mark.parametrize("what", ["message", "speed", "activation", "kept", "checkpoint"])
def test_a_function_where_none_is_asked_is_refused(what):
    with pytest.raises(ScheduleError, match=f"{what} is <function.*, but must be a finite number"):
        Costs(**{what: lambda stage, chunk: 1})


def test_an_array_without_dims_is_one_number():
    assert Costs(forward=np.array(2.0), speed=np.array(4)) == Costs(forward=2.0, speed=4)
    assert Costs(forward=[np.array(2.0), 3]) == Costs(forward=[2.0, 3])
    with pytest.raises(ScheduleError, match="forward is -1.0, but must"):
        Costs(forward=np.array(-1.0))
    assert verify(by_name("1f1b", lanes=2, chunks=4), cap=np.array(2)) is None


def test_numbers_of_numpy_count_as_pythons():
    """Those of uint8 and float16 would overflow when they are added."""
    small, half = np.array([200, 100], dtype=np.uint8), np.array([60000.0, 1.0], dtype=np.float16)
    assert [cost(Costs(input=small, weight=100), f"{stage}B0") for stage in (0, 1)] == [300, 200]
    assert cost(Costs(input=np.uint8(200), weight=np.uint8(200)), "0B0") == 400
    assert cost(Costs(input=half, weight=half), "0B0") == 120_000
    assert cost(Costs(input=lambda stage, chunk: small[stage], weight=lambda stage, chunk: small[0]), "0B0") == 400
    assert Costs(forward=small) == Costs(forward=(200, 100))
    small, lanes = np.uint8(200), (0, 1)
    for link in (small, [small], {lanes: small}, {lanes: Link(small)}, Link(small), Link(small, np.uint8(250)), _small):
        time = Costs(link=link, message=250).hop(0, 1, lanes)
        assert time + 100 in (300, 301)


def _small(sender, receiver):
    return np.uint8(200)


def test_links_that_change_afterwards_change_no_costs():
    links = {(0, 1): 1}
    costs = Costs(link=links)
    links[0, 1] = 2
    assert costs.hop(0, 1, (0, 1)) == 1


def test_a_function_that_gives_no_cost_is_refused_when_it_does():
    with pytest.raises(ScheduleError, match="forward is -1, but"):
        cost(Costs(forward=lambda stage, chunk: -1), "0F0")
    with pytest.raises(ScheduleError, match="link is None, but"):
        Costs(link=lambda sender, receiver: None).hop(0, 1)


def test_lists_for_another_number_of_stages_are_refused():
    Costs(forward=[1, 2], link=[1]).refuse_unless_for(Placement.linear(2))
    with pytest.raises(ScheduleError, match=r"forward lists 2 costs but there are 3 stages \(forward: \(1, 2\)\)"):
        Costs(forward=[1, 2]).refuse_unless_for(Placement.linear(3))
    with pytest.raises(ScheduleError, match=r"link lists 2 costs but there are 1 boundaries"):
        Costs(link=[1, 2]).refuse_unless_for(Placement.linear(2))


def test_a_lane_of_twice_the_speed_takes_half_the_time():
    costs = Costs(forward=3, speed=[1, 2, Fraction(1, 3)])
    assert [costs.of(Action.parse("0F0"), lane) for lane in range(3)] == [3, 1.5, 9]
    assert Costs(forward=3, speed=2).of(Action.parse("0F0")) == 1.5
    assert isinstance(Costs(forward=3).of(Action.parse("0F0"), 5), int)


def test_a_whole_order_costs_what_its_actions_do():
    order = tuple(map(Action.parse, "0F0 2F0 0F1 2B0 0I0 0W0".split()))
    for costs in (Costs(forward=[1, 2, 3], speed=[2, 4]), Costs(forward=lambda stage, chunk: 10 * stage + chunk)):
        assert costs.of_order(1, order) == [costs.of(action, 1) for action in order]


def test_a_link_takes_its_latency_and_what_the_message_needs_to_pass():
    assert Link(latency=2, bandwidth=8).time(64) == 10
    assert Costs(link=Link(2, 8), message=64).hop(1, 0) == 10
    assert [Costs(link=Link(2, 8), message=[64, 8]).hop(*way) for way in ((0, 1), (1, 0), (2, 1))] == [10, 10, 3]
    assert [Costs(link=[1, Link(2, 8)], message=8).hop(*way) for way in ((0, 1), (1, 2))] == [1, 3]
    assert Link(latency=2).time(10**9) == 2


def test_links_may_be_given_for_pairs_of_lanes():
    """Two lanes on one machine, one on another; the stages go 0 1 2 2 1 0 over them."""
    near, far = Link(1), Link(5, bandwidth=2)
    links = {(0, 1): near, (1, 0): near, (1, 2): far, (2, 1): 7}
    hop = Costs(link=links, message=4).hops(Placement.vee(3))
    assert [hop(*way) for way in ((0, 1), (1, 2), (3, 4), (4, 3), (4, 5))] == [1, 7, 7, 7, 1]
    with pytest.raises(ScheduleError, match=r"link has nothing for lanes \(0, 2\) \(between stages 0 and 1\); it has"):
        Costs(link=links).hop(0, 1, (0, 2))


def test_a_speed_or_a_bandwidth_of_0_is_refused():
    for wrong in (lambda: Costs(speed=0), lambda: Costs(speed=[1, 0]), lambda: Link(bandwidth=0)):
        with pytest.raises(ScheduleError, match="is 0, but must be a finite number above 0"):
            wrong()
    with pytest.raises(ScheduleError, match="latency is -1"):
        Link(latency=-1)


def test_lists_for_another_number_of_lanes_or_boundaries_are_refused():
    Costs(speed=[1, 2], message=[1, 2, 3], activation=[1, 2, 3, 4]).refuse_unless_for(Placement.vee(2))
    with pytest.raises(ScheduleError, match="speed lists 3 costs but there are 2 lanes"):
        Costs(speed=[1, 2, 3]).refuse_unless_for(Placement.vee(2))
    with pytest.raises(ScheduleError, match="message lists 4 costs but there are 3 boundaries"):
        Costs(message=[1, 2, 3, 4]).refuse_unless_for(Placement.vee(2))
    with pytest.raises(ScheduleError, match="kept lists 3 costs but there are 4 stages"):
        Costs(kept=[1, 1, 1]).refuse_unless_for(Placement.vee(2))


def test_what_is_kept_is_a_part_of_the_activations():
    assert Costs(activation=[4, 8], kept=[1, 2], checkpoint=0.5).held(1) == (8, 2, 0.5)
    assert Costs(activation=4).held(0) == (4, 4, 4)
    for what in ("kept", "checkpoint"):
        with pytest.raises(ScheduleError, match=f"{what} is 5, but it is a part of the activations, which are 4"):
            Costs(activation=4, **{what: 5}).held(0)
