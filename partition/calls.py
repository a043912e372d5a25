"""Runs of a whole model on its sample, watched: the calls of its modules, and what their forwards set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten

from partition.outline import Call, Leaves, Volatile, called_with, renewed


def always_of(model: nn.Module, sample: Any) -> dict[str, Any]:
    """The keyword arguments that a model is called with beside its inputs.

    A model around one of transformers, peft's, hands any keyword argument on to it.
    """
    parameters = signature(model.forward).parameters
    hands_on = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    takes = "use_cache" in parameters or hands_on and any(
        "use_cache" in signature(module.forward).parameters for module in model.modules()
    )
    return {"use_cache": False} if takes and not (isinstance(sample, dict) and "use_cache" in sample) else {}


def run_model(model: nn.Module, x: Any, always: Mapping[str, Any]) -> Any:
    """The output of the model for an input."""
    args, kwargs = called_with(x, always)
    return model(*args, **kwargs)


def volatile_of(model: nn.Module, sample: Any, always: Mapping[str, Any]) -> Volatile:
    """The attributes that the modules' forwards set, and the buffers that they write, in train and in eval mode."""
    found: set[tuple[int, str]] = set()
    own = nn.Module.__setattr__

    def note(module: nn.Module, name: str, value: Any) -> None:
        found.add((id(module), name))
        own(module, name, value)

    with training(model), torch.no_grad():
        buffers = [(id(module), name, each, each._version) for module in model.modules()
                   for name, each in module._buffers.items() if each is not None]  # fmt: skip
        nn.Module.__setattr__ = note  # type: ignore[method-assign, assignment]
        try:
            run_model(model, sample, always)
            for module in model.modules():
                vars(module)["training"] = False
            run_model(model, sample, always)
        finally:
            nn.Module.__setattr__ = own  # type: ignore[method-assign]
        found.update((owner, name) for owner, name, each, version in buffers if each._version != version)
    return frozenset(found)


@contextmanager
def training(*modules: nn.Module) -> Iterator[None]:
    """Within: train mode; at the end eval mode, and buffers as they were."""
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    for module in modules:
        module.train()
    try:
        yield
    finally:
        for module in modules:
            module.eval()
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):  # a write is counted, and BatchNorm's own are not
                    buffer.copy_(value)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class Called(NamedTuple):
    name: str
    begin: int
    end: int
    given: Call
    returned: tuple[Leaves, TreeSpec]


def all_calls(model: nn.Module, sample: Any, always: Mapping[str, Any]) -> list[Called]:
    """Every call of a module within the model, in the order in which they began."""
    found: list[Called] = []
    clock = iter(range(10**9))
    open_calls: list[tuple[int, Call]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        open_calls.append((next(clock), Call(*renewed((args, kwargs)))))

    def after(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, returned: Any) -> None:
            begin, given = open_calls.pop()
            found.append(Called(name, begin, next(clock), given, tree_flatten(returned)))

        return note

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if name:
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after(name), with_kwargs=True).remove)
        run_model(model, sample, always)
    return sorted(found, key=lambda call: call.begin)
