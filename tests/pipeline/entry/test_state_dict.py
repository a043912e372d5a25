"""State by name: what some parts of a model save, any other parts load, and training goes on as if nothing had been."""

import copy
import warnings
from collections import OrderedDict
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from by_chunks import same
from state_training import CUTS, FRESH, LAYERS, OPTIMIZERS, grouped, make, names_of, net, train, uninterrupted
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipeline import Pipe
from pipeline.distributed.remote_layer import RemoteLayer
from pipeline.entry.state.optimizer_state import load_optimizer_state, optimizer_state, own_part
from pipeline.entry.state.saved import Saved

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
PAIRS = [(one, other) for saving in CUTS for loading in CUTS for one in CUTS[saving] for other in CUTS[loading]]
ALL = [name for name, _ in names_of(net())]


@pytest.fixture(autouse=True)
def _one_process():
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as torch says in one process


def parts_of(model, cut):
    """The named parameters of each part that has any: an optimizer of none cannot be."""
    return [named for start, end in pairwise(cut) if (named := names_of(model, start, end))]


def untied(model):
    """As several processes have it: each its own copy of a tied parameter."""
    model[5].weight = nn.Parameter(model[5].weight.detach().clone())
    return model


def whole(model, cut):
    return model if len(cut) == 2 else untied(model)


def saved_after(kind, cut, steps, before=lambda step: None):
    """The model and the merged optimizer state of parts that have trained for some steps."""
    model, merged = whole(net(), cut), {}
    for named in parts_of(model, cut):
        optimizer = make(kind, named)
        train(named, optimizer, steps, before)
        part = optimizer_state(named, optimizer)
        assert not part.keys() & merged.keys()
        merged.update(part)
    return model, merged


def cloned(state):
    """As another process reads it: no two tensors are one."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def go_on(kind, model, cut, state, steps):
    """Other parts go on from the state; the parameters by name."""
    values = {name: param.detach().clone() for name, param in names_of(model)}
    model = whole(net(), cut)
    with torch.no_grad():
        for name, param in names_of(model):
            param.copy_(values[name])
    for named in parts_of(model, cut):
        fresh = {} if kind in ("adamw", "fused") else FRESH
        optimizer = make(kind, named, turned=True, **fresh)
        load_optimizer_state(named, optimizer, cloned(state), ALL)
        train(named, optimizer, steps)
    return {name: param.detach() for name, param in names_of(model)}


def assert_same_values(ours, theirs):
    assert [name for name in theirs if not same(ours[name], theirs[name])] == []


# ---------------------------------------------------------------------------------------------- from parts to parts


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_saved_by_some_parts_and_loaded_by_others_is_uninterrupted_training(kind):
    expected = uninterrupted(kind, range(7))
    for one, other in PAIRS:
        model, state = saved_after(kind, one, range(4))
        assert_same_values(go_on(kind, model, other, state, range(4, 7)), expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_a_fresh_optimizer_saves_makes_the_loading_one_fresh(kind):
    expected = uninterrupted(kind, range(3))
    for one, other in PAIRS[::3]:
        model, state = saved_after(kind, one, range(0))
        assert_same_values(go_on(kind, model, other, state, range(3)), expected)


def test_saving_changes_nothing():
    for kind in OPTIMIZERS:
        model = net()
        named = names_of(model)
        optimizer = make(kind, named)
        for step in range(3):
            before, kept = optimizer_state_of(optimizer), [param.detach().clone() for param in model.parameters()]
            optimizer_state(named, optimizer)
            assert optimizer_state_of(optimizer) == before
            assert all(same(one.detach(), other) for one, other in zip(model.parameters(), kept, strict=True))
            train(named, optimizer, [step])


def optimizer_state_of(optimizer):
    return repr(optimizer.state_dict())


def test_hooks_and_schedulers_of_the_optimizer_do_not_see_that_it_is_saved():
    called = []
    model = net()
    named = names_of(model)
    optimizer = make("adam", named)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(lambda *args: called.append("own"))
    everywhere = register_optimizer_step_post_hook(lambda *args: called.append("all"))
    try:
        state = optimizer_state(named, optimizer)
    finally:
        everywhere.remove()
    assert called == [] and getattr(optimizer, "_opt_called", False) is False
    assert state["param_groups.1.weight.initial_lr"] == 0.1 and scheduler.get_last_lr() == [0.1, 0.1]


def test_options_are_restored_with_those_a_scheduler_added():
    model, state = saved_after("adam", [0, 3, 6], range(2))
    for name in ALL:
        state[f"param_groups.{name}.initial_lr"] = 0.25
        state[f"param_groups.{name}.lr"] = 0.125
    named = names_of(model)
    optimizer = torch.optim.Adam(grouped(named), lr=3.0, betas=(0.1, 0.2))
    load_optimizer_state(named, optimizer, state)
    for index, group in enumerate(optimizer.param_groups):
        assert (group["lr"], group["initial_lr"], group["betas"]) == (0.125, 0.25, (0.9, 0.999))
        assert group["weight_decay"] == 0.0 and group["params"] == grouped(named)[index]["params"]


def test_a_group_without_parameters_keeps_its_options():
    model, state = saved_after("adam", [0, 6], range(2))
    named = names_of(model, 5, 6)
    optimizer = torch.optim.Adam(grouped(named), lr=3.0)
    load_optimizer_state(named, optimizer, state, ALL)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 3.0]
    assert optimizer_state(named, optimizer).keys() == {key for key in state if ".5.weight" in key}


def test_an_optimizer_built_with_names_keeps_its_own():
    model = net()
    one = torch.optim.Adam(model.named_parameters(), lr=0.1)
    state = optimizer_state(names_of(model), one)
    assert not [key for key in state if "param_names" in key]
    for name in ALL:
        state[f"param_groups.{name}.param_names"] = ["as torch", "saves them"]
    other = torch.optim.Adam(model.named_parameters(), lr=0.2)
    load_optimizer_state(names_of(model), other, state)
    assert other.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    assert other.param_groups[0]["lr"] == 0.1


def test_of_a_parameter_that_stands_for_none_nothing_is_saved_and_nothing_is_asked():
    nothing = nn.Parameter(torch.empty(0))
    optimizer = torch.optim.Adam([nothing], lr=0.3)
    assert optimizer_state([("", nothing)], optimizer) == {}
    _, state = saved_after("adam", [0, 6], range(2))
    load_optimizer_state([("", nothing)], optimizer, state, ALL)
    load_optimizer_state([("", nothing)], optimizer, {}, ALL)
    assert optimizer.param_groups[0]["lr"] == 0.3 and optimizer.param_groups[0]["params"] == [nothing]
    for key in ("state..lr", "state_keys."):
        with pytest.raises(ValueError, match=f"belong to no parameter: {key}"):
            load_optimizer_state([("", nothing)], optimizer, {key: ()}, ALL)


def test_what_was_kept_before_loading_is_gone():
    model = net()
    named = names_of(model)
    state = optimizer_state(named, make("adam", named))
    optimizer = make("adam", named)
    train(named, optimizer, range(6))
    load_optimizer_state(named, optimizer, state)
    assert not any(optimizer.state.values())


def test_nested_state_comes_back_nested():
    class Nested(torch.optim.SGD):
        pass

    layer = nn.Linear(2, 2)
    optimizer = Nested(layer.parameters(), lr=0.1)
    for param in layer.parameters():
        optimizer.state[param] = {"factors": {"left": torch.ones(1), "deep": {"right": 2}}, "none": None, "yes": True}
    state = optimizer_state(layer.named_parameters(), optimizer)
    assert {key for key in state if key.startswith("state.bias")} == {
        f"state.bias.{key}" for key in ("factors.left", "factors.deep.right", "none", "yes")
    }
    other = Nested(layer.parameters(), lr=0.1)
    load_optimizer_state(layer.named_parameters(), other, state)
    assert repr(other.state_dict()) == repr(optimizer.state_dict())


def test_no_step_is_tried_with_an_optimizer_that_is_not_torchs():
    class Own(torch.optim.Adam):
        def step(self, closure=None):
            raise AssertionError("a step")

    layer = nn.Linear(2, 2)
    state = optimizer_state(layer.named_parameters(), Own(layer.parameters()))
    assert not [key for key in state if key.startswith("state.")] and state["state_keys.bias"] == ()


def test_sparse_adam_has_places_too():
    layer = nn.Embedding(5, 2, sparse=True)
    state = optimizer_state(layer.named_parameters(), torch.optim.SparseAdam(list(layer.parameters())))
    assert {key for key in state if key.startswith("state.")} == {
        f"state.weight.{key}" for key in ("step", "exp_avg", "exp_avg_sq")
    }


# --------------------------------------------------------------------------------------------------------------- tied


def test_a_tied_parameter_is_saved_under_all_its_names_and_loads_from_any():
    model, state = saved_after("adam", [0, 6], range(3))
    names = [key for key in state if "0.weight" in key]
    assert len(names) > 9
    for name in names:
        one, other = state[name], state[name.replace("0.weight", "5.weight")]
        assert one is other or one == other
    expected = uninterrupted("adam", range(6))
    for gone in ("0.weight", "5.weight", "neither"):
        left = {key: value for key, value in state.items() if gone not in key}
        assert_same_values(go_on("adam", model, [0, 6], left, range(3, 6)), expected)


def test_of_several_names_one_that_was_stepped_counts():
    model, state = saved_after("adam", [0, 3, 6], range(3))
    for gone in ("0.weight", "5.weight"):
        left = {**state, f"state_keys.{gone}": ()}
        expected = uninterrupted("adam", range(6))
        assert_same_values(go_on("adam", model, [0, 6], left, range(3, 6)), expected)


@pytest.mark.parametrize("key", ["state.5.weight.exp_avg", "param_groups.5.weight.eps"])
def test_several_names_of_one_parameter_with_different_values_are_refused(key):
    model, state = saved_after("adam", [0, 3, 6], range(3))
    state[key] = state[key] + 1
    with pytest.raises(ValueError, match="'0.weight' and '5.weight' are one parameter, but the state has different"):
        go_on("adam", model, [0, 6], state, range(3, 6))


# ------------------------------------------------------------------------------------------------------------ refusals


def loading(state, all_names=None, kind="adam", start=0, end=LAYERS):
    named = names_of(net(), start, end)
    load_optimizer_state(named, make(kind, named), state, all_names)


def test_keys_that_belong_to_nobody_are_named():
    _, state = saved_after("adam", [0, 6], range(2))
    for key in ("state.7.weight.step", "param_groups.1.weigh.lr", "state_keys.1", "moments.1.weight", "state", ""):
        with pytest.raises(ValueError, match=f"entries that belong to no parameter: {key}. The state has the names of"):
            loading({**state, key: 1}, ALL)
    packed = make("adam", names_of(net())).state_dict()
    with pytest.raises(ValueError, match="belong to no parameter: state, param_groups. .*not saved by name"):
        loading(packed)
    pipe = Pipe(net(), [LAYERS])
    for part, words in (({0: {}, 1: {}}, "0, 1"), ({"param_groups": packed["param_groups"]}, "param_groups")):
        with pytest.raises(ValueError, match=f"entries that belong to no parameter: {words}. The state"):
            pipe.load_optimizer_state_dict(torch.optim.Adam(pipe.parameters()), part)


def test_keys_of_others_are_errors_only_where_there_are_no_others():
    _, state = saved_after("adam", [0, 6], range(2))
    loading(state, ALL, start=1, end=3)
    with pytest.raises(ValueError, match="belong to no parameter: state.0.weight.step.* and .* more"):
        loading(state, None, start=1, end=3)


def test_parameters_that_the_state_does_not_know_are_named():
    _, state = saved_after("adam", [0, 6], range(2))
    for name in ("1.weight", "4.bias"):
        left = {key: value for key, value in state.items() if name not in key}
        with pytest.raises(ValueError, match=rf"knows nothing of parameters that the optimizer holds: \['{name}'\]"):
            loading(left)
    with pytest.raises(ValueError, match=r"holds: \['0.weight', '1.weight', '4.weight', '1.bias', '3.weight'"):
        loading({})


def test_state_of_parameters_that_the_optimizer_does_not_hold_is_named():
    model, state = saved_after("adam", [0, 6], range(2))
    named = names_of(model)
    optimizer = torch.optim.Adam([param for name, param in model.named_parameters() if name != "4.bias"])
    state = {key: value for key, value in state.items() if "weight_decay" not in key}
    with pytest.raises(ValueError, match=r"that the optimizer does not hold: \['4.bias'\]"):
        load_optimizer_state(named, optimizer, state)


def test_parameters_without_a_name_are_refused():
    layer, other = nn.Linear(2, 2), nn.Linear(3, 5)
    optimizer = torch.optim.Adam([*layer.parameters(), other.bias])
    with pytest.raises(ValueError, match=r"a parameter of shape \[5\] that is none of those named"):
        optimizer_state(layer.named_parameters(), optimizer)
    state = optimizer_state(layer.named_parameters(), torch.optim.Adam(layer.parameters()))
    with pytest.raises(ValueError, match=r"optimizer holds: \['one of shape \[5\] without a name'\]"):
        load_optimizer_state(layer.named_parameters(), optimizer, state)


def test_groups_that_mix_what_was_saved_apart_are_refused():
    model, state = saved_after("adam", [0, 6], range(2))
    for name in ALL:
        state[f"param_groups.{name}.lr"] = 0.5 if name.endswith("bias") else 0.25
    named = names_of(model)
    load_optimizer_state(named, torch.optim.Adam([{"params": [p]} for p in model.parameters()]), dict(state))
    with pytest.raises(
        ValueError, match="group 0 of the optimizer has '0.weight' and '1.bias', .* saved with lr 0.25 and 0.5"
    ):
        load_optimizer_state(named, torch.optim.Adam(model.parameters()), state)


def test_state_that_was_saved_but_is_not_there_is_named():
    _, state = saved_after("adam", [0, 6], range(2))
    left = {key: value for key, value in state.items() if key != "state.4.weight.exp_avg"}
    with pytest.raises(ValueError, match=r"says that '4.weight' had \['exp_avg'\], which are not here.*Saved\(path"):
        loading(left)


def test_state_of_no_parameter_is_refused():
    layer = nn.Linear(2, 2)
    lbfgs = torch.optim.LBFGS(layer.parameters())
    for work in (optimizer_state, lambda named, optimizer: load_optimizer_state(named, optimizer, {})):
        with pytest.raises(ValueError, match="LBFGS keeps its history of all parameters as one"):
            work(layer.named_parameters(), lbfgs)
        with pytest.raises(TypeError, match="the optimizer is None. Give a torch optimizer"):
            work(layer.named_parameters(), None)
    sgd = torch.optim.SGD(layer.parameters())
    sgd.state["steps"] = {"count": 3}
    with pytest.raises(ValueError, match=r"keeps state that belongs to no parameter, under \['steps'\]"):
        optimizer_state(layer.named_parameters(), sgd)
    pipe = Pipe(nn.Sequential(layer), [1])
    with pytest.raises(ValueError, match=r"keeps state that belongs to no parameter, under \['steps'\]"):
        pipe.load_optimizer_state_dict(torch.optim.SGD(pipe.parameters()), sgd.state_dict())


def test_numbers_without_names_load_in_the_order_of_the_model_alone():
    pipe = Pipe(nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(3)]), [2, 1])
    turned = list(pipe.named_parameters())[::-1]
    saved = torch.optim.Adam([param for _, param in turned])
    pipe(torch.ones(3, 2)).sum().backward()
    saved.step()
    with pytest.raises(ValueError, match=r"in another order than the Pipe: \['2.weight', '1.weight', '0.weight'\]"):
        pipe.load_optimizer_state_dict(torch.optim.Adam([param for _, param in turned]), saved.state_dict())
    named, loaded = torch.optim.Adam(turned), torch.optim.Adam(turned)
    named.load_state_dict(saved.state_dict())
    pipe.load_optimizer_state_dict(loaded, named.state_dict())
    assert all(torch.equal(loaded.state[each]["exp_avg"], saved.state[each]["exp_avg"]) for each in pipe.parameters())


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"blocks": [torch.ones(1)]}, "a list under 'blocks'"),
        ({"mode": "warm"}, "a str under 'mode'"),
        ({"deep": {"blocks": ()}}, "a tuple under 'deep.blocks'"),
        ({3: torch.ones(1)}, "the key 3. Keys are words"),
        ({"a.b": 3}, "the key 'a.b'"),
        ({"deep": {0: 3}}, "the key 0"),
    ],
)
def test_values_that_cannot_be_saved_by_name_are_refused(state, words):
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters())
    optimizer.state[layer.bias] = state
    with pytest.raises(TypeError, match=f"state of 'bias' has {words}"):
        optimizer_state(layer.named_parameters(), optimizer)


# ------------------------------------------------------------------------------------------------------ torch's format


def all_equal(one, other):
    return one.keys() == other.keys() and all(
        same(one[key], other[key]) if isinstance(one[key], torch.Tensor) else one[key] == other[key] for key in one
    )


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS.keys() - {"sgd"}))  # whose empty state torch does not flatten
def test_the_format_is_torchs_and_each_loads_the_others(kind):
    model = untied(net())  # torch saves a tied parameter under one name, which it loads under none
    named = names_of(model)
    optimizer = make(kind, named)
    train(named, optimizer, range(5, 8))
    ours = optimizer_state(named, optimizer)
    theirs = get_optimizer_state_dict(model, optimizer, options=FLAT)
    assert all_equal({key: value for key, value in ours.items() if not key.startswith("state_keys.")}, theirs)
    again, torchs = copy.deepcopy(model), copy.deepcopy(model)
    one, other = make(kind, names_of(again)), make(kind, names_of(torchs))
    load_optimizer_state(names_of(again), one, copy.deepcopy(theirs))
    set_optimizer_state_dict(torchs, other, copy.deepcopy(ours), options=FLAT)
    for each, its in ((again, one), (torchs, other)):
        train(names_of(each), its, range(8, 10))
    train(named, optimizer, range(8, 10))
    for each in (again, torchs):
        assert_same_values(dict(each.named_parameters()), dict(named))


def test_torchs_helper_steps_a_fresh_optimizer_and_ours_leaves_it_as_it_is() -> None:
    """The reason why optimizer states are named by our own code: see docs/ARCHITECTURE.md."""
    model = nn.Sequential(nn.Linear(2, 2))
    theirs, ours = torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters())
    assert get_optimizer_state_dict(model, theirs, options=FLAT)["state.0.weight.step"] == 1
    assert len(theirs.state) == 2
    optimizer_state(model.named_parameters(), ours)
    assert len(ours.state) == 0


# ---------------------------------------------------------------------------------------- torch.distributed.checkpoint


@pytest.fixture(params=["no group", "a group of one"])
def alone(request, tmp_path):
    if request.param == "a group of one":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if request.param == "a group of one":
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_checkpoint_loads_into_a_fresh_optimizer(kind, alone, tmp_path):
    model = net()
    named = names_of(model)
    optimizer = make(kind, named)
    train(named, optimizer, range(4))
    state = {"model": model.state_dict(), "optimizer": optimizer_state(named, optimizer), "epoch": 3}
    dcp.save(state, checkpoint_id=tmp_path)
    train(named, optimizer, range(4, 7))
    for read in ("load", "Saved"):
        again = net()
        other = make(kind, names_of(again))
        if read == "load":
            state = {"model": again.state_dict(), "optimizer": optimizer_state(names_of(again), other)}
            dcp.load(state, checkpoint_id=tmp_path)
        else:
            state = {"model": Saved(tmp_path, "model"), "optimizer": Saved(tmp_path, "optimizer")}
        again.load_state_dict(state["model"])
        load_optimizer_state(names_of(again), other, state["optimizer"])
        train(names_of(again), other, range(4, 7))
        assert_same_values(dict(again.named_parameters()), dict(model.named_parameters()))
    assert Saved(tmp_path)["epoch"] == 3


def test_places_that_were_not_there_are_not_taken_for_no_state(tmp_path):
    model = net()
    named = names_of(model)
    optimizer = make("momentum", named)
    train(named, optimizer, range(6))
    dcp.save({"optimizer": optimizer_state(named, optimizer)}, checkpoint_id=tmp_path)
    other = make("sgd", named)  # without momentum, so without places for it
    state = {"optimizer": optimizer_state(named, other)}
    dcp.load(state, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match=r"'0.weight' had \['momentum_buffer'\], which are not here"):
        load_optimizer_state(named, other, state["optimizer"])
    load_optimizer_state(named, other, Saved(tmp_path, "optimizer"))
    assert all(same(other.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"]) for _, p in named)


# ------------------------------------------------------------------------------------------------------------ own_part


class Reading(OrderedDict):
    def __init__(self, *args):
        super().__init__(*args)
        self.read = []

    def __getitem__(self, key):
        self.read.append(key)
        return super().__getitem__(key)


@pytest.mark.parametrize("own", [set(), {"0"}, {"1", "3"}, {"0", "1", "2", "3", "4", "5"}])
def test_of_a_whole_state_only_own_values_are_read_and_all_keys_judged(own):
    source, target = net(), net()
    with torch.no_grad():
        for tensor in source.state_dict().values():
            tensor.add_(1)

    def is_remote(key):
        return key[0] not in own

    for index, (name, layer) in enumerate(list(target.named_children())):
        if is_remote(name):
            target._modules[name] = RemoteLayer(layer, index, 0, 1)
    state = Reading(source.state_dict())
    state._metadata = source.state_dict()._metadata
    part = own_part(state, is_remote)
    assert list(part) == list(state) and part._metadata is state._metadata
    assert sorted(state.read) == sorted(key for key in state if key[0] in own)
    target.load_state_dict(part)
    found = target.state_dict()
    assert list(found) == [key for key in source.state_dict() if key[0] in own]
    assert_same_values(found, {key: source.state_dict()[key] for key in found})
    for key in ("7.weight", "2.weight", "1.other"):
        with pytest.raises(RuntimeError, match=f'Unexpected key.*"{key}"'):
            target.load_state_dict(own_part({**part, key: torch.ones(1)}, is_remote))


def test_a_plain_dict_stays_without_versions():
    assert not hasattr(own_part({"0.weight": 1}, lambda key: False), "_metadata")


def test_what_full_state_dict_gives_other_ranks_is_not_loaded():
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2)), [1])
    with pytest.raises(TypeError, match=r"state_dict is None: over ranks full_state_dict\(\) gives it to rank 0 alone"):
        pipe.load_state_dict(None)
    with pytest.raises(TypeError, match=r"over ranks full_optimizer_state_dict\(\) gives it to rank 0 .*broadcast_obj"):
        pipe.load_optimizer_state_dict(torch.optim.SGD(pipe.parameters(), lr=0.1), None)
