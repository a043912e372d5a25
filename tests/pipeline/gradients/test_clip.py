"""The clip by a norm over all gradients: torch's own on dense gradients, and the same on sparse ones."""

from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeline import EagerUpdate, Pipe
from pipeline.gradients.clip import clip_factor, joined_norm, norm_of, total_norm

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6)


@given(shapes=SHAPES, norm_type=st.sampled_from([1.0, 2.0, 3.0]), max_norm=st.sampled_from([0.1, 3.0, 1e6]))
def test_it_is_torchs_to_the_bit(shapes, norm_type, max_norm):
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    grads = [param.grad.clone() for param in params]
    total = total_norm(grads, norm_type)
    assert torch.equal(total, joined_norm([norm_of(grad, norm_type) for grad in grads], norm_type))
    assert torch.equal(total, torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type))
    for param, grad in zip(params, grads, strict=True):
        assert torch.equal(param.grad, grad * clip_factor(max_norm, total))


def test_norms_of_gradients_of_two_types_are_joined_in_torchs_order():
    for seed in range(20):
        torch.manual_seed(seed)
        grads = [torch.randn(3, dtype=dtype) for _ in range(6) for dtype in (torch.float64, torch.float32)]
        assert torch.equal(total_norm(grads), joined_norm([norm_of(grad) for grad in grads]))


def measured(to, max_norm):
    """The norm that a step reports, the plain module's gradients, and those that are left, or what was stepped by."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x, y = torch.randn(5, 4).double(), torch.randn(5, 2).double()
    plain = torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters()))
    before = [param.detach().clone() for param in model.parameters()]
    pipe, optimizer = Pipe(model, [2, 1], chunks=2), torch.optim.SGD(model.parameters(), lr=1.0)
    options = {
        "optimizer": {"optimizer": optimizer, "clip_grad_norm": max_norm},
        "scaler": {"optimizer": optimizer, "clip_grad_norm": max_norm, "scaler": torch.amp.GradScaler("cpu")},
        "store": {"grads": "store", "clip_grad_norm": max_norm},
        "eager": {"optimizer": EagerUpdate(optimizer, clip="two_pass", max_norm=max_norm)},
    }[to]
    step = pipe.step(x, y, loss_fn=nn.MSELoss(), **options)
    if step.grads is not None:
        step.grads.apply(optimizer)
    left = [old - param.detach() for old, param in zip(before, model.parameters())]
    return step.grad_norm, plain, left


@pytest.mark.parametrize("max_norm", [0.01, 1e3, inf])
@pytest.mark.parametrize("to", ["optimizer", "scaler", "store", "eager"])
def test_a_step_tells_the_norm_before_the_clip_and_inf_clips_nothing(to, max_norm):
    norm, plain, left = measured(to, max_norm)
    expected = torch.nn.utils.get_total_norm(plain)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for own, grad in zip(left, plain, strict=True):
        torch.testing.assert_close(own, grad * clip_factor(max_norm, expected), rtol=1e-9, atol=1e-12)


def test_a_norm_that_is_measured_alone_leaves_finite_gradients_beside_one_that_is_not():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    pipe = Pipe(model, [1, 1])
    pipe(torch.ones(1, 2)).sum().backward()
    model[1].weight.grad[0, 0] = inf
    finite = model[1].bias.grad.clone()
    assert pipe.clip_grad_norm_(inf) == inf and torch.equal(model[1].bias.grad, finite)


def test_a_store_that_is_clipped_to_no_norm_keeps_its_finite_gradients_beside_one_that_is_not():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    store = Pipe(model, [1, 1]).step(torch.ones(1, 2), torch.ones(1, 1), loss_fn=nn.MSELoss(), grads="store").grads
    finite = store.get(model[1].bias).clone()
    store.get(model[1].weight).fill_(inf)
    assert store.clip_(inf) == inf and torch.equal(store.get(model[1].bias), finite)


def test_a_step_that_was_not_asked_has_no_norm():
    pipe = Pipe(nn.Sequential(nn.Linear(2, 1)), [1])
    assert pipe.step(torch.ones(3, 2), torch.ones(3, 1), loss_fn=nn.MSELoss()).grad_norm is None


@pytest.mark.parametrize("to", ["optimizer", "store", "param"])
def test_sparse_gradients_are_clipped_as_dense_ones(to):
    found = []
    for is_sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, sparse=is_sparse), nn.Linear(4, 4)).double()
        pipe, optimizer = Pipe(model, [1, 1], chunks=2), torch.optim.SGD(model.parameters(), lr=1.0)
        x, y = torch.tensor([1, 3, 3, 7]), torch.randn(4, 4).double()
        options = {"optimizer": {"optimizer": optimizer}, "store": {"grads": "store"}, "param": {}}[to]
        clip = {} if to == "param" else {"clip_grad_norm": 0.01}
        step = pipe.step(x, y, loss_fn=nn.MSELoss(), **options, **clip)
        if to == "store":
            step.grads.apply(optimizer)
        elif to == "param":
            pipe.clip_grad_norm_(0.01)
            optimizer.step()
        found.append([param.detach() for param in model.parameters()])
    for dense, sparse in zip(*found, strict=True):
        torch.testing.assert_close(dense, sparse)
