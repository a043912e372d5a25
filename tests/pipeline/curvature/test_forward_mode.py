"""Are tangents by forward mode those of reverse mode, and is the work saved that they are there for?

Products with one vector are compared with double backward of the plain module. A layer for which forward mode gives
another function's derivative, or none, must have the adjoint's.
"""

from collections import Counter

import pytest
import torch
from curvature_reference import Loss, truth
from law_models import Apply, normal
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import Pipe
from pipeline.curvature import GaussNewton, Hessian
from pipeline.curvature.products.forward_mode import ForwardMode

pytestmark = [
    pytest.mark.inline,
    pytest.mark.filterwarnings("ignore:index_reduce.. is in beta", "ignore:torch.triangular_solve is deprecated"),
]
MSE = Loss(F.mse_loss, lambda out, y: (out - y).square().flatten(1).mean(1))
ROWS = 4
TIES = torch.tensor([[1.0, 1, 0, -1], [0, 0, 0, 0], [2, -2, 2, 0.5], [1, 3, 3, 3]]).double()
AT = torch.tensor([0, 0, 2, 1])


class Scale(nn.Module):
    """x times a weight of ones, so that ties and zeros stay what they are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight


class Words(nn.Module):
    """Rows of a table, of which one may be padding."""

    def __init__(self, padding):
        super().__init__()
        self.words = nn.Embedding(4, 4, padding)

    def forward(self, x):
        return self.words(AT[: len(x)]) + x


def network(layer):
    torch.manual_seed(4)
    return nn.Sequential(Scale(), layer, nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def compared(layer, x=TIES, chunks=1, train=False, calls=3):
    """Whether forward mode was believed, after the products have been compared with the plain module's."""
    y = normal(len(x), 2, seed=5)
    vector = normal(sum(p.numel() for p in network(layer()).parameters()), 1, seed=6)
    with sdpa_kernel(SDPBackend.MATH):  # as products do: others have no second derivative, on the CPU from 2.14 on
        wanted = truth(network(layer()).train(train), [(x, y)], MSE, vector, chunks=chunks, seed=3).products
    for matrix in Hessian, GaussNewton:
        pipe = Pipe(network(layer()), [2, 2, 1], chunks, checkpoint="always", mixes_rows=True)
        op = matrix(pipe, (x, y), F.mse_loss, training=train, seed=3)
        products = [op @ vector for _ in range(calls)]
        for product in products:
            torch.testing.assert_close(product, wanted[matrix.__name__], rtol=1e-10, atol=1e-12, equal_nan=True)
            assert torch.equal(product.nan_to_num(), products[0].nan_to_num())  # whatever a call compares
    return op.checks.forward.get(0)


# ----------------------------------------------------------------------------------------------------- kinks and ties

ELEMENTWISE = [
    torch.abs, torch.relu, F.relu6, F.hardtanh, F.leaky_relu, F.hardswish, F.elu, F.gelu, F.silu, F.softplus,
    torch.sign, torch.floor, lambda x: F.threshold(x, 0.0, 0.0), lambda x: F.hardshrink(x, 0.5),
    lambda x: F.softshrink(x, 0.5),
    lambda x: x.clamp(0, 1), lambda x: x.clamp_min(torch.zeros_like(x)), lambda x: x.clamp_max(torch.ones_like(x)),
    lambda x: torch.maximum(x, x.flip(1)), lambda x: torch.minimum(x, x.flip(1)), lambda x: torch.fmin(x, x.flip(1)),
    lambda x: torch.logaddexp(x, x.flip(1)), lambda x: x + x.amax(1, True), lambda x: x + x.amin(1, True),
    lambda x: x + x.max(1, True)[0], lambda x: x + x.median(1, True)[0], lambda x: x.sort(1)[0],
    lambda x: x.cummax(1)[0],
    lambda x: x + x.topk(2)[0].sum(1, True), lambda x: x + x.kthvalue(2, 1, True)[0], lambda x: x.cumprod(1),
    lambda x: x + x.norm(dim=1, keepdim=True), lambda x: x + x.norm(1, 1, True), lambda x: x + x.prod(1, True),
    lambda x: x + x.norm(float("inf"), 1, True), lambda x: F.normalize(x, dim=1), lambda x: x.softmax(1),
    lambda x: x + x.logsumexp(1, True), lambda x: x.log_softmax(1), lambda x: x + x.var(1, keepdim=True),
    lambda x: F.max_pool1d(x[:, None], 3, 1, 1)[:, 0], lambda x: F.layer_norm(x, (4,)), lambda x: F.rms_norm(x, (4,)),
    lambda x: F.group_norm(x, 2), lambda x: x.gather(1, AT.expand_as(x)), lambda x: torch.where(x > 0, x, -x),
    lambda x: x.index_add(1, AT, x), lambda x: torch.zeros_like(x).scatter_add(1, AT.expand_as(x), x),
    lambda x: x.clone().index_fill_(1, AT, 0.0) + x, lambda x: x.clone().mul_(x), lambda x: x.round() * x,
    lambda x: torch.special.entr(x.abs() + 0.1), lambda x: torch.linalg.solve(x + 9 * torch.eye(4).to(x), x),
    lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    lambda x: F.cosine_similarity(x, x + 1)[:, None] * x,
    lambda x: F.conv1d(x[:, None], torch.ones(1, 1, 3).to(x), padding=1)[:, 0], lambda x: x.float().double() * x,
    lambda x: x.index_put((AT,), x, accumulate=True), lambda x: x.scatter_reduce(1, AT.expand_as(x), x, "mean"),
    lambda x: x.scatter_reduce(1, AT.expand_as(x), x, "sum"), lambda x: torch.linalg.slogdet(x + 9 * eye(x))[1] + x,
]  # fmt: skip


def eye(x):
    return torch.eye(len(x)).to(x)


def assigned(x, values):
    x = x.clone()
    x[AT] = values
    return x


WITHOUT = [
    lambda x: torch.fmax(x, x.flip(1)), lambda x: torch.xlogy(x.abs(), x.abs()),
    lambda x: torch.linalg.cholesky(x @ x.T + torch.eye(4)),
    lambda x: torch.zeros_like(x).index_reduce(0, AT, x, "mean"),
    lambda x: x.scatter(1, AT.expand_as(x), x + 1), lambda x: x.index_copy(0, AT, x + 1), lambda x: assigned(x, x + 1),
    lambda x: x.index_put((AT,), x + 1), lambda x: x.put(AT, x[0] + 1),
    lambda x: (x + 3).scatter_reduce(1, AT.expand_as(x), x + 4, "prod"),
    lambda x: (x * 1).as_strided_scatter(x[:2, :2], (2, 2), (1, 1)),
    lambda x: F.max_unpool2d(x[None, None], AT.repeat(1, 1, 4, 1), 2)[0, 0, :4, :4],
    lambda x: F.max_unpool3d(x[None, None, None], AT.repeat(1, 1, 1, 4, 1), (1, 2, 2))[0, 0, 0, :4, :4],
    lambda x: torch.cholesky_inverse(x + 9 * torch.eye(4).to(x)),
    lambda x: torch.linalg.eigh(x + torch.diag(torch.arange(4) * 9.0).to(x))[1].square(),
    lambda x: torch.atan2(x, x.roll(1, 1)), lambda x: torch.pow(x.abs(), x), torch.sinc,
    lambda x: torch.logit(x * 0.3, 0.1),
    lambda x: torch.clamp(x, torch.zeros_like(x), torch.ones_like(x)), lambda x: torch.clamp(x * 1, min=x.roll(1, 1)),
    lambda x: (x + 3).scatter_reduce(1, AT.expand_as(x), x + 3, "amax"),
    lambda x: (x + 3).scatter_reduce(1, AT.expand_as(x), x + 3, "amin"),
    lambda x: x + torch.det(x[:3, :3] * 1), lambda x: x + torch.linalg.lu_factor_ex(x[:3] * 1)[0].sum(),
    lambda x: x + torch.linalg.lu(x[:3] * 1)[2].sum(), lambda x: torch.triangular_solve(x, x + 9 * eye(x))[0],
    lambda x: x + F.gaussian_nll_loss(x, x.flip(1), x.abs(), eps=0.1),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ELEMENTWISE)))
def test_where_forward_mode_is_believed_it_takes_kinks_and_ties_as_reverse_mode_does(number):
    assert compared(lambda: Apply(ELEMENTWISE[number])) is True


@pytest.mark.parametrize("number", range(len(WITHOUT)))
def test_an_operation_without_a_forward_derivative_or_with_another_one_has_the_adjoints(number):
    assert compared(lambda: Apply(WITHOUT[number])) is False


@pytest.mark.parametrize("number", range(len(WITHOUT)))
def test_ties_that_come_in_the_third_mini_batch_have_the_adjoints(number):
    """Only the first two are computed both ways, and most of these operations are the same there."""
    inputs = normal(ROWS, 4, seed=8), normal(ROWS, 4, seed=9), TIES
    data = [(x, normal(ROWS, 2, seed=5)) for x in inputs]
    vector = normal(sum(p.numel() for p in network(nn.Tanh()).parameters()), 1, seed=6)
    wanted = truth(network(Apply(WITHOUT[number])), data, MSE, vector).products
    pipe = Pipe(network(Apply(WITHOUT[number])), [2, 2, 1], mixes_rows=True)
    product = Hessian(pipe, data, F.mse_loss) @ vector
    torch.testing.assert_close(product, wanted["Hessian"], rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.filterwarnings("ignore:Default grid_sample")
def test_where_this_torch_has_no_forward_derivative_the_adjoints_are_used():
    """torch 2.13 and 2.14 have none of grid_sample, 2.15 has one."""
    def sampled(x):
        return x + F.grid_sample(x[None, None], torch.zeros(1, 4, 4, 2).to(x))[0, 0]

    try:
        torch.func.jvp(sampled, (TIES,), (TIES,))
    except NotImplementedError:
        assert compared(lambda: Apply(sampled)) is False
    else:
        assert compared(lambda: Apply(sampled)) is True


@pytest.mark.parametrize("padding, believed", [(None, True), (0, False), (3, False), (-1, False)])
def test_the_row_of_padding_is_a_constant(padding, believed):
    assert compared(lambda: Words(padding)) is believed


# ------------------------------------------------------------------------------------------- layers that do more


class Once(torch.autograd.Function):
    """A cube with a jvp that is wrong, and that nothing else would show."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad

    @staticmethod
    def jvp(ctx, tangent):
        return tangent


def constant(x):
    with torch.no_grad():
        scale = x.abs().sum(1, keepdim=True)
    return x * scale


def at_times_constant(x):
    return constant(x) if x.sum() > 0 else x


def written(x):
    with torch.no_grad():
        mask = (x > 0).to(x)
        mask += x
    return x * mask


def force(x):
    """An energy's derivative, as of atoms: forward mode over reverse mode, wrong for layer norm in torch 2.13."""
    with torch.enable_grad():
        energy = F.layer_norm(x, (4,)).pow(3).sum()
        (found,) = torch.autograd.grad(energy, x if x.requires_grad else x.requires_grad_(), create_graph=True)
    return found


def hooked(x):
    y = x * x
    if y.requires_grad:
        y.register_hook(lambda grad: 2 * grad)
    return y


def hooked_unseen(x):
    y = x * x
    if y.requires_grad:
        y.grad_fn.register_hook(lambda inputs, _: tuple(None if grad is None else 2 * grad for grad in inputs))
    return y


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(lambda x: x.sin() * x, x, use_reentrant=False)


def derived(x):
    return torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]


LAYERS = {
    "no_grad": (constant, True), "no_grad at times": (at_times_constant, True), "in place": (written, True),
    "detach": (lambda x: x * x.detach(), True), "data": (lambda x: x * x.data.exp(), True),
    "inference mode": (lambda x: x * torch.inference_mode()(lambda: (x * 0 + 2).tolist())()[0][0], True),
    "a checkpoint": (checkpointed, True), "a gradient": (force, False), "a hook": (hooked, False),
    "an unseen hook": (hooked_unseen, False), "torch.func.jvp": (derived, False), "a wrong jvp": (Once.apply, False),
    "torch.func.grad": (lambda x: torch.func.grad(lambda x: F.layer_norm(x, (4,)).pow(3).sum())(x), False),
    "a backward": (lambda x: torch.ops.aten.native_layer_norm_backward(
        x, x, [4], x[:, :1].detach(), x[:, 1:2].detach().exp(), None, None, [True, False, False])[0], False),
}  # fmt: skip


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_what_layers_do_besides_means_the_same(name, chunks):
    function, believed = LAYERS[name]
    assert compared(lambda: Apply(function), normal(ROWS, 4, seed=8), chunks) is believed


class Captured(nn.Module):
    """It computes with a parameter that is registered in the layer behind it."""

    def __init__(self, holder):
        super().__init__()
        self._holder = [holder]

    def forward(self, x):
        return x * self._holder[0].weight.sum()


def test_a_captured_parameter_has_the_adjoints_tangent():
    def build():
        torch.manual_seed(4)
        scale = Scale()
        return nn.Sequential(Captured(scale), scale, nn.Linear(4, 2)).double()

    x, y, vector = normal(ROWS, 4, seed=8), normal(ROWS, 2, seed=5), normal(14, 1, seed=6)
    op = Hessian(Pipe(build(), [2, 1], 2), (x, y), F.mse_loss)
    torch.testing.assert_close(op @ vector, truth(build(), [(x, y)], MSE, vector, chunks=2).products["Hessian"])


class Averages(nn.Module):
    """It moves a buffer as batch norm does, and may have no forward derivative behind that."""

    def __init__(self, fails):
        super().__init__()
        self.register_buffer("mean", torch.ones(4))
        self.fails = fails

    def forward(self, x):
        with torch.no_grad():
            self.mean = 0.9 * self.mean + x.mean(0)
        return x * self.mean + (x.clone().index_reduce(0, AT[: len(x)] % len(x), x, "mean") if self.fails else 0.0)


@pytest.mark.parametrize("fails", [True, False])
def test_buffers_move_once_a_chunk_also_where_it_runs_again(fails):
    assert compared(lambda: Averages(fails), normal(ROWS, 4, seed=8), 2, True) is not fails


def test_within_a_dual_level_of_the_callers_products_are_the_same():
    x, y = normal(ROWS, 4, seed=8), normal(ROWS, 2, seed=5)
    op = Hessian(Pipe(network(nn.Tanh()), [2, 3], 2), (x, y), F.mse_loss)
    vector = normal(op.shape[0], 1, seed=6)
    wanted = op @ vector
    with torch.autograd.forward_ad.dual_level():
        torch.testing.assert_close(op @ vector, wanted, rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------------------------------------------------ the work


class Matrices(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts["products"] += func._schema.name in ("aten::mm", "aten::addmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("matrix, before, last", [(Hessian, 12, 9), (GaussNewton, 6, 7)])
def test_a_linear_layer_costs_so_many_products_of_matrices(matrix, before, last, stages):
    """F 3 and B 9, or 3; of the last stage B alone, or 7. Less what the first layer's input has no part in."""
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 * stages)]).double()
    op = matrix(Pipe(model, [2] * stages, checkpoint="always"), (normal(8, 4), normal(8, 4, seed=2)), F.mse_loss)
    vector = op.space.random("normal", 0, 0)
    for _ in range(4):
        op.products([vector])
    with Matrices() as counted:
        op.products([vector])
    of_input = 11 if matrix is Hessian else 3  # those with the gradient of x, or its tangent, in F and B
    whole = 2 * (before * (stages - 1) + last)
    assert whole - of_input <= counted.counts["products"] <= whole


def test_a_stage_without_a_forward_derivative_is_tried_in_the_first_product_alone(monkeypatch):
    tried, run = [], ForwardMode._run
    monkeypatch.setattr(ForwardMode, "_run", lambda self, stage, *rest: tried.append(stage) or run(self, stage, *rest))
    pipe = Pipe(network(Apply(WITHOUT[0])), [2, 2, 1], 2, checkpoint="always", mixes_rows=True)
    op = Hessian(pipe, (TIES, normal(len(TIES), 2)), F.mse_loss)
    vector = op.space.random("normal", 0, 0)
    for _ in range(3):
        op.products([vector])
    assert [stage.layers.index for stage in tried].count(0) == 1 < [stage.layers.index for stage in tried].count(1)
