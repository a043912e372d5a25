"""The lock that a call of a Pipe holds, beside what else it does around itself.

Calls share what belongs to the process: the default random generators, and, where two Pipes have a layer in common, the
places where aliases stand in for its parameters. A call within a call (a Pipe as a layer of a Pipe) is part of it, in
whatever thread it runs. `parametrize.cached()` around a call keeps nothing within: chunks and stages would go backward
through one graph of a weight, a recomputation through one that was dropped, and a probe's weight has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.utils import parametrize

from partition.process_lock import LockHold, held
from pipeline.common.interrupts import DeferredSignals

_parametrize: Any = parametrize


@contextmanager
def turn(earlier: LockHold | None = None) -> Iterator[LockHold]:
    """Within: no other thread's call runs, no weight is cached, and signals are held back (common/interrupts.py).

    Args:
        earlier: that of the forward whose backward this is; if it is still held, this is part of it.
    """
    with held(earlier, DeferredSignals()) as hold:
        cache = _parametrize._cache_enabled, _parametrize._cache
        _parametrize._cache_enabled, _parametrize._cache = 0, {}
        try:
            yield hold
        finally:
            _parametrize._cache_enabled, _parametrize._cache = cache
