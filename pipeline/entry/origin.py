"""The origin of a Pipe's layers: the module from which they were taken.

    pipe = Pipe(model, ...)          the Pipe holds the layers, not the model that holds them
    model.lm_head = nn.Linear(...)   what the model computes from now on, the Pipe would not: it refuses to run
    model.eval()                     the Pipe follows

A module of which several parts of a model have a copy (an embedding that the beginning and the end call) is the same in
all of them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import nn
from torch.utils._pytree import tree_leaves

from partition.models.references import references_of
from partition.modes import Modes
from partition.names import ModelLayers, ModelNames, NamedLayer, behaviour_of, plain_of
from pipeline.entry.validation import check_own_hooks


class Origin:
    """The modules that hold the layers of a Pipe, which does not keep them alive. A copy of a Pipe has no origin.

    Args:
        module: what the Pipe was made of: its layers are the children. None: nothing is known.
        modes: where no module is known, those of the layers.

    Attributes:
        modes: of the model of which the layers are parts, and theirs.
    """

    def __init__(self, module: nn.Module | None = None, modes: Modes | None = None) -> None:
        self.modes = module.modes if isinstance(module, ModelLayers) else modes or Modes()
        model = self.modes.model
        layers = [] if module is None else list(module.children())
        brought = [layer.in_model for layer in layers if isinstance(layer, NamedLayer) and layer.in_model is not None]
        self._module = None if module is None else weakref.ref(module)
        self._places = [] if module is None else [_children(module)]
        self._settings: list[tuple[weakref.ref[nn.Module], Mapping[str, Any]]] = []
        self._references: list[tuple[weakref.ref[nn.Module], Mapping[str, list[Any]]]] = []
        self._shared = list(_shared(layers))
        self._containers: list[tuple[str, weakref.ref[nn.Module]]] = []
        if model is not None:
            names = {name: None for each in brought for name in each.settings}
            self._containers = [(name, weakref.ref(model.get_submodule(name))) for name in names]
            self._places += _places(model, brought)
            self._settings += _settings(model, brought, [name for name, _ in self._shared])
            owners = [model.get_submodule(name) for name in {name for each in brought for name in each.settings}]
            self._references = [(weakref.ref(owner), ids) for owner in owners if (ids := _referred(owner))]

    def __reduce__(self) -> tuple[type[Origin], tuple[None, Modes]]:
        return Origin, (None, self.modes)

    def check(self) -> None:
        """
        Raises:
            RuntimeError: a layer, or a tensor or a plain attribute beside the layers, was replaced, removed or added
                there; or one of several copies of a module was changed.
            ValueError: hooks were registered there that would not run.
        """
        module = None if self._module is None else self._module()
        if module is not None:
            check_own_hooks(module)
        for name, copies in self._shared:
            contents = [_contents(module) for copy in copies if (module := copy()) is not None]
            if any(each != contents[0] for each in contents):
                raise RuntimeError(
                    f"{name!r}, which several parts of the model call, was replaced in one of them, in whole or in "
                    "part. Build the Pipe anew, or put that back."
                )
        model = self.modes.model
        for name, container in self._containers:
            above, _, own = name.rpartition(".")
            if model is not None and name and model.get_submodule(above)._modules.get(own) is not container():
                _refuse(model.get_submodule(above), [own])
        for owner, table, names, ids in self._places:
            module = owner()
            if module is not None and _ids(module, table, names) != ids:
                changed = [name for name, old in zip(names, ids, strict=True) if _ids(module, table, [name]) != [old]]
                _refuse(module, changed)
        for owner, settings in self._settings:
            module = owner()
            if module is not None:
                now = {**vars(module), **behaviour_of(module)}
                changed = [name for name, value in settings.items() if _differs(now.get(name), value)]
                if changed:
                    _refuse(module, changed)
        for owner, referred in self._references:
            module = owner()
            if module is not None and (refers := _referred(module)) != referred:
                _refuse(module, [key for key in {**referred, **refers} if referred.get(key) != refers.get(key)])


def _refuse(module: nn.Module, changed: Sequence[str]) -> None:
    raise RuntimeError(
        f"{changed} of the {type(module).__name__} was replaced or removed or added after the Pipe was built, which "
        "has what stood there before. Build the Pipe anew, or put that back."
    )


class _TableEntries(NamedTuple):
    """A module, a table of its, names in it, and what stood there."""

    owner: weakref.ref[nn.Module]
    table: str
    names: list[str]
    ids: list[int]


def _children(module: nn.Module) -> _TableEntries:
    appended = str(len(module._modules))
    return _place(module, "_modules", [*module._modules, appended])


def _places(model: nn.Module, brought: Iterable[ModelNames]) -> Iterator[_TableEntries]:
    """The places of what layers bring of a model."""
    tables = dict[tuple[str, str], list[str]]()
    for name in dict.fromkeys(name for each in brought for name in each.names):
        owner, _, own = name.rpartition(".")
        for table in _TABLES:
            if own in getattr(model.get_submodule(owner), table):
                tables.setdefault((owner, table), []).append(own)
    for (owner, table), names in tables.items():
        yield _place(model.get_submodule(owner), table, names)


def _settings(
    model: nn.Module, brought: Iterable[ModelNames], shared: Iterable[str]
) -> Iterator[tuple[weakref.ref[nn.Module], Mapping[str, Any]]]:
    """The settings of modules of a model that layers run and do not hold; and of those of which they have copies.

    Numbers and words are those with which it was cut, which may have been a twin of it; objects are its own.
    """
    settings = {name: own for each in brought for name, own in each.settings.items()}
    for name, own in settings.items():
        module = model.get_submodule(name)
        there = {**vars(module), **behaviour_of(module)}
        yield weakref.ref(module), {key: value if _is_plain(value) else there.get(key) for key, value in own.items()}
    for module in [module for name in shared for module in model.get_submodule(name).modules()]:
        yield weakref.ref(module), behaviour_of(module)


def _referred(module: nn.Module) -> dict[str, list[Any]]:
    """The entries of lists, tuples and dicts in which a module refers to others, by attribute: ids, plain values."""
    return {
        key: [leaf if isinstance(leaf, bool | int | float | str) else (id(leaf),) for leaf in tree_leaves(value)]
        for key, value in references_of(module).items()
    }


def _shared(layers: Iterable[nn.Module]) -> Iterator[tuple[str, list[weakref.ref[nn.Module]]]]:
    """By name the modules that several parts of a model hold, each a copy of its own with the same parameters."""
    held: dict[str, list[weakref.ref[nn.Module]]] = defaultdict(list)
    for layer in layers:
        for name in layer.in_model.names if isinstance(layer, NamedLayer) and layer.in_model is not None else ():
            with suppress(AttributeError):  # it is a tensor
                held[name].append(weakref.ref(layer.get_submodule(name)))
    yield from [(name, copies) for name, copies in held.items() if len(copies) > 1]


def _contents(module: nn.Module) -> list[Any]:
    """The modules in a module: name, type, parameters, plain attributes. Each copy may have buffers of its own."""
    return [
        (name, type(each), {key: id(parameter) for key, parameter in each._parameters.items()}, plain_of(each))
        for name, each in module.named_modules()
    ]


def _place(owner: nn.Module, table: str, names: list[str]) -> _TableEntries:
    return _TableEntries(weakref.ref(owner), table, names, _ids(owner, table, names))


def _ids(module: nn.Module, table: str, names: Iterable[str]) -> list[int]:
    entries = getattr(module, table)
    return [id(entries.get(name)) for name in names]


def _differs(there: Any, value: Any) -> bool:
    return there is not value and (not _is_plain(value) or type(there) is not type(value) or there != value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


_TABLES = ("_modules", "_parameters", "_buffers")
