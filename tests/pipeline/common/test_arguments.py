"""Law 8, the edge, for every argument of every entry point: usual wrong kinds of value are refused in words of ours."""

import copy
import traceback
from functools import partial

import pytest
import torch
from torch import nn

from pipeline import EagerUpdate, GradStore, Pipe, checkpoint_blocks
from pipeline.common.places import Place
from scheduler import by_name

mse = nn.functional.mse_loss
SGD = torch.optim.SGD
X, Y = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4).sin(), torch.zeros(6, 2, dtype=torch.float64)

WRONG = {
    "None": None, "True": True, "nan": float("nan"), "-1": -1, "0": 0, "1.5": 1.5, "inf": float("inf"), "a word": "no",
    "a digit": "1", "bytes": b"x", "a class": SGD, "a list": [1], "an empty list": [], "a dict": {"a": 1},
    "an object": object(), "a tensor": torch.ones(2), "a function": lambda *_: None, "a module": nn.Linear(2, 2),
    "a nested tensor": torch.nested.nested_tensor(
        [torch.ones(2, 4), torch.ones(4, 4)], dtype=torch.float64, layout=torch.jagged
    ),
}  # fmt: skip
NUMBERS = {"1.5", "inf"}  # right where a limit is asked for


class Ragged(nn.Module):
    """Its output has rows of unequal length."""

    def forward(self, x):
        return torch.nested.nested_tensor(list(x), layout=torch.jagged)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()


def pipe_of(**arguments):
    return Pipe(net(), **{"balance": [2, 1], "chunks": 2, **arguments})


def step_with(**arguments):
    pipe = pipe_of()
    given = {"x": X, "target": Y, "loss_fn": mse, **arguments}
    if "clip_grad_norm" in arguments or "scaler" in arguments:
        given["optimizer"] = SGD(pipe.parameters(), lr=0.1)
    pipe.step(**given)


def store_with(method, **arguments):
    model = net()
    model(X).sum().backward()
    store = GradStore.from_grads(model)
    others = {"add_": {"key": "0.weight", "grad": torch.ones(6, 4).double()}, "clip_": {"max_norm": 1.0}}
    others["insert"] = others["add_"]
    getattr(store, method)(**{**others.get(method, {}), **arguments})


def clip_with(**arguments):
    pipe = pipe_of()
    mse(pipe(X), Y).backward()
    pipe.clip_grad_norm_(**{"max_norm": 1.0, **arguments})


def eager_with(**arguments):
    clip = {"max_norm": "per_parameter", "clip_value": "value"}
    given = {"clip": clip[name] for name in arguments if name in clip}
    EagerUpdate(**{"update": SGD(net().parameters(), lr=0.1), **given, **arguments})


def blocks_with(**arguments):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(3)])
    checkpoint_blocks(**{"model": model, "match": "Linear", **arguments})


def evaluate_with(**arguments):
    pipe_of().evaluate(**{"x": X, "target": Y, "loss_fn": mse, **arguments})


def set_on_a_pipe(**arguments):
    for name, value in arguments.items():
        setattr(pipe_of(), name, value)


# Entry point -> argument -> which of the wrong kinds are right there.
FLAG, LIMIT, NONE = {"True"}, NUMBERS, {"None"}
ENTRIES = {
    "Pipe": (pipe_of, {
        "balance": NONE, "chunks": set(), "devices": NONE, "schedule": set(), "checkpoint": {"a function"},
        "deferred_batch_norm": FLAG, "workers": NONE, "group": NONE, "replicas": NONE, "timeout": LIMIT,
        "heartbeat": LIMIT, "materialize": NONE | {"a word", "a digit", "a dict", "a function"},
    }),
    "setting": (set_on_a_pipe, {
        "balance": set(), "devices": set(), "workers": set(), "group": set(), "materialize": set(), "chunks": set(),
        "schedule": set(), "checkpoint": {"a function"}, "deferred_batch_norm": FLAG,
    }),
    "step": (step_with, {
        "x": set(), "loss_fn": {"a module"}, "optimizer": NONE, "outputs": FLAG, "trace": FLAG, "loss_reduction": NONE,
        "clip_grad_norm": LIMIT | NONE, "scaler": NONE, "grads": set(),
    }),
    "evaluate": (evaluate_with, {
        "x": set(), "loss_fn": {"a module"}, "outputs": FLAG, "trace": FLAG, "loss_reduction": NONE,
    }),
    "forward": (lambda **given: pipe_of()(**given), {"input": {"a tensor"}}),
    "forward's": (lambda **given: pipe_of()(X, **given), {"output": set()}),
    "clip_grad_norm_": (clip_with, {
        "max_norm": LIMIT, "norm_type": LIMIT, "error_if_nonfinite": FLAG,
    }),
    "EagerUpdate": (eager_with, {
        "update": {"a function"}, "clip": NONE, "clip_value": LIMIT, "max_norm": LIMIT, "separable": FLAG,
    }),
    "GradStore": (GradStore, {"params": NONE | {"an empty list", "a module"}, "sparse": set()}),
    "from_grads": (partial(GradStore.from_grads, net()), {"grads": NONE | {"a dict"}}),
    "add_": (partial(store_with, "add_"), {"key": set(), "grad": NONE}),
    "insert": (partial(store_with, "insert"), {"key": set(), "grad": set()}),
    "get": (partial(store_with, "get"), {"key": set()}),
    "scale_": (partial(store_with, "scale_"), {"factor": LIMIT | {"-1", "0"}}),
    "clip_": (partial(store_with, "clip_"), {"max_norm": LIMIT, "norm_type": LIMIT}),
    "to": (partial(store_with, "to"), {"dtype": NONE}),
    "load_state_dict": (partial(store_with, "load_state_dict"), {"state": set()}),
    "merge_": (partial(store_with, "merge_"), {"other": set()}),
    "assign": (partial(store_with, "assign"), {"mode": set()}),
    "apply": (partial(store_with, "apply"), {"optimizer": set()}),
    "all_reduce_": (partial(store_with, "all_reduce_"), {"group": NONE}),
    "checkpoint_blocks": (blocks_with, {
        "model": {"a module"}, "match": {"a function"}, "every": set(), "nested": FLAG,
    }),
}  # fmt: skip
OURS = ("/pipeline/", "/partition/", "/scheduler/")


@pytest.mark.parametrize("entry, argument", [(entry, argument) for entry in ENTRIES for argument in ENTRIES[entry][1]])
def test_the_usual_wrong_values_are_refused_in_words_of_ours(entry, argument):
    call, arguments = ENTRIES[entry]
    silent, obscure = [], []
    for kind, value in WRONG.items():
        if kind in arguments[argument]:
            continue
        try:
            call(**{argument: value})
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            if not any(part in last.filename for part in OURS) or isinstance(error, AssertionError):
                obscure.append((kind, error))
        else:
            silent.append(kind)
    assert not silent and not obscure


WORDS = {
    "a limit below 0": (lambda: step_with(clip_grad_norm=-1), ValueError, r"clip_grad_norm is -1\. Give a number abo"),
    "a limit nan": (lambda: step_with(clip_grad_norm=float("nan")), ValueError, r"clip_grad_norm is nan\. Give a num"),
    "a limit in quotes": (lambda: step_with(clip_grad_norm="1"), TypeError, r"clip_grad_norm is '1'\. Give a number"),
    "a limit True": (lambda: step_with(clip_grad_norm=True), TypeError, r"clip_grad_norm is True\. Give a number"),
    "a limit in a store": (lambda: store_with("clip_", max_norm=-1), ValueError, r"max_norm is -1\. Give a number"),
    "a flag": (lambda: pipe_of(deferred_batch_norm="yes"), TypeError, r"deferred_batch_norm is 'yes'\. Use True or F"),
    "an optimizer's class": (lambda: step_with(optimizer=SGD), TypeError, r"the class SGD\. Give an object.*SGD\(p"),
    "a list of optimizers": (
        lambda: step_with(optimizer=[1]), TypeError, r"is \[1\]\. Give a torch opt.*several.*optimizer=None",
    ),
    "a scaler's name": (lambda: step_with(scaler="amp"), TypeError, r"scaler is 'amp'\. Give a torch\.amp\.GradSca"),
    "an eager class": (lambda: EagerUpdate(SGD), TypeError, r"update is the class SGD\. Give an object: SGD\(pipe\."),
    "an eager partial": (lambda: EagerUpdate(partial(SGD, lr=1)), TypeError, r"the class SGD\. Give an object"),
    "an eager rule of one": (lambda: EagerUpdate(lambda p: None), TypeError, r"no rule\(param, grad\): too many"),
    "one device": (lambda: pipe_of(devices="cpu"), TypeError, r"devices is 'cpu'\. Give a list.*\['cpu', 'cpu'\]"),
    "a device's name": (lambda: pipe_of(devices=["cpu", "gpu"]), ValueError, r"device is 'gpu', which torch does not"),
    "True, a device": (lambda: pipe_of(devices=[True, False]), TypeError, r"a device is True\. Give"),
    "meta devices": (lambda: pipe_of(devices=["meta"] * 2), ValueError, r"meta device.*no values.*materialize=\.\.\."),
    "meta places": (lambda: pipe_of(devices=[Place(torch.device("meta"), "a")] * 2), ValueError, r"on the meta device"),
    "a group's name": (lambda: pipe_of(group="world"), TypeError, r"group is 'world'\. Give a ProcessGroup"),
    "a nested input": (lambda: step_with(x=WRONG["a nested tensor"]), TypeError, r"x holds a nested.*to_padded_"),
    "a nested message": (
        lambda: Pipe(nn.Sequential(Ragged(), nn.Tanh()), [1, 1])(X), TypeError, r"output of stage 0 \(layer 0\).*a nest"
    ),
    "a sparse input": (lambda: step_with(x=X.to_sparse()), TypeError, r"sparse_coo and shape \[6, 4\].*to_dense"),
    "a nested target": (lambda: step_with(target=WRONG["a nested tensor"]), TypeError, r"the target holds a nested"),
    "a store of 3": (lambda: GradStore(3), TypeError, r"params is 3\. Give a module, a dict or \(name, parameter\)"),
    "a store of numbers": (lambda: GradStore([1]), TypeError, r"params holds 1\. Give a module"),
    "a loss's class": (lambda: step_with(loss_fn=nn.MSELoss), TypeError, r"class MSELoss\. Give an object"),
    "balance, set": (lambda: set_on_a_pipe(balance=[1, 2]), AttributeError, r"balance cannot be set.*balance=\.\.\."),
    "batch_dim, set": (lambda: set_on_a_pipe(batch_dim=1), AttributeError, r"batch_dim cannot be set.*Build another"),
    "hf_device_map, set": (
        lambda: set_on_a_pipe(hf_device_map={}), AttributeError, "hf_device_map cannot be set: it follows.*placed its"
    ),
    "devices, set": (lambda: set_on_a_pipe(devices=["cpu"]), AttributeError, r"devices cannot be set.*Build another"),
    "traced": (lambda: torch.jit.trace(pipe_of(), X), TypeError, r"torch\.jit\.trace.*to_sequential\(\)"),
    "exported": (lambda: torch.export.export(pipe_of(), (X,)), TypeError, r"torch\.export\.export.*to_seq"),
    "exported in one graph": (
        lambda: torch.export.export(pipe_of(), (X,), strict=True), RuntimeError, r"(?s)plain module .*pipe\.to_seq"
    ),
    "traced by fx": (lambda: torch.fx.symbolic_trace(pipe_of()), TypeError, r"torch\.fx\.symbolic_trace.*to_seq"),
    "scripted": (lambda: torch.jit.script(pipe_of()), TypeError, r"torch\.jit\.script.*pipe\.to_sequential"),
}


@pytest.mark.parametrize("name", WORDS)
def test_what_was_taken_in_silence_is_refused_with_the_value_and_what_to_do(name):
    call, kind, words = WORDS[name]
    with pytest.raises(kind, match=words):
        call()


def test_nothing_is_computed_before_the_arguments_of_a_step_are_looked_at():
    pipe = pipe_of()
    before = copy.deepcopy(pipe.state_dict())
    for wrong in ({"optimizer": SGD}, {"scaler": "amp"}, {"optimizer": SGD(net().parameters(), lr=1)}, {"trace": 1}):
        with pytest.raises((TypeError, ValueError)):
            pipe.step(X, Y, loss_fn=mse, **wrong)
    after = pipe.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(param.grad is None for param in pipe.parameters())


# ------------------------------------------------------------------------------------------- optimizers of others


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, output, target):
        return (self.scale * (output - target).square()).mean()


def of_another_model(pipe):
    return SGD(net().parameters(), lr=0.1)


def made_before_all_were_assigned(pipe):
    optimizer = SGD(pipe.parameters(), lr=0.1)
    pipe.load_state_dict(copy.deepcopy(pipe.state_dict()), assign=True)
    return optimizer


def made_before_one_layer_was_assigned(pipe):
    optimizer = SGD(pipe.parameters(), lr=0.1)
    pipe[2].load_state_dict(copy.deepcopy(pipe[2].state_dict()), assign=True)
    return optimizer


def made_before_a_cast_with_new_parameters(pipe):
    optimizer = SGD(pipe.parameters(), lr=0.1)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        pipe.float().double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    return optimizer


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "made", [of_another_model, made_before_all_were_assigned, made_before_one_layer_was_assigned,
             made_before_a_cast_with_new_parameters]
)  # fmt: skip
def test_an_optimizer_that_would_drop_gradients_is_refused(made, eager):
    pipe = pipe_of()
    optimizer = made(pipe)
    with pytest.raises(ValueError, match=r"gradients would be lost.*make it of pipe\.parameters\(\)"):
        pipe.step(X, Y, loss_fn=mse, optimizer=EagerUpdate(optimizer) if eager else optimizer)


@pytest.mark.parametrize("what", ["some", "the loss's too", "the loss's alone, all frozen", "a closure's", "x", "cast"])
def test_an_optimizer_of_some_or_of_others_too_steps(what):
    pipe, loss_fn, x = pipe_of(), Scaled(), X.clone()
    params = list(pipe.parameters())
    if what == "some":
        params = list(pipe[2].parameters())
    elif what == "x":
        params = [x.requires_grad_()]
    elif what == "the loss's alone, all frozen":
        pipe.requires_grad_(False)
        params = list(loss_fn.parameters())
    elif what != "cast":
        params = [*params, *loss_fn.parameters()]
    optimizer = SGD(params, lr=0.1)
    if what == "cast":
        pipe.double()
    before = [param.detach().clone() for param in params]
    pipe.step(x, Y, loss_fn=loss_fn if what != "a closure's" else lambda o, t: loss_fn(o, t), optimizer=optimizer)
    assert not any(torch.equal(then, param) for then, param in zip(before, params, strict=True))


# ------------------------------------------------------------------------------------------------------- moving


MOVES = {
    "to": lambda module: module.to("meta"),
    "to, by name": lambda module: module.to(device="meta"),
    "to_empty": lambda module: module.to_empty(device="meta"),
    "_apply": lambda module: module._apply(lambda tensor: tensor.to("meta")),
}


@pytest.mark.parametrize("around", [lambda pipe: nn.ModuleDict({"p": pipe}), nn.Sequential])
@pytest.mark.parametrize("move", MOVES)
def test_a_module_around_a_pipe_cannot_move_it_to_another_device(move, around):
    pipe = pipe_of()
    parent = around(pipe)
    with pytest.raises(TypeError, match=r"a Pipe places its stages itself.* on cpu does not move to meta"):
        MOVES[move](parent)
    assert {param.device.type for param in pipe.parameters()} == {"cpu"}


STAYS = {"to here": lambda p: p.to("cpu"), "cpu": nn.Module.cpu, "half": nn.Module.bfloat16, "float": nn.Module.float,
         "share": nn.Module.share_memory, "dtype": lambda p: p.to(torch.float64)}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_a_module_around_a_pipe_may_cast_it_and_leave_it_where_it_is(name):
    pipe, plain = pipe_of(), nn.ModuleDict({"p": net()})
    STAYS[name](nn.ModuleDict({"p": pipe}))
    STAYS[name](plain)
    x, plain = X.to(pipe[0].weight.dtype), plain.eval()["p"]
    assert torch.equal(pipe.eval()(x), torch.cat([plain(rows) for rows in x.chunk(pipe.chunks)]))


def test_settings_that_may_change_may_still_be_set():
    pipe = pipe_of()
    pipe.chunks, pipe.checkpoint, pipe.deferred_batch_norm = 3, "never", True
    for schedule in ("gpipe", by_name("1f1b", 2, 3)):
        pipe.schedule = schedule
        pipe.step(X, Y, loss_fn=mse)
    pipe.note = "mine"
    assert pipe.balance == [2, 1] and pipe.devices == [torch.device("cpu")] * 2 and pipe.note == "mine"
    assert pipe[1].num_batches_tracked == 2  # once for each mini-batch
