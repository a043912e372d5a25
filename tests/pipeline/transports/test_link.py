import dataclasses
import gc
import threading
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process_channels import local_pair, rendezvous_pair
from torch.utils import _pytree as pytree
from tree_strategies import PLAIN, containers, same, tensors

from pipeline.data.pytrees import Tree, flatten
from pipeline.transports.channel import ChannelError, Handle, IncomingChannel, OutgoingChannel
from pipeline.transports.link import Receiver, Sender
from pipeline.transports.message import Message
from pipeline.transports.spec_cache import SERIES_REMEMBERED


class Watched(Handle):
    """Notes when its buffer is waited for, and when it is collected."""

    def __init__(self, handle, number, noted):
        self._handle, self._number, self._noted = handle, number, noted

    def wait(self):
        self._noted.append(("wait", self._number))
        self._handle.wait()

    def collect(self):
        self._noted.append(("collect", self._number))
        self._handle.collect()


class Counting(OutgoingChannel):
    """A channel that keeps count of what is sent, (bytes, on the extra stream?), and of what becomes of it."""

    def __init__(self, outgoing):
        self._outgoing = outgoing
        self._handles = []
        self.sent, self.noted = [], []

    def send(self, buffer, extra=False):
        handle = Watched(self._outgoing.send(buffer, extra), len(self.sent), self.noted)
        self.sent.append((buffer.numel(), extra))
        self._handles.append(weakref.ref(handle))
        return handle

    def held(self):
        """The numbers of buffers whose handles are kept."""
        return [number for number, handle in enumerate(self._handles) if handle() is not None]


@contextmanager
def linked(make_pair=local_pair, window=3):
    with make_pair() as pair:
        counting = Counting(pair.outgoing)
        yield Sender(counting, "rank 0 to rank 1"), Receiver(pair.incoming, "rank 0 to rank 1", window), counting


@pytest.fixture
def link():
    with linked() as ends:
        yield ends


def phase(sender, receiver, letters, series="step"):
    """Send letters as a phase of their own; what comes."""
    slots = [f"2F{place}" for place in range(len(letters))]
    sender.begin(series, slots)
    receiver.begin(series, slots)
    for slot, letter in zip(slots, letters, strict=True):
        sender.send(slot, letter)
    found = [receiver.receive(slot) for slot in slots]
    sender.finish()
    receiver.finish()
    return found


def letter_of(value, memory=0):
    tree = flatten(value, "it")
    count = len(tree.tensors)
    return Message(tree.tensors, tree.skeleton, (True,) * count, tuple((memory, None, (i,)) for i in range(count)))


def value_of(letter):
    return Tree(letter.tensors, letter.skeleton).build(letter.tensors)


values = st.one_of(tensors(2), containers(st.one_of(PLAIN, tensors(2))))
phases = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 3), min_size=3, max_size=3)), min_size=1, max_size=6
)


@settings(max_examples=examples(50))
@given(
    st.lists(values, min_size=4, max_size=4), phases, st.integers(1, 4), st.sampled_from([local_pair, rendezvous_pair])
)
def test_whatever_changes_from_phase_to_phase_the_letters_that_come_are_those_that_were_sent(
    pool, plan, window, make_pair
):
    with linked(make_pair, window) as (sender, receiver, _):
        for series, chosen in plan:
            letters = [letter_of(pool[place], memory=place) for place in chosen]
            for found, letter in zip(phase(sender, receiver, letters, series), letters, strict=True):
                assert same(value_of(found), value_of(letter))
                assert found.needs_grad == letter.needs_grad and found.memory == letter.memory


def test_a_letter_as_predicted_goes_as_one_buffer_of_its_header_and_its_tensors(link):
    sender, receiver, counting = link
    letters = [letter_of(torch.zeros(10)), letter_of({"a": torch.zeros(3, 3), "b": [torch.zeros(1).bool(), 1]})]
    phase(sender, receiver, letters)
    assert [extra for _, extra in counting.sent] == [False, True, False, True]
    assert [size for size, extra in counting.sent if not extra] == [64, 64]
    counting.sent.clear()
    phase(sender, receiver, [letter_of(torch.ones(10)), letters[1]])
    assert counting.sent == [(64 + 40, False), (64 + 64 + 1, False)]


def announced(link, value, **others):
    """Send a value as a phase of its own: what goes on the two streams, in bytes."""
    sender, receiver, counting = link
    counting.sent.clear()
    (found,) = phase(sender, receiver, [letter_of(value, **others)])
    assert same(value_of(found), value)
    assert [extra for _, extra in counting.sent] in ([False], [False, True])
    return [size for size, _ in counting.sent]


def test_a_letter_that_is_not_as_predicted_goes_beside_a_buffer_as_long_as_predicted(link):
    for value, predicted in ((torch.zeros(10), 0), (torch.zeros(1000), 40)):
        size, extra = announced(link, value)
        assert size == 64 + predicted and extra > value.nbytes and extra % 64 == value.nbytes % 64


def test_nothing_is_predicted_where_the_rest_keeps_changing(link):
    for number, predicted in ((1, 0), (2, 4000), (3, 0), (4, 0), (4, 0)):
        size, extra = announced(link, [torch.zeros(1000), number])
        assert size == 64 + predicted and 4000 < extra < 4500
    assert announced(link, [torch.zeros(1000), 4]) == [64 + 4000]
    size, extra = announced(link, [torch.zeros(1000), 4], memory=7)
    assert size == 64 + 4000 and 4000 < extra < 4500


def test_nothing_is_predicted_where_shapes_keep_changing(link):
    for size, predicted in ((10, 0), (20, 40), (30, 0), (40, 0), (40, 0)):
        assert announced(link, torch.zeros(size))[0] == 64 + predicted
    assert announced(link, torch.zeros(40)) == [64 + 160]


@pytest.mark.parametrize("change", ["needs_grad", "memory", "stride", "plain value", "sign of zero", "None"])
def test_whatever_else_a_letter_says_is_said_when_it_changes(link, change):
    sender, receiver, _ = link
    tree = flatten([torch.zeros(2, 2), 0.0, None], "it")
    before = Message(tree.tensors, tree.skeleton, (True,), ((1, None),))
    spec, leaves = tree.skeleton
    after = {
        "needs_grad": before._replace(needs_grad=(False,)),
        "memory": before._replace(memory=((2, None),)),
        "stride": before._replace(tensors=(torch.zeros(2, 2).t(),)),
        "plain value": before._replace(skeleton=tree.skeleton._replace(leaves=(leaves[0], 1.0, None))),
        "sign of zero": before._replace(skeleton=tree.skeleton._replace(leaves=(leaves[0], -0.0, None))),
        "None": before._replace(tensors=(None,)),
    }[change]
    for letter in (before, after, after, before):
        (found,) = phase(sender, receiver, [letter])
        assert repr(found) == repr(letter)
        assert [t is None or t.stride() for t in found.tensors] == [t is None or t.stride() for t in letter.tensors]


def test_series_predict_for_themselves(link):
    sender, receiver, counting = link
    for series, size in (("F", 3), ("B", 5)):
        phase(sender, receiver, [letter_of(torch.zeros(size))], series)
    counting.sent.clear()
    for series, size in (("F", 3), ("B", 5), ("F", 3)):
        phase(sender, receiver, [letter_of(torch.zeros(size))], series)
    assert counting.sent == [(64 + 12, False), (64 + 20, False), (64 + 12, False)]


def test_both_ends_forget_the_series_that_was_not_used_for_longest(link):
    sender, receiver, counting = link
    series = [str(number) for number in range(SERIES_REMEMBERED)]
    for each in series:
        phase(sender, receiver, [letter_of(torch.zeros(3))], each)
    phase(sender, receiver, [letter_of(torch.zeros(3))], "0")  # so that 1 is the oldest
    phase(sender, receiver, [letter_of(torch.zeros(3))], "one more")
    counting.sent.clear()
    for each in ("0", "2", "one more"):
        phase(sender, receiver, [letter_of(torch.zeros(3))], each)
    assert [extra for _, extra in counting.sent] == [False] * 3
    phase(sender, receiver, [letter_of(torch.zeros(3))], "1")
    assert [extra for _, extra in counting.sent] == [False] * 3 + [False, True]


@given(st.permutations(range(6)), st.integers(1, 7), st.sampled_from([local_pair, rendezvous_pair]))
def test_letters_may_be_asked_for_in_any_order_and_position_says_how_many_came(order, window, make_pair):
    with linked(make_pair, window) as (sender, receiver, _):
        slots = [str(place) for place in range(6)]
        for _ in range(2):
            sender.begin("step", slots)
            receiver.begin("step", slots)
            assert receiver.position == 0
            for slot in slots:
                sender.send(slot, letter_of(torch.full((2,), int(slot))))
            for count, place in enumerate(order, 1):
                assert torch.equal(receiver.receive(slots[place]).tensors[0], torch.full((2,), place))
                assert receiver.position == max(order[:count]) + 1
            sender.finish()
            receiver.finish()


@pytest.mark.parametrize("window", [1, 2, 5])
def test_whoever_waits_for_a_message_has_posted_as_many_receives_as_the_window(window):
    with rendezvous_pair() as pair:
        posted, waiting = [], []

        class Watched(Handle):
            def __init__(self, handle):
                self.handle = handle

            def wait(self):
                waiting.append(len(posted))
                self.handle.wait()

        class Watching(IncomingChannel):
            def post(self, buffer, extra=False):
                handle = pair.incoming.post(buffer, extra)
                if extra:
                    return handle
                posted.append(buffer.numel())
                return Watched(handle)

        sender, receiver = Sender(pair.outgoing, "it"), Receiver(Watching(), "it", window)
        slots = ["a", "b", "c", "d"]
        for size in (64, 64 + 8):
            posted.clear(), waiting.clear()
            sender.begin("step", slots)
            receiver.begin("step", slots)
            assert len(posted) == min(window, 4)
            for slot in slots:
                sender.send(slot, Message((torch.zeros(2),)))
                receiver.receive(slot)
            sender.finish()
            receiver.finish()
            assert posted == [size] * 4 and waiting == [min(count + window, 4) for count in range(4)]


def test_a_sender_never_waits_for_its_receiver():
    with linked(rendezvous_pair) as (sender, receiver, _):
        slots = [str(place) for place in range(50)]
        sender.begin("step", slots)
        for slot in slots:
            sender.send(slot, letter_of(torch.zeros(100)))  # nobody has posted a receive
        receiver.begin("step", slots)
        assert [receiver.receive(slot).tensors[0].numel() for slot in slots] == [100] * 50
        sender.finish()


def test_buffers_are_held_until_they_are_reaped(link):
    sender, receiver, channel = link
    for of_each, first in ((2, 0), (1, 6)):  # first all are announced, then all are as predicted
        sender.begin("step", ["a", "b", "c"])
        receiver.begin("step", ["a", "b", "c"])
        for slot in "abc":
            sender.send(slot, letter_of(torch.zeros(10)))
            receiver.receive(slot)
        for count, left in ((0, 0), (1, 1), (1, 1), (0, 1), (3, 3)):
            sender.reap(count)
            assert channel.held() == [*range(first + left * of_each, first + 3 * of_each)]
        with pytest.raises(AssertionError):
            sender.reap(4)
        sender.finish()
        receiver.finish()


def test_a_phase_is_finished_when_all_has_been_received():
    with linked(rendezvous_pair) as (sender, receiver, channel):
        for end in (sender, receiver):
            end.begin("step", ["a", "b"])
        for slot in "ab":
            sender.send(slot, letter_of(torch.zeros(10)))
        thread = threading.Thread(target=sender.finish, daemon=True)
        thread.start()
        for slot in "ab":
            thread.join(0.05)
            assert thread.is_alive()
            receiver.receive(slot)
        thread.join(10)
        assert not thread.is_alive() and channel.held() == []


@pytest.mark.parametrize("reaped", range(3))
def test_what_was_not_reaped_is_waited_for_before_any_of_it_is_collected(link, reaped):
    """To wait can be interrupted, to collect cannot. Buffers of one stream arrive in order: the last waits for all."""
    sender, receiver, channel = link
    sender.begin("step", ["a", "b", "c"])
    receiver.begin("step", ["a", "b", "c"])
    for slot in "abc":
        sender.send(slot, letter_of(torch.zeros(10)))
        receiver.receive(slot)
    assert [extra for _, extra in channel.sent] == [False, True] * 3
    sender.reap(reaped)
    channel.noted.clear()
    sender.finish()
    waited = [("wait", 2 * index + 1) for index in range(reaped, 3)] + [("wait", 4)]
    assert channel.noted == [*waited, *(("collect", number) for number in range(2 * reaped, 6))]


def test_what_is_reaped_has_been_waited_for_and_is_let_go():
    with rendezvous_pair() as pair:
        channel = Counting(pair.outgoing)
        sender = Sender(channel, "it")
        sender.begin("step", ["a", "b"])
        for slot in "ab":
            sender.send(slot, letter_of(torch.zeros(10)))
        receiver = Receiver(pair.incoming, "it")
        receiver.begin("step", ["a", "b"])
        receiver.receive("a")
        sender.reap(1)
        assert channel.held() == [2, 3]
        pair.abort()
        with pytest.raises(ChannelError, match="the channel was given up"):
            sender.reap(2)
        with pytest.raises(ChannelError, match="the channel was given up"):
            receiver.receive("b")


def test_a_send_keeps_a_copy_and_not_the_tensors():
    with linked(rendezvous_pair) as (sender, receiver, _):
        sender.begin("step", ["a", "b"])
        kept, gone = torch.ones(3), torch.ones(3)
        seen = weakref.ref(gone)
        sender.send("a", Message((kept,)))
        sender.send("b", Message((gone,)))
        kept.zero_()
        del gone
        gc.collect()
        assert seen() is None
        receiver.begin("step", ["a", "b"])
        assert [receiver.receive(slot).tensors[0].tolist() for slot in "ab"] == [[1, 1, 1]] * 2


def test_what_is_done_with_one_letter_does_not_show_in_another(link):
    sender, receiver, _ = link
    for _ in range(3):
        first, second = phase(sender, receiver, [letter_of(torch.zeros(3)), letter_of(torch.zeros(3))])
        first.tensors[0].fill_(7)
        assert second.tensors[0].tolist() == [0, 0, 0]


@dataclasses.dataclass
class Noted:
    """A node whose context is a list that everyone may write in."""

    inner: Any
    notes: list


pytree.register_pytree_node(Noted, lambda node: ([node.inner], node.notes), lambda inner, notes: Noted(*inner, notes))


def test_nobody_can_write_in_what_the_ends_remember(link):
    sender, receiver, counting = link
    mine = Noted(torch.zeros(2), ["a"])
    (theirs,) = phase(sender, receiver, [letter_of(mine)])
    value_of(theirs).notes.append("theirs")
    (theirs,) = phase(sender, receiver, [letter_of(mine)])
    assert value_of(theirs).notes == ["a"]
    assert [extra for _, extra in counting.sent] == [False, True, False]  # it was as predicted
    mine.notes.append("b")
    (theirs,) = phase(sender, receiver, [letter_of(mine)])
    assert value_of(theirs).notes == ["a", "b"]


def test_letters_may_be_sent_and_received_in_inference_mode(link):
    sender, receiver, _ = link
    letter = letter_of(torch.ones(3))
    for send_mode, receive_mode in ((True, False), (False, True), (True, True), (False, False)) * 2:
        sender.begin("step", ["a", "b"])
        with torch.inference_mode(send_mode):
            receiver.begin("step", ["a", "b"])
            sender.send("a", letter)
        sender.send("b", letter)
        with torch.inference_mode(receive_mode):
            found = receiver.receive("a").tensors[0]
            found.add_(1)
        assert found.is_inference() == receive_mode and receiver.receive("b").tensors[0].requires_grad_().is_leaf
        sender.finish()
        receiver.finish()


# --------------------------------------------------------------------------------------------------- what goes wrong


def refused(function, *args):
    with pytest.raises(RuntimeError) as caught:
        function(*args)
    return str(caught.value)


def test_messages_are_sent_in_the_order_that_was_announced(link):
    sender, _, counting = link
    for names, sent, wrong in (((), (), "2F0"), (("2F0", "2F1"), ("2F0",), "2F1"), ((), ("2F1",), "2F0")):
        if names:
            sender.begin("step", names)
        with pytest.raises(AssertionError):
            sender.send(wrong, Message(()))
        for name in sent:
            sender.send(name, Message(()))
    with pytest.raises(AssertionError):
        sender.send("2F1", Message(()))
    assert len(counting.sent) == 2


def test_a_phase_ends_when_all_has_been_sent_and_asked_for(link):
    sender, receiver, _ = link
    for end in (sender, receiver):
        with pytest.raises(AssertionError):
            end.finish()
        end.begin("step", ["a", "b"])
    sender.send("a", Message(()))
    for end in (sender, receiver):
        for use in (end.finish, lambda end=end: end.begin("other", [])):
            with pytest.raises(AssertionError):
                use()
    sender.send("b", Message(()))
    receiver.receive("b")
    with pytest.raises(AssertionError):
        receiver.finish()


def test_a_message_is_asked_for_once_and_by_its_name(link):
    sender, receiver, _ = link
    with pytest.raises(AssertionError):
        receiver.receive("a")
    sender.begin("step", ["a", "b"])
    receiver.begin("step", ["a", "b"])
    sender.send("a", Message(()))
    receiver.receive("a")
    for name in ("a", "c"):
        with pytest.raises(KeyError):
            receiver.receive(name)


def test_two_messages_of_a_phase_have_two_names(link):
    for end in link[:2]:
        with pytest.raises(AssertionError):
            end.begin("step", ["a", "b", "a"])


def test_a_letter_that_cannot_be_sent_says_where_it_was_going(link):
    sender, receiver, counting = link
    for letter, words in (
        (Message((torch.ones(2, device="meta"),)), "2F0 from rank 0 to rank 1 holds a tensor on meta"),
        (letter_of([Noted(torch.ones(2), [print])]), "2F0 from rank 0 to rank 1 holds a test_link:Noted, which cannot"),
    ):
        with pytest.raises(TypeError, match=words):
            phase(sender, receiver, [letter])
        sender, receiver = Sender(counting, "rank 0 to rank 1"), Receiver(link[1]._incoming, "rank 0 to rank 1")
    assert counting.sent == []


def test_a_class_that_the_receiver_does_not_know_is_named_with_its_message(link, monkeypatch):
    sender, receiver, _ = link
    sender.begin("step", ["2F0"])
    receiver.begin("step", ["2F0"])
    sender.send("2F0", letter_of(Noted(torch.ones(1), [])))
    monkeypatch.delitem(pytree.SUPPORTED_NODES, Noted)
    assert "2F0 from rank 0 to rank 1 cannot be read: it holds a test_link:Noted" in refused(receiver.receive, "2F0")


def mistaken(sent, expected, letter=Message(()), before=()):
    """What the receiver says when its sender is at another message. Each is (series, slots, how many to skip)."""
    with linked() as (sender, receiver, _):
        for letters in before:
            phase(sender, receiver, letters)
        sender.begin(*sent)
        receiver.begin(*expected)
        sender.send(sent[1][0], letter)
        return refused(receiver.receive, expected[1][0])


def test_a_message_of_another_series_is_told_by_name():
    message = mistaken(("F", ["a"]), ("B", ["b"]))
    assert message == (
        "rank 0 to rank 1: message 0 (b) of 'B' in call 1 should have come, and message 0 of a series that this rank "
        "does not know in call 1 came: the two ranks do not run the same calls in the same order."
    )
    message = mistaken(("step", ["2F0"]), ("B", ["b"]), before=[[Message(())]])
    assert "message 0 (b) of 'B' in call 2 should have come, and message 0 (2F0) of 'step' in call 2 came" in message


def test_other_names_in_the_same_series_are_another_message():
    assert "message 0 of a series that this rank does not know" in mistaken(("step", ["a", "b"]), ("step", ["a", "c"]))


def test_a_message_of_another_call_is_told_by_its_number():
    with linked() as (sender, receiver, _):
        sender.begin("step", [])
        sender.finish()
        sender.begin("step", ["a"])
        receiver.begin("step", ["a"])
        sender.send("a", Message(()))
        message = refused(receiver.receive, "a")
        assert "(a) of 'step' in call 1 should have come, and message 0 (a) of 'step' in call 2 came" in message


def test_a_message_that_was_lost_is_missed_at_the_next():
    with linked() as (sender, receiver, counting):
        sender.begin("step", ["a", "b"])
        receiver.begin("step", ["a", "b"])
        sender._outgoing = type("Losing", (OutgoingChannel,), {"send": lambda self, buffer, extra=False: None})()
        sender.send("a", Message(()))
        sender._outgoing = counting
        sender.send("b", Message(()))
        message = refused(receiver.receive, "a")
        assert "(a) of 'step' in call 1 should have come, and message 1 (b) of 'step' in call 1 came" in message


class Cutting(Counting):
    """A channel that loses all but the header, and cannot tell."""

    def send(self, buffer, extra=False):
        return super().send(buffer[:64], extra)


def test_ends_that_remember_different_things_say_so(link):
    sender, receiver, _ = link
    phase(sender, receiver, [letter_of(torch.zeros(3))])
    with local_pair() as pair:
        sender._outgoing, receiver = Cutting(pair.outgoing), Receiver(pair.incoming, "rank 0 to rank 1")
        receiver.begin("step before", [])
        receiver.finish()
        sender.begin("step", ["2F0"])
        receiver.begin("step", ["2F0"])
        sender.send("2F0", letter_of(torch.zeros(3)))
        assert refused(receiver.receive, "2F0") == (
            "rank 0 to rank 1: message 0 (2F0) of 'step' in call 2 came with 12 bytes of tensors, where this rank "
            "expected 0: the two ends no longer remember the same."
        )


def test_what_is_no_message_is_told():
    with local_pair() as pair:
        receiver = Receiver(pair.incoming, "rank 0 to rank 1")
        receiver.begin("step", ["a"])
        pair.outgoing.send(torch.zeros(64, dtype=torch.uint8))
        assert "message 0 (a) of 'step' in call 1 should have come, and what came is no message at all" in refused(
            receiver.receive, "a"
        )
