"""Deferred interrupts: a signal handler that must not raise within a section runs after it.

    begin    a signal comes: noted, not handled        end    every noted signal comes again, to its own handler

    with DeferredSignals():    around a call               [1] a layer, a loss, autograd: handled
                                                            [2] this package's code: noted
        deliver()   between two actions                    noted signals are handled
        firm()      the call can only be finished          [1] noted, too

Python runs the handler of a signal (Ctrl-C, an alarm, the death of a DataLoader's worker) in the main thread, between
any two instructions, and an exception of the handler ends what runs there. Where that would leave something half done
(an alias in a module, a mode, a hook), it has to wait.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps, without its enums: a microsecond a signal
import signal
import sys
import threading
from collections.abc import Callable
from itertools import compress
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch

_LATE = "this interrupt waited until {} had ended: that has taken place, on all ranks"
_NUMBERS = sorted(int(number) for number in signal.valid_signals())
MOST = 3  # the third interrupt while others wait is handled at once: something hangs
_PACKAGE = __name__.partition(".")[0]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_callers: set[CodeType] = set()  # functions of this package that only call the user's code
_calls: list[DeferredSignals] = []  # around the call that runs in the main thread


class Deferral:
    """A section within which no signal handler runs, a context. Sections may be nested, or overlap.

    Handlers run in the main thread only; in any other a section changes nothing.

    Attributes:
        is_on: whether signals wait.

    Example:
        >>> earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
        >>> deferral = Deferral()
        >>> deferral.begin()
        >>> signal.raise_signal(signal.SIGINT)
        >>> try:
        ...     deferral.end("the section was over")
        ... except KeyboardInterrupt as error:
        ...     print("now:", error.__notes__)
        now: ['the section was over']
        >>> was = signal.signal(signal.SIGINT, earlier)
    """

    def __init__(self) -> None:
        self._handlers: list[_Handler] = []  # installed in the place of others
        self.is_on = False
        self._pending: list[int] = []  # the signals that came

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """From now on signals wait. Without effect if they wait already."""
        if self.is_on or threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in list(compress(_NUMBERS, map(callable, map(_signal.getsignal, _NUMBERS)))):
                if callable(earlier := _standing(number)):
                    self._handlers.append(_Handler(self, number, earlier))
                    _signal.signal(number, self._handlers[-1])
        except BaseException:
            self.end()
            raise
        self.is_on = True  # in one instruction; before it, and after `end`, handlers pass signals on

    def end(self, note: str = "") -> None:
        """From now on signals are handled at once, first those that have waited. Their handlers may raise.

        Another thread than the main one may end a section: autograd ends a backward in that of a device. What was put
        in the place of handlers then stays there, and passes signals on, until the main thread ends another section.

        Args:
            note: added to an exception that they raise.
        """
        try:
            self.is_on = False
            self._restore()
        except BaseException:  # of a handler: a signal has come meanwhile, and handlers pass signals on
            self._restore()
            raise
        finally:
            self._handlers.clear()
            pending, self._pending = self._pending, []
            try:
                _raise(pending)
            except BaseException as error:
                if note:
                    error.add_note(note)
                raise

    def _restore(self) -> None:
        """Put the earlier handlers back, in the main thread."""
        if threading.current_thread() is threading.main_thread():
            for handler in self._handlers:
                standing = _standing(handler.number)
                if standing is not _signal.getsignal(handler.number):  # else the user has set another one since
                    _signal.signal(handler.number, standing)

    def end_with_call(self, entry: str, error: BaseException | None, in_backward: bool) -> None:
        """End with a call over ranks. Within a backward with that: if it succeeds, gradients are in `.grad` by then.

        Args:
            entry: what was called.
            error: with which the call ends.
            in_backward: whether the call is a part of a running backward.
        """
        if error is not None:
            self.end()
        elif not in_backward:
            self.end(_LATE.format(entry))
        elif self.is_on:
            at_end_of_backward(self.end)

    def note(self, number: int, frame: FrameType | None) -> bool:
        """Whether a signal that comes now, while `frame` runs, has to wait; then it does."""
        if self.is_on and number not in self._pending:
            self._pending.append(number)
        return self.is_on


class DeferredSignals(Deferral):
    """A section around a call: signals wait where this package's code runs, until the next action or the end."""

    def __init__(self) -> None:
        super().__init__()
        self.is_firm = False
        self._waiting = 0

    def __enter__(self) -> None:
        if not _calls:
            self.begin()
            if self.is_on:
                _calls.append(self)

    def __exit__(self, *_: object) -> None:
        if self.is_on:
            _calls.clear()
            self.end()

    def note(self, number: int, frame: FrameType | None) -> bool:
        self._waiting += 1
        if self._waiting >= MOST or not (self.is_firm or _is_ours(frame)):
            return False
        return super().note(number, frame)

    @property
    def has_news(self) -> bool:
        """Whether signals have come since the last action, and may be handled."""
        return self._waiting > 0 and not self.is_firm

    def handle(self) -> None:
        """Handle all signals that wait, even if the handler of one raises."""
        self._waiting = 0
        if self._pending:
            number = self._pending.pop(0)
            earlier = {handler.number: handler.earlier for handler in self._handlers}[number]
            try:
                earlier(number, sys._getframe())
            finally:
                self.handle()


def calls_users_code(function: _Function) -> _Function:
    """Mark a function that leaves nothing half done: signals are handled in the code that it calls."""
    _callers.add(function.__code__)
    return function


def deliver() -> None:
    """Handle the signals that wait, between two actions. Raises what their handlers raise."""
    if _calls and _calls[0].has_news and threading.current_thread() is threading.main_thread():
        _calls[0].handle()


def firm() -> None:
    """From here on the call is finished whatever signals come: its effects cannot be undone."""
    for call in _calls:
        call.is_firm = True


def _is_ours(frame: FrameType | None) -> bool:
    """Whether this package's code was interrupted, or a library that it called, not the user's code."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
            return frame.f_code not in _callers
        frame = frame.f_back
    return False


def at_end_of_backward(function: Callable[[], object]) -> None:
    """Call a function once, when the backward under way ends, also if that fails."""
    torch.autograd.Variable._execution_engine.queue_callback(_AtEnd(function))


class _AtEnd:
    """Autograd calls it at the end of a backward, or drops it after a failed one."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._functions = [function]

    def __call__(self) -> None:
        while self._functions:
            self._functions.pop()()

    def __del__(self) -> None:
        self()


class _Handler:
    """A handler in the place of another one."""

    def __init__(self, deferral: Deferral, number: int, earlier: Callable[[int, Any], Any]) -> None:
        self._deferral = deferral
        self.number = number
        self.earlier = earlier

    @property
    def is_over(self) -> bool:
        """Whether it passes every signal on."""
        return not self._deferral.is_on

    def __call__(self, number: int, frame: Any) -> None:
        if not self._deferral.note(number, frame):
            self.earlier(number, frame)


def _standing(number: int) -> Any:
    """The handler of a signal, behind handlers that only pass it on."""
    handler = _signal.getsignal(number)
    while isinstance(handler, _Handler) and handler.is_over:
        handler = handler.earlier
    return handler


def _raise(numbers: list[int]) -> None:
    """Raise all of these signals, even if the handler of one raises."""
    if numbers:
        try:
            signal.raise_signal(numbers.pop(0))
        finally:
            _raise(numbers)
