"""Law: what a loss counts and keeps is what it counts and keeps in a loop over the chunks, in every call."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from pipeline import EagerUpdate, Pipe


class Metric(nn.Module):
    """Counts, in a buffer, in attributes and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.rows, self.calls, self.mean, self.by_size = 0, [], torch.zeros(2, dtype=torch.float64), {}

    def update(self, output, target):
        self.total += len(output)
        self.rows += len(output)
        self.calls.append(len(target))
        self.mean = 0.9 * self.mean + 0.1 * output.detach().mean(0)
        self.by_size[len(output)] = self.by_size.get(len(output), 0) + 1

    @property
    def state(self):
        return self.total.item(), self.rows, list(self.calls), self.mean.tolist(), dict(self.by_size)


def mse(output, target):
    return nn.functional.mse_loss(output, target)


class LossModule(Metric):
    def forward(self, output, target):
        self.update(output, target)
        return mse(output, target)


class Trainer:
    """Not a module: it has one, and the Pipe."""

    def __init__(self, pipe) -> None:
        self.pipe, self.metric, self.seen = pipe, Metric(), 0

    def loss(self, output, target):
        self.metric.update(output, target)
        self.seen += len(output)
        return mse(output, target)


class CallableLoss(Metric):
    __call__ = LossModule.forward


METRIC = Metric()


def with_global(output, target):
    METRIC.update(output, target)
    return mse(output, target)


def in_closure(pipe):
    metric, count = Metric(), 0

    def loss_fn(output, target):
        nonlocal count
        metric.update(output, target)
        count += len(output)
        return mse(output, target)

    return loss_fn, lambda: (metric.state, count)


def of_partial(pipe):
    metric = Metric()

    def loss_fn(metric, output, target):
        metric.update(output, target)
        return mse(output, target), {"error": (output.detach().sum(), len(output))}

    return partial(loss_fn, metric), lambda: metric.state


def of_module(pipe):
    loss = LossModule()
    return loss, lambda: loss.state


def of_callable(pipe):
    loss = CallableLoss()
    return loss, lambda: loss.state


def of_trainer(pipe):
    trainer = Trainer(pipe)
    return trainer.loss, lambda: (trainer.metric.state, trainer.seen)


def of_global(pipe):
    METRIC.__init__()
    return with_global, lambda: METRIC.state


class Tracker:
    """No module either."""

    def __init__(self) -> None:
        self.rows, self.log = 0, []

    def update(self, rows):
        self.rows += rows
        self.log.append(rows)


TRACKER, HISTORY = Tracker(), []


def note(output):
    TRACKER.update(len(output))
    HISTORY.append(output.detach().sum().item())


def with_helper(output, target):
    note(output)
    return mse(output, target)


def of_helper(pipe):
    TRACKER.__init__()
    HISTORY.clear()
    return with_helper, lambda: (TRACKER.rows, list(TRACKER.log), list(HISTORY))


def of_no_module(pipe):
    """A function of a script that was executed as a text."""
    made = {"mse": mse, "history": []}
    exec("def loss_fn(output, target):\n    history.append(len(output))\n    return mse(output, target)", made)
    made["loss_fn"].__module__ = None
    return made["loss_fn"], lambda: list(made["history"])


class Confusion:
    """Counts in an array of numpy, and in a number of its class."""

    rows = 0

    def __init__(self) -> None:
        self.counts = np.zeros((2, 2), dtype=np.int64)
        Confusion.rows = 0

    def __call__(self, output, target):
        np.add.at(self.counts, (output.argmax(1).numpy(), target.argmax(1).numpy()), 1)
        Confusion.rows += len(output)
        return mse(output, target)


def of_array(pipe):
    loss = Confusion()
    return loss, lambda: (loss.counts.tolist(), Confusion.rows)


@dataclass(slots=True)
class Slots:
    """Attributes without a dict."""

    rows: int = 0
    log: list[int] = field(default_factory=list)

    def __call__(self, output, target):
        self.rows += len(output)
        self.log.append(len(output))
        return mse(output, target)


def of_slots(pipe):
    loss = Slots()
    return loss, lambda: (loss.rows, list(loss.log))


STEPS = 0


def with_number(output, target):
    global STEPS
    STEPS += 1
    return mse(output, target)


def of_default(pipe):
    """A list that is the default of an argument that goes by its name."""

    def loss_fn(output, target, *, rows=[]):
        rows.append(len(output))
        return mse(output, target)

    return loss_fn, lambda: list(loss_fn.__kwdefaults__["rows"])


def of_number(pipe):
    global STEPS
    STEPS = 0
    return with_number, lambda: STEPS


KINDS = (
    of_no_module, of_helper, in_closure, of_partial, of_module, of_callable, of_trainer, of_global, of_array, of_slots,
    of_number, of_default,
)  # fmt: skip


class DrawsLate(nn.Module):
    """Draws from the third mini-batch on. The call in which a stage draws for the first time runs twice."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.calls, self.quiet = 0, 2 * chunks

    def forward(self, x):
        self.calls += 1
        return x + 0 * torch.rand((), dtype=x.dtype) * random.random() if self.calls > self.quiet else x


def piped(chunks, schedule, **settings):
    model = nn.Sequential(nn.Linear(3, 3), DrawsLate(chunks), nn.Linear(3, 2)).double()
    return Pipe(model, [2, 1], chunks=chunks, schedule=schedule, **settings)


def eager(pipe, *args, **settings):
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.0)
    pipe.step(*args, **settings, optimizer=EagerUpdate(optimizer, clip="two_pass", max_norm=1.0))


ENTRIES = {"step": Pipe.step, "evaluate": Pipe.evaluate, "eager": eager}


@pytest.mark.parametrize("workers", ["inline", "threads"])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.* is compared with the loss of the joined outputs in every step")
def test_a_loss_counts_as_in_a_loop_over_the_chunks(kind, chunks, schedule, entry, workers):
    pipe = piped(chunks, schedule, workers=workers, devices=["cpu"] * 2)
    loss_fn, state = kind(pipe)
    x, y = torch.rand(6, 3, dtype=torch.float64), torch.rand(6, 2, dtype=torch.float64)
    states = []
    for _ in range(5):
        ENTRIES[entry](pipe, x, y, loss_fn=loss_fn)
        states.append(state())
    loss_fn, state = kind(pipe)
    for found in states:
        for part, target in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
            loss_fn(pipe.to_sequential()(part), target)
        assert found == state()


class Weighted(nn.Module):
    """A loss whose graph saves a buffer, or an attribute, that each call writes in place."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(2, dtype=torch.float64))
        self.kept, self.attribute = kept, torch.ones(2, dtype=torch.float64)

    def forward(self, output, target):
        weight = self.weight if self.kept == "buffer" else self.attribute
        weight.mul_(1.0)
        return mse(output * weight, target)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kept", ["buffer", "attribute"])
def test_what_the_graph_of_a_loss_has_saved_is_put_back_when_it_is_differentiated(kept, entry):
    pipe, loss_fn = piped(2, "1f1b"), Weighted(kept)
    x, y = torch.rand(6, 3, dtype=torch.float64), torch.rand(6, 2, dtype=torch.float64)
    for _ in range(3):
        ENTRIES[entry](pipe, x, y, loss_fn=loss_fn)
