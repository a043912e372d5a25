"""The example and the command line: the same words and numbers in one process and under torchrun."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from crew import Crew
from under_torchrun import Ran, torchrun

from pipeline.__main__ import main
from pipeline.curvature.results.result import Result

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "hessian.py"
SCRIPT = '''
import torch
from torch import nn
from pipeline import Pipe

def build():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]
    x, y = torch.randn(8, 3).double(), torch.randn(8, 2).double()
    return Pipe(nn.Sequential(*layers).double(), [2, 1], chunks=2), (x, y), nn.functional.mse_loss

def plain():
    return nn.Linear(3, 2), (torch.ones(2, 3), torch.ones(2, 2)), nn.functional.mse_loss
'''


def without_numbers(text: str) -> list[str]:
    """The words of what was printed: last digits differ, and there is no twin to compare with over ranks."""
    lines = [line for line in text.splitlines() if "double backward" not in line]
    return [re.sub(r"\s+", " ", re.sub(r"[-+]?\d[\d.,e+-]*", "#", line)) for line in lines]


@pytest.mark.soak
def test_the_example_tells_the_same_in_one_process_and_over_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hessian.py", "--quick", "--out", str(tmp_path / "one")])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    alone = capsys.readouterr().out
    ran = torchrun(EXAMPLE, ["--quick", "--out", str(tmp_path / "two")], timeout=180)
    assert ran.code == 0, ran.stderr
    assert without_numbers(ran.stdout) == without_numbers(alone) != []
    assert "check of the Hessian: all is well" in ran.stdout and ran.stdout.count("spectral density") == 1
    for name, field in ("sharpness", "values"), ("density", "nodes"), ("layers", "values"), ("trace", "draws"):
        one, two = (getattr(Result.load(tmp_path / where / f"{name}.npz"), field) for where in ("one", "two"))
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
        assert (tmp_path / "two" / f"{name}.png").exists()
    parts = [Result.load(tmp_path / "two" / f"top.rank{rank}.npz") for rank in (0, 1)]
    assert torch.equal(parts[0].values, parts[1].values)
    names = [set(part.vectors[0]) for part in parts]
    assert names[0] and names[1] and not names[0] & names[1]
    squares = [float(entries.double().square().sum()) for part in parts for entries in part.vectors[0].values()]
    assert abs(sum(squares) - 1.0) < 1e-5


LAUNCHERS = ["crew", pytest.param("torchrun", marks=pytest.mark.soak)]


def over_ranks(by: str, crew2: Crew, words: list[str]) -> Ran:
    """How a command ends over two ranks, and what both print."""
    if by == "torchrun":
        return torchrun("-m", ["pipeline", *words])
    codes, *written = zip(*crew2.run("rank_command:ran", words, init=False), strict=True)
    return Ran(max(codes), *map("".join, written))


@pytest.mark.parametrize("by", LAUNCHERS)
def test_the_command_line_over_ranks_prints_once_and_gives_the_numbers_of_one_process(
    by: str, crew2: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "fit_over_ranks.py").write_text(SCRIPT)
    words = ["curvature", f"{tmp_path}/fit_over_ranks.py:build", "--check", "--top", "2", "--trace", "--save"]
    ran = over_ranks(by, crew2, [*words, str(tmp_path / "two")])
    assert ran.code == 0, ran.stderr
    assert main([*words, str(tmp_path / "one")]) == 0
    sys.modules.pop("fit_over_ranks")
    alone = capsys.readouterr().out
    assert ran.stdout.startswith("Hessian(26 x 26, float64), 2 stages over 2 ranks\n")
    assert without_numbers(ran.stdout)[1:] == without_numbers(alone)[1:]
    for name, one_file in ("top.rank1", "top"), ("trace", "trace"):
        two, one = Result.load(tmp_path / "two" / f"{name}.npz"), Result.load(tmp_path / "one" / f"{one_file}.npz")
        field = "values" if "top" in name else "draws"
        torch.testing.assert_close(getattr(two, field), getattr(one, field), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("by", LAUNCHERS)
def test_a_wrong_command_over_ranks_is_told_and_fails(by: str, crew2: Crew, tmp_path: Path) -> None:
    (tmp_path / "fit_over_ranks.py").write_text(SCRIPT)
    ran = over_ranks(by, crew2, ["curvature", f"{tmp_path}/fit_over_ranks.py:plain"])
    assert ran.code and "there are 2 processes, and" in ran.stderr and "Return a Pipe" in ran.stderr
    assert ran.stdout == ""
