"""The loss of `step` and `evaluate` is the un-pipelined one, or is refused.

Two references, which import nothing from pipeline: the plain module on the whole batch (`plain`, up to rounding) and a
hand-written loop over the same chunks (`loop`, bit for bit).
"""

import copy
import gc
import re
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from law_reference import sum_in_float32
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from pipeline import GradStore, NoChunk, Pipe
from pipeline.data.loss import Loss

CLASSES = 5
few = settings(max_examples=examples(40))


def model(dtype=torch.float64, out=CLASSES):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, out)).to(dtype)


def data(rows, dtype=torch.float64, out=CLASSES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, 4, dtype=dtype, generator=generator),
        torch.randn(rows, out, dtype=dtype, generator=generator),
    )


def classes(rows, *more, ignored=0.0, ignore_index=-100, seed=0):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(CLASSES, (rows, *more), generator=generator)
    return torch.where(torch.rand(target.shape, generator=generator) < ignored, ignore_index, target)


def pipe_of(module, chunks=3, **options):
    return Pipe(module, [2, 1, 2], chunks=chunks, **options)


def grads_of(module):
    return {name: param.grad for name, param in module.named_parameters()}


def plain(module, x, target, loss_fn):
    """The whole batch at once; loss_fn may give (sum, count)."""
    module = copy.deepcopy(module)
    loss = loss_fn(module(x), target)
    loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    loss.backward()
    return loss.detach(), grads_of(module)


def loop(module, x, target, loss_fn, chunks, reduction="mean"):
    """One forward per chunk, `loss_i * (rows_i / rows)` backward in ascending order; sums are divided at the end."""
    module = copy.deepcopy(module)
    rows = len(x)
    count = min(chunks, rows)
    losses, counts = [], []
    for x_i, target_i in zip(torch.tensor_split(x, count), torch.tensor_split(target, count), strict=True):
        loss = loss_fn(module(x_i), target_i)
        if isinstance(loss, tuple):
            loss, number = loss
            counts.append(number)
        elif reduction == "mean":
            loss = loss * (len(x_i) / rows)
        loss.backward()
        losses.append(loss.detach())
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    grads = grads_of(module)
    if counts:
        total = total / sum(counts)
        grads = {name: grad / sum(counts) for name, grad in grads.items()}
    return total, grads


def assert_near(found, expected, tolerance=1e-12):
    """Relative to the largest entry: single entries may cancel."""
    (loss, grads), (expected_loss, expected_grads) = found, expected
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=tolerance)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        if expected_grads[name] is None:
            assert grad is None
        else:
            difference = (grad - expected_grads[name]).abs().max()
            assert difference <= tolerance * max(1e-3, expected_grads[name].abs().max()), name


def assert_same(found, expected):
    (loss, grads), (expected_loss, expected_grads) = found, expected
    assert torch.equal(loss, expected_loss)
    for name, grad in grads.items():
        assert torch.equal(grad, expected_grads[name]), name


def stepped(module, x, target, loss_fn, chunks=3, options=None, **keywords):
    pipe = pipe_of(copy.deepcopy(module), chunks, **(options or {}))
    step = pipe.step(x, target, loss_fn=loss_fn, **keywords)
    assert step.grads is None and step.loss.shape == () and not step.loss.requires_grad
    return step.loss, grads_of(pipe)


def state_of(pipe):
    tensors = {**dict(pipe.named_parameters()), **dict(pipe.named_buffers())}
    grads = {name: None if param.grad is None else param.grad.clone() for name, param in pipe.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}, grads


def assert_unchanged(pipe, before):
    now = state_of(pipe)
    for old, new in zip(before, now, strict=True):
        for name in old:
            assert (old[name] is None and new[name] is None) or torch.equal(old[name], new[name]), name


def masked(output, target):
    """Squared errors where the target is positive: (sum, count)."""
    mask = target > 0
    return ((output - target) ** 2 * mask).sum(), mask.sum()


def rms(output, target):
    return ((output - target) ** 2).mean().sqrt()


def contrastive(output, target):
    logits = output @ target.T
    return F.cross_entropy(logits, torch.arange(len(logits)))


# ------------------------------------------------------------------------------------------------------- the same loss


@few
@given(
    rows=st.integers(1, 9),
    chunks=st.integers(1, 10),
    checkpoint=st.sampled_from(["always", "except_last", "never"]),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    kind=st.sampled_from(["mse mean", "mse sum", "own mean", "own sum", "lambda sum", "masked", "tokens", "smooth"]),
)
def test_loss_and_gradient_are_the_chunk_loops_bit_for_bit_and_the_plain_modules(
    rows, chunks, checkpoint, schedule, kind
):
    x, y = data(rows)
    y[-1, 0] = 1.0  # the masked loss counts something
    labels = classes(rows, ignored=0.3)
    labels[0] = 2

    def tokens(output, target, **options):
        return F.cross_entropy(output, target, reduction="sum", **options), (target != -100).sum()

    target, loss_fn, keywords, by_hand, reduction = {
        "mse mean": (y, F.mse_loss, {}, F.mse_loss, "mean"),
        "mse sum": (y, partial(F.mse_loss, reduction="sum"), {}, partial(F.mse_loss, reduction="sum"), "sum"),
        "own mean": (y, nn.SmoothL1Loss(), {}, F.smooth_l1_loss, "mean"),
        "own sum": (y, nn.L1Loss(reduction="sum"), {}, partial(F.l1_loss, reduction="sum"), "sum"),
        "lambda sum": (y, lambda o, t: (o * t).sum(), {"loss_reduction": "sum"}, lambda o, t: (o * t).sum(), "sum"),
        "masked": (y, masked, {}, masked, None),
        "tokens": (labels, F.cross_entropy, {}, tokens, None),
        "smooth": (
            labels, nn.CrossEntropyLoss(label_smoothing=0.1), {}, partial(tokens, label_smoothing=0.1), None
        ),
    }[kind]
    module = model()
    options = {"checkpoint": checkpoint, "schedule": schedule}
    found = stepped(module, x, target, loss_fn, chunks, options, **keywords)
    assert_same(found, loop(module, x, target, by_hand, chunks, reduction))
    assert_near(found, plain(module, x, target, loss_fn))


WEIGHT = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0], dtype=torch.float64)
TOKEN_LOSSES = {
    "functional": F.cross_entropy,
    "module": nn.CrossEntropyLoss(),
    "weights": nn.CrossEntropyLoss(weight=WEIGHT),
    "ignore 0": nn.CrossEntropyLoss(ignore_index=0),
    "smoothing": nn.CrossEntropyLoss(label_smoothing=0.2),
    "all": nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=0, label_smoothing=0.2),
    "sum": nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=0, reduction="sum"),
    "partial": partial(F.cross_entropy, weight=WEIGHT, ignore_index=0, label_smoothing=0.1),
    "partial sum": partial(F.cross_entropy, ignore_index=0, reduction="sum"),
}


def log_softmax(loss_fn):
    return nn.Sequential(*model(), nn.LogSoftmax(1)), loss_fn


NLL_LOSSES = {
    "nll functional": log_softmax(F.nll_loss),
    "nll module": log_softmax(nn.NLLLoss(weight=WEIGHT, ignore_index=0)),
    "nll partial": log_softmax(partial(F.nll_loss, weight=WEIGHT)),
}
ALL_TOKEN_LOSSES = {**{name: (model(), loss_fn) for name, loss_fn in TOKEN_LOSSES.items()}, **NLL_LOSSES}


@pytest.mark.parametrize("rows, chunks", [(7, 3), (8, 8), (2, 4)])
@pytest.mark.parametrize("name", ALL_TOKEN_LOSSES)
def test_torchs_token_losses_are_right_by_themselves(name, rows, chunks):
    module, loss_fn = ALL_TOKEN_LOSSES[name]
    balance = [2, 1, len(module) - 3]
    x, _ = data(rows)
    target = classes(rows, seed=1)
    if name not in ("ignore 0", "all", "sum", "partial", "partial sum", "nll module"):
        target[1] = -100
    pipe = Pipe(copy.deepcopy(module), balance, chunks=chunks)
    assert_near((pipe.step(x, target, loss_fn=loss_fn).loss, grads_of(pipe)), plain(module, x, target, loss_fn))
    with torch.no_grad():
        expected = loss_fn(module(x), target)
    torch.testing.assert_close(pipe.evaluate(x, target, loss_fn=loss_fn).loss, expected, rtol=1e-12, atol=0)


class Sequences(nn.Module):
    """[N, 4] -> [N, classes, T]"""

    def __init__(self, length):
        super().__init__()
        self.linear = nn.Linear(4, CLASSES * length, dtype=torch.float64)
        self.length = length

    def forward(self, x):
        return self.linear(x).reshape(len(x), CLASSES, self.length)


@pytest.mark.parametrize("name", ["functional", "weights", "all", "partial"])
@pytest.mark.parametrize("rows, chunks", [(5, 2), (6, 4), (3, 3)])
def test_token_losses_over_sequences_count_tokens(name, rows, chunks):
    module = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), Sequences(6))
    loss_fn = TOKEN_LOSSES[name]
    ignore_index = 0 if name in ("all", "partial") else -100
    x, _ = data(rows)
    target = classes(rows, 6, ignored=0.5, ignore_index=ignore_index)
    target[0] = ignore_index  # no token of the first row counts, which with rows == chunks is a chunk
    pipe = Pipe(copy.deepcopy(module), [1, 1], chunks=chunks)
    assert_near((pipe.step(x, target, loss_fn=loss_fn).loss, grads_of(pipe)), plain(module, x, target, loss_fn))


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1)])
def test_class_probabilities_are_a_mean_over_rows(loss_fn):
    x, y = data(7)
    assert_near(stepped(model(), x, y.softmax(1), loss_fn), plain(model(), x, y.softmax(1), loss_fn))


@pytest.mark.parametrize("name", ["functional", "weights", "nll module", "nll partial"])
def test_labels_of_one_byte_are_labels_and_no_mask(name):
    # `weight[target]` with uint8 takes target for a mask; both sides of the comparison had the same wrong count.
    module, loss_fn = ALL_TOKEN_LOSSES[name]
    x, _ = data(7)
    target = classes(7).to(torch.uint8)
    pipe = Pipe(copy.deepcopy(module), [2, len(module) - 2], chunks=3)
    assert_near((pipe.step(x, target, loss_fn=loss_fn).loss, grads_of(pipe)), plain(module, x, target, loss_fn))


def test_where_no_token_counts_the_loss_is_nan_and_the_gradient_zero_as_in_torch():
    x, _ = data(6)
    target = torch.full((6,), -100)
    loss, grads = stepped(model(), x, target, F.cross_entropy)
    expected_loss, expected = plain(model(), x, target, F.cross_entropy)
    assert loss.isnan() and expected_loss.isnan()
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name]) and not grad.any()


def test_a_chunk_where_nothing_counts_adds_nothing():
    x, y = data(6)
    y[:2] = -1.0
    found = stepped(model(), x, y, masked)
    assert_same(found, loop(model(), x, y, masked, 3))
    assert_near(found, plain(model(), x, y, masked))


COUNTS = {
    "int": lambda n: int(n),
    "float": lambda n: float(n),
    "int64": lambda n: n,
    "float32": lambda n: n.float(),
    "bfloat16": lambda n: n.bfloat16(),
    "uint8": lambda n: n.to(torch.uint8),
    "one element": lambda n: n.reshape(1),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_counts_of_any_type_are_added_exactly(kind):
    # In bfloat16 200 + 201 is 400, in uint8 it is 145; a Python float became float32.
    x, y = data(7)

    def loss_fn(output, target):
        total = (output * target).sum()
        if len(output) > 3:  # the comparison of chunks; the plain module
            return total, {5: 401, 4: 400, 7: 601}[len(output)]
        return total, COUNTS[kind](torch.tensor({3: 201, 2: 200}[len(output)]))

    def by_hand(output, target):
        return (output * target).sum() / 601

    assert_near(stepped(model(), x, y, loss_fn), plain(model(), x, y, by_hand))


def test_gradients_do_not_depend_on_the_default_dtype():
    x, y = data(8)
    module = model()
    found = stepped(module, x, y, masked)
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = stepped(module, x, y, masked)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(again, found)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("loss_fn", [F.mse_loss, nn.MSELoss(reduction="sum"), masked])
def test_lower_precision_passes_the_comparison(dtype, tolerance, loss_fn):
    x, y = data(16, dtype)
    module = model(dtype)
    assert_near(stepped(module, x, y, loss_fn, 5), plain(module, x, y, loss_fn), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_losses_in_lower_precision(dtype):
    x, _ = data(16, dtype)
    target = classes(16, ignored=0.4)
    loss, grads = stepped(model(dtype), x, target, F.cross_entropy, 5)
    expected_loss, expected = plain(model(dtype), x, target, F.cross_entropy)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    assert_near((loss.to(dtype), grads), (expected_loss, expected), tolerance)


def test_sums_of_float16_tokens_do_not_overflow():
    # 2,000 tokens of a loss of about 50 are more than float16 holds, their mean is not.
    logits = torch.zeros(2000, CLASSES, dtype=torch.float16)
    logits[:, 0] = 50.0
    target = torch.ones(2000, dtype=torch.int64)
    pipe = Pipe(nn.Sequential(nn.Identity()), [1], chunks=1)
    assert pipe.evaluate(logits, target, loss_fn=F.cross_entropy).loss == 50.0
    x = logits.requires_grad_()
    pipe.step(x, target, loss_fn=F.cross_entropy)
    (expected,) = torch.autograd.grad(F.cross_entropy(x, target), x)
    torch.testing.assert_close(x.grad, expected, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_whose_rows_cancel_is_not_refused(dtype):
    # A policy gradient with normalised advantages: the loss is about 0, its terms are not.
    rows = 4096
    advantage = torch.randn(rows, 1, dtype=dtype)
    advantage = 100 * (advantage - advantage.mean()) / advantage.std()

    def policy(output, advantage):
        return -((output - output.detach()).exp() * advantage).mean()

    x, _ = data(rows, dtype)
    loss, grads = stepped(model(dtype, out=1), x, advantage, policy, 7)
    expected_loss, expected = plain(model(dtype, out=1), x, advantage, policy)
    tolerance = 1e-4 if dtype is torch.float32 else 1e-12
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=tolerance)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=tolerance)


# ---------------------------------------------------------------------------------------------------------- refusals

NEITHER = {
    "contrastive": contrastive,
    "root of a mean": rms,
    "max": lambda o, t: (o - t).abs().max(),
    "norm": lambda o, t: torch.norm(o - t),
    "variance": lambda o, t: (o - t).var(0).mean(),
    "sum taken for a mean": lambda o, t: ((o - t) ** 2).sum(),
    "tokens by hand": lambda o, t: ((o - t) ** 2 * (t > 0)).sum() / (t > 0).sum(),
    "draws random numbers": lambda o, t: (F.dropout(o, 0.5) * t).mean(),
}


@pytest.mark.parametrize("entry", ["step", "evaluate"])
@pytest.mark.parametrize("name", NEITHER)
def test_a_loss_that_is_neither_mean_nor_sum_is_refused_at_the_first_call(name, entry):
    x, y = data(7)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)).double()
    pipe = Pipe(module, [1, 2], chunks=2)
    pipe(x).sum().backward()  # so that .grad is something
    before = state_of(pipe)
    for _ in range(3):  # a refused call does not use the comparison up
        with pytest.raises(ValueError, match=r"is not a mean over rows.*\[4, 3\] rows.*Return \(sum, count\)"):
            getattr(pipe, entry)(x, y, loss_fn=NEITHER[name])
        assert_unchanged(pipe, before)
    assert pipe.training


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("function", [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.l1_loss])
def test_what_is_kept_of_a_loss_is_one_number(function, reduction):
    """Several of torch's losses are 0-d tensors in memory of the size of the output."""
    loss = Loss(partial(function, reduction=reduction), None, [4, 4])
    output, target = torch.rand(4, 256, requires_grad=True), torch.rand(4, 256)
    found, _ = loss.chunk(0, output, target)
    counted = Loss(lambda *both: (function(*both, reduction="sum"), output.numel()), None, [4, 4])
    total, _ = counted.chunk(0, output, target)
    memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in (found, total)]
    small = [tensor.untyped_storage().nbytes() <= 8 for tensor in (found, total)]
    del found, total
    assert [ref.expired() for ref in memory] == [not each for each in small]
    assert loss.value.item() == pytest.approx(
        function(output, target, reduction=reduction).item() * (0.5 if reduction == "mean" else 1.0)
    )


def test_a_mean_taken_for_a_sum_is_refused():
    x, y = data(6)
    with pytest.raises(ValueError, match="is not a sum over rows.*loss_reduction='mean'"):
        stepped(model(), x, y, lambda o, t: ((o - t) ** 2).mean(), loss_reduction="sum")


@pytest.mark.parametrize("number", [2, 4, 8])
def test_losses_number_1_2_4_8_are_compared(number):
    x, y = data(6)
    pipe = pipe_of(model())
    switch = [F.mse_loss]

    def switched(output, target):
        return switch[0](output, target)

    for _ in range(number - 1):
        pipe.step(x, y, loss_fn=switched)
    before = state_of(pipe)
    switch[0] = rms
    for _ in range(2):
        with pytest.raises(ValueError, match="switched is not a mean over rows"):
            pipe.step(x, y, loss_fn=switched)
        assert_unchanged(pipe, before)


def logged(read):
    """A mean that reads a number, to log it."""
    return lambda o, t: (read(nn.functional.mse_loss(o, t)), nn.functional.mse_loss(o, t))[1]


COMPARED = {
    "item": (logged(torch.Tensor.item), r"Python reads numbers there \(item\), .* Keep the tensor of what is logged"),
    "float": (logged(lambda loss: float(loss.detach())), r"Python reads numbers there \(__float__\)"),
    "if": (logged(bool), r"Python reads numbers there \(__bool__\)"),
    "kink": (lambda o, t: (nn.functional.mse_loss(o, t) + 1).abs(), "something else than sums and factors came behind"),
    "metric": (lambda o, t: (nn.functional.mse_loss(o, t), {"low": ((o < t).sum().item(), t.numel())}), r"\(item\)"),
}


@pytest.mark.parametrize("name", COMPARED)
def test_what_is_compared_in_every_step_is_said_once(name):
    pipe, (loss_fn, words) = pipe_of(model()), COMPARED[name]
    for number in range(1, 20):
        with pytest.warns(UserWarning, match=words) if number == 8 else nullcontext():
            pipe.step(*data(6, seed=number), loss_fn=loss_fn)


def test_a_loss_that_agrees_by_chance_at_first_is_caught_later():
    x, y = data(6)
    pipe = pipe_of(model())
    ones = torch.ones(6, CLASSES, dtype=torch.float64)

    def masked_mean(output, target):
        return (output**2 * target).sum() / target.sum()

    pipe.step(x, ones, loss_fn=masked_mean)  # while nothing is masked it is a mean
    mask = ones.clone()
    mask[4:, 1:] = 0
    with pytest.raises(ValueError, match="masked_mean is not a mean over rows"):
        pipe.step(x, mask, loss_fn=masked_mean)


def errors(output, target):
    return (output - target).square()


def flooding_in_python(output, target):
    mean = errors(output, target).mean()
    return mean if mean > 1 else 2 - mean


def flooding_by_an_item(output, target):
    mean = errors(output, target).mean()
    return mean if mean.item() > 1 else 2 - mean


def gated(output, target):
    mean = errors(output, target).mean()
    return mean * (mean.detach() > 1)


def through_a_view(output, target):
    filled = torch.zeros_like(output)
    filled[:, 0].copy_(output[:, 0] * (errors(output, target) > 1).double().mean())
    return errors(output, target).mean() + filled.square().mean()


# One function where all chunks are on one side of 1, another where some are on the other.
BENT = {
    "flooding": lambda o, t: (F.mse_loss(o, t) - 1).abs() + 1,
    "free bits": lambda o, t: errors(o, t).mean(0).clamp(min=1).sum(),
    "clamp of a mean of all dimensions": lambda o, t: errors(o, t).mean((-1, 0)).clamp(min=1),
    "hinge of a sum": lambda o, t: F.relu(errors(o, t).sum() / len(o) - CLASSES) + errors(o, t).mean(),
    "elu": lambda o, t: F.elu(errors(o, t).mean() - 1),
    "maximum": lambda o, t: torch.maximum(errors(o, t).mean(), torch.ones((), dtype=o.dtype)),
    "where": lambda o, t: torch.where(errors(o, t).mean() > 1, errors(o, t).mean(), 2 * errors(o, t).mean()),
    "in place": lambda o, t: errors(o, t).mean().clamp_(min=1),
    "einsum": lambda o, t: (torch.einsum("bd->d", errors(o, t)) / len(o)).clamp(min=1).sum(),
    "implicit einsum": lambda o, t: (torch.einsum("b, bd", torch.ones_like(o[:, 0]), errors(o, t)) / len(o)).relu().sub(
        1).abs().sum(),
    "product": lambda o, t: (torch.ones_like(o[:, 0]) @ errors(o, t) / len(o)).clamp(min=1).sum(),
    "running sum": lambda o, t: (errors(o, t).cumsum(0)[-1] / len(o)).clamp(min=1).sum(),
    "by class": lambda o, t: (o.new_zeros(1, CLASSES).index_add(
        0, torch.zeros(len(o), dtype=torch.int64), errors(o, t)) / len(o)).clamp(min=1).sum(),
    "by name": lambda o, t: torch.mean(input=errors(o, t), dim=0).clamp(min=1).sum(),
    "product by name": lambda o, t: (torch.mv(errors(o, t).T, vec=torch.ones_like(o[:, 0])) / len(o)).clamp(
        min=1).sum(),
    "by class by name": lambda o, t: (o.new_zeros(1, CLASSES).index_add(
        dim=0, index=torch.zeros(len(o), dtype=torch.int64), source=errors(o, t)) / len(o)).clamp(min=1).sum(),
    "of a pair": lambda o, t: ((errors(o, t).sum() - o.numel()).abs(), len(o)),
    "tokens": lambda o, t: F.cross_entropy(o * (errors(o, t) > 1).double().mean(0), t.argmax(1)),
    "through a view": through_a_view,
    "gated": gated, "in Python": flooding_in_python, "by an item": flooding_by_an_item,
}  # fmt: skip


@pytest.mark.parametrize("name", BENT)
def test_a_loss_with_a_kink_behind_a_mean_is_compared_in_every_step(name):
    x, y = data(12)
    far, near = y + 9, torch.cat([y[:6] * 0.1, y[6:] + 2])
    pipe = pipe_of(model(), chunks=4)
    for target in far, far:
        loss = pipe.step(x, target, loss_fn=BENT[name]).loss
        assert torch.allclose(loss, plain(pipe.to_sequential(), x, target, BENT[name])[0], rtol=1e-12)
    with pytest.raises(ValueError, match="is not a mean over rows|do not add up"):
        pipe.step(x, near, loss_fn=BENT[name])


def test_rows_along_the_second_dimension_are_rows_to_a_kink():
    x, y = data(12)
    far, near = y + 9, torch.cat([y[:6] * 0.1, y[6:] + 2])
    pipe = pipe_of(model(), chunks=4, batch_dim=1)

    def free_bits(output, target):
        return errors(output, target).mean(1).clamp(min=1).sum()

    for _ in range(2):
        pipe.step(torch.stack([x, x]), torch.stack([far, far]), loss_fn=free_bits)
    with pytest.raises(ValueError, match="free_bits is not a mean over rows"):
        pipe.step(torch.stack([x, x]), torch.stack([near, near]), loss_fn=free_bits)


FEATURES = torch.arange(0.1, 2.1, 0.2, dtype=torch.float64).view(CLASSES, 2)
BENT_BY_ROW = {
    "product": lambda o, t: (errors(o, t) @ FEATURES).clamp(min=1).mean(),
    "from the left": lambda o, t: (FEATURES.T @ errors(o, t).unsqueeze(2)).clamp(min=1).mean(),
    "einsum": lambda o, t: torch.einsum("...d,dk->...k", errors(o, t), FEATURES).clamp(min=1).mean(),
    "smaller of two": lambda o, t: torch.min(errors(o, t), 2 * t.abs()).mean(),
    "larger of two": lambda o, t: o.max(t).mean() + torch.max(input=o, other=t).mean(),
    "counts by name": lambda o, t: errors(o, t).mean() + 0 * torch.bincount(input=(t[:, 0] > 0).long()).sum(),
    "by a share of rows": lambda o, t: (errors(o, t).mean(1) * (t[:, 0].abs() > -1) / (t[:, 0].abs() > -1).sum()).sum(),
    "by shares": lambda o, t: (errors(o, t).mean(1) * ((t[:, 0] < 99).double() / (t[:, 0] < 99).sum())).sum(),
    "running sum": lambda o, t: errors(o, t).cumsum(1).clamp(min=1).mean(),
    "class by class": lambda o, t: torch.zeros_like(o).index_add(
        1, torch.tensor([0, 0, 2, 3, 3]), errors(o, t)).clamp(min=1).mean(),
    "likelihood": lambda o, t: -torch.distributions.Normal(o, o.detach().abs() + 0.1).log_prob(t).mean(),
    "divergence": lambda o, t: torch.distributions.kl_divergence(
        torch.distributions.Dirichlet(o.exp()), torch.distributions.Dirichlet(t.exp())).mean(),
    "entropy": lambda o, t: -torch.distributions.Categorical(logits=o).entropy().mean(),  # clamps at the least float
    "inner product": lambda o, t: torch.vdot((o - t).flatten(), (o - t).flatten()) / len(o),
}  # fmt: skip


@pytest.mark.parametrize("name", BENT_BY_ROW)
def test_a_kink_behind_a_sum_over_features_is_one_of_rows(name):
    """It is taken in a step over several mini-batches, where nothing is left to doubt."""
    x, y = data(12)
    pipe = pipe_of(model(), chunks=4)
    for _ in range(4):
        loss = pipe.step(iter([(x[:7], y[:7]), (x[7:], y[7:])]), loss_fn=BENT_BY_ROW[name]).loss
        assert torch.allclose(loss, plain(pipe.to_sequential(), x, y, BENT_BY_ROW[name])[0], rtol=1e-12)


@pytest.mark.parametrize("guard", [torch.nan_to_num, lambda mean: mean.clamp(max=1e6), partial(torch.clamp, max=9)])
def test_a_guard_behind_a_mean_is_taken(guard):
    x, y = data(12)
    pipe = pipe_of(model(), chunks=4)
    loss, grads = plain(model(), x, y, F.mse_loss)
    for _ in range(5):
        pipe.zero_grad()
        step = pipe.step(x, y, loss_fn=lambda output, target: guard(F.mse_loss(output, target)))
        assert torch.allclose(step.loss, loss, rtol=1e-12)
        for name, grad in grads_of(pipe).items():
            assert torch.allclose(grad, grads[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("first", [rms, contrastive])
@pytest.mark.parametrize("chunks, rows", [(1, 6), (4, 1)])
def test_one_chunk_takes_any_loss(first, chunks, rows):
    x, y = data(rows)
    assert_same(stepped(model(), x, y, first, chunks), plain(model(), x, y, first))


REFUSED = {
    "rows": (lambda o, t: ((o - t) ** 2).mean(1), ValueError, "returned a loss of shape .*Return one number"),
    "sum of rows": (lambda o, t: ((o - t).sum(1), 3), ValueError, "returned a sum of shape"),
    "three": (lambda o, t: (o.sum(), 1, 2), ValueError, "returned a tuple of 3"),
    "list": (lambda o, t: [o.sum(), 1], TypeError, "Return a floating-point tensor"),
    "number": (lambda o, t: 1.5, TypeError, "returned 1.5 as a loss"),
    "none": (lambda o, t: None, TypeError, "returned None as a loss"),
    "integers": (lambda o, t: (o > 0).sum(), TypeError, "floating-point tensor"),
    "count by row": (lambda o, t: (o.sum(), (t > 0).sum(1)), ValueError, "a count of shape"),
    "count none": (lambda o, t: (o.sum(), None), TypeError, "returned None as a count"),
    "count with gradient": (lambda o, t: (o.sum(), o.abs().sum()), ValueError, r"Return count.detach\(\)"),
    "sometimes": (
        lambda o, t: (o.sum(), 2) if len(o) == 2 else o.sum(), ValueError, r"\(sum, count\) for one chunk and a single"
    ),
    "sometimes not": (
        lambda o, t: (o.sum(), 2) if len(o) == 3 else o.sum(), ValueError, r"\(sum, count\) for one chunk and a single"
    ),
}


@pytest.mark.parametrize("entry", ["step", "evaluate"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_loss_is_refused_by_name(name, entry):
    loss_fn, error, words = REFUSED[name]
    if name == "count with gradient" and entry == "evaluate":
        pytest.skip("nothing has a gradient there")
    pipe = pipe_of(model())
    before = state_of(pipe)
    x, y = data(7)  # 3, 2 and 2 rows
    with pytest.raises(error, match=words):
        getattr(pipe, entry)(x, y, loss_fn=loss_fn)
    assert_unchanged(pipe, before)


def test_a_loss_per_row_is_refused_where_each_chunk_has_one_row():
    # A chunk of one row gives one number, which only several of them show to be one of many.
    x, y = data(3)
    with pytest.raises(ValueError, match=r"returned a loss of shape \[3\]. Return one number"):
        stepped(model(), x, y, lambda o, t: ((o - t) ** 2).mean(1))


@pytest.mark.parametrize(
    "loss_fn, reduction, error, words",
    [
        (nn.MSELoss(reduction="sum"), "mean", ValueError, "loss_reduction is 'mean' but MSELoss has reduction='sum'"),
        (nn.MSELoss(), "sum", ValueError, "loss_reduction is 'sum' but MSELoss has reduction='mean'"),
        (partial(F.mse_loss, reduction="sum"), "mean", ValueError, "mse_loss has reduction='sum'"),
        (nn.MSELoss(reduction="none"), None, ValueError, "reduction='none'. Use 'mean' or 'sum'"),
        (F.mse_loss, "median", ValueError, "loss_reduction is 'median'"),
        (F.mse_loss, ["sum"], ValueError, r"loss_reduction is \['sum'\]. Use 'mean' or 'sum'"),
        (masked, "sum", ValueError, r"loss_reduction is 'sum' but masked returned \(sum, count\)"),
        (3, None, TypeError, "loss_fn is 3, which is not callable"),
    ],
)
@pytest.mark.parametrize("entry", ["step", "evaluate"])
def test_reductions_that_contradict_are_refused(loss_fn, reduction, error, words, entry):
    x, y = data(6)
    with pytest.raises(error, match=words):
        getattr(pipe_of(model()), entry)(x, y, loss_fn=loss_fn, loss_reduction=reduction)


@pytest.mark.parametrize("loss_fn", [nn.KLDivLoss(reduction="batchmean"), nn.PoissonNLLLoss(), nn.HuberLoss()])
def test_a_reduction_that_is_a_mean_under_another_name_is_a_mean(loss_fn):
    x, y = data(7)
    assert_near(stepped(model(), x, y.softmax(1), loss_fn), plain(model(), x, y.softmax(1), loss_fn))


def test_a_frozen_model_is_refused_with_words():
    module = model().requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not depend on anything that requires grad.*Use pipe.evaluate"):
        stepped(module, *data(6), F.mse_loss)


def test_a_detached_loss_is_refused_with_words():
    with pytest.raises(RuntimeError, match="does not depend on anything that requires grad"):
        stepped(model(), *data(6), lambda o, t: F.mse_loss(o.detach(), t))


def test_without_gradients_step_names_evaluate():
    with torch.no_grad(), pytest.raises(RuntimeError, match="Use pipe.evaluate"):
        pipe_of(model()).step(*data(6), loss_fn=F.mse_loss)


@pytest.mark.parametrize("rows", [5, 7, 1])
@pytest.mark.parametrize("entry", ["step", "evaluate"])
def test_a_target_with_other_rows_is_refused(rows, entry):
    x, _ = data(6)
    with pytest.raises(ValueError, match=f"the target has {rows} rows but the input has 6"):
        getattr(pipe_of(model()), entry)(x, data(rows)[1], loss_fn=F.mse_loss)


def test_a_0d_target_is_refused_and_nochunk_is_the_remedy():
    x, _ = data(6)
    with pytest.raises(ValueError, match=r"0-d tensor, .* Wrap it: NoChunk\(tensor\)"):
        stepped(model(), x, torch.tensor(2.0), lambda o, t: (o * t).mean())
    found = stepped(model(), x, NoChunk(torch.tensor(2.0)), lambda o, t: (o * t).mean())
    assert_near(found, plain(model(), x, 2.0, lambda o, t: (o * t).mean()))


# --------------------------------------------------------------------------------------- what else a loss depends on


class Scaled(nn.Module):
    """A loss with a learnable temperature."""

    def __init__(self):
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, output, target):
        return (((output - target) * self.log_temperature.exp()) ** 2).mean()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_of_the_loss_get_their_gradient(schedule, checkpoint, frozen):
    x, y = data(7)
    module, loss_fn, reference = model().requires_grad_(not frozen), Scaled(), Scaled()
    expected = plain(module, x, y, reference)
    calls = []
    loss_fn.log_temperature.register_hook(lambda grad: calls.append(grad.clone()))
    found = stepped(module, x, y, loss_fn, options={"schedule": schedule, "checkpoint": checkpoint})
    assert_near(found, expected)
    torch.testing.assert_close(loss_fn.log_temperature.grad, reference.log_temperature.grad, rtol=1e-12, atol=0)
    assert len(calls) == 1 and torch.equal(calls[0], loss_fn.log_temperature.grad)  # once, on the whole gradient


def test_a_refused_step_leaves_the_losss_own_parameters_without_gradient():
    class Root(Scaled):
        def forward(self, output, target):
            return super().forward(output, target).sqrt()

    loss_fn = Root()
    with pytest.raises(ValueError, match="Root is not a mean"):
        stepped(model(), *data(7), loss_fn)
    assert loss_fn.log_temperature.grad is None


def test_a_temperature_computed_outside_serves_all_chunks():
    x, y = data(6)
    leaf, other = (torch.tensor(0.3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    temperature = leaf.exp()
    found = stepped(model(), x, y, lambda o, t: ((o - t) ** 2).mean() * temperature)
    assert_near(found, plain(model(), x, y, lambda o, t: ((o - t) ** 2).mean() * other.exp()))
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_loss_may_read_the_parameters_of_the_pipe(checkpoint):
    x, y = data(7)

    def penalised(owner):
        return lambda o, t: F.mse_loss(o, t) + 0.1 * sum((param**2).sum() for param in owner.parameters())

    pipe = pipe_of(model(), checkpoint=checkpoint)
    step = pipe.step(x, y, loss_fn=penalised(pipe))
    module = model()
    loss = penalised(module)(module(x), y)
    loss.backward()
    assert_near((step.loss, grads_of(pipe)), (loss.detach(), grads_of(module)))


def test_a_penalty_in_a_sum_would_count_once_per_chunk_and_is_refused():
    x, y = data(6)
    pipe = pipe_of(model())
    with pytest.raises(ValueError, match="is not a sum over rows"):
        pipe.step(x, y, loss_reduction="sum", loss_fn=lambda o, t: (o * t).sum() + (pipe[0].weight ** 2).sum())


def test_the_input_and_the_target_get_gradients_too():
    x, y = data(7)
    x.requires_grad_()
    y.requires_grad_()
    expected = torch.autograd.grad(F.mse_loss(model()(x), y) + 0.1 * (x**2).mean(), (x, y))

    def loss_fn(output, pair):  # reads the input a second time
        return F.mse_loss(output, pair[0]) + 0.1 * (pair[1] ** 2).mean()

    pipe_of(model()).step(x, (y, x), loss_fn=loss_fn)
    for leaf, grad in zip((x, y), expected, strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-12, atol=1e-15)


def test_what_made_input_and_target_is_trained_too():
    encoder, teacher = nn.Linear(4, 4).double(), nn.Linear(4, CLASSES).double()
    x, _ = data(7)
    loss = F.mse_loss(model()(encoder(x)), teacher(encoder(x)))
    params = [*encoder.parameters(), *teacher.parameters()]
    expected = torch.autograd.grad(loss, params)
    hidden = encoder(x)
    pipe_of(model()).step(hidden, teacher(hidden), loss_fn=F.mse_loss)
    for param, grad in zip(params, expected, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=1e-12, atol=1e-15)


class Stash(nn.Module):
    def forward(self, x):
        self.seen = x
        return x * 2


def test_a_loss_that_reads_an_activation_behind_the_pipes_back_is_refused():
    stash = Stash()
    module = nn.Sequential(nn.Linear(4, CLASSES).double(), stash, nn.Tanh())
    pipe = Pipe(module, [2, 1], chunks=2, checkpoint="never")
    before = state_of(pipe)
    with pytest.raises(RuntimeError, match="did not come through its arguments. Its gradient would be lost"):
        pipe.step(*data(6), loss_fn=lambda o, t: F.mse_loss(o, t) + (stash.seen**2).mean())
    assert_unchanged(pipe, before)


@pytest.mark.parametrize("chunks", [1, 3])
def test_dropout_in_the_loss_is_refused_or_right(chunks):
    x, y = data(6)
    module = nn.Sequential(nn.Linear(4, CLASSES).double())
    pipe = Pipe(module, [1], chunks=chunks)
    state = torch.get_rng_state()

    def loss_fn(output, target):
        return (F.dropout(output, 0.5) * target).mean()

    if chunks > 1:
        with pytest.raises(ValueError, match="A loss that draws random numbers"):
            pipe.step(x, y, loss_fn=loss_fn)
    else:
        loss = pipe.step(x, y, loss_fn=loss_fn).loss
        torch.set_rng_state(state)
        assert pipe.step(x, y, loss_fn=loss_fn).loss == loss  # repeats under a seed


# ------------------------------------------------------------------------------------------------ targets of any shape


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 2, dtype=torch.float64), nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x):
        return {"one": self.one(x), "two": (self.two(x), None, 3)}


@pytest.mark.parametrize("rows, chunks", [(7, 3), (2, 4), (4, 4)])
def test_outputs_and_targets_are_pytrees(rows, chunks):
    module = nn.Sequential(nn.Linear(4, 6).double(), nn.Tanh(), Heads())
    x, y = data(rows)
    scale = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)

    def loss_fn(output, target):
        assert target["plain"] == (2, "name", None) and output["two"][1:] == (None, 3)
        first = F.mse_loss(output["one"], target["list"][0])
        return first + (output["two"][0] * target["scale"]).mean() * target["plain"][0]

    def target(scale):
        return {"list": [y[:, :2]], "scale": scale, "plain": (2, "name", None)}

    pipe = Pipe(copy.deepcopy(module), [1, 1, 1], chunks=chunks)
    step = pipe.step(x, target(NoChunk(scale)), loss_fn=loss_fn, outputs=True)
    assert_near((step.loss, grads_of(pipe)), plain(module, x, target(scale), loss_fn))
    expected = module(x)
    torch.testing.assert_close(step.outputs["one"], expected["one"].detach(), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(step.outputs["two"][0], expected["two"][0].detach(), rtol=1e-12, atol=1e-15)
    assert step.outputs["two"][1:] == (None, 3)


@pytest.mark.parametrize("entry", ["step", "evaluate"])
def test_without_a_target_the_loss_gets_none(entry):
    def loss_fn(output, target):
        assert target is None
        return output.square().mean()

    pipe = pipe_of(model())
    x, _ = data(6)
    torch.testing.assert_close(getattr(pipe, entry)(x, loss_fn=loss_fn).loss, model()(x).square().mean().detach())


@pytest.mark.parametrize("target", [None, [0, 1, 0, 1]])
@pytest.mark.parametrize("entry", ["step", "evaluate"])
def test_a_token_loss_whose_target_is_no_tensor_is_refused_by_torch(entry, target):
    x, _ = data(4)
    with pytest.raises(TypeError, match="argument 'target' .* must be Tensor, not (NoneType|list)"):
        getattr(pipe_of(model()), entry)(x, target, loss_fn=F.cross_entropy)


@pytest.mark.parametrize("entry", ["step", "evaluate"])
def test_a_list_of_mini_batches_is_told_to_be_one_mini_batch(entry):
    pipe = pipe_of(model())
    batches = [data(4), data(6)]
    with pytest.raises((TypeError, ValueError)) as raised:
        getattr(pipe, entry)(batches, loss_fn=F.mse_loss)
    note = "x is a list, which is one mini-batch. If it holds several, (x, target), give iter(x)."
    assert raised.value.__notes__[-1] == note
    getattr(pipe, entry)(iter(batches), loss_fn=F.mse_loss)


def test_a_number_as_target_goes_to_every_chunk():
    x, _ = data(6)
    assert_near(
        stepped(model(), x, 2, lambda o, t: (o**t).mean()), plain(model(), x, 2, lambda o, t: (o**t).mean())
    )


def test_integer_targets_reach_the_loss_as_they_are():
    x, _ = data(6)
    seen = []

    def loss_fn(output, target):
        seen.append((target.dtype, target.tolist()))
        return F.cross_entropy(output, target)

    pipe_of(model()).step(x, torch.arange(6) % CLASSES, loss_fn=loss_fn)
    chunks = [target for target in seen if len(target[1]) == 2]  # the other are those of all chunks, compared
    assert chunks == [(torch.int64, [0, 1]), (torch.int64, [2, 3]), (torch.int64, [4, 0])]


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_step_outputs_are_the_joined_outputs_without_graph(chunks):
    x, y = data(7)
    step = pipe_of(model(), chunks).step(x, y, loss_fn=F.mse_loss, outputs=True)
    assert not step.outputs.requires_grad and step.outputs.shape == y.shape
    torch.testing.assert_close(step.outputs, model()(x).detach(), rtol=1e-12, atol=1e-15)
    assert pipe_of(model(), chunks).step(x, y, loss_fn=F.mse_loss).outputs is None


@pytest.mark.parametrize("number", [1, 3])
def test_nothing_of_a_step_is_alive_after_it(number):
    x, y = data(6)
    pipe = pipe_of(model())
    alive = []

    def loss_fn(output, target):
        alive.append(weakref.ref(output))
        return F.mse_loss(output, target)

    for _ in range(number - 1):
        pipe.step(x, y, loss_fn=loss_fn)
    gc.collect()
    gc.disable()
    try:
        pipe.step(x, y, loss_fn=loss_fn)
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()


# ----------------------------------------------------------------------------------------------------------- evaluate


def mixed():
    """Dropout, BatchNorm, and modules that are in eval mode already."""
    norms = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    module = nn.Sequential(nn.Linear(4, 6), norms[0], nn.Dropout(0.5), norms[1], nn.Linear(6, CLASSES))
    module[3].eval()
    return module.double()


def with_grads(pipe, x, y):
    pipe.step(x, y, loss_fn=F.mse_loss)
    return state_of(pipe), [module.training for module in pipe.modules()]


@pytest.mark.parametrize("loss_fn", [F.mse_loss, nn.L1Loss(reduction="sum"), masked])
@pytest.mark.parametrize("rows, chunks", [(7, 3), (2, 2), (8, 1)])
def test_evaluate_is_the_plain_module_in_eval_mode_and_changes_nothing(loss_fn, rows, chunks):
    x, y = data(rows)
    pipe = Pipe(mixed(), [2, 1, 2], chunks=1)
    before, flags = with_grads(pipe, *data(9))
    pipe.chunks = chunks
    reference = copy.deepcopy(nn.Sequential(*pipe)).eval()
    with torch.no_grad():
        loss = loss_fn(reference(x), y)
    for _ in range(2):
        step = pipe.evaluate(x, y, loss_fn=loss_fn)
        loss_expected = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        torch.testing.assert_close(step.loss, loss_expected, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(step.outputs, reference(x).detach(), rtol=1e-12, atol=1e-15)
        assert not step.outputs.requires_grad and not step.loss.requires_grad and step.grads is None
        assert_unchanged(pipe, before)
        assert [module.training for module in pipe.modules()] == flags
    assert pipe.evaluate(x, y, loss_fn=loss_fn, outputs=False).outputs is None


@pytest.mark.parametrize("where", ["loss", "layer", "target", "reduction", "input"])
def test_evaluate_restores_modes_and_buffers_under_exceptions(where):
    class Stop(KeyboardInterrupt):
        pass

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            if where == "layer" and self.calls > 7:
                raise Stop
            return x

    def loss_fn(output, target):
        if where == "loss" and output[0, 0] == marker[0, 0]:
            raise Stop
        return F.mse_loss(output, target)

    x, y = data(6)
    pipe = Pipe(nn.Sequential(*mixed(), Counting()), [2, 2, 2], chunks=1)
    before, flags = with_grads(pipe, x, y)
    pipe.chunks = 3
    marker = pipe.evaluate(x, y, loss_fn=F.mse_loss).outputs[4:]
    with torch.no_grad():
        pipe[5].calls.fill_(5.0)  # the third chunk is call 8
    before[0]["5.calls"].fill_(5.0)
    keywords = {"loss_fn": loss_fn, "loss_reduction": "median" if where == "reduction" else None}
    with pytest.raises((Stop, ValueError)):
        pipe.evaluate(x[:0] if where == "input" else x, y[:5] if where == "target" else y, **keywords)
    assert_unchanged(pipe, before)
    assert [module.training for module in pipe.modules()] == flags
    assert torch.is_grad_enabled()


def test_evaluate_under_no_grad_and_inference_mode():
    x, y = data(6)
    expected = F.mse_loss(model()(x), y).detach()
    with torch.no_grad():
        torch.testing.assert_close(pipe_of(model()).evaluate(x, y, loss_fn=F.mse_loss).loss, expected)
    pipe = pipe_of(model())
    with torch.inference_mode():
        torch.testing.assert_close(pipe.evaluate(x, y, loss_fn=F.mse_loss).loss, expected)
    pipe.step(x, y, loss_fn=F.mse_loss)  # still trains


# ------------------------------------------------------------------------------------ where the gradients of step go


def batches(count, rows=7):
    return [data(rows, seed=seed) for seed in range(count)]


def optimizers(params):
    return {
        "sgd": lambda: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
        "adamw": lambda: torch.optim.AdamW(params, lr=0.01),
    }


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", [None, 0.05, 1e6])
@pytest.mark.parametrize("to", ["optimizer", "store", "param"])
def test_where_gradients_go_does_not_change_the_training(name, clip, to):
    if to == "param" and clip is not None:
        pytest.skip("refused: see test_arguments_that_exclude_each_other_are_refused")
    module = model()
    optimizer = optimizers(list(module.parameters()))[name]()
    for x, y in batches(4):
        losses = []
        for x_i, y_i in zip(torch.tensor_split(x, 3), torch.tensor_split(y, 3), strict=True):
            loss = F.mse_loss(module(x_i), y_i) * (len(x_i) / len(x))
            loss.backward()
            losses.append(loss)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    pipe = pipe_of(model())
    optimizer = optimizers(list(pipe.parameters()))[name]()
    for x, y in batches(4):
        if to == "optimizer":
            step = pipe.step(x, y, loss_fn=F.mse_loss, optimizer=optimizer, clip_grad_norm=clip)
            assert step.grads is None
        elif to == "store":
            step = pipe.step(x, y, loss_fn=F.mse_loss, grads="store", clip_grad_norm=clip)
            assert isinstance(step.grads, GradStore) and len(step.grads) == 6
            assert all(param.grad is None for param in pipe.parameters())
            if clip == 0.05:
                torch.testing.assert_close(step.grads.norm().item(), 0.05, rtol=1e-4, atol=0)
            step.grads.apply(optimizer)
        else:
            pipe.step(x, y, loss_fn=F.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
        assert all(param.grad is None for param in pipe.parameters())
    for param, expected in zip(pipe.parameters(), module.parameters(), strict=True):
        assert torch.equal(param, expected)


def test_gradients_are_added_to_what_grad_holds():
    pipe, module = pipe_of(model()), model()
    for x, y in batches(3):
        pipe.step(x, y, loss_fn=F.mse_loss)
        F.mse_loss(module(x), y).backward()
    assert_near((torch.tensor(0.0), grads_of(pipe)), (torch.tensor(0.0), grads_of(module)))


def test_the_store_of_a_step_knows_names_and_leaves_grad_alone():
    pipe = pipe_of(model())
    (x, y), (again, target) = batches(2)
    _, expected = loop(model(), x, y, F.mse_loss, 3)
    pipe.step(again, target, loss_fn=F.mse_loss)
    before = state_of(pipe)
    store = pipe.step(x, y, loss_fn=F.mse_loss, grads="store").grads
    assert_unchanged(pipe, before)
    for name, param in pipe.named_parameters():
        assert torch.equal(store.get(name), expected[name]) and store.get(param) is store.get(name)
        assert store.get(name).data_ptr() != param.grad.data_ptr()
    with pytest.raises(KeyError, match="Did you mean '0.weight'"):
        store.get("0.weigth")


def test_stores_of_steps_merge_to_the_sum():
    pipe = pipe_of(model())
    stores = [pipe.step(x, y, loss_fn=F.mse_loss, grads="store").grads for x, y in batches(3)]
    total = GradStore(pipe)
    for store in stores:
        total.merge_(store)
    for x, y in batches(3):
        pipe.step(x, y, loss_fn=F.mse_loss)
    for name, param in pipe.named_parameters():
        torch.testing.assert_close(total.get(name), param.grad, rtol=1e-12, atol=1e-15)


def test_parameters_of_the_loss_are_in_the_store_too():
    loss_fn = Scaled()
    store = pipe_of(model()).step(*data(6), loss_fn=loss_fn, grads="store").grads
    assert len(store) == 7 and loss_fn.log_temperature in store and loss_fn.log_temperature.grad is None


@pytest.mark.parametrize("place", ["layer", "loss"])
def test_a_frozen_pipe_within_a_step_has_nothing_in_its_store(place):
    frozen = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), [1, 1], chunks=2).requires_grad_(False)
    module = nn.Sequential(nn.Linear(4, 4).double(), frozen if place == "layer" else nn.Tanh())
    judge, x = frozen if place == "loss" else nn.Identity(), torch.randn(6, 4).double()
    store = Pipe(module, [1, 1], chunks=3).step(x, x, loss_fn=lambda o, t: F.mse_loss(judge(o), t), grads="store").grads
    F.mse_loss(judge(module(x)), x).backward()
    torch.testing.assert_close(store.get("0.weight"), module[0].weight.grad, rtol=1e-12, atol=1e-15)
    module.zero_grad()
    store.apply(torch.optim.SGD(module[0].parameters(), lr=0.1))


def test_parameters_that_the_loss_does_not_reach_are_absent():
    module = nn.Sequential(nn.Linear(4, 6).double(), nn.Tanh(), Heads())
    pipe = Pipe(module, [1, 2], chunks=2)
    x, _ = data(6)
    store = pipe.step(x, loss_fn=lambda o, t: o["one"].mean(), grads="store").grads
    assert "2.one.weight" in store and "2.two.weight" not in store and store.get("2.two.weight") is None
    store.apply(torch.optim.AdamW(pipe.parameters(), lr=0.1, weight_decay=0.5))
    torch.testing.assert_close(pipe[2].two.weight, module[2].two.weight)


@pytest.mark.parametrize(
    "keywords, words",
    [
        ({"grads": "list"}, "grads is 'list'. Use 'param' or 'store'"),
        ({"clip_grad_norm": 1.0}, "clip_grad_norm without an optimizer"),
        ({"grads": "store", "optimizer": torch.optim.SGD}, r"Use store.apply\(optimizer\)"),
        ({"optimizer": torch.optim.LBFGS}, "write a closure around pipe.step"),
    ],
)
def test_arguments_that_exclude_each_other_are_refused(keywords, words):
    pipe = pipe_of(model())
    if "optimizer" in keywords:
        keywords = {**keywords, "optimizer": keywords["optimizer"](pipe.parameters(), lr=0.1)}
    with pytest.raises(ValueError, match=words):
        pipe.step(*data(6), loss_fn=F.mse_loss, **keywords)


@pytest.mark.parametrize("loss_fn", [F.mse_loss, masked, nn.MSELoss(reduction="sum")])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_scaler_scales_and_unscales(loss_fn, clip):
    # On the CPU a power of two: exact, so that training is the same to the last bit.
    trained = []
    for scaled in (False, True):
        pipe = pipe_of(model(torch.float32))
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        for seed in range(3):
            x, y = data(7, torch.float32, seed=seed)
            pipe.step(x, y, loss_fn=loss_fn, optimizer=optimizer, scaler=scaler, clip_grad_norm=clip)
        trained.append([param.detach().clone() for param in pipe.parameters()])
    for one, other in zip(*trained, strict=True):
        assert torch.equal(one, other)


def test_a_scaler_without_optimizer_leaves_scaled_gradients_for_the_user():
    x, y = data(7, torch.float32)
    pipe, scaler = pipe_of(model(torch.float32)), torch.amp.GradScaler("cpu", init_scale=256.0)
    loss = pipe.step(x, y, loss_fn=masked, scaler=scaler).loss
    expected_loss, expected = loop(model(torch.float32), x, y, masked, 3)
    assert torch.equal(loss, expected_loss)
    for name, grad in grads_of(pipe).items():
        assert torch.equal(grad, expected[name] * 256)


def test_an_overflow_under_a_scaler_skips_the_step():
    x, y = data(6, torch.float32)
    pipe = pipe_of(model(torch.float32))
    optimizer, scaler = torch.optim.SGD(pipe.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**20)
    before = state_of(pipe)
    pipe.step(x * float("inf"), y, loss_fn=F.mse_loss, optimizer=optimizer, scaler=scaler)
    assert_unchanged(pipe, before)
    assert scaler.get_scale() == 2.0**19


# ---------------------------------------------------------------------------------------------- known and not yet right


def advantages(output, reward):
    """A policy gradient that normalises its advantages: its value is 0 for any rows, its gradient is not."""
    advantage = (reward - reward.mean()) / reward.std()
    chances = output.log_softmax(1)
    return -((chances - chances.detach()).exp() * advantage).mean()


def relative(output, target):
    loss = F.mse_loss(output, target)
    return loss / loss.detach()  # 1 for any rows


@pytest.mark.parametrize("loss_fn", [advantages, relative])
def test_a_surrogate_whose_value_agrees_by_construction_is_refused_by_its_gradient(loss_fn):
    pipe = pipe_of(model())
    before = state_of(pipe)
    with pytest.raises(ValueError, match=f"{loss_fn.__name__} is not a mean over rows"):
        pipe.step(*data(7), loss_fn=loss_fn)
    assert_unchanged(pipe, before)


def test_a_loss_may_hook_its_output():
    def hooking(output, target):
        output.register_hook(lambda grad: grad * 2)
        return F.mse_loss(output, target)

    x, y = data(7)
    assert_near(stepped(model(), x, y, hooking), plain(model(), x, y, hooking))


def test_clipping_counts_all_parameters_that_the_optimizer_steps():
    x, y = data(7)
    trained = []
    for piped in (True, False):
        module, loss_fn = model(), Scaled()
        optimizer = torch.optim.SGD([*module.parameters(), *loss_fn.parameters()], lr=0.1)
        if piped:
            pipe_of(module).step(x, y, loss_fn=loss_fn, optimizer=optimizer, clip_grad_norm=0.05)
        else:
            loss_fn(module(x), y).backward()
            torch.nn.utils.clip_grad_norm_([*module.parameters(), *loss_fn.parameters()], 0.05)
            optimizer.step()
        trained.append([*module.parameters(), *loss_fn.parameters()])
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_each_loss_fn_is_compared_at_its_own_first_call():
    x, y = data(6)
    pipe = pipe_of(model())
    for _ in range(2):
        pipe.step(x, y, loss_fn=F.mse_loss)
    with pytest.raises(ValueError, match="rms is not a mean over rows"):
        pipe.evaluate(x, y, loss_fn=rms)  # loss number 3


def test_calls_of_one_chunk_do_not_use_the_comparison_up():
    x, y = data(6)
    pipe = pipe_of(model(), chunks=1)
    for _ in range(2):
        pipe.step(x, y, loss_fn=rms)
    pipe.chunks = 3
    with pytest.raises(ValueError, match="rms is not a mean over rows"):
        pipe.step(x, y, loss_fn=rms)


@pytest.mark.parametrize("name", ["step", "evaluate"])
def test_calls_on_the_flat_side_of_a_hinge_do_not_use_the_comparison_up(name):
    """Of rows beside each other there is no sum or mean to be seen: a contrastive loss is one while no pair counts."""
    x, y = data(6)
    pipe = pipe_of(model())

    def apart(output, target):
        distances = (output[:, None] - output[None]).square().sum(-1)
        return (distances - 0.01).relu().sum(1).mean()

    for _ in range(2):
        getattr(pipe, name)(x * 1e-3, y, loss_fn=apart)
    with pytest.raises(ValueError, match="apart is not a mean over rows"):
        pipe.step(x * 1e3, y, loss_fn=apart)


def test_calls_with_a_bad_target_do_not_use_the_comparison_up():
    x, y = data(6)
    pipe = pipe_of(model())
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape("the target has 5 rows")):
            pipe.step(x, y[:5], loss_fn=rms)
    with pytest.raises(ValueError, match="rms is not a mean over rows"):
        pipe.step(x, y, loss_fn=rms)


# --------------------------------------------------------------------------------------------- where a backward begins


def weighted(output, target):
    return (output.double() - target.double()).square().mean().to(output.dtype)


BEGINNINGS = {
    "mean": (weighted, None),
    "sum": (lambda output, target: (output - target).square().sum(), "sum"),
    "counted": (lambda output, target: ((output - target).square().sum(), (target > 0).sum()), None),
    "of shape [1]": (lambda output, target: (output - target).square().mean().reshape(1), None),
}


@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", BEGINNINGS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_gradient_that_begins_at_the_loss_has_the_bits_of_one_behind_a_multiplication(name, dtype, outputs):
    """Chunks of unlike sizes, whose weights no dtype holds exactly. The reference multiplies, divides at the end."""
    loss_fn, reduction = BEGINNINGS[name]
    x, y = data(7, dtype)
    module = model(dtype)
    reference = copy.deepcopy(module)
    sum_in_float32(reference.parameters())
    count = 0.0
    for x_i, y_i in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        value = loss_fn(reference(x_i), y_i)
        if isinstance(value, tuple):
            count = count + value[1].double()
            (value[0] * 0.125).backward()
        else:
            (value.reshape(()) * (1.0 if reduction else len(x_i) / 7)).backward()
    pipe = Pipe(module, [2, 1, 2], chunks=3)
    for _ in range(3):
        pipe.step(x, y, loss_fn=loss_fn, loss_reduction=reduction, outputs=outputs)
        for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            expected = theirs.grad / (count * 0.125) if isinstance(value, tuple) else theirs.grad
            if isinstance(value, tuple):
                near = 1e-2 if dtype.itemsize < 4 else 1e-6
                torch.testing.assert_close(mine.grad, expected.to(dtype), rtol=near, atol=1e-6)
            else:
                assert torch.equal(mine.grad, expected.to(dtype))
        pipe.zero_grad(set_to_none=True)


@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_loss_may_be_the_output_itself_or_a_leaf_of_its_own(checkpoint, outputs):
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()
    leaf = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    pipe = Pipe(module, [1, 1], chunks=3, checkpoint=checkpoint)
    x, _ = data(3)
    for _ in range(3):  # one row a chunk: the output is one number
        pipe.step(x, loss_fn=lambda out, _: out if out.numel() == 1 else out.mean(), outputs=outputs)
        grads = grads_of(module)
        pipe.zero_grad(set_to_none=True)
        module(x).mean().backward()
        for name, grad in grads_of(module).items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-12, atol=1e-14)
        pipe.zero_grad(set_to_none=True)
        leaf.grad = None
        pipe.step(x, loss_fn=lambda out, _: leaf, outputs=outputs)
        assert leaf.grad == 1.0


@pytest.mark.parametrize("outputs", [False, True])
def test_a_hook_that_writes_the_first_gradient_writes_that_of_its_chunk_only(outputs):
    module = model()
    x, y = data(6)

    def doubling(output, target):
        loss = (output - target).square().mean()
        if loss.requires_grad:
            loss.register_hook(lambda grad: grad.mul_(2) and None)
        return loss

    reference = copy.deepcopy(module)
    for x_i, y_i in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        (2 * (reference(x_i) - y_i).square().mean() / 3).backward()
    pipe = Pipe(module, [2, 1, 2], chunks=3)
    pipe.step(x, y, loss_fn=doubling, outputs=outputs)
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_a_leaf_that_a_loss_captures_in_a_late_chunk_of_a_late_step_counts():
    module, leaf, calls, wanted = model(), torch.tensor(0.5, dtype=torch.float64, requires_grad=True), [], [-1]

    def late(output, target):
        calls.append(1)
        value = (output * target).sum()
        return value * leaf if len(calls) == wanted[0] else value

    pipe = Pipe(module, [2, 1, 2], chunks=3)
    x, y = data(6)
    for step in range(3):
        calls.clear()
        wanted[:] = [3 if step == 2 else -1]
        pipe.step(x, y, loss_fn=late, loss_reduction="sum")
    expected = (module(x.tensor_split(3)[2]) * y.tensor_split(3)[2]).sum()
    torch.testing.assert_close(leaf.grad, expected.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("entry", ["forward", "step", "store"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precision_are_sums_of_float32_rounded_once(entry, schedule, captures, dtype):
    """Within 1e-6 of the float64 sum of the same contributions, before they are rounded. In halves: 1e-2."""
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    leaf = torch.ones(4, dtype=dtype, requires_grad=True)
    module.append(Captures(leaf) if captures else nn.Identity())
    x = torch.randn(128, 16).to(dtype)

    def loss_fn(output, _):
        return output.float().square().mean()

    exact = [torch.zeros(param.shape, dtype=torch.float64) for param in module.parameters()]
    for piece in x.split(2):
        grads = torch.autograd.grad(loss_fn(module(piece), None) / 64, list(module.parameters()))
        for total, grad in zip(exact, grads, strict=True):
            total += grad.double()
    pipe = Pipe(module, [1, 3], chunks=64, schedule=schedule)
    if entry == "store":
        store = pipe.step(x, loss_fn=loss_fn, grads="store").grads
        for param, total in zip(module.parameters(), exact, strict=True):
            found = store.get(param)
            assert found.dtype == torch.float32
            assert (found.double() - total).norm() <= 1e-6 * total.norm()
        store.assign("set")
    elif entry == "step":
        pipe.step(x, loss_fn=loss_fn)
    else:
        loss_fn(pipe(x), None).backward()
    for param, total in zip(module.parameters(), exact, strict=True):
        assert param.grad.dtype == dtype
        assert (param.grad.double() - total).norm() <= 2 * torch.finfo(dtype).eps * total.norm()


class Captures(nn.Module):
    """Computes with a tensor that is no parameter of its own."""

    def __init__(self, leaf):
        super().__init__()
        self.held = [leaf]

    def forward(self, x):
        return x * self.held[0]


class Leaves(nn.Module):
    """Rows whose first entry is negative leave early: a chunk that has one takes no gradient."""

    def forward(self, x):
        return x.detach() if (x.detach()[:, 0] < 0).any() else x


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("gone", [[0], [1], [3], [0, 2], [1, 2, 3]])
def test_chunks_whose_output_needs_no_gradient_are_no_reason_to_refuse_the_loss(gone, schedule, checkpoint):
    x, y = data(7)
    x[:, 0] = x[:, 0].abs()
    for chunk in gone:
        x.tensor_split(4)[chunk][-1, 0] *= -1
    module = nn.Sequential(nn.Linear(4, 4, bias=False).double(), Leaves(), Pair(), nn.Identity())
    nn.init.eye_(module[0].weight)

    def loss_fn(output, target):
        return F.mse_loss(output[0], target[:, :4]) + output[1].square().mean()

    reference = copy.deepcopy(module)
    for x_i, y_i in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        loss = loss_fn(reference(x_i), y_i) * (len(x_i) / 7)
        if loss.requires_grad:
            loss.backward()
    pipe = Pipe(module, [1, 2, 1], chunks=4, schedule=schedule, checkpoint=checkpoint)
    for _ in range(4):
        pipe.zero_grad(set_to_none=True)
        pipe.step(x, y, loss_fn=loss_fn)
        assert torch.equal(module[0].weight.grad, reference[0].weight.grad)
    with pytest.raises(ValueError, match="roots is not a mean over rows"):
        pipe.step(x, y, loss_fn=roots)


class Pair(nn.Module):
    def forward(self, x):
        return x * 2, x.sin()


def roots(output, _):
    return output[0].square().mean().sqrt() + 0.0 * output[1].mean()


@pytest.mark.parametrize("entry", ["step", "evaluate"])
def test_an_error_of_a_loss_that_cannot_take_a_chunk_says_of_how_many_rows_it_is(entry):
    """Rows in pairs: 10 of them are cut into 4, 3 and 3."""

    def of_pairs(output, target):
        return (output - target).view(-1, 2, CLASSES).diff(dim=1).square().mean()

    x, target = data(10)[0], torch.zeros(10, CLASSES, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"shape '\[-1, 2, ") as caught:
        getattr(pipe_of(model()), entry)(x, target, loss_fn=of_pairs)
    assert caught.value.__notes__[0] == "of_pairs, of 3 of the 10 rows"
