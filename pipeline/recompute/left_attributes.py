"""The attributes of modules as the forward of a chunk left them, put back while that chunk goes backward.

    F(0)  self.seen = x0      F(1)  self.seen = x1      B(0)  a hook reads self.seen: x0, as behind F(0)

A hook of the backward, or an autograd.Function, may read from a module what the forward kept there. Forwards of other
chunks run in between, and a recomputation puts back what it found. So within B(i) stands what F(i), or its
recomputation, left, where that or a later forward has changed it; of all else, what stands there. So a backward may
drop what its forward kept (`self.hook = None`): the next one finds its own. What B(i) itself changes stays, but for
entries that it takes out of a list, a set or a deque to which forwards of other chunks have added: a stack pairs
forwards and backwards by their order. That is refused. Of modules, objects and dicts only entries that forwards change
are put back. Modules, and lists and dicts, that several stages reach (a log) stay as they are: other stages may be
writing them.

Buffers are not put back: their kernels compare versions, and a hook that reads one finds its last values.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

from partition.containers import base_of
from pipeline.recompute.attributes import COUNTED, Attributes, ContainerContents, values_alive

EntryPlace: TypeAlias = tuple[int, Any]  # the id of a dict and a name in it; the id of another container and _WHOLE
_GONE, _WHOLE = object(), object()


class Changes(NamedTuple):
    """The places in which two snapshots of attributes differ.

    Attributes:
        places: with their containers.
        tensors: the ids of those that were written in place.
    """

    places: dict[EntryPlace, ContainerContents]
    tensors: set[int]

    @classmethod
    def between(cls, earlier: Attributes, later: Attributes) -> Changes:
        holders, holders_now = _by_id(earlier), _by_id(later)
        before, after = _contents(holders), _contents(holders_now)
        places = {
            place: holders[place[0]]
            for place in {**before, **after}
            if place[0] in holders and place[0] in holders_now
            and not _is_same(before.get(place, _GONE), after.get(place, _GONE))
        }  # fmt: skip
        return cls(places, earlier.written)


@contextmanager
def as_left(
    snapshot: Attributes, changes: Sequence[Changes], is_shared: Callable[[int], bool], stage: str
) -> Iterator[None]:
    """Within: what was changed stands as in a snapshot. At the end as before, unless it was changed within.

    What was added within to a list, a set or a deque is added to what that had before.

    Args:
        snapshot: keeps all values alive.
        changes: its own, and those of others since.
        is_shared: whether several stages reach what has this id.
        stage: how errors name it.

    Raises:
        RuntimeError: something within took entries out of a container to which others have added.
    """
    changed = {place: container for change in changes for place, container in change.places.items()}
    written = {key for change in changes for key in change.tensors}
    holders = _by_id(snapshot)
    left = _contents(holders)
    changed.update({place: holders[place[0]] for place, value in left.items() if id(value) in written})
    within = {
        place: snapshot.copy_of(left.get(place, _GONE)) for place in changed
        if not is_shared(place[0]) and (place in left or place[1] is not _WHOLE)
    }  # fmt: skip
    present = {
        place: now for place, value in within.items() if not _is_same(now := _read(changed[place], place), value)
    }  # fmt: skip
    is_taken = False
    try:
        for place in present:
            _put(changed[place], place, within[place])
        yield
    finally:
        for place, value in present.items():
            container, now = changed[place], _read(changed[place], place)
            if _is_same(now, within[place]):
                _put(container, place, value)
            elif isinstance(now, _AllEntries) and isinstance(container.holder, (list, set, deque)):
                drops_oldest = getattr(container.holder, "maxlen", None) is not None  # by itself
                is_taken = is_taken or not drops_oldest and bool(_beyond(within[place], now))
                _put(container, place, [*value, *_beyond(now, within[place])])
    if is_taken:
        raise RuntimeError(
            f"a backward of {stage} took something out of a list, a set or a deque of a module to which "
            "forwards add. Other chunks have gone forward meanwhile, or the chunk was recomputed, so what it holds "
            "depends on their order. Let a hook hold what its forward keeps (in a local variable that it closes "
            "over), or an autograd.Function in its ctx. A tool's hooks (kronfluence's) need the plain module, "
            "pipe.to_sequential()."
        )


class _AllEntries(list[Any]):
    """All entries of a container."""


def _by_id(attributes: Attributes) -> dict[int, ContainerContents]:
    """The containers whose entries are noted, by id."""
    return {id(container.holder): container for container in attributes.containers if container.kind is not COUNTED}


def _contents(containers: dict[int, ContainerContents]) -> dict[EntryPlace, Any]:
    """The value of each entry of the dicts, and the entries of each other container."""
    contents: dict[EntryPlace, Any] = {}
    for key, container in containers.items():
        if isinstance(container.holder, dict):
            names, values = container.halves
            contents.update({(key, name): value for name, value in zip(names, values_alive(values), strict=True)})
        else:
            contents[key, _WHOLE] = _AllEntries(values_alive(container.content))
    return contents


def _read(container: ContainerContents, place: EntryPlace) -> Any:
    kind, holder, _ = container
    return _AllEntries(kind.read(holder)) if place[1] is _WHOLE else _base(holder).get(holder, place[1], _GONE)


def _put(container: ContainerContents, place: EntryPlace, value: Any) -> None:
    kind, holder, _ = container
    if place[1] is _WHOLE:
        kind.write(holder, value)
    elif value is _GONE:
        _base(holder).pop(holder, place[1], None)
    else:
        _base(holder).__setitem__(holder, place[1], value)


def _base(holder: Any) -> Any:
    return base_of(type(holder))  # type: ignore[arg-type]  # a type is Hashable


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, _AllEntries) and isinstance(other, _AllEntries):
        return len(one) == len(other) and all([a is b or type(a) is bytes and a == b for a, b in zip(one, other)])
    return one is other


def _beyond(one: list[Any], other: list[Any]) -> list[Any]:
    """The entries of `one` that `other` has not, or has not as often."""
    counts = Counter(map(id, other))
    beyond = []
    for entry in one:
        counts[id(entry)] -= 1
        if counts[id(entry)] < 0:
            beyond.append(entry)
    return beyond
