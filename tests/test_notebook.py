"""Laws: the notebook runs, is kept without outputs, and shows its results as lines and pictures; so does any result."""

from __future__ import annotations

import base64
import html
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from torch import nn
from torch.nn import functional

from partition import plan, profile
from pipeline import GradStore, Pipe
from pipeline.curvature import Hessian
from scheduler import Costs, search

NOTEBOOK = Path(__file__).parent.parent / "examples" / "first_hour.ipynb"


def test_the_notebook_runs_and_shows_lines_and_pictures() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
    run = NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = [output.get("data", {}) for cell in run.cells for output in cell.get("outputs", ())]
    assert sum("image/svg+xml" in data for data in shown) == 2
    assert sum("text/html" in data for data in shown) == 6
    assert all(len(data["text/plain"].splitlines()) <= 40 for data in shown)


def results(stages: int, chunks: int) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(stages)]
    model, x, y = nn.Sequential(*layers), torch.randn(2 * chunks, 4), torch.randn(2 * chunks, 4)
    pipe = Pipe(model, [1] * stages, chunks)
    loss_fn = functional.mse_loss

    def with_metric(output: Any, target: Any) -> Any:
        return loss_fn(output, target), {"largest": (output.amax(1).sum(), len(output))}

    step = pipe.step(x, y, loss_fn=with_metric, trace=True, grads="store", outputs=True, clip_grad_norm=1.0)
    hessian = Hessian(pipe, (x, y), loss_fn)
    job: Any = {"loss_fn": loss_fn, "target": y}
    return {
        "step": step, "store": step.grads, "timeline": step.timeline, "report": pipe.report(step), "pipe": pipe,
        "profile": profile(model, x, chunks=chunks, **job), "found": search(Costs(), stages, chunks, effort=0.1),
        "plan": plan(model, x, devices=stages, memory=2**20, chunks=[chunks], **job), "hessian": hessian,
        "eigenpairs": hessian.top_eigenpairs(1), "trace": hessian.trace(4), "diagonal": hessian.diagonal(4),
        "density": hessian.density(runs=1, steps=5), "empty store": GradStore(model),
    }  # fmt: skip


@pytest.mark.parametrize("stages, chunks", [(1, 1), (2, 5), (6, 16)])
def test_a_result_is_a_few_lines_and_html_holds_the_same_and_a_picture(stages: int, chunks: int) -> None:
    made = results(stages, chunks)
    for name, value in made.items():
        for text in (str(value), repr(value)):
            lines = text.splitlines()
            assert 0 < len(lines) <= 40 + (name == "pipe") * 20 and max(map(len, lines)) <= 140, (name, text)
        if hasattr(value, "_repr_html_"):
            shown = value._repr_html_()
            text, picture = re.fullmatch(r"<pre>(.*)</pre>(.*)", shown, re.DOTALL).groups()  # type: ignore[union-attr]
            assert html.unescape(text) == str(value) and "<" not in text
            if picture:
                data = re.fullmatch(r'<img src="data:image/svg\+xml;base64,(.*)">', picture)
                assert data and fromstring(base64.b64decode(data.group(1))).tag.endswith("svg")
            assert bool(picture) == (name in ("found", "eigenpairs", "density", "diagonal", "trace")), name
    step = made["step"]
    assert f"loss {step.loss.item():.6g}, gradient norm {step.grad_norm.item():.6g}" in str(step)
    assert f"largest {step.metrics['largest'].item():.6g}" in str(step)
    assert f"outputs: Tensor[{2 * chunks}, 4]" in str(step)
    assert repr(step.grads) == f"GradStore(gradients of {2 * stages} of {2 * stages} parameters, {80 * stages} bytes)"
    assert "of 2 parameters, 0 bytes" in repr(made["empty store"]) or stages > 1


def test_without_matplotlib_the_lines_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    made = results(2, 2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    for name in ("found", "density"):
        assert made[name]._repr_html_() == f"<pre>{html.escape(str(made[name]))}</pre>"
    assert made["timeline"]._repr_svg_() is None
