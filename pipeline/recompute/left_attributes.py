"""The attributes of modules as the forward of a chunk left them, put back while that chunk goes backward.

    F(0)  self.seen = x0      F(1)  self.seen = x1      B(0)  a hook reads self.seen: x0, as behind F(0)

A hook of the backward, or an autograd.Function, may read from a module what the forward kept there. Forwards of other
chunks run in between, and a recomputation puts back what it found. So within B(i) stands what F(i), or its
recomputation, left; of all else, what stands there. What B(i) itself changes stays, but for entries that it takes out
of a list, a set or a deque to which forwards of other chunks have added: a stack pairs forwards and backwards by their
order. That is refused. Of modules, objects and dicts only entries that forwards change are put back. Modules, and lists
and dicts, that several stages reach (a log) stay as they are: other stages may be writing them.

Buffers are not put back: their kernels compare versions, and a hook that reads one finds its last values.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from partition.containers import base_of
from pipeline.recompute.attributes import FREED, Attributes, ContainerContents, values_alive

_GONE = object()


class Changes(NamedTuple):
    """The entries in which two snapshots of attributes differ.

    Attributes:
        entries: (dict, name), of modules, objects and dicts, by the id of the holder and the name.
        containers: the ids of other containers.
        tensors: the ids of those that were written in place.
    """

    entries: dict[tuple[int, Any], tuple[dict[Any, Any], Any]]
    containers: list[int]
    tensors: set[int]

    @classmethod
    def between(cls, earlier: Attributes, later: Attributes) -> Changes:
        before, contents = entries_of(earlier), contents_of(earlier)
        entries = {
            (key, name): (table, name)
            for key, (table, now) in entries_of(later).items() if key in before
            for name in {**before[key][1], **now} if before[key][1].get(name, _GONE) is not now.get(name, _GONE)
        }  # fmt: skip
        containers = [
            key for key, container in contents_of(later).items()
            if key in contents and not _are_same(values_alive(contents[key].content), container.content)
        ]  # fmt: skip
        return cls(entries, containers, earlier.written)


@contextmanager
def as_left(
    snapshot: Attributes, changes: Sequence[Changes], is_shared: Callable[[int], bool], stage: str
) -> Iterator[None]:
    """Within: what was changed stands as in a snapshot.

    Args:
        snapshot: keeps all values alive.
        changes: of others, since.
        is_shared: whether several stages reach what has this id.
        stage: how errors name it.

    Raises:
        RuntimeError: something within took entries out of a container to which others have added.
    """
    swaps = list(_swaps(snapshot, changes, is_shared))
    for swap in swaps:
        swap.begin()
    try:
        yield
    finally:
        taken = [swap for swap in swaps if not swap.end()]
    if taken:
        raise RuntimeError(
            f"a backward of {stage} took something out of a list, a set or a deque of a module to which "
            "forwards add. Other chunks have gone forward meanwhile, or the chunk was recomputed, so what it holds "
            "depends on their order. Let a hook hold what its forward keeps (in a local variable that it closes "
            "over), or an autograd.Function in its ctx."
        )


def _swaps(
    snapshot: Attributes, changes: Sequence[Changes], is_shared: Callable[[int], bool]
) -> Iterator[EntrySwap | ContainerSwap]:
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
        if value is not FREED and not is_shared(key):
            yield EntrySwap(table, name, snapshot.copy_of(value))
    contents = contents_of(snapshot)
    for key in dict.fromkeys([key for change in changes for key in change.containers]):
        if key in contents and not is_shared(key):
            yield ContainerSwap(contents[key])


class EntrySwap:
    """One entry of a dict, which has another value within."""

    def __init__(self, table: dict[Any, Any], name: Any, value: Any) -> None:
        self._table = table
        self._name = name
        self._within = value
        self._base = base_of(type(table))
        self._present = self._value()

    def _value(self) -> Any:
        return self._base.get(self._table, self._name, _GONE)

    def _set(self, value: Any) -> None:
        if value is _GONE:
            self._base.pop(self._table, self._name, None)
        else:
            self._base.__setitem__(self._table, self._name, value)

    def begin(self) -> None:
        """Set it."""
        self._set(self._within)

    def end(self) -> bool:
        """Set what stood there, unless it was set to something else within. Returns True, as nothing is lost."""
        if self._value() is self._within:
            self._set(self._present)
        return True


class ContainerSwap:
    """One list, set, deque, array or object with slots, which has other entries within."""

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
        elif isinstance(holder, (list, set, deque)):
            is_bounded = isinstance(holder, deque) and holder.maxlen is not None  # it drops its oldest by itself
            is_whole = is_bounded or not _beyond(self._within, now)
            kind.write(holder, [*self._present, *_beyond(now, self._within)])
        return is_whole


def entries_of(attributes: Attributes) -> dict[int, tuple[dict[Any, Any], dict[Any, Any]]]:
    """The dicts of modules and objects, and other dicts, with what they held, by the id of the holder."""
    tables: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {
        id(module.table): (module.table, dict(zip(module.names, values_alive(module.values[1:]), strict=True)))
        for module in attributes.modules
    }
    for container in attributes.containers:
        table = container.table
        if table is not None:
            content = values_alive(container.content)
            half = len(content) // 2
            tables[id(container.holder)] = table, dict(zip(content[:half], content[half:], strict=True))
    return tables


def contents_of(attributes: Attributes) -> dict[int, ContainerContents]:
    """Other containers whose entries are noted, by id."""
    return {
        id(container.holder): container for container in attributes.containers
        if container.is_whole and container.table is None
    }  # fmt: skip


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
