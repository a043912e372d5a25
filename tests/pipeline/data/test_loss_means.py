"""What a loss divides by: in every step the loss and the gradient of the whole mini-batch, or an error.

The reference is the plain module on the whole batch. Mini-batches number 3, 5 and 6 have counts that differ by chunk,
the first have not: these steps do not compare.
"""

import copy
import gc
import warnings
from decimal import Decimal
from fractions import Fraction
from functools import partial
from operator import length_hint

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from pipeline import EagerUpdate, Pipe
from pipeline.curvature import GaussNewton, Hessian
from pipeline.data.loss_key import LossCounts, key_of
from pipeline.data.loss_means import DivisorTrace
from pipeline.data.loss_proof import LossCount

CLASSES, LENGTH = 5, 3
WEIGHT = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0], dtype=torch.float64)


def language_model(dtype=torch.float64):
    torch.manual_seed(3)
    head = nn.Linear(6, LENGTH * CLASSES)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), head, nn.Unflatten(1, (LENGTH, CLASSES))).to(dtype)


def minibatch(number, rows, dtype=torch.float64):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(rows, 4, dtype=dtype, generator=generator)
    target = torch.randint(CLASSES, (rows, LENGTH), generator=generator)
    if number in (3, 5, 6):
        target[0] = -100
        target[1, 1:] = -100
    return x, target


def flat(output, target, **options):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), **options)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, output, target):
        return self.criterion(output.transpose(1, 2), target)


def added_in_place(output, target):
    loss = 0.0
    for power in (1, 2):
        loss += flat(output * power, target)
    loss /= 2
    return loss


def of_dicts(output, target):
    return {"loss": flat(output, target)}["loss"].squeeze().double()


EXACT = {
    "flattened": lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()),
    "by names": lambda o, t: F.cross_entropy(input=o.flatten(0, 1), target=t.flatten(), reduction="mean"),
    "module": Wrapped(),
    "class weights": lambda o, t: flat(o, t, weight=WEIGHT.to(o.dtype)),
    "nll": lambda o, t: F.nll_loss(o.log_softmax(-1).flatten(0, 1), t.flatten()),
    "shifted": lambda o, t: flat(o[:, :-1], t[:, 1:]),
    "temperature": lambda o, t: flat(o / 0.7, t),
    "a share": lambda o, t: flat(o, t) / 4,
    "negative": lambda o, t: -flat(o, t, label_smoothing=0.2),
    "two heads": lambda o, t: flat(o, t) + 0.5 * flat(o.sin(), t, ignore_index=-100),
    "in place": added_in_place,
    "sum of a list": lambda o, t: sum([flat(o, t), flat(2 * o, t)]),
    "casts": of_dicts,
    "checkpointed": lambda o, t: checkpoint(flat, o, t, use_reentrant=False),
    "partial": partial(lambda scale, o, t: scale * flat(o, t), 2.0),
    "own sum and count": lambda o, t: (flat(o, t, reduction="sum"), (t != -100).sum()),
    "old names": lambda o, t: flat(o, t, size_average=True),
    "over a tensor": lambda o, t: flat(o, t) / torch.tensor(4.0, dtype=o.dtype),
    "and a penalty": lambda o, t: flat(o, t) + 0.1 * LEARNED.square().sum(),
}
LEARNED = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)


def run(entry, pipe, x, target, loss_fn):
    """The loss by an entry point, and the gradients there are."""
    pipe.zero_grad()
    if entry == "evaluate":
        return pipe.evaluate(x, target, loss_fn=loss_fn).loss, None
    if entry == "eager":
        grads = {}
        update = EagerUpdate(lambda parameter, grad: grads.__setitem__(id(parameter), grad.clone()))
        loss = pipe.step(x, target, loss_fn=loss_fn, optimizer=update).loss
        return loss, [grads[id(parameter)] for parameter in pipe.parameters()]
    loss = pipe.step(x, target, loss_fn=loss_fn, outputs=entry == "outputs").loss
    return loss, [parameter.grad for parameter in pipe.parameters()]


def whole(module, x, target, loss_fn):
    module = copy.deepcopy(module)
    value = loss_fn(module(x), target)
    loss = value[0] / value[1] if isinstance(value, tuple) else value
    return loss.detach(), torch.autograd.grad(loss, list(module.parameters()))


def assert_near(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    for grad, wanted in zip(found[1] or (), expected[1], strict=bool(found[1])):
        torch.testing.assert_close(grad, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("entry", ["step", "outputs", "eager", "evaluate"])
@pytest.mark.parametrize("name", EXACT)
def test_a_mean_over_tokens_within_a_loss_is_exact_in_every_step(name, entry):
    module, loss_fn = language_model(), EXACT[name]
    pipe = Pipe(module, [1, 3], chunks=3)
    for number in (1, 2, 3):
        x, target = minibatch(number, 6 + number % 2)
        assert_near(run(entry, pipe, x, target, loss_fn), whole(module, x, target, loss_fn))


def masked(output, target):
    losses, mask = flat(output, target, reduction="none"), target.flatten() != -100
    return (losses * mask).sum() / mask.sum()


def selected(output, target):
    return chosen(output, target).mean()


def chosen(output, target):
    return flat(output, target, reduction="none")[target.flatten() != -100]


def constant(output, target):
    count = len(chosen(output, target))
    return torch.ones(count, dtype=output.dtype) / count


class Kept(torch.Tensor):
    """As of a library that keeps notes on its tensors."""


def unseen(output, target):
    """As of an extension, which calls no function of torch's Python."""
    with torch._C.DisableTorchFunction():
        return masked(output, target)


def by_item(output, target):
    return flat(output, target, reduction="sum") / max(1, (target != -100).sum().item())


def weighted(output, target):
    mask = (target.flatten() != -100).double()
    return (flat(output, target, reduction="none") * (mask / mask.sum())).sum()


def by_inverse(output, target):
    return flat(output, target, reduction="sum") * (1 / (target != -100).sum().double())


def without_nan(output, target):
    return flat(output, target, reduction="none").where(target.flatten() != -100, float("nan")).nanmean()


def counted(target):
    return int((target != -100).sum())


def shares(target):
    return (target.flatten() != -100).double()


def mean_of_squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class Opaque(torch.autograd.Function):
    """A fused cross entropy."""

    @staticmethod
    def forward(ctx, output, target):
        with torch.enable_grad():
            leaf = output.detach().requires_grad_()
            loss = flat(leaf, target)
            ctx.save_for_backward(torch.autograd.grad(loss, leaf)[0])
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecated, and still in use
    scripted, scripted_square = torch.jit.script(nn.CrossEntropyLoss()), torch.jit.script(mean_of_squares)
UNEVEN = {
    "masked": masked,
    "selected": selected,
    "by item": by_item,
    "weighted": weighted,
    "by inverse": by_inverse,
    "without nan": without_nan,
    "and more": lambda o, t: flat(o, t) + 0.1 * o.square().mean(),
    "two counts": lambda o, t: flat(o, t) + flat(o, t.clamp(min=0)),
    "positions": lambda o, t: F.mse_loss(o[t != -100], torch.ones_like(o[t != -100])),
    "a new tensor": lambda o, t: flat(o, t, reduction="sum") / torch.tensor(float(counted(t))),
    "a clamped one": lambda o, t: (flat(o, t, reduction="sum") / torch.as_tensor([counted(t)]).clamp(min=1)).sum(),
    "normalised": lambda o, t: (flat(o, t, reduction="none") * F.normalize(shares(t), p=1, dim=0)).sum(),
    "softmax": lambda o, t: (flat(o, t, reduction="none") * shares(t).log().softmax(0)).sum(),
    "numpy": lambda o, t: (flat(o, t, reduction="none") * torch.from_numpy(
        shares(t).numpy() / shares(t).numpy().sum())).sum(),
    "addcdiv": lambda o, t: torch.addcdiv(
        torch.zeros((), dtype=o.dtype), flat(o, t, reduction="sum"), shares(t).sum()),
    "scatter": lambda o, t: torch.zeros(2, dtype=o.dtype).scatter_reduce(
        0, (t != -100).long().flatten(), flat(o, t, reduction="none"), "mean", include_self=False)[1],
    "an operator": lambda o, t: torch.ops.aten.cross_entropy_loss(o.flatten(0, 1), t.flatten()),
    "fused": Opaque.apply,
    "scripted": lambda o, t: scripted(o.flatten(0, 1), t.flatten()),
    "and a scripted one": lambda o, t: o.square().mean() + scripted(o.flatten(0, 1), t.flatten()),
    "and a mapped one": lambda o, t: o.square().mean() + torch.vmap(masked)(o[None], t[None])[0],
    "and one of a subclass": lambda o, t: o.square().mean() + masked(o.as_subclass(Kept), t).as_subclass(torch.Tensor),
    "tokens and a scripted one": lambda o, t: flat(o, t) + scripted_square(o),
    "tokens and a mapped one": lambda o, t: flat(o, t) + torch.vmap(torch.square)(o).mean(),
    "and an unseen one": lambda o, t: o.square().mean() + unseen(o, t),
    "numpy's array": lambda o, t: (flat(o, t, reduction="none") * torch.tensor(
        numpy.asarray(shares(t)) / numpy.asarray(shares(t)).sum())).sum(),
    "by a constant": lambda o, t: (chosen(o, t) * constant(o, t)).sum(),
    "by what is filled": lambda o, t: chosen(o, t).dot(o.new_full((len(chosen(o, t)),), 1 / len(chosen(o, t)))),
    "by a list": lambda o, t: chosen(o, t).dot(
        torch.tensor([1 / len(chosen(o, t))] * len(chosen(o, t)), dtype=o.dtype)),
    "by what is added": lambda o, t: chosen(o, t).dot(
        torch.zeros(len(chosen(o, t)), dtype=o.dtype) + 1 / len(chosen(o, t))),
    "by a choice": lambda o, t: torch.where(t.flatten() != -100, 1 / len(chosen(o, t)), o.new_zeros(())).dot(
        flat(o, t, reduction="none")),
    "by a layer": lambda o, t: F.linear(chosen(o, t), constant(o, t)),
    "pooled": lambda o, t: F.adaptive_avg_pool1d(chosen(o, t)[None, None], 1).squeeze(),
    "of a pair": lambda o, t: torch.std_mean(chosen(o, t), correction=0)[1],
}


@pytest.mark.parametrize("entry", ["step", "eager", "evaluate"])
@pytest.mark.parametrize("name", UNEVEN)
def test_any_other_mean_is_right_where_it_is_even_and_refused_where_it_is_not(name, entry):
    module, loss_fn = language_model(), UNEVEN[name]
    pipe = Pipe(module, [1, 3], chunks=3)
    refused = []
    for number in range(1, 6):
        x, target = minibatch(number, 6)
        before = [parameter.detach().clone() for parameter in module.parameters()]
        try:
            found = run(entry, pipe, x, target, loss_fn)
        except ValueError as error:
            assert "is not a mean over rows" in str(error) and "Return (sum, count)" in str(error)
            refused.append(number)
            assert all(map(torch.equal, module.parameters(), before))
        else:
            assert_near(found, whole(module, x, target, loss_fn))
    assert refused == [3, 5]


EQUAL_COUNTS = {
    "positions": lambda o, t: F.l1_loss(o[t[:, 0] != -100], torch.ones_like(o[t[:, 0] != -100])),
    "tokens, by another function": lambda o, t: F.cross_entropy(o[:, 0], t[:, 0]).nan_to_num(0.0),
    "a mean by a mean": lambda o, t: (o[:, 0, 0] * (t[:, 0] != -100)).mean() / (t[:, 0] != -100).double().mean(),
    "a list": lambda o, t: torch.stack([F.cross_entropy(o[:, 0] * power, t[:, 0]) for power in (1, 2)]).sum(),
}


@pytest.mark.parametrize("rows_before", [7, 6])
@pytest.mark.parametrize("name", EQUAL_COUNTS)
def test_counts_that_are_the_same_in_chunks_of_unlike_rows_are_no_constant(name, rows_before):
    module, loss_fn = language_model(), EQUAL_COUNTS[name]
    pipe = Pipe(module, [1, 3], chunks=3)
    for number in (1, 2, 4, 7, 8):
        x, target = minibatch(number, rows_before)
        assert_near(run("step", pipe, x, target, loss_fn), whole(module, x, target, loss_fn))
    x, target = minibatch(9, 7)
    target[0] = -100  # chunks of 3, 2 and 2 rows, of which 2 count
    with pytest.raises(ValueError, match="is not a mean over rows"):
        run("step", pipe, x, target, loss_fn)


def per_row(output, target):
    losses, mask = flat(output, target, reduction="none").view(target.shape), target != -100
    return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def scaled_out(output, target):
    largest = output.detach().abs().max()  # that of the chunk; it cancels
    return (output / largest).square().mean() * largest * largest


def with_accuracy(output, target):
    accuracy = (output.argmax(-1) == target)[target != -100].double().mean()  # reported, not part of the loss
    with_accuracy.seen.append(accuracy)
    return per_row(output, target)


with_accuracy.seen = []
LEGAL = {
    "rows of unlike lengths": per_row,
    "a scale that cancels": scaled_out,
    "a metric beside": with_accuracy,
    "by rows": lambda o, t: o.square().sum() / len(o),
    "by one over rows": lambda o, t: o.square().sum() * (1 / o.shape[0]),
    "vmap": lambda o, t: torch.vmap(lambda row: row.logsumexp(-1).mean())(o).mean(),
    "probabilities": lambda o, t: F.cross_entropy(o.transpose(1, 2), o.detach().transpose(1, 2).softmax(1)) / LENGTH,
    "batchmean": lambda o, t: F.kl_div(o.log_softmax(-1), o.detach().softmax(-1), reduction="batchmean"),
    "a temperature": lambda o, t: (o.square().mean() * TEMPERATURE).sum(),
    "old names": lambda o, t: F.mse_loss(o, o.detach() + 1, size_average=True),
}
TEMPERATURE = torch.tensor(0.3, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("rows", [7, 3])
@pytest.mark.parametrize("entry", ["step", "evaluate"])
@pytest.mark.parametrize("name", LEGAL)
def test_means_over_rows_go_on_working_whatever_else_a_loss_divides_by(name, entry, rows):
    module, loss_fn = language_model(), LEGAL[name]
    pipe = Pipe(module, [1, 3], chunks=3)
    for number in (1, 2, 3):
        x, target = minibatch(number, rows)
        assert_near(run(entry, pipe, x, target, loss_fn), whole(module, x, target, loss_fn), 1e-10)


@pytest.mark.parametrize("name", ["bare", "flattened", "checkpointed"])
def test_where_no_token_of_a_chunk_or_of_any_counts_it_is_as_in_torch(name):
    loss_fn = EXACT.get(name, lambda o, t: F.cross_entropy(o.transpose(1, 2), t))
    module = language_model()
    pipe = Pipe(module, [1, 1, 2], chunks=3)
    for number in (1, 2, 3):
        x, target = minibatch(number, 6)
        target[2:4] = -100
        if number == 3:
            target[:] = -100
        loss, grads = run("step", pipe, x, target, loss_fn)
        expected, wanted = whole(module, x, target, loss_fn)
        assert loss.isnan() == expected.isnan() == (number == 3)
        assert_near((loss.nan_to_num(), grads), (expected.nan_to_num(), wanted))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_tokens_in_half_precision_stay_in_range(dtype):
    logits = torch.zeros(2000, 1, CLASSES, dtype=dtype)
    logits[..., 0] = 50.0
    target = torch.ones(2000, 1, dtype=torch.int64)
    pipe = Pipe(nn.Sequential(nn.Identity()), [1], chunks=2)
    x = logits.requires_grad_()
    assert pipe.step(x, target, loss_fn=EXACT["flattened"]).loss == 50.0
    exact = x.detach().double().requires_grad_()
    flat(exact, target).backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-2, atol=1e-6)


def test_a_mode_of_the_users_sees_its_calls_and_nothing_of_ours():
    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    names = []
    module = language_model()
    pipe = Pipe(module, [1, 1, 2], chunks=2)
    x, target = minibatch(3, 6)
    with Calls():
        loss = pipe.step(x, target, loss_fn=EXACT["flattened"]).loss
    torch.testing.assert_close(loss, whole(module, x, target, EXACT["flattened"])[0], rtol=1e-12, atol=0)
    assert names.count("cross_entropy") == 3 and "where" not in names and "ne" not in names


def test_a_trace_that_an_interrupt_left_behind_lets_calls_through_and_is_removed():
    logits, target = torch.randn(6, 5), torch.randint(5, (6,))
    seeing = DivisorTrace(6, [logits], [target], True)
    with seeing:
        pass
    torch._C._push_on_torch_function_stack(seeing)  # as an interrupt in its end leaves it
    try:
        loss = F.cross_entropy(logits, target)
        assert seeing.origin(loss) is None
        with DivisorTrace(6, [logits], [target], True):
            assert torch._C._len_torch_function_stack() == 1
    finally:
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()


@pytest.mark.parametrize("operator", [Hessian, GaussNewton])
def test_curvature_of_a_wrapped_mean_over_tokens_is_that_of_sum_and_count(operator):
    module = language_model()
    batches = [minibatch(3, 6), minibatch(5, 4)]
    own, wanted = (
        operator(Pipe(module, [1, 1, 2], chunks=chunks), batches, EXACT[name])
        for chunks, name in ((3, "flattened"), (1, "own sum and count"))
    )
    vector = torch.randn(wanted.shape[0], dtype=torch.float64)
    for _ in range(3):
        torch.testing.assert_close(own @ vector, wanted @ vector, rtol=1e-11, atol=1e-13)
    refused = operator(Pipe(module, [1, 1, 2], chunks=3), batches, masked)
    for _ in range(3):
        with pytest.raises(ValueError, match="masked is not a mean over rows"):
            refused @ vector


# ---------------------------------------------------------------------------------------------- who is compared when


class Crit:
    """Two losses of one class."""

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, output, target):
        loss = output.square().mean()
        return loss if self.kind == "mse" else loss.sqrt()

    def method(self, output, target):
        return self(output, target)


def made(kind):
    criterion = Crit(kind)
    return lambda output, target: criterion(output, target)


def raised(power, output, target):
    return output.square().mean().pow(power)


PAIRS = {
    "objects": lambda: (Crit("mse"), Crit("rmse")),
    "closures": lambda: (made("mse"), made("rmse")),
    "partials": lambda: (partial(raised, 1.0), partial(raised, 0.5)),
    "methods": lambda: (Crit("mse").method, Crit("rmse").method),
    "defaults": lambda: tuple((lambda o, t, power=power: raised(power, o, t)) for power in (1.0, 0.5)),
    "closures in closures": lambda: tuple(partial(made(kind)) for kind in ("mse", "rmse")),
}


@pytest.mark.parametrize("name", PAIRS)
def test_losses_of_one_code_have_a_comparison_each(name):
    good, bad = PAIRS[name]()
    pipe = Pipe(language_model(), [1, 1, 2], chunks=3)
    x, target = minibatch(1, 6)
    for _ in range(2):
        pipe.step(x, target, loss_fn=good)
    with pytest.raises(ValueError, match="is not a mean over rows"):
        pipe.step(x, target, loss_fn=bad)


def test_an_attribute_that_is_changed_makes_another_loss():
    criterion, pipe = Crit("mse"), Pipe(language_model(), [1, 1, 2], chunks=3)
    x, target = minibatch(1, 6)
    for _ in range(2):
        pipe.step(x, target, loss_fn=criterion)
    criterion.kind = "rmse"
    with pytest.raises(ValueError, match="Crit is not a mean over rows"):
        pipe.step(x, target, loss_fn=criterion)


IS_LATE = False


class Trainer:
    """A loss that gets another term when the warm-up is over, and counts its calls."""

    def __init__(self):
        self.is_late = False
        self.calls = 0
        self._all_calls = iter(range(1000))  # less those to come; also calls whose counts are put back

    @property
    def all_calls(self):
        return 1000 - length_hint(self._all_calls)

    def loss(self, output, target):
        self.calls += 1
        next(self._all_calls)
        loss = output.square().mean()
        return loss.sqrt() if self.is_late else loss

    @property
    def closure(self):
        return lambda output, target: self.loss(output, target)


def of_a_global(output, target):
    loss = output.square().mean()
    return loss.sqrt() if IS_LATE else loss


@pytest.mark.parametrize("name", ["loss", "closure"])
def test_a_plain_attribute_that_a_loss_may_read_makes_another_loss(name):
    trainer, pipe = Trainer(), Pipe(language_model(), [1, 1, 2], chunks=3)
    loss_fn = getattr(trainer, name)
    x, target = minibatch(1, 6)
    calls = []
    for _ in range(4):
        before = trainer.all_calls
        pipe.step(x, target, loss_fn=loss_fn)
        calls.append(trainer.all_calls - before)
    assert calls[2] == 3 < calls[0]  # a loss that counts its calls is not compared in each
    assert trainer.calls == 4 * 3
    trainer.is_late = True
    with pytest.raises(ValueError, match="is not a mean over rows"):
        pipe.step(x, target, loss_fn=loss_fn)


def test_a_plain_global_that_a_loss_reads_makes_another_loss(monkeypatch):
    pipe = Pipe(language_model(), [1, 1, 2], chunks=3)
    x, target = minibatch(1, 6)
    for _ in range(4):
        pipe.step(x, target, loss_fn=of_a_global)
    monkeypatch.setitem(globals(), "IS_LATE", True)
    with pytest.raises(ValueError, match="of_a_global is not a mean over rows"):
        pipe.step(x, target, loss_fn=of_a_global)


ANEW = {
    "lambda": lambda held: lambda o, t: held(o, t),
    "module": lambda held: nn.CrossEntropyLoss(label_smoothing=0.1),
    "object": lambda held: Crit("mse"),
    "partial": lambda held: partial(raised, 1.0),
    "method": lambda held: held.method,
    "closure": lambda held: made_of(held, {"scale": 2.0}, (1, "a")),
}


def made_of(*held):
    return lambda output, target: held[0](output, target)


@pytest.mark.parametrize("name", ANEW)
def test_a_loss_made_anew_from_the_same_in_every_step_is_the_same(name):
    held, counts = Crit("mse"), LossCounts()
    for number in range(5):
        assert number_of(counts, ANEW[name](held)) == number
        counts.of(ANEW[name](held))[None] = LossCount(number + 1)


def number_of(counts, loss_fn):
    return counts.of(loss_fn).get(None, LossCount()).number


def test_a_loss_made_anew_from_other_things_in_every_step_leaves_nothing_behind():
    counts, size = LossCounts(), []
    for number in range(300):
        loss_fn = partial(raised, torch.tensor(float(number)))  # an id may come again
        if number < 60:
            assert number_of(counts, loss_fn) == 0
        counts.of(loss_fn)[None] = LossCount(number_of(counts, loss_fn) + 1)
        size.append(sum(map(len, counts._counts.values())))
    assert size[-1] == size[100] < 70 and number_of(counts, partial(raised, torch.tensor(0.0))) > 200
    assert number_of(copy.deepcopy(counts), loss_fn) == 0


def test_what_a_key_holds_does_not_live_longer_for_it():
    held = [torch.zeros(3)]
    key = key_of(partial(raised, held[0]))
    assert key == key_of(partial(raised, held[0]))
    before = hash(key)
    held.clear()
    gc.collect()
    assert hash(key) == before and key == key and key != key_of(partial(raised, torch.zeros(3)))


@pytest.mark.parametrize("number", [
    numpy.float32, numpy.float64, numpy.int64, numpy.bool_, Fraction, Decimal, complex, lambda value: (value,) * 40,
])
def test_a_number_of_any_kind_that_a_loss_holds_counts_by_its_value(number):
    one, same, other = (key_of(partial(raised, number(value))) for value in (1, 1, 0))
    assert one == same != other


def test_a_function_that_holds_itself_has_a_key():
    def loop(output, target):
        return loop(output, target)

    assert key_of(loop) == key_of(loop)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gradient_that_is_rounding_is_no_disagreement(dtype):
    """A divergence from what the output is, as a penalty has at its beginning, has no other gradient."""
    for seed in range(20):
        torch.manual_seed(seed)
        module, x = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 50)).to(dtype), torch.randn(9, 6).to(dtype)
        penalty = lambda o, t: F.cross_entropy(o, o.detach().softmax(1))  # noqa: E731
        step = Pipe(module, [1, 1], chunks=4).step(x, loss_fn=penalty)
        torch.testing.assert_close(step.loss, penalty(module(x), None).detach(), rtol=2e-2, atol=0)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("constant", [0.0, 1e6])
@pytest.mark.parametrize("dtype, wrong", [(torch.float64, 1.001), (torch.float32, 1.01), (torch.bfloat16, 1.2)])
def test_gradients_that_differ_by_more_than_rounding_disagree_whatever_the_size_of_loss_and_output(
    dtype, wrong, constant, size
):
    class Twisted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * (wrong if len(grad) > 3 else 1.0)

    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5)).to(dtype)
    with torch.no_grad():
        module[1].weight.mul_(size)
        module[1].bias.mul_(size)

    def loss_fn(output, _):
        return F.cross_entropy(Twisted.apply(output), torch.ones(len(output)).long()) + constant

    with pytest.raises(ValueError, match="gradients do not combine"):
        Pipe(module, [1, 1], chunks=4).step(torch.randn(9, 6).to(dtype), loss_fn=loss_fn)
