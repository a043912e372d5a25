"""What if a layer computes with more than its input and its parameters, or writes what is not its own?

Captured leaves, live buffers, plain attributes, in-place layers, gradients within a layer: each gives the plain
module's derivatives, or an error that says what is wrong. Never another number.
"""

import pytest
import torch
from law_models import Apply, Checkpointed, normal
from law_reference import call_seed
from second_order_reference import CREATES_CYCLE, MODES, Plain, assert_close, assert_same, balance, flat_orders
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import orthogonal
from torch.utils._pytree import tree_map

from pipeline import CheckpointError, NoChunk, Pipe

pytestmark = pytest.mark.filterwarnings(CREATES_CYCLE)
every_mode = pytest.mark.parametrize("mode", MODES)
both_orders = pytest.mark.parametrize("create_graph", [True, False])


def linear(rows, columns):
    torch.manual_seed(20 + rows + 7 * columns)
    return nn.Linear(rows, columns).double()


def around(*middle):
    """Layers with something in their middle."""
    return nn.Sequential(linear(4, 4), *middle, linear(4, 2))


def nets(mode, model, chunks=3, stages=2):
    return Pipe(model, balance(len(model), stages), chunks, checkpoint=MODES[mode]), Plain(model, chunks)


# ------------------------------------------------------------------------------------------------- captured leaves


@every_mode
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize(
    "how", ["input", "input depends on it", "non-leaf", "parameter", "input depends on it, non-leaf"]
)
def test_a_captured_leaf_gets_each_of_its_paths_once(mode, how, order):
    """Through the layer that captured it and, if the input depends on it, through the input: added, not twice."""
    leaf = normal(4, seed=9).requires_grad_()
    held = [leaf]
    model = around(Apply(lambda x: x.tanh() * held[0]))
    targets = [leaf, *model.parameters()]

    def call(net):
        held[0] = {"non-leaf": leaf.exp(), "parameter": model[0].bias * 2}.get(how.split(", ")[-1], leaf)
        x = normal(5, 4)
        if how == "input":
            x = leaf.expand(5, 4)
        if how.startswith("input depends"):
            x = x * leaf
        return flat_orders(net(x).sin().sum(), targets, order)

    pipe, plain = nets(mode, model)
    assert_close(call(pipe), call(plain))


@every_mode
def test_a_captured_leaf_that_fast_weights_depend_on_gets_each_of_its_paths_once(mode):
    leaf = normal(4, seed=9).requires_grad_()
    model = around(Apply(lambda x: x.tanh() * leaf))
    targets = [leaf, *model.parameters()]

    def call(net):
        fast = {name: param * leaf.sum() for name, param in net.named_parameters()}
        return flat_orders(functional_call(net, fast, (normal(5, 4),)).sin().sum(), targets, 3)

    pipe, plain = nets(mode, model)
    assert_close(call(pipe), call(plain))


@every_mode
def test_a_captured_parameter_of_the_pipe_gets_each_of_its_paths_once(mode):
    """Registered, used by its own layer, held by another in a list, and behind the input: three paths."""
    first = linear(4, 4)
    held = [first.weight]
    model = nn.Sequential(first, nn.Tanh(), Apply(lambda x: x @ held[0]), linear(4, 2))

    def call(net):
        return flat_orders(net(normal(5, 4) @ first.weight).sin().sum(), list(model.parameters()), 3)

    for cut in ([3, 1], [2, 2]):
        pipe, plain = Pipe(model, cut, 3, checkpoint=MODES[mode]), Plain(model, 3)
        assert_close(call(pipe), call(plain))


@every_mode
def test_a_leaf_captured_inside_an_inner_pipe_and_outside_gets_each_of_its_paths_once(mode):
    leaf = normal(4, seed=9).requires_grad_()
    inside = nn.Sequential(linear(4, 4), Apply(lambda x: x.tanh() * leaf), linear(4, 4))
    ends = linear(4, 4), Apply(lambda x: x * leaf), linear(4, 2)
    inner = Pipe(inside, [2, 1], 2, checkpoint=MODES[mode])
    pipe = Pipe(nn.Sequential(ends[0], inner, *ends[1:]), [2, 2], 3, checkpoint=MODES[mode])
    plain = nn.Sequential(ends[0], inside, *ends[1:])
    targets = [leaf, *plain.parameters()]
    found = flat_orders(pipe(normal(5, 4) * leaf).sin().sum(), targets, 3)
    assert_close(found, flat_orders(plain(normal(5, 4) * leaf).sin().sum(), targets, 3))


@every_mode
def test_a_captured_leaf_that_is_a_no_chunk_input_gets_each_of_its_paths_once(mode):
    leaf = normal(4, seed=9).requires_grad_()
    model = nn.Sequential(Apply(lambda pair: pair[0] * pair[1]), *around(Apply(lambda x: x.tanh() * leaf)))
    pipe, _ = nets(mode, model)
    targets = [leaf, *model.parameters()]
    found = flat_orders(pipe((normal(5, 4), NoChunk(leaf))).sin().sum(), targets, 3)
    assert_close(found, flat_orders(model((normal(5, 4), leaf)).sin().sum(), targets, 3))


@every_mode
@both_orders
def test_a_captured_leaf_changed_in_place_before_the_recomputation_is_an_error(mode, create_graph):
    """As it is on the plain module. A kept chunk asks torch, a recomputed one asks us."""
    leaf = normal(4, seed=9).requires_grad_()
    pipe, _ = nets(mode, around(Apply(lambda x: x.tanh() * leaf)))
    loss = pipe(normal(5, 4)).sin().sum()
    with torch.no_grad():
        leaf.mul_(2.0)
    with pytest.raises(RuntimeError, match="changed in place|modified by an inplace operation"):
        torch.autograd.grad(loss, list(pipe.parameters()), create_graph=create_graph)


# ------------------------------------------------------------------------------------------------ state that changes


class Scale(nn.Module):
    """Three ways to hold a number that no version counter and no buffer shows."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.number = 2.0
        self.tensor = torch.tensor(2.0).double()
        self.dropout = nn.Dropout(0.2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.how == "dropout":
            return self.dropout(x)
        return x.sin() * {"number": self.number, "tensor": self.tensor, "counter": self.calls}[self.how]

    def change(self):
        self.number = 5.0
        self.tensor.fill_(5.0)
        self.dropout.p = 0.7


@every_mode
@both_orders
@pytest.mark.parametrize("calls_before", [0, 2])
@pytest.mark.parametrize("how", ["number", "tensor", "dropout", "counter"])
def test_a_recomputation_that_gives_other_numbers_than_its_forward_is_an_error(mode, create_graph, how, calls_before):
    """The graph has the same shape, so only the numbers tell. Kept graphs go on to give the right numbers.

    In any call: what changes after this forward says nothing about the first one.
    """
    model = around(Scale(how))
    pipe, plain = nets(mode, model)
    for _ in range(calls_before):
        pipe(normal(5, 4))
    model[1].calls = 0
    call_seed(7)
    wanted = torch.autograd.grad(plain(normal(5, 4)).sin().sum(), list(model.parameters()))
    model[1].calls = 0
    call_seed(7)
    loss = pipe(normal(5, 4)).sin().sum()
    model[1].change()
    try:
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=create_graph)
    except CheckpointError as error:
        assert "stage" in str(error)
    except RuntimeError as error:
        assert how == "tensor" and "modified by an inplace operation" in str(error)
    else:
        assert_close(found, wanted)


@every_mode
@pytest.mark.parametrize("then", ["frozen", "thawed"])
def test_what_required_a_gradient_at_the_forward_counts_at_every_order(mode, then):
    model = around(nn.Tanh(), linear(4, 4))
    first, third = list(model[0].parameters()), model[2]

    def call(net):
        third.requires_grad_(then == "frozen")
        loss = net(normal(5, 4)).sin().sum()
        third.requires_grad_(then == "thawed")
        grads = torch.autograd.grad(loss, first, create_graph=True)
        third.requires_grad_(True)
        wanted = [*first, *third.parameters()]
        second = torch.autograd.grad(sum(grad.sin().sum() for grad in grads), wanted, allow_unused=True)
        return [*grads, *second]

    pipe, plain = nets(mode, model)
    found, wanted = call(pipe), call(plain)
    assert_close(found, wanted)


@every_mode
@pytest.mark.parametrize("chunks", [1, 3])
def test_an_input_that_required_no_gradient_at_the_forward_is_a_constant_at_every_order(mode, chunks):
    model = around(nn.Tanh())
    pipe, _ = nets(mode, model, chunks=chunks)
    x = normal(5, 4)
    loss = pipe(x).sin().sum()
    x.requires_grad_()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (second,) = torch.autograd.grad(sum(grad.sin().sum() for grad in grads), [x], allow_unused=True)
    assert second is None


# ----------------------------------------------------------------------------------------------------- live buffers


class Buffered(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.register_buffer("value", value)

    def forward(self, x):
        return (x * self.value).tanh()


@every_mode
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("how", ["leaf", "functional_call"])
def test_a_buffer_that_requires_grad_has_the_plain_modules_derivatives(mode, how, order):
    """In meta-learning and hyper-networks buffers come through functional_call, with a graph behind them."""
    leaf = normal(4, seed=9).requires_grad_()
    model = around(Buffered(leaf if how == "leaf" else normal(4)))

    def call(net):
        x = normal(5, 4)
        if how == "leaf":
            out = net(x)
        else:
            (name,) = [name for name, _ in net.named_buffers()]
            out = functional_call(net, {name: leaf * 2}, (x,))
        return flat_orders(out.sin().sum(), [leaf, *model.parameters()], order)

    pipe, plain = nets(mode, model)
    assert_close(call(pipe), call(plain))


# --------------------------------------------------------------------------------------------------- in-place layers

PASSES_ON = {
    "identity": nn.Identity,
    "dropout in eval": lambda: nn.Dropout(0.5).eval(),
    "flatten": nn.Flatten,
    "view": lambda: Apply(lambda x: x[:, :]),
}


@every_mode
@pytest.mark.parametrize("cut", [[5], [2, 3], [1, 4], [1, 1, 3]], ids=str)
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("first", PASSES_ON)
def test_an_in_place_layer_behind_one_that_passes_its_input_on_never_writes_the_users_input(
    mode, first, requires_grad, cut
):
    model = nn.Sequential(PASSES_ON[first](), Apply(lambda x: x.mul_(2.0)), linear(4, 4), nn.Tanh(), linear(4, 2))
    pipe, plain = Pipe(model, cut, 3, checkpoint=MODES[mode]), Plain(model, 3)
    x = normal(5, 4).requires_grad_(requires_grad)
    targets = [x, *model.parameters()] if requires_grad else list(model.parameters())
    found = flat_orders(pipe(x).sin().sum(), targets, 3)
    assert torch.equal(x, normal(5, 4))
    assert_close(found, flat_orders(plain(x).sin().sum(), targets, 3))


@every_mode
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_output_may_be_written_in_place_before_a_double_backward(mode, chunks):
    model = around(nn.Tanh())
    pipe, plain = nets(mode, model, chunks=chunks)
    found = flat_orders(pipe(normal(5, 4)).mul_(2.0).sin_().sum(), list(model.parameters()), 3)
    assert_close(found, flat_orders(plain(normal(5, 4)).mul(2.0).sin().sum(), list(model.parameters()), 3))


@every_mode
@pytest.mark.parametrize("chunks", [1, 2])
def test_an_output_that_is_written_in_place_changes_no_other_tensor(mode, chunks):
    """Neither the input that layers pass on, nor an output that is a part of it: in any call, of any chunks."""
    model = nn.Sequential(linear(4, 4), Apply(lambda pair: (pair[0], made := pair[1].sin(), made[:, :2])))
    model[0] = Apply(lambda x, layer=model[0]: (x, layer(x)))
    pipe = Pipe(model, [1, 1], chunks, checkpoint=MODES[mode])
    for _ in range(4):
        x = normal(4, 4).requires_grad_()
        read = x * 1.0
        outputs = pipe(read)
        written = [out.mul_(3.0) for out in outputs]
        found = torch.autograd.grad(sum(out.sin().sum() for out in (*written, read)), x)
        wanted = [3.0 * out for out in model(x)]
        assert torch.equal(read, x)
        assert_close(found, torch.autograd.grad(sum(out.sin().sum() for out in (*wanted, x)), x))


# ------------------------------------------------------------------------------------------ layers that differentiate


class Force(nn.Module):
    """The gradient of an energy is the output: a layer of second order, as in physics."""

    def __init__(self):
        super().__init__()
        self.energy = linear(4, 1)

    def forward(self, x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(self.energy(x).sin().sum(), x, create_graph=True)[0]


@every_mode
def test_a_layer_that_calls_autograd_itself_is_right_or_refused_in_words(mode):
    model = around(nn.Tanh(), Force())
    pipe, plain = nets(mode, model)
    wanted = flat_orders(plain(normal(5, 4)).sin().sum(), list(model.parameters()), 2)
    try:
        found = flat_orders(pipe(normal(5, 4)).sin().sum(), list(model.parameters()), 2)
    except CheckpointError as error:
        assert mode != "never" and "autograd" in str(error)
    else:
        assert_close(found, wanted)


class Rerun(torch.autograd.Function):
    """A block whose backward runs it anew, and differentiates by the parameters that its forward was given."""

    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block = block
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad):
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            x, *parameters = ctx.saved_tensors
            x = x if again else x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.block(x), [x, *parameters], grad, create_graph=again,
                                              allow_unused=True)  # fmt: skip


class Rerunning(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(linear(4, 4), nn.Tanh(), linear(4, 4))

    def forward(self, x):
        return Rerun.apply(self.block, x, *self.block.parameters())


@every_mode
@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_backward_that_runs_its_block_anew_meets_the_parameters_of_its_forward(mode, order):
    """In passes after the first too, which go through the graph alone (torchdiffeq's adjoint, own checkpoints)."""
    pipe, plain = nets(mode, around(Rerunning(), nn.Tanh()))
    targets = list(plain.parameters())
    assert_close(*[flat_orders(net(normal(5, 4)).sin().sum(), targets, order) for net in (pipe, plain)])


@every_mode
def test_a_users_reentrant_checkpoint_refuses_a_double_backward_as_torch_does(mode):
    model = around(Checkpointed(linear(4, 4), True))
    for net in nets(mode, model):
        with pytest.raises(RuntimeError, match="use_reentrant"):
            torch.autograd.grad(net(normal(5, 4)).sin().sum(), [model[0].weight], create_graph=True)


@every_mode
def test_a_loss_may_use_a_parametrized_weight_of_a_stage(mode):
    """It is computed anew from the parameter each time it is read, so nothing goes round the Pipe."""
    model = around(nn.Tanh(), orthogonal(linear(4, 4)))

    def call(net):
        loss = net(normal(5, 4)).sin().sum() + (model[2].weight - 1).pow(4).sum()
        return flat_orders(loss, list(model.parameters()), 2)

    pipe, plain = nets(mode, model)
    assert_close(call(pipe), call(plain))


@every_mode
def test_two_pipes_may_share_parameters_in_one_loss(mode):
    model = nn.Sequential(linear(4, 4), nn.Tanh(), linear(4, 4), nn.Tanh())
    one, other = Pipe(model, [1, 3], 2, checkpoint=MODES[mode]), Pipe(model, [3, 1], 3)
    x, targets = normal(5, 4), list(model.parameters())
    found = flat_orders((one(x) * other(x.cos()) * one(other(x))).sum(), targets, 3)
    assert_close(found, flat_orders((model(x) * model(x.cos()) * model(model(x))).sum(), targets, 3))


# ------------------------------------------------------------------------------------------------ torch's own contexts

CONTEXTS = {
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "mutation allowed": torch.autograd.graph.allow_mutation_on_saved_tensors,
}


@every_mode
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("context", CONTEXTS)
def test_the_derivatives_are_right_within_torchs_own_contexts(mode, context):
    model = around(nn.Tanh())
    pipe, plain = nets(mode, model)
    with CONTEXTS[context]():
        found = tree_map(torch.clone, flat_orders(pipe(normal(5, 4)).sin().sum(), list(model.parameters()), 2))
    assert_close(found, flat_orders(plain(normal(5, 4)).sin().sum(), list(model.parameters()), 2))


@every_mode
def test_a_default_dtype_that_changed_before_the_double_backward_does_not_change_it(mode):
    model = around(Apply(lambda x: x * torch.ones(4) * torch.tensor(0.1)))
    pipe, plain = nets(mode, model)
    torch.set_default_dtype(torch.float64)
    try:
        loss = pipe(normal(5, 4)).sin().sum()
        wanted = flat_orders(plain(normal(5, 4)).sin().sum(), list(model.parameters()))
    finally:
        torch.set_default_dtype(torch.float32)
    assert_close(flat_orders(loss, list(model.parameters())), wanted)


@every_mode
def test_backward_with_inputs_gives_those_alone_a_gradient(mode):
    model = around(nn.Tanh())
    found = []
    for net in nets(mode, model):
        net(normal(5, 4)).sin().sum().backward(inputs=[model[0].weight], create_graph=True)
        found.append([None if param.grad is None else param.grad.detach() for param in model.parameters()])
        model.zero_grad()
    assert_close(*found)
    assert [grad is None for grad in found[0]] == [False, True, True, True]


@every_mode
def test_a_double_backward_leaves_modules_as_it_found_them(mode):
    """Parameters and buffers are swapped during a recomputation, and back."""
    model = around(nn.BatchNorm1d(4).double(), nn.Tanh())
    pipe, _ = nets(mode, model)
    loss = pipe(normal(6, 4)).sin().sum()
    before = [*model.parameters(), *model.buffers()]
    values = [each.detach().clone() for each in before]
    flat_orders(loss, list(model.parameters()), 3)
    after = [*model.parameters(), *model.buffers()]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert_same(after, values)
    assert all(param.grad is None for param in model.parameters())
