"""Payloads beside the header: over a second gloo group that stands in for NCCL, in one process."""

import os
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from in_process_channels import apart_pair, rendezvous_pair
from payloads_over_gloo import OverGloo, Work

from pipeline.distributed.group import RankGroup
from pipeline.transports import nccl, payloads
from pipeline.transports.channel import ChannelError, OutgoingChannel, PayloadReceiver, PayloadSender
from pipeline.transports.distributed import LAST_WORDS, Channels
from pipeline.transports.link import Receiver, Sender
from pipeline.transports.message import Message
from pipeline.transports.packing import Packing
from pipeline.transports.payloads import Payloads

SOON = timedelta(seconds=30)
THERE, HERE = torch.arange(10.0), torch.arange(3)  # "on the GPU", and on the host


def at_once(*functions):
    """What several functions give, each run in a thread."""
    found = {}
    threads = [
        threading.Thread(target=lambda index=index, each=each: found.update({index: each()}), daemon=True)
        for index, each in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found.get(index) for index in range(len(functions))]


@contextmanager
def joined(*carriers, pairs=None):
    """The channels of several ranks, all in this process."""
    store, ranks = dist.HashStore(), range(len(carriers))
    pairs = pairs or [(a, b) for a in ranks for b in ranks if a != b]

    def make(rank):
        channels = Channels(store, rank, pairs, SOON, carriers[rank])
        for a, b in sorted(pairs):
            if rank in (a, b) and carriers[a] is not None and carriers[b] is not None:
                channels.carry(dist.PrefixStore(f"{a}to{b}", store), (a, b))
        return channels

    found = at_once(*[partial(make, rank) for rank in ranks])
    assert None not in found
    yield found
    for each in found:
        each.close()


def apart(channels, a, b):
    """Whether the channel from a to b has payloads, at either end."""
    return [channels[a].outgoing(b).payloads is not None, channels[b].incoming(a).payloads is not None]


# ----------------------------------------------------------------------------------------- which channels have payloads


def test_a_channel_has_payloads_at_both_ends_once_they_are_connected():
    with joined(OverGloo("a"), OverGloo("b"), None) as channels:
        for a, b in permutations(range(3), 2):
            assert apart(channels, a, b) == [2 not in (a, b)] * 2


def test_a_link_takes_payloads_from_the_message_after_they_were_connected():
    with joined(None, None, pairs=[(0, 1)]) as channels:
        for each, carrier in zip(channels, (OverGloo("a"), OverGloo("b")), strict=True):
            each._carrier = carrier
        out, into = channels[0].outgoing(1), channels[1].incoming(0)
        sender, receiver = Sender(out, "rank 0 to rank 1"), Receiver(into, "rank 0 to rank 1")

        def go():
            for end in sender, receiver:
                end.begin("step", ["a"])
            sender.send("a", Message((THERE,)))
            assert torch.equal(receiver.receive("a").tensors[0], THERE)
            for end in sender, receiver:
                end.finish()
            return [] if into.payloads is None else channels[1]._carrier.received

        assert go() == go() == []
        store = dist.HashStore()
        at_once(*[partial(each.carry, store, (0, 1)) for each in channels])
        assert go() == [1, 40] and go() == [1, 40, 40]


def test_payloads_that_come_after_the_end_of_their_channel_are_ended():
    carriers = OverGloo("a"), OverGloo("b")
    store = dist.HashStore()
    ends = at_once(*[partial(Channels, store, rank, [(0, 1)], SOON, carriers[rank]) for rank in (0, 1)])
    failed = []

    def late(connect):
        ends[0].close()
        return connect()

    def carry(rank):
        try:
            ends[rank].carry(dist.PrefixStore("payloads", store), (0, 1))
        except ChannelError as error:
            failed.append(str(error))

    connect = carriers[0].connect
    carriers[0].connect = lambda *args: late(partial(connect, *args))
    at_once(partial(carry, 0), partial(carry, 1))
    assert "the channel from rank 0 to rank 1 has been closed." in failed  # the other end may see it die, or not
    assert carriers[0].aborted == 1
    ends[1].close()


def test_the_byte_that_connects_is_taken_before_anything_is_sent():
    carriers = OverGloo("a"), OverGloo("b")
    with joined(*carriers) as channels:
        assert [carrier.received for carrier in carriers] == [[1], [1]]
        channels[0].outgoing(1).payloads.send(torch.full((5,), 7, dtype=torch.uint8))
        assert channels[1].incoming(0).payloads.post(5)().tolist() == [7] * 5


def test_a_rank_whose_group_cannot_be_made_says_which_channel_it_is_of():
    class Broken(OverGloo):
        def connect(self, store, rank, timeout):
            raise RuntimeError("no such thing")

    with pytest.raises(ChannelError, match="^the channel cannot be connected for payloads: no such thing$"):
        Payloads("the channel", Broken("a"), dist.HashStore(), 0, SOON)


def test_a_group_on_which_the_first_byte_fails_is_ended():
    class Half(OverGloo):
        def connect(self, store, rank, timeout):
            def fail(*args):
                raise RuntimeError("gone")

            return SimpleNamespace(send=fail, abort=lambda: aborted.append(1))

    aborted = []
    with pytest.raises(ChannelError, match="the channel has died: its payloads travel no more"):
        Payloads("the channel", Half("a"), dist.HashStore(), 0, SOON)
    assert aborted == [1]


# ----------------------------------------------------------------------------------------------- which letters go apart


class Host(OutgoingChannel):
    """The two streams of a channel whose payloads are counted as well."""

    def __init__(self, outgoing):
        self._outgoing, self.payloads = outgoing, Apart(outgoing.payloads)
        self.sent = []

    def send(self, buffer, extra=False):
        self.sent.append((buffer.numel(), extra))
        return self._outgoing.send(buffer, extra)


class Apart(PayloadSender):
    def __init__(self, payloads):
        self._payloads, self.device, self.sent = payloads, payloads.device, []

    def takes(self, tensor):
        return self._payloads.takes(tensor)

    def send(self, buffer):
        self.sent.append(buffer.numel())
        self._payloads.send(buffer)


@contextmanager
def linked():
    with apart_pair() as pair:
        host = Host(pair.outgoing)
        sender, receiver = Sender(host, "rank 0 to rank 1"), Receiver(pair.incoming, "rank 0 to rank 1")

        def go(*tensors, memory=()):
            """Send one letter as a phase: [bytes on the stream], [on the extra stream], [as payload]."""
            host.sent.clear(), host.payloads.sent.clear()
            sender.begin("step", ["2F0"])
            receiver.begin("step", ["2F0"])
            sender.send("2F0", Message(tensors, memory=memory))
            found = receiver.receive("2F0")
            sender.finish()
            receiver.finish()
            assert found.memory == memory and len(found.tensors) == len(tensors)
            for one, other in zip(found.tensors, tensors, strict=True):
                assert (one is None) == (other is None)
                assert one is None or one.dtype is other.dtype and torch.equal(one, other)
            return (
                [size for size, extra in host.sent if not extra], [size for size, extra in host.sent if extra],
                list(host.payloads.sent),
            )

        yield go


def test_as_predicted_only_the_header_goes_through_the_host():
    with linked() as go:
        stream, extra, payload = go(THERE, THERE[:3])
        assert stream == [64] and len(extra) == 1 and payload == [64 + 12]
        for _ in range(3):
            assert go(THERE, THERE[:3]) == ([64], [], [64 + 12])


def test_where_only_the_rest_is_another_the_payload_goes_as_predicted():
    with linked() as go:
        go(THERE)
        stream, extra, payload = go(THERE, memory=(7,))
        assert stream == [64] and len(extra) == 1 and payload == [40]
        assert go(THERE, memory=(7,))[2] == [40]
        assert go(THERE, memory=(7,)) == ([64], [], [40])


def test_no_tensor_of_a_payload_is_announced_with_its_description():
    with linked() as go:
        for size in (1000, 2000, 3000, 3000, 10):
            stream, (extra,), payload = go(torch.zeros(size))
            assert stream == [64] and extra < 1000 and payload == [4 * size]


def test_a_letter_with_one_tensor_on_the_device_goes_apart_whole_and_one_without_stays():
    with linked() as go:
        for tensors, apart, here in (
            ((THERE, HERE), 64 + 24, 0), ((HERE, None, THERE[:1]), 64 + 4, 0), ((HERE,), 0, 24), ((), 0, 0),
            ((None,), 0, 0), ((torch.empty(0),), 0, 0), ((HERE, torch.empty(0, 3)), 24, 0),
            ((HERE.view(torch.float64),), 24, 0),
        ):
            for _ in range(3):
                stream, extra, payload = go(*tensors)
            assert (stream, extra, payload) == ([64 + here], [], [apart] if apart else [])


def test_a_letter_that_leaves_the_device_or_comes_to_it_is_announced_though_its_tensors_look_alike():
    with apart_pair() as pair:
        host, on_device = Host(pair.outgoing), []
        host.payloads.takes = lambda tensor: bool(on_device)  # as if they were moved
        sender, receiver = Sender(host, "it"), Receiver(pair.incoming, "it")
        for moved in ([], [], [1], [1], [], []):
            on_device[:] = moved
            host.sent.clear(), host.payloads.sent.clear()
            for end in sender, receiver:
                end.begin("step", ["a"])
            sender.send("a", Message((THERE,)))
            assert torch.equal(receiver.receive("a").tensors[0], THERE)
            assert host.payloads.sent == [40] * len(moved)
            sender.finish()
            receiver.finish()


def test_a_payload_is_expected_when_its_header_has_come_and_not_before():
    with apart_pair() as pair:
        posted = []

        class Watching(PayloadReceiver):
            def post(self, nbytes):
                posted.append(nbytes)
                return payloads.post(nbytes)

        payloads, pair.incoming.payloads = pair.incoming.payloads, Watching()
        sender, receiver = Sender(pair.outgoing, "it"), Receiver(pair.incoming, "it", window=3)
        for _ in range(2):
            posted.clear()
            for end in sender, receiver:
                end.begin("step", ["a", "b", "c"])
            for count, slot in enumerate("abc"):
                assert posted == [40] * count
                sender.send(slot, Message((THERE,)))
                receiver.receive(slot)
            sender.finish()
            receiver.finish()


def test_what_arrives_shares_no_memory_and_changes_with_nothing():
    with apart_pair() as pair:
        sender, receiver = Sender(pair.outgoing, "it"), Receiver(pair.incoming, "it")
        mine = THERE.clone()
        for end in sender, receiver:
            end.begin("step", ["a"])
        sender.send("a", Message((mine, THERE.clone())))
        mine.zero_()
        one, other = receiver.receive("a").tensors
        before = other._version
        one.add_(1)
        assert torch.equal(one, THERE + 1) and torch.equal(other, THERE) and other._version == before


def test_an_end_without_payloads_says_so_when_one_is_to_come():
    with apart_pair() as pair:
        sender = Sender(pair.outgoing, "rank 0 to rank 1")
        pair.incoming.payloads = None
        receiver = Receiver(pair.incoming, "rank 0 to rank 1")
        for end in sender, receiver:
            end.begin("step", ["a"])
        sender.send("a", Message((THERE,)))
        with pytest.raises(RuntimeError, match="rank 0 to rank 1: a payload is to come, and this end .* no payloads"):
            receiver.receive("a")


def test_a_payload_of_another_size_than_expected_is_an_error_of_the_strict_channel():
    for size in (2, 4):
        with apart_pair() as pair:
            pair.outgoing.payloads.send(torch.zeros(3, dtype=torch.uint8))
            with pytest.raises(RuntimeError, match=f"3 bytes were sent where {size} were expected"):
                pair.incoming.payloads.post(size)()


def test_a_channel_without_payloads_has_none():
    with rendezvous_pair() as pair:
        assert pair.outgoing.payloads is None and pair.incoming.payloads is None


def test_packed_apart_tensors_lie_as_they_do_behind_a_header():
    tensors = [THERE, None, HERE, torch.tensor(True), torch.ones(()).expand(4), torch.arange(6.0).view(2, 3).t()]
    packing, cpu = Packing.of(tensors), torch.device("cpu")
    packed = packing.pack_payload(tensors, cpu)
    assert torch.equal(packed, packing.pack(bytes(64), tensors)[64:])
    for found, tensor in zip(packing.unpack(packed, 0, cpu), tensors, strict=True):
        assert tensor is None and found is None or torch.equal(found, tensor)


# ------------------------------------------------------------------------------------------ what is under way, and ends


class Slow(OverGloo):
    """Whose transfers end when they are told to."""

    def __init__(self, place):
        super().__init__(place)
        self.done = True
        self.asked = 0

    def has_ended(self, waiting):
        self.asked += 1
        return self.done and super().has_ended(waiting)


def under_way(end):
    return len(end.payloads._under_way)


def settled(channel):
    until = time.monotonic() + 10
    while not channel.payloads.is_idle and time.monotonic() < until:
        time.sleep(0.001)
    assert channel.payloads.is_idle


def test_a_buffer_is_kept_until_its_transfer_has_ended_and_no_longer():
    slow = Slow("a")
    with joined(slow, OverGloo("b"), pairs=[(0, 1)]) as channels:
        out, into = channels[0].outgoing(1), channels[1].incoming(0)
        settled(out)
        slow.done = False
        for count in range(1, 5):
            out.payloads.send(torch.full((count,), count, dtype=torch.uint8))
            assert into.payloads.post(count)().tolist() == [count] * count  # the other end has it long since
            assert under_way(out) == 1 + count
        slow.done = True
        settled(out)
        out.payloads.send(torch.zeros(1, dtype=torch.uint8))
        assert under_way(out) == 1
        into.payloads.post(1)()


def test_whoever_leaves_waits_for_payloads_under_way_but_not_for_ever():
    with joined(OverGloo("a"), OverGloo("b")) as channels:
        out, into = channels[0].outgoing(1), channels[1].incoming(0)
        for each in channels:
            begin = time.monotonic()
            each.drain(10)
            assert time.monotonic() - begin < 5
        out.payloads.send(torch.ones(8, dtype=torch.uint8))
        begin = time.monotonic()
        channels[0].drain(0.2)
        assert 0.2 <= time.monotonic() - begin < 2 and not out.payloads.is_idle
        timer = threading.Timer(0.2, lambda: into.payloads.post(8)())
        timer.start()
        channels[0].drain(10)
        assert out.payloads.is_idle
        timer.join()


def test_ranks_that_leave_wait_for_payloads_before_they_close():
    done = []
    connections = SimpleNamespace(
        drain=lambda seconds: done.append(f"drain {seconds}"), close=lambda: done.append("close")
    )
    monitor = SimpleNamespace(farewell=lambda: done.append("farewell"), heartbeat=3.0)
    ranks = SimpleNamespace(monitor=monitor, connections=connections)
    RankGroup.farewell(ranks)
    assert done == ["farewell", "drain 3.0", "close"]


def test_giving_up_lets_what_both_ends_have_begun_arrive():
    """It is of a call that went well."""
    with joined(OverGloo("a"), OverGloo("b"), pairs=[(0, 1)]) as channels:
        timer = threading.Timer(0.2, lambda: channels[0].outgoing(1).payloads.send(torch.ones(8, dtype=torch.uint8)))
        expected = channels[1].incoming(0).payloads.post(8)
        timer.start()
        begin = time.monotonic()
        channels[1].abort()
        assert 0.15 < time.monotonic() - begin < LAST_WORDS
        assert expected.args[0].tolist() == [1] * 8
        timer.join()


def test_giving_up_ends_payloads_at_both_ends_and_wakes_who_waits():
    with joined(OverGloo("a"), OverGloo("b"), pairs=[(0, 1)]) as channels:
        out, into = channels[0].outgoing(1), channels[1].incoming(0)
        expected = into.payloads.post(8)
        begin = time.monotonic()
        channels[1].abort()
        channels[1].abort()
        assert LAST_WORDS <= time.monotonic() - begin < LAST_WORDS + 1
        for use in (expected, lambda: into.payloads.post(8)):
            with pytest.raises(ChannelError, match="the channel from rank 0 to rank 1 was given up by this rank"):
                use()
        begin = time.monotonic()
        channels[0].close()
        assert time.monotonic() - begin < 1
        with pytest.raises(ChannelError, match="the channel from rank 0 to rank 1 was given up by this rank"):
            out.payloads.send(torch.zeros(8, dtype=torch.uint8))


def test_the_two_streams_are_given_up_before_the_payloads_are_waited_for():
    with joined(OverGloo("a"), OverGloo("b"), pairs=[(0, 1)]) as channels:
        into = channels[1].incoming(0)
        into.payloads.post(8)
        waiting, woken = into.post(torch.zeros(1, dtype=torch.uint8)), []

        def wait():
            with pytest.raises(ChannelError):
                waiting.wait()
            woken.append(time.monotonic())

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        begin = time.monotonic()
        channels[1].abort()
        thread.join(10)
        assert woken[0] - begin < LAST_WORDS / 2 < time.monotonic() - begin


def test_what_may_have_been_cut_off_is_not_given_out():
    class Careless(OverGloo):
        """As on a GPU: the host does not wait, and hears of no error."""

        def take(self, buffer, work):
            return buffer

    with joined(OverGloo("a"), Careless("b"), pairs=[(0, 1)]) as channels:
        expected = channels[1].incoming(0).payloads.post(8)
        channels[1].abort()
        with pytest.raises(ChannelError, match="given up by this rank"):
            expected()


# --------------------------------------------------------------------------------------------------------------- NCCL


def named(config):
    return lambda group: config


@pytest.mark.skipif(hasattr(dist, "ProcessGroupNCCL"), reason="this torch has NCCL")
def test_a_torch_without_nccl_says_what_to_install(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", named("cpu:gloo,cuda:nccl"))
    with pytest.raises(RuntimeError, match=r"torch .* has no NCCL.* Install .* or begin with .*init_process_group"):
        nccl.nccl_of(None, torch.device("cuda", 0))


@pytest.mark.parametrize("config", ["cpu:gloo,cuda:gloo", "cpu:gloo", "cpu:nccl,cuda:gloo"])
def test_payloads_go_through_the_host_where_the_group_has_no_nccl_for_cuda(config, monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", named(config))
    assert nccl.nccl_of(None, torch.device("cuda", 0)) is None


def test_ranks_that_compute_on_the_host_have_no_payloads(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", named("cpu:gloo,cuda:nccl"))
    assert nccl.nccl_of(None, torch.device("cpu")) is None


@contextmanager
def nothing(*_):
    yield


class FakeBackend:
    """NCCL's class of groups as its annotations have it, over gloo."""

    class Options:
        def __init__(self):
            self.config, self._timeout = SimpleNamespace(max_ctas=None), None

    made = []

    def __init__(self, store, rank, size, options):
        assert size == 2
        self._group = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self.options, self.aborted = vars(options.config), False
        self.made.append(self)

    def send(self, tensors, to, tag):
        return Work(self._group.send(tensors, to, tag))

    def recv(self, tensors, source, tag):
        return Work(self._group.recv(tensors, source, tag))

    def abort(self):
        self.aborted = True


def test_the_carrier_of_nccl_makes_and_ends_groups_as_it_should(monkeypatch):
    """All but NCCL and CUDA themselves."""
    recorded = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeBackend, raising=False)
    monkeypatch.setattr(FakeBackend, "made", [])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=str(device)))
    monkeypatch.setattr(torch, "Stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(payloads, "entered_streams", nothing)
    monkeypatch.setattr(nccl, "entered", nothing)
    monkeypatch.setattr(payloads, "use_here", lambda tensors: recorded.append(len(tensors[0])))
    carriers = [nccl.Nccl(torch.device("cpu")), nccl.Nccl(torch.device("cpu", 0))]
    assert [carrier.place for carrier in carriers] == ["cpu", "cpu:0"]
    assert not carriers[0].takes(torch.empty(3, device="meta"))
    with joined(*carriers, pairs=[(0, 1)]) as channels:
        channels[0].outgoing(1).payloads.send(torch.full((5,), 7, dtype=torch.uint8))
        assert channels[1].incoming(0).payloads.post(5)().tolist() == [7] * 5
        assert [group.options for group in FakeBackend.made] == 2 * [{"max_ctas": nccl.MOST_BLOCKS}]
        assert not any(group.aborted for group in FakeBackend.made)
        for each in channels:
            each.drain(10)
    assert all(group.aborted for group in FakeBackend.made) and recorded == [1, 5]


class Watched:
    """A class of groups that notes what it finds in the environment, as NCCL's reads it."""

    Options = FakeBackend.Options

    def __init__(self, store, rank, size, options):
        self.found = [os.environ.get(name) for name in nccl.UNWATCHED]


def test_torchs_watchdogs_are_off_for_our_groups_alone(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Watched, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=str(device)))
    monkeypatch.setattr(torch, "Stream", lambda device: None)
    monkeypatch.setattr(nccl, "entered", nothing)
    kept, unset = nccl.UNWATCHED
    monkeypatch.setenv(kept, "1")
    monkeypatch.delenv(unset, raising=False)
    group = nccl.Nccl(torch.device("cpu")).connect(dist.HashStore(), 0, timedelta(seconds=1))
    assert group.found == ["0", "0"] and os.environ[kept] == "1" and unset not in os.environ
