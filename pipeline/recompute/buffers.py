"""The contents of buffers before each chunk, for recomputations, and for the state after a failure.

    call begins   clone every buffer of the stage                                     initial
    F of chunk 0  compare by value: these modules change their buffers                mutated
    F of chunk i  clone the buffers of those modules first                            before[i]
    R of chunk i  runs on copies of before[i]: the buffers are changed once, by F
    failure       what changed goes back to initial

By value on the first chunk, because BatchNorm writes its running statistics without raising their version counters; by
version and identity after. (On a GPU, where the host would have to wait for values, calls 1, 2, 4, 8, ... look, and the
others believe them.) A module that begins to write later is caught by its counters, and has `initial` to go back
to; whatever changes unseen is found by value when the forwards are done, and is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.common.errors import CheckpointError
from pipeline.common.module_tables import buffers_of
from pipeline.data.pytrees import detached, same_values, storage_of
from pipeline.recompute.packed import Snapshot


class _Slot(NamedTuple):
    owner: int  # modules that change their buffers together: one, or several that share a buffer
    place: dict[str, Tensor | None]  # module._buffers
    name: str
    tensor: Tensor
    version: int
    initial: Tensor


class Buffers:
    """The buffers of one stage during one call.

    Args:
        modules: the modules of the stage.
        expected: who wrote theirs in an earlier call, as `writers` said; None: look at all values.
    """

    def __init__(self, modules: Sequence[nn.Module], expected: frozenset[int] | None = None) -> None:
        self._expected = expected
        tables = [buffers_of(module) for module in modules]
        self._places = [(table, table.copy()) for table in tables]  # those that are None too
        found = [
            (module, name, tensor)
            for module, (_, held) in zip(modules, self._places, strict=True)
            for name, tensor in held.items()
            if tensor is not None
        ]
        table_of = {id(module): table for module, table in zip(modules, tables, strict=True)}
        initial = Snapshot([tensor for _, _, tensor in found]).values() if found else []
        owners = _owners(found)
        self._slots = [
            _Slot(owner, table_of[id(module)], name, tensor, _version(tensor), copy)
            for owner, (module, name, tensor), copy in zip(owners, found, initial, strict=True)
        ]
        self._spare: list[Tensor] | None = None
        self._mutated: set[int] = set()  # owners
        self._before: dict[int, tuple[list[int], Snapshot]] = {}  # chunk -> which slots, what they held
        self._seen_first = False

    def __bool__(self) -> bool:
        return bool(self._slots)

    @property
    def ids(self) -> frozenset[int]:
        """The ids of the buffers, as they are when the call begins."""
        return frozenset([id(slot.tensor) for slot in self._slots])

    def hand_over(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Detach outputs; copy those that share memory with a buffer, which the next chunk may write."""
        places = {storage_of(_now(slot)) for slot in self._slots}
        return tuple([
            out.clone() if storage_of(out) in places else out for out in detached(list(tensors))
        ])

    def before_forward(self, chunk: int) -> None:
        """Clone what is known to change: a recomputation of this chunk may come."""
        if self._mutated:
            indices = [index for index, slot in enumerate(self._slots) if slot.owner in self._mutated]
            self._before[chunk] = indices, Snapshot([_now(self._slots[index]) for index in indices])

    def after_forward(self) -> None:
        """Learn which modules change their buffers."""
        fresh = [slot for slot in self._slots if slot.owner not in self._mutated]
        for slot in fresh:
            if _touched(slot) or (not self._seen_first and self._is_written(slot)):
                self._mutated.add(slot.owner)
        self._seen_first = True

    @property
    def writers(self) -> frozenset[int]:
        """The numbers of those who wrote their buffers in this call."""
        return frozenset(self._mutated)

    def _is_written(self, slot: _Slot) -> bool:
        """By value; on a GPU by what earlier calls have seen, since the host would have to wait."""
        if self._expected is not None and slot.tensor.device.type != "cpu":
            return slot.owner in self._expected
        return not same_values(_now(slot), slot.initial)

    def note_writes(self, modules: Iterable[nn.Module], what: str) -> None:
        """These modules' buffers are written now that all forwards have run; none of those has written them."""
        owners = {slot.owner for module in modules for slot in self._slots if slot.place is module._buffers}
        if owners & self._mutated:
            names = ", ".join(f"'{slot.name}'" for slot in self._slots if slot.owner in owners & self._mutated)
            raise CheckpointError(
                f"a batch norm of {what} wrote its running statistics ({names}) within a forward, where "
                "deferred_batch_norm=True puts them off: it is compiled, or its forward is its own. Use "
                "deferred_batch_norm=False."
            )
        self._mutated |= owners

    def check_unseen(self, what: str) -> None:
        """Raise if a buffer changed that was never seen to change."""
        for slot in self._slots:
            if slot.owner not in self._mutated and self._is_written(slot):
                raise CheckpointError(
                    f"buffer '{slot.name}' of {what} changed after chunk 0, without its version counter. Change it "
                    "with torch's in-place operations, in every chunk or in none, or use chunks=1."
                )

    @contextmanager
    def as_before(self, chunk: int) -> Iterator[None]:
        """Within: the modules see their buffers as they were before F of `chunk`. What they change is thrown away."""
        indices, snapshot = self._before.get(chunk, ([], None))
        before = dict(zip(indices, [] if snapshot is None else snapshot.copies(), strict=True))
        found = [slot.place.get(slot.name) for slot in self._slots]
        written = [tensor if tensor is None else _version(tensor) for tensor in found]
        changing = [index for index, slot in enumerate(self._slots) if slot.owner in self._mutated]
        others = [index for index in changing if index not in before]
        before.update(zip(others, Snapshot([self._slots[index].initial for index in others]).values(), strict=True))
        if self._spare is None:  # one that writes unseen must not write `initial`, to which a failure goes back
            self._spare = Snapshot([slot.initial for slot in self._slots]).values()
        for slot, spare in zip(self._slots, self._spare, strict=True):
            slot.place[slot.name] = _leaf_of_caller(slot) if slot.tensor.requires_grad else spare
        for index, copy in before.items():
            self._slots[index].place[self._slots[index].name] = copy
        try:
            yield
        finally:
            for slot, tensor in zip(self._slots, found, strict=True):
                slot.place[slot.name] = tensor
        for slot, tensor, version in zip(self._slots, found, written, strict=True):
            if tensor is not None and _version(tensor) != version:
                raise CheckpointError(
                    f"a recomputation wrote buffer '{slot.name}' by another way than its module's attribute (a list, a "
                    "closure). Write it as self." + slot.name + "."
                )

    def moved(self) -> bool:
        """Whether a buffer that this call only reads holds another value by now.

        A kept graph may have saved it, and autograd would not notice: BatchNorm writes without version counters. On a
        GPU nobody looks: the host would have to wait.
        """
        read = [slot for slot in self._slots if slot.owner not in self._mutated and slot.tensor.device.type == "cpu"]
        return any(not same_values(slot.tensor, slot.initial) for slot in read)

    def memory(self) -> Iterator[tuple[int, str]]:
        """Where each buffer is, and its name."""
        for slot in self._slots:
            if slot.tensor.numel():
                yield storage_of(slot.tensor), f"buffer '{slot.name}'"

    def written_memory(self) -> Iterator[int]:
        """Where the buffers are that changed."""
        for slot in self._slots:
            if slot.owner in self._mutated and slot.tensor.numel():
                yield storage_of(slot.tensor)

    def forget(self, chunk: int) -> None:
        """No recomputation of this chunk will come any more."""
        self._before.pop(chunk, None)

    def put_back(self, chunk: int) -> None:
        """Give the buffers that change the values that they had before F of `chunk`."""
        indices, snapshot = self._before.get(chunk, ([], None))
        for index, copy in zip(indices, [] if snapshot is None else snapshot.copies(), strict=True):
            slot = self._slots[index]
            if slot.place.get(slot.name) is not slot.tensor:  # the module replaces it; a graph may have saved it
                slot.place[slot.name] = copy
            else:
                _give(slot.tensor, copy)

    def roll_back(self) -> None:
        """Make every buffer what it was when the call began: the same tensor with the same values."""
        for place, tensors in self._places:
            place.clear()
            place.update(tensors)
        for slot in self._slots:
            if not same_values(slot.tensor, slot.initial):
                _give(slot.tensor, slot.initial)


def _give(tensor: Tensor, values: Tensor) -> None:
    """Make a buffer what it was, its shape too: observers of quantization resize theirs.

    Not counted as a write: a graph that has saved the buffer finds what it held.
    """
    with torch.no_grad():
        if tensor.shape != values.shape:
            tensor.resize_(values.shape)
        tensor.data.copy_(values)


def _leaf_of_caller(slot: _Slot) -> Tensor:
    """A buffer that requires a gradient is no record of values: it is differentiated, so it stays itself."""
    if _version(slot.tensor) != slot.version:
        raise CheckpointError(
            f"buffer '{slot.name}', which requires a gradient, was changed in place between the forward and the "
            "recomputation. Change it after backward()."
        )
    return slot.tensor


def _owners(found: Sequence[tuple[nn.Module, str, Tensor]]) -> list[int]:
    """A number for each buffer: the same for buffers of one module, and of modules whose buffers share memory."""
    group: dict[int, int] = {}  # by storage and by module
    for number, (module, _, tensor) in enumerate(found):
        keys = (id(module), storage_of(tensor))
        joined = {group[key] for key in keys if key in group}
        smallest = min(joined, default=number)
        if len(joined) > 1:
            group.update({key: smallest for key, value in group.items() if value in joined})
        group.update(dict.fromkeys(keys, smallest))
    return [group[id(module)] for module, _, _ in found]


def _now(slot: _Slot) -> Tensor:
    tensor = slot.place.get(slot.name)
    return slot.initial if tensor is None else tensor


def _touched(slot: _Slot) -> bool:
    tensor = slot.place.get(slot.name)
    return tensor is not slot.tensor or _version(tensor) != slot.version


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
