"""The attributes of a stage's modules in one call: as recomputations must find them, and as backwards do.

    before F(i)     they are looked at: a recomputation of the chunk begins with these
    after F(i)      what it changed is noted: within B(i) stands what F(i) left (left_attributes.py)
    R(i)            within `as_before(i)`; what it leaves is noted for its B(i), and what stood there is put back
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from pipeline.common.errors import CheckpointError
from pipeline.recompute.attributes import Attributes, values_alive
from pipeline.recompute.left_attributes import Changes, as_left

_NOTHING = nullcontext()


class StageAttributes:
    """The attributes of a stage's modules in one call.

    Args:
        stage: how errors name the stage.
        modules, tables, buffers: see `Attributes`.
        owners: the stages that reach a module's dict or a container, by id: gets the number of this one. Complete when
            a call has all its stages.
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
        owners: dict[int, set[int]],
        index: int,
    ) -> None:
        self._stage = stage
        self._owners = owners
        self._written: set[int] = set()  # the ids of tensors that forwards write
        make = partial(Attributes, modules, tables, buffers)
        self._new = partial(make, weak=not tables)
        self._new_alive = make  # keeps all values alive
        self._current = self._found = self.first = self._new()  # `_found` by the last forward
        self._changes: list[Changes] = []  # by forwards of this call, one after the other
        self._unchanged: tuple[Attributes, Attributes] | None = None  # as a forward found and left it; all alive
        # By chunk: what it left; the number of changes until then; its own, or those of its recomputation.
        self._left: dict[int, tuple[Attributes | None, int, list[Changes]]] = {}
        for container in self.first.containers:
            owners.setdefault(id(container.holder), set()).add(index)

    def __bool__(self) -> bool:
        return bool(self._current)

    @property
    def tells_others(self) -> bool:
        """Whether a forward has changed what several stages reach: a config that modules share, say."""
        return any([len(self._owners.get(key, ())) > 1 for changes in self._changes for key, _ in changes.places])

    def before_forward(self) -> Attributes:
        """The attributes that a forward finds, and may change."""
        self._found = self._present()
        return self._found

    def after_forward(self, chunk: int, is_kept: bool) -> None:
        """Note what F of `chunk` left. `is_kept`: its own graph goes backward, not that of a recomputation."""
        if not self:
            return
        snapshot = before = self._found
        own = []
        if not before.is_current:
            snapshot = self._new_alive(self._current)
            own = [Changes.between(before, snapshot)]
            self._changes += own
        elif is_kept and self._changes:
            if self._unchanged is None or self._unchanged[0] is not before:
                self._unchanged = before, self._new_alive(self._current)
            _, snapshot = self._unchanged
        kept = [changes._replace(tensors=set()) for changes in own]  # what B writes in place of its own stays
        self._left[chunk] = snapshot if is_kept else None, len(self._changes), kept

    def as_left(self, chunk: int) -> AbstractContextManager[None]:
        """Within: what that has changed, or other forwards since, is as F of `chunk`, or its recomputation, left it."""
        snapshot, number, own = self._left.get(chunk, (None, 0, []))
        changes = [*own, *self._changes[number:]]
        if snapshot is None or not changes:
            return _NOTHING
        return as_left(snapshot, changes, lambda key: len(self._owners.get(key, ())) > 1, self._stage)

    def _present(self) -> Attributes:
        if not self._current.is_current:
            self._written |= self._current.written
            self._current = self._new(self._current)
        return self._current

    @contextmanager
    def as_before(self, chunk: int, before: Attributes, goes_backward: bool) -> Iterator[None]:
        """Within: modules have the attributes that F of `chunk` found. At the end: those from before.

        `goes_backward`: what is left within will be asked for in the backward.
        """
        present = self._present()
        # Meanwhile, perhaps, by nothing else.
        held = [values_alive(content) for *_, content in present.containers] if before is not present else []
        if before is not present or self._written:
            before.put_back(self._written)
        try:
            yield
        finally:
            written = present.written
            if not present.is_current:
                if goes_backward:
                    snapshot = self._new_alive(self._current)
                    _, number, _ = self._left.get(chunk, (None, len(self._changes), []))
                    self._left[chunk] = snapshot, number, [Changes.between(before, snapshot)]
                present.put_back()
            del held
        if written:
            raise CheckpointError(
                f"a recomputation of {self._stage} wrote a tensor in place that is an attribute of a module, as "
                "its forward had done. Make it a buffer (register_buffer), or assign a new tensor to the attribute."
            )

    def roll_back(self, before: Attributes) -> None:
        """Restore what forwards have changed since `before`."""
        if not before.is_current:
            before.roll_back()
            self._current = self._new(before)  # values are put back past the version counters

    def forget(self, chunk: int) -> None:
        """Drop what is kept for a chunk."""
        self._left.pop(chunk, None)

    def clear(self) -> None:
        """Drop what is kept for all chunks."""
        self._left.clear()
        self._changes.clear()
        self._unchanged = None
