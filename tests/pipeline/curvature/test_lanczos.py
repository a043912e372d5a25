"""Laws of Lanczos, against dense eigenvalues: tridiagonals, the basis under them, and top_eigenpairs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from cover import either, examples
from dense_map import DenseMap, DenseSpace, symmetric
from dense_ranks import RankMap, over_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor

from pipeline.curvature.estimates.eigenpairs import Eigenpairs, top_eigenpairs
from pipeline.curvature.estimates.krylov import Basis, orthogonalise_
from pipeline.curvature.estimates.quadrature import tridiagonals
from pipeline.curvature.estimates.ritz import EigenvectorMap, ritz, shortest, thresholds, wanted
from pipeline.curvature.space import Vec

WHICH = ["LM", "LA", "SA", "BE"]


@st.composite
def spectra(draw: st.DrawFn) -> Tensor:
    """Few levels, each many times: repeated, zero, negative; or all apart; sizes from 1."""
    levels = draw(st.lists(st.integers(-20, 20), min_size=1, max_size=8, unique=True))
    if draw(st.booleans()):
        copies = draw(st.lists(st.integers(1, 6), min_size=len(levels), max_size=len(levels)))
        values = [float(level) for level, times in zip(levels, copies, strict=True) for _ in range(times)]
    else:
        values = [level + 0.01 * place for place, level in enumerate(levels)]
        values += [0.0] * draw(st.integers(0, 20))
    return torch.tensor(values, dtype=torch.float64) * draw(st.sampled_from([1e-6, 1.0, 1e4]))


def dense_truth(matrix: Tensor, k: int, which: str) -> Tensor:
    """The wanted eigenvalues in the promised order, by other means than the code's."""
    values = sorted(torch.linalg.eigvalsh(matrix.double()).tolist(), reverse=True)
    if which == "BE":
        values = values[: (k + 1) // 2] + (values[-(k // 2) :] if k // 2 else [])
    elif which == "LM":
        values = sorted(values, key=abs, reverse=True)[:k]
    else:
        values = values[:k] if which == "LA" else values[::-1][:k]
    return torch.tensor(values, dtype=torch.float64)


def whole(found: Eigenpairs) -> Tensor:
    """The vectors as columns, where one process has all of them."""
    return torch.stack([torch.cat([vector["a"], vector["b"]]) for vector in found.vectors], dim=1).double()


def assert_same_values(found: Eigenpairs, truth: Tensor, within: float) -> None:
    """Of +x and -x, which have one magnitude, rounding decides which is first."""
    left, right = (found.values.abs(), truth.abs()) if found.which == "LM" else (found.values, truth)
    torch.testing.assert_close(left, right, rtol=0, atol=within)


# ----------------------------------------------------------------------------------------------------- eigenpairs


@settings(max_examples=examples(70))
@given(spectra(), st.data())
def test_the_wanted_eigenpairs_are_those_of_dense_eigh_as_often_as_they_are(
    values: Tensor, data: st.DataObject
) -> None:
    matrix = symmetric(values, seed=data.draw(st.integers(0, 99)))
    k = data.draw(st.integers(1, len(values)))
    which = data.draw(st.sampled_from(WHICH))
    A = DenseMap(matrix, block=data.draw(st.integers(1, 5)))
    found = top_eigenpairs(A, k, which=which, tol=1e-9, seed=data.draw(st.integers(0, 9)))
    norm = float(values.abs().max())
    assert found.converged and found.why == "" and found.products == A.asked
    assert_same_values(found, dense_truth(matrix, k, which), within=1e-9 * norm)
    vectors = whole(found)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-12)
    rest = torch.linalg.vector_norm(matrix @ vectors - vectors * found.values, dim=0)
    torch.testing.assert_close(rest / (found.scale or 1.0), found.residuals, rtol=1e-2, atol=1e-14)
    assert float(found.residuals.max()) <= 1e-9


@settings(max_examples=examples(40))
@given(spectra(), st.data())
def test_a_bounded_basis_finds_the_same_pairs_and_holds_no_more_rows(values: Tensor, data: st.DataObject) -> None:
    matrix, most_rows = symmetric(values), 0
    k, block = data.draw(st.integers(1, min(4, len(values)))), data.draw(st.integers(1, 3))
    which = data.draw(st.sampled_from(WHICH))
    most = 2 * k + 3 * min(block, len(values)) + data.draw(st.integers(0, 4))

    def counted(basis: Basis, vec: Vec) -> None:
        nonlocal most_rows
        append(basis, vec)
        most_rows = max(most_rows, len(basis))

    append = Basis.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Basis, "append", counted)
        found = top_eigenpairs(DenseMap(matrix, block=block), k, which=which, tol=1e-9, max_basis=most)
    assert found.converged and most_rows <= most
    assert_same_values(found, dense_truth(matrix, k, which), within=1e-9 * float(values.abs().max()))


def test_an_eigenvalue_that_is_there_nine_times_comes_as_often_as_asked_with_one_start_a_round() -> None:
    values = torch.tensor([4.0] * 9 + [3.0, 1.0, 0.0, -2.0] * 6)
    for block in (1, 2, 4):
        found = top_eigenpairs(DenseMap(symmetric(values), block=block), 5)
        torch.testing.assert_close(found.values, torch.full((5,), 4.0, dtype=torch.float64))
        assert found.converged
    alone = top_eigenpairs(DenseMap(symmetric(values), block=1), 5, miss=1)  # what it is for
    assert alone.values.tolist() == pytest.approx([4, 3, -2, 1, 0], abs=1e-9) and alone.products < found.products


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_of_a_matrix_of_low_rank_the_null_space_is_found_to_k_equal_size(rank: int) -> None:
    values = torch.cat([torch.arange(1.0, rank + 1), torch.zeros(8 - rank)])
    found = top_eigenpairs(DenseMap(symmetric(values), block=3), 8, tol=1e-12)
    assert found.converged and found.products <= 3 * 8
    torch.testing.assert_close(found.values, values.sort(descending=True).values.double(), rtol=0, atol=1e-14)


def test_scipy_finds_the_same_outliers_of_a_larger_matrix_which_are_close_to_one_another() -> None:
    values = torch.cat([torch.linspace(-0.5, 1.0, 290), 5 + torch.tensor([0, 1e-4, 2e-4, 1.0, 1.0])])
    matrix = symmetric(values)
    found = top_eigenpairs(DenseMap(matrix), 5, which="LA", tol=1e-10)
    operator = LinearOperator(matrix.shape, matvec=lambda x: matrix.numpy() @ x, dtype=float)
    there = eigsh(operator, 5, which="LA", tol=1e-12)
    torch.testing.assert_close(found.values, torch.tensor(there[0]).sort(descending=True).values, rtol=0, atol=1e-10)
    assert found.converged and found.products < 150


def test_a_restart_needs_few_rows_for_a_hard_end_of_the_spectrum() -> None:
    matrix = symmetric(torch.linspace(0, 1, 300) ** 2)
    found = top_eigenpairs(DenseMap(matrix, block=1), 3, which="LA", max_basis=20)
    assert found.converged and found.products > 40
    torch.testing.assert_close(found.values, dense_truth(matrix, 3, "LA"), rtol=0, atol=1e-6)


@settings(max_examples=examples(25))
@given(spectra(), st.sampled_from(WHICH), st.integers(1, 4))
def test_float32_is_right_to_its_rounding_and_says_what_it_cannot_reach(values: Tensor, which: str, block: int) -> None:
    matrix = symmetric(values)
    norm, k = float(values.abs().max()), min(3, len(values))
    A = DenseMap(matrix.float(), block=block)
    found = top_eigenpairs(A, k, which=which, tol=1e-5)
    assert found.converged
    assert_same_values(found, dense_truth(matrix, k, which), within=1e-5 * norm)
    beyond = top_eigenpairs(A, k, which=which, tol=1e-12)
    assert beyond.converged == (float(beyond.residuals.max()) <= 1e-12)
    assert_same_values(beyond, dense_truth(matrix, k, which), within=1e-5 * norm)


def test_in_float32_a_residual_under_the_rounding_is_not_claimed() -> None:
    found = top_eigenpairs(DenseMap(symmetric(torch.arange(40.0)).float()), 3, tol=1e-10)
    assert not found.converged and 1e-10 < float(found.residuals.max()) < 1e-5
    assert found.why.startswith("rounding in float32: more products do not bring")


def test_at_max_products_it_ends_with_what_there_is_and_says_so() -> None:
    matrix = symmetric(torch.linspace(0, 1, 40) ** 2)
    for most in [*range(6, 30), *range(30, 150, 10)]:
        A = DenseMap(matrix, block=4)
        found = top_eigenpairs(A, 3, max_products=most)
        assert found.products == A.asked <= most and len(found.values) == len(found.vectors) == 3
        vectors = whole(found)
        rest = torch.linalg.vector_norm(matrix @ vectors - vectors * found.values, dim=0)
        torch.testing.assert_close(rest / found.scale, found.residuals, rtol=1e-6, atol=1e-14)
        assert found.converged or "stopped at max_products" in "\n".join(found.lines())
    assert found.converged
    early = top_eigenpairs(DenseMap(matrix), 3, max_products=6)
    assert not early.converged and float(early.residuals.max()) > 1e-6
    assert f"the worst residual is {float(early.residuals.max()):.1e}" in early.why


def test_pairs_that_are_good_enough_are_not_called_converged_before_a_second_start_has_shown_no_other() -> None:
    A = DenseMap(symmetric(torch.tensor([5.0, 5.0] + [0.1 * place for place in range(30)])), block=1)
    alone = top_eigenpairs(A, 2, miss=1)  # round 1 sees one of the two
    found = top_eigenpairs(A, 2, max_products=alone.products + 1)
    assert not found.converged and float(found.residuals.max()) < 1e-6 and "not sure yet" in found.why


@pytest.mark.soak
def test_a_second_copy_is_missed_no_more_often_than_allowed() -> None:
    """Allowed is 0.5: were it missed that often, more would be 3.6 standard deviations off (56 of 80 seeds)."""
    values = torch.cat([torch.tensor([3.0, 3.0]), torch.linspace(0, 2.5, 14)])
    A, missed, seeds = DenseMap(symmetric(values), block=1), 0, either(30, 80)
    for seed in range(seeds):
        missed += float(top_eigenpairs(A, 2, seed=seed, miss=0.5, tol=1e-3).values[1]) < 2.9
    assert 0 < missed <= seeds / 2 + 3.6 * math.sqrt(seeds) / 2
    certain = [top_eigenpairs(A, 2, seed=seed, miss=1e-4, tol=1e-3).values[1] for seed in range(10)]
    assert min(certain) > 2.9


def test_pairs_come_back_from_a_file_and_are_printed_and_drawn(tmp_path: Path) -> None:
    found = top_eigenpairs(DenseMap(symmetric(torch.tensor([-4.0, 3.0, 2.0, 1.0]))), 2)
    found.save(tmp_path / "top.npz")
    again = Eigenpairs.load(tmp_path / "top.npz")
    assert torch.equal(whole(again), whole(found)) and str(again) == str(found)
    lines = str(found).splitlines()
    assert lines[0] == f"2 eigenvalues of the dense matrix, of largest magnitude; {found.products} products"
    assert lines[1].startswith("    1  -4.0000000e+00  residual ") and lines[2].startswith("    2  +3.0000000e+00")
    assert "relative to the largest magnitude seen, 4.000e+00" in lines[3] and len(lines) == 4
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "top.png")
    assert (tmp_path / "top.png").stat().st_size > 1000


def test_a_copy_that_only_rounding_puts_before_the_last_one_found_begins_no_round() -> None:
    """Rounds of two products: 4 and 0; 4 again; no other. Two more for the residuals."""
    for seed in range(10):
        A = DenseMap(symmetric(torch.tensor([4.0] * 30 + [0.0] * 10)), block=1)
        assert top_eigenpairs(A, 2, seed=seed).products == 8


def test_a_last_round_that_is_cut_down_still_shows_a_second_copy() -> None:
    A = DenseMap(symmetric(torch.cat([torch.tensor([3.0, 3.0]), torch.linspace(0, 2.5, 28)])), block=1)
    for seed in range(either(6, 20)):
        found = top_eigenpairs(A, 2, seed=seed, max_basis=8)
        assert found.converged and float(found.values[1]) > 2.9


@pytest.mark.parametrize(
    "which, found, points",
    [
        ("LM", [4.0, -3.0, 2.0], [2.5, -2.5]),
        ("LA", [4.0, 2.0, -3.0], [-2.5]),
        ("SA", [-3.0, 3.0], [2.5]),
        ("BE", [4.0, 2.0, -3.0], [2.5, -3.5]),
        ("BE", [4.0], [4.5]),
    ],
)
def test_past_the_limits_are_the_values_that_would_be_wanted_more(
    which: str, found: list[float], points: list[float]
) -> None:
    assert thresholds(torch.tensor(found), which, 0.5) == points


def test_the_same_seed_gives_the_same_bits_and_another_one_the_same_values() -> None:
    A = DenseMap(symmetric(torch.arange(20.0)))
    one, again, other = (top_eigenpairs(A, 3, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.values, again.values) and torch.equal(whole(one), whole(again))
    assert not torch.equal(whole(one), whole(other))
    torch.testing.assert_close(one.values, other.values, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"k": 0}, "k is 0: the dense matrix has 6 eigenvalues; ask for 1 to 6"),
        ({"k": 7}, "k is 7: the dense matrix has 6 eigenvalues; ask for 1 to 6"),
        ({"which": "SM"}, r"which is 'SM': use 'LM' \(of largest magnitude\), 'LA'"),
        ({"tol": 0.0}, "tol is 0.0: it bounds a relative residual"),
        ({"miss": 0.0}, "miss is 0.0: it is a probability"),
        ({"max_products": 3}, "max_products is 3: 2 eigenpairs take 4 at least, 2 to find directions and 2 to measure"),
        ({"block": 0}, "block is 0. Give a whole number of at least 1"),
        ({"max_basis": 5, "block": 1}, r"max_basis is 5: 2 eigenpairs with blocks of 1 need 2 k \+ 3 block = 7"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_in_words(wrong: dict[str, object], words: str) -> None:
    arguments = {"k": 2, **wrong}
    with pytest.raises(ValueError, match=words):
        top_eigenpairs(DenseMap(symmetric(torch.arange(6.0))), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"k": 1.5}, "k is 1.5. Give a whole number"),
        ({"tol": "small"}, "tol is 'small'. Give a number"),
        ({"miss": None}, "miss is None. Give a number"),
        ({"max_products": "all"}, "max_products is 'all'. Give a whole number"),
        ({"max_basis": 9.5}, "max_basis is 9.5. Give a whole number"),
    ],
)
def test_arguments_that_are_no_numbers_are_refused_in_words(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        top_eigenpairs(DenseMap(symmetric(torch.arange(6.0))), **wrong)  # type: ignore[arg-type]


def test_a_product_that_is_not_finite_is_an_error_and_never_a_nan() -> None:
    matrix = symmetric(torch.arange(6.0))
    matrix[2, 3] = math.nan
    with pytest.raises(FloatingPointError, match="a product of dense matrix is not finite.*take the space in float64"):
        top_eigenpairs(DenseMap(matrix), 2)
    with pytest.raises(FloatingPointError, match="dense matrix"):
        tridiagonals(DenseMap(matrix), [DenseSpace(6).random("normal", 0, 0)], 3)


# ----------------------------------------------------------------------------------------------------- over ranks


@pytest.mark.parametrize("ranks, tied", [(1, 0), (2, 0), (2, 5), (3, 7)])
def test_over_ranks_each_has_its_part_of_the_same_pairs(ranks: int, tied: int) -> None:
    values = torch.tensor([6.0, 6.0, 5.0, -4.0] + [0.1 * place for place in range(26)])
    matrix = symmetric(values)

    def work(A: RankMap) -> tuple[Eigenpairs, list[Tensor], int]:
        found = top_eigenpairs(A, 4, tol=1e-10, max_basis=20, block=2)
        return found, [A.space.whole(A.space.vec(vector)) for vector in found.vectors], A.asked

    results = over_ranks(matrix, ranks, work, tied=tied)
    for found, vectors, asked in results:
        assert found.converged and found.products == asked
        assert torch.equal(found.values, results[0][0].values)
        assert torch.equal(found.residuals, results[0][0].residuals)
        columns = torch.stack(vectors, dim=1)
        torch.testing.assert_close(columns.T @ columns, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-12)
        torch.testing.assert_close(matrix @ columns, columns * found.values, rtol=0, atol=1e-9)
    torch.testing.assert_close(results[0][0].values, torch.tensor([6.0, 6.0, 5.0, -4.0], dtype=torch.float64))


def test_a_product_takes_three_sums_over_the_processes_whatever_the_basis_holds() -> None:
    matrix = symmetric(torch.linspace(0, 1, 60))

    def work(A: RankMap) -> tuple[int, int]:
        before = A.space.exchange.meetings
        tridiagonals(A, [A.space.random("normal", 0, 0)], 40)
        return A.space.exchange.meetings - before, A.asked

    for meetings, asked in over_ranks(matrix, 2, work):
        assert asked == 40 and meetings == 2 * (1 + 40 * (3 + 1))  # each meets twice; a dense product meets as well


# ---------------------------------------------------------------------------------------------------- tridiagonals


def dense(alphas: Tensor, betas: Tensor) -> Tensor:
    return torch.diag(alphas) + torch.diag(betas[:-1], 1) + torch.diag(betas[:-1], -1)


@settings(max_examples=examples(60))
@given(spectra(), st.integers(1, 3), st.integers(1, 12))
def test_powers_of_the_tridiagonal_are_the_moments_of_the_start_up_to_twice_the_steps(
    values: Tensor, lanes: int, steps: int
) -> None:
    matrix = symmetric(values / values.abs().max().clamp(min=1e-9))
    A = DenseMap(matrix, block=2)
    starts = [A.space.random("rademacher", 3, lane) for lane in range(lanes)]
    found = tridiagonals(A, starts, steps)
    assert A.asked == sum(len(alphas) for alphas, _ in found)
    for start, (alphas, betas) in zip(starts, found, strict=True):
        assert len(betas) == len(alphas) <= min(steps, len(values))
        small, unit = dense(alphas, betas), torch.cat(start) / torch.cat(start).norm()
        for power in range(2 * len(alphas)):
            moment = unit @ torch.linalg.matrix_power(matrix, power) @ unit
            assert torch.linalg.matrix_power(small, power)[0, 0] == pytest.approx(float(moment), abs=1e-10)


@settings(max_examples=examples(40))
@given(spectra(), st.integers(0, 99))
def test_a_tridiagonal_of_all_steps_has_each_eigenvalue_and_none_as_a_ghost(values: Tensor, seed: int) -> None:
    A = DenseMap(symmetric(values, seed))
    [(alphas, betas)] = tridiagonals(A, [A.space.random("normal", seed, 0)], 1000)
    found, near = torch.linalg.eigvalsh(dense(alphas, betas)), 1e-9 * float(values.abs().max())
    for level in set(values.tolist()):
        assert 1 <= int(((found - level).abs() <= near).sum()) <= int((values == level).sum())
    assert all(float((values - one).abs().min()) <= near for one in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_krylov_space_that_is_invariant_ends_the_steps(dtype: torch.dtype) -> None:
    for levels in ([0.0], [3.0], [1.0, 2.0], [-1.0, 0.0, 5.0]):
        A = DenseMap(symmetric(torch.tensor(levels * 6)).to(dtype))
        [(alphas, betas)] = tridiagonals(A, [A.space.random("normal", 1, 0)], 10)
        assert len(alphas) == len(levels) == A.asked
        near = 1e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(
            torch.linalg.eigvalsh(dense(alphas, betas)), torch.tensor(levels).double(), rtol=0, atol=near
        )


def test_starts_in_lockstep_are_multiplied_together_a_block_at_a_time_and_give_what_they_give_alone() -> None:
    A = DenseMap(symmetric(torch.arange(20.0)), block=2)
    starts = [A.space.random("normal", 0, lane) for lane in range(3)]
    kept = [[shard.clone() for shard in start] for start in starts]
    told = [0]
    together = tridiagonals(A, iter(starts), 6, lambda products, _: told.append(products))
    assert torch.tensor(told).diff().tolist() == [2] * 6 + [1] * 6
    for start, before, (alphas, betas) in zip(starts, kept, together, strict=True):
        assert all(map(torch.equal, start, before))
        [(alone, between)] = tridiagonals(A, [start], 6)
        assert torch.equal(alphas, alone) and torch.equal(betas, between)


# ----------------------------------------------------------------------------------------- the basis, the projection


@given(st.integers(1, 40), st.integers(0, 30), st.sampled_from([torch.float32, torch.float64]))
def test_a_basis_splits_combines_and_turns_its_rows_as_a_matrix_does(
    size: int, rows: int, dtype: torch.dtype
) -> None:
    rows, space = min(rows, size), DenseSpace(size, dtype)
    generator = torch.Generator().manual_seed(size)
    random = torch.randn(size, size, generator=generator, dtype=torch.float64)
    Q = torch.linalg.qr(random)[0][:, :rows].T.to(dtype)
    basis, vec = Basis(space), random[0].to(dtype)
    near = {"rtol": 0.0, "atol": 1e-4 if dtype == torch.float32 else 1e-12}
    for row in Q:
        basis.append(space.cut(row))
    part = space.cut(vec)
    [split] = orthogonalise_([basis], [part], "test")
    torch.testing.assert_close(split.inside, (Q @ vec).double(), **near)
    torch.testing.assert_close(torch.cat(part), vec - Q.T @ (Q @ vec), **near)
    assert split.whole == pytest.approx(float(vec.double().norm()), abs=near["atol"])
    turn = torch.linalg.qr(random[:rows, :rows])[0][:, : rows // 2]
    combined = basis.combined(turn)
    assert len(combined) == rows // 2
    basis.rotate_(turn)
    assert len(basis) == rows // 2
    for row, vec in enumerate(combined):
        torch.testing.assert_close(torch.cat(vec), turn[:, row].to(dtype) @ Q, **near)
        torch.testing.assert_close(torch.cat(basis.row(row)), torch.cat(vec), **near)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 999))
def test_no_eigenvector_has_a_longer_part_in_the_start_than_the_chain_says(block: int, steps: int, seed: int) -> None:
    """Restarted or not; and past the Ritz values the bound falls with the distance."""
    size = 30
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(size, dtype=torch.float64, generator=generator)
    start = torch.linalg.qr(torch.randn(size, block, dtype=torch.float64, generator=generator))[0]
    top = float(values.max())
    part = float(start[values.argmax()].norm())

    def grown(rows: Tensor, fresh: Tensor, count: int) -> tuple[Tensor, Tensor]:
        for _ in range(count):
            rows = torch.cat([rows, fresh], 1)
            image = values[:, None] * fresh
            for _ in range(2):
                image = image - rows @ (rows.T @ image)
            fresh = torch.linalg.qr(image)[0]
        return torch.cat([rows, fresh], 1), fresh

    Q, fresh = grown(start[:, :0], start, steps)
    found = ritz(Q.T @ (values[:, None] * Q[:, :-block]))
    bounds = [EigenvectorMap.begin([top + more], block).longest(found) for more in (1e-9, 1e-3, 0.1, 1.0)]
    assert part <= bounds[0] * 1.0001 + 1e-6
    assert all(later <= earlier + 1e-6 for earlier, later in zip(bounds, bounds[1:], strict=False))
    keep = wanted(found.values, max(1, block * steps // 2), "LA")
    rows = torch.cat([Q[:, :-block] @ found.vectors[:, keep], fresh], 1)
    chain = EigenvectorMap.begin([top + 1e-9], block).followed(found, len(keep))
    kept = rows[:, :-block]
    image = values[:, None] * fresh
    for _ in range(2):
        image = image - rows @ (rows.T @ image)
    Q = torch.cat([kept, fresh, torch.linalg.qr(image)[0]], 1)
    later = chain.longest(ritz(Q.T @ (values[:, None] * Q[:, :-block])))
    assert part <= later * 1.0001 + 1e-6


@pytest.mark.parametrize("starts", [1, 2, 4])
def test_a_random_block_has_a_short_part_in_a_direction_as_rarely_as_said(starts: int) -> None:
    """4000 blocks, allowed 0.2: 5 standard deviations are 127; and the bound is no more than 1.5 times too careful."""
    generator = torch.Generator().manual_seed(starts)
    blocks = torch.linalg.qr(torch.randn(4000, 40, starts, dtype=torch.float64, generator=generator))[0]
    short = int((blocks[:, 0].norm(dim=1) <= shortest(40, starts, 0.2)).sum())
    assert 800 / 1.5 - 127 <= short <= 800 + 127
