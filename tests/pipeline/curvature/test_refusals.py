"""What has no second derivative, or a wrong one in torch, is refused: with the stage, the operation and a remedy.

    before any forward     modules that say it of themselves
    at the first chunk     what a stage's graph shows, or what torch says when it is asked
    by numbers             autograd.Functions whose backward forgets what it depends on

That everything else is right: test_operators.py.
"""

import re

import numpy
import pytest
import torch
from pipeline_probes import outside
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from pipeline import Pipe, is_recomputing
from pipeline.common.twice import explained
from pipeline.curvature import EmpiricalFisher, GaussNewton, Hessian
from pipeline.curvature.known_bad import refuse_modules, twice_differentiable

KINDS = [Hessian, GaussNewton, EmpiricalFisher]
CUTS = [(1, 2), (2, 1), (1, 1, 1)]
ROWS = 5
every_kind = pytest.mark.parametrize("kind", KINDS)
every_cut = pytest.mark.parametrize("cut", CUTS, ids=str)


class Apply(nn.Module):
    """`function` of the input and of weights of these shapes; counts its forwards."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(shape) for shape in shapes])
        self.function = function
        self._calls = outside([])  # of what hangs on the module a product leaves no trace

    def forward(self, x):
        if not is_recomputing():
            self._calls().append(1)
        return self.function(x, *self.weights)

    @property
    def calls(self):
        return len(self._calls())


def model_of(middle, *shape):
    """Parameters before and behind; any layer's output is read as 3 numbers a row."""
    size = int(numpy.prod(shape or (8,)))
    first = nn.Sequential(nn.Linear(6, size), nn.Unflatten(1, shape or (8,)))
    last = nn.Sequential(Apply(lambda x: x.reshape(len(x), -1)[:, :3]), nn.Linear(3, 3))
    return nn.Sequential(first, middle, last).double()


def product(
    kind, middle, cut=(2, 1), shape=(8,), loss_fn=F.cross_entropy, chunks=3, training=False, mixes_rows=False
):
    torch.manual_seed(1)
    model = model_of(middle, *shape)
    x, y = torch.randn(ROWS, 6, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0])
    operator = kind(Pipe(model, list(cut), chunks, mixes_rows=mixes_rows), (x, y), loss_fn, training=training)
    return operator @ torch.randn(operator.shape[0], dtype=torch.float64)


# -------------------------------------------------------------------------------------------- before anything has run


def plain_batch_norm():
    return nn.BatchNorm1d(8, track_running_stats=False)


MODULES = {
    "Embedding max_norm": (lambda: nn.Embedding(7, 3, max_norm=0.5), False, "'1.1' has max_norm=0.5.*Renormalise"),
    "EmbeddingBag max_norm": (lambda: nn.EmbeddingBag(7, 3, max_norm=0.5), False, "'1.1' has max_norm=0.5.*no_grad"),
    "Embedding scaled": (
        lambda: nn.Embedding(7, 3, scale_grad_by_freq=True), False,
        "'1.1' has scale_grad_by_freq=True.*not be symmetric. Set scale_grad_by_freq to False",
    ),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(8), True, r"'1.1' \(BatchNorm1d\) normalises.*training=False.*chunks=1"),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(2), True, r"'1.1' \(BatchNorm2d\) normalises.*training=False.*chunks=1"),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(8), True, r"'1.1' \(SyncBatchNorm\) normalises.*chunks=1"),
    "BatchNorm without running statistics": (plain_batch_norm, False, r"'1.1' \(BatchNorm1d\) normalises.*chunks=1"),
    "spectral_norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), True,
        r"'1.1.parametrizations.weight.0' has spectral_norm.*training=False",
    ),
    "spectral_norm, old style": (
        lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), True, "'1.1' has spectral_norm.*training=False",
    ),
}


@every_kind
@pytest.mark.parametrize("name", MODULES)
def test_modules_that_cannot_be_right_are_refused_before_any_forward(name, kind):
    build, training, words = MODULES[name]
    counted = Apply(lambda x: x)
    with pytest.raises(ValueError, match=words):
        product(kind, nn.Sequential(counted, build()), training=training)
    assert counted.calls == 0


@every_kind
def test_cached_parametrizations_change_nothing(kind):
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    wanted = product(kind, layer)
    with parametrize.cached():
        assert torch.equal(product(kind, layer), wanted)


def test_what_is_harmless_is_not_refused():
    """Batch norms in eval mode or of one chunk; spectral norms in eval mode; embeddings that only look up."""
    modules = [
        nn.BatchNorm1d(8).eval(),
        nn.InstanceNorm1d(8),
        nn.Embedding(7, 3, padding_idx=1),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)).eval(),
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    ]
    refuse_modules([(str(number), each) for number, module in enumerate(modules) for each in module.modules()], 3)
    refuse_modules([("0", nn.BatchNorm1d(8)), ("1", plain_batch_norm())], 1)


class WrittenOut(nn.Module):
    """A batch norm of another class than torch's: nothing but what it computes tells that it is one."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))

    def forward(self, x):
        if not self.training:
            return (x - self.mean) / self.var.sqrt()
        mean, var = x.mean(0), x.var(0)
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
            self.var.lerp_(var, 0.1)
        return (x - mean) / var.sqrt()


@pytest.mark.probes
@every_kind
@every_cut
@pytest.mark.parametrize("shape, chunks", [((8,), 2), ((2, 3, 3), 3), ((2, 3, 3), ROWS)], ids=str)
def test_a_batch_norm_function_over_several_chunks_is_refused(shape, chunks, cut, kind):
    """Also where a chunk has one row, and it looks like an instance norm; also in a layer that draws."""
    middle = Apply(lambda x: F.batch_norm(x, None, None, training=True))
    with pytest.raises(ValueError, match="layer 1 .*mixes the rows of the mini-batch.*chunks=1"):
        product(kind, middle, cut, shape, chunks=chunks)
    with pytest.raises(ValueError, match="layer 1 .*mixes the rows of the mini-batch in train mode.*chunks=1"):
        product(kind, DropsAndNorms(), cut, shape, chunks=chunks, training=True)


class DropsAndNorms(nn.Module):
    def forward(self, x):
        return F.batch_norm(F.dropout(x, 0.1), None, None, training=True) if self.training else x


@pytest.mark.probes
@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
@pytest.mark.parametrize("build", [
    lambda: nn.BatchNorm1d(8), plain_batch_norm, lambda: WrittenOut(8),
    lambda: Apply(lambda x: F.batch_norm(x, None, None, training=True)),
])  # fmt: skip
def test_chunks_that_may_be_computed_by_themselves_are_as_mini_batches(build, kind):
    torch.manual_seed(1)
    model = model_of(build(), 8)
    x, y = torch.randn(6, 6, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0, 2])
    once = kind(Pipe(model, [2, 1], 1), [(x[:3], y[:3]), (x[3:], y[3:])], F.cross_entropy, training=True)
    both = kind(Pipe(model, [2, 1], 2, mixes_rows=True), (x, y), F.cross_entropy, training=True)
    v = torch.randn(both.shape[0], dtype=torch.float64)
    torch.testing.assert_close(both @ v, once @ v, rtol=1e-10, atol=1e-12)


@pytest.mark.probes
def test_a_batch_norm_of_a_weight_mixes_no_rows():
    """Standardised convolutions are written so."""
    class Standardised(nn.Conv2d):
        def forward(self, x):
            weight = F.batch_norm(self.weight.reshape(1, 2, -1), None, None, training=True).reshape_as(self.weight)
            return F.conv2d(x, weight, self.bias, padding=1)

    convolution = Standardised(2, 2, 3)
    torch.testing.assert_close(*[on_data(convolution, chunks) for chunks in (3, 1)])


class Renamed(nn.BatchNorm1d):
    """Compiled, it has no base class, and another name than torch's."""


@pytest.mark.probes
@every_kind
@pytest.mark.parametrize("build", [WrittenOut, lambda size: torch.jit.script(Renamed(size))], ids=["own", "compiled"])
def test_another_batch_norm_that_writes_its_statistics_is_refused_over_several_chunks(build, kind):
    """Though a step takes it, as it does torch's; also after one."""
    with pytest.raises(ValueError, match="layer 1 .*mixes the rows of the mini-batch in train mode.*chunks=1"):
        product(kind, build(8), training=True)
    assert product(kind, build(8), training=True, chunks=1).isfinite().all()
    once, cut = [product(kind, build(8), chunks=chunks) for chunks in (1, 2)]
    torch.testing.assert_close(cut, once)
    pipe = Pipe(model_of(build(8), 8), [2, 1], 2)
    x, y = torch.randn(ROWS, 6, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0])
    pipe.step(x, y, loss_fn=F.cross_entropy)
    with pytest.raises(ValueError, match="layer 1 .*mixes the rows of the mini-batch in train mode"):
        kind(pipe, (x, y), F.cross_entropy, training=True).gradient()


@pytest.mark.parametrize("chunks", [2, ROWS])
@pytest.mark.parametrize("affine", [True, False])
def test_an_instance_norm_is_no_batch_norm(affine, chunks):
    found = product(Hessian, nn.InstanceNorm2d(2, affine=affine), shape=(2, 3, 3), chunks=chunks)
    once = product(Hessian, nn.InstanceNorm2d(2, affine=affine), shape=(2, 3, 3), chunks=1)
    torch.testing.assert_close(found, once)


def on_data(layer, chunks):
    """A normalisation of what the mini-batch is made of, which needs no gradient."""
    torch.manual_seed(1)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(18, 3)).double()
    data = torch.randn(ROWS, 2, 3, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0])
    operator = Hessian(Pipe(model, [1, 2], chunks), data, F.cross_entropy)
    return operator @ torch.randn(operator.shape[0], dtype=torch.float64)


@pytest.mark.probes
def test_on_data_too_an_instance_norm_is_no_batch_norm():
    found, once = [on_data(nn.InstanceNorm2d(2, affine=True), chunks) for chunks in (3, 1)]
    torch.testing.assert_close(found, once)
    normed = Apply(lambda x, w: F.batch_norm(x, None, None, w, training=True), (2,))
    for chunks in (3, ROWS):
        with pytest.raises(ValueError, match="layer 0 .*mixes the rows of the mini-batch"):
            on_data(normed, chunks)


def test_a_batch_norm_of_the_loss_over_several_chunks_is_refused():
    """Also where the loss returns (sum, count), which is taken at its word otherwise; and by a Fisher of one chunk."""
    def loss(y, target):
        return F.cross_entropy(F.batch_norm(y, None, None, training=True), target, reduction="sum"), len(target)

    data = torch.randn(ROWS, 8, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0])
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)).double()
    assert Hessian(Pipe(model, [1, 1]), data, loss).gradient()
    with pytest.raises(ValueError, match="compares rows with each other cannot be cut into chunks: .* chunks=1"):
        Hessian(Pipe(model, [1, 1], 2), data, loss).gradient()
    for chunks in (1, 2):
        with pytest.raises(ValueError, match="the loss of a row depends on other rows"):
            EmpiricalFisher(Pipe(model, [1, 1], chunks), data, loss) @ torch.ones(99, dtype=torch.float64)


BIASED = {
    "layer norm": lambda x, w, b: F.layer_norm(x, (3,), None if w is None else w[0, 0], b[0, 0]),
    "batch norm": lambda x, w, b: F.batch_norm(
        x, torch.zeros(2).double(), torch.ones(2).double(), None if w is None else w[:, 0, 0], b[:, 0, 0]
    ),
    "instance norm": lambda x, w, b: F.instance_norm(x, None, None, None if w is None else w[:, 0, 0], b[:, 0, 0]),
    "group norm": lambda x, w, b: F.group_norm(x, 2, None if w is None else w[:, 0, 0], b[:, 0, 0]),
}


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", BIASED)
def test_a_norm_with_a_bias_alone_is_refused_and_one_with_a_weight_is_right(name, chunks, number):
    """Also where the weight is a constant, and where the norm's input is the model's."""
    norm = BIASED[name]
    torch.manual_seed(1)
    weight, y = torch.ones(2, 3, 3).double(), torch.tensor([0, 2, 1, 1, 0])
    alone, weighted = Apply(lambda x, b: norm(x, None, b), (2, 3, 3)), Apply(lambda x, b: norm(x, weight, b), (2, 3, 3))
    tail = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)).double()
    data = torch.randn(ROWS, 2, 3, 3, dtype=torch.float64), y
    first = nn.Conv2d(2, 2, 1)
    for layers in [weighted], [first, weighted], [alone], [first, alone]:
        model = nn.Sequential(*layers, tail).double()
        operator = Hessian(Pipe(model, [len(layers), 1], chunks), data, F.cross_entropy)
        vector = torch.ones(operator.shape[0], number, dtype=torch.float64)
        if alone in layers:
            words = r"stage 0 .*a norm with a bias and without a weight.*layer_norm\(x, shape\) \+ bias"
            with pytest.raises(ValueError, match=words):
                operator @ vector
        else:
            torch.testing.assert_close(operator @ vector, doubled(model, data, vector))


def doubled(model, data, vectors):
    """Products by double backward through the plain module."""
    x, y = data
    parameters = list(model.parameters())
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), parameters, create_graph=True)
    flat = torch.cat([grad.flatten() for grad in grads])
    products = [torch.autograd.grad(flat, parameters, vector, retain_graph=True) for vector in vectors.T]
    return torch.stack([torch.cat([part.flatten() for part in product]) for product in products], 1)


# ------------------------------------------------------------------------------------------- what a stage's graph shows


def rows_of(x, columns=8, count=7):
    return ((torch.arange(columns) * 3 + 1) % count).expand(len(x), columns)


def flash(x):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(x, x, x)


OPERATIONS = {
    "torch._weight_norm": (
        lambda: Apply(lambda x, v, g: x @ torch._weight_norm(v, g, 0), (8, 4), (8, 1)), (8,),
        "calls torch._weight_norm, whose second derivative is wrong.*parametrizations.weight_norm",
    ),
    "F.embedding scaled": (
        lambda: Apply(lambda x, w: F.embedding(rows_of(x), w, scale_grad_by_freq=True)[..., 0] * x, (7, 3)), (8,),
        "scale_grad_by_freq=True.*Set scale_grad_by_freq to False",
    ),
    "EmbeddingBag": (
        lambda: Apply(lambda x, w: F.embedding_bag(rows_of(x, 4), w) * x[:, :3], (7, 3)), (8,),
        "embedding_bag.*Use nn.Embedding and sum or average",
    ),
    "flash attention by hand": (lambda: Apply(flash), (2, 3, 4), "scaled_dot_product.*SDPBackend.MATH, or eager"),
    "F.hardsigmoid": (lambda: Apply(F.hardsigmoid), (8,), r"hardsigmoid.*torch.clamp\(x / 6 \+ 0.5, 0, 1\)"),
    "cdist": (lambda: Apply(torch.cdist, (4, 8)), (8,), r"cdist.*Write it out: \(x\[:, None\] - y\[None\]\)"),
    "pdist": (
        lambda: Apply(lambda x: torch.stack([F.pdist(each) for each in x])), (3, 4), r"pdist.*Write it out: \(x\[:"
    ),
    "CrossMapLRN2d": (lambda: nn.CrossMapLRN2d(2), (2, 3, 3), "out=.*nn.LocalResponseNorm for nn.CrossMapLRN2d"),
    "segment_reduce": (
        lambda: Apply(lambda x: x * torch.segment_reduce(x.T.contiguous(), "sum", lengths=torch.tensor([8])).T),
        (8,), "segment_reduce.*Write it out in other operations",
    ),
    "checkpoint, reentrant": (
        lambda: Apply(lambda x: checkpoint(torch.tanh, x, use_reentrant=True)), (8,),
        "use_reentrant=True, which autograd cannot.*Use use_reentrant=False",
    ),
}


def length(difference):
    return difference.square().sum(-1).sqrt()


# What forward mode can do without a second derivative, from torch 2.14 on, and the same written out.
WRITTEN_OUT = {
    "cdist": lambda: Apply(lambda x, y: length(x[:, None] - y[None]), (4, 8)),
    "pdist": lambda: Apply(lambda x: length(x[:, [0, 0, 1]] - x[:, [1, 2, 2]])),
}


@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
@pytest.mark.parametrize("cut", CUTS[:2], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_without_a_second_derivative_is_refused_with_its_stage_and_a_remedy(name, cut, kind):
    build, shape, words = OPERATIONS[name]
    stage = 1 if cut[0] == 1 else 0
    refused_or_right(
        lambda: product(kind, seeded(build), cut, shape), f"(?s)stage {stage} .*{words}",
        lambda: product(kind, seeded(WRITTEN_OUT[name]), cut, shape) if kind is GaussNewton else None,
    )  # fmt: skip


def seeded(build):
    torch.manual_seed(2)
    return build()


def refused_or_right(made, words, wanted):
    """`made` is refused in these words, or is what `wanted` makes."""
    try:
        found = made()
    except (ValueError, RuntimeError) as error:
        assert re.search(words, str(error)), error
    else:
        torch.testing.assert_close(found, wanted())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
def test_a_compiled_layer_is_refused_where_it_brings_its_own_backward():
    """From torch 2.14 on there is none where nothing before it has parameters: forward mode goes through it."""
    layer = seeded(lambda: nn.Sequential(nn.Linear(8, 4), nn.Tanh()))
    refused_or_right(
        lambda: product(Hessian, torch.compile(layer, backend="aot_eager")),
        "(?s)stage 0 .*double backward.*before torch.compile", lambda: product(Hessian, layer),
    )  # fmt: skip


def ctc(out, y):
    steps = (out[:, None] * torch.linspace(-1, 1, 6, dtype=out.dtype)[:, None]).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(out),), 6)
    return F.ctc_loss(steps, y[:, None] % 2 + 1, lengths, lengths // 6, reduction="sum") / len(out)


@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
@pytest.mark.parametrize(
    "loss_fn, words",
    [
        (ctc, "ctc_loss.*Use EmpiricalFisher, or write the loss out"),
        (F.multi_margin_loss, "multi_margin_loss.*Write it out in other operations"),
    ],
)
def test_a_loss_without_a_second_derivative_is_refused(loss_fn, words, kind):
    with pytest.raises(RuntimeError, match=f"stage 1 .*without a second derivative.*{words}"):
        product(kind, nn.Tanh(), loss_fn=loss_fn)


def test_the_empirical_fisher_of_a_loss_without_a_second_derivative_is_there():
    assert bool(product(EmpiricalFisher, nn.Tanh(), loss_fn=ctc).any())


@every_kind
@every_cut
def test_a_forward_that_writes_its_weight_is_an_error_that_names_it(cut, kind):
    middle = Apply(lambda x, w: F.embedding(rows_of(x), w, max_norm=0.5)[..., 0] * x, (7, 3))
    with pytest.raises(RuntimeError, match=r"parameter '1.weights.0' .*was changed in place"):
        product(kind, middle, cut)


# ---------------------------------------------------------------------------------------------------------- messages

SAID = {
    "derivative for aten::_scaled_dot_product_efficient_attention_backward is not implemented": "SDPBackend.MATH",
    "the derivative for '_cudnn_rnn_backward' is not implemented. Double backwards is not supported": "cudnn.enabled",
    "derivative for flex_attention_backward is not implemented": "scaled_dot_product_attention",
    "double backwards on roi_align not supported": "Write it out in other operations",
    "trying to differentiate twice a function that was marked with @once_differentiable": "Write it out",
    "derivative for aten::_ctc_loss_backward is not implemented": "EmpiricalFisher",
}


@pytest.mark.parametrize("text", SAID)
def test_what_torch_says_about_missing_derivatives_is_said_with_the_stage_and_a_remedy(text):
    """Also of what this machine may not run."""
    said = str(explained(RuntimeError(text), "stage 3 (layer 7)"))
    assert said.startswith("stage 3 (layer 7) has an operation without a second derivative: " + text.rstrip("."))
    assert SAID[text] in said.removeprefix("stage 3 (layer 7) has an operation without a second derivative: " + text)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("not implemented: derivative")])
def test_other_errors_stay_as_they_are(error):
    assert explained(error, "stage 0") is error


# ------------------------------------------------------------------------------------------------ autograd.Functions


class Cube(torch.autograd.Function):
    """x^3, whose `slope` gets ctx and the gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.kept = x**2
        ctx.numbers = x.detach().numpy().copy()
        return x**3


class Once(Cube):
    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


class Numpy(Cube):
    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(3 * ctx.numbers**2 * grad.detach().numpy())


class Detached(Cube):
    @staticmethod
    def backward(ctx, grad):
        return (3 * ctx.saved_tensors[0] ** 2 * grad).detach()


class NoGrad(Cube):
    @staticmethod
    def backward(ctx, grad):
        with torch.no_grad():
            return 3 * ctx.saved_tensors[0] ** 2 * grad


class Kept(Cube):
    """pytorch/pytorch#76185: an intermediate on ctx has no graph."""

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.kept * grad


class KeptNumbers(Cube):
    @staticmethod
    def backward(ctx, grad):
        return 3 * torch.from_numpy(ctx.numbers) ** 2 * grad


class Reversed(torch.autograd.Function):
    """Its backward is that of another function."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -grad


def alone(function):
    return Apply(function.apply)


def beside(function):
    """So that the gradient has a graph all the same."""
    return Apply(lambda x: x.sin() + function.apply(x))


def linear(out, y):
    return out.sum(1).mean()


around = pytest.mark.parametrize("put", [alone, beside])


@every_kind
@every_cut
@around
@pytest.mark.parametrize("loss_fn", [F.cross_entropy, linear])
def test_once_differentiable_is_refused_at_the_first_chunk_whatever_the_matrix_and_the_loss(loss_fn, put, cut, kind):
    middle = put(Once)
    with pytest.raises(ValueError, match="(?s)stage . .*marked @once_differentiable.*take the mark away"):
        product(kind, middle, cut, loss_fn=loss_fn)
    assert middle.calls <= 2  # by forward mode first


@every_kind
@every_cut
@around
@pytest.mark.parametrize("function", [Numpy, Detached, NoGrad])
def test_a_backward_that_autograd_cannot_follow_is_refused(function, put, cut, kind):
    with pytest.raises((ValueError, RuntimeError), match="stage . .*(backward cannot be diff|finite differences)"):
        product(kind, put(function), cut)


@every_cut
@around
@pytest.mark.parametrize("function, loss_fn", [(Kept, F.cross_entropy), (Kept, linear), (KeptNumbers, F.cross_entropy)])
def test_a_backward_that_forgets_what_it_depends_on_is_found_by_finite_differences(function, loss_fn, put, cut):
    with pytest.raises(ValueError, match="stage . .*finite differences"):
        product(Hessian, put(function), cut, loss_fn=loss_fn)


@every_cut
@pytest.mark.parametrize("kind", [GaussNewton, EmpiricalFisher])
@pytest.mark.parametrize("function", [Kept, KeptNumbers])
def test_what_needs_first_derivatives_alone_is_right_with_such_a_backward(function, kind, cut):
    torch.testing.assert_close(product(kind, alone(function), cut), product(kind, Apply(lambda x: x**3), cut))


@every_kind
@every_cut
def test_a_backward_that_is_another_functions_is_found_by_finite_differences(cut, kind):
    with pytest.raises(ValueError, match="stage . .*finite differences"):
        product(kind, alone(Reversed), cut)


@every_cut
def test_a_backward_hook_that_changes_gradients_is_found_by_finite_differences(cut):
    layer = nn.Linear(8, 8)
    layer.register_full_backward_hook(lambda module, before, after: (before[0] * 2,))
    with pytest.raises(ValueError, match="stage . .*finite differences.* a backward hook that changes gradients"):
        product(Hessian, layer, cut)


@every_cut
def test_an_operation_of_a_library_is_asked_too(cut):
    with torch.library._scoped_library("curvature_refusals", "FRAGMENT"):

        @torch.library.custom_op("curvature_refusals::cube", mutates_args=())
        def cube(x: torch.Tensor) -> torch.Tensor:
            return x**3

        def slope(ctx, grad):
            return 3 * ctx.saved_tensors[0].detach() ** 2 * grad

        def keep(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        cube.register_autograd(slope, setup_context=keep)
        with pytest.raises(ValueError, match="stage . .*finite differences"):
            product(Hessian, Apply(cube), cut)


@pytest.mark.parametrize("before", range(5))
def test_the_first_product_asks_however_often_the_pipe_has_run(before):
    model = model_of(alone(Kept))
    pipe = Pipe(model, [2, 1], 2)
    x, y = torch.randn(ROWS, 6, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0])
    for _ in range(before):
        pipe(x).sum().backward()
    operator = Hessian(pipe, (x, y), F.cross_entropy)
    with pytest.raises(ValueError, match="finite differences"):
        operator @ torch.randn(operator.shape[0], dtype=torch.float64)


# ------------------------------------------------------------------------------------------------- what is left behind


def switches():
    return [
        torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(), torch.backends.cudnn.enabled,
    ]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("raises", [True, False])
def test_switches_and_modules_are_as_they_were_after_a_product_and_after_an_error(raises):
    layers = [
        nn.Hardsigmoid(), nn.utils.weight_norm(nn.Linear(8, 8)), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        Apply(F.hardsigmoid if raises else torch.sigmoid),
    ]
    middle = nn.Sequential(*layers)
    layers[0].unused = nn.GRU(8, 8)
    hook = next(iter(layers[1]._forward_pre_hooks.values()))
    torch.backends.cuda.enable_math_sdp(False)
    try:
        before, names = switches(), [set(vars(module)) for module in [*middle.modules(), hook]]
        if raises:
            with pytest.raises(RuntimeError, match="hardsigmoid"):
                product(Hessian, middle)
        else:
            product(Hessian, middle)
        assert switches() == before
        assert [set(vars(module)) for module in [*middle.modules(), hook]] == names
    finally:
        torch.backends.cuda.enable_math_sdp(True)


@pytest.mark.parametrize("outputs, shapes", [
    (lambda x: (x, x[:3]), r"\[\[5, 8\], \[3, 8\]\]"), (lambda x: x.sum(0)[:7], r"\[\[7\]\]"),
], ids=["unlike", "summed"])  # fmt: skip
def test_the_empirical_fisher_of_outputs_without_rows_is_refused(outputs, shapes):
    class Outputs(nn.Linear):
        def forward(self, x):
            return outputs(super().forward(x))

    def loss(output, y):
        return sum(part.sum() for part in (output if isinstance(output, tuple) else (output,)))

    fisher = EmpiricalFisher(nn.Sequential(Outputs(8, 8)), (torch.randn(ROWS, 8), torch.randn(ROWS, 8)), loss)
    with pytest.raises(ValueError, match=f"the output has shapes {shapes} for 5 rows of input. The empirical Fish"):
        fisher @ torch.ones(72)


def test_within_a_product_only_what_can_be_differentiated_twice_is_on():
    with twice_differentiable([nn.GRU(3, 3)]):
        assert switches() == [False, False, False, True, False, False]
    with twice_differentiable([nn.Linear(3, 3)]):
        assert switches() == [False, False, False, True, False, True]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_what_a_user_put_into_a_module_stays():
    layer, normed = nn.Hardsigmoid(), nn.utils.weight_norm(nn.Linear(8, 8))
    hook = next(iter(normed._forward_pre_hooks.values()))
    layer.forward = torch.tanh
    hook.compute_weight = compute_weight = lambda module: module.weight_v.tanh()
    product(Hessian, nn.Sequential(layer, normed))
    assert layer.forward is torch.tanh and hook.compute_weight is compute_weight
    torch.testing.assert_close(product(Hessian, layer), product(Hessian, nn.Tanh()))
