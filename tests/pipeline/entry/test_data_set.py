"""Laws of evaluations over a loader: they give what the plain module gives on all rows at once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pipeline import NoChunk, Pipe
from pipeline.curvature import Hessian

ROWS = 23


def classifier() -> nn.Sequential:
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(6)
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 5)).double()


def data() -> TensorDataset:
    target = torch.randint(5, (ROWS,))
    target[torch.rand(ROWS) < 0.4] = -100
    target[-1] = 2
    return TensorDataset(torch.randn(ROWS, 4, dtype=torch.float64), target)


def correct(output: Tensor, target: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    return {"accuracy": ((output.argmax(1) == target).sum(), (target != -100).sum())}


LOSSES = {
    "tokens": F.cross_entropy,
    "tokens, as a module": nn.CrossEntropyLoss(),
    "rows": lambda o, t: o.square().mean(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "sum and count": lambda o, t: (F.cross_entropy(o, t, reduction="sum"), (t != -100).sum()),
    "with metrics": lambda o, t: (F.cross_entropy(o, t), correct(o, t)),
    "all": lambda o, t: (F.cross_entropy(o, t, reduction="sum"), (t != -100).sum(), correct(o, t)),
    "likelihood": lambda o, t: -torch.distributions.Categorical(logits=o).log_prob(t.clamp(min=0)).mean(),
}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("size", [1, 4, 7, ROWS])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_and_the_metrics_are_those_of_all_rows_at_once(name: str, size: int, chunks: int) -> None:
    module, rows, loss_fn = classifier(), data(), LOSSES[name]
    pipe = Pipe(module, [2, 3], chunks=chunks)
    module.eval()
    with torch.no_grad():
        value = loss_fn(module(rows.tensors[0]), rows.tensors[1])
    module.train()
    metrics = value[-1] if isinstance(value, tuple) and isinstance(value[-1], dict) else {}
    parts = [part for part in (value if isinstance(value, tuple) else (value,)) if not isinstance(part, dict)]
    buffers = [buffer.clone() for buffer in module.buffers()]
    step = pipe.evaluate(DataLoader(rows, batch_size=size), loss_fn=loss_fn)
    torch.testing.assert_close(step.loss, parts[0] / parts[1] if len(parts) == 2 else parts[0], rtol=1e-12, atol=0)
    assert {key: found.item() for key, found in step.metrics.items()} == pytest.approx(
        {key: float(total) / float(count) for key, (total, count) in metrics.items()}
    )
    assert module.training and step.outputs is None and all(map(torch.equal, buffers, module.buffers()))


def test_any_iterable_of_pairs_is_a_loader_and_containers_are_mini_batches() -> None:
    pipe, rows = Pipe(classifier(), [5], chunks=2), data()
    expected = pipe.evaluate(DataLoader(rows, batch_size=5), loss_fn=F.cross_entropy).loss
    pairs = ((x, y) for x, y in DataLoader(rows, batch_size=5))
    assert pipe.evaluate(pairs, loss_fn=F.cross_entropy).loss == expected
    (x, y), first = rows.tensors, nn.Sequential(nn.Identity())
    lists = Pipe(first, [1]).evaluate([x, x], y, loss_fn=lambda out, target: sum(out).mean())
    torch.testing.assert_close(lists.loss, 2 * x.mean())


def test_mini_batches_that_count_nothing_change_nothing() -> None:
    pipe, x = Pipe(classifier(), [5], chunks=2), torch.randn(4, 4, dtype=torch.float64)
    pairs = [(x, torch.full((4,), -100)), (x, torch.arange(4)), (x, torch.full((4,), -100))]
    alone = pipe.evaluate(*pairs[1], loss_fn=F.cross_entropy).loss
    assert pipe.evaluate(iter(pairs), loss_fn=F.cross_entropy).loss == alone
    assert pipe.evaluate(iter(pairs[:1]), loss_fn=F.cross_entropy).loss.isnan()


def test_the_sum_of_a_mini_batch_that_counts_nothing_is_part_of_the_whole() -> None:
    pipe, (x, _) = Pipe(classifier(), [5], chunks=2), data().tensors
    mask = (torch.arange(ROWS) < 8).double()

    def loss_fn(output: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return (output.square().sum(1) * mask).sum() + 0.1 * output.square().sum(), mask.sum().long()

    step = pipe.evaluate(DataLoader(TensorDataset(x, mask), batch_size=4), loss_fn=loss_fn)
    torch.testing.assert_close(step.loss, pipe.evaluate(x, mask, loss_fn=loss_fn).loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bound", [{"min": 1}, {"min": 5}, {"max": 5}])
@pytest.mark.parametrize("least", [-1, 0.5, 2])
def test_what_loss_fn_makes_of_a_count_is_done_to_that_of_all_mini_batches(bound: dict[str, int], least: float) -> None:
    pipe, x = Pipe(classifier(), [5], chunks=2), data().tensors[0]
    chances = torch.linspace(0, 1, len(x), dtype=torch.float64)

    def loss_fn(output: Tensor, chances: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        mask = chances > least
        return output.square().mean(), {"first": ((output[:, 0] * mask).sum(), mask.sum().clamp(**bound))}

    of_all = pipe.evaluate(DataLoader(TensorDataset(x, chances), batch_size=6), loss_fn=loss_fn).metrics["first"]
    torch.testing.assert_close(of_all, pipe.evaluate(x, chances, loss_fn=loss_fn).metrics["first"], equal_nan=True)


def test_the_loss_of_mini_batches_that_count_nothing_is_that_of_one() -> None:
    pipe, x = Pipe(classifier(), [5], chunks=2), data().tensors[0]

    def loss_fn(output: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return (output.sum(1) * mask).sum(), mask.sum().clamp(min=1)

    assert pipe.evaluate(DataLoader(TensorDataset(x, x[:, 0] * 0), batch_size=6), loss_fn=loss_fn).loss == 0


def test_mini_batches_of_which_one_counts_and_another_does_not_are_refused() -> None:
    x = data().tensors[0]

    def loss(out: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return (out.sum(), torch.tensor(8)) if len(out) == 8 else out.sum()

    with pytest.raises(ValueError, match="of one mini-batch is combined by its count, that of another by its mean"):
        Pipe(classifier(), [5]).evaluate(iter([(x[:8], x[:8]), (x[8:11], x[8:11])]), loss_fn=loss)


def test_what_is_no_data_set_is_refused_in_words() -> None:
    pipe, (x, y) = Pipe(classifier(), [5], chunks=2), data().tensors
    cases = {
        "the loader gave no mini-batch": iter([]),
        r"mini-batch 1 of the loader is a dict. Give pairs \(x, target\)": iter([(x, y), {"x": x}]),
        "mini-batch 0 of the loader is a list of 3": iter([[x, y, y]]),
    }
    for words, loader in cases.items():
        with pytest.raises(ValueError, match=words):
            pipe.evaluate(loader, loss_fn=F.cross_entropy)
    with pytest.raises(ValueError, match="a target was given beside a loader"):
        pipe.evaluate(iter([(x, y)]), y, loss_fn=F.cross_entropy)
    with pytest.raises(ValueError, match="trace=True is for one mini-batch"):
        pipe.evaluate(iter([(x, y)]), loss_fn=F.cross_entropy, trace=True)
    named = iter(["one", "other"])
    with pytest.raises(ValueError, match=r"metrics \['one'\] for one mini-batch and \['other'\] for another"):
        pipe = Pipe(classifier(), [5])
        pipe.evaluate(iter([(x, y), (x, y)]), loss_fn=lambda o, t: (o.square().mean(), {next(named): (1, 2)}))


def test_a_loss_whose_weights_cannot_be_seen_is_refused_though_each_mini_batch_is_one_chunk() -> None:
    pipe, (x, _) = Pipe(classifier(), [5]), data().tensors
    for loss_fn in (lambda o, t: o.sum() / (t > 0).sum(), lambda o, t: o[t[:, 0] > 0].mean()):
        with pytest.raises(ValueError, match=r"Return \(sum, count\)"):
            pipe.evaluate(iter([(x, x), (x[:3], x[:3])]), loss_fn=loss_fn)


@pytest.mark.parametrize("loss_fn", [
    lambda o, t: o.square().sum() / 64, lambda o, t: o.square().max(), lambda o, t: o.flatten().logsumexp(0),
    lambda o, t: o.square().median(), lambda o, t: F.cross_entropy(o, t, reduction="sum"),
])  # fmt: skip
def test_a_loss_without_a_mean_over_rows_is_refused_beside_a_mini_batch_of_other_rows(loss_fn: Any) -> None:
    pipe, (x, y) = Pipe(classifier(), [5]), data().tensors
    assert pipe.evaluate(iter([(x, y)]), loss_fn=loss_fn).loss.isfinite()
    with pytest.raises(ValueError, match=r"Return \(sum, count\)"):
        pipe.evaluate(iter([(x, y), (x[:3], y[:3])]), loss_fn=loss_fn)


def test_a_loss_with_a_term_that_nobody_sees_is_refused_with_a_remedy_that_works() -> None:
    def mapped(o: Tensor, t: Tensor) -> Tensor:
        return o.square().mean() + torch.vmap(lambda row: row.abs().sum())(o).mean()

    pipe, (x, y) = Pipe(classifier(), [5], chunks=2), data().tensors
    both = [(x, y), (x[:3], y[:3])]
    with pytest.raises(ValueError, match=r"cannot be seen: a term is scripted, .* torch\.func.* Return \(sum, count\)"):
        pipe.evaluate(iter(both), loss_fn=mapped)
    found = pipe.evaluate(iter(both), loss_fn=lambda o, t: (mapped(o, t) * len(o), len(o))).loss
    outputs = pipe.evaluate(torch.cat([x, x[:3]]), torch.cat([y, y[:3]]), loss_fn=F.cross_entropy, outputs=True).outputs
    torch.testing.assert_close(found, mapped(outputs, y), rtol=1e-12, atol=0)


@pytest.mark.parametrize("is_pair", [False, True])
def test_a_loss_that_python_reads_to_log_it_is_refused_with_a_remedy_that_works(is_pair: bool) -> None:
    log: list[Any] = []

    def logged(o: Tensor, t: Tensor, keep: Any) -> Any:
        loss = o.square().mean()
        log.append(keep(loss))
        return (loss * o.numel(), o.numel()) if is_pair else loss

    pipe, (x, y) = Pipe(classifier(), [5], chunks=2), data().tensors
    with pytest.raises(ValueError, match=r"Python reads numbers there \(item\).* loss\.detach\(\)"):
        pipe.evaluate(iter([(x, y), (x[:3], y[:3])]), loss_fn=lambda o, t: logged(o, t, Tensor.item))
    both = [(x, y), (x[:3], y[:3])]
    found = pipe.evaluate(iter(both), loss_fn=lambda o, t: logged(o, t, Tensor.detach)).loss
    outputs = pipe.evaluate(torch.cat([x, x[:3]]), torch.cat([y, y[:3]]), loss_fn=F.cross_entropy, outputs=True).outputs
    torch.testing.assert_close(found, outputs.square().mean(), rtol=1e-12, atol=0)


def test_ctc_loss_has_a_mean_over_rows() -> None:
    torch.manual_seed(0)
    pipe = Pipe(nn.Sequential(nn.Linear(4, 5)).double(), [1])
    x, words = torch.randn(7, 9, 4).double(), torch.randint(1, 5, (7, 3))

    def ctc(output: Tensor, target: Tensor) -> Tensor:
        lengths = [torch.full((len(output),), length) for length in (output.shape[1], 3)]
        return F.ctc_loss(output.log_softmax(2).transpose(0, 1), target, *lengths)

    step = pipe.evaluate(iter([(x[:4], words[:4]), (x[4:], words[4:])]), loss_fn=ctc)
    torch.testing.assert_close(step.loss, ctc(pipe(x), words).detach())
    short = x[4:, :6]  # as a loader pads each mini-batch by itself
    wanted = (4 * ctc(pipe(x[:4]), words[:4]) + 3 * ctc(pipe(short), words[4:])).detach() / 7
    step = pipe.evaluate(iter([(x[:4], words[:4]), (short, words[4:])]), loss_fn=ctc)
    torch.testing.assert_close(step.loss, wanted)


@pytest.mark.parametrize("chunks", [1, 3])
def test_mini_batches_that_count_unlike_shares_of_their_rows_are_refused(chunks: int) -> None:
    pipe, x = Pipe(classifier(), [5], chunks), data().tensors[0][:6]
    mask = torch.tensor([1.0, 0.0] * 3)  # one of two rows in each chunk
    pairs = [(x, torch.ones(6)), (x, mask)]

    def masked(output: Tensor, target: Tensor) -> Tensor:
        return (output.square().flatten(1).mean(1) * target).sum() / target.sum()

    with pytest.raises(ValueError, match=r"masked is not a mean over rows.*Return \(sum, count\)"):
        pipe.evaluate(iter(pairs), loss_fn=masked)
    assert pipe.evaluate(iter(pairs[:1] * 2), loss_fn=masked).loss.isfinite()


BY_CHANCE = {  # as many entries in four rows as in two
    "a mask": lambda o, t: (o.square().mean(1) * (t >= 0)).sum() / (t >= 0).sum().clamp(min=1) + o.square().mean(),
    "ignored labels": lambda o, t: F.cross_entropy(o, t) + o.square().mean(),
    "chosen rows": lambda o, t: o[t >= 0].square().mean() + o.square().mean(),
}


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", BY_CHANCE)
def test_as_many_entries_of_fewer_rows_are_no_constant_of_the_loss(name: str, chunks: int) -> None:
    pipe, (x, _) = Pipe(classifier(), [5], chunks), data().tensors
    pairs = [(x[:4], torch.tensor([1, -100, 2, -100])), (x[4:6], torch.tensor([3, 0]))]
    with pytest.raises(ValueError, match=r"is not a mean over rows: what it divides by.*Return \(sum, count\)"):
        pipe.evaluate(iter(pairs), loss_fn=BY_CHANCE[name])
    with pytest.raises(ValueError, match=r"is not a mean over rows: what it divides by.*Return \(sum, count\)"):
        Hessian(pipe, pairs, BY_CHANCE[name]).loss()


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("loss_fn", [
    lambda o, t: o.square().mean() * 3.0 / t[1].mean(), lambda o, t: o.square().mean() * t[1][0],
    lambda o, t: o.square().mean(0).mean() / t[1].max(), lambda o, t: (o.square().sum(1) / t[1].sum()).mean(),
])  # fmt: skip
def test_constants_that_the_target_brings_are_the_same_for_all_rows(loss_fn: Any, chunks: int) -> None:
    pipe, (x, _) = Pipe(classifier(), [5], chunks), data().tensors
    table = torch.tensor([1.0, 3.0, 2.0, 2.5, 0.5, 1.5, 4.0])
    pairs = [(x[rows], (x[rows], NoChunk(table))) for rows in (slice(0, 6), slice(6, 10))]
    found = pipe.evaluate(iter(pairs), loss_fn=loss_fn).loss
    outputs = pipe.eval()(x[:10])
    torch.testing.assert_close(found, loss_fn(outputs, (x[:10], table)).detach(), rtol=1e-12, atol=0)
