"""A safetensors file, or the shards of one with their index, as a source of single tensors.

    folder/model.safetensors                                                    its tensors, by name
    folder/model.safetensors.index.json    {"weight_map": {"0.weight": "model-00001-of-00004.safetensors", ...}}

It is what save_pretrained of Hugging Face's libraries writes. A file is mapped into memory while one tensor is copied
out of it, and no longer: who reads holds what was read, and one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.common.arguments import few

_FILE, _INDEX = ".safetensors", ".safetensors.index.json"


def tensor_file(path: Path) -> Path | None:
    """The safetensors file of a folder, or the index of its shards; None where there is neither.

    Args:
        path: a folder; or a file, which is taken if it is one of these.

    Raises:
        ValueError: there are several.
    """
    if path.name.endswith((_FILE, _INDEX)):
        return path
    files = sorted(path.glob(f"*{_INDEX}"))
    files += [
        file for file in sorted(path.glob(f"*{_FILE}"))
        if not files or file.with_name(f"{file.name}.index.json") in files
    ]  # fmt: skip
    if len(files) > 1:
        raise ValueError(
            f"several states in {str(path)!r}: {few([file.name for file in files])}. Give the path of "
            f"the file, or of the index of its shards (*{_INDEX})."
        )
    return files[0] if files else None


class TensorFiles:
    """The tensors of a safetensors file, or of the shards of an index.

    Args:
        path: of the file, or of the index.

    Raises:
        ImportError: the library safetensors is not installed.
        FileNotFoundError: there is no such file.
        RuntimeError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open, self._failure = _library()
        self._files = self._shards() if path.name.endswith(_INDEX) else dict.fromkeys(self._names(path), path)

    @property
    def names(self) -> Collection[str]:
        """The names of the tensors."""
        return self._files.keys()

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Some tensors, on the CPU, in memory of their own.

        Raises:
            RuntimeError: a file cannot be read.
        """
        return {name: self._read(name) for name in names}

    def _read(self, name: str) -> Tensor:
        file = self._files[name]
        try:
            with self._open(file, framework="pt", device="cpu") as tensors:
                tensor: Tensor = tensors.get_tensor(name).clone()
        except (OSError, self._failure) as error:
            raise RuntimeError(
                f"{name!r} of {str(file)!r} cannot be read: {error}. Is the folder whole? {self._path.name!r} says "
                "that this file has it."
            ) from error
        return tensor

    def _names(self, file: Path) -> list[str]:
        try:
            with self._open(file, framework="pt", device="cpu") as tensors:
                return list(tensors.keys())
        except self._failure as error:
            raise RuntimeError(f"{str(file)!r} cannot be read: {error}.") from error

    def _shards(self) -> dict[str, Path]:
        try:
            weight_map = json.loads(self._path.read_text(encoding="utf-8"))["weight_map"]
            return {name: self._path.parent / file for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RuntimeError(
                f"{str(self._path)!r} is no index of safetensors files, {{'weight_map': {{name: file, ...}}}}: "
                f"{type(error).__name__}: {error}."
            ) from error


def _library() -> tuple[Callable[..., Any], type[Exception]]:
    """The function that opens a file, and its error."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "a folder of safetensors files needs the library: pip install penstock-torch[safetensors]"
        ) from error
    return safe_open, SafetensorError
