"""Progress: counts and notes arrive on stderr; nothing does when it is off, or without tqdm."""

from __future__ import annotations

import re
import sys

import pytest
import torch
import tqdm as real_tqdm
from dense_map import DenseMap, symmetric

from pipeline.curvature.estimates.density import density
from pipeline.curvature.estimates.diagonal import diagonal
from pipeline.curvature.estimates.eigenpairs import top_eigenpairs
from pipeline.curvature.estimates.frobenius import frobenius_squared
from pipeline.curvature.estimates.resume import Resumable
from pipeline.curvature.estimates.solve import solve
from pipeline.curvature.estimates.trace import trace


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch):
    """tqdm would leave a thread that wakes up bars which stand still; other tests count threads."""
    monkeypatch.setattr(real_tqdm.tqdm, "monitor_interval", 0)


def bar_of(title: str, total: int | None, show: bool = True) -> Resumable:
    return Resumable(DenseMap(torch.eye(3)), title, total, show=show)


def run(total: int | None, show: bool = True) -> None:
    with bar_of("trace of Hessian", total, show) as bar:
        bar.advance(4, note="638 +- 12")
        bar.advance(1)
        bar.advance(0, note="640 +- 9")


def last_line(text: str) -> str:
    return text.replace("\r", "\n").strip().splitlines()[-1].strip()


def test_nothing_is_printed_when_it_is_off(capfd):
    run(10, show=False)
    assert capfd.readouterr() == ("", "")


def test_the_bar_shows_name_count_total_and_the_last_note(capfd):
    run(10)
    out, err = capfd.readouterr()
    assert out == ""
    assert last_line(err).startswith("trace of Hessian:  50%") and " 5/10 [" in err and "640 +- 9" in last_line(err)


def test_the_bar_without_a_total_counts(capfd):
    run(None)
    assert last_line(capfd.readouterr().err).startswith("trace of Hessian: 5it [")


def test_a_note_without_a_step_is_shown_at_once(capfd):
    with bar_of("trace of Hessian", 10) as bar:
        capfd.readouterr()
        bar.advance(0, note="640 +- 9")
        assert "640 +- 9" in capfd.readouterr().err


def test_without_tqdm_there_is_no_bar(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    run(10)
    assert capfd.readouterr() == ("", "")


def test_an_exception_passes_and_the_bar_ends_where_it_was(capfd):
    with pytest.raises(KeyError, match="from within"):
        with bar_of("solve", 8) as bar:
            bar.advance(3)
            raise KeyError("from within")
    err = capfd.readouterr().err
    assert "3/8" in last_line(err) and err.endswith("\n")
    bar.advance(2)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("show", [True, False])
def test_outside_of_with_nothing_is_shown(show, capfd):
    bar_of("solve", 8, show).advance(3, note="1.0")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("estimate", [
    lambda A: trace(A, 11, show=True), lambda A: trace(A, 12, method="hutch++", show=True),
    lambda A: trace(A, 12, method="xtrace", show=True), lambda A: diagonal(A, 11, show=True),
    lambda A: frobenius_squared(A, 11, show=True), lambda A: density(A, runs=3, steps=7, show=True),
    lambda A: top_eigenpairs(A, 2, show=True),
    lambda A: solve(A, A.space.random("normal", 0, 0), damping=0.1, show=True),
])  # fmt: skip
def test_the_bar_of_an_estimate_counts_its_products(estimate, capfd):
    A = DenseMap(symmetric(torch.linspace(1, 5, 40)))
    estimate(A)
    (count,) = re.findall(r" (\d+)(?:/\d+ |it )\[", last_line(capfd.readouterr().err))
    assert int(count) == A.asked > 0
