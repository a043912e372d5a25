"""Laws: a loss is refused iff the chunks' losses do not combine to it; of large outputs two are held for that.

The reference computes the loss of each chunk and that of all rows at once, by autograd, without a Pipe.
"""

import weakref
from itertools import pairwise, product

import pytest
import torch
from cover import examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import Pipe
from pipeline.entry import chunk_losses

WIDE = 3


class Opaque(torch.autograd.Function):
    """What it divides by cannot be seen."""

    @staticmethod
    def forward(ctx, output, target):
        ctx.save_for_backward(output, target)
        return (output.square() * target).sum() / target.sum()

    @staticmethod
    def backward(ctx, grad):
        output, target = ctx.saved_tensors
        return grad * 2 * output * target / target.sum(), None


LOSSES = {
    "mean": lambda o, t: (o - t).square().mean(),
    "masked": lambda o, t: (o.square() * t).sum() / t.sum(),
    "opaque": Opaque.apply,
    "sum and count": lambda o, t: ((o.square() * t).sum(), t.sum()),
    "mean and count": lambda o, t: ((o.square() * t).sum() / t.sum().clamp(min=1.0), t.sum()),
    "rows and count": lambda o, t: (o.square().mean(1).sum() / len(o), t.sum()),
    "root": lambda o, t: (o - t).square().mean().sqrt(),
    "largest": lambda o, t: (o - t).abs().amax(),
    "middle": lambda o, t: (o - t).abs().flatten().quantile(0.5),
    "variance": lambda o, t: o.var(0, correction=0).mean(),
    "contrast": lambda o, t: F.cross_entropy(o @ o.T, torch.arange(len(o))),
    "policy": lambda o, t: (o.log_softmax(1)[:, 0] * (t[:, 0] - t[:, 0].mean())).mean(),
    "relative": lambda o, t: (loss := (o - t).square().sum()) / loss.detach(),
    "by all rows": lambda o, t: (o - t).square().sum() / 24,
    "hardest": lambda o, t: (o - t).square().mean(1).topk(1).values.mean(),
}  # fmt: skip


@st.composite
def masks(draw):
    """Rows, chunks, and how many entries of each row count: all alike, or any, or none in whole chunks."""
    rows, chunks = draw(st.integers(2, 12)), draw(st.integers(2, 7))
    kept = draw(st.one_of(
        st.just([WIDE] * rows),
        st.lists(st.integers(0, WIDE), min_size=rows, max_size=rows),
        st.lists(st.sampled_from([0, 0, 0, 1]), min_size=rows, max_size=rows),
        st.integers(0, rows - 1).map(lambda odd: [1 if row == odd else WIDE for row in range(rows)]),
    ))  # fmt: skip
    return chunks, (torch.arange(WIDE) < torch.tensor(kept)[:, None]).double()


def difference(loss_fn, output, target, chunks):
    """Between the loss of all rows and what the chunks' combine to, and between their gradients; relative."""
    outputs = [piece.clone().requires_grad_() for piece in output.tensor_split(chunks)]
    parts = [loss_fn(*both) for both in zip(outputs, target.tensor_split(chunks), strict=True)]
    if isinstance(parts[0], tuple):
        combined = sum(total for total, _ in parts) / sum(count for _, count in parts)
    else:
        combined = sum(part * (len(own) / len(output)) for part, own in zip(parts, outputs, strict=True))
    leaf = output.clone().requires_grad_()
    whole = loss_fn(leaf, target)
    whole = whole[0] / whole[1] if isinstance(whole, tuple) else whole
    ours, (theirs,) = torch.cat(torch.autograd.grad(combined, outputs)), torch.autograd.grad(whole, leaf)
    of_value = (combined - whole).abs() / whole.abs().clamp(min=1e-3)
    of_grads = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3)
    return torch.stack([of_value, of_grads]).nan_to_num(1.0).max()


@pytest.fixture
def pairs_alone(monkeypatch):
    """Outputs count as large: no more than two are compared together."""
    monkeypatch.setattr(chunk_losses, "_HELD", 1)


def refused_iff_wrong(name, case, seed, schedule, compared):
    """`compared`: the runs of chunks that are, of all of them."""
    chunks, target = case
    assume(target.sum() > 0)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()).double()
    x = torch.randn(len(target), WIDE, dtype=torch.float64)
    wrong = difference(LOSSES[name], model(x).detach(), target, min(chunks, len(x)))
    assume(wrong < 1e-9 or wrong > 1e-2)
    if wrong > 1e-2:
        pieces = zip(model(x).detach().tensor_split(chunks), target.tensor_split(chunks), strict=True)
        runs = compared([piece for piece in pieces if len(piece[0])])
        joined = [(*map(torch.cat, zip(*run, strict=True)), len(run)) for run in runs]
        assume(max(difference(LOSSES[name], *run) for run in joined) > 1e-2)
    pipe = Pipe(model, [1, 1], chunks, schedule=schedule)
    if wrong < 1e-9:
        pipe.step(x, target, loss_fn=LOSSES[name])
    else:
        with pytest.raises(ValueError, match="is not a mean over rows|do not add up"):
            pipe.step(x, target, loss_fn=LOSSES[name])


CASES = (masks(), st.integers(0, 9), st.sampled_from(["1f1b", "gpipe"]))


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=examples(12))
@given(*CASES)
def test_a_loss_is_refused_iff_its_chunks_do_not_combine(name, case, seed, schedule):
    refused_iff_wrong(name, case, seed, schedule, lambda pieces: [pieces])


@pytest.mark.usefixtures("pairs_alone")
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(*CASES)
def test_of_large_outputs_pairs_are_compared(name, case, seed, schedule):
    """Medians of three rows may combine in each pair, and not in all."""
    refused_iff_wrong(name, case, seed, schedule, pairwise)


@pytest.mark.parametrize("outputs, held", [(1, [2, 2, 2]), (3, [3, 2]), (3.5, [3, 2]), (4, [4]), (9, [4])])
def test_as_many_outputs_are_compared_together_as_the_limit_holds(outputs, held, monkeypatch):
    """And the first of them that adds something with the next ones."""
    joined, gather = [], chunk_losses.gather
    monkeypatch.setattr(chunk_losses, "_HELD", int(outputs * 2 * WIDE * 8))
    monkeypatch.setattr(chunk_losses, "gather", lambda trees, *args: joined.append(len(trees)) or gather(trees, *args))
    pipe = Pipe(nn.Sequential(nn.Linear(WIDE, WIDE)).double(), [1], 4)
    pipe.step(torch.randn(8, WIDE).double(), torch.randn(8, WIDE).double(), loss_fn=F.mse_loss)
    assert joined == held


def test_a_mean_over_few_tokens_that_is_cut_off_at_one_is_refused():
    """Each two chunks count one token or none, and all of them two."""
    torch.manual_seed(0)
    model, mask = nn.Sequential(nn.Linear(WIDE, 1)).double(), torch.tensor([1, 0, 0, 0, 0, 0, 1, 0]).double()[:, None]
    loss_fns = {
        "a mean": lambda output, target: (output * target).sum() / target.sum().clamp(min=1),
        "a mean over rows": lambda output, target: (output * target).sum() / len(target) / target.sum().clamp(min=1),
    }
    for loss_fn in loss_fns.values():
        with pytest.raises(ValueError, match=r"the losses of 4 chunks \(\[2, 2, 2, 2\] rows\) combine to"):
            Pipe(model, [1], 4).step(torch.randn(8, WIDE).double(), mask, loss_fn=loss_fn)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("kept", [[1, 0, 1], [1, 0, 0, 1], [0, 1, 0, 1, 0], [1, 0, 1, 0, 1]])
def test_chunks_that_count_nothing_do_not_stand_between_those_that_do(kept, schedule):
    """The largest entry does not combine, which no pair with an empty chunk shows."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()).double()
    x, target = torch.randn(len(kept), WIDE).double(), torch.tensor(kept)[:, None].expand(-1, WIDE).double()
    pipe = Pipe(model, [1, 1], len(kept), schedule=schedule)
    with pytest.raises(ValueError, match="is not a mean over rows|do not add up"):
        pipe.step(x, target, loss_fn=lambda o, t: ((o * t).abs().amax() * t.sum(), t.sum()))


@pytest.mark.usefixtures("pairs_alone")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_chunks_whose_loss_is_0_do_not_stand_between_those_that_count(reduction):
    """A loss without a count: each chunk was compared with the first, beside which any is right if it has no tokens."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()).double(), torch.randn(8, WIDE).double()

    def masked(output, mask):
        return (output.square().sum(1) * mask).sum() / mask.sum().clamp(min=1)

    for tokens in product(range(3), repeat=4):
        mask = torch.tensor([[1.0] * count + [0.0] * (2 - count) for count in tokens]).flatten().double()
        pipe, expected = Pipe(model, [1, 1], 4), masked(model(x), mask).detach()
        weight = 1 / 4 if reduction == "mean" else 1
        combined = sum(weight * masked(model(x[start : start + 2]), mask[start : start + 2]) for start in (0, 2, 4, 6))
        if torch.isclose(combined, expected, rtol=1e-9):
            torch.testing.assert_close(pipe.step(x, mask, loss_fn=masked, loss_reduction=reduction).loss, expected)
            continue
        for call in (pipe.step, pipe.evaluate):
            with pytest.raises(ValueError, match=f"is not a {reduction} over rows"):
                call(x, mask, loss_fn=masked, loss_reduction=reduction)


class Alive(TorchDispatchMode):
    """The most bytes at a time of storages that an operator made, of at least `least` bytes."""

    def __init__(self, least):
        super().__init__()
        self.least, self.now, self.peak = least, 0, 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage):
        size, key = storage.nbytes(), storage._cdata
        if size >= self.least and key not in self.known:
            self.known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key, size):
        self.known.discard(key)
        self.now -= size


CLASSES, ROWS = 300, 4
LOGITS = CLASSES * ROWS * 4


def peak(schedule, chunks, loss_fn, number):
    """Of call `number`, in outputs of one chunk."""
    torch.manual_seed(0)
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, CLASSES, bias=False)), [1, 1], chunks, schedule=schedule)
    x, target = torch.randn(chunks * ROWS, 4), torch.randint(CLASSES, (chunks * ROWS,))
    for _ in range(number - 1):
        pipe.step(x, target, loss_fn=loss_fn)
    pipe.zero_grad()
    with Alive(LOGITS // 2) as alive:
        pipe.step(x, target, loss_fn=loss_fn)
    return alive.peak / LOGITS


@pytest.mark.usefixtures("pairs_alone")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_a_validating_call_holds_does_not_grow_with_the_chunks(schedule):
    other = peak(schedule, 4, nn.CrossEntropyLoss(), 3)
    few, many = [peak(schedule, chunks, nn.CrossEntropyLoss(), 2) for chunks in (4, 12)]
    assert many == few <= other + 9  # a chunk before; both joined, their log-probabilities, and their gradients
