"""The threaded driver: a thread for each group of lanes, where lanes have accelerators of their own.

    group 0: lanes of cuda:0   a thread --performs what is ready--> done --wakes the others
    group 1: lanes of cuda:1   the calling thread: it drives the group of the last stage, and so computes the loss

Within a group, lanes run as the inline driver runs them. A group that cannot go on waits until another one has done
an action. When all wait, none ever will: that raises StuckError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context

from pipeline.common.errors import StuckError
from pipeline.execution.engine import Lanes, Needs, Perform, stuck
from scheduler import Action

INTERRUPTS = 3  # interrupts that are deferred while threads come to their end


class SharedProgress:
    """The actions that are done, and whether to go on, shared by all groups."""

    def __init__(self, before: Iterable[Action], groups: int) -> None:
        self.done = set(before)
        self.driven: list[Lanes] = []
        self.error: BaseException | None = None
        self.is_over = False  # stays: a thread whose start was interrupted may come when the error is gone
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # entered by its lock: Condition.__enter__ can be interrupted
        self._moving = groups  # neither waiting nor at their end
        self._ended: set[int] = set()  # groups at their end

    def note(self, action: Action) -> None:
        """Note that an action is done."""
        with self._lock:
            self.done.add(action)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop all groups. The first error counts."""
        with self._lock:
            if self.error is None:
                self.error = error
            self.is_over = True
            self._changed.notify_all()

    def leave(self, group: int) -> None:
        """Note that a group has come to its end."""
        with self._lock:
            self._moving -= 1
            self._ended.add(group)
            self._changed.notify_all()

    def wait_for_end(self, group: int) -> None:
        """Wait until a group has come to its end."""
        with self._lock:
            while group not in self._ended:
                self._changed.wait()

    def wait(self, lanes: Lanes) -> None:
        """Wait until one of `lanes` can go on.

        Raises:
            StuckError: every group waits or has ended, and none can go on.
        """
        with self._lock:
            self._moving -= 1
            try:
                while not self.is_over and not lanes.can_go_on(self.done):
                    if self._moving == 0 and not any(driven_lanes.can_go_on(self.done) for driven_lanes in self.driven):
                        raise StuckError(stuck(self.driven, self.done))
                    self._changed.wait()
            finally:
                self._moving += 1


def drive_threads(
    groups: Sequence[Mapping[int, Sequence[Action]]],
    needs: Needs,
    perform: Perform,
    within: Callable[[int], AbstractContextManager[object]],
    before: Iterable[Action] = (),
) -> None:
    """Run groups of orders, each group in a thread, the last group in the calling one. Returns when all have ended.

    Args:
        groups: for each group its lanes, by number, and their orders.
        needs: what each action waits for.
        perform: does the work of one action; holds what locks it needs.
        within: sets up the thread of a group as its layers expect it (switches, device).
        before: actions that ran in an earlier run of the same call.

    Raises:
        StuckError: no lane can go on.
        BaseException: the first that an action raised. The others stop after their present action.
    """
    progress = SharedProgress(before, len(groups))

    def work(action: Action) -> None:
        if progress.is_over:
            raise _GroupStop
        perform(action)
        progress.note(action)

    def run(number: int) -> None:
        try:
            with within(number):
                lanes = Lanes(groups[number], needs, work)
                progress.driven.append(lanes)
                while lanes.remaining and not progress.is_over:
                    if not lanes.sweep(progress.done):
                        progress.wait(lanes)
        except _GroupStop:
            pass
        except BaseException as error:
            progress.fail(error)
        finally:
            progress.leave(number)

    threads = [
        threading.Thread(target=copy_context().run, args=(run, number), name=f"pipe group {number}", daemon=True)
        for number in range(len(groups) - 1)
    ]
    try:
        for thread in threads:
            thread.start()
        run(len(groups) - 1)
        _join(progress, threads)
    except BaseException as interrupt:  # between two bytecodes
        progress.fail(interrupt)
        _join_whatever(progress, threads)
    progress.driven.clear()  # lanes that stopped half-way refer to it
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


class _GroupStop(Exception):
    """Raised in a group after another group has failed."""
