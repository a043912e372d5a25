"""Payloads over NCCL: what only GPUs show. They need two GPUs.

    make test-gpu

Where two ends of a channel are in one process, each has a GPU of its own; whole scripts run as torchrun's ranks.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from message_checks import ON_ANY, WITH_PAYLOADS
from synchronisation import no_synchronisation
from torch import Tensor

from pipeline.transports.distributed import Channels
from pipeline.transports.link import Receiver, Sender
from pipeline.transports.message import Message
from pipeline.transports.packing import Packing
from pipeline.transports.testing import ChannelEnds, check_transport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]
SOON = timedelta(seconds=60)
CYCLES = 200_000_000  # about 100 ms on a GPU of 2 GHz

two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not dist.is_nccl_available(), reason="needs two GPUs and NCCL"
)


def gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(2)]


def carriers(devices: list[torch.device]) -> list[Any]:
    from pipeline.transports.nccl import Nccl

    return [Nccl(device) for device in devices]


@contextmanager
def joined(devices: list[torch.device]) -> Iterator[list[Channels]]:
    """The channels of two ranks, both in this process, each connected by a thread."""
    store, found, carried = dist.HashStore(), dict[int, Channels](), carriers(devices)

    def connect(rank: int) -> None:
        found[rank] = Channels(store, rank, [(0, 1), (1, 0)], SOON, carried[rank])
        for pair in ((0, 1), (1, 0)) if carried[0].place != carried[1].place else ():
            found[rank].carry(dist.PrefixStore(f"{pair}", store), pair)

    threads = [threading.Thread(target=connect, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 2, "the two ranks did not connect"
    try:
        yield [found[0], found[1]]
    finally:
        for each in found.values():
            each.drain(10)
        for each in found.values():
            each.close()


@contextmanager
def nccl_pair() -> Iterator[ChannelEnds]:
    with joined(gpus()) as channels:

        def abort() -> None:
            for each in channels:
                each.abort()

        pair = ChannelEnds(channels[0].outgoing(1), channels[1].incoming(0), abort)
        assert pair.outgoing.payloads is not None
        yield pair


@two_gpus
def test_one_byte_goes_from_gpu_to_gpu() -> None:
    """First, since all else builds on it."""
    with nccl_pair() as pair:
        assert pair.outgoing.payloads is not None and pair.incoming.payloads is not None
        pair.outgoing.payloads.send(torch.full((1,), 7, dtype=torch.uint8, device="cuda:0"))
        found = pair.incoming.payloads.post(1)()
        assert found.device == gpus()[1] and found.tolist() == [7]


@two_gpus
def test_channels_with_nccl_pass_every_check() -> None:
    check_transport(nccl_pair, seconds=60.0)


@two_gpus
@pytest.mark.parametrize("check", ON_ANY + WITH_PAYLOADS)
def test_messages_arrive_over_nccl(check: Callable[[ChannelEnds], None]) -> None:
    with nccl_pair() as pair:
        check(pair)


@two_gpus
@pytest.mark.parametrize("late", ["neither", "sender", "receiver"])
def test_streams_wait_for_each_other_and_the_host_for_none(late: str) -> None:
    with joined(gpus()) as channels:
        sender = Sender(channels[0].outgoing(1), "rank 0 to rank 1")
        receiver = Receiver(channels[1].incoming(0), "rank 0 to rank 1", device=gpus()[1])
        sent = torch.arange(1 << 20, dtype=torch.float32, device="cuda:0")
        found: list[Tensor | None] = []
        for phase in range(4):
            for end in sender, receiver:
                end.begin("step", ["a", "b", "c"])
            begin = time.monotonic()
            with no_synchronisation():
                for place, slot in enumerate("abc"):
                    for device in gpus():
                        if late == ("sender", "receiver")[device.index]:
                            with torch.cuda.device(device):
                                torch.cuda._sleep(CYCLES)
                    mine = sent + (10 * phase + place)
                    sender.send(slot, Message((mine, mine[:3].clone())))
                    mine.fill_(float("nan"))  # after it was packed
                    del mine
                    found += [tensor.add(1) for tensor in receiver.receive(slot).tensors if tensor is not None]
                sender.finish()
            assert late == "neither" or phase == 0 or time.monotonic() - begin < 0.2, "the host waited"
            receiver.finish()
        for index, tensor in enumerate(found):
            phase, place, which = index // 6, index // 2 % 3, index % 2
            expected = torch.arange(3 if which else 1 << 20, dtype=torch.float32) + (10 * phase + place) + 1
            assert tensor is not None and tensor.device == gpus()[1] and torch.equal(tensor.cpu(), expected)


@two_gpus
def test_memory_that_is_still_to_be_read_or_sent_is_not_given_away() -> None:
    with joined(gpus()) as channels:
        out, into = channels[0].outgoing(1).payloads, channels[1].incoming(0).payloads
        assert out is not None and into is not None
        for round_ in range(4):
            with torch.cuda.device(0):
                torch.cuda._sleep(CYCLES)
            out.send(torch.full((1 << 20,), round_, dtype=torch.uint8, device="cuda:0"))
            for _ in range(8):
                torch.full((1 << 20,), 99, dtype=torch.uint8, device="cuda:0")
            found = into.post(1 << 20)()
            with torch.cuda.device(1):
                torch.cuda._sleep(CYCLES)
                read = found.clone()
            del found
            for _ in range(8):
                into_the_way = torch.full((1 << 20,), 98, dtype=torch.uint8, device="cuda:1")
                del into_the_way
            assert bool((read == round_).all())


@two_gpus
def test_both_ways_at_once_do_not_block_each_other() -> None:
    with joined(gpus()) as channels:
        ends = [(each.outgoing(1 - rank), each.incoming(1 - rank)) for rank, each in enumerate(channels)]
        expected = []
        for count in range(20):
            for rank, (outgoing, _) in enumerate(ends):
                assert outgoing.payloads is not None
                outgoing.payloads.send(torch.full((1 << 22,), count + rank, dtype=torch.uint8, device=gpus()[rank]))
        for count in range(20):
            for rank, (_, incoming) in enumerate(ends):
                assert incoming.payloads is not None
                expected.append((incoming.payloads.post(1 << 22), count + 1 - rank))
        for each, value in expected:
            assert bool((each() == value).all())


@two_gpus
def test_giving_up_frees_a_gpu_that_waits_for_a_payload() -> None:
    with joined(gpus()) as channels:
        into = channels[1].incoming(0).payloads
        assert into is not None
        waiting = into.post(8)
        waiting()  # the stream waits from now on
        begin = time.monotonic()
        channels[1].abort()
        torch.cuda.synchronize(1)
        assert time.monotonic() - begin < 10


def test_tensors_of_several_devices_are_packed_on_one() -> None:
    device = torch.device("cuda", 0)
    tensors = [torch.arange(5, device=device), None, torch.arange(3.0), torch.ones((), device=device).expand(4)]
    packing = Packing.of(tensors)
    packed = packing.pack_payload(tensors, device)
    assert packed.device == device and packed.numel() == packing.nbytes
    for found, tensor in zip(packing.unpack(packed, 0, device), tensors, strict=True):
        assert (found is None) == (tensor is None)
        if found is not None and tensor is not None:
            assert found.device == device and found.stride() == tensor.stride()
            assert torch.equal(found.cpu(), tensor.cpu())


def test_the_host_does_not_wait_while_tensors_are_packed() -> None:
    device = torch.device("cuda", 0)
    tensors = [torch.arange(5, device=device), torch.arange(3.0)]
    packing = Packing.of(tensors)
    packing.pack_payload(tensors, device)  # pinned memory is allocated
    with no_synchronisation():
        torch.cuda._sleep(CYCLES)
        begin = time.monotonic()
        packed = packing.pack_payload(tensors, device)
        waited = time.monotonic() - begin
    assert waited < 0.05
    assert torch.equal(packed[64:76].cpu().view(torch.float32), torch.arange(3.0))


# ------------------------------------------------------------------------------------------------------ whole scripts

SCRIPT = '''
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from pipeline import Pipe

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).double()

def square(output, target):
    return (output - target).square().mean()

def train(pipe, device):
    losses = []
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step, rows in enumerate((8, 8, 12, 8, 7)):
        torch.manual_seed(step)
        x, y = torch.randn(rows, 6).double(), torch.randn(rows, 4).double()
        optimizer.zero_grad()
        if step % 2:
            loss = square(pipe(x), y.to(device))
            loss.backward()
        else:
            loss = pipe.step(x, y, loss_fn=square).loss
        optimizer.step()
        losses.append(float(loss))
    return losses

os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % torch.cuda.device_count())
if "BACKEND" in os.environ:
    torch.distributed.init_process_group(os.environ["BACKEND"])
pipe = Pipe(network(), [3, 2], 4)
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
losses = train(pipe, device)
from pipeline.distributed import group
links = [sender for ranks in group._groups.values() for sender in ranks.connections._senders.values()]
has = any(sender._payloads is not None for sender in links)
plain = Pipe(network(), [3, 2], 4, devices=[device] * 2)
print("FOUND " + json.dumps([losses, train(plain, device), has]), flush=True)
'''


def scripts_of_two_ranks(tmp_path: Any, **environment: str) -> list[Any]:
    """What each of two ranks of a script found, under torchrun's environment."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    known = {**os.environ, **environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    known["PYTHONPATH"] = os.pathsep.join([os.getcwd(), known.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path)], env={**known, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)
    return [json.loads(output.split("FOUND ")[1].splitlines()[0]) for output in outputs]


def test_two_ranks_on_one_gpu_are_told_so(tmp_path: Any) -> None:
    one = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] all take device "):
        scripts_of_two_ranks(tmp_path, CUDA_VISIBLE_DEVICES=one)


@two_gpus
def test_two_ranks_without_nccl_train_as_one_process_does_through_the_host(tmp_path: Any) -> None:
    for losses, alone, has_payloads in scripts_of_two_ranks(tmp_path, BACKEND="gloo"):
        assert losses == pytest.approx(alone, rel=1e-10) and not has_payloads


@two_gpus
def test_two_ranks_with_a_gpu_each_train_as_one_process_does_over_nccl(tmp_path: Any) -> None:
    for losses, alone, has_payloads in scripts_of_two_ranks(tmp_path):
        assert losses == pytest.approx(alone, rel=1e-10) and has_payloads
