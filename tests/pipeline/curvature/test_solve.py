"""Is the solution of a linear system that of a dense solver, and is what cannot be solved refused in words?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from cover import examples
from dense_map import DenseMap, symmetric
from hypothesis import given, settings
from hypothesis import strategies as st
from ranked_map import RankedMap, on_ranks
from torch import Tensor

from pipeline.curvature.estimates.solve import ConvergenceError, Inverse, Solution, solve
from pipeline.curvature.estimates.systems import (
    METHODS,
    IndefiniteError,
    SystemResult,
    SystemState,
    solved,
)
from pipeline.curvature.results.result import Result
from pipeline.curvature.space import Vec

SEEDS = st.integers(0, 10**6)
SIZES = st.integers(3, 24)


def whole(solution: Solution) -> Tensor:
    return torch.cat(list(solution.x.values()))


def right(A: DenseMap, seed: int) -> Vec:
    return A.space.random("normal", seed, 0)


def positive(size: int, condition: float, seed: int) -> Tensor:
    """Symmetric, with eigenvalues from 1 to `condition`."""
    return symmetric(torch.logspace(0.0, math.log10(condition), size, dtype=torch.float64), seed)


class CountingMap(DenseMap):
    """Counts calls too, not products alone."""

    calls = 0

    def products(self, vectors: Sequence[Vec]) -> list[Vec]:
        self.calls += 1
        return super().products(vectors)


def check_solution(A: DenseMap, b: Vec, solution: Solution) -> None:
    """The residual is the true one, and x as near to the dense solver's as that residual allows."""
    system = A.matrix + solution.damping * torch.eye(len(A.matrix), dtype=torch.float64)
    b_all, x = torch.cat(b), whole(solution)
    assert solution.converged and solution.residual <= solution.tol
    true = float((b_all - system @ x).norm() / b_all.norm())
    assert true == pytest.approx(solution.residual, abs=1e-13 * float(system.norm() * x.norm() / b_all.norm()))
    exact = torch.linalg.solve(system, b_all)
    values = torch.linalg.eigvalsh(system).abs()
    room = float(values.max() / values.min()) * (solution.tol + 1e-13)
    assert float((x - exact).norm()) <= room * float(exact.norm())  # |x - exact| / |exact| <= condition * residual
    assert solution.products == A.asked


@given(SIZES, st.floats(1.0, 1e4), st.sampled_from([0.0, 0.5, 30.0]), st.sampled_from([1e-3, 1e-8]), SEEDS,
       st.sampled_from(["cg", "minres"]))
@settings(max_examples=examples(60))
def test_solution_of_positive_definite_systems_is_the_dense_solvers(size, condition, damping, tol, seed, method):
    A = DenseMap(positive(size, condition, seed))
    check_solution(A, right(A, seed), solve(A, right(A, seed), damping=damping, tol=tol, method=method))


@given(SIZES, st.floats(0.01, 0.99), st.floats(-0.9, 0.9), SEEDS, st.booleans())
@settings(max_examples=examples(60))
def test_minres_solves_indefinite_systems(size, share, damping, seed, jacobi):
    values = torch.linspace(1.0, 20.0, size, dtype=torch.float64)
    values[: math.ceil(share * size)] *= -1.0
    A = DenseMap(symmetric(values, seed))
    diagonal = [part.abs() + 1.0 for part in A.space.cut(A.matrix.diag())] if jacobi else None
    solution = solve(
        A, right(A, seed), damping=damping, tol=1e-7, method="minres", preconditioner=diagonal, max_products=5000
    )
    check_solution(A, right(A, seed), solution)


@given(SIZES, st.floats(1e-6, 5.0), SEEDS)
@settings(max_examples=examples(40))
def test_conjugate_gradients_never_pass_over_negative_curvature(size, depth, seed):
    """Run to the end, they must meet it: the last direction's curvature is that of the whole space."""
    values = torch.linspace(1.0, 10.0, size, dtype=torch.float64)
    values[seed % size] = -depth
    A = DenseMap(symmetric(values, seed))
    with pytest.raises(IndefiniteError, match=r"dense matrix \+ damping \* I is not positive definite") as caught:
        solve(A, right(A, seed), tol=1e-13)
    assert "curvature -" in str(caught.value)
    assert solve(A, right(A, seed), damping=depth + 1.0).converged


def test_curvature_that_was_found_is_named_with_what_to_do():
    A = DenseMap(torch.diag(torch.tensor([3.0, -2.5, 1.0], dtype=torch.float64)))
    b = A.space.cut(torch.tensor([0.0, 4.0, 0.0]))
    words = r"met curvature -2 \(p.Mp / p.p\) at step 1, with damping 0.5. Use a damping above 2.5.*GaussNewton.*minres"
    with pytest.raises(IndefiniteError, match=words):
        solve(A, b, damping=0.5)
    with pytest.raises(IndefiniteError, match=words):  # the preconditioner makes the direction shorter, not flatter
        solve(A, b, damping=0.5, preconditioner=A.space.cut(torch.full((3,), 100.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_matrices_are_refused_where_b_is_out_of_their_reach(dtype):
    values = torch.linspace(1.0, 9.0, 12, dtype=torch.float64)
    values[4:7] = 0.0
    A = DenseMap(symmetric(values).to(dtype))
    with pytest.raises(IndefiniteError, match="not positive definite"):
        solve(A, right(A, 1), tol=1e-9)
    with pytest.raises(IndefiniteError, match="curvature 0 "):
        solve(DenseMap(torch.zeros(5, 5, dtype=dtype)), [torch.ones(1, dtype=dtype), torch.ones(4, dtype=dtype)])
    for matrix in (torch.ones(6, 6, dtype=dtype), torch.diag(torch.tensor([1, 2, 0, 0, 3, 0], dtype=dtype))):
        flat = DenseMap(matrix)  # whose curvature there is a rounding above 0
        for seed in range(4):
            with pytest.raises(IndefiniteError, match="not positive definite"):
                solve(flat, right(flat, seed), tol=1e-9)


def test_minres_ends_where_b_is_an_eigenvector_to_the_bit():
    A = DenseMap(torch.diag(torch.tensor([2.0, -3.0, 5.0], dtype=torch.float64)))
    for place, value in enumerate((2.0, -3.0, 5.0)):
        b = torch.zeros(3, dtype=torch.float64)
        b[place] = 1.0
        solution = solve(A, A.space.cut(b), method="minres", tol=1e-12)
        assert solution.converged and torch.equal(whole(solution), b / value)


@given(SEEDS, st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=examples(25))
def test_minres_gives_no_garbage_where_there_is_no_solution(seed, dtype):
    """The part of b that is out of reach remains; rounding must not blow x up in the null space."""
    values = torch.linspace(-1.0, 3.0, 20, dtype=torch.float64)
    values[3:6] = 0.0
    A = DenseMap(symmetric(values, seed).to(dtype))
    b = right(A, seed)
    solution = solve(A, b, method="minres", tol=1e-5, max_products=200)
    image = symmetric((values != 0.0).double(), seed) @ torch.cat(b).double()  # symmetric: the same basis
    least = float((torch.cat(b) - image).norm() / torch.cat(b).norm())
    assert not solution.converged
    assert least - 1e-5 <= solution.residual <= 1.0 + 1e-6
    assert float(whole(solution).norm()) < 100.0 * float(torch.cat(b).norm())


@pytest.mark.parametrize("method", ["cg", "minres"])
@pytest.mark.parametrize("jacobi", [False, True])
def test_residual_that_a_recurrence_goes_by_is_the_true_one(method, jacobi):
    """Step by step: what it announces with a product is what b - A x is for the x that it has by then."""
    A = DenseMap(positive(20, 100.0, 6) + torch.diag(torch.logspace(0.0, 2.0, 20, dtype=torch.float64)))
    diagonal = A.space.cut(A.matrix.diag()) if jacobi else None
    system, b = Inverse(A, preconditioner=diagonal, method=method), right(A, 2)

    def run(limit: int) -> tuple[Vec, list[float]]:
        state, announced = SystemState(), []
        steps = METHODS[method](system, [part.clone() for part in b], 0.0, limit, state)
        ask = next(steps)
        try:
            while True:
                if isinstance(ask, list):
                    announced.append(state.left)
                    ask = steps.send(A.products([ask])[0])
                else:
                    ask = steps.send([float(A.space.dots([one], [other])) for one, other in ask])
        except StopIteration as stop:
            return stop.value, announced

    announced = run(12)[1]
    for step in range(12):
        true = torch.cat(b) - A.matrix @ torch.cat(run(step)[0])
        assert announced[step] == pytest.approx(float(true.norm()), rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_minres_does_not_begin_again_where_only_the_null_space_is_left(seed):
    values = torch.linspace(-1.0, 3.0, 12, dtype=torch.float64)
    values[2:4] = 0.0
    A = DenseMap(symmetric(values, seed))
    b = torch.cat(right(A, seed))
    solution = solve(A, A.space.cut(b), method="minres", tol=1e-5)
    least = float((b - symmetric((values != 0.0).double(), seed) @ b).norm() / b.norm())  # the same basis
    assert solution.residual == pytest.approx(least, abs=1e-6)
    assert solution.products <= 10 + 5  # 10 eigenvalues beside 0; a check, and a vain step with its own


@pytest.mark.parametrize("outside", [1.0, 0.3])
def test_minres_ends_at_the_least_residual_of_a_singular_system(outside):
    A = DenseMap(torch.diag(torch.tensor([1.0, 2.0, 3.0, 0.0], dtype=torch.float64)))
    solution = solve(A, A.space.cut(torch.tensor([1.0, 1.0, 1.0, outside], dtype=torch.float64)), method="minres")
    assert solution.residual == pytest.approx(outside / math.sqrt(3.0 + outside**2))
    assert solution.products <= 10 and not solution.converged
    reached = whole(solution)[:3] * torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(reached, torch.ones(3, dtype=torch.float64))
    assert float(whole(solution)[3].abs()) < 10.0


@pytest.mark.parametrize("scaled", [False, True])
def test_minres_leaves_alone_what_a_singular_matrix_makes_nothing_of(scaled):
    """Rounding leaves a little of it in each product, and steps after the least residual would follow that."""
    for seed in range(40):
        values = torch.arange(1.0, 21.0, dtype=torch.float64) ** -2.0
        values[::3], values[1::3] = 0.0, -values[1::3]
        A = DenseMap(symmetric(values, seed))
        weights = torch.rand(20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 1.0
        solution = solve(
            A, right(A, seed), method="minres", tol=1e-2, preconditioner=A.space.cut(weights) if scaled else None
        )
        assert float(whole(solution).norm()) < 1e4


@pytest.mark.parametrize("method", ["cg", "minres"])
@pytest.mark.parametrize("distinct", [1, 2, 5])
def test_as_many_steps_as_there_are_distinct_eigenvalues(method, distinct):
    values = torch.linspace(1.0, 2.0, distinct, dtype=torch.float64).repeat(30)[:30]
    A = DenseMap(symmetric(values))
    assert solve(A, right(A, 0), tol=1e-10, method=method).products == distinct + 1  # and one for the true residual


@pytest.mark.parametrize("method", ["cg", "minres"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_preconditioner_undoes_a_bad_scale(method, dtype):
    """Scaled to a unit diagonal the matrix has eigenvalues from 0.9 to 1.1; as it is, a condition of 1e6."""
    scale = torch.logspace(0.0, 3.0, 60, dtype=torch.float64)
    inner = symmetric(torch.linspace(-0.1, 0.1, 60))
    A = DenseMap((scale[:, None] * (torch.eye(60) + inner - torch.diag(inner.diag())) * scale).to(dtype))
    diagonal = A.space.cut(A.matrix.diag())
    solution = solve(A, right(A, 0), preconditioner=A.space.named(diagonal), tol=1e-4, method=method)
    assert solution.converged and solution.products <= 20
    assert not solve(A, right(A, 0), tol=1e-4, method=method, max_products=20).converged


def test_damping_is_added_to_the_preconditioner():
    A = DenseMap(torch.diag(torch.linspace(-1.0, 1000.0, 9, dtype=torch.float64)))
    b = right(A, 0)
    solution = solve(A, b, damping=2.0, preconditioner=A.space.cut(A.matrix.diag()))
    assert solution.products == 2
    check_solution(A, b, solution)


def test_several_right_hand_sides_share_their_calls():
    A = CountingMap(positive(20, 50.0, 3), block=3)
    bs = [right(A, seed) for seed in range(5)]
    bs[1] = [torch.zeros_like(part) for part in bs[1]]
    together = solved(Inverse(A, damping=0.1, tol=1e-9), bs)
    assert A.asked == sum(one.products for one in together)
    assert A.calls == max(one.products for one in together[:3]) + max(one.products for one in together[3:])
    for b, one in zip(bs, together, strict=True):
        alone = solve(A, b, damping=0.1, tol=1e-9)
        assert torch.equal(torch.cat(one.x), whole(alone)) and one.products == alone.products


def test_no_right_hand_side_gives_no_solution():
    A = DenseMap(torch.eye(3))
    assert solved(Inverse(A), []) == []


def test_zero_has_solution_zero_without_a_product():
    A = DenseMap(positive(6, 3.0, 0))
    solution = solve(A, A.space.zeros(), start=right(A, 0))
    assert whole(solution).abs().max() == 0.0 and solution.converged and solution.residual == 0.0 and A.asked == 0


def test_start_at_the_solution_costs_one_product():
    A = DenseMap(positive(10, 30.0, 1))
    b, exact = right(A, 0), torch.linalg.solve(positive(10, 30.0, 1), torch.cat(right(A, 0)))
    solution = solve(A, b, start=dict(zip("ab", A.space.cut(exact), strict=True)))
    assert solution.products == 1
    check_solution(A, b, solution)
    A.asked = 0
    check_solution(A, b, solve(A, b, start=right(A, 7), tol=1e-9))


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_start_near_the_solution_saves_the_steps_that_lead_there(method):
    matrix = positive(300, 1000.0, 1)
    A = DenseMap(matrix)
    b = right(A, 0)
    exact = torch.linalg.solve(matrix, torch.cat(b))
    noise = torch.linalg.solve(matrix, torch.cat(right(A, 1)))
    near = A.space.cut(exact + 1e-3 * noise)
    far, close = solve(A, b, method=method), solve(A, b, start=near, method=method)
    assert far.converged and close.converged
    assert close.products < 0.7 * far.products  # half of the digits are left to find


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_arguments_are_left_as_they_were(method):
    A = DenseMap(positive(10, 30.0, 1))
    given_ = [right(A, seed) for seed in range(2)] + [[part.abs() + 1.0 for part in right(A, 3)]]
    before = [[part.clone() for part in vec] for vec in given_]
    solve(A, given_[0], start=given_[1], preconditioner=given_[2], method=method)
    Inverse(A, method=method).products(given_[:2])
    for vec, same in zip(given_, before, strict=True):
        assert all(torch.equal(part, other) for part, other in zip(vec, same, strict=True))


@pytest.mark.parametrize("method", ["cg", "minres"])
@pytest.mark.parametrize("limit", [2, 3, 7])
def test_what_was_not_solved_says_so_with_its_true_residual(method, limit):
    A = DenseMap(positive(40, 1e6, 2))
    b = right(A, 0)
    solution = solve(A, b, max_products=limit, method=method)
    assert solution.products == A.asked == limit and not solution.converged
    true = (torch.cat(b) - A.matrix @ whole(solution)).norm() / torch.cat(b).norm()
    assert solution.residual == pytest.approx(float(true), rel=1e-9)
    assert any("NOT CONVERGED" in line for line in solution.lines())


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_float32_residual_is_the_true_one_and_rounding_ends_the_search(method):
    exact = positive(50, 1e5, 4)
    A = DenseMap(exact.float())
    b = right(A, 0)
    solution = solve(A, b, tol=1e-12, max_products=100_000, method=method)
    x = whole(solution).double()
    true = float((torch.cat(b).double() - A.matrix.double() @ x).norm() / torch.cat(b).double().norm())
    room = 50 * 1.2e-7 * float(exact.norm() * x.norm() / torch.cat(b).norm())  # of a product in float32
    assert not solution.converged and solution.residual == pytest.approx(true, abs=room)
    assert solution.products < 5000


@pytest.mark.parametrize("size", [1e-15, 1e15])
@pytest.mark.parametrize("method", ["cg", "minres"])
def test_small_and_large_right_hand_sides_do_not_underflow_in_float32(method, size):
    A = DenseMap(positive(12, 10.0, 4).float())
    b = [size * part for part in right(A, 0)]
    solution = solve(A, b, tol=1e-5, method=method)
    assert solution.converged
    exact = torch.linalg.solve(A.matrix.double(), torch.cat(b).double())
    assert float((whole(solution).double() - exact).norm()) <= 1e-3 * float(exact.norm())


@pytest.mark.parametrize("suffix", ["npz", "json"])
def test_solution_comes_back_from_a_file(tmp_path, suffix):
    A = DenseMap(positive(6, 3.0, 0))
    solution = solve(A, right(A, 0), damping=0.1)
    solution.save(tmp_path / f"x.{suffix}")
    again = Result.load(tmp_path / f"x.{suffix}")
    assert isinstance(again, Solution) and str(again) == str(solution)
    assert torch.equal(whole(again), whole(solution)) and list(again.x) == ["a", "b"]


@pytest.mark.parametrize("method, reduces", [("cg", 2), ("minres", 2)])
def test_ranks_agree_with_one_process_at_two_all_reduces_a_step(method, reduces):
    matrix = positive(13, 40.0, 5)

    def run(A: RankedMap) -> tuple[list[SystemResult], int]:
        bs = [A.space.random("normal", 0, index) for index in range(3)]
        weights = A.space.cut(matrix.diag())
        return solved(Inverse(A, tol=1e-9, preconditioner=weights, method=method), bs), A.space.reduces

    found = on_ranks(matrix, [4, 1, 8], run)
    A = DenseMap(matrix)
    for index in range(3):
        alone = solve(
            A,
            A.space.random("normal", 0, index),
            tol=1e-9,
            method=method,
            preconditioner=A.space.cut(matrix.diag()),
        )
        ends = [of_rank[index] for of_rank, _ in found]
        assert len({(one.products, one.residual) for one in ends}) == 1  # to the bit
        joined = torch.cat([torch.cat(one.x) for one in ends[:3]])
        torch.testing.assert_close(joined, whole(alone), rtol=1e-7, atol=1e-9)
        assert torch.equal(torch.cat(ends[3].x), torch.cat(ends[0].x))
    steps = max(one.products for one in found[0][0])
    assert found[0][1] <= reduces * steps + 6


def test_ranks_refuse_an_indefinite_matrix_together():
    matrix = symmetric(torch.tensor([1.0, 2.0, 3.0, 4.0, -1.0, 5.0]))

    def run(A: RankedMap) -> str:
        with pytest.raises(IndefiniteError) as caught:
            solve(A, A.space.random("normal", 0, 0), tol=1e-12)
        return str(caught.value)

    assert len(set(on_ranks(matrix, [2, 4], run))) == 1


def test_ranks_refuse_a_preconditioner_together_and_count_a_copy_once():
    def run(A: RankedMap) -> str:
        with pytest.raises(ValueError, match="2 of 6 entries of preconditioner") as caught:
            solve(A, A.space.zeros(), preconditioner=A.space.cut(torch.tensor([-1.0, 0.0, 1.0, 1.0, 1.0, 1.0])))
        return str(caught.value)

    assert len(set(on_ranks(torch.eye(6, dtype=torch.float64), [3, 3], run))) == 1


@given(st.integers(3, 15), st.floats(0.0, 2.0), SEEDS, st.sampled_from(["cg", "minres"]))
@settings(max_examples=examples(25))
def test_inverse_is_a_matrix_like_the_others(size, damping, seed, method):
    A = DenseMap(positive(size, 20.0, seed))
    inverse = Inverse(A, damping=damping, tol=1e-11, method=method)
    assert inverse.space is A.space and inverse.block == A.block
    columns = inverse.products([A.space.cut(row) for row in torch.eye(size, dtype=torch.float64)])
    exact = torch.linalg.inv(A.matrix + damping * torch.eye(size))
    torch.testing.assert_close(torch.stack([torch.cat(column) for column in columns]), exact, rtol=1e-8, atol=1e-8)


def test_inverse_raises_where_a_system_was_not_solved():
    A = DenseMap(positive(40, 1e6, 2))
    words = r"inverse of \(dense matrix \+ 0 I\): relative residual .* after 5 products, tol 1e-06, max_products 5"
    with pytest.raises(ConvergenceError, match=words):
        Inverse(A, max_products=5).products([right(A, 0)])
    assert Inverse(A).products([]) == []


def test_inverse_has_another_fingerprint_with_any_other_setting():
    A, B = DenseMap(positive(9, 10.0, 2)), DenseMap(positive(9, 11.0, 2))
    rising = torch.arange(1, 10)
    diagonals = [A.space.cut(entries) for entries in (torch.ones(9), rising, rising.flip(0))]
    maps = [Inverse(A), Inverse(B), Inverse(A, damping=0.1), Inverse(A, tol=1e-7), Inverse(A, method="minres")]
    maps += [Inverse(A, max_products=9), *[Inverse(A, preconditioner=diagonal) for diagonal in diagonals]]
    assert len({one.fingerprint() for one in maps}) == len(maps)
    assert Inverse(A).fingerprint() == Inverse(DenseMap(positive(9, 10.0, 2))).fingerprint()


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"method": "gmres"}, r"method must be 'cg' or 'minres' \(method: 'gmres'\)"),
        ({"damping": math.nan}, r"damping must be finite \(damping: nan\)"),
        ({"tol": 0.0}, "tol is 0.0: it bounds a relative residual, between 0 and 1"),
        ({"max_products": 1}, "max_products is 1. Give a whole number of at least 2"),
        ({"preconditioner": [torch.ones(2), -torch.ones(4)], "damping": 0.5},
         r"4 of 6 entries of preconditioner \+ damping are not above 0 and finite \(damping: 0.5\)"),
        ({"preconditioner": [torch.ones(2), torch.full((4,), math.nan)]}, "4 of 6 entries of preconditioner"),
        ({"start": [torch.ones(6)]}, r"start has shards of shapes \[\(6,\)\], the space \[\(2,\), \(4,\)\]"),
    ],
)
def test_wrong_arguments_are_refused(wrong, words):
    A = DenseMap(positive(6, 2.0, 0))
    with pytest.raises(ValueError, match=words):
        solve(A, right(A, 0), **wrong)


def test_a_damping_or_a_tol_that_is_no_number_is_refused_in_words():
    A = DenseMap(positive(6, 2.0, 0))
    with pytest.raises(TypeError, match="damping is 'some'. Give a number"):
        solve(A, right(A, 0), damping="some")
    with pytest.raises(TypeError, match="tol is None. Give a number"):
        Inverse(A, tol=None)


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_entries_that_are_not_finite_are_named(method):
    A = DenseMap(positive(6, 2.0, 0))
    b = right(A, 0)
    b[1][2] = math.nan
    with pytest.raises(FloatingPointError, match="a product of dense matrix, or b itself, is not finite"):
        solve(A, b, method=method)
    A.matrix[0, 0] = math.inf
    with pytest.raises(FloatingPointError, match="look for inf or nan in the parameters, the data or the loss"):
        solve(A, right(A, 0), method=method)


@pytest.mark.parametrize("form", ["b", "start", "preconditioner"])
def test_a_flat_tensor_is_taken_as_the_vector_by_name(form: str) -> None:
    A = DenseMap(positive(9, 10.0, 2))
    vec = [part.abs() + 1.0 for part in right(A, 1)]
    given = {"b": right(A, 0), form: vec}
    expected = solve(A, **given)  # type: ignore[arg-type]
    for same in (torch.cat(vec), A.space.named(vec)):
        found = solve(A, **{**given, form: same})  # type: ignore[arg-type]
        assert torch.equal(whole(found), whole(expected)) and found.products == expected.products
    with pytest.raises(ValueError, match=rf"{form} has shape \[9, 2\]. Give one vector"):
        solve(A, **{**given, form: torch.ones(9, 2)})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"has shape \[8\]; the parameters have 9 entries"):
        solve(A, **{**given, form: torch.ones(8)})  # type: ignore[arg-type]
