"""Spectra of layers and sharpness over training: units, order, prints and pictures of what they gather."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import pytest
import torch
from dense_map import DenseMap, symmetric
from dense_ranks import over_ranks
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure

from pipeline.curvature.by_layers import LayerSpectra
from pipeline.curvature.estimates.eigenpairs import Eigenpairs, top_eigenpairs
from pipeline.curvature.estimates.trace import Trace, trace
from pipeline.curvature.results.plots import symlog
from pipeline.curvature.results.result import Result
from pipeline.curvature.results.resultfile import ResultError, write_result
from pipeline.curvature.results.sharpness import SharpnessHistory


@dataclass
class Numbers:
    values: dict[str, float]
    stderr: dict[str, float]


def pairs(*values: float, residual: float = 0.01, scale: float = 10.0) -> Eigenpairs:
    residuals = torch.full((len(values),), residual)
    return Eigenpairs("Hessian", "LM", torch.tensor(values), [], residuals, scale, 12, True, "", 0.1)


def number(value: float, stderr: float) -> Trace:
    return Trace(10, "samples", "Hessian", value, stderr, torch.zeros(10), "hutchinson", 82)


def spectra(traces: Numbers | None = None) -> LayerSpectra:
    sizes = {"0": 1200, "2.bias": 1, "4": 30}
    values = torch.tensor([[640.25, 1.0], [-0.5, math.nan], [3.0, 2.0]], dtype=torch.float64)
    by_layer = [] if traces is None else [traces.values, traces.stderr]
    numbers = [torch.tensor([of[name] for name in sizes], dtype=torch.float64) for of in by_layer]
    return LayerSpectra(list(sizes), list(sizes.values()), values, values * 0 + 0.1, "Hessian", *numbers)


TRACES = Numbers({"4": 5.5, "0": 700.0, "2.bias": -0.5}, {"0": 12.34, "2.bias": 0.0, "4": math.inf})


def axes():
    return Figure().subplots()


def bar_heights(ax):
    bars = [container for container in ax.containers if isinstance(container, BarContainer)]
    return [[bar.get_width() for bar in container] for container in bars]


def error_bars(ax):
    """Of each curve: (x, y, half the length of its bar) for each point."""
    found = []
    for container in ax.containers:
        if isinstance(container, ErrorbarContainer):
            line, _, (bars,) = container
            ends = [segment[:, 1] for segment in bars.get_segments()]
            found.append([(x, y, (high - low) / 2) for x, y, (low, high) in zip(*line.get_data(), ends, strict=True)])
    return found


def test_spectra_of_layers_print_a_row_for_each_in_the_order_of_the_sizes():
    assert str(spectra(TRACES)) == (
        "Hessian by layers, 1,231 rows in all\n"
        "  layer    rows   eigenvalue 1  eigenvalue 2      trace  mean eigenvalue\n"
        "  0       1,200  640.25 +- 0.1      1 +- 0.1  700 +- 12          0.58333\n"
        "  2.bias      1    -0.5 +- 0.1             -  -0.5 +- 0             -0.5\n"
        "  4          30       3 +- 0.1      2 +- 0.1        5.5          0.18333"
    )
    assert str(spectra()).splitlines()[1] == "  layer    rows   eigenvalue 1  eigenvalue 2"


def test_errors_of_eigenvalues_are_in_their_unit():
    eigenvalues = torch.linspace(1.0, 2000.0, 60, dtype=torch.float64) ** 1.2
    top = top_eigenpairs(DenseMap(symmetric(eigenvalues)), 3, tol=1e-2)
    found = SharpnessHistory("dense matrix").with_entry(0, top)
    assert found.value_errors[0].equal(top.residuals * top.scale)
    distance = (found.values[0][:, None] - eigenvalues).abs().min(1).values
    assert (distance <= found.value_errors[0] + 1e-9).all()


@pytest.mark.parametrize("suffix", [".npz", ".json"])
def test_spectra_and_history_load_as_they_were(suffix, tmp_path):
    history = SharpnessHistory("Hessian").with_entry(0, pairs(3.0, 2.0)).with_entry(5, trace=number(7.0, math.inf))
    for kept in spectra(), spectra(TRACES), history, SharpnessHistory("Fisher"):
        kept.save(tmp_path / f"kept{suffix}")
        assert str(Result.load(tmp_path / f"kept{suffix}")) == str(kept)
    assert SharpnessHistory.load(tmp_path / f"kept{suffix}").with_entry(1, loss=0.5).losses.tolist() == [0.5]


def test_spectra_draw_a_bar_for_each_eigenvalue_of_each_layer():
    ax = axes()
    spectra().draw(ax)
    assert bar_heights(ax) == [[640.25, -0.5, 3.0], [1.0, 0.0, 2.0]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["eigenvalue 1", "eigenvalue 2"]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["0", "2.bias", "4"]
    assert ax.get_xscale() == "symlog" and ax.yaxis_inverted()


def test_bars_of_one_layer_do_not_overlap_and_stay_with_it():
    ax = axes()
    spectra().draw(ax)
    series = [container for container in ax.containers if isinstance(container, BarContainer)]
    bars = [(layer, bar) for container in series for layer, bar in enumerate(container)]
    spans = sorted((bar.get_y(), bar.get_y() + bar.get_height(), layer) for layer, bar in bars)
    assert [layer for _, _, layer in spans] == [0, 0, 1, 1, 2, 2]
    for (_, end, layer), (start, _, _) in zip(spans, spans[1:]):
        assert end <= start + 1e-9
    assert all(layer - 0.5 < start and end < layer + 0.5 for start, end, layer in spans)


def test_spectra_draw_traces_as_one_series_more():
    ax = axes()
    spectra(TRACES).draw(ax)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["eigenvalue 1", "eigenvalue 2", "trace"]
    (trace,) = [c for c in ax.containers if isinstance(c, ErrorbarContainer) and c.get_label() == "trace"]
    assert trace[0].get_xdata().tolist() == [700.0, -0.5, 5.5]


def test_the_picture_grows_with_the_layers(tmp_path):
    assert spectra().inches() == (6.4, 4.8)
    many = LayerSpectra([str(i) for i in range(40)], [1] * 40, torch.ones(40, 2), torch.zeros(40, 2), "Hessian")
    assert many.plot(tmp_path / "many.svg").figure.get_size_inches().tolist() == [6.4, many.inches()[1]]
    assert 15.0 < many.inches()[1] < 25.0
    assert (tmp_path / "many.svg").read_text().count("eigenvalue") == 2


def test_a_history_with_an_entry_more_leaves_the_one_before_as_it_was():
    first = SharpnessHistory("Hessian")
    second = first.with_entry(0, pairs(3.0), number(7.0, 0.5), 0.25, 0.1)
    third = second.with_entry(100, pairs(5.0, 4.0))
    assert (len(first.steps), len(second.steps), len(third.steps)) == (0, 1, 2)
    assert second.values.tolist() == [[3.0]] and str(third.values.tolist()) == "[[3.0, nan], [5.0, 4.0]]"
    assert (second.traces.tolist(), second.trace_errors.tolist()) == ([7.0], [0.5])
    assert (second.losses.tolist(), second.lrs.tolist(), third.steps.tolist()) == ([0.25], [0.1], [0, 100])
    assert third.lrs[1].isnan() and third.losses[1].isnan() and third.traces[1].isnan()


def history() -> SharpnessHistory:
    found = SharpnessHistory("Hessian").with_entry(0, pairs(3.0), loss=2.0, lr=0.0)
    found = found.with_entry(100, trace=number(70.0, math.inf), loss=1.0, lr=0.1)
    return found.with_entry(1000, pairs(19.5, -4.0), number(80.0, 2.5), lr=0.1)


def test_a_history_prints_what_was_measured():
    assert str(history()) == (
        "sharpness of Hessian over training\n"
        "  step  loss  eigenvalue 1  eigenvalue 2      trace  2 / lr\n"
        "  0        2      3 +- 0.1             -          -     inf\n"
        "  100      1             -             -         70      20\n"
        "  1000     -   19.5 +- 0.1     -4 +- 0.1  80 +- 2.5      20"
    )
    assert str(SharpnessHistory("Hessian")) == "sharpness of Hessian over training\n  step"


def test_a_history_draws_each_series_where_it_was_measured_with_its_errors():
    ax = axes()
    history().draw(ax)
    first, second, trace = error_bars(ax)
    assert first == [pytest.approx((0, 3.0, 0.1)), pytest.approx((1000, 19.5, 0.1))]
    assert second == [pytest.approx((1000, -4.0, 0.1))]
    assert trace == [(100, 70.0, 0.0), (1000, 80.0, 2.5)]
    labels = {line.get_label(): line for line in ax.lines}
    edge = labels["2 / lr"]
    assert edge.get_xdata().tolist() == [100, 1000] and edge.get_ydata().tolist() == [20.0, 20.0]
    assert ax.get_yscale() == "symlog"


def test_a_history_without_traces_and_rates_draws_eigenvalues_alone_on_a_linear_scale():
    ax = axes()
    SharpnessHistory("Hessian").with_entry(0, pairs(3.0)).with_entry(1, pairs(4.0)).draw(ax)
    assert [len(points) for points in error_bars(ax)] == [2]
    assert ax.get_yscale() == "linear" and "2 / lr" not in [line.get_label() for line in ax.lines]


def test_an_empty_history_draws_empty_axes(tmp_path):
    ax = SharpnessHistory("Hessian").plot(tmp_path / "empty.png")
    assert len(ax.lines) == len(ax.containers) == 0 and ax.get_legend() is None


def test_steps_of_a_history_grow():
    with pytest.raises(ValueError, match=r"step 100 is not after the last one, 1000.* history.before\(100\)"):
        history().with_entry(100)
    with pytest.raises(ValueError, match="step 1000 is not after the last one, 1000"):
        history().with_entry(1000)
    with pytest.raises(TypeError, match="step is 'a'. Give a whole number"):
        history().before("a")
    back = history().before(100)
    assert back.steps.tolist() == [0] and back.losses.tolist() == [2.0] and back.values.shape == (1, 2)
    assert str(back.with_entry(100, pairs(1.0)).values.tolist()) == "[[3.0, nan], [1.0, nan]]"


@pytest.mark.parametrize(
    ("entry", "kind", "words"),
    [
        ({"step": 16_777_217.0}, TypeError, "step is 16777217.0. Give a whole number"),
        ({"step": 2000, "eigenpairs": 3}, TypeError, "eigenpairs is 3. Give a result of class Eigenpairs, or None"),
        ({"step": 2000, "trace": 3}, TypeError, "trace is 3. Give a result of class Trace, or None"),
        ({"step": 2000, "eigenpairs": number(1.0, 0.5)}, TypeError, "eigenpairs is <Trace: .*of class Eigenpairs"),
        ({"step": 2000, "trace": pairs(1.0)}, TypeError, "trace is a Eigenpairs. Give a result of class Trace"),
        ({"step": math.nan}, TypeError, "step is nan. Give a whole number"),
        ({"step": -1}, ValueError, "step is -1. Give a whole number of at least 0"),
        ({"lr": [0.1, 0.2]}, TypeError, r"lr is \[0.1, 0.2\]. Give a number"),
        ({"loss": torch.ones(2)}, TypeError, "loss is .*. Give a number"),
    ],
)
def test_what_a_column_cannot_hold_is_refused(entry, kind, words):
    with pytest.raises(kind, match=words):
        SharpnessHistory("Hessian").with_entry(**{"step": 0, **entry})
    exact = SharpnessHistory("Hessian").with_entry(torch.tensor(2**53 + 1), loss=torch.tensor(0.5), lr=0)
    assert (exact.steps.tolist(), exact.losses.tolist(), exact.lrs.tolist()) == ([2**53 + 1], [0.5], [0.0])


@pytest.mark.parametrize("wrong", [{"losses": torch.ones(1)}, {"values": torch.zeros(0, 0)}, {"traces": 1.5}])
def test_a_file_of_a_history_whose_columns_do_not_fit_is_refused(wrong, tmp_path):
    whole = history()
    named = {field.name: getattr(whole, field.name) for field in fields(whole)}
    write_result(tmp_path / "run.json", "SharpnessHistory", SharpnessHistory.__module__, {**named, **wrong})
    with pytest.raises(ResultError, match="run.json does not have the fields of a SharpnessHistory"):
        SharpnessHistory.load(tmp_path / "run.json")


def test_a_history_is_of_one_matrix():
    G = DenseMap(symmetric(torch.ones(3)))
    for results in {"eigenpairs": top_eigenpairs(G, 1)}, {"trace": trace(G, 3)}:
        with pytest.raises(ValueError, match="of dense matrix are no entry of a history of Hessian. Begin another"):
            SharpnessHistory("Hessian").with_entry(0, **results)


@pytest.mark.parametrize("largest", [0.02, 0.999, 1.0, 700.0, 1e9])
def test_about_a_thousandth_of_the_largest_value_is_drawn_linearly(largest):
    ax = axes()
    symlog(ax, "y", torch.tensor([1e-12, -largest, math.inf, math.nan]), torch.zeros(0), torch.tensor([largest / 2]))
    linear = ax.yaxis.get_transform().linthresh
    assert largest * 10**-3.5 <= linear * 1.001 and linear <= largest * 10**-2.5 * 1.001
    assert math.log10(linear) == pytest.approx(round(math.log10(linear)))


def test_an_axis_of_zeros_stays_linear():
    ax = axes()
    symlog(ax, "y", torch.zeros(3), torch.tensor([math.nan]))
    assert ax.get_yscale() == "linear"


def test_over_ranks_each_has_the_same_history_and_goes_on_from_its_file(tmp_path):
    matrices = [symmetric(torch.linspace(-1.0, top, 12)) for top in (3.0, 4.0)]

    def measured(A, history, step):
        return history.with_entry(step, top_eigenpairs(A, 1), trace(A, 6), lr=0.5)

    whole = SharpnessHistory("dense matrix")
    for step, matrix in enumerate(matrices):
        whole = measured(DenseMap(matrix), whole, step)
    first = over_ranks(matrices[0], 2, lambda A: measured(A, SharpnessHistory("dense matrix"), 0))
    for rank, history in enumerate(first):
        history.save(tmp_path / f"run.rank{rank}.json")
    on_each = over_ranks(
        matrices[1], 2, lambda A: measured(A, SharpnessHistory.load(tmp_path / f"run.rank{A.space.rank}.json"), 1)
    )
    assert str(on_each[0]) == str(on_each[1])
    torch.testing.assert_close(on_each[0].values, whole.values, rtol=1e-9, atol=0)
    torch.testing.assert_close(on_each[0].traces, whole.traces, rtol=1e-9, atol=0)
    assert "2 / lr" in str(on_each[0]) and on_each[0].steps.tolist() == [0, 1]
