"""Law: under autocast forwards, recomputations and losses run, and nothing else: no backward, hook or optimizer.

The reference is the usual loop: forward and loss within `torch.autocast`, backward and optimizer outside. Layers that
switch autocast off for themselves (routers, heads, losses) show the difference: a backward under autocast would
multiply their gradients in bfloat16.
"""

import pytest
import torch
from by_chunks import CHECKPOINTS, assert_same_grads, call_seed, same, step_by_chunks, twins
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from pipeline import EagerUpdate, Pipe, checkpoint_blocks, eager_backward
from pipeline.curvature import EmpiricalFisher, GaussNewton, Hessian

WIDE, ROWS, CHUNKS = 8, 7, 3
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v")


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


class Island(nn.Module):
    """A product in float32, in the midst of autocast."""

    def __init__(self, wide=WIDE):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(wide, WIDE) / 3)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.weight.t()


class Checkpointed(nn.Module):
    """Its own checkpoint computes again in the backward, under the autocast of the forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), Island())

    def forward(self, x):
        return torchs_checkpoint(self.inner, x, use_reentrant=False)


class Metric(nn.Module):
    """A loss with a product of its own, and parameters, in float32."""

    def __init__(self):
        super().__init__()
        self.island = Island(5)

    def forward(self, output, target):
        return (self.island(output) - target).pow(2).mean()


def model():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDE, WIDE), nn.Tanh(), Island(), nn.Linear(WIDE, WIDE), nn.Tanh(), Checkpointed(), Island(),
        nn.GELU(),
    )


def data():
    torch.manual_seed(4)
    return torch.randn(ROWS, WIDE), torch.randn(ROWS, 5)


def piped(ours, schedule="1f1b", **options):
    balance = [2, 2, 2, 2] if schedule in ("interleaved", "looped-bfs", "zb-v") else [3, 5]
    return Pipe(ours, balance, CHUNKS, schedule=schedule, **options)


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_gives_the_bits_of_the_usual_loop(schedule, checkpoint, workers):
    ours, theirs = twins(model())
    loss_fn, theirs_loss = twins(Metric())
    x, y = data()
    pipe = piped(ours, schedule, checkpoint=checkpoint, workers=workers)
    for number in (5, 6, 7):  # the first two look at more; the third does not
        seed = call_seed(number)
        with autocast():
            loss = pipe.step(x, y, loss_fn=loss_fn, outputs=number == 5).loss
            assert torch.is_autocast_enabled("cpu")
            expected = step_by_chunks(theirs, x, y, CHUNKS, theirs_loss, seed)
        assert same(loss, expected)
        assert_same_grads(pipe, theirs)
        assert_same_grads(loss_fn, theirs_loss)
        for module in (pipe, theirs, loss_fn, theirs_loss):
            module.zero_grad()


class Rotated(torch.optim.SGD):
    """Multiplies matrices in its step, as Muon does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.dim() == 2:
                    param.sub_((param.grad @ param.grad.t()) @ param, alpha=group["lr"])


def in_float32(grad):
    """A hook that multiplies: in whatever type it runs in."""
    return grad @ torch.linspace(-1, 1, grad.shape[-1] ** 2).reshape(grad.shape[-1], -1)


@pytest.mark.parametrize("way", ["optimizer", "eager", "two runs", "store"])
def test_hooks_and_optimizers_run_outside(way):
    ours, theirs = twins(model())
    x, y = data()
    clip = 0.5 if way in ("optimizer", "two runs") else None
    for net in (ours, theirs):
        net[2].weight.register_hook(in_float32)
    seed = call_seed(5)
    pipe = piped(ours)
    own = Rotated(pipe.parameters(), lr=0.1)
    eager = EagerUpdate(own, *(("two_pass", None, clip) if clip else ()), separable=True)
    loss_fn = nn.MSELoss()
    with autocast():
        if way == "store":
            step = pipe.step(x, x, loss_fn=loss_fn, grads="store")
        elif way == "optimizer":
            pipe.step(x, x, loss_fn=loss_fn, optimizer=own, clip_grad_norm=clip)
        else:
            pipe.step(x, x, loss_fn=loss_fn, optimizer=eager)
    if way == "store":
        step.grads.apply(own)
    hooks = theirs[2].weight._backward_hooks
    theirs[2].weight._backward_hooks = None  # it is to see the whole gradient, once
    with autocast():
        step_by_chunks(theirs, x, x, CHUNKS, loss_fn, seed)
    theirs[2].weight._backward_hooks = hooks
    theirs[2].weight.grad = in_float32(theirs[2].weight.grad)
    if clip is not None:
        nn.utils.clip_grad_norm_(theirs.parameters(), clip)
    Rotated(theirs.parameters(), lr=0.1).step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("way", ["forward entry point", "eager backward", "blocks"])
def test_a_backward_of_the_callers_runs_where_he_runs_it(way, inside):
    ours, theirs = twins(model())
    x, _ = data()
    found = []
    for net in (ours, theirs):
        run = Pipe(net, [3, 5], 1, checkpoint="always") if net is ours and way != "blocks" else net
        if net is ours and way == "blocks":
            checkpoint_blocks(net, lambda name, _: name in ("0", "2", "3"))
        grads = {}
        with autocast():
            loss = run(x).float().pow(2).mean()
            if not inside:
                loss = loss * 1.0
            backward(loss, net, grads, way) if inside else None
        if not inside:
            backward(loss, net, grads, way)
        found.append(grads)
    assert found[0].keys() == found[1].keys() and len(found[0]) == len(list(ours.parameters()))
    assert all(same(found[0][name], found[1][name]) for name in found[0])


def backward(loss, net, grads, way):
    """Into `grads` by name."""
    names = {param: name for name, param in net.named_parameters()}
    if way == "eager backward":
        eager_backward(loss, EagerUpdate(lambda param, grad: grads.update({names[param]: grad.clone()})))
    else:
        loss.backward()
        grads.update({name: param.grad for param, name in names.items()})


@pytest.mark.parametrize("matrix", [Hessian, GaussNewton, EmpiricalFisher])
def test_curvature_products_are_those_of_derivatives_taken_outside(matrix):
    ours, theirs = twins(nn.Sequential(Island(), nn.Tanh(), Island(), nn.Tanh(), Island()))
    x, _ = data()
    y = torch.tensor([1, 0, 3, 2, 5, 4, 7])
    operator = matrix(Pipe(ours, [2, 3], 1, checkpoint="always"), [(x, y)], nn.CrossEntropyLoss())
    torch.manual_seed(2)
    vector = torch.randn(operator.shape[0])
    with autocast():
        found = operator @ vector
    params = list(theirs.parameters())
    with autocast():
        output = theirs(x)
    parts = [part.view_as(param) for part, param in zip(vector.split([p.numel() for p in params]), params, strict=True)]
    torch.testing.assert_close(found, expected_product(matrix, output, y, params, parts), rtol=1e-4, atol=1e-6)


def expected_product(matrix, output, y, params, parts):
    """By double backward, without autocast."""
    def flat(tensors):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    if matrix is Hessian:
        grads = torch.autograd.grad(nn.functional.cross_entropy(output, y), params, create_graph=True)
        return flat(torch.autograd.grad(grads, params, parts))
    seed = torch.zeros_like(output, requires_grad=True)
    pulled = torch.autograd.grad(output, params, seed, create_graph=True)
    (pushed,) = torch.autograd.grad(pulled, seed, parts, retain_graph=True)
    probs = output.detach().softmax(1)
    rows = len(output)
    if matrix is GaussNewton:
        bent = (probs * pushed - probs * (probs * pushed).sum(1, keepdim=True)) / rows
    else:
        at_rows = probs - nn.functional.one_hot(y, output.shape[1])
        bent = at_rows * (at_rows * pushed).sum(1, keepdim=True) / rows
    return flat(torch.autograd.grad(output, params, bent))
