"""The encoding of plain values as JSON that gives back the same values of the same types.

    1, True, None, "a", 2.5     themselves                     (1, 2)          {"tuple": [1, 2]}
    nan, inf, 0.0, -0.0         {"float": its 8 bytes}         {1: "a"}        {"dict": [[1, "a"]]}
    2**70                       {"int": hexadecimal}           list, Pair      {"type": "builtins:list"}
    torch.float32               {"dtype": "float32"}           [1, 2]          [1, 2]
    the spec of a tensor        {"strided": [its fields]}

A type is written as its name, and looked up in the modules that the other process has imported; nothing is imported or
called for it.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from math import isfinite
from typing import Any, TypeAlias

import torch

from pipeline.transports.tensor_spec import SparseSpec, StridedSpec

Json: TypeAlias = Any  # None, bool, int, float, str, and lists and dicts of them


def encode_plain(value: Any) -> Json:
    """None, bool, int, float, str, torch dtypes, layouts, devices, types, specs, and tuples, lists, dicts of them."""
    write = _WRITE.get(type(value))
    if write is not None:
        return write(value)
    if isinstance(value, type):
        return {"type": _name_of(value)}
    raise TypeError(f"a {qualified(type(value))} ({str(value)[:60]}) is not a plain value")


def decode_plain(written: Json) -> Any:
    """The inverse of `encode_plain`."""
    if isinstance(written, list):
        return [decode_plain(item) for item in written]
    if isinstance(written, dict):
        ((tag, content),) = written.items()
        return _READ[tag](content)
    return written


def write_float(value: float) -> Json:
    """A float, so that equal ones are written alike and others are not: nan is nan, and -0.0 is not 0.0."""
    return value if isfinite(value) and value else {"float": struct.pack("<d", value).hex()}


def qualified(kind: Any) -> str:
    """The name of a class, by which another process finds it."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _name_of(kind: type) -> str:
    name = qualified(kind)
    try:
        found_kind = _type_called(name)
    except LookupError:
        found_kind = None
    if found_kind is not kind:
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


def _itself(value: Any) -> Json:
    return value


def _read_float(written: str) -> float:
    (value,) = struct.unpack("<d", bytes.fromhex(written))
    return float(value)


_WRITE: dict[type, Callable[[Any], Json]] = {
    type(None): _itself,
    bool: _itself,
    str: _itself,
    int: lambda value: value if abs(value) < 2**63 else {"int": hex(value)},
    float: write_float,
    list: lambda value: [encode_plain(item) for item in value],
    tuple: lambda value: {"tuple": [encode_plain(item) for item in value]},
    StridedSpec: lambda value: {"strided": [encode_plain(item) for item in value]},
    SparseSpec: lambda value: {"sparse": [encode_plain(item) for item in value]},
    dict: lambda value: {"dict": [[encode_plain(key), encode_plain(item)] for key, item in value.items()]},
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.layout: lambda value: {"layout": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"device": str(value)},
}
_READ: dict[str, Callable[[Any], Any]] = {
    "int": lambda written: int(written, 16),
    "float": _read_float,
    "tuple": lambda written: tuple([decode_plain(item) for item in written]),
    "strided": lambda written: StridedSpec(*[decode_plain(item) for item in written]),
    "sparse": lambda written: SparseSpec(*[decode_plain(item) for item in written]),
    "dict": lambda written: {decode_plain(key): decode_plain(item) for key, item in written},
    "type": _type_called,
    "dtype": lambda written: getattr(torch, written),
    "layout": lambda written: getattr(torch, written),
    "device": torch.device,
}
