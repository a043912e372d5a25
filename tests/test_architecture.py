"""Does docs/ARCHITECTURE.md tell the truth: do its names exist, are all modules in the map, do import rules hold?"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
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


# ------------------------------------------------------------------------------------------------ the rooms of pipeline

LEVELS = (  # each imports only what stands above it
    "common", "skip", "data", "transports", "recompute", "gradients", "stage", "execution", "distributed", "entry",
    "pipe", "curvature",
)  # fmt: skip


def test_pipeline_has_few_rooms_and_each_says_what_it_is_and_imports() -> None:
    inside = [path for path in (ROOT / "pipeline").iterdir() if path.is_dir() or path.suffix == ".py"]
    entries = {path.stem for path in inside if not path.name.startswith("__")}
    assert entries == set(LEVELS) and len(entries) <= 12
    for room in (ROOT / "pipeline").rglob("__init__.py"):
        words = ast.get_docstring(ast.parse(room.read_text()))
        assert words, room
        if room.parent.parent.name == "pipeline" and room.parent.name != "curvature":
            assert re.search(r"\n\nImports .+\.", words), room


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    """(room, name) of what a file of pipeline imports from pipeline."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pipeline":
            for alias in node.names:
                parts = f"{node.module}.{alias.name}".split(".")
                yield parts[1], parts[-1]
        elif isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "pipeline" for alias in node.names), path


@pytest.mark.parametrize("level", range(len(LEVELS)), ids=LEVELS)
def test_a_room_imports_only_rooms_below_it_and_no_private_names(level: int) -> None:
    room = ROOT / "pipeline" / LEVELS[level]
    files = list(room.rglob("*.py")) or [room.with_suffix(".py")]
    assert files[0].exists()
    for path in files:
        for other, name in _imports(path):
            assert other in LEVELS[: level + 1], f"{path.relative_to(ROOT)} imports {other}"
            assert other == LEVELS[level] or not name.startswith("_"), f"{path.relative_to(ROOT)} imports {name}"


def _private_names_of_pipe() -> set[str]:
    """Methods and attributes that pipe.py gives a Pipe for itself."""
    tree = ast.parse((ROOT / "pipeline" / "pipe.py").read_text())
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names += [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    ]
    return {name for name in names if re.match(r"_(?!_)", name)}


def test_curvature_touches_no_private_name_of_a_pipe() -> None:
    private = _private_names_of_pipe()
    assert {"_setup", "_ranks"} <= private
    for path in (ROOT / "pipeline" / "curvature").rglob("*.py"):
        tree = ast.parse(path.read_text())
        own = {"self", "cls", *(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in private:
                owner = ast.unparse(node.value)
                assert owner in own, f"{path.relative_to(ROOT)}:{node.lineno} uses {owner}.{node.attr}"


# ------------------------------------------------------------------------------------- first lines say what a module is

INTERROGATIVE = re.compile(
    r"(Who|Whose|Whom|What|Which|When|Where|Why|How|Whether|Is|Are|Do|Does|Did|Has|Have|May|Must|Can|Could|Should|"
    r"Would|Will)\b"
)


def test_the_first_line_of_a_module_is_no_question() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
            assert first and "?" not in first and not INTERROGATIVE.match(first), f"{path.relative_to(ROOT)}: {first}"
