"""The call lock: one call of a Pipe runs at a time in a process.

    thread A: pipe(x) .......... done
    thread B:        waits ....      pipe.step(x, y) ...

Calls share what belongs to the process: the default random generators, and, where two Pipes have a layer in common, the
places where aliases stand in for its parameters. A call within a call (a Pipe as a layer of a Pipe) is part of it, in
whatever thread it runs. `parametrize.cached()` around a call keeps nothing within: chunks and stages would go backward
through one graph of a weight, a recomputation through one that was dropped, and a probe's weight has none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, ContextVar
from typing import Any, TypeVar

from torch.nn.utils import parametrize

from pipeline.common.interrupts import DeferredSignals

_T = TypeVar("_T")


class LockHold:
    """One call's hold of the lock."""

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.is_on = True


_parametrize: Any = parametrize
_lock = threading.RLock()  # one for the process, as the default generators are
_current: ContextVar[LockHold | None] = ContextVar("turn", default=None)


def _renew() -> None:
    """Take another lock in a forked process: the thread of the parent that held this one is not there."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)


@contextmanager
def turn(earlier: LockHold | None = None) -> Iterator[LockHold]:
    """Within: no other thread's call runs, no weight is cached, and signals are held back (common/interrupts.py).

    Args:
        earlier: that of the forward whose backward this is; if it is still held, this is part of it.
    """
    hold = _current.get() or earlier
    if is_part := hold is not None and hold.is_on:
        lock: AbstractContextManager[object] = nullcontext()
    else:
        hold, lock = LockHold(), _lock
    with lock, DeferredSignals():
        token = _current.set(hold)
        cache = _parametrize._cache_enabled, _parametrize._cache
        _parametrize._cache_enabled, _parametrize._cache = 0, {}
        try:
            yield hold
        finally:
            _parametrize._cache_enabled, _parametrize._cache = cache
            hold.is_on = is_part
            _current.reset(token)


def run_in(context: Context, function: Callable[..., _T], *args: Any) -> _T:
    """Call a function in a copy of an earlier context, as a part of the call that runs now."""
    return context.copy().run(_as_part_of, _current.get(), function, *args)


def _as_part_of(hold: LockHold | None, function: Callable[..., _T], *args: Any) -> _T:
    _current.set(hold)
    return function(*args)
