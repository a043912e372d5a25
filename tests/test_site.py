"""Laws of the documentation site: it builds without a warning, and has every page and every public name."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REFERENCE = ["pipeline", "pipeline.skip", "pipeline.curvature", "partition", "scheduler"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    options = ["-q", "-W", "--keep-going", "-d", str(folder / "read")]
    command = [sys.executable, "-m", "sphinx", *options, "docs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return folder


def test_every_public_name_is_in_the_reference_with_its_docstring(site: Path) -> None:
    for room in REFERENCE:
        module = importlib.import_module(room)
        page = (site / "reference" / f"{room.rpartition('.')[2]}.html").read_text()
        shown = set(re.findall(rf'<dt [^>]*id="{re.escape(room)}\.([\w.]+)"', page))
        assert set(module.__all__) <= shown, room
        for name in module.__all__:
            thing = getattr(module, name)
            assert inspect.getdoc(thing), name
            if inspect.isclass(thing):
                own = [key for key, value in vars(thing).items() if not key.startswith("_") and callable(value)]
                assert {f"{name}.{key}" for key in own} <= shown, name


def test_every_page_is_in_the_table_of_contents(site: Path) -> None:
    contents = (site / "guide.html").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f'href="{page.stem}.html' in contents or page.stem in ("index", "guide"), page.name


def test_words_are_found(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    assert "bubbl" in index and "hessian" in index.lower()
