"""Laws of the distribution: what is built here installs into an empty environment, and works away from the checkout.

Run by `make package`. The environment is built with everything that the package asks for, under constraints.txt.
"""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from nursery import ENVIRONMENT

ROOT = Path(__file__).parents[2]
ROOMS = ("pipeline", "partition", "scheduler")


def run(*command: str | Path, cwd: Path) -> str:
    of_tests = ENVIRONMENT.keys()  # in which no name of a host is looked up
    own = {key: value for key, value in os.environ.items() if not (key.startswith("PYTHON") or key in of_tests)}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this checkout, and the wheel that was made from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="session")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which the wheel and its command line are installed."""
    home = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", home, cwd=home)
    found = home / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    run(found, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{wheel}[cli]", cwd=home)
    return found


def sources() -> set[str]:
    return {str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")}


def test_the_wheel_has_every_module_and_says_that_it_is_typed(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if name.endswith(".py")} == sources()
    assert {f"{room}/py.typed" for room in ROOMS} <= set(names)
    assert {name.partition("/")[0] for name in names} == {*ROOMS, f"penstock_torch-{version()}.dist-info"}


def version() -> str:
    (found,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "pipeline" / "__init__.py").read_text(), re.MULTILINE)
    return str(found)


def test_the_metadata_tell_version_license_pythons_and_readme(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    files = zipfile.ZipFile(wheel)
    told = email.message_from_bytes(files.read(f"penstock_torch-{version()}.dist-info/METADATA"))
    assert (told["Name"], told["Version"]) == ("penstock-torch", version())
    assert told["License-Expression"] or "BSD" in str(told["License"])
    assert told["Description-Content-Type"] == "text/markdown" and "# Penstock" in str(told.get_payload())
    assert "Typing :: Typed" in told.get_all("Classifier", [])


def test_the_sdist_has_what_the_wheel_is_built_from(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    names = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    assert {*sources(), "setup.cfg", "pyproject.toml", "README.md", "LICENSE"} <= names


def test_it_runs_away_from_the_checkout(python: Path, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    first = [block for block in blocks if "transformers" not in block][:2]  # which is not installed there
    first.append("import pipeline\nprint(pipeline.__file__, pipeline.__version__)\n")
    (tmp_path / "readme.py").write_text("\n".join(first))
    where, told = run(python, "readme.py", cwd=tmp_path).split()[-2:]
    assert str(python.parents[1]) in where and told == version()


def test_its_command_runs(python: Path, tmp_path: Path) -> None:
    drawn = run(python.with_name("penstock"), *"schedules draw 1f1b --lanes 2 --chunks 2".split(), cwd=tmp_path)
    assert "lane 1 |" in drawn
    assert "usage" in run(python, "-m", "pipeline", "--help", cwd=tmp_path).lower()
