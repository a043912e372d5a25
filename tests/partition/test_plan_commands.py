"""Laws of `penstock profile` and `penstock plan`: they print what the functions return, and refuse in words."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from partition import Plan, Profile, plan, profile
from pipeline import Pipe
from pipeline.__main__ import main
from scheduler import Link

SCRIPT = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)]), torch.rand(8, 16)

def trained():
    return *build(), nn.functional.mse_loss, torch.rand(8, 16)

def timed():
    return build()[0], torch.rand(3, 8, 16)

wrong = 3
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "fit.py"
    path.write_text(SCRIPT)
    return str(path)


def given() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)]), torch.rand(8, 16)


def test_profile_prints_the_profile_and_writes_json(script: str, tmp_path: Path, capsys: Any) -> None:
    expected = profile(*given(), chunks=2, device="meta", optimizer=torch.optim.Adam)
    words = ["profile", f"{script}:build", "--chunks", "2", "--device", "meta"]
    assert main(words) == 0 and capsys.readouterr().out == f"{expected}\n"
    assert main([*words, "--json", "--save", str(tmp_path / "p.json")]) == 0
    assert Profile.from_json(capsys.readouterr().out) == expected == Profile.load(tmp_path / "p.json")
    assert main(["profile", f"{script}:trained", "--timeout", "0", "--optimizer", "0"]) == 0
    assert "loss" in capsys.readouterr().out
    expected = profile(given()[0], torch.rand(3, 8, 16), chunks=4, batch_dim=1, device="meta")
    words = [f"{script}:timed", "--chunks", "4", "--batch-dim", "1", "--device", "meta", "--optimizer", "0"]
    assert main(["profile", *words]) == 0 and capsys.readouterr().out == f"{expected}\n"


def test_plan_prints_the_plan_which_a_pipe_takes(script: str, capsys: Any) -> None:
    model, x = given()
    memory = 14 * 2**10
    expected = plan(model, x, devices=["cpu", "cpu"], memory=memory, chunks=[2, 4], schedules=["gpipe", "1f1b"],
                    device="meta", flops=1e9, optimizer=torch.optim.Adam, speed=[1.0, 2.0])  # fmt: skip
    words = ["plan", f"{script}:build", "--devices", "cpu,cpu", "--memory", "14KiB", "--chunks", "2,4", "--schedules",
             "gpipe,1f1b", "--device", "meta", "--flops", "1e9", "--speed", "1,2"]  # fmt: skip
    assert main(words) == 0 and capsys.readouterr().out == f"{expected}\n"
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr().out
    assert Plan.from_json(printed) == expected and json.loads(printed)["memory"] == [memory, memory]
    assert torch.equal(Pipe.from_plan(model, Plan.from_json(printed))(x), model(x))


def test_plan_takes_links_and_the_order_of_devices(script: str, capsys: Any) -> None:
    model, x = given()
    expected = plan(model, x, devices=2, speed=[1.0, 2.0], chunks=2, device="meta", flops=1e9, reorder=False,
                    link=Link(1e-6, 1e9), optimizer=torch.optim.Adam)  # fmt: skip
    words = ["plan", f"{script}:build", "--devices", "2", "--speed", "1,2", "--chunks", "2", "--device", "meta"]
    assert main([*words, "--flops", "1e9", "--keep-order", "--latency", "1e-6", "--bandwidth", "1e9"]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize("words, told", [
    (["plan", "{}:build"], "Missing option '--devices'"),
    (["plan", "{}:build", "--devices", "2", "--memory", "1 heap"], "'1 heap' is no size such as 24GiB"),
    (["plan", "{}:build", "--devices", "2", "--memory", "1KiB", "--device", "meta", "--chunks", "2"],
     "no plan fits. The nearest"),
    (["plan", "{}:build", "--devices", "2", "--chunks", "2,x"],
     "Invalid value for '--chunks': 'x' is not a number, nor a list"),
    (["plan", "{}:build", "--devices", "2", "--memory", "1.2.3GB"], "'1.2.3GB' is no size such as 24GiB, nor a list"),
    (["plan", "{}:build", "--devices", "2", "--schedules", "best"], "there is no schedule 'best'"),
    (["profile", "{}:wrong"], "gives a int, and not (model, sample)"),
    (["profile", "{}:missing"], "has no 'missing'. It has build, trained, timed"),
    (["profile", "{}:build", "--optimizer", "adamant"], "'adamant' is none of sgd, momentum, adam, adamw, and no"),
    (["profile", "{}:build", "--chunks", "0"], "chunks is 0, but must be a whole number of at least 1"),
], ids=str)  # fmt: skip
def test_what_cannot_be_is_refused_in_words(words: list[str], told: str, script: str, capsys: Any) -> None:
    assert main([word.format(script) for word in words]) == 2
    assert told in capsys.readouterr().err


def test_what_was_measured_is_printed_although_its_file_cannot_be_written(script: str, capsys: Any) -> None:
    assert main(["profile", f"{script}:build", "--device", "meta", "--save", f"{script}/profile.json"]) == 2
    told = capsys.readouterr()
    assert told.out.startswith("a chunk of") and "Could not open file" in told.err
