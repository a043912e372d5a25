import re
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pipeline.transports.channel import ChannelError, Handle, Incoming, Outgoing
from pipeline.transports.distributed import Channels
from pipeline.transports.testing import CHECKS, Pair, check_transport, local_pair, rendezvous_pair

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


@contextmanager
def gloo_pair():
    """Both ends of a channel over gloo in this process."""
    store, ends = dist.HashStore(), {}

    def connect(rank):
        ends[rank] = Channels(store, "suite", rank, [(0, 1)], timedelta(seconds=30))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)
    yield Pair(ends[0].outgoing(1), ends[1].incoming(0), ends[1].abort)
    for end in ends.values():
        end.close()


@pytest.mark.parametrize("make_pair", [local_pair, rendezvous_pair, gloo_pair])
def test_a_channel_that_does_what_it_must_passes_every_check(make_pair):
    check_transport(make_pair)


def test_a_send_of_the_local_channel_is_done_at_once():
    with local_pair() as pair:
        pair.outgoing.send(torch.zeros(3, dtype=torch.uint8)).wait()


def test_a_send_of_the_rendezvous_channel_is_done_when_its_receive_is_posted():
    with rendezvous_pair() as pair:
        sends = [pair.outgoing.send(torch.zeros(3, dtype=torch.uint8)) for _ in range(2)]
        done = []

        def wait():
            for handle in sends:
                handle.wait()
                done.append(handle)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        for count in (1, 2):
            time.sleep(0.05)
            assert len(done) == count - 1
            pair.incoming.post(torch.zeros(3, dtype=torch.uint8)).wait()
        thread.join(10)
        assert len(done) == 2


@pytest.mark.parametrize("make_pair", [local_pair, rendezvous_pair])
def test_a_buffer_of_another_size_than_what_is_sent_is_an_error(make_pair):
    for size in (2, 4):
        with make_pair() as pair:
            sent = pair.outgoing.send(torch.zeros(3, dtype=torch.uint8))
            posted = pair.incoming.post(torch.zeros(size, dtype=torch.uint8))
            for handle in (posted,) if make_pair is local_pair else (posted, sent):
                with pytest.raises(RuntimeError, match=f"3 bytes were sent where {size} were expected"):
                    handle.wait()


# ----------------------------------------------------------------------------------- channels that are not as they must


class Ends(Outgoing, Incoming):
    """A channel over a good one; below, each class does one thing wrong."""

    def __init__(self, pair):
        self.pair = pair

    def send(self, buffer, extra=False):
        return self.pair.outgoing.send(buffer, extra)

    def post(self, buffer, extra=False):
        return self.pair.incoming.post(buffer, extra)

    def abort(self):
        self.pair.abort()


class Done(Handle):
    def wait(self):
        pass


class Reorders(Ends):
    """Every second buffer is let past by the next."""

    late = None

    def send(self, buffer, extra=False):
        if self.late is None or self.late.numel() != buffer.numel():
            self.late = buffer
            return Done()
        super().send(buffer, extra)
        late, self.late = self.late, None
        return super().send(late, extra)


class Truncates(Ends):
    def send(self, buffer, extra=False):
        return super().send(torch.cat((buffer[:-1], buffer[-1:] * 0)), extra)


class LosesTheEndOfMegabytes(Ends):
    def send(self, buffer, extra=False):
        buffer = buffer.clone()
        buffer[1 << 20 :] = 0
        return super().send(buffer, extra)


class DropsTheExtraStream(Ends):
    def send(self, buffer, extra=False):
        return Done() if extra else super().send(buffer)


class HasOneStream(Ends):
    def send(self, buffer, extra=False):
        return super().send(buffer)

    def post(self, buffer, extra=False):
        return super().post(buffer)


class BlocksInSend(Ends):
    def send(self, buffer, extra=False):
        handle = super().send(buffer, extra)
        handle.wait()
        return handle


class BlocksInPost(Ends):
    def post(self, buffer, extra=False):
        handle = super().post(buffer, extra)
        handle.wait()
        return handle


class CannotSendNothing(Ends):
    def send(self, buffer, extra=False):
        return super().send(buffer, extra) if buffer.numel() else Done()


class IsDoneBeforeItHasCome(Ends):
    def post(self, buffer, extra=False):
        super().post(buffer, extra)
        return Done()


class IsDoneBeforeItHasGone(Ends):
    """Over a channel whose sends take what they find when their receive is posted."""

    def send(self, buffer, extra=False):
        super().send(buffer, extra)
        return Done()


class WaitsOnce(Ends):
    class Once(Handle):
        def __init__(self, handle):
            self.handle = handle

        def wait(self):
            self.handle, handle = None, self.handle
            handle.wait()

    def post(self, buffer, extra=False):
        return self.Once(super().post(buffer, extra))


class IsDeafToAbort(Ends):
    def abort(self):
        pass


class AbortsWithAnotherError(Ends):
    class Translated(Handle):
        def __init__(self, handle):
            self.handle = handle

        def wait(self):
            try:
                self.handle.wait()
            except ChannelError as error:
                raise ValueError("aborted") from error

    def post(self, buffer, extra=False):
        return self.Translated(super().post(buffer, extra))


class AbortsSendsWithAnotherError(AbortsWithAnotherError):
    def send(self, buffer, extra=False):
        return self.Translated(super().send(buffer, extra))

    def post(self, buffer, extra=False):
        return Ends.post(self, buffer, extra)


class GoesOnAfterAbort(Ends):
    gone = False

    def abort(self):
        self.gone = True
        super().abort()

    def send(self, buffer, extra=False):
        return Done() if self.gone else super().send(buffer, extra)


FAULTS = {
    Reorders: "buffers arrive in the order in which they were sent: AssertionError: buffer 0 of 20 is not what was",
    Truncates: "buffers arrive in the order in which they were sent: AssertionError: buffer 0 of 20",
    LosesTheEndOfMegabytes: "buffers of nothing to 4 megabytes arrive whole: AssertionError: buffer 0 of 1",
    DropsTheExtraStream: "the two streams do not wait for each other: not done after 1.5 s",
    HasOneStream: "the two streams do not wait for each other: .*",
    BlocksInSend: "buffers arrive in the order in which they were sent: not done after 1.5 s",
    BlocksInPost: "receives may be posted before anything is sent: not done after 1.5 s",
    CannotSendNothing: "receives may be posted before anything is sent: RuntimeError: 5 bytes were sent where 0",
    IsDoneBeforeItHasCome: "giving up .* refuses the rest: AssertionError: a waiting receive ended with None",
    IsDoneBeforeItHasGone: "what has been waited for may change: AssertionError: buffer 0 of 3",
    WaitsOnce: "handles may be waited for in any order and again: AttributeError",
    IsDeafToAbort: "giving up wakes whoever waits and refuses the rest: not done after 1.5 s",
    AbortsWithAnotherError: r"giving up .*: a waiting receive ended with ValueError\('aborted'\)",
    AbortsSendsWithAnotherError: r"giving up .* for a send: .*a send ended with ValueError\('aborted'\)",
    GoesOnAfterAbort: "giving up .*: a channel that was given up still takes buffers",
}


ON_RENDEZVOUS = (BlocksInSend, IsDoneBeforeItHasGone, AbortsSendsWithAnotherError)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_channel_that_does_one_thing_wrong_fails_the_check_of_that_name(fault):
    @contextmanager
    def make_pair():
        good = rendezvous_pair if fault in ON_RENDEZVOUS else local_pair
        with good() as pair:
            channel = fault(pair)
            yield Pair(channel, channel, channel.abort)
            pair.abort()

    with pytest.raises(AssertionError, match=f"^{FAULTS[fault]}"):
        check_transport(make_pair, seconds=1.5)


def test_every_check_has_a_name_that_says_a_law():
    names = [check.__name__ for check in CHECKS]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"_[a-z0-9_]{20,}", name) for name in names)
