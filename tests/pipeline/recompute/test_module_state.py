"""What modules hold beside buffers, and what a forward does to it: right in every mode, or refused in words."""

from __future__ import annotations

import copy
import random
from collections import UserDict, deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline import CheckpointError, EagerUpdate, Pipe, checkpoint_blocks, is_recomputing

DOUBLE = torch.float64
POLICIES = ("never", "except_last", "always")
ENTRIES = ("forward", "step", "eager", "create_graph")


def linear() -> nn.Linear:
    return nn.Linear(3, 3, dtype=DOUBLE)


def rows(count: int = 6) -> Tensor:
    return torch.linspace(-1, 1, 3 * count, dtype=DOUBLE).reshape(count, 3)


def loss_of(out: Tensor, target: object = None) -> Tensor:
    return out.square().mean()


def run(pipe: Pipe, x: Tensor, entry: str) -> None:
    """One pass through an entry point. The gradients are in `.grad`, or with "eager" in the parameters."""
    if entry == "step":
        pipe.step(x, loss_fn=loss_of)
    elif entry == "eager":
        pipe.step(x, loss_fn=loss_of, optimizer=EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=0.1)))
    elif entry == "create_graph":
        loss = loss_of(pipe(x))
        for param, grad in zip(pipe.parameters(), torch.autograd.grad(loss, [*pipe.parameters()], create_graph=True)):
            param.grad = grad.detach()
    else:
        loss_of(pipe(x)).backward()


# ----------------------------------------------------------------------------------------- parameters within a forward


class Within(nn.Module):
    """Does something to the parameters of a layer of its own in each forward, beginning with `start`."""

    def __init__(self, does: Callable[[nn.Linear], Any], start: int) -> None:
        super().__init__()
        self.linear = linear()
        self.does = does
        self.left = start

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            self.does(self.linear)
        return functional.linear(x, self.linear.weight, getattr(self.linear, "bias", None))


def replaces(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def deletes(layer: nn.Linear) -> None:
    del layer.bias


def sets_to_none(layer: nn.Linear) -> None:
    layer.bias = None


@pytest.mark.parametrize("does, words", [
    (replaces, r"'1.linear.weight' was replaced"), (deletes, r"'1.linear.bias' was deleted"),
    (sets_to_none, r"'1.linear.bias' was replaced"),
])  # fmt: skip
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("start", [0, 1, 13])
def test_a_forward_that_takes_a_parameter_out_of_its_module_is_refused_and_leaves_what_was_there(
    does: Callable[[nn.Linear], None], words: str, entry: str, start: int
) -> None:
    pipe = Pipe(nn.Sequential(linear(), Within(does, start)), [1, 1], 3, checkpoint="never")
    params = dict(pipe.named_parameters())
    first = rf"parameter {words} by a forward of stage 1 \(layer 1\)|when other chunks have run before it"
    with pytest.raises(RuntimeError, match=first):
        for _ in range(5):
            run(pipe, rows(), entry)
    assert all(pipe.get_parameter(name) is param for name, param in params.items())


def test_a_parameter_that_the_first_forward_makes_is_the_modules_as_ever() -> None:
    class Lazily(nn.Module):
        def __init__(self, *others: str) -> None:
            super().__init__()
            for name in others:
                self.register_parameter(name, nn.Parameter(torch.ones(3, dtype=DOUBLE)))

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(torch.full((3,), 2.0, dtype=DOUBLE))
            return x * self.scale

    for others in ((), ("shift",)):
        plain = nn.Sequential(linear(), Lazily(*others))
        ours = nn.Sequential(linear(), Lazily(*others))
        ours.load_state_dict(plain.state_dict())
        pipe = Pipe(ours, [1, 1], 3, checkpoint="never")
        for _ in range(3):
            loss_of(plain(rows())).backward()
            run(pipe, rows(), "step")
        scale, expected = pipe.get_parameter("1.scale").grad, plain.get_parameter("1.scale").grad
        assert scale is not None and expected is not None and torch.allclose(scale, expected, rtol=1e-14)


# ------------------------------------------------------------------------------------------------ state that grows


class Reverses(torch.autograd.Function):
    """The values as they are; their gradient times a factor: what a wrong factor does, no value shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * grad, None


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class SlottedToo(Slotted):
    """With a dict beside the slots."""


class Both(dict[str, Any]):
    """A configuration whose entries are attributes, too, and whose values are what a class makes of them."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        super().__setitem__(name, value)

    def __getitem__(self, name: str) -> Any:
        return [super().__getitem__(name)]

    def copy(self) -> Any:
        return Both({name: self[name] for name in self})

    __setitem__ = __setattr__

    def __str__(self) -> str:
        return f"{vars(self)} {[*self.items()]}"


class Counting(nn.Module):
    """Multiplies the gradient by the number of its forwards, which it keeps in `state`."""

    def __init__(self, state: Any, count: Callable[[Any], float]) -> None:
        super().__init__()
        self.state = state
        self.count = count
        self.begins = 0  # with the calls that come after so many forwards
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return Reverses.apply(x, self.count(self) if self.forwards > self.begins else 1.0)


def increased(read: Callable[[Any], float], write: Callable[[Any, float], Any]) -> Callable[[Any], float]:
    def count(layer: Any) -> float:
        write(layer, read(layer) + 1)
        return read(layer)

    return count


def of_calls(call: Callable[[Any], Any], read: Callable[[Any], float]) -> Callable[[Any], float]:
    def count(layer: Any) -> float:
        call(layer)
        return read(layer)

    return count


def add_one(holder: Any, name: Any) -> None:
    if isinstance(holder, (dict, list)):
        holder[name] += 1
    else:
        setattr(holder, name, getattr(holder, name) + 1)


def numbered() -> nn.Identity:
    layer = nn.Identity()
    layer.n = 0
    return layer


STATES: dict[str, Callable[[], Counting]] = {
    "number": lambda: Counting(0, of_calls(lambda me: add_one(me, "state"), lambda me: me.state)),
    "dict": lambda: Counting({"n": 0}, of_calls(lambda me: add_one(me.state, "n"), lambda me: me.state["n"])),
    "dict with attributes": lambda: Counting(Both(), of_calls(
        lambda me: setattr(me.state, "n", getattr(me.state, "n", 0) + 1),
        lambda me: 2 * me.state.n - dict.get(me.state, "n"))),
    "dict that grows": lambda: Counting({}, of_calls(
        lambda me: me.state.update({len(me.state): None}), lambda me: len(me.state))),
    "long list that nobody reads": lambda: Counting([0] * 2000, of_calls(lambda me: me.state.append(1), lambda me: 2)),
    "long dict that nobody reads": lambda: Counting(dict.fromkeys(range(2000)), of_calls(
        lambda me: me.state.update({len(me.state): None}), lambda me: 2)),
    "list": lambda: Counting([], of_calls(lambda me: me.state.append(1), lambda me: len(me.state))),
    "list of lists": lambda: Counting([[0]], of_calls(lambda me: add_one(me.state[0], 0), lambda me: me.state[0][0])),
    "tuple of dicts": lambda: Counting(({"n": [0]},), of_calls(
        lambda me: add_one(me.state[0]["n"], 0), lambda me: me.state[0]["n"][0])),
    "set": lambda: Counting(set(), of_calls(lambda me: me.state.add(len(me.state)), lambda me: len(me.state))),
    "deque": lambda: Counting(deque([1, 2, 3, 4], 4), of_calls(
        lambda me: me.state.append(me.state[0] + 4), lambda me: me.state[0])),
    "object": lambda: Counting(SimpleNamespace(n=0), of_calls(
        lambda me: add_one(me.state, "n"), lambda me: me.state.n)),
    "object with slots": lambda: Counting(Slotted(), of_calls(
        lambda me: add_one(me.state, "count"), lambda me: me.state.count)),
    "object with slots and a dict": lambda: Counting(SlottedToo(), of_calls(
        lambda me: add_one(me.state, "count"), lambda me: me.state.count)),
    "list beside an array that cannot be written": lambda: Counting([numpy.broadcast_to(1, 3), 0], of_calls(
        lambda me: add_one(me.state, 1), lambda me: me.state[1])),
    "array": lambda: Counting(numpy.zeros(3), of_calls(
        lambda me: me.state.__iadd__(1), lambda me: float(me.state[0]))),
    "tensor, replaced": lambda: Counting(torch.zeros(()), of_calls(
        lambda me: setattr(me, "state", me.state + 1), lambda me: float(me.state))),
    "tensor, in place": lambda: Counting(torch.zeros(()), of_calls(
        lambda me: me.state.add_(1), lambda me: float(me.state))),
    "tensor in a list, in place": lambda: Counting([torch.zeros(())], of_calls(
        lambda me: me.state[0].add_(1), lambda me: float(me.state[0]))),
    "object of the standard library": lambda: Counting(UserDict({"n": 0}), of_calls(
        lambda me: add_one(me.state.data, "n"), lambda me: me.state["n"])),
    "attribute of a layer of torch's": lambda: Counting(numbered(), of_calls(
        lambda me: add_one(me.state, "n"), lambda me: me.state.n)),
    "new attribute of a layer of torch's": lambda: Counting(nn.Identity(), of_calls(
        lambda me: setattr(me.state, "n", getattr(me.state, "n", 0) + 1), lambda me: me.state.n)),
    "new attribute": lambda: Counting(None, of_calls(
        lambda me: setattr(me, "more", getattr(me, "more", 0) + 1), lambda me: me.more)),
}  # fmt: skip


def reference(model: nn.Sequential, x: Tensor, chunks: int) -> None:
    """The hand-written loop."""
    for part in x.tensor_split(chunks):
        (loss_of(model(part)) / chunks).backward()


def state_of(layer: Any) -> tuple[object, ...]:
    state = layer.state
    shown = state.count if isinstance(state, Slotted) else state
    shown = vars(state) if isinstance(state, SimpleNamespace) else shown
    shown = getattr(state, "n", None) if isinstance(state, nn.Identity) else shown
    return str(shown), layer.forwards, getattr(layer, "more", None)


@pytest.mark.parametrize("begins", [0, 7])  # in chunk 1 of the third call, which does not compare whole outputs
@pytest.mark.parametrize("entry, policy", [
    ("forward", "always"), ("step", "always"), ("step", "except_last"), ("eager", "except_last"),
    ("create_graph", "never"),
])  # fmt: skip
@pytest.mark.parametrize("name", STATES)
def test_a_recomputation_finds_the_attributes_of_its_forward_and_leaves_those_that_it_found(
    name: str, entry: str, policy: str, begins: int
) -> None:
    plain = nn.Sequential(linear(), STATES[name](), linear())
    plain[1].begins = begins
    pipe = Pipe(copy.deepcopy(plain), [2, 1], 3, checkpoint=policy)
    for _ in range(3):
        reference(plain, rows(), 3)
        run(pipe, rows(), entry)
        assert state_of(pipe[1]) == state_of(plain[1])
        for param, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert expected.grad is not None
            if entry == "eager":
                with torch.no_grad():
                    expected -= 0.1 * expected.grad
                torch.testing.assert_close(param, expected, rtol=1e-12, atol=1e-14)
            else:
                torch.testing.assert_close(param.grad, expected.grad, rtol=1e-12, atol=1e-14)
        plain.zero_grad()
        pipe.zero_grad()


def draw_from_python(x: Tensor) -> None:
    random.random()


def differentiate_within(x: Tensor) -> None:
    with torch.enable_grad():
        leaf = x * 1 if x.requires_grad else x.detach().requires_grad_()
        torch.autograd.grad(leaf.square().sum(), leaf)


def fail(x: Tensor) -> None:
    raise KeyError("third")


class BeginsToWrite(nn.Module):
    """Counts its forwards in a tensor, in place, and does something for which the call or the chunk runs again."""

    def __init__(self, does: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.seen = torch.zeros((), dtype=DOUBLE)
        self.does = does
        self.is_on = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_on:
            return x
        self.seen.add_(1)
        self.does(x)
        return x * float(self.seen)


@pytest.mark.parametrize("does", [draw_from_python, differentiate_within, fail])
@pytest.mark.parametrize("entry", ["forward", "step", "no_grad"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_tensor_held_is_put_back_where_a_call_begins_to_write_it_and_runs_again(
    does: Callable[[Tensor], None], entry: str, policy: str
) -> None:
    layer = BeginsToWrite(does)
    pipe = Pipe(nn.Sequential(linear(), layer, linear()), [2, 1], 3, checkpoint=policy)
    with torch.no_grad() if entry == "no_grad" else nullcontext():
        make_call = partial(pipe, rows()) if entry == "no_grad" else partial(run, pipe, rows(), entry)
        make_call()
        make_call()
        layer.is_on = True
        with pytest.raises(KeyError, match="third") if does is fail else nullcontext():
            make_call()
    assert layer.seen == (0 if does is fail else 3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved"])
@pytest.mark.parametrize("workers", ["inline", "threads"])
def test_each_chunk_in_flight_has_its_own_attributes_in_every_schedule(schedule: str, workers: str) -> None:
    plain = nn.Sequential(*[layer for _ in range(4) for layer in (linear(), STATES["dict"]())])
    pipe = Pipe(copy.deepcopy(plain), [2, 2, 2, 2], 4, checkpoint="always", schedule=schedule, workers=workers)
    for _ in range(3):
        reference(plain, rows(8), 4)
        run(pipe, rows(8), "step")
    for param, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad, rtol=1e-12, atol=1e-14)


class Nested(nn.Linear):
    """Counts its forwards at the bottom of some dicts."""

    def __init__(self, depth: int) -> None:
        super().__init__(3, 3, dtype=DOUBLE)
        self.table: dict[str, Any] = {"count": 0}
        for _ in range(depth):
            self.table = {"inner": self.table}

    def forward(self, x: Tensor) -> Tensor:
        table = self.table
        while "inner" in table:
            table = table["inner"]
        table["count"] += 1
        return super().forward(x) * table["count"]


@pytest.mark.parametrize("depth", range(6))
def test_a_recomputation_finds_what_attributes_hold_to_a_depth_of_four_and_refuses_what_lies_deeper(depth: int) -> None:
    pipe = Pipe(nn.Sequential(Nested(depth), linear()), [1, 1], 3, checkpoint="always")
    with nullcontext() if depth <= 4 else pytest.raises(CheckpointError, match="gave other values than its forward"):
        pipe(rows()).sum().backward()
        grad = pipe[0].weight.grad
        plain = nn.Sequential(Nested(depth), linear())
        plain.load_state_dict(pipe.state_dict())
        sum([plain(chunk).sum() for chunk in rows().tensor_split(3)]).backward()
        torch.testing.assert_close(grad, plain[0].weight.grad)


def test_checkpointed_blocks_follow_the_same_rule() -> None:
    for name in STATES:
        plain = nn.Sequential(linear(), nn.Sequential(linear(), STATES[name]()), linear())
        ours = copy.deepcopy(plain)
        checkpoint_blocks(ours, lambda name, module: name == "1")
        for _ in range(3):
            for model in (plain, ours):
                (loss_of(model(rows())) + loss_of(model(rows() / 2))).backward()
        assert state_of(ours[1][1]) == state_of(plain[1][1])
        for param, expected in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, expected.grad, rtol=1e-12, atol=1e-14)


def test_two_runs_of_an_eager_step_begin_with_the_same_attributes() -> None:
    plain = nn.Sequential(linear(), STATES["dict"](), linear())
    pipe = Pipe(copy.deepcopy(plain), [2, 1], 3, checkpoint="always")
    optimizer = EagerUpdate(torch.optim.SGD(pipe.parameters(), lr=0.1), clip="two_pass", max_norm=0.01)
    reference(plain, rows(), 3)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    pipe.step(rows(), loss_fn=loss_of, optimizer=optimizer)
    assert state_of(pipe[1]) == state_of(plain[1])
    for param, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", STATES)
def test_a_forward_that_runs_twice_since_a_layer_calls_autograd_changes_attributes_once(name: str) -> None:
    """What a checkpointed forward saves is dropped; the first chunk runs again where that is not possible."""

    class Differentiates(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            (grad,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
            return x + grad

    found = []
    for policy in ("never", "always"):
        layers = nn.Sequential(linear(), STATES[name](), Differentiates())
        layers.load_state_dict({"0.weight": torch.eye(3), "0.bias": torch.ones(3)})
        run(Pipe(layers, [1, 2], 3, checkpoint=policy), rows(), "step")
        found.append((state_of(layers[1]), layers[0].weight.grad))
    assert found[0][0] == found[1][0] and torch.allclose(found[0][1], found[1][1], rtol=1e-12)


def test_what_the_caller_changes_between_forward_and_backward_changes_no_gradient_and_stays_changed() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"factor": 2.0}

        def forward(self, x: Tensor) -> Tensor:
            return Reverses.apply(x, self.config["factor"])

    found = []
    for policy in POLICIES:
        pipe = Pipe(nn.Sequential(linear(), Scale()), [1, 1], 3, checkpoint=policy)
        pipe.load_state_dict({"0.weight": torch.eye(3), "0.bias": torch.ones(3)})
        loss = loss_of(pipe(rows()))
        pipe[1].config["factor"] = 5.0
        loss.backward()
        assert pipe[1].config == {"factor": 5.0}
        found.append(pipe[0].weight.grad)
    assert all(torch.equal(found[0], grad) for grad in found)


def test_a_tensor_in_the_graph_that_a_module_keeps_is_not_kept_longer() -> None:
    from weakref import ref

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            made.append(ref(self.last))
            return x * 3

    made: list[Any] = []
    pipe = Pipe(nn.Sequential(linear(), Keeps()), [1, 1], 3, checkpoint="always")
    out = pipe(rows())
    assert [each() is None for each in made] == [True, True, False]
    last = pipe[1].last
    out.sum().backward()
    assert pipe[1].last is last


@pytest.mark.parametrize("policy", ["except_last", "always"])
def test_a_factor_that_grows_where_nobody_puts_it_back_is_found_out(policy: str) -> None:
    seen: list[int] = []

    class Elsewhere(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(1)
            return Reverses.apply(x, len(seen) / 10)

    pipe = Pipe(nn.Sequential(linear(), Elsewhere(), linear()), [2, 1], 3, checkpoint=policy)
    with pytest.raises(CheckpointError, match=r"an autograd.Function kept factor: 0.\d then, 0.\d now.*attribute"):
        run(pipe, rows(), "step")


def test_a_counter_that_asks_whether_it_recomputes_counts_as_ever() -> None:
    class Careful(nn.Module):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            if not is_recomputing():
                self.count += 1
            return x * 2

    for policy in POLICIES:
        pipe = Pipe(nn.Sequential(linear(), Careful()), [1, 1], 3, checkpoint=policy)
        for _ in range(3):
            run(pipe, rows(), "step")
        assert pipe[1].count == 9


# -------------------------------------------------------------------------------------------------- leaves of its own


class Forces(nn.Module):
    """The gradient of an energy by the positions, which it makes a leaf for that."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear = linear()
        self.in_place = in_place

    def forward(self, x: Any) -> Tensor:
        hidden, positions = x
        positions = positions if self.in_place else positions.detach()
        positions.requires_grad_()
        (forces,) = torch.autograd.grad(self.linear(positions).sin().sum(), positions, create_graph=True)
        return hidden + forces


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x.detach() * 2


def penalty(out: Tensor, target: object) -> Tensor:
    """A loss with a leaf of its own."""
    leaf = torch.ones(3, dtype=DOUBLE, requires_grad=True)
    return (out * leaf).square().mean()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("loss_fn", [loss_of, penalty])
def test_a_leaf_that_a_forward_makes_for_itself_is_nobody_elses(
    in_place: bool, schedule: str, loss_fn: Callable[..., Tensor]
) -> None:
    plain = nn.Sequential(Beside(), Forces(in_place), linear())
    for part in rows().tensor_split(3):
        (loss_fn(plain(part), None) / 3).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    total = torch.nn.utils.get_total_norm([grad for grad in expected.values() if grad is not None])
    for policy in POLICIES:
        pipe = Pipe(copy.deepcopy(plain), [1, 2], 3, checkpoint=policy, schedule=schedule)
        for _ in range(3):
            pipe.zero_grad()
            grads = pipe.step(rows(), loss_fn=loss_fn, grads="store", clip_grad_norm=float(total) / 2).grads
            assert grads is not None
            found = dict(grads.items())
            for name, param in pipe.named_parameters():
                torch.testing.assert_close(found.pop(param), expected[name] / 2, rtol=1e-6, atol=1e-14)
            assert not found
            grads.apply(torch.optim.SGD(pipe.parameters(), lr=0.0))
            run(pipe, rows(), "forward")


def test_a_leaf_of_the_callers_that_a_layer_captures_gets_its_gradient() -> None:
    mine = [torch.ones(3, dtype=DOUBLE, requires_grad=True)]

    class Captures(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * mine[0]

    found = []
    for policy in POLICIES:
        mine[0].grad = None
        torch.manual_seed(0)
        run(Pipe(nn.Sequential(linear(), Captures()), [1, 1], 3, checkpoint=policy), rows(), "step")
        found.append(mine[0].grad)
    assert found[0] is not None and all(torch.equal(found[0], grad) for grad in found)


# ------------------------------------------------------------------------------------------- torch's classes, patched


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", [(nn.Linear, "forward"), (nn.Module, "__call__"), (nn.Module, "_call_impl")])
def test_a_class_of_torchs_that_someone_has_patched_to_draw_gets_its_seeds(
    where: tuple[type[nn.Module], str], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, name = where
    own = getattr(kind, name)

    def noisy(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = own(self, *args, **kwargs)
        return out * torch.rand(1, dtype=DOUBLE) if isinstance(self, nn.Linear) else out

    torch.manual_seed(0)
    layers = nn.Sequential(linear(), nn.Tanh(), linear())
    found = []
    for checkpoint in ("never", policy):
        pipe = Pipe(copy.deepcopy(layers), [1, 2], 3, checkpoint=checkpoint)
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, noisy)
            for number in range(3):
                torch.manual_seed(number)
                run(pipe, rows(), "forward")
        found.append([param.grad for param in pipe.parameters()])
    assert all(map(torch.equal, *found))


# ------------------------------------------------------------------------------------- writing the input, or a copy


@pytest.mark.parametrize("late", [3, 5, 6])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("entry", ["forward", "step"])
def test_a_stage_may_write_inputs_of_one_length_and_copies_of_those_of_another(
    entry: str, policy: str, late: int
) -> None:
    class Pads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] % 2:
                x = functional.pad(x, (0, 1))
            x += 1
            return x * x

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(1.5, dtype=DOUBLE))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    plain = nn.Sequential(Scale(), Pads())
    pipe = Pipe(copy.deepcopy(plain), [1, 1], 3, checkpoint=policy)
    for number in range(1, 7):
        x = rows()[:, : 2 if number == late else 3]
        plain.zero_grad()
        pipe.zero_grad()
        loss_of(plain(x)).backward()
        run(pipe, x, entry)
        torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad, rtol=1e-12, atol=0)


class Frozen(dict[str, Any]):
    """A configuration that nobody may change, as libraries of models have."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a frozen configuration is not written")

    __setitem__ = __delitem__ = update = pop = setdefault = _refuse


class Configured(nn.Linear):
    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.config = Frozen(width=3, scales=[1.0, 2.0])


@pytest.mark.probes
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("checkpoint", POLICIES)
def test_a_frozen_configuration_is_left_alone(checkpoint: str, entry: str) -> None:
    first = Configured(3, 3, dtype=DOUBLE)
    pipe = Pipe(nn.Sequential(first, linear()), [1, 1], chunks=2, checkpoint=checkpoint, devices=["cpu"] * 2)
    for _ in range(3):
        run(pipe, rows(), entry)
    assert first.config == {"width": 3, "scales": [1.0, 2.0]}


def test_a_list_behind_a_thousand_modules_with_children_counts_each_chunk_once():
    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.sizes, self.options = nn.Identity(), (3, 3), {"bias": True}

    class Logs(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts, self.linear, self.log = nn.ModuleList([Expert() for _ in range(1100)]), linear(), []

        def forward(self, x):
            self.log.append(len(x))
            return self.linear(x)

    pipe = Pipe(nn.Sequential(Logs(), Logs()), [2], chunks=2, checkpoint="always")
    run(pipe, rows(), "step")
    assert [layer.log for layer in pipe] == [[3, 3], [3, 3]]
