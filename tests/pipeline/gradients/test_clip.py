"""The clip by a norm over all gradients: torch's own on dense gradients, and the same on sparse ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeline import Pipe
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
