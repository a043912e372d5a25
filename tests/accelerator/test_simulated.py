"""The simulated accelerator itself: numbers, order, missing waits, late copies, memory, generators, threads."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

NUMBERS = 1000  # of a tensor; 4 bytes each


def stream(device: str = "sim:0") -> torch.Stream:
    return torch.Stream(device=device)


def current(device: str = "sim:0") -> torch.Stream:
    return torch.accelerator.current_stream(device)


def ones(device: str = "sim:0") -> Tensor:
    return torch.ones(NUMBERS, device=device)


# ------------------------------------------------------------------------------------------------------------- numbers

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: (x + 1) * x.sin() / (2 - x.abs().neg()),
    "in place": lambda x: x.clone().add_(x).mul_(3).clamp_(max=1.0),
    "views": lambda x: x.view(2, -1)[:, ::2].T.unfold(0, 2, 1).contiguous(),
    "writes through views": lambda x: x.clone().view(3, 4)[1:].zero_()._base,
    "out": lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
    "matrices": lambda x: x.view(3, 4) @ x.view(4, 3),
    "reductions": lambda x: [x.sum(), x.mean(0), x.max(), x.std(), x.norm(), x.argmax()],
    "sorted": lambda x: x.sort(descending=True),
    "of unknown size": lambda x: [x[x > 0], x.nonzero(), (x * 3).round().unique(return_counts=True)],
    "indexed": lambda x: [x[torch.tensor([1, 3])], x.index_add(0, torch.zeros_like(x).long(), x)],
    "joined": lambda x: [torch.cat([x, x]), torch.stack(x.split(3)), torch.where(x > 0, x, 0.0)],
    "foreach": lambda x: torch._foreach_add(torch._foreach_mul([x, x + 1], 2.0), [x, x]),
    "complex": lambda x: (torch.view_as_complex(x.view(6, 2)).conj() * 1j).resolve_conj(),
    "types": lambda x: [x.double(), x.to(torch.bfloat16), x.long(), x.bool()],
    "linear algebra": lambda x: torch.linalg.solve(torch.diag(x[:3] + 9) + x.view(3, 4)[:, :3], x.view(3, 4)),
    "resized": lambda x: torch.empty(2, device=x.device).resize_(3).copy_(x[:3]),
    "of another storage": lambda x: torch.empty(0, device=x.device).set_(x.untyped_storage(), 2, (3,), (2,)),
    "functional": lambda x: torch.func.vmap(torch.func.grad(lambda each: each.square().sin()))(x),
    "forward mode": lambda x: torch.func.jvp(torch.tanh, (x,), (x * 2,)),
}


def same(one: Any, other: Any) -> bool:
    pairs = zip(torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other), strict=True)
    return all(ours.is_sim and ours.stride() == its.stride() and torch.equal(ours.cpu(), its) for ours, its in pairs)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_give_the_numbers_of_the_cpu(name: str) -> None:
    x = torch.randn(12)
    assert same(OPERATIONS[name](x.to("sim:1")), OPERATIONS[name](x))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)), (5, 6)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4),
            nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, bias=False), nn.AdaptiveAvgPool2d(2),
        ),
        (4, 3, 8, 8),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (3, 4, 8)),
    "recurrent": (lambda: nn.RNN(4, 5, batch_first=True), (2, 6, 4)),
    "losses": (lambda: Losses(), (5, 6)),
}  # fmt: skip


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        target = torch.arange(len(x), device=x.device)
        entropy = functional.cross_entropy(x + self.embedding(target), target)
        return entropy + functional.mse_loss(x, x.flip(0)) + functional.smooth_l1_loss(x.softmax(1), x)


def trained(module: nn.Module, x: Tensor, order: int) -> list[Tensor]:
    """The output, the gradients of its squares, and those of the squares of these; all on the host."""
    out = module(x)
    values = [out[0] if isinstance(out, tuple) else out]
    for _ in range(order):
        total = sum((value.double().square().sum() for value in values), torch.zeros((), dtype=torch.float64))
        values = list(torch.autograd.grad(total, [x, *module.parameters()], create_graph=True, materialize_grads=True))
    return [value.detach().cpu() for value in (*values, *module.buffers())]


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("name", MODULES)
def test_modules_give_the_numbers_of_the_cpu_at_each_order(name: str, order: int) -> None:
    make, shape = MODULES[name]
    module, x = make(), torch.randn(shape)
    module, x = module.double(), x.double()
    there = copy.deepcopy(module).to("sim:2")
    with sdpa_kernel(SDPBackend.MATH):  # the host's own kernel has no second derivative
        ours = trained(there, x.to("sim:2").requires_grad_(), order)
        others = trained(module, x.requires_grad_(), order)
    for one, other in zip(ours, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_optimizers_give_the_numbers_of_the_cpu(make: Callable[..., torch.optim.Optimizer]) -> None:
    found = []
    for device in ("cpu", "sim:0"):
        torch.manual_seed(1)
        module = nn.Linear(4, 3)
        x = torch.randn(5, 4).to(device)
        optimizer = make(module.to(device).parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
        found.append([param.detach().cpu() for param in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_to_moves_parameters_in_place_as_on_cuda() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    before = list(module.parameters())
    module.to("sim:1")
    assert all(one is other and one.is_sim for one, other in zip(module.parameters(), before, strict=True))
    assert module[1].weight is module[0].weight


def test_tensors_of_several_devices_do_not_mix() -> None:
    for other in (ones("sim:1"), torch.ones(NUMBERS)):
        with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
            ones() + other
    assert (ones() + torch.tensor(2.0)).sum().item() == 3 * NUMBERS  # a number may be anywhere
    with pytest.raises(RuntimeError, match="no device sim:7, but 3"):
        ones("sim:7")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_as_the_lists_of_torch_say(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(4, 4).to("sim"), torch.randn(2, 4, device="sim")
    with torch.autocast("sim", dtype=dtype):
        out = layer(x)
        assert (out.dtype, out.softmax(1).dtype, (x @ x.T).dtype) == (dtype, torch.float32, dtype)
    out.float().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float32
    assert layer(x).dtype is torch.float32


# ------------------------------------------------------------------------------------------------------------- streams


def test_devices_and_streams_are_those_that_torch_accelerator_finds() -> None:
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 3
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    side = stream("sim:1")
    with side:
        assert torch.accelerator.current_device_index() == 1 and current("sim:1") == side
        assert ones("sim").device.index == 1
    assert torch.accelerator.current_device_index() == 0 and current("sim:1").stream_id == 0
    with torch.accelerator.device_index(2):
        assert torch.empty(1, device="sim").device.index == 2
    elsewhere: list[Any] = []
    with stream("sim:0"):  # other threads have a current stream of their own
        thread = threading.Thread(target=lambda: elsewhere.append(current().stream_id))
        thread.start()
        thread.join()
    assert elsewhere == [0]


def test_an_event_that_the_host_has_not_waited_for_is_not_there_when_first_asked() -> None:
    event = torch.Event("sim")
    assert event.query()  # never recorded
    ones()
    event.record()
    assert not event.query() and event.query()
    ones()
    event.record()
    event.synchronize()
    assert event.query()


def test_autograd_has_a_thread_for_each_device() -> None:
    threads: dict[str, int] = {}

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            threads[str(grad.device)] = threading.get_ident()
            return grad

    x = torch.ones(3, requires_grad=True)
    for device in ("sim:0", "sim:1", "sim:2", "cpu"):
        x = Noting.apply(x.to(device))
    x.sum().backward()
    assert len(set(threads.values())) == 4 and threads["cpu"] == threading.get_ident()


# ------------------------------------------------------------------------------------------------------- missing waits


def reads_too_early(wait: bool) -> None:
    x, side = ones(), stream()
    if wait:
        side.wait_stream(current())
    with side:
        y = x * 2
    current().wait_stream(side)
    y.record_stream(current())
    x.record_stream(side)
    assert y.sum().item() == 2 * NUMBERS


def writes_what_is_read(wait: bool) -> None:
    x, side = ones(), stream()
    side.wait_stream(current())
    x.record_stream(side)
    with side:
        y = x * 2
    if wait:
        current().wait_stream(side)
    x.zero_()
    side.synchronize()
    del y


def writes_what_is_written(wait: bool) -> None:
    x, side, event = ones(), stream(), torch.Event("sim")
    event.record()
    side.wait_event(event)
    with side:
        x[: NUMBERS // 2].mul_(2)
        event.record()
    if wait:
        event.wait(current())
    x[NUMBERS // 3 :].mul_(3)
    current().wait_stream(side)


def event_recorded_too_early(wait: bool) -> None:
    x, side, event = ones(), stream(), torch.Event("sim")
    if not wait:
        event.record()
    x.mul_(2)
    if wait:
        event.record()
    side.wait_event(event)
    with side:
        x.add_(1)
    current().wait_stream(side)


def event_never_recorded(wait: bool) -> None:
    x, side, event = ones(), stream(), torch.Event("sim")
    if wait:
        event.record()
    side.wait_event(event)
    with side:
        x.add_(1)
    current().wait_stream(side)


def waits_for_one_of_two(wait: bool) -> None:
    left, right = stream(), stream()
    parts = []
    for side in (left, right):
        with side:
            parts.append(ones())
    current().wait_stream(left)
    if wait:
        current().wait_stream(right)
    parts[0] + parts[1]
    for side in (left, right):
        side.wait_stream(current())


def another_device_reads_too_early(wait: bool) -> None:
    x, side = ones("sim:0"), stream("sim:1")
    arrived = torch.empty(NUMBERS, device="sim:1")  # made on the default stream of sim:1, in which the copy waits
    with side:
        arrived.copy_(x)
    if wait:
        current("sim:1").wait_stream(side)
    assert arrived.sum().item() == NUMBERS


def freed_while_read(wait: bool) -> None:
    x, side = ones(), stream()
    side.wait_stream(current())
    with side:
        y = x * 2
    if wait:
        x.record_stream(side)
    del x
    torch.sim.check()
    side.synchronize()
    del y


def freed_by_another_stream(wait: bool) -> None:
    side = stream()
    with side:
        x = ones()
    current().wait_stream(side)
    y = x * 2
    if wait:
        side.wait_stream(current())
    del x
    torch.sim.check()
    del y


def gradient_on_another_stream(wait: bool) -> None:
    side, x = stream(), ones().requires_grad_()
    side.wait_stream(current())
    with side:
        y = (x * 2).sum()
        y.backward()
    if wait:
        current().wait_stream(side)
    assert x.grad is not None
    x.grad.add_(1)
    x.grad.record_stream(side)
    side.wait_stream(current())


def item_of_another_stream(wait: bool) -> None:
    side = stream()
    with side:
        x = ones().sum()
    if wait:
        current().wait_stream(side)
    x.item()
    side.wait_stream(current())


def host_waits_for_the_wrong_stream(wait: bool) -> None:
    side = stream()
    with side:
        x = ones()
    (side if wait else current()).synchronize()
    y = x * 2
    side.wait_stream(current())
    del y


def pinned_memory_is_written_twice(wait: bool) -> None:
    x, side = ones(), stream()
    target = torch.empty(NUMBERS, pin_memory=True)
    target.copy_(x, non_blocking=True)
    if wait:
        side.wait_stream(current())
    with side:
        target.copy_(ones(), non_blocking=True)
    side.synchronize()


PROGRAMS = [
    reads_too_early, writes_what_is_read, writes_what_is_written, event_recorded_too_early, event_never_recorded,
    waits_for_one_of_two, another_device_reads_too_early, freed_while_read, freed_by_another_stream,
    gradient_on_another_stream, item_of_another_stream, host_waits_for_the_wrong_stream, pinned_memory_is_written_twice,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_missing_wait_is_found_and_its_twin_passes(program: Callable[[bool], None]) -> None:
    program(True)
    torch.sim.check()
    with pytest.raises(RuntimeError, match="^race: ") as raised:
        program(False)
    message = str(raised.value)
    assert "now: " in message and "before: " in message
    assert message.count(f"in {program.__name__}") >= (1 if "Backward" in message else 2), message
    with torch.sim.unchecked():  # also the end of what the exception holds
        del raised
        gc.collect()
        program(False)


def test_each_thread_of_the_host_knows_what_others_have_waited_for_unless_told_otherwise() -> None:
    def program() -> None:
        side = stream()
        with side:
            x = ones()
        current().synchronize()  # this thread is known
        thread = threading.Thread(target=side.synchronize)
        thread.start()
        thread.join()
        x.add_(1)
        side.wait_stream(current())

    program()
    with torch.sim.own_hosts(), pytest.raises(RuntimeError, match="race"):
        program()


# --------------------------------------------------------------------------------------------------------- late copies


@pytest.mark.parametrize("waits", ["event", "stream", "device", "item", "no"])
def test_a_copy_to_pinned_memory_is_there_when_the_host_has_waited(waits: str) -> None:
    x, target = ones(), torch.zeros(NUMBERS, pin_memory=True)
    assert target.is_pinned() and not torch.zeros(1).is_pinned()
    target.copy_(x, non_blocking=True)
    event = torch.Event("sim")
    event.record()
    x.mul_(3)  # the stream's order: after the copy
    if waits == "event":
        event.synchronize()
    elif waits == "stream":
        current().synchronize()
    elif waits == "device":
        torch.accelerator.synchronize()
    elif waits == "item":
        x[0].item()
    assert target.isnan().all() if waits == "no" else target.eq(1).all()


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_from_pinned_memory_reads_it_when_it_is_used(waits: bool) -> None:
    batch = torch.ones(NUMBERS).pin_memory()
    there = batch.to("sim", non_blocking=True)
    if waits:
        current().synchronize()
    batch.fill_(7)
    if waits:
        assert there.eq(1).all()
        return
    used = there * 2
    with pytest.raises(RuntimeError, match="race: the host has written pinned memory before it waited for a copy"):
        torch.accelerator.synchronize()
    assert used.eq(14).all()


def test_pinned_memory_is_the_copys_until_the_host_has_waited_even_if_it_is_used() -> None:
    batch = torch.ones(NUMBERS).pin_memory()
    side = stream()
    with side:
        used = batch.to("sim", non_blocking=True) * 2
        del used
    current().synchronize()  # of another stream
    batch.fill_(7)
    with pytest.raises(RuntimeError, match="race: the host has written pinned memory"):
        side.synchronize()
    target = batch.to("sim", non_blocking=True)
    batch.copy_(target * 3, non_blocking=True)  # a device may write it, in the stream's order
    current().synchronize()
    assert batch.eq(21).all()


def test_copies_of_other_memory_are_made_at_once_and_blocking_ones_wait() -> None:
    batch = torch.ones(NUMBERS)
    there = batch.to("sim", non_blocking=True)
    batch.fill_(7)
    assert there.eq(1).all()
    assert there.to("cpu", non_blocking=True).isnan().all()  # torch takes pinned memory
    before = torch.sim.host_waits()
    assert torch.empty(NUMBERS).copy_(there, non_blocking=True).eq(1).all()
    assert torch.sim.host_waits() == before + 1
    with torch.sim.no_synchronisation():
        batch.to("sim", non_blocking=True)
        for blocks in (lambda: batch.to("sim"), there.cpu, there.sum().item, lambda: there.equal(there)):
            with pytest.raises(RuntimeError, match="the host waits for stream 0 of sim:0"):
                blocks()


def test_copies_change_layout_and_type_as_on_the_host() -> None:
    x = torch.randn(4, 5, 6)
    for view in (x, x.transpose(0, 2), x[:, ::2], x[:1].expand(3, 5, 6)):
        for dtype in (torch.float32, torch.float64, torch.int32):
            there = view.to("sim:0").to("sim:1", dtype, non_blocking=True)
            back = torch.empty_like(view.to(dtype), pin_memory=True).copy_(there, non_blocking=True)
            torch.accelerator.synchronize(1)
            assert torch.equal(back, view.to(dtype)) and torch.equal(there.cpu(), back)


# -------------------------------------------------------------------------------------------------------------- memory


def test_memory_is_counted_to_the_byte() -> None:
    device = "sim:2"
    torch.accelerator.reset_peak_memory_stats(device)
    start = torch.accelerator.memory_allocated(device)

    def allocated() -> tuple[int, int]:
        now, peak = torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)
        return now - start, peak - start

    x = ones(device)
    assert allocated() == (4 * NUMBERS, 4 * NUMBERS)
    y = x * 2 + 1  # the product lives until the sum is there
    assert allocated() == (8 * NUMBERS, 12 * NUMBERS)
    view = x[10:]
    del x
    assert allocated() == (8 * NUMBERS, 12 * NUMBERS)
    del view, y
    assert allocated() == (0, 12 * NUMBERS)
    torch.accelerator.reset_peak_memory_stats(device)
    weight = torch.ones(NUMBERS, device=device, requires_grad=True)
    loss = (weight.sin() * 2).sum()  # autograd keeps the weight
    assert allocated() == (4 * NUMBERS + 4, 12 * NUMBERS)
    loss.backward()  # an expanded one, its product with 2, that with the cosine
    assert allocated() == (8 * NUMBERS + 4, 16 * NUMBERS + 8)


def test_new_memory_is_poisoned() -> None:
    assert torch.empty(NUMBERS, device="sim").isnan().all() and torch.empty(NUMBERS, pin_memory=True).isnan().all()
    grown = ones().resize_(2 * NUMBERS)
    assert grown[:NUMBERS].eq(1).all() and grown[NUMBERS:].isnan().all()
    assert torch.empty(3, dtype=torch.int64, device="sim").tolist() == [-1] * 3


# ---------------------------------------------------------------------------------------------------------- generators

DRAWS: dict[str, Callable[[str], Tensor]] = {
    "rand": lambda device: torch.rand(8, device=device),
    "randn": lambda device: torch.randn(8, device=device),
    "randperm": lambda device: torch.randperm(8, device=device),
    "like": lambda device: torch.rand_like(torch.ones(8, device=device)),
    "bernoulli": lambda device: torch.bernoulli(torch.full((8,), 0.5, device=device)),
    "multinomial": lambda device: torch.multinomial(torch.ones(8, device=device), 4),
    "dropout": lambda device: functional.dropout(torch.ones(64, device=device)),
    "attention": lambda device: functional.scaled_dot_product_attention(
        *[torch.ones(1, 1, 4, 4, device=device)] * 3, dropout_p=0.5
    ),
    "rrelu": lambda device: functional.rrelu(torch.full((8,), -1.0, device=device), training=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_depend_on_their_device_generator_alone(name: str) -> None:
    draw = DRAWS[name]
    states = [torch.get_rng_state(), torch.sim.get_rng_state("sim:0"), torch.sim.get_rng_state("sim:2")]
    torch.sim.default_generators[1].manual_seed(5)
    first = draw("sim:1")
    torch.manual_seed(6)  # of all
    assert not torch.equal(draw("sim:1").cpu(), first.cpu())
    torch.sim.default_generators[1].manual_seed(5)
    assert torch.equal(draw("sim:1").cpu(), first.cpu())
    torch.manual_seed(0)
    with torch.random.fork_rng([1], device_type="sim"):
        inside = draw("sim:1")
    assert torch.equal(draw("sim:1").cpu(), inside.cpu())
    torch.set_rng_state(states[0])
    torch.sim.set_rng_state(states[1], "sim:0")
    draw("sim:1")
    assert torch.equal(torch.get_rng_state(), states[0]), "drew from the host"
    assert torch.equal(torch.sim.get_rng_state("sim:0"), states[1]), "drew from another device"


def test_a_generator_of_ones_own_is_that_of_one_device() -> None:
    generator = torch.Generator("sim:1").manual_seed(3)
    first = torch.rand(4, device="sim:1", generator=generator)
    assert torch.equal(torch.rand(4, device="sim:1", generator=generator.manual_seed(3)).cpu(), first.cpu())
    for device, wrong in (("sim:0", generator), ("sim:0", torch.Generator())):
        with pytest.raises(RuntimeError, match="Expected a.*generator"):
            torch.rand(4, device=device, generator=wrong)


def test_dropout_gives_what_its_mask_leaves() -> None:
    x = ones().requires_grad_()
    y = functional.dropout(x, 0.25)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad.cpu(), y.detach().cpu())
    kept = y.detach().ne(0)
    assert y.detach()[kept].allclose(torch.tensor(1 / 0.75)) and 650 < int(kept.sum()) < 850
    assert functional.dropout(x, 1.0).eq(0).all() and functional.dropout(x, 0.5, training=False) is not None


# ------------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("own", [False, True])
def test_threads_that_wait_for_each_others_events_do_not_race(own: bool) -> None:
    """A ring of devices, each driven by a thread of its own."""
    events = [torch.Event(f"sim:{index}") for index in range(3)]
    recorded = [threading.Event() for _ in range(3)]
    sums: list[float] = []
    values: list[Tensor] = []
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            if index:
                assert recorded[index - 1].wait(10)
                reader = current(f"sim:{index}")
                reader.wait_event(events[index - 1])
                torch.accelerator.set_device_index(index)
                moved = values[-1].to(f"sim:{index}", non_blocking=True)
            else:
                moved = ones()
            values.append(moved * 2)
            events[index].record(current(f"sim:{index}"))
            recorded[index].set()
            if index == 2:
                sums.append(values[-1].sum().item())
        except BaseException as error:
            errors.append(error)

    with torch.sim.own_hosts() if own else nullcontext():
        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.accelerator.synchronize()
        values.clear()
    assert not errors and sums == [8 * NUMBERS]
