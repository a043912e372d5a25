"""The conformance suite of channels: `check_transport`.

    make_pair() --> ChannelEnds(outgoing, incoming, abort)   a check --in a thread--> done, failed, or not done in time

To try a channel, write a context manager that gives both its ends and a function that gives it up:

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from contextlib import contextmanager
    >>> from datetime import timedelta
    >>> from torch.distributed import HashStore
    >>> from pipeline.transports.distributed import Channels
    >>> @contextmanager
    ... def over_gloo():
    ...     store = HashStore()
    ...     with ThreadPoolExecutor() as threads:
    ...         connect = lambda rank: Channels(store, rank, [(0, 1)], timedelta(seconds=30))
    ...         source, target = threads.map(connect, [0, 1])
    ...     yield ChannelEnds(source.outgoing(1), target.incoming(0), target.abort)
    ...     source.close()
    ...     target.close()
    >>> check_transport(over_gloo)

Every check has a pair of its own and a thread of its own, so that one that would wait for ever is a failure as well.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import NoneType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipeline.transports.channel import ChannelError, Handle, IncomingChannel, OutgoingChannel


class ChannelEnds(NamedTuple):
    """Both ends of a channel, and what gives it up, which may be called from any thread."""

    outgoing: OutgoingChannel
    incoming: IncomingChannel
    abort: Callable[[], None]


MakePair: TypeAlias = Callable[[], AbstractContextManager[ChannelEnds]]


def check_transport(make_pair: MakePair, seconds: float = 20.0) -> None:
    """Try everything that a channel must do; of payloads, where it has them.

    Args:
        make_pair: returns a context manager that gives a ChannelEnds: a new channel.
        seconds: after which a check that has not come to its end has failed.

    Raises:
        AssertionError: a check failed. The message begins with its name.
    """
    for check in CHECKS:
        _run(check, make_pair, seconds)


def _run(check: Callable[[ChannelEnds], None], make_pair: MakePair, seconds: float) -> None:
    name = check.__name__.strip("_").replace("_", " ")
    with make_pair() as pair:
        thread = _Thread(partial(check, pair))
        thread.join(seconds)
        is_late = thread.is_alive()
        if is_late:
            pair.abort()
            thread.join(seconds)
    if is_late:
        raise AssertionError(f"{name}: not done after {seconds} s.")
    if thread.error is not None:
        raise AssertionError(f"{name}: {type(thread.error).__name__}: {thread.error}") from thread.error


class _Way(NamedTuple):
    """A way through a channel: one of its two streams, or its payloads.

    Attributes:
        name: of what goes there.
        device: where it is.
        least: the fewest bytes.
        send: begins to send a buffer; what it returns waits until that has gone.
        post: begins to receive so many bytes; what it returns waits for them.
    """

    name: str
    device: torch.device
    least: int
    send: Callable[[Tensor], Callable[[], object]]
    post: Callable[[int], Callable[[], Tensor]]


def _stream(pair: ChannelEnds, extra: bool) -> _Way:
    def post(nbytes: int) -> Callable[[], Tensor]:
        buffer = torch.zeros(nbytes, dtype=torch.uint8)
        handle = pair.incoming.post(buffer, extra)

        def take() -> Tensor:
            handle.wait()
            return buffer

        return take

    name = "extra buffer" if extra else "buffer"
    return _Way(name, torch.device("cpu"), 0, lambda buffer: pair.outgoing.send(buffer, extra).wait, post)


def _ways(pair: ChannelEnds) -> list[_Way]:
    ways = [_stream(pair, extra) for extra in (False, True)]
    out, into = pair.outgoing.payloads, pair.incoming.payloads
    if out is None or into is None:
        return ways

    def post(nbytes: int) -> Callable[[], Tensor]:
        take = into.post(nbytes)
        return lambda: take().cpu()

    def send(buffer: Tensor) -> Callable[[], object]:
        out.send(buffer.to(out.device, copy=True))
        return int  # it has gone when it has come

    return [*ways, _Way("payload", out.device, 1, send, post)]


def _what_is_sent_arrives_in_order(way: _Way) -> None:
    sent = [_bytes(16, seed) for seed in range(20)]
    _end(way, sent, [way.send(buffer) for buffer in sent], [way.post(16) for _ in sent])


def _what_is_sent_may_be_expected_before(way: _Way) -> None:
    sent = [_bytes(way.least + 5 * seed, seed) for seed in range(10)]
    expected, received = [way.post(len(buffer)) for buffer in sent], list[Tensor]()
    thread = _Thread(lambda: received.extend([take() for take in expected]))
    time.sleep(0.02)  # let whoever does not wait go wrong
    gone = [way.send(buffer) for buffer in sent]
    thread.end("whoever expects it")
    _end(way, sent, gone, [partial(received.__getitem__, index) for index in range(len(sent))])


def _what_is_sent_arrives_whole_up_to_4_megabytes(way: _Way) -> None:
    for size in (way.least, 1, 63, 64, 65, 4096, 65_537, 4 << 20):
        sent = _bytes(size, size)
        _end(way, [sent], [way.send(sent)], [way.post(size)])


def _hundreds_of_any_length_arrive_in_order(way: _Way) -> None:
    sent = [_bytes(max(way.least, 7919 * seed % 20_011), seed) for seed in range(300)]
    _end(way, sent, [way.send(buffer) for buffer in sent], [way.post(len(buffer)) for buffer in sent])


def _what_is_sent_need_not_be_kept_by_the_sender(way: _Way) -> None:
    gone = [way.send(_bytes(10_000, seed)) for seed in range(10)]
    gc.collect()
    others = [_bytes(10_000, 100 + seed).to(way.device) for seed in range(10)]
    _end(way, [_bytes(10_000, seed) for seed in range(10)], gone, [way.post(len(other)) for other in others])


def _no_way_waits_for_another(pair: ChannelEnds) -> None:
    for way in _ways(pair):
        others = [other for other in _ways(pair) if other.name != way.name]
        expected = [other.post(64) for other in others]
        first, last, between = _bytes(64, 0), _bytes(64, 1), _bytes(64, 2)
        gone = [way.send(first), way.send(last)]  # and the last is not expected yet
        _end(way, [first], [], [way.post(64)])
        for other, take in zip(others, expected, strict=True):
            _end(other, [between], [other.send(between)], [take])
        _end(way, [last], gone, [way.post(64)])


def _what_is_sent_fills_the_beginning_of_a_longer_buffer(pair: ChannelEnds) -> None:
    sent = [_bytes(size, size) for size in (0, 1, 64, 100_000)]
    posted = [torch.full((200_000,), 9, dtype=torch.uint8) for _ in sent]
    _wait([pair.incoming.post(buffer) for buffer in posted], [pair.outgoing.send(buffer) for buffer in sent])
    _assert_same("buffer", [buffer[: len(original)] for buffer, original in zip(posted, sent, strict=True)], sent)
    untouched = [bool((buffer[len(original) :] == 9).all()) for buffer, original in zip(posted, sent, strict=True)]
    assert all(untouched), "what lies beyond a shorter buffer has changed"


def _handles_may_be_waited_for_in_any_order_and_again(pair: ChannelEnds) -> None:
    sent = [_bytes(100 + seed, seed) for seed in range(6)]
    posted = [torch.zeros_like(buffer) for buffer in sent]
    sends = [pair.outgoing.send(buffer) for buffer in sent]
    receives = [pair.incoming.post(buffer) for buffer in posted]
    _wait(receives[::-1], sends[3:])
    for handle in sends[::-1]:
        handle.collect()
    _wait(receives, sends)
    _assert_same("buffer", posted, sent)


def _what_is_told_arrives_in_order(pair: ChannelEnds) -> None:
    sent = [_bytes(100 + seed, seed) for seed in range(6)]
    posted = [torch.zeros_like(buffer) for buffer in sent]
    for buffer, original in zip(posted, sent, strict=True):
        handle = pair.incoming.post(buffer)
        pair.outgoing.tell(original.clone())
        handle.wait()
    _assert_same("buffer", posted, sent)


def _what_has_been_waited_for_may_change(pair: ChannelEnds) -> None:
    def send() -> None:
        buffer = torch.empty(1000, dtype=torch.uint8)
        for seed in range(3):
            buffer.copy_(_bytes(1000, seed))
            pair.outgoing.send(buffer).wait()
        buffer.zero_()

    thread = _Thread(send)
    posted = [torch.zeros(1000, dtype=torch.uint8) for _ in range(3)]
    for buffer in posted:
        time.sleep(0.01)  # let the sender go as far as it may
        pair.incoming.post(buffer).wait()
    thread.end("the sender")
    _assert_same("buffer", posted, [_bytes(1000, seed) for seed in range(3)])


def _giving_up_wakes_whoever_waits_and_refuses_the_rest(pair: ChannelEnds) -> None:
    receives = [pair.incoming.post(torch.zeros(8, dtype=torch.uint8), extra=extra) for extra in (False, True)]
    threads = [_Thread(handle.wait) for handle in receives]
    _abort_soon(pair)
    for thread in threads:
        thread.end("a waiting receive", ChannelError)
    pair.abort()
    _assert_dead(lambda: pair.outgoing.send(_bytes(8, 0)).wait())
    _assert_dead(lambda: pair.incoming.post(_bytes(8, 0)).wait())


def _giving_up_wakes_whoever_waits_for_a_send(pair: ChannelEnds) -> None:
    sends = [pair.outgoing.send(_bytes(1 << 20, seed)) for seed in range(2)]
    threads = [_Thread(handle.wait) for handle in sends]
    _abort_soon(pair)
    for thread in threads:
        thread.end("a send", ChannelError, NoneType)  # a channel that keeps what is sent has done its part


def _both_ends_have_payloads_or_neither_has(pair: ChannelEnds) -> None:
    ends = [end is not None for end in (pair.outgoing.payloads, pair.incoming.payloads)]
    assert ends[0] == ends[1], "one end of the channel has payloads, and the other has not"


def _giving_up_ends_payloads_as_well(pair: ChannelEnds) -> None:
    out, into = pair.outgoing.payloads, pair.incoming.payloads
    if out is None or into is None:
        return
    first, second = into.post(8), into.post(8)
    thread = _Thread(first)
    _abort_soon(pair)
    thread.end("a payload", ChannelError, NoneType)  # where only a stream waits, the host has gone on
    for use in (second, lambda: into.post(8)(), lambda: out.send(_bytes(8, 0).to(out.device))):
        _assert_dead(use)


def _on_each_way(check: Callable[[_Way], None]) -> Callable[[ChannelEnds], None]:
    def run(pair: ChannelEnds) -> None:
        for way in _ways(pair):
            check(way)

    run.__name__ = check.__name__
    return run


CHECKS: tuple[Callable[[ChannelEnds], None], ...] = (
    _both_ends_have_payloads_or_neither_has,
    _on_each_way(_what_is_sent_arrives_in_order),
    _on_each_way(_what_is_sent_may_be_expected_before),
    _on_each_way(_what_is_sent_arrives_whole_up_to_4_megabytes),
    _on_each_way(_hundreds_of_any_length_arrive_in_order),
    _on_each_way(_what_is_sent_need_not_be_kept_by_the_sender),
    _no_way_waits_for_another,
    _what_is_sent_fills_the_beginning_of_a_longer_buffer,
    _handles_may_be_waited_for_in_any_order_and_again,
    _what_is_told_arrives_in_order,
    _what_has_been_waited_for_may_change,
    _giving_up_wakes_whoever_waits_and_refuses_the_rest,
    _giving_up_wakes_whoever_waits_for_a_send,
    _giving_up_ends_payloads_as_well,
)


class _Thread(threading.Thread):
    """Runs a function and keeps the error that it ended with."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self.error = error

    def end(self, label: str, *kinds: type) -> None:
        """Wait for the end, which is to be an error of one of these types; without any, none."""
        self.join()
        assert isinstance(self.error, kinds or NoneType), f"{label} ended with {self.error!r}"


def _abort_soon(pair: ChannelEnds) -> None:
    time.sleep(0.05)  # until whoever waits does
    pair.abort()


def _wait(receives: list[Handle], sends: list[Handle]) -> None:
    for handle in receives + sends:
        handle.wait()


def _end(
    way: _Way, sent: list[Tensor], gone: list[Callable[[], object]], expected: list[Callable[[], Tensor]]
) -> None:
    """Wait until all has arrived and gone, and compare."""
    received = [take() for take in expected]
    for wait in gone:
        wait()
    _assert_same(way.name, received, sent)


def _bytes(size: int, seed: int) -> Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _assert_same(name: str, received: list[Tensor], expected: list[Tensor]) -> None:
    for index, (buffer, original) in enumerate(zip(received, expected, strict=True)):
        assert torch.equal(buffer, original), f"{name} {index} of {len(expected)} is not what was sent"


def _assert_dead(use: Callable[[], object]) -> None:
    """It is refused soon: the end that has not given up itself learns of it from a buffer or from its host.

    The wait for the buffer from which it learns need not end; nor does one that went just before.
    """
    for _ in range(20):
        attempt = _Thread(use)
        attempt.join(0.1)
        if isinstance(attempt.error, ChannelError):
            return
        assert attempt.error is None, f"a channel that was given up ended with {attempt.error!r}"
        time.sleep(0.05)
    raise AssertionError("a channel that was given up is still of use")
