"""Is the spectral density that of the dense matrix, exactly where quadrature is exact and within its band elsewhere?"""

from __future__ import annotations

import math

import pytest
import torch
from cover import either, examples
from dense_map import DenseMap, symmetric
from hypothesis import given, settings
from hypothesis import strategies as st
from ranked_map import RankedMap, on_ranks
from torch import Tensor

from pipeline.curvature.estimates.density import Density, density
from pipeline.curvature.estimates.quadrature import gauss, tridiagonals
from pipeline.curvature.estimates.solve import Inverse
from pipeline.curvature.results.result import Result

SEEDS = st.integers(0, 10**6)


def unit(A: DenseMap, seed: int, run: int) -> Tensor:
    start = torch.cat(A.space.random("normal", seed, run)).double()
    return start / start.norm()


def integral(found: Density) -> float:
    return float(torch.trapezoid(found.density, found.grid))


def bumps(values: Tensor, weights: Tensor, grid: Tensor, sigma: float) -> Tensor:
    """The sum of Gaussians, point by point."""
    normal = torch.distributions.Normal(values[:, None], sigma)
    return (weights[:, None] * normal.log_prob(grid).exp()).sum(0)


@given(st.integers(3, 40), st.integers(1, 12), st.integers(1, 4), SEEDS)
@settings(max_examples=examples(60))
def test_quadrature_is_exact_for_polynomials_up_to_degree_2_steps_minus_1(size, steps, runs, seed):
    A = DenseMap(symmetric(2.0 * torch.rand(size, dtype=torch.float64) - 1.0, seed))
    found = density(A, steps=steps, runs=runs, points=10, seed=seed)
    assert found.nodes.shape == found.weights.shape == (runs, min(steps, size))
    for run in range(runs):
        start = image = unit(A, seed, run)
        for power in range(2 * steps):
            mine = (found.weights[run] * found.nodes[run] ** power).sum()
            assert float(mine) == pytest.approx(float(start @ image), abs=1e-10)  # start.A^power start
            image = A.matrix @ image


@given(st.integers(1, 30), st.lists(st.integers(0, 4), min_size=30, max_size=30), SEEDS)
@settings(max_examples=examples(40))
def test_spectrum_is_exact_where_steps_reach_all_distinct_eigenvalues(size, levels, seed):
    """Zero, identity, low rank, more steps than rows: each run's weights are what its start has in each eigenspace."""
    values = torch.tensor([-2.0, 0.0, 0.5, 1.0, 30.0], dtype=torch.float64)[torch.tensor(levels[:size])]
    A = DenseMap(symmetric(values, seed))
    found = density(A, steps=size + 3, runs=2, seed=seed, points=50)
    assert all(part.isfinite().all() for part in (found.nodes, found.weights, found.density, found.grid))
    for run in range(2):
        inside = unit(A, seed, run)
        for level in values.unique():
            eigenspace = symmetric((values == level).double(), seed)  # the projection: the same basis
            near = (found.nodes[run] - level).abs() < 1e-8
            assert float(found.weights[run][near].sum()) == pytest.approx(
                float(inside @ eigenspace @ inside), abs=1e-9
            )
    assert integral(found) == pytest.approx(1.0, abs=1e-6)
    assert found.products == A.asked <= 2 * size


@pytest.mark.parametrize("sigma", [None, 1e-9, 0.01, 3.0, 1e3])
@pytest.mark.parametrize("points", [10, 11, 50, 1000])
@pytest.mark.parametrize("margin", [0.0, 0.05, 2.0])
def test_integral_is_1_and_the_grid_covers_all_nodes(sigma, points, margin):
    for values in torch.linspace(-3.0, 8.0, 20), torch.zeros(4), torch.full((5,), -1e6), torch.tensor([1e-20, 3e-20]):
        found = density(DenseMap(symmetric(values)), steps=6, runs=3, points=points, sigma=sigma, margin=margin)
        step = float(found.grid[1] - found.grid[0])
        assert float(found.density.sum()) * step == pytest.approx(1.0, abs=1e-6)
        assert integral(found) == pytest.approx(1.0, abs=1e-6)
        assert found.grid.shape == found.density.shape == (points,) and float(found.density.min()) >= 0.0
        low, high = float(found.nodes.min()), float(found.nodes.max())
        least = margin * (high - low) * (1 - 1e-9)
        assert float(found.grid[0]) - step / 2 <= low - least and high + least <= float(found.grid[-1]) + step / 2


@pytest.mark.parametrize("kind", ["even", "outliers", "low rank"])
def test_density_is_the_exact_smoothed_spectrum_within_the_variance_of_random_unit_vectors(kind):
    """For unit u: var u.Fu = 2 / (n + 2) * (mean of f^2 - (mean of f)^2), f the Gaussian at a point of each eigenvalue;
    within 6 deviations of the mean over the runs everywhere. With as many steps as rows there is no other error."""
    size, runs = 50, 24
    values = torch.linspace(-1.0, 1.0, size, dtype=torch.float64)
    if kind == "outliers":
        values[-2:] = torch.tensor([4.0, 6.0])
    if kind == "low rank":
        values[:40] = 0.0
    found = density(DenseMap(symmetric(values)), steps=size, runs=runs, sigma=0.1, points=1500)
    each = torch.distributions.Normal(values[:, None], 0.1).log_prob(found.grid).exp()
    deviation = (2.0 / (size + 2) * each.var(0, correction=0) / runs).sqrt()
    peak = float(each.mean(0).max())
    assert bool(((found.density - each.mean(0)).abs() <= 6.0 * deviation + 1e-3 * peak).all())
    # And not wider than it must be: the squared errors, in units of their variances, are about 1 in the mean.
    inside = deviation > 1e-3 * peak
    ratio = ((found.density - each.mean(0)) / deviation)[inside].square().mean()
    assert 0.1 < float(ratio) < 4.0


def test_few_steps_give_the_smoothed_density_of_a_wide_spectrum():
    """Lanczos with 30 steps integrates polynomials of degree 59: Gaussians of a tenth of the range's half nearly so."""
    values = torch.linspace(-1.0, 1.0, 400, dtype=torch.float64)
    few, full = (density(DenseMap(symmetric(values)), steps=steps, runs=1, sigma=0.15) for steps in (30, 120))
    exact = bumps(full.nodes[0], full.weights[0], few.grid, 0.15)
    assert float((few.density - exact).abs().max()) < 1e-3 * float(exact.max())


def test_band_is_two_standard_errors_around_the_mean_of_the_runs_curves():
    A = DenseMap(symmetric(torch.linspace(-1.0, 2.0, 50)))
    found = density(A, steps=12, runs=5, sigma=0.2)
    curves = torch.stack([bumps(*run, found.grid, 0.2) for run in zip(found.nodes, found.weights, strict=True)])
    error = (curves - curves.mean(0)).square().sum(0).div(5 * 4).sqrt()
    room = {"rtol": 0.0, "atol": 1e-3}  # the mean over a cell is not the value in its middle
    torch.testing.assert_close(found.density, curves.mean(0), **room)
    torch.testing.assert_close(found.upper, curves.mean(0) + 2.0 * error, **room)
    torch.testing.assert_close(found.lower, (curves.mean(0) - 2.0 * error).clamp(min=0.0), **room)


def test_band_holds_the_truth_as_often_as_students_distribution_says():
    """With 10 runs |t| < 2 has probability 0.924, |t| < 1 0.657. In 150 seeds: within 4 binomial deviations of each."""
    values = torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64).repeat_interleave(20)
    A, seeds = DenseMap(symmetric(values), block=10), either(40, 150)
    band = one_error = 0
    for seed in range(seeds):
        found = density(A, steps=4, runs=10, sigma=0.3, points=61, seed=seed)
        middle = int((found.grid - 0.5).abs().argmin())
        truth = float(bumps(values, torch.full((80,), 1 / 80), found.grid[middle : middle + 1], 0.3))
        assert found.lower is not None and found.upper is not None
        band += bool(found.lower[middle] <= truth <= found.upper[middle])
        mean, error = found.moment(2)
        assert error is not None
        one_error += abs(mean - float(values.square().mean())) < error
    for hits, probability in (band, 0.924), (one_error, 0.657):
        assert abs(hits - seeds * probability) <= 4.0 * math.sqrt(seeds * probability * (1.0 - probability))


def test_trace_and_count_are_the_dense_ones_within_their_errors():
    values = torch.cat([torch.zeros(70), torch.linspace(1.0, 2.0, 25), torch.tensor([9.0, 10.0, 11.0, -4.0, -5.0])])
    found = density(DenseMap(symmetric(values)), steps=40, runs=30)
    assert found.moment(0) == (pytest.approx(1.0, abs=1e-12), pytest.approx(0.0, abs=1e-12))
    for (mean, error), truth in [
        (found.trace(), float(values.sum())),
        (found.moment(2), float(values.square().mean())),
        (found.count(-0.5, 0.5), 70.0),
        (found.count(0.5, 3.0), 25.0),
        (found.count(3.0, math.inf), 3.0),
        (found.count(-math.inf, -0.5), 2.0),
    ]:
        assert error is not None and 0.0 < error < 0.3 * truth
        assert abs(mean - truth) < 4.0 * error  # Student with 29 degrees: 4 in 10,000
    everything, error = found.count(-math.inf, math.inf)
    assert everything == pytest.approx(100.0) and error == pytest.approx(0.0, abs=1e-9)


def test_steps_beyond_the_rows_of_the_matrix_take_neither_products_nor_memory():
    A = DenseMap(symmetric(torch.tensor([0.5, 1.0, 4.0])))
    enough, more = density(A, steps=3, runs=2), density(A, steps=10**15, runs=2)
    assert more.nodes.shape == (2, 3)
    for field in ("nodes", "weights", "density", "grid"):
        assert torch.equal(getattr(more, field), getattr(enough, field))


def test_nodes_at_the_ends_of_an_interval_are_in_it():
    found = density(DenseMap(2.0 * torch.eye(9, dtype=torch.float64)), steps=5, runs=2)
    ends = float(found.nodes.min()), float(found.nodes.max())
    assert [found.count(ends[0], end)[0] for end in ends] == pytest.approx([9.0, 9.0])
    assert found.count(ends[1], 3.0)[0] == found.count(1.0, ends[0])[0] == pytest.approx(9.0)


def test_one_run_has_no_band_and_no_nan():
    found = density(DenseMap(symmetric(torch.linspace(-1.0, 2.0, 9))), steps=5, runs=1)
    assert found.lower is None and found.upper is None
    assert found.trace()[1] is None and found.moment(3)[1] is None and found.count(0.0, 1.0)[1] is None
    assert not any("nan" in line or "+-" in line for line in found.lines())


@given(st.integers(1, 7), st.integers(1, 8), st.integers(0, 100))
@settings(max_examples=examples(20))
def test_block_and_number_of_runs_change_no_run(block, runs, seed):
    matrix = symmetric(torch.linspace(-1.0, 2.0, 12))
    one = density(DenseMap(matrix, block=block), steps=5, runs=runs, points=20, seed=seed)
    many = density(DenseMap(matrix, block=4), steps=5, runs=8, points=20, seed=seed)
    torch.testing.assert_close(one.nodes, many.nodes[:runs], rtol=0.0, atol=1e-10)
    torch.testing.assert_close(one.weights, many.weights[:runs], rtol=0.0, atol=1e-10)
    other = density(DenseMap(matrix), steps=5, runs=8, points=20, seed=seed + 1)
    assert float((other.weights - many.weights).abs().max()) > 1e-3


@pytest.mark.parametrize("sizes", [[13], [4, 9], [9, 1, 3]])
def test_ranks_and_their_parts_of_the_vectors_change_nothing(sizes):
    matrix = symmetric(torch.linspace(-1.0, 2.0, 13))
    alone = density(DenseMap(matrix), steps=6, runs=3, sigma=0.1, points=40)
    for found in on_ranks(matrix, sizes, lambda A: _density_of(A)):
        torch.testing.assert_close(found.nodes, alone.nodes, rtol=0.0, atol=1e-10)
        torch.testing.assert_close(found.density, alone.density, rtol=0.0, atol=1e-8)
        assert found.products == alone.products


def _density_of(A: RankedMap) -> Density:
    return density(A, steps=6, runs=3, sigma=0.1, points=40)


@pytest.mark.parametrize("value, sigma", [(0.0, 0.0025), (3.0, 0.0075), (-7e5, 1750.0)])
def test_multiple_of_the_identity_has_a_width_of_a_four_hundredth_of_its_size(value, sigma):
    """Not of the rounding by which its nodes differ."""
    found = density(DenseMap(symmetric(torch.full((9,), value))), steps=4, runs=3)
    assert found.sigma == pytest.approx(sigma, rel=1e-6)
    assert float((found.nodes - value).abs().max()) <= 1e-9 * abs(value)


def test_float32_finds_the_same_density():
    values = torch.linspace(-1.0, 2.0, 40)
    single, double = (density(DenseMap(symmetric(values).to(kind)), steps=10, runs=3, sigma=0.1)
                      for kind in (torch.float32, torch.float64))
    assert single.density.dtype == torch.float64
    torch.testing.assert_close(single.nodes, double.nodes, rtol=0.0, atol=1e-4)


def test_gauss_gives_the_rule_of_legendre():
    """betas k / sqrt(4 k^2 - 1) are those of the uniform measure on [-1, 1]: nodes and weights are in every table."""
    k = torch.arange(1, 4, dtype=torch.float64)
    nodes, weights, reach = gauss(torch.zeros(3, dtype=torch.float64), k / (4.0 * k**2 - 1.0).sqrt())
    torch.testing.assert_close(nodes, torch.tensor([-math.sqrt(0.6), 0.0, math.sqrt(0.6)], dtype=torch.float64))
    torch.testing.assert_close(weights, torch.tensor([5.0, 8.0, 5.0], dtype=torch.float64) / 18.0)
    torch.testing.assert_close(reach, reach.flip(0))
    assert float(reach.max()) <= math.sqrt(0.6)


@given(st.lists(st.integers(0, 60), min_size=2, max_size=40), st.integers(1, 12), SEEDS)
def test_within_reach_of_each_node_there_is_an_eigenvalue(levels, steps, seed):
    values = torch.tensor(levels, dtype=torch.float64) / 7.0
    A = DenseMap(symmetric(values, seed))
    [(alphas, betas)] = tridiagonals(A, [A.space.random("normal", seed, 0)], steps)
    rule = gauss(alphas, betas)
    away = (values - rule.nodes[:, None]).abs().min(1).values
    assert bool((away <= rule.reach + 1e-9).all())
    if len(alphas) < steps:
        assert float(rule.reach.max()) == 0.0


def rises(heights: Tensor, errors: Tensor) -> int:
    """How often a curve that should fall rises by more than the luck of the random vectors."""
    found, valley = 0, math.inf
    for height, error in zip(heights.tolist(), errors.tolist(), strict=True):
        if height > valley + 4.0 * error + 1e-3 * float(heights.max()):
            found, valley = found + 1, height
        valley = min(valley, height)
    return found


@pytest.mark.parametrize("steps", either([10, 80], [10, 20, 40, 80]))
def test_a_wide_spectrum_shows_no_tooth_for_each_node(steps):
    """The covariance of normal numbers has the density of Marchenko and Pastur, 1967, with one peak."""
    size, ratio = 800, 0.2
    numbers = torch.randn(int(size / ratio), size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = density(DenseMap(numbers.T @ numbers / len(numbers)), steps=steps, runs=10)
    low, high, x = (1.0 - ratio**0.5) ** 2, (1.0 + ratio**0.5) ** 2, found.grid
    exact = ((high - x) * (x - low)).clamp(min=0.0).sqrt() / (2.0 * math.pi * ratio * x.clamp(min=low / 2.0))
    assert float(torch.trapezoid((found.density - exact).abs(), x)) < (0.15 if steps == 10 else 0.08)
    top, errors = int(found.density.argmax()), (found.upper - found.density) / 2.0
    assert rises(found.density[top:], errors[top:]) == rises(found.density[:top].flip(0), errors[:top].flip(0)) == 0
    near = (0.03 if steps < 40 else 0.01) * (high - low)
    assert abs(float(found.nodes.min()) - low) < near and abs(float(found.nodes.max()) - high) < 2.0 * near


def spectrum(kind):
    """Marchenko and Pastur's (d / n = 0.2), a semicircle, a bulk with separate eigenvalues, or most at 0."""
    generator, size = torch.Generator().manual_seed(3), 400
    numbers = torch.randn(5 * size, size, generator=generator, dtype=torch.float64)
    bulk = torch.linalg.eigvalsh(numbers.T @ numbers / len(numbers))
    if kind == "semicircle":
        return torch.linalg.eigvalsh((numbers[:size] + numbers[:size].T) / (2.0 * size) ** 0.5)
    if kind == "outliers":
        return torch.cat([bulk, torch.tensor([4.0, 6.0, -1.5]).double()])
    few = torch.tensor([0.5, 0.7, 1.0, 2.0, 5.0, 10.0]).double()
    return bulk if kind == "marchenko-pastur" else torch.cat([torch.zeros(300).double(), 0.01 * bulk, few])


KINDS = ["marchenko-pastur", "semicircle", "outliers", "mostly zero"]


class Diagonal(DenseMap):
    """The matrix of these eigenvalues, in the basis of random starts as good as any."""

    def __init__(self, values):
        super().__init__(torch.empty(len(values), 0).double())
        self.values = values

    def products(self, vectors):
        return [self.space.cut(self.values * torch.cat(vector)) for vector in vectors]


@pytest.mark.parametrize("kind", KINDS)
def test_edges_are_within_a_hundredth_of_the_range(kind):
    """Of the nodes, of what the picture shows, and of where the integrated density leaves 0 and comes to 1."""
    values = spectrum(kind)
    found, low, high = density(Diagonal(values)), float(values.min()), float(values.max())
    near = 0.01 * (high - low)
    floor = 0.1 / (found.size * found.sigma * math.sqrt(2.0 * math.pi))  # the lower end of the picture
    seen, share = found.grid[found.density > floor], found.integrated().share
    inside = found.grid[(share > 1e-9) & (share < 1.0 - 1e-9)]
    for points in found.nodes.flatten(), seen, inside:
        assert float(points.min()) == pytest.approx(low, abs=near)
        assert float(points.max()) == pytest.approx(high, abs=near)


@pytest.mark.parametrize("steps, runs", [(5, 10), (20, 10), (80, 10), (20, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_integrated_densitys_band_holds_the_share_of_eigenvalues_below(kind, steps, runs):
    """Also of few steps, of which the band tells: of one run for certain, but for the luck of the start; of ten runs
    within twice the band everywhere."""
    values = spectrum(kind)
    start = unit(Diagonal(values), 0, 0).square() if runs == 1 else torch.full_like(values, 1.0 / len(values))
    found = density(Diagonal(values), steps=steps, runs=runs).integrated()
    place = 1e-3 * float(values.max() - values.min())  # to which a node is taken for an eigenvalue
    low, high = [((values < found.grid[:, None] + move) * start).sum(1) for move in (-place, place)]
    times = 1.0 if runs == 1 else 2.0
    assert bool((found.share - times * (found.share - found.lower) <= high + 1e-9).all())
    assert bool((found.share + times * (found.upper - found.share) >= low - 1e-9).all())
    assert bool((found.lower.diff() >= 0).all() and (found.upper.diff() >= 0).all())
    assert bool((found.lower <= found.share + 1e-12).all() and (found.share <= found.upper + 1e-12).all())
    assert float((found.upper - found.lower).max()) < (0.12 if steps >= 80 else 0.5 if steps >= 20 else 1.0)


@pytest.mark.parametrize("values", [[-3.0], [1.0] * 20, [-1.0, 3.0]])
def test_the_range_of_a_quantile_holds_an_eigenvalue_between_points_of_the_grid(values):
    found = density(DenseMap(symmetric(torch.tensor(values))), steps=5, runs=1).integrated()
    median, least, largest = found.quantile(0.5)
    assert least <= min(values, key=lambda value: abs(value - median)) <= largest


def test_quantiles_have_the_eigenvalues_they_say():
    values = spectrum("semicircle")
    found = density(Diagonal(values)).integrated()
    for share in (0.01, 0.1, 0.5, 0.9, 0.99):
        value, early, late = found.quantile(share)
        true = float(values.quantile(share))
        assert early - 0.01 <= true <= late + 0.01 and early <= value <= late
    assert "50 %" in str(found) and "semicircle" not in str(found)
    with pytest.raises(ValueError, match="share must be between 0 and 1"):
        found.quantile(1.0)


def test_the_integrated_density_is_drawn_with_its_band_and_kept_in_files(tmp_path):
    found = density(Diagonal(spectrum("outliers")), steps=10, runs=3).integrated()
    ax = found.plot(tmp_path / "share.svg")
    (line,), (band,) = ax.get_lines(), ax.collections
    assert line.get_ydata().tolist() == found.share.tolist() and band.get_paths()
    found.save(tmp_path / "share.npz")
    assert torch.equal(Result.load(tmp_path / "share.npz").upper, found.upper)


def test_a_separate_eigenvalue_keeps_its_place_and_a_given_width_is_kept():
    values = torch.cat([torch.linspace(0.0, 1.0, 200), torch.tensor([3.0, 3.2, 9.0])]).double()
    found = density(DenseMap(symmetric(values)), steps=30, runs=3)
    assert found.sigma == pytest.approx(0.0225, rel=1e-3)
    for node, width in zip(found.nodes.flatten().tolist(), found.widths.flatten().tolist(), strict=True):
        assert width == pytest.approx(found.sigma, rel=1e-6) if node > 2.0 else width >= found.sigma
    assert bool((density(DenseMap(symmetric(values)), steps=30, sigma=0.01).widths == 0.01).all())


def test_print_tells_the_matrix_the_cost_and_each_number_with_its_error():
    text = list(density(DenseMap(symmetric(torch.linspace(-1.0, 3.0, 30))), steps=8, runs=4).lines())
    assert text[0] == "spectral density of dense matrix: 30 eigenvalues, 4 runs of 8 steps, 32 products"
    assert [line[:20].strip() for line in text[1:]] == [
        "smallest node", "largest node", "trace", "mean eigenvalue",
        "share below -sigma", "share around 0", "share above sigma", "sigma",
    ]
    assert sum("+-" in line for line in text) == 5
    shares = [float(line[20:].split()[0]) for line in text[5:8]]
    assert sum(shares) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("suffix", ["npz", "json"])
@pytest.mark.parametrize("runs", [1, 3])
def test_density_comes_back_from_a_file(tmp_path, suffix, runs):
    found = density(DenseMap(symmetric(torch.linspace(-1.0, 3.0, 30))), steps=4, runs=runs, points=20)
    found.save(tmp_path / f"density.{suffix}")
    again = Result.load(tmp_path / f"density.{suffix}")
    assert isinstance(again, Density) and str(again) == str(found)
    assert torch.equal(again.density, found.density) and (again.upper is None) == (runs == 1)


def test_density_of_an_inverse_has_the_inverse_eigenvalues():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64).repeat(5)
    found = density(Inverse(DenseMap(symmetric(values)), damping=1.0, tol=1e-12), steps=4, runs=2)
    expected = (1.0 / (values[:4] + 1.0)).sort().values
    torch.testing.assert_close(found.nodes, expected.expand(2, 4), rtol=1e-8, atol=1e-10)


class Paper:
    """Axes that remember what was drawn."""

    def __init__(self) -> None:
        self.drawn: dict[str, tuple[object, ...]] = {}

    def __getattr__(self, kind: str) -> object:
        return lambda *given, **options: self.drawn.__setitem__(kind, (*given, options))


@pytest.mark.parametrize("runs", [1, 4])
def test_picture_is_logarithmic_with_the_band_filled_where_there_is_one(runs):
    found = density(DenseMap(symmetric(torch.tensor([0.0] * 30 + [5.0, 90.0]))), steps=8, runs=runs)
    paper = Paper()
    found.draw(paper)
    grid, curve, _ = paper.drawn["semilogy"]
    assert (grid == found.grid.numpy()).all() and curve.min() > 0.0
    assert ("fill_between" in paper.drawn) == (runs > 1)
    # One eigenvalue of all, 1 / (n sigma sqrt(2 pi)) high, stands out of the floor.
    assert 0.0 < paper.drawn["set_ylim"][0]["bottom"] < 0.2 / (32 * found.sigma * math.sqrt(2 * math.pi))


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"steps": 0}, "steps is 0. Give a whole number of at least 1"),
        ({"runs": 0}, "runs is 0. Give a whole number of at least 1"),
        ({"points": 9}, "points is 9. Give a whole number of at least 10"),
        ({"sigma": 0.0}, "sigma is 0.0, but must be a finite number above 0"),
        ({"sigma": math.nan}, "sigma is nan, but must be a finite number above 0"),
        ({"margin": -0.1}, "margin is -0.1, but must be a finite number"),
    ],
)
def test_numbers_out_of_range_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        density(DenseMap(torch.eye(3, dtype=torch.float64)), **wrong)


def test_moment_and_count_refuse_what_makes_no_sense():
    found = density(DenseMap(torch.eye(3, dtype=torch.float64)), steps=2, runs=2)
    with pytest.raises(ValueError, match="power is -1. Give a whole number of at least 0"):
        found.moment(-1)
    with pytest.raises(ValueError, match=r"low must not be above high \(low: 2.0, high: 1.0\)"):
        found.count(2.0, 1.0)
    with pytest.raises(TypeError, match="low is 'least'. Give a number"):
        found.count("least", 1.0)
    with pytest.raises(TypeError, match="share is 'half'. Give a number"):
        found.integrated().quantile("half")
