"""The mailbox: values on their way from the action that made them to the action that reads them.

    F(s, i)  --activations[name, i]-->  F(reader, i)
    B(s, i)  --gradients[name, i]---->  B(producer, i)

Each entry is put once and taken once; taking it is what frees it. A value for another place starts to move when it is
put, and has arrived when it is taken (transports/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from pipeline.common.places import Place
from pipeline.data.pytrees import Activations, Grads, Tree, Written
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

    def __len__(self) -> int:
        """The number of values under way."""
        return len(self._activations) + len(self._gradients)


def written_until(name: str, inbox: Sequence[Activations], writes: bool) -> Written:
    """The memory that a stage and those before it write. They write copies: who reads it later reads old numbers.

    Each stage tells the next one, so all that read later know of it, whatever way the memory came.

    Args:
        name: of the stage.
        inbox: the values that it has read.
        writes: whether it writes its input.

    Raises:
        RuntimeError: it reads what a stage before has written, or two of the tensors that it writes share memory.
    """
    memory = [identity for value in inbox for identity in value.memory]
    written = inbox[0].written
    writers = [writer for identity, writer in written if identity in memory]
    writers += [name] if writes and len(set(memory)) < len(memory) else []
    if writers:
        raise RuntimeError(
            f"{writers[0]} writes its input in place, and another tensor of that input, or a skip that a later stage "
            "pops, shares memory with it: the plain module would see it written, which a stage boundary cannot "
            "keep. Write to a copy (x * 2 instead of x.mul_(2)), or stash a clone."
        )
    return (*written, *[(identity, name) for identity in memory]) if writes else written


def sent(message: Activations, parcel: Parcel) -> Activations:
    """A message that holds the tensors that are sent: copies rather than their originals."""
    if parcel.tensors is message.tree.tensors:
        return message
    tensors = tuple([tensor for tensor in parcel.tensors if tensor is not None])
    return message._replace(tree=Tree(tensors, message.tree.skeleton))
