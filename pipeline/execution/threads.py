"""The threaded driver: a thread for each group of lanes, where lanes have accelerators of their own.

    group 0: lanes of cuda:0   a thread --performs its actions, each when what it needs is done--> wakes the others
    group 1: lanes of cuda:1   the calling thread: it drives the group of the last stage, and so computes the loss

A group runs its part of the merged order (engine.py), so no group can wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import TypeAlias

from pipeline.execution.engine import Needs
from scheduler import Action

Perform: TypeAlias = Callable[[Action], None]
INTERRUPTS = 3  # interrupts that are deferred while threads come to their end


class SharedProgress:
    """The actions that are done, and whether to go on, shared by all groups."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._done = set[Action | int]()  # and the groups that have come to their end
        self._is_over = False  # stays: a thread whose start was interrupted may come when the error is gone
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # entered by its lock: Condition.__enter__ can be interrupted

    def wait(self, needs: Iterable[Action]) -> bool:
        """Whether these actions are done, for which it waits. False: another group has failed."""
        with self._lock:
            while not self._is_over and not self._done.issuperset(needs):
                self._changed.wait()
            return not self._is_over

    def note(self, done: Action | int) -> None:
        """Note that an action is done, or that a group has come to its end."""
        with self._lock:
            self._done.add(done)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop all groups. The first error counts."""
        with self._lock:
            if self.error is None:
                self.error = error
            self._is_over = True
            self._changed.notify_all()

    def wait_for_end(self, group: int) -> None:
        """Wait until a group has come to its end."""
        with self._lock:
            while group not in self._done:
                self._changed.wait()


def drive_threads(
    orders: Sequence[Sequence[Action]],
    needs: Needs,
    perform: Perform,
    within: Callable[[int], AbstractContextManager[object]],
) -> None:
    """Run orders, each in a thread, the last one in the calling one. Returns when all have ended.

    Args:
        orders: the actions of each group, its part of one order of all.
        needs: what each action waits for.
        perform: does the work of one action; holds what locks it needs.
        within: sets up the thread of a group as its layers expect it (switches, device).

    Raises:
        BaseException: the first that an action raised. The others stop after their present action.
    """
    progress = SharedProgress()

    def run(number: int) -> None:
        try:
            with within(number):
                for action in orders[number]:
                    if not progress.wait(needs[action]):
                        break
                    perform(action)
                    progress.note(action)
        except BaseException as error:
            progress.fail(error)
        finally:
            progress.note(number)

    threads = [
        threading.Thread(target=copy_context().run, args=(run, number), name=f"pipe group {number}", daemon=True)
        for number in range(len(orders) - 1)
    ]
    try:
        for thread in threads:
            thread.start()
        run(len(orders) - 1)
        _join(progress, threads)
    except BaseException as interrupt:  # between two bytecodes
        progress.fail(interrupt)
        _join_whatever(progress, threads)
    error, progress.error = progress.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame


def _join(progress: SharedProgress, threads: Sequence[threading.Thread]) -> None:
    """Wait for the threads' own notes: an interrupted `join` takes a running thread for ended (Python < 3.13)."""
    for number, thread in enumerate(threads):
        if thread.ident is not None:
            progress.wait_for_end(number)
            thread.join()


def _join_whatever(progress: SharedProgress, threads: Sequence[threading.Thread]) -> None:
    """The same through further interrupts: a thread that went on would compute on what the call has put back.

    Enough interrupts end the wait, so that a layer that hangs can be left.
    """
    for _ in range(INTERRUPTS):
        try:
            _join(progress, threads)
            return
        except KeyboardInterrupt as interrupt:
            progress.fail(interrupt)
