"""The state in which modules were found, put back after a run: what a cut does to a model that it only looks at.

    found     attributes, lists, dicts and random generators in them, parameters, buffers, hooks
    runs      write weights on the first batch, count, cache, draw, register hooks
    as found  all of it again: the first batch of a Pipe is the first that the model sees
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from partition.containers import CONTAINERS, base_of, reader_of, write
from partition.contents import Contents
from partition.generators import GENERATORS, Generator, generators_among, put_generators_back, stand_at
from partition.names import OF_EVERY_MODULE

_ABSENT = object()
_TABLES = OF_EVERY_MODULE - {"training"}  # of every module: of parameters, of hooks

Hook: TypeAlias = "tuple[Callable[..., Any], bool]"  # on what a module returns; whether it takes keyword arguments


class PutBacks:
    """The times at which what forwards had set was put back: a forward whose settings are read runs again."""

    count = 0

    @classmethod
    def note(cls) -> None:
        """Count one."""
        cls.count += 1


class _ModuleAttributes(NamedTuple):
    name: str
    module: nn.Module
    attributes: dict[str, Any]


class _ContainerEntries(NamedTuple):
    """A list, a set or a dict, and its entries; and whose it is."""

    owner: str
    container: Any
    entries: list[Any]

    @property
    def are_same(self) -> bool:
        """Whether it holds the same."""
        current = reader_of(type(self.container))(self.container)
        return len(current) == len(self.entries) and all(map(is_same, current, self.entries))


class AttributeSnapshot:
    """The attributes of modules, and what is in their lists and dicts, at any depth.

    Args:
        modules: the modules, and all that is in them.
        contents: of their parameters and buffers.

    Attributes:
        contents: see above.
    """

    def __init__(self, modules: Iterable[nn.Module], contents: Contents) -> None:
        self.contents = contents
        named_modules = {
            id(submodule): (name, submodule) for module in modules for name, submodule in module.named_modules()
        }
        plain = [entry for entry in named_modules.values() if not isinstance(entry[1], torch.jit.ScriptModule)]
        self._modules = [_ModuleAttributes(name, module, dict(vars(module))) for name, module in plain]
        self._entries: dict[int, _ContainerEntries] = {}
        self._generators: dict[int, tuple[str, tuple[Generator, Any]]] = {}
        for name, _, attributes in self._modules:
            for key, value in attributes.items():
                self._reach(f"{name}.{key}" if name else key, value)

    def changed(self, ignored: Collection[tuple[int, str]] = ()) -> list[str]:
        """The names of attributes that are not as they were found, but for some, and for tables of hooks."""
        names = [entries.owner for entries in self._entries.values() if not entries.are_same]
        for name, module, attributes in self._modules:
            current = vars(module)
            names += [
                f"{name}.{key}" if name else key for key in attributes | current
                if (id(module), key) not in ignored
                and not is_same(attributes.get(key, _ABSENT), current.get(key, _ABSENT))
            ]  # fmt: skip
        return sorted({name for name in names if name.rpartition(".")[2] not in _TABLES})

    def drawn(self) -> list[str]:
        """The names of the random generators that do not stand where they did."""
        return [name for name, state in self._generators.values() if not stand_at([state])]

    def filled(self) -> list[Any]:
        """The lists, sets and dicts that hold something else than they did."""
        return [entries.container for entries in self._entries.values() if not entries.are_same]

    def hooks(self) -> dict[int, list[Hook]]:
        """The hooks on what modules return that are the model's own, by the id of a module.

        These were registered since, or are functions of a package that classes of its modules are of: they may collect
        what the model's forward reads. Hooks of scripts, of torch, and of other packages are not.
        """
        hooks_by_module: dict[int, list[Hook]] = {}
        packages = {_package(type(module)) for _, module, _ in self._modules} - {"torch", "__main__"}
        for _, module, attributes in self._modules:
            earlier_hooks = self._entries[id(attributes["_forward_hooks"])].entries
            hooks = [
                (hook, key in module._forward_hooks_with_kwargs) for key, hook in module._forward_hooks.items()
                if key not in earlier_hooks or _package(hook) in packages
            ]  # fmt: skip
            hooks_by_module.update({id(module): hooks} if hooks else {})
        return hooks_by_module

    def put_back(self) -> None:
        """Put back all."""
        for _, module, attributes in self._modules:
            current = vars(module)
            for key in current.keys() - attributes.keys():
                del current[key]
            current.update(attributes)
        for _, container, entries in self._entries.values():
            write(container, entries)
        put_generators_back([state for _, state in self._generators.values()])
        self.contents.put_back()

    def _reach(self, owner: str, value: Any) -> None:
        for key, generator in generators_among([value]).items() if isinstance(value, GENERATORS) else ():
            self._generators.setdefault(key, (owner, (generator, generator.get_state())))
        if base_of(type(value)) is None or id(value) in self._entries:  # type: ignore[arg-type]  # a type is Hashable
            return
        entries = reader_of(type(value))(value)
        if isinstance(value, CONTAINERS):
            self._entries[id(value)] = _ContainerEntries(owner, value, entries)
        for entry in entries:
            self._reach(owner, entry)


@contextmanager
def as_found(
    modules: Iterable[nn.Module], written: Iterable[Tensor] = (), others: Iterable[Tensor] = ()
) -> Iterator[AttributeSnapshot]:
    """At the end: modules are as they were found.

    Args:
        modules: the modules.
        written: tensors that are written within, beside their buffers.
        others: tensors, beside those of the modules, that may be: see `Contents.keep`.
    """
    modules = list(modules)
    written_tensors = [*written, *[buffer for module in modules for buffer in module.buffers()]]
    model_tensors = [tensor for module in modules for submodule in module.modules() for tensor in tensors_of(submodule)]
    snapshot = AttributeSnapshot(modules, Contents([*model_tensors, *others, *written_tensors]))
    for tensor in written_tensors:
        snapshot.contents.keep(tensor)
    try:
        yield snapshot
    finally:
        snapshot.put_back()


def tensors_of(module: nn.Module) -> list[Tensor]:
    """The parameters, buffers and attributes of a module that are tensors."""
    values = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
    return [value for value in values if isinstance(value, Tensor)]


def _package(value: Any) -> str | None:
    """The package that a class, or a function, is of."""
    name = getattr(getattr(value, "func", value), "__module__", None)  # of a partial
    return None if name is None else str(name).partition(".")[0]


def is_same(one: Any, other: Any) -> bool:
    """Whether they are one object, or equal numbers or words. A nan equals a nan."""
    if one is other:
        return True
    is_plain = type(one) is type(other) and isinstance(one, int | float | str)
    return is_plain and (one == other or one != one and other != other)


def stays(value: Any, earlier: Any) -> bool:
    """Whether a value is the tensor that was there, or that one on another device: `self.table.to(x.device)`."""
    if not (isinstance(value, Tensor) and isinstance(earlier, Tensor)):
        return False
    is_moved = value.device != earlier.device and value.dtype == earlier.dtype
    return value is earlier or is_moved and value.equal(earlier.to(value.device))
