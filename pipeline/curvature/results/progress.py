"""The progress bar of a long estimate, with its value so far.

    with Progress(100, "trace of Hessian", show) as bar:
        bar.advance(4, note="638 +- 12")       trace of Hessian:  4%|4    | 4/100 [00:02<00:48, 638 +- 12]

tqdm draws the bar, on stderr. Without it there is none.
"""

from __future__ import annotations

import importlib
import sys
from types import TracebackType
from typing import Any, Self


class Progress:
    """A progress bar, or nothing at all.

    Args:
        total: how many steps there are, None if nobody knows.
        title: the work's name, shown at the left.
        show: whether to show anything. Over ranks, the caller asks for it on one.

    Example:
        >>> with Progress(10, "trace of Hessian", show=False) as bar:
        ...     bar.advance(4, note="638 +- 12")
    """

    def __init__(self, total: int | None, title: str, show: bool) -> None:
        self._total, self._title, self._show = total, title, show
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self._show:
            self._bar = _bar(self._total, self._title)
        return self

    def advance(self, n: int = 1, note: str = "") -> None:
        """Goes on by `n` steps; a note replaces the one at the right, an empty one leaves it."""
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=not n)
            self._bar.update(n)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _bar(total: int | None, title: str) -> Any:
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=title, file=sys.stderr, dynamic_ncols=True)
