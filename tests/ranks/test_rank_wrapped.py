"""Law: nothing that takes the ranks of a pipeline for replicas of each other runs with it."""

from __future__ import annotations

import re

import pytest
from crew import Crew

MIXED = r" takes ranks \[0, 1\] for replicas, but they have different stages of one pipeline.*replicas=group"


@pytest.mark.parametrize("kind, words", [
    ("ddp", r"DistributedDataParallel\(pipe\)" + MIXED), ("zero", "ZeroRedundancyOptimizer" + MIXED),
    ("fsdp", r"fully_shard was called on a Pipe.*Leave it out"),
])  # fmt: skip
def test_a_wrapper_over_the_pipelines_own_ranks_is_refused(kind: str, words: str, crew2: Crew) -> None:
    for found in crew2.run("rank_wrapped:wrapped", kind):
        assert re.match(words, found), found
