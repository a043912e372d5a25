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
            RuntimeError: a layer, or a tensor beside the layers, was replaced, removed or added there.
        """
        for owner, table, names, ids in self._places:
            module = owner()
            if module is not None and _ids(module, table, names) != ids:
                changed = [name for name, old in zip(names, ids, strict=True) if _ids(module, table, [name]) != [old]]
                raise RuntimeError(
                    f"{changed} of the {type(module).__name__} was replaced or removed or added after the Pipe was "
                    "built, which has what stood there before. Build the Pipe anew, or put that back."
                )


class _Place(NamedTuple):
    """A module, a table of its, names in it, and what stood there."""

    owner: weakref.ref[nn.Module]
    table: str
    names: list[str]
    ids: list[int]


def _places(module: nn.Module, layers: Iterable[nn.Module]) -> Iterator[_Place]:
    if isinstance(module, nn.Sequential):
        yield _place(module, "_modules", [*module._modules, str(len(module))])  # the last is what `append` takes
        return
    modules, tables = dict(module.named_modules()), dict[tuple[str, str], list[str]]()
    brought = [layer.in_model for layer in layers if isinstance(layer, NamedLayer)]
    for name in dict.fromkeys(name for each in brought if each is not None for name in each.names):
        owner, _, own = name.rpartition(".")
        for table in _TABLES:
            if owner in modules and own in getattr(modules[owner], table):
                tables.setdefault((owner, table), []).append(own)
    for (owner, table), names in tables.items():
        yield _place(modules[owner], table, names)


def _place(owner: nn.Module, table: str, names: list[str]) -> _Place:
    return _Place(weakref.ref(owner), table, names, _ids(owner, table, names))


def _ids(module: nn.Module, table: str, names: Iterable[str]) -> list[int]:
    entries = getattr(module, table)
    return [id(entries.get(name)) for name in names]


_TABLES = ("_modules", "_parameters", "_buffers")
