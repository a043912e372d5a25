"""`eager_backward(loss, update)` is `loss.backward()`, clipping, `optimizer.step()`, `zero_grad()`: to the bit.

The reference is that loop on a twin; of a pipe's output too.
"""

import copy
import sys

import pytest
import torch
from cover import examples
from eager_twins import everything, same, twins
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline import EagerUpdate, Pipe, eager_backward

eager_backward_module = sys.modules["pipeline.entry.eager_backward"]
WIDTH = 4
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
}
CLIPS = {
    None: ({}, lambda params: None),
    "value": ({"clip_value": 0.01}, lambda params: nn.utils.clip_grad_value_(params, 0.01)),
    "per_parameter": ({"max_norm": 0.05}, lambda params: [nn.utils.clip_grad_norm_([each], 0.05) for each in params]),
    "two_pass": ({"max_norm": 0.05}, lambda params: nn.utils.clip_grad_norm_(params, 0.05)),
}


class Within(nn.Module):
    """Layers within torch's checkpoint."""

    def __init__(self, inner, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


def linears(*kinds, seed=0):
    """Layers of WIDTH to WIDTH; 'tied' has the first one's weight."""
    torch.manual_seed(seed)
    first = nn.Linear(WIDTH, WIDTH)
    made = {
        "linear": lambda: nn.Linear(WIDTH, WIDTH), "layer norm": lambda: nn.LayerNorm(WIDTH), "tanh": nn.Tanh,
        "dropout": lambda: nn.Dropout(0.3), "batch norm": lambda: nn.BatchNorm1d(WIDTH),
        "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False), "tied": lambda: nn.Linear(WIDTH, WIDTH),
    }  # fmt: skip
    layers = [first]
    for kind in kinds:
        layer = made[kind]()
        if kind == "tied":
            layer.weight = first.weight
        layers.append(layer)
    return nn.Sequential(*layers).double()


def batch(seed=1, rows=6):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]


def update_if(is_eager, optimizer, clip=None):
    return EagerUpdate(optimizer, clip, **CLIPS[clip][0]) if is_eager else None


def go(loss, optimizer, update, clip=None):
    """Backward and step, with the EagerUpdate if there is one."""
    if update is not None:
        return eager_backward(loss, update)
    loss.backward()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    CLIPS[clip][1](params)
    optimizer.step()
    optimizer.zero_grad()


def sgd(module, lr=0.1):
    return torch.optim.SGD(module.parameters(), lr=lr)


# ---------------------------------------------------------------------------------------------------- the same numbers


@settings(max_examples=examples(80))
@given(
    st.lists(
        st.sampled_from(["linear", "layer norm", "tanh", "dropout", "batch norm", "frozen", "tied"]),
        min_size=1, max_size=5
    ),
    st.sampled_from(["plain", "checkpoint", "pipe", "pipe twice", "regularised pipe", "pipe and plain"]),
    st.sampled_from(["always", "never", "except_last"]), st.integers(1, 3), st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(list(CLIPS)), st.sampled_from([None, "threads"]), st.booleans(), st.integers(0, 9),
)  # fmt: skip
def test_eager_backward_is_backward_and_step_to_the_bit(kinds, how, policy, chunks, name, clip, workers, hooks, seed):
    kinds = [kind for kind in kinds if (kind, how) != ("batch norm", "checkpoint")]  # torch's own would count it again

    def run(is_eager):
        module = linears("linear", *kinds, seed=seed)
        if how == "checkpoint":
            module = nn.Sequential(module[0], Within(module[1:], False))
        half = (len(module) + 1) // 2
        settings = {"chunks": chunks, "checkpoint": policy, "workers": workers}
        f = Pipe(module, [half, len(module) - half], **settings) if "pipe" in how else module
        params = list(module.parameters())
        for param in params if hooks else ():
            if param.requires_grad:
                param.register_hook(lambda grad: grad.clamp(-0.02, 0.03))
        optimizer = OPTIMIZERS[name](params)
        update = update_if(is_eager, optimizer, clip)
        found = []
        for number in range(3):
            torch.manual_seed(number)
            x, target = batch(seed + number)
            x.requires_grad_()
            loss = (f(x) - target).square().mean()
            if how == "pipe twice":
                loss = loss + f(x * 2).square().mean()
            if how == "regularised pipe":
                loss = loss + 0.1 * module[0].weight.square().sum()
            if how == "pipe and plain":
                loss = loss * module(x).mean()
            go(loss, optimizer, update, clip)
            found += everything(loss, x.grad, torch.rand(1))
            assert all(param.grad is None for param in params)
        return found + everything(module, optimizer)

    twins(run)


@pytest.mark.parametrize("clip", list(CLIPS))
@pytest.mark.parametrize("more", [
    lambda pipe, module, x: pipe(x * 2).square().mean(),
    lambda pipe, module, x: module[0].weight.square().sum() + module[2].bias.sum(),
    lambda pipe, module, x: module(x).mean(),
    lambda pipe, module, x: Pipe(module, [2, 1], 3)(x).mean(),
], ids=["the pipe twice", "a penalty on weights", "the plain module", "another pipe"])  # fmt: skip
def test_what_others_than_one_run_of_a_pipe_read_is_updated_once_with_all_parts(more, clip):
    def run(is_eager):
        module = linears("tanh", "linear")
        pipe = Pipe(module, [1, 2], 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        update = update_if(is_eager, optimizer, clip)
        for number in range(2):
            x, target = batch(number)
            go((pipe(x) - target).square().mean() + more(pipe, module, x), optimizer, update, clip)
        return everything(module, optimizer)

    twins(run)


@pytest.mark.parametrize("how", ["plain", "checkpoint", "pipe"])
@pytest.mark.parametrize("clip", list(CLIPS))
def test_a_rule_gets_each_parameter_once_with_its_whole_gradient(how, clip):
    def made():
        module = linears("tanh", "tied", "linear", "frozen")
        if how == "checkpoint":
            module[3] = Within(nn.Sequential(module[3], nn.Tanh()), False)
        return module, Pipe(module, [2, 3], 2) if how == "pipe" else module

    (module, f), (twin, g) = made(), made()
    calls = []

    def rule(param, grad):
        assert not torch.is_grad_enabled() and param.grad is None
        calls.append((param, grad.clone()))

    x, target = batch()
    eager_backward((f(x) - target).square().mean(), EagerUpdate(rule, clip, **CLIPS[clip][0]))
    (g(x) - target).square().mean().backward()
    CLIPS[clip][1](list(twin.parameters()))
    expected = {name: param.grad for name, param in twin.named_parameters() if param.grad is not None}
    names = {param: name for name, param in module.named_parameters()}
    assert len(calls) == len(expected) == 5
    for param, grad in calls:  # a rule has no list of parameters, in whose order their norms would be added
        limit = 1e-14 if clip == "two_pass" else 0
        torch.testing.assert_close(grad, expected[names[param]], rtol=limit, atol=0)
    assert all(param.grad is None for param in module.parameters())


@pytest.mark.parametrize("policy", ["always", "never"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_parameters_within_a_reentrant_checkpoint_are_updated_once(policy, is_tied):
    # Its backward runs another: Adam's counter would move twice where a layer is used twice within.
    def run(is_eager):
        module = linears("linear", "tied" if is_tied else "linear", "tanh", "linear")
        inner = nn.Sequential(module[1], nn.Tanh(), module[1])
        whole = nn.Sequential(module[0], module[2], Within(inner, True), module[3:])
        f = whole if policy == "never" else Pipe(whole, [2, 1, 1], 2, checkpoint=policy)
        optimizer = torch.optim.Adam(whole.parameters(), lr=0.1)
        update = update_if(is_eager, optimizer)
        for number in range(3):
            x, target = batch(number)
            go((f(x) - target).square().mean(), optimizer, update)
        assert {int(state["step"]) for state in optimizer.state.values()} == {3}
        return everything(whole, optimizer)

    twins(run)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_optimizers_state_goes_over_to_ordinary_training_and_back(name):
    def run(switches):
        module = linears("layer norm", "tied", "tanh", "linear")
        optimizer = OPTIMIZERS[name](module.parameters())
        for number in range(4):
            x, target = batch(number)
            update = update_if(switches and number % 2 == 0, optimizer)
            go((module(x) - target).square().mean(), optimizer, update)
            if switches:
                state = optimizer.state_dict()
                optimizer = OPTIMIZERS[name](module.parameters())
                optimizer.load_state_dict(state)
        return everything(module, optimizer)

    same(run(False), run(True))


def test_a_scheduler_moves_once_a_step_and_does_not_warn():
    def run(is_eager):
        module = linears("tanh", "linear")
        optimizer = sgd(module)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=8)
        update = update_if(is_eager, optimizer)
        for number in range(4):
            x, target = batch(number)
            go((module(x) - target).square().mean(), optimizer, update)
            scheduler.step()
        return everything(module) + scheduler.get_last_lr()

    twins(run)


# ------------------------------------------------------------------------------------------------- when, and who else


@pytest.mark.parametrize("how", ["plain", "pipe"])
def test_each_layer_is_updated_before_the_backward_of_the_one_before_ends(how):
    notes = []

    class Noting(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            index = names[id(self)]
            y.register_hook(lambda grad: notes.append(f"{index}B"))
            return y

    module = nn.Sequential(*[Noting(WIDTH, WIDTH, bias=False) for _ in range(4)]).double()
    names = {id(layer): index for index, layer in enumerate(module)}
    by_weight = {layer.weight: index for index, layer in enumerate(module)}
    f = Pipe(module, [1] * 4, 2, schedule="gpipe", devices=["cpu"] * 4, checkpoint="never") if how == "pipe" else module
    rule = EagerUpdate(lambda param, grad: notes.append(f"{by_weight[param]}U"))
    x, target = batch()
    eager_backward((f(x) - target).square().mean(), rule)
    last = {note: index for index, note in enumerate(notes)}
    for layer in range(4):
        assert notes.count(f"{layer}U") == 1 and last[f"{layer}B"] < last[f"{layer}U"]
    assert last["3U"] < last["0B"]


@pytest.mark.parametrize("how", ["plain", "pipe"])
@pytest.mark.parametrize("clip", [None, "two_pass"])
def test_leaves_that_are_not_the_optimizers_get_their_grad_once(how, clip):
    def run(is_eager):
        module = linears("tanh", "linear", "linear")
        f = Pipe(module, [2, 2], 2) if how == "pipe" else module
        optimizer = sgd(module[0])
        update = update_if(is_eager, optimizer, clip)
        scale = torch.full((), 1.5, dtype=torch.float64, requires_grad=True)
        found = []
        for number in range(2):
            x, target = batch(number)
            x.requires_grad_()
            go((f(x) * scale - target).square().mean(), optimizer, update, clip)
            found.append(x.grad)
        assert module[0].weight.grad is None and module[2].weight.grad is not None
        return found + everything(module, module[2].weight.grad, module[3].bias.grad, scale.grad)

    twins(run)


@pytest.mark.parametrize("how", ["plain", "pipe"])
def test_hooks_of_a_parameter_act_once_on_the_whole_gradient(how):
    module = linears("tanh", "tied")
    f = Pipe(module, [1, 2], 3) if how == "pipe" else module
    twin = linears("tanh", "tied")
    seen = []
    module[0].weight.register_hook(lambda grad: (seen.append(grad.clone()), grad * 0)[1])
    before = everything(module[0].weight)
    x, target = batch()
    eager_backward((f(x) - target).square().mean(), EagerUpdate(sgd(module)))
    (twin(x) - target).square().mean().backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], twin[0].weight.grad, rtol=1e-12, atol=1e-14)
    same(before, everything(module[0].weight))


@pytest.mark.parametrize("how", ["plain", "pipe"])
def test_no_hook_stays_behind(how):
    module = linears("tanh", "linear")
    f = Pipe(module, [1, 2], 2) if how == "pipe" else module
    x, target = batch()
    eager_backward((f(x) - target).square().mean(), EagerUpdate(sgd(module)))
    assert not any(param._post_accumulate_grad_hooks for param in module.parameters())
    (f(x) - target).square().mean().backward()  # an ordinary one: no update
    assert all(param.grad is not None for param in module.parameters())


def test_without_gradient_lists_what_was_left_alone():
    module = linears("linear", "frozen")
    aside = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([*module.parameters(), aside], weight_decay=0.5)
    update = EagerUpdate(optimizer)
    eager_backward(module[0](batch()[0]).sum(), update)
    assert {id(param) for param in update.without_gradient} == {id(each) for each in (*module[1].parameters(), aside)}
    assert torch.equal(aside, torch.ones(2)) and aside not in optimizer.state


# ------------------------------------------------------------------------------------------------- failures, refusals


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("broken on purpose")


class MuteError(ArithmeticError):
    def __str__(self):
        raise ZeroDivisionError


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.is_armed = True

    def forward(self, x):
        return Broken.apply(x) if self.is_armed and len(x) != 4 else x  # not in the first chunk of 7 rows


@pytest.mark.parametrize("how", ["plain", "pipe"])
@pytest.mark.parametrize("clip", [None, "two_pass"])
@pytest.mark.parametrize("place, is_torn", [(4, False), (2, True), (1, True)])
def test_a_failure_leaves_the_step_torn_only_if_something_was_updated(how, clip, place, is_torn):
    module = linears("tanh", "linear", "linear")
    layers = [*module]
    layers.insert(place, Breaks())  # of its last chunk
    whole = nn.Sequential(*layers)
    f = Pipe(whole, [1] * 5, 2) if how == "pipe" else whole
    update = EagerUpdate(sgd(whole), clip, **CLIPS[clip][0])
    is_torn = is_torn and clip is None  # the first pass updates nothing
    before = everything(whole)
    x, target = batch(rows=7)
    with pytest.raises(ArithmeticError, match="broken on purpose"):
        eager_backward((f(x) - target).square().mean(), update)
    assert update.is_torn is is_torn
    assert all(param.grad is None for param in whole.parameters())
    assert not any(param._post_accumulate_grad_hooks for param in whole.parameters())
    layers[place].is_armed = False
    loss = (f(x) - target).square().mean()
    if not is_torn:
        same(before, everything(whole))
    else:
        with pytest.raises(RuntimeError, match="failed half-way.*updated here; then ArithmeticError"):
            eager_backward(loss, update)
        update.acknowledge_torn_step()
    eager_backward(loss, update)


def test_after_a_failed_run_for_norms_the_graphs_own_backward_gives_gradients_to_grad():
    module, twin = linears("tanh", "linear"), linears("tanh", "linear")
    armed = [True]

    def burn(module, args, output):
        output.register_hook(lambda grad: 1 / len(armed) * grad)

    module[1].register_forward_hook(burn)
    x, target = batch()
    loss = (Pipe(module, [1, 2], 2, checkpoint="never")(x) - target).square().mean()
    armed.clear()
    with pytest.raises(ZeroDivisionError):
        eager_backward(loss, EagerUpdate(sgd(module), "two_pass", max_norm=0.05))
    armed.append(True)
    loss.backward()
    (twin(x) - target).square().mean().backward()
    for one, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_a_failure_leaves_no_grad_of_a_backward_within_the_backward():
    """What a reentrant checkpoint leaves in `.grad` waits for the end, which does not come."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Breaks(), Within(nn.Linear(WIDTH, WIDTH), True)).double()
    update = EagerUpdate(sgd(module))
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            eager_backward(module(batch()[0]).sum(), update)
        assert all(param.grad is None for param in module.parameters())
        update.acknowledge_torn_step()


def test_an_error_whose_message_cannot_be_had_leaves_the_step_torn():
    module, updated = nn.Sequential(nn.Linear(WIDTH, WIDTH)).double(), []

    def rule(param, grad):
        updated.append(param)
        if len(updated) == 2:
            raise MuteError
        param.sub_(grad)

    update = EagerUpdate(rule)
    with pytest.raises(MuteError):
        eager_backward(module(batch()[0]).sum(), update)
    assert update.is_torn


def test_loading_the_optimizers_state_ends_a_torn_step():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Breaks(), nn.Linear(WIDTH, WIDTH)).double()
    optimizer = sgd(module)
    update = EagerUpdate(optimizer)
    with pytest.raises(ArithmeticError):
        eager_backward(module(batch()[0]).sum(), update)
    assert update.is_torn
    optimizer.load_state_dict(optimizer.state_dict())
    assert not update.is_torn


@pytest.mark.parametrize("make, words", [
    (lambda module: module(batch()[0]).sum().detach(), r"depends on no parameter.*it has no gradient"),
    (lambda module: torch.ones((), requires_grad=True) * 2, r"depends on no parameter.*it has a gradient"),
])  # fmt: skip
def test_a_loss_that_reaches_no_parameter_is_refused(make, words):
    module = linears("linear")
    with pytest.raises(RuntimeError, match=words):
        eager_backward(make(module), EagerUpdate(sgd(module)))


@pytest.mark.parametrize("prepare, words", [
    (lambda module, optimizer: setattr(module[0].bias, "grad", torch.ones_like(module[0].bias)), "has a .grad already"),
    (lambda module, optimizer: module[0].bias.register_post_accumulate_grad_hook(print), "has post-accumulate hooks"),
    (lambda module, optimizer: optimizer.register_step_pre_hook(print), "the optimizer has step hooks"),
])  # fmt: skip
@pytest.mark.parametrize("how", ["plain", "pipe"])
def test_what_would_be_missed_is_refused_before_anything_changes(prepare, words, how):
    module = linears("linear")
    f = Pipe(module, [1, 1]) if how == "pipe" else module
    optimizer = sgd(module)
    update = EagerUpdate(optimizer)
    before = everything(module)
    prepare(module, optimizer)
    with pytest.raises(RuntimeError, match=words):
        eager_backward(f(batch()[0]).sum(), update)
    same(before, everything(module))
    assert not update.is_torn


def test_a_grad_that_is_set_on_a_parameter_the_loss_does_not_reach_is_refused_too():
    module = linears("linear")
    module[1].weight.grad = torch.ones_like(module[1].weight)
    with pytest.raises(RuntimeError, match="has a .grad already"):
        eager_backward(module[0](batch()[0]).sum(), EagerUpdate(sgd(module)))


def test_parameters_in_one_memory_are_refused_before_anything_changes():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    module[2].weight.data = module[0].weight.data
    before = module[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"\[4, 4\] \(number \d\) and .* lie in the same memory.*Tie them as one"):
        eager_backward(module(torch.ones(3, WIDTH)).sum(), EagerUpdate(torch.optim.SGD(module.parameters(), lr=0.1)))
    assert torch.equal(module[0].weight, before)


def test_an_optimizer_alone_is_refused():
    module = linears("linear")
    with pytest.raises(TypeError, match=r"update is .*SGD.*EagerUpdate\(optimizer\)"):
        eager_backward(module(batch()[0]).sum(), sgd(module))


@pytest.mark.parametrize("name", ["retain_graph", "create_graph"])
def test_a_graph_that_is_to_be_kept_is_refused(name):
    module = linears("linear")
    before = everything(module)
    with pytest.raises(ValueError, match=f"{name}=True keeps the graph for another backward.*writes the weights"):
        eager_backward(module(batch()[0]).sum(), EagerUpdate(sgd(module)), **{name: True})
    same(before, everything(module))


def test_a_loss_of_several_numbers_is_refused_by_torch_and_nothing_is_torn():
    module = linears("linear")
    update = EagerUpdate(sgd(module))
    with pytest.raises(RuntimeError, match="scalar outputs"):
        eager_backward(module(batch()[0]), update)
    assert not update.is_torn


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_rule", [True, False])
def test_a_reentrant_checkpoint_is_refused_by_a_rule_and_by_two_runs(is_rule, is_first):
    # The norm of the first run lacked its parameters where x, which is no parameter, was all that went into it.
    layers = [nn.Linear(WIDTH, WIDTH), Within(nn.Linear(WIDTH, WIDTH), True)]
    module = nn.Sequential(*(reversed(layers) if is_first else layers)).double()
    two_runs = EagerUpdate(sgd(module), clip="two_pass", max_norm=0.1)
    update = EagerUpdate(lambda param, grad: None) if is_rule else two_runs
    with pytest.raises(RuntimeError, match="reentrant checkpoint hides its parameters.*use_reentrant=False"):
        eager_backward(module(batch()[0].requires_grad_()).sum(), update)
    assert not update.is_torn


@pytest.mark.parametrize("policy", ["always", "never"])
def test_a_reentrant_checkpoint_within_a_pipe_is_refused_by_two_runs_before_anything_changes(policy):
    def loss_of(module):
        x, target = batch()
        return (Pipe(module, [1, 2], 2, checkpoint=policy)(x) - target).square().mean()

    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Within(nn.Linear(WIDTH, WIDTH), True), nn.Tanh()).double()
    twin = copy.deepcopy(module)
    update, loss = EagerUpdate(sgd(module), clip="two_pass", max_norm=0.1), loss_of(module)
    with pytest.raises(RuntimeError, match="reentrant checkpoint hides its parameters.*use_reentrant=False"):
        eager_backward(loss, update)
    assert not update.is_torn and all(param.grad is None for param in module.parameters())
    loss.backward()
    loss_of(twin).backward()
    for param, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close((param, param.grad), (other, other.grad), rtol=0, atol=0)


def test_a_loss_whose_parameters_are_all_hidden_is_refused_in_words_that_say_so():
    module = Within(linears("linear"), True)
    with pytest.raises(RuntimeError, match="hides all of them.*use_reentrant=False"):
        eager_backward(module(batch()[0].requires_grad_()).sum(), EagerUpdate(sgd(module)))


class Later(torch.autograd.Function):
    """A layer whose backward runs another one, whose gradients autograd's outer graph does not know of."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.inner = x.detach(), weight[0]
        return x @ weight[0].detach().T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.inner
        x = x.clone().requires_grad_()  # which a second backward begins anew
        with torch.enable_grad():
            y = x @ weight.T
        torch.autograd.backward(y, grad)
        return x.grad, None


class Hidden(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return Later.apply(x, [self.layer.weight])


@pytest.mark.parametrize("max_norm", [1e-2, 1e9])
@pytest.mark.parametrize("order", [[0, "hidden"], [0, 1, "hidden"], [0, "hidden", 2, "hidden"]])
def test_two_runs_count_hidden_gradients_in_the_norm_and_once(order, max_norm):
    # Those of the first run stayed in `.grad`, were added to by the second, and were not in the norm.
    def run(is_eager):
        module = linears("linear", "linear", "linear")
        hidden = Hidden(nn.Linear(WIDTH, WIDTH, bias=False).double())
        nn.init.constant_(hidden.layer.weight, 0.1)
        whole = nn.Sequential(*(hidden if place == "hidden" else module[place] for place in order))
        optimizer = sgd(whole)
        for number in range(3):
            x, target = batch(number)
            loss = (whole(x) - target).square().mean()
            if is_eager:
                eager_backward(loss, EagerUpdate(optimizer, clip="two_pass", max_norm=max_norm))
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
        assert all(param.grad is None for param in whole.parameters())
        return [param.detach().clone() for param in whole.parameters()]

    for eager, ordinary in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(eager, ordinary, rtol=1e-12, atol=0)


def test_two_runs_refuse_a_hidden_part_that_comes_late_before_any_update():
    module = linears("linear", "linear")
    whole = nn.Sequential(module[0], Hidden(module[1]), module[1])
    before = [param.detach().clone() for param in whole.parameters()]
    update = EagerUpdate(sgd(whole), clip="two_pass", max_norm=1e-2)
    with pytest.raises(RuntimeError, match=r"late gradient for a parameter of shape \[4, 4\]"):
        eager_backward(whole(batch()[0]).square().mean(), update)
    assert not update.is_torn and all(map(torch.equal, whole.parameters(), before))
    assert all(param.grad is None for param in whole.parameters())


def test_two_runs_refuse_a_gradient_that_the_first_did_not_reach():
    module = linears("linear", "linear")
    whole = nn.Sequential(Hidden(module[0]), module[1])
    update = EagerUpdate(sgd(whole), clip="two_pass", max_norm=1e-2)
    with pytest.raises(RuntimeError, match=r"shape \[4, 4\] got a gradient in the second run only"):
        eager_backward(whole(batch()[0].requires_grad_()).square().mean(), update)


def test_a_hidden_gradient_after_the_update_is_loud_and_one_before_it_is_waited_for():
    def run(late):
        module = linears("linear", "linear")
        hidden = Hidden(module[1])
        order = [module[0], hidden, module[1]] if late else [module[0], module[1], hidden]
        return nn.Sequential(*order), module

    whole, _ = run(late=True)
    update = EagerUpdate(sgd(whole))
    x, target = batch()
    with pytest.raises(RuntimeError, match=r"late gradient for a parameter of shape \[4, 4\].*reentrant"):
        eager_backward((whole(x) - target).square().mean(), update)
    assert update.is_torn

    def early(is_eager):
        whole, module = run(late=False)
        optimizer = sgd(whole)
        go((whole(x) - target).square().mean(), optimizer, update_if(is_eager, optimizer))
        return everything(module)

    twins(early)


@pytest.mark.parametrize("how", ["plain", "pipe always", "pipe never"])
def test_a_forward_from_before_the_update_cannot_be_differentiated_in_silence(how):
    module = linears("tanh", "linear", "tied")
    f = module if how == "plain" else Pipe(module, [2, 2], 2, checkpoint=how.split()[1])
    x, target = batch()
    pending = f(x).square().mean()
    eager_backward((f(x) - target).square().mean(), EagerUpdate(sgd(module)))
    with pytest.raises(RuntimeError):
        pending.backward()


def test_the_same_output_cannot_be_differentiated_again():
    module = linears("tanh", "linear")
    for f in (module, Pipe(module, [1, 2], 2)):
        loss = f(batch()[0]).square().mean()
        eager_backward(loss, EagerUpdate(sgd(module)))
        with pytest.raises(RuntimeError):
            eager_backward(loss, EagerUpdate(sgd(module)))


def test_a_parameter_that_two_nodes_read_is_updated_when_the_last_of_them_has_run():
    # A naive update as soon as a part of the gradient is there would be another number.
    def run(is_eager):
        module = linears()
        optimizer = sgd(module, lr=0.5)
        update = update_if(is_eager, optimizer)
        for number in range(3):
            x, target = batch(number)
            y = module(torch.tanh(module(torch.tanh(module(x)))))
            go((y - target).square().mean(), optimizer, update)
        return everything(module)

    twins(run)


class Captures(nn.Module):
    def __init__(self, leaf):
        super().__init__()
        self.captured = (leaf,)

    def forward(self, x):
        return x + self.captured[0].mean(0)


def test_an_input_that_a_stage_captures_too_is_updated_once_with_both_parts():
    def run(is_eager):
        torch.manual_seed(0)
        x = nn.Parameter(batch()[0])
        module = nn.Sequential(nn.Linear(x.shape[1], x.shape[1]).double(), Captures(x))
        optimizer = torch.optim.SGD([*module.parameters(), x], lr=0.1)
        loss = Pipe(module, [1, 1], 2)(x).square().mean()
        if is_eager:
            eager_backward(loss, EagerUpdate(optimizer))
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return everything(module, x)

    twins(run)


def test_backwards_1_2_4_8_look_for_others_that_use_the_gradients_or_the_memory(monkeypatch):
    looked = {"refuse_reduced": [], "refuse_shared_memory": []}
    for name, numbers in looked.items():
        monkeypatch.setattr(eager_backward_module, name, lambda *_, numbers=numbers: numbers.append(number))
    layer = nn.Linear(2, 1)
    update = EagerUpdate(torch.optim.SGD(layer.parameters(), lr=0.1))
    for number in range(1, 10):
        eager_backward(layer(torch.ones(3, 2)).square().mean(), update)
    assert looked == {"refuse_reduced": [1, 2, 4, 8], "refuse_shared_memory": [1, 2, 4, 8]}
