"""The attributes of modules at one moment, and what is in them: put back where a chunk or a call runs again.

    module.seen = 3    module.log = ["a"]     module.config.rates = {"lr": 0.1}
        the module's own dict, and every list, dict, set, deque, small array and plain object that it
        reaches: their entries by identity; of tensors the versions, and copies of those that forwards write

Entries are put back into the same containers, so other references to them see it too. Parameters and buffers are
handled in parameters.py and buffers.py. Not covered are classes, functions and their closures, iterators, other modules
on an attribute, and anything deeper than four levels; of long containers only the length counts.

Attributes are compared by identity before each forward that may be recomputed, at 0.5 us a module (torch's own layers
are left out). A snapshot is made only where something changed; the chunks between share it. No call relies on what an
earlier one saw, so state that begins to change late is right too. Only which tensors are written in place is learned,
since their values must be copied beforehand.
"""

from __future__ import annotations

import sys
import sysconfig
import types
from collections.abc import Callable, Container, Iterable, Sequence
from enum import Enum
from functools import lru_cache
from itertools import chain, filterfalse
from operator import call, eq, is_, itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy
import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from partition.containers import CONTAINERS, FIXED, length, reader_of, shorten, write
from partition.names import OF_EVERY_MODULE
from pipeline.recompute.randomness import is_torchs_own

# Not kept here: the tables of parameters and buffers, and what stands in an RNN where aliases stand in (parameters.py).
_ELSEWHERE = OF_EVERY_MODULE | {"flatten_parameters"}
_DEPTH = 4
_LONG = 1000  # entries
_MOST = 1000  # containers of one stage
_OTHERS = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module, Tensor, Enum, BaseException)
OTHER_PACKAGES = {"torch", "numpy", "pipeline", "partition", "scheduler", *sys.stdlib_module_names}
ValueKeeper: TypeAlias = Callable[[Iterable[Any]], list[Any]]  # what is kept of some values
_INSTALLED = tuple([sysconfig.get_path(name) for name in ("purelib", "platlib")])


class Attributes:
    """The present contents of the attributes of some modules.

    Args:
        modules: the modules. Those of torch's own classes without hooks keep no state.
        tables: of parameters, where none stand in for them: of a block, whose attributes may also be set before its
            forward (a weight that a hook computes).
        buffers: the ids of tensors that are left out.
        copied: the ids of the tensors that forwards write, of which copies are kept. None: all.
        weak: whether tensors in autograd's graph are not kept alive.

    Attributes:
        modules: the dicts of the modules, and what they hold.
        containers: other containers that these reach.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        tables: Iterable[dict[str, Any]] = (),
        buffers: frozenset[int] = frozenset(),
        copied: set[int] | None = None,
        weak: bool = False,
    ) -> None:
        self.modules: list[ModuleEntries] = []
        self.containers: list[ContainerContents] = []
        self._visited: set[int] = set()
        self._tensors: dict[int, _TensorContents] = {}
        self._buffers = buffers
        self._copied = copied
        tables = list(tables)
        keep: ValueKeeper = _with_weak_references if weak else list
        for module in modules:
            if is_torchs_own(module) or isinstance(module, torch.jit.ScriptModule):  # which has them in C++
                continue
            table = vars(module)
            names, get = _getter(tuple(table))
            values = get(table)
            self.modules.append(ModuleEntries(table, names, get, keep(values)))
            self._look(values[1:], 0, package_of(type(module)), keep)
            if table["_modules"]:
                self.containers.append(ContainerContents.of(_MAPPING, table["_modules"], keep))
        self._visited.clear()
        self._tables = [(table, table.copy()) for table in tables]
        self._all = _FlatContents.of(self.modules, self.containers, tables)

    def __bool__(self) -> bool:
        return bool(self.modules or self.containers or self._tables)

    def _look(self, values: Iterable[Any], depth: int, package: str, keep: ValueKeeper) -> None:
        """Note the containers among `values` and their entries; of objects those of the module's own `package`,
        and those of no installed package."""
        for value in values:
            kind = kind_of(type(value))  # type: ignore[arg-type]  # a type is Hashable
            if kind is None or id(value) in self._visited or len(self._visited) >= _MOST:
                continue
            if kind in OBJECTS and is_installed(owner := package_of(type(value))) and owner != package:
                continue
            self._visited.add(id(value))
            if kind is _TENSOR:
                self._note(value)
                continue
            if kind is ARRAY and (value.size > _LONG or value.dtype.hasobject):
                continue
            if kind.long is not None and length(value) > _LONG:
                kind = kind.long
            if kind.write is not _write_nothing:
                self.containers.append(ContainerContents.of(kind, value, keep))
            if kind.has_dict:
                self._look([vars(value)], depth, package, keep)
            if kind.opens and depth < _DEPTH:
                self._look(kind.read(value), depth + 1, package, keep)

    def _note(self, tensor: Tensor) -> None:
        if tensor.requires_grad or tensor.is_inference() or id(tensor) in self._buffers:
            return
        keep = self._copied is None or id(tensor) in self._copied
        self._tensors[id(tensor)] = _TensorContents(tensor, tensor._version, tensor.detach().clone() if keep else None)

    @property
    def is_current(self) -> bool:
        """Whether their contents are unchanged."""
        return self._all.are_current and not self.written

    @property
    def written(self) -> set[int]:
        """The ids of the tensors that were written in place since the snapshot."""
        return {key for key, (tensor, version, _) in self._tensors.items() if tensor._version != version}

    def copy_of(self, value: Any) -> Any:
        """A copy with the earlier value of a tensor that was written in place since; or else the value itself."""
        tensor, version, copy = self._tensors.get(id(value), _NO_TENSOR)
        return value if copy is None or tensor._version == version else copy.clone()

    def put_back(self, copies: set[int], long: bool = True) -> None:
        """Restore the contents.

        Args:
            copies: the ids of tensors that are replaced by copies with the earlier values.
            long: whether to shorten containers with many entries, which drops the entries added since.
        """
        stand_ins = {
            key: copy.clone() for key, (_, _, copy) in self._tensors.items() if copy is not None and key in copies
        }
        for table, names, _, values in self.modules:
            _become(table, names, [stand_ins.get(id(value), value) for value in values[1:]], _ELSEWHERE)
        for holder, copy in self._tables:
            write(holder, [*copy, *copy.values()])
        for kind, holder, content in self.containers:
            if long or kind is not _COUNTED:
                kind.write(holder, [stand_ins.get(id(value), value) for value in content])

    def roll_back(self) -> None:
        """Restore all contents, the values of tensors too."""
        self.put_back(set())
        for tensor, version, copy in self._tensors.values():
            if copy is not None and tensor._version != version:
                with torch.no_grad():
                    if tensor.shape != copy.shape:  # torch resizes no tensor with gradients, not even to the same shape
                        tensor.resize_(copy.shape)
                    tensor.copy_(copy)


@lru_cache(maxsize=4096)
def _getter(keys: tuple[str, ...]) -> tuple[list[str], Callable[[dict[str, Any]], tuple[Any, ...]]]:
    """Of the dict of a module the names that count, and what gets their values, behind that of its children."""
    names = list(filterfalse(_ELSEWHERE.__contains__, keys))
    return names, itemgetter("_modules", *names) if names else lambda table: (table["_modules"],)


class ModuleEntries(NamedTuple):
    table: dict[str, Any]
    names: list[str]
    get: Callable[[dict[str, Any]], tuple[Any, ...]]
    values: list[Any]


class _TensorContents(NamedTuple):
    tensor: Tensor
    version: int
    copy: Tensor | None


_NO_TENSOR = _TensorContents(torch.empty(0, device="cpu"), 0, None)


class ContainerKind(NamedTuple):
    """A kind of container, with functions that read and write it.

    Attributes:
        read: its entries.
        write: gives it entries that were read earlier.
        long: the kind of such a container with many entries.
        opens: whether its entries are searched too.
        same: whether an entry is one that was read earlier.
        has_dict: whether it has attributes beside its entries.
    """

    read: Callable[[Any], Sequence[Any]]
    write: Callable[[Any, list[Any]], None]
    long: ContainerKind | None = None
    opens: bool = True
    same: Callable[[Any, Any], bool] = is_
    has_dict: bool = False


class ContainerContents(NamedTuple):
    """A container and its contents."""

    kind: ContainerKind
    holder: Any
    content: list[Any]

    @classmethod
    def of(cls, kind: ContainerKind, holder: Any, keep: ValueKeeper) -> ContainerContents:
        return cls(kind, holder, keep(kind.read(holder)))

    @property
    def is_whole(self) -> bool:
        """Whether all entries are noted, not their number alone."""
        return self.kind is not _COUNTED

    @property
    def table(self) -> dict[Any, Any] | None:
        """The holder, if it is a dict whose entries are noted: names and, behind these, values."""
        return self.holder if isinstance(self.holder, dict) and self.is_whole else None


class _FlatContents(NamedTuple):
    """All entries of modules, dicts and containers, one after the other: one comparison shows whether any changed.

    Attributes:
        modules: their dicts, and below what gets their attributes.
        dicts: the children of modules, tables of parameters, other dicts.
        holders: other containers whose entries are compared by identity, and below what reads them.
        others: those that are compared by value.
        counts: the number of entries of each module's dict, of each of `dicts`, of each of `holders`.
        values: what they all hold, of `dicts` all names first.
    """

    modules: Sequence[dict[str, Any]]
    gets: Sequence[Callable[[dict[str, Any]], tuple[Any, ...]]]
    dicts: Sequence[dict[Any, Any]]
    holders: Sequence[Any]
    reads: Sequence[Callable[[Any], Sequence[Any]]]
    others: Sequence[ContainerContents]
    counts: tuple[list[int], list[int], list[int]]
    values: list[Any]

    @classmethod
    def of(
        cls,
        modules: Sequence[ModuleEntries],
        containers: Sequence[ContainerContents],
        tables: Sequence[dict[str, Any]],
    ) -> _FlatContents:
        dicts: list[dict[Any, Any]] = []
        names: list[Any] = []
        values: list[Any] = []
        by_identity: list[ContainerContents] = []
        by_value: list[ContainerContents] = []
        for container in containers:
            kind, holder, content = container
            if type(holder) is dict and kind is _MAPPING:
                name_count = len(content) // 2
                dicts.append(holder)
                names += content[:name_count]
                values += content[name_count:]
            else:
                (by_identity if kind.same is is_ else by_value).append(container)
        dicts += tables
        sizes = [len(module.table) for module in modules]
        lengths = [len(container.content) for container in by_identity]
        entries = [
            *[module.values for module in modules], names, *tables, values, *map(dict.values, tables),
            *[container.content for container in by_identity],
        ]  # fmt: skip
        return cls(
            [module.table for module in modules], [module.get for module in modules], dicts,
            [container.holder for container in by_identity], [container.kind.read for container in by_identity],
            by_value, (sizes, list(map(len, dicts)), lengths), list(chain.from_iterable(entries)),
        )  # fmt: skip

    @property
    def are_current(self) -> bool:
        """Whether all are as they were."""
        try:
            attributes = list(map(call, self.gets, self.modules))
        except KeyError:
            return False
        contents = list(map(call, self.reads, self.holders))
        if (list(map(len, self.modules)), list(map(len, self.dicts)), list(map(len, contents))) != self.counts:
            return False
        entries = chain.from_iterable(chain(attributes, self.dicts, map(dict.values, self.dicts), contents))
        return all(map(is_, entries, self.values)) and all([
            container.content == container.kind.read(container.holder) for container in self.others
        ])


def _with_weak_references(values: Iterable[Any]) -> list[Any]:
    """The values, with weak references to those in autograd's graph, which it would keep alive."""
    return [
        TensorWeakRef(value) if isinstance(value, Tensor) and value.grad_fn is not None else value for value in values
    ]


def values_alive(values: Sequence[Any]) -> list[Any]:
    """The values that were held; a mark for those that are freed."""
    return [(FREED if (tensor := value()) is None else tensor) if type(value) is TensorWeakRef else value
            for value in values]  # fmt: skip


def _become(table: dict[str, Any], names: list[str], values: list[Any], others: Container[str]) -> None:
    """Give a module's dict these entries and no more, but for `others`. One whose value is freed stays as it is."""
    pairs = zip(names, values_alive(values), strict=True)
    wanted = {name: table.get(name, FREED) if value is FREED else value for name, value in pairs}
    for name in [name for name in table if name not in others and wanted.get(name, FREED) is FREED]:
        del table[name]
    changed = {name: value for name, value in wanted.items() if value is not table.get(name, FREED)}
    if changed:
        table.update(changed)


def _write(holder: Any, content: list[Any]) -> None:
    """Give a container what it held, but for values that are freed: those of a dict stay as they are."""
    entries = values_alive(content)
    if isinstance(holder, dict):
        pairs = zip(entries, entries[len(entries) // 2 :])  # noqa: B905  # names and values, one behind the other
        wanted = {name: dict.get(holder, name, FREED) if value is FREED else value for name, value in pairs}
        alive = {name: value for name, value in wanted.items() if value is not FREED}
        entries = [*alive, *alive.values()]
    write(holder, [value for value in entries if value is not FREED])


def _write_slots(holder: Any, content: list[Any]) -> None:
    for name, value in zip(_slots(type(holder)), values_alive(content), strict=True):
        if value is _NONE:
            if hasattr(holder, name):
                object.__delattr__(holder, name)
        elif value is not FREED:
            object.__setattr__(holder, name, value)


def _write_nothing(holder: Any, content: list[Any]) -> None:
    """Its entries are always the same."""


def _write_array(holder: Any, content: list[bytes]) -> None:
    if holder.tobytes() != content[0]:  # it may be one that cannot be written
        holder[...] = numpy.frombuffer(content[0], holder.dtype).reshape(holder.shape)


def _slots(kind: type) -> list[str]:
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return [name for names in slots for name in ([names] if isinstance(names, str) else names) if name[:2] != "__"]


FREED, _NONE = object(), object()
_COUNTED = ContainerKind(
    lambda holder: [length(holder)], lambda holder, content: shorten(holder, content[0]), opens=False, same=eq
)
_MAPPING = ContainerKind(reader_of(dict), _write, _COUNTED)
_OBJECT = ContainerKind(lambda holder: [], _write_nothing, opens=False, has_dict=True)
_SLOTTED = ContainerKind(lambda holder: [getattr(holder, name, _NONE) for name in _slots(type(holder))], _write_slots)
OBJECTS = (_OBJECT, _SLOTTED, _SLOTTED._replace(has_dict=True))
ARRAY = ContainerKind(lambda holder: [holder.tobytes()], _write_array, opens=False, same=eq)
_TENSOR = ContainerKind(list, _write_nothing)


@lru_cache(maxsize=4096)
def kind_of(kind: type) -> ContainerKind | None:
    """The kind of a class of objects. None: they are not covered."""
    if issubclass(kind, Tensor):
        return _TENSOR
    if issubclass(kind, CONTAINERS):
        if kind is dict:
            return _MAPPING
        return ContainerKind(
            reader_of(kind), _write, _COUNTED, has_dict=kind not in CONTAINERS and bool(kind.__dictoffset__)
        )
    if issubclass(kind, FIXED):
        return ContainerKind(reader_of(kind), _write_nothing)
    if issubclass(kind, numpy.ndarray):
        return ARRAY
    if issubclass(kind, _OTHERS) or package_of(kind) in OTHER_PACKAGES and kind is not types.SimpleNamespace:
        return None
    if not _slots(kind):
        return _OBJECT if kind.__dictoffset__ else None
    return _SLOTTED._replace(has_dict=bool(kind.__dictoffset__))


def package_of(made: type | types.FunctionType) -> str:
    """The name of the package, or of the script, in which a class or a function was made; of none "None"."""
    return str(made.__module__).partition(".")[0]


@lru_cache(maxsize=1024)
def is_installed(package: str) -> bool:
    """Whether a package was installed by pip: the effects of restoring its objects are not known."""
    return (getattr(sys.modules.get(package), "__file__", None) or "").startswith(_INSTALLED)
