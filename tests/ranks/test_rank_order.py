"""A rank runs its order of the schedule and holds no more than that says, seen from inside the layers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest
from crew import Crew
from rank_transparency import LOOPS, TWO_A_LANE, least_chunks

from scheduler import Kind, Schedule, by_name, names, simulate

TWO = (*LOOPS, *TWO_A_LANE)  # by name they have two stages a lane
SPLIT = [name for name in names() if by_name(name, 2, 8).split]


def schedules(size: int) -> list[tuple[str, int, int]]:
    """(name, stages, chunks) with a lane for each rank, for few chunks and many."""
    sizes = [(name, (2 if name in TWO else 1) * size) for name in names()]
    return [
        (name, stages, max(chunks, least_chunks(name, stages))) for (name, stages), chunks in product(sizes, (1, 3, 6))
    ]


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
    cases = [(name, chunks, "never", "step") for name, chunks in product(names_, (1, 3, 6))]
    logs = request.getfixturevalue(f"crew{size}").run("rank_order:logs", 2 * size, cases)
    for (name, chunks, *_), *ranks in zip(cases, *logs, strict=True):
        schedule = by_name(name, 2 * size, chunks)
        peaks = simulate(schedule).peak_in_flight
        for rank, ran in enumerate(ranks):
            lanes = 2 * rank, 2 * rank + 1
            for lane in lanes:
                assert [action for action in ran if action[0] == str(lane)] == seen(schedule.orders[lane])
            assert most_held(ran) <= sum(peaks[lane] for lane in lanes)


def test_the_forward_door_runs_all_forwards_then_all_backwards_ascending_whatever_the_schedule(crew3: Crew) -> None:
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
