"""Law: the layers that a model is cut into compute what the model computes, with its own parameters, in any Pipe."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import re
import weakref
from itertools import groupby

import numpy
import pytest
import torch
from block_models import (
    MIXING,
    MODELS,
    REFUSED,
    Chain,
    Gpt,
    Graph,
    Moods,
    OnTheHost,
    ResNet,
    Skips,
    Tells,
    UNet,
    called,
    compiled,
    doubled,
    ids,
    padded,
)
from cover import either
from families import of_family
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.utils._pytree import tree_leaves

from partition import PartitionError, split, to_sequential
from partition.models.inputs import UnsentInputError
from partition.models.outline import Outline
from partition.models.parts import Block
from pipeline import Pipe
from scheduler import Kind

HALF, OTHER_HALF = (either(list(MODELS)[first::2], list(MODELS)) for first in range(2))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def made(name, rows=4):
    kind, inputs = MODELS[name]
    return kind().double(), doubled(inputs(rows)), lambda count: doubled(inputs(count))


def rows_of(x, rows):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda leaf: leaf[rows], x)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True))


def hidden(out):
    return tree_leaves(out)[0]


@pytest.mark.parametrize("name", MODELS)
def test_layers_compute_what_the_model_computes(name):
    model, sample, inputs = made(name)
    layers = to_sequential(model, sample)
    model.eval(), layers.eval()
    for rows in (4, 1, 7):
        x = inputs(rows)
        out, expected = layers(x), called(model, x)
        assert same(out, expected)
        weight = torch.randn_like(hidden(out))
        grads = []
        for each in (out, expected):
            model.zero_grad()
            (hidden(each) * weight).sum().backward()
            grads.append({key: each.grad for key, each in model.named_parameters()})
        for key, grad in grads[0].items():
            other = grads[1][key]
            assert (grad is None) == (other is None), key
            assert grad is None or torch.allclose(grad, other, rtol=1e-12, atol=1e-14), key


def laid_out(value):
    return [(leaf.shape, leaf.stride()) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_called_with_tensors_that_lie_in_memory_as_those_of_the_model(name):
    model, sample, inputs = made(name)
    layers = to_sequential(model, sample).eval()
    seen = []
    for block in {part.block for part in layers if isinstance(part, Block)}:
        block.register_forward_pre_hook(lambda *call: seen.append((call[0], laid_out(call[1:]))), with_kwargs=True)
    for turn in (lambda x: x, turned):
        x = turn(inputs(5))
        out = called(model.eval(), x)
        expected = seen.copy()
        seen.clear()
        assert same(layers(x), out)
        assert seen == expected
        seen.clear()


def turned(x):
    """Pictures as channels_last, sequences as by places."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf.movedim(1, -1).contiguous().movedim(-1, 1) if leaf.dim() > 2 else leaf, x
    )


@pytest.mark.parametrize("name", HALF)
def test_layers_draw_in_train_mode_what_the_model_draws(name):
    model, sample, inputs = made(name)
    layers, x, found = to_sequential(model, sample).train(), inputs(5), []
    start = copy.deepcopy(model.state_dict())
    for compute in (layers, lambda x: called(model, x)):
        model.load_state_dict(start)
        torch.manual_seed(5)
        found.append([*tree_leaves(compute(x)), torch.rand(3), *[each.clone() for each in model.state_dict().values()]])
    assert same(*found)


@pytest.mark.parametrize("name", OTHER_HALF)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_layers_draw_what_a_model_draws_of_which_all_or_some_modules_are_in_train_mode(name, every):
    model, sample, inputs = made(name)
    for number, module in enumerate(model.modules()):
        module.training = number % every == 0
    layers, x, found = to_sequential(model, sample), inputs(5), []
    for module in (layers, model):
        torch.manual_seed(7)
        found.append(layers(x) if module is layers else called(model, x))
    assert same(*found)


@pytest.mark.parametrize("name", HALF)
def test_layers_hold_the_models_own_parameters_and_buffers(name):
    model, sample, _ = made(name)
    layers = to_sequential(model, sample)
    pairs = zip(layers.named_parameters(), model.named_parameters(), strict=True)
    assert all(name == key and parameter is own for (name, parameter), (key, own) in pairs)
    pairs = zip(layers.state_dict().items(), model.state_dict().items(), strict=True)
    assert all(name == key and value.data_ptr() == own.data_ptr() for (name, value), (key, own) in pairs)


@pytest.mark.parametrize("name", OTHER_HALF)
def test_the_model_is_left_as_it_was(name):
    model, sample, _ = made(name)
    model.train()
    list(model.children())[0].eval()
    before = [module.training for module in model.modules()]
    values = {key: value.clone() for key, value in model.state_dict().items()}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    state = torch.get_rng_state()
    layers = to_sequential(model, sample)
    assert all(layer.training for layer in layers)
    assert torch.equal(state, torch.get_rng_state())
    assert before == [module.training for module in model.modules()]
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_pythons_and_numpys_generators_are_left_as_they_were():
    """Only torch's was."""

    class Draws(Chain):
        def forward(self, ids):
            draws.append(random.random() + numpy.random.rand())
            return super().forward(ids)

    draws, before = [], (random.getstate(), pickle.dumps(numpy.random.get_state()))
    to_sequential(Draws(), ids(4))
    assert draws and before == (random.getstate(), pickle.dumps(numpy.random.get_state()))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", HALF)
def test_a_pipe_of_the_layers_is_a_loop_over_the_model(name, checkpoint):
    model, sample, inputs = made(name)
    model.eval()
    settings = {"checkpoint": checkpoint, "mixes_rows": True} if name in MIXING else {"checkpoint": checkpoint}
    pipe = Pipe(model, sample=sample, balance=None, chunks=2, devices=["cpu"] * 3, **settings)
    x = inputs(4)
    target = torch.randn_like(hidden(called(model, x)).detach())

    def loss_fn(out, target):
        return ((hidden(out) - target) ** 2).mean()

    for _ in range(3):
        model.zero_grad()
        step = pipe.step(x, target, loss_fn=loss_fn)
        grads = {key: each.grad for key, each in model.named_parameters()}
        model.zero_grad()
        total = 0
        for rows in (slice(0, 2), slice(2, 4)):
            loss = loss_fn(called(model, rows_of(x, rows)), target[rows]) / 2
            loss.backward()
            total += loss.detach()
        assert torch.equal(step.loss, total)
        for key, each in model.named_parameters():
            assert (grads[key] is None) == (each.grad is None), key
            assert each.grad is None or torch.allclose(grads[key], each.grad, rtol=1e-12, atol=1e-14), key


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_dropout_and_running_statistics_are_the_same_however_it_is_cut(name):
    model, sample, inputs = made(name)
    x, found = inputs(5), []
    start = copy.deepcopy(model.state_dict())
    layers = to_sequential(model, sample).train()
    target = torch.randn_like(hidden(called(model, x)).detach())
    for balance in ([len(layers)], [1, len(layers) - 1], [2, 1, len(layers) - 3]):
        for checkpoint in ("always", "never"):
            model.load_state_dict(start)
            model.zero_grad()
            torch.manual_seed(3)
            pipe = Pipe(layers, balance, chunks=3, devices=["cpu"] * len(balance), checkpoint=checkpoint)
            step = pipe.step(x, target, loss_fn=lambda out, target: ((hidden(out) - target) ** 2).mean())
            found.append(([step.loss, *model.state_dict().values()], [each.grad for each in model.parameters()]))
    for numbers, grads in found:
        assert same(numbers, found[0][0])
        for one, other in zip(grads, found[0][1], strict=True):  # a tied weight's are summed in another order
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert not same(called(model, x), called(model.eval(), x))  # there was something to be the same


class Recurrent(Chain):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(self.embed, nn.LSTM(4, 4, batch_first=True), First())


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


def test_a_model_with_an_lstm_may_be_cut_after_its_parameters_were_others():
    model, x = Recurrent(), ids(4)
    model(x)
    model.embed[1].weight_hh_l0 = nn.Parameter(torch.ones(16, 4))  # its next forward sets its lists of parameters
    assert torch.equal(to_sequential(model, x)(x), model(x))


def test_a_number_that_the_beginning_computes_is_computed_again_where_it_is_used():
    layers = to_sequential(model := OnTheHost().eval(), ids(4))
    for x in (ids(3), ids(5)):
        assert torch.equal(layers(x), model(x))


class Coding(nn.Linear):
    def forward(self, x):
        made = super().forward(x)
        return made, made.argmax(-1)


class UsesCodes(nn.Module):
    """What a block returns is chosen for some rows, of which the sample may have none."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Coding(4, 4), *[nn.Linear(4, 4) for _ in range(3)]])
        self.table = nn.Embedding(4, 4)

    def forward(self, x):
        hidden, codes = self.blocks[0](x)
        for block in self.blocks[1:]:
            hidden = block(hidden)
        return hidden + self.table(torch.where(x.sum(-1) > 0, codes, 0))


def test_whole_numbers_pass_by_though_the_sample_does_not_use_them():
    model = UsesCodes().eval()
    layers = to_sequential(model, -torch.rand(4, 4))
    for x in (-torch.rand(3, 4), torch.rand(3, 4), torch.randn(9, 4)):
        assert torch.equal(layers(x), model(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch's own compiler
def test_blocks_that_compile_go_on_to_compile_when_the_model_has_been_cut():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return x * torch.sigmoid(self.layer(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Gate() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.tanh()

    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    torch.compiler.reset()
    model, x = Model(), torch.randn(2, 4)
    for block in model.blocks:
        block.compile(backend=backend)
    layers = to_sequential(model, x)
    assert not compiled
    expected = model(x)
    number = len(compiled)
    assert number and torch.equal(layers(x), expected) and len(compiled) == number
    torch.compiler.reset()
    compiled.clear()
    layers = to_sequential(model, x)
    assert torch.equal(layers(x), expected) and len(compiled) == number
    torch.compiler.reset()


def test_compiled_modules_within_blocks_and_sparse_buffers_are_the_models():
    model = Graph().eval()
    layers = to_sequential(model, ids(4))
    for rows in (1, 5):
        assert torch.equal(layers(x := ids(rows)), model(x))
    assert len(layers) == 5


@pytest.mark.parametrize("mode", [True, False])
def test_a_script_within_blocks_stays_in_its_mode_and_follows_the_layers(mode):
    model = Chain()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), compiled(nn.Dropout(0.5))) for _ in range(3))
    layers = to_sequential(model.train(mode), ids(4))
    dropouts = [block[1] for block in model.blocks]
    for training in (mode, not mode, mode):
        assert all(module.training == training for module in [*model.modules(), *layers.modules()])
        assert any(bool((dropout(torch.ones(64)) == 0).any()) for dropout in dropouts) == training
        layers.train(not training)


def test_what_passes_by_travels_as_long_as_it_is_read():
    model = UNet().eval()
    layers, value, there = to_sequential(model, x := torch.randn(4, 3, 8, 8)), x, []
    for layer in layers[:-1]:
        value = layer(value)
        there.append([i for i, passing in enumerate(value[2]) if passing is not None])
    assert max(map(len, there)) == 2 and there[0] == there[-1] == []
    assert torch.equal(layers[-1](value), model(x))


def test_a_block_that_returns_another_plain_value_than_on_the_sample_is_refused():
    layers = to_sequential(Tells().eval(), torch.ones(4, 4))
    layers(torch.ones(3, 4))
    with pytest.raises(PartitionError, match="block 'blocks.0' returned -1.0, and 1.0 on the sample by which the"):
        layers(-torch.ones(3, 4))


class Unknown(nn.Linear):
    """Returns nan beside the hidden state, in the place of a number that it does not compute."""

    def forward(self, x):
        return super().forward(x).tanh(), float("nan")


class Unknowns(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Unknown(4, 4) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x, number = block(x)
        return x if number != number else x * number


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # by torch, of its own copy of a tree
@pytest.mark.parametrize("pickled", [False, True])
def test_blocks_that_return_nan_on_the_sample_may_do_so_in_each_call(pickled):
    model = Unknowns().eval()
    layers = to_sequential(model, torch.ones(4, 4))
    assert sum(isinstance(layer, Block) for layer in layers) == 3
    layers = pickle.loads(pickle.dumps(layers)) if pickled else layers
    for rows in (1, 3):
        assert torch.equal(layers(x := torch.randn(rows, 4)), model(x))


def test_what_is_not_read_again_does_not_travel():
    value = to_sequential(Chain(), ids(4))[0](ids(3))
    assert value == (value[0], (((3, 6), "int64"),), ()) and value[0][0].shape == (3, 6, 4)
    x = padded(3)
    (state,), (first, padding), passing = to_sequential(Gpt(), padded(4))[0](x)
    assert not passing and state.shape == (3, 6, 8) and padding is x["padding"]


@given(st.lists(st.integers(0, 5), min_size=2, max_size=6))
def test_what_blocks_are_called_with_is_that_of_this_call(turns):
    """Masks are kept as long as their inputs live; others come, or the same tensor is changed."""
    model = Gpt().eval()
    layers = to_sequential(model, padded(2))
    several = [padded(2) for _ in range(3)]
    for turn in turns:
        x = several[turn % 3]
        if turn > 2:
            x["padding"][:, -1].logical_not_()
        assert torch.equal(layers(x), model(**x))


class Biased(Chain):
    """Its blocks add what the model multiplies, without their inputs, and what has the type of the hidden state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.randn(4, 4))
        self.project, self.blocks = nn.Linear(4, 4), nn.ModuleList(Sum() for _ in range(3))

    def forward(self, ids):
        x, product = self.project(self.embed(ids)), self.angles @ self.angles
        bias = torch.full((4,), 0.1234567, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, product, bias)
        return x


class Sum(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x, product, bias):
        return super().forward(x) + (x.unsqueeze(-2) * product).sum(-1) + bias


def test_what_blocks_are_called_with_is_of_the_types_that_autocast_has_now():
    model = Biased().eval()
    layers, x = to_sequential(model, ids(2)), ids(2)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            out, expected = layers(x), model(x)
            assert out.dtype == expected.dtype and torch.equal(out, expected)
    assert same(layers(x), model(x))


@pytest.fixture
def runs(monkeypatch):
    """The runs of outlines: the number of the block at which each ended."""
    found, run = [], Outline.run
    monkeypatch.setattr(Outline, "run", lambda self, *args: [found.append(args[0]._end), run(self, *args)][1])
    return found


def test_masks_are_made_once_for_all_blocks_of_a_call(runs):
    layers, made = to_sequential(Gpt().eval(), padded(2)), []
    runs.clear()
    x = padded(2)
    layers(x)
    assert runs == [0, 2, None]  # the beginning, the blocks, the end
    (calls,) = layers[1].outline._last.calls.values()
    made += [weakref.ref(leaf) for leaf in tree_leaves(calls[1].kwargs) if isinstance(leaf, torch.Tensor)]
    assert made and all(each() is not None for each in made)
    del calls, x
    layers(padded(2))
    gc.collect()
    assert runs == [0, 2, None] * 2 and all(each() is None for each in made)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_masks_are_made_once_for_all_stages_of_a_thread_until_another_chunk_is_run(checkpoint, runs):
    model = Gpt().eval()
    pipe = Pipe(model, [2, 3], chunks=4, sample=padded(8), schedule="1f1b", checkpoint=checkpoint)

    def loss(out, target):
        return ((hidden(out) - target[..., None]) ** 2).mean()

    for _ in range(6):
        runs.clear()
        timeline = pipe.step(padded(8), ids(8), loss_fn=loss, trace=True).timeline
    events = sorted([event for lane in timeline.by_lane for event in lane], key=lambda event: event.start)
    chunks = [event.action.chunk for event in events if event.action.kind in (Kind.F, Kind.R)]
    assert runs.count(2) == len(list(groupby(chunks))) < len(chunks)


def test_a_copy_computes_with_its_own_parameters():
    model = Gpt().double().eval()
    layers = to_sequential(model, padded(2))
    other, x = copy.deepcopy(layers), padded(3)
    expected = layers(x)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert torch.equal(layers(x), expected) and not torch.allclose(other(x), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(other(x), layers(x))


@pytest.mark.parametrize("name", OTHER_HALF)
def test_second_derivatives_are_those_of_the_model(name):
    model, sample, inputs = made(name)
    layers, x = to_sequential(model.eval(), sample), inputs(4)
    chunks = 1 if name in MIXING else 2
    pipe = Pipe(layers, [2, len(layers) - 2], chunks, devices=["cpu"] * 2, checkpoint="always")
    params, products = [each for each in model.parameters() if each.requires_grad], []
    for compute in (pipe, lambda x: called(model, x)):
        with sdpa_kernel(SDPBackend.MATH):
            loss = (hidden(compute(x)) ** 2).mean()
            grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True, materialize_grads=True)
            products.append(torch.autograd.grad(sum((grad**2).sum() for grad in grads), params, materialize_grads=True))
    for one, other in zip(*products, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_a_module_under_the_name_of_a_method_is_refused():
    model = Chain()
    model.parameters = nn.ParameterList(model.blocks.parameters())  # as N-BEATS has it
    with pytest.raises(PartitionError, match="Chain keeps a module under the name of its method 'parameters': nothing"):
        to_sequential(model, ids(4))


@pytest.mark.parametrize("is_loaded", [False, True])
def test_lazy_modules_are_refused_until_they_have_run(is_loaded):
    model = Chain()
    model.blocks[1] = nn.LazyLinear(4)
    if is_loaded:
        model.blocks[1].load_state_dict(nn.Linear(4, 4).state_dict())
    with pytest.raises(PartitionError, match=r"lazy modules have not run yet: blocks\.1\. Call the model with a batch"):
        to_sequential(model, ids(4))
    x = ids(3)
    expected = model(x)
    assert torch.equal(to_sequential(model, ids(4))(x), expected)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_error_of_a_model_says_in_which_mode_it_was_called(mode):
    class InOneMode(Chain):
        def forward(self, ids):
            if self.training == (mode == "train"):
                raise ValueError("targets should not be None")
            return super().forward(ids)

    model = InOneMode().train(mode == "eval")
    with pytest.raises(ValueError, match="targets should not be None") as raised:
        to_sequential(model, ids(4))
    words = f"to_sequential called InOneMode with the sample in {mode} mode, without gradients: it must run so in both."
    assert [note.startswith(words) for note in raised.value.__notes__] == [True]
    assert model.training is (mode == "eval")


def test_the_error_of_a_model_that_differentiates_says_what_to_cut():
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x).tanh()
            return x.sum(1)

    class Forces(nn.Module):
        def __init__(self, energy):
            super().__init__()
            self.energy = energy

        def forward(self, x):
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    model, x = Energy().double(), torch.randn(5, 4).double().requires_grad_()
    with pytest.raises(RuntimeError, match="does not require grad") as raised:
        to_sequential(Forces(model), x)
    assert "without gradients: it must run so in both. Let a function around its Pipe diff" in raised.value.__notes__[0]
    grads = []
    for energy in (model, Pipe(model, [4, 3], 2, sample=x, devices=["cpu"] * 2)):
        grads.append(torch.autograd.grad(Forces(energy)(x).square().sum(), model.parameters(), allow_unused=True))
    for expected, grad in zip(*grads, strict=True):
        assert grad is expected is None or torch.allclose(grad, expected, rtol=1e-12, atol=1e-14)


def test_the_error_of_a_model_says_with_what_it_was_called():
    class OfFeatures(Chain):
        def forward(self, features):
            return {**features, "output": super().forward(features["ids"])}

    with pytest.raises(TypeError, match="unexpected keyword argument 'ids'") as raised:
        to_sequential(OfFeatures(), {"ids": ids(4)})
    assert raised.value.__notes__[0].endswith(" Its arguments were ids=; to hand it a dict, give (sample,).")
    layers = to_sequential(model := OfFeatures(), ({"ids": ids(4)},))
    x = ids(3)
    assert torch.equal(layers(({"ids": x},))["output"], model({"ids": x})["output"])

    class WithCache(OfFeatures):
        def forward(self, ids, **arguments):
            return self.inner(ids, use_cache=False, **arguments)

        def inner(self, ids, use_cache=True):
            return super().forward({"ids": ids})

    model = WithCache()
    model.blocks[0].forward = lambda x, use_cache=None: x
    with pytest.raises(TypeError, match="multiple values for keyword argument 'use_cache'") as raised:
        to_sequential(model, {"ids": ids(4)})
    assert " Its arguments were ids=, use_cache=; to hand it a dict, " in raised.value.__notes__[0]


@pytest.mark.parametrize("length, words", [
    (5, r"block 'blocks\.2' was called where 'blocks\.1' was on the sample by which the model was cut\. .*layerdrop=0"),
    (6, "block 'blocks.0' was called once more than it was on the sample by which the model was cut"),
])  # fmt: skip
def test_blocks_in_another_order_than_on_the_sample_are_refused(length, words):
    class Orders(Skips):
        def forward(self, ids):
            first = x = self.embed(ids)
            for number in {4: (0, 1, 2), 5: (0, 2), 6: (0, 1, 2, 0)}[ids.shape[1]]:
                x = self.blocks[number](x)
            return x + first

    layers = to_sequential(Orders(), torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(PartitionError, match=words):
        layers(torch.zeros(2, length, dtype=torch.long))


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_be_cut_are_refused_in_words(kind):
    with pytest.raises(PartitionError, match=re.escape(REFUSED[kind])):
        to_sequential(kind(), ids(4))


def test_blocks_may_be_named_and_wrong_names_are_refused():
    model = Gpt()
    assert len(to_sequential(model, ids(2), blocks="transformer.h")) == 5
    assert len(to_sequential(model, ids(2), blocks=["transformer.h.0", "transformer.h.1"])) == 4
    assert len(to_sequential(model, ids(2), blocks=["transformer.h.0", "transformer.h.2"])) == 5  # one between the two
    for blocks, words in (
        ("h", "blocks: Gpt has no module 'h'."),
        (["transformer.h", "transformer.h.0.linear1"], "block 'transformer.h.0.linear1' is called within block 'tran"),
        ([], "blocks is []. Name modules"), (3, "blocks is 3. Name modules"),
        ("last_drop.x", "blocks: Gpt has no module 'last_drop.x'"),
    ):
        with pytest.raises(PartitionError, match=re.escape(words)):
            to_sequential(model, ids(2), blocks=blocks)


class Supervised(Chain):
    """Each block has an output in train mode, of its own head or of that of the last; in eval mode the last one."""

    def __init__(self, of_its_own):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in self.blocks) if of_its_own else [self.head] * 3

    def forward(self, ids):
        x, outputs = self.embed(ids), []
        for block, head in zip(self.blocks, self.heads):
            x = block(x)
            if self.training:
                outputs.append(head(x))
        return outputs if self.training else self.head(x)


class Auxiliary(Chain):
    """In train mode alone a head behind the second block, whose output is returned beside the last."""

    def __init__(self):
        super().__init__()
        self.auxiliary, self.head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), nn.Linear(4, 2)

    def forward(self, ids):
        x, outputs = self.embed(ids), []
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.training and number == 1:
                outputs.append(self.auxiliary(x))
        return [*outputs, self.head(x)] if self.training else self.head(x)


@pytest.mark.parametrize("make", [lambda: Supervised(False), lambda: Supervised(True), Auxiliary])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_head_behind_blocks_in_train_mode_alone(checkpoint, make):
    def loss_of(outputs, targets):
        return torch.stack([(output - targets).square().mean() for output in outputs]).sum()

    torch.manual_seed(0)
    model = make().double()
    plain = copy.deepcopy(model)
    pipe = Pipe(model, None, 2, devices=["cpu"] * 2, checkpoint=checkpoint, sample=ids(4))
    for length in (6, 5, 7, 6):
        x, targets = ids(4, length), torch.randn(4, 1, 2, dtype=torch.float64)
        pipe.zero_grad()
        plain.zero_grad()
        loss = pipe.step(x, targets, loss_fn=loss_of).loss
        expected = loss_of(plain(x), targets)
        expected.backward()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=0, atol=1e-13)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-13)
    x = ids(4, 7)
    assert torch.equal(pipe.eval()(x), plain.eval()(x))


def test_what_follows_a_head_of_train_mode_alone_is_in_the_end():
    layers = to_sequential(Auxiliary(), ids(2))
    assert [type(layer).__name__ for layer in layers] == ["Beginning", "Block", "Block", "End"]
    modules = [name.rpartition(".")[0] for name, _ in layers[3].named_parameters()]
    assert list(dict.fromkeys(modules)) == ["blocks.2", "auxiliary.0", "auxiliary.1", "head"]


class Scales(Chain):
    """A block that is called with a number, one that no forward calls, statistics between others in train mode."""

    def __init__(self):
        super().__init__()
        self.scale, self.spare, self.watch = Scale(), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)

    def forward(self, ids):
        x = self.embed(ids) * self.scale(2)
        for block in self.blocks:
            x = block(x)
            if self.training:
                self.watch(x.flatten(0, 1))
        return x


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, times):
        return self.weight * times


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(3))

    def forward(self, x):
        for weight in self.weights:
            x = x @ weight
        return x


@pytest.mark.parametrize("model, blocks, words", [
    (Scales(), ["scale", "blocks"], "block 'scale' is not called with a tensor, or returns none: it has no hidden st"),
    (Scales(), ["blocks", "spare"], "block 'spare' is not called in a forward."),
    (Scales(), ["blocks"], "module 'watch' is called between blocks, and belongs to none. Name blocks that contain"),
    (Products(), None, "Products has no blocks: no modules that are called with a tensor and have most of its param"),
])  # fmt: skip
def test_what_is_no_block_is_refused(model, blocks, words):
    sample = ids(2) if isinstance(model, Scales) else torch.randn(2, 4)
    with pytest.raises(PartitionError, match=re.escape(words)):
        to_sequential(model, sample, blocks=blocks)


@pytest.mark.parametrize("only_in_training, words", [
    (False, "CountsOutside does not return on the sample what its parts return (the furthest number is"),
    (True, "CountsOutside does not return in train mode what its parts return (the furthest number is"),
])  # fmt: skip
def test_a_forward_that_reads_what_calls_change_outside_of_the_model_is_refused(only_in_training, words):
    calls = []

    class CountsOutside(Chain):
        def finish(self, x, ids):
            if self.training or not only_in_training:
                calls.append(ids)
            return x + len(calls)

    with pytest.raises(PartitionError, match=re.escape(words)):
        to_sequential(CountsOutside(), ids(2))


def test_layers_print_with_the_names_of_the_model():
    assert "(0): Beginning(\n    embed\n" in repr(to_sequential(Chain(), ids(2)))


class Hesitant(nn.Linear):
    """A block in which a call fails, and another takes its place."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.either = nn.Bilinear(4, 2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = self.either(x, x)
        except RuntimeError:
            x = self.either(x, x[..., :2])
        return super().forward(x).tanh()


def test_a_block_may_catch_what_a_module_in_it_raises() -> None:
    model, ids = Chain(), torch.arange(10).view(2, 5)
    model.blocks = nn.ModuleList(Hesitant() for _ in range(3))
    layers = to_sequential(model, ids)
    assert [type(layer).__name__ for layer in layers] == ["Beginning", "Block", "Block", "Block", "End"]
    assert torch.equal(layers(ids.flip(0)), model(ids.flip(0)))


class Stage(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def test_blocks_are_layers_rather_than_the_stages_that_they_fill():
    model = ResNet()
    model.layer1, model.layer2 = nn.Sequential(Stage(*model.layer1), Stage(*model.layer2)), nn.Identity()
    for each in (ResNet(), model):
        layers = to_sequential(each, torch.randn(4, 3, 8, 8))
        assert [type(layer).__name__ for layer in layers] == ["Beginning", *["Block"] * 4, "End"]


class Unlike(nn.Module):
    """Modules that follow each other, of which one alone has layers of one type, and few of the parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), Stage(nn.Linear(8, 8), nn.Linear(8, 8))
        self.third, self.fourth, self.head = nn.Bilinear(8, 8, 8), nn.Bilinear(8, 8, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.second(self.first(x))
        x = self.third(x, x)
        return self.head(self.fourth(x, x))


def test_modules_that_follow_each_other_are_blocks_rather_than_a_chain_in_one_of_them():
    model = Unlike()
    layers = to_sequential(model, torch.randn(4, 8))
    parameters = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    assert max(parameters) == sum(parameter.numel() for parameter in model.third.parameters())


class Pool(nn.MultiheadAttention):
    """It computes with the parameters of a module in it, which it does not call, and has most of the model's."""

    def __init__(self):
        super().__init__(8, 2, batch_first=True)

    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0][:, 0]


def test_a_module_that_calls_none_of_those_in_it_is_a_block_however_large():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 8, bias=False), Pool()).double()
    layers = to_sequential(nn.Sequential(Stage(*model)), torch.randn(4, 3, 4).double())
    x = torch.randn(5, 2, 4).double()
    assert torch.equal(layers(x), model(x))
    parameters = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    assert max(parameters) == sum(parameter.numel() for parameter in model[3].parameters())


class Forwards(Chain):
    """It calls the forwards of its blocks, and not the blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True) for _ in range(3)
        )

    def forward(self, ids):
        x = self.embed.forward(ids)
        for block in self.blocks:
            x = block.forward(x)
        return x


@pytest.mark.parametrize("of_its_own", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_blocks_may_be_called_by_their_forwards(training, of_its_own):
    model = Forwards().train(training)
    if of_its_own:
        model.blocks[1].forward = model.blocks[1].forward
    attributes = [{**vars(module)} for module in model.modules()]
    layers, x = to_sequential(model, ids(4)), ids(3)
    assert [type(layer).__name__ for layer in layers] == ["Beginning", *["Block"] * 3, "End"]
    assert [vars(module).keys() for module in model.modules()] == [found.keys() for found in attributes]
    outputs = []
    for run in (layers, model):
        torch.manual_seed(1)
        outputs.append(run(x))
    assert torch.equal(*outputs)
    grads = [torch.autograd.grad(out.square().sum(), list(model.parameters())) for out in outputs]
    assert all(map(torch.allclose, *grads))


def test_a_call_that_is_not_like_the_sample_is_refused():
    layers = to_sequential(Gpt().eval(), padded(2))
    with pytest.raises(PartitionError, match="for inputs like a dict of ids, padding; it is called with one tensor"):
        layers(ids(2))
    with pytest.raises(PartitionError, match="it is called with a dict of ids"):
        layers({"ids": ids(2)})
    words = r"a dict of ids, padding \(padding was one value, and is a list of 3\)\. .* cannot be cut into chunks\."
    with pytest.raises(PartitionError, match=words):
        layers({"ids": ids(2), "padding": [1, 2, 3]})
    with pytest.raises(PartitionError, match="the hidden state is torch.float64, and was torch.float32 when the model"):
        layers.double()(padded(2))


@pytest.mark.parametrize("x, words", [
    ((), r"like a tuple of 2; it is called with a tuple of 3\. Call"),
    (([], {}), r"with a tuple of 3 \(number 2 was a dict of state, and is a dict of nothing\)\. Call"),
    (([1], {"state": 0}), r"a tuple of 3 \(number 1 was a list of 0, and is a list of 1\)\. Call"),
    (([], {"state": (0, [1, 2])}), r"\(number 2\['state'\] was one value, and is a tuple of 2\)\. Call"),
])  # fmt: skip
def test_the_words_for_a_call_tell_it_from_the_sample(x, words):
    class Takes(Chain):
        def forward(self, ids, options, states=None):
            return super().forward(ids)

    sample = (ids(2), [], {"state": 1}) if x else (ids(2), {})
    layers = to_sequential(Takes(), sample)
    with pytest.raises(PartitionError, match=words):
        layers((ids(2), *(x or ({}, {}))))


def test_words_may_be_integers_of_another_type_where_their_embedding_is_a_block():
    model, sample, inputs = made("sees")
    layers, (words, images) = to_sequential(model.eval(), sample), inputs(3)
    assert any(isinstance(layer, Block) and layer.block is model.words for layer in layers)
    assert torch.equal(layers((words.int(), images)), model(words.int(), images))


class WithoutGradients(Chain):
    def forward(self, ids):
        y = x = self.embed(ids)
        with torch.no_grad():
            for block in self.blocks:
                y = block(y)
        return x * y


def test_what_blocks_are_called_with_without_gradients_has_them_behind_the_blocks():
    model = WithoutGradients()
    layers, x = to_sequential(model, ids(4), blocks="blocks"), ids(3)
    pairs = [torch.autograd.grad(each(x).sum(), model.embed.weight) for each in (layers, model)]
    assert same(*pairs)


class Branches(Chain):
    def finish(self, x, ids):
        return x if ids.size(1) < 8 else x * (ids == 0).sum()


def test_an_input_that_is_read_only_later_is_refused_where_it_is_read():
    layers = to_sequential(Branches(), ids(2))
    layers(ids(2, 7))
    expected = r"tensor 0 of the inputs is read after the beginning of the model \(eq\), w"
    with pytest.raises(UnsentInputError, match=expected):
        layers(ids(2, 8))


@pytest.mark.parametrize("read", [lambda ids: sum(ids.flatten().tolist()), lambda ids: int(ids.numpy().sum())])
def test_an_input_is_sent_where_python_reads_all_its_numbers_behind_blocks(read):
    class Reading(Chain):
        def finish(self, x, ids):
            return x * read(ids)

    model = Reading()
    layers, x = to_sequential(model, ids(4)), ids(3)
    assert torch.equal(layers(x), model(x))


def test_a_module_of_another_part_may_ask_for_the_sizes_among_its_arguments():
    """As embeddings of images of several sizes do."""
    class Patches(nn.Linear):
        def forward(self, images, sizes):
            longest = max(sizes.tolist())
            if not longest:
                raise ValueError("sizes must be positive")
            return super().forward(images)[:, :longest], longest

    class OfPatches(Chain):
        def forward(self, images, sizes):
            x, longest = self.embed(images, sizes)
            for block in self.blocks:
                x = block(x)
            return x * torch.arange(longest)[:, None]

    model = OfPatches()
    model.embed = Patches(6, 4)
    layers = to_sequential(model, (torch.randn(4, 5, 6), torch.tensor([2, 3, 1, 3])))
    x = torch.randn(3, 5, 6), torch.tensor([4, 2, 2])
    assert torch.equal(layers(x), model(*x))


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="model must be an nn.Module, got int"):
        to_sequential(3, ids(2))
    with pytest.raises(TypeError, match=re.escape("partition.to_sequential(model, x), where x is what it is called")):
        split(Skips(), [1])
    with pytest.raises(TypeError, match="partition.to_sequential"):
        Pipe(nn.Linear(2, 2))


# ------------------------------------------------------------------------------------------------------ transformers

def test_a_frozen_model_of_transformers_has_gradients_where_it_is_trained():
    model, inputs = of_family("LlamaForCausalLM")
    model.requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(True)
    pipe = Pipe(model, sample=inputs(4), balance=[2, 1, 2], chunks=2, devices=["cpu"] * 3, checkpoint="always")
    x = inputs(4)
    pipe.step(x, x["input_ids"], loss_fn=lambda out, y: nn.functional.cross_entropy(out["logits"].transpose(1, 2), y))
    with_grad = {name for name, each in model.named_parameters() if each.grad is not None}
    assert with_grad == {f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile reads it
@pytest.mark.parametrize("name", ["", "body", "body.inner.1", "often"])
def test_what_is_compiled_in_place_runs_in_its_part(name):
    for is_before in (True, False):
        model, x = Moods().double(), torch.rand(4, 4).double()
        told = model.get_submodule(name)
        if is_before:
            told.compile(backend="eager")
        layers = to_sequential(model, x)
        if not is_before:
            told.compile(backend="eager")
        for parameter in model.parameters():
            torch.nn.init.uniform_(parameter)
        torch.testing.assert_close(layers(x), model(x))


class Flexible(nn.Linear):
    def forward(self, x):
        query, key, value = super().forward(x).unsqueeze(1).chunk(3, -1)
        return x + flex_attention.flex_attention(query, key, value).squeeze(1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG:UserWarning")
def test_blocks_may_call_an_operator_of_higher_order(monkeypatch):
    """Frozen: flex attention has no backward on CPUs."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    model = nn.Sequential(nn.Linear(3, 16), *[Flexible(16, 48) for _ in range(3)]).requires_grad_(False).eval()
    layers = to_sequential(model, torch.randn(4, 5, 3), blocks=["1", "2", "3"])
    x = torch.randn(2, 7, 3)
    assert len(layers) == 5 and torch.equal(layers(x), model(x))


def test_a_model_that_is_compiled_whole_is_refused_in_words() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(PartitionError, match=r"compiled as a whole \(OptimizedModule, .* Give model\._orig_mod, and "):
        to_sequential(model, torch.ones(2, 4))
