"""Final gradients: whole once every stage that reads the parameter has run its last backward of the last chunk.

    stage s settled: its sums --> parts --all readers of p settled--> take(p, its parts, added by stage)
    the run has ended         --> rest: gradients of which the loss or the input has a part, too

The readers of a parameter are known from the modules and from what the forwards captured, not from gradients: a
stage that reads a weight without computing its gradient still recomputes with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from torch import Tensor

from pipeline.execution.communicator import Pair, joined
from pipeline.stage.stage import StageRun


class GradientFinalizer:
    """A listener of a call that hands over each gradient as soon as it is whole.

    Args:
        stages: those in this process.
        take: called with (parameter, whole gradient), once for each parameter.
        ready: called once, after all forwards and before the first `take`.
        late: parameters whose gradients have a part from outside the stages; they wait for the end.
        waits: hand over nothing before the end.
    """

    def __init__(
        self,
        stages: Sequence[StageRun],
        take: Callable[[Tensor, Tensor], None],
        ready: Callable[[], None],
        late: Callable[[], Iterable[int]],
        waits: bool = False,
    ) -> None:
        self._stages = stages
        self._take = take
        self._ready = ready
        self._late = late
        self._waits = waits
        self._open: dict[int, set[int]] = {}  # by the parameter's id: the stages whose part is missing
        self._late_ids: frozenset[int] = frozenset()
        self._parts: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        self._has_begun = False
        self._lock = threading.Lock()

    def settled(self, stage: StageRun, pairs: list[Pair]) -> None:
        """Take the final sums of a stage whose last backward has run. Empties `pairs`."""
        with self._lock:
            if not self._has_begun:
                self._begin()
            for owner, grad in pairs:
                self._parts.setdefault(id(owner), []).append((stage.layers.index, owner, grad))
                del grad
            pairs.clear()
            stage.aliases.check_memory()  # again: its recomputations are over, and updates will write its parameters
            for key in [key for key, stages in self._open.items() if stage.layers.index in stages]:
                self._open[key].discard(stage.layers.index)
                if not self._open[key]:
                    del self._open[key]
                    if not self._waits and key not in self._late_ids:
                        self._give(key)

    def _begin(self) -> None:
        self._has_begun = True
        for stage in self._stages:
            stage.aliases.check_memory()
            for key in stage.reads:
                self._open.setdefault(key, set()).add(stage.layers.index)
        self._late_ids = frozenset(self._late())
        self._ready()

    def _give(self, key: int) -> None:
        parts = self._parts.pop(key, None)
        if parts is None:
            return
        whole = joined(sorted(parts, key=itemgetter(0)))
        parts.clear()
        self._take(*whole.popitem()[1])

    def rest(self) -> list[tuple[int, Tensor, Tensor]]:
        """The parts that were not handed over, by stage."""
        parts = [part for parts in self._parts.values() for part in parts]
        self._parts.clear()
        return sorted(parts, key=itemgetter(0))
