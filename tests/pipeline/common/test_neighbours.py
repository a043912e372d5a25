"""Packages of other projects that have the names of ours are errors in words, not strange ImportErrors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["partition", "scheduler"])
@pytest.mark.parametrize("is_package", [True, False])
def test_a_package_of_another_project_is_named(name, is_package, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / ("__init__.py" if is_package else "data.txt")).write_text("")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    code = "import sys; sys.modules['torch'] = None; import pipeline"  # it is found before torch is imported
    command = [sys.executable, "-S", "-P", "-c", code]
    done = subprocess.run(command, env={"PYTHONPATH": paths}, capture_output=True, text=True)
    told = done.stderr.splitlines()[-1]
    if is_package:
        assert f"ImportError: penstock-torch brings a package '{name}', at {ROOT / name}" in told
        assert str(tmp_path / name / "__init__.py") in told and "rename it" in told
    else:  # ours comes first: Python takes a folder without __init__.py only where it finds no package
        assert "penstock-torch" not in told
