"""Between ranks: tied weights are one weight, and whatever may stand between stages arrives as it was."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch
from crew import Crew
from one_and_many import agree_all, check_all
from tied_models import made

NAMED = ("embedding_and_head", "layer_three_times", "in_other_containers", "unused_at_first", "tied_originals")


@pytest.mark.parametrize("size", [2, 3])
def test_training_with_tied_weights_over_ranks_gives_the_bits_of_one_process(
    size: int, request: pytest.FixtureRequest
) -> None:
    results = request.getfixturevalue(f"crew{size}").run("rank_between:tied_in_any_way", size, timeout=300.0)
    assert len(results[0][0]) >= 30
    check_all(results[0][0], [found for _, found in results])


def test_autograd_grad_gives_whole_gradients_of_tied_weights_on_all_their_ranks(crew2: Crew, crew3: Crew) -> None:
    """On ranks too that have one and do not use it."""
    kinds = ("unused_at_first", "unused_at_last", "in_some_chunks")
    agree_all(crew2, "rank_between:asked", [(kind,) for kind in (*kinds, "embedding_and_head")])
    agree_all(crew3, "rank_between:asked", [(kind,) for kind in kinds])


def test_a_tied_weight_has_the_plain_modules_names_and_place_on_every_rank_that_has_it(
    crew2: Crew, crew3: Crew, crew4: Crew
) -> None:
    for crew in (crew2, crew3, crew4):
        kinds = [kind for kind in NAMED if len(made(kind)) >= crew.size]
        assert len(kinds) >= 1
        agree_all(crew, "rank_between:named", [(kind,) for kind in kinds])


def test_a_weight_that_was_untied_after_the_pipe_was_built_is_not_hidden_by_the_tied_one(crew3: Crew) -> None:
    first, between, last = crew3.run("rank_between:untied", 3)
    assert first == [["0.weight", "1.weight"], ["0.weight", "1.weight", "2.weight", "3.weight"]]
    assert between[0] == last[0] == ["0.weight"]


@pytest.mark.parametrize("rank_seeds", [False, True])
def test_copies_of_a_tied_weight_and_their_gradients_are_the_same_on_all_their_ranks(
    crew2: Crew, crew3: Crew, rank_seeds: bool
) -> None:
    for crew in (crew2, crew3):
        first, *between, last = crew.run("rank_between:embedding_and_head", rank_seeds)
        assert between == [[[]] * 4] * (crew.size - 2)
        values = [value for ((value, _),) in first]
        assert not torch.equal(values[0], values[3])
        for ((value, grad),), ((other, other_grad),) in zip(first, last, strict=True):
            assert torch.equal(value, other)
            assert (grad is None and other_grad is None) or torch.equal(grad, other_grad)


@pytest.mark.parametrize("door", ["step", "forward"])
def test_shapes_between_ranks_may_depend_on_the_data(crew2: Crew, crew4: Crew, door: str) -> None:
    agree_all(crew2, "rank_between:shapes_from_data", product((2, 4), (door,), ("always", "never")))
    agree_all(crew4, "rank_between:shapes_from_data", product((4,), (door,), ("always", "never")))


@pytest.mark.parametrize("door", ["step", "forward"])
def test_tensors_of_any_dtype_shape_and_strides_and_plain_values_pass_between_ranks(
    crew2: Crew, crew3: Crew, door: str
) -> None:
    agree_all(crew2, "rank_between:kinds", [(2, door), (4, door)])
    agree_all(crew3, "rank_between:kinds", [(3, door)])


@pytest.mark.parametrize("which", ["object", "type", "function", "bytes", "set", "dtype"])
def test_what_cannot_pass_between_ranks_is_refused_by_name_on_every_rank(crew2: Crew, which: str) -> None:
    (words, loss), (others, other_loss) = crew2.run("rank_between:strange", which)
    for each in (words, others):
        assert re.search(r"(Type|Rank)Error: .*stage 0", each.replace("\n", " ")), each
    assert loss == other_loss > 0
