"""Laws: a count that loss_fn returns is that of the whole, whatever is done to it; or it is refused, in whichever step.

The reference is the plain module on all rows at once.
"""

import pytest
import torch
from cover import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pipeline import Pipe

WIDE = 3
ALL = torch.ones(9, dtype=torch.int64)


def summed(output, mask):
    return (output.square().mean(1) * mask).sum()


SEEN = {
    "the sum": lambda o, m: (summed(o, m), m.sum()),
    "not none": lambda o, m: (summed(o, m), m.sum().clamp(min=1)),
    "not none, of floats": lambda o, m: (summed(o, m), m.double().sum().clamp(min=1.0).float()),
    "the larger": lambda o, m: (summed(o, m), torch.maximum(m.sum(), torch.ones((), dtype=m.dtype))),
    "the larger, the other way round": lambda o, m: (summed(o, m), torch.max(torch.tensor(1), m.sum())),
    "at least five": lambda o, m: (summed(o, m), torch.clamp(m.sum(), 5)),
    "at most four": lambda o, m: (summed(o, m), m.count_nonzero().clamp(1, 4)),
    "twice cut off": lambda o, m: (summed(o, m), m.sum().clamp(min=1).clamp(max=4) * 2),
    "read": lambda o, m: (summed(o, m), int(m.sum())),
    "by an item": lambda o, m: (summed(o, m), torch.tensor(m.sum().item())),
    "rows": lambda o, m: (summed(o, m), len(o)),
}  # fmt: skip


def guarded(output, mask):
    return (summed(output, mask), mask.sum()) if mask.any() else (output.sum() * 0, 1)


def guarded_by_a_count(output, mask):
    return summed(output, mask), mask.sum() if mask.sum() > 0 else 1


def written(output, mask):
    return summed(output, mask), mask.sum().clamp_(min=1)


UNSEEN = {
    "the larger in Python": lambda o, m: (summed(o, m), max(1, int(m.sum()))),
    "or one": lambda o, m: (summed(o, m), int(m.sum()) or 1),
    "as a tensor": lambda o, m: (summed(o, m), torch.tensor(max(1, m.sum().item()))),
    "where": lambda o, m: (summed(o, m), torch.where(m.sum() > 0, m.sum(), 1)),
    "an if": guarded, "another if": guarded_by_a_count, "in place": written,
    "of a mean": lambda o, m: summed(o, m) / m.sum().clamp(min=1),
}  # fmt: skip

BOUNDED = {
    "at most four in Python": lambda o, m: (summed(o, m), min(m.sum(), 4)),
    "at most four, read": lambda o, m: (summed(o, m), min(int(m.sum()), 4)),
    "at most four of those listed": lambda o, m: (summed(o, m), min(sum(m.tolist()), 4)),
    "half of the rows": lambda o, m: (summed(o, m), m.sum().clamp(min=len(o) // 2)),
    "at most half of the rows": lambda o, m: (summed(o, m), m.sum().clamp(max=(len(o) + 1) // 2)),
    "half of the rows, the larger": lambda o, m: (summed(o, m), torch.maximum(m.sum(), torch.tensor(len(o) // 2))),
    "of a mean, half of the rows": lambda o, m: summed(o, m) / m.sum().clamp(min=len(o) // 2),
    "of a mean, at most four": lambda o, m: summed(o, m) / min(m.sum(), 4),
    "of a mean in Python": lambda o, m: summed(o, m) / max(1, int(m.sum())),
    "of a mean with an if": lambda o, m: summed(o, m) / (m.sum() if m.sum() > 0 else 1),
}  # fmt: skip


def made(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDE, 4), nn.Tanh(), nn.Linear(4, WIDE)).double()
    return model, torch.randn(len(ALL), WIDE, dtype=torch.float64)


def plain(model, x, mask, loss_fn):
    loss = loss_fn(model(x), mask)
    loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    return loss, torch.autograd.grad(loss, list(model.parameters()))


masks = st.lists(st.integers(0, 1), min_size=9, max_size=9).map(torch.tensor)


def after(calls, chunks, loss_fn, mask=ALL):
    """A Pipe after some steps with a mask, and its input."""
    model, x = made(calls)
    pipe = Pipe(model, [2, 1], chunks)
    for _ in range(calls):
        pipe.step(x, mask, loss_fn=loss_fn)
    pipe.zero_grad()
    return pipe, model, x


@pytest.mark.parametrize("name", SEEN)
@settings(max_examples=examples(8))
@given(masks, st.integers(0, 3), st.integers(2, 5))
def test_a_count_that_is_cut_off_is_that_of_all_chunks(name, mask, calls, chunks):
    pipe, model, x = after(calls, chunks, SEEN[name])
    loss, grads = plain(model, x, mask, SEEN[name])
    if loss.isnan():
        return
    step = pipe.step(x, mask, loss_fn=SEEN[name])
    torch.testing.assert_close(step.loss, loss.detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close([p.grad for p in model.parameters()], [*grads], rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(pipe.evaluate(x, mask, loss_fn=SEEN[name]).loss, loss.detach(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", UNSEEN)
@settings(max_examples=examples(8))
@given(masks, st.integers(0, 3), st.integers(2, 5))
def test_a_count_of_python_is_refused_where_it_does_not_add_up(name, mask, calls, chunks):
    pipe, model, x = after(calls, chunks, UNSEEN[name])
    loss, grads = plain(model, x, mask, UNSEEN[name])
    is_mean = not isinstance(UNSEEN[name](model(x), mask), tuple)
    try:
        step = pipe.step(x, mask, loss_fn=UNSEEN[name])
    except ValueError as error:
        words = "is not a mean over rows" if is_mean else "Return as count how much the sum has of each chunk, 0 where"
        assert words in str(error) and (is_mean or not all(part.any() for part in mask.tensor_split(chunks)))
    else:
        torch.testing.assert_close(step.loss, loss.detach(), rtol=1e-7, atol=0)
        torch.testing.assert_close([p.grad for p in model.parameters()], [*grads], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=examples(20))
@given(masks, masks, st.integers(0, 3), st.integers(2, 5))
def test_a_bound_that_acts_on_the_whole_alone_is_refused(name, earlier, mask, calls, chunks):
    model, x = made(calls)
    loss, grads = plain(model, x, mask, BOUNDED[name])
    assume(mask.any() and earlier.any())
    try:
        pipe, model, x = after(calls, chunks, BOUNDED[name], earlier)
        step = pipe.step(x, mask, loss_fn=BOUNDED[name])
    except ValueError as error:
        assert "Return as count how much the sum has of each chunk" in str(error) or "mean over rows" in str(error)
    else:
        torch.testing.assert_close(step.loss, loss.detach(), rtol=1e-7, atol=0)
        torch.testing.assert_close([p.grad for p in model.parameters()], [*grads], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("mask", [[1, 1, 1, 0, 0, 0, 0, 1, 0], [0] * 9])
def test_so_is_the_count_of_a_metric(mask):
    def loss_fn(output, mask):
        return output.square().mean(), {"first": (output[:, 0].sum(), mask.sum().clamp(min=1))}

    pipe, model, x = after(2, 3, loss_fn)
    step = pipe.step(x, torch.tensor(mask), loss_fn=loss_fn)
    assert step.metrics["first"].item() == pytest.approx(model(x)[:, 0].sum().item() / max(1, sum(mask)))


def test_beside_other_mini_batches_a_count_stays_what_was_summed():
    model, x = made(0)
    parts = [(x[:4], torch.tensor([1, 0, 1, 0])), (x[4:], torch.zeros(5, dtype=torch.int64))]
    pipe, mask = Pipe(model, [2, 1], 2), torch.cat([target for _, target in parts])
    for loss_fn in SEEN["not none"], SEEN["at least five"]:
        wanted = plain(model, x, mask, loss_fn)[0].item()
        assert pipe.step(iter(parts), loss_fn=loss_fn).loss.item() == pytest.approx(wanted)
    wanted = plain(model, x, mask, SEEN["not none"])[0].item()
    assert pipe.evaluate(iter(parts), loss_fn=SEEN["not none"]).loss.item() == pytest.approx(wanted)
    with pytest.raises(ValueError, match="beside other mini-batches a count must stay what torch has summed"):
        pipe.evaluate(iter(parts), loss_fn=SEEN["at least five"])


PRODUCTS = {
    "of two means": lambda o, t: F.mse_loss(o, t) * o.abs().mean(),
    "of sums": lambda o, t: (o - t).square().sum() / len(o) * o.square().sum() / len(o),
    "in columns": lambda o, t: (o.mean(0) * t.mean(0) * o.mean(0)).sum(),
    "of vectors": lambda o, t: torch.dot(o.mean(0), o.mean(0)),
    "quotient": lambda o, t: (o - t).square().sum() / o.square().sum(),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_means_is_no_mean_beside_other_mini_batches(name):
    model, x = made(0)
    parts = [(x[:6], x[:6] + 1), (x[6:], x[6:] - 1)]
    with pytest.raises(ValueError, match="is not a mean over rows"):
        Pipe(model, [2, 1], 1).evaluate(iter(parts), loss_fn=PRODUCTS[name])


@pytest.mark.parametrize("chosen", [slice(None, None, 2), slice(2), slice(-2, None)])
def test_rows_that_are_chosen_by_their_place_are_compared_in_every_step(chosen):
    """Of chunks of two rows every second one is half of all; of chunks of three it is not."""
    model, _ = made(0)
    pipe = Pipe(model, [2, 1], 3)

    def loss_fn(output, target):
        return (output - target)[chosen].square().sum() / len(output)

    found = []
    for rows in (6, 6, 9, 6, 9):
        x = torch.randn(rows, WIDE).double()
        wanted = plain(model, x, x + 1, loss_fn)[0].item()
        try:
            found.append(pipe.step(x, x + 1, loss_fn=loss_fn).loss.item() == pytest.approx(wanted))
        except ValueError as error:
            assert "is not a mean over rows" in str(error)
    assert all(found) and len(found) < 5


MOVED = {
    "one by one": lambda o, t: sum([o[i] * t[i] for i in range(len(o))]).abs().sum() / len(o),
    "all of a loop": lambda o, t: sum(list(o * t)).abs().sum() / len(o),
    "by T": lambda o, t: (o * t).T.sum(1).abs().mean() / len(o),
    "by t": lambda o, t: (o * t).t().sum(1).abs().mean() / len(o),
    "transposed": lambda o, t: (o * t).transpose(0, 1).sum(-1).abs().mean() / len(o),
    "permuted": lambda o, t: (o * t).permute(1, 0).sum(1).abs().mean() / len(o),
    "the first row": lambda o, t: (o * t[0]).square().mean(),
    "behind dots": lambda o, t: (o * t[..., 0, :]).square().mean(),
    "the last row": lambda o, t: (o * t.select(0, -1)).square().mean(),
    "turned": lambda o, t: (o - t.flip(0)).square().mean(),
    "turned by name": lambda o, t: (o - t.flip(dims=(0,))).square().mean(),
    "rolled": lambda o, t: (o - t.roll(1, 0)).square().mean(),
    "each with each": lambda o, t: (o[:, None] * t[None]).sum(-1).square().mean(),
    "each with each by unsqueeze": lambda o, t: (o.unsqueeze(1) * t.unsqueeze(0)).sum(-1).square().mean(),
    "distances": lambda o, t: torch.cdist(o, 2 * t).square().mean(),
    "an outer product": lambda o, t: torch.outer(o[:, 0], t[:, 0]).square().mean(),
    "in pieces": lambda o, t: sum([piece.sum(0).abs().mean() for piece in (o * t).split(2)]) / len(o),
    "each with each by a view": lambda o, t: (o.view(1, -1, WIDE) * t.view(-1, 1, WIDE)).square().mean(),
    "each with each by reshape": lambda o, t: (o.reshape(len(o), 1, -1) * t.reshape(1, len(t), -1)).square().mean(),
    "as weights": lambda o, t: F.linear(o, t).square().mean(),
    "of weights": lambda o, t: F.linear(t, o).square().mean(),
    "keys": lambda o, t: F.scaled_dot_product_attention(o, t, o).square().mean(),
    "repeated": lambda o, t: (o.repeat_interleave(2, 0) * t.repeat(2, 1)).square().mean(),
    "tiled": lambda o, t: (o.tile(2, 1) * t.repeat_interleave(2, dim=0)).square().mean(),
    "turned by 90 degrees": lambda o, t: torch.rot90(o * t).sum(1).abs().mean() / len(o),
    "slopes": lambda o, t: torch.gradient(o * t, dim=0)[0].square().mean() + o.mean(),
    "cosines of columns": lambda o, t: F.cosine_similarity(o, t, dim=0).mean(),
    "normalized over rows": lambda o, t: (F.layer_norm(o * t, o.shape) + o).square().mean(),
    "batch norm": lambda o, t: (F.batch_norm(o * t, None, None, training=True) + o).square().mean(),
    "products of all": lambda o, t: torch.kron(o, t).square().mean(),
    "covariances": lambda o, t: torch.cov(o).square().mean(),
    "correlations": lambda o, t: torch.corrcoef(o - 2 * t).square().mean(),
    "pairs": lambda o, t: torch.cartesian_prod(o[:, 0], t[:, 1]).prod(1).square().mean(),
    "how many differ": lambda o, t: o.square().mean() * len(torch.unique(t[:, 0])),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_rows_that_are_moved_are_compared_in_every_step(name):
    """While all rows are alike such a loss is a mean over rows."""
    model, x = made(0)
    pipe, loss_fn, alike = Pipe(model, [2, 1], 3), MOVED[name], torch.ones_like(x)
    for _ in range(2):
        wanted = loss_fn(model(alike), alike).item()
        assert pipe.step(alike, alike, loss_fn=loss_fn).loss.item() == pytest.approx(wanted)
    with pytest.raises(ValueError, match="is not a mean over rows"):
        pipe.step(x, x, loss_fn=loss_fn)


PAIRED = {
    "over a mean": lambda o, t: (o.square().sum() / t[:, 0].mean(), len(o)),
    "times a mean": lambda o, t: (o.square().sum() * t.mean(), len(o)),
    "times means of columns": lambda o, t: ((o.square() * t.mean(0)).sum(), len(o)),
    "the largest": lambda o, t: ((o * t).cumsum(0).abs().sum() / len(o), len(o)),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRED)
def test_the_sum_of_a_pair_is_compared_where_what_it_divides_by_is_uneven(name):
    """While all targets are alike it adds up, or nearly."""
    model, x = made(0)
    pipe, loss_fn = Pipe(model, [2, 1], 3), PAIRED[name]
    for target in (torch.ones_like(x), torch.ones_like(x), x):
        total, count = loss_fn(model(x), target)
        try:
            assert pipe.step(x, target, loss_fn=loss_fn).loss.item() == pytest.approx(total.item() / count)
        except ValueError as error:
            assert "returned (sum, count) that do not add up" in str(error) and (target is x or name == "the largest")
        else:
            assert target is not x


def test_a_mean_beside_which_nothing_counts_is_refused():
    model, x = made(0)
    with pytest.raises(ValueError, match="that do not add up over the chunks: the losses of 3 chunks"):
        Pipe(model, [2, 1], 3).step(x, 0 * ALL, loss_fn=lambda o, m: (o.square().mean(), m.sum().clamp(min=1)))


def test_a_metric_of_whole_numbers_makes_no_comparison_coarser():
    model, x = made(0)

    def loss_fn(output, target):
        hits = (output.argmax(1) == target.argmax(1)).sum()
        return output.square().mean() + 1e-3 * output.std(), {"accuracy": (hits, len(output))}

    with pytest.raises(ValueError, match="is not a mean over rows"):
        Pipe(model, [2, 1], 3).evaluate(x, x, loss_fn=loss_fn)


HALF, UNEVEN = torch.full((WIDE,), 0.5).double(), torch.tensor([0.2, 0.5, 1.0]).double()
SUMS = {  # of two means over tokens that count differently
    "a constant weight first": lambda o, y: F.cross_entropy(o, y, weight=HALF) + F.cross_entropy(o, y),
    "a constant weight last": lambda o, y: F.cross_entropy(o, y) - 2 * F.cross_entropy(o, y, weight=HALF),
    "weights": lambda o, y: torch.add(F.cross_entropy(o, y), F.cross_entropy(o, y, weight=UNEVEN), alpha=0.2),
    "three": lambda o, y: sum([F.cross_entropy(o, y, ignore_index=label) for label in range(WIDE)]),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("chunks", [1, 2])
def test_means_over_tokens_that_count_differently_add_up_or_are_refused(name, chunks):
    model, x = made(0)
    x, labels = x[:8], torch.tensor([0, 1, 2, 2, 1, 1, 0, 2])
    pipe, wanted = Pipe(model, [2, 1], chunks), SUMS[name](model(x), labels)
    calls = {
        "step": lambda: pipe.step(x, labels, loss_fn=SUMS[name]),
        "steps": lambda: pipe.step(iter([(x, labels)]), loss_fn=SUMS[name]),
        "evaluate": lambda: pipe.evaluate(x, labels, loss_fn=SUMS[name]),
        "loader": lambda: pipe.evaluate(iter([(x, labels)]), loss_fn=SUMS[name]),
    }
    for call in calls.values():
        if chunks == 1 or "constant" in name:
            torch.testing.assert_close(call().loss, wanted.detach(), rtol=1e-12, atol=0)
        else:
            with pytest.raises(ValueError, match="is not a mean over rows"):
                call()


GUARDED = {  # with what its error tells to return instead
    "a mean over tokens": (
        lambda o, y: F.cross_entropy(o, y) if (y != -100).any() else 0 * o.sum(), F.cross_entropy),
    "a sum and a count": (
        lambda o, y: (F.cross_entropy(o, y, reduction="sum"), (y != -100).sum()) if (y != -100).any() else 0 * o.sum(),
        lambda o, y: (F.cross_entropy(o, y, reduction="sum"), (y != -100).sum())
        if (y != -100).any() else (0 * o.sum(), 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", GUARDED)
def test_a_guard_against_chunks_without_tokens_is_refused_and_the_remedy_works(name):
    model, x = made(0)
    labels = torch.tensor([-100] * 3 + [0, 1, 2] * 2)
    pipe, (guarded, remedy) = Pipe(model, [2, 1], 3), GUARDED[name]
    with pytest.raises(ValueError, match="a single loss for another. Return the same for every chunk"):
        pipe.step(x[:9], labels, loss_fn=guarded)
    wanted = F.cross_entropy(model(x[:9]), labels).detach()
    torch.testing.assert_close(pipe.step(x[:9], labels, loss_fn=remedy).loss, wanted, rtol=1e-12, atol=0)
