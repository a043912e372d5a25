"""Layers that call autograd within their own forward are as right as others: in every mode, beside every buffer."""

import pytest
import torch
from by_chunks import CHECKPOINTS, assert_same_grads, call_seed, same, step_by_chunks, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline import CheckpointError, EagerUpdate, Pipe, checkpoint_blocks

ROWS, WIDE, CHUNKS = 12, 6, 3
mse = nn.functional.mse_loss


class Descent(nn.Module):
    """A step down the gradient of an energy, which a call of autograd in the forward computes."""

    def __init__(self, call):
        super().__init__()
        self.inner = nn.Linear(WIDE, WIDE)
        self._call = call

    def energy(self, x):
        return (self.inner(x).tanh() ** 2).sum()

    def forward(self, x):
        return x - 0.1 * self._call(self.energy, x)


def by_autograd(energy, x):
    with torch.enable_grad():
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(energy(leaf), leaf, create_graph=True)[0]


def by_vjp(energy, x):
    value, pull = torch.func.vjp(energy, x)
    return pull(torch.ones_like(value))[0]


def by_rows(energy, x):
    return torch.func.vmap(torch.func.grad(energy))(x)


CALLS = {"autograd.grad": by_autograd, "func.grad": lambda energy, x: torch.func.grad(energy)(x),
         "func.vjp": by_vjp, "vmap of func.grad": by_rows}  # fmt: skip
BEFORE = {"nothing": lambda: [], "a batch norm": lambda: [nn.BatchNorm1d(WIDE)]}


def model_of(call, before, after):
    torch.manual_seed(2)
    stage = [*BEFORE[before](), Descent(CALLS[call]), *BEFORE[after]()]
    return nn.Sequential(nn.Linear(WIDE, WIDE), *stage, *model_of_last(call)).double(), len(stage)


def model_of_last(call):
    return [Descent(CALLS[call]), nn.BatchNorm1d(WIDE), nn.Dropout(0.3), nn.Linear(WIDE, 2)]


def data():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(ROWS, wide, dtype=torch.float64, generator=generator) for wide in (WIDE, 2)]


def assert_same_buffers(ours, theirs):
    expected = dict(theirs.named_buffers())
    assert all([same(buffer, expected[name]) for name, buffer in ours.named_buffers()])


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("policy", CHECKPOINTS)
def test_a_layer_that_calls_autograd_has_the_gradients_and_buffers_of_the_loop(policy, schedule, call, before):
    model, length = model_of(call, before, before)
    ours, theirs = twins(model)
    x, y = data()
    pipe = Pipe(ours, [1, length, 4], CHUNKS, checkpoint=policy, schedule=schedule)
    for seed in range(3):  # calls 1 and 2 compare, 3 does not
        ours.zero_grad()
        theirs.zero_grad()
        drawn = call_seed(seed)
        loss = pipe.step(x, y, loss_fn=mse).loss
        torch.testing.assert_close(loss, step_by_chunks(theirs, x, y, CHUNKS, mse, drawn), rtol=0.0, atol=1e-15)
        assert_same_grads(ours, theirs)
        assert_same_buffers(ours, theirs)


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("entry", ["forward", "create_graph", "evaluate", "eager", "deferred"])
@pytest.mark.parametrize("call", ["autograd.grad", "func.grad"])
def test_every_entry_point_takes_a_layer_that_calls_autograd(call, entry, workers):
    model, length = model_of(call, "a batch norm", "a batch norm")
    x, y = data()
    found = []
    for policy in CHECKPOINTS:
        ours, _ = twins(model)
        pipe = Pipe(
            ours, [1, length, 4], CHUNKS, checkpoint=policy, workers=workers, deferred_batch_norm=entry == "deferred"
        )
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            if entry == "forward":
                mse(pipe(x), y).backward()
            elif entry == "create_graph":
                wanted = list(pipe.parameters())
                grads = torch.autograd.grad(mse(pipe(x), y), wanted, create_graph=True)
                sum([grad.square().sum() for grad in grads]).backward()
            elif entry == "evaluate":
                pipe.evaluate(x, y, loss_fn=mse)
            elif entry == "eager":
                pipe.step(x, y, loss_fn=mse, optimizer=EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=0.1)))
            else:
                pipe.step(x, y, loss_fn=mse)
        found.append(ours)
    for other in found[1:]:  # what is kept in all chunks is right: the law above
        assert_same_grads(found[-1], other)
        assert_same_buffers(found[-1], other)
        assert all(map(torch.equal, found[-1].parameters(), other.parameters()))


@pytest.mark.parametrize("call", CALLS)
def test_a_checkpointed_block_that_calls_autograd_is_right_or_refused(call):
    ours, theirs = twins(Descent(CALLS[call]).double())
    x = data()[0].requires_grad_()
    checkpoint_blocks(ours, Descent)
    theirs(x).square().sum().backward()
    if call == "autograd.grad":
        ours(x).square().sum().backward()
        assert_same_grads(ours, theirs)
    else:  # torch's own checkpoint cannot
        with pytest.raises(CheckpointError, match=r"block '' \(Descent\) calls torch\.func.*do not checkpoint this"):
            ours(x)


class Captured(nn.Module):
    """A reentrant torch.utils.checkpoint, beside a leaf of the caller's that is no parameter of it."""

    def __init__(self, leaf):
        super().__init__()
        self.inner = nn.Linear(WIDE, WIDE)
        self._held = [leaf]

    def forward(self, x):
        return checkpoint(lambda z: self.inner(z).tanh(), x, use_reentrant=True) * self._held[0]


@pytest.mark.parametrize("place", ["leaf", "computed", "loss"])
@pytest.mark.parametrize("entry", ["step", "forward", "store"])
@pytest.mark.parametrize("policy", CHECKPOINTS)
def test_a_captured_leaf_beside_a_reentrant_checkpoint_gets_its_whole_gradient_once(policy, entry, place):
    found = []
    for ours in (True, False):
        torch.manual_seed(4)
        leaf = torch.randn(WIDE, dtype=torch.float64, requires_grad=True)
        leaf.grad = torch.ones_like(leaf)  # it adds to what is there
        calls = []
        leaf.register_post_accumulate_grad_hook(lambda each: calls.append(each.grad.clone()))
        held = leaf if place != "computed" else leaf * 2
        model = nn.Sequential(nn.Linear(WIDE, WIDE), Captured(held), Captured(held), nn.Linear(WIDE, 2)).double()
        x, y = data()

        def loss_fn(output, target):
            return mse(output, target) + (0.1 * leaf.square().mean() if place == "loss" else 0.0)

        if ours:
            pipe = Pipe(model, [2, 2], CHUNKS, checkpoint=policy)
            if entry == "forward":
                loss_fn(pipe(x), y).backward()
            else:
                grads = pipe.step(x, y, loss_fn=loss_fn, grads="store" if entry == "store" else "param").grads
                if grads is not None:
                    assert torch.equal(leaf.grad, torch.ones_like(leaf)) and not calls
                    grads.assign()
        else:
            loss_fn(torch.cat([model(piece) for piece in x.chunk(CHUNKS)]), y).backward()
        assert len(calls) == 1 or entry == "store"  # assign() is no backward
        found.append([leaf.grad, *[param.grad for param in model.parameters()]])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
