"""The attributes of modules as the forward of a chunk left them, put back while that chunk goes backward.

    F(0)  self.seen = x0      F(1)  self.seen = x1      B(0)  a hook reads self.seen: x0, as behind F(0)

A hook of the backward, or an autograd.Function, may read from a module what the forward kept there. Forwards of other
chunks run in between, and a recomputation puts back what it found. So within B(i) stands what F(i), or its
recomputation, left; of all else, what stands there. What B(i) itself changes stays, but for entries that it takes out
of a list, a set or a deque to which forwards of other chunks have added: a stack pairs forwards and backwards by their
order. That is refused. Modules, and lists and dicts, that several stages reach (a log) stay as they are: other stages
may be writing them.

Buffers are not put back: their kernels compare versions, and a hook that reads one finds its last values.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from pipeline.recompute.attributes import FREED, Attributes, ContainerContents, values_alive

_GONE = object()
_NOTHING = nullcontext()


class Changes(NamedTuple):
    """The entries in which two snapshots of attributes differ.

    Attributes:
        entries: (dict of a module, name), by the id of the dict and the name.
        containers: other containers, by id.
        tensors: the ids of those that were written in place.
    """

    entries: dict[tuple[int, str], tuple[dict[str, Any], str]]
    containers: dict[int, Any]
    tensors: set[int]

    @classmethod
    def between(cls, earlier: Attributes, later: Attributes) -> Changes:
        entries: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        before = entries_of(earlier)
        for key, (table, now) in entries_of(later).items():
            _, then = before.get(key, (table, {}))
            for name in then.keys() | now.keys():
                if then.get(name, _GONE) is not now.get(name, _GONE):
                    entries[key, name] = table, name
        contents = contents_of(earlier)
        containers = {
            key: container.holder for key, container in contents_of(later).items()
            if key in contents and not _are_same(values_alive(contents[key].content), container.content)
        }  # fmt: skip
        return cls(entries, containers, earlier.written)


class LeftAttributes:
    """The attributes of a stage's modules as forwards leave them, in one call.

    Args:
        stage: how errors name the stage.
        new: makes a snapshot, which keeps all values alive.
        owners: the stages that reach a module's dict or a container, by id; complete when a call has all its stages.
    """

    def __init__(self, stage: str, new: Callable[[], Attributes], owners: Mapping[int, Collection[int]]) -> None:
        self._stage = stage
        self._new = new
        self._owners = owners
        self._changes: list[Changes] = []  # by forwards of this call, one after the other
        self._unchanged: tuple[Attributes, Attributes] | None = None  # as a forward found and left it; all alive
        # By chunk: what it left; the number of changes until then; those of its recomputation.
        self._left: dict[int, tuple[Attributes | None, int, list[Changes]]] = {}

    def after_forward(self, chunk: int, before: Attributes, is_kept: bool) -> None:
        """Note what F of `chunk` left. `before`: what it found; `is_kept`: a backward will ask."""
        snapshot = before
        if not before.is_current:
            snapshot = self._new()
            self._changes.append(Changes.between(before, snapshot))
        elif is_kept and self._changes:
            if self._unchanged is None or self._unchanged[0] is not before:
                self._unchanged = before, self._new()
            _, snapshot = self._unchanged
        self._left[chunk] = snapshot if is_kept else None, len(self._changes), []

    def after_recomputation(self, chunk: int, before: Attributes) -> None:
        """Note what a recomputation of `chunk` left. `before`: what it found."""
        snapshot = self._new()
        _, number, _ = self._left.get(chunk, (None, len(self._changes), []))
        self._left[chunk] = snapshot, number, [Changes.between(before, snapshot)]

    def as_left(self, chunk: int) -> AbstractContextManager[None]:
        """Within: what others have changed since is as F of `chunk`, or its recomputation, left it.

        Raises:
            RuntimeError: something within took entries out of a container to which others have added.
        """
        snapshot, number, own = self._left.get(chunk, (None, 0, []))
        changes = [*own, *self._changes[number:]]
        return _NOTHING if snapshot is None or not changes else self._swapped(snapshot, changes)

    @contextmanager
    def _swapped(self, snapshot: Attributes, changes: list[Changes]) -> Iterator[None]:
        swaps = [*self._entry_swaps(snapshot, changes), *self._container_swaps(snapshot, changes)]
        for swap in swaps:
            swap.begin()
        try:
            yield
        finally:
            taken = [swap for swap in swaps if not swap.end()]
        if taken:
            raise RuntimeError(
                f"a backward of {self._stage} took something out of a list, a set or a deque of a module to which "
                "forwards add. Other chunks have gone forward meanwhile, or the chunk was recomputed, so what it holds "
                "depends on their order. Let a hook hold what its forward keeps (in a local variable that it closes "
                "over), or an autograd.Function in its ctx."
            )

    def _entry_swaps(self, snapshot: Attributes, changes: list[Changes]) -> Iterator[EntrySwap | ContainerSwap]:
        changed = {key: pair for change in changes for key, pair in change.entries.items()}
        written = {key for change in changes for key in change.tensors}
        left = entries_of(snapshot)
        if written:  # in place, so that the attribute is the same
            changed.update({
                (key, name): (table, name) for key, (table, entries) in left.items() for name, value in entries.items()
                if id(value) in written
            })  # fmt: skip
        for (key, name), (table, _) in changed.items():
            _, entries = left.get(key, (table, {}))
            value = entries.get(name, _GONE)
            if value is not FREED and not self._is_shared(key):
                yield EntrySwap(table, name, snapshot.copy_of(value))

    def _container_swaps(self, snapshot: Attributes, changes: list[Changes]) -> Iterator[EntrySwap | ContainerSwap]:
        contents = contents_of(snapshot)
        for key in {key: None for change in changes for key in change.containers}:
            if key in contents and not self._is_shared(key):
                yield ContainerSwap(contents[key])

    def _is_shared(self, key: int) -> bool:
        return len(self._owners.get(key, ())) > 1

    def forget(self, chunk: int) -> None:
        """Drop what is kept for a chunk."""
        self._left.pop(chunk, None)

    def clear(self) -> None:
        """Drop what is kept for all chunks."""
        self._left.clear()
        self._changes.clear()
        self._unchanged = None


class EntrySwap:
    """One attribute, which has another value within."""

    def __init__(self, table: dict[str, Any], name: str, value: Any) -> None:
        self._table = table
        self._name = name
        self._within = value
        self._present = table.get(name, _GONE)

    def begin(self) -> None:
        """Set it."""
        _set(self._table, self._name, self._within)

    def end(self) -> bool:
        """Set what stood there, unless it was set to something else within. Returns True, as nothing is lost."""
        if self._table.get(self._name, _GONE) is self._within:
            _set(self._table, self._name, self._present)
        return True


class ContainerSwap:
    """One container, which has other entries within."""

    def __init__(self, container: ContainerContents) -> None:
        self._container = container
        self._within = list(container.content)
        self._present = self._entries()

    def _entries(self) -> list[Any]:
        return list(self._container.kind.read(self._container.holder))

    def begin(self) -> None:
        """Set them."""
        self._container.kind.write(self._container.holder, self._within)

    def end(self) -> bool:
        """Set what stood there, beside what was added within. Returns whether nothing was taken out of a sequence."""
        kind, holder, _ = self._container
        now, is_whole = self._entries(), True
        if _are_same(now, self._within):
            kind.write(holder, self._present)
        elif self._container.is_mapping:
            kind.write(holder, _merged(_as_dict(self._within), _as_dict(now), _as_dict(self._present)))
        elif isinstance(holder, (list, set, deque)):
            is_bounded = isinstance(holder, deque) and holder.maxlen is not None  # it drops its oldest by itself
            is_whole = is_bounded or not _beyond(self._within, now)
            kind.write(holder, [*self._present, *_beyond(now, self._within)])
        return is_whole


def entries_of(attributes: Attributes) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """The dicts of modules, and what they held, by id."""
    return {
        id(module.table): (module.table, dict(zip(module.names, values_alive(module.values[1:]), strict=True)))
        for module in attributes.modules
    }  # fmt: skip


def contents_of(attributes: Attributes) -> dict[int, ContainerContents]:
    """The containers whose entries are noted, by id."""
    return {id(container.holder): container for container in attributes.containers if container.is_whole}


def _set(table: dict[str, Any], name: str, value: Any) -> None:
    if value is _GONE:
        table.pop(name, None)
    else:
        table[name] = value


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all([a is b or type(a) is bytes and a == b for a, b in zip(one, other)])


def _beyond(one: list[Any], other: list[Any]) -> list[Any]:
    """The entries of `one` that `other` has not, or has not as often."""
    counts = Counter(map(id, other))
    beyond = []
    for entry in one:
        counts[id(entry)] -= 1
        if counts[id(entry)] < 0:
            beyond.append(entry)
    return beyond


def _as_dict(content: list[Any]) -> dict[Any, Any]:
    half = len(content) // 2
    return dict(zip(content[:half], content[half:], strict=True))


def _merged(before: dict[Any, Any], now: dict[Any, Any], present: dict[Any, Any]) -> list[Any]:
    """The present entries, and the changes from `before` to `now`."""
    merged = dict(present)
    for name in before.keys() | now.keys():
        if now.get(name, _GONE) is not before.get(name, _GONE):
            _set(merged, name, now.get(name, _GONE))
    return [*merged, *merged.values()]
