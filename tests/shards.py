"""Tensors saved as shards of safetensors files, with their index, as save_pretrained writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_shards(folder: Path, shards: Sequence[Mapping[str, Tensor]]) -> Path:
    """The folder: in the index the names are in the order of the shards."""
    folder.mkdir()
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        save_file(dict(shard), folder / file)
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
