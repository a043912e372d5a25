import gc
import re
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from in_process_channels import apart_pair, local_pair, rendezvous_pair
from message_checks import ON_ANY, WITH_PAYLOADS
from payloads_over_gloo import OverGloo

from pipeline.transports.channel import (
    ChannelError,
    Handle,
    IncomingChannel,
    OutgoingChannel,
    PayloadReceiver,
    PayloadSender,
)
from pipeline.transports.distributed import Channels
from pipeline.transports.testing import CHECKS, ChannelEnds, check_transport

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect():
    """A check that collects garbage shall not take the longer, the more was imported before."""
    gc.collect()
    gc.freeze()


@contextmanager
def gloo_pair(carriers=(None, None)):
    """Both ends of a channel over gloo in this process."""
    store, ends = dist.HashStore(), {}

    def connect(rank):
        ends[rank] = Channels(store, rank, [(0, 1)], timedelta(seconds=30), carriers[rank])
        if carriers[rank]:
            ends[rank].carry(dist.PrefixStore("payloads", store), (0, 1))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)
    yield ChannelEnds(ends[0].outgoing(1), ends[1].incoming(0), ends[1].abort)
    for end in ends.values():
        end.close()


@contextmanager
def gloo_pair_with_payloads():
    """The same, and payloads over a group that stands in for NCCL's."""
    with gloo_pair((OverGloo("a"), OverGloo("b"))) as pair:
        assert pair.outgoing.payloads is not None
        yield pair


HOSTS, DEVICES = [local_pair, rendezvous_pair, gloo_pair], [apart_pair, gloo_pair_with_payloads]


@pytest.mark.parametrize("make_pair", HOSTS + DEVICES)
def test_a_channel_that_does_what_it_must_passes_every_check(make_pair):
    check_transport(make_pair)


@pytest.mark.parametrize("check", ON_ANY + WITH_PAYLOADS)
@pytest.mark.parametrize("make_pair", HOSTS + DEVICES)
def test_messages_arrive_over_any_channel(make_pair, check):
    if make_pair in DEVICES or check in ON_ANY:
        with make_pair() as pair:
            check(pair)


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
def test_a_buffer_that_is_too_short_for_what_is_sent_is_an_error(make_pair):
    with make_pair() as pair:
        sent = pair.outgoing.send(torch.zeros(3, dtype=torch.uint8))
        posted = pair.incoming.post(torch.zeros(2, dtype=torch.uint8))
        for handle in (posted,) if make_pair is local_pair else (posted, sent):
            with pytest.raises(RuntimeError, match="3 bytes were sent where 2 were expected"):
                handle.wait()


# ----------------------------------------------------------------------------------- channels that are not as they must


class Ends(OutgoingChannel, IncomingChannel):
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


class ClearsWhatItFills(Ends):
    def post(self, buffer, extra=False):
        return super().post(buffer.zero_(), extra)


class LosesTheEndOfMegabytes(Ends):
    def send(self, buffer, extra=False):
        buffer = buffer.clone()
        buffer[1 << 20 :] = 0
        return super().send(buffer, extra)


class ChangesAByteOfSomeLengths(Ends):
    def send(self, buffer, extra=False):
        buffer = buffer.clone()
        if 8000 < buffer.numel() < 9000:
            buffer[77] ^= 1
        return super().send(buffer, extra)


class Counts(Ends):
    """Goes wrong once it has sent more than a few."""

    sent = 0

    def send(self, buffer, extra=False):
        self.sent += 1
        return self.late(buffer, extra) if self.sent == 250 else super().send(buffer, extra)


class LosesALateOne(Counts):
    def late(self, buffer, extra):
        return Done()


class DoublesALateOne(Counts):
    def late(self, buffer, extra):
        Ends.send(self, buffer, extra)
        return Ends.send(self, buffer, extra)


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


class CannotCollect(Ends):
    class Uncollected(Handle):
        def __init__(self, handle):
            self.wait = handle.wait

        def wait(self):
            pass

        def collect(self):
            raise NotImplementedError

    def send(self, buffer, extra=False):
        return self.Uncollected(super().send(buffer, extra))


class DropsWhatIsTold(Ends):
    def tell(self, buffer):
        pass


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


# ------------------------------------------------------------------------------------------------------- of payloads


class EndsWithPayloads(Ends):
    """A channel with payloads over a good one; below, each class does one thing wrong with these."""

    class Out(PayloadSender):
        def __init__(self, ends, good):
            self.device, self.takes, self.send = good.device, good.takes, ends.send_payload

        def takes(self, tensor): ...

        def send(self, buffer): ...

    class Into(PayloadReceiver):
        def __init__(self, ends):
            self.post = ends.post_payload

        def post(self, nbytes): ...

    def __init__(self, pair):
        super().__init__(pair)
        self.good = pair.outgoing.payloads, pair.incoming.payloads
        self.payloads = self.Out(self, self.good[0]), self.Into(self)

    def send_payload(self, buffer):
        self.good[0].send(buffer)

    def post_payload(self, nbytes):
        return self.good[1].post(nbytes)


class HasPayloadsAtOneEnd(EndsWithPayloads):
    def __init__(self, pair):
        super().__init__(pair)
        self.payloads = self.payloads[0], None


class ReordersPayloads(EndsWithPayloads):
    """Every second one is let past by the next, where they are alike."""

    late = None

    def send_payload(self, buffer):
        if self.late is None:
            self.late = buffer
            return
        late, self.late = self.late, None
        for each in (buffer, late) if late.numel() == buffer.numel() else (late, buffer):
            super().send_payload(each)


class CutsPayloadsShort(EndsWithPayloads):
    def send_payload(self, buffer):
        super().send_payload(buffer[:-1])


class LosesTheEndOfLongPayloads(EndsWithPayloads):
    def send_payload(self, buffer):
        buffer = buffer.clone()
        buffer[1 << 20 :] = 0
        super().send_payload(buffer)


class SendsPayloadsOnTheStream(EndsWithPayloads):
    def send_payload(self, buffer):
        self.send(buffer)

    def post_payload(self, nbytes):
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        handle = self.post(buffer)
        return lambda: handle.wait() or buffer


class BlocksUntilAPayloadHasCome(EndsWithPayloads):
    def post_payload(self, nbytes):
        expected = super().post_payload(nbytes)
        expected()
        return expected


class BlocksUntilAPayloadIsExpected(EndsWithPayloads):
    expected = False

    def send_payload(self, buffer):
        super().send_payload(buffer)
        until = time.monotonic() + 5
        while not self.expected and time.monotonic() < until:
            time.sleep(0.01)

    def post_payload(self, nbytes):
        self.expected = True
        return super().post_payload(nbytes)


class GivesOutPayloadsBeforeTheyHaveCome(EndsWithPayloads):
    def post_payload(self, nbytes):
        super().post_payload(nbytes)
        return lambda: torch.zeros(nbytes, dtype=torch.uint8)


class LetsPayloadsOutliveIt(EndsWithPayloads):
    """They are another channel's, which nobody gives up."""

    def __init__(self, pair):
        super().__init__(pair)
        self.another = apart_pair()
        another = self.another.__enter__()
        self.good = another.outgoing.payloads, another.incoming.payloads


class UsesTheMemoryOfPayloadsAnew(EndsWithPayloads):
    last = None

    def send_payload(self, buffer):
        super().send_payload(buffer)
        if self.last is not None:
            self.last.zero_()
        self.last = buffer


IN_ORDER, BEFORE = "what is sent arrives in order", "what is sent may be expected before"
HUNDREDS = "hundreds of any length arrive in order"
PAYLOAD_FAULTS = {
    HasPayloadsAtOneEnd: "both ends .* or neither has: AssertionError: one end of the channel has payloads, and the",
    ReordersPayloads: f"{IN_ORDER}: AssertionError: payload 0 of 20",
    CutsPayloadsShort: f"{IN_ORDER}: RuntimeError: 15 bytes were sent where 16 were expected",
    LosesTheEndOfLongPayloads: "what is sent arrives whole up to 4 megabytes: AssertionError: payload 0 of 1",
    SendsPayloadsOnTheStream: "no way waits for another: .*",
    BlocksUntilAPayloadHasCome: f"{BEFORE}: not done after 2.0 s",
    BlocksUntilAPayloadIsExpected: f"{IN_ORDER}: not done after 2.0 s",
    GivesOutPayloadsBeforeTheyHaveCome: f"{IN_ORDER}: AssertionError: payload 0 of 20",
    LetsPayloadsOutliveIt: "giving up ends payloads as well: not done after 2.0 s",
    UsesTheMemoryOfPayloadsAnew: f"{IN_ORDER}: AssertionError: payload 0 of 20",
}


FAULTS = {
    Reorders: f"{IN_ORDER}: AssertionError: buffer 0 of 20 is not what was",
    Truncates: f"{IN_ORDER}: AssertionError: buffer 0 of 20",
    ClearsWhatItFills: "what is sent fills the beginning of a longer buffer: AssertionError: what lies beyond",
    LosesTheEndOfMegabytes: "what is sent arrives whole up to 4 megabytes: AssertionError: buffer 0 of 1",
    ChangesAByteOfSomeLengths: f"{HUNDREDS}: AssertionError: buffer 39 of 300",
    LosesALateOne: f"{HUNDREDS}: .* bytes were sent where",
    DoublesALateOne: f"{HUNDREDS}: .* bytes were sent where",
    DropsTheExtraStream: f"{IN_ORDER}: not done after 2.0 s",
    HasOneStream: "no way waits for another: .*",
    BlocksInSend: f"{IN_ORDER}: not done after 2.0 s",
    BlocksInPost: f"{BEFORE}: not done after 2.0 s",
    CannotSendNothing: f"{BEFORE}: .*: whoever expects it ended with RuntimeError.'5 bytes were sent where 0",
    IsDoneBeforeItHasCome: "giving up .* refuses the rest: AssertionError: a waiting receive ended with None",
    IsDoneBeforeItHasGone: "what has been waited for may change: AssertionError: buffer 0 of 3",
    WaitsOnce: "handles may be waited for in any order and again: AttributeError",
    CannotCollect: "handles may be waited for in any order and again: NotImplementedError",
    DropsWhatIsTold: "what is told arrives in order: not done after 2.0 s",
    IsDeafToAbort: "giving up wakes whoever waits and refuses the rest: not done after 2.0 s",
    AbortsWithAnotherError: r"giving up .*: a waiting receive ended with ValueError\('aborted'\)",
    AbortsSendsWithAnotherError: r"giving up .* for a send: .*a send ended with ValueError\('aborted'\)",
    GoesOnAfterAbort: "giving up .*: a channel that was given up is still of use",
}


def patience(words):
    """Seconds for a check: few only where one is to run out of time."""
    return 2.0 if words.endswith(("not done after 2.0 s", ".*")) else 10.0


ON_RENDEZVOUS = (BlocksInSend, IsDoneBeforeItHasGone, AbortsSendsWithAnotherError)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_channel_that_does_one_thing_wrong_fails_the_check_of_that_name(fault):
    @contextmanager
    def make_pair():
        good = rendezvous_pair if fault in ON_RENDEZVOUS else local_pair
        with good() as pair:
            channel = fault(pair)
            yield ChannelEnds(channel, channel, channel.abort)
            pair.abort()

    with pytest.raises(AssertionError, match=f"^{FAULTS[fault]}"):
        check_transport(make_pair, patience(FAULTS[fault]))


@pytest.mark.parametrize("fault", PAYLOAD_FAULTS, ids=lambda fault: fault.__name__)
def test_a_channel_that_does_one_thing_wrong_with_payloads_fails_the_check_of_that_name(fault):
    @contextmanager
    def make_pair():
        with apart_pair() as pair:
            channel = fault(pair)
            outgoing, incoming = EndsWithPayloads(pair), EndsWithPayloads(pair)
            outgoing.payloads, incoming.payloads = channel.payloads
            yield ChannelEnds(outgoing, incoming, channel.abort)

    with pytest.raises(AssertionError, match=f"^{PAYLOAD_FAULTS[fault]}"):
        check_transport(make_pair, patience(PAYLOAD_FAULTS[fault]))


def test_every_check_has_a_name_that_says_a_law():
    names = [check.__name__ for check in CHECKS]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"_[a-z0-9_]{20,}", name) for name in names)
