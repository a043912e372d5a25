"""A rank runs its order of the schedule and holds no more than that says, seen from inside the layers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product

import pytest
from cover import some
from crew import Crew
from rank_transparency import LOOPS, TWO_A_LANE, least_chunks

from scheduler import Action, Costs, Event, Kind, Schedule, Timeline, by_name, names, simulate

TWO = (*LOOPS, *TWO_A_LANE)  # by name they have two stages a lane
SPLIT = [name for name in names() if by_name(name, 2, 8).split]


def schedules(size: int) -> list[tuple[str, int, int]]:
    """(name, stages, chunks) with a lane for each rank, for few chunks and many; some of them (cover.py)."""
    sizes = [(name, (2 if name in TWO else 1) * size) for name in names()]
    return some(
        (name, stages, max(chunks, least_chunks(name, stages))) for (name, stages), chunks in product(sizes, (1, 3, 6))
    )


def seen(order: Iterable[object]) -> list[str]:
    """A lane's order as layers see it: an input gradient is a backward to them, a weight gradient nothing."""
    return [str(action).replace("I", "B") for action in order if "W" not in str(action)]


def most_held(ran: Iterable[str]) -> int:
    """How many (stage, chunk) pairs are between F and B at most."""
    held = most = 0
    for action in ran:
        held += 1 if "F" in action else -1
        most = max(most, held)
    assert held == 0
    return most


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_runs_its_order_and_holds_as_many_chunks_as_the_simulation_says(
    size: int, request: pytest.FixtureRequest
) -> None:
    crew = request.getfixturevalue(f"crew{size}")
    for stages in (size, 2 * size):
        cases = [(name, chunks) for name, many, chunks in schedules(size) if many == stages]
        logs = crew.run("rank_order:logs", stages, [(*case, "never", "step") for case in cases], timeout=120.0)
        for (name, chunks), *ranks in zip(cases, *logs, strict=True):
            schedule = by_name(name, size, chunks)
            assert schedule.stages == stages
            assert ranks == [seen(order) for order in schedule.orders], name
            if name not in SPLIT:
                assert tuple(map(most_held, ranks)) == simulate(schedule).peak_in_flight, name


@pytest.mark.parametrize("size", [2, 3])
def test_with_more_lanes_than_ranks_a_rank_holds_no_more_than_its_lanes_together(
    size: int, request: pytest.FixtureRequest
) -> None:
    names_ = [name for name in names() if name not in TWO and name != "zb-h2"]
    cases = some((name, chunks, "never", "step") for name, chunks in product(names_, (1, 3, 6)))
    logs = request.getfixturevalue(f"crew{size}").run("rank_order:logs", 2 * size, cases)
    for (name, chunks, *_), *ranks in zip(cases, *logs, strict=True):
        schedule = by_name(name, 2 * size, chunks)
        peaks = simulate(schedule).peak_in_flight
        for rank, ran in enumerate(ranks):
            lanes = 2 * rank, 2 * rank + 1
            for lane in lanes:
                assert [action for action in ran if action[0] == str(lane)] == seen(schedule.orders[lane])
            assert most_held(ran) <= sum(peaks[lane] for lane in lanes)


def test_a_forward_runs_all_forwards_then_all_backwards_ascending_whatever_the_schedule(crew3: Crew) -> None:
    cases = [(name, 4, "never", "forward") for name in names() if name not in TWO and name != "zb-h2"]
    for rank, logs in enumerate(crew3.run("rank_order:logs", 3, cases)):
        for ran in logs:
            assert ran == [f"{rank}{kind}{chunk}" for kind in "FB" for chunk in range(4)]


@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_a_rank_recomputes_a_chunk_just_before_its_backward_and_as_the_rule_says(crew3: Crew, mode: str) -> None:
    """except_last: iff another backward of the rank stands between F and B."""
    cases = [(name, 5, mode, "step") for name in ("gpipe", "1f1b", "eager-1f1b", "zb-h1")]
    for rank, logs in enumerate(crew3.run("rank_order:logs", 3, cases)):
        for ran in logs:
            plain = [action for action in ran if "R" not in action]
            for chunk in range(5):
                here = plain.index(f"{rank}F{chunk}"), plain.index(f"{rank}B{chunk}")
                between = any("B" in action for action in plain[here[0] + 1 : here[1]])
                before = ran[ran.index(f"{rank}B{chunk}") - 1]
                assert (before == f"{rank}R{chunk}") == (mode == "always" or between)


@pytest.mark.parametrize(("name", "stages"), [("1f1b", 2), ("gpipe", 4), ("interleaved", 4), ("zb-h1", 2), ("zb-v", 4)])
def test_every_rank_has_the_whole_timeline_of_a_step(crew2: Crew, name: str, stages: int) -> None:
    schedule = by_name(name, 2, 3) if name in TWO else by_name(name, stages, 3)
    wanted = {str(action) for order in schedule.orders for action in order}
    first, second = crew2.run("rank_order:timelines", stages, name, 3)
    assert first == second
    assert {action for action, _, _ in first} == wanted and all(forward for _, _, forward in first)
    assert {lane for _, lane, _ in first} == {0, 1}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_an_evaluation_runs_the_forwards_alone(crew2: Crew, name: str) -> None:
    ran = crew2.run("rank_order:evaluation", 2, name, 3)
    assert ran == [[f"{rank}F{chunk}" for chunk in range(3)] for rank in range(2)]


def test_a_schedule_given_as_data_is_what_the_ranks_run(crew2: Crew) -> None:
    text = """
        schedule mine, chunks 3, stages on lanes 0 1 0
        lane 0: 0F0 0F1 2F0 2B0 0F2 2F1 2F2 2B1 0B0 2B2 0B1 0B2
        lane 1: 1F0 1F1 1B0 1F2 1B1 1B2
    """
    schedule = Schedule.parse(text)
    assert any(action.kind is Kind.B for action in schedule.actions)
    assert crew2.run("rank_order:given", text) == [seen(order) for order in schedule.orders]


def test_a_rank_has_the_layers_of_its_device_in_the_plan_whatever_the_order_of_devices(crew2: Crew) -> None:
    orders = set()
    for speed in ([1.0, 3.0], [3.0, 1.0]):
        told = crew2.run("rank_order:planned", speed)
        (balance, lane_of, *_), _ = told
        orders.add(lane_of)
        assert sorted(balance)[0] < 4  # a third of the speed
        for rank, (_, _, has, right, same) in enumerate(told):
            assert right and same and has == balance[lane_of.index(rank)]
            assert (has < 4) == (speed[rank] == 1.0)
    assert orders == {(0, 1), (1, 0)}  # one of them in another order than the given one


UNIT = 0.03  # seconds: what a busy machine adds to a sleep is little beside it
SLEEPS = {2: ((1, 2), (2, 4)), 3: ((1, 2, 1), (2, 4, 2))}  # of forwards and of backwards, stage by stage; no ties


def slept(crew: Crew, schedule: str, chunks: int, entry: str) -> Timeline:
    forward, backward = ([UNIT * units for units in of_stages] for of_stages in SLEEPS[crew.size])
    (events, turns), *others = crew.run("rank_order:slept", schedule, forward, backward, chunks, entry)
    assert others == [(events, turns)] * (crew.size - 1) and turns == ()
    return Timeline.measured([Event(Action.parse(text), *rest) for text, *rest in events], crew.size, turns)


def cause(words: str) -> list[str]:
    """What an explanation says, without its times."""
    return re.findall(r"\d+[FB]\d+|[a-z]+", words)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_measured_step_over_ranks_is_the_simulated_one_waits_included(
    name: str, size: int, request: pytest.FixtureRequest
) -> None:
    forward, backward = SLEEPS[size]
    expected = simulate(by_name(name, size, 3), Costs(forward=forward, backward=backward))
    faults = [_unlike(slept(request.getfixturevalue(f"crew{size}"), name, 3, "step"), expected)]
    while faults[-1] and len(faults) < 3:  # the machine had something else to do
        faults.append(_unlike(slept(request.getfixturevalue(f"crew{size}"), name, 3, "step"), expected))
    assert faults[-1] == []


def _unlike(measured: Timeline, expected: Timeline) -> list[str]:
    """In which respects a measured timeline is not the simulated one."""
    faults = []
    if abs(measured.bubble - expected.bubble) > 0.06:
        faults.append(f"bubble {measured.bubble} instead of {expected.bubble}")
    for lane, (busy, wanted) in enumerate(zip(measured.busy, expected.busy, strict=True)):
        if not 0.98 * wanted <= busy / UNIT <= 1.2 * wanted:
            faults.append(f"lane {lane} is busy for {busy / UNIT} instead of {wanted}")
    paths = [[str(event.action) for event in timeline.critical_path] for timeline in (measured, expected)]
    if paths[0] != paths[1]:
        faults.append(f"the critical path is {paths[0]} instead of {paths[1]}")
    for lane, row in enumerate(expected.by_lane):
        for event, after, seen in zip(row, row[1:], measured.by_lane[lane][1:], strict=False):
            if after.start > event.end:  # asked just before it goes on
                words = measured.why_idle(lane, seen.start - UNIT / 4), expected.why_idle(lane, after.start - 0.25)
                if cause(words[0]) != cause(words[1]):
                    faults.append(f"{words[0]} instead of {words[1]}")
    return faults


@pytest.mark.parametrize("entry", ["forward", "evaluate"])
def test_an_action_over_ranks_lasts_as_long_as_it_computes_through_every_entry_point(crew2: Crew, entry: str) -> None:
    forward, backward = SLEEPS[2]
    for _ in range(3):  # the machine may have something else to do
        timeline = slept(crew2, "1f1b", 2, entry)
        assert len(timeline.events) == (8 if entry == "forward" else 4)
        units = [(forward if event.action.kind is Kind.F else backward)[event.lane] for event in timeline.events]
        ratios = [event.duration / UNIT / unit for event, unit in zip(timeline.events, units, strict=True)]
        if max(ratios) < 1.4:
            break
    assert 0.98 < min(ratios) and max(ratios) < 1.4


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_costs_of_a_traced_step_are_what_its_layers_took_on_every_rank(
    schedule: str, request: pytest.FixtureRequest
) -> None:
    """Ranks wait for each other, which is no work of theirs."""
    forward, backward = (0.5, 2.0), (3.0, 0.25)
    crew = request.getfixturevalue("crew2")
    for checkpoint, again in (("never", (0, 0)), ("always", forward)):
        for found in crew.run("rank_order:measured", schedule, forward, backward, checkpoint):
            works = [5 * sum(times) for times in zip(forward, backward, again)]
            assert found == (forward, backward, again, works)


@pytest.mark.parametrize("ahead", [-1e6, 1e6])
def test_the_timeline_of_machines_is_on_one_clock(ahead: float, request: pytest.FixtureRequest) -> None:
    for makespan, outside, messages in request.getfixturevalue("crew2").run("rank_order:on_clocks", "1f1b", ahead):
        assert makespan < 1e3 and 0 < outside < 1e3 and len(messages) == 8
        assert all(-1 < time < 1e3 for time in messages)  # what is sent may be there before its action ends
