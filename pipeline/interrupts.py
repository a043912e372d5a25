"""Interrupts that wait: signal handlers which must not raise within a section run when it is over.

    begin    a signal comes: noted, not handled        end    every noted signal comes again, to its own handler

Python runs the handler of a signal (Ctrl-C, an alarm, the death of a DataLoader's worker) in the main thread, between
any two instructions, and what it raises ends what runs there. Where half of something would be left, it has to wait.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps, without its enums: a microsecond a signal
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch

LATE = "this interrupt waited until {} had ended: that has taken place, on all ranks"
_NUMBERS = sorted(int(number) for number in signal.valid_signals())


class Deferral:
    """A section within which no handler of a signal runs. Sections may lie within each other, or overlap.

    Handlers run in the main thread alone; in any other a section changes nothing.

    Attributes:
        is_on: whether signals wait.

    Example:
        >>> deferral = Deferral()
        >>> deferral.begin()
        >>> signal.raise_signal(signal.SIGINT)
        >>> try:
        ...     deferral.end("the section was over")
        ... except KeyboardInterrupt as error:
        ...     print("now:", error.__notes__)
        now: ['the section was over']
    """

    def __init__(self) -> None:
        self._handlers: list[_Handler] = []  # that stand in the place of others
        self.is_on = False
        self._came: list[int] = []  # the signals that came

    def begin(self) -> None:
        """From now on signals wait. Nothing happens where they wait already."""
        if self.is_on or threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _NUMBERS:
                earlier = _standing(number)
                if callable(earlier):
                    self._handlers.append(_Handler(self, number, earlier))
                    _signal.signal(number, self._handlers[-1])
        except BaseException:
            self.end()
            raise
        self.is_on = True  # in one instruction; until then, and after `end`, what stands there passes signals on

    def end(self, note: str = "") -> None:
        """From now on signals come at once. First those come that have waited: their handlers may raise.

        Args:
            note: for what they raise.
        """
        self.is_on = False
        handlers, self._handlers = self._handlers, []
        came, self._came = self._came, []
        try:
            for handler in handlers:
                standing = _standing(handler.number)
                if standing is not _signal.getsignal(handler.number):  # else someone has set another one since
                    _signal.signal(handler.number, standing)
        finally:
            try:
                _raise(came)
            except BaseException as error:
                if note:
                    error.add_note(note)
                raise

    def end_with_backward(self) -> None:
        """End when the backward under way does: if it goes well, gradients have become `.grad` then."""
        if self.is_on:
            torch.autograd.Variable._execution_engine.queue_callback(_End(self))

    def note(self, number: int) -> bool:
        """Whether a signal that comes now has to wait; then it does."""
        if self.is_on and number not in self._came:
            self._came.append(number)
        return self.is_on


class _End:
    """Ends a section when it is called; or when autograd drops it, since the backward failed."""

    def __init__(self, deferral: Deferral) -> None:
        self._deferral = deferral

    def __call__(self) -> None:
        self._deferral.end()

    def __del__(self) -> None:
        self._deferral.end()


class _Handler:
    """Stands in the place of another handler."""

    def __init__(self, deferral: Deferral, number: int, earlier: Callable[[int, Any], Any]) -> None:
        self._deferral = deferral
        self.number = number
        self.earlier = earlier

    @property
    def is_over(self) -> bool:
        """Whether it passes every signal on."""
        return not self._deferral.is_on

    def __call__(self, number: int, frame: Any) -> None:
        if not self._deferral.note(number):
            self.earlier(number, frame)


def _standing(number: int) -> Any:
    """The handler of a signal, behind those that only pass it on."""
    handler = _signal.getsignal(number)
    while isinstance(handler, _Handler) and handler.is_over:
        handler = handler.earlier
    return handler


def _raise(numbers: list[int]) -> None:
    """Let signals come, each though the handler of another has raised."""
    if numbers:
        try:
            signal.raise_signal(numbers.pop(0))
        finally:
            _raise(numbers)
