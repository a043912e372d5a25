"""An evaluation of a data set: the mini-batches of a loader, one after the other, and their losses as one.

    "mean"         loss = sum_b loss_b * rows_b / sum_b rows_b
    "sum"          loss = sum_b loss_b
    (sum, count)   loss = sum_b loss_b * count_b / sum_b count_b            metrics: sum of sums / sum of counts

Each mini-batch is a call, and so is the end: over ranks a loader that fails, or ends sooner, fails on all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
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
_METRIC = "metric "  # before its name


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
    total: Step | None = None  # of sums
    loss_sums, number = WeightedLossSums(), 0
    batches = _pairs(loader, arguments)
    while (pair := _next(batches, runtime)) is not None:
        part_arguments = arguments._replace(x=pair[0], target=pair[1], outputs=False, is_part=True)
        part = entry_points.evaluate(runtime, part_arguments, LossSink(loss_sums))
        total = part if total is None else _added(total, part)
        number += 1
    with turn(), runtime.communicator("evaluate") as communicator:
        communicator.open(lambda values: {MINI_BATCHES: f"none after {number}"}, draws=False)
    assert total is not None  # or `pairs` raised
    return _divided(total)


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


def _added(total: Step, part: Step) -> Step:
    """The sums of some mini-batches, with another's added."""
    rule, part_rule = _rule_of(total), _rule_of(part)
    if part_rule != rule:
        raise ValueError(
            f"the loss of one mini-batch is combined by its {rule}, that of another by its {part_rule}. "
            "Return (sum, count) from loss_fn for every one."
        )
    if part.metrics.keys() != total.metrics.keys():
        raise ValueError(
            f"loss_fn returned metrics {_names(total)} for one mini-batch and {_names(part)} for another. Return the "
            "same for every one; a metric without entries is (0, 0)."
        )
    with without_function_modes():
        sums = {name: value + part.metrics[name].to(value.device) for name, value in total.metrics.items()}
    return replace(total, metrics=sums)


def _divided(total: Step) -> Step:
    """The result for all mini-batches."""
    rule = _rule_of(total)
    with without_function_modes():
        loss, weight = total.metrics[rule]
        loss = loss if rule == "sum" else loss / weight
        metrics = {name: divided_sum(*total.metrics[_METRIC + name]) for name in _names(total)}
        return Step(loss.to(total.loss.dtype), metrics=metrics)


def _rule_of(sums: Step) -> str:
    return next(rule for rule in RULES if rule in sums.metrics)


def _names(sums: Step) -> list[str]:
    return [name.removeprefix(_METRIC) for name in sums.metrics if name.startswith(_METRIC)]


class WeightedLossSums:
    """The report of a mini-batch's loss in the place of its metrics: sums that add up to those of all mini-batches.

    Under the name of its rule stands (loss times weight, weight), under that of a metric (sum, count).
    """

    def __init__(self) -> None:
        self._first_loss: Loss | None = None

    def __call__(self, loss: Loss) -> dict[str, Tensor]:
        """
        Raises:
            ValueError: its weight beside others cannot be seen. Comparisons are within a mini-batch.
        """
        self._first_loss = self._first_loss or loss
        if loss is not self._first_loss and not loss.is_proven_beside(self._first_loss):
            raise loss.unproven()
        rule, weight, value = loss.rule, loss.weight, loss.value
        with without_function_modes():
            weight = weight.to(value.device, torch.float64)
            share = value.double() * (1.0 if rule == "sum" else weight)
            # Where nothing counts the loss is nan, and counts as nothing.
            sums = {rule: torch.stack([torch.where(weight == 0, 0.0, share), weight])}
            for name, (total, count) in loss.metrics.sums.items():
                sums[_METRIC + name] = torch.stack([total, count.to(total.device)])
            return sums
