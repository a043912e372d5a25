"""The plain module, one forward per chunk, with the backward apart: for what happens between the two.

    run = ByChunks(model, x, chunks, seed)      one forward per chunk; run.output: their outputs joined, a leaf
    run.backward(loss(run.output))              gradient of the joined output, out_i.backward(g_i), i ascending

`law_reference` does both in one go and for any pytree; here a context may end, a flag may change, in between.
"""

import copy

import torch
from law_reference import sum_in_float32

from pipeline.recompute.randomness import layer_seed

CHECKPOINTS = ("always", "except_last", "never")


def call_seed(manual_seed):
    """What a call draws after torch.manual_seed(manual_seed); leaves the generator at that seed."""
    torch.manual_seed(manual_seed)
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    torch.manual_seed(manual_seed)
    return seed


def twins(model):
    """A model, and another one with the same weights in other memory."""
    return model, copy.deepcopy(model)


class ByChunks:
    """Writes the model's buffers at once and its `.grad` in `backward`; never x, whose gradient is `input_grad`."""

    def __init__(self, model, x, chunks, seed=0):
        self._model = model
        pieces = [piece.detach() for piece in torch.tensor_split(x, min(chunks, len(x)))]
        self.pieces = [piece.requires_grad_(x.requires_grad) for piece in pieces]
        with torch.random.fork_rng(devices=()):
            self.outs = [self._forward(model, piece, chunk, seed) for chunk, piece in enumerate(self.pieces)]
        self.output = torch.cat([out.detach() for out in self.outs]).requires_grad_(self.outs[0].requires_grad)

    @staticmethod
    def _forward(model, value, chunk, seed):
        for index, layer in enumerate(model):
            torch.default_generator.manual_seed(layer_seed(seed, chunk, index))
            value = layer(value)
        return value

    def backward(self, loss):
        (grad,) = torch.autograd.grad(loss, self.output)
        sum_in_float32(self._model.parameters())
        for out, piece in zip(self.outs, torch.split(grad, [len(out) for out in self.outs]), strict=True):
            out.backward(piece)
        round_sums(self._model)

    @property
    def input_grad(self):
        return torch.cat([piece.grad for piece in self.pieces])


def step_by_chunks(model, x, target, chunks, loss_fn, seed=0):
    """A mean loss of `pipe.step`: each chunk's share of it goes backward, ascending. Returns the loss."""
    run = ByChunks(model, x, chunks, seed)
    targets = torch.tensor_split(target, len(run.outs))
    total = 0.0
    for out, piece in zip(run.outs, targets, strict=True):
        part = loss_fn(out, piece) * (len(piece) / len(target))
        with torch.autocast("cpu", enabled=False):  # as in a loop that has autocast around forward and loss alone
            part.backward()
        total = total + part.detach()
    return total


def round_sums(model):
    """Gradients of half precision, summed in float32, become what they are gradients of."""
    for param in model.parameters():
        if param.grad is not None and param.grad.dtype != param.dtype:
            grad, param.grad = param.grad, None
            param.grad_dtype = None
            param.grad = grad.to(param.dtype)


def same(one, other):
    """Bit for bit, None only where None is; nan equals nan."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def assert_same_grads(ours, theirs):
    """The gradients of two modules with the same names, bit for bit."""
    expected = {name: param.grad for name, param in theirs.named_parameters()}
    found = {name: param.grad for name, param in ours.named_parameters()}
    assert list(found) == list(expected)
    wrong = [name for name, grad in found.items() if not same(grad, expected[name])]
    assert not wrong, f"gradients differ: {wrong}"
