"""Channels over gloo, between processes. Rank 0 is this process; the others are its children."""

import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from operator import gt
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline.transports.channel import ChannelError
from pipeline.transports.distributed import Channels
from pipeline.transports.link import Receiver, Sender
from pipeline.transports.message import Message

SOON = timedelta(seconds=60)
SIZES = (0, 1, 64, 1000, 1 << 20, 3, 64, 200_000)


def threads_and_sockets():
    """How many this process has."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    sockets = sum(os.readlink(link).startswith("socket:") for link in links if os.path.lexists(link))
    return len(os.listdir("/proc/self/task")), sockets


def all_pairs(ranks):
    return [(a, b) for a in range(ranks) for b in range(ranks) if a != b]


class Meeting:
    """Where processes wait for each other."""

    def __init__(self, store, rank, ranks):
        self.store, self.rank, self.ranks, self.count = store, rank, ranks, 0

    def wait(self):
        self.count += 1
        if self.store.add(f"meeting/{self.count}", 1) == self.ranks:
            self.store.set(f"met/{self.count}", "")
        self.store.wait([f"met/{self.count}"], SOON)


@contextmanager
def company(work, ranks):
    """This process as rank 0 of several; the others do `work`, and put what they return into the queue."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SOON)
    multiprocessing.set_forkserver_preload(["pipeline", "pytest"])  # processes that begin with torch imported
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    children = [context.Process(target=child, args=(work, store.port, rank, ranks, queue)) for rank in range(1, ranks)]
    for process in children:
        process.start()
    try:
        yield store, queue
        for process in children:
            process.join(60)
    finally:
        for process in children:
            process.kill()
            process.join()
        queue.close()
        queue.join_thread()


def child(work, port, rank, ranks, queue):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=SOON)
    queue.put((rank, work(store, rank, ranks)))


def buffers(a, b):
    """What rank a sends to rank b."""
    return [torch.full((size,), (a * 7 + b * 3 + place) % 256, dtype=torch.uint8) for place, size in enumerate(SIZES)]


def exchange(channels, rank, ranks):
    """Send to everyone and receive from everyone, on both streams: whether all came as it was sent."""
    others = [other for other in range(ranks) if other != rank]
    handles = [
        channels.outgoing(other).send(buffer, extra=extra)
        for other in others for extra in (False, True) for buffer in buffers(rank, other)
    ]
    found = []
    for other in others:
        for extra in (True, False):
            posted = [torch.zeros_like(buffer) for buffer in buffers(other, rank)]
            handles += [channels.incoming(other).post(buffer, extra=extra) for buffer in posted]
            found += zip(posted, buffers(other, rank), strict=True)
    for handle in handles:
        handle.wait()
    return all(torch.equal(one, other) for one, other in found)


def letters(channels, rank, ranks):
    """Letters around the ring, which change from phase to phase: whether all came as they were sent."""
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    sender, receiver = Sender(channels.outgoing(to), "next"), Receiver(channels.incoming(source), "last")
    slots, good = ["a", "b", "c", "d"], True
    for size in (10, 10, 0, 100_000, 10):
        sender.begin("ring", slots)
        receiver.begin("ring", slots)
        for slot in slots:
            sender.send(slot, Message((torch.full((size,), rank), torch.ones(())), None, (True, False), (size,)))
        for slot in slots:
            found = receiver.receive(slot)
            good = good and found.tensors[0].tolist() == [source] * size and found.memory == (size,)
        sender.finish()
        receiver.finish()
    return good


class Waiter(threading.Thread):
    """Waits for something; what ended that, and when."""

    def __init__(self, wait):
        super().__init__(daemon=True)
        self.wait, self.error, self.when = wait, None, None
        self.start()

    def run(self):
        try:
            self.wait()
        except Exception as error:
            self.error = error
        self.when = time.monotonic()


def blocked(channels, rank, ranks):
    """Threads that wait for rank 0 (in rank 0, for the others): one for what nobody receives, one to receive."""
    waiters = []
    for other in range(1, ranks) if rank == 0 else [0]:
        sender = Sender(channels.outgoing(other), "it")
        sender.begin("step", ["2F0"])
        sender.send("2F0", Message(()))  # as predicted, so that nothing of it is on the extra stream
        waiters.append(Waiter(sender.finish))
        waiters.append(Waiter(channels.incoming(other).post(torch.zeros(8, dtype=torch.uint8), extra=True).wait))
    return waiters


def story(store, rank, ranks):
    """What every rank does, and what it saw."""
    meeting, seen = Meeting(store, rank, ranks), {}
    meeting.wait()
    before = threads_and_sockets()
    pairs = all_pairs(ranks)
    random.Random(rank).shuffle(pairs)
    channels = Channels(dist.PrefixStore("0", store), rank, pairs, SOON)
    seen["threads and sockets of channels"] = tuple(
        now - then for now, then in zip(threads_and_sockets(), before, strict=True)
    )
    seen["came as sent"] = exchange(channels, rank, ranks) and letters(channels, rank, ranks)
    waiters = blocked(channels, rank, ranks)
    kept = [channels.incoming((rank + 1) % ranks).post(torch.zeros(8, dtype=torch.uint8), extra=True)]
    meeting.wait()
    time.sleep(0.2)
    if rank == 0:
        seen["still waited"] = all(waiter.is_alive() for waiter in waiters)
        seen["aborted"] = time.monotonic()
        channels.abort()
        channels.abort()
    for waiter in waiters:
        waiter.join(10)
    seen["woken"] = [waiter.when for waiter in waiters]
    seen["errors"] = [(type(waiter.error).__name__, str(waiter.error)) for waiter in waiters]
    other = 1 if rank == 0 else 0
    for begin in (channels.outgoing(other).send, channels.incoming(other).post):
        try:
            begin(torch.zeros(1, dtype=torch.uint8)).wait()
        except ChannelError as error:
            kept.append(error)
    seen["later"] = [str(error) for error in kept[1:]]
    meeting.wait()
    channels.abort()
    channels.close()
    channels = Channels(dist.PrefixStore("1", store), rank, pairs, SOON)
    seen["came as sent again"] = exchange(channels, rank, ranks) and letters(channels, rank, ranks)
    meeting.wait()
    channels.close()
    deadline = time.monotonic() + 5
    while any(map(gt, threads_and_sockets(), before)) and time.monotonic() < deadline:  # fewer: gloo closes its own
        time.sleep(0.01)  # threads that have ended are gone a moment later
    assert len(waiters) and len(kept) == 3  # errors and handles that are kept keep nothing alive
    seen["left behind"] = tuple(now - then for now, then in zip(threads_and_sockets(), before, strict=True))
    return seen


@pytest.fixture(scope="module")
def seen():
    """What each of three ranks saw."""
    with company(story, 3) as (store, queue):
        found = {0: story(store, 0, 3)}
        found.update(queue.get(timeout=60) for _ in range(2))
    return [found[rank] for rank in range(3)]


def test_everything_that_was_sent_came_in_order_between_all_pairs_on_both_streams(seen):
    assert [each["came as sent"] for each in seen] == [True] * len(seen)


def test_abort_wakes_every_wait_on_every_rank_at_once(seen):
    assert seen[0]["still waited"]
    waits = [when - seen[0]["aborted"] for each in seen for when in each["woken"]]
    assert len(waits) == 4 * (len(seen) - 1) and all(0 < wait < 1 for wait in waits), waits


def test_a_woken_wait_says_which_channel_died_and_who_gave_it_up(seen):
    for rank, each in enumerate(seen):
        died = "the other rank is gone, gave it up, or did not answer in time."
        words = "given up by this rank." if rank == 0 else died
        for name, text in each["errors"]:
            assert name == "ChannelError" and text.startswith("the channel from rank ") and text.endswith(words), text
            assert f"rank {rank}" in text


def test_a_channel_that_was_given_up_stays_dead(seen):
    for rank, each in enumerate(seen):
        words = "was given up by this rank" if rank == 0 else "has died"
        assert len(each["later"]) == 2 and all(words in text for text in each["later"])


def test_channels_can_be_built_anew_under_another_prefix(seen):
    assert [each["came as sent again"] for each in seen] == [True] * len(seen)


def test_the_channels_of_a_rank_have_one_thread_and_a_socket_each(seen):
    for each in seen:
        threads, sockets = each["threads and sockets of channels"]
        assert threads == 1 and 2 * (len(seen) - 1) <= sockets <= 2 * (len(seen) - 1) + 2


def test_no_thread_and_no_socket_is_left_after_close(seen):
    assert all(max(each["left behind"]) <= 0 for each in seen)


def vanish(store, rank, ranks):
    channels = Channels(dist.PrefixStore("0", store), rank, all_pairs(ranks), SOON)
    channels.outgoing(0).send(torch.ones(1, dtype=torch.uint8)).wait()
    os._exit(1)


def test_the_end_of_the_other_process_wakes_who_waits_for_it():
    with company(vanish, 2) as (store, _):
        channels = Channels(dist.PrefixStore("0", store), 0, all_pairs(2), SOON)
        waiters = [
            Waiter(channels.incoming(1).post(torch.zeros(4, dtype=torch.uint8), extra=True).wait),
            Waiter(channels.outgoing(1).send(torch.zeros(4, dtype=torch.uint8)).wait),
        ]
        channels.incoming(1).post(torch.zeros(1, dtype=torch.uint8)).wait()
        for waiter in waiters:
            waiter.join(10)
            assert isinstance(waiter.error, ChannelError) and "has died: the other rank is gone" in str(waiter.error)
        channels.close()


LONG = 64 << 20  # bytes, more than sockets have room for


def stop_within(store, rank, ranks):
    """Stop this process while a message is under way each way: some of it has gone, and not all."""
    channels = Channels(dist.PrefixStore("0", store), rank, all_pairs(ranks), SOON)
    handles = [channels.incoming(0).post(torch.zeros(LONG, dtype=torch.uint8))]
    store.set("process", str(os.getpid()))
    store.wait(["posted"], SOON)
    time.sleep(0.1)  # for gloo to know of it: only then does it write
    handles.append(channels.outgoing(0).send(torch.zeros(LONG, dtype=torch.uint8)))
    os.kill(os.getpid(), signal.SIGSTOP)


def woken_within_messages():
    """See that an abort wakes who waits; False where the process was stopped too late: its whole message had come."""
    with company(stop_within, 2) as (store, _):
        channels = Channels(dist.PrefixStore("0", store), 0, all_pairs(2), timedelta(seconds=20))
        other = int(store.get("process"))
        posted = channels.incoming(1).post(torch.zeros(LONG, dtype=torch.uint8))
        store.set("posted", "")
        while Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        waiters = [Waiter(posted.wait), Waiter(channels.outgoing(1).send(torch.zeros(LONG, dtype=torch.uint8)).wait)]
        time.sleep(0.2)
        begin = time.monotonic()
        waiting = [waiter for waiter in waiters if waiter.is_alive()]
        channels.abort()
        for waiter in waiting:
            waiter.join(5)
            assert isinstance(waiter.error, ChannelError) and "was given up by this rank" in str(waiter.error)
            assert waiter.when - begin < 2
        channels.close()
        os.kill(other, signal.SIGKILL)
        return waiting == waiters


def test_a_wait_for_a_message_of_which_a_part_has_come_or_gone_is_woken_too():
    assert any(woken_within_messages() for _ in range(5))


# --------------------------------------------------------------------------------------------- ranks in one process


@contextmanager
def together(ranks, pairs=None, timeout=SOON):
    """The channels of several ranks, all in this process."""
    store, found = dist.HashStore(), {}

    def connect(rank):
        mine = list(pairs or all_pairs(ranks))
        random.Random(rank).shuffle(mine)
        found[rank] = Channels(dist.PrefixStore("it", store), rank, mine, timeout)

    threads = [threading.Thread(target=connect, args=(rank,), daemon=True) for rank in range(ranks)]
    for step in (threading.Thread.start, lambda thread: thread.join(30)):
        for thread in threads:
            step(thread)
    yield [found[rank] for rank in range(ranks)]
    for channels in found.values():
        channels.close()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_connect_whatever_order_they_are_told_the_pairs_in(ranks):
    with together(ranks) as channels:
        sent = torch.full((3,), 7, dtype=torch.uint8)
        for a, b in all_pairs(ranks):
            posted = torch.zeros(3, dtype=torch.uint8)
            receive = channels[b].incoming(a).post(posted)
            channels[a].outgoing(b).send(sent).wait()
            receive.wait()
            assert torch.equal(posted, sent)


def test_what_is_told_comes_in_the_order_of_what_is_sent_and_is_kept_until_the_next():
    with together(2) as channels:
        outgoing, incoming = channels[0].outgoing(1), channels[1].incoming(0)
        for number in range(5):
            posted = [torch.zeros(3, dtype=torch.uint8) for _ in range(2)]
            receives = [incoming.post(buffer) for buffer in posted]
            outgoing.tell(torch.full((3,), number, dtype=torch.uint8))
            outgoing.send(torch.full((3,), 100 + number, dtype=torch.uint8)).wait()
            for receive in receives:
                receive.wait()
            assert [buffer.tolist() for buffer in posted] == [[number] * 3, [100 + number] * 3]
            assert len(channels[0]._channels[0, 1]._under_way) == 1


def test_giving_up_many_channels_takes_no_longer_than_one():
    with together(6) as channels:
        waiters = [
            Waiter(channels[b].incoming(a).post(torch.zeros(1, dtype=torch.uint8)).wait) for a, b in all_pairs(6)
        ]
        begin = time.monotonic()
        channels[0].abort()
        assert time.monotonic() - begin < 0.5
        mine = [waiter for waiter, pair in zip(waiters, all_pairs(6), strict=True) if 0 in pair]
        for waiter in mine:
            waiter.join(10)
            assert isinstance(waiter.error, ChannelError) and waiter.when - begin < 1
        assert all(waiter.is_alive() for waiter in waiters if waiter not in mine)
        for each in channels:
            each.abort()
        for waiter in waiters:
            waiter.join(10)
        assert len(mine) == 10 and all(isinstance(waiter.error, ChannelError) for waiter in waiters)


def test_several_threads_may_give_up_at_once():
    with together(2) as channels:
        waiter = Waiter(channels[1].incoming(0).post(torch.zeros(1, dtype=torch.uint8)).wait)
        aborting = [Waiter(each.abort) for each in channels * 3]
        for thread in [waiter, *aborting]:
            thread.join(10)
        assert isinstance(waiter.error, ChannelError) and [thread.error for thread in aborting] == [None] * 6


def test_a_closed_channel_says_so():
    with together(2) as channels:
        outgoing, incoming = channels[0].outgoing(1), channels[0].incoming(1)
        under_way = incoming.post(torch.zeros(1, dtype=torch.uint8))
        channels[0].close()
        channels[0].close()
        channels[0].abort()
        for use in (lambda: outgoing.send(torch.zeros(1, dtype=torch.uint8)), under_way.wait):
            with pytest.raises(ChannelError, match=r"the channel from rank \d to rank \d has been closed"):
                use()


def test_channels_lead_from_this_rank_to_those_that_were_named():
    with together(3, pairs=[(0, 1), (1, 2)]) as channels:
        channels[0].outgoing(1)
        channels[2].incoming(1)
        for use in (lambda: channels[0].outgoing(2), lambda: channels[1].incoming(2)):
            with pytest.raises(KeyError):
                use()


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(ChannelError, match="the channel from rank 0 to rank 1 cannot be connected"):
        Channels(dist.HashStore(), 0, [(0, 1)], timedelta(milliseconds=200))


def test_a_message_that_does_not_come_in_time_ends_the_channel():
    with together(2, timeout=timedelta(milliseconds=300)) as channels:
        waiting = channels[1].incoming(0).post(torch.zeros(1, dtype=torch.uint8))
        with pytest.raises(ChannelError, match="from rank 0 to rank 1 has died.* or did not answer in time"):
            waiting.wait()
        with pytest.raises(ChannelError, match="from rank 0 to rank 1"):
            waiting.wait()


def test_the_interface_that_the_environment_names_is_used(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,another")
    with together(2) as channels:
        channels[0].outgoing(1).send(torch.zeros(1, dtype=torch.uint8))
        channels[1].incoming(0).post(torch.zeros(1, dtype=torch.uint8)).wait()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RuntimeError, match="no-such-interface"):
        Channels(dist.HashStore(), 0, [(0, 1)], SOON)
