"""The cache of message specs: it predicts each message from the last of its kind, and checks what came.

    begin("step", ["2F0", "2F1"])  -->  MessageSeries: names, and the last spec of each

    header, 64 bytes: magic | call | index | digest of the names | bytes of tensors as predicted
                      | bytes of the description (0: as predicted) | bytes on the extra stream | unused

Both ends of a link begin the same phases in the same order and learn from the same messages, so that both predict and
forget the same, and know every header before it comes. One that differs is another message: the ranks do not run the
same calls. Where messages keep changing, nothing is predicted: a buffer as long as the last would be sent for nothing.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from pipeline.transports.message import NOTHING, MessageSpec

SERIES_REMEMBERED = 64
HEADER = struct.Struct("<7q8x")
_MAGIC = 0x6B636F74736E6550  # "Penstock"


class MessageSeries:
    """The messages of a phase, in order, with the last spec of each.

    Attributes:
        predicted: the spec of the next message of each index.
    """

    def __init__(self, name: str, names: tuple[str, ...]) -> None:
        self.name = name
        self.names = names
        self.index_of = {message: index for index, message in enumerate(names)}
        assert len(self.index_of) == len(names)  # no two messages have one name
        self.call = 0
        self.digest = _digest(name, names)
        self._last = [b""] * len(names)  # the descriptions
        self.predicted = [NOTHING] * len(names)

    def learn(self, index: int, text: bytes) -> MessageSpec:
        """The spec of an announced message, from its description; it is the next prediction."""
        spec = MessageSpec.read(text)
        is_steady = self._last[index] in (b"", text)
        self._last[index], self.predicted[index] = text, spec if is_steady else NOTHING
        return spec

    def header(self, index: int, length: int = 0, extra: int = 0) -> bytes:
        """The header of a message.

        Args:
            length: of the description, in bytes; 0: the message is as predicted.
            extra: the bytes on the extra stream.
        """
        nbytes = self.predicted[index].packing.nbytes
        return HEADER.pack(_MAGIC, self.call, index, self.digest, nbytes, length, extra)


class SpecCache:
    """The phases that an end remembers. Both ends begin the same ones in one order, so both forget the same."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._calls = 0
        self._series: OrderedDict[tuple[str, tuple[str, ...]], MessageSeries] = OrderedDict()

    def begin(self, name: str, names: Sequence[str]) -> MessageSeries:
        """Begin a phase of the series of this name, with these messages."""
        key = (name, tuple(names))
        series = self._series.pop(key, None) or MessageSeries(*key)
        self._series[key] = series
        if len(self._series) > SERIES_REMEMBERED:
            self._series.popitem(last=False)
        self._calls += 1
        series.call = self._calls
        return series

    def mistaken(self, series: MessageSeries, index: int, header: tuple[int, ...]) -> str:
        """The error text for a message other than the expected one."""
        expected = f"message {index} ({series.names[index]}) of {series.name!r} in call {series.call}"
        magic, call, sent_index, digest, predicted, *_ = header
        if magic != _MAGIC:
            return f"{self._label}: {expected} should have come, and what came is no message at all."
        if (call, sent_index, digest) == (series.call, index, series.digest):
            return (
                f"{self._label}: {expected} came with {predicted} bytes of tensors, where this rank expected "
                f"{series.predicted[index].packing.nbytes}: the two ends no longer remember the same."
            )
        sent_series = next((candidate for candidate in self._series.values() if candidate.digest == digest), None)
        whose = f"of {sent_series.name!r}" if sent_series is not None else "of a series that this rank does not know"
        shown = f" ({sent_series.names[sent_index]})" if sent_series is not None else ""
        return (
            f"{self._label}: {expected} should have come, and message {sent_index}{shown} {whose} in call {call} came: "
            "the two ranks do not run the same calls in the same order."
        )


def _digest(name: str, names: tuple[str, ...]) -> int:
    text = json.dumps([name, names]).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)
