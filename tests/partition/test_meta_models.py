"""Law: a model without numbers is cut as one that has some, and computes the same once it gets them."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch
from block_models import MODELS, REFUSED, Chain, doubled, ids
from cover import either
from families import of_family
from peak import peak_bytes
from torch import nn
from torch.utils._pytree import tree_leaves

from partition import PartitionError, to_sequential
from partition.models import twin
from pipeline import Pipe, meta_parameters


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def on_meta(build):
    with meta_parameters():
        return build()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True))


def agree(build, sample, x):
    """The layers of a model on the meta device, with values, compute what those of one that always had them do."""
    real, empty = build().eval(), on_meta(build).eval()
    expected, layers = to_sequential(real, sample), to_sequential(empty, sample)
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    assert {id(tensor) for tensor in layers.parameters()} == {id(tensor) for tensor in empty.parameters()}
    assert {id(module) for module in empty.modules() if not len(module._modules)} <= set(map(id, layers.modules()))
    state = expected.state_dict()
    assert list(layers.state_dict()) == list(state)
    pipe = Pipe(layers, [2, len(layers) - 2], chunks=2, devices=["cpu"] * 2, materialize=state)
    assert same(list(pipe.state_dict().values()), list(state.values()))
    for training in (False, True):
        found = []
        for module in (layers, expected):
            torch.manual_seed(3)
            found.append(module.train(training)(x))
        assert same(*found)


@pytest.mark.parametrize("name", either(list(MODELS)[::2], list(MODELS)))
def test_a_model_without_numbers_is_cut_as_one_that_has_some(name):
    kind, inputs = MODELS[name]
    agree(lambda: kind().double(), doubled(inputs(4)), doubled(inputs(3)))


CUT = ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "MixtralForCausalLM", "BartForConditionalGeneration"]


@pytest.mark.parametrize("family", CUT)
def test_models_of_transformers_without_numbers_are_cut(family):
    inputs = of_family(family)[1]
    agree(lambda: of_family(family)[0], inputs(4), inputs(3))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_cut_is_refused_without_numbers_too(kind):
    with pytest.raises(PartitionError, match=re.escape(REFUSED[kind])):
        to_sequential(on_meta(kind), ids(4))


class Tables(Chain):
    """Buffers of the model itself, and of a module without parameters, that a state_dict has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("last", torch.randn(4))
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))
        self.scale = nn.BatchNorm1d(6, affine=False)
        self.scale.running_mean.normal_()
        self.blocks = nn.ModuleList(Ordered(4, 4) for _ in range(3))

    def forward(self, ids):
        x = self.scale(self.embed(ids) + self.shift)
        for block in self.blocks:
            x = block(x, self.order, self.shift)
        return self.finish(x, ids)

    def finish(self, x, ids):
        return x + self.last


class Ordered(nn.Linear):
    def forward(self, x, order, shift):
        return super().forward(x)[..., order] * shift


def test_buffers_of_a_model_get_their_values():
    agree(Tables, ids(4), ids(3))
    to_sequential(on_meta(Again), ids(4))  # the end has a buffer that blocks are called with


class Again(Tables):
    def finish(self, x, ids):
        return x + self.shift


class Hides(Chain):
    """A parameter of the model that its forward takes from elsewhere."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.hidden = {"scale": self.scale}

    def finish(self, x, ids):
        return x * self.hidden["scale"]


class HidesWhatAModuleHas(Chain):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(self.embed, nn.Linear(4, 4))
        self.hidden = [self.embed[0].weight, self.embed[1]]

    def finish(self, x, ids):
        return self.hidden[1](x) @ self.hidden[0].T


@pytest.mark.parametrize("build", [Hides, HidesWhatAModuleHas])
def test_parameters_beside_the_tables_of_a_model_are_found_by_their_names(build):
    agree(build, ids(4), ids(3))


class HidesItsOwn(Hides):
    """No table of a module has it: an optimizer of `model.parameters()` would not train it either."""

    def __init__(self):
        super().__init__()
        self.hidden = {"scale": nn.Parameter(torch.ones(4))}


@pytest.mark.parametrize("build", [HidesItsOwn, lambda: on_meta(HidesItsOwn)])
def test_parameters_that_no_module_has_are_refused(build):
    with pytest.raises(PartitionError, match="AttributeError: 'HidesItsOwn' object has no attribute 'hidden'"):
        to_sequential(build(), ids(4))


def test_what_would_never_get_values_is_refused():
    def build():
        model = Chain()
        model.register_buffer("table", torch.ones(4), persistent=False)
        model.blocks[1].register_buffer("other", torch.ones(4), persistent=False)
        return model

    with torch.device("meta"):
        model = build()
    with pytest.raises(PartitionError, match="no state_dict has: table, blocks.1.other. Build the model under"):
        to_sequential(model, ids(4))
    assert len(to_sequential(on_meta(build), ids(4))) == 5
    with pytest.raises(PartitionError, match="the sample is on the meta device"):
        to_sequential(on_meta(build), ids(4).to("meta"))


def test_what_has_values_keeps_them():
    model = Chain()
    model.embed = on_meta(lambda: nn.Embedding(11, 4))
    before = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
    layers = to_sequential(model, ids(4))
    assert layers[1] is not None and [name for name, value in model.state_dict().items() if value.is_meta] == [
        "embed.weight"
    ]
    assert {id(parameter) for parameter in layers.parameters()} == {id(parameter) for parameter in model.parameters()}
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_made_up_numbers_differ_between_parameters_and_are_about_as_large_as_initial_ones(dtype):
    with torch.device("meta"):
        matrices = [nn.Linear(64, 256).weight, nn.Linear(64, 256).weight, nn.Conv2d(8, 8, 3).weight]
        tensors = [*matrices, nn.Embedding(99, 64).weight, nn.Linear(1, 9).bias, torch.empty(3, 0), torch.empty(())]
        tensors.append(torch.empty(2, 2).long())
    tensors = [tensor if tensor.dtype == torch.long else tensor.to(dtype) for tensor in tensors]
    numbers = twin._numbers(tensors, torch.device("cpu"))
    again = twin._numbers(tensors, torch.device("cpu"))
    assert len({number.untyped_storage()._cdata for number in numbers.values()}) == len(tensors)
    for tensor in tensors:
        number = numbers[id(tensor)]
        assert number.shape == tensor.shape and number.dtype == tensor.dtype
        assert torch.equal(number, again[id(tensor)])
        if tensor.dim() > 1 and tensor.numel() and tensor.is_floating_point():
            assert 0.5 < number.float().std() * min(tensor.numel() / max(tensor.shape), 72) ** 0.5 < 2
        elif tensor.numel():
            assert 0.5 <= number.min() and number.max() <= 1.5
    weights = [numbers[id(tensor)] for tensor in tensors[:2]]
    assert not torch.equal(*weights)


class Wide(Chain):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 256), nn.ModuleList(nn.Linear(256, 256) for _ in range(16))


@pytest.mark.parametrize("work", ["build", "cut"])
def test_the_whole_model_is_never_held(work):
    one, made = 4 * 256 * 257, []
    to_sequential(on_meta(Chain), ids(1))
    if work == "cut":
        made.append(on_meta(Wide))
    peak = peak_bytes(lambda: to_sequential(made[0], ids(1)) if made else on_meta(Wide))
    assert one <= peak + one <= 5 * one  # the whole model is 16; of a cut a matrix, and the gradients of two


def test_made_up_numbers_go_with_the_cut():
    refs = []

    class Twin(twin.Twin):
        def __init__(self, *args):
            super().__init__(*args)
            refs.extend(map(weakref.ref, self.model.parameters()))

    to_sequential(Chain(), ids(4))  # torch imports modules, whose frames are in cycles
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twin, "Twin", Twin)
        gc.collect()
        gc.disable()
        try:
            layers = to_sequential(on_meta(Chain), ids(4))
        finally:
            gc.enable()
    assert len(layers) == 5 and len(refs) == 7 and all(ref() is None for ref in refs)
