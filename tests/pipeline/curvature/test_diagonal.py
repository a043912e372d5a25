"""Diagonals, Frobenius norms and the traces of layers: without bias, each with an error that can be believed.

Random claims are checked over fixed seeds: a mean of N runs is within 5 of its own standard errors of the truth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from dense_map import DenseMap, DenseSpace, symmetric
from dense_ranks import over_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.curvature.estimates.diagonal import Diagonal, diagonal
from pipeline.curvature.estimates.frobenius import Norm, frobenius_squared
from pipeline.curvature.estimates.layer_traces import LayerTraces, layer_traces
from pipeline.curvature.results.result import Result
from pipeline.curvature.space import Vec
from pipeline.distributed.agreement import MismatchError

MATRIX = symmetric(torch.linspace(-1.0, 3.0, 24))


def whole(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([parts["a"], parts["b"]])


def without_bias(errors: Tensor) -> bool:
    """Every column."""
    return bool((errors.mean(0).abs() <= 5 * errors.std(0) / math.sqrt(len(errors))).all())


# ---- diagonal ----


def test_diagonal_has_no_bias_and_the_variance_of_the_theory() -> None:
    seeds, samples = 300, 8
    errors = torch.stack(
        [whole(diagonal(DenseMap(MATRIX), samples, seed=seed).values) - MATRIX.diagonal() for seed in range(seeds)]
    )
    assert without_bias(errors)
    beside = MATRIX.square().sum(1) - MATRIX.diagonal().square()
    ratio = errors.square().mean(0) / (beside / samples)
    assert (ratio - 1).abs().max() <= 5 * math.sqrt(2 / seeds)  # sums of signs have no heavier tails than the normal


def test_each_entrys_error_is_as_large_as_its_error() -> None:
    """Mean squares over seeds: stderr^2 has the expectation of error^2, whatever the distribution."""
    found = [diagonal(DenseMap(MATRIX), 10, seed=seed) for seed in range(200)]
    errors = torch.stack([whole(one.values) - MATRIX.diagonal() for one in found])
    stderrs = torch.stack([whole(one.stderr) for one in found])
    assert without_bias(errors.square() - stderrs.square())
    inside = (errors.abs() <= 2 * stderrs).double().mean(1)  # 0.92 of a t-distribution of 9 degrees of freedom
    assert abs(inside.mean() - 0.92) <= 5 * inside.std() / math.sqrt(200) + 0.01


def test_diagonal_is_the_mean_of_its_draws() -> None:
    A = DenseMap(MATRIX, block=3)
    found = diagonal(A, 11, seed=4)
    vectors = [torch.cat(A.space.random("rademacher", 4, index)) for index in range(11)]
    draws = torch.stack([vec * (MATRIX @ vec) for vec in vectors])
    assert torch.allclose(whole(found.values), draws.mean(0), rtol=1e-12, atol=1e-14)
    assert torch.allclose(whole(found.stderr), draws.std(0) / math.sqrt(11), rtol=1e-12, atol=1e-14)
    assert found.rms == pytest.approx(float(draws.mean(0).square().mean().sqrt()))
    assert found.rms_stderr == pytest.approx(float((draws.var(0) / 11).mean().sqrt()))


def test_a_large_mean_does_not_hide_a_small_error_in_float32() -> None:
    matrix = (1e3 * torch.eye(24, dtype=torch.float64) + 1e-1 * MATRIX).float()
    found = whole(diagonal(DenseMap(matrix), 20).stderr).double()
    exact = whole(diagonal(DenseMap(matrix.double()), 20).stderr)
    assert torch.allclose(found, exact, rtol=0.02)  # a sum of squares less a square would keep no digit of 1e-2 in 1e6


@given(st.integers(1, 40), st.integers(0, 3), st.integers(1, 5), st.booleans())
def test_samples_for_a_whole_basis_give_the_exact_diagonal(n: int, more: int, block: int, half: bool) -> None:
    matrix = symmetric(torch.linspace(-2.0, 5.0, n), seed=n).to(torch.float32 if half else torch.float64)
    A = DenseMap(matrix, block)
    found = diagonal(A, n + more)
    assert (whole(found.values) - matrix.diagonal()).abs().max() <= (1e-4 if half else 1e-12)
    assert whole(found.stderr).eq(0).all() and found.rms_stderr == 0.0
    assert (found.samples, found.stopped, A.asked, found.converged) == (n, "exact", n, True)


@given(st.integers(2, 40), st.integers(1, 39), st.integers(1, 7), st.sampled_from([None, 0.3]), st.booleans())
def test_products_of_a_diagonal_are_counted_and_nothing_is_nan(
    n: int, samples: int, block: int, rel: float | None, half: bool
) -> None:
    matrix = symmetric(torch.linspace(-2.0, 5.0, n), seed=n).to(torch.float32 if half else torch.float64)
    A = DenseMap(matrix, block)
    found = diagonal(A, samples, rel=rel, min_samples=3)
    assert A.asked == found.samples <= samples
    assert whole(found.values).isfinite().all() and not whole(found.stderr).isnan().any()
    assert math.isinf(found.rms_stderr) == bool(whole(found.stderr).isinf().all()) == (samples == 1)
    assert found.values["a"].dtype == matrix.dtype


def test_one_product_finds_a_diagonal_matrix_and_two_know_it() -> None:
    matrix = torch.diag(torch.arange(1.0, 13.0, dtype=torch.float64))
    assert torch.equal(whole(diagonal(DenseMap(matrix), 1).values), matrix.diagonal())
    assert whole(diagonal(DenseMap(matrix), 2).stderr).eq(0).all()


def test_a_diagonal_ends_where_its_error_is_small_enough_and_not_before_enough_draws() -> None:
    large = symmetric(torch.linspace(0.5, 1.5, 200))
    A = DenseMap(large, block=1)
    assert diagonal(A, 100, abs=1e9, min_samples=7).samples == 7
    found = diagonal(A, 100, rel=0.07)
    assert found.stopped == "tolerance" and 10 <= found.samples < 100
    assert found.rms_stderr <= 0.07 * found.rms
    assert diagonal(A, found.samples - 1).rms_stderr > 0.07 * diagonal(A, found.samples - 1).rms
    assert diagonal(A, 12, rel=1e-9).stopped == "samples"


def test_zero_has_the_diagonal_zero_without_error_and_a_tolerance_is_reached() -> None:
    found = diagonal(DenseMap(torch.zeros(24, 24, dtype=torch.float64)), 20, rel=0.1)
    assert (found.rms, found.rms_stderr, found.stopped) == (0.0, 0.0, "tolerance")


# ---- Frobenius norm ----


@pytest.mark.parametrize("kind", ["rademacher", "normal"])
def test_the_squared_norm_has_no_bias_and_the_variance_of_the_theory(kind: str) -> None:
    seeds, samples = 300, 10
    found = [frobenius_squared(DenseMap(MATRIX), samples, kind=kind, seed=seed) for seed in range(seeds)]
    errors = torch.tensor([one.value for one in found], dtype=torch.float64) - MATRIX.square().sum()
    stderrs = torch.tensor([one.stderr for one in found], dtype=torch.float64)
    square = MATRIX @ MATRIX
    beside = square.square().sum() - (square.diagonal().square().sum() if kind == "rademacher" else 0.0)
    assert without_bias(errors)
    assert without_bias(stderrs.square() - 2 * beside / samples)
    assert without_bias(errors.square() - stderrs.square())


@given(st.integers(1, 40), st.integers(1, 45), st.integers(1, 7), st.booleans())
def test_squared_norms_are_exact_with_samples_enough(n: int, samples: int, block: int, half: bool) -> None:
    matrix = symmetric(torch.linspace(-2.0, 5.0, n), seed=n).to(torch.float32 if half else torch.float64)
    A = DenseMap(matrix, block)
    found = frobenius_squared(A, samples)
    assert A.asked == found.samples <= samples
    assert math.isfinite(found.value) and found.stderr >= 0
    assert found.norm == math.sqrt(found.value)
    if samples >= n:
        assert found.value == pytest.approx(float(matrix.double().square().sum()), rel=1e-5 if half else 1e-12)
        assert (found.stderr, found.samples, found.stopped) == (0.0, n, "exact")
    else:
        assert math.isinf(found.stderr) == (samples == 1)


# ---- layers ----


def test_traces_of_layers_have_no_bias_and_errors_that_are_as_large_as_theirs() -> None:
    found = [layer_traces(DenseMap(MATRIX), None, 10, seed=seed) for seed in range(300)]
    truth = torch.tensor([MATRIX[:8, :8].trace(), MATRIX[8:, 8:].trace()])
    errors = torch.tensor([[one.values["a"], one.values["b"]] for one in found], dtype=torch.float64) - truth
    stderrs = torch.tensor([[one.stderr["a"], one.stderr["b"]] for one in found], dtype=torch.float64)
    assert without_bias(errors)
    assert without_bias(errors.square() - stderrs.square())


def test_a_layers_trace_is_its_part_of_the_quadratic_form() -> None:
    A = DenseMap(MATRIX)
    found = layer_traces(A, {"second": ["b"], "all": ["b", "a"]}, 3, seed=2)
    vectors = [torch.cat(A.space.random("rademacher", 2, index)) for index in range(3)]
    draws = torch.stack([vec * (MATRIX @ vec) for vec in vectors])
    assert found.values["second"] == pytest.approx(float(draws[:, 8:].sum(1).mean()))
    assert found.values["all"] == pytest.approx(float(draws.sum(1).mean()))
    assert found.stderr["all"] == pytest.approx(float(draws.sum(1).std() / math.sqrt(3)))
    assert found.entries == {"second": 16, "all": 24} and found.samples == A.asked == 3


@given(st.integers(3, 40), st.integers(0, 3), st.integers(1, 5))
def test_samples_for_a_whole_basis_give_the_exact_traces_of_layers(n: int, more: int, block: int) -> None:
    matrix = symmetric(torch.linspace(-2.0, 5.0, n), seed=n)
    found = layer_traces(DenseMap(matrix, block), None, n + more)
    first = n // 3
    assert found.values["a"] == pytest.approx(float(matrix[:first, :first].trace()), abs=1e-11)
    assert found.values["b"] == pytest.approx(float(matrix[first:, first:].trace()), abs=1e-11)
    assert found.stderr == {"a": 0.0, "b": 0.0} and found.stopped == "exact"


def test_layers_end_where_every_one_is_near_enough() -> None:
    A = DenseMap(symmetric(torch.linspace(0.5, 1.5, 200)))
    found = layer_traces(A, None, 150, rel=0.012)
    assert found.stopped == "tolerance" and found.samples < 150
    assert all(found.stderr[name] <= 0.012 * found.values[name] for name in "ab")


def test_one_draw_of_layers_has_infinite_errors() -> None:
    assert layer_traces(DenseMap(MATRIX), None, 1).stderr == {"a": math.inf, "b": math.inf}


class HalfCounted(DenseSpace):
    """Another process counts 'b'; its names are those of this one and 'c.weight'."""

    counted = property(lambda self: [True, False])

    def named(self, vec: Vec) -> dict[str, Tensor]:
        return dict(zip(("net.a", "net.b"), vec, strict=True))


def test_a_parameter_that_another_process_counts_makes_no_layer_here() -> None:
    A = DenseMap(MATRIX)
    A._space = HalfCounted(24)
    found = layer_traces(A, None, 4)
    assert list(found.values) == ["net"] and found.entries == {"net": 8}
    draws = [torch.cat(A.space.random("rademacher", 0, index)) for index in range(4)]
    assert found.values["net"] == pytest.approx(sum(float((vec * (MATRIX @ vec))[:8].sum()) for vec in draws) / 4)


def test_groups_may_be_named_by_numbers() -> None:
    found = layer_traces(DenseMap(MATRIX), {0: ["a"], 1: ["b"]}, 24)
    assert "exact" in str(found) and list(found.values) == ["0", "1"]


@pytest.mark.parametrize(
    "groups, words",
    [
        ({}, "groups is empty: give layer -> names"),
        ({"one": []}, "group 'one' is \\[\\]: give a list of names"),
        ({"one": "a"}, "group 'one' is 'a': give a list of names"),
        ({"one": ["a", "a"]}, "group 'one' has a name twice"),
        ({"one": ["a", "z"], "two": ["y"]}, "no process has parameters named \\['y', 'z'\\].*there are \\['a', 'b'\\]"),
    ],
)
def test_groups_that_mean_nothing_are_refused(groups: dict[str, Any], words: str) -> None:
    A = DenseMap(MATRIX)
    with pytest.raises(ValueError, match=words):
        layer_traces(A, groups)
    assert A.asked == 0


# ---- over ranks ----


@pytest.mark.parametrize("samples", [1, 13, 24])
@pytest.mark.parametrize("ranks, tied", [(2, 0), (3, 5)])
def test_every_process_finds_its_part_of_the_diagonal(ranks: int, tied: int, samples: int) -> None:
    alone = diagonal(DenseMap(MATRIX), samples)
    found = over_ranks(MATRIX, ranks, lambda A: diagonal(A, samples), tied=tied)
    for field in ("values", "stderr"):
        parts = [getattr(one, field)[f"rank {rank}"] for rank, one in enumerate(found)]
        tail = getattr(found[-1], field)["tied"]
        assert torch.allclose(torch.cat([*parts, tail]), whole(getattr(alone, field)), rtol=1e-10, atol=1e-12)
    assert len({(one.rms, one.rms_stderr) for one in found}) == 1
    assert found[0].rms == pytest.approx(alone.rms)


@pytest.mark.parametrize("samples", [7, 24])
def test_every_process_finds_the_traces_of_all_layers_and_counts_tied_entries_once(samples: int) -> None:
    alone = layer_traces(DenseMap(MATRIX), None, samples)
    found = over_ranks(MATRIX, 3, lambda A: layer_traces(A, None, samples), tied=5)
    assert len({str(one) for one in found}) == 1
    assert found[0].entries == {"rank 0": 7, "tied": 5, "rank 1": 6, "rank 2": 6}
    assert sum(found[1].values.values()) == pytest.approx(sum(alone.values.values()), rel=1e-12)
    if samples == 24:
        assert found[2].values["tied"] == pytest.approx(float(MATRIX[19:, 19:].trace()))


def test_groups_may_join_parameters_of_several_processes() -> None:
    groups = {"head": ["rank 1", "tied"], "body": ["rank 0"]}
    found = over_ranks(MATRIX, 2, lambda A: layer_traces(A, groups, 24), tied=4)
    assert found[0].values["head"] == found[1].values["head"] == pytest.approx(float(MATRIX[10:, 10:].trace()))
    assert found[0].entries == {"head": 14, "body": 10}


def test_processes_with_different_groups_all_refuse() -> None:
    def refused(A: Any) -> bool:
        with pytest.raises(MismatchError, match="groups differ between the ranks: rank 0: .*'rank 0'.*; rank 1: "):
            layer_traces(A, {"g": [f"rank {A.space.rank}"]})
        return bool(A.asked == 0)

    assert over_ranks(MATRIX, 2, refused) == [True, True]


# ---- all ----

ALL = [diagonal, frobenius_squared, layer_traces]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("samples", [2, 12])
def test_a_product_that_is_not_finite_is_an_error_of_each(make: Any, samples: int) -> None:
    matrix = torch.eye(12, dtype=torch.float64)
    matrix[3, 3] = math.nan
    with pytest.raises(FloatingPointError, match="is not finite.*look for inf or nan"):
        make(DenseMap(matrix), samples=samples)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(
    "options, words",
    [(dict(samples=0), "samples is 0"), (dict(rel=-1.0), "rel is -1.0"), (dict(min_samples=1), "min_samples is 1")],
)
def test_numbers_that_mean_nothing_are_refused_by_each(make: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(DenseMap(MATRIX), **options)


def test_results_print_tables_with_their_errors() -> None:
    exact = DenseMap(torch.diag(torch.arange(1.0, 13.0, dtype=torch.float64)))
    assert list(frobenius_squared(exact, 12).lines()) == [
        "squared Frobenius norm of dense matrix  650 +- 0  (norm 25.4951)",
        "  12 products, stopped by: exact",
    ]
    assert list(layer_traces(exact, None, 2).lines()) == [
        "traces of layers of dense matrix  (2 products, stopped by: samples)",
        "  layer    trace  entries  mean eigenvalue",
        "  a      10 +- 0        4              2.5",
        "  b      68 +- 0        8              8.5",
    ]
    assert list(diagonal(exact, 2).lines()) == [
        "diagonal of dense matrix  root mean square 7.3598 +- 0",
        "  2 products, stopped by: samples",
        "  parameter  mean  least  largest  error (rms)",
        "  a           2.5      1        4            0",
        "  b           8.5      5       12            0",
    ]


class Axes:
    """Keeps what is drawn."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Any, dict[str, Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self.calls.update({name: (args, options)})


def test_pictures_show_every_entry_and_every_layer() -> None:
    axes = Axes()
    diagonal(DenseMap(MATRIX), 4).draw(axes)
    assert sum(axes.calls["stairs"][0][0]) == 24
    layers = layer_traces(DenseMap(MATRIX), None, 4)
    layers.draw(axes)
    (_, heights), options = axes.calls["bar"]
    assert heights == list(layers.values.values()) and options["yerr"] == list(layers.stderr.values())
    norm = frobenius_squared(DenseMap(MATRIX), 4)
    norm.draw(axes)
    assert axes.calls["errorbar"][0][1][-1] == pytest.approx(norm.value)


@pytest.mark.parametrize("suffix", [".npz", ".json"])
@pytest.mark.parametrize("make, kind", list(zip(ALL, [Diagonal, Norm, LayerTraces], strict=True)))
def test_saved_results_load_as_they_were(tmp_path: Any, make: Any, kind: type[Result], suffix: str) -> None:
    found = make(DenseMap(MATRIX), samples=1)
    found.save(tmp_path / f"found{suffix}")
    again = Result.load(tmp_path / f"found{suffix}")
    assert type(again) is kind and str(again) == str(found)
