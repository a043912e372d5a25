"""The encoding of plain values, and of the structure of any value, as JSON that gives back the same of the same types.

    1, True, None, "a", 2.5     themselves                     (1, 2)          {"tuple": [1, 2]}
    nan, inf, 0.0, -0.0         {"float": its 8 bytes}         {1: "a"}        {"dict": [[1, "a"]]}
    2**70                       {"int": hexadecimal}           list, Pair      {"type": "builtins:list"}
    torch.float32               {"dtype": "float32"}           [1, 2]          [1, 2]
    TensorPosition(0)           {"slot": [its fields]}         (x, [y])        {"skeleton": [its spec, its leaves]}
    a spec of torch's pytree    {"node": ["builtins:tuple", its context, its children]}

Nothing is pickled. A type is written as its name, and looked up in the modules that the other process has imported, a
node of a pytree among those that are registered there; nothing is imported or called for it. What a class hands to
`torch.utils._pytree` as its context must be made of plain values, or the class says itself how to write it
(`to_dumpable_context`).
"""

from __future__ import annotations

import json
import struct
import sys
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from pipeline.data.pytrees import Skeleton, TensorPosition
from pipeline.transports.tensor_spec import SparseSpec, StridedSpec

Json: TypeAlias = Any  # None, bool, int, float, str, and lists and dicts of them
_LEAF = pytree.tree_structure(0)
_LISTS_KEYS = (dict, OrderedDict, defaultdict)  # their context is a list of keys, which torch alone reads


def encode(value: Any) -> Json:
    """A value for `json.dumps`.

    Args:
        value: None, bool, int, float, str, a dtype, layout, device, type, Skeleton or spec; a tuple, list or dict.

    Raises:
        TypeError: it has a part that cannot be written. It says which, and what to do.

    Example:
        >>> from pipeline.data.pytrees import flatten
        >>> encode(flatten((torch.ones(2), 7), "it").skeleton.leaves)
        {'tuple': [{'slot': [0]}, 7]}
    """
    write = _WRITE.get(type(value))
    if write is not None:
        return write(value)
    if isinstance(value, type):
        return {"type": _name_of(value)}
    raise TypeError(f"a {_qualified(type(value))} ({str(value)[:60]}) is not a plain value")


def decode(written: Json) -> Any:
    """The inverse of `encode`.

    Raises:
        LookupError: it names a class that this process does not know.
    """
    if isinstance(written, list):
        return [decode(item) for item in written]
    if isinstance(written, dict):
        ((tag, content),) = written.items()
        return _READ[tag](content)
    return written


def same_skeleton(one: Skeleton | None, other: Skeleton | None) -> bool:
    """Whether both are written alike: of the same types, 1 is not True, -0.0 is not 0.0 and nan is nan."""
    if one is other or one is None or other is None:
        return one is other
    return _same_spec(one.spec, other.spec) and all(map(_same_leaf, one.leaves, other.leaves))


def may_be_shared(spec: pytree.TreeSpec) -> bool:
    """Whether many values may be built by one spec, since nobody can write in its contexts."""
    immutable = spec.type in _LISTS_KEYS or isinstance(spec.context, (type(None), bool, int, float, str, type))
    return immutable and all(map(may_be_shared, spec.children()))


def _same_leaf(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    return encode(one) == encode(other) if type(one) is float else bool(one == other)


def _same_spec(one: pytree.TreeSpec, other: pytree.TreeSpec) -> bool:
    ones, others = one.children(), other.children()
    return one is other or (
        one.type is other.type
        and len(ones) == len(others)
        and _same_context(one, other)
        and all(map(_same_spec, ones, others))
    )


def _same_context(one: pytree.TreeSpec, other: pytree.TreeSpec) -> bool:
    """Not by == alone: 1 == True, and a class may have odd ideas of what is equal."""
    if one.context is other.context:
        return True
    if one.type in (dict, OrderedDict) and all([type(key) is str for key in one.context + other.context]):
        return bool(one.context == other.context)
    return json.dumps(_write_context(one)) == json.dumps(_write_context(other))


def _qualified(kind: Any) -> str:
    """The name of a class, by which another process finds it."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _name_of(kind: type) -> str:
    name = _qualified(kind)
    try:
        is_found = _type_called(name) is kind
    except LookupError:
        is_found = False
    if not is_found:
        raise TypeError(f"the class {name} cannot be found by its name; define it at the top level of a module")
    return name


def _type_called(name: str) -> type:
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for attribute in path.split("."):
        value = getattr(value, attribute, None)
    if not isinstance(value, type):
        raise LookupError(
            f"it names the class {name}, which this process does not know. Import or define it on every rank before "
            "the Pipe is called."
        )
    return value


def _nodes() -> dict[str, Any]:
    """The registered pytree nodes by name; of several with one name, the last."""
    return {_qualified(kind): kind for kind in pytree.SUPPORTED_NODES}


def _write_node(spec: pytree.TreeSpec) -> Json:
    if spec.is_leaf():
        return {"node": None}
    name = _qualified(spec.type)
    if _nodes().get(name) is not spec.type:
        raise TypeError(
            f"a {name}, which cannot be sent to another rank: another class of that name is registered as a pytree "
            "node. Give it a name of its own."
        )
    return {"node": [name, _write_context(spec), encode(spec.children())]}


def _write_context(spec: pytree.TreeSpec) -> Json:
    try:
        return encode(spec.context)
    except TypeError as error:
        dump = pytree.SUPPORTED_SERIALIZED_TYPES[spec.type].to_dumpable_context
        if dump is None or spec.type in (namedtuple, defaultdict):  # these two write no more than is written here
            raise TypeError(
                f"a {_qualified(spec.type)}, which cannot be sent to another rank: of its context for "
                f"torch.utils._pytree, {error}. Register it with a context of plain values, or with "
                "to_dumpable_context= and from_dumpable_context=."
            ) from None
        return {"dumped": [_qualified(spec.type), encode(dump(spec.context))]}


def _read_node(written: Json) -> pytree.TreeSpec:
    if written is None:
        return _LEAF
    name, context, children = written
    kind = _nodes().get(name)
    if kind is None:
        raise LookupError(
            f"it holds a {name}, which is registered as a pytree node on the rank that sent it and not on this one. "
            "Call torch.utils._pytree.register_pytree_node on every rank before the Pipe is called."
        )
    context = decode(context)
    if kind is namedtuple and not issubclass(context, tuple):  # torch will call it
        raise LookupError(f"it holds a {_qualified(context)} as a namedtuple, which it is not on this rank.")
    return pytree.TreeSpec(kind, context, decode(children))


def _read_dumped(written: Json) -> Any:
    name, context = written
    load = pytree.SUPPORTED_SERIALIZED_TYPES[_nodes()[name]].from_dumpable_context
    if load is None:
        raise LookupError(f"{name} is registered without from_dumpable_context= on this rank. Give it one.")
    return load(decode(context))


def _itself(value: Any) -> Json:
    return value


def _write_float(value: float) -> Json:
    """A float, so that equal ones are written alike and others are not: nan is nan, and -0.0 is not 0.0."""
    return value if isfinite(value) and value else {"float": struct.pack("<d", value).hex()}


def _write_record(tag: str, value: tuple[Any, ...]) -> Json:
    return {tag: encode(list(value))}


def _read_record(kind: type, written: Json) -> Any:
    return kind(*decode(written))


_RECORDS = {
    "slot": TensorPosition, "skeleton": Skeleton, "strided": StridedSpec, "sparse": SparseSpec,
}  # fmt: skip
_WRITE: dict[type, Callable[[Any], Json]] = {
    type(None): _itself,
    bool: _itself,
    str: _itself,
    int: lambda value: value if abs(value) < 2**63 else {"int": hex(value)},
    float: _write_float,
    list: lambda value: [encode(item) for item in value],
    tuple: lambda value: {"tuple": encode(list(value))},
    dict: lambda value: {"dict": encode(list(map(list, value.items())))},
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.layout: lambda value: {"layout": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"device": str(value)},
    **dict.fromkeys([pytree.TreeSpec, type(_LEAF)], _write_node),
    **{kind: partial(_write_record, tag) for tag, kind in _RECORDS.items()},
}
_READ: dict[str, Callable[[Any], Any]] = {
    "int": lambda written: int(written, 16),
    "float": lambda written: struct.unpack("<d", bytes.fromhex(written))[0],
    "tuple": lambda written: tuple(decode(written)),
    "dict": lambda written: dict(decode(written)),
    "type": _type_called,
    "dtype": lambda written: getattr(torch, written),
    "layout": lambda written: getattr(torch, written),
    "device": torch.device,
    "node": _read_node,
    "dumped": _read_dumped,
    **{tag: partial(_read_record, kind) for tag, kind in _RECORDS.items()},
}
