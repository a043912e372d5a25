"""Law: a recipe prints over two ranks what it prints in one process."""

from __future__ import annotations

import pytest
from crew import Crew
from recipe_scripts import EXAMPLES, RECIPES, ran
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
