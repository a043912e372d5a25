"""What 1, 2 or 3 processes save, 1, 2 or 3 others load, and training goes on as if nothing had been."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from by_chunks import same
from cover import some
from crew import Crew
from rank_state_jobs import KINDS, data, deep, groups_of, tied_and_frozen
from safetensors.torch import save_file
from shards import save_shards
from state_training import net, uninterrupted

from pipeline.entry.state.saved import Saved

SIZES = (1, 2, 3)


@pytest.fixture(scope="module")
def crew1():
    crew = Crew(1)
    yield crew
    crew.stop()


def loadings(saving: int) -> list[tuple[int, str]]:
    """(ranks, how) by which some load (cover.py) what so many ranks have saved."""
    ways = product(SIZES, SIZES, ("load", "Saved"))
    kept = some((origin, loading, how, loading - origin) for origin, loading, how in ways)
    return [(loading, how) for origin, loading, how, _ in kept if origin == saving]


@pytest.fixture
def crews(crew1: Crew, crew2: Crew, crew3: Crew) -> dict[int, Crew]:
    return {1: crew1, 2: crew2, 3: crew3}


@pytest.mark.parametrize("kind", ["momentum", "amsgrad", "adafactor"])
def test_any_number_of_ranks_goes_on_from_what_any_number_saved(
    kind: str, crews: dict[int, Crew], tmp_path: Path
) -> None:
    expected = uninterrupted(kind, range(7))
    for saving in SIZES:
        path = str(tmp_path / str(saving))
        keys = crews[saving].run("rank_state_jobs:save", path, kind, 4)
        given = [key for part in keys for key in part]
        assert len(given) == len(set(given))  # no two ranks write one key
        for loading, how in loadings(saving):
            found = crews[loading].run("rank_state_jobs:go_on", path, kind, 7, how)
            assert sum(len(part) for part in found) == len(expected)
            values = {name: value for part in found for name, value in part.items()}
            assert [name for name in expected if not same(values[name], expected[name])] == [], (saving, loading)


def test_values_made_or_read_on_ranks_do_not_depend_on_their_number(crews: dict[int, Crew], tmp_path: Path) -> None:
    crews[2].run("rank_state_jobs:save", str(tmp_path), "sgd", 2)
    saved = Saved(tmp_path, "model")
    (initial,) = crews[1].run("rank_state_jobs:materialized", None)
    assert initial.keys() == net().state_dict().keys() and not any(value.isnan().any() for value in initial.values())
    for size in SIZES:
        for path, expected in ((None, initial), (str(tmp_path), saved)):
            parts = crews[size].run("rank_state_jobs:materialized", path)
            values = {name: value for part in parts for name, value in part.items()}
            assert values.keys() == expected.keys()
            wrong = [name for name, value in values.items() if not torch.equal(value, expected[name])]
            if path is None and size > 1:  # a tied weight's other place: the Pipe shares the first one's values
                wrong.remove("5.weight")
            assert wrong == []


def test_after_an_error_on_one_rank_all_read_anew_and_only_then(crew2: Crew, tmp_path: Path) -> None:
    model = deep()
    save_shards(tmp_path / "earlier", [model.state_dict()])
    for name in ("0.weight", "5.bias"):  # of either rank
        shards = [{key: torch.ones_like(value)} for key, value in model.state_dict().items()]
        torn = save_shards(tmp_path / name, shards)
        (torn / f"model-{list(model.state_dict()).index(name) + 1:05}-of-{len(shards):05}.safetensors").unlink()
        folders = [str(torn), str(tmp_path / "earlier"), str(tmp_path / "earlier")]
        state, _ = crew2.run("rank_state_jobs:first_that_is_whole", folders)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.fixture(scope="module")
def trained(crew1: Crew) -> dict[str, torch.Tensor]:
    """What a Pipe in one process has after six steps without a break."""
    (state,) = crew1.run("rank_state_jobs:piped", None, (0, 6), None)
    return state


@pytest.mark.parametrize("saving", SIZES)
def test_a_pipe_goes_on_at_any_number_of_ranks(
    saving: int, crews: dict[int, Crew], trained: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    begun = crews[saving].run("rank_state_jobs:piped", None, (0, 3), str(tmp_path))
    assert [state is None for state in begun] == [False, True, True][:saving]
    assert list(begun[0]) == list(deep().state_dict())
    for loading, how in loadings(saving):
        state, *others = crews[loading].run("rank_state_jobs:piped", str(tmp_path), (3, 6), None, how)
        assert list(state) == list(trained) and others == [None] * (loading - 1)
        assert [name for name in trained if not same(state[name], trained[name])] == [], (saving, loading, how)
    plain = deep()
    plain.load_state_dict(Saved(tmp_path, "model"))
    assert all(same(value, begun[0][name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("size", SIZES)
def test_a_plain_modules_state_loads_on_every_rank_and_keys_of_nobody_on_none(
    size: int, crews: dict[int, Crew], trained: dict[str, torch.Tensor]
) -> None:
    for lacks in ("6.weight", "0.other", "2.weight", "other"):
        for words in crews[size].run("rank_state_jobs:loaded", trained, lacks):
            assert f'Unexpected key(s) in state_dict: "{lacks}"' in words


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_optimizer_state_goes_on_in_the_plain_module_and_at_any_number_of_ranks(
    kind: str, apart: bool, crews: dict[int, Crew]
) -> None:
    (expected,) = crews[1].run("rank_state_jobs:whole", kind, apart, None, (0, 4))
    for saving in SIZES:
        first, *others = crews[saving].run("rank_state_jobs:whole", kind, apart, None, (0, 2))
        assert others == [[(None, None)] * 2] * (saving - 1)
        assert all([state["4.weight"] is state["0.weight"] for state, _ in first])
        assert alike(first, expected[:2], 1e-12)  # a tied weight's stages are added in another order
        plain, optimizer = plain_from(kind, apart, copy.deepcopy(first[1]))
        for step in (2, 3):
            x, y = data(step)
            torch.nn.functional.mse_loss(plain(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert list(plain.state_dict()) == list(expected[3][0])
        assert alike((plain.state_dict(), optimizer.state_dict()), expected[3], 1e-12)
        for loading in dict.fromkeys(loading for loading, _ in loadings(saving)):
            (*_, last), *_ = crews[loading].run("rank_state_jobs:whole", kind, apart, first[1], (2, 4))
            assert alike(last, expected[3], 1e-12)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_an_optimizer_of_the_models_parameters_saves_and_loads_as_one_of_the_pipes(
    size: int, apart: bool, crews: dict[int, Crew]
) -> None:
    crew = crews[size]
    assert alike(crew.run("rank_state_jobs:by_name", True), crew.run("rank_state_jobs:by_name", False), 0)
    expected, *_ = crew.run("rank_state_jobs:whole", "adamw", apart, None, (0, 4))
    first, *_ = crew.run("rank_state_jobs:whole", "adamw", apart, None, (0, 2), True)
    last, *_ = crew.run("rank_state_jobs:whole", "adamw", apart, first[1], (2, 4), True)
    assert alike([*first, *last], expected, 0)


def test_a_whole_optimizer_state_has_the_names_that_parameters_got_after_the_pipe(crews: dict[int, Crew]) -> None:
    expected, *found = [crews[size].run("rank_state_jobs:renamed")[0] for size in SIZES]
    assert "3.parametrizations.weight.original0" in expected[0]["param_groups"][0]["param_names"]
    assert all(alike(state, expected, 1e-12) for state in found)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_loaded_a_whole_optimizer_state_saves_it_where_a_rank_has_or_trains_none_of_a_group(
    frozen: bool, crew2: Crew
) -> None:
    (saved, again), _ = crew2.run("rank_state_jobs:in_turn", frozen)
    assert alike(saved, again, 0) and [group["lr"] for group in again["param_groups"]] == [0.05, 0.05]


@pytest.mark.parametrize("name", ["0.weight", "4.weight"])
@pytest.mark.parametrize("size", SIZES)
def test_a_file_may_have_a_tied_weight_under_one_of_its_names(
    size: int, name: str, crews: dict[int, Crew], tmp_path: Path
) -> None:
    state = {key: torch.randn_like(value) for key, value in tied_and_frozen().state_dict().items()}
    state["4.weight"] = state["0.weight"]
    del state["4.weight" if name == "0.weight" else "0.weight"]
    save_file(state, tmp_path / "model.safetensors")
    state["0.weight"] = state["4.weight"] = state[name]
    for own in crews[size].run("rank_state_jobs:from_file", str(tmp_path)):
        assert all(torch.equal(own[key], state[key]) for key in own)


@pytest.mark.parametrize("names", [["0.weight"], ["4.weight"], ["0.weight", "4.weight"]])
@pytest.mark.parametrize("size", SIZES)
def test_a_tied_weight_is_what_it_is_in_the_plain_module_whatever_names_a_state_has(
    size: int, names: list[str], crews: dict[int, Crew]
) -> None:
    """Copies on ranks without their name in the state are loaded too."""
    state = {key: torch.randn_like(value) for key, value in tied_and_frozen().state_dict().items()}
    state = {key: value for key, value in state.items() if key in names or key not in ("0.weight", "4.weight")}
    plain = tied_and_frozen()
    plain.load_state_dict(state, strict=False)
    for own in crews[size].run("rank_state_jobs:from_state", state, False):
        assert all(torch.equal(own[key], plain.state_dict()[key]) for key in own)


def alike(one: Any, other: Any, rtol: float) -> bool:
    """Whether two states are the same, tensors up to a relative error."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key], rtol) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(alike(*pair, rtol) for pair in zip(one, other, strict=True))
    return bool(torch.allclose(one, other, rtol, rtol / 10) if isinstance(one, torch.Tensor) else one == other)


def plain_from(kind: str, apart: bool, states: tuple[Any, Any]) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    plain = tied_and_frozen()
    optimizer = KINDS[kind](groups_of(plain, apart))
    plain.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    return plain, optimizer


def test_the_plain_optimizers_own_state_loads_over_ranks_where_it_says_which_parameters_it_has(crew2: Crew) -> None:
    for named in (True, False):
        plain = deep()
        optimizer = torch.optim.AdamW(plain.named_parameters() if named else plain.parameters(), lr=0.25)
        plain(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        for names, found in crew2.run("rank_state_jobs:taken", optimizer.state_dict()):
            for name, moment in zip(names, found, strict=True):
                assert torch.equal(moment, optimizer.state[plain.get_parameter(name)]["exp_avg"])
    optimizer = torch.optim.AdamW([{"params": [each]} for each in plain.parameters()])
    for words in crew2.run("rank_state_jobs:taken", optimizer.state_dict()):
        assert re.search("group 0 of the state has 1 parameters by number, of the model's 8.*full_optimizer", words)


REFUSED = {
    "order": r"group 0 of the optimizer has its parameters in another order than the Pipe: \['4\.bias', '0\.weight'",
    "one each": r"group 0 of the optimizer has another lr on rank 1.*params=\[\] where a rank has none of a group's",
    "options": r"group 0 of the optimizer has another momentum on rank 1. Build the groups alike on.*params=\[\]",
    "tied": "the tied parameter '0.weight' is in group 1 of the optimizer on rank 1, and in group 0 on another. Build",
    "stranger": "the optimizer has a parameter that is none of the Pipe's",
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_no_one_optimizer_of_the_model_has_no_whole_state(how: str, crew2: Crew) -> None:
    for words in crew2.run("rank_state_jobs:refused_whole", how):
        assert re.search(REFUSED[how], words), words
