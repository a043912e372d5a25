"""The file of a result: its format, and its atomic replacement.

    run.json   {"format": "penstock result", "version": 1, "class": "Trace", "module": ..., "fields": {...}}
    run.npz    the same JSON as the text "result", and an array for each tensor: a zip of *.npy, no pickle in it
    fields --> run.npz.4711.part --rename--> run.npz      so that a run that dies leaves the old file as it was

Tensors, and numbers, texts and containers around them, are JSON without loss:

    {"value": 638.3, "stderr": inf, "vectors": [{"weight": Tensor[3, 2]}]}
      --encoded-->  {"dict": {"value": 638.3, "stderr": {"float": "inf"}, "vectors": [{"dict": {"weight": <tensor>}}]}}
      <tensor>, as data    {"tensor": "float32", "shape": [3, 2], "data": [[0.5, -1.0], ["inf", 0.0], [2.0, 0.0]]}
      <tensor>, as array   {"tensor": "float32", "array": "vectors.0.weight"}, and that array kept beside the JSON

JSON knows no tuples, no inf and no nan, so that objects with one key name stand for them; a plain JSON object is never
a dict. numpy knows no bfloat16: the array has its bits as integers.
"""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import IO, Any, TypeAlias, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_FORMAT, _VERSION = "penstock result", 1
_TEXT = "result"


StoredResult: TypeAlias = tuple[str, str, dict[str, Any]]  # a class's name, the module that it was in, its fields


def write(path: str | PathLike[str], *stored: Unpack[StoredResult]) -> None:
    """Writes a file. Where one of that name is, it stays whole until it is replaced.

    Raises:
        ResultError: another suffix than .npz and .json, or a value of a type that a file cannot hold.
        FileNotFoundError: the folder is not there.
    """
    path, arrays = Path(path), Arrays()
    arrays.named[_TEXT] = np.array("")  # takes the name
    text = _text(stored, as_data if _is_json(path) else arrays.put)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} (path: {path}). Make it first.")
    with replacing(path, f".{os.getpid()}.part") as file:
        if _is_json(path):
            file.write(text.encode() + b"\n")
        else:
            arrays.named[_TEXT] = np.array(text)
            _write_zip(file, arrays.named)


def read(path: str | PathLike[str]) -> StoredResult:
    """Reads what `write` wrote.

    Raises:
        ResultError: it is something else, damaged, or written by a newer version.
        FileNotFoundError: there is none.
    """
    path = Path(path)
    try:
        if _is_json(path):
            return _stored(path.read_text(encoding="utf-8"), {}, path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:  # numpy leaves a damaged one open
            return _stored(str(arrays[_TEXT]), arrays, path)
    except (ResultError, FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    # zipfile, numpy and json say in many types that a file is not theirs, or was cut short
    except Exception as error:
        raise ResultError(f"{path} is no saved result, or a damaged one ({type(error).__name__}: {error})") from error


def _is_json(path: Path) -> bool:
    if path.suffix not in (".npz", ".json"):
        raise ResultError(f"a result's file is named *.npz or *.json (path: {path})")
    return path.suffix == ".json"


def _text(stored: StoredResult, tensor: ToJson) -> str:
    kind, module, named = stored
    top = {"format": _FORMAT, "version": _VERSION, "class": kind, "module": module}
    fields = {name: encoded(value, name, tensor) for name, value in named.items()}
    return json.dumps({**top, "fields": fields}, allow_nan=False)


def _stored(text: str, arrays: Mapping[str, Any], path: Path) -> StoredResult:
    top = json.loads(text)
    if not isinstance(top, dict) or top.get("format") != _FORMAT:
        raise ResultError(f"{path} is no saved result: it does not say {_FORMAT!r}")
    if top["version"] > _VERSION:
        raise ResultError(
            f"{path} was written by a newer version: its format is {top['version']}, this version knows {_VERSION}. "
            "Update penstock-torch."
        )
    return top["class"], str(top["module"]), {name: decoded(value, arrays) for name, value in top["fields"].items()}


@contextmanager
def replacing(path: Path, suffix: str) -> Iterator[IO[bytes]]:
    """Within: a file beside `path`, with `suffix` behind its name, which takes its place at the end and at once."""
    part = path.with_name(path.name + suffix)  # beside it: a rename is whole within one file system
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a crash of the machine could leave a new name with old content
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _write_zip(file: IO[bytes], arrays: Mapping[str, Any]) -> None:
    """numpy.savez, which takes no array of the name "file"."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


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
