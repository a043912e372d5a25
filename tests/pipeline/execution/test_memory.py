"""Law 6: what is held for the backward, to the byte, and that it dies.

    saved bytes   what autograd packs (saved_tensors_hooks around the call), less parameters
    saved bytes   what autograd packs (saved_tensors_hooks around the call), less parameters

A pack hook that returned the tensor itself would keep its graph alive; the holders here keep `t.detach()` and count
themselves out when autograd drops them.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline_probes import Seen, labelled, no_collector, probes, run, sum_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipeline import EagerUpdate, GradStore, Pipe, eager_backward, is_recomputing
from pipeline.curvature import Hessian
from pipeline.execution.plan import plan_forward, plan_step
from scheduler import Action, Kind, by_name

ENTRIES = ("forward", "step")
SCHEDULES = ("gpipe", "1f1b")


def odd(stage: int, chunk: int) -> bool:
    return (stage + chunk) % 2 == 1


POLICIES = ("always", "except_last", "never", odd)

# ------------------------------------------------------------------------------------------------------- saved bytes


class Holder:
    """What stands in autograd's graph for a saved tensor."""

    __slots__ = ("tensor", "__weakref__")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class Saved:
    """Counts the bytes that autograd holds: each distinct piece of memory once, parameters and buffers not at all."""

    def __init__(self, module: nn.Module) -> None:
        self._known = {tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())}
        self._held: Counter[tuple[int, int]] = Counter()
        self.packed = 0
        self.bytes = 0
        self.peak = 0

    @contextmanager
    def counted(self) -> Iterator["Saved"]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda holder: holder.tensor):
            yield self

    def _pack(self, tensor: Tensor) -> Holder:
        holder = Holder(tensor)
        if tensor.data_ptr() not in self._known and tensor.numel():
            self.packed += 1
            key = (tensor.data_ptr(), tensor.numel() * tensor.element_size())
            self.bytes += key[1] * (not self._held[key])
            self._held[key] += 1
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(holder, self._free, key)
        return holder

    def _free(self, key: tuple[int, int]) -> None:
        self._held[key] -= 1
        self.bytes -= key[1] * (not self._held[key])


# Tanh and Sigmoid save their output, Linear (without a bias) its input: what layer k saves is at position k or k + 1.
#       0    1     2    3     4        5    6    7    8       positions between the layers
LAYERS = "L    T     L    T     S        L    L    T".split()
WIDTHS = (3, 4, 4, 5, 5, 5, 2, 6, 6)
# At no boundary do the last layer of a stage and the first of the next save the same memory: its bytes are its own.
BALANCES = ([8], [3, 5], [1, 7], [3, 3, 2], [1, 2, 3, 2])


def layered() -> nn.Sequential:
    torch.manual_seed(1)
    made = {
        "L": lambda index: nn.Linear(WIDTHS[index], WIDTHS[index + 1], bias=False),
        "T": lambda index: nn.Tanh(),
        "S": lambda index: nn.Sigmoid(),
    }
    return nn.Sequential(*(made[kind](index) for index, kind in enumerate(LAYERS))).double()


def position(layer: int) -> int:
    return layer if LAYERS[layer] == "L" else layer + 1


def stage_bytes(balance: Sequence[int]) -> list[int]:
    """For each stage, the bytes that one row leaves for its backward: float64 at each position that a layer saves."""
    found, first = [], 0
    for size in balance:
        positions = {position(layer) for layer in range(first, first + size)}
        found.append(8 * sum(WIDTHS[each] for each in positions))
        first += size
    return found


def analytic_peak(
    order: Sequence[Action], again: frozenset[tuple[int, int]], bytes_of: Callable[[int, int], int]
) -> int:
    """Kept pairs are held from F to B; a recomputed one comes on top of them for the time of its own B."""
    held = peak = 0
    for action in order:
        pair = (action.stage, action.chunk)
        if action.kind is Kind.F:
            held += bytes_of(*pair) * (pair not in again)
            peak = max(peak, held)
        elif pair in again:
            peak = max(peak, held + bytes_of(*pair))
        else:
            held -= bytes_of(*pair)
    assert held == 0
    return peak


def measure(balance: Sequence[int], chunks: int, rows: int, entry: str, schedule: str, policy: object) -> Saved:
    model = layered()
    pipe = Pipe(model, balance, chunks, schedule=schedule, checkpoint=policy)
    with Saved(model).counted() as saved:
        run(pipe, torch.randn(rows, WIDTHS[0]).double(), entry)
    return saved


def check_peak(balance: Sequence[int], chunks: int, rows: int, entry: str, schedule: str, policy: object) -> None:
    saved = measure(balance, chunks, rows, entry, schedule, policy)
    count = min(chunks, rows)
    lengths = [rows // count + (chunk < rows % count) for chunk in range(count)]
    per_row = stage_bytes(balance)
    planner = plan_step if entry == "step" else plan_forward
    plan = planner(by_name(schedule, len(balance), count), ["cpu"] * len(balance))
    (order,) = plan.device_orders
    again = plan.recomputed(policy)
    assert saved.peak == analytic_peak(order, again, lambda stage, chunk: per_row[stage] * lengths[chunk])
    assert saved.bytes == 0 and saved.packed > 0


@pytest.mark.inline
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("balance", BALANCES, ids=str)
def test_peak_saved_bytes_equal_the_analytic_count(
    balance: list[int], entry: str, schedule: str, policy: object
) -> None:
    for chunks, rows in ((1, 4), (3, 7), (4, 8)):
        check_peak(balance, chunks, rows, entry, schedule, policy)


@pytest.mark.soak
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("balance", BALANCES, ids=str)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 8, 16])
def test_peak_saved_bytes_equal_the_analytic_count_over_the_full_product(
    rows: int, chunks: int, balance: list[int], entry: str, schedule: str, policy: object
) -> None:
    check_peak(balance, chunks, rows, entry, schedule, policy)


def test_the_counter_counts_what_the_plain_module_saves() -> None:
    """The closed form of the layers themselves, without a Pipe."""
    model = layered()
    with Saved(model).counted() as saved:
        out = model(torch.randn(5, WIDTHS[0]).double())
        assert saved.bytes == saved.peak == 5 * sum(stage_bytes([8]))
    out.sum().backward()
    assert saved.bytes == 0


@pytest.mark.parametrize("balance", BALANCES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_peaks_in_closed_form(balance: list[int], schedule: str) -> None:
    """GPipe holds every chunk of every stage, 1F1B of stage s only its stages-left many; with checkpointing, one."""
    chunks, rows = 6, 12  # two rows a chunk
    per_chunk = [2 * each for each in stage_bytes(balance)]
    always = measure(balance, chunks, rows, "step", schedule, "always").peak
    assert always == max(per_chunk)
    assert measure(balance, chunks, rows, "forward", schedule, "never").peak == chunks * sum(per_chunk)
    never = measure(balance, chunks, rows, "step", schedule, "never").peak
    if schedule == "gpipe":
        assert never == chunks * sum(per_chunk)
    else:
        left = range(len(balance), 0, -1)
        assert never <= sum(min(chunks, number) * each for number, each in zip(left, per_chunk, strict=True))
    assert never > always or len(balance) == 1 and schedule == "1f1b"


@pytest.mark.inline
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("balance", BALANCES, ids=str)
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_the_peak_of_except_last_equals_that_of_always(
    balance: list[int], entry: str, schedule: str, chunks: int
) -> None:
    peaks = [measure(balance, chunks, 10, entry, schedule, policy).peak for policy in ("always", "except_last")]
    assert peaks[0] == peaks[1]


@given(
    name=st.sampled_from(SCHEDULES), devices=st.lists(st.sampled_from("abc"), min_size=1, max_size=6),
    chunks=st.integers(1, 6), sizes=st.lists(st.integers(1, 100), min_size=6, max_size=6), step=st.booleans(),
)
def test_per_device_the_peak_of_except_last_equals_that_of_always_for_any_sizes(
    name: str, devices: list[str], chunks: int, sizes: list[int], step: bool
) -> None:
    plan = (plan_step if step else plan_forward)(by_name(name, len(devices), chunks), devices)
    for order in plan.device_orders:
        peaks = {
            analytic_peak(order, plan.recomputed(policy), lambda stage, chunk: sizes[stage])
            for policy in ("always", "except_last")
        }
        assert len(peaks) == 1


@pytest.mark.inline
@pytest.mark.parametrize("policy", ["always", "except_last", "never"])
def test_nothing_is_saved_between_a_recomputed_forward_and_its_backward(policy: str) -> None:
    model = layered()
    pipe = Pipe(model, [3, 3, 2], 4, checkpoint=policy)
    per_row = stage_bytes([3, 3, 2])
    with Saved(model).counted() as saved:
        out = pipe(torch.randn(8, 3).double())
        held = {"always": 0, "except_last": 2 * per_row[2], "never": 8 * sum(per_row)}[policy]
        assert saved.bytes == held
        out.sum().backward(retain_graph=True)
        assert saved.bytes == held  # retained: kept is kept, recomputed is not
        out.sum().backward()
        assert saved.bytes == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_order_recomputation_dies_with_its_result(policy: object) -> None:
    model = layered()
    x = torch.randn(8, 3).double().requires_grad_()
    with no_collector(), Saved(model).counted() as saved:
        (grad,) = torch.autograd.grad(Pipe(model, [3, 3, 2], 4, checkpoint=policy)(x).sum(), x, create_graph=True)
        assert saved.bytes > 0
        del grad
        assert saved.bytes == 0


# ------------------------------------------------------------------------------------------- outputs without gradient


@pytest.mark.parametrize("entry", ["forward", "no_grad", "inference", "evaluate"])
@pytest.mark.parametrize("policy", POLICIES)
def test_without_gradients_nothing_is_saved(entry: str, policy: object) -> None:
    model = layered()
    if entry == "forward":
        model.requires_grad_(False)
    pipe = Pipe(model, [3, 3, 2], 4, checkpoint=policy)
    x = torch.randn(8, 3).double()
    with Saved(model).counted() as saved:
        if entry == "evaluate":
            pipe.evaluate(x, loss_fn=sum_of, loss_reduction="sum")
        else:
            with torch.inference_mode(entry == "inference"), torch.set_grad_enabled(entry == "forward"):
                out = pipe(x)
            assert not out.requires_grad and out.grad_fn is None
    assert saved.packed == 0


class Detach(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_detached_output_keeps_nothing_and_has_no_backward(policy: object) -> None:
    model = nn.Sequential(*layered(), Detach())
    pipe = Pipe(model, [3, 3, 3], 4, checkpoint=policy)
    with no_collector(), Saved(model).counted() as saved:
        out = pipe(torch.randn(8, 3).double())
        assert not out.requires_grad and saved.bytes == 0


@pytest.mark.inline
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_frozen_stages_in_front_keep_nothing(entry: str, policy: object) -> None:
    model = layered()
    model[:3].requires_grad_(False)
    balance, chunks = [3, 3, 2], 4
    pipe = Pipe(model, balance, chunks, schedule="gpipe", checkpoint=policy)
    with Saved(model).counted() as saved:
        run(pipe, torch.randn(8, 3).double(), entry)
    # Stage 1 begins with Tanh, Sigmoid on what needs no gradient; Linear saves its input, the Sigmoid's output.
    per_row = [0, 8 * WIDTHS[5], stage_bytes(balance)[2]]
    plan = (plan_step if entry == "step" else plan_forward)(by_name("gpipe", 3, chunks), ["cpu"] * 3)
    order = [action for action in plan.device_orders[0] if action.stage > 0]
    assert saved.peak == analytic_peak(order, plan.recomputed(policy), lambda stage, chunk: 2 * per_row[stage])


# --------------------------------------------------------------------------------------------------- stashed inputs


@pytest.mark.inline
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages, chunks", [(2, 3), (3, 4), (4, 2)])
def test_of_recomputed_chunks_only_the_inputs_in_flight_are_held(
    entry: str, schedule: str, stages: int, chunks: int
) -> None:
    """What stage s made of a chunk lives until B of that chunk in stage s + 1 is done, and no longer; seen at each
    forward, recomputation and backward."""
    model, log = probes(stages)
    made: dict[tuple[int, int], StorageWeakRef] = {}  # the input of (stage, chunk)
    held: list[int] = []

    def check(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        alive = {pair for pair, storage in made.items() if not storage.expired()}
        assert alive == {pair for pair in made if Seen("B", *pair) not in log}
        held.append(len(alive))

    def remember(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        if module.stage < stages - 1 and not is_recomputing():
            made[module.stage + 1, int(out.detach()[0, 0])] = StorageWeakRef(out.untyped_storage())

    for layer in model:
        layer.register_forward_pre_hook(check)
        layer.register_forward_hook(remember)
    with no_collector():
        run(Pipe(model, [1] * stages, chunks, schedule=schedule, checkpoint="always"), labelled(chunks), entry)
        assert all(storage.expired() for storage in made.values())
    # Before each action of the merged order: F done in the stage before, B not done in the stage that reads.
    order = [seen for seen in log if seen.kind != "R"]
    ran = [order[:at] for at in range(len(order))]
    assert held == [
        sum(Seen("F", stage - 1, chunk) in before and Seen("B", stage, chunk) not in before for stage, chunk in made)
        for before in ran
    ]


# -------------------------------------------------------------------------------------------------- nothing is alive


class Watch:
    """Weak references to everything that passes through the layers of a model."""

    def __init__(self, model: nn.Sequential) -> None:
        self.references: list[tuple[str, weakref.ref[Tensor]]] = []
        self.storages: list[tuple[str, StorageWeakRef]] = []
        for index, layer in enumerate(model):
            layer.register_forward_hook(self._note(index))

    def _note(self, index: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            for name, tensor in (("input", args[0]), ("output", out)):
                self.add(f"{name} of layer {index}", tensor)

        return hook

    def add(self, what: str, tensor: Tensor) -> Tensor:
        self.references.append((what, weakref.ref(tensor)))
        self.storages.append((what, StorageWeakRef(tensor.untyped_storage())))
        return tensor

    def alive(self) -> set[str]:
        found = {what for what, reference in self.references if reference() is not None}
        return found | {what for what, storage in self.storages if not storage.expired()}


class Boom(nn.Module):
    """Raises in F of its second chunk, in its recomputation, or in its backward."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.when == "R" and is_recomputing() or self.when == "F" and self.calls == 2:
            raise KeyError(self.when)
        y = x * 1
        if self.when == "B" and y.requires_grad:
            y.register_hook(_raise)
        return y


def _raise(grad: Tensor) -> None:
    raise KeyError("B")


def net(when: str = "") -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 4), nn.Tanh(), Boom(when), nn.Linear(4, 2)
    ).double()


EAGER: dict[str, dict[str, Any]] = {
    "eager": {}, "eager outputs": {}, "eager two runs": {"clip": "two_pass", "max_norm": 1.0},
    "eager_backward": {}, "eager_backward two runs": {"clip": "two_pass", "max_norm": 1.0},
}  # fmt: skip


# torch's first optimizer imports torch._dynamo, and what that tries leaves tracebacks in cycles, with callers' frames.
torch.optim.SGD([torch.zeros(1, requires_grad=True)])


def run_eagerly(pipe: Pipe, x: Tensor, y: Tensor, entry: str) -> object:
    """A step that updates during the backward, or a backward that does."""
    update = EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=0.1), **EAGER[entry])
    if entry.startswith("eager_backward"):
        return eager_backward(mean_of_squares(pipe(x), y), update)
    return pipe.step(x, y, loss_fn=mean_of_squares, optimizer=update, outputs=entry == "eager outputs")


def mean_of_squares(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).pow(2).mean()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "entry", ["forward", "step", "store", "outputs", "evaluate", "no_grad", "dropped", "create_graph", *EAGER]
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_nothing_is_alive_after_a_call(policy: object, schedule: str, entry: str, requires_grad: bool) -> None:
    """With the garbage collector off: not even a cycle. x and the target die with the user's names for them."""
    model = net()
    watch = Watch(model)
    pipe = Pipe(model, [2, 2, 3], 3, schedule=schedule, checkpoint=policy)
    with no_collector():
        x = watch.add("x", torch.randn(6, 3).double().requires_grad_(requires_grad))
        y = watch.add("target", torch.randn(6, 2).double())
        if entry in ("step", "store", "outputs"):
            step = pipe.step(
                x, y, loss_fn=mean_of_squares, outputs=entry == "outputs",
                grads="store" if entry == "store" else "param",
            )
        elif entry == "evaluate":
            step = pipe.evaluate(x, y, loss_fn=mean_of_squares)
        elif entry == "no_grad":
            with torch.no_grad():
                pipe(x)
        elif entry in EAGER:
            step = run_eagerly(pipe, x, y, entry)
        elif entry == "forward":
            mean_of_squares(pipe(x), y).backward()
        elif entry == "dropped":
            pipe(x)
        else:
            torch.autograd.grad(mean_of_squares(pipe(x), y), list(model.parameters()), create_graph=True)
        step = None
        del x, y, step
        assert watch.alive() == set()


def test_a_gradient_goes_as_soon_as_the_store_of_a_step_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store copies: gradients that waited for the end would be there twice."""
    add, taken, alive = GradStore.add_, list[Any](), list[int]()

    def watched(store: GradStore, owner: Any, grad: Any) -> None:
        alive.append(sum(reference() is not None for reference in taken))
        taken.append(weakref.ref(grad))
        add(store, owner, grad)

    monkeypatch.setattr(GradStore, "add_", watched)
    with no_collector():
        x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
        Pipe(net(), [2, 2, 3], 3).step(x, y, loss_fn=mean_of_squares, grads="store")
    assert len(taken) > 3 and not any(alive)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_but_the_output_is_alive_after_backward_while_the_output_is_held(entry: str, policy: object) -> None:
    model = net()
    watch = Watch(model[:-1])
    pipe = Pipe(model, [2, 2, 3], 3, checkpoint=policy)
    with no_collector():
        x = watch.add("x", torch.randn(6, 3).double())
        if entry == "forward":
            out = pipe(x)
            out.sum().backward()
        else:
            out = pipe.step(x, loss_fn=sum_of, loss_reduction="sum", outputs=True).outputs
        del x
        assert out.shape == (6, 2) and watch.alive() == set()


@pytest.mark.parametrize(
    "entry, when",
    [*((entry, when) for entry in [*ENTRIES, *EAGER] for when in "FRB"), ("evaluate", "F"), ("no_grad", "F")],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_is_alive_after_a_failed_call(entry: str, when: str, schedule: str) -> None:
    model = net(when)
    watch = Watch(model)
    pipe = Pipe(model, [2, 2, 3], 3, schedule=schedule, checkpoint="always")

    def fail() -> None:
        x = watch.add("x", torch.randn(6, 3).double())
        y = watch.add("target", torch.randn(6, 2).double())
        try:
            if entry in ("forward", "no_grad"):
                with torch.set_grad_enabled(entry == "forward"):
                    out = pipe(x)
                mean_of_squares(out, y).backward()
            elif entry in EAGER:
                run_eagerly(pipe, x, y, entry)
            else:
                getattr(pipe, entry)(x, y, loss_fn=mean_of_squares)
        except KeyError:
            return
        raise AssertionError

    with no_collector():
        fail()
        assert watch.alive() == set()


def product(pipe: Pipe, x: Tensor, y: Tensor) -> object:
    """Of a Hessian and a vector."""
    operator = Hessian(pipe, (x, y), mean_of_squares)
    return operator @ torch.ones(operator.shape[0], dtype=x.dtype)


LEAVING = {
    **{entry: partial(run_eagerly, entry=entry) for entry in EAGER},
    **{entry: partial(lambda pipe, x, y, entry: run(pipe, x, entry), entry=entry) for entry in ENTRIES},
    "evaluate": lambda pipe, x, y: pipe.evaluate(x, y, loss_fn=mean_of_squares),
    "optimizer": lambda pipe, x, y: pipe.step(
        x, y, loss_fn=mean_of_squares, optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1), clip_grad_norm=1.0
    ),
    "product": product,
}


@pytest.mark.parametrize("entry", LEAVING)
def test_a_call_leaves_nothing_of_ours_for_the_collector(entry: str) -> None:
    """The objects of a call (stages, copies of buffers, the loss) are no cycle either, and no class is made for one, as
    ctypes makes one for a length. (torch's pytree makes cycles, of functions alone.)"""
    pipe = Pipe(net(), [2, 2, 3], 3)
    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    LEAVING[entry](pipe, x, y)
    gc.collect()
    with no_collector():
        LEAVING[entry](pipe, x, y)
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            kinds = {type(each) for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    ours = ("pipeline", "_ctypes")
    assert not {kind for kind in kinds if kind.__module__.startswith(ours) or issubclass(kind, Tensor)}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("policy", ["always", "never"])
def test_a_pipe_holds_no_more_after_many_calls_than_after_one(entry: str, policy: str) -> None:
    """Counted in tensors that the collector knows, with no call under way."""
    pipe = Pipe(net(), [2, 2, 3], 3, checkpoint=policy)
    x = torch.randn(6, 3).double()

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    run(pipe, x, entry)
    before = tensors()
    for _ in range(5):
        run(pipe, x, entry)
    assert tensors() == before
