"""The state in which modules were found, put back after a run: what a cut does to a model that it only looks at.

    found     attributes, lists and dicts in them, parameters, buffers, hooks
    runs      write weights on the first batch, count, cache, register hooks
    as found  all of it again: the first batch of a Pipe is the first that the model sees
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from partition.contents import Contents

_LISTS: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {  # how they are emptied, and filled
    list: (list.clear, list.extend),
    set: (set.clear, set.update),
    deque: (deque.clear, deque.extend),
    dict: (dict.clear, dict.update),
    defaultdict: (dict.clear, dict.update),
    OrderedDict: (OrderedDict.clear, OrderedDict.update),
}
_ABSENT = object()
_TABLES = frozenset(vars(nn.Module())) - {"training"}  # of every module: of parameters, of hooks

Hook: TypeAlias = "tuple[Callable[..., Any], bool]"  # on what a module returns; whether it takes keyword arguments


class _Module(NamedTuple):
    name: str
    module: nn.Module
    attributes: dict[str, Any]


class _ContainerEntries(NamedTuple):
    """A list, a set or a dict, and its entries; and whose it is."""

    owner: str
    of: Any
    entries: Any


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
        every = {id(each): (name, each) for module in modules for name, each in module.named_modules()}
        own = [each for each in every.values() if not isinstance(each[1], torch.jit.ScriptModule)]
        self._modules = [_Module(name, module, dict(vars(module))) for name, module in own]
        self._entries: dict[int, _ContainerEntries] = {}
        for name, _, attributes in self._modules:
            for key, value in attributes.items():
                self._reach(f"{name}.{key}" if name else key, value)

    def changed(self, but: Collection[tuple[int, str]] = ()) -> list[str]:
        """The names of attributes that are not as they were found, but for some, and for tables of hooks."""
        names = [each.owner for each in self._entries.values() if not _same_entries(each)]
        for name, module, attributes in self._modules:
            now = vars(module)
            names += [
                f"{name}.{key}" if name else key for key in attributes | now
                if (id(module), key) not in but and not _same(attributes.get(key, _ABSENT), now.get(key, _ABSENT))
            ]  # fmt: skip
        return sorted({name for name in names if name.rpartition(".")[2] not in _TABLES})

    def hooks(self) -> dict[int, list[Hook]]:
        """The hooks on what modules return that are the model's own, by the id of a module.

        These were registered since, or are functions of a package that classes of its modules are of: they may collect
        what the model's forward reads. Hooks of scripts, of torch, and of other packages are not.
        """
        own: dict[int, list[Hook]] = {}
        packages = {_package(type(module)) for _, module, _ in self._modules} - {"torch", "__main__"}
        for _, module, attributes in self._modules:
            known = self._entries[id(attributes["_forward_hooks"])].entries
            hooks = [
                (hook, key in module._forward_hooks_with_kwargs) for key, hook in module._forward_hooks.items()
                if key not in known or _package(hook) in packages
            ]  # fmt: skip
            own.update({id(module): hooks} if hooks else {})
        return own

    def put_back(self) -> None:
        """Put back all."""
        for _, module, attributes in self._modules:
            now = vars(module)
            for key in now.keys() - attributes.keys():
                del now[key]
            now.update(attributes)
        for each in self._entries.values():
            if not _same_entries(each):
                clear, fill = _LISTS[type(each.of)]
                clear(each.of)
                fill(each.of, each.entries)
        self.contents.put_back()

    def _reach(self, owner: str, value: Any) -> None:
        if isinstance(value, tuple):
            for entry in value:
                self._reach(owner, entry)
        elif type(value) in _LISTS and id(value) not in self._entries:
            is_dict = isinstance(value, dict)
            self._entries[id(value)] = _ContainerEntries(owner, value, dict(value) if is_dict else list(value))
            for entry in value.values() if is_dict else value:
                self._reach(owner, entry)


@contextmanager
def as_found(
    modules: Iterable[nn.Module], written: Iterable[Tensor] = (), there: Iterable[Tensor] = ()
) -> Iterator[AttributeSnapshot]:
    """At the end: modules are as they were found.

    Args:
        modules: the modules.
        written: tensors that are written within, beside their buffers.
        there: others, beside those of the modules, that may be: see `Contents.keep`.
    """
    modules = list(modules)
    kept = [*written, *[buffer for module in modules for buffer in module.buffers()]]
    own = [tensor for module in modules for each in module.modules() for tensor in tensors_of(each)]
    found = AttributeSnapshot(modules, Contents([*own, *there, *kept]))
    for tensor in kept:
        found.contents.keep(tensor)
    try:
        yield found
    finally:
        found.put_back()


def tensors_of(module: nn.Module) -> list[Tensor]:
    """The parameters, buffers and attributes of a module that are tensors."""
    own = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
    return [each for each in own if isinstance(each, Tensor)]


def _package(of: Any) -> str | None:
    """The package that a class, or a function, is of."""
    name = getattr(getattr(of, "func", of), "__module__", None)  # of a partial
    return None if name is None else str(name).partition(".")[0]


def _same_entries(entries: _ContainerEntries) -> bool:
    now = entries.of
    if len(now) != len(entries.entries):
        return False
    if isinstance(now, dict):
        return all(one is other and _same(now[one], entries.entries[one]) for one, other in zip(now, entries.entries))
    return all(map(_same, now, entries.entries))


def _same(one: Any, other: Any) -> bool:
    """Whether they are one object, or equal numbers or words."""
    return one is other or type(one) is type(other) and isinstance(one, int | float | str) and one == other
