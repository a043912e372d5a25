"""Is every order of derivative of a Pipe the plain module's, in every checkpoint mode?"""

import gc
import weakref

import pytest
import torch
from cover import pairwise
from law_models import MODELS, Apply, normal
from law_reference import call_seed, reference
from second_order_reference import (
    CREATES_CYCLE,
    MODES,
    TWICE,
    Plain,
    assert_close,
    assert_same,
    balance,
    derivatives,
    flat_orders,
    mix,
    orders,
    pair,
    targets_of,
)
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

from pipeline import CheckpointError, NoChunk, Pipe

pytestmark = pytest.mark.filterwarnings(CREATES_CYCLE)
AXES = {
    "name": TWICE,
    "mode": list(MODES),
    "stages": [1, 2, 3],
    "chunks": [1, 2, 3, 4],
    "rows": [1, 2, 5, 7],  # uneven, and fewer than chunks
    "train": [True, False],
}
COVER = [tuple(row.values()) for row in pairwise(AXES)]


def small(*extra):
    """Three layers with all that a law about calls needs: a curve, a mask, two stages."""
    torch.manual_seed(20)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 2), *extra).double()


def piped(mode, chunks=3, stages=2, model=None):
    """A Pipe and the plain module that it must equal, on the same parameters."""
    model = small() if model is None else model
    return Pipe(model, balance(len(model), stages), chunks, checkpoint=MODES[mode]), Plain(model, chunks)


def both(mode, function, **what):
    """`function(net)` of the Pipe and of the plain module, at the same seed."""
    found = []
    for net in piped(mode, **what):
        call_seed(7)
        found.append(function(net))
    return found


every_mode = pytest.mark.parametrize("mode", MODES)


# ------------------------------------------------------------------------------------------- the laws, over the models


@pytest.mark.parametrize("name, mode, stages, chunks, rows, train", COVER)
def test_first_second_and_third_derivatives_equal_the_plain_module(name, mode, stages, chunks, rows, train):
    (case, pipe), (plain_case, plain) = pair(MODELS[name], stages, chunks, mode, train)
    found = derivatives(case, pipe, rows, order=3)
    wanted = derivatives(plain_case, plain, rows, order=3)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)


@pytest.mark.soak
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_equal_the_plain_module_at_every_cut(name, mode, train):
    for stages in (1, 2, 3, 4):
        for chunks in (1, 2, 3, 4, 8):
            for rows in (1, 2, 5, 7, 8):
                (case, pipe), (plain_case, plain) = pair(MODELS[name], stages, chunks, mode, train)
                found = derivatives(case, pipe, rows, order=2)
                wanted = derivatives(plain_case, plain, rows, order=2)
                for one, other in zip(found, wanted, strict=True):
                    assert_close(one, other)


@pytest.mark.parametrize("name, mode, stages, chunks, rows, train", COVER)
def test_gradients_with_create_graph_equal_those_without_bit_for_bit(name, mode, stages, chunks, rows, train):
    (case, pipe), _ = pair(MODELS[name], stages, chunks, mode, train)
    (again, other_pipe), _ = pair(MODELS[name], stages, chunks, mode, train)
    with_graph = derivatives(case, pipe, rows, order=2)[0]
    assert_same(with_graph, derivatives(again, other_pipe, rows, order=1)[0])
    assert any(grad is not None and grad.requires_grad for grad in with_graph)


@pytest.mark.parametrize("kind", ["first order", "create_graph", "is_grads_batched"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_mode
def test_sums_of_half_precision_are_rounded_once_in_every_backward(mode, dtype, kind):
    """Of parameters, a captured leaf and an input that is not cut."""
    w, table = normal(4, seed=4).to(dtype).requires_grad_(), normal(3, seed=5).to(dtype).requires_grad_()
    layers = small(Apply(lambda x: torch.cat([x, x.sin()], 1) * w))
    model = nn.Sequential(Apply(lambda pair: pair[0] * pair[1]), *layers).to(dtype).eval()
    x, seed, leaves = normal(32, 3).to(dtype), normal(32, 4, seed=2).to(dtype), [*model.parameters(), w, table]
    rows = zip(x.split(1), seed.split(1), strict=True)
    parts = [torch.autograd.grad(model((row, table)), leaves, row_seed) for row, row_seed in rows]
    pipe, _ = piped(mode, chunks=32, model=model)
    out = pipe((x, NoChunk(table)))
    if kind == "is_grads_batched":
        found = [grad[0] for grad in torch.autograd.grad(out, leaves, seed[None], is_grads_batched=True)]
    else:
        found = torch.autograd.grad(out, leaves, seed, create_graph=kind == "create_graph")
    assert_same(found, [sum(map(torch.Tensor.float, column)).to(dtype) for column in zip(*parts, strict=True)])


@pytest.mark.parametrize("name, mode, stages, chunks, rows, train", COVER)
def test_backward_with_create_graph_leaves_the_references_gradients_and_buffers_bit_for_bit(
    name, mode, stages, chunks, rows, train
):
    """The buffers too: one forward of each chunk changes them, a double backward does not."""
    (case, pipe), (plain_case, plain) = pair(MODELS[name], stages, chunks, mode, train)
    x = plain_case.make_input(rows)
    wanted = reference(plain.model, x, chunks, call_seed(7), plain_case.loss, plain_case.extras)
    x = case.make_input(rows)
    case.loss(pipe(x)).backward(create_graph=True)
    params = [*case.model.parameters(), *case.extras]
    assert_same([param.grad for param in params], [*wanted.grads.values(), *wanted.extra_grads])
    live = [param for param in params if param.requires_grad]
    torch.autograd.grad(mix([param.grad for param in live]), live, allow_unused=True)
    buffers = dict(case.model.named_buffers())
    assert_same(list(buffers.values()), [wanted.buffers[key] for key in buffers])
    for param in params:
        param.grad = None  # torch's own reference cycle


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mlp", "convnet", "transformer", "reused", "captured"])
def test_dense_hessians_over_parameters_equal_the_plain_module(name, mode, train):
    def hessian(case, net):
        params = [*case.model.parameters(), *case.extras][-3:]
        call_seed(7)
        grads = torch.autograd.grad(case.loss(net(case.make_input(5))), params, create_graph=True)
        flat = torch.cat([grad.flatten() for grad in grads])
        rows = [torch.autograd.grad(each, params, retain_graph=True) for each in flat]
        return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])

    (case, pipe), (plain_case, plain) = pair(MODELS[name], 3, 3, mode, train)
    found, wanted = hessian(case, pipe), hessian(plain_case, plain)
    assert_close([found], [wanted])
    assert_close([found], [found.T])  # a Hessian is symmetric


# -------------------------------------------------------------------------------------------- finite differences


@every_mode
@pytest.mark.parametrize("train", [True, False])
def test_gradcheck_and_gradgradcheck_pass_over_input_and_parameters(mode, train):
    pipe, _ = piped(mode)
    pipe.train(train)
    params = dict(pipe.named_parameters())

    def call(x, *values):
        torch.manual_seed(3)  # the same masks each time
        return functional_call(pipe, dict(zip(params, values, strict=True)), (x,))

    inputs = (normal(4, 3).requires_grad_(), *(param.detach().clone().requires_grad_() for param in params.values()))
    assert gradcheck(call, inputs, fast_mode=True)
    assert gradgradcheck(call, inputs, fast_mode=True)


@every_mode
def test_gradcheck_and_gradgradcheck_hold_for_batched_gradients_too(mode):
    pipe, _ = piped(mode, chunks=2)
    pipe.eval()
    x = normal(2, 3).requires_grad_()
    assert gradcheck(pipe, (x,), check_batched_grad=True)
    assert gradgradcheck(pipe, (x,), check_batched_grad=True)


@every_mode
def test_gradgradcheck_passes_for_batch_norm_and_for_spectral_norm_in_eval_mode(mode):
    # In train mode spectral_norm holds u and v constant, so finite differences disagree with the plain module too.
    for name, train in (("convnet", True), ("spectral", False)):
        case = MODELS[name]()
        pipe = Pipe(case.model, balance(len(case.model), 2), 2, checkpoint=MODES[mode]).train(train)

        def call(x):
            torch.manual_seed(3)
            return pipe(x)

        x = case.make_input(5).requires_grad_()
        assert gradcheck(call, (x,), fast_mode=True)
        assert gradgradcheck(call, (x,), fast_mode=True)


# ------------------------------------------------------------------------------------- what a loss and a call may be


@every_mode
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_script_of_the_torchgpipe_issue_gives_the_plain_modules_numbers(mode, rows):
    """kakaobrain/torchgpipe: always raised, and except_last was silently wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    pipe = Pipe(model, [1, 1], chunks=2, checkpoint=MODES[mode])
    x = torch.rand(rows, 1)
    found = []
    for net in (pipe, model):
        model.zero_grad()
        net(x).norm().backward(create_graph=True)
        grads = [param.grad for param in model.parameters()]
        second = torch.autograd.grad(grads, list(model.parameters()), [torch.ones_like(grad) for grad in grads])
        found.append([*(grad.detach().clone() for grad in grads), *second])
        model.zero_grad()
    assert_close(*found, rtol=1e-5)  # float32, as in the issue
    assert any(bool(grad.abs().max() > 1e-3) for grad in found[0][4:])


@every_mode
@pytest.mark.parametrize("which", range(4))
def test_derivatives_of_one_parameter_alone_are_those_of_all(mode, which):
    def of_one(net):
        one = list(net.parameters())[which]
        (grad,) = torch.autograd.grad(net(normal(5, 3)).sin().sum(), [one], create_graph=True)
        return [grad, *torch.autograd.grad(mix([grad]), [one], allow_unused=True)]

    assert_close(*both(mode, of_one))


@every_mode
def test_derivatives_by_the_input_and_mixed_with_parameters_are_the_plain_modules(mode):
    def mixed(net):
        x = normal(5, 3).requires_grad_()
        (by_x,) = torch.autograd.grad(net(x).sin().sum(), [x], create_graph=True)
        by_both = torch.autograd.grad(mix([by_x]), [x, *net.parameters()], create_graph=True)
        return [by_x, *by_both, *torch.autograd.grad(mix(by_both), [x, *net.parameters()])]

    assert_close(*both(mode, mixed))


@every_mode
def test_an_input_that_depends_on_the_parameters_gets_every_path(mode):
    """x = f(w): both the path through the input and the one through the layer, at both orders."""

    def call(net):
        params = list(net.parameters())
        x = normal(5, 3) * params[0].sum(0)
        return flat_orders(net(x).sin().sum(), params, 3)

    assert_close(*both(mode, call))


@every_mode
def test_the_output_of_a_pipe_may_be_its_next_input(mode):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 3)).double()

    def call(net):
        return flat_orders(net(net(normal(5, 3))).sin().sum(), list(net.parameters()), 2)

    assert_close(*both(mode, call, model=model))


@every_mode
def test_a_loss_may_mix_output_and_parameters(mode):
    def call(net):
        params = list(net.parameters())
        loss = net(normal(5, 3)).sin().sum() * params[0].square().sum() + sum(param.pow(3).sum() for param in params)
        return flat_orders(loss, params, 3)

    assert_close(*both(mode, call))


@every_mode
def test_a_gradient_penalty_trains_as_on_the_plain_module(mode):
    """WGAN-GP, Gulrajani et al. 2017: the norm of the critic's gradient by its input is in the loss."""

    def train(net):
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        losses = []
        for step in range(4):
            real, fake = normal(5, 3, seed=step), normal(5, 3, seed=step + 50)
            between = (0.3 * real + 0.7 * fake).requires_grad_()
            (by_x,) = torch.autograd.grad(net(between).sum(), [between], create_graph=True)
            penalty = (by_x.norm(dim=1) - 1).square().mean()
            loss = net(fake).mean() - net(real).mean() + 10 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *(param.detach().clone() for param in net.parameters())]

    found = []
    for index in (0, 1):
        net = piped(mode)[index]
        call_seed(7)
        found.append(train(net))
    assert_close(*found)


@every_mode
def test_an_optimizer_steps_on_gradients_that_have_a_graph(mode):
    def train(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            net(normal(5, 3, seed=step)).sin().sum().backward(create_graph=True)
            with torch.no_grad():  # SGD's momentum would keep the graphs alive
                for param in net.parameters():
                    param.grad = param.grad.detach()
            optimizer.step()
        return [param.detach().clone() for param in net.parameters()]

    found = []
    for index in (0, 1):
        net = piped(mode)[index]
        call_seed(7)
        found.append(train(net))
    assert_close(*found)


@every_mode
@pytest.mark.parametrize("steps", [1, 2])
def test_an_outer_gradient_through_inner_steps_is_the_plain_modules(mode, steps):
    """MAML, Finn et al. 2017: theta' = theta - lr * grad, through functional_call on parameters that are no leaves."""

    def meta(net):
        names, params = zip(*net.named_parameters(), strict=True)
        fast = list(params)
        for step in range(steps):
            loss = functional_call(net, dict(zip(names, fast, strict=True)), (normal(5, 3, seed=step),)).sin().sum()
            grads = torch.autograd.grad(loss, fast, create_graph=True)
            fast = [param - 0.1 * grad for param, grad in zip(fast, grads, strict=True)]
        outer = functional_call(net, dict(zip(names, fast, strict=True)), (normal(4, 3, seed=9),)).square().sum()
        return flat_orders(outer, list(params), 2)

    assert_close(*both(mode, meta))


@every_mode
@pytest.mark.parametrize("inner_mode", MODES)
def test_a_pipe_inside_a_pipe_has_the_plain_modules_derivatives(mode, inner_mode):
    # No dropout inside: the inner Pipe draws a seed of its own there.
    torch.manual_seed(20)
    inside = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid()).double()
    outside = nn.Linear(3, 4).double(), nn.Dropout(0.3), nn.Linear(4, 2).double()
    inner = Pipe(inside, [2, 2], chunks=2, checkpoint=MODES[inner_mode])
    pipe = Pipe(nn.Sequential(outside[0], outside[1], inner, outside[2]), [1, 2, 1], chunks=3, checkpoint=MODES[mode])
    plain = Plain(nn.Sequential(outside[0], outside[1], inside, outside[2]), 3)
    found = []
    for net in (pipe, plain):
        x = normal(7, 3).requires_grad_()
        call_seed(7)
        found.append(flat_orders(net(x).sin().sum(), [x, *net.parameters()], 3))
    assert_close(*found)


@every_mode
def test_a_pipe_with_dropout_inside_a_pipe_is_consistent_with_itself(mode):
    """Its Hessian is symmetric, and repeats: each recomputation saw the same masks."""
    inside = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.4)).double()
    inner = Pipe(inside, [1, 2], chunks=2, checkpoint=MODES[mode])
    pipe = Pipe(nn.Sequential(inner, nn.Linear(3, 2).double()), [1, 1], chunks=2, checkpoint=MODES[mode])
    weight = inside[0].weight

    def hessian():
        call_seed(7)
        (grad,) = torch.autograd.grad(pipe(normal(5, 3)).sin().sum(), [weight], create_graph=True)
        return torch.stack([torch.autograd.grad(g, weight, retain_graph=True)[0].flatten() for g in grad.flatten()])

    found = hessian()
    assert_close([found], [found.T])
    assert torch.equal(found, hessian())


@every_mode
def test_a_no_chunk_input_has_second_derivatives(mode):
    model = nn.Sequential(Apply(lambda pair: pair[0] * pair[1]), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    pipe, _ = piped(mode, model=model)
    x, scale = normal(5, 3).requires_grad_(), normal(3, seed=2).requires_grad_()
    targets = [x, scale, *model.parameters()]
    found = flat_orders(pipe((x, NoChunk(scale))).sin().sum(), targets, 3)
    wanted = flat_orders(model((x, scale)).sin().sum(), targets, 3)
    assert_close(found, wanted)


@every_mode
def test_an_input_that_arrives_at_two_places_has_second_derivatives(mode):
    model = nn.Sequential(Apply(lambda pair: pair[0] * pair[1].tanh()), nn.Linear(3, 2)).double()
    pipe, _ = piped(mode, model=model)
    x = normal(5, 3).requires_grad_()
    targets = [x, *model.parameters()]
    found = flat_orders(pipe((x, x)).sin().sum(), targets, 3)
    assert_close(found, flat_orders(model((x, x)).sin().sum(), targets, 3))


@every_mode
def test_complex_parameters_have_second_derivatives(mode):
    torch.manual_seed(20)
    kind = torch.complex128
    model = nn.Sequential(nn.Linear(3, 3, dtype=kind), Apply(torch.tanh), nn.Linear(3, 2, dtype=kind))

    def call(net):
        params = list(net.parameters())
        grads = torch.autograd.grad(net(normal(5, 3).to(kind)).abs().sum(), params, create_graph=True)
        second = torch.autograd.grad(sum(grad.abs().pow(3).sum() for grad in grads), params)
        return [torch.view_as_real(grad) for grad in (*grads, *second)]

    assert_close(*both(mode, call, model=model))


@every_mode
def test_a_layer_shared_by_two_stages_has_second_derivatives(mode):
    torch.manual_seed(20)
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), nn.Dropout(0.2), shared, nn.Linear(3, 2)).double()

    def call(net):
        return flat_orders(net(normal(5, 3)).sin().sum(), list(net.parameters()), 3)

    assert_close(*both(mode, call, model=model, stages=3))


@every_mode
def test_double_backward_by_the_gradient_of_the_output_is_a_jacobian_vector_product(mode):
    """The double-backward trick: g(v) = J^T v is linear in v, so its gradient by v is J u, of any order in x."""

    def call(net):
        x, v = normal(5, 3).requires_grad_(), normal(5, 2, seed=3).requires_grad_()
        out = net(x)
        (pulled,) = torch.autograd.grad(out, [x], v, create_graph=True)
        (pushed,) = torch.autograd.grad(pulled, [v], normal(5, 3, seed=4), create_graph=True)
        return [pulled, pushed, *torch.autograd.grad(mix([pushed]), [x, *net.parameters()], allow_unused=True)]

    assert_close(*both(mode, call))


# ----------------------------------------------------------------------------------------- one graph, several backwards


@every_mode
@pytest.mark.parametrize("create_graph", [True, False])
def test_a_retained_graph_gives_the_same_gradients_until_it_is_freed_with_torchs_own_words(mode, create_graph):
    pipe, _ = piped(mode)
    x = normal(5, 3).requires_grad_()
    loss, targets = pipe(x).sin().sum(), [x, *pipe.parameters()]
    calls = [torch.autograd.grad(loss, targets, retain_graph=True, create_graph=create_graph) for _ in range(2)]
    calls.append(torch.autograd.grad(loss, targets))
    for found in calls[1:]:
        assert_same(found, calls[0])
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        torch.autograd.grad(loss, targets, create_graph=create_graph)


@every_mode
def test_first_and_second_order_backwards_of_one_forward_may_alternate(mode):
    """Neither leaves something behind that the other sees: a sum, a buffer, a freed record."""

    def call(net):
        params = list(net.parameters())
        out = net(normal(5, 3))
        one, other = out[:, 0].sin().sum(), out[:, 1].cos().sum()  # two losses of one forward
        found = [*torch.autograd.grad(one, params, retain_graph=True)]
        with_graph = torch.autograd.grad(other, params, create_graph=True)
        found += [*with_graph, *torch.autograd.grad(one + other, params, retain_graph=True)]
        mixed = mix(with_graph)
        found += [*torch.autograd.grad(mixed, params, retain_graph=True)]
        found += [*torch.autograd.grad(mix(torch.autograd.grad(one, params, create_graph=True)) * mixed, params)]
        return found

    assert_close(*both(mode, call))


@every_mode
def test_backward_with_create_graph_adds_to_grad_call_after_call(mode):
    def call(net):
        for param in net.parameters():
            param.grad = None
        for step in range(2):
            net(normal(5, 3, seed=step)).sin().sum().backward(create_graph=True)
        params = list(net.parameters())
        found = [param.grad for param in params]
        for param in params:
            param.grad = None
        return [*found, *torch.autograd.grad(mix(found), params)]

    assert_close(*both(mode, call))


@every_mode
@pytest.mark.parametrize("name", ["mixed_outputs", "exchange"])
@pytest.mark.parametrize("which", [0, 1])
def test_one_of_several_outputs_has_the_plain_modules_derivatives(mode, name, which):
    """The others, integers and None among them, get no gradient."""

    def call(case, net):
        x = case.make_input(5)
        targets = targets_of(case, x)
        call_seed(7)
        out = net(x)
        chosen = (out["h"], out["x"])[which] if isinstance(out, dict) else out[which]
        return flat_orders(chosen.sin().sum(), targets, 2)

    (case, pipe), (plain_case, plain) = pair(MODELS[name], 2, 3, mode)
    assert_close(call(case, pipe), call(plain_case, plain))


# ------------------------------------------------------------------------------------------------------------- hooks


@every_mode
@pytest.mark.parametrize("create_graph", [True, False])
def test_hooks_on_parameters_act_once_on_the_whole_gradient(mode, create_graph):
    pipe, plain = piped(mode)
    seen = []
    handles = [param.register_hook(lambda grad: seen.append(grad.detach().clone())) for param in pipe.parameters()]
    handles += [
        param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.detach().clone()))
        for param in pipe.parameters()
    ]
    call_seed(7)
    pipe(normal(5, 3)).sin().sum().backward(create_graph=create_graph)
    for handle in handles:
        handle.remove()
    assert len(seen) == 8
    call_seed(7)
    wanted = torch.autograd.grad(plain(normal(5, 3)).sin().sum(), list(pipe.parameters()))
    for grad in wanted:
        assert sum(one.shape == grad.shape and bool((one - grad).abs().max() < 1e-12) for one in seen) == 2
    pipe.zero_grad()


@every_mode
@pytest.mark.parametrize("where", ["parameters", "captured", "inside"])
def test_hooks_that_change_gradients_act_at_every_order_as_on_the_plain_module(mode, where):
    """Inside a stage a hook acts on the parts of a second derivative one by one, so it has to be linear."""
    torch.manual_seed(20)
    leaf = normal(4, seed=3).requires_grad_()

    def inside(x):
        x = x * leaf
        if where == "inside":
            x.register_hook(lambda grad: grad * 3)
        return x

    model = nn.Sequential(nn.Linear(3, 4), Apply(inside), nn.Tanh(), nn.Linear(4, 2)).double()
    hooked = {"parameters": list(model.parameters()), "captured": [leaf], "inside": []}[where]
    for param in hooked:
        param.register_hook(lambda grad: grad * grad)

    def call(net):
        return flat_orders(net(normal(5, 3)).sin().sum(), [leaf, *model.parameters()], 2)

    assert_close(*both(mode, call, model=model), rtol=1e-11)


# ---------------------------------------------------------------------------------- what changes between F and backward


def norms():
    """A BatchNorm, whose numbers depend on its mode and its buffers."""
    torch.manual_seed(20)
    norm = nn.BatchNorm1d(4)
    with torch.no_grad():
        norm.running_mean.copy_(normal(4))
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 2)).double()


@every_mode
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("meanwhile", ["flip", "forward", "both"])
def test_a_double_backward_sees_the_modes_and_buffers_of_its_forward(mode, train, meanwhile):
    """In eval mode the plain module itself would see running statistics that a later forward has changed."""

    def call(net, meanwhile):
        net.train(train)
        loss = net(normal(6, 3)).sin().sum()
        if meanwhile in ("forward", "both"):  # which changes the running statistics
            net.train()
            net(normal(6, 3, seed=5) * 10)
            net.train(train)
        if meanwhile in ("flip", "both"):
            net.train(not train)
        buffers = [buffer.clone() for buffer in net.buffers()]
        modes = [module.training for module in net.modules()]
        found = flat_orders(loss, list(net.parameters()), 3)
        assert_same(list(net.buffers()), buffers)
        assert [module.training for module in net.modules()] == modes
        return found

    pipe, _ = piped(mode, model=norms())
    _, plain = piped(mode, model=norms())
    call_seed(7)
    found = call(pipe, meanwhile)
    call_seed(7)
    assert_close(found, call(plain, "nothing"))


@every_mode
@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_changed_in_place_before_a_double_backward_is_an_error_that_names_it(mode, frozen):
    pipe, _ = piped(mode)
    pipe[3].weight.requires_grad_(not frozen)
    loss = pipe(normal(5, 3)).sin().sum()
    with torch.no_grad():
        pipe[3].weight.mul_(2.0)
    with pytest.raises(CheckpointError, match=r"parameter '3.weight' \(shape \[2, 4\]\) of stage 1 \(layers"):
        torch.autograd.grad(loss, [pipe[0].weight], create_graph=True)
    call_seed(7)
    torch.autograd.grad(pipe(normal(5, 3)).sum(), [pipe[0].weight], create_graph=True)  # the next call works


@every_mode
def test_an_input_changed_in_place_before_a_double_backward_is_an_error_that_names_it(mode):
    pipe, _ = piped(mode)
    x = normal(5, 3)
    loss = pipe(x).sin().sum()
    x.mul_(2.0)
    with pytest.raises(CheckpointError, match="the input of the pipe was changed in place"):
        torch.autograd.grad(loss, list(pipe.parameters()), create_graph=True)


@every_mode
def test_parameters_replaced_between_forward_and_double_backward_are_those_of_the_forward(mode):
    def call(net):
        params = list(net.parameters())
        loss = net(normal(5, 3)).sin().sum()
        first = [module for module in net.modules() if isinstance(module, nn.Linear)][0]
        weight, first.weight = first.weight, nn.Parameter(torch.zeros_like(first.weight))
        found = flat_orders(loss, params, 2)
        assert not first.weight.any()
        first.weight = weight
        return found

    assert_close(*both(mode, call))


@every_mode
def test_autocast_off_in_the_double_backward_does_not_change_its_numbers(mode):
    """First derivatives to the bit: the recomputation was in bfloat16 too. One chunk, as such sums differ visibly."""

    def call(net):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(normal(5, 3).float())
        return orders(out.float().sin().sum(), list(net.parameters()), 2)

    found, wanted = both(mode, call, chunks=1, model=small().float())
    assert_same(found[0], wanted[0])
    assert_close(found[1], wanted[1], rtol=2e-2)


@every_mode
@pytest.mark.parametrize("create_graph", [True, False])
def test_every_generator_is_left_as_found_by_a_backward(mode, create_graph):
    pipe, _ = piped(mode)
    loss = pipe(normal(5, 3)).sin().sum()
    state = torch.get_rng_state()
    grads = torch.autograd.grad(loss, list(pipe.parameters()), create_graph=create_graph)
    if create_graph:
        torch.autograd.grad(mix(grads), list(pipe.parameters()))
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------------------------------------ lifetime


def kept(model):
    """Weak references to the activations that the last layers see."""
    seen = []
    for layer in model:
        layer.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)) and None)
    return seen


@every_mode
def test_nothing_is_alive_after_a_second_order_computation(mode):
    pipe, _ = piped(mode)
    seen = kept(pipe)
    gc.disable()  # by reference counts alone
    try:
        x = normal(5, 3).requires_grad_()
        loss = pipe(x).sin().sum()
        grads = torch.autograd.grad(loss, [x, *pipe.parameters()], create_graph=True)
        second = torch.autograd.grad(mix(grads), [x, *pipe.parameters()])
        del x, loss, grads, second
        assert len(seen) >= 24 and all(ref() is None for ref in seen)
    finally:
        gc.enable()


@every_mode
def test_nothing_is_alive_after_a_forward_that_nobody_differentiates(mode):
    pipe, _ = piped(mode)
    seen = kept(pipe)
    gc.disable()
    try:
        out = pipe(normal(5, 3))
        del out
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()


@every_mode
def test_nothing_is_alive_after_a_second_order_graph_that_was_never_used(mode):
    pipe, _ = piped(mode)
    seen = kept(pipe)
    gc.disable()
    try:
        loss = pipe(normal(5, 3)).sin().sum()
        grads = torch.autograd.grad(loss, list(pipe.parameters()), create_graph=True)
        del loss, grads
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()


@every_mode
def test_nothing_is_alive_after_backward_with_create_graph_once_torchs_own_cycle_is_broken(mode):
    pipe, _ = piped(mode)
    seen = kept(pipe)
    pipe(normal(5, 3)).sin().sum().backward(create_graph=True)
    pipe.zero_grad()
    gc.collect()
    assert all(ref() is None for ref in seen)


@every_mode
def test_a_freed_graph_keeps_nothing_for_a_backward_that_can_no_longer_come(mode):
    """create_graph=True with retain_graph=False, while the output lives on."""
    pipe, _ = piped(mode)
    seen = kept(pipe)
    loss = pipe(normal(5, 3)).sin().sum()
    grads = torch.autograd.grad(loss, list(pipe.parameters()), create_graph=True, retain_graph=False)
    del grads
    assert all(ref() is None for ref in seen)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        torch.autograd.grad(loss, list(pipe.parameters()))
