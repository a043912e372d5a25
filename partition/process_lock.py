"""The lock of what belongs to the process: one call of a Pipe runs at a time, one cut of a model, or one profile.

    thread A: pipe(x) .......... done
    thread B:        waits ....      to_sequential(model, sample) ...

Each seeds the default random generators and puts them back, and a cut watches `nn.Module`. What runs within another is
part of it, in whatever thread it runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, ContextVar
from typing import Any, TypeVar

_T = TypeVar("_T")


class LockHold:
    """One hold of the lock."""

    __slots__ = ("is_on",)

    def __init__(self) -> None:
        self.is_on = True


_lock = threading.RLock()
_current: ContextVar[LockHold | None] = ContextVar("hold", default=None)


def _renew() -> None:
    """Take another lock in a forked process: the thread of the parent that held this one is not there."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)


@contextmanager
def held(
    earlier: LockHold | None = None, guard: AbstractContextManager[object] = nullcontext()
) -> Iterator[LockHold]:
    """Within: no other thread holds the lock.

    Args:
        earlier: that of the forward whose backward this is; if it is still on, this is part of it.
        guard: entered once the lock is held, and left before it is released.
    """
    hold = _current.get() or earlier
    if is_part := hold is not None and hold.is_on:
        lock: AbstractContextManager[object] = nullcontext()
    else:
        hold, lock = LockHold(), _lock
    with lock, guard:
        token = _current.set(hold)
        try:
            yield hold
        finally:
            hold.is_on = is_part
            _current.reset(token)


def run_in(context: Context, function: Callable[..., _T], *args: Any) -> _T:
    """Call a function in a copy of an earlier context, as a part of the hold that is on now."""
    return context.copy().run(_as_part_of, _current.get(), function, *args)


def _as_part_of(hold: LockHold | None, function: Callable[..., _T], *args: Any) -> _T:
    _current.set(hold)
    return function(*args)
