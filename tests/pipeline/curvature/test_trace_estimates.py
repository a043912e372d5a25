"""The trace of a matrix from its products: without bias, with an error that can be believed, and never over the limit.

Random claims are checked over fixed seeds. A mean of N runs is within 5 of its own standard errors of the truth; mean
squares of N ratios that are nearly normal have the standard deviation sqrt(2 / N), t-distributed ones a little more.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cover import either
from dense_map import DenseMap, symmetric
from dense_ranks import over_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.curvature.estimates.krylov import append_orthonormal
from pipeline.curvature.estimates.sampling import SampleSize, mean_and_stderr
from pipeline.curvature.estimates.trace import METHODS, Trace, trace
from pipeline.curvature.results.result import Result

EIGENVALUES = torch.linspace(-1.0, 3.0, 24)
DECAYING = 0.5 ** torch.arange(40.0)


def runs(matrix: Tensor, seeds: int, samples: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Errors and standard errors over seeds."""
    found = [trace(DenseMap(matrix), samples, seed=seed, **options) for seed in range(seeds)]
    errors = torch.tensor([one.value for one in found], dtype=torch.float64) - matrix.double().trace()
    return errors, torch.tensor([one.stderr for one in found], dtype=torch.float64)


def without_bias(errors: Tensor) -> bool:
    return bool(errors.mean().abs() <= 5 * errors.std() / math.sqrt(len(errors)))


@pytest.mark.parametrize("method, kind", [("hutchinson", "rademacher"), ("hutchinson", "normal"), ("hutch++", None),
                                          ("hutch++", "normal"), ("xtrace", None)])  # fmt: skip
def test_trace_has_no_bias(method: str, kind: str | None) -> None:
    errors, _ = runs(symmetric(EIGENVALUES), either(60, 150), 12, method=method, kind=kind)
    assert without_bias(errors)


@pytest.mark.parametrize("kind", ["rademacher", "normal"])
def test_hutchinsons_variance_is_that_of_the_theory(kind: str) -> None:
    matrix, seeds, samples = symmetric(EIGENVALUES), 300, 10
    beside = matrix.square().sum() - (matrix.diagonal().square().sum() if kind == "rademacher" else 0.0)
    errors, _ = runs(matrix, seeds, samples, kind=kind)
    ratio = errors.square().mean() / (2 * beside / samples)
    assert abs(ratio - 1) <= 5 * math.sqrt(2 / seeds) * 1.2  # the kurtosis of a mean of ten quadratic forms is near 3


@pytest.mark.parametrize("method, samples, draws", [("hutchinson", 16, 16), ("hutch++", 23, 9)])
def test_standard_errors_are_as_large_as_the_errors(method: str, samples: int, draws: int) -> None:
    """(error / stderr)^2 of normal draws is an F(1, d): mean d/(d-2), variance 2 d^2 (d-1) / ((d-2)^2 (d-4))."""
    seeds, d = either(60, 200), draws - 1
    errors, stderrs = runs(symmetric(EIGENVALUES), seeds, samples, method=method)
    mean, variance = d / (d - 2), 2 * d**2 * (d - 1) / ((d - 2) ** 2 * (d - 4))
    assert abs((errors / stderrs).square().mean() - mean) <= 5 * math.sqrt(variance / seeds)
    inside = (errors.abs() <= 2 * stderrs).double().mean()
    assert inside >= 0.91 - 5 * math.sqrt(0.91 * 0.09 / seeds)  # 0.919 of a t-distribution of 8 degrees of freedom


def test_beside_one_eigenvalue_ten_draws_are_too_few_to_know_their_error_and_a_hundred_are_enough() -> None:
    matrix, seeds = symmetric(torch.eye(120)[0]), 150
    for samples, least, most in (10, 0.7, 0.88), (100, 0.88, 1.0):
        errors, stderrs = runs(matrix, seeds, samples)
        assert least <= (errors.abs() <= 2 * stderrs).double().mean() <= most


@pytest.mark.parametrize("values", [EIGENVALUES, 0.8 ** torch.arange(40.0), 1 / torch.arange(1.0, 41.0) ** 2])
def test_xtraces_standard_error_is_rather_too_large_than_too_small(values: Tensor) -> None:
    """Efron and Stein: the mean of its square is at least the variance with one vector fewer."""
    seeds = either(30, 100)
    errors, stderrs = runs(symmetric(values), seeds, 20, method="xtrace")
    over = stderrs.square() - errors.square()
    assert over.mean() >= -5 * over.std() / math.sqrt(seeds)
    inside = (errors.abs() <= 2 * stderrs).double().mean()
    assert inside >= 0.95 - 5 * math.sqrt(0.95 * 0.05 / seeds)
    assert stderrs.square().mean().sqrt() <= 6 * errors.square().mean().sqrt()


@pytest.mark.parametrize(
    "method, rel, seeds", [("hutchinson", 0.006, 100), ("hutch++", 0.006, 60), ("xtrace", 0.009, 40)]
)
def test_a_run_that_ends_early_is_within_twice_its_error_nearly_as_often(method: str, rel: float, seeds: int) -> None:
    """At least 85 of 100, by 5 standard deviations of a binomial."""
    matrix, seeds = symmetric(torch.linspace(0.5, 1.5, 200)), either(seeds // 3, seeds)
    options: dict[str, Any] = dict(method=method, rel=rel, sketch=5 if method == "hutch++" else None)
    found = [trace(DenseMap(matrix), 180, seed=seed, **options) for seed in range(seeds)]
    assert sum(one.stopped == "tolerance" for one in found) > seeds / 2
    assert all(one.stderr <= rel * one.value for one in found if one.converged)
    inside = sum(abs(one.value - float(matrix.trace())) <= 2 * one.stderr for one in found)
    assert inside >= seeds * 0.85 - 5 * math.sqrt(seeds * 0.85 * 0.15)


@given(st.integers(1, 40), st.integers(0, 3), st.sampled_from(METHODS), st.integers(1, 5), st.booleans())
def test_samples_for_a_whole_basis_give_the_exact_trace(n: int, more: int, method: str, block: int, half: bool) -> None:
    matrix = symmetric(torch.linspace(-2.0, 5.0, n), seed=n).to(torch.float32 if half else torch.float64)
    A = DenseMap(matrix, block)
    found = trace(A, n + more, method=method)
    assert found.value == pytest.approx(float(matrix.double().trace()), rel=0, abs=(3e-5 if half else 1e-13) * n)
    assert (found.stderr, found.samples, found.stopped, found.method) == (0.0, n, "exact", "basis")
    assert A.asked == n and found.converged


def test_an_exact_trace_is_that_of_the_unit_vectors_and_holds_a_block_of_them() -> None:
    multiplied: list[list[Tensor]] = []

    class Noted(DenseMap):
        def products(self, vectors):
            multiplied.append([torch.cat(vector) for vector in vectors])
            return super().products(vectors)

    matrix = symmetric(torch.linspace(-2.0, 5.0, 10))
    assert trace(Noted(matrix, 4), 10).value == pytest.approx(float(matrix.trace()), rel=1e-14)
    assert list(map(len, multiplied)) == [4, 4, 2]
    assert torch.equal(torch.stack(sum(multiplied, [])), torch.eye(10, dtype=torch.float64))


@given(
    n=st.integers(1, 40),
    rank=st.integers(0, 40),
    samples=st.integers(1, 45),
    block=st.integers(1, 7),
    method=st.sampled_from(METHODS),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    rel=st.sampled_from([None, 0.3]),
)
def test_products_are_counted_within_the_limit_and_nothing_is_nan(
    n: int, rank: int, samples: int, block: int, method: str, dtype: torch.dtype, rel: float | None
) -> None:
    values = torch.linspace(1.0, 4.0, n) * (torch.arange(n) < rank)
    A = DenseMap(symmetric(values, seed=n).to(dtype), block)
    found = trace(A, samples, method=method, rel=rel, min_samples=3)
    assert A.asked == found.samples <= samples
    assert math.isfinite(found.value) and found.stderr >= 0
    assert math.isinf(found.stderr) == (samples == 1 < n)
    assert found.draws.mean() == pytest.approx(found.value, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_below_four_samples_every_method_is_hutchinsons(method: str, samples: int) -> None:
    A = DenseMap(symmetric(EIGENVALUES))
    found = trace(A, samples, method=method)
    kind = "normal" if method == "xtrace" else "rademacher"
    assert found.value == trace(A, samples, kind=kind).value
    assert (found.method, found.samples) == ("hutchinson", samples)
    assert math.isinf(found.stderr) == (samples == 1) and not math.isnan(found.stderr)


@given(st.integers(1, 5), st.integers(0, 6), st.sampled_from(["hutch++", "xtrace"]))
def test_a_matrix_of_low_rank_that_the_sketch_catches_comes_out_to_rounding(rank: int, more: int, method: str) -> None:
    values = torch.linspace(1.0, 4.0, 40, dtype=torch.float64) * (torch.arange(40) < rank)
    samples = (3 if method == "hutch++" else 2) * (rank + 1) + more
    found = trace(DenseMap(symmetric(values)), samples, method=method)
    assert found.value == pytest.approx(float(values.sum()), rel=1e-12)
    assert found.stderr <= 1e-11


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("samples", [2, 4, 9])
def test_zero_has_the_trace_zero_without_error(method: str, samples: int) -> None:
    found = trace(DenseMap(torch.zeros(12, 12, dtype=torch.float64)), samples, method=method)
    assert (found.value, found.stderr) == (0.0, 0.0)


def test_one_rademacher_vector_finds_the_trace_of_a_diagonal_matrix_and_two_know_it() -> None:
    A = DenseMap(torch.diag(torch.arange(1.0, 13.0, dtype=torch.float64)))
    assert (trace(A, 1).value, trace(A, 1).stderr) == (78.0, math.inf)
    assert (trace(A, 2).value, trace(A, 2).stderr) == (78.0, 0.0)


@pytest.mark.parametrize("method", ["hutch++", "xtrace"])
def test_sketches_are_ten_times_better_where_eigenvalues_fall_by_half(method: str) -> None:
    """12 of 40 directions leave at most 2^-5 of the trace; Hutchinson's error is near sqrt(2 * 4/3 / 24) = 0.33."""
    plain, _ = runs(symmetric(DECAYING), 40, 24)
    better, _ = runs(symmetric(DECAYING), 40, 24, method=method)
    assert 10 * better.square().mean().sqrt() < plain.square().mean().sqrt()


def test_xtrace_is_what_leaving_each_vector_out_in_turn_defines() -> None:
    matrix = symmetric(EIGENVALUES)
    A = DenseMap(matrix)
    found = trace(A, 14, method="xtrace", seed=3)
    vectors = torch.stack([torch.cat(A.space.random("normal", 3, index)) for index in range(7)], 1)
    for left, draw in enumerate(found.draws):
        others = [index for index in range(7) if index != left]
        Q, _ = torch.linalg.qr(matrix @ vectors[:, others])
        rest = vectors[:, left] - Q @ (Q.T @ vectors[:, left])
        rest *= math.sqrt(24 - 6) / rest.norm()
        assert draw == pytest.approx(float((Q.T @ matrix @ Q).trace() + rest @ matrix @ rest), rel=1e-11)


def test_hutchpp_is_what_its_projections_define() -> None:
    matrix = symmetric(EIGENVALUES)
    A = DenseMap(matrix)
    found = trace(A, 14, method="hutch++", seed=3)
    sketch = torch.stack([torch.cat(A.space.random("normal", 3, index)) for index in range(4)], 1)
    Q, _ = torch.linalg.qr(matrix @ sketch)
    for index, draw in enumerate(found.draws, start=4):
        vec = torch.cat(A.space.random("rademacher", 3, index))
        rest = vec - Q @ (Q.T @ vec)
        assert draw == pytest.approx(float((Q.T @ matrix @ Q).trace() + rest @ matrix @ rest), rel=1e-11)
    assert len(found.draws) == 6


@pytest.mark.parametrize("method", METHODS)
def test_equal_seeds_give_equal_numbers_at_any_block_and_others_do_not(method: str) -> None:
    matrix = symmetric(EIGENVALUES)
    values = [trace(DenseMap(matrix, block), 12, method=method, seed=5).value for block in (1, 3, 12)]
    assert values == pytest.approx([values[0]] * 3, rel=1e-13)
    assert trace(DenseMap(matrix), 12, method=method, seed=6).value != values[0]


@pytest.mark.parametrize("method", METHODS)
def test_float32_maps_give_the_trace_to_their_own_error(method: str) -> None:
    values = 3.0 ** -torch.arange(40.0)
    plain = trace(DenseMap(symmetric(values)), 30, method=method)
    half = trace(DenseMap(symmetric(values).float()), 30, method=method)
    assert half.value == pytest.approx(plain.value, abs=2e-5)
    assert half.stderr == pytest.approx(plain.stderr, abs=2e-5)


def test_the_looser_of_two_tolerances_ends_a_run_and_not_before_enough_draws() -> None:
    matrix = symmetric(torch.linspace(0.5, 1.5, 200))
    A = DenseMap(matrix, block=1)
    assert trace(A, 100, abs=1e9, min_samples=7).samples == 7
    assert trace(A, 100, abs=1e9, rel=1e-9, min_samples=7).samples == 7
    assert trace(A, 100, abs=1e-9, rel=1e9, min_samples=7).samples == 7
    assert trace(A, 100, abs=1e-9, rel=1e-9).stopped == "samples"
    assert trace(A, 100, method="xtrace", abs=1e9, min_samples=7).samples == 14
    assert trace(A, 100, method="hutch++", abs=1e9, min_samples=7, sketch=3).samples == 13
    without, relative = (
        SampleSize(A, 100, "rademacher", rel, None, 2, 0, None, None, 300.0) for rel in (None, 0.1)
    )
    assert not without.is_reached(torch.ones(1), torch.zeros(1), 50)
    assert not relative.is_reached(torch.ones(2), torch.tensor([0.0, 0.2]), 50)
    assert relative.is_reached(torch.tensor([200.0]), torch.tensor([15.0]), 2)
    assert not relative.is_reached(torch.tensor([200.0]), torch.tensor([15.0]), 1)


@given(st.integers(1, 12), st.integers(0, 14), st.sampled_from([torch.float32, torch.float64]))
def test_vectors_become_orthonormal_whatever_their_angles(count: int, fall: int, dtype: torch.dtype) -> None:
    A = DenseMap(torch.eye(30, dtype=dtype))
    base = torch.randn(30, 1, dtype=torch.float64)
    given_ = (base + 10.0**-fall * torch.randn(30, count, dtype=torch.float64)).to(dtype)
    basis: list[list[Tensor]] = []
    columns = [append_orthonormal(A.space, basis, A.space.cut(vec)) for vec in given_.T]
    Q = torch.stack([torch.cat(vec) for vec in basis], 1).double()
    eps = torch.finfo(dtype).eps
    assert (Q.T @ Q - torch.eye(len(basis))).abs().max() <= 100 * eps
    for vec, column in zip(given_.T.double(), columns, strict=True):
        assert (Q[:, : len(column)] @ column - vec).norm() <= 200 * eps * vec.norm()
    assert len(basis) == count or 10.0**-fall <= 1e4 * eps


@pytest.mark.parametrize("samples", [3, 13, 24])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks, tied", [(2, 0), (3, 5)])
def test_every_process_finds_what_one_alone_does(ranks: int, tied: int, method: str, samples: int) -> None:
    matrix = symmetric(EIGENVALUES)
    alone = trace(DenseMap(matrix), samples, method=method)
    found = over_ranks(matrix, ranks, lambda A: trace(A, samples, method=method), tied=tied)
    assert len({(one.value, one.stderr, one.samples) for one in found}) == 1
    assert found[0].value == pytest.approx(alone.value, rel=1e-12)
    assert found[0].stderr == pytest.approx(alone.stderr, rel=1e-10)


def test_a_block_of_hutchinsons_products_costs_one_all_reduce() -> None:
    def work(A: Any) -> int:
        trace(A, 12)
        return int(A.space.exchange.meetings)

    exchanges = over_ranks(symmetric(EIGENVALUES), 2, work, block=4)
    assert min(exchanges) == 2 * (1 + 12 + 3)  # of two barriers each; the arguments and a product of the fake are one


def test_one_draw_has_an_infinite_error() -> None:
    mean, stderr = mean_and_stderr(torch.tensor([[2.0]]))
    assert (float(mean), float(stderr)) == (2.0, math.inf)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("method", METHODS)
def test_a_product_that_is_not_finite_is_an_error(method: str, bad: float) -> None:
    matrix = torch.eye(12, dtype=torch.float64)
    matrix[3, 3] = bad
    for samples in (8, 12):
        with pytest.raises(FloatingPointError, match="is not finite.*look for inf or nan"):
            trace(DenseMap(matrix), samples, method=method)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(samples=0), "samples is 0. Give a whole number of at least 1"),
        (dict(method="hutch"), "method is 'hutch': use one of 'hutchinson', 'hutch"),
        (dict(kind="sign"), "kind is 'sign': random vectors are of kind 'rademacher' or 'normal'"),
        (dict(method="xtrace", kind="rademacher"), "'xtrace' is without bias for kind 'normal' alone"),
        (dict(rel=-0.1), "rel is -0.1, but must be a finite number"),
        (dict(abs=math.nan), "abs is nan, but must be a finite number"),
        (dict(min_samples=1), "min_samples is 1. Give a whole number of at least 2"),
        (dict(sketch=3), "sketch is 3, which is for method 'hutch\\+\\+', not 'hutchinson'"),
        (dict(method="hutch++", samples=10, sketch=5), "sketch is 5 of 10 samples.*use 1 to 4, or more samples"),
        (dict(method="hutch++", samples=10, sketch=0), "sketch is 0 of 10 samples"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    A = DenseMap(symmetric(EIGENVALUES))
    with pytest.raises(ValueError, match=words):
        trace(A, **options)
    assert A.asked == 0


def test_a_trace_prints_its_error_and_what_it_cost() -> None:
    found = trace(DenseMap(torch.diag(torch.arange(1.0, 13.0, dtype=torch.float64))), 4)
    first, second = found.lines()
    assert first == "trace of dense matrix  78 +- 0"
    assert second == "  hutchinson, 4 products, stopped by: samples"


class Axes:
    """Keeps what is drawn."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Any, dict[str, Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self.calls.update({name: (args, options)})


def test_the_picture_of_a_trace_is_its_mean_after_each_draw() -> None:
    found, axes = trace(DenseMap(symmetric(EIGENVALUES)), 5), Axes()
    found.draw(axes)
    (counts, means), options = axes.calls["errorbar"]
    assert counts == [1, 2, 3, 4, 5]
    assert means[-1] == found.value and options["yerr"][0] == 0.0 and options["yerr"][-1] == found.stderr


@pytest.mark.parametrize("suffix", [".npz", ".json"])
def test_a_saved_trace_loads_as_it_was(tmp_path: Any, suffix: str) -> None:
    found = trace(DenseMap(symmetric(EIGENVALUES)), 1)
    found.save(tmp_path / f"trace{suffix}")
    again = Result.load(tmp_path / f"trace{suffix}")
    assert isinstance(again, Trace)
    assert str(again) == str(found) and torch.equal(again.draws, found.draws) and again.stderr == math.inf
