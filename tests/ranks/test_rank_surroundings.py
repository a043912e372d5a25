"""What stands around a call counts the same on ranks as in one process."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from crew import Crew
from one_and_many import agree_on
from rank_surroundings import shared_buffer


def test_what_layers_draw_from_pythons_and_numpys_generators_is_the_same_on_ranks(crew2: Crew, crew3: Crew) -> None:
    agree_on((crew2, crew3), "rank_surroundings:drawn_outside_torch", lambda size: [
        *product((size,), ("1f1b", "gpipe", "zb-h1"), ("always", "never")),
        (2 * size, "interleaved", "except_last"), (2 * size, "zb-v", "always"),
    ])  # fmt: skip


def test_a_default_device_is_for_the_script_and_its_layers_alone(crew2: Crew, crew3: Crew) -> None:
    agree_on((crew2, crew3), "rank_surroundings:default_device", lambda size: product(
        (size,), ("forward", "step", "store", "eager", "evaluate", "curvature")
    ))  # fmt: skip


def test_conjugates_and_negatives_that_torch_has_put_off_cross_ranks(crew2: Crew, crew3: Crew) -> None:
    agree_on((crew2, crew3), "rank_surroundings:lazy_values", lambda size: product(
        (size,), ("step", "forward"), ("always", "never")
    ))  # fmt: skip


def test_a_generator_that_two_ranks_hold_is_refused_where_a_layer_draws_from_it(crew2: Crew) -> None:
    """Each would draw from a copy of its own."""
    for words in crew2.run("rank_surroundings:shared_generator", True):
        assert "a random generator of stage 1" in words and "is shared with stage 0" in words
        assert "give each its own" in words
    assert crew2.run("rank_surroundings:shared_generator", False) == ["", ""]


@pytest.mark.parametrize("is_module", [True, False])
def test_a_buffer_that_two_ranks_hold_is_read_and_refused_where_a_layer_writes_it(crew2: Crew, is_module: bool) -> None:
    _, expected = shared_buffer(is_module, None)
    found = crew2.run("rank_surroundings:shared_buffer", is_module, None)
    assert [words for words, _ in found] == ["", ""]
    grads = [grad for _, part in found for grad in part if grad is not None and grad.numel()]
    assert len(grads) == len(expected) == 6 and all(map(torch.equal, grads, expected))
    for writer in (0, 1, 2):
        for words, _ in crew2.run("rank_surroundings:shared_buffer", is_module, writer):
            assert "buffer 'angles' of stage" in words and "is shared with stage" in words, words
