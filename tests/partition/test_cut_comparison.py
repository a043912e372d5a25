"""Law: gradients of the parts are compared with those of the model, however many numbers they have."""

from __future__ import annotations

import pytest
import torch
from block_models import Chain, ids
from torch import nn

from partition import PartitionError, to_sequential
from partition.models.comparison import compare


class Around(nn.Module):
    """The model, with other gradients."""

    def __init__(self, model, change):
        super().__init__()
        self.model, self.change = model, change

    def forward(self, x):
        out = self.model(x)
        out.register_hook(self.change)
        return out


@pytest.mark.parametrize("width", [3, 64, 100])
def test_another_gradient_is_seen(width):
    torch.manual_seed(0)
    model, x = nn.Linear(width, width), torch.randn(5, width)
    compare(model, nn.Sequential(Around(model, lambda grad: grad * 1.0)), x, {}, lambda out: out)
    one = torch.zeros(width)
    one[width // 2] = 0.1
    for change in (lambda grad: grad * 1.01, lambda grad: grad + one, lambda grad: grad.flip(0)):
        with pytest.raises(PartitionError, match="Linear: the gradient of weight is not that of the model"):
            compare(model, nn.Sequential(Around(model, change)), x, {}, lambda out: out)
    with pytest.raises(PartitionError, match="Linear: the gradient of weight is not that of the model"):
        compare(model, nn.Sequential(Around(model, lambda grad: grad)), x, {}, torch.Tensor.detach)


def test_sparse_gradients_are_compared():
    model = Chain()
    model.embed = nn.Embedding(11, 4, sparse=True)
    layers, x = to_sequential(model, ids(4)), ids(3)
    layers(x).sum().backward()
    found, model.embed.weight.grad = model.embed.weight.grad, None
    model(x).sum().backward()
    assert found.is_sparse and torch.equal(found.to_dense(), model.embed.weight.grad.to_dense())
