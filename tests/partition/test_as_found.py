"""Law: a cut leaves a model as it was found, and its parts then keep what the model keeps, call by call."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict, deque

import numpy
import pytest
import torch
from block_models import MODELS
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from partition import PartitionError, to_sequential
from partition.contents import unwritten
from partition.models.as_found import AttributeSnapshot, as_found
from pipeline import Pipe, layer_seed


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Blocks(nn.Module):
    """Blocks; others keep something before them, in them, or behind them."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def before(self, x):
        return x

    after = before

    def forward(self, x):
        x = self.before(self.into(x))
        for block in self.blocks:
            x = block(x)
        return self.after(self.out(x))


class Counts(nn.Module):
    """It counts its calls, in a number and a list."""

    def __init__(self):
        super().__init__()
        self.calls, self.listed = 0, [0]

    def forward(self, x):
        self.calls += 1
        self.listed[0] += 1
        return x * (self.calls + self.listed[0])


class Initialised(nn.Module):
    """Its first batch says what its weight is, as in Glow (https://arxiv.org/abs/1807.03039, section 3.1)."""

    def __init__(self, flag):
        super().__init__()
        self.bias, self.done = nn.Parameter(torch.zeros(4)), False
        if flag == "buffer":
            del self.done
            self.register_buffer("done", torch.zeros((), dtype=torch.bool))

    def forward(self, x):
        if not self.done:
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
            self.done = True if isinstance(self.done, bool) else torch.ones((), dtype=torch.bool)
        return x + self.bias


class Averages(nn.Module):
    """It keeps a moving average in a buffer, in train mode: a new one each time, or the same one written."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training and self.in_place:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        elif self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Halves(nn.Module):
    """Its weight has other data in each call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.weight.data = self.weight.data / 2
        return x * self.weight


KEEPERS = {
    "counts": Counts, "initialised, by a flag": lambda: Initialised("attribute"),
    "initialised, by a buffer": lambda: Initialised("buffer"), "averages": lambda: Averages(False),
    "averages in place": lambda: Averages(True), "halves": Halves,
}  # fmt: skip
PLACES = ("before", "block", "after")


def keeping(name, place):
    torch.manual_seed(0)
    model = Blocks()
    if place == "block":
        for block in model.blocks:
            block.linear = nn.Sequential(KEEPERS[name](), block.linear)
    else:
        model.kept = KEEPERS[name]()
        setattr(type(model := _own_class(model)), place, lambda self, x: self.kept(x))
    return model


def _own_class(model):
    model.__class__ = type("Keeping", (type(model),), {})
    return model


def state_of(model):
    """What a model has: objects by their ids, and what is in them."""
    state = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            entries = dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value
            state[name, key] = id(value), entries
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            state[name, "contents of", key] = None if tensor is None else tensor.detach().clone()
    return state


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, other[key]), key
        elif key[1] in ("_parameters", "_buffers"):
            assert value[0] == other[key][0] and value[1].keys() == other[key][1].keys(), key
            assert all(tensor is other[key][1][name] for name, tensor in value[1].items()), key
        else:
            same = value == other[key] or value[0] == other[key][0] and value[1] is other[key][1]
            assert same or isinstance(value[1], int | float | str) and value[1] == other[key][1], key


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_leaves_a_model_as_it_was_found(name):
    model, sample = MODELS[name][0](), MODELS[name][1](4)
    found = state_of(model)
    try:
        to_sequential(model, sample)
    finally:
        assert_same_state(found, state_of(model))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", KEEPERS)
def test_a_module_of_its_own_keeps_what_it_keeps_in_the_plain_model(name, place):
    model = keeping(name, place)
    found = state_of(model)
    plain = copy.deepcopy(model)
    layers = to_sequential(model, torch.rand(4, 4))
    assert_same_state(found, state_of(model))
    for number in range(4):
        x = torch.randn(5, 4)
        assert torch.equal(layers(x), plain(x)), number
    for one, other in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["counts", "initialised, by a flag", "averages"])
def test_the_first_batch_of_a_pipe_is_the_first_that_the_model_sees(name, place):
    model = keeping(name, place)
    plain = copy.deepcopy(model)
    pipe = Pipe(model, chunks=1, sample=torch.rand(4, 4))
    x = torch.randn(6, 4)
    assert torch.equal(pipe(x), plain(x))


def kept_by(way):
    """A model whose own forward keeps something from call to call."""

    class Model(Blocks):
        def __init__(self):
            super().__init__()
            if way in ("number", "own table"):
                self.kept = 0
            elif way == "listed":
                self.kept = {"calls": [0]}
            elif way == "tensor":
                self.kept = torch.zeros(4)
            elif way == "parameter":
                self.kept = nn.Parameter(torch.zeros(4))

        def before(self, x):
            if way in ("number", "tensor"):
                self.kept += 1
            elif way == "own table":
                vars(self)["kept"] += 1
            elif way == "listed":
                self.kept["calls"][0] += 1
                return x * self.kept["calls"][0]
            elif way == "missing":
                self.kept = getattr(self, "kept", 0) + 1
            elif way == "first":  # which is no other on the sample
                self.kept = self.kept if hasattr(self, "kept") else x.detach().std().item()
            elif way == "last":
                before, self.kept = getattr(self, "kept", x), x.detach()
                return x + before.mean(0)
            elif way == "parameter":
                with torch.no_grad():
                    self.kept.add_(1)
            elif way == "train mode" and self.training:
                self.kept = getattr(self, "kept", 0) + 1
            return x * getattr(self, "kept", 1)

    return Model()


@pytest.mark.parametrize("way", [
    "number", "tensor", "own table", "listed", "missing", "first", "last", "parameter", "train mode",
])  # fmt: skip
def test_what_the_models_own_forward_keeps_is_refused_and_nothing_is_left(way):
    model = kept_by(way)
    found = state_of(model)
    words = "writes its parameter 'kept'" if way == "parameter" else "keeps 'kept' from one call to the next, and each"
    with pytest.raises(PartitionError, match=words):
        to_sequential(model, torch.rand(4, 4))
    assert_same_state(found, state_of(model))


def test_what_a_forward_sets_and_then_reads_is_cut():
    class Sets(Blocks):
        def before(self, x):
            self.size, self.mean, self.log = x.shape[0], x.mean(), [*getattr(self, "log", []), 1]
            return x

        def after(self, x):
            return x * self.size + self.mean

    model = Sets()
    layers = to_sequential(model, torch.rand(4, 4))
    assert not {"size", "mean", "log"} & vars(model).keys()
    for rows in (3, 5):
        x = torch.rand(rows, 4)
        assert torch.equal(layers(x), model(x))


def test_a_module_that_writes_a_buffer_is_in_one_part_and_what_it_returns_travels():
    class Coded(Averages):
        def forward(self, x):
            distance = (x - self.mean).square().mean(1)
            return super().forward(x), distance

    class Model(Blocks):
        def __init__(self):
            super().__init__()
            self.coded = Coded(True)

        def forward(self, x):
            x, distance = self.coded(self.blocks[0](self.into(x)))
            return self.out(self.blocks[2](self.blocks[1](x))), distance

    model = Model()
    layers, plain = to_sequential(model, torch.rand(4, 4)), copy.deepcopy(model)
    for rows in (4, 3, 5):
        x = torch.rand(rows, 4)
        assert all(map(torch.equal, layers(x), plain(x)))


def test_what_a_forward_sets_of_its_parameters_is_put_back():
    class Sets(Blocks):
        def before(self, x):
            for parameter in list(self.parameters())[1:3]:
                parameter.requires_grad_(False)
            return x

    model = Sets()
    kept = [parameter.requires_grad for parameter in model.parameters()]
    layers = to_sequential(model, torch.rand(4, 4))
    assert [parameter.requires_grad for parameter in model.parameters()] == kept and all(kept)
    x = torch.rand(3, 4)
    assert torch.equal(layers(x), model(x))


def test_a_hook_that_was_there_stays_and_can_be_removed_and_one_that_comes_is_removed():
    weight, calls = nn.Parameter(torch.ones(2)), []
    handle = weight.register_hook(lambda grad: calls.append("there before"))
    with unwritten([weight]):
        weight.register_hook(lambda grad: calls.append("came"))
        weight.register_post_accumulate_grad_hook(lambda _: calls.append("came"))
    (2 * weight).sum().backward()
    assert calls == ["there before"]
    handle.remove()
    (2 * weight).sum().backward()
    assert calls == ["there before"]


class BuildsItself(nn.Module):
    """A layer that makes what it computes with when it is first called."""

    def __init__(self, what):
        super().__init__()
        self.what, self.inner = what, None
        self.outer = nn.Linear(4, 4)

    def forward(self, x):
        if self.inner is None:
            self.inner = nn.Linear(4, 4).to(x) if self.what == "module" else nn.Parameter(torch.full_like(x[0], 2.0))
        return self.outer(x).tanh() + (self.inner(x) if self.what == "module" else x * self.inner)


@pytest.mark.parametrize("what", ["module", "parameter"])
@pytest.mark.parametrize("first", ["layers", "model", "pipe"])
def test_what_layers_make_in_their_first_forward_is_made_by_the_first_call_and_is_the_models(what, first):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*[BuildsItself(what) for _ in range(3)])).double()
    x = torch.rand(4, 4, dtype=torch.float64)
    found = state_of(model)
    layers = to_sequential(model, x)
    assert_same_state(found, state_of(model))
    pipe = Pipe(layers, [2, len(layers) - 2], 2, checkpoint="never")
    {"layers": layers, "model": model, "pipe": pipe}[first](x)
    assert {f"1.{number}.inner" for number in range(3)} <= {
        name.removesuffix(".weight") for name, _ in model.named_parameters()
    }
    assert list(layers.state_dict()) == list(model.state_dict())
    expected = model(x)
    assert torch.equal(layers(x), expected)
    torch.testing.assert_close(pipe(x), expected, rtol=1e-12, atol=1e-12)


def test_a_sample_that_the_model_writes_is_as_it_was_for_each_part_too():
    class Scales(Blocks):
        def forward(self, batch):
            x = batch.pop("x")
            if "always" in batch or len(x) == 3:
                x /= 255
            return super().forward(x) + x

    model, sample = Scales(), torch.rand(4, 4)
    found = sample.clone()
    layers = to_sequential(model, ({"x": sample, "always": True},))
    assert torch.equal(sample, found)
    for rows in (4, 3):
        x = torch.rand(rows, 4)
        expected = model({"x": x.clone(), "always": True})
        assert torch.equal(layers(({"x": x, "always": True},)), expected)
    layers = to_sequential(model, ({"x": torch.rand(4, 4)},))
    with pytest.raises(PartitionError, match="own forward writes tensor 0 of the inputs, .*, write to a copy"):
        layers(({"x": torch.rand(3, 4)},))


ENTRIES = st.recursive(
    st.integers(0, 3), lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=2).map(tuple), st.lists(inner, max_size=3).map(deque),
        st.dictionaries(st.integers(0, 3), inner, max_size=3), st.frozensets(st.integers(0, 5)).map(set),
        st.dictionaries(st.integers(0, 3), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.integers(0, 3), inner, max_size=3).map(lambda entries: defaultdict(list, entries)),
    ), max_leaves=8,
)  # fmt: skip


def changed_within(value, number):
    """Change the container of some number, counted from without; whether there is one."""
    open_values, mutable = [value], []
    while open_values:
        each = open_values.pop(0)
        if isinstance(each, dict | list | tuple | deque):
            open_values += each.values() if isinstance(each, dict) else each
        if not isinstance(each, int | tuple):
            mutable.append(each)
    if not mutable:
        return False
    chosen = mutable[number % len(mutable)]
    if isinstance(chosen, dict):
        chosen[9] = chosen.pop(next(iter(chosen), None), 7)
    elif isinstance(chosen, set):
        chosen.add(9)
    else:
        chosen.append(9)
    return True


@given(ENTRIES, st.integers(0, 9))
def test_lists_and_dicts_at_any_depth_are_as_they_were_found(value, number):
    module = nn.Module()
    module.kept = value
    as_it_was = copy.deepcopy(value)
    with as_found([module]) as found:
        assert found.changed() == []
        is_changed = changed_within(value, number)
        assert found.changed() == (["kept"] if is_changed else [])
    assert module.kept is value and value == as_it_was and AttributeSnapshot([module], found.contents).changed() == []


def test_tensors_that_share_a_storage_hooks_and_attributes_are_as_they_were_found():
    module = nn.Linear(3, 3)
    module.register_buffer("view", module.weight.detach()[0])
    module.cache = torch.zeros(3)
    found_weight, versions = module.weight.detach().clone(), [module.weight._version, module.view._version]
    with as_found([module], written=[module.cache], others=[module.weight]) as found:
        found.contents.keep(module.weight)
        with torch.no_grad():
            module.view.add_(1)
            module.cache.add_(1)
        kept, module.bias = module.bias, None
        module.register_forward_hook(lambda *_: None)
        del module.in_features
    assert torch.equal(module.weight, found_weight) and torch.equal(module.view, found_weight[0])
    assert module.bias is kept and not module._forward_hooks and module.in_features == 3
    assert torch.equal(module.cache, torch.zeros(3)) and module.weight._version >= versions[0]


class Draws(Blocks):
    """In train mode it draws a number before its first block, between its blocks, or behind them."""

    def __init__(self, place, draw, least=1e-9):
        super().__init__()
        self.place, self.draw, self.least = place, draw, least

    def drawn(self, place):
        return self.draw() if self.training and place == self.place else 1.0

    def forward(self, x):
        x = self.into(x) * self.drawn("before")
        for block in self.blocks:
            x = block(x) if self.drawn("between") >= self.least else x
        return self.out(x) * self.drawn("behind")


DRAWN = {
    "python": lambda: random.random(), "uniform": lambda: random.uniform(0, 1),
    "numpy": lambda: float(numpy.random.rand()), "of a shape": lambda: float(numpy.random.uniform(0, 1, (1,))[0]),
}  # fmt: skip


@pytest.mark.parametrize("drawn", DRAWN)
def test_layers_that_are_dropped_never_are_no_hindrance_though_numbers_are_drawn(drawn):
    model, x = Draws("between", DRAWN[drawn], least=0.0), torch.rand(4, 4)
    assert torch.equal(to_sequential(model, x)(x), model(x))
    by_name = random.random  # imported by its name, it cannot be seen what is drawn
    with pytest.raises(PartitionError, match="numbers of Python or numpy are drawn before block"):
        to_sequential(Draws("between", by_name, least=0.0), x)
    assert random.random == by_name and random.random() != random.random()


@pytest.mark.parametrize("place", ["before", "between", "behind"])
@pytest.mark.parametrize("drawn", DRAWN)
def test_what_python_and_numpy_draw_behind_the_first_block_is_refused(place, drawn):
    model, states = Draws(place, DRAWN[drawn]), (random.getstate(), numpy.random.get_state()[1].tobytes())
    if place == "before":
        pipe, x = Pipe(model, [2, 3], 2, sample=torch.rand(4, 4)), torch.rand(4, 4)
        torch.manual_seed(3)
        step = pipe.step(x, torch.zeros(4, 4), loss_fn=nn.MSELoss())
        torch.manual_seed(3)
        seed, total = int(torch.empty((), dtype=torch.int64).random_()), 0.0
        for chunk, rows in enumerate(x.chunk(2)):
            random.seed(layer_seed(seed, chunk, 0))
            numpy.random.seed(layer_seed(seed, chunk, 0) % 2**32)
            total += model(rows).detach().square().mean().item() / 2
        assert abs(float(step.loss) - total) < 1e-6
    else:
        with pytest.raises(PartitionError, match="numbers of Python or numpy are drawn (before|behind the last) block"):
            to_sequential(model, torch.rand(4, 4))
        assert states == (random.getstate(), numpy.random.get_state()[1].tobytes())
