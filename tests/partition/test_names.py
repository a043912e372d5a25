"""Law: whoever names what lies in the layers of a cut model names it as the model does, in the model's order."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from block_models import MODELS, Chain, doubled, ids
from cover import either
from families import of_family
from torch import nn
from torch.utils._pytree import tree_leaves

from partition import PartitionError, split, to_sequential
from pipeline import Pipe, Saved
from pipeline.curvature import Hessian

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FAMILIES = ("GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration", "ViTForImageClassification")


class HeadFirst(nn.Module):
    """What comes last stands first, in modules and in tensors; names are numbers, a weight and a module have two."""

    def __init__(self):
        super().__init__()
        self.add_module("9", nn.Linear(4, 11))
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        for number in range(3):
            self.add_module(str(number), nn.Linear(4, 4))
        self.embed = nn.Embedding(11, 4)
        self.embed.weight = self._modules["9"].weight
        self.bend = self.bend_again = nn.Tanh()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, ids):
        x = self.bend(self.embed(ids) + self.shift)
        for number in range(3):
            x = self._modules[str(number)](x)
        return self._modules["9"](self.bend_again(x) * self.scale + self.seen)


def made(name):
    """A model, and inputs of so many rows."""
    torch.manual_seed(len(name))
    if name in FAMILIES:
        model, inputs = of_family(name)
        return model.double(), lambda rows: doubled(inputs(rows))
    kind, inputs = (HeadFirst, ids) if name == "head first" else MODELS[name]
    return kind().double(), lambda rows: doubled(inputs(rows))


def cut(name):
    """A model, its layers, and Pipes of these."""
    model, inputs = made(name)
    blocks = ["0", "1", "2"] if name == "head first" else None
    layers = to_sequential(model, inputs(4), blocks=blocks)
    return model, layers, piped(layers), inputs


def piped(layers, **settings):
    return Pipe(layers, [2, len(layers) - 2], chunks=2, devices=["cpu"] * 2, **settings)


def other(model):
    """A copy with other values."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for value in dict.fromkeys(changed.state_dict().values()):
            value += 0.1 if value.is_floating_point() else 1
    return changed


def called(model, x):
    return model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)


def hidden(out):
    return next(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))


def containers(layers):
    """The names of modules that contain units of parts: each part has one of its own."""
    units = [name for layer in layers for name in layer.in_model.names]
    return {name[:end] for name in units for end, mark in enumerate(name) if mark == "."} | {""}


def same(one, other):
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


ALL = ("diffusion", "resnet", "gpt", "llama with adapters", "experts", "unet", "between", "head first", *FAMILIES)


@pytest.mark.parametrize("name", ALL)
def test_names_and_their_order_are_those_of_the_model(name):
    model, layers, pipe, _ = cut(name)
    state = model.state_dict()
    with_tensors = {key.rpartition(".")[0] for key in state}
    for module in (layers, pipe, layers[:], pipe.to_sequential(), copy.deepcopy(pipe), Pipe(nn.Sequential(*layers))):
        found = module.state_dict()
        assert same(found, state) and with_tensors <= found._metadata.keys() <= state._metadata.keys()
        assert all(found._metadata[key] == state._metadata[key] for key in with_tensors)
        for apart in (True, False):
            names = [[key for key, _ in each.named_parameters(remove_duplicate=apart)] for each in (module, model)]
            assert names[0] == names[1]
        buffers = [[key for key, _ in each.named_buffers() if key in state] for each in (module, model)]
        assert buffers[0] == buffers[1]
    modules, within = dict(layers.named_modules()), set(dict(model.named_modules())) - containers(layers)
    assert all(type(modules[key]) is type(model.get_submodule(key)) for key in within & set(modules)) and within
    assert len(list(pipe.modules())) == len({*pipe.modules()}) == len({*nn.Sequential(*layers).modules()})
    assert all(pipe.get_parameter(key) is parameter for key, parameter in model.named_parameters())
    assert list(pipe.full_state_dict()) == list(state)


def named_by_children(module, name=""):
    """The parameters of a module as one finds them that goes from child to child."""
    for key, parameter in module.named_parameters(recurse=False):
        yield f"{name}{key}", parameter
    for key, child in module.named_children():
        yield from named_by_children(child, f"{name}{key}.")


@pytest.mark.parametrize("name", ALL)
def test_names_from_child_to_child_are_those_of_the_model(name):
    model, layers, pipe, _ = cut(name)
    for module in (layers, pipe):
        found = {key.removeprefix("."): parameter for key, parameter in named_by_children(module)}
        expected = dict(model.named_parameters(remove_duplicate=False))
        assert set(map(id, found.values())) == set(map(id, expected.values()))
        assert found.keys() <= expected.keys() and all(expected[key] is found[key] for key in found)
        assert found.keys() >= dict(model.named_parameters()).keys()
        assert list(module.children()) == list(module)


@pytest.mark.parametrize("name", either(ALL[::2], ALL))
def test_the_state_of_the_model_loads_and_what_does_not_fit_is_told_by_its_names(name):
    model, layers, pipe, inputs = cut(name)
    changed, plain, x = other(model).eval(), copy.deepcopy(model), inputs(4)
    expected = hidden(called(changed, x))
    for module, assign in ((layers, False), (pipe, False), (pipe, True)):
        module.load_state_dict(other(changed).state_dict())
        assert module.load_state_dict(changed.state_dict(), assign=assign) == ([], [])
        assert same(module.state_dict(), changed.state_dict())
        torch.testing.assert_close(hidden(module.eval()(x)), expected, rtol=1e-12, atol=1e-12)
    plain.load_state_dict(changed.state_dict(), assign=True)
    assert [key for key, _ in pipe.named_parameters()] == [key for key, _ in plain.named_parameters()]
    state = changed.state_dict()
    absent, large = list(state)[0], list(state)[-1]
    del state[absent]
    unexpected = ["no.such", f"{absent}.more", f"{large}.more"]
    state.update({**dict.fromkeys(unexpected, torch.ones(1)), large: torch.ones(7, 7, 7, 7, 7)})
    words = []
    for module in (model, layers, pipe):
        found = module.load_state_dict({key: state[key] for key in state if key != large}, strict=False)
        assert found.missing_keys == [absent, large] and sorted(found.unexpected_keys) == sorted(unexpected)
        with pytest.raises(RuntimeError) as error:
            module.load_state_dict(state)
        words.append(str(error.value).split("\n")[1:])
    assert words[0] == words[1] == words[2]


@pytest.mark.parametrize("name", ["gpt", "diffusion", "head first", "T5ForConditionalGeneration"])
def test_training_goes_on_in_the_model_from_what_a_pipe_saved_and_back(name, tmp_path):
    """By each way of saving; the optimizers then step with the same gradients, to the same bits."""
    model, layers, pipe, inputs = cut(name)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    x = inputs(4)
    target = torch.randn_like(hidden(called(model, x)).detach())
    for _ in range(2):
        step = pipe.step(x, target, loss_fn=lambda out, y: ((hidden(out) - y) ** 2).mean(), grads="store")
        step.grads.apply(optimizer)
    assert set(step.grads.state_dict()) <= dict(model.named_parameters()).keys()
    dcp.save(
        {"model": pipe.state_dict(), "optimizer": pipe.optimizer_state_dict(optimizer)}, checkpoint_id=tmp_path
    )
    plain, whole = other(model), pipe.full_optimizer_state_dict(optimizer)
    plain.load_state_dict(pipe.full_state_dict())
    numbered = torch.optim.AdamW(plain.parameters())
    numbered.load_state_dict(copy.deepcopy(whole))
    assert whole["param_groups"][0]["param_names"] == [key for key, _ in model.named_parameters()]
    trained = [(model, optimizer), (plain, numbered)]
    for way in (numbered.state_dict(), Saved(tmp_path, "optimizer")):
        again = cut(name)[2]
        again.load_state_dict(Saved(tmp_path, "model"))
        fresh = torch.optim.AdamW(again.parameters())
        again.load_optimizer_state_dict(fresh, copy.deepcopy(way))
        trained.append((again, fresh))
    for module, other_optimizer in trained:
        torch.manual_seed(1)
        for _ in range(2):
            for parameter in module.parameters():
                parameter.grad = torch.randn_like(parameter)
            other_optimizer.step()
    assert all(same(module.state_dict(), model.state_dict()) for module, _ in trained)


@pytest.mark.parametrize("name", ["resnet", "diffusion"])
def test_values_come_from_a_state_of_the_model_where_it_has_no_memory(name, tmp_path):
    model, layers, _, _ = cut(name)
    changed = other(model)
    dcp.save({"model": changed.state_dict()}, checkpoint_id=tmp_path)
    for source in (changed.state_dict(), tmp_path):
        pipe = piped(copy.deepcopy(layers).to("meta"), materialize=source)
        assert same(pipe.state_dict(), changed.state_dict())
    first = next(iter(model.state_dict()))
    with pytest.raises(ValueError, match=re.escape(f"on the meta device, so without values: {first}")):
        piped(copy.deepcopy(layers).to("meta"))


def test_a_model_of_transformers_is_saved_after_training_and_read_again(tmp_path):
    transformers = pytest.importorskip("transformers")
    model, inputs = of_family("GPT2LMHeadModel")
    pipe = Pipe(model.eval(), sample=inputs(4), balance=[2, 3], chunks=2, devices=["cpu"] * 2)
    optimizer, x = torch.optim.AdamW(pipe.parameters(), lr=0.01), inputs(4)

    def loss_fn(out, words):
        return nn.functional.cross_entropy(out["logits"].transpose(1, 2), words)

    before = model.state_dict()["lm_head.weight"].clone()
    pipe.step(x, x["input_ids"], loss_fn=loss_fn, optimizer=optimizer)
    assert not torch.equal(before, model.state_dict()["lm_head.weight"])
    model.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert torch.equal(again(**x).logits, model(**x).logits)
    third = Pipe(of_family("GPT2LMHeadModel")[0].eval(), sample=x, balance=[3, 2], chunks=2, devices=["cpu"] * 2)
    third.load_state_dict(again.state_dict())
    assert torch.equal(third(x)["logits"], pipe(x)["logits"])


class Titled(nn.Module):
    """A model with blocks under one name, a first layer, a last one, a weight and a buffer under others."""

    def __init__(self, blocks, first, last, weight, buffer):
        super().__init__()
        self.titles = (blocks, first, last, weight, buffer)
        self.add_module(first, nn.Linear(4, 4))
        self.add_module(blocks, nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]))
        self.add_module(last, nn.Linear(4, 4))
        self.register_parameter(weight, nn.Parameter(torch.rand(4)))
        self.register_buffer(buffer, torch.rand(4))

    def forward(self, x):
        blocks, first, last, weight, buffer = (getattr(self, title) for title in self.titles)
        x = first(x)
        for block in blocks:
            x = block(x)
        return last(x) * weight + buffer


def titles():
    """The names of attributes of parts that a module of a user's own may have."""
    layers = to_sequential(Chain(), ids(2))
    names = {name for layer in layers for name in (*dir(layer), *vars(layer))}
    return sorted(name for name in names - set(dir(nn.Module())) if "__" not in name and name not in layers[0]._modules)


def test_a_model_may_have_the_names_of_attributes_of_parts():
    names = titles()
    assert {"outline", "in_model", "begin", "block", "modes"} < set(names)
    x, y = torch.rand(4, 4, dtype=torch.float64), torch.rand(4, 4, dtype=torch.float64)
    for turn in range(len(names)):
        torch.manual_seed(turn)
        model = Titled(*(names[(turn + place) % len(names)] for place in range(5))).double()
        plain = copy.deepcopy(model)
        layers = to_sequential(model, x)
        pipe = piped(layers)
        for module in (layers, pipe):
            assert [name for name, _ in module.named_parameters()] == [name for name, _ in model.named_parameters()]
            for name, parameter in model.named_parameters():
                assert module.get_parameter(name) is parameter
            blocks, first, last, _, buffer = model.titles
            assert module.get_submodule(f"{blocks}.1.0") is model.get_submodule(f"{blocks}.1.0")
            assert module.get_submodule(first) is model.get_submodule(first)
            assert module.get_submodule(last) is model.get_submodule(last)
            assert module.get_buffer(buffer) is model.get_buffer(buffer)
        assert layers.get_submodule(f"{len(layers) - 1}.{last}") is model.get_submodule(last)
        loss = pipe.step(x, y, loss_fn=nn.functional.mse_loss).loss
        expected = nn.functional.mse_loss(plain(x), y)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        for parameter, one in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, one.grad, rtol=1e-10, atol=1e-14)
        changed = other(plain)
        pipe.load_state_dict(changed.state_dict())
        assert same(pipe.state_dict(), changed.state_dict()) and torch.equal(copy.deepcopy(pipe)(x), pipe(x))


def test_layers_before_and_behind_have_their_numbers():
    model = Chain()
    layers = to_sequential(model, ids(2))
    layers.append(nn.Linear(4, 2))
    pipe = Pipe(nn.Sequential(*layers), [3, 3])
    assert list(pipe.state_dict()) == [*model.state_dict(), "5.weight", "5.bias"]
    assert [key for key, _ in pipe.named_parameters()] == list(pipe.state_dict())
    pipe.load_state_dict(layers.state_dict())
    pipe.load_state_dict(nn.Sequential(*layers).state_dict())  # a plain nn.Sequential has numbers
    assert split(layers, [5, 1])[1].state_dict().keys() == {"5.weight", "5.bias"}


def test_a_module_around_a_pipe_has_the_names_of_the_model_behind_its_own():
    model, _, pipe, _ = cut("head first")
    around, plain = nn.ModuleDict({"pipe": pipe, "head": nn.Linear(2, 2)}), nn.ModuleDict({"pipe": model})
    plain["head"] = around["head"]
    assert list(around.state_dict()) == list(plain.state_dict())
    assert around.state_dict()._metadata.keys() == plain.state_dict()._metadata.keys()
    assert [key for key, _ in around.named_parameters()] == [key for key, _ in plain.named_parameters()]
    changed = other(plain)
    around.load_state_dict(changed.state_dict())
    assert same(around.state_dict(), changed.state_dict())
    assert {key for key, _ in around.named_modules()} >= {"", "pipe", "pipe.9", "pipe.embed", "head"}
    state = changed.state_dict()
    state["pipe.no.such"] = state.pop("pipe.9.bias")
    faults = [module.load_state_dict(state, strict=False) for module in (plain, around)]
    assert faults[0] == faults[1] == (["pipe.9.bias"], ["pipe.no.such"])
    state["pipe.9.bias"] = torch.ones(7)
    with pytest.raises(RuntimeError, match="size mismatch for 9.bias"):
        around.load_state_dict(state)


class Counted(Pipe):
    """It keeps more than its layers do."""

    loads = 0

    def get_extra_state(self):
        return torch.tensor(self.loads)

    def set_extra_state(self, state):
        self.loads = int(state) + 1


def test_hooks_see_the_names_of_the_model_and_what_they_and_the_module_keep_is_kept():
    model, layers, _, _ = cut("head first")
    pipe, seen = Counted(layers, [2, 3]), []

    def note(module, *args):
        module.notes = vars(module).get("notes", 0) + 1
        seen.append(list(args[0]))

    pipe.register_state_dict_post_hook(note)
    pipe.register_load_state_dict_pre_hook(note)
    state = pipe.state_dict()
    pipe.load_state_dict(state)
    assert (pipe.loads, pipe.notes) == (1, 2) and seen == [list(state)] * 2
    assert [key for key in state if key != "_extra_state"] == list(model.state_dict())


@pytest.mark.parametrize("name", ["gpt", "head first"])
def test_a_state_that_was_assigned_is_loaded_again_without(name):
    """torch notes in the state's versions that it was to be assigned."""
    _, layers, pipe, _ = cut(name)
    state = other(pipe.to_sequential()).state_dict()
    layers.load_state_dict(state, assign=True)
    again = cut(name)[1]
    parameters = list(again.parameters())
    again.load_state_dict(state)
    assert all(one is other for one, other in zip(again.parameters(), parameters, strict=True))
    assert same(again.state_dict(), state)


@pytest.mark.parametrize("version", [None, 1, 2])
def test_the_versions_of_a_state_count_as_in_the_model(version):
    """An old BatchNorm's state has no count."""
    model, layers, pipe, _ = cut("resnet")
    state, versions = model.state_dict(), copy.deepcopy(model.state_dict()._metadata)
    versions["bn1"] = {"version": version}
    for key in [key for key in state if key.endswith("num_batches_tracked")]:
        del state[key]
    found = []
    for module in (model, layers, pipe):
        state._metadata = copy.deepcopy(versions)
        found.append(set(module.load_state_dict(state, strict=False).missing_keys))
    assert found[0] == found[1] == found[2] and ("bn1.num_batches_tracked" in found[0]) == (version == 2)


def test_a_module_is_replaced_in_the_part_that_has_it_and_refused_in_another():
    model, x = Chain(), ids(4)
    layers = to_sequential(model, x)
    holder = layers[1].get_submodule("blocks")  # of the first block
    with pytest.raises(PartitionError, match="module '1' is put into a part of a model that has no such module"):
        setattr(holder, "1", nn.Identity())
    model.blocks[0] = nn.Identity()
    setattr(holder, "0", nn.Identity())
    assert torch.equal(layers(x), model(x))


def test_parts_of_two_models_are_refused():
    one, other = (to_sequential(Chain(), ids(2)) for _ in range(2))
    with pytest.raises(PartitionError, match="two parameters are named 'embed.weight'. Either the layers are par"):
        Pipe(nn.Sequential(*one, *other), [4, 6])
    tied = cut("gpt")[1]
    with pytest.raises(PartitionError, match="'transformer.wte.weight'. Either .* Or two parts of one model shared"):
        Pipe(tied.to("meta"), [2, 3])


def test_what_joins_a_block_later_stands_where_the_model_has_it():
    model, layers, pipe, _ = cut("gpt")
    model.transformer["h"][1].adapter = nn.Linear(2, 2)
    assert list(layers.state_dict()) == list(pipe.state_dict()) == list(model.state_dict())
    assert [key for key, _ in pipe.named_parameters()] == [key for key, _ in model.named_parameters()]


def test_curvature_has_parameters_by_the_names_of_the_model():
    model, layers, pipe, inputs = cut("head first")
    x, found = inputs(4), []
    target = torch.randn_like(model(x).detach())
    for module in (pipe, layers):
        vector = {key: torch.ones_like(each) for key, each in model.named_parameters() if key in ("shift", "1.weight")}
        product = Hessian(module, (x, target), nn.functional.mse_loss, params=["shift", "1.weight"]) @ vector
        assert list(product) == ["shift", "1.weight"]
        found.append(product)
    for key in found[0]:
        torch.testing.assert_close(found[0][key], found[1][key], rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match="params has 'no'.*There are .*scale, shift, 9.weight"):
        Hessian(pipe, (x, target), nn.functional.mse_loss, params="no")


@pytest.mark.parametrize("name", ["embed", "blocks"])
def test_a_name_of_the_model_that_is_asked_for_as_an_attribute_is_refused_in_words(name):
    layers = to_sequential(Chain(), ids(4))
    for module in (layers, Pipe(layers, [2, 3]), copy.deepcopy(layers)):
        with pytest.raises(AttributeError, match=f"no attribute '{name}': the model that was cut has it.*Give the m"):
            getattr(module, name)
        assert not hasattr(module, name) and not hasattr(type(module).__new__(type(module)), "embed")
        with pytest.raises(AttributeError, match="no attribute 'config'$"):
            module.config
