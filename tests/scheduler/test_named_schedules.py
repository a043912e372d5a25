"""Laws of the named schedules, section 2.1 of reference/schedules.md: T_F and T_B are what F and B of a chunk cost."""

from math import inf

import pytest

from scheduler import Costs, Kind, ScheduleError, by_name, names, simulate, verify

SIZES = [(lanes, chunks) for lanes in range(1, 7) for chunks in range(1, 13)]


@pytest.mark.parametrize("lanes, chunks", SIZES)
@pytest.mark.parametrize("name", names())
def test_named_schedules_are_right_at_every_size(name, lanes, chunks):
    schedule = by_name(name, lanes, chunks)
    assert (schedule.name, schedule.lanes, schedule.chunks) == (name, lanes, chunks)
    verify(schedule)


@pytest.mark.parametrize("forward, backward", [(1, 2), (3, 1), (1, 1), (2, 5)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_makespan_is_chunks_plus_stages_minus_1_times_f_plus_b(name, forward, backward):
    for lanes, chunks in SIZES:
        timeline = simulate(by_name(name, lanes, chunks), Costs(forward=forward, backward=backward))
        assert timeline.makespan == (chunks + lanes - 1) * (forward + backward)
        assert timeline.bubble == pytest.approx((lanes - 1) / (chunks + lanes - 1))


@pytest.mark.parametrize("lanes, chunks", SIZES)
def test_gpipe_holds_all_chunks_in_flight(lanes, chunks):
    assert simulate(by_name("gpipe", lanes, chunks)).peak_in_flight == (chunks,) * lanes


@pytest.mark.parametrize("lanes, chunks", SIZES)
def test_1f1b_holds_at_most_stages_left_chunks_in_flight(lanes, chunks):
    assert simulate(by_name("1f1b", lanes, chunks)).peak_in_flight == tuple(
        min(chunks, lanes - lane) for lane in range(lanes)
    )


@pytest.mark.parametrize("lanes, chunks", SIZES)
def test_gpipe_idles_lanes_minus_1_times_t_plus_two_links(lanes, chunks):
    timeline = simulate(by_name("gpipe", lanes, chunks), Costs(forward=3, backward=5, link=2))
    assert timeline.makespan - chunks * (3 + 5) == (lanes - 1) * (3 + 5 + 2 * 2)


@pytest.mark.parametrize("lanes, chunks", SIZES)
def test_1f1b_with_links_is_no_faster_than_gpipe(lanes, chunks):
    costs = Costs(forward=3, backward=5, link=2)
    one, all_first = (simulate(by_name(name, lanes, chunks), costs).makespan for name in ("1f1b", "gpipe"))
    assert one >= all_first


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_worked_values_of_the_reference(name):
    """Section 2.3, with T_F = T_I = T_W."""
    for lanes, chunks, bubble in [(4, 8, 0.2727), (4, 64, 0.0448), (8, 8, 0.4667), (8, 64, 0.0986), (16, 64, 0.1899)]:
        assert simulate(by_name(name, lanes, chunks)).bubble == pytest.approx(bubble, abs=5e-5)


@pytest.mark.parametrize("lanes, chunks", SIZES)
@pytest.mark.parametrize("name", names())
def test_chunks_go_backward_in_ascending_order_on_every_stage(name, lanes, chunks):
    for order in by_name(name, lanes, chunks).orders:
        assert [action.chunk for action in order if action.kind is Kind.B] == list(range(chunks))


def test_the_same_call_gives_the_same_object():
    assert by_name("1f1b", lanes=4, chunks=8) is by_name("1f1b", lanes=4, chunks=8)


def test_names_are_sorted_and_hold_the_first_two():
    assert names() == tuple(sorted(names()))
    assert {"gpipe", "1f1b"} <= set(names())


@pytest.mark.parametrize("wrong, near", [("1f1", "1f1b"), ("GPipe", "gpipe"), ("gpip", "gpipe"), (None, "")])
def test_an_unknown_name_is_refused_with_the_nearest_one(wrong, near):
    with pytest.raises(ScheduleError, match=f"no schedule {wrong!r}; there are .*1f1b.*gpipe.* mean '{near}"):
        by_name(wrong, 2, 2)


@pytest.mark.parametrize("number", [0, -1, 2.0, inf, "2", True])
def test_lanes_and_chunks_that_are_not_counts_are_refused(number):
    with pytest.raises(ScheduleError, match="lanes is .*, but must be a whole number of at least 1"):
        by_name("1f1b", number, 2)
    with pytest.raises(ScheduleError, match="chunks is .*, but must be a whole number of at least 1"):
        by_name("1f1b", 2, number)
