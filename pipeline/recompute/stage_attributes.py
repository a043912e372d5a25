"""The attributes of a stage's modules in one call: as recomputations must find them, and as backwards do.

    before F(i)     they are looked at: a recomputation of the chunk begins with these
    after F(i)      what it changed is noted: within B(i) stands what F(i) left (left_attributes.py)
    R(i)            within `as_before(i)`; what it leaves is noted for its B(i), and what stood there is put back
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import nn

from pipeline.common.errors import CheckpointError
from pipeline.recompute.attributes import Attributes
from pipeline.recompute.left_attributes import LeftAttributes


class StageAttributes:
    """The attributes of a stage's modules in one call.

    Args:
        stage: how errors name the stage.
        modules, tables, buffers: see `Attributes`.
        copies: whether the values of all tensors are kept from the beginning. Else of those that forwards write, once
            one has.
        owners: gets the number of the stage, by the ids of what it reaches: see `LeftAttributes`.
        index: its number.

    Attributes:
        first: those from the beginning of the call.
    """

    def __init__(
        self,
        stage: str,
        modules: Sequence[nn.Module],
        tables: Sequence[dict[str, Any]],
        buffers: frozenset[int],
        copies: bool,
        owners: dict[int, set[int]],
        index: int,
    ) -> None:
        self._stage = stage
        make = partial(Attributes, modules, tables, buffers)
        self._new = partial(make, weak=not tables)
        self._written: set[int] = set()  # the ids of tensors that forwards write
        self._current = self.first = self._new(None if copies else self._written)
        self._found = self.first  # by the last forward
        self._left = LeftAttributes(stage, partial(make, None if copies else self._written), owners)
        for holder in [part.table for part in self.first.modules] + [part.holder for part in self.first.containers]:
            owners.setdefault(id(holder), set()).add(index)

    def __bool__(self) -> bool:
        return bool(self._current)

    @property
    def are_written(self) -> bool:
        """Whether a forward has written a tensor among them in place."""
        return bool(self._written or self._current.written)

    def before_forward(self) -> Attributes:
        """The attributes that a forward finds, and may change."""
        self._found = self._present()
        return self._found

    def after_forward(self, chunk: int, is_kept: bool) -> None:
        """Note what F of `chunk` left. `is_kept`: its own graph goes backward, not that of a recomputation."""
        self._left.after_forward(chunk, self._found, is_kept)

    def as_left(self, chunk: int) -> AbstractContextManager[None]:
        """Within: what others have changed since is as F of `chunk`, or its recomputation, left it."""
        return self._left.as_left(chunk)

    def _present(self) -> Attributes:
        if not self._current.is_current:
            self._written |= self._current.written
            self._current = self._new(self._written)
        return self._current

    @contextmanager
    def as_before(self, chunk: int, before: Attributes, goes_backward: bool) -> Iterator[None]:
        """Within: modules have the attributes that F of `chunk` found. At the end: those from before.

        `goes_backward`: what is left within will be asked for in the backward.
        """
        present = self._present()
        if before is not present or self._written:
            before.put_back(self._written, long=False)
        try:
            yield
        finally:
            written = present.written
            if not present.is_current:
                if goes_backward:
                    self._left.after_recomputation(chunk, before)
                present.put_back(set())
        if written:
            raise CheckpointError(
                f"a recomputation of {self._stage} wrote a tensor in place that is an attribute of a module, as "
                "its forward had done. Make it a buffer (register_buffer), or assign a new tensor to the attribute."
            )

    def forget(self, chunk: int) -> None:
        """Drop what is kept for a chunk."""
        self._left.forget(chunk)

    def clear(self) -> None:
        """Drop what is kept for all chunks."""
        self._left.clear()
