"""The file of a result: its format, and its atomic replacement.

    run.json   {"format": "penstock result", "version": 1, "class": "Trace", "module": ..., "fields": {...}}
    run.npz    the same JSON as the text "result", and an array for each tensor: a zip of *.npy, no pickle in it
    fields --> run.npz.4711.part --rename--> run.npz      so that a run that dies leaves the old file as it was
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import IO, Any, TypeAlias, Unpack

import numpy as np

from pipeline.curvature.results.encoding import Arrays, ResultError, ToJson, as_data, decoded, encoded

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
