"""Does scipy compute with the operator what it computes with the dense matrix?"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from cover import examples
from dense_map import DenseMap, DenseSpace, symmetric
from hypothesis import given, settings
from hypothesis import strategies as st
from ranked_map import RankedMap, on_ranks
from torch import Tensor

from pipeline.curvature.estimates.scipy_operator import to_scipy
from pipeline.curvature.space import Vec

linalg = pytest.importorskip("scipy.sparse.linalg")


class ShapedSpace(DenseSpace):
    """Its parameters have shapes, and stand in another order in the shards than by name."""

    def named(self, vec: Vec) -> dict[str, Tensor]:
        return {"late": vec[1].view(2, -1), "early": vec[0]}

    def vec(self, named: Mapping[str, Tensor]) -> Vec:
        assert named["late"].shape == (2, self.sizes[1] // 2) and named["early"].shape == (self.sizes[0],)
        return [named["early"].clone(), named["late"].reshape(-1).clone()]


def shaped(size: int, dtype: torch.dtype = torch.float64) -> tuple[DenseMap, np.ndarray]:
    """A map, and its dense matrix in the order of the names."""
    A = DenseMap(symmetric(torch.linspace(-2.0, 5.0, size), 3).to(dtype), block=3)
    A._space = ShapedSpace(size, dtype)
    order = torch.cat([torch.arange(size // 3, size), torch.arange(size // 3)])
    return A, A.matrix[order][:, order].numpy()


@given(st.sampled_from([6, 9, 12, 24]), st.integers(0, 7), st.integers(0, 1000))
@settings(max_examples=examples(30))
def test_products_are_those_of_the_matrix_in_the_order_of_the_names(size, columns, seed):
    A, dense = shaped(size)
    operator = to_scipy(A)
    x = np.random.default_rng(seed).standard_normal((size, columns))
    assert operator.shape == (size, size) and operator.dtype == np.float64
    np.testing.assert_allclose(operator @ x, dense @ x, atol=1e-12)
    np.testing.assert_allclose(operator.H @ x, dense @ x, atol=1e-12)
    for column in x.T:
        np.testing.assert_allclose(operator @ column, dense @ column, atol=1e-12)
        np.testing.assert_allclose(operator.rmatvec(column), dense @ column, atol=1e-12)
        np.testing.assert_allclose(operator.matmat(column[:, None]), (dense @ column)[:, None], atol=1e-12)


def test_columns_are_asked_for_a_block_at_a_time():
    A, dense = shaped(12)
    asked: list[int] = []
    products = A.products
    A.products = lambda vectors: asked.append(len(vectors)) or products(vectors)  # type: ignore[func-returns-value]
    to_scipy(A) @ np.eye(12)
    assert asked == [3, 3, 3, 3]


def test_eigsh_finds_the_eigenvalues():
    A, dense = shaped(30)
    values, vectors = linalg.eigsh(to_scipy(A), k=4, which="LA")
    exact = np.linalg.eigvalsh(dense)[-4:]
    np.testing.assert_allclose(np.sort(values), exact, rtol=1e-10)
    np.testing.assert_allclose(dense @ vectors, vectors * values, atol=1e-8)


def test_cg_solves_a_damped_system():
    A, dense = shaped(24)
    b = np.arange(24.0)
    x, info = linalg.cg(to_scipy(A) + 4.0 * linalg.aslinearoperator(np.eye(24)), b, rtol=1e-12)
    assert info == 0
    np.testing.assert_allclose(x, np.linalg.solve(dense + 4.0 * np.eye(24), b), rtol=1e-8, atol=1e-8)


def test_dtype_is_that_of_the_vectors_unless_another_is_asked_for():
    A, dense = shaped(12, torch.float32)
    x = np.arange(12)
    assert to_scipy(A).dtype == np.float32 and (to_scipy(A) @ x).dtype == np.float32
    assert to_scipy(A, np.float64).dtype == np.float64 and (to_scipy(A, "float64") @ x).dtype == np.float64
    np.testing.assert_allclose(to_scipy(A) @ x, dense @ x, rtol=1e-4, atol=1e-4)


def test_what_scipy_gives_is_not_changed():
    A, _ = shaped(12)
    x = np.arange(12.0)
    x.setflags(write=False)
    to_scipy(A) @ x
    assert (x == np.arange(12.0)).all()


def test_complex_vectors_are_refused():
    with pytest.raises(TypeError, match="dense matrix takes real vectors"):
        to_scipy(shaped(12)[0]) @ (1j * np.ones(12))


def test_several_ranks_are_refused():
    def run(A: RankedMap) -> str:
        with pytest.raises(ValueError, match="3 ranks share the vectors of dense matrix.*Use top_eigenpairs") as caught:
            to_scipy(A)
        return str(caught.value)

    assert len(set(on_ranks(torch.eye(6, dtype=torch.float64), [2, 4], run))) == 1


def test_missing_scipy_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    with pytest.raises(ImportError, match="to_scipy needs scipy, which is not installed: pip install scipy"):
        to_scipy(shaped(12)[0])
