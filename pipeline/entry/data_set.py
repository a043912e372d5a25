"""An evaluation of a data set: the mini-batches of a loader, one after the other, and their losses as one.

    "mean"         loss = sum_b loss_b * rows_b / sum_b rows_b
    "sum"          loss = sum_b loss_b
    (sum, count)   loss = sum_b sum_b / sum_b count_b                       metrics: sum of sums / sum of counts

What loss_fn makes of a count, such as n.clamp(min=1), is done to the sum of the counts.

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
from pipeline.distributed.agreement import MINI_BATCHES
from pipeline.entry import entry_points
from pipeline.entry.minibatches import pairs, read_before
from pipeline.entry.runtime import Runtime
from pipeline.entry.sinks import LossSink
from pipeline.entry.step import Step
from pipeline.entry.step_arguments import StepArguments
from pipeline.execution.communicator import Verdict


def evaluate_loader(runtime: Runtime, loader: Iterable[Any], arguments: StepArguments) -> Step:
    """The loss and the metrics of all mini-batches of a loader, in eval mode, without gradients.

    Args:
        runtime: of the Pipe.
        loader: of pairs (x, target).
        arguments: of each call, but for x and target.

    Raises:
        ValueError: the loader gives no mini-batch, or something else than pairs; mini-batches differ in the names of
            their metrics or in what their loss is; a target or trace=True is given.
    """
    sums, number = LossSums(), 0
    batches = _pairs(loader, arguments)
    while (pair := read_before(runtime, "evaluate", lambda: next(batches, None))) is not None:
        part_arguments = arguments._replace(x=pair[0], target=pair[1], outputs=False, is_part=True)
        entry_points.evaluate(runtime, part_arguments, LossSink(sums.add))
        number += 1
    with turn(), runtime.communicator("evaluate") as communicator:
        communicator.open(lambda values: {MINI_BATCHES: f"none after {number}"}, draws=False)
        verdict = communicator.agree(sums.verdict())
    return Step(verdict.value, metrics=verdict.metrics)


def _pairs(loader: Iterable[Any], arguments: StepArguments) -> Iterator[tuple[Any, Any]]:
    if arguments.trace:
        raise ValueError("trace=True is for one mini-batch. Evaluate one of the loader's: pipe.evaluate(x, y, ...).")
    yield from pairs(loader, arguments.target, "evaluate")


class LossSums:
    """The sums of the losses of mini-batches, and of their metrics, in the process that has them."""

    def __init__(self) -> None:
        self._first: Loss | None = None
        self._sums: dict[str | None, Tensor] = {}  # by metric the sum, and the count; None: the loss, and its weight

    def add(self, loss: Loss) -> dict[str, Tensor]:
        """Add that of a mini-batch. Returns what is reported beside it: nothing.

        Raises:
            ValueError: mini-batches differ in the names of their metrics or in what their loss is; or its weight beside
                others cannot be seen. Comparisons are within a mini-batch.
        """
        first = self._first = self._first or loss
        names, metrics = first.metrics.sums.keys(), loss.metrics.sums
        if loss is not first and not loss.is_proven_beside(first):
            raise loss.unproven()
        if loss.rule != first.rule:
            raise ValueError(
                f"the loss of one mini-batch is combined by its {first.rule}, that of another by its {loss.rule}. "
                "Return (sum, count) from loss_fn for every one."
            )
        if metrics.keys() != names:
            raise ValueError(
                f"loss_fn returned metrics {list(names)} for one mini-batch and {list(metrics)} for another. "
                "Return the same for every one; a metric without entries is (0, 0)."
            )
        with without_function_modes():
            total = loss.total
            self._put(None, total, loss.weight.to(total))
            for name, (total, count) in metrics.items():
                self._put(name, total, count.to(total.device))
        return {}

    def _put(self, name: str | None, total: Tensor, count: Tensor) -> None:
        part, earlier = torch.stack([total, count]), self._sums.get(name)
        self._sums[name] = part if earlier is None else earlier + part.to(earlier.device)

    def verdict(self) -> Verdict:
        """The loss and the metrics of all mini-batches, where they are."""
        first = self._first
        if first is None:
            return Verdict(None, None, True)
        with without_function_modes():
            loss, weight = self._sums.pop(None)
            loss = loss if first.rule == "sum" else loss / first.whole_count(weight)
            metrics = {str(name): first.metrics.value(str(name), *pair) for name, pair in self._sums.items()}
            return Verdict(loss.to(first.value.dtype), None, True, metrics=metrics)
