"""Parameters of types of their own: tensors that wrap others, as quantised weights of libraries do, and subclasses of
nn.Parameter. In the layers they are what they are in the plain module."""

import copy

import pytest
import torch
from parameter_kinds import KINDS, Adapted, Linear, adapted, looped, rows, same
from torch import nn
from torch.nn import functional as F

from partition import plan, profile, to_sequential
from pipeline import CheckpointError, EagerUpdate, Pipe
from pipeline.curvature import Hessian


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_parameters_of_other_types_have_the_gradients_of_a_loop(kind, checkpoint, schedule):
    model, (x, y) = adapted(kind).eval(), rows()
    pipe = Pipe(model, [2, 3], 2, checkpoint=checkpoint, schedule=schedule)
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(x, y, loss_fn=F.mse_loss)
        same([parameter.grad for parameter in model.parameters()], looped(adapted(kind).eval(), x, y))


@pytest.mark.parametrize("kind", KINDS)
def test_they_train_with_dropout_and_are_copied_and_loaded(kind):
    x, y = rows()
    steps = []
    for checkpoint in ("always", "never"):
        pipe = Pipe(adapted(kind), [2, 3], 2, checkpoint=checkpoint)
        optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad])
        for _ in range(2):
            pipe.step(x, y, loss_fn=F.mse_loss, optimizer=optimizer)
        steps.append([parameter.grad for parameter in pipe.parameters()])
    same(*steps)
    other = copy.deepcopy(pipe)
    assert torch.equal(pipe.eval()(x), other.eval()(x))
    assert [type(parameter) for parameter in other.parameters()] == [type(parameter) for parameter in pipe.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_eager_updates_leave_them_alone(kind):
    x, y = rows()
    pipe, model = Pipe(adapted(kind).eval(), [2, 3], 2), adapted(kind).eval()
    update = EagerUpdate(torch.optim.SGD([p for p in pipe.parameters() if p.requires_grad], lr=0.1))
    pipe.step(x, y, loss_fn=F.mse_loss, optimizer=update)
    looped(model, x, y)
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    torch.testing.assert_close(pipe(x), model(x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_the_hessian_of_adapters_is_that_of_dequantised_weights(kind):
    model, (x, y) = adapted(kind).eval(), rows()
    hessian = Hessian(Pipe(model, [2, 3], 2), (x, y), F.mse_loss)
    assert hessian.check().ok
    vector = torch.ones(hessian.shape[0], dtype=torch.float64)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(F.mse_loss(model(x), y), trained, create_graph=True)
    expected = torch.autograd.grad(sum(grad.sum() for grad in grads), trained)
    torch.testing.assert_close(hessian @ vector, torch.cat([product.flatten() for product in expected]))


@pytest.mark.parametrize("kind", KINDS)
def test_models_with_them_are_cut_and_planned(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks = Linear(6, 6), adapted(kind)[:4]

        def forward(self, x):
            return self.blocks(self.first(x)).sin()

    torch.manual_seed(2)
    model, x = Model(), rows()[0]
    layers = to_sequential(model, x)
    assert len(layers) == 6 and torch.equal(layers.eval()(x), model.eval()(x))
    measured = profile(layers, x)
    size = {"wraps": 6 * 6 + 6 * 8}.get(kind, 6 * 6 * 8) + 6 * 8 + 8 * (2 * 6 + 6 * 2 + 6)  # base, its bias, adapter
    assert [layer.parameters.own for layer in measured.layers[1:5]] == [size] * 4
    assert plan(layers, x, devices=2, loss_fn=F.mse_loss, target=x).balance


def test_a_forward_that_writes_what_a_parameter_wraps_is_refused():
    class Writes(Adapted):
        def forward(self, x):
            with torch.no_grad():
                self.base.weight.scale.mul_(1.5)
            return super().forward(x)

    pipe, (x, y) = Pipe(nn.Sequential(Writes(6, KINDS["wraps"]), Linear(6, 3)), [1, 1], 2), rows()
    with pytest.raises(CheckpointError, match="gave other values than its forward|wrote a parameter through .data"):
        pipe.step(x, y, loss_fn=F.mse_loss)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_sparse_parameter_has_the_gradient_of_a_loop(checkpoint):
    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            weight = torch.eye(4, dtype=torch.float64).repeat_interleave(2, 0)[1:5]
            self.weight = nn.Parameter(weight.to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.weight, x.t()).t()

    torch.manual_seed(0)
    x, y = torch.rand(2, 6, 4, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 4), Mixes(), nn.Tanh()).double()
    F.mse_loss(model(x), y).backward()
    wanted = [parameter.grad.to_dense() for parameter in model.parameters()]
    model.zero_grad()
    Pipe(model, [2, 1], 2, checkpoint=checkpoint).step(x, y, loss_fn=F.mse_loss)
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad.to_dense(), grad, rtol=1e-12, atol=1e-15)
