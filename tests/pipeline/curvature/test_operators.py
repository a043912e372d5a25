"""Is the second derivative right, operation by operation?

    Linear -> [the operation] -> Linear, cut before and behind it, in 3 chunks

    H @ v   against   (gradient(w + h v) - gradient(w - h v)) / 2h                     of the plain module
    G @ v   against   J^T u,  u = (dL/dy (y + h J v) - ...) / 2h,  J v = (y(w + h v) - ...) / 2h

Only first derivatives of torch are used for the reference. What cannot be right is refused: test_refusals.py.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from cover import either
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline import Pipe, layer_seed
from pipeline.curvature import GaussNewton, Hessian

SEED, ROWS, CHUNKS = 5, 5, 3
COMPLEX = "ignore:Casting complex values to real discards the imaginary part:UserWarning"


class Case(NamedTuple):
    """An operation in the middle.

    Attributes:
        build: makes the module.
        shape: of what it takes, without the dimension of the rows.
        train: the mode.
        chunks: into which the mini-batch is cut.
        single: compute in float32.
        rough: its layers round to float32 in between, which finite differences magnify.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (8,)
    train: bool = False
    chunks: int = CHUNKS
    single: bool = False
    rough: bool = False


class Apply(nn.Module):
    """`function` as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class With(nn.Module):
    """`function(x, weight)`."""

    def __init__(self, function, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


class Inner(nn.Module):
    """`function(module, x)`."""

    def __init__(self, function, module):
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, x):
        return self.function(self.module, x)


class Join(nn.Module):
    def forward(self, x):
        return x.reshape(len(x), -1)


def apply(function, *shape, **more):
    return Case(partial(Apply, function), shape or (8,), **more)


def module(build, *shape, **more):
    return Case(build, shape or (8,), **more)


def run(function, build, *shape, **more):
    return Case(lambda: Inner(function, build()), shape or (8,), **more)


def first(layer, x):
    return layer(x)[0]


def rows_of(x, columns, count):
    """Indices that depend on the column alone."""
    return ((torch.arange(columns) + 1) % count).expand(len(x), columns)


def embedded(layer, x):
    return layer(rows_of(x, x.shape[1], 7)).tanh() * x[..., None]


def positive(x):
    return x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype)


def rotated(x):
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones(4, 2, dtype=x.dtype), torch.arange(8, dtype=x.dtype).view(4, 2)
    )
    return torch.view_as_real(turned).flatten(-2)


def to_complex(x):
    found = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.cat([found.abs(), found.angle()], -1)


def attended(x, w, **options):
    query, key, value = (x @ w).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
    return F.scaled_dot_product_attention(query, key, value, **options)


def attended_math(x, w, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return attended(x, w, **options)


def grouped(x, w):
    """Four heads of queries, two of keys and values."""
    queries, keys = (x @ w)[:, None].expand(-1, 4, -1, -1), x[:, None].expand(-1, 2, -1, -1)
    return F.scaled_dot_product_attention(queries, keys, keys, enable_gqa=True)


def attention(**options):
    return Case(lambda: With(partial(attended, **options), 4, 24), (3, 4))


def self_attended(needs, layer, x):
    return layer(x, x, x, need_weights=needs)[0]


def sampled(mode, x):
    return F.grid_sample(x[:, :1], x[:, 1:].permute(0, 2, 3, 1).tanh(), align_corners=False, mode=mode)


def of_kind(build, kind):
    return getattr(nn.utils.parametrizations, kind)(build())


class Cube(torch.autograd.Function):
    """As torch's documentation writes one that can be differentiated twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class CubeWithJvp(torch.autograd.Function):
    generate_vmap_rule = True

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
        (x,) = ctx.saved_tensors
        return 3 * x**2 * tangent


class ScaledCube(torch.autograd.Function):
    """Its backward is a Function too."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x**3 * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return 3 * Cube.apply(x) / x * w * grad, (Cube.apply(x) * grad).sum(0)


def sequence(kind, **options):
    return lambda: getattr(nn, kind)(4, 3, batch_first=True, **options)


def cell(kind):
    return lambda: getattr(nn, kind)(8, 5)


def encoder(**options):
    return lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, **options)


IMAGE, LINE, VOLUME = (2, 6, 6), (2, 8), (1, 4, 4, 4)
MASK = torch.randn(3, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
POINTWISE = {
    kind: module(getattr(nn, kind))
    for kind in (
        "GELU ELU SELU CELU Softplus Hardswish Hardtanh LogSigmoid Sigmoid Tanh Softsign Tanhshrink ReLU ReLU6 "
        "LeakyReLU PReLU SiLU Mish GLU Hardsigmoid Hardshrink Softshrink"
    ).split()
}
OPERATORS = POINTWISE | {
    "GELU tanh": module(lambda: nn.GELU("tanh")),
    "ReLU inplace": module(lambda: nn.ReLU(inplace=True)),
    "Hardsigmoid, all of it": run(lambda layer, x: layer(8 * x), nn.Hardsigmoid),
    "Threshold": module(lambda: nn.Threshold(0.1, 0.2)),
    "Linear": module(lambda: nn.Linear(8, 5)),
    "Bilinear": run(lambda layer, x: layer(x, x.tanh()), lambda: nn.Bilinear(8, 8, 5)),
    "Conv1d": module(lambda: nn.Conv1d(2, 3, 3), *LINE),
    "Conv2d": module(lambda: nn.Conv2d(2, 3, 3), *IMAGE),
    "Conv2d grouped dilated": module(lambda: nn.Conv2d(2, 4, 2, groups=2, dilation=2, stride=2), *IMAGE),
    "Conv3d": module(lambda: nn.Conv3d(1, 2, 2), *VOLUME),
    "ConvTranspose2d": module(lambda: nn.ConvTranspose2d(2, 3, 2, stride=2), *IMAGE),
    "LayerNorm": module(lambda: nn.LayerNorm(8)),
    "RMSNorm": module(lambda: nn.RMSNorm(8)),
    "rms_norm without weight": apply(lambda x: F.rms_norm(x, (8,))),
    "GroupNorm": module(lambda: nn.GroupNorm(2, 4), 4, 5),
    "InstanceNorm2d": module(lambda: nn.InstanceNorm2d(2, affine=True), *IMAGE),
    "LocalResponseNorm": module(lambda: nn.LocalResponseNorm(2), *IMAGE),
    "BatchNorm1d": module(lambda: nn.BatchNorm1d(8)),
    "BatchNorm2d": module(lambda: nn.BatchNorm2d(2), *IMAGE),
    "BatchNorm1d train": module(lambda: nn.BatchNorm1d(8), train=True, chunks=1),
    "BatchNorm2d train": module(lambda: nn.BatchNorm2d(2), *IMAGE, train=True, chunks=1),
    "batch_norm train without buffers": apply(lambda x: F.batch_norm(x, None, None, training=True), chunks=1),
    "Dropout": module(lambda: nn.Dropout(0.3), train=True),
    "AlphaDropout": module(lambda: nn.AlphaDropout(0.3), train=True),
    "RReLU train": module(lambda: nn.RReLU(), train=True, chunks=1),  # how much it draws goes by the signs of all rows
    "MaxPool1d": module(lambda: nn.MaxPool1d(2), *LINE),
    "MaxPool2d": module(lambda: nn.MaxPool2d(2), *IMAGE),
    "MaxPool3d": module(lambda: nn.MaxPool3d(2), *VOLUME),
    "AvgPool2d": module(lambda: nn.AvgPool2d(2), *IMAGE),
    "AdaptiveAvgPool2d(1)": module(lambda: nn.AdaptiveAvgPool2d(1), *IMAGE),
    "AdaptiveAvgPool2d(3)": module(lambda: nn.AdaptiveAvgPool2d(3), *IMAGE),
    "AdaptiveMaxPool2d": module(lambda: nn.AdaptiveMaxPool2d(2), *IMAGE),
    "LPPool2d": module(lambda: nn.LPPool2d(2, 2), *IMAGE),
    "FractionalMaxPool2d": module(lambda: nn.FractionalMaxPool2d(2, 3), *IMAGE),
    "PixelShuffle": module(lambda: nn.PixelShuffle(2), 4, 3, 3),
    "ChannelShuffle": module(lambda: nn.ChannelShuffle(2), 4, 3, 3),
    "RNN 2 layers": run(first, sequence("RNN", num_layers=2), 3, 4),
    "GRU 2 layers": run(first, sequence("GRU", num_layers=2), 3, 4),
    "LSTM 2 layers": run(first, sequence("LSTM", num_layers=2), 3, 4),
    "LSTM bidirectional": run(first, sequence("LSTM", bidirectional=True, proj_size=2), 3, 4),
    "RNN float32": run(first, sequence("RNN"), 3, 4, single=True),
    "GRU float32": run(first, sequence("GRU"), 3, 4, single=True),
    "LSTM float32": run(first, sequence("LSTM"), 3, 4, single=True),
    "RNNCell": module(cell("RNNCell")),
    "GRUCell": module(cell("GRUCell")),
    "LSTMCell": run(first, cell("LSTMCell")),
    "Embedding": run(embedded, lambda: nn.Embedding(7, 3), 4),
    "Embedding sparse": run(embedded, lambda: nn.Embedding(7, 3, sparse=True), 4),
    "F.embedding": Case(lambda: With(lambda x, w: F.embedding(rows_of(x, 4, 7), w).tanh() * x[..., None], 7, 3), (4,)),
    "index_select": apply(lambda x: x.index_select(1, torch.tensor([2, 0, 2]))),
    "advanced index": apply(lambda x: x[:, [2, 0, 2]] * x[:, torch.tensor([True] * 3 + [False] * 5)]),
    "gather": apply(lambda x: x.gather(1, rows_of(x, 5, 8))),
    "scatter_add": apply(lambda x: torch.zeros(len(x), 4, dtype=x.dtype).scatter_add(1, rows_of(x, 8, 4), x)),
    "index_add": apply(lambda x: torch.zeros(len(x), 4, dtype=x.dtype).index_add(1, torch.arange(8) % 4, x)),
    "masked_fill, where": apply(lambda x: torch.where(x > 0, x.masked_fill(x < -1, 0.5), x.sin())),
    "topk": apply(lambda x: x.topk(3, 1).values),
    "sort": apply(lambda x: x.sort(1).values.cumsum(1)),
    "cumsum": apply(lambda x: x.cumsum(1)),
    "cumprod": apply(lambda x: x.cumprod(1)),
    "einsum": Case(lambda: With(lambda x, w: torch.einsum("bi,ijk,bk->bj", x, w, x), 8, 4, 8)),
    "bmm, baddbmm": apply(lambda x: torch.baddbmm(x, x, x.bmm(x)), 3, 3),
    "rfft": apply(lambda x: torch.view_as_real(torch.fft.rfft(x)).square()),
    "fft convolution": Case(
        lambda: With(lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w, 8), n=8), 8)
    ),
    "rotary, complex": apply(rotated, 4, 4),
    "complex abs, angle": apply(to_complex),
    "interpolate bilinear": apply(lambda x: F.interpolate(x, size=4, mode="bilinear"), *IMAGE),
    "interpolate nearest": apply(lambda x: F.interpolate(x, size=4), *IMAGE),
    "interpolate bicubic": apply(lambda x: F.interpolate(x, size=4, mode="bicubic"), *IMAGE),
    "interpolate antialias": apply(lambda x: F.interpolate(x, size=4, mode="bilinear", antialias=True), *IMAGE),
    "pad reflect": apply(lambda x: F.pad(x, (1, 2), mode="reflect"), *LINE),
    "pad replicate": apply(lambda x: F.pad(x, (1, 2), mode="replicate"), *LINE),
    "unfold": apply(lambda x: F.unfold(x, 2), *IMAGE),
    "fold": apply(lambda x: F.fold(x, (3, 3), 2), 4, 4),
    "cosine_similarity": Case(lambda: With(lambda x, w: F.cosine_similarity(x[:, None], w, dim=-1), 5, 8)),
    "normalize": apply(lambda x: F.normalize(x)),
    "softmax": apply(lambda x: x.softmax(1)),
    "log_softmax": apply(lambda x: x.log_softmax(1)),
    "logsumexp": apply(lambda x: x.logsumexp(2), 3, 4),
    "std, norm, prod": apply(lambda x: torch.stack([x.std(1), x.norm(dim=1), x.prod(1)], 1)),
    "cholesky": apply(lambda x: torch.linalg.cholesky(positive(x)), 3, 3),
    "eigvalsh": apply(lambda x: torch.linalg.eigvalsh(x + x.mT), 3, 3),
    "eigh": apply(lambda x: torch.linalg.eigh(x + x.mT).eigenvectors.square(), 3, 3),
    "linalg.solve": apply(lambda x: torch.linalg.solve(positive(x), x), 3, 3),
    "linalg.inv": apply(lambda x: torch.linalg.inv(positive(x)), 3, 3),
    "linalg.slogdet": apply(lambda x: x * positive(x).slogdet()[1][:, None, None], 3, 3),
    "attention": attention(),
    "attention causal": attention(is_causal=True),
    "attention mask": attention(attn_mask=MASK),
    "attention dropout": attention(dropout_p=0.3),
    "attention grouped": Case(lambda: With(grouped, 4, 4), (3, 4)),
    "attention MATH": Case(lambda: With(attended_math, 4, 24), (3, 4)),
    "attention MATH causal": Case(lambda: With(partial(attended_math, is_causal=True), 4, 24), (3, 4)),
    "grid_sample": apply(partial(sampled, "bilinear"), 3, 3, 3),
    "grid_sample bicubic": apply(partial(sampled, "bicubic"), 3, 3, 3),
    "max_unpool2d": apply(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), *IMAGE),
    "pairwise_distance": Case(lambda: With(F.pairwise_distance, 1, 8)),
    "distances written out": Case(lambda: With(lambda x, w: (x[:, None] - w).square().sum(-1).sqrt(), 4, 8)),
    "hardsigmoid written out": apply(lambda x: torch.clamp(x / 6 + 0.5, 0, 1)),
    "svdvals": apply(torch.linalg.svdvals, 3, 3),
    "qr": apply(lambda x: torch.linalg.qr(x)[0], 3, 3),
    "lu": apply(lambda x: torch.linalg.lu(positive(x))[2], 3, 3),
    "matrix_exp": apply(torch.matrix_exp, 3, 3),
    "renorm": apply(lambda x: x.renorm(2, 0, 1.0)),
    "digamma, i0e": apply(lambda x: torch.digamma(x**2 + 1) + torch.special.i0e(x)),
    "erfinv": apply(lambda x: torch.erfinv(x.tanh() / 2)),
    "pad circular": apply(lambda x: F.pad(x, (1, 1), mode="circular"), *LINE),
    "spectral_norm": module(lambda: of_kind(lambda: nn.Linear(8, 5), "spectral_norm")),
    "orthogonal": module(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 5), orthogonal_map="matrix_exp")),
    "Function": apply(Cube.apply),
    "Function with setup_context and jvp": apply(CubeWithJvp.apply),
    "Function whose backward is one": Case(lambda: With(ScaledCube.apply, 8)),
} | {
    f"MultiheadAttention train={train} need_weights={needs}": run(
        partial(self_attended, needs), lambda: nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.1), 3, 4,
        train=train,
    )
    for train in (True, False)
    for needs in (True, False)
} | {
    f"TransformerEncoderLayer train={train}": module(encoder(dropout=0.1), 3, 4, train=train) for train in (True, False)
} | {
    "TransformerEncoderLayer norm first, float32": module(encoder(norm_first=True), 3, 4, single=True),
    "TransformerDecoderLayer": run(
        lambda layer, x: layer(x, x.tanh()), lambda: nn.TransformerDecoderLayer(4, 2, 8, batch_first=True), 3, 4
    ),
    "TransformerEncoder": run(
        lambda layer, x: layer(x, is_causal=True, mask=nn.Transformer.generate_square_subsequent_mask(3)),
        lambda: nn.TransformerEncoder(encoder()(), 2, enable_nested_tensor=False), 3, 4,
    ),
}


# ------------------------------------------------------------------------------------------------------ the reference


def model_of(case):
    """Parameters before the operation, in it and behind it."""
    torch.manual_seed(1)
    before = nn.Sequential(nn.Linear(6, math.prod(case.shape)), nn.Unflatten(1, case.shape))
    middle = case.build()
    for layer in [before, middle]:
        layer.to(torch.float32 if case.single else torch.float64)
    x, y = data(case)
    width = Join()(case.build().to(x.dtype).eval()(before(x[:2]))).shape[1]
    behind = nn.Sequential(Join(), nn.Linear(width, 3).to(x.dtype))
    return nn.Sequential(before, middle, behind).train(case.train), x, y


def data(case):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return x.float() if case.single else x, torch.tensor([0, 2, 1, 1, 0])


def outputs(model, x, chunks):
    """Of the plain module, chunk by chunk with the generators of a call whose seed is SEED."""
    found = []
    for chunk, part in enumerate(x.tensor_split(chunks)):
        for layer, each in enumerate(model):
            torch.default_generator.manual_seed(layer_seed(SEED, chunk, layer))
            part = each(part)
        found.append(part)
    return torch.cat(found)


def value(loss):
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


class Reference:
    """Products by central differences of first derivatives, in float64."""

    def __init__(self, model, x, y, loss_fn, chunks):
        self.model, self.x = model.double(), x.double()
        self.y, self.loss_fn, self.chunks = y, loss_fn, chunks
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.start = [parameter.detach().clone() for parameter in self.parameters]
        self.buffers = [buffer.clone() for buffer in model.buffers()]

    def at(self, vec, step):
        """The output, moved along `vec`."""
        parts = vec.double().split([part.numel() for part in self.start])
        with torch.no_grad():
            for parameter, start, part in zip(self.parameters, self.start, parts, strict=True):
                parameter.copy_(start + step * part.view_as(start))
            for buffer, start in zip(self.model.buffers(), self.buffers, strict=True):
                buffer.copy_(start)
        return outputs(self.model, self.x, self.chunks)

    def pulled(self, out, grad=None):
        found = torch.autograd.grad(out, self.parameters, grad, allow_unused=True, materialize_grads=True)
        return torch.cat([each.to_dense().flatten() for each in found])

    def hessian(self, vec, step=1e-5):
        grads = [self.pulled(value(self.loss_fn(self.at(vec, sign * step), self.y))) for sign in (1, -1)]
        return (grads[0] - grads[1]) / (2 * step)

    def gauss_newton(self, vec, step=1e-5):
        along = (self.at(vec, step).detach() - self.at(vec, -step).detach()) / (2 * step)
        out = self.at(vec, 0)
        sides = [(out.detach() + sign * step * along).requires_grad_() for sign in (1, -1)]
        slopes = [torch.autograd.grad(value(self.loss_fn(side, self.y)), side)[0] for side in sides]
        return self.pulled(out, (slopes[0] - slopes[1]) / (2 * step))


def check(case, loss_fn=F.cross_entropy, y=None, balances=either([(2, 1)], [(1, 2), (2, 1)])):
    """Both products, for each cut."""
    model, x, labels = model_of(case)
    y = labels if y is None else y
    reference = Reference(model_of(case)[0], x, y, loss_fn, case.chunks)
    size = sum(start.numel() for start in reference.start)
    vec, other = torch.randn(2, size, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    wanted = {Hessian: reference.hessian(vec), GaussNewton: reference.gauss_newton(vec)}
    tolerance = 5e-3 if case.rough else 1e-3 if case.single else 1e-6
    for balance in balances:
        pipe = Pipe(model, balance, case.chunks, devices=["cpu"] * len(balance))
        for kind, expected in wanted.items():
            assert float(expected.norm()) > 1e-6, "nothing to compare"
            operator = kind(pipe, (x, y), loss_fn, training=case.train, seed=SEED)
            found, back = (operator @ torch.stack([vec, other], 1).to(operator.dtype)).double().unbind(1)
            error = float((found - expected).norm() / expected.norm())
            assert error < tolerance, f"{kind.__name__}, {balance}: {error:.1e}"
            gap = abs(float(found @ other - back @ vec))
            rounding = 1e-4 if case.single or case.rough else 1e-10
            assert gap < rounding * float(found.norm() * other.norm()), "not symmetric"


# ---------------------------------------------------------------------------------------------------------- the laws


@pytest.mark.filterwarnings(COMPLEX)
@pytest.mark.parametrize("balance", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_products_equal_differences_of_the_gradient(name, balance):
    check(OPERATORS[name], balances=[balance])


OLD_STYLE = "ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning"
WEIGHT_NORMS = {
    "Linear": (lambda: nn.Linear(8, 5), (8,), (0, 1, -1, None)),
    "Linear without bias": (lambda: nn.Linear(8, 5, bias=False), (8,), (0,)),
    "Conv1d": (lambda: nn.Conv1d(2, 3, 3), LINE, (0, 1, 2, -1)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 3), IMAGE, (0, 1, 3, None)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 2), IMAGE, (0, 1)),
}


@pytest.mark.filterwarnings(OLD_STYLE)
@pytest.mark.parametrize("style", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm], ids=["new", "old"])
@pytest.mark.parametrize("kind, dim", [(kind, dim) for kind, (*_, dims) in WEIGHT_NORMS.items() for dim in dims])
def test_weight_norm_is_right_although_torchs_own_second_derivative_is_not(kind, dim, style):
    build, shape, _ = WEIGHT_NORMS[kind]
    check(Case(lambda: style(build(), dim=dim), shape))


@pytest.mark.filterwarnings(OLD_STYLE)
@pytest.mark.parametrize("style", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm], ids=["new", "old"])
def test_weight_norm_of_another_name_in_a_recurrent_layer_is_right(style):
    check(run(first, lambda: style(sequence("GRU")(), "weight_hh_l0"), 3, 4))


def test_weight_norm_of_a_vector_is_right():
    build = partial(With, torch.mul, 8)
    check(Case(lambda: nn.utils.parametrizations.weight_norm(build(), "weight")))


def weighted(out, y):
    """A mean over what is not ignored, weighted by class."""
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=out.dtype)
    return F.cross_entropy(out, y, weight, ignore_index=1, label_smoothing=0.1)


def ignoring(out, y):
    """A mean over what is not ignored: as its sum and how much that is."""
    return F.cross_entropy(out, y, ignore_index=1, label_smoothing=0.1, reduction="sum"), (y != 1).sum()


LABELS = torch.tensor([0, 2, 1, 1, 0])
POINTS = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
SHARES = POINTS.softmax(1)
TIMES = torch.tensor([1.0, -0.5], dtype=torch.float64)
HEAD = torch.randn(4, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
LOSSES = {
    "cross_entropy": (F.cross_entropy, LABELS),
    "cross_entropy smoothed": (partial(F.cross_entropy, label_smoothing=0.1), LABELS),
    "cross_entropy weighted, smoothed, ignoring": (weighted, LABELS),
    "cross_entropy as (sum, count)": (ignoring, LABELS),
    "cross_entropy of probabilities": (F.cross_entropy, SHARES),
    "cross_entropy (rows, classes, times)": (
        lambda out, y: F.cross_entropy(out[..., None] * TIMES, y), torch.stack([LABELS, LABELS.flip(0)], 1)
    ),
    "nll_loss": (lambda out, y: F.nll_loss(out.log_softmax(1), y), LABELS),
    "mse_loss": (F.mse_loss, POINTS),
    "mse_loss against a constant": (lambda out, y: F.mse_loss(out, torch.ones_like(out)), LABELS),
    "l1_loss": (lambda out, y: F.l1_loss(out.sin(), y), POINTS),
    "smooth_l1_loss": (F.smooth_l1_loss, POINTS),
    "huber_loss": (partial(F.huber_loss, delta=0.7), POINTS),
    "binary_cross_entropy": (lambda out, y: F.binary_cross_entropy(out.sigmoid(), y), SHARES),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, SHARES),
    "kl_div": (lambda out, y: F.kl_div(out.log_softmax(1), y, reduction="batchmean"), SHARES),
    "gaussian_nll_loss": (lambda out, y: F.gaussian_nll_loss(out[:, :1], y[:, :1], out[:, 1:2].exp()), POINTS),
    "poisson_nll_loss": (F.poisson_nll_loss, SHARES),
    "soft_margin_loss": (F.soft_margin_loss, POINTS.sign()),
    "triplet_margin_loss": (lambda out, y: F.triplet_margin_loss(out, y, y.flip(1)), POINTS),
    "logsumexp": (lambda out, y: out.logsumexp(1).square().mean(), POINTS),
}


@pytest.mark.parametrize("name", LOSSES)
def test_products_of_a_loss_equal_differences_of_its_gradient(name):
    loss_fn, y = LOSSES[name]
    check(module(nn.Tanh), loss_fn, y)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has none")
def test_linear_cross_entropy_is_right():
    check(module(nn.Tanh), lambda out, y: F.linear_cross_entropy(out, HEAD, y), LABELS)


# ------------------------------------------------------------------------------------------------------- embeddings


def padded(x, w):
    return F.embedding(rows_of(x, 4, 7), w, padding_idx=1).tanh() * x[..., None]


@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
@pytest.mark.parametrize("style", ["module", "functional", "sparse"])
def test_the_padding_row_is_a_constant(kind, style):
    """Products do not depend on a vector's entries there, have none, and are right in all others."""
    build = {
        "module": lambda: Inner(embedded, nn.Embedding(7, 3, padding_idx=1)),
        "sparse": lambda: Inner(embedded, nn.Embedding(7, 3, padding_idx=1, sparse=True)),
        "functional": lambda: With(padded, 7, 3),
    }[style]
    (model, x, y), (other, *_) = model_of(Case(build, (4,))), model_of(Case(build, (4,)))
    for each in (model, other):
        with torch.no_grad():  # padding that says something
            next(each[1].parameters())[1] = 0.5
    reference = Reference(other, x, y, F.cross_entropy, CHUNKS)
    operator = kind(Pipe(model, [2, 1], CHUNKS), (x, y), F.cross_entropy)
    vec = torch.randn(operator.shape[0], dtype=torch.float64)
    start = sum(parameter.numel() for parameter in model[0].parameters()) + 3
    padding = slice(start, start + 3)
    zeroed = vec.clone()
    zeroed[padding] = 0
    expected = reference.hessian(zeroed) if kind is Hessian else reference.gauss_newton(zeroed)
    found = operator @ vec
    assert not expected[padding].any() and expected[start + 3 : start + 6].all()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert torch.equal(found, operator @ zeroed)
    assert not found[padding].any()


def stored_as(layout, x):
    return x.to_sparse(layout=layout)


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_sparse_values_between_stages_have_tangents_for_the_entries_that_they_store(layout, activation):
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(6, 4), activation(), Apply(partial(stored_as, layout)))
    model = nn.Sequential(first, nn.Sequential(Apply(torch.Tensor.to_dense), nn.Tanh(), nn.Linear(4, 3))).double()
    x, y = data(Case(nn.Tanh))
    reference = Reference(copy.deepcopy(model), x, y, F.cross_entropy, CHUNKS)
    pipe = Pipe(model, [1, 1], CHUNKS, devices=["cpu"] * 2)
    vec = torch.randn(sum(each.numel() for each in model.parameters()), dtype=torch.float64)
    for kind, expected in ((Hessian, reference.hessian(vec)), (GaussNewton, reference.gauss_newton(vec))):
        torch.testing.assert_close(kind(pipe, (x, y), F.cross_entropy) @ vec, expected, rtol=1e-6, atol=1e-9)


# --------------------------------------------------------------------------------------------- what users put around it


def hooked(layer):
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    layer.register_forward_hook(lambda module, args, out: out.sin())
    return layer


def watched(layer):
    layer.register_full_backward_pre_hook(lambda module, grads: None)
    layer.register_full_backward_hook(lambda module, before, after: None)
    return layer


def energy(layer):
    """The gradient of an inner network: forces."""
    return Inner(lambda inner, x: torch.func.grad(lambda z: inner(z).sin().sum())(x), layer)


def forces(layer):
    return Inner(
        lambda inner, x: torch.autograd.grad(inner(x).sin().sum(), x, create_graph=True)[0], layer
    )


def mapped(layer):
    return Inner(lambda inner, x: torch.vmap(inner)(x.sin()), layer)


def pushed(layer):
    return Inner(lambda inner, x: torch.func.jvp(inner, (x,), (x.sin(),))[1], layer)


def checkpointed(layer):
    return Inner(partial(torch.utils.checkpoint.checkpoint, use_reentrant=False), layer)


def compiled(layer):
    return torch.compile(layer, backend="eager")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
@pytest.mark.parametrize("put", [hooked, watched, energy, forces, mapped, pushed, checkpointed, compiled])
def test_what_is_put_around_a_layer_is_differentiated_too(put):
    check(Case(lambda: put(nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8)))))


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
def test_hooks_on_saved_tensors_around_a_product_do_not_change_it(kind, mode):
    model, x, y = model_of(OPERATORS["LayerNorm"])
    operator = kind(Pipe(model, [1, 1, 1], CHUNKS, checkpoint=mode), (x, y), F.cross_entropy)
    vec = torch.randn(operator.shape[0], dtype=torch.float64)
    expected, packed = operator @ vec, []

    def pack(tensor):
        packed.append(tensor.numel())
        return tensor.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = operator @ vec
    assert packed
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(operator @ vec, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("attention_kind", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_blocks_of_transformers_are_right(family, attention_kind):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "Llama": dict(
            hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=11, max_position_embeddings=8,
        ),
        "GPT2": dict(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8),
    }[family]
    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation=attention_kind, use_cache=False)

    def build():
        inner = getattr(transformers, f"{family}Model")(config)
        table = inner.embed_tokens if family == "Llama" else inner.wte
        table.requires_grad_(False)  # embeddings come from the stage before
        return Inner(lambda net, x: net(inputs_embeds=x).last_hidden_state, inner)

    check(Case(build, (4, 8), rough=family == "Llama"))  # its RMSNorm computes in float32
