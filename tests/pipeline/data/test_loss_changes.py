"""Losses that become others on the way: in every step the loss of the whole mini-batch, or an error in that step.

Steps 1, 2, 4, 8, ... compare anyway. These change in step 3, which does not.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline import Pipe

WIDTH, CLASSES, ROWS = 6, 5, 12
ARGS, TABLE, FACTOR = SimpleNamespace(epoch=0), {"epoch": 0}, torch.zeros((), dtype=torch.float64)


def module(dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).to(dtype)


def data(number, dtype=torch.float64):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS, WIDTH, dtype=dtype, generator=generator)
    return x, torch.randn(ROWS, CLASSES, dtype=dtype, generator=generator)


def contrast(output):
    """Every row against all others."""
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def by_helper():
    return ARGS.epoch >= 2


class OfTrainer:
    def __init__(self):
        self.trainer = SimpleNamespace(state=SimpleNamespace(epoch=0))

    def __call__(self, output, target):
        self.trainer.state.epoch = ARGS.epoch
        return F.mse_loss(output, target[0]) + (contrast(output) if self.trainer.state.epoch >= 2 else 0)


def centred(output, target):
    return (output - output.mean(0)).square().mean() if ARGS.epoch >= 2 else F.mse_loss(output, target[0])


def total(errors):
    return errors.sum() if ARGS.epoch >= 2 else errors.mean()


BECOME_WRONG = {
    "a global": lambda o, t: F.mse_loss(o, t[0]) + (contrast(o) if ARGS.epoch >= 2 else 0),
    "a dict": lambda o, t: F.mse_loss(o, t[0]) + (contrast(o) if TABLE["epoch"] >= 2 else 0),
    "in a helper": lambda o, t: F.mse_loss(o, t[0]) + (contrast(o) if by_helper() else 0),
    "of a trainer": OfTrainer(),
    "a ramp": lambda o, t: F.mse_loss(o, t[0]) + max(0, ARGS.epoch - 1) * contrast(o),
    "a ramp in the target": lambda o, t: F.mse_loss(o, t[0]) + t[1] * contrast(o),
    "a ramp in a tensor": lambda o, t: F.mse_loss(o, t[0]) + FACTOR * contrast(o),
    "another loss": centred,
    "a sum by its reduction": lambda o, t: F.mse_loss(o, t[0], reduction="sum" if ARGS.epoch >= 2 else "mean"),
    "a sum of sums": lambda o, t: total((o - t[0]).square().sum(1)),
    "a sum without its divisor": lambda o, t: o.square().sum() / len(o) if ARGS.epoch < 2 else o.square().sum(),
    "a sum over a constant": lambda o, t: o.square().sum() / (len(o) if ARGS.epoch < 2 else 2),
    "a factor less": lambda o, t: o.square().sum() / len(o) / 4 if ARGS.epoch < 2 else o.square().sum() / 8,
    "a mean along another dimension": lambda o, t: o.square().mean(int(ARGS.epoch >= 2)).sum(),
}
BECOME_OTHERS = {
    "another mean": lambda o, t: F.mse_loss(o, t[0]) + (F.l1_loss(o, t[0]) if ARGS.epoch >= 2 else 0),
    "a ramp": lambda o, t: F.mse_loss(o, t[0]) + max(0, ARGS.epoch - 1) * o.abs().mean(),
    "of each row": lambda o, t: sum([
        F.mse_loss(row, other) for row, other in zip(o, t[0], strict=True) for _ in range(ARGS.epoch + 1)
    ]) / len(o),
    "factors in another order": lambda o, t: (
        o.square().mean() * 2 if ARGS.epoch >= 2 else (o.square().mean(1) * t[0][:, 0].abs()).mean()),
}  # fmt: skip


def steps(loss_fn, entry, chunks):
    """Go through five mini-batches: the numbers of those that were refused; the loss of the others is the plain one."""
    plain = module()
    pipe = Pipe(copy.deepcopy(plain), [1, 2], chunks=chunks)
    refused = []
    for number in range(5):
        x, y = data(number)
        ARGS.epoch = TABLE["epoch"] = number
        FACTOR.fill_(number >= 2)
        target = y, float(number >= 2)
        run = pipe.step if entry == "step" else pipe.evaluate
        try:
            loss = run(x, target, loss_fn=loss_fn).loss
        except ValueError as error:
            assert "is not a mean over rows" in str(error)
            refused.append(number + 1)
        else:
            torch.testing.assert_close(loss, loss_fn(plain(x), target).detach(), rtol=1e-12, atol=0)
    return refused


@pytest.mark.parametrize("chunks", [4, 5])  # as many rows each, or not
@pytest.mark.parametrize("entry", ["step", "evaluate"])
@pytest.mark.parametrize("name", BECOME_WRONG)
def test_a_loss_that_becomes_no_mean_over_rows_is_refused_in_that_step(name, entry, chunks):
    assert steps(BECOME_WRONG[name], entry, chunks) == [3, 4, 5]


@pytest.mark.parametrize("chunks", [4, 5])
@pytest.mark.parametrize("entry", ["step", "evaluate"])
@pytest.mark.parametrize("name", BECOME_OTHERS)
def test_a_loss_that_becomes_another_mean_goes_on(name, entry, chunks):
    assert steps(BECOME_OTHERS[name], entry, chunks) == []


@pytest.mark.parametrize("every", [2, 3, 5, 6])
@pytest.mark.parametrize("first", [0, 1])
def test_a_term_that_comes_and_goes_is_that_of_the_mini_batch_or_refused(every, first):
    """In each step where its factor is not zero; one that looks at all rows is refused whenever it comes."""
    right, wrong = [
        lambda o, t: F.mse_loss(o, t[0]) + t[1] * o.abs().mean(), lambda o, t: F.mse_loss(o, t[0]) + t[1] * contrast(o),
    ]  # fmt: skip
    for loss_fn in (right, wrong):
        plain = module()
        pipe = Pipe(copy.deepcopy(plain), [1, 2], chunks=4)
        for number in range(first, first + 18):
            x, y = data(number)
            target = y, 0.3 * (number % every == 0)
            wanted = loss_fn(plain(x), target).detach()
            if loss_fn is wrong and target[1]:
                with pytest.raises(ValueError, match="is not a mean over rows"):
                    pipe.step(x, target, loss_fn=loss_fn)
            else:
                torch.testing.assert_close(pipe.step(x, target, loss_fn=loss_fn).loss, wanted, rtol=1e-12, atol=0)


def labels(number):
    """Of as many rows of each class, and complete; in step 3 not."""
    if number < 2:
        return torch.arange(3).repeat(4), torch.ones(ROWS, CLASSES, dtype=torch.float64)
    mask = torch.ones(ROWS, CLASSES, dtype=torch.float64)
    mask[0, 1:] = mask[5, 0] = 0
    return torch.tensor([0, 1, 2, 0, 0, 0, 0, 0, 1, 1, 2, 2]), mask


def of_classes(values, classes):
    return values.new_zeros(3).index_add(0, classes, values) / torch.bincount(classes, minlength=3).clamp(min=1)


SEVERAL = {
    "mean of each column": lambda o, t: ((o.square() * t[1]).sum(0) / t[1].sum(0).clamp(min=1)).mean(),
    "by einsum": lambda o, t: torch.einsum("bc,bc,c->", o.square(), t[1], 1 / t[1].sum(0).clamp(min=1)),
    "by a product": lambda o, t: (o.square() * t[1] @ (1 / t[1].sum(0).clamp(min=1))).sum(),
    "weights of classes": lambda o, t: F.cross_entropy(
        o[:, :3], t[0], weight=1 / torch.bincount(t[0], minlength=3).clamp(min=1).double()),
    "mean of each class": lambda o, t: of_classes(o.square().mean(1), t[0]).mean(),
    "by the largest": lambda o, t: (o.square() / (t[0][:, None] * t[1]).amax(0).clamp(min=1)).mean(),
    "by the count of each column": lambda o, t: ((o.square() * t[1]).sum(0) / t[1].count_nonzero(0)).mean(),
    "by the norm of each column": lambda o, t: (o.square() * (t[1] / t[1].norm(1, 0))).sum(),
    "by the vector norm of each column": lambda o, t: (
        o.square() * (t[1] / torch.linalg.vector_norm(t[1], 1, dim=0, keepdim=True))).sum(),
    "by a quantile of each column": lambda o, t: (o.square() * t[1].quantile(0.1, dim=0)).mean(),
    "above the mean": lambda o, t: (o.square() * (t[0] >= t[0].double().mean())[:, None]).mean(),
    "weights of mse_loss": lambda o, t: F.mse_loss(o, t[1], weight=t[1]),
    "weights of l1_loss": lambda o, t: F.l1_loss(o, t[1] / 2, weight=t[1]),
    "share of lerp": lambda o, t: torch.lerp(o.square().mean(), o.abs().mean(), t[1].mean()),
    "alpha of add": lambda o, t: torch.add(o.square().mean(), o.abs().mean(), alpha=t[1].mean().item()),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_what_weighs_by_sums_over_rows_is_refused_where_they_are_uneven(name):
    plain = module()
    pipe, refused = Pipe(copy.deepcopy(plain), [1, 2], chunks=4), []
    for number in range(4):
        x, target = data(number)[0], labels(number)
        try:
            loss = pipe.step(x, target, loss_fn=SEVERAL[name]).loss
        except ValueError as error:
            assert "is not a mean over rows" in str(error)
            refused.append(number + 1)
        else:
            torch.testing.assert_close(loss, SEVERAL[name](plain(x), target).detach(), rtol=1e-12, atol=0)
    assert refused == [3, 4]


def test_shares_of_rows_along_the_second_dimension_are_refused_where_they_are_uneven():
    def weighted(output, target):
        return (output.square().mean(2) * F.normalize(target, p=1, dim=1)).sum(1).mean()

    plain = module()
    pipe, refused = Pipe(copy.deepcopy(plain), [1, 2], chunks=4, batch_dim=1), []
    for number in range(4):
        x, shares = data(number)[0].expand(2, ROWS, WIDTH), torch.ones(2, ROWS, dtype=torch.float64)
        shares[:, :3] = float(number != 2)
        try:
            loss = pipe.step(x, shares, loss_fn=weighted).loss
        except ValueError as error:
            assert "is not a mean over rows" in str(error)
            refused.append(number + 1)
        else:
            torch.testing.assert_close(loss, weighted(plain(x), shares).detach(), rtol=1e-12, atol=0)
    assert refused == [3]


def test_weights_of_l1_loss_count_though_torch_hands_them_to_no_mode():
    def weighted(output, target):
        return F.l1_loss(output, target, weight=target.abs(), reduction="none").mean()

    plain = module()
    pipe = Pipe(copy.deepcopy(plain), [1, 2], chunks=4)
    for number in range(3):
        x, y = data(number)
        loss = pipe.step(x, y, loss_fn=weighted).loss
        torch.testing.assert_close(loss, weighted(plain(x), y).detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("choose", [
    lambda losses, count: losses.topk(count)[0], lambda losses, count: losses.sort(descending=True)[0][:count],
    lambda losses, count: losses[losses.argsort(descending=True)[:count]],
])  # fmt: skip
def test_a_choice_among_all_rows_is_compared_in_every_step(choose):
    def hardest(output, target):
        losses = (output - target).square().mean(1)
        return choose(losses, len(losses) // 3).mean()

    pipe = Pipe(module(), [1, 2], chunks=2)
    x, y = data(0)
    y = torch.cat([y[:6], y[:6]])
    x = torch.cat([x[:6], x[:6]])
    pipe.step(x, y, loss_fn=hardest), pipe.step(x, y, loss_fn=hardest)  # each half has the same hardest rows
    with pytest.raises(ValueError, match="hardest is not a mean over rows"):
        pipe.step(x, torch.cat([y[:6], y[:6] * 9]), loss_fn=hardest)


@pytest.mark.parametrize("first, then", [("sum", None), (None, "sum")])
def test_a_loss_of_another_reduction_counts_by_itself(first, then):
    def loss_fn(output, target):
        return F.mse_loss(output, target, reduction="mean" if first is None else "sum")

    pipe, (x, y) = Pipe(module(), [1, 2], chunks=4), data(0)
    for _ in range(2):
        pipe.step(x, y, loss_fn=loss_fn, loss_reduction=first)
    for run in pipe.step, pipe.evaluate:
        with pytest.raises(ValueError, match=f"loss_fn is not a {then or 'mean'} over rows"):
            run(x, y, loss_fn=loss_fn, loss_reduction=then)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mean_in_half_precision_may_be_returned_in_another(dtype):
    x, y = data(0, dtype)
    for loss_fn in (
        lambda o, t: F.mse_loss(o, t).float(), lambda o, t: (o - t).abs().mean().double(),
        lambda o, t: F.cross_entropy(o, t.argmax(1)).float(), lambda o, t: (F.mse_loss(o, t).float(), {"n": (1, 1)}),
    ):  # fmt: skip
        pipe = Pipe(module(dtype), [1, 2], chunks=3)
        for _ in range(3):
            assert pipe.step(x, y, loss_fn=loss_fn).loss.isfinite()
    with pytest.raises(ValueError, match="is not a mean over rows"):
        pipe.step(x, y, loss_fn=lambda o, t: (o - t).abs().sum().float())


def test_an_output_that_only_a_small_term_reads_is_compared_by_itself():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            return x, self.scores(x).softmax(1)

    def with_balance(output, target):
        return F.mse_loss(output[0], target) + 1e-6 * output[1].mean(0).square().sum()

    torch.manual_seed(0)
    pipe = Pipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Both()), [1, 1], chunks=3)
    with pytest.raises(ValueError, match="with_balance is not a mean over rows: .* their gradients do not combine"):
        pipe.step(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), loss_fn=with_balance)
