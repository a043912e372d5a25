"""Final gradients: whole once every stage that reads the parameter has run its last backward of the last chunk.

    stage s settled: its sums --> parts --all readers of p settled--> take(p, its parts, added by stage)
    the run has ended         --> rest: what the loss or the input have a part in, too

Who reads a parameter is known from the modules and from what the forwards were seen to capture, not from gradients: a
stage that reads a weight without asking for its gradient still recomputes with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from torch import Tensor

from pipeline.execution.call import Call
from pipeline.execution.communicator import Pair, joined
from pipeline.stage.stage import StageRun


class GradientFinalizer:
    """Listens to a call, and gives whole gradients away as soon as they are.

    Args:
        call: whose sums.
        take: gets (parameter, whole gradient), once for each.
        ready: called once, before the first could be given: all forwards have run.
        late: parameters that something else than stages has a part in; they wait for the end.
        waits: give nothing away before the end.
    """

    def __init__(
        self,
        call: Call,
        take: Callable[[Tensor, Tensor], None],
        ready: Callable[[], None],
        late: Callable[[], Iterable[int]],
        waits: bool = False,
    ) -> None:
        self._call = call
        self._take = take
        self._ready = ready
        self._late = late
        self._waits = waits
        self._open: dict[int, set[int]] = {}  # by the parameter's id: the stages whose part is to come
        self._held: frozenset[int] = frozenset()
        self._parts: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        self._has_begun = False
        self._lock = threading.Lock()
        call.listen(self.settled)

    def settled(self, stage: StageRun, pairs: list[Pair]) -> None:
        """A stage's last backward has run. Empties `pairs`."""
        with self._lock:
            if not self._has_begun:
                self._begin()
            for owner, grad in pairs:
                self._parts.setdefault(id(owner), []).append((stage.index, owner, grad))
                del grad
            pairs.clear()
            stage.aliases.check_memory()  # once more: its recomputations are over, and updates will write them
            for key in [key for key, stages in self._open.items() if stage.index in stages]:
                self._open[key].discard(stage.index)
                if not self._open[key]:
                    del self._open[key]
                    if not self._waits and key not in self._held:
                        self._give(key)

    def _begin(self) -> None:
        self._has_begun = True
        for stage in self._call.stages:
            stage.aliases.check_memory()
            for key in stage.reads:
                self._open.setdefault(key, set()).add(stage.index)
        self._held = frozenset(self._late())
        self._ready()

    def _give(self, key: int) -> None:
        parts = self._parts.pop(key, None)
        if parts is None:
            return
        found = joined(sorted(parts, key=_stage))
        parts.clear()
        self._take(*found.popitem()[1])

    def rest(self) -> list[tuple[int, Tensor, Tensor]]:
        """The parts that nobody has got yet, by stage."""
        parts = [part for parts in self._parts.values() for part in parts]
        self._parts.clear()
        return sorted(parts, key=_stage)


def _stage(part: tuple[int, Tensor, Tensor]) -> int:
    return part[0]
