"""What a call does about devices, shown without one: by stand-ins for torch.accelerator, and the meta device."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline import Pipe
from pipeline.common.places import Place
from pipeline.common.torch_modes import Ambient
from pipeline.data.pytrees import Activations, Tree
from pipeline.data.values import CALLER, chain
from pipeline.distributed.mailbox import RankMailbox
from pipeline.execution.communicator import Exchange
from pipeline.execution.drivers import Driver
from pipeline.execution.mailbox import Mailbox
from pipeline.execution.plan import plan_step
from pipeline.transports.local import Local
from pipeline.transports.message import Message
from scheduler import Action, by_name

CPU, META = torch.device("cpu"), torch.device("meta")


class CurrentGpu(threading.local):
    """Each thread begins with GPU 0 as its current one, as CUDA has it."""

    index = 0

    @contextmanager
    def entered(self, index: int | None) -> Iterator[None]:
        before, self.index = self.index, self.index if index is None else index
        try:
            yield
        finally:
            self.index = before


@pytest.mark.parametrize("workers", ["inline", "threads", None])
@pytest.mark.parametrize("devices", [
    ["cuda:0", "cpu", "cuda:1"], ["cpu", "cuda:1", "cuda:0"], ["cpu", "cuda:1"], ["cuda:1", "cuda:1"], ["cuda:0"],
    ["cpu", "cpu"],
])
def test_every_stage_computes_with_its_gpu_as_the_current_one(
    devices: list[str], workers: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = CurrentGpu()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_index", gpu.entered)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: gpu.index)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: setattr(gpu, "index", index))
    stream = lambda device: SimpleNamespace(device=device, query=lambda: True)  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "current_stream", stream)
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: setattr(gpu, "index", stream.device.index))
    places = [Place(torch.device(device)) for device in devices]
    seen: dict[Action, int] = {}

    def perform(action: Action) -> None:
        seen[action] = gpu.index

    plan = plan_step(by_name("1f1b", len(places), 3), places)
    driver = Driver(places, [[nn.Tanh()] for _ in places], range(len(places)), workers)
    for in_turns in (False, True):
        driver.run(plan.phases[0], perform, False, Ambient.capture(["cpu"]), in_turns)
        assert len(seen) == 6 * len(places)
        for action, index in seen.items():
            device = places[action.stage].device
            assert index == (device.index if device.type == "cuda" else 0), action
        seen.clear()


@pytest.mark.parametrize("device", [META, CPU], ids=["an accelerator", "the host"])
def test_named_parts_of_an_accelerator_which_has_one_generator_compute_one_at_a_time(device: torch.device) -> None:
    inside, seen = [0], {0}

    def perform(action: Action) -> None:
        inside[0] += 1
        seen.add(inside[0])
        time.sleep(0.005)
        inside[0] -= 1

    places = [Place(device, name) for name in "abc"]
    plan = plan_step(by_name("gpipe", 3, 4), places)
    driver = Driver(places, [[nn.Tanh()] for _ in places], range(3), "threads")
    driver.run(plan.phases[0], perform, False, Ambient.capture(["cpu"]), False)
    assert (max(seen) == 1) is (device == META)


def test_what_the_caller_gives_comes_to_the_device_of_its_rank() -> None:
    """As in one process; a value between two stages is there already."""
    values = chain(2, ())
    ranks: Any = SimpleNamespace(rank=0, device=META)  # nothing goes to another one
    over_ranks = RankMailbox(values, (0, 0), ranks, "", Local())
    alone = Mailbox(values, dict.fromkeys(range(2), Place(META)), Local())
    x = torch.ones(3, 2)
    for box in (over_ranks, alone):
        box.put(CALLER, 0, [Activations(Tree((x,), None), (True,))])
        (message,) = box.take(0, 0)
        assert message.tree.tensors[0].device == META and message.tree.tensors[0].shape == (3, 2)
        made = torch.ones(3, 2, device="meta")
        box.put(0, 0, [Activations(Tree((made,), None), (True,))])
        assert box.take(1, 0)[0].tree.tensors[0] is made
        assert len(box) == 0


@pytest.mark.parametrize("entry", ["forward", "step"])
def test_gradients_of_the_input_that_another_rank_computed_come_to_the_input(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried: list[Tensor] = []

    def elsewhere(self: Exchange, what: str, stage: int, message: Message | None) -> Message:
        assert message is not None
        if what != "the gradients of the input":
            return message
        return message._replace(tensors=tuple([None if grad is None else grad.to(META) for grad in message.tensors]))

    def carry(self: Local, tensor: Tensor, source: Place | None, target: Place | None) -> Tensor:
        assert target is not None
        if tensor.device != META:  # a sum for a parameter
            return tensor
        carried.append(tensor)
        return torch.full(tensor.shape, 7.0, device=target.device)

    monkeypatch.setattr(Exchange, "broadcast", elsewhere)
    monkeypatch.setattr(Local, "carry", carry)
    x = torch.ones(4, 2, requires_grad=True)
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], 2)
    if entry == "forward":
        pipe(x).sum().backward()
    else:
        pipe.step(x, loss_fn=lambda out, _: out.sum(), loss_reduction="sum")
    assert x.grad is not None and x.grad.tolist() == [[7.0, 7.0]] * 4
    assert len(carried) == 1
