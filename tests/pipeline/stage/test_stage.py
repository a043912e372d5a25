"""What a stage does is the same in every call: numbers 1, 2, 4 validate, numbers 3, 5, 6 do not.

The reference is the plain module, chunk by chunk.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from by_chunks import ByChunks
from cover import either, pairwise
from pipeline_probes import no_collector
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import pipeline.recompute.randomness
from pipeline import CheckpointError, EagerUpdate, Pipe, is_recomputing
from pipeline.recompute.randomness import draw_seed

CALLS = 6
MODES_OF_CHECKPOINTING = ["always", "except_last", "never"]
AXES = {"entry": ["forward", "step"], "schedule": ["gpipe", "1f1b", "zb-h1"], "mode": MODES_OF_CHECKPOINTING}
MODES = either([tuple(row.values()) for row in pairwise(AXES)], [*product(*AXES.values())])


class Apply(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def linear(wide: int = 4) -> nn.Linear:
    return nn.Linear(wide, 4)


def hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: -3 * grad)
    return torch.tanh(x)


def noisy(x: Tensor) -> Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda grad: grad + torch.randn_like(grad))
    return y


def with_its_gradient(x: Tensor) -> Tensor:
    if not x.requires_grad:
        return x
    (grad,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    return x + grad


def with_its_gradient_of_few(x: Tensor) -> Tensor:
    """Not for chunk 0: of 9 rows it has 3."""
    return with_its_gradient(x) if len(x) < 3 else x * x


class Doubled(torch.autograd.Function):
    """A function that frees its input, and computes it again from its output: as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x, ctx.size = x, x.untyped_storage().nbytes()
        out = x * 2
        ctx.save_for_backward(out)
        x.untyped_storage().resize_(0)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ctx.x.untyped_storage().resize_(ctx.size)
        ctx.x.data.copy_(ctx.saved_tensors[0] / 2)
        return grad * 2


class Drawing(nn.Module):
    """Draws from its own generator, and for some chunks calls autograd afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(x.shape, generator=self.generator)
        return with_its_gradient_of_few(x * drawn)


def captured() -> nn.Sequential:
    leaf = torch.linspace(0, 1, 4).requires_grad_()
    return nn.Sequential(linear(), nn.Tanh(), Apply(lambda x: x * leaf), linear())


def shared() -> nn.Sequential:
    one = linear()
    return nn.Sequential(one, nn.ReLU(), one, nn.ReLU())


STAGES: dict[str, Callable[[], nn.Module]] = {  # what comes second
    "linear": lambda: nn.Sequential(linear(), nn.ReLU()),
    "saves nothing of its input": lambda: nn.Sequential(nn.Tanh(), linear()),
    "a gradient in another layout": lambda: Apply(lambda x: (torch.ones(4, 4).tril() @ x.t().contiguous()).t()),
    "an expanded gradient": lambda: Apply(lambda x: x * 1 + x.sum(1, keepdim=True)),
    "only an expanded gradient": lambda: Apply(lambda x: x.sum(1, keepdim=True).expand(x.shape[0], 4)),
    "a view": nn.Flatten,
    "itself": nn.Identity,
    "a transposed view": lambda: Apply(lambda x: x.t().contiguous().t()),
    "writes in place": lambda: nn.Sequential(nn.ReLU(inplace=True), linear()),
    "detaches in place": lambda: Apply(lambda x: x.clone() + x.detach_()),
    "frees its input": lambda: nn.Sequential(Apply(Doubled.apply), linear()),
    "a hook on the input": lambda: nn.Sequential(Apply(hooked), linear()),
    "a hook that draws": lambda: nn.Sequential(linear(), Apply(noisy)),
    "a gradient within": lambda: nn.Sequential(Apply(with_its_gradient), linear()),
    "a gradient within, of some chunks": lambda: nn.Sequential(Apply(with_its_gradient_of_few), linear()),
    "a generator of its own": lambda: nn.Sequential(Drawing(), linear()),
    "a captured leaf": captured,
    "a layer twice": shared,
    "dropout": lambda: nn.Sequential(linear(), nn.Dropout(0.5), linear(), nn.Dropout(0.3)),
    "frozen": lambda: nn.Sequential(linear().requires_grad_(False), nn.Tanh(), linear()),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(4), linear()),
}


PLAIN = {"writes in place": lambda: nn.Sequential(nn.ReLU(), linear())}  # where the plain module itself cannot


def model_with(stage: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Sequential(linear(3), nn.Tanh()), stage(), linear())


def trained(
    stage: Callable[[], nn.Module], entry: str, schedule: str, checkpoint: str, calls: int, around: bool = True
) -> list[Any]:
    """Of each call: loss, gradients, buffers. `around`: it is one stage of three, else it has a stage for each part."""
    model = model_with(stage) if around else stage()
    assert isinstance(model, nn.Sequential)
    pipe = Pipe(model, [1] * len(model), 4, schedule=schedule, checkpoint=checkpoint, mixes_rows=True)
    found: list[Any] = []
    for call in range(calls):
        torch.manual_seed(call)
        x = torch.randn(9, 3)
        if entry == "forward":
            loss = pipe(x).square().sum()
            loss.backward()
        else:
            loss = pipe.step(x, loss_fn=lambda out, _: out.square().sum(), loss_reduction="sum").loss
        found.append([loss.detach(), *[p.grad for p in model.parameters()], *[b.clone() for b in model.buffers()]])
        pipe.zero_grad(set_to_none=True)
    return found


def by_hand(stage: Callable[[], nn.Module], calls: int, around: bool = True) -> list[Any]:
    """The same of the plain module, chunk by chunk."""
    model = model_with(stage) if around else stage()
    found: list[Any] = []
    for call in range(calls):
        torch.manual_seed(call)
        run = ByChunks(model, torch.randn(9, 3), 4, draw_seed())
        loss = run.output.square().sum()
        run.backward(loss)
        found.append([loss.detach(), *[p.grad for p in model.parameters()], *[b.clone() for b in model.buffers()]])
        model.zero_grad(set_to_none=True)
    return found


def check_calls(found: list[Any], expected: list[Any], *what: str) -> None:
    """Gradients and buffers have the same bits; losses are summed in another order."""
    for call, ((loss, *ones), (whole, *others)) in enumerate(zip(found, expected, strict=True), 1):
        assert all(map(same, ones, others)), (*what, call)
        torch.testing.assert_close(loss, whole)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("entry", ["forward", "step"])
def test_gradients_have_the_bits_of_the_plain_module_in_every_call(name: str, entry: str) -> None:
    expected = by_hand(PLAIN.get(name, STAGES[name]), CALLS)
    if name == "a hook that draws":  # seeded in a way of its own: see test_randomness.py
        expected = trained(STAGES[name], entry, "gpipe", "never", CALLS)
    for _, schedule, checkpoint in [mode for mode in MODES if mode[0] == entry]:
        check_calls(trained(STAGES[name], entry, schedule, checkpoint, CALLS), expected, schedule, checkpoint)


def triple(x: Any) -> Any:
    return {"a": x, "n": 3, "b": x * x}


def odd_messages() -> nn.Sequential:
    """What crosses is now one tensor, now several, now one that wants no gradient."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Sequential(linear(3), nn.Tanh()),
        Apply(lambda x: (x, x.detach() * 2)),
        Apply(lambda pair: pair[0] * pair[1]),
        linear(),
        Apply(triple),
        Apply(lambda each: each["a"] * each["n"] + each["b"]),
        Apply(lambda x: (x,)),
        Apply(lambda one: one[0]),
        nn.Sequential(linear(), nn.ReLU()),
    )


def frozen_first() -> nn.Sequential:
    """What crosses the first cuts wants no gradient."""
    torch.manual_seed(3)
    first = nn.Sequential(linear(3), nn.Tanh()).requires_grad_(False)
    return nn.Sequential(first, nn.Dropout(0.5), linear(), Apply(lambda x: x.double().float()), linear())


def counted() -> nn.Sequential:
    """Integers come in: a leaf of these there is none."""
    torch.manual_seed(3)
    return nn.Sequential(Apply(lambda x: (x > 0).sum(1)), nn.Embedding(4, 4), nn.Tanh(), linear())


@pytest.mark.parametrize("model", [odd_messages, frozen_first, counted])
@pytest.mark.parametrize("entry", ["forward", "step"])
def test_messages_may_change_from_stage_to_stage(model: Callable[[], nn.Sequential], entry: str) -> None:
    expected = by_hand(model, CALLS, around=False)
    for _, schedule, checkpoint in [mode for mode in MODES if mode[0] == entry]:
        found = trained(model, entry, schedule, checkpoint, CALLS, around=False)
        check_calls(found, expected, schedule, checkpoint)


class Late(nn.Module):
    """Does something else in chunks 1 and later of calls 3 and later, and in no probe where nothing is recomputed."""

    def __init__(self, usual: Callable[[Tensor], Tensor], late: Callable[[Tensor], Tensor], recomputes: bool) -> None:
        super().__init__()
        self.usual, self.late, self.recomputes = usual, late, recomputes
        self.calls = self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += self.recomputes or not is_recomputing()
        return self.late(x) if self.calls >= 3 and self.forwards > 1 else self.usual(x)


def with_late(late: Callable[[Tensor], Tensor], first: nn.Module, checkpoint: Any) -> Iterator[Pipe]:
    """The Pipe before each of four calls."""
    layer = Late(lambda x: x * x, late, checkpoint != "never")
    model = nn.Sequential(first, nn.Sequential(layer, linear()))
    pipe = Pipe(model, [1, 1], 4, checkpoint=checkpoint, schedule="gpipe")
    for layer.calls in range(1, 5):
        layer.forwards = 0
        yield pipe


def one_step(pipe: Pipe) -> Tensor:
    return pipe.step(torch.randn(8, 4), loss_fn=lambda out, _: out.square().mean()).loss


def refused_in_the_third(calls: Iterator[Pipe], words: str) -> None:
    for _ in range(2):
        one_step(next(calls))
    with pytest.raises(CheckpointError, match=words):
        one_step(next(calls))


def test_a_layer_that_begins_late_to_write_parameters_of_torchs_own_stage_is_found_out() -> None:
    first = linear()

    def writes(x: Tensor) -> Tensor:
        first.weight.data.mul_(2)
        return x * x

    refused_in_the_third(with_late(writes, first, lambda stage, _: stage == 0), "gave other values than its forward")


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_stage_that_begins_late_to_write_its_input_is_named(frozen: bool, checkpoint: str) -> None:
    def writes(x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(2)
        return x * x

    calls = with_late(writes, linear().requires_grad_(not frozen), checkpoint)
    refused_in_the_third(calls, "wrote its input in place, which it did not do before")


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_layer_that_is_set_to_write_its_input_does_so_in_the_call_that_is_made_once_more(checkpoint: str) -> None:
    relu, x = nn.ReLU(), torch.randn(8, 4)
    model = nn.Sequential(linear(), relu, linear())
    pipe = Pipe(model, [1, 2], 4, checkpoint=checkpoint)
    for _ in range(2):
        one_step(pipe)
    relu.inplace = True
    with pytest.raises(CheckpointError, match="as after relu.inplace = True, make this call once more"):
        pipe(x)
    for _ in range(3):
        assert torch.allclose(pipe(x), model(x), rtol=0, atol=1e-6)
        one_step(pipe)


def test_a_layer_that_begins_late_to_count_is_found_out() -> None:
    """Some entries of each output are compared in every call."""
    count = iter(range(100))
    calls = with_late(lambda x: x * next(count), linear(), lambda _, chunk: chunk > 0)
    refused_in_the_third(calls, "gave other values than its forward")


def test_a_leaf_that_only_late_chunks_capture_gets_one_whole_gradient() -> None:
    leaf, seen = torch.ones(4, requires_grad=True), []
    leaf.register_hook(lambda grad: seen.append(grad.clone()))
    for number, pipe in enumerate(with_late(lambda x: x * leaf, linear(), "never"), 1):
        one_step(pipe)
        assert len(seen) == (number >= 3) + (number >= 4)
        if seen:
            assert leaf.grad is not None and torch.equal(leaf.grad, sum(seen[1:], seen[0]))


def test_a_leaf_that_only_late_chunks_capture_is_an_input_of_the_call() -> None:
    leaf = torch.ones(4, requires_grad=True)
    for number, pipe in enumerate(with_late(lambda x: x * leaf, linear(), "never"), 1):
        out = pipe(torch.randn(8, 4)).sum()
        (grad,) = torch.autograd.grad(out, [leaf], allow_unused=True)
        assert (grad is not None) == (number >= 3) and leaf.grad is None


def test_a_captured_leaf_beside_a_parameter_that_some_chunks_leave_out_gets_its_gradient() -> None:
    leaf = torch.ones(4, requires_grad=True, dtype=torch.float64)

    class Routed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x) if x[0, 0] > 0 else x
            return y * leaf

    torch.manual_seed(0)
    model = nn.Sequential(Routed(4, 4), nn.Linear(4, 4)).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    x[::2, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    sum([model(chunk).square().sum() for chunk in x.chunk(4)]).backward()
    owners = [leaf, *model.parameters()]
    wanted = [owner.grad for owner in owners]
    for checkpoint, entry in product(["always", "never"], ["forward", "step"]):
        for owner in owners:
            owner.grad = None
        pipe = Pipe(model, [1, 1], 4, checkpoint=checkpoint)
        if entry == "step":
            pipe.step(x, loss_fn=lambda out, _: out.square().sum(), loss_reduction="sum")
        else:
            pipe(x).square().sum().backward()
        for owner, grad in zip(owners, wanted, strict=True):
            torch.testing.assert_close(owner.grad, grad, rtol=1e-12, atol=0)


@pytest.mark.inline
def test_late_chunks_whose_graphs_do_not_hold_their_input_hold_none() -> None:
    inputs: list[StorageWeakRef] = []

    def adds(x: Tensor) -> Tensor:
        inputs.append(StorageWeakRef(x.untyped_storage()))
        return x + 1

    first = nn.Sequential(linear(), nn.ReLU(), linear())
    for number, pipe in enumerate(with_late(adds, first, "never"), 1):
        out = pipe(torch.randn(8, 4))
        if number == 3:
            assert not any([not each.expired() for each in inputs])
        out.sum().backward()


@pytest.mark.parametrize("entry", ["forward", "step", "evaluate"])
def test_inference_tensors_come_in_in_every_call(entry: str) -> None:
    torch.manual_seed(1)
    pipe = Pipe(nn.Sequential(Apply(lambda x: x * 2), linear(3)), [1, 1], 4, checkpoint="always")
    plain = pipe.to_sequential()
    for _ in range(CALLS):
        with torch.inference_mode():
            x = torch.randn(8, 3)
            expected = plain(x).square().mean()
            if entry == "evaluate":
                assert torch.allclose(pipe.evaluate(x, loss_fn=lambda out, _: out.square().mean()).loss, expected)
        if entry == "forward":
            loss = pipe(x).square().mean()
            loss.backward()
            assert torch.allclose(loss, expected.clone())
        if entry == "step":
            loss = pipe.step(x, loss_fn=lambda out, _: out.square().mean()).loss
            assert torch.allclose(loss, expected.clone())


def strides_of_gradients(stage: nn.Module, checkpoint: str | None) -> list[tuple[int, ...]]:
    """How the gradients are laid out that come to what is before a stage, in call number 3.

    `checkpoint` None: in the plain module.
    """
    found: list[tuple[int, ...]] = []

    def notes(x: Tensor) -> Tensor:
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda grad: found.append(grad.stride()))
        return y

    torch.manual_seed(3)
    model = nn.Sequential(nn.Sequential(linear(), Apply(notes)), stage)
    if checkpoint is None:
        run = ByChunks(model, torch.randn(6, 4), 2)
        run.backward(run.output.sum())
        return found
    pipe = Pipe(model, [1, 1], 2, checkpoint=checkpoint)
    for _ in range(3):
        found.clear()
        pipe.step(torch.randn(6, 4), loss_fn=lambda out, _: out.sum(), loss_reduction="sum")
    return found


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "by columns": lambda x: x * (torch.ones(4, 4).tril() @ x.t().contiguous()).t().sum(1, keepdim=True),
    "expanded": lambda x: x.sum(1, keepdim=True) + x.detach(),
    "by columns alone": lambda x: (torch.ones(4, 4).tril() @ x.t().contiguous()).t(),
    "in rows": lambda x: x * x,
}


@pytest.mark.parametrize("has_hook", [False, True])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_gradient_crosses_the_cut_as_it_is_laid_out(name: str, checkpoint: str, has_hook: bool) -> None:
    """In another layout the sums over it would round differently. `has_hook`: the layer has one on its input."""

    def compute(x: Tensor) -> Tensor:
        if has_hook and x.requires_grad:
            x.register_hook(lambda grad: None)
        return LAYOUTS[name](x) + (x * x).detach()

    stage = Apply(compute)
    assert strides_of_gradients(stage, checkpoint) == strides_of_gradients(stage, None)


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "by columns": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:, :1].expand(-1, 33),
    "expanded in two dims": lambda x: x[:, :3, None, None].expand(-1, 3, 5, 7),
    "expanded, with as many numbers as its span": lambda x: x[:, ::3, None].expand(-1, 2, 2),
    "with gaps": lambda x: x[:, ::2],
    "with wide gaps": lambda x: x.repeat(1, 9)[:, :4],
}


@pytest.mark.parametrize("entry", ["forward", "step", "evaluate"])
@pytest.mark.parametrize("name", VALUES)
def test_a_value_crosses_the_cut_as_it_is_laid_out_in_every_call(name: str, entry: str) -> None:
    """In another layout kernels would round differently."""
    seen: list[Any] = []

    def see(x: Tensor) -> Tensor:
        seen.append((x.stride(), x.data_ptr() % 64))
        return x.flatten(1).sum(1, keepdim=True)

    model = nn.Sequential(linear(), Apply(VALUES[name]), Apply(see))
    pipe = Pipe(model, [1, 1, 1], 3, checkpoint="never")
    for call in range(CALLS):
        x = torch.randn(9, 4)
        [model(part) for part in x.tensor_split(3)]
        expected = seen.copy()
        seen.clear()
        if entry == "forward":
            pipe(x)
        elif entry == "step":
            pipe.step(x, loss_fn=lambda out, _: out.sum(), loss_reduction="sum", grads="store")
        else:
            pipe.evaluate(x, loss_fn=lambda out, _: out.sum(), loss_reduction="sum")
        assert seen[-3:] == expected, call
        seen.clear()


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_part_of_an_expanded_value_is_written_as_in_the_plain_module(checkpoint: str) -> None:
    """All its numbers are one in memory: on a dense copy one column alone was written."""

    def write(x: Tensor) -> Tensor:
        x[:, 1] = 0.0
        return x.sum(1, keepdim=True) + 1

    model = nn.Sequential(linear(), Apply(lambda x: x[:, :1].expand(-1, 4)), Apply(write))
    pipe = Pipe(model, [1, 1, 1], 2, checkpoint=checkpoint)
    for _ in range(CALLS):
        x = torch.randn(6, 4)
        with torch.no_grad():
            assert torch.equal(pipe(x), model(x))


class WithGaps(torch.autograd.Function):
    """Identity; its gradient has gaps between the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pragma: no cover
        return grad.repeat(1, 2)[:, :4]


def test_a_gradient_with_gaps_of_an_input_with_gaps_crosses_the_cut_with_them() -> None:
    """A leaf that has gaps itself would copy it into one without."""
    found: list[tuple[int, ...]] = []

    def with_gaps(x: Tensor) -> Tensor:
        y = x.repeat(1, 2)[:, :4]
        if y.requires_grad:
            y.register_hook(lambda grad: found.append(grad.stride()))
        return y

    stages = nn.Sequential(linear(), Apply(with_gaps)), Apply(lambda x: WithGaps.apply(x) + (x * x).detach())
    pipe = Pipe(nn.Sequential(*stages), [1, 1], 2, checkpoint="always")
    for _ in range(3):
        pipe.step(torch.randn(6, 4), loss_fn=lambda out, _: out.sum(), loss_reduction="sum")
    assert found == [(8, 1)] * 6


def holds_its_input(stage: nn.Module) -> bool:
    """Whether what a plain module makes, or its graph, keeps the input alive."""
    x = (torch.randn(2, 4, requires_grad=True) * 1).relu()
    memory = StorageWeakRef(x.untyped_storage())
    x = stage(x)
    return not memory.expired()


@pytest.mark.inline
@pytest.mark.parametrize("name", [name for name in STAGES if name not in ("writes in place", "batch norm")])
@pytest.mark.parametrize("schedule, most", [("gpipe", [1, 2, 3, 4, 0]), ("1f1b", [1, 2, 2, 2, 0])])
def test_no_input_lives_longer_than_the_chunks_graph(name: str, schedule: str, most: list[int]) -> None:
    """Counted at each forward of the last layer, and at the end: which inputs of the middle stage are alive."""
    model = model_with(STAGES[name])
    inputs: list[StorageWeakRef] = []
    found: list[int] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(StorageWeakRef(args[0].untyped_storage()))

    def count(*_: object) -> None:
        found.append(sum(not each.expired() for each in inputs))

    expected = most if holds_its_input(model[1]) else [0] * 5
    model[0] = nn.Sequential(linear(3), nn.ReLU(), linear())  # saves nothing of what it returns
    model[1].register_forward_pre_hook(note)
    model[2].register_forward_pre_hook(count)
    pipe = Pipe(model, [1, 1, 1], 4, schedule=schedule, checkpoint="never", mixes_rows=True)
    with no_collector():
        for call in range(1, CALLS + 1):
            found.clear(), inputs.clear()
            pipe.step(torch.randn(8, 3), loss_fn=lambda out, _: out.square().mean())
            count()
            assert len(found) == 5 and all([own <= limit for own, limit in zip(found, expected)]), (call, found)


def test_a_stage_that_stops_saving_its_input_holds_none() -> None:
    """A frozen layer saves nothing of its input."""
    model = nn.Sequential(nn.Sequential(linear(3), nn.ReLU(), linear()), nn.Sequential(linear(), nn.Tanh(), linear()))
    inputs: list[StorageWeakRef] = []
    model[1].register_forward_pre_hook(lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage())))
    pipe = Pipe(model, [1, 1], 4, checkpoint="never", schedule="gpipe")
    alive = []
    for call in range(1, 8):
        model[1][0].requires_grad_(call < 6)
        inputs.clear()
        out = pipe(torch.randn(8, 3))
        alive.append(sum(not each.expired() for each in inputs))
        out.sum().backward()
    assert alive == [4, 4, 4, 4, 4, 0, 0]


@pytest.mark.parametrize("has_hook", [False, True])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_gradient_from_outside_is_refused_in_every_call(checkpoint: str, has_hook: bool) -> None:
    """What has passed through the input of a stage reaches another, where it would be lost."""
    kept: list[Tensor] = []

    def keeps(x: Tensor) -> Tensor:
        kept.append(x)
        if has_hook and x.requires_grad:
            x.register_hook(lambda grad: None)
        return x * x

    pipe = Pipe(nn.Sequential(linear(3), Apply(keeps)), [1, 1], 2, checkpoint=checkpoint)
    for call in range(CALLS):
        kept.clear()
        out = pipe(torch.randn(4, 3))
        (grad,) = torch.autograd.grad(kept[0].sum(), kept[0])  # asks for no gradient of ours
        assert torch.equal(grad, torch.ones_like(grad))
        out.sum().backward()
        aux = kept[-1].sum()
        with pytest.raises(RuntimeError, match="a backward from outside reached stage 1"):
            aux.backward()


class KeepsPenalty(nn.Linear):
    """Keeps a penalty on its weight, attached."""

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.weight.square().sum()
        return super().forward(x)


@pytest.mark.parametrize("order", ["in one", "after", "before"])
@pytest.mark.parametrize("entry", ["forward", "retained", "step"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_gradient_of_a_parameter_from_outside_is_refused_in_every_call(
    checkpoint: str, entry: str, order: str
) -> None:
    """One that comes before the stage's own backward is found as that begins, but for a step, which is over then."""
    for last in range(1, CALLS + 1):
        layer = KeepsPenalty(3, 4)
        pipe = Pipe(nn.Sequential(layer, linear()), [1, 1], 2, checkpoint=checkpoint)
        for call in range(1, last + 1):
            x = torch.randn(4, 3)
            loss = pipe.step(x, loss_fn=lambda out, _: out.mean()).loss if entry == "step" else pipe(x).sum()
            if call < last and entry != "step":
                loss.backward(retain_graph=entry == "retained")
        with pytest.raises(RuntimeError, match="a backward from outside reached stage 0|this forward keeps nothing"):
            if entry == "step" or order == "after":
                if entry != "step":
                    loss.backward(retain_graph=entry == "retained")
                layer.penalty.backward()
            elif order == "before":
                layer.penalty.backward()
                loss.backward()
            else:
                (loss + layer.penalty).backward()


class Leaves(nn.Linear):
    """Leaves tensors of its forward where the caller finds them: on itself, and in a list."""

    def __init__(self, wide: int) -> None:
        super().__init__(wide, wide)
        self.outputs: list[Tensor] = []
        self.register_forward_hook(lambda module, args, out: self.outputs.__setitem__(slice(None), [out]))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(super().forward(x))
        self.loss = out.pow(3).mean()
        self.penalty = self.weight.square().sum()
        return out


LEFT: dict[str, Callable[[Leaves], Tensor]] = {
    "loss": lambda layer: layer.loss,
    "penalty": lambda layer: layer.penalty,
    "activation": lambda layer: layer.outputs[-1].pow(2).mean(),
}
LossOf = Callable[[Tensor], Tensor]
Way = Callable[[LossOf, list[Tensor], Tensor, bool], Any]


def by_backward(loss_of: LossOf, parameters: list[Tensor], x: Tensor, create_graph: bool) -> Any:
    with warnings.catch_warnings(action="ignore"):  # torch's, of create_graph=True
        loss_of(x).backward(create_graph=create_graph)
    return [parameter.grad for parameter in parameters]


def by_backward_of_inputs(loss_of: LossOf, parameters: list[Tensor], x: Tensor, create_graph: bool) -> Any:
    with warnings.catch_warnings(action="ignore"):
        loss_of(x).backward(create_graph=create_graph, inputs=parameters)
    return [parameter.grad for parameter in parameters]


def by_grad(loss_of: LossOf, parameters: list[Tensor], x: Tensor, create_graph: bool) -> Any:
    return torch.autograd.grad(loss_of(x), parameters, create_graph=create_graph)


def by_grad_of_x(loss_of: LossOf, parameters: list[Tensor], x: Tensor, create_graph: bool) -> Any:
    x = x.clone().requires_grad_() * 1
    return torch.autograd.grad(loss_of(x), x, create_graph=create_graph)


def by_batched_grad(loss_of: LossOf, parameters: list[Tensor], x: Tensor, create_graph: bool) -> Any:
    rows = torch.stack([loss_of(x), torch.zeros((), dtype=x.dtype)])
    vectors = torch.eye(2, dtype=x.dtype)
    return torch.autograd.grad(rows, parameters, vectors, create_graph=create_graph, is_grads_batched=True)


def by_hvp(loss_of: LossOf, parameters: list[Tensor], x: Tensor, create_graph: bool) -> Any:
    return torch.autograd.functional.hvp(loss_of, x, torch.ones_like(x), create_graph=create_graph)[1:]


def by_second_grad(loss_of: LossOf, parameters: list[Tensor], x: Tensor, create_graph: bool) -> Any:
    """What was left is used at the second order only."""
    assert isinstance(loss_of, Loss)
    first, rest = loss_of.first(x), loss_of.rest()
    parts = torch.autograd.grad(first, parameters, create_graph=True)
    return torch.autograd.grad(torch.stack([part.square().sum() for part in parts]).sum() + rest, parameters)


WAYS: list[Way] = [by_backward, by_backward_of_inputs, by_grad, by_grad_of_x, by_batched_grad, by_hvp, by_second_grad]


class Loss:
    """The loss of a model, and some times what a layer has left."""

    def __init__(self, model: nn.Module, left: Callable[[], Tensor] | None) -> None:
        self.model = model
        self.left = left

    def __call__(self, x: Tensor) -> Tensor:
        return self.first(x) + self.rest()

    def first(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()

    def rest(self) -> Tensor | float:
        return 0.0 if self.left is None else 10 * self.left()


def leaving() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Leaves(3), nn.Linear(3, 3), Leaves(3), nn.Linear(3, 2)).double()


USES: dict[str, list[Any]] = {
    "way": WAYS,
    "left": [*LEFT],
    "place": [0, 2],
    "checkpoint": MODES_OF_CHECKPOINTING,
    "chunks": [1, 2],
    "create_graph": [False, True],
}


@pytest.mark.parametrize(
    [*USES], either([tuple(row.values()) for row in pairwise(USES)], [*product(*USES.values())])
)
def test_what_a_layer_left_is_refused_in_a_loss_in_every_call_and_way(
    way: Way, left: str, place: int, checkpoint: str, chunks: int, create_graph: bool
) -> None:
    """Also where autograd would run nothing that leads there. Before and after, gradients are the plain module's."""
    x = torch.randn(4, 3, dtype=torch.float64)
    for last in range(1, 5):
        model, plain = leaving(), leaving()
        pipe, layer = Pipe(model, [1, 3], chunks, checkpoint=checkpoint), model[place]
        assert isinstance(layer, Leaves)
        for call in range(1, last + 2):
            model.zero_grad()
            loss = Loss(pipe, partial(LEFT[left], layer) if call == last else None)
            if call == last:
                with pytest.raises(RuntimeError, match=f"a backward from outside reached stage {min(place, 1)}"):
                    way(loss, list(model.parameters()), x, create_graph)
            elif call > last - 2:
                grads = way(loss, list(model.parameters()), x, create_graph)
                plain.zero_grad()
                torch.testing.assert_close(grads, way(Loss(plain, None), list(plain.parameters()), x, create_graph))
            else:
                loss(x).backward()


@pytest.mark.parametrize("checkpoint", MODES_OF_CHECKPOINTING)
@pytest.mark.parametrize("left", LEFT)
def test_what_a_layer_left_may_go_into_what_asks_for_no_gradient_of_the_pipe(left: str, checkpoint: str) -> None:
    x, scale = torch.randn(4, 3, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    model = leaving()
    pipe, layer = Pipe(model, [1, 3], 2, checkpoint=checkpoint), model[2]
    assert isinstance(layer, Leaves)
    for _ in range(4):
        loss = pipe(x).square().mean()
        value = LEFT[left](layer)
        (grad,) = torch.autograd.grad(loss + value * scale, scale, retain_graph=True)
        assert torch.equal(grad, value)
        (loss + value.detach() * scale).backward()


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_backward_within_a_forward_is_refused_in_every_call(checkpoint: str) -> None:
    state = {"call": 0, "from": 0}

    def backward_within(x: Tensor) -> Tensor:
        if state["call"] >= state["from"] and x.requires_grad:
            (x * 2).sum().backward()
        return x * x

    for first in range(1, CALLS + 1):
        state.update({"from": first, "call": 0})
        pipe = Pipe(nn.Sequential(linear(3), Apply(backward_within)), [1, 1], 2, checkpoint=checkpoint)
        for state["call"] in range(1, first):
            pipe(torch.randn(4, 3)).sum().backward()
        state["call"] = first
        with pytest.raises(RuntimeError, match="a backward from outside reached stage 1"):
            pipe(torch.randn(4, 3)).sum().backward()


def test_after_the_first_stage_began_to_write_its_input_x_is_copied_again() -> None:
    writes = [False]
    first = Apply(lambda x: x.mul_(2) if writes[0] else x * 2)
    pipe, x = Pipe(nn.Sequential(first, linear(3)), [1, 1], 2), torch.randn(4, 3)
    for call in range(7):
        before = x.clone()
        writes[0] = call > 1
        if call == 2:
            with pytest.raises(CheckpointError, match="The x of this call was changed: make it anew"):
                pipe.step(x, loss_fn=lambda output, _: output.square().mean())
        else:
            pipe.step(x, loss_fn=lambda output, _: output.square().mean())
            assert torch.equal(x, before)


@pytest.mark.parametrize("does", [
    lambda x: x.mul_(2), lambda x: x.view(-1).mul_(2), lambda x: x.detach().mul_(2)
])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_stage_that_begins_to_write_its_input_is_named(does: Callable[[Tensor], Any], checkpoint: str) -> None:
    state = {"call": 0}

    def late(x: Tensor) -> Tensor:
        y = x * x
        if state["call"] == 3 and x.requires_grad:
            does(x)
        return y

    pipe = Pipe(nn.Sequential(linear(3), Apply(late)), [1, 1], 2, checkpoint=checkpoint)
    for _ in range(2):
        pipe(torch.randn(4, 3)).sum().backward()
    state["call"] = 3
    remedy = r"x = x \+ 1 instead of x \+= 1"
    words = rf"stage 1 \(layer 1\) wrote its input in place.* did not do before.*for example {remedy}"
    with pytest.raises(CheckpointError, match=words):
        pipe(torch.randn(4, 3)).sum().backward()


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("begins", range(1, CALLS + 1))
def test_a_stage_may_begin_to_detach_its_input_in_place(begins: int, checkpoint: str) -> None:
    """What it computed before goes on as it was, and what it computes from then on has no gradient there."""
    state = {"call": 0}

    def late(x: Tensor) -> Tensor:
        y = x.exp()  # saves its result
        return y + x.detach_() if state["call"] >= begins else y + x

    torch.manual_seed(3)
    first = linear(3)
    pipe = Pipe(nn.Sequential(first, Apply(late)), [1, 1], 2, checkpoint=checkpoint)
    for state["call"] in range(1, CALLS + 1):
        x = torch.randn(4, 3)
        parts = [late(first(rows)).square().sum() for rows in x.chunk(2)]
        expected = torch.autograd.grad(parts[0] + parts[1], list(first.parameters()))
        assert all(map(torch.allclose, torch.autograd.grad(pipe(x).square().sum(), list(first.parameters())), expected))


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved"])
@pytest.mark.parametrize("entry", ["forward", "step", "evaluate", "eager"])
def test_a_layer_sees_the_same_kind_of_input_in_every_call(entry: str, schedule: str, checkpoint: str) -> None:
    """With what it gets in the plain module: a result of autograd, or where nothing wants a gradient a leaf."""
    seen: dict[int, set[tuple[Any, ...]]] = {}
    call = 0

    class Looks(nn.Module):
        def __init__(self, place: int) -> None:
            super().__init__()
            self.place = place
            self.layer = linear(4)

        def forward(self, x: Tensor) -> Tensor:
            key = call, self.place
            if torch.is_grad_enabled() or entry == "evaluate":  # a recomputation looks, the probe's forwards do not
                seen.setdefault(key, set()).add((x.is_leaf, type(x.grad_fn).__name__, x.requires_grad, x.retains_grad))
            return torch.tanh(self.layer(x))

    torch.manual_seed(3)
    model = nn.Sequential(*[Looks(place) for place in range(4)])
    pipe = Pipe(model, [1, 1, 1, 1], 4, schedule=schedule, checkpoint=checkpoint)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for call in range(1, 10):
        x = torch.randn(8, 4)
        if entry == "forward":
            pipe(x).sum().backward()
        if entry == "step":
            pipe.step(x, loss_fn=lambda out, _: out.square().mean())
        if entry == "evaluate":
            pipe.evaluate(x, loss_fn=lambda out, _: out.square().mean())
        if entry == "eager":
            pipe.step(x, loss_fn=lambda out, _: out.square().mean(), optimizer=EagerUpdate(optimizer))
    for place in range(4):
        assert all([seen[call, place] == seen[1, place] for call in range(1, 10)])
        ((is_leaf, _, requires_grad, _),) = seen[1, place]
        assert (is_leaf, requires_grad) == ((True, False) if place == 0 or entry == "evaluate" else (False, True))


def test_a_layers_own_fault_with_a_leaf_of_its_own_is_shown_as_torch_says_it() -> None:
    state = {"call": 0}
    mine = torch.ones(4, requires_grad=True)

    def faulty(x: Tensor) -> Tensor:
        if state["call"] == 3:
            mine.mul_(2)
        return x * x

    pipe = Pipe(nn.Sequential(linear(3), Apply(faulty)), [1, 1], 2, checkpoint="never")
    for _ in range(2):
        pipe(torch.randn(4, 3)).sum().backward()
    state["call"] = 3
    with pytest.raises(RuntimeError) as caught:
        pipe(torch.randn(4, 3))
    shown = caught.value if "leaf Variable" in str(caught.value) else caught.value.__cause__
    assert "a leaf Variable that requires grad is being used in an in-place operation" in str(shown)


def test_a_gradient_that_a_layer_retains_is_there_after_every_call() -> None:
    kept: list[Tensor] = []

    def retains(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.retain_grad()
            kept.append(x)
        return x * x

    pipe = Pipe(nn.Sequential(linear(3), Apply(retains)), [1, 1], 1, checkpoint="never")
    for _ in range(CALLS):
        pipe.step(torch.randn(4, 3), loss_fn=lambda out, _: out.sum(), loss_reduction="sum")
        x = kept.pop()
        assert x.grad is not None and torch.equal(x.grad, 2 * x)


@pytest.mark.parametrize("name", ["linear", "an expanded gradient", "a captured leaf", "a gradient in another layout"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_second_backward_of_a_retained_graph_gives_the_same_again(name: str, checkpoint: str) -> None:
    model = model_with(STAGES[name])
    pipe = Pipe(model, [1, 1, 1], 2, checkpoint=checkpoint, mixes_rows=True)
    for _ in range(CALLS):
        x = torch.randn(4, 3, requires_grad=True)
        out = pipe(x).sum()
        wanted = [x, *model.parameters()]
        once = torch.autograd.grad(out, wanted, retain_graph=True)
        twice = torch.autograd.grad(out, wanted, retain_graph=True)
        assert all(map(torch.equal, once, twice))


@pytest.mark.parametrize("what, name", [("the input", "input of stage 0 "), ("a parameter", "parameter '2.weight'")])
def test_what_is_written_before_a_recomputation_is_named_in_every_call(what: str, name: str) -> None:
    words = name + ".* was changed in place between the forward and the recomputation"
    pipe = Pipe(nn.Sequential(linear(), nn.Tanh(), linear()), [2, 1], 4, checkpoint="always")
    for call in range(1, CALLS + 1):
        x = torch.randn(8, 4)
        loss = pipe(x).square().mean()
        with torch.no_grad():
            (x if what == "the input" else pipe[2].weight).mul_(2)
        with pytest.raises(CheckpointError, match=words):
            loss.backward()
        assert all(param.grad is None for param in pipe.parameters()), call


@pytest.mark.parametrize("change", ["eval", "autocast", "no_grad"])
def test_what_is_switched_before_a_recomputation_is_as_it_was_in_every_call(change: str) -> None:
    found = []
    for checkpoint in ("never", "always"):
        torch.manual_seed(3)
        pipe = Pipe(nn.Sequential(linear(), nn.Dropout(0.5), linear()), [2, 1], 4, checkpoint=checkpoint)
        for _ in range(CALLS):
            pipe.train()
            loss = pipe(torch.randn(8, 4)).square().mean()
            with {"eval": nullcontext(), "autocast": torch.autocast("cpu"), "no_grad": torch.no_grad()}[change]:
                pipe.train(change != "eval")
                loss.backward()
        found.append([param.grad for param in pipe.parameters()])
    assert all(map(same, *found))


def test_second_order_is_the_plain_modules_in_every_call() -> None:
    model = model_with(STAGES["linear"]).double()
    pipe = Pipe(model, [1, 1, 1], 2, checkpoint="never")
    for _ in range(CALLS):
        x = torch.randn(4, 3).double().requires_grad_()
        found = []
        for module in (model, pipe):
            (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(grad.square().sum(), [x, *model.parameters()]))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_a_leaf_that_is_captured_in_a_late_chunk_of_a_late_call_counts() -> None:
    state = {"seen": 0}
    leaf = torch.ones((), requires_grad=True)

    def late(x: Tensor) -> Tensor:
        state["seen"] += 1
        return x * leaf if state["seen"] % 4 == 3 else x * 1

    model = nn.Sequential(linear(3), nn.Sequential(Apply(late), linear()))
    pipe = Pipe(model, [1, 1], 4, checkpoint="never")
    for _ in range(CALLS):
        x = torch.randn(8, 3)
        leaf.grad = None
        pipe.step(x, loss_fn=lambda out, _: out.sum(), loss_reduction="sum")
        with torch.no_grad():
            expected = model[1][1].weight.sum(0) @ model[0](x.tensor_split(4)[2]).sum(0)
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-4, atol=1e-5)
        (grad,) = torch.autograd.grad(pipe(x).sum(), leaf)
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


class Noisy(Tensor):
    """Draws wherever it is rectified."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out + torch.rand(()) if func in (torch.relu, torch.nn.functional.relu) else out


@pytest.mark.parametrize("what", ["a loss that draws in its backward", "an input that draws"])
@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_torchs_own_layers_leave_the_numbers_to_others_that_they_had(what: str, outputs: bool, schedule: str) -> None:
    def gradients() -> list[Any]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.ReLU(), linear(), nn.ReLU(), linear(), nn.Tanh())
        pipe = Pipe(model, [2, 2, 1], 3, schedule=schedule, checkpoint="always")
        found, under_way = [], [0]  # a number that the loss closes over would make it another loss in each call

        def loss_fn(out: Tensor, _: Any) -> Tensor:
            if what.startswith("a loss") and under_way == [3]:  # the first two are compared with the un-pipelined ones
                out.register_hook(lambda grad: grad + torch.randn_like(grad))
            return out.square().mean()

        for under_way[0] in range(1, 4):
            x = torch.randn(6, 4)
            x = x.as_subclass(Noisy) if what == "an input that draws" else x
            pipe.step(x, loss_fn=loss_fn, outputs=outputs)
            found += [param.grad for param in model.parameters()]
            pipe.zero_grad(set_to_none=True)
        return found

    short = gradients()
    with mock.patch.dict(pipeline.recompute.randomness._FORWARDS, clear=True):
        assert all(map(torch.equal, short, gradients()))


def test_a_mode_that_draws_in_the_backward_alone_draws_the_same_again() -> None:
    class NoisyBackward(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out + torch.rand(()) if func is torch.ops.aten.threshold_backward.default else out

    model = nn.Sequential(linear(), nn.ReLU(), linear())
    out = Pipe(model, [2, 1], 2, checkpoint="never")(torch.randn(4, 4)).sum()
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        with NoisyBackward():
            found.append(torch.autograd.grad(out, list(model[0].parameters()), retain_graph=True))
    assert all(map(torch.equal, *found))


# ------------------------------------------------------------------------------------- what belongs to the caller


class WritesLateChunks(nn.Module):
    """Writes its input past autograd, but not that of the first chunk."""

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] >= 2:
            x.data.mul_(3)
        return x * 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("entry", ["forward", "evaluate"])
def test_without_gradients_no_chunk_of_the_callers_input_is_written(mode: type, entry: str) -> None:
    pipe = Pipe(nn.Sequential(WritesLateChunks(), nn.Identity()), [1, 1], 4, mixes_rows=True)
    x = torch.arange(8.0)[:, None].repeat(1, 3)
    before = x.clone()
    for _ in range(3):
        if entry == "forward":
            with mode():
                out = pipe(x)
        else:
            out = pipe.evaluate(x, loss_fn=lambda output, _: output.mean()).outputs
        assert torch.equal(x, before)
        assert torch.equal(out, torch.where(torch.arange(8)[:, None] // 2 * 2 >= 2, 6 * x, 2 * x))
