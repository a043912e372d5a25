"""Does docs/ARCHITECTURE.md tell the truth: do its names exist, are all modules in the map, do import rules hold?"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
PACKAGES = ("scheduler", "partition", "pipeline")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py")
QUOTED = re.findall(r"`([^`\n]+)`", TEXT)


def test_every_path_on_the_page_exists() -> None:
    paths = [name for name in QUOTED if re.fullmatch(r"[\w./]+\.py|[\w./]+/", name)]
    assert len(paths) > 30
    assert [name for name in paths if not (ROOT / name).exists()] == []


def test_every_dotted_name_on_the_page_exists() -> None:
    names = [name for name in QUOTED if re.fullmatch(rf"({'|'.join(PACKAGES)})\.[\w.]+", name) and name[-3:] != ".py"]
    assert names
    for name in names:
        owner, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(owner), attribute), name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_module_is_in_the_map_and_says_what_it_is_for(path: Path) -> None:
    assert f"`{path.relative_to(ROOT)}`" in TEXT
    assert ast.get_docstring(ast.parse(path.read_text()))


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [("scheduler", {"torch", "partition", "pipeline"}), ("partition", {"pipeline"})],
)
def test_packages_import_only_downward(package: str, forbidden: set[str]) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert not imported(path) & forbidden, path


def test_the_scheduler_needs_no_torch() -> None:
    code = "import sys, scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
