"""Law: gradients of the parts are compared with those of the model, however many numbers they have."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from block_models import Chain, ids
from torch import nn
from torch.utils.checkpoint import checkpoint

from partition import PartitionError, to_sequential
from partition.models.calls import record_model
from partition.models.comparison import check_layers


class Around(nn.Module):
    """The model, with other gradients."""

    def __init__(self, model, change):
        super().__init__()
        self.model, self.change = model, change

    def forward(self, x):
        out = self.model(x)
        if out.requires_grad:
            out.register_hook(self.change)
        return out


@pytest.mark.parametrize("width", [3, 64, 100])
def test_another_gradient_is_seen(width):
    torch.manual_seed(0)
    inner, x = nn.Linear(width, width), torch.randn(5, width)
    seen = record_model(nn.Sequential(Around(inner, lambda grad: grad)), x, lambda out: out)
    check_layers(seen, nn.Sequential(Around(inner, lambda grad: grad * 1.0)), lambda out: out, ())
    one = torch.zeros(width)
    one[width // 2] = 0.1
    words = "Sequential: the gradient of 0.model.weight is not that of the model"
    for change in (lambda grad: grad * 1.01, lambda grad: grad + one, lambda grad: grad.flip(0)):
        with pytest.raises(PartitionError, match=words):
            check_layers(seen, nn.Sequential(Around(inner, change)), lambda out: out, ())
    with pytest.raises(PartitionError, match=words):
        check_layers(seen, nn.Sequential(Around(inner, lambda grad: grad)), torch.Tensor.detach, ())


class Overflows(Chain):
    """Its numbers, or its gradients alone, are NaN for `weight` 0."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs, self.weight = outputs, nn.Parameter(torch.zeros(()))

    def forward(self, x):
        out = super().forward(x)
        ratio = self.weight / self.weight if self.outputs else (self.weight * self.weight).sqrt()
        return out + ratio


@pytest.mark.parametrize("outputs, words", [
    (True, r"Overflows itself returns NaN on the sample, which tells nothing\. Give a sample, and a dtype, in which"),
    (False, r"Overflows: the gradient of weight is not finite on the sample\. Give a sample, and a dtype, in which"),
])  # fmt: skip
def test_a_model_that_is_not_finite_on_the_sample_is_told_apart_from_one_that_cannot_be_cut(outputs, words):
    with pytest.raises(PartitionError, match=words):
        to_sequential(Overflows(outputs), ids(4))


class Reenters(nn.Module):
    """A stage whose blocks are checkpointed by what no gradient can be asked of."""

    def __init__(self, count):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_stands_in_the_way_of_every_cut_is_told_and_not_what_the_last_way_lacks():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Reenters(1), Reenters(3)))
    with pytest.raises(PartitionError, match="Sequential itself has no gradients on the sample: .*use_reentrant=False"):
        to_sequential(model, torch.randn(4, 4))


class InTraining(Chain):
    """In train mode its first block gets no gradient, or another one."""

    def __init__(self, frozen):
        super().__init__()
        self.frozen = frozen

    def forward(self, ids):
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            is_other = self.training and number == 1
            if is_other and not self.frozen and x.requires_grad:
                x.register_hook(lambda grad: 2 * grad)
            with torch.no_grad() if is_other and self.frozen else nullcontext():
                x = block(x)
        return x


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_are_compared_in_train_mode_too(frozen):
    words = r"InTraining in train mode: the gradient of .* is not that of the model: .*, or a switch around blocks that"
    with pytest.raises(PartitionError, match=words):
        to_sequential(InTraining(frozen), ids(4))


def test_sparse_gradients_are_compared():
    model = Chain()
    model.embed = nn.Embedding(11, 4, sparse=True)
    layers, x = to_sequential(model, ids(4)), ids(3)
    layers(x).sum().backward()
    found, model.embed.weight.grad = model.embed.weight.grad, None
    model(x).sum().backward()
    assert found.is_sparse and torch.equal(found.to_dense(), model.embed.weight.grad.to_dense())


class TakenAway(nn.Module):
    """A block whose norm takes away what it adds, so that has no gradient but what rounding leaves."""

    def __init__(self):
        super().__init__()
        self.shift, self.inner = nn.Linear(3, 8), nn.Conv1d(8, 8, 1)

    def forward(self, x, by):
        return x + self.inner(nn.functional.instance_norm(x + self.shift(by)[..., None])).tanh()


class Pooled(nn.Module):
    """What each block returns is read three times, and the parts add up its gradient in another order."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(TakenAway() for _ in range(4)), nn.Linear(32, 2)

    def forward(self, x, by):
        means = []
        for block in self.blocks:
            x = block(x, by)
            means.append(x.square().mean(2))
        return self.head(torch.cat(means, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_a_module_that_are_nothing_but_rounding_are_no_difference(dtype):
    for seed in range(5):
        torch.manual_seed(seed)
        model, sample = Pooled().to(dtype), (torch.randn(4, 8, 6), torch.randn(4, 3))
        assert len(to_sequential(model, tuple([each.to(dtype) for each in sample]))) > 4


class Scaled(nn.Linear):
    """It counts little, as a layer with a small scale does."""

    def forward(self, x):
        return x + 1e-4 * super().forward(x)


def test_another_gradient_is_seen_in_a_module_that_counts_little():
    torch.manual_seed(0)
    around, x = Around(Scaled(8, 8), lambda grad: grad), torch.randn(5, 8)
    head = nn.Linear(8, 8)
    seen = record_model(nn.Sequential(around, head), x, lambda out: out)
    with pytest.raises(PartitionError, match="the gradient of 0.model.weight is not that of the model"):
        check_layers(seen, nn.Sequential(Around(around.model, lambda grad: 1.01 * grad), head), lambda out: out, ())


class DropsInBackward(torch.autograd.Function):
    """Its backward draws, as that of a checkpoint does which runs dropout again under no seed."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return nn.functional.dropout(grad, 0.5)


class Dropping(nn.Linear):
    def forward(self, x):
        return DropsInBackward.apply(super().forward(x))


def test_what_a_backward_draws_is_the_same_in_the_model_and_in_its_parts():
    model = Chain()
    model.blocks = nn.ModuleList(Dropping(4, 4) for _ in range(3))
    assert len(to_sequential(model, ids(4))) == 5
