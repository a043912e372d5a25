"""The mailbox: values on their way from the action that made them to the action that reads them.

    F(s, i)  --activations[name, i]-->  F(reader, i)
    B(s, i)  --gradients[name, i]---->  B(producer, i)

Each entry is put once and taken once; taking it is what frees it. A value for another place starts to move when it is
put, and has arrived when it is taken (transports/).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

from pipeline.common.places import Place
from pipeline.data.pytrees import Activations, Grads, MemoryId, Tree
from pipeline.data.values import CALLER, Name, Value, Values
from pipeline.execution.p2p_plan import P2PPlan
from pipeline.transports.local import Local, Parcel


class Mailbox:
    """The values under way in one call, put and taken in the order of the table: here, those in one process.

    Args:
        values: the table.
        places: the place of each stage. The caller has none: it gives and takes tensors on any device.
        transport: moves tensors.

    Attributes:
        arrived: when the last value that came from another process was there, of `perf_counter`; -inf: none came.
    """

    arrived: float = -inf

    def __init__(self, values: Values, places: Mapping[int, Place], transport: Local) -> None:
        self._read_by = values.read_by
        self._made_by = values.made_by
        self._place = places.get
        self._is_one_place = len(set(places.values())) <= 1
        self._transport = transport
        self._activations: dict[tuple[Name, int], tuple[Activations, Parcel | None]] = {}  # by name and chunk
        self._gradients: dict[tuple[Name, int], tuple[Grads, Parcel | None]] = {}

    def begin(self, phase: int, messages: P2PPlan | None) -> None:
        """Begin a phase, before its first action.

        Args:
            phase: its number.
            messages: those of the phase from and to other processes. None: there are none.
        """

    def end(self) -> None:
        """End a phase, after its last action: everything that was sent to other processes has arrived."""

    def put(self, stage: int, chunk: int, outputs: Sequence[Activations]) -> None:
        """Post the values that `stage` (or the caller) made of `chunk`."""
        for row, message in zip(self._made_by[stage], outputs):
            self._put(row, chunk, message)

    def take(self, stage: int, chunk: int) -> list[Activations]:
        """Take the values that `stage` (or the caller) reads of `chunk`."""
        return [self._take(row, chunk) for row in self._read_by[stage]]

    def put_grads(self, stage: int, chunk: int, grads: Sequence[Grads]) -> None:
        """Post the gradients that `stage` (or the caller) has for the values it read."""
        for row, of_row in zip(self._read_by[stage], grads):
            self._put_grads(row, chunk, of_row)

    def take_grads(self, stage: int, chunk: int) -> list[Grads]:
        """Take the gradients of the values that `stage` (or the caller) made."""
        return [self._take_grads(row, chunk) for row in self._made_by[stage]]

    def _put(self, row: Value, chunk: int, message: Activations) -> None:
        parcel = None
        if not self._is_one_place or row.producer == CALLER:
            parcel = self._transport.send(message.tree.tensors, self._place(row.producer), self._place(row.reader))
            message = sent(message, parcel)
        self._activations[row.name, chunk] = message, parcel

    def _take(self, row: Value, chunk: int) -> Activations:
        activations, parcel = self._activations.pop((row.name, chunk))
        if parcel is not None:
            self._transport.receive(parcel)
        return activations

    def _put_grads(self, row: Value, chunk: int, grads: Grads) -> None:
        parcel = None
        if not self._is_one_place and row.reader != CALLER:  # an output's gradient is where the output is
            parcel = self._transport.send(grads, self._place(row.reader), self._place(row.producer))
            grads = parcel.tensors
        self._gradients[row.name, chunk] = grads, parcel

    def _take_grads(self, row: Value, chunk: int) -> Grads:
        grads, parcel = self._gradients.pop((row.name, chunk))
        return grads if parcel is None else self._transport.receive(parcel)

    def under_way(self, chunk: int) -> Iterator[MemoryId]:
        """Identities of the memory of those tensors of `chunk` that were made and are not read yet."""
        of_chunk = [message for (_, number), (message, _) in list(self._activations.items()) if number == chunk]
        return (memory for message in of_chunk for memory in message.memory)

    def __len__(self) -> int:
        """The number of values under way."""
        return len(self._activations) + len(self._gradients)


def check_alone(index: int, name: str, inbox: Sequence[Activations], under_way: Iterable[MemoryId]) -> None:
    """Refuse memory shared with the input of a stage that writes it: the stage writes a copy.

    Args:
        index: the stage that writes its input.
        name: how an error names it.
        inbox: the values that it has read.
        under_way: the memory of those tensors of the chunk that other stages will read.

    Raises:
        RuntimeError: another tensor shares that memory.
    """
    of_input = [memory for value in inbox for memory in value.memory]
    origins = {memory.origin for memory in of_input}
    other_origins = {memory.origin for memory in under_way}
    is_read_later = any(memory.until > index for memory in of_input)
    if len(origins) < len(of_input) or not origins.isdisjoint(other_origins) or is_read_later:
        raise RuntimeError(
            f"{name} writes its input in place, and another tensor of that input, or a skip that a later stage "
            "pops, shares memory with it: the plain module would see it written, which a stage boundary cannot "
            "keep. Write to a copy (x * 2 instead of x.mul_(2)), or stash a clone."
        )


def sent(message: Activations, parcel: Parcel) -> Activations:
    """A message that holds the tensors that are sent: copies rather than their originals."""
    if parcel.tensors is message.tree.tensors:
        return message
    tensors = tuple([tensor for tensor in parcel.tensors if tensor is not None])
    return message._replace(tree=Tree(tensors, message.tree.skeleton))
