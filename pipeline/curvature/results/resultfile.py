"""The file of a result: its format, and its atomic replacement.

    run.json   {"format": "penstock result", "version": 1, "class": "Trace", "module": ..., "fields": {...}}
    run.npz    the same JSON as the text "result", and an array for each tensor: a zip of *.npy, no pickle in it
    fields --> run.npz.4711.part --rename--> run.npz      so that a run that dies leaves the old file as it was

Tensors, and numbers, texts and containers around them, are JSON without loss:

    {"value": 638.3, "stderr": inf, "vectors": [{"weight": Tensor[3, 2]}]}
      --encoded-->  {"dict": {"value": 638.3, "stderr": {"float": "inf"}, "vectors": [{"dict": {"weight": <tensor>}}]}}
      <tensor>, as data    {"tensor": "float32", "shape": [3, 2], "data": [[0.5, -1.0], ["inf", 0.0], [2.0, 0.0]]}
      <tensor>, as array   {"array": "vectors.0.weight"}, and that array kept beside the JSON

JSON knows no tuples, no inf and no nan, so that objects with one key name stand for them; a plain JSON object is never
a dict. Tensors are of the types that numpy knows and JSON has numbers for.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, count
from os import PathLike
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pipeline.common.arguments import check_path

_FORMAT, _VERSION = "penstock result", 1
_TEXT = "result"


StoredResult: TypeAlias = tuple[str, str, dict[str, Any]]  # a class's name, the module that it was in, its fields


def write_result(path: str | PathLike[str], kind: str, module: str, named: Mapping[str, Any]) -> None:
    """Writes a file. Where one of that name is, it stays whole until it is replaced.

    Raises:
        ResultError: another suffix than .npz and .json, or a value of a type that a file cannot hold.
        FileNotFoundError: the folder is not there.
    """
    check_path("the path of the result", path)
    path, arrays = Path(path), NamedArrays()
    fields = {name: encoded(value, name, None if _is_json(path) else arrays) for name, value in named.items()}
    top = {"format": _FORMAT, "version": _VERSION, "class": kind, "module": module, "fields": fields}
    text = json.dumps(top, allow_nan=False)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} (path: {path}). Make it first.")
    with replacing(path, f".{os.getpid()}.part") as file:
        if _is_json(path):
            file.write(text.encode() + b"\n")
        else:
            members: dict[str, Any] = {_TEXT: np.array(text), **arrays}
            np.savez(file, **members)


def read_result(path: str | PathLike[str]) -> StoredResult:
    """Reads what `write_result` wrote.

    Raises:
        ResultError: it is something else, damaged, or written by a newer version.
        FileNotFoundError: there is none.
    """
    check_path("the path of the result", path)
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


NamedArrays: TypeAlias = dict[str, np.ndarray[Any, Any]]
_DTYPES = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64".split()


class ResultError(ValueError):
    """A result that cannot be saved, loaded or drawn."""


def encoded(value: Any, where: str, arrays: NamedArrays | None) -> Any:
    """A form that `json.dumps` takes.

    Args:
        value: a tensor, float, int, bool, str, None, or a list, tuple or dict (keys str) of these.
        where: its name, for messages and arrays.
        arrays: tensors are added to it. None: they are nested lists of numbers.

    Raises:
        ResultError: it is, or holds, something else.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, Tensor):
        array = _array(value, where)
        if arrays is None:
            data = tree_map(lambda number: number if math.isfinite(number) else repr(number), array.tolist())
            return {"tensor": str(array.dtype), "shape": list(array.shape), "data": data}
        arrays[name := _free_name(where, arrays)] = array
        return {"array": name}
    if type(value) in (list, tuple, torch.Size):
        items = [encoded(item, f"{where}.{index}", arrays) for index, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encoded(item, f"{where}.{key}", arrays) for key, item in value.items()}}
    keys = " with keys that are no str" if isinstance(value, dict) else ""
    raise ResultError(
        f"{where} is a {type(value).__name__}{keys}, which no file can hold here. Make it a tensor, float, int, bool, "
        "str, None, or a list, tuple or dict (keys: str) of these."
    )


def _array(value: Tensor, where: str) -> np.ndarray[Any, Any]:
    if value.layout is not torch.strided or value.is_meta or str(value.dtype).removeprefix("torch.") not in _DTYPES:
        raise ResultError(
            f"{where} is a {value.layout} tensor of {value.dtype} on {value.device}, which no file can hold here. "
            f"Make it a dense one of: {', '.join(_DTYPES)}."
        )
    return value.numpy(force=True)


def _free_name(where: str, arrays: NamedArrays) -> str:
    """A name that tells where an array belongs, and that is neither another's nor a parameter of `numpy.savez`."""
    base = re.sub(r"[^\w.\-]", "_", where, flags=re.ASCII)[:100]
    taken = {_TEXT, "file", "allow_pickle", *[name.lower() for name in arrays]}  # some disks know no case
    names = chain([base], (f"{base}.{number}" for number in count(1)))
    return next(name for name in names if name.lower() not in taken)


def decoded(value: Any, arrays: Mapping[str, Any]) -> Any:
    """The value that `encoded` took.

    Raises:
        ValueError, LookupError, TypeError: the JSON is not what `encoded` made, or an array is missing.
    """
    if isinstance(value, list):
        return [decoded(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:  # numpy reads inf and nan out of words
        return torch.from_numpy(np.array(value["data"], value["tensor"]).reshape(value["shape"]))
    ((kind, inner),) = value.items()
    if kind == "array":
        return torch.from_numpy(arrays[f"{inner}.npy"])  # the whole name: numpy takes "x.npy" for "x", too
    if kind == "float":
        return float(inner)
    if kind == "tuple":
        return tuple(decoded(item, arrays) for item in inner)
    if kind == "dict":
        return {key: decoded(item, arrays) for key, item in inner.items()}
    raise ValueError(f"an object of unknown kind {kind!r}")
