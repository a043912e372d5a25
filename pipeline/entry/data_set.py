"""An evaluation of a data set: the mini-batches of a loader, one after the other, and their losses as one.

    "mean"         loss = sum_b loss_b * rows_b / sum_b rows_b
    "sum"          loss = sum_b loss_b
    (sum, count)   loss = sum_b loss_b * count_b / sum_b count_b            metrics: sum of sums / sum of counts

Each mini-batch is a call, and so is the end: over ranks a loader that fails, or ends sooner, fails on all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pipeline.common.call_lock import turn
from pipeline.common.torch_modes import without_function_modes
from pipeline.data.loss import Loss
from pipeline.data.metrics import divided_sum
from pipeline.distributed.agreement import MINI_BATCHES
from pipeline.entry import entry_points
from pipeline.entry.minibatches import pairs
from pipeline.entry.runtime import Runtime
from pipeline.entry.sinks import LossSink
from pipeline.entry.step import LossArguments, Step

RULES = ("mean", "sum", "count")


def evaluate(runtime: Runtime, loader: Iterable[Any], arguments: LossArguments) -> Step:
    """The loss and the metrics of all mini-batches of a loader, in eval mode, without gradients.

    Args:
        runtime: of the Pipe.
        loader: of pairs (x, target).
        arguments: of each call, but for x and target.

    Raises:
        ValueError: the loader gives no mini-batch, or something else than pairs; mini-batches differ in the names of
            their metrics or in what their loss is; a target or trace=True is given.
    """
    total: Total | None = None
    weighing, number = Weighing(), 0
    batches = _pairs(loader, arguments)
    while (pair := _next(batches, runtime)) is not None:
        one = arguments._replace(x=pair[0], target=pair[1], outputs=False, is_part=True)
        part = Total(entry_points.evaluate(runtime, one, LossSink(weighing)))
        total = part if total is None else total.added(part)
        number += 1
    with turn(), runtime.communicator("evaluate") as communicator:
        communicator.open(lambda values: {MINI_BATCHES: f"none after {number}"}, draws=False)
    assert total is not None  # or `pairs` raised
    return total.step()


def _pairs(loader: Iterable[Any], arguments: LossArguments) -> Iterator[tuple[Any, Any]]:
    if arguments.trace:
        raise ValueError("trace=True is for one mini-batch. Evaluate one of the loader's: pipe.evaluate(x, y, ...).")
    yield from pairs(loader, arguments.target, "evaluate")


def _next(batches: Iterator[tuple[Any, Any]], runtime: Runtime) -> tuple[Any, Any] | None:
    """The next mini-batch. It is taken before its call, since a loader may call Pipes; a failure is the call's."""
    try:
        return next(batches, None)
    except BaseException:
        with turn(), runtime.communicator("evaluate"):
            raise


class Total:
    """The losses and metrics of some mini-batches.

    Args:
        part: the evaluation of one, whose metrics are a `Weighing`'s.
    """

    def __init__(self, part: Step) -> None:
        sums = dict(part.metrics)
        rule, weight = sums.pop("loss")
        self._dtype = part.loss.dtype
        with without_function_modes():
            factor = torch.ones_like(weight) if RULES[int(rule)] == "sum" else weight
            # Where nothing counts the loss is nan, and counts as nothing.
            share = torch.where(weight == 0, 0.0, part.loss.double() * factor.to(part.loss.device))
            self._sums = {"loss": torch.stack([share, weight.to(share.device)]), **sums}
        self._rule = RULES[int(rule)]

    def added(self, other: Total) -> Total:
        """This one, with another added."""
        if other._rule != self._rule:
            raise ValueError(
                f"the loss of one mini-batch is combined by its {self._rule}, that of another by its {other._rule}. "
                "Return (sum, count) from loss_fn for every one."
            )
        if other._sums.keys() != self._sums.keys():
            raise ValueError(
                f"loss_fn returned metrics {self._names} for one mini-batch and {other._names} for another. Return the "
                "same for every one; a metric without entries is (0, 0)."
            )
        with without_function_modes():
            self._sums = {name: own + other._sums[name].to(own.device) for name, own in self._sums.items()}
        return self

    def step(self) -> Step:
        """The result for all of them."""
        with without_function_modes():
            total, weight = self._sums["loss"]
            loss = total if self._rule == "sum" else total / weight
            metrics = {name: divided_sum(*self._sums[f"metric {name}"]) for name in self._names}
            return Step(loss.to(self._dtype), metrics=metrics)

    @property
    def _names(self) -> list[str]:
        return [name.removeprefix("metric ") for name in self._sums if name != "loss"]


class Weighing:
    """The report of a mini-batch's loss: what must be known of it to add it to others."""

    def __init__(self) -> None:
        self._first: Loss | None = None

    def __call__(self, loss: Loss) -> dict[str, Tensor]:
        """
        Raises:
            ValueError: its weight beside others cannot be seen. Comparisons are within a mini-batch.
        """
        self._first = self._first or loss
        if loss is not self._first and not loss.is_proven_beside(self._first):
            raise loss.unproven()
        rule, weight = loss.weight
        with without_function_modes():
            sums = {f"metric {name}": torch.stack([total, count.to(total.device)])
                    for name, (total, count) in loss.metric_sums.items()}  # fmt: skip
            number = torch.full_like(weight, RULES.index(rule), dtype=torch.float64)
            return {"loss": torch.stack([number, weight.to(number)]), **sums}
