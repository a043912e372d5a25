"""A model whose layers are replaced after Pipe(model, ...) computes something else than the Pipe: that is refused."""

import copy
import gc
import pickle

import pytest
import torch
from block_models import Borrows, Lists, Moods, Refers, ids
from cover import either
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from partition import PartitionError, to_sequential
from pipeline import Pipe
from pipeline.curvature import Hessian

X = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).view(6, 4).sin()


def layers():
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Dropout(0.0), nn.Linear(4, 2)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, bias):
        return x + torch.tanh(self.linear(x) + bias)


class Model(nn.Module):
    """No nn.Sequential: its blocks are in a list, which is replaced in another way than its head."""

    def __init__(self):
        super().__init__()
        self.first, self.head, self.offset = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.power, self.name = 1.0, "a model"
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.posts, self.bias = nn.ModuleList(), nn.Sequential(nn.Identity(), nn.Tanh())
        self.register_module("norm", None), self.register_parameter("gain", None)

    def forward(self, x):
        bias = self.bias(x)
        x = self.first(x) * self.scale**self.power + self.offset
        for block in self.blocks:
            x = block(x, bias)
        for module in self.posts:
            x = module(x)
        x = x if self.norm is None else self.norm(x)
        return self.head(x if self.gain is None else x * self.gain)


def of_sequential():
    model = nn.Sequential(*layers()).double()
    return model, Pipe(model, [2, 1], 2)


def of_model():
    model = Model().double().eval()
    return model, Pipe(model, [3, 2], 2, sample=X)


def mean_of_squares(output, target):
    return output.square().mean()


CALLS = {
    "forward": lambda pipe: pipe(X),
    "step": lambda pipe: pipe.step(X, loss_fn=mean_of_squares),
    "evaluate": lambda pipe: pipe.evaluate(X, loss_fn=mean_of_squares),
    "product": lambda pipe: Hessian(pipe, (X, X), mean_of_squares).loss(),
}


def doubled(model):
    return {name: 2 * value for name, value in model.state_dict().items()}


CHANGES = {
    "a layer": (of_sequential, "1", lambda model: model.__setitem__(1, nn.ReLU())),
    "the last": (of_sequential, "2", lambda model: model.pop(2)),
    "one more": (of_sequential, "3", lambda model: model.append(nn.ReLU())),
    "the head": (of_model, "head", lambda model: setattr(model, "head", nn.Linear(4, 2).double())),
    "a parameter": (of_model, "offset", lambda model: setattr(model, "offset", nn.Parameter(torch.zeros(4).double()))),
    "a buffer": (of_model, "scale", lambda model: setattr(model, "scale", torch.zeros(4).double())),
    "a number": (of_model, "power", lambda model: setattr(model, "power", 2.0)),
    "a word": (of_model, "name", lambda model: delattr(model, "name")),
    "by a state": (of_model, "offset", lambda model: model.load_state_dict(doubled(model), assign=True)),
    "a block": (of_model, "1", lambda model: model.blocks.__setitem__(1, copy.deepcopy(model.blocks[0]))),
    "a further block": (of_model, "3", lambda model: model.blocks.append(copy.deepcopy(model.blocks[0]))),
    "a module for None": (of_model, "norm", lambda model: setattr(model, "norm", nn.LayerNorm(4).double())),
    "a parameter for None": (of_model, "gain", lambda model: setattr(model, "gain", nn.Parameter(torch.ones(4)))),
    "a module among none": (of_model, "0", lambda model: model.posts.append(nn.Tanh())),
    "within a mask": (of_model, "1", lambda model: model.bias.__setitem__(1, nn.Sigmoid())),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", CALLS)
def test_a_layer_that_is_replaced_in_the_model_is_refused_until_it_is_put_back(change, call):
    build, name, replace = CHANGES[change]
    model, pipe = build()
    before = copy.deepcopy(pipe)
    CALLS[call](pipe)
    tables = [
        (module, {kind: copy.copy(value) if isinstance(value, dict) else value for kind, value in vars(module).items()})
        for module in model.modules()
    ]
    replace(model)
    with pytest.raises(RuntimeError, match=rf"\['{name}'\] of the \w+ was replaced or removed.*Build the Pipe anew"):
        CALLS[call](pipe)
    for each in (before, copy.deepcopy(pipe), pickle.loads(pickle.dumps(before)) if build is of_sequential else before):
        CALLS[call](each)  # a copy has layers of its own
    for module, own in tables:
        vars(module).update(own)
    CALLS[call](pipe)


def test_what_is_replaced_within_a_layer_or_in_the_pipe_is_what_runs_and_no_model_need_be_kept():
    model, pipe = of_sequential()
    model[0][1] = nn.ReLU()
    torch.testing.assert_close(pipe(X), model(X), rtol=0, atol=1e-15)
    setattr(pipe, "1", nn.Sigmoid())
    expected = nn.Sequential(model[0], nn.Sigmoid(), model[2])(X)
    torch.testing.assert_close(pipe(X), expected, rtol=0, atol=1e-15)
    del model
    torch.testing.assert_close(pipe(X), expected, rtol=0, atol=1e-15)


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, nn.Embedding(11, 4)

    def forward(self, ids):
        return self.base(ids) + self.more(ids)


WITHIN = {
    "a weight": lambda condition: setattr(condition[0], "weight", nn.Parameter(torch.rand(11, 4))),
    "a layer": lambda condition: condition.__setitem__(0, nn.Embedding(11, 4)),
    "a layer without weights": lambda condition: condition.__setitem__(1, nn.Identity()),
    "an adapter": lambda condition: condition.__setitem__(0, Adapted(condition[0])),
}


@pytest.mark.parametrize("change", WITHIN)
def test_what_is_replaced_in_a_module_that_several_parts_call_is_refused(change):
    model, x = Borrows().eval(), ids(4)  # its blocks 0 and 2 and its end call modules named "condition"
    pipe = Pipe(model, [2, 3], 2, sample=x)
    torch.testing.assert_close(pipe(x), model(x))
    condition = model.blocks[0].condition
    before, weight = list(condition), condition[0].weight
    WITHIN[change](condition)
    with pytest.raises(RuntimeError, match="'blocks.0.condition', which several parts .* was replaced in"):
        pipe(x)
    condition[0], condition[1] = before
    condition[0].weight, condition[1].p = weight, 0.2
    torch.testing.assert_close(pipe(x), model(x))
    torch.testing.assert_close(Pipe(model, [2, 3], 2, sample=x)(x), model(x))


MOODS = {
    "model.train()": lambda model, pipe: model.train(),
    "model.eval()": lambda model, pipe: model.eval(),
    "pipe.train()": lambda model, pipe: pipe.train(),
    "pipe.eval()": lambda model, pipe: pipe.eval(),
    "layers.train()": lambda model, pipe: pipe.to_sequential().train(),
    "layers.eval()": lambda model, pipe: pipe.to_sequential().eval(),
    "model.body.train()": lambda model, pipe: model.body.train(),
    "model.body.eval()": lambda model, pipe: model.body.eval(),
    "model.often.train()": lambda model, pipe: model.often.train(),
    "model.often.inner[1].eval()": lambda model, pipe: model.often.inner[1].eval(),
    "model.body.inner[1].train(), eval()": lambda model, pipe: model.body.inner[1].train().inner[0].eval(),
    "model.training = False": lambda model, pipe: setattr(model, "training", False),
    "pipe.evaluate()": lambda model, pipe: pipe.evaluate(X, loss_fn=mean_of_squares),
    "pipe.step()": lambda model, pipe: pipe.step(X, loss_fn=mean_of_squares),
    "Hessian": lambda model, pipe: Hessian(pipe, (X, X), mean_of_squares, training=True).loss(),
}


@example(True, ["model.eval()", "pipe.evaluate()"])
@example(True, ["layers.eval()", "model.train()"])
@settings(max_examples=either(12, 80))
@given(training=st.booleans(), changes=st.lists(st.sampled_from(list(MOODS)), min_size=1, max_size=5))
def test_the_modes_of_a_model_and_of_its_pipe_are_one(training, changes):
    torch.manual_seed(3)
    model = Moods().double().train(training)
    model.body.eval()
    layers = to_sequential(model, X)
    for pipe in (Pipe(model, [2, 3], 2, sample=X), Pipe(layers, [1, 4], 3)):
        torch.testing.assert_close(pipe(X), model(X))
        for number, change in enumerate(changes):
            alone, modes = copy.deepcopy(pipe), [module.training for module in model.modules()]
            alone.train(), alone(X), alone.eval()
            MOODS[change](model, pipe)
            is_call = change in ("pipe.evaluate()", "pipe.step()", "Hessian")
            assert modes == [module.training for module in model.modules()] or not is_call
            if number % 2:
                torch.testing.assert_close(pipe(X), model(X))
        expected = model(X)
        again = Pipe(pipe.to_sequential(), [len(pipe)])
        for each in (pipe.to_sequential(), again, pipe, layers):
            torch.testing.assert_close(each(X), expected)


def test_a_pipe_keeps_its_modes_when_its_model_is_gone():
    model = Moods().double().train()
    pipe = Pipe(model, [2, 3], 2, sample=X)
    model.eval()
    expected = model(X)
    torch.testing.assert_close(pipe(X), expected)
    del model
    gc.collect()
    torch.testing.assert_close(pipe(X), expected)
    pipe.train(), pipe.eval()
    torch.testing.assert_close(pipe(X), expected)


HOOKS = {
    "register_forward_hook": lambda module, args, out: 2 * out,
    "register_forward_pre_hook": lambda module, args: (2 * args[0],),
    "register_full_backward_pre_hook": lambda module, grads: (2 * grads[0],),
    "register_full_backward_hook": lambda module, given, grads: given[0] if given[0] is None else (2 * given[0],),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", ["", "body", "often", "often.inner.0", "body.inner.1", "body.inner.1.inner.0"])
@pytest.mark.parametrize("method", HOOKS)
@pytest.mark.parametrize("is_before", [True, False])
def test_hooks_of_a_model_run_in_its_pipe_or_are_refused(name, method, is_before):
    torch.manual_seed(3)
    model = Moods().double()
    told = model.get_submodule(name)
    if is_before:
        getattr(told, method)(HOOKS[method])
    is_whole = method == "register_full_backward_hook"
    if is_before and is_whole and name in ("", "body"):
        with pytest.raises(PartitionError, match="which contains blocks, has a backward hook, and no part runs it"):
            Pipe(model, [2, 3], 2, sample=X)
        return
    pipe = Pipe(model, None, 2, devices=["cpu", "cpu"], sample=X)
    if not is_before:
        getattr(told, method)(HOOKS[method])
    if not is_before and is_whole and not name.startswith("body."):
        with pytest.raises(RuntimeError, match="of the .* was replaced or|was replaced in one of them"):
            pipe(X)
        return
    found = []
    for module in (pipe, model):
        x = X.clone().requires_grad_()
        out = module(x)
        found.append([out, *torch.autograd.grad(mean_of_squares(out, None), [x, *model.parameters()])])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("build, name", [
    *[(Moods, name) for name in ("", "body", "often", "often.inner.1")], *[(Model, name) for name in ("", "bias.0")],
])  # fmt: skip
def test_a_forward_or_a_class_that_is_set_beside_the_layers_is_refused(build, name):
    model = build().double()
    pipe = Pipe(model, None, 2, sample=X, devices=["cpu"] * 2)
    told = model.get_submodule(name)
    own = type(told)
    told.forward = lambda x: x
    with pytest.raises(RuntimeError, match=r"\['forward'\] of the .*was replaced"):
        pipe(X)
    del told.forward
    told.__class__ = type("Other", (own,), {})
    with pytest.raises(RuntimeError, match=r"\['class'\] of the Other was replaced|was replaced in one of them"):
        pipe(X)
    told.__class__ = own
    torch.testing.assert_close(pipe(X), model(X))


@pytest.mark.parametrize("method", HOOKS)
@pytest.mark.parametrize("call", CALLS)
def test_hooks_that_a_sequential_gets_after_its_pipe_are_refused_as_before_it(method, call):
    model, pipe = of_sequential()
    hook = getattr(model, method)(HOOKS[method])
    for run in (lambda: CALLS[call](pipe), lambda: Pipe(model, [2, 1], 2)):
        with pytest.raises(ValueError, match="has hooks of its own, which would not run. Register them on the Pipe"):
            run()
    hook.remove()
    CALLS[call](pipe)


class Settings(nn.Module):
    """It has settings of all kinds beside its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scales, self.act, self.bias, self.options = (1.0,), torch.tanh, None, {"gain": 1.0}
        self.register_buffer("waves", torch.ones(4), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.options["gain"]
        for block in self.blocks:
            x = block(x)
        x = self.act(x) * self.scales[0] * self.waves
        return x if self.bias is None else x + self.bias


@pytest.mark.parametrize("name, value", [
    ("scales", (3.0,)), ("act", torch.relu), ("bias", torch.ones(4)), ("options", {"gain": 2.0}),
    ("blocks", nn.ModuleList(nn.Linear(4, 4) for _ in range(3))),
])  # fmt: skip
def test_whatever_is_replaced_on_a_module_that_contains_blocks_is_refused(name, value):
    model, x = Settings(), ids(4)
    pipe = Pipe(model, None, 2, sample=x, devices=["cpu"] * 2)
    before, own = pipe(x), getattr(model, name)
    setattr(model, name, value)
    with pytest.raises(RuntimeError, match=rf"\['{name}'\] of the Settings was replaced or removed or added after"):
        pipe(x)
    setattr(model, name, own)
    assert torch.equal(pipe(x), before)


def test_what_is_written_into_settings_and_buffers_counts():
    model, x = Settings(), ids(4)
    pipe = Pipe(model, None, 2, sample=x, devices=["cpu"] * 2)
    model.options["gain"] = 2.0
    torch.testing.assert_close(pipe(x), model(x))
    model.waves = torch.full((4,), 3.0)
    torch.testing.assert_close(pipe(x), model(x))


@pytest.mark.parametrize("change, words", [
    (lambda model: model.weighed.__setitem__(1, (Lists(), 1.5)), r"\['weighed'\] of the Refers"),
    (lambda model: model.weighed.__setitem__(1, (model.block1, 7.0)), r"\['weighed'\] of the Refers"),
    (lambda model: model.weighed.pop(), r"\['weighed'\] of the Refers"),
    (lambda model: model.heads.update(narrow=nn.Linear(4, 2)), r"\['heads'\] of the Refers"),
    (lambda model: setattr(model, "weighed", None), r"\['weighed'\] of the Refers"),
])  # fmt: skip
def test_what_is_replaced_in_a_list_to_which_the_model_refers_is_refused(change, words):
    model, x = Refers(), ids(4)
    pipe = Pipe(model, None, 2, sample=x, devices=["cpu"] * 2)
    before, weighed, heads = pipe(x), list(model.weighed), dict(model.heads)
    model.weighed, model.heads = list(weighed), dict(heads)  # others with the same in them
    assert torch.equal(pipe(x), before)
    change(model)
    with pytest.raises(RuntimeError, match=words + " was replaced or removed or added after the Pipe was built"):
        pipe(x)
    model.weighed, model.heads = weighed, heads
    assert torch.equal(pipe(x), before)
