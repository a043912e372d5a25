"""python -m pipeline curvature: its answers are the library's, what is wrong is said in words, with a status."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.__main__ import main
from pipeline.curvature import EmpiricalFisher, GaussNewton, Hessian
from pipeline.curvature.command import curvature
from pipeline.curvature.results.result import Result

SCRIPT = '''
import torch
from torch import nn
from pipeline import Pipe
from pipeline.curvature import GaussNewton

calls = []

def parts(chunks=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    return model, (torch.randn(8, 3).double(), torch.randn(8, 2).double()), nn.functional.mse_loss

def build():
    calls.append("build")
    model, *others = parts()
    return Pipe(model, [2, 2], chunks=2, devices=["cpu", "cpu"]), *others

def plain():
    return parts()

def resting():
    model, *others = parts()
    return model.eval(), *others

def named():
    model, data, loss_fn = parts()
    return {"model": model, "data": [data, data], "loss_fn": loss_fn, "loss_reduction": "mean"}

def operator():
    return GaussNewton(*parts())

OPERATOR = GaussNewton(*parts())

def two():
    return parts()[:2]

def odd():
    return {"model": parts()[0], "loss": 1}

def fails():
    raise ValueError("the script's own fault")

def frozen():
    model, *others = parts()
    return model.requires_grad_(False), *others

class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * (x.detach() ** 2)

class Cube(nn.Module):
    def forward(self, x):
        return Wrong.apply(x)

def wrong():
    model, *others = parts()
    model = nn.Sequential(model[0], Cube(), model[3])
    return {"model": model, "data": others[0], "loss_fn": others[1], "verify": False}
'''


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "fit_for_command.py").write_text(SCRIPT)
    yield str(tmp_path / "fit_for_command.py")
    sys.modules.pop("fit_for_command", None)


def parts() -> tuple[nn.Sequential, Any, Any]:
    names: dict[str, Any] = {}
    exec(SCRIPT, names)
    found: tuple[nn.Sequential, Any, Any] = names["parts"]()
    return found


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["curvature", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refusal(capsys: pytest.CaptureFixture[str], *words: str, status: int = 2) -> str:
    assert main(["curvature", *words]) == status
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


# ----------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("name", ["build", "plain", "named"])
def test_the_eigenvalues_of_the_command_are_those_of_the_library(
    script: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = answer(capsys, f"{script}:{name}", "--top", "3", "--save", str(tmp_path / "out"))
    expected = torch.linalg.eigvalsh(Hessian(*parts()) @ torch.eye(26).double())
    expected = expected[expected.abs().argsort(descending=True)][:3]
    shown = re.findall(r"^ +\d +([+-][\d.e+-]+)", text, re.MULTILINE)
    torch.testing.assert_close(torch.tensor([float(one) for one in shown]).double(), expected, rtol=1e-4, atol=1e-6)
    saved = Result.load(tmp_path / "out" / "top.npz")
    torch.testing.assert_close(saved.values, expected, rtol=1e-4, atol=1e-6)
    assert text.startswith("Hessian(26 x 26, float64)")


def test_all_that_is_asked_is_answered_in_order_and_saved(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, folder = tmp_path / "density.png", tmp_path / "deep" / "out"
    text = answer(
        capsys, f"{script}:build", "--density", str(picture), "--steps", "4", "--runs", "2", "--layers", "2", "--trace",
        "7", "--samples", "5", "--top", "--check", "--save", str(folder),
    )
    heads = ["2 stages", "check of the Hessian: all is well", "1 eigenvalue of the Hessian", "trace of Hessian",
             "Hessian by layers", "spectral density of Hessian", "picture in"]
    places = [text.index(head) for head in heads]
    assert places == sorted(places)
    found = {path.stem: Result.load(path) for path in folder.iterdir()}
    assert sorted(found) == ["check", "density", "layers", "top", "trace"]
    assert found["trace"].samples == 7 and found["density"].products == 8 and found["layers"].values.shape == (2, 2)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("matrix", "cls"), [("hessian", Hessian), ("gauss-newton", GaussNewton), ("fisher", EmpiricalFisher)]
)
def test_the_matrix_and_the_parameters_are_those_that_are_named(
    script: str, matrix: str, cls: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(capsys, f"{script}:plain", "--matrix", matrix, "--params", "0.weight,3", "--trace", "22", "--save",
           str(tmp_path))
    A = cls(*parts(), params=["0.weight", "3"])
    exact = (A @ torch.eye(A.shape[0]).double()).trace()
    trace = Result.load(tmp_path / "trace.npz")
    assert A.shape == (22, 22) and trace.size == 22 and trace.stopped == "exact"
    torch.testing.assert_close(torch.tensor(trace.value).double(), exact)


def test_the_numbers_of_the_command_reach_the_estimators(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--top 2 --which SA --tol 0.25 --trace 25 --rel 0.9 --layers --samples 12 --save".split()
    answer(capsys, f"{script}:plain", *words, str(tmp_path))
    top, trace, layers = (Result.load(tmp_path / f"{name}.npz") for name in ("top", "trace", "layers"))
    smallest = torch.linalg.eigvalsh(Hessian(*parts()) @ torch.eye(26).double())[0]
    assert (top.which, top.tol) == ("SA", 0.25) and (top.values >= smallest - 1e-9).all() and top.values[0] < 0
    assert trace.stopped == "tolerance" and 10 <= trace.samples < 25
    assert layers.values.shape == (2, 1) and layers.values[1] < 1.0 and layers.traces is not None


def test_progress_is_shown_on_a_terminal_unless_it_is_to_be_quiet(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    words = [f"{script}:plain", "--top", "--trace", "5", "--layers", "--density", "--steps", "2", "--runs", "2"]
    assert main(["curvature", *words, "--quiet"]) == 0 and capsys.readouterr().err == ""
    assert main(["curvature", *words]) == 0
    shown = capsys.readouterr().err
    assert all(what in shown for what in ("eigenpairs of", "trace of", "layers of", "density of"))


def test_what_is_not_asked_for_is_the_top_and_the_trace(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, f"{script}:plain", "--samples", "5")
    assert "1 eigenvalue of the Hessian" in text and "hutchinson, 5 products" in text and "layers" not in text


@pytest.mark.parametrize("name", ["operator", "OPERATOR"])
def test_an_operator_is_taken_as_it_is(script: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, f"{script}:{name}", "--trace").startswith("GaussNewton(26 x 26, float64), 1 stage\n")
    said = refusal(capsys, f"{script}:{name}", "--trace", "--matrix", "fisher", "--params", "0")
    assert "leaves nothing to say for --matrix, --params" in said


def test_train_mode_is_on_where_it_is_asked_for_and_seeded(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trace", "26"]
    evaluated, trained, again, resting, otherwise = (
        answer(capsys, f"{script}:{name}", *words, *more)
        for name, *more in (
            ["plain"], ["plain", "--train-mode"], ["plain", "--train-mode"], ["resting", "--train-mode"],
            ["plain", "--train-mode", "--seed", "1"],
        )
    )
    assert trained == again == resting and len({evaluated, trained, otherwise}) == 3


def test_a_module_may_be_named_as_well(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(Path(script).parent))
    assert answer(capsys, "fit_for_command:plain", "--trace", "3") == answer(capsys, f"{script}:plain", "--trace", "3")


def test_a_run_that_stops_goes_on_from_its_file(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"{script}:plain", "--top", "2", "--save", str(tmp_path), "--resume", str(tmp_path / "run.pt")]
    assert "NOT CONVERGED" in answer(capsys, *words, "--max-products", "9")
    assert (tmp_path / "run.pt").exists()
    answer(capsys, *words)
    resumed = Result.load(tmp_path / "top.npz")
    assert resumed.converged and not (tmp_path / "run.pt").exists()
    answer(capsys, *words[:5])
    assert torch.equal(Result.load(tmp_path / "top.npz").values, resumed.values)


def test_a_check_that_fails_ends_with_status_1_and_nothing_else_is_computed(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["curvature", f"{script}:wrong", "--check", "--top"]) == 1
    text = capsys.readouterr().out
    assert "SOMETHING IS WRONG" in text and "WRONG\n" in text and "eigenvalue" not in text


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fit.py:build", "--top", "x"], "Invalid value for '--top': 'x' is not a valid integer range."),
        (["fit.py:build", "--top", "0"], "0 is not in the range x>=1"),
        (["fit.py:build", "--tol", "2"], "2.0 is not in the range 0<x<1"),
        (["fit.py:build", "--tol", "small"], "'small' is not a valid float range"),
        (["fit.py:build", "--params", "0,,3"], "no list of names"),
        (["fit.py:build", "--matrix", "jacobian"], "'jacobian' is not one of 'hessian'"),
        (["fit.py:build", "--trace", "--resume", "run.pt"], "--resume is for --top"),
        (["fit.py:build", "--trace", "--max-products", "9"], "--max-products is for --top"),
        (["fit.py:build", "--top", "--rel", "0.1"], "--rel is for --trace"),
        ([], "Missing argument 'TARGET'"),
        (["build"], "'build' is no target. Give FILE.py:NAME"),
        (["nowhere.py:build"], "there is no file nowhere.py"),
        (["no_such_module:build"], "there is no module no_such_module. Name a script with its suffix"),
        (["torch.no_such_module:build"], "there is no module torch.no_such_module"),
        (["fit.py:build", "--density", "out.txt"], r"a picture goes to a file named *.png"),
        (["fit.py:build", "--density", "no/such/folder/out.png"], "its folder is not there"),
    ],
)
def test_a_wrong_command_is_told_in_words_with_status_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("nothing", [], "has no 'nothing'. It has parts, build, plain, resting"),
        ("two", [], "gives a tuple of 2. Return (model, data, loss_fn)"),
        ("SCRIPT", [], "has no 'SCRIPT'"),
        ("calls", [], "gives a list. Return"),
        ("odd", [], "gives a dict that does not fit"),
        ("frozen", [], "there is no parameter to differentiate by"),
        ("plain", ["--params", "7"], "params has '7', which is no parameter or layer"),
        ("plain", ["--params", "0,3.bias", "--top", "99"], "ask for 1 to 18"),
    ],
)  # fmt: skip
def test_what_a_script_gives_wrong_is_told_in_words_with_status_2(
    script: str, name: str, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["curvature", f"{script}:{name}", *more]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and "Traceback" not in captured.err


def test_a_file_in_the_way_of_the_folder_is_told_before_anything_is_built(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    assert "cannot make the folder" in refusal(capsys, f"{script}:fails", "--save", str(tmp_path / "taken"))


def test_what_the_script_itself_raises_keeps_its_traceback(script: str) -> None:
    with pytest.raises(ValueError, match="the script's own fault"):
        main(["curvature", f"{script}:fails"])


def test_several_processes_do_not_each_analyse_a_whole_model(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for name in ("plain", "operator", "build"):
        said = refusal(capsys, f"{script}:{name}", "--trace")
        assert said.startswith("rank 1: there are 2 processes, and") and "Return a Pipe" in said


def test_matplotlib_is_missed_before_anything_is_computed(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install" in refusal(capsys, f"{script}:fails", "--density", "out.png")


def test_an_interrupted_run_says_where_it_is_saved(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.curvature.estimates.eigenpairs._measured", interrupted)
    assert main(["curvature", f"{script}:plain", "--top", "--resume", str(tmp_path / "run.pt")]) == 130
    said = capsys.readouterr().err
    assert said.startswith("interrupted\n") and f"is in {tmp_path / 'run.pt'}" in said


@pytest.mark.soak
def test_the_command_line_runs_as_a_module(script: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline", "curvature", f"{script}:plain", "--trace", "3", "--save"]
    ran = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and "trace of Hessian" in ran.stdout and ran.stderr == ""


def test_an_unknown_command_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve"]) == 2
    assert "No such command 'curve'" in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curvature", "--help"]) == 0
    text = capsys.readouterr().out
    for option in curvature.params:
        assert option.opts[0] in text or option.name == "target"


def test_penstock_is_a_script_that_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="penstock")
    assert script.load() is main


def test_the_schedules_are_a_command_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("schedules draw gpipe --lanes 2 --chunks 2".split()) == 0
    assert "makespan 9 slots" in capsys.readouterr().out
    assert main("schedules draw gpipe --lanes 0 --chunks 2".split()) == 2
    assert capsys.readouterr().err.startswith("lanes is 0")
