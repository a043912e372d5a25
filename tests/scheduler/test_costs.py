from fractions import Fraction

import pytest

from scheduler import Action, Costs, Kind, ScheduleError


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


@pytest.mark.parametrize("what", ["forward", "input", "weight", "backward", "recompute", "link"])
@pytest.mark.parametrize("number", [-1, float("nan"), float("inf"), "1", 1j])
def test_what_is_not_a_cost_is_refused_with_its_name_and_value(what, number):
    with pytest.raises(ScheduleError, match=f"{what} costs .*, but time is a finite number that is not negative"):
        Costs(**{what: number})
    with pytest.raises(ScheduleError, match=f"{what} costs "):
        Costs(**{what: [1, number]})


def test_a_function_that_gives_no_cost_is_refused_when_it_does():
    with pytest.raises(ScheduleError, match="forward costs -1, but"):
        cost(Costs(forward=lambda stage, chunk: -1), "0F0")
    with pytest.raises(ScheduleError, match="link costs None, but"):
        Costs(link=lambda sender, receiver: None).hop(0, 1)


def test_lists_for_another_number_of_stages_are_refused():
    Costs(forward=[1, 2], link=[1]).refuse_unless_for(2)
    with pytest.raises(ScheduleError, match=r"forward lists 2 costs but there are 3 stages \(forward: \(1, 2\)\)"):
        Costs(forward=[1, 2]).refuse_unless_for(3)
    with pytest.raises(ScheduleError, match=r"link lists 2 costs but there are 1 boundaries"):
        Costs(link=[1, 2]).refuse_unless_for(2)
