"""The attributes of modules at one moment, and what is in them: put back where a chunk or a call runs again.

    module.seen = 3    module.log = ["a"]     module.config.rates = {"lr": 0.1}
        the module's own dict, and every list, dict, set, deque, small array and plain object that it
        reaches: their entries by identity; of tensors the versions, and copies

Entries are put back into the same containers, so other references to them see it too. Parameters and buffers are
handled in parameters.py and buffers.py. Not covered are classes, functions and their closures, iterators, other modules
on an attribute, and anything deeper than four levels or behind a thousand containers of a module; of long containers
only the length counts. A tensor in autograd's graph is held weakly: a recomputation that reads one that is freed by
then finds a stand-in that refuses it (FreedTensor).

Attributes are compared by identity before each forward that may be recomputed, at 0.5 us a module; of torch's own
layers their number alone. A snapshot is made only where something changed; the chunks between share it. No call relies
on what an earlier one saw, so state that begins to change late is right too. So every call copies all tensors, as it
does all buffers: which ones a forward will write in place is not known beforehand.
"""

from __future__ import annotations

import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from functools import lru_cache
from itertools import chain
from operator import call, eq, is_, itemgetter
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy
import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from partition.containers import CONTAINERS, FIXED, length, reader_of, shorten, write
from partition.models.as_found import PutBacks
from partition.names import OF_EVERY_MODULE
from pipeline.common.errors import CheckpointError
from pipeline.recompute.copies import refill
from pipeline.recompute.randomness import is_torchs_own

# Not kept here: the tables of parameters and buffers, and what stands in an RNN where aliases stand in (parameters.py).
_ELSEWHERE = OF_EVERY_MODULE - {"_modules"} | {"flatten_parameters"}
_DEPTH = 4
_LONG = 1000  # entries
_MOST = 1000  # containers of one module that no module before it reaches
_OTHERS = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module, Tensor, Enum, BaseException)
OTHER_PACKAGES = {"torch", "numpy", "pipeline", "partition", "scheduler", *sys.stdlib_module_names}
ValueKeeper: TypeAlias = Callable[[Iterable[Any]], list[Any]]  # what is kept of some values
_INSTALLED = tuple([sysconfig.get_path(name) for name in ("purelib", "platlib")])


class Attributes:
    """The present contents of the attributes of some modules.

    Args:
        modules: the modules. Those of torch's own classes keep no state, unless it was set on them, or they have hooks:
            of others the number of attributes is noted.
        tables: of parameters, where none stand in for them: of a block, whose attributes may also be set before its
            forward (a weight that a hook computes).
        buffers: the ids of tensors that are left out.
        earlier: a snapshot, whose copies of tensors that nobody has written since are shared.
        weak: whether tensors in autograd's graph are not kept alive.

    Attributes:
        containers: the dicts of the modules, and other containers that these reach.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        tables: Iterable[dict[str, Any]] = (),
        buffers: frozenset[int] = frozenset(),
        earlier: Attributes | None = None,
        weak: bool = False,
    ) -> None:
        self.containers: list[ContainerContents] = []
        self._visited: set[int] = set()
        self._bound = 0  # of these
        self._tensors: dict[int, _TensorContents] = {}
        self._buffers = buffers
        self._copied = {} if earlier is None else earlier._tensors
        keep: ValueKeeper = _with_weak_references if weak else list
        modules = list(modules)
        are_bare = list(map(is_torchs_own, modules))
        bare = [module.__dict__ for module, is_bare in zip(modules, are_bare, strict=True) if is_bare]
        self._bare = list(zip(bare, map(len, bare)))
        for module, is_bare in zip(modules, are_bare, strict=True):
            if is_bare or isinstance(module, torch.jit.ScriptModule):  # which has them in C++
                continue
            table = vars(module)
            names, get = _getter(tuple(table))
            values = get(table)
            self.containers.append(ContainerContents(_MODULE, table, [*names, *keep(values)]))
            if table["_modules"]:
                self.containers.append(ContainerContents.of(_MAPPING, table["_modules"], keep))
            self._bound = len(self._visited) + _MOST
            self._look(values[1:], 0, package_of(type(module)), keep)
        self.containers += [ContainerContents.of(_MAPPING, table, keep) for table in tables]
        self._visited.clear()
        self._are_same = _comparison(bare, self.containers)

    def __bool__(self) -> bool:
        return bool(self.containers)

    def _look(self, values: Iterable[Any], depth: int, package: str, keep: ValueKeeper) -> None:
        """Note the containers among `values` and their entries; of objects those of the module's own `package`,
        and those of no installed package."""
        for value in values:
            kind = kind_of(type(value))  # type: ignore[arg-type]  # a type is Hashable
            if kind is None or id(value) in self._visited or len(self._visited) >= self._bound:
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
            if depth < _DEPTH:
                self._look(kind.read(value), depth + 1, package, keep)

    def _note(self, tensor: Tensor) -> None:
        if tensor.requires_grad or tensor.is_inference() or id(tensor) in self._buffers:
            return
        known = self._copied.get(id(tensor))
        if known is None or known.version != tensor._version:
            known = _TensorContents(tensor, tensor._version, tensor.detach().clone())
        self._tensors[id(tensor)] = known

    @property
    def is_current(self) -> bool:
        """Whether their contents are unchanged."""
        return self._are_same() and not self.written

    @property
    def written(self) -> set[int]:
        """The ids of the tensors that were written in place since the snapshot."""
        return {key for key, (tensor, version, _) in self._tensors.items() if tensor._version != version}

    def copy_of(self, value: Any) -> Any:
        """A copy with the earlier value of a tensor that was written in place since; or else the value itself."""
        noted = self._tensors.get(id(value))
        return value if noted is None or value._version == noted.version else noted.copy.clone()

    def put_back(self, copies: Collection[int] | None = None) -> None:
        """Restore the contents.

        Args:
            copies: as a recomputation is to find them: the ids of tensors that are replaced by copies with the earlier
                values. What is freed has a stand-in, and containers with many entries stay as they are. None: for good.
                What stands now stays in the place of what is freed, and such containers lose the entries added since.
        """
        PutBacks.note()
        replaced = [self._tensors[key] for key in copies or () if key in self._tensors]
        stand_ins = {id(tensor): copy.clone() for tensor, _, copy in replaced}
        for table, count in self._bare:
            shorten(table, count)
        for kind, holder, content in self.containers:
            values = values_alive(content)
            if copies is None and any([value is FREED for value in values]):
                values = _with_present(kind, holder, values)
            if copies is None or kind is not COUNTED:
                kind.write(holder, [stand_ins.get(id(value), value) for value in values])

    def roll_back(self) -> None:
        """Restore all contents, where something has changed; the values of tensors too."""
        if self.is_current:
            return
        self.put_back()
        for tensor, version, copy in self._tensors.values():
            if tensor._version != version:
                refill(tensor, copy)


@lru_cache(maxsize=4096)
def _getter(keys: tuple[str, ...]) -> tuple[list[str], Callable[[dict[str, Any]], tuple[Any, ...]]]:
    """Of the dict of a module the names that count, first that of its children, and what gets their values."""
    names = ["_modules", *[key for key in keys if key not in _ELSEWHERE and key != "_modules"]]
    return names, itemgetter(*names) if len(names) > 1 else lambda table: (table["_modules"],)


class _TensorContents(NamedTuple):
    tensor: Tensor
    version: int
    copy: Tensor


class ContainerKind(NamedTuple):
    """A kind of container, with functions that read and write it.

    Attributes:
        read: its entries.
        write: gives it entries that were read earlier.
        long: the kind of such a container with many entries.
        same: whether an entry is one that was read earlier.
        has_dict: whether it has attributes beside its entries.
    """

    read: Callable[[Any], Sequence[Any]]
    write: Callable[[Any, list[Any]], None]
    long: ContainerKind | None = None
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
    def halves(self) -> tuple[list[Any], list[Any]]:
        """Of a dict whose entries are noted the names, and the values."""
        half = len(self.content) // 2
        return self.content[:half], self.content[half:]

    @property
    def parts(self) -> list[tuple[Any, Callable[[Any], Collection[Any]], list[Any]]]:
        """The parts that are compared: the container, a function of C that reads it, and what that is to find."""
        if self.kind is _MODULE:
            return [(self.holder, _getter(tuple(self.holder))[1], self.halves[1])]
        if self.kind is _MAPPING:
            names, values = self.halves
            return [(self.holder, dict.keys, names), (self.holder, dict.values, values)]
        return [(self.holder, self.kind.read, self.content)]


def _comparison(bare: Sequence[dict[str, Any]], containers: Sequence[ContainerContents]) -> Callable[[], bool]:
    """A function that says whether all these have the entries that they had, and `bare` as many: all at once, in C."""
    sized = [*bare, *[container.holder for container in containers if container.kind is _MODULE]]
    by_value = [container for container in containers if container.kind.same is eq]
    parts = [part for container in containers if container.kind.same is is_ for part in container.parts]
    holders, reads = [holder for holder, _, _ in parts], [read for _, read, _ in parts]
    expected = list(chain.from_iterable([entries for _, _, entries in parts]))
    lengths = list(map(len, sized)), [len(entries) for _, _, entries in parts]

    def are_same() -> bool:
        try:
            present = list(map(call, reads, holders))
        except KeyError:  # an attribute is gone
            return False
        if (list(map(len, sized)), list(map(len, present))) != lengths:
            return False
        return all(map(is_, chain.from_iterable(present), expected)) and all([
            container.content == container.kind.read(container.holder) for container in by_value
        ])

    return are_same


def _with_weak_references(values: Iterable[Any]) -> list[Any]:
    """The values, with weak references to those in autograd's graph, which it would keep alive."""
    return [
        TensorWeakRef(value)
        if isinstance(value, Tensor) and value is not FREED and value.grad_fn is not None else value
        for value in values
    ]


def values_alive(values: Sequence[Any]) -> list[Any]:
    """The values that were held; a stand-in for each that is freed."""
    return [(FREED if (tensor := value()) is None else tensor) if type(value) is TensorWeakRef else value
            for value in values]  # fmt: skip


def _with_present(kind: ContainerKind, holder: Any, values: list[Any]) -> list[Any]:
    """The values that a container held, but for freed ones: entries of dicts and objects are as they are now."""
    if isinstance(holder, dict):
        pairs = zip(values, values[len(values) // 2 :])  # noqa: B905  # names and values, one behind the other
        wanted = {name: dict.get(holder, name, FREED) if value is FREED else value for name, value in pairs}
        alive = {name: value for name, value in wanted.items() if value is not FREED}
        return [*alive, *alive.values()]
    if kind.write is _write_slots:
        return [now if value is FREED else value for value, now in zip(values, kind.read(holder), strict=True)]
    return [value for value in values if value is not FREED]


def _write_module(table: dict[str, Any], entries: list[Any]) -> None:
    """Give a module's dict these entries and no more, but for those that are kept elsewhere."""
    wanted = dict(zip(entries, entries[len(entries) // 2 :]))  # noqa: B905  # names and values, as above
    for name in [name for name in table if name not in _ELSEWHERE and name not in wanted]:
        del table[name]
    changed = {name: value for name, value in wanted.items() if value is not table.get(name, _NONE)}
    if changed:
        table.update(changed)


def _write_slots(holder: Any, content: list[Any]) -> None:
    for name, value in zip(_slots(type(holder)), content, strict=True):
        if value is _NONE:
            if hasattr(holder, name):
                object.__delattr__(holder, name)
        else:
            object.__setattr__(holder, name, value)


def _write_nothing(holder: Any, content: list[Any]) -> None:
    """Its entries are always the same."""


def _write_array(holder: Any, content: list[bytes]) -> None:
    if holder.tobytes() != content[0]:  # it may be one that cannot be written
        holder[...] = numpy.frombuffer(content[0], holder.dtype).reshape(holder.shape)


def _slots(kind: type) -> list[str]:
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return [name for names in slots for name in ([names] if isinstance(names, str) else names) if name[:2] != "__"]


class FreedTensor(Tensor):
    """The stand-in for a tensor that a forward left on a module and that is freed: until a forward leaves another.

    To read it is an error.
    """

    @classmethod
    def __torch_function__(cls, *call: Any, **options: Any) -> NoReturn:
        raise CheckpointError(
            "a recomputation, or the backward of one, read a tensor in autograd's graph that the forward of another "
            "chunk had left in an attribute of a module. It is not kept: that would keep the graph. Let the forward "
            "keep value.detach(), or use checkpoint='never'."
        )


FREED = torch.Tensor._make_subclass(FreedTensor, torch.empty(0, device="cpu"))
_NONE = object()
COUNTED = ContainerKind(
    lambda holder: [length(holder)], lambda holder, content: shorten(holder, content[0]), same=eq
)
_MAPPING = ContainerKind(reader_of(dict), write, COUNTED)
_MODULE = ContainerKind(list, _write_module)
_OBJECT = ContainerKind(lambda holder: [], _write_nothing, has_dict=True)
_SLOTTED = ContainerKind(lambda holder: [getattr(holder, name, _NONE) for name in _slots(type(holder))], _write_slots)
OBJECTS = (_OBJECT, _SLOTTED, _SLOTTED._replace(has_dict=True))
ARRAY = ContainerKind(lambda holder: [holder.tobytes()], _write_array, same=eq)
_TENSOR = ContainerKind(list, _write_nothing)


@lru_cache(maxsize=4096)
def kind_of(kind: type) -> ContainerKind | None:
    """The kind of a class of objects. None: they are not covered."""
    if issubclass(kind, Tensor):
        return None if kind is FreedTensor else _TENSOR
    if issubclass(kind, CONTAINERS):
        if kind is dict:
            return _MAPPING
        return ContainerKind(
            reader_of(kind), write, COUNTED, has_dict=kind not in CONTAINERS and bool(kind.__dictoffset__)
        )
    if issubclass(kind, FIXED):
        return ContainerKind(reader_of(kind), _write_nothing)
    if issubclass(kind, numpy.ndarray):
        return ARRAY
    is_plain = kind.__module__ in ("types", "collections")  # SimpleNamespace, UserDict, UserList
    if issubclass(kind, _OTHERS) or package_of(kind) in OTHER_PACKAGES and not is_plain:
        return None
    if not _slots(kind):
        return _OBJECT if kind.__dictoffset__ else None
    return _SLOTTED._replace(has_dict=bool(kind.__dictoffset__))


def package_of(made: Any) -> str:
    """The name of the package, or of the script, in which a class or a function was made; of none "None"."""
    return str(made.__module__).partition(".")[0]


@lru_cache(maxsize=1024)
def is_installed(package: str) -> bool:
    """Whether a package was installed by pip: the effects of restoring its objects are not known."""
    return (getattr(sys.modules.get(package), "__file__", None) or "").startswith(_INSTALLED)
