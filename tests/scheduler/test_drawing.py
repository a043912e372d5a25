from fractions import Fraction

import pytest
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_strategies import schedules

from scheduler import Action, Costs, Event, Kind, Schedule, ScheduleError, Timeline, by_name, draw, simulate, svg


def golden(text):
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_1f1b_is_drawn_with_b_of_two_slots():
    assert draw(by_name("1f1b", 3, 4)) == golden("""
        lane 0 |F0 F1 F2 .  .  .  .  B0 == F3 B1 == .  B2 == .  B3 ==
        lane 1 |.  F0 F1 .  .  B0 == F2 B1 == F3 B2 == .  B3 == .  .
        lane 2 |.  .  F0 B0 == F1 B1 == F2 B2 == F3 B3 == .  .  .  .
        makespan 18 slots, bubble 33.3%, peak in flight 3 2 1
    """)


def test_i_and_w_are_drawn_as_one_slot_each():
    split = Schedule.parse("schedule s, chunks 1, stages on lanes 0 1\nlane 0: 0F0 0I0 0W0\nlane 1: 1F0 1I0 1W0")
    assert draw(split) == golden("""
        lane 0 |F0 .  .  I0 W0
        lane 1 |.  F0 I0 W0 .
        makespan 5 slots, bubble 40.0%, peak in flight 1 1
    """)


def test_a_lane_with_several_stages_puts_the_stage_in_front():
    vee = Schedule.parse("""
        schedule v, chunks 1, stages on lanes 0 1 1 0
        lane 0: 0F0 3F0 3B0 0B0
        lane 1: 1F0 2F0 2B0 1B0
    """)
    assert draw(vee) == golden("""
        lane 0 |0F0 .   .   3F0 3B0 ==  .   .   .   .   0B0 ==
        lane 1 |.   1F0 2F0 .   .   .   2B0 ==  1B0 ==  .   .
        makespan 12 slots, bubble 50.0%, peak in flight 2 2
    """)


def test_a_slot_is_the_longest_that_all_times_are_multiples_of():
    schedule = by_name("gpipe", 2, 2)
    assert draw(simulate(schedule, Costs(0.5, backward=1.0))).splitlines()[:2] == draw(schedule).splitlines()[:2]
    third = Costs(Fraction(1, 3), backward=Fraction(2, 3))
    assert draw(simulate(schedule, third)).splitlines()[:2] == draw(schedule).splitlines()[:2]
    assert draw(simulate(by_name("gpipe", 2, 1), Costs(2, backward=2, link=1))) == golden("""
        lane 0 |F0 == .  .  .  .  .  .  B0 ==
        lane 1 |.  .  .  F0 == B0 == .  .  .
        makespan 10 slots, bubble 60.0%, peak in flight 1 1
    """)


def test_times_without_a_sensible_common_slot_are_drawn_as_shares_of_the_makespan():
    timeline = simulate(by_name("gpipe", 1, 1), Costs(100, backward=201))
    row = draw(timeline).splitlines()[0].removeprefix("lane 0 |").split()
    assert len(row) == 40
    assert (row.index("F0"), row.index("B0")) == (0, 13)


def test_a_short_action_beside_a_long_one_makes_no_endless_row():
    row = draw(simulate(by_name("gpipe", 1, 1), Costs(1, backward=10**12))).splitlines()[0].removeprefix("lane 0 |")
    assert row.split() == ["F0", "B0", *["=="] * 38]


def test_a_width_cuts_the_makespan_into_so_many_slots():
    assert draw(simulate(by_name("gpipe", 1, 1)), width=6) == golden("""
        lane 0 |F0 == B0 == == ==
        makespan 3 slots, bubble 0.0%, peak in flight 1
    """)


def test_a_measured_timeline_is_drawn_in_seconds_and_loses_no_action():
    events = [Event(Action.parse(f"0F{chunk}"), 0, 5 + chunk * 1e-9, 5 + (chunk + 1) * 1e-9) for chunk in range(3)]
    timeline = Timeline.measured([*events, Event(Action.parse("0B0"), 0, 6.0, 7.0)], lanes=2)
    assert draw(timeline, width=8) == golden("""
        lane 0 |F0 F1 F2 .  B0 == == ==
        lane 1 |.  .  .  .  .  .  .  .
        makespan 2 s, bubble 75.0%, peak in flight 3 0
    """)


def test_what_begins_late_for_others_before_it_ends_when_it_ends():
    events = [Event(Action.parse(f"0F{chunk}"), 0, chunk * 1e-9, (chunk + 1) * 1e-9) for chunk in range(3)]
    timeline = Timeline.measured([*events, Event(Action.parse("0B0"), 0, 3e-9, 5.0)], lanes=1)
    assert draw(timeline, width=5).splitlines()[0] == "lane 0 |F0 F1 F2 B0 =="


@settings(derandomize=True, deadline=None, max_examples=examples(50))
@given(schedules())
def test_every_action_is_drawn_once_on_its_lane_in_its_order(schedule):
    for picture in (draw(schedule), draw(simulate(schedule), width=3), draw(simulate(schedule, Costs(0, 0, 0)))):
        rows = picture.splitlines()
        assert len(rows) == schedule.lanes + 1
        assert all(row == row.rstrip() for row in rows)
        for row, order in zip(rows, schedule.orders):
            cells = [cell for cell in row.split("|")[1].split() if cell not in (".", "==")]
            several = any(len(schedule.placement.stages_of(lane)) > 1 for lane in range(schedule.lanes))
            assert cells == [str(action) if several else str(action)[1:] for action in order]


@settings(derandomize=True, deadline=None, max_examples=examples(50))
@given(schedules(), st.sampled_from([1, 3]), st.integers(0, 2))
def test_every_slot_shows_what_runs_in_it(schedule, backward, link):
    timeline = simulate(schedule, Costs(forward=2, input=1, weight=1, backward=backward, link=link))
    for row, events in zip(draw(timeline).splitlines(), timeline.by_lane):
        cells = row.split("|")[1].split() + ["."] * timeline.makespan
        for slot in range(timeline.makespan):
            event = next((event for event in events if event.start <= slot < event.end), None)
            if event is None:
                assert cells[slot] == "."
            else:
                assert cells[slot] == "==" if slot > event.start else str(event.action).endswith(cells[slot])


def test_a_block_is_marked_at_its_first_action():
    schedule = Schedule.parse("schedule s, chunks 2, stages on lanes 0\nlane 0: 0F0 0F1+0B0 0B1")
    assert draw(schedule) == golden("""
        lane 0 |F0  F1+ B0  ==  B1  ==
        makespan 6 slots, bubble 0.0%, peak in flight 2
    """)


def test_lanes_line_up_where_their_numbers_have_two_digits():
    rows = draw(by_name("gpipe", 11, 1)).splitlines()
    assert rows[0].startswith("lane  0 |F0")
    assert {row.index("|") for row in rows[:11]} == {8}


def test_nothing_is_drawn_as_empty_lanes():
    assert draw(Timeline((), lanes=2)) == "lane 0 |\nlane 1 |\nmakespan 0 slots, bubble 0.0%, peak in flight 0 0"


def test_a_width_that_is_no_count_is_refused():
    with pytest.raises(ScheduleError, match="width is 0, but must be a whole number of at least 1"):
        draw(by_name("gpipe", 2, 2), width=0)


def test_a_schedule_that_cannot_end_is_refused_by_draw():
    with pytest.raises(ScheduleError, match="lane 0 waits at 0B0 for 0F0, which lane 0 runs after 0B0"):
        draw(Schedule.parse("schedule wrong, chunks 1, stages on lanes 0\nlane 0: 0B0 0F0"))


@pytest.mark.parametrize(
    ("seconds", "words"), [(2.5, "2.5 s"), (0.00412916, "4.13 ms"), (0.000031, "31 us"), (0.1239, "124 ms")]
)
def test_a_measured_makespan_is_told_in_a_unit_that_fits(seconds, words):
    timeline = Timeline.measured([Event(Action(0, Kind.F, 0), 0, 5.0, 5.0 + seconds)], 1)
    assert f"makespan {words}, bubble" in draw(timeline)


def test_lanes_that_take_turns_are_said_to_and_one_alone_is_not():
    events = [Event(Action.parse(f"{lane}F0"), lane, lane, lane + 1) for lane in range(4)]
    alone, together = "", "take turns (one thread or device): no bubble of lanes that run at once"
    for turns, said in (
        ((), alone), ([[0], [1]], alone), ([[0, 1, 2, 3]], f"\nlanes 0 1 2 3 {together}"),
        ([[0, 2], [1, 3]], f"\nlanes 0 2, and lanes 1 3 {together}"), ([[1, 2], [3]], f"\nlanes 1 2 {together}"),
    ):  # fmt: skip
        timeline = Timeline.measured(events, 4, turns)
        assert draw(timeline).endswith(f"peak in flight 1 1 1 1{said}")
        assert (together in svg(timeline)) is bool(said)
