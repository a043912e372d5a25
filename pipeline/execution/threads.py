"""The threaded driver: a thread for each group of lanes, where lanes have accelerators of their own.

    group 0: lanes of cuda:0   a thread --performs what is ready--> done --tells the others
    group 1: lanes of cuda:1   the calling thread: it drives the group of the last stage

Within a group, lanes run as the inline driver runs them. A group that cannot go on waits until another one has done
something; when all wait, nobody will, and that is an error in words.

The calling thread may be one in which autograd works for the last stage's device (the backward of the forward door). It
must not wait while another thread asks for a backward on that device; so it drives that device's lanes itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context

from pipeline.common.errors import StuckError
from pipeline.execution.engine import Lanes, Needs, Perform, stuck
from scheduler import Action

INTERRUPTS = 3  # so many are borne while threads come to their end


class SharedProgress:
    """What is done, and whether to go on."""

    def __init__(self, before: Iterable[Action], groups: int) -> None:
        self.done = set(before)
        self.driven: list[Lanes] = []
        self.error: BaseException | None = None
        self.is_over = False  # stays: a thread whose start was interrupted may come when the error is gone
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # entered by its lock: Condition.__enter__ can be interrupted
        self._moving = groups  # neither waiting nor at their end
        self._left: set[int] = set()  # groups at their end

    def note(self, action: Action) -> None:
        """An action is done."""
        with self._lock:
            self.done.add(action)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Stop everyone. The first error counts."""
        with self._lock:
            if self.error is None:
                self.error = error
            self.is_over = True
            self._changed.notify_all()

    def leave(self, group: int) -> None:
        """A group has come to its end."""
        with self._lock:
            self._moving -= 1
            self._left.add(group)
            self._changed.notify_all()

    def wait_for_end(self, group: int) -> None:
        """Until a group has come to its end."""
        with self._lock:
            while group not in self._left:
                self._changed.wait()

    def wait(self, lanes: Lanes) -> None:
        """Until something can go on.

        Raises:
            StuckError: every group waits or has ended, and none has been told of something to do.
        """
        with self._lock:
            self._moving -= 1
            try:
                while not self.is_over and not lanes.can_go_on(self.done):
                    if self._moving == 0 and not any(each.can_go_on(self.done) for each in self.driven):
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
        within: makes the thread of a group what its layers expect (switches, device).
        before: actions that ran in an earlier run of the same call.

    Raises:
        StuckError: no lane can go on.
        BaseException: the first that an action raised. The others stop after their present action.
    """
    board = SharedProgress(before, len(groups))

    def work(action: Action) -> None:
        if board.is_over:
            raise _Stopped
        perform(action)
        board.note(action)

    def run(number: int) -> None:
        try:
            with within(number):
                lanes = Lanes(groups[number], needs, work)
                board.driven.append(lanes)
                while lanes.left and not board.is_over:
                    if not lanes.sweep(board.done):
                        board.wait(lanes)
        except _Stopped:
            pass
        except BaseException as error:
            board.fail(error)
        finally:
            board.leave(number)

    threads = [
        threading.Thread(target=copy_context().run, args=(run, number), name=f"pipe group {number}", daemon=True)
        for number in range(len(groups) - 1)
    ]
    try:
        for thread in threads:
            thread.start()
        run(len(groups) - 1)
        _join(board, threads)
    except BaseException as interrupt:  # in between
        board.fail(interrupt)
        _join_whatever(board, threads)
    board.driven.clear()  # lanes that stopped half-way know the board
    error, board.error = board.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # or it would hold itself, by way of this frame


def _join(board: SharedProgress, threads: Sequence[threading.Thread]) -> None:
    """Wait for the threads' own word: a `join` that is interrupted takes a running thread for ended (Python < 3.13)."""
    for number, thread in enumerate(threads):
        if thread.ident is not None:
            board.wait_for_end(number)
            thread.join()


def _join_whatever(board: SharedProgress, threads: Sequence[threading.Thread]) -> None:
    """The same, though interrupted again: a thread that went on would compute on what the call has put back.

    Who interrupts often enough wants to leave a layer that hangs, and may.
    """
    for _ in range(INTERRUPTS):
        try:
            _join(board, threads)
            return
        except KeyboardInterrupt as interrupt:
            board.fail(interrupt)


class _Stopped(Exception):
    """Another group failed."""
