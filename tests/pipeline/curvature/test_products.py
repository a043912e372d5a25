"""Is the Hessian, Gauss-Newton or Fisher matrix of a Pipe that of the plain module, and is nothing else left changed?

The reference is curvature_reference.py: whole-graph double backward of the plain module, chunk by chunk.
"""

import copy
import itertools
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import product

import numpy
import pytest
import torch
from cover import examples, pairwise
from curvature_reference import Loss, forward, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from law_check import CHECKPOINTS, DRIVES, balance_of
from law_models import MODELS, Apply, normal, per_row, sum_loss
from pipeline_probes import outside
from skip_models import SKIPS
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from pipeline import Pipe
from pipeline.curvature import EmpiricalFisher, GaussNewton, Hessian

MATRICES = {"Hessian": Hessian, "GaussNewton": GaussNewton, "EmpiricalFisher": EmpiricalFisher}
CASES = {name: build for name, build in {**MODELS, **SKIPS}.items() if name != "checkpoint_reentrant"}
TWO_A_LANE = ("interleaved", "zb-v", "looped-bfs")
SEED = 9
AXES = {
    "name": tuple(CASES),
    "matrix": tuple(MATRICES),
    "balance": ("whole", "first alone", "last alone", "halves", "each alone"),
    "chunks": (1, 2, 3, 5),
    "rows": (1, 2, 5, 7),
    "schedule": ("gpipe", "1f1b", "zb-h1", *TWO_A_LANE),
    "checkpoint": tuple(CHECKPOINTS),
    "drive": tuple(DRIVES),
    "training": (True, False, None),
    "block": (1, 4),  # of one product tangents come by forward mode
}
every_matrix = pytest.mark.parametrize("matrix", MATRICES)
SUM = Loss(lambda out, y: sum_loss(out), lambda out, y: per_row(out), "sum")
MSE = Loss(functional.mse_loss, lambda out, y: (out - y).square().flatten(1).mean(1))
CE = Loss(functional.cross_entropy, lambda out, y: functional.cross_entropy(out, y, reduction="none"))


def close(found, wanted, rtol=1e-10):
    """Equal relative to the largest entry."""
    assert found.shape == wanted.shape
    error, scale = float((found - wanted).abs().max()), float(wanted.abs().max()) or 1.0
    assert error <= rtol * scale


def flat(named):
    return torch.cat([part.flatten() for part in named.values()])


def columns(count, number=2, seed=3):
    return normal(count, number, seed=seed)


def entries(module):
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def sized(balance, schedule, layers):
    """The layers of each stage, an even number of stages where the schedule needs that."""
    sizes = balance_of(balance, layers)
    if schedule in TWO_A_LANE and len(sizes) % 2:
        return [layers - layers // 2, layers // 2] if len(sizes) == 1 else [sizes[0] + sizes[1], *sizes[2:]]
    return sizes


def small(*extra):
    """A curve, a mask, four layers."""
    torch.manual_seed(20)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 3), *extra).double()


def rows_of(count=7, width=3):
    return normal(count, width), torch.arange(count) % 3


def piped(model=None, chunks=3, checkpoint="always", **what):
    model = small() if model is None else model
    half = len(model) // 2
    return Pipe(model, [half, len(model) - half] if half else [1], chunks, checkpoint=checkpoint, **what)


def agree(build, data, loss, chunks=3, train=False, pipe_of=piped):
    """Products with three random vectors, gradient and loss of a Pipe equal the plain module's."""
    vectors = columns(entries(build()), 3)
    wanted = truth(build().train(train), data, loss, vectors, chunks=chunks, seed=SEED)
    reduction = "sum" if loss.kind == "sum" else None
    for matrix in MATRICES:
        pipe = pipe_of(build(), chunks)
        op = MATRICES[matrix](pipe, data, loss.whole, training=train, seed=SEED, loss_reduction=reduction)
        close(op @ vectors, wanted.products[matrix])
        close(op @ vectors[:, 0], wanted.products[matrix][:, 0])  # one alone: its tangents come by forward mode
        close(flat(op.gradient()), wanted.gradient)
    assert float(op.loss()) == pytest.approx(wanted.loss, rel=1e-12)


# ------------------------------------------------------------------------------------------------------------- the laws


@cache
def expected(name, chunks, rows, train):
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        case = CASES[name]()
        vectors = columns(entries(case.model))
        data = [(case.make_input(rows), None)]
        return vectors, truth(case.model.train(train), data, SUM, vectors, chunks=min(chunks, rows), seed=SEED)


def check(config):
    case = CASES[config["name"]]()
    sizes = sized(config["balance"], config["schedule"], len(case.model))
    pipe = Pipe(
        case.model, sizes, config["chunks"], checkpoint=CHECKPOINTS[config["checkpoint"]],
        schedule=config["schedule"], mixes_rows=not case.rowwise, **DRIVES[config["drive"]](len(sizes)),
    )
    rows, train = config["rows"], config["training"] is not False
    chunks = min(config["chunks"], rows)
    pipe.train(config["training"] is None)  # the other mode than the one that is asked for
    op = MATRICES[config["matrix"]](
        pipe, (case.make_input(rows), None), SUM.whole, loss_reduction="sum", training=config["training"], seed=SEED,
        block=config["block"],
    )
    kinds = {type(module).__name__ for module in pipe.modules()}
    refused = "_SpectralNorm" in kinds or chunks > 1 and "BatchNorm2d" in kinds
    if train and refused:
        with pytest.raises(ValueError, match="normalises with the statistics of the rows|has spectral_norm"):
            op @ columns(entries(case.model))
        return
    vectors, wanted = expected(config["name"], chunks, rows, train)
    close(op @ vectors, wanted.products[config["matrix"]])


@pytest.mark.parametrize("config", pairwise(AXES), ids=lambda config: ", ".join(map(str, config.values())))
def test_products_equal_the_plain_modules_for_every_pair_of_settings(config):
    check(config)


@pytest.mark.soak
@pytest.mark.parametrize("training", AXES["training"])
@pytest.mark.parametrize("name", CASES)
def test_products_equal_the_plain_modules_for_every_setting(name, training):
    draw = random.Random(0)
    for values in product(*(AXES[axis] for axis in ("balance", "chunks", "schedule", "checkpoint"))):
        config = dict(zip(("balance", "chunks", "schedule", "checkpoint"), values, strict=True))
        others = {axis: draw.choice(AXES[axis]) for axis in ("matrix", "rows", "drive", "block")}
        check({"name": name, "training": training, **config, **others})


ACTIVATIONS = [nn.Tanh, nn.GELU, nn.Softplus, nn.Sigmoid, lambda: nn.Dropout(0.3), lambda: nn.ReLU(inplace=True)]


@settings(max_examples=examples(25))
@given(st.data())
def test_products_equal_the_plain_modules_for_random_networks(data):
    draw = data.draw
    widths = draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    kinds = draw(st.lists(st.sampled_from(ACTIVATIONS), min_size=len(widths), max_size=len(widths)))

    def build():
        torch.manual_seed(1)
        pairs = zip(widths, widths[1:], kinds, strict=False)
        return nn.Sequential(*(layer for a, b, kind in pairs for layer in (nn.Linear(a, b), kind()))).double()

    cuts = sorted(draw(st.sets(st.integers(1, 2 * len(widths) - 3), max_size=4))) if len(widths) > 2 else []
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, 2 * len(widths) - 2], strict=True)]
    schedules = [each for each in AXES["schedule"] if len(sizes) % 2 == 0 or each not in TWO_A_LANE]
    chunks, train = draw(st.integers(1, 4)), draw(st.booleans())
    pipe = Pipe(
        build(), sizes, chunks, schedule=draw(st.sampled_from(schedules)),
        checkpoint=CHECKPOINTS[draw(st.sampled_from(list(CHECKPOINTS)))],
        **DRIVES[draw(st.sampled_from(list(DRIVES)))](len(sizes)),
    )
    counts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    batches = [
        (normal(count, widths[0], seed=count), normal(count, widths[-1], seed=count + 9)) for count in counts
    ]
    vectors = columns(entries(pipe), draw(st.integers(1, 3)))
    wanted = truth(build().train(train), batches, MSE, vectors, chunks=chunks, seed=SEED)
    for name, matrix in MATRICES.items():
        op = matrix(pipe, batches, MSE.whole, training=train, seed=SEED, block=draw(st.integers(1, 3)))
        close(op @ vectors, wanted.products[name])


def test_the_reference_is_the_matrix_of_second_derivatives():
    """By torch's own functional.hessian and jacobian, which know no products."""
    model = small()
    x, y = rows_of()
    wanted = truth(model, [(x, y)], CE, chunks=2, seed=SEED)
    names, params = zip(*model.named_parameters(), strict=True)
    sizes = [param.numel() for param in params]
    start = torch.cat([param.detach().flatten() for param in params])

    def output(whole):
        parts = [part.view_as(param) for part, param in zip(whole.split(sizes), params, strict=True)]
        named = dict(zip(names, parts, strict=True))

        def swapped(index, layer):
            own = {key.partition(".")[2]: part for key, part in named.items() if key.startswith(f"{index}.")}
            return Apply(lambda h: functional_call(layer, own, (h,)))

        layers = [swapped(index, layer) for index, layer in enumerate(model)]
        return forward(nn.Sequential(*layers), x, 2, SEED)[0]

    hessian = torch.autograd.functional.hessian(lambda whole: CE.whole(output(whole), y), start)
    jacobian = torch.autograd.functional.jacobian(lambda whole: output(whole).flatten(), start)
    bend = torch.autograd.functional.hessian(lambda out: CE.whole(out.view(7, 3), y), output(start).flatten())
    rows = torch.autograd.functional.jacobian(lambda whole: CE.each(output(whole), y), start)
    close(wanted.products["Hessian"], hessian)
    close(wanted.products["GaussNewton"], jacobian.T @ bend @ jacobian)
    close(wanted.products["EmpiricalFisher"], rows.T @ rows / 7)


# --------------------------------------------------------------------------------------------------- what layers may do


def tied(apart):
    """One weight in two layers, of one stage or of two."""
    torch.manual_seed(2)
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    between = [nn.Tanh(), nn.Sigmoid()] if apart else [nn.Tanh()]
    after = [] if apart else [nn.Sigmoid(), nn.Linear(3, 3), nn.Tanh()]
    return nn.Sequential(one, *between, other, *after).double()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("drive", DRIVES)
def test_a_tied_weight_is_one_parameter_whose_parts_add_up(apart, drive):
    agree(
        lambda: tied(apart), [rows_of()], CE, train=True,
        pipe_of=lambda model, chunks: piped(model, chunks, **DRIVES[drive](2)),
    )


class Choosing(nn.Module):
    """Which of its parts computes depends on the data: each chunk has another one."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        return self.parts[int(x[0, -1].detach().abs()) % len(self.parts)](x)


def chunks_choose():
    """Three chunks, which choose part 0, 1 and 0."""
    x = normal(6, 3)
    x[:, -1] = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0])
    return x, torch.arange(6) % 3


@pytest.mark.parametrize("mode", CHECKPOINTS)
def test_a_parameter_that_only_some_chunks_use_has_their_curvature(mode):
    def build():
        torch.manual_seed(5)
        return nn.Sequential(Choosing(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 3)).double()

    agree(build, [chunks_choose()], CE, pipe_of=lambda model, chunks: piped(model, chunks, CHECKPOINTS[mode]))


class Captured(nn.Module):
    """Uses through a list a parameter that another stage's layer has registered."""

    def __init__(self, weight):
        super().__init__()
        self.held = [weight]

    def forward(self, x):
        return (x @ self.held[0]).tanh()


@pytest.mark.parametrize("mode", CHECKPOINTS)
@pytest.mark.parametrize("place", [0, 3])
def test_a_parameter_captured_by_a_layer_of_another_stage_has_both_its_paths(mode, place):
    def build():
        torch.manual_seed(5)
        owner = nn.Linear(3, 3)
        layers = [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)]
        layers[2 if place == 0 else 0] = owner
        layers.insert(place, Captured(owner.weight))
        model = nn.Sequential(*layers).double()
        model[place].held[0] = owner.weight
        return model

    agree(build, [rows_of()], CE, pipe_of=lambda model, chunks: piped(model, chunks, CHECKPOINTS[mode]))


class Inside(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_own_checkpoints_inside_layers_repeat_their_masks():
    def build():
        torch.manual_seed(5)
        inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.4), nn.Linear(4, 3))
        nested = Inside(nn.Sequential(nn.Linear(3, 3), Inside(nn.GELU())))
        return nn.Sequential(Inside(inner), nn.Tanh(), nested).double()

    agree(build, [rows_of()], CE, train=True)


@every_matrix
@pytest.mark.parametrize("stages", [1, 3])
def test_a_reentrant_checkpoint_is_refused_in_words(matrix, stages):
    case = MODELS["checkpoint_reentrant"]()
    pipe = Pipe(case.model, balance_of("whole" if stages == 1 else [1, 2, 2], 5), 2)
    op = MATRICES[matrix](pipe, (case.make_input(4), None), SUM.whole, loss_reduction="sum")
    with pytest.raises(RuntimeError, match=r"use_reentrant=True, which autograd cannot differentiate twice. Use use_"):
        op @ columns(entries(pipe))


@pytest.mark.parametrize("inner_mode", CHECKPOINTS)
def test_a_pipe_inside_a_pipe_has_the_plain_modules_curvature(inner_mode):
    def build(inner_of):
        torch.manual_seed(5)
        inside = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        first, last = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()
        return nn.Sequential(first, inner_of(inside), nn.Sigmoid(), last)

    inner = CHECKPOINTS[inner_mode]
    model = build(lambda inside: Pipe(inside, [2, 1], 2, checkpoint=inner))
    vectors = columns(entries(model))
    wanted = truth(build(lambda inside: inside), [rows_of()], CE, vectors, chunks=3)
    for name, matrix in MATRICES.items():
        op = matrix(piped(model), rows_of(), CE.whole)
        close(op @ vectors, wanted.products[name])


class ClipsGradients(nn.Module):
    def forward(self, x):
        y = x * 1.0
        if y.requires_grad:
            y.register_hook(lambda grad: grad.clamp(-0.3, 0.3))
        return y


@pytest.mark.parametrize("balance", [[4, 3], [1, 3, 3], [7]])
def test_a_hook_that_clips_longer_gradients_than_there_are_changes_no_product(balance):
    """The gradient from which tangents are computed in F is zero, and not, say, as long as the output."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), ClipsGradients(), nn.Linear(8, 8), nn.Tanh(), ClipsGradients(), nn.Linear(8, 3)
    ).double()  # fmt: skip
    plain = nn.Sequential(*[layer for layer in model if not isinstance(layer, ClipsGradients)])
    data = 3 * normal(6, 4), normal(6, 3, seed=2) / 9
    vector = torch.randn(sum(parameter.numel() for parameter in model.parameters()), dtype=torch.float64) / 1000
    close(*[Hessian(piece, data, functional.mse_loss) @ vector for piece in (Pipe(model, balance, 1), plain)])


def spectral():
    torch.manual_seed(5)
    return nn.Sequential(spectral_norm(nn.Linear(3, 4)), nn.Tanh(), spectral_norm(nn.Linear(4, 3))).double()


@pytest.mark.parametrize("chunks", [1, 3])
def test_spectral_norm_in_eval_mode_is_that_of_its_buffers(chunks):
    agree(spectral, [rows_of(), rows_of(4)], CE, chunks=chunks)


@every_matrix
@pytest.mark.parametrize("chunks", [1, 3])
def test_spectral_norm_in_train_mode_is_refused_in_words(matrix, chunks):
    op = MATRICES[matrix](piped(spectral(), chunks), rows_of(), CE.whole, training=True)
    with untouched(op.pipe), pytest.raises(ValueError, match=r"has spectral_norm, which .* \(training=False\)"):
        op @ columns(op.shape[0])


def normed():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    model(normal(20, 3, seed=8))
    return model


@pytest.mark.parametrize("train, chunks", [(False, 3), (True, 1)])
def test_batch_norm_by_running_statistics_or_by_those_of_one_chunk(train, chunks):
    agree(normed, [rows_of(), rows_of(5)], CE, chunks=chunks, train=train)


@every_matrix
def test_batch_norm_in_train_mode_over_chunks_is_refused_in_words(matrix):
    op = MATRICES[matrix](piped(normed()), rows_of(), CE.whole, training=True)
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\) normalises with .* Analyse in eval mode \(training=Fal"):
        op @ columns(entries(op.pipe))


def test_training_none_takes_each_module_in_its_own_mode():
    def build():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)).double()

    model, plain = build(), build()
    for each in (model, plain):
        each[3].eval()
    wanted = truth(plain, [rows_of()], CE, chunks=3, seed=SEED)
    op = Hessian(piped(model), rows_of(), CE.whole, training=None, seed=SEED)
    close(op @ torch.eye(op.shape[0], dtype=torch.float64), wanted.products["Hessian"])
    assert [module.training for module in model] == [True, True, True, False, True]


class Annealed(nn.Module):
    """Its factor depends on how often it was called, and on what it has kept."""

    def __init__(self):
        super().__init__()
        self.calls, self.kept = 0, []

    def forward(self, x):
        self.calls += 1
        self.kept.append(self.calls)
        return x * (1 + 1 / self.calls + len(self.kept))


class MovingAverage(nn.Module):
    """A loss with a buffer and a counter that its calls move, and of another size in train mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))
        self.calls = 0

    def forward(self, out, y):
        self.calls += 1
        loss = functional.cross_entropy(out, y)
        self.mean.lerp_(loss.detach(), 0.1)
        return loss / self.mean / self.calls * (2 if self.training else 1)


@pytest.mark.parametrize("matrix", [Hessian, GaussNewton])
@pytest.mark.parametrize("training", [False, True, None])
def test_state_of_layers_and_of_the_loss_does_not_pass_from_one_product_to_the_next(matrix, training):
    layer, loss = Annealed(), MovingAverage()
    op = matrix(small(layer), rows_of(), loss, training=training, seed=SEED)
    vector = columns(op.shape[0])
    products = [op @ vector for _ in range(5)]
    assert all(torch.equal(product, products[0]) for product in products)
    assert (layer.calls, layer.kept, loss.calls, float(loss.mean)) == (0, [], 0, 1.0) and loss.training


@pytest.mark.parametrize("before", [False, True])
def test_a_module_that_is_the_loss_is_in_the_mode_of_the_matrix(before):
    loss, model = MovingAverage().train(before), nn.Sequential(nn.Linear(3, 3)).double()
    train, test, own = (Hessian(model, rows_of(), loss, training=mode).loss() for mode in (True, False, None))
    close(train, 2 * test)
    close(own, train if before else test)
    assert loss.training is before


# ----------------------------------------------------------------------------------- layers without a second derivative


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.pow(3)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x.square() * grad


class Forgets(torch.autograd.Function):
    """Its backward is right, and computed where autograd cannot see what it depends on."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.pow(3)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            return 3 * x.square() * grad


class Keeps(torch.autograd.Function):
    """Keeps what it has computed on ctx, where no derivative can reach it: silently wrong in torch alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.square = x.square()
        ctx.save_for_backward(x)
        return x.pow(3) + 0.0 * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.square * grad


class Right(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.pow(3)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x.square() * grad


class OldNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.v, self.g = nn.Parameter(normal(3, 3, seed=4)), nn.Parameter(normal(3, 1, seed=6))

    def forward(self, x):
        return x @ torch._weight_norm(self.v, self.g, 0)


WRONG = {
    "once_differentiable": (lambda: Apply(Once.apply), "once_differentiable"),
    "forgetful": (lambda: Apply(Forgets.apply), "cannot be differentiated|forgets what it depends on"),
    "saves a number": (lambda: Apply(Keeps.apply), "cannot be differentiated|forgets what it depends on"),
    "fused weight norm": (OldNorm, "second derivative is wrong in torch"),
    "hardsigmoid": (lambda: Apply(functional.hardsigmoid), "without a second derivative.*clamp"),
    "max_norm": (
        lambda: nn.Sequential(Apply(lambda x: x.argmax(1)), nn.Embedding(3, 3, max_norm=0.5)), "Renormalise the weight"
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_second_derivative_that_would_be_wrong_is_refused_in_words(what, place, mode):
    build, words = WRONG[what]
    layers = [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)]
    layers.insert(place, build())
    op = Hessian(piped(nn.Sequential(*layers).double(), 2, mode), rows_of(4), CE.whole)
    with pytest.raises((RuntimeError, ValueError), match=words):
        op @ columns(op.shape[0])


@pytest.mark.parametrize("what", [what for what in WRONG if what != "max_norm"])
@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("last", [False, True])
def test_what_only_a_later_chunk_computes_with_is_refused_too(what, mode, last):
    build, words = WRONG[what]
    torch.manual_seed(5)

    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.odd = nn.Linear(3, 3), build()

        def forward(self, x):
            return self.odd(self.first(x)) if int(x[0, -1].detach()) % 2 else self.first(x)

    after = [] if last else [nn.Tanh(), nn.Linear(3, 3)]
    before = [nn.Identity(), nn.Identity()] if last else []
    data = chunks_choose()
    pipe = Pipe(nn.Sequential(*before, Choice(), *after).double(), [2, 1] if last else [1, 2], 3, checkpoint=mode)
    with pytest.raises((RuntimeError, ValueError), match=words):
        Hessian(pipe, data, CE.whole) @ columns(entries(pipe))


FUNCTIONS = [what for what in WRONG if what in ("once_differentiable", "forgetful", "saves a number", "hardsigmoid")]


@pytest.mark.parametrize("what", FUNCTIONS)
@pytest.mark.parametrize("matrix", [Hessian, GaussNewton])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_loss_whose_second_derivative_would_be_wrong_is_refused_in_words(what, matrix, chunks):
    build, words = WRONG[what]
    odd = build()
    op = matrix(piped(small(), chunks), rows_of(), lambda out, y: odd(out).mean())
    assert len(op.gradient()) == 4  # of first order it is right
    with pytest.raises((RuntimeError, ValueError), match=words):
        op @ columns(op.shape[0])


@pytest.mark.parametrize("matrix", [Hessian, GaussNewton])
def test_a_loss_with_a_function_whose_backward_is_right_is_taken(matrix):
    right, same = (matrix(small(), rows_of(), loss) for loss in (
        lambda out, y: Right.apply(out).mean(), lambda out, y: out.pow(3).mean()
    ))
    close(right @ columns(right.shape[0]), same @ columns(same.shape[0]))


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_function_of_the_users_whose_backward_is_right_is_taken(place):
    def build():
        torch.manual_seed(5)
        layers = [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)]
        layers.insert(place, Apply(Right.apply))
        return nn.Sequential(*layers).double()

    agree(build, [rows_of()], CE)


def test_weight_norm_is_written_out_so_that_it_is_right():
    class Plain(nn.Module):
        def __init__(self, v, g, bias):
            super().__init__()
            self.bias, self.g, self.v = nn.Parameter(bias), nn.Parameter(g), nn.Parameter(v)

        def forward(self, x):
            return x @ (self.v * (self.g / self.v.norm(dim=1, keepdim=True))).T + self.bias

    torch.manual_seed(5)
    layer = weight_norm(nn.Linear(3, 3)).double()
    values = [layer.parametrizations.weight.original1, layer.parametrizations.weight.original0, layer.bias]
    plain = nn.Sequential(Plain(*(value.detach().clone() for value in values)), nn.Tanh())
    wanted = truth(plain, [rows_of()], CE, chunks=3)
    op = Hessian(Pipe(nn.Sequential(layer, nn.Tanh()), [1, 1], 3), rows_of(), CE.whole)
    close(op @ torch.eye(op.shape[0], dtype=torch.float64), wanted.products["Hessian"])


@pytest.mark.parametrize("sizes", [[6], [1, 2, 3], [2, 2, 2], [1] * 6])
@pytest.mark.parametrize("mode", ["always", "never"])
def test_complex_numbers_may_go_from_stage_to_stage(sizes, mode):
    def build():
        torch.manual_seed(5)
        turned = Apply(lambda z: z * z.conj() * z + (0.3 + 1j) * z * torch.exp(1j * z.real))
        apart = Apply(lambda z: torch.cat([z.real, z.imag], 1))
        return nn.Sequential(
            nn.Linear(3, 4), Apply(torch.fft.fft), turned, Apply(torch.fft.ifft), apart, nn.Linear(8, 3)
        ).double()

    agree(build, [rows_of()], CE, pipe_of=lambda model, chunks: Pipe(model, sizes, chunks, checkpoint=mode))


@pytest.mark.parametrize("matrix", MATRICES)
def test_a_complex_output_is_one_of_real_and_imaginary_parts(matrix):
    def products(last, loss_fn):
        torch.manual_seed(5)
        layers = nn.Linear(3, 3), Apply(torch.fft.fft), Apply(lambda z: z * z), Apply(last)
        op = MATRICES[matrix](piped(nn.Sequential(*layers).double(), 2), rows_of(), loss_fn)
        return op @ torch.eye(op.shape[0], dtype=torch.float64)

    def of_parts(parts, y):
        return functional.cross_entropy(parts[..., 0] + 2 * parts[..., 1], y)

    wanted = products(torch.view_as_real, of_parts)
    close(products(torch.clone, lambda z, y: of_parts(torch.view_as_real(z), y)), wanted)


class Odd(nn.Module):
    """Parameters of no dimension, of no entry, and transposed."""

    def __init__(self):
        super().__init__()
        self.scale, self.none = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(normal(3, 3, seed=8).t())

    def forward(self, x):
        return torch.sin(self.scale * x) @ self.turned + self.none.sum()


def test_parameters_may_have_any_shape_and_strides():
    def build():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(3, 3), Odd(), nn.Tanh(), nn.Linear(3, 3)).double()

    agree(build, [rows_of()], CE)


class Fork(nn.Module):
    def forward(self, x):
        return {"logits": x, "energy": x.sin().sum(1), "place": x.argmax(1), "name": "fork"}


@pytest.mark.parametrize("energy", [1.0, 0.0])
def test_an_output_may_be_several_tensors_of_which_the_loss_uses_some(energy):
    def each(out, y):
        found = functional.cross_entropy(out["logits"], y, reduction="none")
        return found + energy * out["energy"].square() if energy else found

    agree(lambda: nn.Sequential(*small(), Fork()), [rows_of()], Loss(lambda out, y: each(out, y).mean(), each))


# --------------------------------------------------------------------------------------------------------------- losses


WEIGHTS = torch.tensor([2.0, 1.0, 5.0], dtype=torch.float64)  # a count is a whole number


def counted(out, y):
    """Cross entropy with class weights, in which label -100 does not count: (sum, count)."""
    total = functional.cross_entropy(out, y, weight=WEIGHTS, reduction="sum")
    return total, WEIGHTS[y[y >= 0]].sum()


def surprise(out, y):
    """A likelihood by torch.distributions, which check their arguments."""
    return -torch.distributions.Normal(out, 0.5).log_prob(y).sum(1)


COUNT = Loss(counted, lambda out, y: functional.cross_entropy(out, y, weight=WEIGHTS, reduction="none"), "count")
LOSSES = {
    "mse": MSE,
    "mse sum": Loss(nn.MSELoss(reduction="sum"), lambda out, y: (out - y).square().sum(1), "sum"),
    "cross entropy": CE,
    "cross entropy sum": Loss(nn.CrossEntropyLoss(reduction="sum"), CE.each, "sum"),
    "count": COUNT,
    "linear": Loss(lambda out, y: (out * y).sum(1).mean(), lambda out, y: (out * y).sum(1)),
    "likelihood": Loss(lambda out, y: surprise(out, y).mean(), surprise),
}


def data_for(name, counts):
    real = name in ("mse", "mse sum", "linear", "likelihood")
    return [
        (normal(count, 3, seed=count), normal(count, 3, seed=count + 40) if real else rows_of(count)[1])
        for count in counts
    ]


@pytest.mark.parametrize("counts, chunks", [([7], 1), ([7], 3), ([5, 2, 4], 3)])
@pytest.mark.parametrize("name", LOSSES)
def test_matrices_of_every_kind_of_loss_over_mini_batches_of_uneven_rows(name, counts, chunks):
    agree(small, data_for(name, counts), LOSSES[name], chunks=chunks, train=True)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_tokens_that_do_not_count_and_a_mini_batch_without_any_that_do(chunks):
    data = data_for("count", [5, 3, 4])
    data[0][1][:2] = -100
    data[1][1][:] = -100
    agree(small, data, COUNT, chunks=chunks)
    agree(small, data[1:], COUNT, chunks=chunks)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_where_no_token_counts_the_loss_is_torchs_and_the_gradient_zero(reduction, chunks):
    x, labels = data_for("count", [5])[0]
    loss, model = nn.CrossEntropyLoss(reduction=reduction), small()
    op = Hessian(piped(small(), chunks), (x, labels.fill_(-100)), loss)
    torch.testing.assert_close(op.loss(), loss(model(x), labels).detach(), equal_nan=True)  # 0 / 0, or a sum of nothing
    assert not any(gradient.any() for gradient in op.gradient().values())


@pytest.mark.parametrize("chunks", [1, 3])
def test_torchs_cross_entropy_with_weights_and_ignored_labels_is_the_sum_over_the_count(chunks):
    """As in `Pipe.step`, it is a mean over what counts, over all mini-batches too."""
    data = data_for("count", [5, 3])
    data[0][1][:2] = -100
    wanted = truth(small().eval(), data, COUNT, chunks=chunks)
    op = Hessian(piped(small(), chunks), data, nn.CrossEntropyLoss(weight=WEIGHTS))
    close(op @ torch.eye(op.shape[0], dtype=torch.float64), wanted.products["Hessian"])


def masked(out, y):
    counts = y >= 0
    return (functional.cross_entropy(out, y.clamp(min=0), reduction="none") * counts).sum() / counts.sum()


def contrastive(out, y):
    rows = functional.normalize(out, dim=1)
    return functional.cross_entropy(rows @ rows.T, torch.arange(len(out)))


UNEVEN = {
    "a mask": (masked, "what it divides by"),
    "a root": (lambda out, y: functional.cross_entropy(out, y.clamp(min=0)).sqrt(), "combine to"),
    "rows against each other": (contrastive, "combine to"),
    "a statistic": (lambda out, y: out.square().mean() / out.detach().std(), "what it divides by|combine to"),
    "a square": (lambda out, y: out.square().mean().square(), "combine to"),
}


@pytest.mark.parametrize("matrix", [Hessian, GaussNewton])
@pytest.mark.parametrize("name", UNEVEN)
def test_a_loss_that_is_no_mean_over_rows_is_refused_over_mini_batches_of_one_chunk(name, matrix):
    """By rows it would be weighed otherwise than by what it is: the matrix would depend on how the data are cut."""
    loss, words = UNEVEN[name]
    data = data_for("count", [4, 4])
    data[0][1][:3] = -1
    pipe = piped(small(), 1)
    pipe.step(data[0][0], data[0][0], loss_fn=functional.mse_loss)  # other calls before it change nothing
    assert len(matrix(pipe, data[0], loss).gradient()) == 4  # one mini-batch needs no proof
    with pytest.raises(ValueError, match=rf"is not a mean over rows: .*({words})"):
        matrix(pipe, data, loss).gradient()


@every_matrix
@pytest.mark.parametrize("chunks", [1, 3])
def test_an_output_beside_the_one_that_counts_may_have_no_gradient_over_mini_batches(matrix, chunks):
    def build():
        return small(Apply(lambda out: {"out": out, "best": out.argmax(1), "seen": out.detach()}))

    data, vectors = data_for("count", [4, 3]), columns(entries(small()))
    loss = Loss(lambda out, y: functional.cross_entropy(out["out"], y), lambda out, y: CE.each(out["out"], y))
    op = MATRICES[matrix](piped(build(), chunks), data, loss.whole)
    close(op @ vectors, truth(build().eval(), data, loss, vectors).products[matrix])


@every_matrix
@pytest.mark.parametrize("beside", [
    lambda out: out.new_tensor(2.0), lambda out: out.new_ones(4, 4), lambda out: out.sum(), lambda out: out[:2] @ out.T,
], ids=["number", "grid", "sum", "some rows"])  # fmt: skip
def test_an_output_beside_the_one_that_counts_need_have_no_rows(matrix, beside):
    model = small(Apply(lambda out: (out, beside(out))))
    data, vectors = data_for("count", [7]), columns(entries(model))
    op = MATRICES[matrix](model, data, lambda out, y: functional.cross_entropy(out[0], y))
    close(op @ vectors, truth(small().eval(), data, CE, vectors).products[matrix])


def test_over_mini_batches_a_loss_that_the_model_computes_is_refused_unless_it_is_a_sum():
    class Losses(nn.Linear):
        def forward(self, pair):
            return {"loss": functional.cross_entropy(super().forward(pair[0]), pair[1])}

    data = [((x, y), None) for x, y in data_for("count", [4, 3])]
    model = nn.Sequential(Losses(3, 3).double())

    def own(out, _):
        return out["loss"]

    with pytest.raises(ValueError, match="own is not a mean over rows: what it divides by .* cannot be seen"):
        Hessian(model, data, own).loss()
    whole = Hessian(model, data, own, loss_reduction="sum").loss()
    close(whole, sum(Hessian(model, pair, own).loss() for pair in data))


def test_a_pair_of_sum_and_count_is_taken_at_its_word_over_mini_batches_of_one_chunk():
    data = data_for("mse", [4, 3])
    op = Hessian(small(), data, lambda out, y: (contrastive(out, y) * len(out), len(out)))
    parts = [Hessian(small(), pair, contrastive).loss() * rows for pair, rows in zip(data, (4, 3), strict=True)]
    close(op.loss(), sum(parts) / 7)


@every_matrix
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_sum_over_a_count_of_zero_is_infinite_and_no_sum(matrix, chunks):
    data = data_for("mse", [4, 3])
    op = MATRICES[matrix](piped(small(), chunks), data, lambda out, y: ((out - y).square().sum(), 0))
    assert op.loss().isinf()
    assert not (op @ columns(op.shape[0])).isfinite().all()
    with pytest.raises(FloatingPointError, match="is not finite"):
        op.trace(3)


TOKENS = {
    "mean": Loss(
        lambda out, y: functional.cross_entropy(out, y.flatten()),
        lambda out, y: functional.cross_entropy(out, y.flatten(), reduction="none"),
    ),
    "sum": Loss(
        lambda out, y: functional.cross_entropy(out, y.flatten(), reduction="sum"),
        lambda out, y: functional.cross_entropy(out, y.flatten(), reduction="none"), "sum",
    ),
    "count": Loss(
        lambda out, y: (functional.cross_entropy(out, y.flatten(), reduction="sum"), (y >= 0).sum()),
        lambda out, y: functional.cross_entropy(out, y.flatten(), reduction="none"), "count",
    ),
}


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("kind", TOKENS)
def test_an_output_with_a_row_for_each_token_is_summed_over_tokens(kind, chunks):
    def build():
        torch.manual_seed(5)
        return nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Linear(3, 3), nn.Flatten(0, 1)).double()

    def draw(rows):
        generator = torch.Generator().manual_seed(rows)
        found = [torch.randint(high, (rows, 4), generator=generator) for high in (5, 3)]
        if kind == "count":
            found[1][0, 1:3] = -100
        return tuple(found)

    agree(build, [draw(3), draw(5)], TOKENS[kind], chunks=chunks)


@every_matrix
def test_a_loss_that_is_neither_a_mean_nor_a_sum_is_refused(matrix):
    op = MATRICES[matrix](piped(), data_for("mse", [7]), lambda out, y: (out - y).norm())
    with pytest.raises(ValueError, match="depends on other rows|not a mean over rows"):
        op @ columns(op.shape[0])


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("row, other", [(5, 6), (5, 7), (8, 9), (1, 8)])
def test_a_row_that_another_one_weighs_has_no_empirical_fisher(row, other, chunks):
    """Wherever the two are, and however small their gradients."""
    def weighed(out, y):
        weights = torch.ones_like(y)
        weights[row] = 0.3 if y[row] == y[other] else 1.0
        return ((out - y).square() * weights).mean()

    def beside(out, y):
        return weighed(out, y) if len(y) > max(row, other) else (out - y).square().mean()

    x, y = normal(10 * chunks, 3), torch.arange(10.0 * chunks).double()[:, None]
    y[row] = y[other] = 0.1
    op = EmpiricalFisher(Pipe(nn.Sequential(nn.Linear(3, 1)).double(), [1], chunks), (x, y), beside)
    with pytest.raises(ValueError, match="the loss of a row depends on other rows"):
        op @ columns(op.shape[0])


@pytest.mark.parametrize("mixing", range(3))
def test_rows_that_weigh_each_other_in_any_chunk_have_no_empirical_fisher(mixing):
    """Neighbours of two kinds repel each other."""
    def loss_fn(out, target):
        y, kind = target
        pairs, kinds = (rows[: len(rows) // 2 * 2].unflatten(0, (-1, 2)) for rows in (out, kind))
        repulsion = pairs.prod(1) * (kinds[:, 0] != kinds[:, 1])
        return (out - y).square().mean() + repulsion.sum() / len(out)

    x, y, kind = normal(12, 3), normal(12, 1), torch.zeros(12, 1, dtype=torch.float64)
    kind[4 * mixing] = 1.0
    op = EmpiricalFisher(Pipe(nn.Sequential(nn.Linear(3, 1)).double(), [1], 3), (x, (y, kind)), loss_fn)
    with pytest.raises(ValueError, match="the loss of a row depends on other rows"):
        op @ columns(op.shape[0])


@pytest.mark.parametrize("lengths", sorted({*itertools.permutations([3, 5, 1, 3])}))
def test_a_mean_over_tokens_by_hand_has_no_empirical_fisher_also_where_a_row_has_the_mean_length(lengths):
    """The loss of a row is not its part then: the first one's is, where its length is the mean one."""
    x, y = normal(4, 5, 3), torch.arange(20).reshape(4, 5) % 3
    for row, length in enumerate(lengths):
        y[row, length:] = -1

    def tokens(out, y):
        return functional.cross_entropy(out.transpose(1, 2), y.clamp(min=0), reduction="none") * (y >= 0)

    model = nn.Sequential(nn.Linear(3, 3)).double()
    with pytest.raises(ValueError, match="the loss of a row depends on other rows"):
        by_hand = EmpiricalFisher(model, (x, y), lambda out, y: tokens(out, y).sum() / (y >= 0).sum())
        by_hand @ columns(by_hand.shape[0])
    pair = EmpiricalFisher(model, (x, y), lambda out, y: (tokens(out, y).sum(), (y >= 0).sum()))
    own = EmpiricalFisher(model, (x, y), lambda out, y: functional.cross_entropy(
        out.transpose(1, 2), y, ignore_index=-1
    ))
    close(pair @ columns(pair.shape[0]), own @ columns(own.shape[0]))


@every_matrix
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_loss_that_reads_a_parameter_is_refused_and_says_what_to_do(matrix, chunks):
    model = small()

    def loss(out, y):
        return functional.cross_entropy(out, y) + model[0].weight.square().sum()

    op = MATRICES[matrix](piped(model, chunks), rows_of(), loss)
    with pytest.raises(RuntimeError, match=r"shape \[4, 3\] that requires a gradient and is no output.*Detach it"):
        op @ columns(op.shape[0])


@every_matrix
def test_a_loss_that_depends_on_no_parameter_is_refused(matrix):
    op = MATRICES[matrix](piped(), rows_of(), lambda out, y: functional.cross_entropy(out.detach(), y))
    with pytest.raises(RuntimeError, match="does not depend on any of the parameters"):
        op @ columns(op.shape[0])


@every_matrix
def test_what_has_no_curvature_has_a_product_of_zeros(matrix):
    """A linear model under a linear loss: only the Fisher is not zero."""
    data = data_for("linear", [6])
    wanted = truth(nn.Sequential(*list(small())[:1]), [(data[0][0], normal(6, 4))], LOSSES["linear"], chunks=3)
    model = nn.Sequential(*list(small())[:1])
    op = MATRICES[matrix](Pipe(model, [1], 3), (data[0][0], normal(6, 4)), LOSSES["linear"].whole)
    found = op @ torch.eye(op.shape[0], dtype=torch.float64)
    close(found, wanted.products[matrix])
    assert (matrix == "EmpiricalFisher") == bool(found.any())


# --------------------------------------------------------------------------------------------------------- closed forms


def whitened(rows, width):
    q, _ = torch.linalg.qr(normal(rows, width))
    return q * rows**0.5


def half_square(out, y):
    return 0.5 * (out - y).square().sum(1).mean()


@pytest.mark.parametrize("layers, width", [(2, 3), (4, 2), (6, 2)])
def test_a_deep_linear_identity_chain_has_eigenvalues_of_its_depth_alone(layers, width):
    """(1/2) |W_L .. W_1 x - x|^2 at identities: H = (1 1^T) kron I, so depth `width`^2 times, and zeros."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).double()
    for layer in model:
        nn.init.eye_(layer.weight)
    x = whitened(12, width)
    for matrix in (Hessian, GaussNewton):
        op = matrix(piped(model), (x, x), half_square)
        dense = op @ torch.eye(op.shape[0], dtype=torch.float64)
        values = torch.zeros((layers - 1) * width**2 + width**2, dtype=torch.float64)
        values[-(width**2) :] = layers
        close(torch.linalg.eigvalsh(dense), values)
        assert float(dense.trace()) == pytest.approx(layers * width**2)


@pytest.mark.parametrize("layers", [3, 8])
def test_a_scalar_chain_at_ones_has_a_hessian_of_ones(layers):
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(layers))).double()
    for layer in model:
        nn.init.ones_(layer.weight)
    x = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]).double()
    op = Hessian(piped(model, 2), (x, x), half_square)
    close(op @ torch.eye(layers, dtype=torch.float64), torch.ones(layers, layers).double())


def test_softmax_regression_at_zero_has_its_closed_form():
    """(1/C) (I - 1 1^T / C) kron X^T X / N."""
    x, y = normal(10, 3), torch.arange(10) % 4
    model = nn.Sequential(nn.Identity(), nn.Linear(3, 4, bias=False)).double()
    nn.init.zeros_(model[1].weight)
    bend = (torch.eye(4) - torch.full((4, 4), 0.25)).double() / 4
    for matrix in (Hessian, GaussNewton):
        op = matrix(piped(model), (x, y), functional.cross_entropy)
        close(op @ torch.eye(12, dtype=torch.float64), torch.kron(bend, x.T @ x / 10))
    share = torch.eye(4).double()[y] - 0.25
    rows = torch.einsum("nc,nd->ncd", share, x).flatten(1)
    op = EmpiricalFisher(piped(model), (x, y), functional.cross_entropy)
    close(op @ torch.eye(12, dtype=torch.float64), rows.T @ rows / 10)


def test_linear_regression_has_the_covariance_of_its_inputs():
    x, y = normal(9, 3), normal(9, 2, seed=4)
    model = nn.Sequential(nn.Linear(3, 2, bias=False)).double()
    op = Hessian(Pipe(model, [1], 4), (x, y), half_square)
    close(op @ torch.eye(6, dtype=torch.float64), torch.kron(torch.eye(2).double(), x.T @ x / 9))


# --------------------------------------------------------------------------------------------------- nothing is written


class Draws(nn.Module):
    """Draws from every generator that there is."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        if not self.training:
            return x
        private = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        return x * private * torch.rand_like(x) * random.random() * float(numpy.random.rand())


def busy():
    """All that could be written: statistics, masks, generators."""
    torch.manual_seed(5)
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), Draws(), nn.Tanh(), nn.Dropout(0.2), Draws()]
    return nn.Sequential(*layers, nn.Linear(4, 3)).double()


def random_alone():
    """Of it what may run in several chunks."""
    return nn.Sequential(*(layer for layer in busy() if not isinstance(layer, nn.BatchNorm1d)))


@contextmanager
def untouched(model):
    """At the end everything is what it was."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: (tensor, tensor._version, tensor.detach().clone()) for name, tensor in tensors.items()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    grads = {name: (parameter.grad, parameter.grad._version) for name, parameter in model.named_parameters()}
    own = [module.generator for module in model.modules() if isinstance(module, Draws)]

    def rest():
        return (
            [module.training for module in model.modules()],
            [parameter.requires_grad for parameter in model.parameters()],
            [sorted(vars(module)) for module in model.modules()],
            random.getstate(), [str(each) for each in numpy.random.get_state()],
            [state.tolist() for state in (torch.get_rng_state(), *(each.get_state() for each in own))],
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
            torch.backends.cuda.flash_sdp_enabled(), torch.backends.mha.get_fastpath_enabled(),
        )

    before = rest()
    yield
    assert rest() == before
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, (tensor, version, value) in values.items():
        assert now[name] is tensor and torch.equal(tensor, value)
        assert name not in grads or tensor._version == version
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name][0] and parameter.grad._version == grads[name][1]
        assert bool((parameter.grad == 0.5).all())


def test_a_product_leaves_power_iterations_as_they_were():
    model = spectral()
    op = Hessian(piped(model), rows_of(), CE.whole)
    with untouched(model):
        op @ columns(op.shape[0])


@every_matrix
@pytest.mark.parametrize("drive", ["inline", "threads"])
@pytest.mark.parametrize("training, chunks", [(False, 3), (True, 1), (None, 1)])
def test_a_product_leaves_everything_as_it_was(matrix, training, chunks, drive):
    model = busy()
    pipe = piped(model, chunks, **DRIVES[drive](2))
    op = MATRICES[matrix](pipe, [rows_of(), rows_of(4)], CE.whole, training=training, seed=SEED)
    with untouched(model):
        found = op @ columns(op.shape[0])
        op.gradient()
        op.loss()
    assert bool(found.abs().max() > 0)


class Fails(nn.Module):
    """Raises at its n-th call, of forwards and recomputations together; a probe's, without gradients, do not count."""

    def __init__(self, when, error):
        super().__init__()
        self.calls, self.when, self.error = outside([0]), when, error

    def forward(self, x):
        if torch.is_grad_enabled():
            self.calls()[0] += 1
            if self.calls()[0] == self.when:
                raise self.error
        return x


FAILURES = {
    "error": (ArithmeticError, KeyboardInterrupt),
    "when": ("first", "second", "last"),  # call; the last one of the first stage is a recomputation
    "drive": ("inline", "threads"),
    "place": (0, 3, 6),
}


@pytest.mark.parametrize("error, when, drive, place", [tuple(row.values()) for row in pairwise(FAILURES)])
def test_a_failure_leaves_everything_as_it_was(error, when, drive, place):
    layers = list(random_alone())
    calls = {"first": 1, "second": 2, "last": 3 if place else 6}
    layers.insert(place, Fails(calls[when], error("here")))
    model = nn.Sequential(*layers).double()
    pipe = Pipe(model, [3, 4] if place else [4, 3], 3, checkpoint="always", **DRIVES[drive](2))
    op = Hessian(pipe, rows_of(), CE.whole, training=True, seed=SEED)
    vector = columns(op.shape[0])[:, 0]
    with untouched(model), pytest.raises(error, match="here"):
        op @ vector
    fresh = Hessian(Pipe(random_alone(), [3, 3], 3), rows_of(), CE.whole, training=True, seed=SEED)
    close(op @ vector, fresh @ vector) if place == 6 else op @ vector  # elsewhere the layers' numbers are others


@pytest.mark.parametrize("error", [ArithmeticError("here"), KeyboardInterrupt("here")])
def test_a_failure_of_the_loss_leaves_everything_as_it_was(error):
    model = busy()
    calls = []

    def loss(out, y):
        calls.append(0)
        if len(calls) == 1:
            raise error
        return functional.cross_entropy(out, y)

    op = Hessian(piped(model, 1), rows_of(), loss, training=True)
    with untouched(model), pytest.raises(type(error), match="here"):
        op @ columns(op.shape[0])
    assert bool(torch.isfinite(op @ columns(op.shape[0])).all())


@every_matrix
def test_hooks_of_parameters_do_not_run(matrix):
    model = small()
    wanted = truth(small().eval(), [rows_of()], CE, columns(entries(model)), chunks=3)
    seen = []

    def doubled(grad):
        seen.append(1)
        return 2 * grad

    for parameter in model.parameters():
        parameter.register_hook(doubled)
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(2))
    op = MATRICES[matrix](piped(model), rows_of(), CE.whole)
    close(op @ columns(op.shape[0]), wanted.products[matrix])
    assert seen == [] and all(parameter.grad is None for parameter in model.parameters())


@every_matrix
def test_hooks_of_a_captured_parameter_do_not_run(matrix):
    case, plain = MODELS["captured"](), MODELS["captured"]()
    vectors = columns(entries(case.model))
    wanted = truth(plain.model.eval(), [(plain.make_input(5), None)], SUM, vectors, chunks=3)
    case.model[1].w.register_hook(lambda grad: 2 * grad)
    op = MATRICES[matrix](Pipe(case.model, [2, 3], 3), (case.make_input(5), None), SUM.whole, loss_reduction="sum")
    close(op @ vectors, wanted.products[matrix])


@pytest.mark.parametrize("mode", CHECKPOINTS)
@pytest.mark.parametrize("drive", ["inline", "threads"])
def test_a_product_between_forward_and_backward_of_a_call_changes_neither(mode, drive):
    found = []
    for between in (False, True):
        model = random_alone().train()
        pipe = piped(model, 3, CHECKPOINTS[mode], **DRIVES[drive](2))
        op = Hessian(pipe, rows_of(), CE.whole, training=True, seed=SEED)
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        out = pipe(rows_of()[0])
        if between:
            found.append(op @ columns(op.shape[0]))
        out.sin().sum().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], op @ columns(op.shape[0]))


@every_matrix
def test_products_from_several_threads_take_turns(matrix):
    """Two operators on one Pipe, one in eval mode, one in train mode."""
    pipe = piped()
    vectors = columns(entries(pipe), 8)
    ops = [MATRICES[matrix](pipe, rows_of(), CE.whole, training=mode, seed=SEED) for mode in (True, False)]
    wanted = [op @ vectors[:, number] for number in range(8) for op in ops]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda task: task[1] @ vectors[:, task[0]], product(range(8), ops)))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@every_matrix
@pytest.mark.parametrize("within", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("drive", ["inline", "threads"])
def test_a_product_does_not_care_about_the_grad_mode_around_it(matrix, within, drive):
    wanted = truth(small(), [rows_of()], CE, columns(entries(small())), chunks=3)
    op = MATRICES[matrix](piped(**DRIVES[drive](2)), rows_of(), CE.whole, seed=SEED, training=False)
    plain = truth(small().eval(), [rows_of()], CE, columns(entries(small())), chunks=3)
    assert not torch.equal(plain.gradient, wanted.gradient)  # the masks
    with within():
        found = op @ columns(op.shape[0])
        before = torch.is_grad_enabled()
    assert before == (within is torch.enable_grad)
    close(found.clone(), plain.products[matrix])


def test_a_loader_may_be_gone_through_within_inference_mode():
    """It makes its tensors there."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows_of(10)), batch_size=4)
    vectors = columns(entries(small()))
    wanted = truth(small().eval(), list(loader), CE, vectors, chunks=3)
    op = Hessian(piped(), loader, CE.whole)
    with torch.inference_mode():
        found = op @ vectors
    close(found.clone(), wanted.products["Hessian"])


@every_matrix
def test_autocast_around_a_product_is_that_of_the_layers(matrix):
    """bfloat16 has 8 bits: errors of a few per cent, over three products of matrices."""
    model = small().float().eval()
    x, y = rows_of()
    op = MATRICES[matrix](piped(model), (x.float(), y), CE.whole)
    vectors = columns(op.shape[0]).float()
    exact = op @ vectors
    with torch.autocast("cpu", torch.bfloat16):
        found = op @ vectors
        assert torch.is_autocast_enabled("cpu")
    assert found.dtype == torch.float32 and not torch.equal(found, exact)
    close(found, exact, rtol=0.1)


# ----------------------------------------------------------------------------------------------------------- randomness


@pytest.mark.parametrize("matrix, drive, mode", [
    ("Hessian", "inline", "always"), ("Hessian", "threads", "callable"), ("Hessian", "threads", "never"),
    ("GaussNewton", "inline", "except_last"), ("GaussNewton", "threads", "always"),
    ("EmpiricalFisher", "inline", "callable"), ("EmpiricalFisher", "threads", "except_last"),
])
def test_products_of_one_operator_agree_bit_for_bit_whatever_is_drawn_in_between(matrix, drive, mode):
    model = random_alone()
    pipe = piped(model, 3, CHECKPOINTS[mode], **DRIVES[drive](2))
    op = MATRICES[matrix](pipe, [rows_of(), rows_of(4)], CE.whole, training=True)
    vectors = columns(op.shape[0], 3)
    first, gradient = op @ vectors, flat(op.gradient())
    for each in (None, model[1].generator):
        torch.rand(2, generator=each)
    random.random()
    numpy.random.rand()
    pipe.eval()(normal(3, 3))
    assert torch.equal(op @ vectors, first) and torch.equal(flat(op.gradient()), gradient)
    other = MATRICES[matrix](pipe, [rows_of(), rows_of(4)], CE.whole, training=True)
    assert not torch.equal(other @ vectors, first)  # another seed, other masks
    again = MATRICES[matrix](pipe, [rows_of(), rows_of(4)], CE.whole, training=True, seed=op.seed)
    assert op.fingerprint() == op.fingerprint()
    assert again.seed == op.seed


@every_matrix
def test_matrices_with_every_kind_of_randomness_are_symmetric(matrix):
    op = MATRICES[matrix](piped(random_alone()), [rows_of(), rows_of(4)], CE.whole, training=True)
    dense = op @ torch.eye(op.shape[0], dtype=torch.float64)
    close(dense, dense.T, rtol=1e-12)
    if matrix != "Hessian":
        assert float(torch.linalg.eigvalsh(dense).min()) >= -1e-12 * float(dense.abs().max())


def test_one_product_of_a_block_is_that_of_the_vector_alone():
    op = Hessian(piped(), rows_of(), CE.whole, training=True, block=3)
    vectors = columns(op.shape[0], 7)
    found = op @ vectors
    for number in range(7):
        close(found[:, number], op @ vectors[:, number], rtol=1e-14)


# ----------------------------------------------------------------------------------------------------- data that change


@every_matrix
def test_data_that_change_between_products_are_refused(matrix):
    x, y = rows_of()
    op = MATRICES[matrix](piped(), (x, y), CE.whole)
    op @ columns(op.shape[0])
    x[0, 0] += 1.0
    with pytest.raises(ValueError, match="mini-batch 0 of the data is not what it was in the first product"):
        op @ columns(op.shape[0])


def test_a_loader_that_shuffles_is_refused():
    data = torch.utils.data.TensorDataset(*rows_of(12))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    op = Hessian(piped(), loader, CE.whole)
    op @ columns(op.shape[0])
    with pytest.raises(ValueError, match="not what it was in the first product. .*shuffle=False"):
        op @ columns(op.shape[0])


def test_targets_that_change_are_refused():
    x, y = rows_of()
    op = Hessian(piped(), [(x, y)], CE.whole)
    op @ columns(op.shape[0])
    y[0] = 2
    with pytest.raises(ValueError, match="not what it was"):
        op @ columns(op.shape[0])


class Weighed(nn.Module):
    """Times a number that comes with its input."""

    def forward(self, pair):
        x, weight = pair
        return x * weight


@every_matrix
@pytest.mark.parametrize("where", ["x", "target"])
def test_plain_values_beside_tensors_count_as_data(matrix, where):
    def data_with(number):
        x, y = rows_of()
        numbers = (number, 1.0) if where == "x" else (1.0, number)
        return [((x, numbers[0]), (y, {"weight": numbers[1]}))]

    def operator(data):
        model = nn.Sequential(Weighed(), *small())
        return MATRICES[matrix](Pipe(model, [2, len(model) - 2], 3), data, loss_of_pair, seed=SEED)

    batches = data_with(0.5)
    op = operator(batches)
    op @ columns(op.shape[0])
    batches[:] = data_with(0.25)
    with pytest.raises(ValueError, match="not what it was"):
        op @ columns(op.shape[0])
    prints = [operator(data_with(number)).fingerprint() for number in (0.5, 0.5, 0.25)]
    assert prints[0] == prints[1] != prints[2]


def loss_of_pair(output, pair):
    target, options = pair
    return CE.whole(output, target) * options["weight"]


def test_more_or_fewer_mini_batches_than_the_first_time_are_refused():
    words = "the data gave [01] mini-batches, and 2 the|mini-batch 2 of the data is not"
    for change in (list.pop, list.clear, lambda batches: batches.append(rows_of(2))):
        batches = [rows_of(), rows_of(4)]
        op = Hessian(piped(), batches, CE.whole)
        op @ columns(op.shape[0])
        change(batches)
        with pytest.raises(ValueError, match=words):
            op @ columns(op.shape[0])


@every_matrix
def test_parameters_that_change_give_the_matrix_at_the_new_ones(matrix):
    model, plain = small(), small()
    op = MATRICES[matrix](piped(model), rows_of(), CE.whole)
    op @ columns(op.shape[0])
    for each in (model, plain):
        with torch.no_grad():
            each[0].weight.mul_(2.0)
            each[3].weight = nn.Parameter(each[3].weight - 1.0)
    wanted = truth(plain.eval(), [rows_of()], CE, columns(op.shape[0]), chunks=3)
    close(op @ columns(op.shape[0]), wanted.products[matrix])


# -------------------------------------------------------------------------------------------------------- low precision


@every_matrix
@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("build", [small, lambda: tied(True)])
def test_products_in_low_precision_are_float32_and_near_those_of_float64(matrix, dtype, rtol, build):
    model = build().to(dtype)
    x, y = rows_of()
    vectors = columns(entries(model)).to(dtype).double()
    plain = build()
    with torch.no_grad():
        for parameter, rounded in zip(plain.parameters(), model.parameters(), strict=True):
            parameter.copy_(rounded)
    wanted = truth(plain.eval(), [(x.to(dtype).double(), y)], CE, vectors, chunks=3)
    op = MATRICES[matrix](piped(model), (x.to(dtype), y), CE.whole)
    assert op.dtype == torch.float32
    found = op @ vectors.float()
    assert found.dtype == torch.float32
    close(found.double(), wanted.products[matrix], rtol)


@pytest.mark.parametrize("chunks", [1, 2])
def test_rows_of_a_mean_in_low_precision_are_seen_to_be_their_own(chunks):
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).bfloat16()
    data = normal(999, 3).bfloat16(), normal(999, 1, seed=2).bfloat16()
    op = EmpiricalFisher(Pipe(model, [2, 1], chunks), data, functional.mse_loss)
    assert (op @ columns(op.shape[0]).float()).isfinite().all()


class Recurrent(nn.Module):
    """A residual block around one of torch's RNNs."""

    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(4, 4, batch_first=True)

    def forward(self, x):
        return x + self.rnn(x)[0]


@every_matrix
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_rnns_without_forward_derivatives_are_differentiated_backwards(kind, matrix):
    """In float32 the LSTM of CPUs has none: the first product of a Pipe begins by forward mode, and turns back."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 4), Recurrent(kind), nn.Tanh(), Recurrent(kind))
    x, y = torch.randn(6, 5, 4), torch.randn(6, 5, 4)
    vector = columns(entries(model), 1)
    wanted = truth(copy.deepcopy(model).double(), [(x.double(), y.double())], MSE, vector, chunks=3)
    op = MATRICES[matrix](piped(model), (x, y), MSE.whole)
    for _ in range(2):
        close((op @ vector[:, 0].float()).double(), wanted.products[matrix][:, 0], rtol=1e-5)
    assert not any("flatten_parameters" in vars(module) for module in model.modules())


# --------------------------------------------------------------------------------------------------------------- memory


class Holder:
    """What stands in autograd's graph for a saved tensor."""

    __slots__ = ("tensor", "__weakref__")

    def __init__(self, tensor):
        self.tensor = tensor.detach()


class Saved:
    """The bytes that autograd holds: each piece of memory once, parameters not at all."""

    def __init__(self, module):
        self._known = {tensor.data_ptr() for tensor in module.parameters()}
        self._held = {}
        self.bytes = self.peak = 0

    def counted(self):
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda holder: holder.tensor)

    def _pack(self, tensor):
        holder = Holder(tensor)
        key = (tensor.data_ptr(), tensor.numel() * tensor.element_size())
        if key[0] not in self._known and key[1]:
            self.bytes += key[1] * (not self._held.get(key))
            self._held[key] = self._held.get(key, 0) + 1
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(holder, self._free, key)
        return holder

    def _free(self, key):
        self._held[key] -= 1
        self.bytes -= key[1] * (not self._held[key])


DEPTH, WIDTH, ROWS = 8, 8, 64


def deep():
    torch.manual_seed(5)
    pairs = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*pairs).double()


def peak_of(model, compute):
    saved = Saved(model)
    with saved.counted():
        compute()
    assert saved.bytes == 0
    return saved.peak


def whole_graph(model, x, y):
    """A double backward of the plain module, as one writes it."""
    params = list(model.parameters())
    grads = torch.autograd.grad(functional.mse_loss(model(x), y), params, create_graph=True)
    return torch.autograd.grad(grads, params, [torch.ones_like(grad) for grad in grads])


def held_by_a_product(matrix, model, stages, chunks, mode):
    x, y = normal(ROWS, WIDTH), normal(ROWS, WIDTH, seed=2)
    pipe = Pipe(model, [2 * DEPTH // stages] * stages, chunks, checkpoint=mode)
    op = MATRICES[matrix](pipe, (x, y), functional.mse_loss)
    vector = columns(op.shape[0])[:, 0]
    for _ in range(2):  # the first two products of a Pipe compare
        op @ vector
    return peak_of(model, lambda: op @ vector)


class Running(nn.Module):
    """It divides by a running mean, and then adds to that."""

    def __init__(self, kind):
        super().__init__()
        if kind == "attribute":
            self.mean = torch.ones(4).double()
        elif kind != "registered late":
            self.register_buffer("mean", None if kind == "no buffer yet" else torch.ones(4).double())
        self.kind = kind

    def forward(self, x):
        mean = getattr(self, "mean", None)
        before = torch.ones(4).double() if mean is None else mean.clone()
        mean = before.lerp(x.detach().square().mean(0), 0.5)
        if self.kind == "written past its version":
            self.mean.data.copy_(mean)
        elif self.kind == "written":
            self.mean.copy_(mean)
        elif self.kind == "registered late":
            self.register_buffer("mean", mean)
        else:
            self.mean = mean
        return (x / before).tanh()


STATES = ["attribute", "written", "written past its version", "replaced", "no buffer yet"]


@pytest.mark.probes
@pytest.mark.parametrize("kind, mode", [*itertools.product(STATES, ["never", "always"]), ("registered late", "never")])
@pytest.mark.parametrize("matrix", MATRICES)
def test_all_chunks_find_the_state_of_layers_as_the_minibatch_found_it(matrix, kind, mode):
    """So the matrix is that of all rows at once."""
    model = nn.Sequential(nn.Linear(3, 4), Running(kind), nn.Linear(4, 2)).double()
    data = normal(7, 3), normal(7, 2, seed=2)
    matrices = [
        MATRICES[matrix](Pipe(model, [2, 1], chunks, checkpoint=mode), data, functional.mse_loss, training=True)
        for chunks in (1, 3)
    ]
    vectors = columns(matrices[0].shape[0])
    for _ in range(3):
        torch.testing.assert_close(*[op @ vectors for op in matrices], rtol=1e-12, atol=1e-14)


class KeepsSeen(nn.Linear):
    """It leaves what it computes, with its graph, in an attribute."""

    def forward(self, x):
        self.seen = super().forward(x)
        return self.seen.tanh()


@every_matrix
@pytest.mark.parametrize("batches", [1, 2])
def test_a_product_leaves_what_an_earlier_forward_has_left_with_its_graph(matrix, batches):
    model = nn.Sequential(KeepsSeen(3, 4), nn.Linear(4, 2)).double()
    data = [(normal(4, 3, seed=seed), normal(4, 2, seed=seed)) for seed in range(batches)]
    op = MATRICES[matrix](Pipe(model, [1, 1]), data, functional.mse_loss)
    model(data[0][0])
    before = id(model[0].seen), model[0].seen.tolist()
    for _ in range(2):
        op @ columns(op.shape[0])
    assert (id(model[0].seen), model[0].seen.tolist()) == before


@pytest.mark.inline
@pytest.mark.parametrize("matrix, stages, chunks", [("Hessian", 1, 8), ("Hessian", 4, 4), ("GaussNewton", 4, 4)])
def test_what_autograd_holds_is_one_stages_graph_of_one_chunk(matrix, stages, chunks):
    """Of a graph for all layers and rows: 1/stages of the layers, 1/chunks of the rows, at a time."""
    model = deep()
    whole = peak_of(model, lambda: whole_graph(model, normal(ROWS, WIDTH), normal(ROWS, WIDTH, seed=2)))
    one_layer = 8 * ROWS * WIDTH
    assert whole > 2 * DEPTH * one_layer  # it holds at least each activation, twice
    bound = 1.1 * whole / (stages * chunks) + one_layer  # and the loss, and where stages meet
    assert held_by_a_product(matrix, model, stages, chunks, "always") <= bound < whole / 5
    if stages > 1:
        assert held_by_a_product(matrix, model, stages, chunks, "never") > 2 * bound
