"""Laws of a step over several mini-batches: it is one over all their rows, whose chunks may differ in shape."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pipeline import EagerUpdate, NoChunk, Pipe
from scheduler import ScheduleError, by_name

PAD = -100


def classifier(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    middle = nn.BatchNorm1d(6) if norm else nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(4, 6), middle, nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 5)).double()


def data(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    target = torch.randint(5, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < 0.4] = PAD
    target[-1] = 2
    return torch.randn(rows, 4, dtype=torch.float64, generator=generator), target


def parts(rows: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    x, target = data(rows)
    return iter(list(zip(x.split(size), target.split(size), strict=True)))


def correct(output: Tensor, target: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    return {"accuracy": ((output.argmax(1) == target).sum(), (target != PAD).sum())}


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "tokens": F.cross_entropy,
    "rows": lambda o, t: o.square().mean(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "sum, count, metrics": lambda o, t: (F.cross_entropy(o, t, reduction="sum"), (t != PAD).sum(), correct(o, t)),
}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("rows, size", [(13, 1), (13, 4), (12, 6), (5, 9)])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_metrics_and_gradients_are_those_of_the_plain_module_on_all_rows(
    name: str, rows: int, size: int, chunks: int
) -> None:
    module, loss_fn, (x, target) = classifier().eval(), LOSSES[name], data(rows)
    plain = deepcopy(module)
    output = plain(x)
    value = loss_fn(output, target)
    loss = value[0] / value[1] if isinstance(value, tuple) else value
    loss.backward()
    pipe = Pipe(module, [2, 3], chunks=chunks)
    for call in range(3):  # the third does not compare
        pipe.zero_grad()
        step = pipe.step(parts(rows, size), loss_fn=loss_fn, outputs=True)
        torch.testing.assert_close(step.loss, loss.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(step.outputs, output.detach(), rtol=0, atol=1e-14)
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-14)
        accuracy = value[2]["accuracy"][0] / value[2]["accuracy"][1] if isinstance(value, tuple) else None
        assert step.metrics.get("accuracy") == accuracy


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("deferred", [False, True])
def test_with_dropout_and_batch_norm_the_bits_are_those_of_one_mini_batch_of_as_many_chunks(
    schedule: str, checkpoint: str, deferred: bool
) -> None:
    def trained(chunks: int, *given: Any) -> list[Tensor]:
        module = classifier(norm=True)
        settings = {"schedule": schedule, "checkpoint": checkpoint, "deferred_batch_norm": deferred}
        pipe = Pipe(module, [2, 2, 1], chunks=chunks, **settings)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for seed in range(3):
            torch.manual_seed(seed)
            these = (parts(12, 4),) if not given else given
            step = pipe.step(*these, loss_fn=F.cross_entropy, optimizer=optimizer, clip_grad_norm=0.5)
            losses += [step.loss, step.grad_norm, torch.get_rng_state()]
        return [*losses, *module.state_dict().values()]

    assert all(map(torch.equal, trained(2), trained(6, *data(12))))


class Words(nn.Module):
    """Tokens [rows, length] of a length of their own -> [rows, length, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        embedded = self.embedding(given["tokens"])
        return (embedded + embedded.mean(1, keepdim=True)) * given["scale"]


def sentences() -> list[tuple[dict[str, Any], Tensor]]:
    generator, made = torch.Generator().manual_seed(1), []
    for rows, length in [(4, 3), (2, 7), (3, 1), (3, 2)]:
        tokens = torch.randint(7, (rows, length), generator=generator)
        target = torch.randint(5, (rows, length), generator=generator)
        target[:, length // 2 + 1 :] = PAD
        x = {"tokens": tokens, "scale": NoChunk(torch.tensor(1.0 + len(made), dtype=torch.float64))}
        made.append((x, target))
    return made


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), target)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("to", ["param", "store", "optimizer", "eager"])
def test_mini_batches_of_sentences_of_other_lengths_are_one_mean_over_all_tokens(to: str, chunks: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Words(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    plain, pipe = deepcopy(module), Pipe(module, [2, 2], chunks=chunks)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (module, plain)]
    for _ in range(3):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for x, target in sentences():
            output = plain({"tokens": x["tokens"], "scale": x["scale"].value})
            total = total + F.cross_entropy(output.transpose(1, 2), target, reduction="sum")
            count += int((target != PAD).sum())
        optimizers[1].zero_grad()
        (total / count).backward()
        optimizers[1].step()
        given: dict[str, Any] = {"optimizer": {"optimizer": optimizers[0]}, "store": {"grads": "store"}}.get(to, {})
        if to == "eager":
            given = {"optimizer": EagerUpdate(optimizers[0])}
        step = pipe.step(iter(sentences()), loss_fn=token_loss, **given)
        if to == "store":
            step.grads.apply(optimizers[0])
        if to == "param":
            optimizers[0].step()
            optimizers[0].zero_grad()
        torch.testing.assert_close(step.loss, (total / count).detach(), rtol=1e-12, atol=0)
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=0, atol=1e-13)


def sentence_loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output.mean(1), target, reduction="sum"), len(target)


@pytest.mark.parametrize("chunks", [1, 2])
def test_outputs_of_other_lengths_whose_targets_could_be_joined_are_not_joined(chunks: int) -> None:
    """A loss of whole sentences: their outputs have the lengths of their mini-batches, their targets are one number."""
    torch.manual_seed(0)
    module = nn.Sequential(Words(), nn.Linear(5, 5)).double()
    plain, pipe = deepcopy(module), Pipe(module, [1, 1], chunks=chunks)
    given = [(x, target[:, 0] % 5) for x, target in sentences()]
    outputs = [plain({"tokens": x["tokens"], "scale": x["scale"].value}).mean(1) for x, _ in given]
    expected = F.cross_entropy(torch.cat(outputs), torch.cat([target for _, target in given]))
    expected.backward()
    for _ in range(3):
        pipe.zero_grad()
        step = pipe.step(iter(given), loss_fn=sentence_loss)
        torch.testing.assert_close(step.loss, expected.detach(), rtol=1e-12, atol=0)
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-13)


def test_a_mean_whose_weights_nothing_shows_is_refused() -> None:
    """A mean over rows and places is not in proportion to the rows where lengths differ."""
    pipe = Pipe(nn.Sequential(Words(), nn.Linear(5, 5)).double(), [1, 1], chunks=2)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"not a mean over rows: what it divides by .* Return \(sum, count\)"):
            pipe.step(iter(sentences()), loss_fn=lambda output, _: output.square().mean())
    assert all(parameter.grad is None for parameter in pipe.parameters())
    step = pipe.step(iter(sentences()), loss_fn=lambda out, _: (out.square().sum(), out.numel()))
    assert step.loss > 0


def test_a_loader_is_gone_through_once_and_its_last_mini_batch_may_be_smaller() -> None:
    module, (x, target) = classifier().eval(), data(11)
    loader = DataLoader(TensorDataset(x, target), batch_size=4)
    whole = Pipe(module, [5], chunks=2).evaluate(x, target, loss_fn=F.cross_entropy).loss
    step = Pipe(module, [3, 2], chunks=2).step(loader, loss_fn=F.cross_entropy, trace=True)
    torch.testing.assert_close(step.loss, whole, rtol=1e-12, atol=0)
    assert step.timeline is not None
    assert {event.action.chunk for event in step.timeline.events} == set(range(6))


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_schedules_that_ask_for_multiples_take_a_last_mini_batch_that_is_short(name: str) -> None:
    module, (x, target) = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Linear(4, 5)).double(), data(9)
    plain = deepcopy(module)
    pipe = Pipe(module, [1] * 4, chunks=4, schedule=by_name(name, 2, 12))
    F.cross_entropy(plain(x), target).backward()
    with pytest.warns(UserWarning, match="its order for the first 9 runs"):
        pipe.step(parts(9, 4), loss_fn=F.cross_entropy)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-14)


def test_a_schedule_made_for_one_mini_batch_is_refused_for_several() -> None:
    pipe = Pipe(classifier(), [2, 3], chunks=2, schedule=by_name("1f1b", 2, 2))
    with pytest.raises(ScheduleError, match="made for 2 chunks .* gives 4 .*Give a schedule by name"):
        pipe.step(parts(8, 4), loss_fn=F.cross_entropy)


@pytest.mark.probes
def test_uncut_mini_batches_may_mix_their_rows() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    module, (x, target) = nn.Sequential(nn.Linear(4, 4), Centred(), nn.Linear(4, 5)).double(), data(8)
    plain = deepcopy(module)
    losses = [F.cross_entropy(plain(own), of, reduction="sum") for own, of in zip(x.split(4), target.split(4))]
    (sum(losses) / (target != PAD).sum()).backward()
    Pipe(module, [1, 2], chunks=1).step(parts(8, 4), loss_fn=F.cross_entropy)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-14)
    for several in (parts(8, 4), reversed(list(parts(9, 8)))):  # the first of 1 row, the second of 8
        with pytest.raises(ValueError, match="mixes the rows"):
            Pipe(module, [1, 2], chunks=2).step(several, loss_fn=F.cross_entropy)


@pytest.mark.probes
@pytest.mark.parametrize("size", [1, 4])
def test_a_stage_that_reads_what_another_left_is_refused_where_mini_batches_are_uncut(size: int) -> None:
    left: dict[str, Tensor] = {}

    class Leave(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            left["x"] = x.detach()
            return x * 1

    class Read(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + left["x"]

    module = nn.Sequential(nn.Linear(4, 5), Leave(), nn.Linear(5, 5), Read()).double()
    pipe = Pipe(module, [2, 2], chunks=1, schedule="gpipe")
    with pytest.raises(RuntimeError, match="for the same input when other chunks have run before it"):
        pipe.step(parts(8, size), loss_fn=F.cross_entropy)


@pytest.mark.parametrize(
    "given, error, words",
    [
        ([], ValueError, "the loader gave no mini-batch"),
        ([torch.ones(2, 4)], ValueError, r"mini-batch 0 of the loader is a Tensor. Give pairs .*pipe\.step\("),
        ([data(4), ((data(3)[0], 1), data(3)[1])], ValueError, r"mini-batches of one step differ: x of mini-batch 0"),
        ([data(4), (data(3)[0], None)], ValueError, "the target of mini-batch 0 is .* that of mini-batch 1 is None"),
        ([data(4), (data(3)[0], data(5)[1])], ValueError, "the target of mini-batch 1 has 5 rows but the input has 3"),
        ([data(4), (data(3)[0][:0], data(3)[1][:0])], ValueError, "x of mini-batch 1 has 0 rows"),
        ([data(4), (data(3)[0].requires_grad_(), data(3)[1])], ValueError, "x of mini-batch 1 requires a gradient"),
    ],
)
def test_errors_name_the_mini_batch(given: list[Any], error: type[Exception], words: str) -> None:
    pipe = Pipe(classifier(), [2, 3], chunks=2)
    with pytest.raises(error, match=words):
        pipe.step(iter(given), loss_fn=F.cross_entropy)
    with pytest.raises(ValueError, match="a target was given beside a loader"):
        pipe.step(parts(4, 2), data(4)[1], loss_fn=F.cross_entropy)


OTHERS = [{1.0, 2.0}, np.ones((4, 4)), b"ab", object(), range(4), deque([1.0])]


@pytest.mark.parametrize("x", OTHERS, ids=[type(x).__name__ for x in OTHERS])
def test_what_is_neither_a_mini_batch_nor_a_loader_is_no_loader(x: Any) -> None:
    pipe = Pipe(classifier(), [2, 3], chunks=2)
    for entry in (pipe.step, pipe.evaluate):
        with pytest.raises((TypeError, ValueError), match="x holds a|nothing to cut") as caught:
            entry(x, data(4)[1], loss_fn=F.cross_entropy)
        assert "loader" not in str(caught.value)


def test_outputs_of_other_lengths_are_not_joined_and_the_step_does_not_take_place() -> None:
    pipe = Pipe(nn.Sequential(Words(), nn.Linear(5, 5)).double(), [1, 1], chunks=2)
    with pytest.raises(ValueError, match=r"cannot be joined: their shapes .* leave outputs=True out"):
        pipe.step(iter(sentences()), loss_fn=token_loss, outputs=True)
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_failure_in_the_second_mini_batch_leaves_buffers_and_gradients_as_they_were() -> None:
    module = classifier(norm=True)
    pipe = Pipe(module, [2, 3], chunks=2)

    def fails(output: Tensor, target: Tensor) -> Tensor:
        if (target == 4).any():
            raise KeyError("four")
        return F.cross_entropy(output, target, reduction="sum")

    state = [buffer.clone() for buffer in module.buffers()]
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(KeyError, match="four"):
        pipe.step(iter([(x, torch.zeros(4).long()), (x, torch.full((4,), 4))]), loss_fn=fails, loss_reduction="sum")
    assert all(map(torch.equal, state, module.buffers()))
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("entry", ["step", "evaluate"])
def test_a_loader_may_call_pipes_in_threads_of_its_own(entry: str) -> None:
    """As one does that reads ahead: the call that waits for it must not keep them waiting."""
    teacher, (x, y) = Pipe(classifier(), [2, 3], chunks=2), data(4)
    student = deepcopy(teacher)
    with ThreadPoolExecutor(1) as ahead:
        results = (ahead.submit(teacher.evaluate, x, y, loss_fn=F.cross_entropy) for _ in range(2))
        pairs = ((x, result.result(60).outputs) for result in results)
        assert getattr(student.eval(), entry)(pairs, loss_fn=F.mse_loss).loss == 0
