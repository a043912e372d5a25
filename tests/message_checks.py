"""Laws of messages on any channel, and on the payloads of one that has some: what is sent arrives, bit by bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.data.pytrees import flatten, memory_address, same_values
from pipeline.transports.link import Receiver, Sender
from pipeline.transports.message import Message
from pipeline.transports.packing import Packing
from pipeline.transports.tensor_spec import sendable
from pipeline.transports.testing import ChannelEnds


def messages_of_every_dtype_and_layout_arrive_bit_by_bit(pair: ChannelEnds) -> None:
    messages = [Message((tensor,)) for tensor in _tensors()] + [Message(tuple(_tensors()))]
    _exchange(pair, [messages, messages])


def messages_without_tensors_arrive(pair: ChannelEnds) -> None:
    structures = [flatten(value, "it") for value in ((), [None, 1, "a"], {"a": float("inf"), "b": ()})]
    messages = [Message(tree.tensors, tree.skeleton) for tree in structures] + [Message(()), Message((None, None))]
    _exchange(pair, [messages, messages[::-1], messages])


def shapes_may_change_from_phase_to_phase_and_within_one(pair: ChannelEnds) -> None:
    numbers = random.Random(0)
    sizes = [[numbers.choice([0, 1, 3, 3, 3, 100]) for _ in range(8)] for _ in range(12)]
    _exchange(pair, [[Message((torch.randn(size),), None, (size > 1,), (size,)) for size in row] for row in sizes])


def a_message_of_megabytes_may_follow_a_small_one_and_the_other_way(pair: ChannelEnds) -> None:
    small, large = Message((torch.randn(3),)), Message((torch.randn(1 << 19), torch.ones(1, dtype=torch.bool)))
    _exchange(pair, [[small, large, small], [large, small, large], [large, small, large]])


def messages_may_be_asked_for_in_another_order(pair: ChannelEnds) -> None:
    _ask_in_another_order(pair, [Message((torch.full((index + 1,), index),)) for index in range(8)], 2)


def _ask_in_another_order(pair: ChannelEnds, messages: Sequence[Message], times: int) -> None:
    names = [str(index) for index in range(8)]
    sender, receiver = Sender(pair.outgoing, "a to b"), Receiver(pair.incoming, "a to b")
    for _ in range(times):
        sender.begin("order", names)
        receiver.begin("order", names)
        for name, message in zip(names, messages, strict=True):
            sender.send(name, message)
        for index in (5, 0, 7, 6, 1, 2, 4, 3):
            _assert_equal(receiver.receive(names[index]), messages[index])
        sender.finish()
        receiver.finish()


def a_sender_in_a_thread_of_its_own_may_be_far_ahead(pair: ChannelEnds) -> None:
    messages = [Message((torch.full((7,), index),)) for index in range(60)]
    names = [str(index) for index in range(60)]
    sender, receiver = Sender(pair.outgoing, "a to b"), Receiver(pair.incoming, "a to b")

    def send() -> None:
        for _ in range(3):
            sender.begin("ahead", names)
            for name, message in zip(names, messages, strict=True):
                sender.send(name, message)
            sender.finish()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    for _ in range(3):
        receiver.begin("ahead", names)
        for name, message in zip(names, messages, strict=True):
            _assert_equal(receiver.receive(name), message)
        receiver.finish()
    thread.join()


def messages_on_the_device_arrive_bit_by_bit(pair: ChannelEnds) -> None:
    device = _device_of(pair)
    tensors = [tensor.to(device) for tensor in _tensors() if tensor.layout is torch.strided]
    messages = [Message((tensor,)) for tensor in tensors] + [Message(tuple(tensors)), Message((tensors[0], None))]
    _exchange(pair, [messages, messages])


def messages_may_hold_tensors_on_the_device_and_on_the_host(pair: ChannelEnds) -> None:
    device = _device_of(pair)
    on_device, on_host, empty = torch.randn(5).to(device), torch.arange(3), torch.empty(0).to(device)
    combinations = (
        (on_device,), (on_device, on_host), (on_host, on_device, empty), (on_host,), (empty,), (on_host, empty)
    )
    mixed = [Message(tensors) for tensors in combinations]
    _exchange(pair, [mixed, mixed, mixed[::-1], [mixed[0], mixed[3]] * 3, [mixed[3], mixed[0]] * 3])


def messages_on_the_device_may_be_asked_for_in_another_order(pair: ChannelEnds) -> None:
    device = _device_of(pair)
    messages = [Message((torch.full((index + 1,), index + 0.5).to(device),)) for index in range(8)]
    _ask_in_another_order(pair, messages, 3)


ON_ANY = (
    messages_of_every_dtype_and_layout_arrive_bit_by_bit,
    messages_without_tensors_arrive,
    shapes_may_change_from_phase_to_phase_and_within_one,
    a_message_of_megabytes_may_follow_a_small_one_and_the_other_way,
    messages_may_be_asked_for_in_another_order,
    a_sender_in_a_thread_of_its_own_may_be_far_ahead,
)
WITH_PAYLOADS = (
    messages_on_the_device_arrive_bit_by_bit,
    messages_may_hold_tensors_on_the_device_and_on_the_host,
    messages_on_the_device_may_be_asked_for_in_another_order,
)


def _device_of(pair: ChannelEnds) -> torch.device:
    assert pair.outgoing.payloads is not None
    return pair.outgoing.payloads.device


def _tensors() -> list[Tensor]:
    """One of each dtype, of each layout, and of each way to lie in memory."""
    bits = torch.randint(256, (48,), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    dtypes = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16]
    dtypes += [torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]
    numbers = torch.randn(2, 3, 4, 5)
    return [bits.clone().view(dtype) for dtype in dtypes] + [
        bits > 100,
        torch.tensor(3.5),
        torch.empty(0, 3),
        numbers.to(memory_format=torch.channels_last),
        numbers.transpose(1, 3),
        torch.ones(()).expand(4, 4),
        numbers[..., ::2],
        numbers[..., 0],
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse_coo(),
    ]


def _exchange(pair: ChannelEnds, phases: list[list[Message]]) -> None:
    """Send messages phase by phase, each as soon as may be, and see that the same ones come."""
    sender, receiver = Sender(pair.outgoing, "a to b"), Receiver(pair.incoming, "a to b", window=2)
    for messages in phases:
        names = [str(index) for index in range(len(messages))]
        sender.begin("messages", names)
        receiver.begin("messages", names)
        for name, message in zip(names, messages, strict=True):
            sender.send(name, message)
            _assert_equal(receiver.receive(name), message)
            sender.reap(receiver.position)
        sender.finish()
        receiver.finish()


def _assert_equal(received: Message, expected: Message) -> None:
    counts = len(received.tensors), len(expected.tensors)
    assert counts[0] == counts[1], f"{counts[0]} tensors came of {counts[1]}"
    for tensor, original in zip(received.tensors, expected.tensors, strict=True):
        assert (tensor is None) == (original is None), "None was taken for a tensor, or a tensor for None"
        if tensor is not None and original is not None:
            assert _same_bits(tensor, original), f"{original} came as {tensor}"
    memories = [memory_address(tensor) for tensor in received.tensors if tensor is not None]
    assert len(set(memories)) == len(memories), "two tensors of a message share their memory"
    assert repr(received[1:]) == repr(expected[1:]), f"{expected[1:]} came as {received[1:]}"


def _same_bits(received: Tensor, original: Tensor) -> bool:
    (original,) = sendable([original], "it")  # type: ignore[assignment]  # a tensor, since it was one
    if original.layout is not torch.strided:
        return received.layout is original.layout and same_values(received, original)
    return Packing.of([received]).specs == Packing.of([original]).specs and torch.equal(
        _bits(received), _bits(original)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
