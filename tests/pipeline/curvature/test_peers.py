"""Do others' tools find the same matrices, eigenvalues and traces? Where they do not, who is right?

    curvlinops 3.0.1   jvp of the gradient (Hessian); jvp, the loss, vjp (Gauss-Newton, empirical Fisher)
    PyHessian 0.1      backward(create_graph=True), then the gradient's gradient
    who is right       central differences of the gradient, in float64

What torch 2.13 differentiates wrongly, or not at all, is theirs to inherit: these are facts about pinned versions, and
a test that fails after a new version of one of them says that a fact has changed. Without curvlinops (how to install
it: benchmarks/curvature_peers.py) its tests are skipped.
"""

import warnings

import pytest
import torch
from law_models import normal
from second_order_reference import CREATES_CYCLE
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.parametrizations import weight_norm

from pipeline import Pipe
from pipeline.curvature import EmpiricalFisher, GaussNewton, Hessian

pyhessian = pytest.importorskip("pyhessian")
pytestmark = pytest.mark.filterwarnings(CREATES_CYCLE)

ROWS, WIDTH, CLASSES = 7, 4, 3
OURS = {"HessianLinearOperator": Hessian, "GGNLinearOperator": GaussNewton, "EFLinearOperator": EmpiricalFisher}
LOSSES = [
    nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss(), nn.MSELoss(reduction="sum"),
]
by_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{type(loss).__name__}-{loss.reduction}")


def network(*middle):
    """Three stages' worth of layers, in eval mode."""
    torch.manual_seed(4)
    ends = [nn.Linear(WIDTH, WIDTH), nn.Tanh()], [nn.Linear(WIDTH, CLASSES)]
    return nn.Sequential(*ends[0], nn.Sequential(*[build() for build in middle]), *ends[1]).double().eval()


def smooth():
    return network(lambda: nn.Linear(WIDTH, WIDTH), nn.GELU)


def data_for(loss, rows=ROWS, seed=0):
    x = normal(rows, WIDTH, seed=seed)
    return x, torch.arange(rows) % CLASSES if isinstance(loss, nn.CrossEntropyLoss) else normal(rows, CLASSES, seed=9)


def ours(matrix, model, data, loss):
    """The whole matrix, through three stages and two chunks."""
    op = matrix(Pipe(model, [2, 1, 1], 2, checkpoint="always"), data, loss)
    return op @ torch.eye(op.shape[0], dtype=torch.float64)


def curvlinops_matrix(name, model, data, loss):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, while it is imported
        curvlinops = pytest.importorskip("curvlinops")
    op = getattr(curvlinops, name)(model, loss, list(model.parameters()), data, check_deterministic=False)
    return (op @ torch.eye(op.shape[0], dtype=torch.float64)).detach()


def pyhessian_matrix(model, data, loss):
    tool = pyhessian.hessian(model, loss, data=data, cuda=False)
    sizes = [parameter.numel() for parameter in tool.params]

    def product(column):
        parts = [part.view_as(like) for part, like in zip(column.split(sizes), tool.params, strict=True)]
        products = pyhessian.utils.hessian_vector_product(tool.gradsH, tool.params, parts)
        return torch.cat([part.flatten() for part in products])

    found = torch.stack([product(column) for column in torch.eye(sum(sizes), dtype=torch.float64)], 1)
    model.zero_grad()
    return found


def by_differences(model, data, loss, step=1e-4):
    """The Hessian from gradients at four points of each axis: the error is of the order of step^4."""
    x, y = data
    params = list(model.parameters())
    here = parameters_to_vector(params).detach().clone()

    def gradient(at):
        vector_to_parameters(at, params)
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss(model(x), y), params)])

    columns = []
    for axis in torch.eye(len(here), dtype=torch.float64):
        near, far = [gradient(here + k * step * axis) - gradient(here - k * step * axis) for k in (1, 2)]
        columns.append((8 * near - far) / (12 * step))
    vector_to_parameters(here, params)
    return torch.stack(columns, 1)


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


# ------------------------------------------------------------------------------------------------ where all are right


@by_loss
@pytest.mark.parametrize("name", OURS)
def test_matrices_are_those_of_curvlinops(name, loss):
    data = data_for(loss)
    model = smooth()
    found = ours(OURS[name], model, data, loss)
    wanted = curvlinops_matrix(name, model, [data], loss)
    if name == "EFLinearOperator" and isinstance(loss, nn.MSELoss) and loss.reduction == "mean":
        wanted = wanted / CLASSES  # curvlinops counts each entry of a row as a loss; here a row has one, their mean
    assert wanted.norm() > 0.01
    assert error(found, wanted) < 1e-10


@pytest.mark.parametrize("loss", [LOSSES[0], LOSSES[3]], ids=["mean", "sum"])
@pytest.mark.parametrize("name", OURS)
def test_matrices_over_mini_batches_of_uneven_rows_are_those_of_curvlinops(name, loss):
    """curvlinops weighs a mini-batch's mean by its rows; so do we."""
    data = [data_for(loss), data_for(loss, rows=3, seed=5)]
    model = smooth()
    assert error(ours(OURS[name], model, data, loss), curvlinops_matrix(name, model, data, loss)) < 1e-10


@by_loss
def test_the_hessian_is_that_of_pyhessian(loss):
    data, model = data_for(loss), smooth()
    assert error(ours(Hessian, model, data, loss), pyhessian_matrix(model, data, loss)) < 1e-10


class Doubles:
    """PyHessian draws its vectors in the default dtype."""

    def __enter__(self):
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *exc):
        torch.set_default_dtype(torch.float32)


@pytest.fixture
def analysed():
    """Our operator of three stages, and PyHessian's tool of the plain module."""
    loss = LOSSES[0]
    data, model = data_for(loss, rows=24), smooth()
    op = Hessian(Pipe(model, [2, 1, 1], 2, checkpoint="always"), data, loss)
    with Doubles():
        yield op, pyhessian.hessian(model, loss, data=data, cuda=False)
    model.zero_grad()


def test_eigenvalues_are_those_of_pyhessian(analysed):
    """Up to the length of its vectors, which it divides by their norm plus 1e-6."""
    op, tool = analysed
    torch.manual_seed(3)
    values, vectors = tool.eigenvalues(maxIter=2000, tol=1e-10, top_n=2)
    pairs = op.top_eigenpairs(2, tol=1e-8)
    assert pairs.values.tolist() == pytest.approx([value * (1 + 1e-6) ** 2 for value in values], rel=1e-8)
    for number, vector in enumerate(vectors):
        flat = torch.cat([part.flatten() for part in vector])
        assert float((op @ flat - pairs.values[number] * flat).norm()) < 1e-3 * abs(values[0])


def test_each_sample_of_the_trace_is_that_of_pyhessian(analysed):
    op, tool = analysed
    torch.manual_seed(3)
    found = tool.trace(maxIter=5, tol=-float("inf"))
    torch.manual_seed(3)
    for value in found:
        signs = torch.cat([torch.randint_like(p, high=2).flatten() for p in tool.params]) * 2 - 1
        assert value == pytest.approx(float(signs @ (op @ signs)), rel=1e-10)
    assert len(found) == 5


def test_pyhessians_trace_scatters_around_ours_as_far_as_its_samples_may(analysed):
    """For signs the variance of one sample is twice the sum of squares off the diagonal."""
    op, tool = analysed
    n = op.shape[0]
    exact = op.trace(n).value
    dense = op @ torch.eye(n, dtype=torch.float64)
    assert exact == pytest.approx(float(dense.trace()), rel=1e-10)
    torch.manual_seed(3)
    samples = torch.tensor(tool.trace(maxIter=100, tol=-float("inf")))
    spread = float((2 * (dense.square().sum() - dense.diagonal().square().sum()) / len(samples)).sqrt())
    assert abs(float(samples.mean()) - exact) < 4 * spread
    assert spread < 0.5 * exact


# ---------------------------------------------------------------------------------------------- where they are wrong


class Solve(nn.Module):
    """A layer that solves a linear system."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(normal(WIDTH, WIDTH, seed=8) + 4 * torch.eye(WIDTH, dtype=torch.float64))

    def forward(self, x):
        return torch.linalg.solve(self.weight, x.T).T


class Attention(nn.Module):
    """Each row is a sequence of two tokens."""

    def forward(self, x):
        tokens = x.view(-1, 1, 2, WIDTH // 2)
        return nn.functional.scaled_dot_product_attention(tokens, tokens, tokens).reshape(x.shape)


class Square(torch.autograd.Function):
    """An autograd.Function as most are written: forward and ctx in one."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Squared(nn.Module):
    def forward(self, x):
        return Square.apply(x)


def normed():
    return weight_norm(nn.Linear(WIDTH, WIDTH))


def layer_norm():
    return nn.LayerNorm(WIDTH)


def group_norm():
    return nn.GroupNorm(1, WIDTH)


LIMIT = 1e-6  # of what differs by rounding in the differences; what is wrong is wrong in the second digit


def asymmetry(matrix):
    return float((matrix - matrix.T).norm() / matrix.norm())


@pytest.mark.parametrize("layer", [layer_norm, Solve, normed, Attention, nn.Hardsigmoid, Squared, group_norm, nn.SiLU])
def test_our_hessian_is_that_of_finite_differences_where_others_are_wrong_or_give_up(layer):
    loss = LOSSES[0]
    data, model = data_for(loss), network(layer)
    found = ours(Hessian, model, data, loss)
    assert error(found, by_differences(model, data, loss)) < LIMIT
    assert asymmetry(found) < 1e-12


@pytest.mark.parametrize("layer", [layer_norm, Solve])
def test_curvlinops_hessian_is_wrong_and_not_symmetric_behind(layer):
    """Forward mode over torch 2.13's own gradient, without an error."""
    loss = LOSSES[0]
    data, model = data_for(loss), network(layer)
    found = curvlinops_matrix("HessianLinearOperator", model, [data], loss)
    assert error(found, by_differences(model, data, loss)) > 0.01
    assert asymmetry(found) > 0.01


@pytest.mark.parametrize("layer", [layer_norm, Solve, group_norm, nn.SiLU])
@pytest.mark.parametrize("name", ["GGNLinearOperator", "EFLinearOperator"])
def test_curvlinops_other_matrices_are_right_there_and_ours_are_the_same(name, layer):
    loss = LOSSES[0]
    data, model = data_for(loss), network(layer)
    assert error(ours(OURS[name], model, data, loss), curvlinops_matrix(name, model, [data], loss)) < 1e-10


@pytest.mark.parametrize("layer", [normed, Attention, nn.Hardsigmoid, Squared])
def test_curvlinops_has_no_hessian_behind(layer):
    loss = LOSSES[0]
    with pytest.raises((NotImplementedError, RuntimeError), match="forward AD|functorch"):
        curvlinops_matrix("HessianLinearOperator", network(layer), [data_for(loss)], loss)


@pytest.mark.parametrize("name", ["GGNLinearOperator", "EFLinearOperator"])
def test_curvlinops_takes_padding_for_a_parameter_in_one_direction_only(name):
    """Its J sees the padding row that its J^T does not: not symmetric. In ours that row is zero in both."""
    loss = LOSSES[0]
    torch.manual_seed(4)
    layers = nn.Embedding(5, WIDTH, padding_idx=0), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    model = nn.Sequential(*layers).double().eval()
    data = torch.arange(ROWS) % 5, torch.arange(ROWS) % CLASSES
    theirs, found = curvlinops_matrix(name, model, [data], loss), ours(OURS[name], model, data, loss)
    assert asymmetry(theirs) > 0.01
    assert asymmetry(found) < 1e-12
    assert not found[:WIDTH].any() and not found[:, :WIDTH].any()
    assert error(found[WIDTH:, WIDTH:], theirs[WIDTH:, WIDTH:]) < 1e-10  # the rest is the same


def test_pyhessians_products_are_wrong_and_not_symmetric_behind_weight_norm():
    """Double backward of torch's fused weight_norm, without an error."""
    loss = LOSSES[0]
    data, model = data_for(loss), network(normed)
    found = pyhessian_matrix(model, data, loss)
    assert error(found, by_differences(model, data, loss)) > 0.01
    assert asymmetry(found) > 0.01


@pytest.mark.parametrize("layer", [Attention, nn.Hardsigmoid])
def test_pyhessian_has_no_product_behind(layer):
    loss = LOSSES[0]
    model = network(layer)
    with pytest.raises(RuntimeError, match="not implemented"):
        pyhessian_matrix(model, data_for(loss), loss)
    model.zero_grad()
