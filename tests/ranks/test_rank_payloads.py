"""Over ranks whose tensors travel beside their headers a Pipe gives the same bits, and fails as it does without."""

from __future__ import annotations

import pytest
from crew import Crew


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_training_gives_the_bits_of_one_process_with_payloads_beside_the_headers(crew2: Crew, schedule: str) -> None:
    stages = 4 if schedule == "interleaved" else 2
    for wrong, payloads in crew2.run("rank_payloads:trained", schedule, stages):
        assert wrong == [] and payloads > 20


def test_three_ranks_have_payloads_with_each_other(crew3: Crew) -> None:
    for wrong, payloads in crew3.run("rank_payloads:trained", "1f1b", 3):
        assert wrong == [] and payloads > 20


def test_ranks_of_one_device_have_none(crew2: Crew) -> None:
    assert crew2.run("rank_payloads:trained", "1f1b", 2, "the GPU of both") == [([], 0), ([], 0)]


def test_pairs_that_carry_no_payloads_have_no_groups_for_them(crew4: Crew) -> None:
    """The ends are tied, so they share values when the Pipe is built; an evaluation needs the ways forward."""
    assert crew4.run("rank_payloads:connected") == [[2, 3, 4, 4], [0, 2, 4, 4], [0, 2, 4, 4], [2, 3, 4, 4]]


@pytest.mark.parametrize("crew", [2, 3], indirect=True)
@pytest.mark.parametrize("first", [True, False])
def test_a_failure_reaches_all_ranks_and_the_next_step_is_right(crew: Crew, first: bool) -> None:
    for heard, waited, wrong in crew.run("rank_payloads:failing", first):
        assert "a layer's own" in heard and waited < 5 and wrong == []
