"""Laws: a module whose value another part reads is a layer of its own, with its hooks; or it is refused in words."""

import copy
import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
from block_models import MODELS, Chain, Sees, Towers, ids, pictured, squashing
from families import of_family
from torch import nn

from partition import PartitionError, to_sequential
from pipeline import Pipe


def cut(model, *sample):
    torch.manual_seed(1)
    return to_sequential(model.eval(), sample).eval()


def layers_of(layers):
    """What is in each layer: "patch", say; "" where only other modules are, called or not."""
    return [", ".join(layer._names) for layer in layers]


@pytest.mark.parametrize("name, modules", [
    ("sees", ["words"]), ("towers", ["of_image"]), ("towers of modules", []), ("branches", ["pair", "between"]),
])  # fmt: skip
def test_a_module_whose_value_another_part_reads_is_a_layer(name, modules):
    """Each computes what its reader cannot: it does not have the module, nor is that an argument of a block."""
    build, inputs = MODELS[name]
    layers = to_sequential(build(), inputs(4))
    alone = [layer for layer in layers_of(layers) if "." not in layer and layer in dict(build().named_children())]
    assert [name for name in alone if name in modules] == modules
    written = {layers_of(layers[2:])[0]} if name == "sees" else set()
    assert bool(layers[0].outline.passing.written) is bool(written)


class Apart(nn.Module):
    """What a module of the beginning returns is read at the end; how often it is called depends on the length."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.extra = nn.Embedding(11, 4), squashing(3), nn.Linear(4, 4)

    def forward(self, ids):
        x = self.embed(ids)
        passing = self.extra(x) if ids.size(1) < 9 else x
        if ids.size(1) == 8:
            passing = self.extra(passing)
        for block in self.blocks:
            x = block(x)
        return x + passing


class Table(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.rows, self.inner = nn.Parameter(torch.randn(4)), inner

    def forward(self):
        return self.inner(self.rows)


@pytest.mark.parametrize("inner", [torch.tanh, nn.Linear(4, 4)], ids=["function", "module"])
def test_what_a_module_makes_without_a_tensor_each_reader_makes_again(inner):
    class Turns(Chain):
        def __init__(self):
            super().__init__()
            self.table = Table(inner)

        def forward(self, ids):
            table = self.table()
            return super().forward(ids) * table

    model = Turns().double()
    layers = to_sequential(model, ids(4))
    assert [name for layer in layers for name in layer._names].count("table") > 0 and len(layers) == 5
    x = ids(3)
    ours = torch.autograd.grad(layers(x).square().sum(), model.parameters())
    for one, other in zip(ours, torch.autograd.grad(model(x).square().sum(), model.parameters()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


class Both(Apart):
    def forward(self, ids):
        x = self.embed(ids)
        passing = self.extra(x) + self.extra(-x)
        for block in self.blocks:
            x = block(x)
        return x + passing


def test_of_a_module_that_is_called_twice_nothing_travels():
    with pytest.raises(PartitionError, match="what 'extra' computes is used .*or from a module that is called once"):
        to_sequential(Both(), torch.arange(8).view(2, 4), blocks="blocks")


def test_a_module_that_is_called_another_number_of_times_than_on_the_sample_is_named():
    layers = cut(Apart(), torch.arange(8).view(2, 4))
    assert layers_of(layers)[1] == "extra"
    with pytest.raises(PartitionError, match="block 'extra' was called where 'blocks.0' was on the sample .* like"):
        layers((torch.arange(8).view(1, 8),))
    words = "block 'blocks.0' was called where 'extra' was on the sample .* a sample like this call"
    with pytest.raises(PartitionError, match=words):
        layers((torch.arange(9).view(1, 9),))
    pipe = Pipe(layers, [2, len(layers) - 2], 2)
    with pytest.raises(PartitionError, match=words):
        pipe((torch.arange(9).view(1, 9).repeat(4, 1),))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
@pytest.mark.parametrize("way", ["hooks", "compiled"])
def test_what_travels_is_what_the_module_returns_with_its_hooks_or_compiled(way):
    torch.manual_seed(0)
    model, sample = Towers().eval(), pictured(4)
    if way == "hooks":
        model.of_image.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    else:
        model.of_image.compile(backend="eager")
    layers = cut(model, *sample)
    if way == "hooks":
        model.of_image.register_forward_hook(lambda module, args, output: output + 1)  # after the cut, too
    torch.compiler.reset()
    images, ids = pictured(5)
    for one, other in zip(layers((images, ids)).values(), model(images, ids).values(), strict=True):
        assert torch.equal(one, other)
    assert "of_image" in layers_of(layers)


def test_gradients_reach_what_travels_from_every_reader():
    torch.manual_seed(0)
    model, (ids, images) = Sees().double().eval(), (pictured(6)[1], pictured(6)[0].double())
    layers = to_sequential(model, (ids, images))
    pipe = Pipe(layers, [4, 6], 3, checkpoint="always")
    pipe.step((ids, images), torch.zeros(6), loss_fn=lambda y, _: y.pow(2).mean())
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(ids, images).pow(2).mean().backward()
    for one, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-12, atol=1e-15)


def collecting(blocks, found):
    for block in blocks:
        block.register_forward_hook(lambda module, args, output: found[0].append(output))


class Collecting(Chain):
    """Its first forward registers hooks, or its constructor; they collect what blocks return.

    Args:
        asks: whether it returns what they have collected.
        at_once: whether they are there before it is called.
    """

    def __init__(self, asks, at_once=False):
        super().__init__()
        self.asks, self.found, self.is_hooked = asks, [[]], at_once
        if at_once:
            collecting(self.blocks, self.found)

    def forward(self, ids):
        if not self.is_hooked:
            collecting(self.blocks, self.found)
            self.is_hooked = True
        self.found[0] = []
        y = super().forward(ids)
        return (y, *self.found[0]) if self.asks else y


def hooks_of(model):
    return [list(module._forward_hooks.values()) for module in model.modules()]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("asks", [False, True])
def test_what_hooks_of_the_models_own_collect_is_in_its_parts_too(asks, at_once):
    model, ids = Collecting(asks, at_once).eval(), torch.arange(8).view(2, 4)
    found = hooks_of(model)
    layers = to_sequential(model, ids)
    assert hooks_of(model) == found and len(layers) == 5
    for ids in (ids, torch.arange(12).view(3, 4) % 11, ids + 1):
        ours, theirs = layers(ids), model(ids)
        assert len(model.found[0]) == 3
        assert all(map(torch.equal, ours, theirs)) if asks else torch.equal(ours, theirs)


class AroundTower(nn.Module):
    """A tower that registers hooks within itself when it is first called, and whose collected states are read."""

    def __init__(self):
        super().__init__()
        self.tower, self.mix, self.head = Collecting(True), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, ids):
        y, *states = self.tower(ids)
        return self.head(self.mix(y) + sum(states)), len(states)


@torch.no_grad()
@pytest.mark.parametrize("is_called", [False, True])
def test_a_block_that_hooks_itself_is_the_same_whether_the_model_was_called_or_not(is_called):
    model, ids = AroundTower().eval(), torch.arange(8).view(2, 4)
    if is_called:
        model(ids)
    layers = to_sequential(model, ids, blocks=["tower", "mix"])
    other = AroundTower().eval()  # as on another rank, where the tower runs
    other.load_state_dict(model.state_dict())
    elsewhere = to_sequential(other, ids, blocks=["tower", "mix"])
    for ids in (ids, torch.arange(12).view(3, 4) % 11):
        apart = [layers[at:](elsewhere[:at](ids)) for at in (2, 3, 4)]  # here it has not run yet
        assert all([count == 3 and torch.equal(ours, other(ids)[0]) for ours, count in apart])
    (ours, count), (theirs, _) = layers(ids), model(ids)
    assert count == 3 and torch.equal(ours, theirs)


def test_gradients_go_through_what_hooks_collect():
    model, ids = Collecting(True).double(), torch.randint(0, 11, (6, 4))
    pipe = Pipe(copy.deepcopy(model), [2, 3], 3, sample=ids, checkpoint="always")
    pipe.step(ids, torch.zeros(6), loss_fn=lambda ys, _: sum(y.pow(2).sum(-1).mean() for y in ys))
    sum(y.pow(2).sum(-1).mean() for y in model(ids)).backward()
    for one, other in zip(pipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)


class Logged(Chain):
    """A model of the package that its hooks are of."""


@pytest.mark.parametrize("kind", [Chain, Logged], ids=["of a script", "of the model's own"])
def test_hooks_that_the_model_does_not_read_run_where_the_block_does_and_nowhere_else(kind):
    model, ids, found = kind().eval(), torch.arange(8).view(2, 4), [[]]
    collecting(model.blocks, found)
    layers = to_sequential(model, ids)
    found[0] = []
    layers(ids)
    assert len(found[0]) == 3 and all(bool(y.isfinite().all()) for y in found[0])


def test_hooks_of_a_script_that_the_model_reads_are_refused():
    namespace = {"__name__": "__main__"}
    exec("def hook(found): return lambda module, args, output: found[0].append(output)", namespace)
    model = Collecting(True, at_once=True).eval()
    for block in model.blocks:
        block._forward_hooks.clear()
        block.register_forward_hook(namespace["hook"](model.found))
    with pytest.raises(PartitionError, match=r"returns 4 tensors on the sample, and its parts 1, .*output="):
        to_sequential(model, torch.arange(8).view(2, 4))


@pytest.mark.parametrize("kind, settings", [
    ("LlamaForCausalLM", {"output_hidden_states": True}), ("BertForMaskedLM", {"output_hidden_states": True}),
    ("T5ForConditionalGeneration", {"output_hidden_states": True}),
    ("ViTForImageClassification", {"output_hidden_states": True}),
])  # fmt: skip
def test_hidden_states_of_transformers_come_out_of_the_parts(kind, settings):
    model, inputs = of_family(kind, **settings)
    model.eval()
    layers = to_sequential(model, inputs(4))
    assert not hasattr(model, "_output_capturing_hooks_installed")
    for x in (inputs(3), inputs(5)):
        ours, theirs = layers(x), model(**x)
        states = [name for name in theirs if name.endswith("hidden_states") and isinstance(theirs[name], tuple)]
        assert states
        for name in states:
            assert all(map(torch.equal, ours[name], theirs[name])) and len(ours[name]) == len(theirs[name])


@pytest.mark.parametrize("kind, output", [
    ("BertForMaskedLM", "attentions"), ("ViTForImageClassification", "attentions"), ("GPT2LMHeadModel", "attentions"),
    ("MixtralForCausalLM", "router_logits"),
])  # fmt: skip
def test_what_hooks_within_blocks_collect_comes_out_of_the_parts(kind, output):
    model, inputs = of_family(kind, attn_implementation="eager", **{f"output_{output}": True})
    model.eval()
    layers = to_sequential(model, inputs(4), output=lambda out: {"logits": out.logits, output: out[output]})
    for x in (inputs(3), inputs(5)):
        ours, theirs = layers(x), model(**x)
        assert all(map(torch.equal, ours[output], theirs[output])) and len(ours[output]) == len(theirs[output])


def test_a_model_that_reads_what_no_output_has_is_told_whose_hooks_collect_it():
    model, inputs = of_family("MixtralForCausalLM", output_router_logits=True)
    with pytest.raises(PartitionError, match=r"Hooks collect what .*mlp\.gate, .* return: turn that off"):
        to_sequential(model, inputs(4), output=lambda returned: returned.logits)


def test_the_auxiliary_loss_of_experts_is_that_of_a_loop_over_chunks():
    model, inputs = of_family("MixtralForCausalLM", output_router_logits=True, experts_implementation="eager")
    model.double().eval()
    x = inputs(4)

    def output(out):
        return {"logits": out.logits, "aux": out.aux_loss.expand(len(out.logits))}

    def loss_fn(out, _):
        return out["logits"].square().mean() + out["aux"].mean()

    layers = to_sequential(model, x, output=output)
    Pipe(layers, chunks=2, devices=["cpu"] * 2, mixes_rows=True).step(x, loss_fn=loss_fn)
    found = [parameter.grad for parameter in model.parameters()]
    loss = 0
    for rows in (slice(0, 2), slice(2, 4)):
        out = model(**{name: value[rows] for name, value in x.items()}, use_cache=False)
        loss = loss + (out.logits.square().mean() + out.aux_loss) / 2
    for mine, expected in zip(found, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


@dataclasses.dataclass
class Loss:
    """What blocks return beside the hidden state, as mixtures of experts do."""

    value: torch.Tensor


@dataclasses.dataclass
class Seen:
    value: torch.Tensor


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Nested:
    def __init__(self, value: torch.Tensor) -> None:
        self.inner = Slotted(value)

    @property
    def value(self) -> torch.Tensor:
        return self.inner.value


class Listed(list):
    @property
    def value(self) -> torch.Tensor:
        return self[0]


torch.utils._pytree.register_dataclass(Seen)
OPAQUE = {
    "dataclass": Loss, "namespace": lambda value: SimpleNamespace(value=value), "slots": Slotted,
    "an object in one": Nested, "a list of its own kind": lambda value: Listed([value]),
}  # fmt: skip


class Expert(nn.Linear):
    def __init__(self, kind):
        super().__init__(4, 4)
        self.kind = kind

    def forward(self, x):
        y = super().forward(x).tanh()
        return y, self.kind(y.square())


class Experts(Chain):
    """Each block returns an object beside the hidden state, whose values the end adds up."""

    def __init__(self, kind, returns=lambda x, total: x + total):
        super().__init__()
        self.returns, self.blocks = returns, nn.ModuleList(Expert(kind) for _ in range(3))

    def forward(self, ids):
        x, total = self.embed(ids), 0
        for block in self.blocks:
            x, loss = block(x)
            total = total + loss.value
        return self.returns(x, total)


@pytest.mark.parametrize("kind", OPAQUE)
def test_objects_in_which_nothing_is_seen_are_named(kind):
    with pytest.raises(PartitionError, match="computes beside what it returns") as error:
        to_sequential(Experts(OPAQUE[kind]), ids(4))
    (note,) = error.value.__notes__
    assert re.search(r"Modules of it return a \S+, and nothing sees what is in it: register it", note)
    assert ("register_dataclass(Loss)" in note) == (kind == "dataclass")


class Padded:
    """Values, and where there are none: no pytree yet."""

    def __init__(self, values, padding):
        self.values, self.padding = values, padding


class Pads(nn.Module):
    """A module that is called with such an object, and returns one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return [Padded(self.linear(x.values), x.padding[:, ::2])]


class ReadsPadded(nn.Module):
    """Blocks, and what is behind them, read what a module returns in an object."""

    def __init__(self):
        super().__init__()
        self.pads, self.blocks = Pads(), nn.ModuleList(Shifted(4, 4) for _ in range(4))

    def forward(self, x):
        (padded,) = self.pads(Padded(x, x.repeat_interleave(2, 1)[..., 0] < 0))
        x = padded.values
        for block in self.blocks[:2]:
            x = block(x, padded.padding)
        y = x.flip(1)
        for block in self.blocks[2:]:
            y = block(y, padded.padding)
        return y + x


class Shifted(nn.Linear):
    def forward(self, x, padding):
        return super().forward(x.masked_fill(padding[..., None], 0.5)).tanh()


def test_an_object_that_a_module_returns_to_several_parts_is_refused_until_it_is_registered():
    torch.manual_seed(0)
    model, x = ReadsPadded(), torch.randn(5, 6, 4)
    words = "a Pads returns a test_returns.Padded to several parts of the model, and nothing sees what is in it: regis"
    with pytest.raises(PartitionError, match=words):
        to_sequential(model, x)
    torch.utils._pytree.register_pytree_node(
        Padded, lambda padded: ([padded.values, padded.padding], None), lambda leaves, _: Padded(*leaves)
    )
    pipe = Pipe(model, [4, 5], chunks=2, sample=x)
    for _ in range(2):
        torch.testing.assert_close(pipe(x), model(x))


class Unread(Experts):
    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x, _ = block(x)
        return x


def test_what_is_in_an_object_that_a_block_returned_on_the_sample_is_read_in_no_other_call():
    kind, words = lambda square: SimpleNamespace(value=square.size(1)), ids(6)
    with pytest.raises(PartitionError, match="type object 'Opaque' has no attribute 'value'") as error:
        to_sequential(Experts(kind), words)
    assert "Modules of it return a types.SimpleNamespace, and nothing sees what is in it" in error.value.__notes__[0]
    model = Unread(kind)
    assert torch.equal(to_sequential(model, words)(words[:, :3]), model(words[:, :3]))


@pytest.mark.parametrize("kind", OPAQUE)
def test_an_object_that_the_model_returns_is_refused_or_taken_apart(kind):
    model, words = Experts(Seen, lambda x, total: OPAQUE[kind](x + total)).double(), ids(4)
    with pytest.raises(PartitionError, match=r"Experts returns a \S+, and nothing sees what is in it: .*output="):
        to_sequential(model, words)
    assert torch.equal(to_sequential(model, words, output=lambda returned: returned.value)(words), model(words).value)


def test_dataclasses_that_are_registered_are_taken_apart():
    model, words = Experts(Seen, lambda x, total: {"x": Seen(x), "total": total}).double(), ids(4)
    pipe = Pipe(model, sample=words, chunks=2, devices=["cpu"] * 2)
    for found, expected in zip(pipe(words).values(), model(words).values(), strict=True):
        torch.testing.assert_close(getattr(found, "value", found), getattr(expected, "value", expected))


class AsksForItsDevice(nn.Linear):
    """A block that does not run on the meta device, and returns more than the hidden state."""

    def __init__(self):
        super().__init__(4, 4)
        self.scale = (torch.rand(4, dtype=torch.float64),)

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            y = super().forward(x) * self.scale[0]
        return y.tanh(), y.square()


@pytest.mark.parametrize("autocast", [False, True])
def test_a_block_that_does_not_run_on_the_meta_device_is_stood_in_for(autocast):
    class Adds(Chain):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(AsksForItsDevice() for _ in range(3))

        def forward(self, words):
            x, total = self.embed(words), 0
            for block in self.blocks:
                x, beside = block(x)
                total = total + beside
            return x + total

    model = Adds().double()
    layers = to_sequential(model, ids(4))
    words = ids(6)[:, :3]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(layers(words), model(words))


class RotaryTable(nn.Module):
    """A table that it keeps until a longer one is asked for, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.length = self.table = None

    def forward(self, length):
        if length != self.length or self.table.size(0) < length:
            self.length, self.table = length, torch.linspace(1, 2, length).cos().unsqueeze(1)
        return self.table


class Mapped(nn.Module):
    """A block that returns a map beside the hidden state."""

    def __init__(self):
        super().__init__()
        self.inner, self.rotary = nn.Linear(4, 4), RotaryTable()

    def forward(self, x):
        y = self.inner(x) * self.rotary(x.size(1))
        return x + y.tanh(), y @ y.transpose(1, 2)


class Maps(nn.Module):
    """It returns the maps of all of its blocks, as models that predict contacts do."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Mapped() for _ in range(3)), nn.Linear(4, 4)

    def forward(self, x):
        maps = []
        for block in self.blocks:
            x, found = block(x)
            maps.append(found.transpose(1, 2))
        return self.head(x), torch.stack(maps, 1)


@pytest.mark.parametrize("before", [None, 5, 7])
def test_blocks_that_keep_a_table_of_a_length_return_their_maps(before):
    """They were refused; or, behind a call of the model with another length, a call with that length raised."""
    model = Maps().eval()
    if before:
        model(torch.randn(2, before, 4))
    layers = cut(model, torch.randn(4, 5, 4))
    for length in (5, 7, 3, 9):
        x = torch.randn(3, length, 4)
        assert all(map(torch.equal, layers((x,)), model(x)))


class Frequent(nn.Linear):
    """A block that goes by its numbers as numpy has them, and returns more than the hidden state."""

    def forward(self, x):
        largest = int(x.detach().abs().amax((0, 1)).argmax().numpy())
        return super().forward(x).roll(largest, -1), x.square()


class Normed(nn.Linear):
    """A block that sets its weights by its first batch, and returns more than the hidden state."""

    def __init__(self):
        super().__init__(4, 4)
        self.shift, self.is_set = nn.Parameter(torch.zeros(4)), nn.Buffer(torch.tensor(0, dtype=torch.uint8))

    def forward(self, x):
        if self.is_set.item() == 0:
            self.shift.data.copy_(-x.detach().mean((0, 1)))
            self.is_set.fill_(1)
        return super().forward(x + self.shift), x.square()


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("block", [lambda: Frequent(4, 4), Normed])
def test_blocks_that_read_or_write_their_numbers_return_more_than_the_hidden_state(block, is_called):
    class Adds(Chain):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(block() for _ in range(3))

        def forward(self, words):
            x, total = self.embed(words), 0
            for inner in self.blocks:
                x, beside = inner(x)
                total = total + beside
            return x + total

    torch.manual_seed(0)
    model = Adds()
    if is_called:
        model(ids(5))
    plain, words = copy.deepcopy(model), ids(3)
    assert torch.equal(to_sequential(model, ids(4))(words), plain(words))
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
