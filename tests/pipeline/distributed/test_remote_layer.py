"""What stands where another rank has the layer: nothing to compute with, everything to name and load by."""

import copy
import io
import pickle
from collections import OrderedDict

import pytest
import torch
from by_chunks import same
from torch import nn

from pipeline.distributed.remote_layer import RemoteLayer
from pipeline.entry.settled import FixedModule


class Counted(nn.Module):
    """A layer with a parameter, a buffer, one that is not saved, and extra state."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.count = 7

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


class Renaming(nn.Linear):
    """Loads what an older version saved under another name."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if prefix + "kernel" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Hooked(nn.Linear):
    """Does the same by a hook."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module, state_dict, prefix, *args):
        if prefix + "kernel" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")


def net():
    inner = nn.Sequential(OrderedDict(first=nn.Linear(3, 3), norm=nn.BatchNorm1d(3)))
    return nn.Sequential(nn.Linear(2, 3), inner, nn.Tanh(), Counted(), Renaming(2, 2), Hooked())


def part(model, own):
    """As a rank has it: its own layers, Elsewhere for the others."""
    there = nn.Sequential()
    for index, (name, layer) in enumerate(model._modules.items()):
        there._modules[name] = layer if index in own else RemoteLayer(layer, index, stage=index, rank=9)
    return there


@pytest.fixture
def linear():
    return RemoteLayer(nn.Linear(2, 3), index=4, stage=2, rank=1)


def test_it_says_what_it_stands_for_in_a_plain_modules_print(linear):
    assert repr(linear) == "Linear(...) of stage 2 on rank 1"
    assert repr(nn.Sequential(nn.Tanh(), linear)) == (
        "Sequential(\n  (0): Tanh()\n  (1): Linear(...) of stage 2 on rank 1\n)"
    )


def test_it_holds_no_tensor_and_keeps_no_layer_alive(linear):
    assert not linear.state_dict() and not list(linear.parameters()) and not list(linear.buffers())
    assert not list(linear.children())
    assert len(pickle.dumps(RemoteLayer(nn.Linear(300, 300), 0, 0, 0))) < 2000


@pytest.mark.parametrize("training", [True, False])
def test_it_has_the_layers_training_mode_and_takes_another(training):
    here = RemoteLayer(nn.Linear(2, 3).train(training), 0, 0, 0)
    assert here.training is training
    assert here.train(not training).training is not training
    here.requires_grad_(False).double().zero_grad()


def test_calling_it_names_the_rank_that_has_the_layer(linear):
    with pytest.raises(RuntimeError, match=r"layer 4 \(Linear\) belongs to stage 2, which rank 1 has.*Call the Pipe"):
        linear(torch.ones(1, 2))


@pytest.mark.parametrize("name", ["weight", "in_features", "anything"])
def test_what_the_layer_would_have_is_an_attribute_error_that_names_the_rank(linear, name):
    assert not hasattr(linear, name)
    with pytest.raises(AttributeError, match=f"rank 1 has, so its '{name}' is not here.*pipe.named_parameters"):
        getattr(linear, name)


def test_one_half_made_lacks_what_it_lacks():
    with pytest.raises(AttributeError, match="is on another rank, so its 'weight' is not here"):
        RemoteLayer.__new__(RemoteLayer).weight


def test_no_tensor_and_no_module_can_be_put_into_it(linear):
    attempts = [
        lambda: setattr(linear, "weight", nn.Parameter(torch.ones(1))),
        lambda: setattr(linear, "weight", torch.ones(1)),
        lambda: setattr(linear, "inner", nn.Tanh()),
        lambda: linear.register_parameter("weight", nn.Parameter(torch.ones(1))),
        lambda: linear.register_buffer("weight", torch.ones(1)),
        lambda: linear.register_module("inner", nn.Tanh()),
        lambda: linear.add_module("inner", nn.Tanh()),
    ]
    for attempt in attempts:
        with pytest.raises(AttributeError, match="no tensor or module can be put into it here"):
            attempt()
    linear.p = 0.5  # as a script does that sets a dropout's probability: here it means nothing


@pytest.mark.parametrize("put", [
    lambda pipe: setattr(pipe, "4", nn.Linear(2, 3)),
    lambda pipe: setattr(pipe, "4", None),
    lambda pipe: pipe.set_submodule("4", nn.Linear(2, 3)),
    lambda pipe: pipe.add_module("4", nn.Linear(2, 3)),
    lambda pipe: pipe.register_module("4", nn.Linear(2, 3)),
])
def test_no_other_layer_can_be_put_into_its_place(put, linear):
    """It would be among this rank's parameters, untrained, and a whole state could have its values."""
    pipe = FixedModule()
    pipe.add_module("3", nn.Tanh())
    setattr(pipe, "3", nn.ReLU())
    pipe._modules["4"] = linear
    with pytest.raises(AttributeError, match=r"layer 4 \(Linear\).*rank 1 has, so no other layer can be put into"):
        put(pipe)
    assert list(pipe.children())[1] is linear


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_and_pickles_say_and_load_the_same(again, linear):
    other = again(linear)
    assert other is not linear and repr(other) == repr(linear)
    with pytest.raises(AttributeError, match="rank 1 has"):
        other.weight
    owner = nn.Sequential(other)
    owner.load_state_dict({"0.weight": torch.ones(3, 2), "0.bias": torch.ones(3)})
    with pytest.raises(RuntimeError, match='Unexpected key.*"0.other"'):
        owner.load_state_dict({"0.other": torch.ones(3)})


@pytest.mark.parametrize("own", [set(), {0}, {1, 2}, {3}, {0, 3}, {0, 1, 2, 3, 4, 5}])
def test_the_whole_state_dict_loads_strictly_wherever_the_layers_are(own):
    source, target = net(), net()
    with torch.no_grad():
        for tensor in source.state_dict().values():
            if isinstance(tensor, torch.Tensor):
                tensor.add_(1)
    source[3].count = 11
    here = part(target, own)
    here.load_state_dict(source.state_dict(), strict=True)
    state = here.state_dict()
    assert list(state) == [key for key in source.state_dict() if int(key[0]) in own]
    assert all(same(value, source.state_dict()[key]) for key, value in state.items() if "extra" not in key)
    assert target[3].count == (11 if 3 in own else 7)


def test_a_key_that_no_layer_has_is_unexpected_on_every_rank():
    state = net().state_dict()
    for key in ("0.other", "1.other.weight", "1.first", "7.weight"):
        for own in (set(), {0}, {1}, {0, 1, 2, 3, 4, 5}):
            # What a layer may rename (BatchNorm's loading is its own) only its own rank can judge.
            if key.startswith("1.") and 1 not in own:
                continue
            with pytest.raises(RuntimeError, match=f'Unexpected key.*"{key}"'):
                part(net(), own).load_state_dict({**state, key: torch.ones(1)})
            part(net(), own).load_state_dict({**state, key: torch.ones(1)}, strict=False)


@pytest.mark.parametrize("strict", [True, False])
def test_a_key_is_unexpected_only_where_that_is_asked(strict, linear):
    unexpected = []
    linear._load_from_state_dict({"4.weight": 1, "4.other": 2, "5.weight": 3}, "4.", {}, strict, [], unexpected, [])
    assert unexpected == (["4.other"] if strict else [])


def test_an_older_name_that_the_layer_would_rename_is_no_error_elsewhere():
    source = net()
    state = source.state_dict()
    for layer in "45":
        state[f"{layer}.kernel"] = state.pop(f"{layer}.weight") + 1
    target = net()
    for own in (set(), {0, 1, 2, 3}, {4}, {5}):
        part(target, own).load_state_dict(state)
    assert same(target[4].weight, state["4.kernel"]) and same(target[5].weight, state["5.kernel"])


@pytest.mark.parametrize("own", [set(), {0}, {1}, {2, 3, 4}])
def test_a_state_dict_from_any_rank_tells_the_versions_of_all_layers(own):
    model = net()
    expected = model.state_dict()._metadata
    found = part(model, own).state_dict()._metadata
    assert found == expected and found["1.norm"] == {"version": 2}
    outer = nn.ModuleDict({"pipe": part(model, own)}).state_dict()._metadata
    assert outer["pipe.1.norm"] == {"version": 2}


def test_a_state_dict_collected_in_a_plain_dict_is_well():
    found = {}
    part(net(), {0}).state_dict(destination=found)
    assert list(found) == ["0.weight", "0.bias"]


def test_torch_save_takes_it(linear):
    file = io.BytesIO()
    torch.save(nn.Sequential(linear), file)
    file.seek(0)
    assert repr(torch.load(file, weights_only=False)[0]) == repr(linear)
