"""Law: a recomputation runs under the hooks of modules with which its forward began, and leaves those that it found."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from pipeline import EagerUpdate, Pipe, Place, checkpoint_blocks, is_recomputing

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of a layer whose input has no gradient

WAYS = ("blocks", "never", "except_last", "always")
CHUNKS = (1, 2)
Register = Callable[[nn.Module], Any]
Models = tuple[nn.Sequential, nn.Sequential, nn.Module]  # the plain one; the other; what runs that


def doubled(grad: Tensor) -> Tensor:
    return grad * 2


def double_gradient(module: nn.Module, args: Any, output: Any) -> None:
    if isinstance(module, nn.Tanh) and output.requires_grad:
        output.register_hook(doubled)


def double_gradient_with_kwargs(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    double_gradient(module, args, output)


def of_inputs(module: nn.Module, args: Any) -> tuple[Tensor]:
    return (args[0] + 0.1,)


def of_gradients(module: nn.Module, grads: Any, _: Any = None) -> Any:
    return (grads[0] * 2,) if isinstance(module, nn.Tanh) else None


REGISTER: dict[str, Register] = {
    "tensor hooks": lambda layer: layer.register_forward_hook(double_gradient),
    "tensor hooks, with kwargs": lambda layer: layer.register_forward_hook(
        double_gradient_with_kwargs, with_kwargs=True, always_call=True, prepend=True),
    "outputs": lambda layer: layer.register_forward_hook(lambda module, args, output: output + 0.1),
    "inputs": lambda layer: layer.register_forward_pre_hook(of_inputs),
    "inputs, with kwargs": lambda layer: layer.register_forward_pre_hook(
        lambda module, args, kwargs: (of_inputs(module, args), kwargs), with_kwargs=True),
    "backward": lambda layer: layer.register_full_backward_hook(of_gradients),
    "backward, before": lambda layer: layer.register_full_backward_pre_hook(of_gradients),
    "of all modules, tensor hooks": lambda layer: module_hooks.register_module_forward_hook(double_gradient),
    "of all modules, backward": lambda layer: module_hooks.register_module_full_backward_pre_hook(of_gradients),
}  # fmt: skip
OF_ALL = [name for name in REGISTER if name.startswith("of all modules")]


def rows() -> Tensor:
    return torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)


def loss_of(output: Tensor, target: object = None) -> Tensor:
    return output.pow(3).mean() + output.square().mean()


def models(way: str, chunks: int, **settings: Any) -> Models:
    """A model with a hookable layer 1 of torch's own, twice."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), inner, nn.Linear(3, 3)).double()
    ours = copy.deepcopy(plain)
    if way == "blocks":
        checkpoint_blocks(ours, lambda name, module: name in ("1", "2"))
        return plain, ours, ours
    return plain, ours, Pipe(ours, [2, 2], chunks, checkpoint=way, **settings)


def gradients(loss: Tensor, model: nn.Module, twice: bool = False) -> Sequence[Tensor]:
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, create_graph=twice)
    if not twice:
        return first
    return *first, *torch.autograd.grad(sum(grad.square().sum() for grad in first), parameters)


def check_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert all(bool(grad.abs().max() > 1e-6) for grad in expected)
    torch.testing.assert_close(list(found), list(expected), rtol=1e-12, atol=1e-14)


def entries_of(model: nn.Module) -> list[dict[int, Any]]:
    tables = [table for module in model.modules() for name, table in vars(module).items() if name.endswith("_hooks")]
    return list(map(dict, tables))


def once(layer: nn.Module, hook: Callable[..., Any] = double_gradient) -> list[int]:
    """Register a hook that removes itself as it runs. Returns the numbers of its runs, one after the other."""
    runs: list[int] = []

    def run_once(*args: Any) -> Any:
        handle.remove()
        runs.append(len(runs))
        return hook(*args)

    handle = layer.register_forward_hook(run_once)
    return runs


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", REGISTER)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("way", WAYS)
def test_hooks_that_are_on_during_the_forward_alone_act(way: str, chunks: int, name: str, twice: bool) -> None:
    plain, ours, pipe = models(way, chunks)
    for _ in range(3):  # call 3 compares less
        found = []
        for model, run in ((plain, plain), (ours, pipe)):
            handles = [REGISTER[name](layer) for layer in ([model[1]] if name in OF_ALL else [model[1], model[2][1]])]
            loss = loss_of(run(rows()))
            for handle in handles:
                handle.remove()
            found.append(gradients(loss, model, twice))
            assert not any(entries_of(model)) and not module_hooks._has_any_global_hook()
        check_equal(found[1], found[0])


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", REGISTER)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("way", WAYS)
def test_hooks_that_are_on_during_the_backward_alone_do_not_act(way: str, chunks: int, name: str, twice: bool) -> None:
    plain, ours, pipe = models(way, chunks)
    expected = gradients(loss_of(plain(rows())), plain, twice)
    for _ in range(3):
        loss = loss_of(pipe(rows()))
        handle = REGISTER[name](ours[1])
        registered = entries_of(ours)
        check_equal(gradients(loss, ours, twice), expected)
        assert entries_of(ours) == registered
        handle.remove()
        assert not any(entries_of(ours)) and not module_hooks._has_any_global_hook()


@pytest.mark.parametrize("entry", ["forward", "create_graph", "step", "eager"])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("way", WAYS[1:])
def test_a_hook_that_removes_itself_acts_on_one_chunk(way: str, chunks: int, entry: str) -> None:
    plain, ours, pipe = models(way, chunks)
    for _ in range(3):
        once(plain[1])
        once(plain[2][1])
        loss = loss_of(torch.cat([plain(part) for part in rows().tensor_split(chunks)]))
        expected = gradients(loss, plain, twice=entry == "create_graph")
        runs = [once(ours[1]), once(ours[2][1])]
        if entry in ("forward", "create_graph"):
            found = gradients(loss_of(pipe(rows())), ours, twice=entry == "create_graph")
        else:
            before = [parameter.detach().clone() for parameter in ours.parameters()]
            optimizer = EagerUpdate(torch.optim.SGD(ours.parameters(), lr=1.0), clip="two_pass", max_norm=1e9)
            pipe.step(rows(), loss_fn=loss_of, optimizer=optimizer if entry == "eager" else None)
            found = [
                earlier - parameter.detach() if entry == "eager" else parameter.grad
                for earlier, parameter in zip(before, ours.parameters())
            ]
            with torch.no_grad():
                for parameter, value in zip(ours.parameters(), before):
                    parameter.copy_(value)
                    parameter.grad = None
        check_equal(found, expected)
        assert all(runs) and not any(entries_of(ours))


@pytest.mark.parametrize("way", WAYS[1:])
def test_tables_of_hooks_are_left_as_the_caller_has_made_them_and_handles_stay_valid(way: str) -> None:
    plain, ours, pipe = models(way, 2)
    found = []
    for model, run in ((plain, plain), (ours, pipe)):
        table, counts = model[1]._forward_hooks, {"removed": 0, "later": 0}

        def count(name: str, *args: Any) -> None:
            counts[name] += not is_recomputing()

        removed = model[1].register_forward_hook(partial(count, "removed"))
        kept = model[1].register_forward_hook(double_gradient)
        loss = loss_of(run(rows()))
        removed.remove()
        later = model[1].register_forward_hook(partial(count, "later"))
        found.append(gradients(loss, model))
        assert model[1]._forward_hooks is table and list(table) == [kept.id, later.id]
        run(rows())
        assert counts["removed"] in (1, 2) and counts["later"] == counts["removed"]
        kept.remove()
        later.remove()
        assert not any(entries_of(model))
    check_equal(found[1], found[0])


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_hook_that_a_forward_registers_stays_once_and_acts_from_then_on(way: str) -> None:
    plain, ours, pipe = models(way, 2)

    def register(module: nn.Module, args: Any) -> None:
        if len(module._forward_hooks) < 2:
            module.register_forward_hook(double_gradient)

    for model in (plain, ours):
        model[1].register_forward_pre_hook(register)
    for number in range(1, 4):
        expected = gradients(loss_of(torch.cat([plain(part) for part in rows().tensor_split(2)])), plain)
        check_equal(gradients(loss_of(pipe(rows())), ours), expected)
        assert len(ours[1]._forward_hooks) == len(plain[1]._forward_hooks) == 2


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_forward_in_another_table_of_hooks_than_the_backward_keeps_its_hooks(way: str) -> None:
    """A caller clears them by assignment."""
    plain, ours, pipe = models(way, 2)
    found = []
    for model, run in ((plain, plain), (ours, pipe)):
        model[1].register_forward_hook(double_gradient)
        loss = loss_of(run(rows()))
        model[1]._forward_hooks = OrderedDict()
        found.append(gradients(loss, model))
        assert not any(entries_of(model))
    check_equal(found[1], found[0])


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_hook_that_removes_itself_acts_where_the_first_forward_runs_twice(way: str) -> None:
    """What a checkpointed forward saves is dropped; the first chunk runs again where a layer calls autograd."""

    class Differentiates(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            (grad,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
            return x + grad

    plain, ours, _ = models("never", 2)
    for model in (plain, ours):
        model[2].append(Differentiates())
        once(model[1])
    pipe = Pipe(ours, [3, 1], 2, checkpoint=way)
    expected = gradients(loss_of(torch.cat([plain(part) for part in rows().tensor_split(2)])), plain)
    check_equal(gradients(loss_of(pipe(rows())), ours), expected)
    assert not any(entries_of(ours))


@pytest.mark.parametrize("name", OF_ALL)
def test_hooks_of_all_modules_are_those_of_the_forward_in_threads_too(name: str) -> None:
    cpu = torch.device("cpu")
    plain, ours, pipe = models("always", 4, devices=[Place(cpu, "a"), Place(cpu, "b")], workers="threads")
    for _ in range(3):  # the third call runs in threads
        found = []
        for model, run in ((plain, plain), (ours, pipe)):
            handle = REGISTER[name](model)
            loss = loss_of(run(rows()))
            handle.remove()
            found.append(gradients(loss, model))
        check_equal(found[1], found[0])
