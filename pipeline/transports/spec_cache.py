"""The cache of message specs: it predicts each message from the last of its kind, and checks what came.

    begin("step", ["2F0", "2F1"])  -->  MessageSeries: slots, and the last spec of each

    header, 64 bytes: magic | call | place | digest of series and slots | bytes of tensors as predicted
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
    """The messages of a phase, in order, with the last spec of each."""

    def __init__(self, series: str, slots: tuple[str, ...], what: str) -> None:
        self.series = series
        self.slots = slots
        self.places = {slot: place for place, slot in enumerate(slots)}
        if len(self.places) < len(slots):
            raise ValueError(f"{what}: {series!r} has two messages of one name: {', '.join(slots)}.")
        self.call = 0
        self.digest = _digest(series, slots)
        self._last = [b""] * len(slots)  # the descriptions
        self._predicted = [NOTHING] * len(slots)

    def predicted(self, place: int) -> MessageSpec:
        """The predicted spec of the next message of this place."""
        return self._predicted[place]

    def learn(self, place: int, text: bytes) -> MessageSpec:
        """The spec of an announced message, from its description; it is the next prediction."""
        form = MessageSpec.read(text)
        is_steady = self._last[place] in (b"", text)
        self._last[place], self._predicted[place] = text, form if is_steady else NOTHING
        return form

    def header(self, place: int) -> tuple[int, ...]:
        """The header of a message that is as predicted, in numbers."""
        return _MAGIC, self.call, place, self.digest, self._predicted[place].packing.nbytes, 0, 0


class SpecCache:
    """The phases that an end remembers. Both ends begin the same ones in one order, so both forget the same."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._calls = 0
        self._known: OrderedDict[tuple[str, tuple[str, ...]], MessageSeries] = OrderedDict()

    def begin(self, series: str, slots: Sequence[str]) -> MessageSeries:
        key = (series, tuple(slots))
        course = self._known.pop(key, None) or MessageSeries(*key, self._what)
        self._known[key] = course
        if len(self._known) > SERIES_REMEMBERED:
            self._known.popitem(last=False)
        self._calls += 1
        course.call = self._calls
        return course

    def mistaken(self, course: MessageSeries, place: int, header: tuple[int, ...]) -> str:
        """The error text for a message other than the expected one."""
        expected = f"message {place} ({course.slots[place]}) of {course.series!r} in call {course.call}"
        magic, call, came, digest, predicted, *_ = header
        if magic != _MAGIC:
            return f"{self._what}: {expected} should have come, and what came is no message at all."
        if (call, came, digest) == (course.call, place, course.digest):
            return (
                f"{self._what}: {expected} came with {predicted} bytes of tensors, where this rank expected "
                f"{course.predicted(place).packing.nbytes}: the two ends no longer remember the same."
            )
        other = next((each for each in self._known.values() if each.digest == digest), None)
        name = f"of {other.series!r}" if other is not None else "of a series that this rank does not know"
        slot = f" ({other.slots[came]})" if other is not None else ""
        return (
            f"{self._what}: {expected} should have come, and message {came}{slot} {name} in call {call} came: the "
            "two ranks do not run the same calls in the same order."
        )


def _digest(series: str, slots: tuple[str, ...]) -> int:
    text = json.dumps([series, slots]).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)
