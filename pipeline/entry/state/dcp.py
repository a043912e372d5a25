"""A reader of torch.distributed.checkpoint directories that loads single tensors.

    torch.distributed.checkpoint.save({"model": ..., "optimizer": ...}, checkpoint_id="run/100")    any number of ranks
    Saved("run/100", "model")["2.weight"]                                                           reads that tensor

Each rank reads its own entries: no rank waits for another, and none holds the whole model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata


class Saved(Mapping[str, Any]):
    """A dict in a torch.distributed.checkpoint directory, whose values are each read when they are asked for.

    Tensors come to the CPU, in memory of their own. Other values were pickled by torch: read them only
    from a source that you trust.

    Args:
        path: the directory.
        part: the key of a dict within the saved one, such as "model": this mapping is that dict then.

    Raises:
        FileNotFoundError: there is no checkpoint in the directory.
        KeyError: it has no such part.
        RuntimeError: when asked for a value that cannot be read.

    Example:
        >>> import tempfile
        >>> warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as torch says in one process
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = dcp.save({"model": {"0.weight": torch.ones(2)}, "epoch": 3}, checkpoint_id=path)
        ...     dict(Saved(path, "model")), sorted(Saved(path)), Saved(path)["epoch"]
        ({'0.weight': tensor([1., 1.])}, ['epoch', 'model'], 3)
    """

    def __init__(self, path: str | PathLike[str], part: str | None = None) -> None:
        self._reader = _Reader(path)
        self._name = f"Saved({str(path)!r}{'' if part is None else f', {part!r}'})"
        self._entries: dict[str, list[_Entry]] = {}
        metadata = self._reader.found
        for flat in metadata.state_dict_metadata:
            way = (metadata.planner_data or {}).get(flat, (flat,))
            if part is not None and way[0] == part and len(way) > 1:
                way = way[1:]
            elif part is not None:
                continue
            self._entries.setdefault(way[0], []).append(_Entry(flat, way[1:]))
        if part is not None and not self._entries:
            raise KeyError(f"the checkpoint in {str(path)!r} has no dict {part!r}; it has {sorted(Saved(path))}.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __repr__(self) -> str:
        return f"{self._name} of {len(self)} entries"

    def __getitem__(self, key: str) -> Any:
        return self.read([key])[key]

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """Several values at once, which takes less time than one by one."""
        ways = {entry.flat: (key, *entry.way) for key in keys for entry in self._entries[key]}
        into = {flat: self._place(flat) for flat in ways}
        self._reader.wanted = list(into)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as asked for: no_dist
                dcp.load(into, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:  # a BaseException, around what went wrong on each rank
            causes = "; ".join(str(failure[0]) for failure in error.failures.values())
            first = next(iter(ways.values()))[0]
            raise RuntimeError(
                f"{first!r} of {self._name} cannot be read: {causes}. Is the directory whole?"
            ) from error
        return unflatten_state_dict(into, ways)

    def _place(self, flat: str) -> torch.Tensor | None:
        """Memory to read an entry into, if it is a tensor."""
        entry = self._reader.found.state_dict_metadata[flat]
        if isinstance(entry, TensorStorageMetadata):
            return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        return None


class _Entry(NamedTuple):
    """An entry of torch.distributed.checkpoint: its flat name, and the path of keys to it."""

    flat: str
    way: tuple[str | int, ...]


class _Reader(dcp.FileSystemReader):
    """Reads the list of entries once, and shows torch the requested ones only: torch goes through all that it sees."""

    wanted: Sequence[str] = ()

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(path)
        try:
            self.found = super().read_metadata()
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"no checkpoint in {str(path)!r}: {error}. Give the directory that torch.distributed.checkpoint.save "
                "got as checkpoint_id."
            ) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries = {flat: self.found.state_dict_metadata[flat] for flat in self.wanted}
        return replace(self.found, state_dict_metadata=entries)
