"""The origin of a Pipe's layers: the module from which they were taken. A Pipe refuses to run once that has others.

    pipe = Pipe(model, ...)          the Pipe holds the layers, not the model that holds them
    model.lm_head = nn.Linear(...)   what the model computes from now on, the Pipe would not

A module of which several parts of a model have a copy (an embedding that the beginning and the end call) is the same in
all of them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from torch import nn

from partition.names import NamedLayer


class Origin:
    """The modules that hold the layers of a Pipe, which does not keep them alive. A copy of a Pipe has no origin.

    Args:
        module: what was given to `Pipe`. None: nothing is known.
        layers: those of the Pipe.
    """

    def __init__(self, module: nn.Module | None = None, layers: Iterable[nn.Module] = ()) -> None:
        layers = list(layers)
        self._places = [] if module is None else list(_places(module, layers))
        self._shared = [] if module is None else list(_shared(layers))

    def __reduce__(self) -> tuple[type[Origin], tuple[()]]:
        return Origin, ()

    def check(self) -> None:
        """
        Raises:
            RuntimeError: a layer, or a tensor beside the layers, was replaced, removed or added there; or one of
                several copies of a module was changed.
        """
        for name, copies in self._shared:
            contents = [_contents(module) for copy in copies if (module := copy()) is not None]
            if any(each != contents[0] for each in contents):
                raise RuntimeError(
                    f"{name!r}, which several parts of the model call, was replaced in one of them, in whole or in "
                    "part. Build the Pipe anew, or put that back."
                )
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


def _shared(layers: Iterable[nn.Module]) -> Iterator[tuple[str, list[weakref.ref[nn.Module]]]]:
    """By name the modules that several parts of a model hold, each a copy of its own with the same parameters."""
    held: dict[str, list[weakref.ref[nn.Module]]] = defaultdict(list)
    for layer in layers:
        for name in layer.in_model.names if isinstance(layer, NamedLayer) and layer.in_model is not None else ():
            with suppress(AttributeError):  # it is a tensor
                held[name].append(weakref.ref(layer.get_submodule(name)))
    yield from [(name, copies) for name, copies in held.items() if len(copies) > 1]


def _contents(module: nn.Module) -> list[Any]:
    """The modules in a module, by name and type, and their parameters. Each copy may have buffers of its own."""
    return [
        (name, type(each), {key: id(parameter) for key, parameter in each._parameters.items()})
        for name, each in module.named_modules()
    ]


def _place(owner: nn.Module, table: str, names: list[str]) -> _Place:
    return _Place(weakref.ref(owner), table, names, _ids(owner, table, names))


def _ids(module: nn.Module, table: str, names: Iterable[str]) -> list[int]:
    entries = getattr(module, table)
    return [id(entries.get(name)) for name in names]


_TABLES = ("_modules", "_parameters", "_buffers")
