"""Law: whenever a signal handler raises on one rank, a step has taken place on all ranks, or on none, or all say so."""

from __future__ import annotations

import pytest
from cover import either
from crew import Crew

CASES = [
    ("step", 1), ("hooks", 0), ("backward", 1), ("clip", 0), ("eager", 0), ("eager", 1), ("replicas", 1),
    ("replica hooks", 0), ("replica backward", 1),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "apart"), CASES)
def test_an_interrupt_on_one_rank_leaves_a_step_on_all_ranks_or_on_none_or_torn_in_words(
    crew2: Crew, entry: str, apart: int
) -> None:
    ends = set()
    for outcomes in zip(*crew2.run("rank_interrupts:swept", entry, apart, *either((3, 5), (5, 8))), strict=True):
        where, left = outcomes[apart].where, outcomes[0].left
        told = [(where, outcome.error, left, outcome.is_torn) for outcome in outcomes]
        if not where:
            continue  # this call was shorter than the one that was counted
        assert "the alarm went off" in outcomes[apart].error, told
        assert all(outcome.is_right_then for outcome in outcomes), told
        if left == ["none", "none"]:
            assert all("the alarm went off" in outcome.error for outcome in outcomes), told
        elif left == ["all", "all"]:
            is_told = "had ended: that has taken place, on all ranks" in outcomes[apart].error
            assert is_told or entry.endswith("backward") or "in step" not in outcomes[apart].error, told
        else:
            assert entry == "eager" and all(outcome.is_torn for outcome in outcomes), told
        ends.add(left[apart])
    assert ends >= {"none", "all"} or (entry == "clip" and ends == {"all"})  # no code of the user's, no action
