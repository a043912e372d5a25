"""Skips as a profile sees them: values that one layer leaves in the context, and a later layer takes from there.

    layer --stash--> a mapping {key: value} in a context variable --take--> layer

This package knows no runtime. A module that skips says so by two methods, `stashable` and `poppable`, which return
keys; between the layers the value stands under its key in a mapping that is the value of a context variable.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar, copy_context
from typing import Any, Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class SkipModule(Protocol):
    """A module with skips."""

    def stashable(self) -> Iterable[Hashable]:
        """The keys that it stashes."""

    def poppable(self) -> Iterable[Hashable]:
        """The keys that it takes."""


def skips_of(layer: nn.Module) -> tuple[list[Hashable], list[Hashable]]:
    """The keys that a layer stashes for layers after it, and those that it takes from layers before it."""
    stashed: list[Hashable] = []
    popped: list[Hashable] = []
    for module in layer.modules():
        if isinstance(module, SkipModule):
            popped += module.poppable()
            stashed += module.stashable()
    within = set(stashed) & set(popped)
    return [key for key in stashed if key not in within], [key for key in popped if key not in within]


def skips_under(keys: Iterable[Hashable]) -> list[Any]:
    """The values that now stand under these keys."""
    return [variable.get()[key] for key in keys for variable in _holding(key)]


def renew(values: Mapping[Hashable, Any]) -> None:
    """Put values in the places of those that stand under their keys, in this context."""
    for key, value in values.items():
        for variable in _holding(key):
            variable.set({**variable.get(), key: value})


def _holding(key: Hashable) -> Iterator[ContextVar[Any]]:
    for variable, value in copy_context().items():
        if isinstance(value, Mapping) and key in value:
            yield variable
            return
