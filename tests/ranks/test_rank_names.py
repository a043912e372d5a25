"""Law: over ranks a cut model is saved and loaded by its own names, and its own optimizer goes on from there."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from crew import Crew
from rank_names import alone, built
from torch.testing import assert_close

from pipeline import Saved


def same(one: object, other: object) -> None:
    assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt", "resnet", "diffusion"])
def test_ranks_go_on_from_what_the_model_saved_and_the_model_from_what_they_did(
    name: str, crew2: Crew, tmp_path: Path
) -> None:
    expected, begun = alone(name, None, (0, 4)), alone(name, None, (0, 2))
    saved, nothing = crew2.run("rank_names:over", name, None, (0, 2), str(tmp_path))
    assert nothing == (None, None)
    assert list(saved[0]) == list(begun[0])
    same((saved[0], saved[1]["state"]), (begun[0], begun[1]["state"]))
    same(Saved(tmp_path, "model"), begun[0])
    model, optimizer = alone(name, copy.deepcopy(saved), (2, 4))
    same((model, optimizer["state"]), (expected[0], expected[1]["state"]))
    for start in (begun, saved, str(tmp_path)):
        model, optimizer = crew2.run("rank_names:over", name, start, (2, 4))[0]
        same((model, optimizer["state"]), (expected[0], expected[1]["state"]))


@pytest.mark.parametrize("name", ["gpt", "resnet", "diffusion"])
def test_each_rank_has_its_part_of_the_models_names(name: str, crew3: Crew, tmp_path: Path) -> None:
    model, _ = built(name)
    state = model.state_dict()
    parts = crew3.run("rank_names:named", name)
    for parameters, keys, versions, words in parts:
        assert parameters == [key for key, _ in model.named_parameters() if key in parameters]
        assert keys == [key for key in state if key in keys]
        assert set(versions) <= state._metadata.keys() and {key.rpartition(".")[0] for key in keys} <= set(versions)
        assert words.split("\n")[1].startswith("\tUnexpected key(s) in state_dict: ")
        assert '"no.such"' in words and f'"{list(state)[-1]}.more"' in words and words.count('"') == 4
    for place, names in enumerate((dict(model.named_parameters()), state)):
        assert {key for part in parts for key in part[place]} == set(names)
    if name != "gpt":  # whose tied weight .to("meta") unties
        for part in crew3.run("rank_names:materialized", name, state):
            same(part, {key: state[key] for key in part})
