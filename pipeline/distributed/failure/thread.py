"""A thread that watches: it takes turn after turn, until its end."""

from __future__ import annotations

import threading

JOINING = 1.0  # seconds to wait for a thread's end: it may be held by a store that does not answer


class WatchingThread(threading.Thread):
    """A thread of a monitor. Its process may end before it.

    Args:
        name: of the thread.
        pause: seconds between two turns.
    """

    def __init__(self, name: str, pause: float) -> None:
        super().__init__(name=name, daemon=True)
        self._pause = pause
        self._wake = threading.Event()
        self._is_over = False

    def hurry(self) -> None:
        """Make the next turn begin now."""
        self._wake.set()

    def end(self) -> None:
        """End the thread after the turn that is under way."""
        self._is_over = True
        self._wake.set()

    def await_end(self) -> None:
        """Wait for its end, unless it is held by the store."""
        if threading.current_thread() is not self:
            self.join(JOINING)
