"""Do torchgpipe's promises about skip connections hold here? Everything else is in test_from_torchgpipe.py.

Its cases (torchgpipe 0.0.7, tests/skip/; each name with test_ before it) -> ours that ask the same.

    test_api.py
      namespace_difference, namespace_copy -> test_a_namespace_is_its_copies_and_no_other
      skippable_repr -> test_a_skippable_layer_prints_what_it_wraps
    test_gpipe.py
      1to3 (CUDA there) -> test_a_skip_past_a_layer_is_plain
      none_skip -> test_none_is_skipped
    test_verify_skippables.py
      matching, stash_pop_together_different_names, double_stash_pop_but_isolated -> test_pairs_that_match_are_accepted
      stash_not_pop, pop_unknown, stash_again, pop_again, stash_pop_together_same_name, double_stash_pop ->
          test_pairs_that_do_not_match_are_refused_by_name
    test_stash_pop.py
      stash, pop, stash_none -> test_without_a_pipe_what_is_stashed_is_popped_once
      declare_but_not_use, stash_not_declared, pop_not_declared, pop_not_stashed ->
          test_what_is_declared_is_done_and_nothing_else, test_what_was_not_stashed_is_not_popped
    test_leak.py
      delete_portal_tensor -> test_a_popped_skip_dies_without_gradients,
          test_a_skip_is_dead_when_its_stash_goes_backward
      no_portal_without_gpipe -> test_without_a_pipe_gradients_pass_through_a_skip
    test_inspect_skip_layout.py
      no_skippables, inner_partition, adjoining_partitions, far_partitions, pop_2_from_different_partitions,
          namespace ->
          test_only_skips_that_cross_stages_are_sent_and_straight_to_who_pops_them

Its test_portal and test_tracker ask about private modules.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import pytest
import torch
from by_chunks import CHECKPOINTS, ByChunks, assert_same_grads, same, twins
from pipeline_probes import no_collector
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from partition import split
from pipeline import Pipe, is_recomputing
from pipeline.skip import Namespace, pop, routes, skippable, stash, verify_skippables

F64 = torch.float64
every_mode = pytest.mark.parametrize("checkpoint", CHECKPOINTS)
Commands = Generator[Any, Any, Any]


class Stashing(nn.Module):
    """Stashes its input under each name; the name's place makes them different."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: Tensor) -> Commands:
        for place, name in enumerate(self.names, 1):
            yield stash(name, x * place)
        return x


class Popping(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: Tensor) -> Commands:
        for name in self.names:
            x = 2 * x + (yield pop(name))
        return x


class Both(nn.Module):
    def __init__(self, popped: str, stashed: str) -> None:
        super().__init__()
        self.popped, self.stashed = popped, stashed

    def forward(self, x: Tensor) -> Commands:
        y = yield pop(self.popped)
        yield stash(self.stashed, x + y)
        return x


def stashes(*names: str) -> Any:
    return skippable(stash=names)(Stashing)(*names)


def pops(*names: str) -> Any:
    return skippable(pop=names)(Popping)(*names)


def both(popped: str, stashed: str) -> Any:
    return skippable(stash=[stashed], pop=[popped])(Both)(popped, stashed)


def test_a_namespace_is_its_copies_and_no_other() -> None:
    one, other = Namespace(), Namespace()
    assert one != other and hash(one) != hash(other)
    for again in (copy.copy(one), copy.deepcopy(one)):
        assert again == one and hash(again) == hash(one) and {one: 1}[again] == 1


def test_a_copy_of_a_model_with_namespaces_still_matches() -> None:
    space = Namespace()
    model = nn.Sequential(stashes("a").isolate(space), pops("a").isolate(space), stashes("a"), pops("a"))
    x = torch.rand(4, 2)
    assert torch.equal(Pipe(copy.deepcopy(model), [1, 1, 1, 1], 2)(x), model(x))


def test_a_skippable_layer_prints_what_it_wraps() -> None:
    @skippable(stash=["hello"])
    class Hello(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

    assert repr(Hello()) == "@skippable(Hello(\n  (inner): Linear(in_features=1, out_features=1, bias=True)\n))"
    assert Hello.__name__ == "Hello" and list(Hello().state_dict()) == ["module.inner.weight", "module.inner.bias"]


@skippable(stash=["1to3"])
class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Commands:
        yield stash("1to3", x)
        return self.conv(x)


@skippable(pop=["1to3"])
class Third(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Commands:
        skip = yield pop("1to3")
        return self.conv(x) + skip.square()


@every_mode
@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_a_skip_past_a_layer_is_plain(balance: list[int], checkpoint: str) -> None:
    plain, by_chunks = twins(nn.Sequential(First(), nn.Conv2d(3, 3, 1), Third()).double())
    piped = copy.deepcopy(plain)
    x = torch.rand(8, 3, 4, 4, dtype=F64, requires_grad=True)
    out = Pipe(piped, balance, 3, checkpoint=checkpoint)(x)
    out.square().mean().backward()
    reference = ByChunks(by_chunks, x, 3)
    reference.backward(reference.output.square().mean())
    assert torch.equal(out, reference.output) and same(x.grad, reference.input_grad)
    assert_same_grads(piped, by_chunks)
    other = x.detach().clone().requires_grad_()
    torch.testing.assert_close(plain(other), out.detach(), rtol=1e-13, atol=1e-14)
    plain(other).square().mean().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-12, atol=1e-15)


@every_mode
def test_none_is_skipped(checkpoint: str) -> None:
    popped: list[object] = []

    @skippable(stash=["none"])
    class Stash(nn.Module):
        def forward(self, x: Tensor) -> Commands:
            yield stash("none", None)
            return x

    @skippable(pop=["none"])
    class Pop(nn.Module):
        def forward(self, x: Tensor) -> Commands:
            popped.append((yield pop("none")))
            return x

    x = torch.rand(10, requires_grad=True)
    Pipe(nn.Sequential(Stash(), nn.Identity(), Pop()), [1, 1, 1], 5, checkpoint=checkpoint)(x).sum().backward()
    assert set(popped) == {None} and len(popped) >= 5 and torch.equal(x.grad, torch.ones(10))


def test_pairs_that_match_are_accepted() -> None:
    one, other = Namespace(), Namespace()
    for layers in (
        [stashes("foo"), pops("foo")],
        [stashes("foo"), both("foo", "bar"), pops("bar")],
        [layer.isolate(space) for space in (one, other) for layer in (stashes("foo"), pops("foo"))],
        [stashes("foo").isolate(one), stashes("foo"), pops("foo"), pops("foo").isolate(one)],
    ):
        model = nn.Sequential(*layers)
        verify_skippables(model)
        x = torch.rand(4, dtype=F64)
        expected = model(x)
        for balance in ([len(layers)], [1] * len(layers)):
            assert torch.equal(Pipe(model, balance, 2)(x), expected)


@pytest.mark.parametrize(
    "layers, faults",
    [
        ([stashes("foo")], ["no module declared 'foo' as poppable but stashed"]),
        ([pops("foo")], ["'0' declared 'foo' as poppable but it was not stashed"]),
        ([pops("foo"), stashes("foo")], ["'0' declared 'foo' as poppable but it was not stashed"]),
        ([stashes("foo"), stashes("foo"), pops("foo")], ["'1' redeclared 'foo' as stashable"]),
        ([stashes("foo"), pops("foo"), pops("foo")], ["'2' redeclared 'foo' as poppable"]),
        ([both("foo", "foo")], ["'0' declared 'foo' both as stashable and as poppable"]),
        (
            [stashes("foo"), pops("foo"), stashes("foo"), pops("foo")],
            ["'2' redeclared 'foo' as stashable", "'3' redeclared 'foo' as poppable"],
        ),
    ],
)
def test_pairs_that_do_not_match_are_refused_by_name(layers: list[nn.Module], faults: list[str]) -> None:
    model = nn.Sequential(*layers)
    for check in (verify_skippables, lambda module: Pipe(module, [1] * len(layers), 2)):
        with pytest.raises(TypeError, match="one or more pairs of stash and pop do not match") as caught:
            check(model)
        assert all(f"* {fault}" in str(caught.value) for fault in faults)


def test_without_a_pipe_what_is_stashed_is_popped_once() -> None:
    x = torch.tensor(42.0)
    assert stashes("foo", "bar")(x).item() == 42
    assert pops("bar")(x).item() == 42 * 4  # 2 * 42 + the second, 84
    assert pops("foo")(x).item() == 42 * 3
    for name in ("foo", "bar"):
        with pytest.raises(RuntimeError, match=f"'{name}' has not been stashed"):
            pops(name)(x)


def test_without_a_pipe_gradients_pass_through_a_skip() -> None:
    x = torch.rand(10, dtype=F64, requires_grad=True)
    model = nn.Sequential(stashes("skip"), nn.Tanh(), pops("skip"))
    model(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * (1 - x.detach().tanh() ** 2) + 1, rtol=1e-14, atol=0)
    with torch.no_grad():
        assert model.eval()(x).grad_fn is None


@skippable(stash=["foo"], pop=["bar"])
class Idle(nn.Module):
    """Does nothing of what it declares."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("piped", [False, True])
@pytest.mark.parametrize(
    "layers, words",
    [
        ([skippable(stash=["foo"])(nn.Identity)(), pops("foo")], "'foo' must be stashed but has not been"),
        ([stashes("foo"), skippable(pop=["foo"])(nn.Identity)()], "'foo' must be popped but has not been"),
        ([stashes("bar"), Idle(), pops("foo")], "'foo' must be stashed but has not been"),
        ([skippable()(Stashing)("foo")], "'foo' has not been declared as stashable"),
        ([stashes("foo"), skippable()(Popping)("foo"), pops("foo")], "'foo' has not been declared as poppable"),
    ],
)
def test_what_is_declared_is_done_and_nothing_else(layers: list[nn.Module], words: str, piped: bool) -> None:
    model = nn.Sequential(*layers)
    net = Pipe(model, [1] * len(layers), 2) if piped else model
    with pytest.raises(RuntimeError, match=words):
        net(torch.rand(4))


def test_what_was_not_stashed_is_not_popped() -> None:
    with pytest.raises(RuntimeError, match="'never' has not been stashed"):
        pops("never")(torch.rand(4))


class Life:
    """Watches what is stashed and popped: chunk -> the memory of its skip."""

    def __init__(self) -> None:
        self.skips: dict[int, StorageWeakRef] = {}
        life = self

        @skippable(stash=["skip"])
        class Stash(nn.Module):
            def forward(self, x: Tensor) -> Commands:
                skip = x + 1
                if not is_recomputing():
                    life.skips[int(x[0, 0])] = StorageWeakRef(skip.untyped_storage())
                yield stash("skip", skip)
                return x

        self.stash, self.pop = Stash(), pops("skip")

    def dead(self) -> set[int]:
        return {chunk for chunk, storage in self.skips.items() if storage.expired()}


def numbered(chunks: int) -> Tensor:
    return torch.arange(chunks, dtype=F64)[:, None].repeat(1, 2)


@pytest.mark.inline
@every_mode
@pytest.mark.parametrize("train", [True, False])
def test_a_popped_skip_dies_without_gradients(train: bool, checkpoint: str) -> None:
    life, seen = Life(), []

    def after(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        seen.append((int(args[0][0, 0]), life.dead()))

    last = nn.Identity()
    last.register_forward_hook(after)
    model = nn.Sequential(life.stash, nn.Identity(), life.pop, last).train(train)
    with no_collector(), torch.no_grad():
        Pipe(model, [1, 1, 1, 1], 3, checkpoint=checkpoint)(numbered(3))
        assert life.dead() == {0, 1, 2}
    assert [len(dead) for _, dead in seen] == [1, 2, 3]


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, life: Life, log: list[tuple[int, bool]]) -> Tensor:
        ctx.chunk, ctx.life, ctx.log = int(x[0, 0]), life, log
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append((ctx.chunk, ctx.chunk in ctx.life.dead()))
        return grad, None, None


@every_mode
@pytest.mark.parametrize("entry", ["forward", "step"])
def test_a_skip_is_dead_when_its_stash_goes_backward(entry: str, checkpoint: str) -> None:
    life, log = Life(), []

    class Note(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Backward.apply(x, life, log)

    model = nn.Sequential(Note(), life.stash, life.pop)
    pipe = Pipe(model, [2, 1], 3, checkpoint=checkpoint)
    x = numbered(3).requires_grad_()
    with no_collector():
        if entry == "forward":
            pipe(x).norm().backward()
        else:
            pipe.step(x, loss_fn=lambda out, _: out.sum(), loss_reduction="sum")
        assert life.dead() == {0, 1, 2}
    assert log == [(chunk, True) for chunk in range(3)]


@pytest.mark.parametrize(
    "stages, crossing",
    [
        ([[nn.Identity()], [nn.Identity()]], []),
        ([[stashes("foo"), pops("foo")], [nn.Identity()]], []),
        ([[stashes("foo")], [pops("foo")]], [("foo", 0, 1)]),
        ([[stashes("foo")], [nn.Identity()], [pops("foo")]], [("foo", 0, 2)]),
        ([[stashes("foo")], [stashes("bar")], [pops("bar"), pops("foo")]], [("foo", 0, 2), ("bar", 1, 2)]),
        (
            [
                [stashes("foo").isolate(Namespace("one"))],
                [stashes("foo").isolate(Namespace("two"))],
                [pops("foo").isolate(Namespace("two")), pops("foo").isolate(Namespace("one"))],
            ],
            [("foo", 0, 2), ("foo", 1, 2)],
        ),
    ],
)
def test_only_skips_that_cross_stages_are_sent_and_straight_to_who_pops_them(
    stages: list[list[nn.Module]], crossing: list[tuple[str, int, int]]
) -> None:
    model, balance = nn.Sequential(*(layer for stage in stages for layer in stage)), [len(stage) for stage in stages]
    found = routes(split(model, balance))
    assert sorted((key.name, made, read) for key, made, read in found) == sorted(crossing)
    x = torch.rand(6, dtype=F64)
    assert torch.equal(Pipe(model, balance, 3)(x), model(x))
