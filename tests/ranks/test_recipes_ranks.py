"""Law: a recipe prints over two ranks what it prints in one process."""

from __future__ import annotations

import pytest
from crew import Crew
from recipe_scripts import EXAMPLES, RECIPES, SECOND_ORDER, ran
from under_torchrun import torchrun

LLAMA = "finetune_llama"
DRAWS = "hessian_llama"  # vectors over ranks are not those of one process
OTHERS = [pytest.param(name, marks=pytest.mark.soak) for name in RECIPES if name not in (LLAMA, DRAWS)]


@pytest.mark.parametrize("name", [LLAMA, *OTHERS])
def test_a_recipe_gives_the_same_over_ranks(name: str, crew2: Crew) -> None:
    printed = crew2.run("recipe_scripts:ran", name, init=False)
    assert printed == [ran(name), "" if name == LLAMA else printed[0]]


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
