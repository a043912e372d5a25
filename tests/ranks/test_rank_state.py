"""What 1, 2 or 3 processes save, 1, 2 or 3 others load, and training goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from by_chunks import same
from crew import Crew
from rank_state_jobs import deep
from state_training import net, uninterrupted

from pipeline.saved import Saved

SIZES = (1, 2, 3)


@pytest.fixture(scope="module")
def crew1():
    crew = Crew(1)
    yield crew
    crew.stop()


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
        for loading in SIZES:
            for how in ("load", "Saved"):
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
    for loading in SIZES:
        for how in ("load", "Saved"):
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
