"""Law: nothing that takes the ranks of a pipeline for replicas of each other runs with it."""

from __future__ import annotations

import re

import pytest
from crew import Crew

MIXED = r" takes ranks \[0, 1\] for replicas, but they have different stages of one pipeline.*mesh\[\"dp\"\]"


@pytest.mark.parametrize("kind, words", [
    ("ddp", r"DistributedDataParallel\(pipe\)" + MIXED), ("zero", "ZeroRedundancyOptimizer" + MIXED),
    ("zero-before", "ZeroRedundancyOptimizer" + MIXED), ("zero-loop", "ZeroRedundancyOptimizer" + MIXED),
    ("fsdp", r"fully_shard was called on a Pipe.*Leave it out"),
])  # fmt: skip
def test_a_wrapper_over_the_pipelines_own_ranks_is_refused(kind: str, words: str, crew2: Crew) -> None:
    for found in crew2.run("rank_wrapped:wrapped", kind):
        assert re.match(words, found), found


def test_a_sharded_optimizer_of_the_ranks_that_have_one_stage_steps_as_torchs(crew2: Crew) -> None:
    for found in crew2.run("rank_wrapped:sharded_over_replicas"):
        assert found < 1e-15


def test_a_sharded_optimizer_of_another_model_steps(crew2: Crew) -> None:
    assert crew2.run("rank_wrapped:sharded_beside") == ["", ""]
