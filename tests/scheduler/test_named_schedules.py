"""Laws of all named schedules, whatever their kinds and placement; and of gpipe and 1f1b (section 2.1, reference).

Some schedules are not defined for fewer than two chunks a lane: `built` is None there, after a look at their words.
"""

import re
from importlib import import_module
from inspect import signature
from itertools import product
from math import inf
from pkgutil import iter_modules

import pytest
from cover import either

from scheduler import Costs, Kind, Schedule, ScheduleError, by_name, names, schedules, simulate, verify

SIZES = list(either(product(range(1, 6), (1, 2, 3, 4, 5, 8, 11)), product(range(1, 7), range(1, 13))))


def built(name, lanes, chunks):
    try:
        return by_name(name, lanes, chunks)
    except ScheduleError as error:
        least = re.search(r"Use chunks=(\d+) or more", str(error))
        assert least and chunks < int(least[1]) <= 2 * lanes, error
        assert by_name(name, lanes, int(least[1])).chunks == int(least[1])
        return None


def files():
    found = [module.name for module in iter_modules(schedules.__path__) if not module.name.startswith("_")]
    return [import_module(f"scheduler.schedules.{name}") for name in found]


@pytest.mark.parametrize("name", names())
def test_named_schedules_are_right_at_every_size_or_refused_with_one_that_is(name):
    for lanes, chunks in SIZES:
        schedule = built(name, lanes, chunks)
        if schedule:
            assert (schedule.name, schedule.lanes, schedule.chunks) == (name, lanes, chunks)
            assert {len(schedule.placement.stages_of(lane)) for lane in range(lanes)} == {schedule.stages // lanes}
            verify(schedule)


@pytest.mark.parametrize("name", names())
def test_two_chunks_a_lane_are_enough_for_every_schedule(name):
    for lanes in range(1, 9):
        for chunks in range(2 * lanes, 2 * lanes + 4):
            verify(by_name(name, lanes, chunks))


@pytest.mark.parametrize("name", names())
def test_chunks_go_backward_in_ascending_order_on_every_stage(name):
    for schedule in filter(None, (built(name, *size) for size in SIZES)):
        order = [action for lane in schedule.orders for action in lane]  # each stage is on one lane
        for stage in range(schedule.stages):
            backward = [chunk for at, kind, chunk in order if at == stage and kind.is_backward]
            weights = [chunk for at, kind, chunk in order if at == stage and kind is Kind.W]
            assert backward == list(range(schedule.chunks))
            assert weights == [chunk for at, chunk in sorted(schedule.split) if at == stage]


@pytest.mark.parametrize("name", names())
def test_one_lane_is_never_idle(name):
    for chunks in range(2, 7):
        assert simulate(by_name(name, 1, chunks)).bubble == 0


@pytest.mark.parametrize("name", names())
def test_what_a_named_schedule_prints_reads_back(name):
    schedule = by_name(name, 3, 7)
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("forward, backward", [(1, 2), (3, 1), (1, 1), (2, 5)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_makespan_is_chunks_plus_stages_minus_1_times_f_plus_b(name, forward, backward):
    for lanes, chunks in SIZES:
        timeline = simulate(by_name(name, lanes, chunks), Costs(forward=forward, backward=backward))
        assert timeline.makespan == (chunks + lanes - 1) * (forward + backward)
        assert timeline.bubble == pytest.approx((lanes - 1) / (chunks + lanes - 1))


def test_gpipe_holds_all_chunks_in_flight():
    for lanes, chunks in SIZES:
        assert simulate(by_name("gpipe", lanes, chunks)).peak_in_flight == (chunks,) * lanes


def test_1f1b_holds_at_most_stages_left_chunks_in_flight():
    for lanes, chunks in SIZES:
        peaks = simulate(by_name("1f1b", lanes, chunks)).peak_in_flight
        assert peaks == tuple(min(chunks, lanes - lane) for lane in range(lanes))


def test_with_links_gpipe_idles_lanes_minus_1_times_t_plus_two_links_and_1f1b_no_less():
    costs = Costs(forward=3, backward=5, link=2)
    for lanes, chunks in SIZES:
        one, all_first = (simulate(by_name(name, lanes, chunks), costs).makespan for name in ("1f1b", "gpipe"))
        assert one >= all_first == chunks * (3 + 5) + (lanes - 1) * (3 + 5 + 2 * 2)


def test_the_same_call_gives_the_same_object():
    assert by_name("1f1b", lanes=4, chunks=8) is by_name("1f1b", lanes=4, chunks=8)
    assert by_name("eager-1f1b", 2, 4, warmup=[3, 1]) is by_name("eager-1f1b", 2, 4, warmup=(3, 1))
    assert by_name("eager-1f1b", 2, 4, warmup=[3, 1]) is not by_name("eager-1f1b", 2, 4, warmup=[3, 2])


def test_a_builder_keeps_what_a_list_held_when_it_was_given():
    warmup = [3, 1]
    before = by_name("eager-1f1b", 2, 4, warmup=warmup)
    warmup[1] = 2
    assert by_name("eager-1f1b", 2, 4, warmup=warmup) != before == by_name("eager-1f1b", 2, 4, warmup=[3, 1])


def test_names_are_sorted_and_hold_the_first_two():
    assert names() == tuple(sorted(names()))
    assert {"gpipe", "1f1b"} <= set(names())


def test_every_file_has_schedules_and_no_two_have_one_of_the_same_name():
    found = [name for file in files() for name in file.BUILDERS]
    assert all(file.BUILDERS for file in files())
    assert sorted(found) == list(names())


def test_every_builder_takes_lanes_and_chunks_and_has_a_default_for_the_rest():
    for file in files():
        for build in file.BUILDERS.values():
            lanes, chunks, *options = signature(build).parameters.values()
            assert (lanes.name, chunks.name) == ("lanes", "chunks")
            assert all(option.default is not option.empty for option in options)


@pytest.mark.parametrize("wrong, near", [("1f1", "1f1b"), ("GPipe", "gpipe"), ("gpip", "gpipe"), (None, "")])
def test_an_unknown_name_is_refused_with_the_nearest_one(wrong, near):
    with pytest.raises(ScheduleError, match=f"no schedule {wrong!r}; there are .*1f1b.*gpipe.* mean '{near}"):
        by_name(wrong, 2, 2)


@pytest.mark.parametrize("number", [0, -1, 2.0, inf, "2", True, [2]])
@pytest.mark.parametrize("name", names())
def test_lanes_and_chunks_that_are_not_counts_are_refused(name, number):
    with pytest.raises(ScheduleError, match="lanes is .*, but must be a whole number of at least 1"):
        by_name(name, number, 2)
    with pytest.raises(ScheduleError, match="chunks is .*, but must be a whole number of at least 1"):
        by_name(name, 2, number)


@pytest.mark.parametrize("name", ["1f1", None, ["1f1b"], {"1f1b": 2}])
def test_an_unknown_name_is_refused_with_those_that_there_are(name):
    with pytest.raises(ScheduleError, match=r"there is no schedule .*; there are 1f1b, .* Did you mean '"):
        by_name(name, 2, 2)


def test_an_unknown_option_is_refused_with_those_that_the_schedule_takes():
    with pytest.raises(ScheduleError, match="interleaved takes no option v; it takes stages_per_lane=2 by default"):
        by_name("interleaved", 2, 2, v=2)
    with pytest.raises(ScheduleError, match="1f1b takes no option warmup, depth; it takes none. Drop warmup, depth"):
        by_name("1f1b", 2, 2, warmup=1, depth=3)


def test_an_option_that_could_change_is_refused():
    with pytest.raises(ScheduleError, match="warmup is {0: 1}, but must be a number, a text, or a list of these"):
        by_name("eager-1f1b", 2, 2, warmup={0: 1})


def test_a_wrong_value_is_refused_although_an_equal_right_one_was_taken():
    by_name("1f1b", 1, 1)
    with pytest.raises(ScheduleError, match="lanes is True, but must be a whole number"):
        by_name("1f1b", True, 1)
    with pytest.raises(ScheduleError, match="chunks is 1.0, but must be a whole number"):
        by_name("1f1b", 1, 1.0)
    by_name("eager-1f1b", 2, 4, warmup=(2, 1))
    by_name("interleaved", 2, 4, stages_per_lane=1)
    with pytest.raises(ScheduleError, match=r"warmup\[1\] is True, but must be a whole number"):
        by_name("eager-1f1b", 2, 4, warmup=(2, True))
    with pytest.raises(ScheduleError, match="stages_per_lane is 1.0, but must be a whole number"):
        by_name("interleaved", 2, 4, stages_per_lane=1.0)


@pytest.mark.parametrize("lanes, chunks", [(1, 10**9), (10**9, 1), (512, 513)])
def test_more_actions_than_anyone_could_list_are_refused_before_they_are_made(lanes, chunks):
    for name in names():
        with pytest.raises(ScheduleError, match=f"lanes is {lanes} and chunks {chunks}, .* Use fewer chunks"):
            by_name(name, lanes, chunks)
