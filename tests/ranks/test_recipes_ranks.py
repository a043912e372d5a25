"""Law: a recipe prints over two ranks what it prints in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from crew import Crew
from recipe_scripts import EXAMPLES, RECIPES, SECOND_ORDER, ran
from safetensors.torch import load_file
from under_torchrun import torchrun

LLAMA = "finetune_llama"
DRAWS = "hessian_llama"  # vectors over ranks are not those of one process
OTHERS = [pytest.param(name, marks=pytest.mark.soak) for name in RECIPES if name not in (LLAMA, DRAWS)]


@pytest.mark.parametrize("name", [LLAMA, *OTHERS])
def test_a_recipe_gives_the_same_over_ranks(name: str, crew2: Crew) -> None:
    first, second = crew2.run("recipe_scripts:ran", name, init=False)
    assert first == ran(name) and second in ("", first)  # some print on rank 0 alone


def test_the_trainer_of_transformers_gives_the_same_over_ranks_and_saves_the_same(crew2: Crew, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    alone = ran("trainer", "--epochs", "1", "--out", str(folders[0])).splitlines()[-1]
    first, second = crew2.run("recipe_scripts:ran", "trainer", "--epochs", "1", "--out", str(folders[1]), init=False)
    assert first.splitlines()[-1] == alone and not second
    one, two = [load_file(folder / "checkpoint-8" / "model.safetensors") for folder in folders]
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.soak
def test_a_recipe_gives_the_same_under_torchrun() -> None:
    assert torchrun(EXAMPLES / f"{LLAMA}.py", RECIPES[LLAMA], timeout=180.0).stdout == ran(LLAMA)


@pytest.mark.parametrize("name", SECOND_ORDER)
def test_a_script_of_second_derivatives_gives_what_the_plain_module_gives_over_ranks(name: str, crew2: Crew) -> None:
    assert all("1e-10" in printed for printed in crew2.run("recipe_scripts:ran", name, init=False))


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", SECOND_ORDER)
def test_a_script_of_second_derivatives_runs_under_torchrun(name: str, size: int) -> None:
    over = torchrun(EXAMPLES / f"{name}.py", nproc=size, timeout=120.0)
    assert over.code == 0 and over.stdout.count("1e-10") == size, over
