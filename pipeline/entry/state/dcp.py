"""A torch.distributed.checkpoint directory as a source of single values.

    torch.distributed.checkpoint.save({"model": ..., "optimizer": ...}, checkpoint_id="run/100")    any number of ranks
    Directory(Path("run/100"), "model").read(["2.weight"])                                          reads that tensor
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata


class Directory:
    """The values of a checkpoint directory. Those that are no tensors were pickled by torch.

    Args:
        path: of the directory.
        part: the key of a dict within the saved one: the values are those of that dict then.

    Raises:
        FileNotFoundError: there is no checkpoint in the directory.
        RuntimeError: its list of entries cannot be read.
        KeyError: it has no such part.
    """

    def __init__(self, path: Path, part: str | None) -> None:
        self._reader = _RequestedReader(path)
        self._entries: dict[str, list[tuple[str, tuple[str | int, ...]]]] = {}  # flat names, and the keys to each
        metadata, all_keys = self._reader.saved_metadata, set()
        for flat in metadata.state_dict_metadata:
            key_path = (metadata.planner_data or {}).get(flat, (flat,))
            all_keys.add(str(key_path[0]))
            if part is not None and key_path[0] == part and len(key_path) > 1:
                key_path = key_path[1:]
            elif part is not None:
                continue
            self._entries.setdefault(key_path[0], []).append((flat, key_path[1:]))
        if part is not None and not self._entries:
            raise KeyError(f"the checkpoint in {str(path)!r} has no dict {part!r}; it has {sorted(all_keys)}.")

    @property
    def names(self) -> Collection[str]:
        """The keys of the saved dict."""
        return self._entries.keys()

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """Some values; tensors on the CPU, in memory of their own.

        Raises:
            RuntimeError: one cannot be read.
        """
        key_paths = {flat: (name, *key_path) for name in names for flat, key_path in self._entries[name]}
        state_dict = {flat: self._place(flat) for flat in key_paths}
        self._reader.requested = list(state_dict)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as asked for: no_dist
                dcp.load(state_dict, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:  # a BaseException, around what went wrong on each rank
            causes = "; ".join(str(failure[0]) or repr(failure[0]) for failure in error.failures.values())
            first = next(iter(key_paths.values()))[0]
            raise RuntimeError(
                f"{first!r} of {str(self._reader.path)!r} cannot be read: {causes}. Is the directory whole?"
            ) from error
        return unflatten_state_dict(state_dict, key_paths)

    def _place(self, flat: str) -> torch.Tensor | None:
        """Memory to read an entry into, if it is a tensor."""
        entry = self._reader.saved_metadata.state_dict_metadata[flat]
        if isinstance(entry, TensorStorageMetadata):
            return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        return None


class _RequestedReader(dcp.FileSystemReader):
    """Reads the list of entries once, and shows torch the requested ones only: torch goes through all that it sees."""

    requested: Sequence[str] = ()

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self.saved_metadata = super().read_metadata()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(
                f"no checkpoint in {str(path)!r}: {error}. Give the directory that torch.distributed.checkpoint.save "
                "got as checkpoint_id, or a folder of safetensors files."
            ) from error
        except Exception as error:  # pickle says in many types that a file is not its own, or was cut short
            raise RuntimeError(
                f"'.metadata' of {str(path)!r} cannot be read: {error!r}. Is the directory whole?"
            ) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries = {flat: self.saved_metadata.state_dict_metadata[flat] for flat in self.requested}
        return replace(self.saved_metadata, state_dict_metadata=entries)
