"""Laws: a Pipe whose parameters are in parts on several ranks (DTensor) trains as the plain module, or says why not."""

from __future__ import annotations

import pytest
from crew import Crew


@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_a_pipe_of_layers_that_parallelize_module_has_cut_trains_as_the_plain_module(
    checkpoint: str, by_step: bool, crew2: Crew
) -> None:
    for losses, apart in crew2.run("rank_parts:trained", checkpoint, by_step):
        assert max(map(abs, losses)) < 1e-12 and apart < 1e-12


@pytest.mark.parametrize("sharded_dim", [None, 0])
@pytest.mark.parametrize("entry", ["forward", "step", "evaluate"])
def test_inputs_in_parts_are_cut_into_chunks_like_others(entry: str, sharded_dim: int | None, crew2: Crew) -> None:
    for distances in crew2.run("rank_parts:of_parts", entry, sharded_dim):
        assert max(distances) < 1e-12


@pytest.mark.parametrize(("how", "words"), [
    ("step", "DTensor parameters in a step with an EagerUpdate: 0.up.weight, 0.up.bias, 0.down.weight"),
    ("backward", "DTensor parameters in eager_backward: a parameter of shape [8, 4]"),
    ("curvature", "DTensor parameters in an operator of curvature: 0.up.weight, 0.up.bias"),
])
def test_what_needs_whole_parameters_says_so(how: str, words: str, crew2: Crew) -> None:
    for said in crew2.run("rank_parts:refused", how):
        assert said.startswith(words) and said.endswith(("which steps the part that is here.", "parallelize_module."))
