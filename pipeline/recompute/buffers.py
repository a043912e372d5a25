"""The contents of buffers before each chunk, for recomputations, and for the state after a failure.

    call begins   clone every buffer of the stage                                     initial
    F of chunk 0  compare by value: these modules change their buffers                mutated
    F of chunk i  clone the buffers of those modules first                            present()
    R of chunk i  runs on copies of these: the buffers are changed once, by F
    failure       changed buffers return to initial

The first chunk compares by value, because BatchNorm writes its running statistics without raising their version
counters; later chunks compare versions and identities. (On a GPU, where the host would have to wait for values, calls
1, 2, 4, 8, ... validate; non-validating calls reuse earlier verdicts.) A module that begins to write later is found by
its counters and can return to `initial`. Any other change is found by value after the forwards, and is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.common.errors import CheckpointError
from pipeline.common.module_tables import tables_of
from pipeline.data.pytrees import detached, memory_address, same_values, versions
from pipeline.recompute.copies import copies


class _BufferSlot(NamedTuple):
    owner: int  # a group of modules that share buffers, or one module
    table: dict[str, Tensor | None]  # module._buffers
    name: str
    tensor: Tensor
    memory: int  # its address as the call began
    version: int
    initial: Tensor


class _Group(NamedTuple):
    """Some buffers, with their tensors and versions as the call began."""

    slots: list[_BufferSlot]
    tensors: list[Tensor]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, slots: list[_BufferSlot]) -> _Group:
        return cls(slots, [slot.tensor for slot in slots], tuple([slot.version for slot in slots]))

    @property
    def is_untouched(self) -> bool:
        """Whether the same tensors are in their places, at the same versions."""
        tensors = [slot.table.get(slot.name) for slot in self.slots]
        return all(map(is_, tensors, self.tensors)) and versions(self.tensors) == self.versions


class BufferValues(NamedTuple):
    """The values of buffers as a forward found them.

    Attributes:
        slots: the buffers that forwards before had written.
        values: their values.
        filled: what else was in the tables of modules in which a forward fills or registers buffers.
    """

    slots: list[_BufferSlot]
    values: list[Tensor]
    filled: list[dict[str, Tensor | None]]


class Buffers:
    """The buffers of one stage during one call.

    Args:
        modules: the modules of the stage.
        expected: the `writers` of an earlier call; None: compare all values.
    """

    def __init__(self, modules: Sequence[nn.Module], expected: frozenset[int] | None = None) -> None:
        self._expected = expected
        self._tables = [(table, table.copy()) for table in tables_of(modules, "_buffers")]  # as the call began
        entries = [
            (number, table, name, tensor)
            for number, (table, buffers) in enumerate(self._tables) if buffers
            for name, tensor in buffers.items() if tensor is not None
        ]
        tensors = [tensor for *_, tensor in entries]
        memory = list(map(memory_address, tensors))
        owners = _owners([number for number, *_ in entries], memory)
        self._slots = [
            _BufferSlot(owner, table, name, tensor, address, version, copy)
            for owner, (_, table, name, tensor), address, version, copy in zip(
                owners, entries, memory, versions(tensors), copies(tensors, memory), strict=True
            )
        ]
        self._spare: list[tuple[_BufferSlot, Tensor]] | None = None
        self._written: list[_BufferSlot] = []
        self._read = _Group.of(self._slots)  # those that no forward has written so far
        self._mutated: set[int] = set()  # owners of these
        # Those in which a forward may fill some, and into which it registers some.
        self._growing = [(table, buffers) for table, buffers in self._tables if buffers and _lacks_some(buffers)]
        self._count = sum(map(len, [buffers for _, buffers in self._tables]))
        self._seen_first = False

    def __bool__(self) -> bool:
        return bool(self._slots or self._growing)

    @property
    def ids(self) -> frozenset[int]:
        """The ids of the buffers, as they are when the call begins."""
        return frozenset([id(slot.tensor) for slot in self._slots])

    def hand_over(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Detach outputs; copy those that share memory with a buffer, which the next chunk may write."""
        storages = {memory_address(tensor) for slot in self._slots if (tensor := slot.table.get(slot.name)) is not None}
        return tuple([out.clone() if memory_address(out) in storages else out for out in detached(list(tensors))])

    def present(self) -> BufferValues:
        """Clones of the buffers that change, for a recomputation of what runs next."""
        values = copies(list(map(_present, self._written))) if self._written else []
        return BufferValues(self._written, values, [_copied(_filled(*pair)) for pair in self._growing])

    def after_forward(self) -> None:
        """Observe which modules change their buffers."""
        if not self._read.is_untouched:
            self._note([slot.owner for slot in self._read.slots if _touched(slot)])
        if not self._seen_first:
            self._note([slot.owner for slot in self._read.slots if self._is_written(slot)])
            if sum(map(len, [table for table, _ in self._tables])) > self._count:
                fixed = [pair for pair in self._tables if not _lacks_some(pair[1])]
                self._growing += [pair for pair in fixed if _filled(*pair)]
        self._seen_first = True

    def _note(self, owners: Collection[int]) -> None:
        """Note who writes buffers."""
        if owners:
            self._mutated.update(owners)
            self._read = _Group.of([slot for slot in self._slots if slot.owner not in self._mutated])
            self._written = [slot for slot in self._slots if slot.owner in self._mutated]

    @property
    def writers(self) -> frozenset[int]:
        """The numbers of the groups that wrote their buffers in this call."""
        return frozenset(self._mutated)

    def _is_written(self, slot: _BufferSlot) -> bool:
        """Compare by value; on a GPU reuse an earlier verdict, since the host would have to wait."""
        if self._expected is not None and slot.tensor.device.type != "cpu":
            return slot.owner in self._expected
        return not same_values(_present(slot), slot.initial)

    def note_writes(self, modules: Iterable[nn.Module], stage: str) -> None:
        """Note modules whose buffers are written after all forwards. Raise if a forward has written them."""
        owners = {slot.owner for module in modules for slot in self._slots if slot.table is module._buffers}
        if owners & self._mutated:
            names = ", ".join(f"'{slot.name}'" for slot in self._slots if slot.owner in owners & self._mutated)
            raise CheckpointError(
                f"a batch norm of {stage} wrote its running statistics ({names}) within a forward, where "
                "deferred_batch_norm=True puts them off: it is compiled, or its forward is its own. Use "
                "deferred_batch_norm=False."
            )
        self._note(owners)

    def check_unseen(self, stage: str) -> None:
        """Raise if a buffer changed after chunk 0 without its version counter."""
        for slot in self._read.slots:
            if self._is_written(slot):
                raise CheckpointError(
                    f"buffer '{slot.name}' of {stage} changed after chunk 0, without its version counter. Change it "
                    "with torch's in-place operations, in every chunk or in none, or use chunks=1."
                )

    @contextmanager
    def as_before(self, before: BufferValues, again: bool = True) -> Iterator[None]:
        """Within: the modules see their buffers as a forward found them. Their changes are dropped.

        Args:
            before: how it found them.
            again: whether this may be asked for again. If not, that is used up.
        """
        written, values, filled_before = before
        written_ids = set(map(id, written))
        others = [slot for slot in self._written if id(slot) not in written_ids]
        if self._spare is None:  # a write past the counters must not reach `initial`
            self._spare = list(zip(self._read.slots, _copies(self._read.slots)))
        replacements = [*(copies(values) if again else values), *_copies(others)]
        filled = [_filled(*pair) for pair in self._growing]
        self._fill(filled_before)
        tensors = [slot.table.get(slot.name) for slot in self._slots]
        buffers = [tensor for tensor in tensors if tensor is not None]
        counts = versions(buffers)
        for slot, copy in [*self._spare, *zip([*written, *others], replacements, strict=True)]:
            if slot.tensor.__dict__:
                copy.__dict__.update(slot.tensor.__dict__)  # what the user has set on it
            slot.table[slot.name] = copy if not slot.tensor.requires_grad else _leaf_of_caller(slot)
        try:
            yield
        finally:
            for slot, tensor in zip(self._slots, tensors):
                slot.table[slot.name] = tensor
            for pair, entries in zip(self._growing, filled):
                _fill(*pair, entries)
        if versions(buffers) != counts:
            counters = dict(zip(map(id, buffers), zip(counts, versions(buffers))))
            slot = next(slot for slot, tensor in zip(self._slots, tensors) if len({*counters.get(id(tensor), ())}) > 1)
            raise CheckpointError(
                f"a recomputation wrote buffer '{slot.name}' by another way than its module's attribute (a list, a "
                "closure). Write it as self." + slot.name + "."
            )

    def moved(self) -> bool:
        """Whether a buffer that this call only reads has another value than before.

        A kept graph may have saved it, and autograd would not notice: BatchNorm writes without version counters. On a
        GPU there is no check: the host would have to wait.
        """
        read = [slot for slot in self._read.slots if slot.tensor.device.type == "cpu"]
        return any(not same_values(slot.tensor, slot.initial) for slot in read)

    def shareable(self) -> Iterator[tuple[int, str]]:
        """The keys of what other stages may have too, with names: memory of buffers, buffers, tables of modules."""
        for slot in self._slots:
            for key in _keys(slot):
                yield key, f"buffer '{slot.name}'"

    def written(self) -> Iterator[int]:
        """Those of them whose buffers changed."""
        for slot in self._slots:
            if slot.owner in self._mutated and slot.tensor.numel():
                yield from _keys(slot)

    def _fill(self, values: Sequence[Mapping[str, Tensor | None]]) -> None:
        """Give the buffers that were None or not there as the call began what they held."""
        for number, pair in enumerate(self._growing):
            _fill(*pair, _copied(values[number]) if number < len(values) else {})  # the first chunk may register some

    def put_back(self, before: BufferValues) -> None:
        """Give the buffers that change the values that a forward found."""
        self._fill(before.filled)
        for slot, copy in zip(before.slots, copies(before.values), strict=True):
            if slot.table.get(slot.name) is not slot.tensor:  # replaced; a graph may have saved the old one
                slot.table[slot.name] = copy
            else:
                _give(slot.tensor, copy)

    def begin_again(self) -> None:
        """Restore the buffers to the beginning of the call: the same tensors; those that change, with their values."""
        for table, tensors in self._tables:
            table.clear()
            table.update(tensors)
        for slot in self._written:
            _give(slot.tensor, slot.initial)

    def roll_back(self) -> None:
        """Restore every buffer to the beginning of the call: the same tensor with the same values."""
        self.begin_again()
        for slot in self._read.slots:
            if not same_values(slot.tensor, slot.initial):
                _give(slot.tensor, slot.initial)


def _keys(slot: _BufferSlot) -> tuple[int, ...]:
    return slot.memory, id(slot.tensor), id(slot.table)


def _lacks_some(buffers: Mapping[str, Tensor | None]) -> bool:
    """Whether a name in a table has no tensor. (`None in values` would ask each tensor whether it equals None.)"""
    return any([buffer is None for buffer in buffers.values()])


def _filled(table: Mapping[str, Tensor | None], at_begin: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The entries of a table that held no tensor as the call began, since a forward fills or registers them."""
    return {name: tensor for name, tensor in table.items() if at_begin.get(name) is None}


def _fill(
    table: dict[str, Tensor | None], at_begin: Mapping[str, Tensor | None], entries: Mapping[str, Tensor | None]
) -> None:
    """Let these be such entries, and no others."""
    for name in _filled(table, at_begin).keys() - entries:
        del table[name]
    table.update(entries)


def _copied(buffers: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if buffer is None else buffer.detach().clone() for name, buffer in buffers.items()}


def _give(tensor: Tensor, values: Tensor) -> None:
    """Restore a buffer's values and shape: observers of quantization resize theirs.

    Not counted as a write: a graph that has saved the buffer finds its earlier values.
    """
    with torch.no_grad():
        if tensor.shape != values.shape:
            tensor.resize_(values.shape)
        tensor.data.copy_(values)


def _leaf_of_caller(slot: _BufferSlot) -> Tensor:
    """Return a buffer that requires a gradient: it is differentiated, so no copy may replace it."""
    if versions([slot.tensor])[0] != slot.version:
        raise CheckpointError(
            f"buffer '{slot.name}', which requires a gradient, was changed in place between the forward and the "
            "recomputation. Change it after backward()."
        )
    return slot.tensor


def _owners(modules: Sequence[int], memory: Sequence[int]) -> list[int]:
    """The number of each buffer's module; of modules whose buffers share memory, that of the first."""
    owners = list(modules)
    first: dict[int, int] = {}  # by address: where it stands first
    for index, address in enumerate(memory):
        earlier, later = owners[first.setdefault(address, index)], owners[index]
        if earlier != later:
            owners = [earlier if owner == later else owner for owner in owners]
    return owners


def _copies(slots: Sequence[_BufferSlot]) -> list[Tensor]:
    """Copies of what buffers were as the call began."""
    return copies([slot.initial for slot in slots], [slot.memory for slot in slots])


def _present(slot: _BufferSlot) -> Tensor:
    tensor = slot.table.get(slot.name)
    return slot.initial if tensor is None else tensor


def _touched(slot: _BufferSlot) -> bool:
    tensor = slot.table.get(slot.name)
    return tensor is not slot.tensor or versions([tensor])[0] != slot.version
