"""A message, and its spec: all that it is but the numbers in its tensors.

    Message --describe--> JSON text, over the channel --MessageSpec.read--> MessageSpec --message(tensors)--> Message

Both ends of a link keep the spec of the last message and predict the next one by it.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from torch import Tensor

from pipeline.data.pytrees import Activations, MemoryId, Skeleton, Tree, Written
from pipeline.transports.codec import decode, encode, may_be_shared, same_skeleton
from pipeline.transports.packing import Packing


class Message(NamedTuple):
    """A value with its tensors apart.

    Attributes:
        tensors: those of the value, in order.
        skeleton: the rest of the value; None: the value is one tensor.
        needs_grad: which of the tensors need a gradient.
        memory: the identity of each one's memory.
        written: the memory that stages before wrote copies of.
    """

    tensors: tuple[Tensor | None, ...]
    skeleton: Skeleton | None = None
    needs_grad: tuple[bool, ...] = ()
    memory: tuple[MemoryId, ...] = ()
    written: Written = ()

    @classmethod
    def of(cls, activations: Activations) -> Message:
        """The message of a value whose tensors may need gradients."""
        (tensors, skeleton), needs_grad, memory, written = activations
        return cls(tensors, skeleton, needs_grad, memory, written)

    @property
    def tree(self) -> Tree:
        """The value, none of whose tensors is missing."""
        return Tree(tuple([tensor for tensor in self.tensors if tensor is not None]), self.skeleton)

    @property
    def activations(self) -> Activations:
        """The inverse of `of`."""
        return Activations(self.tree, self.needs_grad, self.memory, self.written)


class MessageSpec(NamedTuple):
    """All that a message is but the numbers in its tensors.

    It shares no object with a message, so that no user can change what both ends keep.

    Attributes:
        as_payload: its tensors go as a payload, from device to device, and not with the header.
    """

    packing: Packing
    skeleton: Skeleton | None
    needs_grad: tuple[bool, ...]
    memory: tuple[MemoryId, ...]
    written: Written
    written_skeleton: Any
    as_payload: bool = False

    @property
    def beside_header(self) -> int:
        """The bytes of tensors that go with the header."""
        return 0 if self.as_payload else self.packing.nbytes

    @classmethod
    def read(cls, text: bytes) -> MessageSpec:
        """Read what `spec_text` wrote.

        Raises:
            LookupError: it names a class that this process does not know.
        """
        packed, as_payload, skeleton = json.loads(text)
        specs, needs_grad, memory, written = decode(packed)
        return cls(Packing(specs), decode(skeleton), needs_grad, memory, written, skeleton, as_payload)

    def says(self, message: Message) -> bool:
        """Whether a message has this spec."""
        return (
            self.needs_grad == message.needs_grad
            and self.memory == message.memory
            and self.written == message.written
            and same_skeleton(self.skeleton, message.skeleton)
        )

    def message(self, tensors: tuple[Tensor | None, ...]) -> Message:
        """A message with this spec, whose containers its reader may write."""
        skeleton = self.skeleton
        if skeleton is not None and not may_be_shared(skeleton.spec):
            skeleton = decode(self.written_skeleton)
        return Message(tensors, skeleton, self.needs_grad, self.memory, self.written)


NOTHING = MessageSpec(Packing(()), None, (), (), (), None)


def spec_text(message: Message, packing: Packing, label: str, as_payload: bool = False) -> bytes:
    """The spec of a message, as text.

    Args:
        packing: of its tensors.
        label: how an error names it: "2F0 from rank 0 to rank 1".
        as_payload: its tensors go as a payload.

    Raises:
        TypeError: its structure cannot be written. The message says why, and what to do.
    """
    try:
        packed = [packing.specs, message.needs_grad, message.memory, message.written]
        text = encode([packed, as_payload, message.skeleton])
    except TypeError as error:
        raise TypeError(f"{label} holds {error}") from None
    return json.dumps(text).encode()
