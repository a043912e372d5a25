"""A Pipe on accelerators: which it takes, which is current where, generators, what goes to the host and back.

References are the plain module on the host, chunk by chunk: numbers there are the same bits. A wait that is missing is
an error (tests/accelerator/simulated.py).
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import simulated
import torch
import torch.distributed as dist
from torch import Tensor, nn

from partition import profile
from pipeline import Pipe, Place, checkpoint_blocks
from pipeline.common import accelerators
from pipeline.common.places import place_of
from pipeline.distributed.digests import Fingerprint, Sketches
from pipeline.gradients.clip import norms_as_numbers
from pipeline.randomness import layer_seed
from pipeline.transports.local import Local
from pipeline.transports.packing import Packing

CPU = torch.device("cpu")
CHUNKS = 3


def sim(index: int = 0) -> torch.device:
    return torch.device("sim", index)


PLACES: dict[str, Callable[[], list[Any] | None]] = {
    "not said": lambda: None,
    "one": lambda: ["sim:0"] * 3,
    "one, not the current one": lambda: ["sim:2"] * 3,
    "three, by number": lambda: [2, 0, 1],
    "host first": lambda: ["cpu", "sim:1", "sim:2"],
    "host between": lambda: ["sim:1", "cpu", "sim:0"],
    "host last": lambda: ["sim:2", "sim:1", "cpu"],
    "one between hosts": lambda: ["cpu", "sim:1", "cpu"],
    "parts of one": lambda: [Place(sim(), name) for name in "abc"],
}
WORKERS = [None, "inline", "threads"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 4)
    ).double()


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def by_hand(plain: nn.Sequential, x: Tensor, y: Tensor, seed: int) -> None:
    """Gradients of the plain module, chunk by chunk, with the masks of a call that has this seed."""
    for chunk, (part, target) in enumerate(zip(x.tensor_split(CHUNKS), y.tensor_split(CHUNKS), strict=True)):
        for index, layer in enumerate(plain):
            torch.manual_seed(layer_seed(seed, chunk, index))
            part = layer(part)
        (mean_square(part, target) * (len(target) / len(y))).backward()


def trained(pipe: Pipe, x: Tensor, y: Tensor, entry: str) -> None:
    if entry == "step":
        pipe.step(x, y, loss_fn=mean_square)
        return
    output = pipe(x)
    mean_square(output, y.to(output.device)).backward()


@pytest.mark.parametrize("entry", ["step", "forward"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("where", PLACES)
def test_gradients_masks_and_buffers_are_those_of_the_plain_module_on_the_host(
    where: str, workers: str | None, checkpoint: str, entry: str
) -> None:
    plain = model()
    pipe = Pipe(model(), [2, 2, 2], CHUNKS, devices=PLACES[where](), checkpoint=checkpoint, workers=workers)
    for call in range(3):
        torch.manual_seed(call)
        x, y = torch.randn(8, 6).double(), torch.randn(8, 4).double()
        state = torch.get_rng_state()
        seed = int(torch.empty((), dtype=torch.int64).random_())
        plain.zero_grad()
        pipe.zero_grad()
        by_hand(plain, x, y, seed)
        torch.set_rng_state(state)
        found = [generator.get_state() for generator in torch.sim.default_generators]
        trained(pipe, x, y, entry)
        for generator, before in zip(torch.sim.default_generators, found, strict=True):
            assert torch.equal(generator.get_state(), before)
        for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-13, atol=1e-15)
        for ours, theirs in zip(pipe.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-14, atol=0)


# ------------------------------------------------------------------------------------------------------ which device


def test_a_pipe_that_is_not_told_takes_the_accelerators_in_order() -> None:
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    assert Pipe(layers, chunks=2).devices == [sim(0), sim(1), sim(2)]
    assert Pipe(layers, chunks=2).balance == [2, 2, 2]
    assert Pipe(layers, [3, 3], chunks=2).devices == [sim(0), sim(1)]
    with pytest.raises(ValueError, match=r"4 stages but there are 3 devices \(sim:0, sim:1, sim:2\)"):
        Pipe(layers, [1, 1, 2, 2])


def test_a_device_without_a_number_is_the_current_one() -> None:
    assert place_of("sim") == Place(sim(0)) and place_of(1) == Place(sim(1))
    with accelerators.entered(sim(2)):
        assert place_of("sim") == Place(sim(2))
        assert Pipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["sim"]).devices == [sim(2)]


def test_a_rank_without_a_number_takes_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in accelerators.LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    with accelerators.entered(sim(1)):
        assert accelerators.device_of_rank() == sim(1)
    monkeypatch.setenv("SLURM_LOCALID", "2")
    assert accelerators.device_of_rank() == sim(2) and accelerators.device_identity(sim(2)) == "sim:2"


class Current(nn.Module):
    """Notes the current device, and what is made there, in the forward; the current device in the backward."""

    def __init__(self, notes: list[tuple[str, int, torch.device]]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(("F", torch.accelerator.current_device_index(), x.device))
        return Passing.apply(x, self.notes)  # type: ignore[no-untyped-call, no-any-return]


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: list[tuple[str, int, torch.device]]) -> Tensor:
        ctx.notes = notes
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.notes.append(("B", torch.accelerator.current_device_index(), grad.device))
        return grad, None


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("where", PLACES)
def test_every_layer_computes_with_its_accelerator_as_the_current_one(
    where: str, workers: str | None, current: int
) -> None:
    """A kernel of one's own goes to the current device. It is the caller's again afterwards."""
    notes: list[tuple[str, int, torch.device]] = []
    layers = [layer for _ in range(3) for layer in (nn.Linear(2, 2), Current(notes))]
    with accelerators.entered(sim(current)):
        pipe = Pipe(nn.Sequential(*layers), [2, 2, 2], 2, devices=PLACES[where](), checkpoint="always", workers=workers)
        for _ in range(3):
            pipe.step(torch.ones(4, 2), loss_fn=lambda out, _: out.sum(), loss_reduction="sum")
            pipe(torch.ones(4, 2)).sum().backward()
        assert torch.accelerator.current_device_index() == current
    assert {what for what, _, _ in notes} == {"F", "B"} and {device for _, _, device in notes} == set(pipe.devices)
    assert [note for note in notes if note[2].type == "sim" and note[1] != note[2].index] == []


@pytest.mark.parametrize("where", ["one, not the current one", "not said", "host between"])
def test_parameters_stay_the_objects_that_they_are_and_tied(where: str) -> None:
    """As on CUDA. On devices of backends that are not torch's own, `.to()` would replace them."""
    layers, plain = ([nn.Linear(4, 4).double() for _ in range(3)] for _ in range(2))
    x = torch.randn(4, 4).double()
    for some in (layers, plain):
        some[2].weight = some[0].weight
        some[1].bias = some[0].bias
    before = list(nn.Sequential(*layers).parameters())
    plain_model = nn.Sequential(*plain)
    plain_model.load_state_dict(nn.Sequential(*layers).state_dict())
    optimizers = [torch.optim.SGD(before, lr=0.1), torch.optim.SGD(plain_model.parameters(), lr=0.1)]
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        pipe = Pipe(nn.Sequential(*layers), [1, 1, 1], 2, devices=PLACES[where]())
        assert not torch.__future__.get_swap_module_params_on_conversion()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    assert all(one is other for one, other in zip(pipe.parameters(), before, strict=True)) and len(before) == 4
    for _ in range(2):
        pipe.step(x, x, loss_fn=mean_square, optimizer=optimizers[0])
        optimizers[1].zero_grad()
        mean_square(plain_model(x), x).backward()
        optimizers[1].step()
    for one, other in zip(pipe.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-13, atol=1e-15)


# -------------------------------------------------------------------------------------------------------- over ranks


def over_ranks(rank: int, port: int, results: Any) -> None:
    """One of two ranks: with the same device, then with devices of their own. Puts what was said, and the gradients."""
    simulated.load()
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    dist.init_process_group("gloo")
    try:
        Pipe(model(), [2, 4], CHUNKS, group=dist.new_group())
        said = "nothing"
    except ValueError as error:
        said = str(error)
    os.environ["LOCAL_RANK"] = str(2 * rank)
    pipe = Pipe(model(), [2, 4], CHUNKS)
    grads: list[dict[str, Tensor]] = []
    for entry in ("step", "forward"):
        x, y = torch.ones(8, 6).double().cumsum(0), torch.ones(8, 4).double()
        pipe.zero_grad()
        torch.manual_seed(7)
        trained(pipe, x, y, entry)
        grads.append({name: parameter.grad.cpu() for name, parameter in pipe.named_parameters() if parameter.numel()})
    torch.sim.check()
    results.put((rank, said, str(pipe.devices[0]), [{k: g.numpy() for k, g in some.items()} for some in grads]))
    dist.destroy_process_group()


def test_ranks_compute_on_devices_of_their_own() -> None:
    """The numbers are those of one process on the host, and two ranks on one device are told so."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=over_ranks, args=(rank, store.port, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found = sorted((results.get(timeout=60) for _ in ranks), key=lambda result: result[0])
    for rank in ranks:
        rank.join()
    assert [(rank, device) for rank, _, device, _ in found] == [(0, "sim:0"), (1, "sim:2")]
    assert all(said.startswith("ranks [0, 1] all take device sim:1 on host ") for _, said, _, _ in found)
    plain = Pipe(model(), [2, 4], CHUNKS, devices=["cpu", "cpu"])
    for number, entry in enumerate(("step", "forward")):
        x, y = torch.ones(8, 6).double().cumsum(0), torch.ones(8, 4).double()
        plain.zero_grad()
        torch.manual_seed(7)
        trained(plain, x, y, entry)
        grads = {name: grad for *_, each in found for name, grad in each[number].items()}
        assert grads.keys() == dict(plain.named_parameters()).keys()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None and torch.equal(torch.from_numpy(grads[name]), parameter.grad)


# ----------------------------------------------------------------------------------------------------------- streams


def test_a_stream_may_be_entered_by_several_threads_at_a_time() -> None:
    """Within it is the current one, afterwards the one before: whatever happens in other threads."""
    stream, barrier = torch.Stream(device=sim(1)), threading.Barrier(2)
    found: list[bool] = []

    def work() -> None:
        before = torch.accelerator.current_stream(sim(1))
        with accelerators.entered_streams(stream):
            barrier.wait(5)
            found.append(torch.accelerator.current_stream(sim(1)) == stream)
            found.append(torch.accelerator.current_device_index() == 1)
            with accelerators.entered_streams(stream):
                barrier.wait(5)
        found.append(torch.accelerator.current_stream(sim(1)) == before)
        found.append(torch.accelerator.current_device_index() == 0)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


@pytest.mark.parametrize("entry", ["step", "forward"])
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("where", ["one", "not said", "host between", "parts of one"])
def test_calls_on_streams_of_the_callers_own(where: str, workers: str | None, entry: str) -> None:
    x, y = torch.randn(8, 6).double(), torch.randn(8, 4).double()
    grads: list[list[Tensor]] = []
    for streams in ([], [torch.Stream(device=sim(index)) for index in range(3)]):
        with accelerators.entered_streams(*streams):
            pipe = Pipe(model().eval(), [2, 2, 2], CHUNKS, devices=PLACES[where](), workers=workers)
            for _ in range(2):
                pipe.zero_grad()
                trained(pipe, x, y, entry)
            grads.append([param.grad.cpu() for param in pipe.parameters() if param.grad is not None])
    assert all(map(torch.equal, *grads)) and len(grads[0]) == 8


MOVES = [("cpu", "sim:1"), ("sim:1", "cpu"), ("sim:0", "sim:2"), ("sim:1", "sim:1")]


@pytest.mark.parametrize(("source", "target"), MOVES)
@pytest.mark.parametrize("of", [
    lambda x: x, lambda x: x.t(), lambda x: x[:1].expand(7, -1), lambda x: x[:, ::2], lambda x: x[:0],
    lambda x: x.pin_memory() if x.is_cpu else x, lambda x: torch.view_as_complex(x).conj(),
])
def test_what_is_moved_arrives_as_it_was_without_a_wait_of_the_host(
    of: Callable[[Tensor], Tensor], source: str, target: str
) -> None:
    """Its sender may free it at once. The host waits for what it gets itself."""
    local, here, there = Local(), torch.device(source), torch.device(target)
    sent = of(torch.randn(5, 2).to(here))
    expected = sent.cpu().clone()
    with torch.sim.no_synchronisation():
        parcel = local.send([sent, None], Place(here, "a"), Place(there, "b"))
        del sent
        arrived, nothing = local.receive(parcel)
        used = None if arrived is None or arrived.is_cpu else arrived * 1
    assert nothing is None and arrived is not None and arrived.device == there
    assert torch.equal((arrived if used is None else used).cpu(), expected)


# --------------------------------------------------------------------------------- generators, messages, fingerprints


def test_a_pipe_without_parameters_seeds_the_generators() -> None:
    """And leaves them as it found them."""
    pipe = Pipe(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), [1, 1], 2, devices=["sim:1", "sim:2"])
    x = torch.ones(64, 8)
    found = [generator.get_state() for generator in torch.sim.default_generators]
    outputs = []
    for _ in range(2):
        torch.random.default_generator.manual_seed(1)
        outputs.append(pipe(x).cpu())
        torch.sim.default_generators[1].manual_seed(7)
    assert torch.equal(*outputs) and 0 < (outputs[0] == 0).double().mean() < 1
    torch.sim.default_generators[1].set_state(found[1])
    pipe(x)
    now = [generator.get_state() for generator in torch.sim.default_generators]
    assert all(map(torch.equal, now, found))


def test_checkpointed_blocks_repeat_the_masks_of_their_device() -> None:
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)]).to(sim(1))
    grads: list[list[Tensor]] = []
    for checkpointed in (False, True):
        blocks = checkpoint_blocks(layers, lambda name, module: name.isdigit()) if checkpointed else None
        torch.sim.manual_seed_all(3)
        layers.zero_grad()
        layers(torch.ones(5, 8, device=sim(1))).square().sum().backward()
        grads.append([parameter.grad.cpu() for parameter in layers.parameters() if parameter.grad is not None])
        if blocks is not None:
            blocks.remove()
    assert all(map(torch.equal, *grads)) and len(grads[0]) == 6


@pytest.mark.parametrize("source", ["cpu", "sim:0", "sim:2"])
def test_messages_are_packed_on_the_host_and_unpacked_where_they_go(source: str) -> None:
    device = torch.device(source)
    tensors = (torch.randn(3, 4).to(device).t(), None, torch.tensor(True), torch.arange(5).to(device))
    packing = Packing.of(tensors)
    buffer = packing.pack(bytes(64), tensors)
    assert buffer.is_cpu
    for there in (CPU, sim(1)):
        for one, other in zip(packing.unpack(buffer.pin_memory(), 64, there), tensors, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.device == there and one.stride() == other.stride() and torch.equal(one.cpu(), other.cpu())
    if device.type == "sim":
        payload = packing.pack_payload(tensors, device)
        assert payload.device == device
        assert torch.equal(payload.cpu(), buffer[64:])


def test_fingerprints_of_what_is_on_an_accelerator_are_those_on_the_host() -> None:
    """They are asked for later, and are of the values as they were."""
    values = [torch.randn(300, 400), torch.randn(7)]
    for device in (sim(0), sim(1)):
        Sketches([value.to(device) for value in values])  # the first brings random weights there
        there = [value.to(device) for value in values]
        with torch.sim.no_synchronisation():
            fingerprint, sketches = Fingerprint(there), Sketches([*there, None])
            for value in there:
                value.zero_()
        assert not fingerprint.is_on_host and fingerprint.number == Fingerprint(values).number
        assert sketches.values == Sketches([*values, None]).values


def test_profiling_on_an_accelerator_leaves_generators_alone() -> None:
    layers, x = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3)), torch.rand(3, 5)
    found = [torch.get_rng_state(), *[generator.get_state() for generator in torch.sim.default_generators]]
    there, here = profile(layers, x, timeout=0, device="sim:1"), profile(layers, x, timeout=0)
    assert [layer.saved for layer in there.layers[::2]] == [layer.saved for layer in here.layers[::2]]
    assert all(layer.work.total > 0 for layer in there.layers)
    now = [torch.get_rng_state(), *[generator.get_state() for generator in torch.sim.default_generators]]
    assert all(map(torch.equal, found, now)) and next(layers.parameters()).is_cpu


def test_a_pinned_mini_batch_may_be_written_while_its_copy_is_under_way() -> None:
    """A call returns before the copies of its last chunks have ended; here a kernel that reads one ends it."""
    batch, mover = torch.ones(7, 4).pin_memory(), Local()
    parcel = mover.send([batch], None, Place(sim(1)))
    batch.fill_(9)
    (moved,) = mover.receive(parcel)
    assert moved is not None and moved.eq(1).all()


def test_the_host_waits_once_for_the_norms_of_a_device_and_a_type() -> None:
    numbers = [torch.tensor(number, dtype=dtype) for number in (0.1, 2.5) for dtype in (torch.float32, torch.float64)]
    there = [number.to(device) for number in numbers for device in (sim(0), sim(2))]
    before = torch.sim.host_waits()
    assert norms_as_numbers(there) == [number.item() for number in numbers for _ in range(2)]
    assert torch.sim.host_waits() == before + 4
