"""Metrics that a loss_fn reports beside its loss: (sum, count) by name, combined over the chunks as the loss is.

    chunk 0: {"accuracy": (3, 4)}   chunk 1: {"accuracy": (1, 2)}   -->   {"accuracy": tensor(0.6667)}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pipeline.common.torch_modes import without_function_modes
from pipeline.data.loss_means import DivisorTrace


class Metrics:
    """The metrics of one call, added up without gradients.

    Args:
        name: of the loss_fn, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._by_chunk: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
        self._of_count: dict[str, Callable[[Tensor], Tensor]] = {}  # what loss_fn makes of a count: n.clamp(min=1)

    def record(self, chunk: int, value: Any, trace: DivisorTrace) -> Any:
        """Keep the metrics in a result of loss_fn, which was traced; return the rest."""
        has_metrics = isinstance(value, tuple) and len(value) in (2, 3) and isinstance(value[-1], dict)
        metrics: dict[Any, Any] = value[-1] if has_metrics else {}
        first = next(iter(self._by_chunk.values()), metrics)
        if metrics.keys() != first.keys():
            raise ValueError(
                f"{self._name} returned metrics {list(first)} for one chunk and {list(metrics)} for another. "
                "Return the same for every chunk; a metric without entries in a chunk is (0, 0)."
            )
        self._by_chunk[chunk] = {name: self._pair(name, metric, trace) for name, metric in metrics.items()}
        if not has_metrics:
            return value
        return value[0] if len(value) == 2 else value[:-1]

    @property
    def values(self) -> dict[str, Tensor]:
        """The metrics of the mini-batch."""
        return {name: self.value(name, *pair) for name, pair in self.sums.items()}

    @property
    def sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The sums and the counts of the mini-batch, float64."""
        chunks = [self._by_chunk[chunk] for chunk in sorted(self._by_chunk)]
        return {
            name: (added([chunk[name][0] for chunk in chunks]), added([chunk[name][1] for chunk in chunks]))
            for name in (chunks[0] if chunks else ())
        }

    def value(self, name: str, total: Tensor, count: Tensor) -> Tensor:
        """A metric of this sum and this count, in the default dtype; nan for a count of 0."""
        whole = self._of_count[name](count) if name in self._of_count else count
        with without_function_modes():
            return (total / whole.to(total.device)).to(torch.get_default_dtype())

    def _pair(self, name: Any, metric: Any, trace: DivisorTrace) -> tuple[Tensor, Tensor]:
        if not isinstance(name, str):
            raise TypeError(f"{self._name} returned a metric named {name!r}. Use a string.")
        if not isinstance(metric, (tuple, list)) or len(metric) != 2:
            raise ValueError(
                f"{self._name} returned {metric!r} as the metric {name!r}. Return (sum, count), such as "
                "(correct.sum(), correct.numel()): a mean alone does not say how much each chunk counts."
            )
        count = trace.count(metric[1])
        if count.function is not None:
            self._of_count[name] = count.function
        return self._number(name, metric[0]), self._number(name, count.number)

    def _number(self, name: str, part: Any) -> Tensor:
        if isinstance(part, Tensor) and part.numel() == 1 and not part.is_complex():
            with without_function_modes():
                return part.detach().reshape(()).to(torch.float64, copy=True)
        if isinstance(part, (int, float)):
            return torch.tensor(float(part), dtype=torch.float64, device="cpu")
        shown = f"a tensor of shape {list(part.shape)}" if isinstance(part, Tensor) else repr(part)
        raise TypeError(f"{self._name} returned {shown} in the metric {name!r}. Return two numbers: (sum, count).")


def added(parts: Iterable[Tensor]) -> Tensor:
    """The sum of some numbers, in their order, on the device of the first."""
    with without_function_modes():
        return reduce(lambda total, part: total + part.to(total.device), parts)
