"""Law 1 with skip connections: a Pipe gives the plain module's outputs, losses, gradients to second order and buffers.

The models are skip_models.py, the reference is law_reference.py. Then: what fails, fails cleanly; a skip is held only
where it must be; memory that a skip shares with what a stage writes is an error.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
from by_chunks import same
from cover import examples, pairwise, some
from hypothesis import given, settings
from hypothesis import strategies as st
from law_check import (
    AXES,
    CHECKPOINTS,
    DRIVES,
    SEED,
    apart,
    balance_of,
    differences,
    expect,
    observe,
    observed,
    ready,
)
from law_models import Apply, Case, normal, sum_loss
from law_reference import call_seed, forward_only
from pipeline_probes import no_collector, outside
from second_order_reference import MODES, Plain, assert_close, balance, derivatives, targets_of
from skip_models import MANY_READERS, SKIPS, Commands, Pop, Stash
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from pipeline import Pipe, is_recomputing
from pipeline.skip import pop, skippable

ENTRIES = ("forward", "step")
SKIP_AXES = {**AXES, "model": tuple(SKIPS), "rows": (1, 2, 5, 7, 8)}


def _name(config: Mapping[str, Any]) -> str:
    return ", ".join(str(value) for value in config.values())


def piped(model: nn.Sequential, config: Mapping[str, Any]) -> Pipe:
    sizes = balance_of(config["balance"], len(model))
    return Pipe(
        model, sizes, config["chunks"], checkpoint=CHECKPOINTS[config["checkpoint"]], schedule=config["schedule"],
        mixes_rows=not SKIPS[config["model"]]().rowwise, **DRIVES[config["drive"]](len(sizes)),
    )


def check(config: Mapping[str, Any]) -> None:
    ours, theirs = observe(config, SKIPS), expect(config, SKIPS)
    if config["model"] not in MANY_READERS:
        assert not differences(ours, theirs)
        return
    mine, spec = pytree.tree_flatten(vars(ours))
    other, other_spec = pytree.tree_flatten(vars(theirs))
    assert spec == other_spec
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------------------------------------------ first order


@pytest.mark.parametrize("config", pairwise(SKIP_AXES), ids=_name)
def test_skips_equal_the_plain_module_bit_for_bit_for_every_pair_of_settings(config: dict[str, Any]) -> None:
    check(config)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Any value on each axis, any balance, any small number of chunks and rows."""
    config = {name: draw(st.sampled_from(values)) for name, values in SKIP_AXES.items()}
    layers = len(SKIPS[config["model"]]().model)
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1))))
    config["balance"] = [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    config["chunks"] = draw(st.integers(1, 9))
    config["rows"] = draw(st.integers(1, 9))
    return config


@settings(max_examples=examples(80))
@given(configs())
def test_skips_equal_the_plain_module_bit_for_bit_at_any_balance(config: dict[str, Any]) -> None:
    check(config)


@pytest.mark.soak
@pytest.mark.parametrize("model", SKIPS)
def test_skips_equal_the_plain_module_bit_for_bit_in_the_full_product(model: str) -> None:
    names = [name for name in SKIP_AXES if name not in ("model", "drive")]
    for values in product(*(SKIP_AXES[name] for name in names)):
        check({"model": model, "drive": "inline", **dict(zip(names, values, strict=True))})


@pytest.mark.parametrize("model", SKIPS)
def test_calls_after_the_first_are_as_exact(model: str) -> None:
    """The first call computes chunk 0 on copies; later ones know what is only read."""
    config = {"model": model, "balance": "each alone", "chunks": 3, "rows": 7, "checkpoint": "always", "train": False}
    config |= {"entry": "forward", "schedule": "1f1b", "drive": "inline", "input_grad": True}
    case = SKIPS[model]()
    pipe = piped(case.model.eval(), config)
    for _ in range(3):
        case.model.zero_grad()
        x = ready(case, False, True, 7)
        torch.manual_seed(SEED)
        outputs = pipe(x)
        loss = case.loss(outputs)
        loss.backward()
    ours, theirs = observed(case, x, outputs, loss), expect(config, SKIPS)
    assert model in MANY_READERS or not differences(ours, theirs)


@pytest.mark.parametrize("model", SKIPS)
@pytest.mark.parametrize("kind", ["halves", "each alone"])
def test_without_gradients_outputs_equal_the_plain_modules(model: str, kind: str) -> None:
    for entry, (chunks, rows) in some(product(("no_grad", "inference", "evaluate"), ((1, 5), (3, 4)))):
        ours, plain = SKIPS[model](), SKIPS[model]()
        x = ours.make_input(rows)
        pipe = Pipe(ours.model, balance_of(kind, len(ours.model)), chunks, mixes_rows=not ours.rowwise)
        plain.model.train(entry != "evaluate")
        with torch.inference_mode(entry == "inference"), torch.no_grad():
            want = forward_only(plain.model, x, chunks, call_seed(SEED))
            if entry == "evaluate":
                step = pipe.evaluate(x, loss_fn=_sum, loss_reduction="sum")
                found = step.outputs
            else:
                found = pipe(x)
        assert same(found, want) and not found.requires_grad
        assert all(same(one, two) for one, two in zip(ours.model.buffers(), plain.model.buffers(), strict=True))


# ----------------------------------------------------------------------------------------------------- second order


def twins(name: str, stages: int, chunks: int, mode: str, train: bool) -> list[tuple[Case, nn.Module]]:
    ours, plain = SKIPS[name](), SKIPS[name]()
    cuts = balance(len(ours.model), stages)
    pipe = Pipe(ours.model, cuts, chunks, checkpoint=MODES[mode], mixes_rows=not ours.rowwise)
    return [(ours, pipe.train(train)), (plain, Plain(plain.model, chunks).train(train))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SKIPS)
def test_second_derivatives_equal_the_plain_modules(name: str, mode: str) -> None:
    for stages, chunks, rows, train in ((99, 2, 3, True), (3, 3, 3, False))[: 1 + (mode == "always")]:
        found, wanted = (derivatives(case, net, rows, 2) for case, net in twins(name, stages, chunks, mode, train))
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("mode", ["always", "except_last", "callable"])
def test_a_stashed_buffer_is_what_its_chunk_saw(mode: str) -> None:
    """A layer stashes the running mean of its batch norm, in train mode: each chunk has its own."""
    ours, plain = SKIPS["stashed_buffer"](), SKIPS["stashed_buffer"]()
    pipe = Pipe(ours.model, [2, 1, 2], 3, checkpoint=MODES[mode])
    found, wanted = (derivatives(*each, 7, 2) for each in ((ours, pipe), (plain, Plain(plain.model, 3))))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)
    x = ours.make_input(7)
    loss = ours.loss(pipe(x))
    once, twice = (torch.autograd.grad(loss, list(pipe.parameters()), retain_graph=more) for more in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(once, twice, strict=True))


def test_third_derivatives_equal_the_plain_modules() -> None:
    for name in ("relay", "namespaces", "containers"):
        found, wanted = (derivatives(case, net, 4, 3) for case, net in twins(name, 99, 2, "always", True))
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("mode", MODES)
def test_numeric_second_derivatives_agree(mode: str) -> None:
    ours, net = twins("relay", 99, 2, mode, False)[0]
    x = ours.make_input(2).requires_grad_()
    assert torch.autograd.gradcheck(net, (x,))
    assert torch.autograd.gradgradcheck(net, (x,))


@pytest.mark.parametrize("mode", MODES)
def test_hessian_vector_products_equal_the_plain_modules(mode: str) -> None:
    products = []
    for case, net in twins("unet", 5, 2, mode, False):
        x = case.make_input(3)
        params = list(net.parameters())
        grads = torch.autograd.grad(case.loss(net(x)), params, create_graph=True)
        vector = [normal(*param.shape, seed=index) for index, param in enumerate(params)]
        products.append(torch.autograd.grad(grads, params, vector))
    assert_close(*products)


def test_first_and_second_backward_of_one_forward_agree() -> None:
    """retain_graph: skips are there for each backward, kept or recomputed."""
    for mode in MODES:
        (ours, net), _ = twins("namespaces", 99, 3, mode, True)
        x = ours.make_input(7)
        loss = ours.loss(net(x))
        targets = targets_of(ours, x)[1:]
        first, second = (torch.autograd.grad(loss, targets, retain_graph=more) for more in (True, False))
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


# ---------------------------------------------------------------------------------------------------------- failure


class Trouble(Exception):
    """Of the user."""


class Burst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.fuse.burn("backward")
        return grad, None


class Fuse:
    """Raises at the n-th forward, recomputation or backward once it is set."""

    def __init__(self) -> None:
        self.where, self.count = "", 0

    def burn(self, where: str) -> None:
        self.count -= where == self.where
        if where == self.where and not self.count:
            self.where = ""
            raise Trouble(where)


@skippable(pop=["a"])
class Fused(nn.Module):
    """Adds the skip; fails when it has been popped."""

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self.fuse = outside(fuse)

    def forward(self, x: Tensor) -> Commands:
        a = yield pop("a")
        self.fuse().burn("recomputation" if is_recomputing() else "forward")
        return Burst.apply(x + a, self.fuse())


@pytest.mark.parametrize(
    "where, count, note",
    [
        ("forward", 2, "stage 2 (layers 3..4), chunk 1, 2F1"),
        ("recomputation", 1, "stage 2 (layers 3..4), chunk 0, 2B0"),
        ("recomputation", 3, "stage 2 (layers 3..4), chunk 2, 2B2"),
        ("backward", 2, "stage 2 (layers 3..4), chunk 1, 2B1"),
    ],
)
@pytest.mark.parametrize("drive", ["inline", "apart, threads"])
@pytest.mark.parametrize("schedule", AXES["schedule"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_layer_that_fails_when_it_pops_is_named_and_leaves_nothing_behind(
    where: str, count: int, note: str, drive: str, schedule: str, entry: str
) -> None:
    fuse, life = Fuse(), []

    def skip(x: Tensor) -> Tensor:
        made = x.sin()
        life.append(StorageWeakRef(made.untyped_storage()))
        return made

    model = nn.Sequential(nn.Linear(4, 4), Stash(skip), nn.Linear(4, 4), Fused(fuse), nn.Linear(4, 2)).double()
    again = copy.deepcopy(model)
    checkpoint = "always" if where == "recomputation" else "never"
    make = {"schedule": schedule, "checkpoint": checkpoint, **DRIVES[drive](3)}
    pipe, other = Pipe(model, [2, 1, 2], 3, **make), Pipe(again, [2, 1, 2], 3, **make)
    x = normal(7, 4)

    def run(net: Pipe) -> None:
        if entry == "forward":
            net(x).square().sum().backward()
        else:
            net.step(x, loss_fn=lambda out, _: out.square().sum(), loss_reduction="sum")

    fuse.where, fuse.count = where, count
    notes: list[str] = []
    with no_collector():
        try:
            run(pipe)
        except Trouble as error:
            notes = error.__notes__
            error.with_traceback(None)
        assert notes == (["layer 3 (Fused)"] if where != "backward" else []) + [note] and fuse.where == ""
        assert all(param.grad is None for param in model.parameters())
        assert all(each.expired() for each in life)
    run(pipe)
    run(other)
    assert all(same(one.grad, two.grad) for one, two in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("drive", DRIVES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_call_that_failed_dies_without_the_collector(drive: str, entry: str) -> None:
    fuse = Fuse()
    fuse.where, fuse.count = "forward", 2
    pipe = Pipe(nn.Sequential(Stash(), nn.Linear(4, 4), Fused(fuse)).double(), [1, 1, 1], 3, **DRIVES[drive](3))
    x = normal(7, 4)
    life = StorageWeakRef(x.untyped_storage())
    with no_collector():
        try:
            pipe(x) if entry == "forward" else pipe.step(x, loss_fn=lambda out, _: out.sum(), loss_reduction="sum")
        except Trouble as error:
            error.with_traceback(None)
            error.__context__ = None
        del x
        assert life.expired()


# ----------------------------------------------------------------------------------------------------------- memory


class Life:
    """Who is alive, seen from within the layers: chunk -> the memory of its skip; and what has run."""

    def __init__(self) -> None:
        self.skips: dict[int, StorageWeakRef] = {}
        self.ran: list[tuple[str, str, int]] = []  # (F or B, layer, chunk)
        self.seen: list[tuple[set[int], set[int]]] = []  # (alive, those that a law allows)
        self.until = ""

    def stashed(self, x: Tensor) -> Tensor:
        made = x * 2  # saves nothing for its backward
        if not is_recomputing():
            self.skips[_chunk(x)] = StorageWeakRef(made.untyped_storage())
        return made

    def note(self, kind: str, layer: str, chunk: int) -> None:
        """Something begins to run: what is alive now, and what must be?"""
        alive = {number for number, storage in self.skips.items() if not storage.expired()}
        due = {number for number in self.skips if (self.until, "pop", number) not in self.ran}
        self.seen.append((alive, due))
        self.ran.append((kind, layer, chunk))


class Noted(nn.Module):
    """Identity that notes when it runs. A skippable layer notes its F when it is left."""

    def __init__(self, life: Life, layer: str) -> None:
        super().__init__()
        self.life, self.layer = outside(life), layer

    def forward(self, x: Tensor) -> Tensor:
        if not is_recomputing():
            self.life().note("F", self.layer, _chunk(x))
        return NotedBackward.apply(x, self.life(), self.layer)


class NotedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, life: Life, layer: str) -> Tensor:
        ctx.life, ctx.layer, ctx.chunk = life, layer, _chunk(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.life.note("B", ctx.layer, ctx.chunk)
        return grad, None, None


def _chunk(x: Tensor) -> int:
    return int(x.detach()[0, 0])


def _keep_label(x: Tensor, a: Tensor) -> Tensor:
    return x + a * 0.0 + 0.0


def watched(life: Life, between: int) -> nn.Sequential:
    """stash | between | ... | pop, note | note: the first column of all is the number of the chunk."""
    front = nn.Sequential(Noted(life, "stash"), Stash(life.stashed, on=lambda x: x + 0.0))
    middle = [Noted(life, "between") for _ in range(between)]
    return nn.Sequential(front, *middle, nn.Sequential(Pop(_keep_label), Noted(life, "pop")), Noted(life, "last"))


def numbered(chunks: int) -> Tensor:
    return torch.arange(chunks, dtype=torch.float64)[:, None].repeat(1, 2)


def run_watched(life: Life, pipe: Pipe, chunks: int, entry: str) -> None:
    x = numbered(chunks).requires_grad_(entry != "no_grad")
    if entry == "no_grad":
        with torch.no_grad():
            pipe(x)
    elif entry == "evaluate":
        pipe.evaluate(x, loss_fn=lambda out, _: out.sum(), loss_reduction="sum")
    elif entry == "forward":
        pipe(x).sum().backward()
    else:
        pipe.step(x, loss_fn=lambda out, _: out.sum(), loss_reduction="sum")


@pytest.mark.inline
@pytest.mark.parametrize("schedule", AXES["schedule"])
@pytest.mark.parametrize("entry", ["no_grad", "evaluate", "forward", "step"])
@pytest.mark.parametrize("policy", ["always", "never"])
def test_a_skip_is_held_from_its_stash_to_its_pop_and_no_longer(policy: str, entry: str, schedule: str) -> None:
    """Seen at each forward and backward: to the F of the stage that pops it, whose graph does not need it; where that
    is recomputed to its B. It is dead while the backwards of the stages between, and its own stash's, are to come."""
    for between, chunks in product((0, 1, 3), (1, 2, 4)):
        life = Life()
        life.until = "B" if policy == "always" and entry in ENTRIES else "F"
        model = watched(life, between)
        pipe = Pipe(model, [1] * len(model), chunks, schedule=schedule, checkpoint=policy)
        with no_collector():
            for _ in range(3):  # in the third call no stage computes on copies of its input
                life.skips, life.ran, life.seen = {}, [], []
                run_watched(life, pipe, chunks, entry)
            assert len(life.skips) == chunks and all(storage.expired() for storage in life.skips.values())
        kinds = {kind for kind, _, _ in life.ran}
        assert kinds == ({"F", "B"} if entry in ENTRIES else {"F"})
        _check_seen(life)


def _check_seen(life: Life) -> None:
    """While the layer that pops itself runs, its own chunk's skip may be alive still."""
    for (alive, due), (_, layer, chunk) in zip(life.seen, life.ran, strict=True):
        assert alive - {chunk} == due - {chunk} if layer == "pop" else alive == due


def _sum(output: Any, target: Any) -> Tensor:
    return sum_loss(output)


@pytest.mark.parametrize("policy", ["always", "except_last", "never"])
@pytest.mark.parametrize("entry", ["no_grad", "evaluate", "forward", "step", "dropped", "create_graph"])
@pytest.mark.parametrize("name", ["residual", "containers", "namespaces", "only_by_the_skip", "unet"])
def test_nothing_of_a_skip_is_alive_after_a_call(name: str, entry: str, policy: str) -> None:
    """With the garbage collector off: not even a cycle."""
    case = SKIPS[name]()
    pipe = Pipe(case.model, balance_of("each alone", len(case.model)), 2, checkpoint=policy)
    life: list[Any] = []

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        for leaf in pytree.tree_leaves((args, out)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                life.append(weakref.ref(leaf))

    def noting(skip: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(x: Any) -> Any:
            made = skip(x)
            life.extend(weakref.ref(leaf) for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor))
            return made

        return noted

    for layer in case.model.modules():
        if isinstance(layer, Stash.module_cls):
            layer.skip = noting(layer.skip)
    for layer in case.model:
        layer.register_forward_hook(hook)
    x = case.make_input(5)
    with no_collector():
        if entry in ("no_grad", "evaluate"):
            with torch.no_grad():
                pipe(x) if entry == "no_grad" else pipe.evaluate(x, loss_fn=_sum, loss_reduction="sum")
        elif entry == "step":
            pipe.step(x, loss_fn=_sum, loss_reduction="sum")
        else:
            loss = case.loss(pipe(x))
            if entry == "forward":
                loss.backward()
            elif entry == "create_graph":
                torch.autograd.grad(loss, list(pipe.parameters()), create_graph=True, allow_unused=True)
            del loss
        del x
        assert len(life) > 10 and not any(each() is not None for each in life)


@pytest.mark.parametrize("drive", ["apart", "apart, threads"])
def test_between_places_the_stage_that_stashed_gives_its_memory_back(drive: str) -> None:
    """Where the stage that pops is on another device, its copy is all that is held."""
    life = Life()
    life.until = "F"
    alive: list[bool] = []
    model = watched(life, 2)
    model[2].register_forward_pre_hook(lambda module, args: alive.append(not life.skips[0].expired()))
    with torch.no_grad():
        Pipe(model, [1] * 5, 1, **DRIVES[drive](5))(numbered(1))
    assert alive == [False]


# --------------------------------------------------------------------------------------------------- shared memory


class Writes(nn.Module):
    """x *= 2 in place, where told to."""

    def __init__(self, when: Callable[[nn.Module, Tensor], bool] = lambda module, x: True) -> None:
        super().__init__()
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if self.when(self, x) else x * 2


SHARED: dict[str, Callable[[], list[nn.Module]]] = {
    "itself": lambda: [Stash(), Writes(), _narrow()],
    "a view": lambda: [Stash(lambda x: x[:, :2]), Writes(), _narrow()],
    "a reshape": lambda: [Stash(lambda x: x.reshape(-1).view(x.shape)), Writes(), _narrow()],
    "one of a tuple": lambda: [Stash(lambda x: (x + 1, [x])), Writes(), Pop(lambda x, a: x + 10 * a[1][0])],
    "in eval mode": lambda: [Stash(), Writes(lambda module, x: not module.training), _narrow()],
    "in the second chunk": lambda: [Stash(), Writes(lambda module, x: bool(x[0, 0] > 1.5)), _narrow()],
    "in the first chunk": lambda: [Stash(), Writes(lambda module, x: bool(x[0, 0] < 1.5)), _narrow()],
    "behind an identity": lambda: [Stash(), nn.Identity(), Writes(), _narrow()],
    "behind two": lambda: [Stash(lambda x: x[:, :2]), nn.Identity(), nn.Flatten(), Writes(), _narrow()],
    "far from the pop": lambda: [Stash(), Writes(), nn.Identity(), nn.Tanh(), _narrow()],
    "by who pops": lambda: [Stash(), nn.Identity(), Pop(lambda x, a: x[:, : a.shape[1]] + 10 * a.mul_(2))],
    "from the caller": lambda: [Stash(), nn.Identity(), Writes(), nn.Identity(), _narrow()],
    "no skip: a tuple": lambda: [Apply(lambda x: (x, x[:, :2])), nn.Identity(), Apply(_write_first)],
}


def _narrow() -> nn.Module:
    return Pop(lambda x, a: x[:, : a.shape[1]] + 10 * a)


def _write_first(pair: tuple[Tensor, Tensor]) -> Tensor:
    one, other = pair
    return one.mul_(2)[:, :2] + 10 * other


def outcome(kind: str, chunks: int, drive: str, entry: str, stages: str, policy: str) -> str:
    """What becomes of it: "error", "equal" to the plain module, or "wrong"."""
    first = [] if kind == "from the caller" else [nn.Identity(), nn.Hardtanh(-99.0, 99.0)]
    plain = nn.Sequential(*first, *SHARED[kind]())
    plain.train(kind != "in eval mode")
    rows = torch.arange(1, chunks + 1, dtype=torch.float64)[:, None].repeat(1, 3)
    x = rows.requires_grad_() if first and entry == "grad" else rows
    want = torch.cat([plain(piece.clone()) for piece in x.split(1)])
    sizes = balance_of(stages, len(plain))
    pipe = Pipe(plain, sizes, chunks, checkpoint=policy, mixes_rows=True, **DRIVES[drive](len(sizes)))
    try:
        with torch.set_grad_enabled(entry != "no_grad"):
            found = pipe(x)
    except RuntimeError as error:
        assert "in place" in str(error) and ("share" in str(error) or "did not do before" in str(error))
        return "error"
    return "equal" if torch.equal(found, want) else "wrong"


@pytest.mark.parametrize(
    "kind, chunks, drive", list(product(SHARED, (1, 2, 3), ("inline", "apart")))
)
def test_a_write_into_memory_that_a_skip_shares_is_an_error_and_never_another_number(
    kind: str, chunks: int, drive: str
) -> None:
    for entry, policy in product(("grad", "no_grad"), ("always", "never")):
        alone = outcome(kind, chunks, drive, entry, "each alone", policy)
        assert alone == ("equal" if (kind, chunks) == ("in the second chunk", 1) else "error")
        assert outcome(kind, chunks, drive, entry, "whole", policy) == "equal"
        assert outcome(kind, chunks, drive, entry, "halves", policy) in ("error", "equal")


def test_the_error_names_the_stage_that_writes_and_says_what_to_do() -> None:
    model = nn.Sequential(Stash(), nn.ReLU(inplace=True), Pop())
    words = "stage 1 .* writes its input in place.*a skip.*shares memory.*stash a clone"
    with pytest.raises(RuntimeError, match=words):
        Pipe(model, [1, 1, 1], 2)(torch.rand(4, 2))
    plain = nn.Sequential(Stash(lambda x: x.clone()), nn.ReLU(inplace=True), Pop())
    x = normal(4, 2)
    assert torch.equal(Pipe(plain, [1, 1, 1], 2, devices=apart(3))(x), plain(x.clone()))
    assert torch.equal(Pipe(model, [2, 1], 2)(x), model(x.clone()))
