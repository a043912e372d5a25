"""The contents of buffers before each chunk, for recomputations, and for the state after a failure.

    call begins   clone every buffer of the stage                                     originals
    F of chunk 0  compare by value: these modules change their buffers                mutated
    F of chunk i  clone the buffers of those modules first                            present()
    R of chunk i  runs on copies of these: the buffers are changed once, by F
    failure       changed buffers return to their originals

The first chunk compares by value, because BatchNorm writes its running statistics without raising their version
counters; later chunks compare versions and identities. (On a GPU, where the host would have to wait for values, calls
1, 2, 4, 8, ... validate; non-validating calls reuse earlier verdicts.) A module that begins to write later is found by
its counters and can return to its originals. Any other change is found by value after the forwards, and is an error.
A module that fills a buffer which was None, or registers one, or puts another tensor there, changes its buffers too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from pipeline.common.errors import CheckpointError
from pipeline.common.module_tables import ModuleTable, tables_of
from pipeline.data.pytrees import detached, memory_address, same_values, versions
from pipeline.recompute.copies import copies, refill

BufferTable: TypeAlias = dict[str, Tensor | None]
BufferValues: TypeAlias = Mapping[int, BufferTable]  # by the number of a module; of those that change their buffers
_AT_BEGIN: BufferValues = MappingProxyType({})


class _Original(NamedTuple):
    """A buffer as the call began: its address, its version, a copy."""

    tensor: Tensor
    memory: int
    version: int
    copy: Tensor


class _BufferHolder(NamedTuple):
    """A module with buffers.

    Attributes:
        number: the module.
        table: module._buffers.
        found: what was in there as the call began.
    """

    number: int
    table: ModuleTable
    found: dict[str, _Original | None]

    @property
    def originals(self) -> list[tuple[str, _Original]]:
        """The buffers that it had."""
        return [(name, original) for name, original in self.found.items() if original is not None]


class _Watch(NamedTuple):
    """The buffers of some modules in their places, and their versions, as the call began: looked at for each chunk."""

    places: list[tuple[ModuleTable, str]]
    tensors: list[Tensor | None]
    present: list[Tensor]
    versions: tuple[int, ...]
    tables: list[ModuleTable]

    @classmethod
    def of(cls, holders: Iterable[_BufferHolder]) -> _Watch:
        """That of some modules."""
        found = [(holder.table, name, original) for holder in holders for name, original in holder.found.items()]
        originals = [original for _, _, original in found if original is not None]
        return cls(
            [(table, name) for table, name, _ in found], [original and original.tensor for _, _, original in found],
            [original.tensor for original in originals], tuple([original.version for original in originals]),
            [holder.table for holder in holders],
        )  # fmt: skip

    @property
    def is_untouched(self) -> bool:
        """Whether the same tensors are in their places, at the same versions, and no others."""
        return (
            all(map(is_, [table.get(name) for table, name in self.places], self.tensors))
            and sum(map(len, self.tables)) == len(self.places)
            and versions(self.present) == self.versions
        )


class Buffers:
    """The buffers of one stage during one call.

    Args:
        modules: the modules of the stage.
        expected: the `writers` of an earlier call; None: compare all values.
    """

    def __init__(self, modules: Sequence[nn.Module], expected: frozenset[int] | None = None) -> None:
        self._expected = expected
        tables = dict(enumerate(tables_of(modules, "_buffers")))
        held = {number: table.copy() for number, table in tables.items() if table}
        entries = [(number, tensor) for number, table in held.items() for _, tensor in _tensors_in(table)]
        tensors = [tensor for _, tensor in entries]
        memory = list(map(memory_address, tensors))
        originals = map(_Original, tensors, memory, versions(tensors), copies(tensors, memory))
        self._holders = [
            _BufferHolder(
                number, tables[number],
                {name: None if tensor is None else next(originals) for name, tensor in table.items()},
            ) for number, table in held.items()
        ]  # fmt: skip
        self._empty = {number: table for number, table in tables.items() if not table}
        self._spare: BufferValues | None = None
        self._mutated: set[int] = set()  # the numbers of those that change
        self._changing: list[_BufferHolder] = []
        self._unchanged = self._holders.copy()
        self._watch = _Watch.of(self._unchanged)
        self._seen_first = False

    def __bool__(self) -> bool:
        return bool(self._holders) or any(self._empty.values())

    @property
    def ids(self) -> frozenset[int]:
        """The ids of the buffers, as they are when the call begins."""
        return frozenset([id(original.tensor) for holder in self._holders for _, original in holder.originals])

    def hand_over(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Detach outputs; copy those that share memory with a buffer, which the next chunk may write."""
        storages = {memory_address(tensor) for holder in self._holders for _, tensor in _tensors_in(holder.table)}
        return tuple([out.clone() if memory_address(out) in storages else out for out in detached(list(tensors))])

    # ---------------------------------------------------------------------------------------------- who changes them

    def after_forward(self) -> None:
        """Observe which modules change their buffers."""
        self._observe(by_value=not self._seen_first)
        self._seen_first = True

    def _observe(self, by_value: bool) -> None:
        numbers = [number for number, table in self._empty.items() if table]  # of modules that have registered some
        self._holders += [_BufferHolder(number, self._empty.pop(number), {}) for number in numbers]
        if not self._watch.is_untouched:
            numbers += [holder.number for holder in self._unchanged if not _Watch.of([holder]).is_untouched]
        self._note(numbers)
        if by_value:
            self._note([holder.number for holder, _ in self._written_unseen()])

    def _written_unseen(self) -> Iterator[tuple[_BufferHolder, str]]:
        """The buffers with other values. On a GPU by an earlier verdict: the host would have to wait."""
        for holder in self._unchanged:
            for name, original in holder.originals:
                present = holder.table.get(name)
                if self._expected is not None and not original.tensor.is_cpu:
                    is_written = holder.number in self._expected
                else:
                    is_written = present is not None and not same_values(present, original.copy)
                if is_written:
                    yield holder, name

    def _note(self, numbers: Collection[int]) -> None:
        """Note modules that write buffers, by number."""
        if numbers:
            self._mutated.update(numbers)
            self._changing = [holder for holder in self._holders if holder.number in self._mutated]
            self._unchanged = [holder for holder in self._holders if holder.number not in self._mutated]
            self._watch = _Watch.of(self._unchanged)

    @property
    def writers(self) -> frozenset[int]:
        """The numbers of the modules that wrote their buffers in this call."""
        return frozenset(self._mutated)

    def note_writes(self, modules: Iterable[nn.Module], stage: str) -> None:
        """Note modules whose buffers are written after all forwards. Raise if a forward has written them."""
        tables = [id(module._buffers) for module in modules]
        holders = [holder for holder in self._holders if id(holder.table) in tables]
        written = [f"'{name}'" for holder in holders if holder.number in self._mutated for name in holder.found]
        if written:
            raise CheckpointError(
                f"a batch norm of {stage} wrote its running statistics ({', '.join(written)}) within a forward, where "
                "deferred_batch_norm=True puts them off: it is compiled, or its forward is its own. Use "
                "deferred_batch_norm=False."
            )
        self._note([holder.number for holder in holders])

    def check_unseen(self, stage: str) -> None:
        """Raise if a buffer changed after chunk 0 without its version counter."""
        for _, name in self._written_unseen():
            raise CheckpointError(
                f"buffer '{name}' of {stage} changed after chunk 0, without its version counter. Change it "
                "with torch's in-place operations, in every chunk or in none, or use chunks=1."
            )

    def moved(self) -> bool:
        """Whether a buffer that this call only reads has another value than before.

        A kept graph may have saved it, and autograd would not notice: BatchNorm writes without version counters. On a
        GPU there is no check: the host would have to wait.
        """
        originals = [original for holder in self._unchanged for _, original in holder.originals]
        return any(each.tensor.is_cpu and not same_values(each.tensor, each.copy) for each in originals)

    def shareable(self) -> Iterator[tuple[int, str]]:
        """The keys of what other stages may have too, with names: memory of buffers, buffers, tables of modules."""
        return chain.from_iterable(map(_keys, self._holders))

    def written(self) -> Iterator[int]:
        """Those of them whose buffers changed, in backwards since the last forward too."""
        self._observe(by_value=False)
        return (key for holder in self._changing for key, _ in _keys(holder))

    # ------------------------------------------------------------------------------------------ what they were before

    def present(self) -> BufferValues:
        """Copies of the buffers that change, for a recomputation of what runs next."""
        return _copied({holder.number: holder.table for holder in self._changing}) if self._changing else _AT_BEGIN

    @contextmanager
    def as_before(self, before: BufferValues, again: bool = True) -> Iterator[None]:
        """Within: the modules see their buffers as a forward found them. Their changes are dropped.

        Args:
            before: how it found them.
            again: whether this may be asked for again. If not, that is used up.
        """
        if self._spare is None:  # a write past the counters must not reach the originals
            self._spare = _at_begin(self._unchanged)
        late = _at_begin([holder for holder in self._changing if holder.number not in before])
        values = {**self._spare, **late, **(_copied(before) if again else before)}
        named = [pair for holder in self._holders for pair in _tensors_in(holder.table)]
        buffers = [tensor for _, tensor in named]
        counts = versions(buffers)
        others = [_as_set(holder, values[holder.number]) for holder in self._holders]
        with _exchanged([holder.table for holder in self._holders], others):
            yield
        if versions(buffers) != counts:
            name = next(name for (name, tensor), count in zip(named, counts) if versions([tensor]) != (count,))
            raise CheckpointError(
                f"a recomputation wrote buffer '{name}' by another way than its module's attribute (a list, a "
                f"closure). Write it as self.{name}."
            )

    def put_back(self, before: BufferValues = _AT_BEGIN) -> None:
        """Give the buffers that change what a forward found, in the tensors of then."""
        values = {**_at_begin(self._changing), **_copied(before)}
        for holder in self._changing:
            entries = values[holder.number]
            for name, (tensor, *_) in holder.originals:
                value = entries.get(name)
                is_replaced = holder.number in before and holder.table.get(name) is not tensor
                if value is not None and not is_replaced:  # else a graph may have saved it
                    refill(tensor, value)
                    entries[name] = tensor
            _exchange(holder.table, entries)

    def roll_back(self, before: BufferValues = _AT_BEGIN) -> None:
        """The same after a forward that has failed, whatever that has written."""
        self._observe(by_value=True)
        self.put_back(before)


def _keys(holder: _BufferHolder) -> Iterator[tuple[int, str]]:
    for name, (tensor, memory, *_) in holder.originals:
        if tensor.numel():
            yield from [(key, f"buffer '{name}'") for key in (memory, id(tensor), id(holder.table))]


def _tensors_in(table: ModuleTable) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in table.items() if tensor is not None]


@contextmanager
def on_copies(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within: the modules see copies of their buffers. What they do to these is dropped."""
    tables = dict(enumerate(tables_of(modules, "_buffers")))
    with _exchanged([*tables.values()], [*_copied(tables).values()]):
        yield


@contextmanager
def _exchanged(tables: Sequence[ModuleTable], others: Sequence[BufferTable]) -> Iterator[None]:
    """Within: modules have other buffers."""
    present = [table.copy() for table in tables]
    try:
        for table, entries in zip(tables, others, strict=True):
            _exchange(table, entries)
        yield
    finally:
        for table, entries in zip(tables, present, strict=True):
            _exchange(table, entries)


def _exchange(table: ModuleTable, entries: BufferTable) -> None:
    """Let these be all buffers of a module."""
    table.clear()
    table.update(entries)


def _copied(tables: BufferValues) -> BufferValues:
    """Copies of all buffers, which share memory as these do."""
    copied = iter(copies([tensor for table in tables.values() for _, tensor in _tensors_in(table)]))
    return {
        number: {name: None if tensor is None else next(copied) for name, tensor in table.items()}
        for number, table in tables.items()
    }


def _at_begin(holders: Sequence[_BufferHolder]) -> BufferValues:
    """Copies of what modules had as the call began."""
    return _copied({
        holder.number: {name: original and original.copy for name, original in holder.found.items()}
        for holder in holders
    })


def _as_set(holder: _BufferHolder, values: BufferTable) -> BufferTable:
    """Values of buffers with what the user has set on these. One that requires a gradient is differentiated itself."""
    for name, original in holder.found.items():
        if original is None:
            continue
        tensor = original.tensor
        if tensor.requires_grad:
            if versions([tensor])[0] != original.version:
                raise CheckpointError(
                    f"buffer '{name}', which requires a gradient, was changed in place between the forward and the "
                    "recomputation. Change it after backward()."
                )
            values[name] = tensor
        elif tensor.__dict__ and (value := values.get(name)) is not None:
            value.__dict__.update(tensor.__dict__)
    return values
