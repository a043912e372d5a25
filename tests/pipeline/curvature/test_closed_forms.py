"""Are influences and natural-gradient steps, as the recipes compute them, those of closed forms?"""

from __future__ import annotations

import pytest
import torch
from dense_map import DenseMap, symmetric
from dense_ranks import over_ranks
from law_models import normal
from torch import nn
from torch.nn import functional

from pipeline import Pipe
from pipeline.curvature import GaussNewton, Hessian


def test_influences_are_the_derivatives_of_a_ridge_regression_by_the_weights_of_its_rows():
    """w(e) minimises sum_j (1/n + e_j) l_j + c/2 |w|^2: dw/de_i = -(H + c I)^-1 g_i, exactly, by the closed form."""
    x, y, test, wanted = normal(20, 4), normal(20, 1, seed=2), normal(6, 4, seed=3), normal(6, 1, seed=4)
    decay, weights = 0.3, torch.full((20,), 1 / 20, dtype=torch.float64).requires_grad_()
    weighted = 2 * x.T * weights
    solution = torch.linalg.solve(weighted @ x + decay * torch.eye(4).double(), weighted @ y)
    (exact,) = torch.autograd.grad(functional.mse_loss(test @ solution, wanted), weights)

    model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Identity()).double()
    with torch.no_grad():
        model[0].weight.copy_(solution.T)
    pipe = Pipe(model, [1, 1], chunks=2)
    H = Hessian(pipe, (x, y), functional.mse_loss)
    direction = H.inverse(damping=decay, tol=1e-12) @ Hessian(pipe, (test, wanted), functional.mse_loss).gradient()
    found = [
        -H.dot(direction, Hessian(pipe, (x[i:i + 1], y[i:i + 1]), functional.mse_loss).gradient()) for i in range(20)
    ]
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), exact, rtol=1e-9, atol=1e-12)


def test_a_natural_gradient_step_is_that_of_the_dense_fisher_information():
    """Of softmax regression, whose Fisher information has a closed form: the mean of (diag(p) - p p') x x'."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Identity()).double()
    x, y = normal(12, 3), torch.arange(12) % 4
    G = GaussNewton(Pipe(model, [1, 1], chunks=3), (x, y), functional.cross_entropy)
    p = model(x).softmax(1).detach()
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    fisher = torch.einsum("nab,nc,nd->acbd", inner, x, x).reshape(12, 12) / 12
    gradient = G.gradient()["0.weight"].flatten()
    step = G.inverse(0.01, tol=1e-12) @ {"0.weight": gradient.view(4, 3)}
    expected = torch.linalg.solve(fisher + 0.01 * torch.eye(12).double(), gradient)
    torch.testing.assert_close(step["0.weight"].flatten(), expected, rtol=1e-9, atol=1e-12)


def test_dot_takes_one_vector_in_any_form_and_counts_tied_entries_once():
    A = DenseMap(symmetric(torch.arange(1.0, 13.0)))
    one, other = normal(12, 1)[:, 0], normal(12, 1, seed=2)[:, 0]
    named = [A.space.named(A.space.cut(each)) for each in (one, other)]
    assert A.dot(*named) == pytest.approx(float(one @ other), rel=1e-14)
    found = over_ranks(A.matrix, 3, lambda B: B.dot(*[B.space.named(B.space.cut(v)) for v in (one, other)]), tied=4)
    assert found == [pytest.approx(float(one @ other), rel=1e-14)] * 3
    with pytest.raises(ValueError, match="dot takes two vectors, not 1 and 2"):
        A.dot(named[0], named)
