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
        in_models = [layer.in_model for layer in layers if isinstance(layer, NamedLayer) and layer.in_model is not None]
        self._module = None if module is None else weakref.ref(module)
        self._places = [] if module is None else [_children(module)]
        self._settings: list[tuple[weakref.ref[nn.Module], Mapping[str, Any]]] = []
        self._references: list[tuple[weakref.ref[nn.Module], Mapping[str, list[Any]]]] = []
        self._shared = list(_shared(layers))
        self._containers: list[tuple[str, weakref.ref[nn.Module]]] = []
        if model is not None:
            owners = {name: model.get_submodule(name) for in_model in in_models for name in in_model.settings}
            self._containers = [(name, weakref.ref(owner)) for name, owner in owners.items()]
            self._places += _places(model, in_models)
            self._settings += _settings(model, in_models, [name for name, _ in self._shared])
            pairs = [(weakref.ref(owner), _reference_ids(owner)) for owner in owners.values()]
            self._references = [(owner, ids) for owner, ids in pairs if ids]

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
            if any(content != contents[0] for content in contents):
                raise RuntimeError(
                    f"{name!r}, which several parts of the model call, was replaced in one of them, in whole or in "
                    "part. Build the Pipe anew, or put that back."
                )
        model = self.modes.model
        for name, container in self._containers:
            parent, _, child = name.rpartition(".")
            if model is not None and name and model.get_submodule(parent)._modules.get(child) is not container():
                _refuse(model.get_submodule(parent), [child])
        for owner, table, names, ids in self._places:
            module = owner()
            if module is not None and _ids(module, table, names) != ids:
                changed = [name for name, old in zip(names, ids, strict=True) if _ids(module, table, [name]) != [old]]
                _refuse(module, changed)
        for owner, settings in self._settings:
            module = owner()
            if module is not None:
                current = {**vars(module), **behaviour_of(module)}
                changed = [name for name, value in settings.items() if _differs(current.get(name), value)]
                if changed:
                    _refuse(module, changed)
        for owner, recorded in self._references:
            module = owner()
            if module is not None and (current_ids := _reference_ids(module)) != recorded:
                changed = [key for key in {**recorded, **current_ids} if recorded.get(key) != current_ids.get(key)]
                _refuse(module, changed)


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


def _places(model: nn.Module, in_models: Iterable[ModelNames]) -> Iterator[_TableEntries]:
    """The places of what layers bring of a model."""
    tables = dict[tuple[str, str], list[str]]()
    for name in dict.fromkeys(name for in_model in in_models for name in in_model.names):
        owner_name, _, key = name.rpartition(".")
        for table in _TABLES:
            if key in getattr(model.get_submodule(owner_name), table):
                tables.setdefault((owner_name, table), []).append(key)
    for (owner_name, table), names in tables.items():
        yield _place(model.get_submodule(owner_name), table, names)


def _settings(
    model: nn.Module, in_models: Iterable[ModelNames], shared: Iterable[str]
) -> Iterator[tuple[weakref.ref[nn.Module], Mapping[str, Any]]]:
    """The settings of modules of a model that layers run and do not hold; and of those of which they have copies.

    Numbers and words are those with which it was cut, which may have been a twin of it; objects are its own.
    """
    settings = {name: module_settings for in_model in in_models for name, module_settings in in_model.settings.items()}
    for name, module_settings in settings.items():
        module = model.get_submodule(name)
        attributes = {**vars(module), **behaviour_of(module)}
        yield weakref.ref(module), {
            key: value if _is_plain(value) else attributes.get(key) for key, value in module_settings.items()
        }
    for module in [module for name in shared for module in model.get_submodule(name).modules()]:
        yield weakref.ref(module), behaviour_of(module)


def _reference_ids(module: nn.Module) -> dict[str, list[Any]]:
    """The entries of lists, tuples and dicts in which a module refers to others, by attribute: ids, plain values."""
    return {
        key: [leaf if isinstance(leaf, bool | int | float | str) else (id(leaf),) for leaf in tree_leaves(value)]
        for key, value in references_of(module).items()
    }


def _shared(layers: Iterable[nn.Module]) -> Iterator[tuple[str, list[weakref.ref[nn.Module]]]]:
    """By name the modules that several parts of a model hold, each a copy of its own with the same parameters."""
    copies_by_name: dict[str, list[weakref.ref[nn.Module]]] = defaultdict(list)
    for layer in layers:
        for name in layer.in_model.names if isinstance(layer, NamedLayer) and layer.in_model is not None else ():
            with suppress(AttributeError):  # it is a tensor
                copies_by_name[name].append(weakref.ref(layer.get_submodule(name)))
    yield from [(name, copies) for name, copies in copies_by_name.items() if len(copies) > 1]


def _contents(module: nn.Module) -> list[Any]:
    """The modules in a module: name, type, parameters, plain attributes. Each copy may have buffers of its own."""
    return [
        (
            name,
            type(submodule),
            {key: id(parameter) for key, parameter in submodule._parameters.items()},
            plain_of(submodule),
        )
        for name, submodule in module.named_modules()
    ]


def _place(owner: nn.Module, table: str, names: list[str]) -> _TableEntries:
    return _TableEntries(weakref.ref(owner), table, names, _ids(owner, table, names))


def _ids(module: nn.Module, table: str, names: Iterable[str]) -> list[int]:
    entries = getattr(module, table)
    return [id(entries.get(name)) for name in names]


def _differs(current: Any, recorded: Any) -> bool:
    return current is not recorded and (
        not _is_plain(recorded) or type(current) is not type(recorded) or current != recorded
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


_TABLES = ("_modules", "_parameters", "_buffers")
