"""A saved state as a mapping that reads each value when it is asked for.

    Saved("run/100", "model")["2.weight"]                   a torch.distributed.checkpoint directory
    Saved("Llama-3.2-1B")["model.norm.weight"]              a folder of safetensors files

Each rank reads its own entries: no rank waits for another, and none holds the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.common.arguments import check_path
from pipeline.entry.state.tensor_files import TensorFiles, tensor_file

if TYPE_CHECKING:
    from pipeline.entry.state.dcp import Directory


class Saved(Mapping[str, Any]):
    """A saved dict, whose values are each read when they are asked for.

    Tensors come to the CPU, in memory of their own. What else a torch.distributed.checkpoint directory has was pickled
    by torch: read it only from a source that you trust.

    Args:
        path: a torch.distributed.checkpoint directory. Or a folder of safetensors files, as save_pretrained of Hugging
            Face's libraries writes it: one file, or shards with their index; or the path of that file, or index.
        part: of a directory the key of a dict within the saved one, such as "model": this mapping is that dict then.

    Raises:
        FileNotFoundError: there is no checkpoint in the directory.
        KeyError: it has no such part.
        ValueError: the folder has several safetensors files and no index, or a directory's files as well.
        ImportError: it is a folder of safetensors files, and the library is not installed.
        RuntimeError: it, or when asked for a value that one, cannot be read.

    Example:
        >>> import tempfile
        >>> import warnings
        >>> import torch
        >>> import torch.distributed.checkpoint as dcp
        >>> warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as torch says in one process
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = dcp.save({"model": {"0.weight": torch.ones(2)}, "epoch": 3}, checkpoint_id=path)
        ...     dict(Saved(path, "model")), sorted(Saved(path)), Saved(path)["epoch"]
        ({'0.weight': tensor([1., 1.])}, ['epoch', 'model'], 3)
    """

    def __init__(self, path: str | PathLike[str], part: str | None = None) -> None:
        check_path("the path of Saved", path)
        self._source = _source(Path(path), part)
        self._name = f"Saved({str(path)!r}{'' if part is None else f', {part!r}'})"

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.names)

    def __len__(self) -> int:
        return len(self._source.names)

    def __contains__(self, key: object) -> bool:
        return key in self._source.names

    def __repr__(self) -> str:
        return f"{self._name} of {len(self)} entries"

    def __getitem__(self, key: str) -> Any:
        return self.read([key])[key]

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """Several values at once, which takes less time than one by one."""
        return self._source.read(keys)


def _source(path: Path, part: str | None) -> Directory | TensorFiles:
    file, is_directory = tensor_file(path), (path / ".metadata").exists()
    if file is None or is_directory and part is not None:
        from pipeline.entry.state.dcp import Directory  # with it sympy: half of the time that it takes to import us

        return Directory(path, part)
    if is_directory:
        raise ValueError(
            f"{str(path)!r} has a checkpoint of torch.distributed.checkpoint (.metadata) and {file.name!r}. Give the "
            "path of that file, or move one of the two."
        )
    if part is not None:
        raise KeyError(f"{str(file)!r} has no dict {part!r}: safetensors files have tensors only.")
    return TensorFiles(file)
