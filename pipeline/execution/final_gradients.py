"""Final gradients: whole once every stage that reads the parameter has run its last backward of the last chunk.

    stage s settled: its sums --> the call keeps them --all readers of p settled--> use.take(p, its parts added up)
    the run has ended         --> what is left there: gradients of which the loss or the input has a part, too

The readers of a parameter are known from the modules and from what the forwards captured, not from gradients: a
stage that reads a weight without computing its gradient still recomputes with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from pipeline.execution.communicator import Pair, joined_by_owner
from pipeline.stage.stage import StageRun


class EarlyUse(NamedTuple):
    """The use of whole gradients while the backward still runs.

    Attributes:
        begin: called once, after all forwards and before the first `take`. It gives a function from a parameter's id to
            whether its gradient is used early. One that has a part from outside the stages has to wait for the end.
        take: called with (parameter, whole gradient), once for each of these.
    """

    begin: Callable[[], Callable[[int], bool]]
    take: Callable[[Tensor, Tensor], None]


class GradientFinalizer:
    """A watch over the stages of a call, which hands over each gradient as soon as it is whole.

    Args:
        stages: those in this process.
        use: gets the gradients.
        sums: by stage the sums that are final. What is handed over is taken out of there.
    """

    def __init__(self, stages: Sequence[StageRun], use: EarlyUse, sums: Mapping[int, list[Pair]]) -> None:
        self._stages = stages
        self._use = use
        self._sums = sums
        self._open: dict[int, set[int]] | None = None  # by the parameter's id: the stages whose part is missing
        self._lock = threading.Lock()

    def settled(self, stage: StageRun) -> None:
        """Note that the last backward of a stage has run, and hand over the gradients that are whole now."""
        index = stage.layers.index
        with self._lock:
            if self._open is None:
                self._open = self._begin()
            stage.aliases.check_memory()  # again: its recomputations are over, and updates will write its parameters
            whole_keys = [key for key, stages in self._open.items() if stages == {index}]
            for key in whole_keys:
                del self._open[key]
            for stages in self._open.values():
                stages.discard(index)
            self._hand_over(frozenset(whole_keys))

    def _begin(self) -> dict[int, set[int]]:
        readers: dict[int, set[int]] = {}
        for stage in self._stages:
            stage.aliases.check_memory()
            for key in stage.reads:
                readers.setdefault(key, set()).add(stage.layers.index)
        is_early = self._use.begin()
        return {key: stages for key, stages in readers.items() if is_early(key)}

    def _hand_over(self, keys: Collection[int]) -> None:
        parts = []
        for stage in self._stages:
            pairs = self._sums.get(stage.layers.index, [])
            parts += [(stage.layers.index, *pair) for pair in pairs if id(pair[0]) in keys]
            pairs[:] = [pair for pair in pairs if id(pair[0]) not in keys]
        whole = joined_by_owner(parts)
        parts.clear()
        while whole:
            self._use.take(*whole.pop(next(iter(whole))))
