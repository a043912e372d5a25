"""Law: a schedule that can end becomes a program in which every message is sent and received once, both ends of each
channel see one order, and nobody waits for ever, even where sends wait for their receives and receives for their sends.
"""

import re

import pytest
from cover import either, examples
from golden import FOLDER, golden
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_strategies import schedules

from scheduler import Action, Kind, Placement, Program, Schedule, ScheduleError, by_name, lower, names, verify
from scheduler.programs.program import other_end

law = settings(derandomize=True, deadline=None, max_examples=examples(100))


def messages_of(schedule):
    """All (SEND, RECV) pairs, in other words: neighbours on different lanes."""
    lane_of, pairs = schedule.placement.lane_of, set()
    for stage, kind, chunk in schedule.actions:
        other = stage + 1 if kind is Kind.F else stage - 1
        if kind is not Kind.W and 0 <= other < schedule.stages and lane_of[other] != lane_of[stage]:
            way = "F" if kind is Kind.F else "B"
            pairs.add((Action(stage, Kind[f"SEND_{way}"], chunk), Action(other, Kind[f"RECV_{way}"], chunk)))
    return pairs


@law
@given(schedules())
def test_every_result_that_another_lane_needs_is_sent_and_received_once_in_one_order(schedule):
    program = lower(schedule)
    found = []
    for (sender, receiver), channel in program.channels().items():
        assert [other_end(send) for send in channel.sends] == list(channel.receives)
        assert all(schedule.placement.lane_of[send.stage] == sender for send in channel.sends)
        assert all(schedule.placement.lane_of[receive.stage] == receiver for receive in channel.receives)
        found += zip(channel.sends, channel.receives)
    assert len(found) == len(set(found)) and set(found) == messages_of(schedule)


@law
@given(schedules())
def test_what_is_computed_stays_and_messages_stand_after_what_they_send_and_before_what_needs_them(schedule):
    program = lower(schedule)
    assert program.schedule() == schedule
    for order in program.orders:
        place = {action: position for position, action in enumerate(order)}
        assert len(place) == len(order)
        for (stage, kind, chunk), position in place.items():
            work = [at for at in place if at.stage == stage and at.chunk == chunk]
            if kind is Kind.SEND_F or kind is Kind.RECV_F:
                (forward,) = [at for at in work if at.kind is Kind.F]
                assert (position > place[forward]) == kind.is_send
            elif kind is Kind.SEND_B or kind is Kind.RECV_B:
                (backward,) = [at for at in work if at.kind.is_backward]
                assert (position > place[backward]) == kind.is_send


@law
@given(schedules())
def test_a_lowered_schedule_passes_verify(schedule):
    verify(lower(schedule))


def ends_hand_to_hand(program):
    """Whether all lanes end where SEND and RECV of a message wait for each other, and both are over at once."""
    orders = [list(reversed(order)) for order in program.orders]
    host, lanes = program.placement.lane_of, list(range(program.lanes))
    while lanes:
        order = orders[lanes.pop()]
        while order:
            action = order.pop()
            if action.kind.is_send or action.kind.is_receive:
                other = host[other_end(action).stage]
                if orders[other][-1:] != [other_end(action)]:
                    order.append(action)
                    break
                orders[other].pop()
                lanes.append(other)
    return not any(orders)


@law
@given(schedules())
def test_a_lowered_schedule_ends_even_where_receives_wait_too(schedule):
    assert ends_hand_to_hand(lower(schedule))


@pytest.mark.parametrize("name", names())
def test_named_schedules_lower_to_right_programs(name):
    for lanes in either((1, 2, 3, 4, 6), range(1, 9)):
        for chunks in either((1, 3, 8, 12), (1, 2, 3, 5, 8, 12, 16)):
            try:
                schedule = by_name(name, lanes, chunks)
            except ScheduleError:
                continue
            program = lower(schedule)
            verify(program)
            assert ends_hand_to_hand(program)


def test_what_cannot_end_is_not_lowered():
    wrong = Schedule.parse("schedule wrong, chunks 1, stages on lanes 0 1\nlane 0: 0B0 0F0\nlane 1: 1F0 1B0")
    with pytest.raises(ScheduleError, match="cannot end: lane 0 waits at 0B0 for 0F0"):
        lower(wrong)


# ---------------------------------------------------------------------------------------------------------- programs


def program(*rows, chunks=1, lanes="0 1"):
    lines = "\n".join(f"lane {lane}: {row}" for lane, row in enumerate(rows))
    return Program.parse(f"program mine, chunks {chunks}, stages on lanes {lanes}\n{lines}")


@law
@given(schedules())
def test_a_program_is_printed_as_it_is_parsed(schedule):
    lowered = lower(schedule)
    assert Program.parse(str(lowered)) == lowered


def broken(program, data, change):
    """One lane's order, changed at one message."""
    places = [(lane, at) for lane, order in enumerate(program.orders) for at, action in enumerate(order)
              if action.kind.is_send or action.kind.is_receive]
    if not places:
        return None
    lane, at = data.draw(st.sampled_from(places))
    order = list(program.orders[lane])
    action = order[at]
    change(order, at)
    orders = (*program.orders[:lane], tuple(order), *program.orders[lane + 1:])
    return lane, action, Program(program.name, program.placement, program.chunks, orders)


def words(program):
    with pytest.raises(ScheduleError) as error:
        verify(program)
    return str(error.value)


@law
@given(schedules(), st.data())
def test_a_message_that_is_dropped_is_missed(schedule, data):
    found = broken(lower(schedule), data, lambda order, at: order.pop(at))
    if found:
        lane, action, wrong = found
        assert re.search(rf"{action} is missing, (the result of|which) .*: add it to lane {lane} ", words(wrong))


@law
@given(schedules(), st.data())
def test_a_message_that_is_repeated_is_named(schedule, data):
    found = broken(lower(schedule), data, lambda order, at: order.insert(at, order[at]))
    if found:
        lane, action, wrong = found
        assert f"lane {lane} runs {action}, which has run before: drop one of them" in words(wrong)


@law
@given(schedules(), st.data())
def test_a_message_on_the_wrong_side_of_its_action_is_put_right(schedule, data):
    def move(order, at):
        action = order.pop(at)
        order.insert(0 if action.kind.is_send else len(order), action)

    found = broken(lower(schedule), data, move)
    if found:
        lane, action, wrong = found
        side = "before .*, whose result it sends: put it after" if action.kind.is_send else "after .*, which needs it"
        assert re.search(f"lane {lane} runs {action} {side}", words(wrong))


@law
@given(schedules(), st.data())
def test_a_message_of_another_lane_or_of_none_is_dropped(schedule, data):
    lane = data.draw(st.integers(0, schedule.lanes - 1))
    stage, kind = data.draw(st.integers(0, schedule.stages - 1)), data.draw(st.sampled_from(list(Kind)[4:]))
    action = Action(stage, kind, data.draw(st.integers(0, schedule.chunks)))
    lowered = lower(schedule)
    if action in lowered.orders[lane]:
        return
    orders = list(lowered.orders)
    orders[lane] = (*orders[lane], action)
    wrong = Program("mine", schedule.placement, schedule.chunks, tuple(orders))
    assert f"lane {lane} runs {action}, but there is no such message: drop it" in words(wrong)


def test_messages_in_another_order_at_the_other_end_are_named():
    found = words(program(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1", chunks=2,
    ))
    assert found.splitlines()[:2] == [
        "program mine (lanes=2, chunks=2) has 1 fault:",
        "  channel from lane 0 to lane 1: its message 0 is sent as 0SEND_F0 and received as 1RECV_F1. "
        "Put 1RECV_F0 there, or 0SEND_F1.",
    ]
    assert "lane 1 |RECV_F1! RECV_F0" in found


def test_sends_that_wait_for_each_other_are_named_though_receives_stand_before_their_use():
    """Right on a transport that buffers what is sent; on one that does not, each sends to the other."""
    found = words(program(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1", chunks=2,
    ))
    assert "lane 0 waits at 0SEND_F1 for 1RECV_F1, which lane 1 comes to after 1SEND_B0." in found
    assert "lane 1 waits at 1SEND_B0 for 0RECV_B0, which lane 0 comes to after 0SEND_F1." in found


def test_a_program_whose_schedule_is_wrong_is_refused_for_that():
    found = words(program("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0"))
    assert "schedule mine (lanes=2, chunks=1) has" in found and "1B0 is missing" in found


def test_no_lane_sends_over_the_ends_of_the_model():
    with pytest.raises(ScheduleError, match="a message of stage 2 cannot be: there are 2 stages, numbered from 0"):
        program("0F0", "1F0 1SEND_F0").channels()


@pytest.mark.parametrize("orders", [((),), ([], []), (("0F0",), ())])
def test_orders_that_are_none_are_refused(orders):
    with pytest.raises(ScheduleError, match="orders is|there are 1 orders but 2 lanes"):
        Program("mine", Placement.linear(2), 1, orders)


# -------------------------------------------------------------------------------------------------------- golden files


@pytest.mark.parametrize("name", names())
def test_programs_are_those_of_the_golden_files(name):
    """What ran yesterday runs today. After a change that is meant: python tests/scheduler/golden.py"""
    assert (FOLDER / f"{name}.txt").read_text() == golden(name)


def test_every_golden_file_belongs_to_a_schedule():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(names())
