"""The interface of skip connections: what is accepted, what each layer sees, what is refused and in which words.

The numbers are test_skip_laws.py; torchgpipe's own promises are test_from_torchgpipe_skip.py.
"""

from __future__ import annotations

import copy
import re
import threading
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from by_chunks import same
from hypothesis import given
from hypothesis import strategies as st
from law_models import Checkpointed, normal
from pipeline_probes import no_collector
from skip_models import SKIPS, Commands, Pop, Stash
from torch import Tensor, nn

from partition import balance_by_size, balance_by_time
from pipeline import Pipe
from pipeline.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables

HEAD = "one or more pairs of stash and pop do not match:\n\n"


class Does(nn.Module):
    """Pops, then stashes, under names that are told; what it gives on depends on the order of all."""

    def __init__(self, stashes: tuple[str, ...], pops: tuple[str, ...]) -> None:
        super().__init__()
        self.stashes, self.pops = stashes, pops

    def forward(self, x: Tensor) -> Commands:
        for place, name in enumerate(self.pops, 2):
            x = x + place * (yield pop(name))
        for place, name in enumerate(self.stashes, 3):
            yield stash(name, x.sin() * place)
        return x.cos()


def does(stashes: str = "", pops: str = "") -> Skippable:
    """A layer that stashes and pops skips with names of one letter."""
    return skippable(stash=stashes, pop=pops)(Does)(tuple(stashes), tuple(pops))


# ------------------------------------------------------------------------------------------------ which are accepted


@st.composite
def layers_that_may_match(draw: st.DrawFn) -> list[tuple[str, str, str, bool]]:
    """For each layer: what it stashes, what it pops, the names that are in the namespace, whether it is nested."""
    some = st.sets(st.sampled_from("ab"), max_size=2).map(lambda names: "".join(sorted(names)))
    return draw(st.lists(st.tuples(some, some, some, st.booleans()), min_size=1, max_size=4))


def faults_of(layers: list[tuple[str, str, str, bool]]) -> list[str]:
    """The same rules, counted over the whole list rather than told layer by layer."""
    paths = [f"{index}.1" if nested else f"{index}" for index, (_, _, _, nested) in enumerate(layers)]
    made: list[tuple[str, bool, str]] = []
    read: list[tuple[str, bool, str]] = []
    faults = []
    for path, (stashes, pops, apart, _) in zip(paths, layers, strict=True):
        both = set(stashes) & set(pops)
        faults += [f"'{path}' declared '{name}' both as stashable and as poppable" for name in sorted(both)]
        for name in sorted(set(stashes) - both):
            if any(each[:2] == (name, name in apart) for each in made):
                faults.append(f"'{path}' redeclared '{name}' as stashable but not isolated by namespace")
            made.append((name, name in apart, path))
        for name in sorted(set(pops) - both):
            if any(each[:2] == (name, name in apart) for each in read):
                faults.append(f"'{path}' redeclared '{name}' as poppable but not isolated by namespace")
            elif not any(each[:2] == (name, name in apart) for each in made):
                faults.append(f"'{path}' declared '{name}' as poppable but it was not stashed")
            read.append((name, name in apart, path))
    popped = {each[:2] for each in read}
    first = {each[:2]: each[2] for each in reversed(made)}
    missing = {key: path for key, path in first.items() if key not in popped}
    faults += [f"no module declared '{key[0]}' as poppable but stashed (by '{path}')" for key, path in missing.items()]
    return faults


@given(layers_that_may_match())
def test_what_matches_computes_in_any_cut_and_of_what_does_not_all_faults_are_told(
    layers: list[tuple[str, str, str, bool]]
) -> None:
    space = Namespace()
    made: list[nn.Module] = []
    for stashes, pops, apart, nested in layers:
        layer = does(stashes, pops).isolate(space, only=set(apart) & {*stashes, *pops})
        made.append(nn.Sequential(nn.Identity(), layer) if nested else layer)
    model = nn.Sequential(*made)
    expected = faults_of(layers)
    if expected:
        for check in (verify_skippables, Pipe):
            with pytest.raises(TypeError) as caught:
                check(model)
            text = str(caught.value)
            assert text.startswith(HEAD) and text.endswith("or keep pairs apart: .isolate(ns).")
            assert Counter(re.findall(r"^\* (.*)$", text, re.MULTILINE)) == Counter(expected)
        return
    x = normal(5, 3)
    for balance in ([len(made)], [1] * len(made)):
        assert torch.equal(Pipe(model, balance, 1)(x), model(x))


def test_without_skippable_layers_nothing_is_asked() -> None:
    verify_skippables(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())))
    verify_skippables(nn.Sequential())


def test_a_layer_that_stands_in_two_places_stashes_twice() -> None:
    layer = Stash()
    with pytest.raises(TypeError, match="'1' redeclared 'a' as stashable but not isolated by namespace"):
        verify_skippables(nn.Sequential(layer, layer, Pop()))


def test_skips_of_a_pipe_within_stay_in_it() -> None:
    """A Pipe is closed: its names are its own, whatever stands around it."""
    inner = SKIPS["residual"]()
    pipe = Pipe(inner.model.eval(), [3, 2, 3], 2, checkpoint="always")
    around = nn.Sequential(Stash(lambda x: x[:, :3]), pipe, Pop(torch.mul))
    verify_skippables(around)
    plain = SKIPS["residual"]().model.eval()
    x, other = (normal(6, 4).requires_grad_() for _ in range(2))
    want = plain(other) * other[:, :3]
    for net in (around, Pipe(around, [1, 1, 1], 3)):
        inner.model.zero_grad()
        plain.zero_grad()
        x.grad = other.grad = None
        found = net(x)
        torch.testing.assert_close(found, want, rtol=1e-14, atol=1e-15)
        found.sin().sum().backward()
        want.sin().sum().backward(retain_graph=True)
        pairs = [(x, other), *zip(inner.model.parameters(), plain.parameters(), strict=True)]
        for one, two in pairs:
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-14)


# --------------------------------------------------------------------------------------------------- the decorator


def test_the_decorated_class_takes_the_arguments_of_the_class() -> None:
    @skippable(stash=["a"])
    class Wide(nn.Module):
        def __init__(self, wide: int, *, bias: bool = True) -> None:
            super().__init__()
            self.linear = nn.Linear(2, wide, bias=bias)

        def forward(self, x: Tensor, times: int = 1) -> Commands:
            yield stash("a", x)
            return self.linear(x) * times

    layer = Wide(3, bias=False)
    assert isinstance(layer, Skippable) and isinstance(layer, Wide) and isinstance(layer.module, Wide.module_cls)
    assert list(layer.state_dict()) == ["module.linear.weight"]
    x = torch.rand(4, 2)
    assert torch.equal(layer(x, times=2), layer.module.linear(x) * 2)
    Pop()(x)


def test_a_forward_that_yields_nothing_is_a_layer_like_any_other() -> None:
    layer = skippable()(nn.Linear)(3, 2)
    x = torch.rand(4, 3)
    assert torch.equal(Pipe(nn.Sequential(layer), [1], 2)(x), layer(x))


@pytest.mark.parametrize("command", [None, 3, "a", ("stash", "a", 1)], ids=str)
def test_anything_else_that_is_yielded_is_no_command(command: object) -> None:
    @skippable()
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Commands:
            yield command
            return x

    words = re.escape(f"{command!r} is not a command of @skippable. Yield stash(name, value) or pop(name).")
    with pytest.raises(TypeError, match=words):
        Odd()(torch.rand(2))
    with pytest.raises(TypeError, match=words) as caught:
        Pipe(nn.Sequential(nn.Identity(), Odd()), [1, 1], 2)(torch.rand(2))
    assert caught.value.__notes__ == ["layer 1 (Odd)", "stage 1 (layer 1), chunk 0, 1F0"]


def test_a_skip_is_popped_once() -> None:
    @skippable(pop=["a"])
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Commands:
            first = yield pop("a")
            second = yield pop("a")
            return first + second

    for cut in ([2], [1, 1]):
        model = nn.Sequential(Stash(), Twice())
        for module in (Pipe(model, cut, 2), model):
            with pytest.raises(RuntimeError, match=r"'a' has been popped twice\. A skip is popped once: keep"):
                module(torch.rand(2))
        with pytest.raises(RuntimeError, match=r"'a' has not been stashed\. A layer before must `yield stash\('a'"):
            model[1](torch.rand(2))


def test_what_a_layer_stashed_before_it_failed_is_not_kept() -> None:
    @skippable(stash=["a"])
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Commands:
            yield stash("a", x)
            raise KeyError("here")

    with pytest.raises(KeyError):
        Fails()(torch.rand(2))
    with pytest.raises(RuntimeError, match="'a' has not been stashed"):
        Pop()(torch.rand(2))


# ------------------------------------------------------------------------------------------------------ namespaces


def test_only_the_names_that_are_given_are_isolated() -> None:
    """The names of `only` are put into the namespace, the others stay where they are."""
    one, two = Namespace(), Namespace()
    model = nn.Sequential(
        does("ab").isolate(one, only=["a"]).isolate(two, only="b"), does("a"), does(pops="a"),
        does(pops="a").isolate(one), does(pops="b").isolate(two),
    )
    verify_skippables(model)
    x = normal(4, 3)
    assert torch.equal(Pipe(model, [1] * 5, 3)(x), model(x))
    model[3].isolate(two)
    with pytest.raises(TypeError, match=r"\* '3' declared 'a' as poppable but it was not stashed\n\* no module"):
        verify_skippables(model)


def test_isolating_what_is_not_declared_is_refused() -> None:
    layer = does("ab", "c")
    words = r"isolate: 'd', 'e' is not declared by this layer, which has \['a', 'b', 'c'\]"
    with pytest.raises(ValueError, match=words):
        layer.isolate(Namespace(), only="aed")
    assert layer.namespaces == {} and layer.isolate(Namespace()) is layer and set(layer.namespaces) == set("abc")


def test_a_namespace_by_name_is_the_same_everywhere() -> None:
    assert Namespace("up") == Namespace("up") != Namespace("down")
    model = nn.Sequential(Stash().isolate(Namespace("up")), nn.Tanh(), Pop().isolate(Namespace("up")))
    x = normal(3, 2)
    assert torch.equal(Pipe(model, [1, 1, 1], 3)(x), x + x.tanh())


def test_a_pair_that_is_isolated_after_the_pipe_was_made_is_missed_in_words() -> None:
    model = nn.Sequential(Stash(), nn.Identity(), Pop())
    pipe = Pipe(model, [1, 1, 1], 2)
    space = Namespace()
    model[0].isolate(space)
    model[2].isolate(space)
    with pytest.raises(RuntimeError, match="'a' has not been stashed"):
        pipe(torch.rand(4))
    assert torch.equal(Pipe(model, [1, 1, 1], 2)(torch.ones(4)), torch.full((4,), 2.0))


@pytest.mark.parametrize("deep", [copy.deepcopy, copy.copy])
@pytest.mark.parametrize("name", ["namespaces", "nested", "unet"])
def test_a_copy_of_a_pipe_computes_the_same(name: str, deep: Any) -> None:
    case = SKIPS[name]()
    pipe = Pipe(case.model.eval(), [1] * len(case.model), 2)
    again = deep(pipe)
    x = case.make_input(5)
    for net in (pipe, again):
        net.zero_grad()
        case.loss(net(x)).backward()
    assert torch.equal(pipe(x), again(x))
    assert all(same(one.grad, two.grad) for one, two in zip(pipe.parameters(), again.parameters(), strict=True))
    assert (next(pipe.parameters()) is next(again.parameters())) == (deep is copy.copy)


# ---------------------------------------------------------------------------------------------- the plain Sequential


@pytest.mark.parametrize("name", SKIPS)
def test_the_plain_module_keeps_nothing(name: str) -> None:
    case = SKIPS[name]()
    x = case.make_input(3)
    life: list[weakref.ref[Tensor]] = []
    for layer in case.model:
        layer.register_forward_hook(lambda module, args, out: life.append(weakref.ref(out)))
    with no_collector():
        out = case.model(x)
        case.loss(out).backward()
        del x, out
        assert len(life) == len(case.model) and not any(each() is not None for each in life)


def test_threads_do_not_see_each_others_skips() -> None:
    """Plain modules and Pipes alike: each thread stashes, waits for the other, and pops its own."""
    for piped in (False, True):
        meet = threading.Barrier(1 if piped else 2)  # calls of Pipes take turns
        found: dict[int, Tensor] = {}

        class Meet(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                meet.wait(10)
                return x

        def work(number: int) -> None:
            model = nn.Sequential(Stash(), Meet(), Pop())
            found[number] = (Pipe(model, [1, 1, 1], 2) if piped else model)(torch.full((2,), float(number)))

        threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {number: out.tolist() for number, out in found.items()} == {1: [2.0, 2.0], 2: [4.0, 4.0]}


def test_a_pipe_between_a_plain_stash_and_its_pop_leaves_it_alone() -> None:
    around = nn.Sequential(Stash(), Pipe(nn.Sequential(Stash(torch.neg), nn.Tanh(), Pop()), [1, 1, 1], 2), Pop())
    x = normal(4)
    torch.testing.assert_close(around(x), x.tanh() - x + x)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_pair_within_torchs_own_checkpoint_is_plain(reentrant: bool, checkpoint: str) -> None:
    """Its recomputation runs in the backward, when the stage is no longer computing."""

    def build() -> nn.Sequential:
        torch.manual_seed(2)
        inner = nn.Sequential(nn.Linear(3, 3), Stash(torch.sin), nn.Linear(3, 3), nn.Tanh(), Pop(torch.mul))
        return nn.Sequential(nn.Linear(3, 3), Checkpointed(inner, reentrant), nn.Linear(3, 3)).double()

    ours, plain = build(), build()
    x = normal(4, 3)
    Pipe(ours, [1, 1, 1], 2, checkpoint=checkpoint)(x).sin().sum().backward()
    plain(x).sin().sum().backward()
    for one, two in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------------------------------------- across stages


def test_a_value_that_cannot_cross_stages_is_refused_with_the_name_of_the_skip() -> None:
    model = nn.Sequential(nn.Identity(), Stash(lambda x: {1, 2}), nn.Identity(), Pop(lambda x, a: x + len(a)))
    words = r"skip 'a' of stage 0 \(layers 0..1\) holds a builtins.set \(\{1, 2\}\).*Only tensors"
    with pytest.raises(TypeError, match=words) as caught:
        Pipe(model, [2, 2], 2)(torch.rand(4))
    assert caught.value.__notes__ == ["stage 0 (layers 0..1), chunk 0, 0F0"]
    assert torch.equal(Pipe(model, [4], 2)(torch.ones(4)), torch.full((4,), 3.0))  # within a stage anything goes


def test_what_a_declared_skip_needs_is_told_for_the_stage_that_lacks_it() -> None:
    @skippable(stash=["a"])
    class Sometimes(nn.Module):
        def forward(self, x: Tensor) -> Commands:
            if x[0] < 2:
                yield stash("a", x)
            return x

    pipe = Pipe(nn.Sequential(Sometimes(), nn.Identity(), Pop()), [1, 1, 1], 3)
    words = "'a' must be stashed but has not been. A layer does all that it declares."
    with pytest.raises(RuntimeError, match=words) as caught:
        pipe(torch.arange(3.0))
    assert caught.value.__notes__ == ["layer 0 (Sometimes)", "stage 0 (layer 0), chunk 2, 0F2"]
    assert torch.equal(pipe(torch.ones(3)), torch.full((3,), 2.0))


def test_parameters_from_outside_are_computed_with() -> None:
    """functional_call: no parameter is cached, in a stage that stashes or pops neither."""
    case = SKIPS["relay"]()
    pipe = Pipe(case.model.eval(), [1] * len(case.model), 2)
    other = {name: (param.detach() * 0.5).requires_grad_() for name, param in pipe.named_parameters()}
    x = case.make_input(4)
    grads = []
    for net in (pipe, case.model):
        out = torch.func.functional_call(net, other, (x,))
        grads.append(torch.autograd.grad(case.loss(out), list(other.values())))
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


def test_layers_that_stash_and_pop_can_be_profiled() -> None:
    case = SKIPS["relay"]()
    x = case.make_input(4)
    assert sum(balance_by_size(3, case.model, x)) == len(case.model)
    assert sum(balance_by_time(3, case.model, x, timeout=0.0)) == len(case.model)
    assert torch.equal(case.model.eval()(x), SKIPS["relay"]().model.eval()(x))
