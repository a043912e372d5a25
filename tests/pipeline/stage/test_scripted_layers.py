"""Layers that torch.jit has compiled are layers like others: parameters, buffers, modes, ties, at every entry point."""

import copy

import pytest
import torch
from by_chunks import CHECKPOINTS, call_seed, step_by_chunks
from torch import nn

from partition.modes import modes_of
from pipeline import EagerUpdate, Pipe, checkpoint_blocks
from pipeline.common.places import Place

ROWS, WIDE, CHUNKS = 11, 6, 3
mse = nn.functional.mse_loss
GELU = """
def bias_gelu(bias, x):
    y = bias + x
    return y * 0.5 * (1.0 + torch.tanh(0.79788456 * y * (1 + 0.044715 * y * y)))
"""


class Fused(nn.Module):
    """Calls a scripted function, as Megatron's layers do; each instance one that has never run."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDE))
        self._function = torch.jit.CompilationUnit(GELU).bias_gelu

    def forward(self, x):
        return self._function(self.bias, x)

    def __deepcopy__(self, memo):
        made = Fused()
        made.bias = copy.deepcopy(self.bias, memo)
        return made


def scripted(*layers):
    return torch.jit.script(nn.Sequential(*layers).double())


def traced(*layers):
    return torch.jit.trace(nn.Sequential(*layers).double(), torch.ones(2, WIDE, dtype=torch.float64), check_trace=False)


LAYERS = {
    "script": lambda: scripted(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE, bias=False)),
    "trace": lambda: traced(nn.Linear(WIDE, WIDE), nn.Tanh()),
    "script with buffers": lambda: scripted(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE)),
    "script that draws": lambda: scripted(nn.Linear(WIDE, WIDE), nn.Dropout(0.4)),
    "script in a module": lambda: nn.Sequential(nn.Linear(WIDE, WIDE), scripted(nn.Linear(WIDE, WIDE))).double(),
    "frozen script": lambda: torch.jit.freeze(scripted(nn.Linear(WIDE, WIDE), nn.Tanh()).eval()),  # it has no mode
    "function": lambda: Fused().double(),
}


def model_of(kind):
    torch.manual_seed(3)
    layers = [nn.Linear(WIDE, WIDE), LAYERS[kind](), nn.Tanh(), LAYERS[kind](), nn.Linear(WIDE, 2)]
    return nn.Sequential(*[layer.double() for layer in layers])


def data():
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(ROWS, wide, dtype=torch.float64, generator=generator) for wide in (WIDE, 2)]


def assert_close(ours, theirs):
    """torch.jit computes otherwise in its first run than later, so not to the bit."""
    expected = dict(theirs.named_parameters())
    for name, param in ours.named_parameters():
        torch.testing.assert_close(param.grad, expected[name].grad, rtol=1e-11, atol=1e-13)
    buffers = dict(theirs.named_buffers())
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("schedule", ["zb-h1"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_compiled_layer_has_the_gradients_of_the_loop(kind, schedule, checkpoint):
    ours, theirs = model_of(kind), model_of(kind)
    pipe = Pipe(ours, [2, 3], CHUNKS, schedule=schedule, checkpoint=checkpoint)
    x, y = data()
    for seed in range(5):  # calls 1, 2 and 4 compare; torch.jit compiles anew between the first runs
        ours.zero_grad()
        theirs.zero_grad()
        drawn = call_seed(seed)
        loss = pipe.step(x, y, loss_fn=mse).loss
        torch.testing.assert_close(loss, step_by_chunks(theirs, x, y, CHUNKS, mse, drawn), rtol=1e-11, atol=0.0)
        assert_close(ours, theirs)
    assert list(pipe.state_dict()) == list(theirs.state_dict())


@pytest.mark.parametrize("entry", ["forward", "create_graph", "evaluate", "eager", "store", "threads"])
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "script that draws"])
def test_a_compiled_layer_goes_through_every_entry_point(kind, entry):
    ours, theirs = model_of(kind), model_of(kind)
    places = [Place(torch.device("cpu"), name) for name in "ab"] if entry == "threads" else None
    pipe = Pipe(ours, [2, 3], CHUNKS, checkpoint="always", devices=places, workers="threads" if places else None)
    x, y = data()
    if entry == "evaluate":
        for model in (ours, theirs):
            model.requires_grad_(True)
        before = modes_of(pipe.modules())
        loss = pipe.evaluate(x, y, loss_fn=mse).loss
        torch.testing.assert_close(loss, mse(theirs.eval()(x), y), rtol=1e-11, atol=0.0)
        assert modes_of(pipe.modules()) == before
        return
    if entry == "forward":
        mse(pipe(x), y).backward()
    elif entry == "create_graph":
        grads = torch.autograd.grad(mse(pipe(x), y), list(pipe.parameters()), create_graph=True)
        sum([grad.square().sum() for grad in grads]).backward()
    elif entry == "eager":
        pipe.step(x, y, loss_fn=mse, optimizer=EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=1.0)))
        before = model_of(kind)
        for param, old in zip(ours.parameters(), before.parameters(), strict=True):
            param.grad = (old - param).detach()
    elif entry == "store":
        pipe.step(x, y, loss_fn=mse, grads="store").grads.assign()
    else:
        pipe.step(x, y, loss_fn=mse)
    if entry == "create_graph":
        outs = torch.cat([theirs(piece) for piece in torch.tensor_split(x, CHUNKS)])
        grads = torch.autograd.grad(mse(outs, y), list(theirs.parameters()), create_graph=True)
        sum([grad.square().sum() for grad in grads]).backward()
    else:
        step_by_chunks(theirs, x, y, CHUNKS, mse)
    assert_close(ours, theirs)


@pytest.mark.parametrize("apart", [False, True])
def test_a_weight_that_is_tied_to_a_compiled_layer_gets_both_gradients(apart):
    def tied():
        model = model_of("script")
        inner = next(child for name, child in model[1].named_children() if name == "0")
        inner._c.setattr("weight", model[0].weight)
        return model

    ours, theirs = tied(), tied()
    places = [Place(torch.device("cpu"), name) for name in "ab"] if apart else None
    pipe = Pipe(ours, [1, 4], CHUNKS, devices=places)
    x, y = data()
    pipe.step(x, y, loss_fn=mse)
    step_by_chunks(theirs, x, y, CHUNKS, mse)
    assert_close(ours, theirs)


def test_a_compiled_batch_norm_cannot_be_put_off():
    with pytest.raises(TypeError, match=r"deferred_batch_norm=True cannot put off layer '1\.1'.*torch\.jit"):
        Pipe(model_of("script with buffers"), [2, 3], CHUNKS, deferred_batch_norm=True)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_failed_call_leaves_the_buffers_of_a_compiled_layer(checkpoint):
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    model = nn.Sequential(LAYERS["script with buffers"](), nn.Linear(WIDE, 2).double(), Fails())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(KeyError, match="mine"):
        Pipe(model, [1, 2], CHUNKS, checkpoint=checkpoint).step(*data(), loss_fn=mse)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("kind", LAYERS)
def test_a_checkpointed_block_that_is_compiled_is_right_or_refused(kind):
    ours, theirs = model_of(kind), model_of(kind)
    x, y = data()
    if kind != "function":
        with pytest.raises(TypeError, match=r"block '1' is, or holds, a module that torch\.jit.*Leave it unc"):
            checkpoint_blocks(ours, lambda name, module: name in ("1", "3"))
        return
    checkpoint_blocks(ours, Fused)  # torch.jit compiles it between its first run and its second
    with pytest.raises(RuntimeError, match=r"compiled a function of block '3'.*run forward and backward again"):
        mse(ours(x), y).backward()
    ours.zero_grad()
    mse(ours(x), y).backward()
    mse(theirs(x), y).backward()
    assert_close(ours, theirs)
