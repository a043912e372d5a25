"""Between ranks: tied weights are one weight, and whatever may stand between stages arrives as it was."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch
from crew import Crew
from one_and_many import agree, agree_on
from rank_between import ties
from tied_models import made

NAMED = ("embedding_and_head", "layer_three_times", "in_other_containers", "unused_at_first", "tied_originals")


def test_training_with_tied_weights_over_ranks_gives_the_bits_of_one_process(crew2: Crew, crew3: Crew) -> None:
    assert min(map(len, map(ties, (2, 3)))) >= 30
    agree_on((crew2, crew3), "rank_between:tied", ties)


def test_autograd_grad_gives_whole_gradients_of_tied_weights_on_all_their_ranks(crew2: Crew, crew3: Crew) -> None:
    """On ranks too that have one and do not use it."""
    kinds = ("unused_at_first", "unused_at_last", "in_some_chunks", "embedding_and_head")
    agree_on((crew2, crew3), "rank_between:asked", lambda size: [(kind,) for kind in kinds[: 6 - size]])


def test_a_tied_weight_has_the_plain_modules_names_and_place_on_every_rank_that_has_it(
    crew2: Crew, crew3: Crew, crew4: Crew
) -> None:
    kinds = {size: [(kind,) for kind in NAMED if len(made(kind)) >= size] for size in (2, 3, 4)}
    assert all(kinds.values())
    agree_on((crew2, crew3, crew4), "rank_between:named", lambda size: kinds[size])


def test_a_weight_that_was_untied_after_the_pipe_was_built_is_not_hidden_by_the_tied_one(crew3: Crew) -> None:
    first, between, last = crew3.run("rank_between:untied", 3)
    assert first == [["0.weight", "1.weight"], ["0.weight", "2.weight", "3.weight", "1.weight"]]
    assert between[0] == last[0] == ["0.weight"]


def test_ties_between_layers_of_one_rank_may_be_made_later(crew2: Crew) -> None:
    agree(crew2, "rank_between:tied_within", 2)


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


def test_shapes_between_ranks_may_depend_on_the_data(crew2: Crew, crew4: Crew) -> None:
    agree_on((crew2, crew4), "rank_between:shapes_from_data", lambda size: product(
        (2, 4) if size == 2 else (4,), ("step", "forward"), ("always", "never")
    ))  # fmt: skip


def test_tensors_of_any_dtype_shape_and_strides_and_plain_values_pass_between_ranks(crew2: Crew, crew3: Crew) -> None:
    agree_on((crew2, crew3), "rank_between:kinds", lambda size: product(
        (2, 4) if size == 2 else (3,), ("step", "forward")
    ))  # fmt: skip


def test_outputs_that_shared_memory_lie_on_every_rank_as_in_one_process(crew3: Crew) -> None:
    agree(crew3, "rank_between:views", 3)


@pytest.mark.parametrize("which", ["object", "type", "function", "bytes", "set", "dtype"])
def test_what_cannot_pass_between_ranks_is_refused_by_name_on_every_rank(crew2: Crew, which: str) -> None:
    (words, loss), (others, other_loss) = crew2.run("rank_between:strange", which)
    for each in (words, others):
        assert re.search(r"(Type|Rank)Error: .*stage 0", each.replace("\n", " ")), each
    assert loss == other_loss > 0


@pytest.mark.parametrize("entry", ["forward", "product"])
def test_memory_that_is_stashed_again_before_another_stage_writes_it_is_refused(crew2: Crew, entry: str) -> None:
    """The plain module would see it written; the stage that writes got it before it was stashed again."""
    words = "stage 2 .layer 2. writes its input in place.* a skip that a later stage pops, shares memory"
    assert all([re.match(words, found) for found in crew2.run("rank_between:stashed_again", False, entry)])
    assert crew2.run("rank_between:stashed_again", True, entry) == ["equal"] * 2
