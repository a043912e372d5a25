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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.utils._pytree import tree_leaves

from partition.models.references import references_of
from partition.modes import Modes
from partition.names import Holder, ModelLayers, NamedLayer, behaviour_of, plain_of, starts, units_of
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
        self._shared = list(_shared(layers))
        self._records: list[_Record] = []
        if module is not None:
            self._records.append(_record(module, _entries))
        if model is not None:
            settings = {name: own for in_model in in_models for name, own in in_model.settings.items()}
            names = [*settings, *[name for in_model in in_models for name in in_model.names]]
            blocks = [name for in_model in in_models if not in_model.settings for name in in_model.names]
            self._records += _tables(model, dict.fromkeys([start for name in names for start in starts(name)]))
            self._records += _settings(model, settings, [name for name, _ in self._shared])
            self._records += [_record(model.get_submodule(name), _references) for name in settings]
            self._records += _copied(model, settings, blocks)

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
        for owner, read, recorded in self._records:
            module = owner()
            if module is not None and (current := read(module)) != recorded:
                changed = [key for key in {**recorded, **current} if current.get(key) != recorded.get(key)]
                raise RuntimeError(
                    f"{changed} of the {type(module).__name__} was replaced or removed or added after the Pipe was "
                    "built, which has what stood there before. Build the Pipe anew, or put that back."
                )


class _Record(NamedTuple):
    """A module, a function that reads something in it, by name, and what that gave: plain values, and ids of others."""

    owner: weakref.ref[nn.Module]
    read: Callable[[nn.Module], Mapping[str, Any]]
    recorded: Mapping[str, Any]


def _record(module: nn.Module, read: Callable[[nn.Module], Mapping[str, Any]]) -> _Record:
    return _Record(weakref.ref(module), read, read(module))


def _table(module: nn.Module, table: str, names: Sequence[str]) -> _Record:
    """The entries under some names in a table of a module."""
    return _record(module, lambda owner: {name: id(getattr(owner, table).get(name)) for name in names})


def _entries(module: nn.Module) -> dict[str, Any]:
    """All modules and parameters in the tables of a module: their ids, by name."""
    tables: Mapping[str, Any] = {**module._parameters, **module._modules}
    return {name: id(entry) for name, entry in tables.items()}


def _copied(model: nn.Module, containers: Iterable[str], blocks: Iterable[str]) -> Iterator[_Record]:
    """The entries of modules of a model of which its parts run copies: modules around blocks, those without parameters.

    Args:
        model: the model.
        containers: the names of the modules that contain blocks.
        blocks: the names of the blocks.
    """
    around = [model.get_submodule(name) for name in containers]
    known = {*map(id, around), *[id(model.get_submodule(name)) for name in blocks]}
    for module in around:
        yield _record(module, _entries)
        children = [child for child in module.children() if id(child) not in known]
        copied = [child for child in children if next(child.parameters(), None) is None]
        for inner in [inner for child in copied for inner in child.modules()]:
            yield _record(inner, lambda owner: _entries(owner) | behaviour_of(owner))


def _tables(model: nn.Module, names: Iterable[str]) -> Iterator[_Record]:
    """The places of modules and tensors of a model, of which layers bring something or which they run."""
    tables: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in filter(None, names):
        owner_name, _, key = name.rpartition(".")
        for table in _TABLES:
            if key in getattr(model.get_submodule(owner_name), table):
                tables[owner_name, table].append(key)
    for (owner_name, table), keys in tables.items():
        yield _table(model.get_submodule(owner_name), table, keys)


def _settings(
    model: nn.Module, settings: Mapping[str, Mapping[str, Any]], shared: Iterable[str]
) -> Iterator[_Record]:
    """The settings of modules of a model that layers run and do not hold; and of those of which they have copies.

    Numbers and words are those with which it was cut, which may have been a twin of it; objects are its own.
    """
    for name, module_settings in settings.items():
        module = model.get_submodule(name)
        attributes = {**vars(module), **behaviour_of(module)}
        own = {key: value if _is_plain(value) else attributes.get(key) for key, value in module_settings.items()}
        # They are held: no other object gets the id of one.
        facts = {key: _fact(value) for key, value in own.items()}
        yield _Record(weakref.ref(module), partial(_attributes, settings=own), facts)
    for module in [module for name in shared for module in model.get_submodule(name).modules()]:
        yield _record(module, behaviour_of)


def _attributes(module: nn.Module, settings: Mapping[str, Any]) -> dict[str, Any]:
    attributes = {**vars(module), **behaviour_of(module)}
    return {name: _fact(attributes.get(name)) for name in settings}


def _references(module: nn.Module) -> dict[str, Any]:
    """The entries of lists, tuples and dicts in which a module refers to others, by attribute: ids, plain values."""
    return {key: [_fact(leaf) for leaf in tree_leaves(value)] for key, value in references_of(module).items()}


def _shared(layers: Iterable[nn.Module]) -> Iterator[tuple[str, list[weakref.ref[nn.Module]]]]:
    """By name the modules that several parts of a model hold, each a copy of its own with the same parameters."""
    parts = {str(number): layer for number, layer in enumerate(layers) if isinstance(layer, NamedLayer)}
    modules = [dict(part.named_modules(remove_duplicate=False)) for part in parts.values()]
    for name in units_of(parts):
        copies = [weakref.ref(named[name]) for named in modules if not isinstance(named.get(name), Holder | None)]
        if len(copies) > 1:
            yield name, copies


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


def _fact(value: Any) -> Any:
    """The identity of a value: type and value of a plain one, else the id."""
    return (type(value), value) if _is_plain(value) else id(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


_TABLES = ("_modules", "_parameters", "_buffers")
