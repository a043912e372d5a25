import pytest

from scheduler import Placement, ScheduleError


@pytest.mark.parametrize("lanes", range(1, 7))
def test_every_stage_is_on_exactly_one_lane(lanes):
    for placement in (Placement.linear(lanes), Placement.loop(lanes, 2 * lanes + 1), Placement.vee(lanes)):
        hosted = [stage for lane in range(placement.lanes) for stage in placement.stages_of(lane)]
        assert placement.lanes == lanes
        assert sorted(hosted) == list(range(placement.stages))


def test_linear_loop_and_vee_are_what_their_names_say():
    assert Placement.linear(3).lane_of == (0, 1, 2)
    assert Placement.loop(3, 6).lane_of == (0, 1, 2, 0, 1, 2)
    assert Placement.vee(3).lane_of == (0, 1, 2, 2, 1, 0)
    assert Placement.vee(3).stages_of(1) == (1, 4)


def test_equal_placements_are_one_key():
    assert {Placement.linear(2): "found"}[Placement((0, 1))] == "found"


def test_a_placement_without_stages_is_refused():
    with pytest.raises(ScheduleError, match=r"lane_of is \(\), but must be a tuple with the lane of each stage"):
        Placement(())


def test_a_placement_that_is_no_tuple_is_refused():
    with pytest.raises(ScheduleError, match=r"lane_of is \[0, 1\], but must be a tuple"):
        Placement([0, 1])


@pytest.mark.parametrize("lane", [-1, 0.0, True, "0"])
def test_a_lane_that_is_no_whole_number_is_refused(lane):
    with pytest.raises(ScheduleError, match=r"lane_of\[1\] is .*, but must be a whole number of at least 0"):
        Placement((0, lane))


def test_lanes_without_a_stage_are_refused():
    with pytest.raises(ScheduleError, match=r"lanes \[0, 2\] host no stage .*without a gap"):
        Placement((1, 3))


def test_a_loop_with_fewer_stages_than_lanes_is_refused():
    with pytest.raises(ScheduleError, match="stages is 2, but must be a whole number of at least 3"):
        Placement.loop(3, 2)


@pytest.mark.parametrize("make", [Placement.linear, Placement.vee, lambda lanes: Placement.loop(lanes, 4)])
def test_no_lanes_are_refused(make):
    with pytest.raises(ScheduleError, match="lanes is 0, but must be a whole number of at least 1"):
        make(0)
