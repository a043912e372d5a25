"""Vectors in every form, parameters by every choice, models and data of every kind: the same matrix behind all.

The reference is the dense matrix of curvature_reference.py; entries are parameter after parameter, as `flat` has them.
"""

import inspect
import logging
from fractions import Fraction
from functools import cache, partial

import numpy
import pytest
import torch
from cover import examples
from curvature_reference import Loss, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from law_models import normal
from torch import nn
from torch.nn import functional

from pipeline import NoChunk, Pipe
from pipeline.curvature import EmpiricalFisher, GaussNewton, Hessian
from pipeline.curvature.identity import value_in_words

MATRICES = {"Hessian": Hessian, "GaussNewton": GaussNewton, "EmpiricalFisher": EmpiricalFisher}
every_matrix = pytest.mark.parametrize("matrix", MATRICES)
CE = Loss(functional.cross_entropy, lambda out, y: functional.cross_entropy(out, y, reduction="none"))
SEED = 9
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
SIZES = [12, 4, 12, 3, 9, 3]


def layered():
    torch.manual_seed(20)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Linear(3, 3)).double()


def data():
    return normal(7, 3), torch.arange(7) % 3


def made(matrix="Hessian", model=None, **what):
    return MATRICES[matrix](Pipe(model or layered(), [2, 2], 3), data(), CE.whole, seed=SEED, **{"block": 16, **what})


@cache
def all_dense():
    return truth(layered(), [data()], CE, chunks=3).products


def dense(matrix="Hessian"):
    return all_dense()[matrix]


def close(found, wanted, rtol=1e-12):
    assert found.shape == wanted.shape
    error, scale = float((found - wanted).abs().max()), float(wanted.abs().max()) or 1.0
    assert error <= rtol * scale


def cut(vector):
    """A flat vector by name."""
    parts = zip(NAMES, vector.split(SIZES), layered().parameters(), strict=True)
    return {name: part.view_as(parameter) for name, part, parameter in parts}


def joined(named):
    return torch.cat([named[name].flatten() for name in NAMES])


# -------------------------------------------------------------------------------------------------------------- vectors


@every_matrix
def test_a_product_comes_in_the_form_of_its_vector(matrix):
    op, wanted, vectors = made(matrix), dense(matrix), normal(43, 3, seed=4)
    assert op.shape == (43, 43)
    assert op.dtype == torch.float64
    assert repr(op) == f"{matrix}(43 x 43, float64)"
    close(op @ vectors, wanted @ vectors)
    close(op @ vectors[:, 1], wanted @ vectors[:, 1])
    named = op @ cut(vectors[:, 2])
    assert list(named) == NAMES
    assert [part.shape for part in named.values()] == [parameter.shape for parameter in layered().parameters()]
    close(joined(named), wanted @ vectors[:, 2])
    several = op @ [cut(column) for column in vectors.unbind(1)]
    close(torch.stack([joined(each) for each in several], 1), wanted @ vectors)
    assert (op @ torch.empty(43, 0)).shape == (43, 0)


@settings(max_examples=examples(12))
@given(count=st.integers(1, 9), block=st.integers(1, 5), matrix=st.sampled_from(list(MATRICES)))
def test_a_block_of_products_equals_its_columns(count, block, matrix):
    op, vectors = made(matrix, block=block), normal(43, count, seed=count)
    found = op @ vectors
    for number, column in enumerate(vectors.unbind(1)):
        close(found[:, number], op @ column)


@every_matrix
def test_a_product_is_linear_and_symmetric(matrix):
    op, (u, v, w) = made(matrix), normal(3, 43, seed=4)
    assert float(u @ (op @ v)) == pytest.approx(float(v @ (op @ u)), rel=1e-12)
    close(op @ (2 * u - 3 * w), 2 * (op @ u) - 3 * (op @ w))
    assert not (op @ torch.zeros(43, dtype=torch.float64)).any()


@every_matrix
def test_hvp_gives_the_gradient_too(matrix):
    op, vector = made(matrix), normal(43, seed=4)
    wanted = truth(layered(), [data()], CE, vector[:, None], chunks=3)
    for given_, back in ((vector, lambda found: found), (cut(vector), joined)):
        product, gradient = op.hvp(given_)
        close(back(product), wanted.products[matrix][:, 0])
        assert list(gradient) == NAMES
        close(joined(gradient), wanted.gradient)
    close(joined(op.gradient()), wanted.gradient)
    assert float(op.loss()) == pytest.approx(wanted.loss, rel=1e-12)
    assert op.loss().dtype == torch.float64


def test_vectors_are_not_written_and_products_are_tensors_of_their_own():
    op, vector = made(), normal(43, seed=4)
    named = {name: part.clone().requires_grad_() for name, part in cut(vector).items()}
    before = vector.clone()
    first = op @ vector
    found = op @ named
    assert torch.equal(vector, before) and torch.equal(joined(named), before)
    assert not any(part.requires_grad for part in found.values())
    kept = first.clone()
    first.zero_()
    for part in found.values():
        part.fill_(3.0)
    assert torch.equal(op @ vector, kept)


def test_vectors_of_another_precision_and_layout_are_taken_as_numbers():
    op, wanted = made(), dense()
    vector = normal(43, seed=4).float()
    found = op @ vector
    assert found.dtype == torch.float64  # that of the parameters
    close(found, wanted @ vector.double())
    wide = normal(2, 43, seed=5).t()  # not contiguous
    close(op @ wide, wanted @ wide)


BAD_VECTORS = {
    "size": (lambda: torch.ones(42), ValueError, r"a flat vector has shape \[42\]; the parameters have 43 entries"),
    "rows": (lambda: torch.ones(3, 43), ValueError, r"shape \[3, 43\].*Give shape \[43\], or \[43, k\]"),
    "dims": (lambda: torch.ones(43, 1, 1), ValueError, r"shape \[43, 1, 1\]"),
    "integers": (lambda: torch.ones(43, dtype=torch.int64), TypeError, "torch.int64. Give a floating-point tensor"),
    "number": (lambda: 3.0, TypeError, "a vector is a float. Give a dict of tensors"),
    "empty list": (lambda: [], TypeError, "a vector is a list"),
    "list of tensors": (lambda: [torch.ones(43)], TypeError, "a vector is a list. Give a dict"),
    "missing": (lambda: {"0.weight": torch.ones(4, 3)}, KeyError, "'0.bias'.* are missing. Give zeros for those"),
    "unknown": (
        lambda: {**cut(torch.ones(43)), "9.weight": torch.ones(3)}, KeyError, "'9.weight'.* are no parameters here"
    ),
    "shape": (
        lambda: {**cut(torch.ones(43)), "0.bias": torch.ones(5)}, ValueError,
        r"entries for '0.bias' have shape \[5\], the parameter has \[4\]",
    ),
    "no tensor": (lambda: {**cut(torch.ones(43)), "0.bias": [1.0] * 4}, TypeError, "entries for '0.bias' are list"),
    "sparse": (lambda: torch.ones(43).to_sparse(), TypeError, "sparse_coo. Give a floating-point tensor, not sparse"),
    "complex": (lambda: torch.ones(43, dtype=torch.complex64), TypeError, "complex64. Give a floating-point tensor"),
}


@pytest.mark.parametrize("what", BAD_VECTORS)
def test_another_vector_is_refused_in_words(what):
    vector, error, words = BAD_VECTORS[what]
    op = made()
    with pytest.raises(error, match=words):
        op @ vector()
    with pytest.raises(error, match=words):
        op.hvp(vector())


def test_what_is_no_pair_of_vectors_and_no_kind_of_random_ones_is_refused_in_words():
    op = made()
    with pytest.raises(ValueError, match="dot takes two vectors, not 2 and 1."):
        op.dot(torch.ones(43, 2), torch.ones(43))
    with pytest.raises(ValueError, match=r"kind is 'gauss'. Use 'rademacher' \(\+1 or -1\) or 'normal'."):
        op.space.random("gauss", 0, 0)


def test_hvp_of_several_vectors_is_refused_in_words():
    with pytest.raises(ValueError, match="hvp takes one vector, not 2. Use Hessian @ vectors"):
        made().hvp(torch.ones(43, 2))


# ----------------------------------------------------------------------------------------------------------- parameters


PARAMS = {
    "layer": ("2", ["2.weight", "2.bias"]),
    "parameter": ("0.bias", ["0.bias"]),
    "list": (["0.weight", "3"], ["0.weight", "3.weight", "3.bias"]),
    "another order": (("3.bias", "0.weight"), ["0.weight", "3.bias"]),
    "generator": ((name for name in ["2", "0.bias"]), ["0.bias", "2.weight", "2.bias"]),
    "predicate": (lambda name, parameter: parameter.dim() == 1, ["0.bias", "2.bias", "3.bias"]),
    "all": (None, NAMES),
    "last stage": (["2", "3"], NAMES[2:]),
    "first stage": ("0", NAMES[:2]),
}


@pytest.mark.parametrize("what", PARAMS)
def test_a_choice_of_parameters_is_that_block_of_the_matrix(what):
    params, names = PARAMS[what]
    params = list(params) if what == "generator" else params
    index = torch.cat([
        torch.arange(43).split(SIZES)[NAMES.index(name)] for name in names
    ])
    for matrix in MATRICES:
        op = made(matrix, params=iter(params) if what == "generator" else params)
        assert op.shape == (len(index), len(index))
        found = op @ torch.eye(len(index), dtype=torch.float64)
        close(found, dense(matrix)[index][:, index])
        assert list(op.gradient()) == names


def test_the_rest_of_the_model_may_be_frozen_or_left_out_alike():
    """Parameters that are left out get no gradient and stay trained."""
    model = layered()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("2"))
    op, other = made(model=model), made(params="2")
    vectors = normal(15, 2)
    assert torch.equal(op @ vectors, other @ vectors)


BAD_PARAMS = {
    "unknown": ("7", r"params has '7', which is no parameter or layer. There are 0.weight, 0.bias, .* and 1 more"),
    "part of a name": ("0.wei", "params has '0.wei', which is no parameter or layer"),
    "no parameters": ("1", "params has '1', which is no parameter or layer"),
    "one of a list": (["0", "nine"], "params has 'nine'"),
    "frozen": ("3", r"params has '3', but 3.weight, 3.bias do not require a gradient. Call requires_grad_"),
    "none chosen": (lambda name, parameter: False, "there is no parameter to differentiate by"),
    "empty": ([], r"there is no parameter to differentiate by \(params=\[\]\)"),
}


@pytest.mark.parametrize("what", BAD_PARAMS)
def test_another_choice_of_parameters_is_refused_in_words(what):
    params, words = BAD_PARAMS[what]
    model = layered()
    model[3].requires_grad_(False)
    with pytest.raises(ValueError, match=words):
        made(model=model, params=params)


def test_a_model_that_is_all_frozen_or_complex_is_refused_in_words():
    with pytest.raises(ValueError, match=r"no parameter to differentiate by .*Call requires_grad_\(\)"):
        made(model=layered().requires_grad_(False))

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex128))

        def forward(self, x):
            return (x * self.phase).abs()

    model = nn.Sequential(Turned(), nn.Linear(3, 3).double())
    with pytest.raises(ValueError, match="'0.phase' is torch.complex128.*view_as_complex.*leave it out with params="):
        Hessian(Pipe(model, [1, 1], 2), data(), CE.whole)
    op = Hessian(Pipe(model, [1, 1], 2), data(), CE.whole, params="1")
    wanted = truth(model, [data()], CE, chunks=2, names=["1.weight", "1.bias"])
    close(op @ torch.eye(12, dtype=torch.float64), wanted.products["Hessian"])


def test_parameters_that_no_loss_depends_on_have_rows_of_zeros_and_alone_are_refused():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(3, 3), nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self.used(x)

    def build():
        torch.manual_seed(3)
        return nn.Sequential(Spare(), nn.Tanh()).double()

    for matrix in MATRICES:
        op = MATRICES[matrix](Pipe(build(), [1, 1], 2), data(), CE.whole)
        found = op @ torch.eye(op.shape[0], dtype=torch.float64)
        close(found, truth(build(), [data()], CE, chunks=2).products[matrix])
        place = [name for name, _ in build().named_parameters()].index("0.spare")
        assert place == 0 and not found[:2].any() and not found[:, :2].any()
        with pytest.raises(RuntimeError, match="params= leaves out all that are used"):
            MATRICES[matrix](Pipe(build(), [1, 1], 2), data(), CE.whole, params="0.spare") @ torch.ones(2)


@pytest.mark.parametrize("change, what", [
    (lambda model: model[0].requires_grad_(False), "frozen"),
    (lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(4, 5).double())), r"\[4, 5\]"),
    (lambda model: model[0].register_parameter("bias", None), "gone"),
])
def test_parameters_that_are_others_than_when_the_operator_was_made_are_refused(change, what):
    model = layered()
    op = made(model=model)
    change(model)
    with pytest.raises(ValueError, match=f"was of shape .* it is {what} now. Make a new operator"):
        op @ torch.ones(43)


# --------------------------------------------------------------------------------------------------------------- models


class Residual(nn.Module):
    """Not a Sequential."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x):
        return x + self.scale * self.two(self.one(x).tanh())


class Own(nn.Sequential):
    """A Sequential with a forward of its own: its layers are not to be taken one by one."""

    def forward(self, x):
        return super().forward(x) + x


def plain_models():
    torch.manual_seed(4)
    return {
        "sequential": nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)),
        "module": Residual(),
        "one layer": nn.Linear(3, 3),
        "own forward": Own(nn.Linear(3, 3), nn.Tanh()),
    }


@every_matrix
@pytest.mark.parametrize("kind", list(plain_models()))
def test_a_plain_module_is_taken_whole_under_its_own_names(matrix, kind):
    model = plain_models()[kind].double()
    names = [name for name, _ in model.named_parameters()]
    op = MATRICES[matrix](model, data(), CE.whole)
    wanted = truth(nn.Sequential(plain_models()[kind].double()), [data()], CE)
    found = op @ torch.eye(op.shape[0], dtype=torch.float64)
    close(found, wanted.products[matrix])
    assert list(op.gradient()) == names
    assert list(op @ {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}) == names
    one = MATRICES[matrix](model, data(), CE.whole, params=names[0])
    count = next(model.parameters()).numel()
    close(one @ torch.eye(count, dtype=torch.float64), found[:count, :count])
    assert [name for name, _ in model.named_parameters()] == names
    assert model.training


def test_a_plain_modules_masks_are_the_same_in_every_product():
    """Those of `layer_seed` with the layers of a Sequential; any other module is layer 0."""
    masked = Residual()
    masked.two = nn.Sequential(nn.Dropout(0.5), masked.two, nn.Dropout(0.5))
    model = nn.Sequential(nn.Dropout(0.5), masked).double()
    for given_, plain in ((model, model), (masked, nn.Sequential(masked))):
        op = Hessian(given_, data(), CE.whole, training=True, seed=SEED)
        wanted = truth(plain, [data()], CE, seed=SEED)
        found = op @ torch.eye(op.shape[0], dtype=torch.float64)
        close(found, wanted.products["Hessian"])
        assert torch.equal(op @ torch.eye(op.shape[0], dtype=torch.float64), found)


@every_matrix
def test_another_model_is_refused_in_words(matrix):
    with pytest.raises(TypeError, match="the model is a function. Give a Pipe or a torch.nn.Module"):
        MATRICES[matrix](lambda x: x, data(), CE.whole)
    two_devices = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, device="meta"))
    with pytest.raises(ValueError, match=r"the module is on several devices \(\['cpu', 'meta'\]\). Wrap it: Pipe\("):
        MATRICES[matrix](two_devices, data(), CE.whole)


# ----------------------------------------------------------------------------------------------------------------- data


def test_data_may_be_one_pair_a_list_a_loader_or_a_generator():
    x, y = data()
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=3)
    vectors = normal(43, 2)
    cases = {
        "list": (batches, batches),
        "tuples in a generator": ((pair for pair in batches), batches),
        "lists": ([list(pair) for pair in batches], batches),
        "loader": (loader, list(loader)),
        "one": ((x, y), [(x, y)]),
        "mapped": (map(tuple, batches), batches),
    }
    for given_, plain in cases.values():
        op = Hessian(Pipe(layered(), [2, 2], 3), given_, CE.whole)
        wanted = truth(layered(), plain, CE, vectors, chunks=3)
        close(op @ vectors, wanted.products["Hessian"])
        close(op @ vectors, wanted.products["Hessian"])  # a second time
        close(joined(op.gradient()), wanted.gradient)
        assert float(op.loss()) == pytest.approx(wanted.loss, rel=1e-12)


def test_the_cut_into_mini_batches_does_not_matter_to_a_mean():
    x, y = data()
    vectors = normal(43, 2)
    for matrix in MATRICES.values():
        found = [
            matrix(Pipe(layered(), [2, 2], 2), list(zip(x.split(size), y.split(size), strict=True)), CE.whole) @ vectors
            for size in (1, 2, 3, 7)
        ]
        for other in found[1:]:
            close(other, found[0])


def test_trees_and_uncut_values_may_be_inputs_and_targets():
    class Mixing(nn.Module):
        def forward(self, given_):
            return given_["x"] * given_["scale"] + given_["more"][0]

    x, y = data()
    model = nn.Sequential(Mixing(), *layered())
    tree = {"x": x, "scale": NoChunk(torch.tensor([2.0, 1.0, 0.5]).double()), "more": [normal(7, 3, seed=8), "name"]}

    def loss(out, target):
        return (functional.cross_entropy(out, target["y"], reduction="none") * target["w"][0]).mean()

    weights = normal(7, seed=2).square()
    op = Hessian(Pipe(model, [2, 3], 3), (tree, {"y": y, "w": [weights]}), loss)
    plain = [(x * tree["scale"].value + tree["more"][0], y)]
    weighted = Loss(
        lambda out, target: (functional.cross_entropy(out, target, reduction="none") * weights).mean(),
        lambda out, target: functional.cross_entropy(out, target, reduction="none") * weights,
    )
    wanted = truth(layered(), plain, weighted, chunks=3)
    close(op @ torch.eye(43, dtype=torch.float64), wanted.products["Hessian"])


def test_a_model_that_gives_the_loss_itself_needs_no_target():
    x, _ = data()
    square = Loss(lambda out, y: out.square().mean(), lambda out, y: out.square().mean(1))
    op = GaussNewton(Pipe(layered(), [2, 2], 3), (x, None), square.whole)
    wanted = truth(layered(), [(x, None)], square, chunks=3)
    close(op @ torch.eye(43, dtype=torch.float64), wanted.products["GaussNewton"])


BAD_DATA = {
    "tensor": (lambda: torch.ones(3, 3), TypeError, "the data are a Tensor. Give one mini-batch as a tuple"),
    "dict": (lambda: {"x": 1}, TypeError, "the data are a dict"),
    "number": (lambda: 3, TypeError, "the data are a int"),
    "three": (lambda: (1, 2, 3), TypeError, "mini-batch 0 of the data is a tuple of 3. Give pairs"),
    "no pairs": (lambda: [torch.ones(3, 3)], TypeError, "mini-batch 0 of the data is a Tensor"),
    "empty": (lambda: [], ValueError, "the data hold no mini-batch"),
    "rows": (lambda: (torch.ones(4, 3).double(), torch.zeros(3).long()), ValueError, "rows"),
}


@pytest.mark.parametrize("what", BAD_DATA)
def test_other_data_are_refused_in_words(what):
    build, error, words = BAD_DATA[what]
    with pytest.raises(error, match=words):
        Hessian(Pipe(layered(), [2, 2], 3), build(), CE.whole) @ torch.ones(43)


def test_settings_that_cannot_be_are_refused_in_words():
    with pytest.raises(ValueError, match="block is 0. Give a whole number of at least 1"):
        made(block=0)
    with pytest.raises(TypeError, match="which is not callable"):
        Hessian(Pipe(layered(), [2, 2], 3), data(), "mse") @ torch.ones(43)
    with pytest.raises(ValueError, match="loss_reduction|reduction"):
        Hessian(Pipe(layered(), [2, 2], 3), data(), CE.whole, loss_reduction="median") @ torch.ones(43)
    for seed in ("seven", 7.5, True):
        with pytest.raises(TypeError, match=f"seed is {seed!r}. Give a whole number, or None"):
            Hessian(Pipe(layered(), [2, 2], 3), data(), CE.whole, seed=seed)


def test_a_seed_is_kept_and_repeats_the_masks():
    model = nn.Sequential(layered(), nn.Dropout(0.5))
    one = Hessian(Pipe(model, [1, 1], 3), data(), CE.whole, training=True)
    torch.manual_seed(1)
    other = Hessian(Pipe(model, [1, 1], 3), data(), CE.whole, training=True)
    vectors = normal(43, 2)
    assert one.seed != other.seed
    assert not torch.equal(one @ vectors, other @ vectors)
    again = Hessian(Pipe(model, [1, 1], 3, schedule="gpipe"), data(), CE.whole, training=True, seed=one.seed)
    close(again @ vectors, one @ vectors)


def test_a_fingerprint_tells_parameters_data_and_settings_apart():
    model = layered()
    one = made(model=model)
    same = made(model=layered())
    assert one.fingerprint() == same.fingerprint()
    assert one.fingerprint() != made("GaussNewton").fingerprint()
    assert one.fingerprint() != made(training=True).fingerprint()
    x, y = data()
    assert one.fingerprint() != Hessian(Pipe(layered(), [2, 2], 3), (x + 1, y), CE.whole, seed=SEED).fingerprint()
    before = one.fingerprint()
    assert before != Hessian(Pipe(layered(), [2, 2], 3, mixes_rows=True), (x, y), CE.whole, seed=SEED).fingerprint()
    with torch.autocast("cpu"):
        assert one.fingerprint() != before
    with torch.no_grad():
        model[0].weight.add_(1e-9)
    assert one.fingerprint() != before


class Scaled(nn.Module):
    """It does not print its number."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return (x * self.scale).sin()


def made_with(loss=CE.whole, act=nn.Tanh, frozen=0.0, params=None):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), act(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].weight.add_(frozen)
    return Hessian(model, data(), loss, params=params or ["2"], seed=SEED)


def test_a_fingerprint_tells_architectures_and_what_is_frozen_apart():
    makers = [
        made_with, partial(made_with, act=nn.ReLU), partial(made_with, act=partial(nn.LeakyReLU, 0.1)),
        partial(made_with, act=partial(nn.LeakyReLU, 0.2)), partial(made_with, frozen=1e-9),
        partial(made_with, params=["0"]),
        *[partial(made_with, act=partial(Scaled, scale)) for scale in (1, 0.5, numpy.float32(2), numpy.float32(3))],
    ]
    prints = [make().fingerprint() for make in makers]
    assert len(set(prints)) == len(prints)
    assert prints == [make().fingerprint() for make in makers]


class Between(nn.Module):
    """Blocks between what the model computes with a number and a buffer of its own, which no state_dict has."""

    def __init__(self, power, table):
        super().__init__()
        torch.manual_seed(1)
        self.blocks, self.power = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), power
        self.register_buffer("table", torch.full((3,), table), persistent=False)

    def forward(self, x):
        hidden = x * self.table
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden * self.power


def test_a_fingerprint_tells_what_stays_in_a_model_that_was_cut_apart():
    x, y = torch.randn(4, 3), torch.randn(4, 3)

    def printed(power, table):
        pipe = Pipe(Between(power, table), None, 2, sample=x[:2], devices=["cpu"] * 2)
        return Hessian(pipe, (x, y), nn.functional.mse_loss).fingerprint()

    choices = [(1.0, 1.0), (2.0, 1.0), (1.0, 2.0)]
    assert len({printed(*choice) for choice in choices}) == len(choices)
    assert printed(1.0, 1.0) == printed(1.0, 1.0)


class Smoothed:
    def __init__(self, by):
        self.by = by

    def __call__(self, out, y):
        return functional.cross_entropy(out, y, label_smoothing=self.by)

    def method(self, out, y):
        return self(out, y)


def closed_over(value):
    return lambda out, y: functional.cross_entropy(out, y, weight=value)


SCRIPTS = {
    "a global number": "def loss(out, y): return functional.cross_entropy(out, y) * value",
    "a global table": "table = {'by': value}\ndef loss(out, y): return functional.cross_entropy(out, y) * table['by']",
    "a global of a helper": "def scaled(x): return x * value\ndef loss(out, y): return scaled(out.square().mean())",
    "a global of a class": "class Loss:\n def __call__(self, out, y): return out.sum() * value\nloss = Loss()",
    "a global of a module": "class Loss(Module):\n def forward(self, out, y): return out.sum() * value\nloss = Loss()",
    "a global within a comprehension": "def loss(out, y): return sum([value * row.sum() for row in out])",
}


def test_an_identity_is_the_same_where_a_logger_that_a_loss_names_has_been_used():
    logger = logging.getLogger("a loss")
    loss = of_script("def loss(out, y): value.debug('used'); return out.sum()", logger)
    before = value_in_words(loss)
    loss(torch.ones(1), None)
    logging.getLogger("a loss.within").debug("used")
    assert value_in_words(loss) == before


def test_an_identity_does_not_look_at_what_torch_keeps_in_globals():
    """Its compiler writes them: a compiled loss would be another one in each process."""
    assert "handle_torch_function: " not in value_in_words(functional.cross_entropy)


def of_script(text, value):
    namespace = {"functional": functional, "Module": nn.Module, "value": value, "__name__": "script"}
    exec(text, namespace)
    return namespace["loss"]


LOSS_PAIRS = {
    **{what: [lambda t=text, v=v: of_script(t, v) for v in (1.0, 2.0)] for what, text in SCRIPTS.items()},
    "a global tensor": [
        lambda v=v: of_script(SCRIPTS["a global number"], torch.full((3,), v)) for v in (1.0, 2.0)
    ],
    "a setting": [lambda s=s: nn.CrossEntropyLoss(label_smoothing=s) for s in (0.1, 0.2)],
    "a buffer": [lambda w=w: nn.CrossEntropyLoss(weight=torch.tensor([w, 1.0, 1.0]).double()) for w in (1.0, 2.0)],
    "a partial": [lambda s=s: partial(functional.cross_entropy, label_smoothing=s) for s in (0.1, 0.2)],
    "an object": [lambda s=s: Smoothed(s) for s in (0.1, 0.2)],
    "a method": [lambda s=s: Smoothed(s).method for s in (0.1, 0.2)],
    "a default": [lambda s=s: lambda out, y, by=s: functional.cross_entropy(out, y) * by for s in (1.0, 2.0)],
    "a closure": [lambda w=w: closed_over(torch.tensor([w, 1.0, 1.0]).double()) for w in (1.0, 2.0)],
    "a number of numpy": [lambda w=w: closed_over(numpy.float32(w)) for w in (1.0, 2.0)],
    "a fraction": [lambda n=n: closed_over(Fraction(1, n)) for n in (2, 3)],
    "a range": [lambda n=n: closed_over(range(n)) for n in (2, 3)],
    "an array": [lambda w=w: closed_over(numpy.array([w, 1.0, 1.0])) for w in (1.0, 2.0)],
    "a set": [lambda v=v: closed_over({"ids", v}) for v in ("x", "y")],
    "a module": [lambda v=v: closed_over(v) for v in (functional, numpy)],
    "a builtin": [lambda v=v: closed_over(v) for v in (max, min)],
    "a constant": [lambda: lambda out, y: out.sum() * 2, lambda: lambda out, y: out.sum() * 3],
    "a function": [
        lambda: lambda out, y: functional.mse_loss(out, y), lambda: lambda out, y: functional.l1_loss(out, y)
    ],
}


@pytest.mark.parametrize("what", LOSS_PAIRS)
def test_an_identity_tells_losses_apart_and_has_no_address(what):
    one, other = LOSS_PAIRS[what]
    assert value_in_words(one()) == value_in_words(one()) != value_in_words(other())
    assert " at 0x" not in value_in_words(one())


ESTIMATES = {
    "trace": {"samples": 3}, "diagonal": {"samples": 3}, "frobenius_squared": {"samples": 3}, "density": {"steps": 3},
    "layer_traces": {"samples": 3}, "per_layer": {}, "layer_densities": {"steps": 3}, "top_eigenpairs": {},
}  # fmt: skip
OTHER = {
    "seed": ([None, 2.0, "2", True, torch.ones(2), iter([1])], TypeError, "seed is .* Give a whole number"),
    "show": (["no", 1, torch.ones(2), []], TypeError, "show is .* Use True or False"),
    "resume": ([True, 3, [], b"run.pt"], TypeError, "resume is .* Give a path"),
    "groups": ([True, 3, "0", [1, 2]], TypeError, "groups is .*: give layer -> names"),
    "k": ([None, "2", [], torch.ones(2), 1.5], TypeError, "k is .* Give a whole number"),
}


@pytest.mark.parametrize("what", OTHER)
@pytest.mark.parametrize("estimate", ESTIMATES)
def test_other_settings_of_an_estimate_are_refused_in_words(estimate, what):
    op = made("Hessian")
    values, kind, words = OTHER[what]
    compute = getattr(op, estimate)
    for value in values if what in inspect.signature(compute).parameters else ():
        with pytest.raises(kind, match=words):
            compute(**{**ESTIMATES[estimate], what: value})


def test_settings_of_a_trace_that_are_numbers_of_another_kind_are_taken_or_refused_in_words():
    op = made("Hessian")
    for bound in ("rel", "abs"):
        assert op.trace(20, min_samples=2, **{bound: 2**70}).samples < 20
        assert op.trace(20, min_samples=2, **{bound: Fraction(1, 2**40)}).samples == 20
    for sketch in ("2", [], torch.ones(2), 1.5):
        with pytest.raises(TypeError, match="sketch is .* Give a whole number"):
            op.trace(6, method="hutch++", sketch=sketch)
    for method in ([], {}, None, "gmres"):
        with pytest.raises(ValueError, match="method must be 'cg' or 'minres'"):
            op.inverse(1.0, method=method)
