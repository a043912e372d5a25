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

from pipeline.transports.channel import (
    ChannelError,
    ExpectedPayload,
    Handle,
    IncomingChannel,
    OutgoingChannel,
    PayloadReceiver,
    PayloadSender,
)


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


def _buffers_arrive_in_the_order_in_which_they_were_sent(pair: ChannelEnds) -> None:
    sent = [_bytes(16, seed) for seed in range(20)]
    posted = [torch.zeros(16, dtype=torch.uint8) for _ in sent]
    sends = [pair.outgoing.send(buffer) for buffer in sent]
    receives = [pair.incoming.post(buffer) for buffer in posted]
    _wait(receives, sends)
    _assert_same(posted, sent)


def _receives_may_be_posted_before_anything_is_sent(pair: ChannelEnds) -> None:
    sent = [_bytes(5 * seed, seed) for seed in range(10)]
    posted = [torch.zeros_like(buffer) for buffer in sent]
    receives = [pair.incoming.post(buffer) for buffer in posted]
    sends = [pair.outgoing.send(buffer) for buffer in sent]
    _wait(receives, sends)
    _assert_same(posted, sent)


def _buffers_of_nothing_to_4_megabytes_arrive_whole(pair: ChannelEnds) -> None:
    for size in (0, 1, 63, 64, 65, 4096, 65_537, 4 << 20):
        sent, posted = _bytes(size, size), torch.zeros(size, dtype=torch.uint8)
        _wait([pair.incoming.post(posted)], [pair.outgoing.send(sent)])
        _assert_same([posted], [sent])


def _what_is_sent_fills_the_beginning_of_a_longer_buffer(pair: ChannelEnds) -> None:
    sent = [_bytes(size, size) for size in (0, 1, 64, 100_000)]
    posted = [torch.full((200_000,), 9, dtype=torch.uint8) for _ in sent]
    _wait([pair.incoming.post(buffer) for buffer in posted], [pair.outgoing.send(buffer) for buffer in sent])
    _assert_same([buffer[: len(original)] for buffer, original in zip(posted, sent, strict=True)], sent)
    untouched = [bool((buffer[len(original) :] == 9).all()) for buffer, original in zip(posted, sent, strict=True)]
    assert all(untouched), "what lies beyond a shorter buffer has changed"


def _handles_may_be_waited_for_in_any_order_and_again(pair: ChannelEnds) -> None:
    sent = [_bytes(100 + seed, seed) for seed in range(6)]
    posted = [torch.zeros_like(buffer) for buffer in sent]
    sends = [pair.outgoing.send(buffer) for buffer in sent]
    receives = [pair.incoming.post(buffer) for buffer in posted]
    _wait(receives[::-1], sends[::-1])
    _wait(receives, sends)
    _assert_same(posted, sent)


def _the_two_streams_do_not_wait_for_each_other(pair: ChannelEnds) -> None:
    sent = [_bytes(64, seed) for seed in range(4)]
    posted = [torch.zeros_like(buffer) for buffer in sent]
    waiting = [pair.incoming.post(buffer) for buffer in posted[:2]]
    sends = [pair.outgoing.send(buffer, extra=True) for buffer in sent[2:]]
    _wait([pair.incoming.post(buffer, extra=True) for buffer in posted[2:]], sends)
    _assert_same(posted[2:], sent[2:])
    sends = [pair.outgoing.send(buffer) for buffer in sent[:2]]
    _wait(waiting, sends)
    _assert_same(posted, sent)


def _what_is_sent_need_not_be_kept_by_the_sender(pair: ChannelEnds) -> None:
    sends = [pair.outgoing.send(_bytes(10_000, seed)) for seed in range(10)]
    gc.collect()
    others = [_bytes(10_000, 100 + seed) for seed in range(10)]
    posted = [torch.zeros_like(buffer) for buffer in others]
    _wait([pair.incoming.post(buffer) for buffer in posted], sends)
    _assert_same(posted, [_bytes(10_000, seed) for seed in range(10)])


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
    _assert_same(posted, [_bytes(1000, seed) for seed in range(3)])


def _giving_up_wakes_whoever_waits_and_refuses_the_rest(pair: ChannelEnds) -> None:
    receives = [pair.incoming.post(torch.zeros(8, dtype=torch.uint8), extra=extra) for extra in (False, True)]
    threads = [_Thread(handle.wait) for handle in receives]
    _abort_soon(pair)
    for thread in threads:
        thread.end("a waiting receive", ChannelError)
    pair.abort()
    for begin in (pair.outgoing.send, pair.incoming.post):
        _assert_dead(begin)


def _giving_up_wakes_whoever_waits_for_a_send(pair: ChannelEnds) -> None:
    sends = [pair.outgoing.send(_bytes(1 << 20, seed)) for seed in range(2)]
    threads = [_Thread(handle.wait) for handle in sends]
    _abort_soon(pair)
    for thread in threads:
        thread.end("a send", ChannelError, NoneType)  # a channel that keeps what is sent has done its part


def _both_ends_have_payloads_or_neither_has(pair: ChannelEnds) -> None:
    ends = [end is not None for end in (pair.outgoing.payloads, pair.incoming.payloads)]
    assert ends[0] == ends[1], "one end of the channel has payloads, and the other has not"


def _payloads_arrive_in_the_order_in_which_they_were_sent(
    out: PayloadSender, into: PayloadReceiver, pair: ChannelEnds
) -> None:
    sent = [_bytes(size, seed) for seed, size in enumerate((16, 16, 1, 63, 64, 65, 4096, 16))]
    for buffer in sent:
        _send(out, buffer)
    _assert_same(_taken([into.post(buffer.numel()) for buffer in sent]), sent)


def _payloads_may_be_expected_before_they_are_sent(
    out: PayloadSender, into: PayloadReceiver, pair: ChannelEnds
) -> None:
    sent = [_bytes(100 + seed, seed) for seed in range(5)]
    expected, received = [into.post(buffer.numel()) for buffer in sent], list[Tensor]()
    thread = _Thread(lambda: received.extend(_taken(expected)))
    time.sleep(0.02)  # let whoever does not wait go wrong
    for buffer in sent:
        _send(out, buffer)
    thread.end("whoever expects payloads")
    _assert_same(received, sent)


def _payloads_of_megabytes_arrive_whole(out: PayloadSender, into: PayloadReceiver, pair: ChannelEnds) -> None:
    sent = [_bytes(4 << 20, seed) for seed in range(3)]
    for buffer in sent:
        _send(out, buffer)
        _assert_same(_taken([into.post(buffer.numel())]), [buffer])


def _payloads_and_the_two_streams_do_not_wait_for_each_other(
    out: PayloadSender, into: PayloadReceiver, pair: ChannelEnds
) -> None:
    sent = [_bytes(64, seed) for seed in range(4)]
    posted = [torch.zeros_like(buffer) for buffer in sent]
    waiting = [pair.incoming.post(posted[extra], extra=bool(extra)) for extra in (0, 1)]
    _send(out, sent[2])
    _assert_same(_taken([into.post(64)]), sent[2:3])
    _send(out, sent[3])  # and this one is not expected yet
    _wait(waiting, [pair.outgoing.send(sent[extra], extra=bool(extra)) for extra in (0, 1)])
    _assert_same(posted[:2], sent[:2])
    _assert_same(_taken([into.post(64)]), sent[3:])


def _a_payload_need_not_be_kept_by_its_sender(out: PayloadSender, into: PayloadReceiver, pair: ChannelEnds) -> None:
    for seed in range(10):
        _send(out, _bytes(10_000, seed))
    gc.collect()
    others = [_bytes(10_000, 100 + seed).to(out.device) for seed in range(10)]
    received = _taken([into.post(buffer.numel()) for buffer in others])
    _assert_same(received, [_bytes(10_000, seed) for seed in range(10)])


def _giving_up_ends_payloads_as_well(out: PayloadSender, into: PayloadReceiver, pair: ChannelEnds) -> None:
    first, second = into.post(8), into.post(8)
    thread = _Thread(lambda: (first.take(), None)[1])
    _abort_soon(pair)
    thread.end("a payload", ChannelError, NoneType)  # where only a stream waits, the host has gone on
    for name, use in (
        ("gives what was expected", second.take),
        ("expects payloads", lambda: into.post(8).take()),
        ("sends payloads", lambda: _send_on(out)),
    ):
        _assert_raises_channel_error(use, f"a channel that was given up still {name}")


def _with_payloads(
    check: Callable[[PayloadSender, PayloadReceiver, ChannelEnds], None]
) -> Callable[[ChannelEnds], None]:
    def run(pair: ChannelEnds) -> None:
        if pair.outgoing.payloads is not None and pair.incoming.payloads is not None:
            check(pair.outgoing.payloads, pair.incoming.payloads, pair)

    run.__name__ = check.__name__
    return run


CHECKS: tuple[Callable[[ChannelEnds], None], ...] = (
    _buffers_arrive_in_the_order_in_which_they_were_sent,
    _receives_may_be_posted_before_anything_is_sent,
    _buffers_of_nothing_to_4_megabytes_arrive_whole,
    _what_is_sent_fills_the_beginning_of_a_longer_buffer,
    _handles_may_be_waited_for_in_any_order_and_again,
    _the_two_streams_do_not_wait_for_each_other,
    _what_is_sent_need_not_be_kept_by_the_sender,
    _what_has_been_waited_for_may_change,
    _giving_up_wakes_whoever_waits_and_refuses_the_rest,
    _giving_up_wakes_whoever_waits_for_a_send,
    _both_ends_have_payloads_or_neither_has,
    _with_payloads(_payloads_arrive_in_the_order_in_which_they_were_sent),
    _with_payloads(_payloads_may_be_expected_before_they_are_sent),
    _with_payloads(_payloads_of_megabytes_arrive_whole),
    _with_payloads(_payloads_and_the_two_streams_do_not_wait_for_each_other),
    _with_payloads(_a_payload_need_not_be_kept_by_its_sender),
    _with_payloads(_giving_up_ends_payloads_as_well),
)


class _Thread(threading.Thread):
    """Runs a function and keeps the error that it ended with."""

    def __init__(self, function: Callable[[], None]) -> None:
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


def _send(out: PayloadSender, buffer: Tensor) -> None:
    out.send(buffer.to(out.device, copy=True))


def _send_on(out: PayloadSender) -> None:
    """Send until it is refused: the end that has not given up itself sees it as soon as its host tells."""
    while True:
        _send(out, _bytes(8, 0))
        time.sleep(0.001)


def _taken(expected: list[ExpectedPayload]) -> list[Tensor]:
    return [payload.take().cpu() for payload in expected]


def _bytes(size: int, seed: int) -> Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _assert_same(received: list[Tensor], expected: list[Tensor]) -> None:
    for index, (buffer, original) in enumerate(zip(received, expected, strict=True)):
        assert torch.equal(buffer, original), f"buffer {index} of {len(expected)} is not what was sent"


def _assert_dead(begin: Callable[[Tensor], Handle]) -> None:
    """Buffers are refused soon: the end that has not given up itself learns of it from a buffer or from its host.

    The wait for the buffer from which it learns need not end; nor does one that went just before.
    """
    for _ in range(20):
        attempt = _Thread(lambda: begin(torch.zeros(8, dtype=torch.uint8)).wait())
        attempt.join(0.1)
        if isinstance(attempt.error, ChannelError):
            return
        assert attempt.error is None, f"a channel that was given up ended with {attempt.error!r}"
        time.sleep(0.05)
    raise AssertionError("a channel that was given up still takes buffers")


def _assert_raises_channel_error(use: Callable[[], object], failure: str) -> None:
    try:
        use()
    except ChannelError:
        return
    raise AssertionError(failure)
