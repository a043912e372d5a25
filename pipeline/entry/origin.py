"""The origin of a Pipe's layers: the module from which they were taken. A Pipe refuses to run once that has others.

    pipe = Pipe(model, ...)          the Pipe holds the layers, not the model that holds them
    model.lm_head = nn.Linear(...)   what the model computes from now on, the Pipe would not
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from partition.names import NamedLayer


class Origin:
    """The modules that hold the layers of a Pipe, which does not keep them alive. A copy of a Pipe has no origin.

    Args:
        module: what was given to `Pipe`. None: nothing is known.
        layers: those of the Pipe.
    """

    def __init__(self, module: nn.Module | None = None, layers: Iterable[nn.Module] = ()) -> None:
        self._places = [] if module is None else list(_places(module, layers))

    def __reduce__(self) -> tuple[type[Origin], tuple[()]]:
        return Origin, ()

    def check(self) -> None:
        """
        Raises:
            RuntimeError: a layer was replaced or removed there.
        """
        for owner, names, ids in self._places:
            module = owner()
            if module is not None and [id(module._modules.get(name)) for name in names] != ids:
                self._refuse(module, names, ids)

    def _refuse(self, module: nn.Module, names: list[str], ids: list[int]) -> None:
        changed = [name for name, old in zip(names, ids, strict=True) if id(module._modules.get(name)) != old]
        kind = type(module).__name__
        raise RuntimeError(
            f"{changed} of the {kind} was replaced or removed after the Pipe was built, which still has the old one. "
            "Build the Pipe anew, or put the old one back."
        )


class _Place(NamedTuple):
    """A module, the names of some of its children, and which these were."""

    owner: weakref.ref[nn.Module]
    names: list[str]
    ids: list[int]


def _places(module: nn.Module, layers: Iterable[nn.Module]) -> Iterator[_Place]:
    if isinstance(module, nn.Sequential):
        yield _place(module, list(module._modules))
        return
    modules, children = dict(module.named_modules()), dict[str, list[str]]()
    brought = [layer.in_model for layer in layers if isinstance(layer, NamedLayer)]
    for name in dict.fromkeys(name for each in brought if each is not None for name in each.names):
        owner, _, child = name.rpartition(".")
        if name in modules and owner in modules:
            children.setdefault(owner, []).append(child)
    for owner, names in children.items():
        yield _place(modules[owner], names)


def _place(owner: nn.Module, names: list[str]) -> _Place:
    return _Place(weakref.ref(owner), names, [id(owner._modules[name]) for name in names])
