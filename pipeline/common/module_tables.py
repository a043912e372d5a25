"""Modules' tables of parameters and buffers, and their training flags.

A table is a dict, or, in a ScriptModule, an object of C++.

    module._parameters                           {"weight": p, ...}
    ScriptModuleTable(script, "_parameters")     the same interface for reading and writing
"""

from __future__ import annotations

from collections import Counter
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from partition.modes import modes_of

ModuleTable: TypeAlias = dict[str, Any]


class ScriptModuleTable(dict[str, Any]):
    """A table of a ScriptModule. Its names are fixed; values are read each time.

    Args:
        module: from torch.jit.script or trace.
        table: "_parameters" or "_buffers".
    """

    def __init__(self, module: nn.Module, table: str) -> None:
        super().__init__(dict.fromkeys(getattr(module, table).keys()))
        self._object: Any = module._c

    def __getitem__(self, name: str) -> Any:
        return self._object.getattr(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._object.setattr(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def copy(self) -> dict[str, Any]:
        return {name: self[name] for name in self}

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]  # a view of the present values
        return self.copy().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return self.copy().values()

    def update(self, values: Mapping[str, Any]) -> None:  # type: ignore[override]
        for name, value in values.items():
            if value is not None:  # None stays None
                self[name] = value

    def clear(self) -> None:
        """Leave the table: `update` follows and writes all values."""


def modules_of(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of some modules, each once, in the order of `modules()` and in a quarter of its time.

    Example:
        >>> [type(each).__name__ for each in modules_of([nn.Sequential(nn.ReLU(), nn.Tanh())])]
        ['Sequential', 'ReLU', 'Tanh']
    """
    stack = list(reversed(roots))
    seen: dict[nn.Module, None] = {}
    while stack:
        module = stack.pop()
        if module not in seen:
            seen[module] = None
            if module._modules:
                stack += [child for child in reversed(module._modules.values()) if child is not None]
    return list(seen)


def children_first(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules with their names, each once, those that a module has before itself.

    Example:
        >>> [name for name, _ in children_first(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Tanh()))]
        ['0.0', '0', '1', '']
    """
    names = {id(module): name for name, module in root.named_modules()}
    seen: set[int] = set()

    def below(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        seen.add(id(module))
        for child in module.children():
            if id(child) not in seen:
                yield from below(child)
        yield names[id(module)], module

    return below(root)


def buffers_of(module: nn.Module) -> ModuleTable:
    """The table of a module's own buffers."""
    return tables_of([module], "_buffers")[0]


def tables_of(modules: Iterable[nn.Module], kind: str) -> list[ModuleTable]:
    """The tables of many modules. `kind`: "_parameters" or "_buffers"."""
    scripted = torch.jit.ScriptModule
    return [
        ScriptModuleTable(module, kind) if isinstance(module, scripted) else module.__dict__[kind]
        for module in modules
    ]


@contextmanager
def training_flags(modules: Sequence[nn.Module], flags: Sequence[bool]) -> Iterator[None]:
    """Within: modules are in train mode where `flags` say so; at the end as they were."""
    previous = modes_of(modules)
    for module, flag in zip(modules, flags, strict=True):
        module.training = flag
    try:
        yield
    finally:
        for module, flag in zip(modules, previous, strict=True):
            module.training = flag


def read_by_several(stages: Iterable[Iterable[nn.Module]]) -> set[int]:
    """The ids of the parameters that several stages read.

    Args:
        stages: the layers of each.

    Example:
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> len(read_by_several([[one, one], [other, one]])) == len(list(one.parameters()))
        True
    """
    readers = Counter(key for layers in stages for key in {id(leaf) for layer in layers for leaf in layer.parameters()})
    return {key for key, count in readers.items() if count > 1}
