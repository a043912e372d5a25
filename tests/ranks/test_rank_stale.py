"""Laws: the values that another rank trains are never taken from this rank's model, which has those of before."""

from __future__ import annotations

import re

import pytest
from crew import Crew

REMEDY = (
    r", which another rank trains: the values of this rank's model are those of before\. Call state = "
    r"pipe\.full_state_dict\(\) on all ranks, and model\.load_state_dict\(state\) on rank 0"
)


@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_model_is_refused_where_another_rank_trains_it_until_it_is_loaded(how: str, crew2: Crew) -> None:
    for rank, found in enumerate(crew2.run("rank_stale:refusals", how)):
        kind = ("BatchNorm1d|Linear", "Linear")[rank]
        called = rf"a module of the model \(({kind})\) was called"
        for name, words in {
            "forward": called, "later": called, "copy": called,
            "file": "a module of the model cannot be pickled or saved",
            "state": rf"state_dict\(\) of a module of the model \('[0-4]', ({kind})\)",
            "penalty": rf"the script itself computed with a parameter of the model \(({kind})\.(weight|bias)\)",
            "recut": r"a Pipe is built with '[0-4]' \(\w+\)",
        }.items():
            assert re.match(words + REMEDY, found[name]), (rank, name, found[name])
        for name in ("before", "own", "own_penalty", "pipe", "loaded"):
            assert found[name] == "", (rank, name)


def test_a_layer_that_goes_to_another_rank_is_refused_and_one_that_stays_is_not(crew2: Crew) -> None:
    for found in crew2.run("rank_stale:recut"):
        assert found["same"] == "" and re.match(rf"a Pipe is built with '2' \(Linear\){REMEDY}", found["other"])


def test_a_model_that_an_earlier_pipe_has_filled_in_parts_is_not_filled_from_a_second_source(crew2: Crew) -> None:
    for found in crew2.run("rank_stale:refilled"):
        assert found["later"] == ""  # the failed one has taken nothing away
        assert re.match(
            r"the tensors on the meta device differ between the ranks: rank 0: 1\.weight; .*; rank 1: 0\.weight; "
            r"0\.bias\. Build the model anew on the meta device, on every rank,.*an earlier Pipe", found["other"]
        )  # fmt: skip


def test_a_module_that_makes_what_blocks_are_given_follows_what_is_set_on_it_while_its_buffer_is_stale(
    crew2: Crew,
) -> None:
    for found, wanted in crew2.run("rank_stale:given"):
        assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", ["gpt", "experts", "resnet", "diffusion", "lstm"])
def test_a_model_that_was_cut_is_refused_too(name: str, crew2: Crew) -> None:
    found = crew2.run("rank_stale:cut", name)
    for words in found:
        assert re.search(REMEDY, words["forward"]) and re.search(REMEDY, words["state"])
    assert found[0]["loaded"] == ""


@pytest.mark.parametrize("how, stages", [("seed", "[0, 1]"), ("state", "[0, 1]"), ("own", ""), ("same", "")])
def test_models_of_other_values_are_told_of_once_unless_they_are_on_the_meta_device(
    how: str, stages: str, crew2: Crew
) -> None:
    own, other = crew2.run("rank_stale:values_of_several_models", how)
    assert other == [] and len(own) == bool(stages)
    for words in own:
        assert f"the ranks' models have other values in stages {stages}" in words and "load it on every rank" in words
