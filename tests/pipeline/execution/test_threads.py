"""Law 9: lanes in threads compute what lanes in one thread compute, to the last bit, and leave nothing behind.

    workers="inline"    the reference: one thread, one order
    workers="threads"   places named a, b, c share the CPU, and each of them has a thread

Every comparison makes three calls: the first two hold the generator's lock and learn, in the third stages overlap.
"""

import _thread
import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from cover import examples, pairwise
from hypothesis import given, settings
from hypothesis import strategies as st
from law_check import CHECKPOINTS, balance_of, differences, observed, ready, row_loss, target_of
from law_models import MODELS, Apply, Case, normal, sum_loss
from pipeline_probes import outside
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import CheckpointError, Pipe, is_checkpointing, is_recomputing
from pipeline.common.places import Place
from pipeline.execution.call import Call
from pipeline.execution.drivers import uses_threads
from pipeline.execution.engine import Needs, merged_order, needs_of
from pipeline.execution.threads import drive_threads
from pipeline.skip import pop, skippable, stash
from scheduler import Action, Timeline, by_name, requires

CPU = torch.device("cpu")
F64 = torch.float64
WORKERS = ("inline", "threads")
PATIENCE = 20.0  # seconds, after which a test that should have ended is called stuck


def places(kind: str, stages: int) -> list[Place]:
    """All in one place; each apart; or in turns a, b, a."""
    names = {"one": [""] * stages, "apart": [f"p{stage}" for stage in range(stages)], "turns": list("aba" * stages)}
    return [Place(CPU, name) for name in names[kind][:stages]]


def piped(model: nn.Sequential, balance: Sequence[int], chunks: int, workers: str = "threads", **how: Any) -> Pipe:
    """Each stage at a place of its own."""
    how.setdefault("devices", places("apart", len(balance)))
    return Pipe(model, balance, chunks, workers=workers, **how)


def learnt(pipe: Pipe, width: int = 3) -> Pipe:
    """After its first two calls."""
    for _ in range(2):
        pipe(torch.ones(4, width)).sum().backward()
    return pipe


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.enumerate()
    yield
    assert threading.enumerate() == before


def in_time(function: Callable[[], Any]) -> Any:
    """Call it in a thread of its own, and fail where it does not return."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert found, f"no end after {PATIENCE} s"
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


class Gradual(torch.autograd.Function):
    """Identity that calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return grad, None


def calling(forward: Callable[[], None], backward: Callable[[], None] = lambda: None) -> Apply:
    """An identity layer that calls one function in each forward and another in each backward."""

    def both(x: Tensor) -> Tensor:
        forward()
        return Gradual.apply(x, backward)

    return Apply(both)


# ------------------------------------------------------------------------------------------------- the same as inline


@skippable(stash=["early"])
class Split(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("early", x.sin())
        return 2 * x


@skippable(pop=["early"])
class Join(nn.Module):
    def forward(self, x: Tensor) -> Any:
        early = yield pop("early")
        return x + early


def skips() -> Case:
    layers = Split(), nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2), Join(), nn.Linear(4, 2)
    return Case(nn.Sequential(*layers).double(), partial(normal_rows, 4))


def tied() -> Case:
    """One module in two stages, and one parameter in two modules."""
    twice, one, other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    return Case(nn.Sequential(twice, one, nn.Tanh(), twice, nn.Dropout(0.2), other).double(), partial(normal_rows, 4))


def normal_rows(width: int, rows: int) -> Tensor:
    return normal(rows, width)


def fresh(name: str) -> Case:
    if name in MODELS:
        return MODELS[name]()
    torch.manual_seed(20)
    return {"skips": skips, "tied": tied}[name]()


AXES: dict[str, tuple[Any, ...]] = {
    "model": ("mlp", "convnet", "transformer", "exchange", "inplace_middle", "captured", "private_generator", "skips",
              "tied"),
    "balance": ("halves", "each alone"),
    "places": ("one", "apart", "turns"),
    "chunks": (1, 4),
    "checkpoint": tuple(CHECKPOINTS),
    "train": (True, False),
    "entry": ("forward", "step mean"),
    "schedule": ("gpipe", "1f1b"),
}


def outcome(config: dict[str, Any], workers: str) -> list[Any]:
    """What three calls leave: outputs, loss, gradients, buffers; and the generator's state after each."""
    case = fresh(config["model"])
    x = ready(case, config["train"], True, rows=7)
    balance = balance_of(config["balance"], len(case.model))
    pipe = Pipe(
        case.model, balance, config["chunks"], devices=places(config["places"], len(balance)), workers=workers,
        checkpoint=CHECKPOINTS[config["checkpoint"]], schedule=config["schedule"], mixes_rows=not case.rowwise,
    )
    found: list[Any] = []
    for number in range(3):
        for leaf in [*pipe.parameters(), *case.extras, x] if isinstance(x, Tensor) else pipe.parameters():
            leaf.grad = None
        torch.manual_seed(number)
        if config["entry"] == "forward":
            outputs = pipe(x)
            loss = case.loss(outputs)
            loss.backward()
        else:
            reduction = config["entry"].split()[1]
            step = pipe.step(x, target_of(7), loss_fn=row_loss(reduction), loss_reduction=reduction, outputs=True)
            outputs, loss = step.outputs, step.loss
        found.append((observed(case, x, outputs, loss), torch.get_rng_state()))
    return found


@pytest.mark.parametrize("config", pairwise(AXES), ids=lambda config: "-".join(map(str, config.values())))
def test_threads_give_the_bits_of_one_thread(config: dict[str, Any]) -> None:
    for (ours, state), (theirs, expected) in zip(outcome(config, "threads"), outcome(config, "inline"), strict=True):
        assert differences(ours, theirs) == []
        assert torch.equal(state, expected)


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]


def all_equal(ones: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    pairs = zip(ones, others, strict=True)
    return all(one is other if one is None or other is None else torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_threads_give_the_bits_of_one_thread(context: Any) -> None:
    found = {}
    for workers in WORKERS:
        case = MODELS["convnet"]()
        flags: set[tuple[bool, bool]] = set()
        case.model.append(calling(lambda: flags.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))))
        case.model.insert(0, calling(lambda: flags.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))))
        pipe = piped(case.model, [3, 2, 3], 3, workers)
        found[workers] = []
        for number in range(3):
            torch.manual_seed(number)
            with context():
                out = pipe(case.make_input(7))
            assert not out.requires_grad and out.is_inference() is (context is torch.inference_mode)
            found[workers] += [out, *[buffer.clone() for buffer in pipe.buffers()]]
        assert flags == {(False, context is torch.inference_mode)}
    assert all_equal(found["inline"], found["threads"])


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_evaluation_in_threads_gives_the_bits_of_one_thread(checkpoint: str) -> None:
    found = {}
    for workers in WORKERS:
        case = MODELS["convnet"]()
        pipe = piped(case.model, [2, 2, 2], 3, workers, checkpoint=checkpoint)
        for _ in range(3):
            step = pipe.evaluate(case.make_input(7), target_of(7), loss_fn=row_loss("mean"))
        found[workers] = [step.loss, step.outputs]
        assert all(module.training for module in pipe.modules())
    assert all_equal(found["inline"], found["threads"])


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_second_derivatives_in_threads_are_those_of_one_thread(checkpoint: str) -> None:
    found = {}
    for workers in WORKERS:
        case = MODELS["mlp"]()
        pipe = piped(case.model, [2, 2, 2], 3, workers, checkpoint=checkpoint)
        x = case.make_input(7).requires_grad_()
        for number in range(3):
            torch.manual_seed(number)
            leaves = [x, *pipe.parameters()]
            grads = torch.autograd.grad(case.loss(pipe(x)), leaves, create_graph=True)
            twice = torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)
        found[workers] = [*grads, *twice]
    assert all_equal(found["inline"], found["threads"])


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).to(x.dtype)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_autocast_in_threads_gives_the_bits_of_one_thread(checkpoint: str) -> None:
    found = {}
    for workers in WORKERS:
        torch.manual_seed(0)
        model = nn.Sequential(*(Cast() for _ in range(4)))
        dtypes: set[torch.dtype] = set()
        for layer in model:
            layer.linear.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
        pipe = piped(model, [1, 1, 2], 3, workers, checkpoint=checkpoint)
        for _ in range(3):
            pipe.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = pipe(torch.linspace(-1, 1, 56).view(7, 8)).float().square().sum()
            loss.backward()
        assert dtypes == {torch.bfloat16}
        found[workers] = [loss.detach(), *grads_of(pipe)]
    assert all_equal(found["inline"], found["threads"])


# ------------------------------------------------------------------------------------------ what layers see in a thread


class Counting(TorchFunctionMode):
    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(threading.current_thread().name)
        return function(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(threading.current_thread().name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Counting, Dispatching])
def test_the_callers_modes_see_the_layers_of_every_thread(mode: Any) -> None:
    seen: set[str] = set()
    pipe = learnt(piped(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1, 1], 2))
    with mode(seen):
        pipe(torch.ones(4, 3))
    assert {"pipe group 0", "pipe group 1", threading.current_thread().name} <= seen
    seen.clear()
    pipe(torch.ones(4, 3))
    assert seen == set()


def test_the_callers_hooks_for_saved_tensors_see_what_every_thread_saves() -> None:
    packed: set[str] = set()
    opened: set[str] = set()

    def pack(tensor: Tensor) -> Tensor:
        packed.add(threading.current_thread().name)
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        opened.add(threading.current_thread().name)
        return tensor

    pipe = learnt(piped(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Tanh()), [1, 1, 1], 2, checkpoint="never"))
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = pipe(torch.ones(4, 3))
    out.sum().backward()
    everyone = {"pipe group 0", "pipe group 1", threading.current_thread().name}
    assert everyone <= packed and everyone <= opened


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    found = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(found)


@contextmanager
def sdpa_without_flash() -> Iterator[None]:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "default dtype": (partial(default_dtype, F64), lambda: torch.empty(0).dtype),
    "default device": (partial(torch.device, "meta"), lambda: torch.empty(0).device.type),
    "autocast": (partial(torch.autocast, "cpu", dtype=torch.float16), lambda: torch.get_autocast_dtype("cpu")),
    "attention kernels": (sdpa_without_flash, torch.backends.cuda.flash_sdp_enabled),
    "gradients": (torch.no_grad, torch.is_grad_enabled),
    "inference": (torch.inference_mode, torch.is_inference_mode_enabled),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_layers_in_every_thread_see_the_callers_switches(name: str) -> None:
    switch, read = SWITCHES[name]
    seen: dict[str, set[Any]] = {}
    note = calling(lambda: seen.setdefault(threading.current_thread().name, set()).add(read()))
    model = nn.Sequential(nn.Linear(3, 3), note, nn.Identity(), note, nn.Identity(), note)
    pipe = learnt(piped(model, [2, 2, 2], 2, checkpoint="never"))
    x = torch.ones(4, 3)
    outside = read()
    seen.clear()
    pipe(x)
    assert list(seen.values()) == [{outside}] * 3
    pipe(x)  # number 4, which learns
    seen.clear()
    with switch():
        inside = read()
        pipe(x)
    assert inside != outside and list(seen.values()) == [{inside}] * 3
    assert read() == outside


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_layers_in_every_thread_are_told_whether_they_are_checkpointed_and_recomputed(
    checkpoint: str, schedule: str
) -> None:
    told: dict[str, list[Any]] = {}
    for workers in WORKERS:
        notes: list[list[tuple[bool, bool]]] = [[], [], []]
        layers: list[nn.Module] = []
        for own in notes:
            layers += [nn.Linear(3, 3), calling(lambda own=own: own.append((is_checkpointing(), is_recomputing())))]
        pipe = piped(
            nn.Sequential(*layers), [2, 2, 2], 3, workers, checkpoint=CHECKPOINTS[checkpoint], schedule=schedule,
            devices=places("apart", 3),
        )
        for _ in range(3):
            pipe.step(torch.ones(6, 3), loss_fn=lambda out, _: out.sum(), loss_reduction="sum")
            assert not is_checkpointing() and not is_recomputing()
        told[workers] = notes
    assert told["threads"] == told["inline"]
    if checkpoint in ("always", "never"):
        expected = {(True, False), (False, True)} if checkpoint == "always" else {(False, False)}
        assert [set(own) for own in told["threads"]] == [expected] * 3


# ------------------------------------------------------------------------------------------------------------- errors


class Trouble(Exception):
    """Of the user."""


class Fuse:
    """Raises when it is called for the n-th time after `set`."""

    def __init__(self) -> None:
        self.left = 0
        self.error: BaseException = Trouble()

    def set(self, count: int, error: BaseException) -> None:
        self.left, self.error = count, error

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            error, self.error = self.error, Trouble()  # an error that is kept keeps the frames that it went through
            try:
                raise error
            finally:
                del error


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.get = outside({"F": Fuse(), "R": Fuse(), "B": Fuse()})

    @property
    def fuses(self) -> dict[str, Fuse]:
        return self.get()

    def forward(self, x: Tensor) -> Tensor:
        self.fuses["R" if is_recomputing() else "F"]()
        return Gradual.apply(x, self.fuses["B"])


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x


def fused() -> nn.Sequential:
    layers = [[nn.Linear(4, 4), nn.Dropout(0.2), nn.BatchNorm1d(4), Counter(), Fused()] for _ in range(3)]
    return nn.Sequential(*(layer for stage in layers for layer in stage)).double()


def state(pipe: Pipe) -> list[Tensor | None]:
    return [*[tensor.clone() for tensor in pipe.state_dict().values()], *grads_of(pipe)]


def square(out: Tensor, target: Any = None) -> Tensor:
    return out.square().sum()


def through(entry: str, pipe: Pipe, x: Tensor, loss_fn: Any = square) -> None:
    if entry == "step":
        pipe.step(x, loss_fn=loss_fn, loss_reduction="sum")
    else:
        loss_fn(pipe(x), None).backward()


def places_of_failure(kind: str, stage: int, chunk: int) -> list[str]:
    action = f"{stage}{'F' if kind == 'F' else 'B'}{chunk}"
    layer = [] if kind == "B" else [f"layer {5 * stage + 4} (Fused)"]
    return [*layer, f"stage {stage} (layers {5 * stage}..{5 * stage + 4}), chunk {chunk}, {action}"]


@pytest.mark.parametrize("entry, error", [
    ("forward", Trouble), ("step", Trouble), ("forward", SystemExit), ("step", KeyboardInterrupt),
])
@pytest.mark.parametrize("kind", ["F", "R", "B"])
@pytest.mark.parametrize("stage", [0, 2])
def test_an_error_in_any_thread_names_its_action_and_leaves_everything_as_before(
    stage: int, kind: str, entry: str, error: type[BaseException]
) -> None:
    model = fused()
    pipe = piped(model, [5, 5, 5], 3, checkpoint="always")
    x = normal(6, 4)
    for _ in range(2):
        through(entry, pipe, x)
    out = pipe(x) if entry == "forward" and kind != "F" else None
    before, parameters = state(pipe), list(map(id, pipe.parameters()))
    model[5 * stage + 4].fuses[kind].set(2, error("burnt"))
    generator = torch.get_rng_state()
    with pytest.raises(error, match="burnt") as caught:
        through(entry, pipe, x) if out is None else square(out).backward()
    assert caught.value.__notes__ == places_of_failure(kind, stage, 1)
    assert all_equal(state(pipe), before) and list(map(id, pipe.parameters())) == parameters
    after = torch.get_rng_state()
    torch.set_rng_state(generator)
    if out is None:
        torch.empty((), dtype=torch.int64).random_()  # the one draw of the call
    assert torch.equal(after, torch.get_rng_state())
    through(entry, pipe, x)


@pytest.mark.parametrize("kind", ["F", "B"])
@pytest.mark.parametrize("first, second", [(0, 2), (2, 0), (1, 0), (1, 2)])
def test_of_two_errors_the_first_in_time_is_raised(first: int, second: int, kind: str) -> None:
    """0F2, 1F1 and 2F0 run at one time, and so do 2B2, 1B1 and 0B0: there the one raises while the other computes."""
    raised, begun, is_armed = threading.Event(), threading.Event(), threading.Event()
    number = {stage: 2 - stage if kind == "F" else stage for stage in range(3)}
    ran = dict.fromkeys(range(3), 0)

    def act(stage: int) -> None:
        ran[stage] += is_armed.is_set()
        if not is_armed.is_set() or ran[stage] != number[stage] + 1:
            return
        if stage == first:
            assert begun.wait(PATIENCE / 4)
            raised.set()
            raise Trouble("first")
        if stage == second:
            begun.set()
            assert raised.wait(PATIENCE / 4)
            time.sleep(0.02)
            raise Trouble("second")

    nothing: Callable[[], None] = lambda: None
    acts = [(partial(act, stage), nothing) if kind == "F" else (nothing, partial(act, stage)) for stage in range(3)]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), calling(*each)) for each in acts))
    pipe = piped(model, [1, 1, 1], 3, schedule="gpipe", checkpoint="never")
    x = torch.ones(6, 4)
    for _ in range(2):
        through("step", pipe, x)
    before = state(pipe)
    is_armed.set()
    with pytest.raises(Trouble, match="first") as caught:
        in_time(lambda: through("step", pipe, x))
    chunk = number[first]
    layer = [f"layer {first} (Sequential)"] if kind == "F" else []
    assert caught.value.__notes__ == [*layer, f"stage {first} (layer {first}), chunk {chunk}, {first}{kind}{chunk}"]
    assert all_equal(state(pipe), before)
    is_armed.clear()
    through("step", pipe, x)


def test_an_error_in_the_loss_names_the_last_stage_and_leaves_everything_as_before() -> None:
    pipe = piped(fused(), [5, 5, 5], 3)
    x = normal(6, 4)
    for _ in range(3):
        through("step", pipe, x)
    fuse = Fuse()

    def loss_fn(out: Tensor, target: Any) -> Tensor:
        fuse()
        return square(out)

    for _ in range(3):
        through("step", pipe, x, loss_fn)
    before = state(pipe)
    fuse.set(2, Trouble("of the loss"))
    with pytest.raises(Trouble, match="of the loss") as caught:
        through("step", pipe, x, loss_fn)
    assert caught.value.__notes__ == ["loss_fn, of 2 of the 6 rows", *places_of_failure("B", 2, 1)]
    assert all_equal(state(pipe), before)
    through("step", pipe, x, loss_fn)


@pytest.mark.parametrize("entry", ["forward", "step"])
def test_an_error_in_a_tensor_hook_of_a_layer_leaves_everything_as_before(entry: str) -> None:
    fuse = Fuse()

    def watched(x: Tensor) -> Tensor:
        x = x * 1.0
        x.register_hook(lambda grad: fuse())
        return x

    pipe = piped(nn.Sequential(nn.Linear(4, 4), Apply(watched), nn.Linear(4, 4)), [2, 1], 3)
    x = torch.ones(6, 4)
    for _ in range(3):
        through(entry, pipe, x)
    before = state(pipe)
    fuse.set(2, Trouble("of the hook"))
    with pytest.raises(Trouble, match="of the hook") as caught:
        through(entry, pipe, x)
    assert caught.value.__notes__ == ["stage 0 (layers 0..1), chunk 1, 0B1"]
    assert all_equal(state(pipe), before)
    through(entry, pipe, x)


def test_after_an_error_no_thread_begins_another_action() -> None:
    ran: list[Action] = []
    failed = threading.Event()

    def perform(action: Action) -> None:
        if str(action) == "1F0":
            failed.set()
            raise Trouble
        ran.append(action)
        if str(action) == "0F1":
            assert failed.wait(PATIENCE)
            time.sleep(0.05)

    orders = by_name("gpipe", 2, 6).orders
    with pytest.raises(Trouble):
        in_time(lambda: drive_threads(orders, needs_of(orders, 2), perform, nullcontext))
    assert " ".join(map(str, ran)) in ("0F0", "0F0 0F1")


def test_an_error_while_a_thread_gets_ready_is_raised() -> None:
    orders = by_name("gpipe", 2, 2).orders

    @contextmanager
    def within(number: int) -> Iterator[None]:
        if number == 0:
            raise Trouble("not ready")
        yield

    with pytest.raises(Trouble, match="not ready"):
        in_time(lambda: drive_threads(orders, needs_of(orders, 2), print, within))


def calls_alive(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """From now on: how many calls are alive."""
    made: list[weakref.ref[Call]] = []
    original = Call.__init__

    def init(self: Call, *args: Any) -> None:
        made.append(weakref.ref(self))
        original(self, *args)

    monkeypatch.setattr(Call, "__init__", init)
    return lambda: sum(each() is not None for each in made)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("entry", ["forward", "step"])
def test_a_call_goes_with_its_output(entry: str, no_collector: None, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = calls_alive(monkeypatch)
    pipe = piped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1, 1], 3)
    for _ in range(3):
        through(entry, pipe, torch.ones(6, 4))
    out = pipe(torch.ones(6, 4))
    assert alive() == 1
    del out
    assert alive() == 0


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("entry", ["forward", "step"])
def test_a_failed_call_goes_with_its_error(
    entry: str, stage: int, no_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = calls_alive(monkeypatch)
    model = fused()
    pipe = piped(model, [5, 5, 5], 3)
    model[5 * stage + 4].fuses["F"].set(2, Trouble())
    with pytest.raises(Trouble) as caught:
        through(entry, pipe, normal(6, 4))
    del caught
    assert alive() == 0


# --------------------------------------------------------------------------------------------------------- interrupts


INTERRUPTS = """
import signal, threading, time
from itertools import product
import torch
from torch import nn
from pipeline import is_recomputing
from test_threads import all_equal, calling, piped, state, through

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and what they start
for stage, when, entry, calls_before in product((0, 1), ("forward", "backward"), ("forward", "step"), (0, 2)):
    left, sent = 0, 0.0

    def alarm():
        global left, sent
        if is_recomputing():  # the probe's forwards, which no thread runs
            return
        left -= 1
        if left == 0:
            sent = time.perf_counter()
            signal.raise_signal(signal.SIGINT)

    nothing = lambda: None
    rings = calling(alarm, nothing) if when == "forward" else calling(nothing, alarm)
    slow = calling(lambda: time.sleep(0.002), lambda: time.sleep(0.002))
    layers = [[nn.Linear(4, 4), nn.BatchNorm1d(4), rings if own == stage else slow] for own in range(2)]
    pipe = piped(nn.Sequential(*(layer for own in layers for layer in own)), [3, 3], 4, checkpoint="never")
    x = torch.linspace(0, 1, 32).view(8, 4)
    for _ in range(calls_before):
        through(entry, pipe, x)
    before, left = state(pipe), 2
    try:
        through(entry, pipe, x)
        raise SystemExit("no KeyboardInterrupt")
    except KeyboardInterrupt:
        assert time.perf_counter() - sent < 1, "late"
    assert threading.enumerate() == [threading.main_thread()]
    if entry == "step" or when == "forward":  # else the forward had gone well
        assert all_equal(state(pipe), before)
    through(entry, pipe, x)
    print("ok", flush=True)
"""


@pytest.mark.soak
def test_an_interrupt_ends_the_call_at_once_and_the_next_call_works() -> None:
    """In a process of its own, which may hang. The first call holds the generator's lock, the third does not.

    Stage 0 computes while the main thread waits; stage 1 is the main thread's own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, list(Path(__file__).parents)[:4])))
        try:
            done = subprocess.run([sys.executable, "-c", INTERRUPTS], capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"it hangs after {error.stdout!r}")
    assert (done.returncode, done.stdout.split()) == (0, ["ok"] * 16), done.stderr


# ------------------------------------------------------------------------------------------------------------- overlap


def overlaps(timeline: Timeline) -> set[tuple[int, int]]:
    """The pairs of lanes of which two actions ran at one time."""
    events = timeline.events
    return {
        (one.lane, other.lane)
        for one in events
        for other in events
        if one.lane < other.lane and one.start < other.end and other.start < one.end
    }


def sleepers(stages: int, seconds: float = 0.002) -> nn.Sequential:
    def sleep() -> None:
        time.sleep(seconds)

    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), calling(sleep, sleep)) for _ in range(stages)))


def step_timeline(pipe: Pipe, calls: int = 1) -> Timeline:
    for _ in range(calls):
        step = pipe.step(torch.ones(8, 4), loss_fn=square, loss_reduction="sum", trace=True)
    return step.timeline


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_lanes_at_different_places_overlap(schedule: str) -> None:
    pairs = {}
    for workers in WORKERS:
        pipe = piped(sleepers(3), [1, 1, 1], 4, workers, schedule=schedule)
        timeline = step_timeline(pipe, calls=3)
        pairs[workers] = overlaps(timeline)
        busy = sum(event.duration for event in timeline.events)
        assert (timeline.makespan < busy) is (workers == "threads")
    assert pairs == {"inline": set(), "threads": {(0, 1), (0, 2), (1, 2)}}


def test_calls_that_learn_do_not_overlap() -> None:
    """Calls number 1, 2, 4, 8 and so on learn who draws from the CPU's generator, with everyone holding it."""
    pipe = piped(sleepers(2), [1, 1], 4)
    found = [bool(overlaps(step_timeline(pipe))) for _ in range(5)]
    assert found == [False, False, True, False, True]


def test_no_stages_overlap_where_one_draws_from_the_cpus_generator() -> None:
    """Another one might begin to draw from it, and nobody could tell whose numbers were whose."""
    model = sleepers(4)
    model[2].append(nn.Dropout(0.1))
    assert not overlaps(step_timeline(piped(model, [1, 1, 1, 1], 5), calls=3))


@pytest.mark.parametrize("names", ["aa", "aba", "aab"])
def test_lanes_that_share_a_place_never_compute_at_once(names: str) -> None:
    inside: dict[str, int] = dict.fromkeys(names, 0)
    most: dict[str, int] = dict.fromkeys(names, 0)

    def stay(name: str) -> None:
        inside[name] += 1
        most[name] = max(most[name], inside[name])
        time.sleep(0.002)
        inside[name] -= 1

    layers = (nn.Sequential(nn.Linear(4, 4), calling(partial(stay, name), partial(stay, name))) for name in names)
    devices = [Place(CPU, name) for name in names]
    pipe = piped(nn.Sequential(*layers), [1] * len(names), 4, devices=devices, schedule="1f1b")
    for _ in range(3):
        through("step", pipe, torch.ones(8, 4))
    assert most == dict.fromkeys(names, 1)


def test_a_module_that_stands_in_two_stages_never_computes_in_both_at_once() -> None:
    inside, most, threads = [0], [0], set()

    def stay() -> None:
        threads.add(threading.current_thread().name)
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.002)
        inside[0] -= 1

    shared = nn.Sequential(nn.Linear(4, 4), calling(stay, stay))
    wrapped = nn.Sequential(nn.Tanh(), shared)
    pipe = piped(nn.Sequential(shared, nn.Linear(4, 4), wrapped), [1, 1, 1], 4, checkpoint="always")
    for _ in range(3):
        through("step", pipe, torch.ones(8, 4))
    assert most == [1] and len(threads) == 2


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_each_lane_has_a_thread_and_the_caller_drives_the_last_one_forward_and_backward(stages: int) -> None:
    seen: dict[tuple[int, str], set[int]] = {}

    def note(stage: int, kind: str) -> None:
        seen.setdefault((stage, kind), set()).add(threading.get_ident())

    layers = (
        nn.Sequential(nn.Linear(4, 4), calling(partial(note, stage, "F"), partial(note, stage, "B")))
        for stage in range(stages)
    )
    pipe = learnt(piped(nn.Sequential(*layers), [1] * stages, 3, checkpoint="always"), 4)
    me = threading.get_ident()
    for entry in ("step", "forward"):  # calls number 3 and 5
        seen.clear()
        through(entry, pipe, torch.ones(6, 4))
        assert seen[stages - 1, "F"] == seen[stages - 1, "B"] == {me}
        others = [idents for (stage, _), idents in seen.items() if stage < stages - 1]
        assert len(others) == 2 * (stages - 1) and all(me not in idents for idents in others)
        if entry == "step":
            assert all(len(idents) == 1 for idents in seen.values())
            assert len(set().union(*seen.values())) == stages
            through(entry, pipe, torch.ones(6, 4))


def test_a_thread_that_python_did_not_start_drives_all_lanes_itself() -> None:
    """It may be one in which autograd works for a device: other threads would wait for it."""
    seen: set[int] = set()
    note = partial(lambda: seen.add(threading.get_ident()))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), calling(note, note)) for _ in range(3)])
    pipe = learnt(piped(model, [1] * 3, 3, checkpoint="always"), 4)
    seen.clear()
    ended = threading.Event()
    idents: list[int] = []

    def work() -> None:
        through("forward", pipe, torch.ones(6, 4))
        idents.append(threading.get_ident())
        threading._active.pop(threading.get_ident(), None)  # type: ignore[attr-defined]  # Python lists it for ever
        ended.set()

    _thread.start_new_thread(work, ())
    assert ended.wait(PATIENCE) and seen == set(idents)


def test_without_being_told_threads_are_for_several_accelerators() -> None:
    cpus = places("apart", 3)
    gpus = [Place(torch.device("cuda", index)) for index in range(2)]
    assert not uses_threads(None, cpus) and not uses_threads(None, [*cpus, gpus[0], gpus[0]])
    assert uses_threads(None, gpus) and not uses_threads("inline", gpus) and uses_threads("threads", cpus)


def test_unknown_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="workers is 'processes'. Use 'inline' .* 'threads' .* or None"):
        Pipe(nn.Sequential(nn.Linear(2, 2)), [1], workers="processes")


# ------------------------------------------------------------------------------------------------- the driver by itself


def grouped(orders: Sequence[Sequence[Action]], needs: Needs, cuts: Sequence[int]) -> list[list[Action]]:
    """The parts of the merged order that groups of lanes run: `cuts` says to which group each stage belongs."""
    merged = merged_order(orders, needs)
    return [[action for action in merged if cuts[action.stage] == group] for group in sorted(set(cuts))]


@settings(max_examples=examples(25))
@given(data=st.data(), name=st.sampled_from(["gpipe", "1f1b"]), lanes=st.integers(1, 5), chunks=st.integers(1, 5))
def test_threads_perform_each_action_once_after_its_needs_and_keep_every_group(
    data: Any, name: str, lanes: int, chunks: int
) -> None:
    orders = by_name(name, lanes, chunks).orders
    needs = needs_of(orders, lanes)
    cuts = data.draw(st.lists(st.integers(0, 2), min_size=lanes, max_size=lanes))
    performed: list[Action] = []
    done: set[Action] = set()

    def perform(action: Action) -> None:
        assert done.issuperset(requires(action, lanes))
        performed.append(action)
        done.add(action)

    in_time(lambda: drive_threads(grouped(orders, needs, cuts), needs, perform, nullcontext))
    assert sorted(performed) == sorted(action for order in orders for action in order)
    for order in [*orders, *grouped(orders, needs, cuts)]:
        assert [action for action in performed if action in set(order)] == list(order)


def test_what_ran_before_counts_as_done_in_threads() -> None:
    orders = [(Action.parse("0B0"),), (Action.parse("1B0"),)]
    before = [Action.parse("0F0"), Action.parse("1F0")]
    performed: list[Action] = []
    drive_threads(orders, needs_of(orders, 2, before=before), performed.append, nullcontext)
    assert " ".join(map(str, performed)) == "1B0 0B0"


# ------------------------------------------------------------------------------------------- what threads might disturb


def after_two_calls(
    make: Callable[[], nn.Sequential], change: Callable[[nn.Sequential], None], workers: str, entry: str,
    checkpoint: str = "never",
) -> list[Tensor | None]:
    """Output and gradients of a third call, before which the model was changed."""
    torch.manual_seed(0)
    model = make().double()
    pipe = piped(model, [2, 2], 3, workers, checkpoint=checkpoint)
    x = normal(6, 4)
    for _ in range(2):
        through(entry, pipe, x)
    change(model)
    pipe.zero_grad()
    torch.manual_seed(5)
    if entry == "step":
        step = pipe.step(x, loss_fn=square, loss_reduction="sum", outputs=True)
        return [step.outputs, *grads_of(pipe)]
    out = pipe(x)
    torch.rand(3)  # the caller's own draw between forward and backward
    out.square().sum().backward()
    return [out.detach(), *grads_of(pipe)]


def with_dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4), nn.Identity())


def raise_dropout(model: nn.Sequential) -> None:
    model[1].p = 0.5


def add_noise_to_gradients(model: nn.Sequential) -> None:
    def noisy(module: nn.Module, args: Any, out: Tensor) -> None:
        out.register_hook(lambda grad: grad * torch.rand_like(grad))

    model[1].register_forward_hook(noisy)


def test_a_backward_that_begins_to_draw_later_is_an_error_once() -> None:
    torch.manual_seed(0)
    pipe = piped(with_dropout().double(), [2, 2], 3, "threads", checkpoint="never")
    for _ in range(2):
        through("forward", pipe, normal(6, 4))
    add_noise_to_gradients(pipe)  # type: ignore[arg-type]
    words = "a backward drew from a default generator.*which none did in earlier calls. Run forward and backward again"
    with pytest.raises(RuntimeError, match=words):
        pipe(normal(6, 4)).sum().backward()
    pipe(normal(6, 4)).sum().backward()


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad])
def test_forwards_alone_do_not_show_whether_a_backward_draws(context: Any) -> None:
    """A recomputation of torch's own seeds the host's generators anew, and stages do so at the same time."""
    model = nn.Sequential(*[OwnCheckpoint() for _ in range(3)]).double()
    pipe = piped(model, [1, 1, 1], 4, "threads", checkpoint="never")
    for _ in range(5):
        with context():
            pipe(normal(8, 4))
    pipe(normal(8, 4)).sum().backward()
    assert model[0].linear.weight.grad is not None


class OwnCheckpoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)


def tied_with_dropout() -> nn.Sequential:
    """Both linear layers share their weight: the second stage's is a copy."""
    model = with_dropout()
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("make", [with_dropout, tied_with_dropout])
@pytest.mark.parametrize(
    "change, entry", [(raise_dropout, "forward"), (raise_dropout, "step"), (add_noise_to_gradients, "step")]
)
def test_a_stage_that_begins_to_draw_later_draws_its_seeds_numbers(
    change: Callable[[nn.Sequential], None], entry: str, make: Callable[[], nn.Sequential], checkpoint: str
) -> None:
    inline, threads = (after_two_calls(make, change, workers, entry, checkpoint) for workers in WORKERS)
    assert all_equal(inline, threads)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_a_call_that_runs_once_more_is_traced_once_and_shows_layers_what_every_call_does(checkpoint: str) -> None:
    """A stage begins to draw: what ran before is undone, and the layers see leaves of the call as ever, not the real
    parameters."""
    model = with_dropout().double()
    seen: list[bool] = []
    weight = model[2].weight
    model[2].register_forward_pre_hook(lambda module, args: seen.append(module.weight is weight))
    pipe = piped(model, [1, 1, 2], 3, "threads", checkpoint=checkpoint)
    counts = []
    for number in range(3):
        if number == 2:
            raise_dropout(model)
        timeline = pipe.step(normal(6, 4), loss_fn=square, loss_reduction="sum", trace=True).timeline
        counts.append(len(timeline.events) - len(timeline.recomputed))
    assert counts == [2 * 3 * 3] * 3
    assert len(seen) > 9 and not any(seen)


def test_what_cannot_be_recomputed_though_nothing_drew_is_an_error_and_runs_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Identity()).double()
    armed: list[bool] = []
    runs: list[int] = []

    def write_weight(module: nn.Module, args: Any, out: Tensor) -> None:
        runs.append(1)
        if armed and not is_recomputing():
            with torch.no_grad():
                module.weight.mul_(1.0)

    model[0].register_forward_hook(write_weight)
    pipe = piped(model, [2, 2], 3, "threads", checkpoint="always")
    for _ in range(2):
        through("step", pipe, normal(6, 4))
    armed.append(True)
    runs.clear()
    with pytest.raises(CheckpointError, match="parameter '0.weight' .* was changed in place between the forward and"):
        through("step", pipe, normal(6, 4))
    assert 1 <= len(runs) <= 2 * 3  # each chunk at most once forward and once again


def test_a_loss_that_draws_after_one_that_does_not_draws_its_seeds_numbers() -> None:
    losses = []
    for workers in WORKERS:
        torch.manual_seed(0)
        pipe = piped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), [1, 1], 1, workers)
        for _ in range(2):
            through("step", pipe, normal(6, 4))
        torch.manual_seed(5)
        noisy = pipe.step(normal(6, 4), loss_fn=lambda out, _: (out * torch.rand_like(out)).sum())
        losses.append(noisy.loss)
    assert torch.equal(*losses)


def test_a_stage_that_draws_in_one_chunk_only_draws_its_seeds_numbers() -> None:
    """Known after the first call, since all chunks are looked at."""
    found = []
    x = torch.arange(4.0)[:, None].expand(4, 4)
    for workers in WORKERS:
        torch.manual_seed(0)
        sometimes = Apply(lambda x: nn.functional.dropout(x, 0.5) if x[0, 0] == 2 else x)
        model = nn.Sequential(sometimes, calling(lambda: time.sleep(0.001)), nn.Dropout(0.3), nn.Linear(4, 4))
        pipe = piped(model, [2, 2], 4, workers, checkpoint="always")
        for number in range(5):
            torch.manual_seed(number)
            out = pipe(x)
            out.sum().backward()
            found.append(out.detach())
    assert all_equal(found[:5], found[5:])


class HostNoise(nn.Module):
    """Draws from Python's generator after a while: the longer, the later the stage."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x * random.random()


def test_what_two_stages_draw_from_pythons_generator_is_what_one_thread_draws() -> None:
    found = []
    for workers in WORKERS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), HostNoise(0.0), nn.Linear(4, 4), HostNoise(0.01))
        pipe = piped(model, [2, 2], 4, workers)
        for _ in range(3):
            torch.manual_seed(3)
            out = pipe(torch.ones(8, 4)).detach()
        found.append(out)
    assert torch.equal(*found)


class Meeting:
    """Two threads meet: each waits for the other's word, but not for ever (in one thread nobody answers)."""

    def __init__(self) -> None:
        self.words = [threading.Event() for _ in range(4)]
        self.is_on = False

    def say(self, word: int) -> None:
        self.words[word].set()

    def hear(self, word: int) -> None:
        self.words[word].wait(0.3)


def test_a_recomputation_under_other_switches_disturbs_no_other_thread() -> None:
    """Stage 1 begins to recompute chunk 2, stage 0 begins with chunk 1, stage 1 ends. What does stage 0 see now?"""
    meeting, seen = Meeting(), []

    def last_recomputes() -> None:
        if meeting.is_on and is_recomputing():
            meeting.say(0)
            meeting.hear(1)

    def last_has_recomputed() -> None:
        if meeting.words[0].is_set():
            meeting.say(2)

    def first_recomputes() -> None:
        if meeting.is_on and is_recomputing():
            meeting.say(1)
            meeting.hear(2)
            seen.append(torch.get_default_dtype())

    def first_goes_backward() -> None:
        if meeting.is_on:
            meeting.hear(0)

    first, last = calling(first_recomputes, first_goes_backward), calling(last_recomputes, last_has_recomputed)
    model = nn.Sequential(nn.Linear(4, 4), first, nn.Linear(4, 4), last).double()
    pipe = piped(model, [2, 2], 3, checkpoint=lambda stage, chunk: (stage, chunk) in ((0, 1), (1, 2)))
    x = normal(6, 4)
    for _ in range(2):
        through("forward", pipe, x)
    with default_dtype(F64):
        out = pipe(x)
    meeting.is_on = True
    try:
        in_time(lambda: out.sum().backward())
        assert seen == [F64] and torch.get_default_dtype() is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_thread_that_ends_leaves_the_switches_of_the_process_to_the_layers_that_still_compute() -> None:
    """Stage 1 changes one for a moment, in which the thread of stage 0 comes to its end."""
    seen: list[torch.dtype] = []
    is_on = []

    def compute() -> None:
        if is_on:
            with default_dtype(F64):
                for thread in threading.enumerate():
                    if thread.name.startswith("pipe group"):
                        thread.join(1.0)  # with the last chunk
                seen.append(torch.get_default_dtype())

    pipe = learnt(piped(nn.Sequential(nn.Linear(4, 4), calling(compute)), [1, 1], 1), 4)
    is_on.append(True)
    with torch.no_grad():
        in_time(lambda: pipe(torch.ones(2, 4)))
    assert seen == [F64, F64] and torch.get_default_dtype() is torch.float32


def test_hooks_of_a_leaf_that_two_stages_captured_act_once() -> None:
    """Stage 1 puts the hooks to sleep, stage 0 finds none, stage 1 puts them back, stage 0 gets its gradient."""
    meeting, seen, counts = Meeting(), [], [0]
    leaf = normal(4, 4, seed=3).requires_grad_()
    leaf.register_hook(lambda grad: seen.append(grad.clone()))

    def first_recomputes() -> None:
        if meeting.is_on and is_recomputing():
            meeting.hear(1)

    def first_begins() -> None:
        if meeting.is_on and not meeting.words[0].is_set():
            meeting.say(0)
            time.sleep(0.05)

    def last_begins() -> None:
        counts[0] += meeting.is_on
        if meeting.is_on and counts[0] == 2:
            meeting.say(1)
            meeting.hear(0)

    first, last = calling(first_recomputes, first_begins), calling(lambda: None, last_begins)
    model = nn.Sequential(
        nn.Linear(4, 4), Apply(lambda x: x @ leaf), first, nn.Linear(4, 4), Apply(lambda x: x @ leaf), last
    ).double()
    pipe = piped(model, [3, 3], 2, checkpoint=lambda stage, chunk: stage == 0)
    for _ in range(2):
        through("forward", pipe, normal(6, 4))
    seen.clear()
    out = pipe(normal(6, 4))
    meeting.is_on = True
    in_time(lambda: out.sum().backward())
    assert len(seen) == 1


class Reused(nn.Module):
    """Uses its weight twice: under autocast once as it is cast, and once more."""

    def __init__(self, between: Callable[[], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.between()
        return self.linear(y)


def test_autocast_casts_a_weight_once_in_a_forward_whatever_other_threads_do() -> None:
    """The thread of stage 0 ends while stage 1 is between two uses of its weight."""
    found = {}
    for workers in WORKERS:
        meeting, ran = Meeting(), [0]

        def first(meeting: Meeting = meeting, ran: list[int] = ran) -> None:
            ran[0] += meeting.is_on
            if ran[0] == 2:
                meeting.hear(0)

        def second(meeting: Meeting = meeting) -> None:
            if meeting.is_on and not meeting.words[0].is_set():
                meeting.say(0)
                for _ in range(100):
                    if all(thread.name != "pipe group 0" for thread in threading.enumerate()):
                        break
                    time.sleep(0.003)

        torch.manual_seed(0)
        pipe = piped(nn.Sequential(Reused(first), Reused(second)), [1, 1], 2, workers, checkpoint="never")
        for number in range(3):
            meeting.is_on = number == 2 and workers == "threads"
            pipe.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = pipe(torch.linspace(-1, 1, 512).view(8, 64)).float().square().sum()
            loss.backward()
        found[workers] = grads_of(pipe)
    assert all_equal(found["inline"], found["threads"])


# ------------------------------------------------------------------------------------------------------- Pipe in a Pipe


@pytest.mark.parametrize("outer", WORKERS)
@pytest.mark.parametrize("inner", WORKERS)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_pipe_in_a_pipe_in_threads_gives_the_bits_of_one_thread(checkpoint: str, inner: str, outer: str) -> None:
    def run(inner: str, outer: str) -> list[Tensor | None]:
        torch.manual_seed(0)
        pipes = [
            piped(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 4)).double(), [1, 2], 2, inner)
            for _ in range(2)
        ]
        model = nn.Sequential(nn.Linear(4, 4).double(), pipes[0], nn.Dropout(0.2), pipes[1])
        pipe = piped(model, [2, 2], 3, outer, checkpoint=checkpoint)
        x = normal(12, 4).requires_grad_()
        found: list[Tensor | None] = []
        for number in range(3):
            pipe.zero_grad()
            torch.manual_seed(number)
            through("forward", pipe, x)
            through("step", pipe, x)
            found += [x.grad.clone(), *grads_of(pipe), torch.get_rng_state()]
        return found

    assert all_equal(in_time(lambda: run(inner, outer)), run("inline", "inline"))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_pipe_that_is_called_in_the_backward_of_another_computes_its_numbers(workers: str) -> None:
    torch.manual_seed(0)
    inner = piped(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), [1, 2], 2)
    x = normal(6, 4)
    found: list[list[Tensor]] = []

    def call_inner() -> None:
        with torch.enable_grad():
            found.append(list(torch.autograd.grad(sum_loss(inner(x)), list(inner.parameters()))))

    call_inner()
    layers = (nn.Sequential(nn.Linear(4, 4), calling(lambda: None, call_inner)) for _ in range(2))
    pipe = piped(nn.Sequential(*layers).double(), [1, 1], 3, workers)
    for _ in range(3):
        in_time(lambda: through("forward", pipe, x))
        in_time(lambda: through("step", pipe, x))
    assert len(found) >= 1 + 3 * 2 * 6 and all(all_equal(each, found[0]) for each in found)
