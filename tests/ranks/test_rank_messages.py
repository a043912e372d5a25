"""A step over ranks exchanges twice: one message up the tree and one down it, from each rank but the first."""

from __future__ import annotations

import pytest
from crew import Crew
from rank_messages import KINDS

# For each rank but one: messages beside those of the plan. An exchange of all ranks is 2, one rank's news to all is 1.
EXPECTED = {
    "a step": 2 + 2,  # do all make the same call; did it go well everywhere
    "a step that is traced": 6,
    "a step with its outputs": 5,
    "a step that clips": 6,
    "a step that clips many": 8,  # more norms than go at once
    "a step with an optimizer": 6,  # did all optimizers step
    "a step with an optimizer that clips": 8,
    "a step with hooks": 8,  # did all hooks go well; and those that run after the gradients are there
    "an eager step": 7,  # the divisor
    "an eager step that clips": 12,  # of two runs
    "a step with tied weights": 4 + 1,  # there and back: two messages, of three ranks
    "an evaluation": 5,  # and its outputs
    "a forward and its backward": 4 + 1 + 4,  # two calls, and the output
    "clip_grad_norm_": 4,
}


def per_rank(crew: Crew, kind: str) -> float:
    """Messages beside the plan, for each rank but one: the same in every later step."""
    steps = list(zip(*crew.run("rank_messages:counted", kind), strict=True))
    assert len(steps) > 1
    (found,) = {sum(step) / (crew.size - 1) for step in steps}
    return found


@pytest.mark.parametrize("crew", [2, 4], indirect=True)
def test_a_step_exchanges_twice(crew: Crew) -> None:
    assert per_rank(crew, "a step") == 2 + 2


def test_other_steps_exchange_no_more_than_they_must(crew3: Crew) -> None:
    assert {kind: per_rank(crew3, kind) for kind in EXPECTED} == EXPECTED


def test_every_kind_is_counted() -> None:
    assert set(EXPECTED) == set(KINDS)
