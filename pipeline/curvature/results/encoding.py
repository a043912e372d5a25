"""The encoding of tensors, and of numbers, texts and containers around them, as JSON without loss.

    {"value": 638.3, "stderr": inf, "vectors": [{"weight": Tensor[3, 2]}]}
      --encoded-->  {"dict": {"value": 638.3, "stderr": {"float": "inf"}, "vectors": [{"dict": {"weight": <tensor>}}]}}
      <tensor>, as data    {"tensor": "float32", "shape": [3, 2], "data": [[0.5, -1.0], ["inf", 0.0], [2.0, 0.0]]}
      <tensor>, as array   {"tensor": "float32", "array": "vectors.0.weight"}, and that array kept beside the JSON

JSON knows no tuples, no inf and no nan, so that objects with one key name stand for them; a plain JSON object is never
a dict. numpy knows no bfloat16: the array has its bits as integers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_NAMES = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 complex64 complex128 bfloat16"
_DTYPES = {name: getattr(torch, name) for name in _NAMES.split()}
_OF_DTYPE = {dtype: name for name, dtype in _DTYPES.items()}

ToJson: TypeAlias = Callable[[Tensor, str], dict[str, Any]]


class ResultError(ValueError):
    """A result that cannot be saved, loaded or drawn."""


def encoded(value: Any, where: str, tensor: ToJson) -> Any:
    """A form that `json.dumps` takes.

    Args:
        value: a tensor, float, int, bool, str, None, or a list, tuple or dict (keys str) of these.
        where: its name, for messages and arrays.
        tensor: `as_data`, or `Arrays().put`.

    Raises:
        ResultError: it is, or holds, something else.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, Tensor):
        return {"tensor": _dtype_name(value, where), **tensor(_plain(value), where)}
    if type(value) in (list, tuple, torch.Size):
        items = [encoded(item, f"{where}.{index}", tensor) for index, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encoded(item, f"{where}.{key}", tensor) for key, item in value.items()}}
    keys = " with keys that are no str" if isinstance(value, dict) else ""
    raise ResultError(
        f"{where} is a {type(value).__name__}{keys}, which no file can hold here. Make it a tensor, float, int, bool, "
        "str, None, or a list, tuple or dict (keys: str) of these."
    )


def decoded(value: Any, arrays: Mapping[str, Any]) -> Any:
    """The value that `encoded` took.

    Raises:
        ValueError, LookupError, TypeError: the JSON is not what `encoded` made, or an array is missing.
    """
    if isinstance(value, list):
        return [decoded(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return _tensor(value, arrays)
    ((kind, inner),) = value.items()
    if kind == "float":
        return float(inner)
    if kind == "tuple":
        return tuple(decoded(item, arrays) for item in inner)
    if kind == "dict":
        return {key: decoded(item, arrays) for key, item in inner.items()}
    raise ValueError(f"an object of unknown kind {kind!r}")


def as_data(value: Tensor, where: str) -> dict[str, Any]:
    """Nested lists of numbers; of a complex tensor pairs of them."""
    real = torch.view_as_real(value) if value.is_complex() else value
    data = real.tolist()
    if real.is_floating_point() and not bool(real.isfinite().all()):
        data = tree_map(lambda number: number if math.isfinite(number) else repr(number), data)
    return {"shape": list(value.shape), "data": data}


class Arrays:
    """numpy's arrays by names that tell where they belong."""

    def __init__(self) -> None:
        self.named: dict[str, np.ndarray[Any, Any]] = {}

    def put(self, value: Tensor, where: str) -> dict[str, Any]:
        name = base = re.sub(r"[^\w.\-]", "_", where, flags=re.ASCII)[:100]
        while name.lower() in {used.lower() for used in self.named}:  # unzip to a disk that knows no case loses none
            name = f"{base}.{len(self.named)}"
        bits = value.view(torch.int16) if value.dtype is torch.bfloat16 else value
        self.named[name] = bits.numpy()
        return {"array": name}


def _plain(value: Tensor) -> Tensor:
    return value.detach().cpu().resolve_conj().resolve_neg()


def _dtype_name(value: Tensor, where: str) -> str:
    if value.layout is not torch.strided or value.is_meta or value.dtype not in _OF_DTYPE:
        raise ResultError(
            f"{where} is a {value.layout} tensor of {value.dtype} on {value.device}, which no file can hold here. "
            f"Make it a dense one of: {_NAMES.replace(' ', ', ')}."
        )
    return _OF_DTYPE[value.dtype]


def _tensor(value: Mapping[str, Any], arrays: Mapping[str, Any]) -> Tensor:
    dtype = _DTYPES[value["tensor"]]
    if "array" in value:
        stored = torch.from_numpy(arrays[f"{value['array']}.npy"])  # the whole name: numpy takes "x.npy" for "x", too
        if stored.dtype is not (torch.int16 if dtype is torch.bfloat16 else dtype):
            raise ValueError(f"array {value['array']} has {stored.dtype} where {dtype} is told")
        return stored.view(dtype)
    data = tree_map(lambda number: float(number) if isinstance(number, str) else number, value["data"])
    if not dtype.is_complex:
        return torch.tensor(data, dtype=dtype, device="cpu").reshape(value["shape"])
    pairs = torch.tensor(data, dtype=dtype.to_real(), device="cpu")
    return torch.view_as_complex(pairs.reshape([*value["shape"], 2]))
