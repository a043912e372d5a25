"""Laws: each recipe runs and learns, as it asserts itself, and the page shows lines of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cover import either
from recipe_scripts import EXAMPLES, RECIPES, SECOND_ORDER, ran

PAGE = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text()


@pytest.mark.parametrize("name", either(list(RECIPES)[1::2], list(RECIPES)))
def test_a_recipe_runs_and_learns(name: str) -> None:
    assert ran(name)


@pytest.mark.parametrize("workers", [(), ("threads",)], ids=["inline", "threads"])
@pytest.mark.parametrize("name", SECOND_ORDER)
def test_a_script_of_second_derivatives_gives_the_plain_modules(name: str, workers: tuple[str, ...]) -> None:
    assert "1e-10" in ran(name, *workers)


def test_the_page_tells_of_each_recipe_and_shows_lines_of_them() -> None:
    assert set(re.findall(r"\(\.\./examples/(\w+)\.py\)", PAGE)) == {*RECIPES, *SECOND_ORDER}
    texts = [(EXAMPLES / f"{name}.py").read_text() for name in (*RECIPES, *SECOND_ORDER)]
    lines = {line.strip() for text in texts for line in text.splitlines()}
    shown = {line.strip() for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
             for line in block.splitlines()}  # fmt: skip
    assert len(shown) > 10 and shown <= lines
