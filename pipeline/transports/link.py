"""How does a letter get over a channel, when its receiver must know before how long it is?

    Sender.send("2F0", letter) --[header | tensors]-->  Receiver.receive("2F0")
                  as predicted     buffers as long as predicted are posted ahead

Both ends remember for each message of a series what it was like the last time it was sent. The letter that looks like
that, as nearly every one does, goes as one buffer: a header of 64 bytes and its tensors. Any other one is announced:

    as predicted   stream        [header | tensors]
    otherwise      stream        [header | nothing, as long as predicted]
                   extra stream  [what the letter is like, as JSON | gap | tensors]

so a posted buffer always has the size of what is sent into it, and both ends know from then on. The header says
which message of which call it begins; one that is not what was expected is an error at once, never taken for another.

Terms: a phase = the messages that one begin() announces; series = the name of phases that are alike; slot = the name
of a message in its phase; place = which of them it is.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.transports.channel import Handle, Incoming, Outgoing
from pipeline.transports.codec import decode, decode_plain, encode, encode_plain, may_be_shared, same_skeleton
from pipeline.transports.packing import ALIGNMENT, Packing, settle
from pipeline.trees import Skeleton

SERIES_REMEMBERED = 64
_HEADER = struct.Struct("<8q")  # magic, call, place, digest, predicted, announced, and of that the description, all
_MAGIC = 0x6B636F74736E6550  # "Penstock"
_HOST = torch.device("cpu")


class Letter(NamedTuple):
    """What one message holds.

    Attributes:
        tensors: where they stand in the value.
        skeleton: the rest of the value; None: the value is one tensor.
        needs_grad: which of the tensors want a gradient.
        memory: what stands for the memory of each, in tuples, whole numbers and None.
    """

    tensors: tuple[Tensor | None, ...]
    skeleton: Skeleton | None = None
    needs_grad: tuple[bool, ...] = ()
    memory: tuple[object, ...] = ()


class Sender:
    """The end of a channel where letters are sent.

    Args:
        outgoing: the channel. Nobody else sends on it.
        what: how errors name it: "rank 0 to rank 1".
    """

    def __init__(self, outgoing: Outgoing, what: str) -> None:
        self._outgoing = outgoing
        self._what = what
        self._courses = _Courses(what)
        self._course: _Course | None = None
        self._sent: list[tuple[Handle, ...]] = []
        self._sizes: list[int] = []
        self._reaped = 0
        self._held = 0

    @property
    def held_bytes(self) -> int:
        """How many bytes of buffers are kept, since nobody knows yet that they have been received."""
        return self._held

    def begin(self, series: str, slots: Sequence[str]) -> None:
        """Begin a phase: these messages will be sent, in this order. The receiver begins the same.

        Args:
            series: phases of one name are alike, so that each predicts the next.
            slots: the names of the messages, each once.

        Raises:
            RuntimeError: the phase before has not been finished.
        """
        _check_finished(self._course, self._what)
        self._course = self._courses.begin(series, slots)
        self._sent, self._sizes, self._reaped = [], [], 0

    def send(self, slot: str, letter: Letter) -> None:
        """Send the next message. Never blocks; nothing of the letter is kept, only a packed copy.

        Raises:
            RuntimeError: it is not the turn of this message.
            TypeError: the letter holds something that cannot be sent.
            ChannelError: the channel is dead.
        """
        course = self._course
        place = len(self._sent)
        if course is None or place == len(course.slots) or course.slots[place] != slot:
            raise RuntimeError(self._not_next(slot))
        form = course.forms[place]
        tensors = letter.tensors
        fits = form.packing.fits(tensors)
        if not fits:
            tensors = settle(tensors, f"{slot} from {self._what}")
            fits = form.packing.fits(tensors)
        if fits and form.says(letter):
            buffer = form.packing.pack(_tensor_of(course.header(place)), tensors)
            self._keep(buffer.numel(), self._outgoing.send(buffer))
        else:
            self._announce(course, place, letter, tensors)

    def reap(self, count: int) -> None:
        """Let go of the first `count` messages of this phase, which are known to have been received.

        Raises:
            RuntimeError: so many have not been sent.
            ChannelError: the channel is dead.
        """
        if count > len(self._sent):
            sent = len(self._sent)
            raise RuntimeError(f"{self._what}: {count} messages cannot have been received: {sent} were sent.")
        while self._reaped < count:
            for handle in self._sent[self._reaped]:
                handle.wait()
            self._sent[self._reaped] = ()
            self._held -= self._sizes[self._reaped]
            self._reaped += 1

    def finish(self) -> None:
        """End the phase: wait until all that was sent may be let go.

        Raises:
            RuntimeError: not all messages of the phase have been sent.
            ChannelError: the channel is dead.
        """
        course = self._course
        if course is None:
            raise RuntimeError(f"{self._what}: no phase has begun.")
        if len(self._sent) < len(course.slots):
            missing = course.slots[len(self._sent)]
            raise RuntimeError(
                f"{self._what}: {len(self._sent)} of the {len(course.slots)} messages of {course.series!r} were sent; "
                f"{missing} is the first that was not."
            )
        self.reap(len(self._sent))
        self._course = None

    def _announce(
        self, course: _Course, place: int, letter: Letter, tensors: tuple[Tensor | None, ...]
    ) -> None:
        """Send a letter that is not as predicted, and predict the next one by it."""
        what = f"{course.slots[place]} from {self._what}"
        text = _written(letter, Packing.of(tensors), what)
        form = _Form.read(text)  # as the receiver does
        rest = form.packing.pack(_tensor_of(text + bytes(-len(text) % ALIGNMENT)), tensors)
        predicted = course.forms[place].packing.nbytes
        header = _tensor_of(course.header(place, len(text), rest.numel()))
        first = torch.cat((header, torch.zeros(predicted, dtype=torch.uint8, device=_HOST)))
        course.forms[place] = form
        self._keep(
            first.numel() + rest.numel(), self._outgoing.send(first), self._outgoing.send(rest, extra=True)
        )

    def _keep(self, nbytes: int, *handles: Handle) -> None:
        self._sent.append(handles)
        self._sizes.append(nbytes)
        self._held += nbytes

    def _not_next(self, slot: str) -> str:
        course = self._course
        if course is None:
            return f"{self._what}: {slot} was sent, but no phase has begun."
        if len(self._sent) == len(course.slots):
            return f"{self._what}: {slot} was sent, but all messages of {course.series!r} have been sent."
        return f"{self._what}: {slot} was sent where {course.slots[len(self._sent)]} is next in {course.series!r}."


class Receiver:
    """The end of a channel where letters arrive.

    Args:
        incoming: the channel. Nobody else receives on it.
        what: how errors name it: "rank 0 to rank 1".
        window: how many receives are posted ahead.
        device: where tensors shall be; None: on the host.
    """

    def __init__(
        self, incoming: Incoming, what: str, window: int = 3, device: torch.device | None = None
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}.")
        self._incoming = incoming
        self._what = what
        self._window = window
        self._device = device or _HOST
        self._courses = _Courses(what)
        self._course: _Course | None = None
        self._posted: deque[tuple[Tensor, Handle]] = deque()
        self._arrived: dict[int, _Arrival] = {}
        self._position = 0

    @property
    def position(self) -> int:
        """How many messages of this phase have been received, in order."""
        return self._position

    def begin(self, series: str, slots: Sequence[str]) -> None:
        """Begin a phase, as the sender does, and post the first receives.

        Raises:
            RuntimeError: the phase before has not been finished.
            ChannelError: the channel is dead.
        """
        _check_finished(self._course, self._what)
        self._course = self._courses.begin(series, slots)
        self._position = 0
        self._post_ahead(self._course)

    def receive(self, slot: str) -> Letter:
        """Wait for a message. Those before it are received too, and kept until they are asked for.

        Raises:
            RuntimeError: no such message is expected, or another one has come.
            ChannelError: the channel is dead.
        """
        course = self._course
        place = None if course is None else course.places.get(slot)
        if course is None or place is None or place < self._position and place not in self._arrived:
            raise RuntimeError(self._not_expected(slot))
        while self._position <= place:
            self._receive_next(course)
        form, buffer, start = self._arrived.pop(place)
        return form.letter(form.packing.unpack(buffer, start, self._device))

    def finish(self) -> None:
        """End the phase.

        Raises:
            RuntimeError: not all messages of the phase have been asked for.
        """
        course = self._course
        if course is None:
            raise RuntimeError(f"{self._what}: no phase has begun.")
        missing = [*sorted(self._arrived), *range(self._position, len(course.slots))]
        if missing:
            names = ", ".join(course.slots[place] for place in missing[:5])
            raise RuntimeError(
                f"{self._what}: {len(missing)} of the {len(course.slots)} messages of {course.series!r} were not "
                f"asked for: {names}{', ...' if len(missing) > 5 else ''}."
            )
        self._course = None

    def _post_ahead(self, course: _Course) -> None:
        while len(self._posted) < self._window and self._position + len(self._posted) < len(course.slots):
            form = course.forms[self._position + len(self._posted)]
            buffer = self._buffer(_HEADER.size + form.packing.nbytes)
            self._posted.append((buffer, self._incoming.post(buffer)))

    def _receive_next(self, course: _Course) -> None:
        """Wait for the message at `position`, and know what is in it."""
        buffer, handle = self._posted.popleft()
        handle.wait()
        place = self._position
        header = _HEADER.unpack_from(_memory_of(buffer))
        expected = course.expected(place)
        if header == expected:
            self._arrived[place] = _Arrival(course.forms[place], buffer, _HEADER.size)
        elif header[:5] == expected[:5] and header[5] == 1:
            self._arrived[place] = self._receive_announced(course, place, *header[6:])
        else:
            raise RuntimeError(self._courses.mistaken(course, place, header))
        self._position += 1
        self._post_ahead(course)

    def _receive_announced(self, course: _Course, place: int, length: int, nbytes: int) -> _Arrival:
        buffer = self._buffer(nbytes)
        self._incoming.post(buffer, extra=True).wait()
        try:
            form = _Form.read(bytes(_memory_of(buffer[:length])))
        except LookupError as error:
            raise RuntimeError(f"{course.slots[place]} from {self._what} cannot be read: {error.args[0]}") from error
        course.forms[place] = form
        return _Arrival(form, buffer, length + -length % ALIGNMENT)

    def _buffer(self, nbytes: int) -> Tensor:
        """Memory to receive into; where a GPU copies from it, in pages that do not move."""
        return torch.empty(nbytes, dtype=torch.uint8, device=_HOST, pin_memory=self._device.type == "cuda")

    def _not_expected(self, slot: str) -> str:
        course = self._course
        if course is None:
            return f"{self._what}: {slot} was asked for, but no phase has begun."
        if slot in course.places:
            return f"{self._what}: {slot} was asked for twice in {course.series!r}."
        return f"{self._what}: {slot} was asked for, which is not in {course.series!r} ({', '.join(course.slots)})."


class _Form(NamedTuple):
    """What a message looks like: all of a letter but the numbers in its tensors.

    Nothing in it is anybody else's, so that nobody can change what both ends remember.
    """

    packing: Packing
    skeleton: Skeleton | None
    needs_grad: tuple[bool, ...]
    memory: tuple[object, ...]
    written_skeleton: Any

    @classmethod
    def read(cls, text: bytes) -> _Form:
        skeleton, plain = json.loads(text)
        packing, needs_grad, memory = decode_plain(plain)
        return cls(Packing.from_plain(packing), decode(skeleton), needs_grad, memory, skeleton)

    def says(self, letter: Letter) -> bool:
        """Whether a letter is like this, its tensors aside."""
        return (
            self.needs_grad == letter.needs_grad
            and self.memory == letter.memory
            and same_skeleton(self.skeleton, letter.skeleton)
        )

    def letter(self, tensors: tuple[Tensor | None, ...]) -> Letter:
        """A letter like this; what its reader may write in is its own."""
        skeleton = self.skeleton
        if skeleton is not None and not may_be_shared(skeleton.spec):
            skeleton = decode(self.written_skeleton)
        return Letter(tensors, skeleton, self.needs_grad, self.memory)


def _written(letter: Letter, packing: Packing, what: str) -> bytes:
    """What a letter is like."""
    try:
        skeleton = encode(letter.skeleton)
    except TypeError as error:
        raise TypeError(f"{what} holds {error}") from None
    return json.dumps([skeleton, encode_plain([packing.plain(), letter.needs_grad, letter.memory])]).encode()


class _Arrival(NamedTuple):
    """A message that has been received: what it is like, and where its tensors begin in which buffer."""

    form: _Form
    buffer: Tensor
    start: int


_NOTHING = _Form(Packing(()), None, (), (), None)


class _Course:
    """The messages of a phase, in order, and what each was like the last time."""

    def __init__(self, series: str, slots: tuple[str, ...], what: str) -> None:
        self.series = series
        self.slots = slots
        self.places = {slot: place for place, slot in enumerate(slots)}
        if len(self.places) < len(slots):
            raise ValueError(f"{what}: {series!r} has two messages of one name: {', '.join(slots)}.")
        self.forms = [_NOTHING] * len(slots)
        self.call = 0
        self.digest = _digest(series, slots)

    def header(self, place: int, length: int = 0, nbytes: int = 0) -> bytes:
        """The first 64 bytes of a message.

        Args:
            length: of the description on the extra stream, in bytes. 0: the message is as predicted.
            nbytes: of all that goes there.
        """
        return _HEADER.pack(*self.expected(place)[:5], length > 0, length, nbytes)

    def expected(self, place: int) -> tuple[int, ...]:
        """The header of a message that is as predicted, in numbers."""
        return _MAGIC, self.call, place, self.digest, self.forms[place].packing.nbytes, 0, 0, 0


class _Courses:
    """The phases that an end remembers. Both ends begin the same ones in one order, so both forget the same."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._calls = 0
        self._known: OrderedDict[tuple[str, tuple[str, ...]], _Course] = OrderedDict()

    def begin(self, series: str, slots: Sequence[str]) -> _Course:
        key = (series, tuple(slots))
        course = self._known.pop(key, None) or _Course(*key, self._what)
        self._known[key] = course
        if len(self._known) > SERIES_REMEMBERED:
            self._known.popitem(last=False)
        self._calls += 1
        course.call = self._calls
        return course

    def mistaken(self, course: _Course, place: int, header: tuple[int, ...]) -> str:
        """How an error says that another message has come than was expected."""
        expected = f"message {place} ({course.slots[place]}) of {course.series!r} in call {course.call}"
        magic, call, came, digest, predicted, *_ = header
        if magic != _MAGIC:
            return f"{self._what}: {expected} should have come, and what came is no message at all."
        if (call, came, digest) == (course.call, place, course.digest):
            return (
                f"{self._what}: {expected} came with {predicted} bytes of tensors, where this rank expected "
                f"{course.forms[place].packing.nbytes}: the two ends no longer remember the same."
            )
        other = next((each for each in self._known.values() if each.digest == digest), None)
        name = f"of {other.series!r}" if other is not None else "of a series that this rank does not know"
        slot = f" ({other.slots[came]})" if other is not None and came < len(other.slots) else ""
        return (
            f"{self._what}: {expected} should have come, and message {came}{slot} {name} in call {call} came: the "
            "two ranks do not run the same calls in the same order."
        )


def _digest(series: str, slots: tuple[str, ...]) -> int:
    text = json.dumps([series, slots]).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _memory_of(buffer: Tensor) -> Any:
    return buffer.numpy()


def _check_finished(course: _Course | None, what: str) -> None:
    if course is not None:
        raise RuntimeError(f"{what}: {course.series!r} has not been finished, and another phase begins.")
