"""Do torch's own tools of differentiation, and PyHessian, work on a Pipe, or does it refuse them in words?"""

import pyhessian
import pytest
import torch
from law_models import normal
from law_reference import call_seed
from second_order_reference import CREATES_CYCLE, MODES, Plain, assert_close, assert_same, balance
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, hvp, jacobian, jvp, vhp, vjp
from torch.func import functional_call

from pipeline import Pipe

pytestmark = pytest.mark.filterwarnings(CREATES_CYCLE)
every_mode = pytest.mark.parametrize("mode", MODES)


def small():
    torch.manual_seed(20)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 2)).double()


def piped(mode, chunks=3, model=None):
    model = small() if model is None else model
    return Pipe(model, balance(len(model), 2), chunks, checkpoint=MODES[mode]), Plain(model, chunks)


def both(mode, function, **what):
    """`function(net)` of the Pipe and of the plain module, at the same seed."""
    found = []
    for net in piped(mode, **what):
        call_seed(7)
        found.append(function(net))
    return found


def loss_of(net):
    return lambda x: net(x).sin().sum()


# ------------------------------------------------------------------------------------------ torch.autograd.functional


@every_mode
@pytest.mark.parametrize("tool", [hvp, vhp], ids=["hvp", "vhp"])
@pytest.mark.parametrize("create_graph", [True, False])
def test_hvp_and_vhp_are_the_plain_modules(mode, tool, create_graph):
    def call(net):
        value, product = tool(loss_of(net), normal(5, 3), normal(5, 3, seed=2), create_graph=create_graph)
        assert product.requires_grad is create_graph
        return [value.detach(), product.detach()]

    assert_close(*both(mode, call))


@every_mode
def test_hvp_and_vhp_over_parameters_are_the_plain_modules(mode):
    def call(net):
        names, params = zip(*net.named_parameters(), strict=True)

        def loss(*values):
            return functional_call(net, dict(zip(names, values, strict=True)), (normal(5, 3),)).sin().sum()

        vectors = tuple(normal(*param.shape, seed=place) for place, param in enumerate(params))
        return [*hvp(loss, params, vectors)[1], *vhp(loss, params, vectors)[1]]

    assert_close(*both(mode, call))


@every_mode
def test_jvp_and_vjp_by_double_backward_are_the_plain_modules(mode):
    def call(net):
        pushed = jvp(net, normal(5, 3), normal(5, 3, seed=2), create_graph=True)[1]
        pulled = vjp(net, normal(5, 3), normal(5, 2, seed=2), create_graph=True)[1]
        return [pushed, pulled]

    assert_close(*both(mode, call))


@every_mode
@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("create_graph", [True, False])
def test_jacobian_is_the_plain_modules(mode, vectorize, create_graph):
    def call(net):
        x = normal(4, 3).requires_grad_()
        found = jacobian(net, x, vectorize=vectorize, create_graph=create_graph)
        if not create_graph:
            return [found]
        return [found, *torch.autograd.grad(found.sin().sum(), [x, *net.parameters()], allow_unused=True)]

    assert_close(*both(mode, call))


@every_mode
@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("over", ["input", "parameters"])
def test_hessian_is_the_plain_modules(mode, vectorize, over):
    def call(net):
        if over == "input":
            return [hessian(loss_of(net), normal(4, 3), vectorize=vectorize)]
        names, params = zip(*net.named_parameters(), strict=True)

        def loss(*values):
            return functional_call(net, dict(zip(names, values, strict=True)), (normal(4, 3),)).sin().sum()

        return [block for row in hessian(loss, params, vectorize=vectorize) for block in row]

    assert_close(*both(mode, call))


# -------------------------------------------------------------------------------------------------------- PyHessian


class Doubles:
    """PyHessian draws its vectors in the default dtype."""

    def __enter__(self):
        self.found = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *exc):
        torch.set_default_dtype(self.found)


@every_mode
@pytest.mark.parametrize("batches", ["data", "dataloader"])
def test_pyhessian_finds_the_plain_modules_eigenvalues_and_trace_on_a_pipe(mode, batches):
    # Plain draws one number a call as a Pipe does: PyHessian's random vectors come from the same generator.
    data = [(normal(8, 3, seed=seed), torch.arange(8) % 2) for seed in range(2)]
    given = {"data": data[0]} if batches == "data" else {"dataloader": data}
    found = []
    model = small()
    for net in piped(mode, model=model):
        call_seed(7)
        net.train()
        with Doubles():
            tool = pyhessian.hessian(net, nn.CrossEntropyLoss(), cuda=False, **given)
            torch.manual_seed(3)
            values, vectors = tool.eigenvalues(maxIter=20, top_n=2)
            torch.manual_seed(3)
            trace = tool.trace(maxIter=5)
        found.append([torch.tensor(values), torch.tensor(trace), *(part for vector in vectors for part in vector)])
        net.zero_grad()
    assert_close(*found, rtol=1e-8)  # power iteration amplifies the last bits
    assert float(found[0][0].abs().max()) > 1e-3


# ------------------------------------------------------------------------------------------------ batched gradients


@every_mode
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("create_graph", [True, False])
def test_batched_gradients_are_those_of_a_loop(mode, train, create_graph):
    """With dropout too: no random number may be drawn under vmap, so the recomputation steps outside."""
    pipe, _ = piped(mode)
    pipe.train(train)
    x = normal(5, 3).requires_grad_()
    targets = [x, *pipe.parameters()]
    out = pipe(x)
    state = torch.get_rng_state()
    vectors = normal(4, 5, 2, seed=2)
    how = {"retain_graph": True, "create_graph": create_graph}
    found = torch.autograd.grad(out, targets, vectors, is_grads_batched=True, **how)
    assert torch.equal(torch.get_rng_state(), state)
    rows = [torch.autograd.grad(out, targets, vector, **how) for vector in vectors]
    wanted = [torch.stack(column) for column in zip(*rows, strict=True)]
    assert_close(found, wanted)
    if create_graph:
        seconds = [
            torch.autograd.grad(sum(g.sin().sum() for g in gs), targets, allow_unused=True, **how)
            for gs in (found, wanted)
        ]
        assert_close(*seconds)
    rows = torch.autograd.grad(out, targets, vectors[0])  # the graph is whole
    assert_close(rows, [grad[0] for grad in found])


@every_mode
def test_batched_gradients_of_a_second_order_graph_are_a_dense_hessian(mode):
    pipe, _ = piped(mode)
    params = list(pipe.parameters())
    grads = torch.autograd.grad(pipe(normal(5, 3)).sin().sum(), params, create_graph=True)
    flat = torch.cat([grad.flatten() for grad in grads])
    found = torch.autograd.grad(flat, params, torch.eye(len(flat)).double(), is_grads_batched=True, retain_graph=True)
    rows = [torch.autograd.grad(each, params, retain_graph=True) for each in flat]
    assert_close(found, [torch.stack(column) for column in zip(*rows, strict=True)])


@every_mode
@pytest.mark.parametrize("train", [True, False])
def test_vmap_over_autograd_grad_is_right_or_refused_by_name(mode, train):
    """The pattern of torch.func's own documentation for a Jacobian of an existing graph."""
    pipe, _ = piped(mode)
    pipe.train(train)
    params = list(pipe.parameters())
    out = pipe(normal(5, 3))
    vectors = normal(4, 5, 2, seed=2)
    pull = lambda vector: torch.autograd.grad(out, params, vector, retain_graph=True)  # noqa: E731: vmap's idiom
    wanted = [torch.stack(column) for column in zip(*(pull(vector) for vector in vectors), strict=True)]
    try:
        found = torch.func.vmap(pull)(vectors)
    except RuntimeError as error:
        assert "Pipe" in str(error) and "is_grads_batched" in str(error)
    else:
        assert_close(found, wanted)
    assert_close(pull(vectors[0]), [grad[0] for grad in wanted])


# -------------------------------------------------------------------------------------- refused, in words, and no harm

IN_A_TRANSFORM = {
    "grad": lambda pipe, x: torch.func.grad(lambda x: pipe(x).sum())(x),
    "vmap": lambda pipe, x: torch.func.vmap(pipe)(x[None]),
    "jvp": lambda pipe, x: torch.func.jvp(pipe, (x,), (x,)),
    "vjp": lambda pipe, x: torch.func.vjp(pipe, x),
    "jacrev": lambda pipe, x: torch.func.jacrev(pipe)(x),
    "hessian": lambda pipe, x: torch.func.hessian(lambda x: pipe(x).sum())(x),
    "grad over parameters": lambda pipe, x: torch.func.grad(lambda p: functional_call(pipe, p, (x,)).sum())(
        dict(pipe.named_parameters())
    ),
    "functionalize": lambda pipe, x: torch.func.functionalize(pipe)(x),
}


def assert_nothing_moved(pipe, call, match):
    """`call` is refused in words; parameters, buffers, generators and the next call are as if it had not been.

    But for the one draw of a call that had begun: a captured tensor shows its tangent only in the output.
    """
    x = normal(5, 3)
    call_seed(7)
    wanted = pipe(x)
    before = {key: value.clone() for key, value in pipe.state_dict().items()}
    call_seed(7)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=match):
        call(pipe, x)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    if not torch.equal(after, state):
        torch.empty((), dtype=torch.int64).random_()
        assert torch.equal(after, torch.get_rng_state())
        torch.set_rng_state(state)
    assert_same(list(pipe.state_dict().values()), list(before.values()))
    assert all(param.grad is None for param in pipe.parameters())
    assert torch.equal(pipe(x), wanted)
    assert torch.autograd.grad(wanted.sum(), list(pipe.parameters()), create_graph=True)[0].requires_grad


@every_mode
@pytest.mark.parametrize("transform", IN_A_TRANSFORM)
def test_torch_func_transforms_over_a_pipe_are_refused_in_words(mode, transform):
    pipe, _ = piped(mode)
    assert_nothing_moved(pipe, IN_A_TRANSFORM[transform], "torch.func transforms .* cannot see through a Pipe. Use ")


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


@pytest.mark.parametrize("transform", [name for name in IN_A_TRANSFORM if name != "grad over parameters"])
def test_of_a_model_that_was_cut_the_words_name_the_model_which_works(transform):
    model, x = Blocks(), normal(5, 4)
    with pytest.raises(RuntimeError, match="the model that was cut, or pipe.to_sequential"):
        IN_A_TRANSFORM[transform](Pipe(model, sample=x, chunks=2), x)
    IN_A_TRANSFORM[transform](model, x)


class Shift(nn.Module):
    """Computes with a buffer, and with a tensor that is registered nowhere."""

    def __init__(self):
        super().__init__()
        self.register_buffer("offset", normal(4))
        self.captured = [normal(4)]

    def forward(self, x):
        return x * self.offset + self.captured[0]


def dual():
    return forward_ad.make_dual(normal(4), normal(4, seed=2))


def by_parameter(pipe, x):
    param = pipe[0].bias
    functional_call(pipe, {"0.bias": forward_ad.make_dual(param.detach(), torch.ones_like(param))}, (x,))


def by_captured(pipe, x):
    found, pipe[1].captured = pipe[1].captured, [dual()]
    try:
        pipe(x)
    finally:
        pipe[1].captured = found


IN_FORWARD_MODE = {
    "input": lambda pipe, x: pipe(forward_ad.make_dual(x, x)),
    "parameter": by_parameter,
    "buffer": lambda pipe, x: functional_call(pipe, {"1.offset": dual()}, (x,)),
    "captured": by_captured,
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("what", IN_FORWARD_MODE)
def test_forward_mode_tangents_are_refused_in_words_wherever_they_come_from(mode, what, grad):
    """A tangent that is dropped is a derivative of zero, without an error."""
    torch.manual_seed(20)
    model = nn.Sequential(nn.Linear(3, 4), Shift(), nn.Dropout(0.3), nn.Linear(4, 2)).double()
    pipe, _ = piped(mode, model=model)

    def call(pipe, x):
        with forward_ad.dual_level(), torch.set_grad_enabled(grad):
            IN_FORWARD_MODE[what](pipe, x)

    assert_nothing_moved(pipe, call, "forward-mode AD cannot go through a Pipe")


def test_within_a_dual_level_a_pipe_without_tangents_works():
    pipe, plain = piped("always")
    x = normal(5, 3)
    with forward_ad.dual_level():
        call_seed(7)
        found = torch.autograd.grad(pipe(x).sin().sum(), list(pipe.parameters()), create_graph=True)
        call_seed(7)
        assert_close(found, torch.autograd.grad(plain(x).sin().sum(), list(plain.parameters()), create_graph=True))


@every_mode
def test_a_layer_without_a_second_derivative_is_torchs_own_error_and_does_no_harm(mode):
    model = nn.Sequential(nn.Linear(3, 3), nn.Hardsigmoid(), nn.Linear(3, 2)).double()
    pipe, _ = piped(mode, model=model)
    params = list(pipe.parameters())
    out = pipe(normal(5, 3))
    state = torch.get_rng_state()
    grads = torch.autograd.grad(out.sin().sum(), params, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative for aten::hardsigmoid_backward is not implemented"):
        torch.autograd.grad(grads[0].sum(), params)
    assert torch.equal(torch.get_rng_state(), state)
    again = torch.autograd.grad(pipe(normal(5, 3)).sin().sum(), params)
    assert_same(again, grads)
