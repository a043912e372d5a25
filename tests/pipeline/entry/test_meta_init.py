"""Layers built without memory: the same values however they are shared out, in the same objects, or errors by name."""

import copy
import random
import warnings
import weakref
from collections.abc import Mapping

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from by_chunks import same
from peak import peak_bytes
from safetensors.torch import save_file
from shards import save_shards
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from pipeline import Pipe, layer_seed, meta_parameters
from pipeline.entry.state.meta_init import materialize, reset_parameters
from pipeline.entry.state.meta_tensors import PlacedLayer

CPU = torch.device("cpu")


class Rotary(nn.Module):
    """A parameter, a buffer that is saved and one that is not, filled by reset_parameters."""

    def __init__(self, wide=4):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(wide))
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.register_buffer("table", torch.empty(3, wide), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.gain)
        self.count.fill_(3)
        self.table.copy_(torch.rand(self.table.shape) + torch.arange(3.0)[:, None])


LAYERS = {
    "linear": lambda: nn.Linear(4, 3),
    "no bias": lambda: nn.Linear(4, 3, bias=False),
    "half": lambda: nn.Linear(4, 3, dtype=torch.bfloat16),
    "conv": lambda: nn.Conv2d(2, 4, 3, groups=2),
    "transposed conv": lambda: nn.ConvTranspose1d(2, 4, 3),
    "embedding": lambda: nn.Embedding(7, 4, padding_idx=2),
    "embedding bag": lambda: nn.EmbeddingBag(7, 4),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "batch norm without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "layer norm": lambda: nn.LayerNorm(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "rms norm": lambda: nn.RMSNorm(4),
    "prelu": lambda: nn.PReLU(3),
    "bilinear": lambda: nn.Bilinear(2, 3, 4),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "gru cell": lambda: nn.GRUCell(3, 4),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "attention over others": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    "decoder layer": lambda: nn.TransformerDecoderLayer(4, 2, 8),
    "transformer": lambda: nn.Transformer(4, 2, 1, 1, 8, batch_first=True),
    "nested": lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()), nn.Linear(4, 2)),
    "own": Rotary,
    "no tensors": nn.Tanh,
}


def net():
    return nn.Sequential(*(build() for build in LAYERS.values()))


def on_meta(build):
    with torch.device("meta"):
        return build()


def own(model, indices=None):
    """Some layers of a Sequential."""
    layers = [PlacedLayer(number, name, layer, CPU) for number, (name, layer) in enumerate(model._modules.items())]
    return layers if indices is None else [layers[index] for index in indices]


def fill(model, how, seed=5, indices=None):
    materialize(own(model, indices), how, seed)
    return model


def tensors(module):
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def assert_same(ours, theirs):
    ours, theirs = tensors(ours), tensors(theirs)
    assert list(ours) == list(theirs)
    assert [name for name in ours if not same(ours[name], theirs[name])] == []


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Checkpoints of `net()`: its names stand under "model", or alone, or in safetensors files."""
    torch.manual_seed(3)
    model, path = net(), tmp_path_factory.mktemp("checkpoint")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save({"model": model.state_dict(), "optimizer": {"0.weight": 7}}, checkpoint_id=path / "model")
        dcp.save({**model.state_dict(), "model": {"0.weight": 7}}, checkpoint_id=path / "plain")
    (path / "files").mkdir()
    save_file(model.state_dict(), path / "files" / "model.safetensors")
    return model, path


# ------------------------------------------------------------------------------------------------------ initial values


@pytest.mark.parametrize("kind", LAYERS)
def test_under_one_seed_a_reset_layer_has_the_values_of_a_new_one(kind):
    torch.manual_seed(11)
    new = LAYERS[kind]()
    torch.manual_seed(12)
    old = LAYERS[kind]()
    torch.manual_seed(11)
    reset_parameters(old)
    if kind == "transformer":  # whose encoder and decoder are built from copies: the law holds as far as zeros go
        assert [name for name, value in tensors(new).items() if not value.any()] == [
            name for name, value in tensors(old).items() if not value.any()
        ]
    else:
        assert_same(old, new)


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63])
def test_values_are_those_of_each_layer_under_its_own_seed(seed):
    model = fill(on_meta(net), reset_parameters, seed)
    plain = net()
    for index, layer in enumerate(plain):
        torch.manual_seed(layer_seed(seed, 0, index))
        reset_parameters(layer)
    assert_same(model, plain)


@pytest.mark.parametrize("cuts", [[], [1], [5, 6], [3, 9, 14, 20], list(range(1, len(LAYERS)))])
def test_values_do_not_depend_on_who_fills_which_layers(cuts):
    whole = fill(on_meta(net), reset_parameters)
    parts = on_meta(net)
    edges = [0, *cuts, len(LAYERS)]
    for start, end in reversed(list(zip(edges, edges[1:]))):
        torch.manual_seed(start)  # processes differ in what they drew before
        fill(parts, reset_parameters, indices=range(start, end))
    assert_same(parts, whole)


@pytest.mark.parametrize("how", ["init", "state", "directory", "both"])
def test_every_generator_is_as_it_was(how, directory):
    saved, path = directory
    how = {
        "init": draw_everywhere,
        "state": saved.state_dict(),
        "directory": path / "model",
        "both": (draw_everywhere, saved.state_dict()),
    }[how]
    indices = range(len(LAYERS) - 2)  # all but those with buffers that no state_dict has
    torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
    expected = torch.rand(2), random.random(), numpy.random.rand()
    torch.manual_seed(1), random.seed(2), numpy.random.seed(3)
    fill(on_meta(net), how, indices=indices)
    assert same(torch.rand(2), expected[0]) and (random.random(), numpy.random.rand()) == expected[1:]


def draw_everywhere(layer):
    reset_parameters(layer)
    torch.rand(3), random.random(), numpy.random.rand(3)


def test_pythons_and_numpys_draws_belong_to_the_layer_too():
    def init(layer):
        layer.weight.fill_(random.random())
        layer.bias.copy_(torch.from_numpy(numpy.random.rand(2)))

    def build():
        return nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))

    whole, parts = fill(on_meta(build), init), on_meta(build)
    for index in (2, 0, 3, 1):
        fill(parts, init, indices=[index])
    assert_same(parts, whole)
    assert len({layer.weight[0, 0].item() for layer in whole}) == len({layer.bias[0].item() for layer in whole}) == 4


def test_the_callable_gets_each_layer_that_needs_values_once_without_gradients():
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2), nn.Tanh(), nn.BatchNorm1d(2, device="meta"))
    model.append(model[0])
    seen = []

    def init(layer):
        seen.append(layer)
        assert not torch.is_grad_enabled() and not any(tensor.is_meta for tensor in tensors(layer).values())
        reset_parameters(layer)

    fill(model, init)
    assert seen == [model[0], model[3]]
    fill(model, init)
    assert len(seen) == 2


def test_a_callable_may_make_tensors_where_the_script_builds_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(Rotary(), nn.Linear(2, 2))
        fill(model, reset_parameters)
    assert_same(model, fill(on_meta(lambda: nn.Sequential(Rotary(), nn.Linear(2, 2))), reset_parameters))


# --------------------------------------------------------------------------------------------------------- given values


@pytest.mark.parametrize("how", ["state", "model", "plain", "files", "str"])
@pytest.mark.parametrize("cuts", [[], [8, 15]])
def test_a_state_gives_the_values_it_has(how, cuts, directory):
    saved, path = directory
    given = {name: path / name for name in ("model", "plain", "files")}
    given |= {"state": saved.state_dict(), "str": str(path / "model")}
    model = on_meta(net)
    edges = [0, *cuts, len(LAYERS)]
    for start, end in zip(edges, edges[1:]):
        fill(model, (reset_parameters, given[how]), indices=range(start, end))
    table = list(LAYERS).index("own")
    fresh = fill(on_meta(net), reset_parameters)[table].table
    assert same(model[table].table, fresh)
    saved = copy.deepcopy(saved)
    saved[table].table.copy_(fresh)
    assert_same(model, saved)


class Asked(Mapping):
    """A state that keeps account of what is read."""

    def __init__(self, state):
        self.state, self.read = state, []

    def __getitem__(self, name):
        self.read.append(name)
        return self.state[name]

    def __iter__(self):
        return iter(self.state)

    def __len__(self):
        return len(self.state)

    def __contains__(self, name):
        return name in self.state


def test_only_own_names_are_read_and_only_own_tensors_get_memory(directory):
    saved, _ = directory
    state, model = Asked(saved.state_dict()), on_meta(net)
    fill(model, state, indices=[0, 3, 7])
    assert set(state.read) == {name for name in saved.state_dict() if name.split(".")[0] in {"0", "3", "7"}}
    assert {name.split(".")[0] for name, tensor in tensors(model).items() if not tensor.is_meta} == {"0", "3", "7"}


@pytest.mark.parametrize("how", ["init", "state", "directory", "shards"])
def test_the_whole_model_is_never_held(how, tmp_path):
    def build():
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))

    one = 4 * (256 * 256 + 256)
    saved = build()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path / "directory")
    save_shards(tmp_path / "shards", [layer.state_dict(prefix=f"{index}.") for index, layer in enumerate(saved)])
    given = {"init": reset_parameters, "state": saved.state_dict()}.get(how, tmp_path / how)
    model = on_meta(build)
    peak = peak_bytes(lambda: fill(model, given, indices=[4, 5, 6]))
    assert 3 * one <= peak <= 6 * one  # reading takes an entry's bytes twice; the whole model is 16
    assert how != "shards" or peak <= 5 * one  # those of a file that is mapped, and a copy of a tensor


def test_extra_state_comes_with_the_tensors(tmp_path):
    class Counted(nn.Linear):
        count = 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    def build():
        return nn.Sequential(nn.Sequential(Counted(2, 2)), Counted(2, 2))

    saved = build()
    saved[0][0].count, saved[1].count = 5, 6
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(saved.state_dict(), checkpoint_id=tmp_path)
    for given in (saved.state_dict(), tmp_path):
        model = fill(on_meta(build), given, indices=[0])
        assert (model[0][0].count, model[1].count) == (5, 0)
        model = on_meta(build)
        model[1] = Counted(2, 2)
        fill(model, given)
        assert (model[0][0].count, model[1].count) == (5, 0)  # what has values keeps this too


def test_extra_state_comes_to_a_layer_without_tensors_of_its_own(tmp_path):
    class Counting(nn.Module):
        count = 0

        def __init__(self, weight=None):
            super().__init__()
            self.weight = weight
            self.register_buffer("table", torch.ones(2), persistent=False)

        def get_extra_state(self):
            return torch.tensor(self.count)

        def set_extra_state(self, state):
            self.count = int(state)

    def build():
        linear = nn.Linear(2, 2)
        return nn.Sequential(nn.Sequential(Counting()), linear, Counting(linear.weight))

    saved = build()
    saved[0][0].count, saved[2].count = 5, 6
    state = saved.state_dict()
    save_shards(tmp_path / "shards", [{name: state[name] for name in state if name != "2.weight"}])  # tied
    for given in (state, tmp_path / "shards"):
        for indices in ([0, 1, 2], [0]):
            with meta_parameters():
                model = build()
            materialize(own(model, indices), given, seed=1, anywhere=lambda _: True)
            assert [model[0][0].count, model[2].count] == [5, 6 if 2 in indices else 0]
    with meta_parameters():
        model = build()
    with pytest.raises(ValueError, match="no values for 0.0._extra_state. It has 4 entries"):
        fill(model, {name: state[name] for name in state if name != "0.0._extra_state"})


class Turned(nn.Linear):
    """A layer whose state has its weight the other way round."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].t()

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()
        super()._load_from_state_dict(state_dict, prefix, *args)


class Hooked(nn.Linear):
    """A layer with hooks on loading: one changes a value, one notes that it was loaded."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *args: state.update({f"{prefix}weight": 2 * state[f"{prefix}weight"]})
        )
        self.register_load_state_dict_post_hook(lambda module, keys: setattr(module, "is_loaded", True))


@pytest.mark.parametrize("kind", [Turned, Hooked])
def test_a_layer_loads_a_state_by_rules_of_its_own(kind):
    def build():
        model = nn.Sequential(nn.Sequential(kind(3, 3), nn.Tanh()), kind(3, 3), kind(3, 3))
        model[2].weight = model[1].weight
        return model

    state = build().state_dict()
    loaded, filled = build(), on_meta(build)
    loaded.load_state_dict(state)
    fill(filled, state)
    assert_same(filled, loaded)
    assert [vars(module).get("is_loaded") for module in filled.modules()] == [
        vars(module).get("is_loaded") for module in loaded.modules()
    ]


# ------------------------------------------------------------------------------------------------- what stays as it was


@pytest.mark.parametrize("how", ["init", "state"])
def test_what_has_values_keeps_them(how):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    model[1].running_mean += 5
    model[1].bias = nn.Parameter(torch.empty(2, device="meta"))
    before = {name: (tensor, tensor.clone()) for name, tensor in tensors(model).items() if not tensor.is_meta}
    state = {name: torch.full(tensor.shape, 9, dtype=tensor.dtype) for name, tensor in tensors(model).items()}
    fill(model, reset_parameters if how == "init" else state)
    for name, (tensor, value) in before.items():
        assert tensors(model)[name].data_ptr() == tensor.data_ptr() and same(tensors(model)[name], value)
    assert not model[0].weight.is_meta and not model[1].bias.is_meta


class Special(nn.Parameter):
    pass


@pytest.mark.parametrize("how", ["init", "state"])
def test_objects_and_all_that_hangs_on_them_stay(how):
    called = []
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2)))
    model[0].weight = Special(model[0].weight)
    model[0].weight.tag = "kept"
    model[0].bias.requires_grad_(False)
    model[0].captured = [model[0].weight]
    model[0].weight.register_hook(lambda grad: called.append("hook"))
    model[0].weight.register_post_accumulate_grad_hook(lambda param: called.append("after"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    known = {name: weakref.ref(tensor) for name, tensor in model.named_parameters()}
    ids = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    state = {name: torch.ones(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors(model).items()}
    fill(model, reset_parameters if how == "init" else state)
    assert {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]} == ids
    assert all(known[name]() is tensor for name, tensor in model.named_parameters())
    weight = model[0].weight
    assert type(weight) is Special and weight.tag == "kept" and model[0].captured[0] is weight
    assert [param.requires_grad for param in model[0].parameters()] == [True, False]
    assert list(tensors(model)) == list(state)
    output, _ = model[2](model[1](model[0](torch.randn(4, 3))))
    output.pow(2).sum().backward()
    assert called == ["hook", "after"]
    value = weight.detach() - weight.grad
    optimizer.step()
    assert same(weight.detach(), value)


@pytest.mark.parametrize("indices", [None, [0, 1, 2, 3]])
def test_a_tensor_at_several_places_stays_one_and_has_its_first_places_values(indices):
    def build():
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 5))
        model[3].weight = model[0].weight
        return model

    model = fill(on_meta(build), reset_parameters, indices=indices)
    assert model[3].weight is model[0].weight
    alone = fill(on_meta(build), reset_parameters, indices=[0])
    assert same(model[0].weight, alone[0].weight)
    for place in ("0", "3"):
        value = torch.randn(5, 3)
        state = {"1.weight": torch.ones(3, 3), "1.bias": torch.ones(3), "3.bias": torch.ones(5)}
        state[f"{place}.weight"] = value
        model = fill(on_meta(build), state)
        assert model[3].weight is model[0].weight and same(model[0].weight.detach(), value)
        state["0.weight"] = state["3.weight"] = value
        assert same(fill(on_meta(build), state)[3].weight.detach(), value)
        state["3.weight"] = value + 1
        with pytest.raises(ValueError, match="'0.weight' and '3.weight' are one tensor, but the state.*different"):
            fill(on_meta(build), state)


def test_a_buffer_that_is_saved_at_one_place_of_several_takes_a_state():
    for places in ((True, False), (False, True)):
        layers = [nn.Module(), nn.Module()]
        table = torch.empty(3, device="meta")
        for layer, persistent in zip(layers, places, strict=True):
            layer.register_buffer("table", table, persistent=persistent)
        model = nn.Sequential(*layers)
        assert len(model.state_dict()) == 1
        with pytest.raises(ValueError, match=r"no values for 0.table\. It has 0 entries \(\)"):
            fill(model, (lambda layer: layer.table.zero_(), {}))
        fill(model, {name: torch.ones(3) for name in model.state_dict()})
        assert model[0].table is model[1].table and model[0].table.tolist() == [1, 1, 1]


def test_a_module_at_several_places_of_a_layer_takes_a_state_from_each():
    for place in ("0.0", "0.1"):
        inner = nn.Linear(2, 2, bias=False, device="meta")
        model = nn.Sequential(nn.Sequential(inner, inner))
        fill(model, {f"{place}.weight": torch.ones(2, 2)})
        assert inner.weight.tolist() == [[1, 1], [1, 1]]


def test_a_layer_at_several_places_is_filled_as_at_its_first():
    def build():
        layer = nn.Linear(3, 3)
        return nn.Sequential(nn.Tanh(), layer, nn.Linear(3, 3), layer)

    model = fill(on_meta(build), reset_parameters)
    alone = fill(on_meta(build), reset_parameters, indices=[1])
    assert model[3] is model[1] and same(model[1].weight, alone[1].weight)


def test_memory_that_tensors_share_they_share_again_with_their_strides():
    layer = nn.Module()
    whole = torch.empty(2, 6, device="meta")
    layer.flat = nn.Parameter(whole)
    layer.turned = nn.Parameter(whole.data.t()[2:4])
    layer.register_buffer("wide", torch.empty(1, 3, device="meta").expand(4, 3))
    layer.register_buffer("last", torch.empty(2, 3, 4, 5, device="meta").to(memory_format=torch.channels_last))
    model = nn.Sequential(layer)

    def init(layer):
        layer.flat.copy_(torch.arange(12.0).reshape(2, 6))
        layer.wide[0].copy_(torch.tensor([1.0, 2.0, 3.0]))
        layer.last.zero_()

    fill(model, init)
    assert layer.turned.tolist() == [[2.0, 8.0], [3.0, 9.0]] and layer.turned.stride() == (1, 6)
    assert layer.wide.tolist() == [[1.0, 2.0, 3.0]] * 4 and layer.wide.untyped_storage().nbytes() == 12
    assert layer.last.is_contiguous(memory_format=torch.channels_last)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("build", [lambda: nn.Linear(2, 2), nn.Tanh])
@pytest.mark.parametrize("how", [3, b"path", (reset_parameters,), (reset_parameters, None), ({}, reset_parameters)])
def test_what_is_no_way_to_fill_is_refused_even_where_nothing_is_to_fill(build, how):
    with pytest.raises(TypeError, match="materialize is .*Give materialize=: a callable"):
        fill(nn.Sequential(build()), how)


@pytest.mark.parametrize("how", [None, reset_parameters, {}, "nowhere"])
def test_where_all_have_values_nothing_happens_and_a_state_is_refused(how):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = copy.deepcopy(model)
    if isinstance(how, dict | str):
        with pytest.raises(ValueError, match="has values already, which stay. Build it on the meta device"):
            fill(model, how)
        materialize(own(model), how, 0, anywhere=lambda here: not here)  # another rank reads it
    else:
        fill(model, how)
    assert_same(model, before)
    fill(nn.Sequential(nn.Tanh()), how)


def test_without_values_the_first_names_are_said():
    with pytest.raises(ValueError, match=r"0.weight, 0.bias, 1.weight, 2.weight, 2.bias and \d+ more.*materialize="):
        fill(on_meta(net), None)
    with pytest.raises(ValueError, match=r"without values: 1.weight. Give"):
        fill(on_meta(net), None, indices=[1])


def test_what_a_state_lacks_is_named_before_anything_is_done(directory):
    _, path = directory
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)))
    for given in ({"0.weight": torch.ones(3, 4), "1.weight": torch.ones(3, 3)}, {"2.bias": 0}):
        names = ", ".join(name for name, _ in model.named_parameters() if name not in given)
        with pytest.raises(ValueError, match=f"no values for {names}. It has {len(given)} entries"):
            fill(model, given)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3)).to("meta")
    with pytest.raises(ValueError, match=r"no values for 1.bias. It has"):
        fill(model, path / "model")
    assert all(tensor.is_meta for tensor in tensors(model).values())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(3, 2), r"torch.float32 of shape \[3, 2\] for '0.weight', which is torch.float32 of shape \[2, 2\]"),
        (torch.ones(2), r"of shape \[2\] for '0.weight'"),
        (torch.ones(2, 2, dtype=torch.float64), "has torch.float64 of.* for '0.weight', which is torch.float32"),
        (torch.ones(2, 2, dtype=torch.int32), "has torch.int32 of.* for '0.weight', which is torch.float32"),
        ([[1.0, 1.0], [1.0, 1.0]], "has a list for '0.weight'"),
        (torch.ones(2, 2, device="meta"), "has a tensor on meta of torch.strided for '0.weight'. Give one with all"),
        (torch.eye(2).to_sparse(), "has a tensor on cpu of torch.sparse_coo for '0.weight'"),
    ],
)
def test_a_value_of_another_shape_or_type_is_refused(value, words):
    model = nn.Sequential(nn.Linear(2, 2, bias=False, device="meta"))
    with pytest.raises(ValueError, match=words):
        fill(model, {"0.weight": value})


@pytest.mark.parametrize(
    ("kept", "wide"),
    [
        (torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64),
        (torch.float8_e4m3fn, torch.bfloat16),
    ],
)  # fmt: skip
def test_a_value_of_a_type_that_the_modules_type_holds_is_widened(kept, wide):
    value = torch.tensor([[1.5, -0.0], [torch.finfo(kept).max, torch.finfo(kept).smallest_normal]]).to(kept)
    model = nn.Sequential(nn.Linear(2, 2, bias=False, device="meta", dtype=wide))
    fill(model, {"0.weight": value})
    assert model[0].weight.dtype == wide and torch.equal(model[0].weight.to(kept).float(), value.float())
    narrow = nn.Sequential(nn.Linear(2, 2, bias=False, device="meta", dtype=kept))
    with pytest.raises(ValueError, match=f"has {wide} of.*Build the module with that shape and type"):
        fill(narrow, {"0.weight": value.to(wide)})


@pytest.mark.parametrize("given", ["weight", "inner.0.weight", "inner.model.0.weight"])
def test_names_with_other_steps_in_front_are_shown(given):
    with pytest.raises(ValueError, match=f"values for 0.weight.*: '{given}' may be '0.weight'.*save_original_format"):
        fill(nn.Sequential(nn.Linear(2, 2, bias=False, device="meta")), {"2.bias": 0, given: torch.ones(2, 2)})


def test_a_tied_tensor_may_stand_under_a_name_in_layers_of_others():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)).to("meta")
    model[1].weight = model[0].weight
    value = torch.randn(5, 3)
    table = own(model)
    materialize(table[1:], {"0.weight": value}, 0, table[:1])
    assert same(model[1].weight.detach(), value)
    model.to("meta")
    with pytest.raises(ValueError, match="no values for 1.weight"):
        materialize(table[1:], {"2.weight": value}, 0, table[:1])


def test_an_entry_of_another_shape_in_a_directory_is_refused(directory):
    _, path = directory
    with pytest.raises(ValueError, match=r"\[3, 4\] for '0.weight', which is .*\[3, 9\]"):
        fill(nn.Sequential(nn.Linear(9, 3, device="meta")), path / "model")
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        fill(nn.Sequential(nn.Linear(9, 3, device="meta")), path)


def test_buffers_that_no_state_has_want_a_callable(directory):
    saved, _ = directory
    index = list(LAYERS).index("own")
    with pytest.raises(ValueError, match=rf"{index}.table.*\(callable, state\)"):
        fill(on_meta(net), saved.state_dict())


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(), (3,), (2, 3)])
def test_what_the_callable_leaves_is_named(dtype, size):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("one", torch.empty(size, dtype=dtype))
            self.register_buffer("other", torch.empty(size, dtype=dtype))

    for name, other in (("one", "other"), ("other", "one")):
        with pytest.raises(ValueError, match=rf"left \['0.{other}'\] without values"):
            fill(on_meta(lambda: nn.Sequential(Two())), lambda layer: getattr(layer, name).zero_())
    if dtype is not torch.bool:  # which has no third value to see that by
        model = fill(on_meta(lambda: nn.Sequential(Two())), lambda layer: (layer.one.zero_(), layer.other.data.zero_()))
        assert not model[0].other.to(torch.complex64).any()
    model = fill(on_meta(lambda: nn.Sequential(Two())), lambda layer: (layer.one.zero_(), layer.other.zero_()))
    assert not model[0].one.to(torch.complex64).any() and not model[0].other.to(torch.complex64).any()


def test_a_tensor_that_is_filled_in_part_is_named():
    with pytest.raises(ValueError, match=r"left \['0.weight'\]"):
        fill(nn.Sequential(nn.Linear(2, 2, bias=False, device="meta")), lambda layer: layer.weight[:1].zero_())


def test_what_the_state_fills_the_callable_may_leave():
    model = on_meta(lambda: nn.Sequential(Rotary()))
    state = {"0.gain": torch.full((4,), torch.nan), "0.count": torch.tensor(8)}
    fill(model, (lambda layer: layer.table.zero_(), state))
    assert model[0].count == 8 and not model[0].table.any() and bool(model[0].gain.isnan().all())
    with pytest.raises(ValueError, match=r"left \['0.table'\] without values"):
        fill(on_meta(lambda: nn.Sequential(Rotary())), (lambda layer: None, state))
    model = on_meta(lambda: nn.Sequential(Rotary()))
    fill(model, {**state, "0.table": torch.full((3, 4), 2.0)})  # given by hand: then it is there
    assert bool((model[0].table == 2).all())


@pytest.mark.parametrize(
    "init",
    [
        lambda layer: setattr(layer, "bias", nn.Parameter(torch.ones(2))),
        lambda layer: layer.register_parameter("bias", None),
        lambda layer: layer.register_buffer("more", torch.ones(2)),
    ],
)
def test_a_callable_that_puts_other_objects_there_is_refused(init):
    with pytest.raises(RuntimeError, match=r"put other objects at \[.*'0\.(bias|more)'\].*fill the tensors"):
        fill(nn.Sequential(nn.Linear(2, 2, device="meta")), init)


def test_what_the_callable_raises_comes_out_and_generators_are_as_they_were():
    torch.manual_seed(4)
    expected = torch.rand(1)
    torch.manual_seed(4)
    with pytest.raises(ZeroDivisionError):
        fill(nn.Sequential(nn.Linear(2, 2, device="meta")), lambda layer: 1 / 0)
    assert same(torch.rand(1), expected)


@pytest.mark.parametrize("fails", [{"2.bias": torch.ones(3)}, lambda layer: 1 / (not isinstance(layer, nn.Linear))])
def test_after_an_error_another_try_fills_all(fails):
    def build():
        model = nn.Sequential(nn.BatchNorm1d(2), nn.GRU(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        model[3].weight = model[2].weight
        return model

    expected = build()
    state = expected.state_dict()
    model = on_meta(build)
    before = list(model.parameters())
    with pytest.raises((ValueError, ZeroDivisionError)):
        Pipe(model, [2, 2], devices=["cpu"] * 2, materialize=fails if callable(fails) else {**state, **fails})
    assert all(tensor.is_meta for tensor in tensors(model).values())
    Pipe(model, [2, 2], devices=["cpu"] * 2, materialize=state)
    assert_same(model, expected)
    assert all(param.requires_grad and param is one for param, one in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("hide", [lambda t: t, lambda t: [t], lambda t: {"a": (1, t)}])
@pytest.mark.parametrize("how", [None, reset_parameters])
def test_a_tensor_without_memory_that_is_no_buffer_is_named(hide, how):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Tanh())
    model[0][0].mask = hide(torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match=r"are no parameters or buffers: \['0.0.mask'\].*register_buffer"):
        fill(model, how)
    fill(model, how, indices=[1])


def test_tensors_that_are_not_plain_are_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("rows", torch.sparse_coo_tensor(size=(2, 2), device="meta", check_invariants=False))
    with pytest.raises(ValueError, match="'0.rows' is on the meta device and no plain tensor"):
        fill(model, reset_parameters)

    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    model = nn.Sequential(nn.Linear(2, 2))
    inner = torch.Tensor._make_wrapper_subclass(Wrapped, (2, 2), device=torch.device("meta"))
    model[0]._buffers["table"] = inner
    with pytest.raises(ValueError, match="'0.table' is on the meta device and no plain tensor .Wrapped"):
        fill(model, reset_parameters)


# -------------------------------------------------------------------------------------------------------- parametrized


class Doubled(nn.Module):
    def forward(self, value):
        return 2 * value

    def right_inverse(self, value):
        return value / 2


def parametrized():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    return model


def test_a_parametrized_layer_is_refused_by_reset_parameters_and_filled_by_assignment():
    with pytest.raises(ValueError, match=r"no reset_parameters\(\): parametrizations.weight \(ParametrizationList\)"):
        fill(on_meta(parametrized), reset_parameters)
    with pytest.raises(ValueError, match=r"left \['0.parametrizations.weight.original'\].*parametrized"):
        fill(on_meta(parametrized), lambda layer: layer.reset_parameters())

    def init(layer):
        value = torch.empty(3, 3)
        nn.init.orthogonal_(value)
        layer.bias.zero_()
        layer.weight = value if parametrize.is_parametrized(layer) else nn.Parameter(value)

    with pytest.raises(RuntimeError, match=r"put other objects at \['1.weight'\]"):
        fill(on_meta(parametrized), init)
    model = fill(on_meta(parametrized), init, indices=[0])
    assert torch.allclose(model[0].weight @ model[0].weight.t(), torch.eye(3), atol=1e-6)
    assert same(2 * model[0].parametrizations.weight.original, model[0].weight)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_parametrized_layer_takes_a_state(norm):
    def build():
        return nn.Sequential(norm(nn.Linear(3, 3)), nn.Linear(3, 3))

    with torch.device("cpu"):
        saved = build()
    model = on_meta(build)
    fill(model, saved.state_dict())
    assert_same(model, saved)
    x = torch.randn(2, 3)
    assert same(model(x), saved(x))


# ---------------------------------------------------------------------------------------------------- reset_parameters


def test_modules_without_a_reset_are_all_named_and_nothing_is_done():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1))

    layer = nn.Sequential(nn.Linear(2, 2), Own(), nn.Sequential(Own()))
    before = copy.deepcopy(layer)
    with pytest.raises(ValueError, match=r"no reset_parameters\(\): 1 \(Own\), 2.0 \(Own\). Give them that method"):
        reset_parameters(layer)
    assert_same(layer, before)
    with pytest.raises(ValueError, match=r"no reset_parameters\(\): the layer \(Own\)"):
        reset_parameters(Own())


def test_a_module_resets_its_children_last_said_wins():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def reset_parameters(self):
            nn.init.constant_(self.inner.weight, 7)

    layer = Scaled()
    reset_parameters(layer)
    assert layer.inner.weight.tolist() == [[7, 7], [7, 7]]
    assert layer.inner.bias.abs().max() < 1


def test_a_module_that_stands_twice_is_reset_once():
    count = []

    class Counting(nn.Linear):
        def reset_parameters(self):
            count.append(self)
            super().reset_parameters()

    inner = Counting(2, 2)
    layer = nn.Sequential(inner, nn.Sequential(inner))
    count.clear()
    reset_parameters(layer)
    assert count == [inner]


class OfCudnn(nn.GRU):
    """It notes what it would move into one memory for cuDNN."""

    def flatten_parameters(self):
        vars(self)["moved"] = [weight.device.type for weight in self._flat_weights]


def test_the_parameters_of_rnns_come_into_one_memory_when_they_have_some():
    rnn = on_meta(lambda: OfCudnn(2, 2))
    materialize([PlacedLayer(0, "0", rnn, CPU)], reset_parameters, seed=7)
    assert rnn.moved == ["cpu"] * 4
