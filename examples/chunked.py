"""The plain module over the chunks of a Pipe, with the Pipe's dropout masks: what the scripts here compare it with."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pipeline import layer_seed


class Chunked(nn.Sequential):
    """A copy of a module that computes chunk by chunk; autograd differentiates it as a whole."""

    def __init__(self, model: nn.Sequential, chunks: int) -> None:
        super().__init__(*copy.deepcopy(model))
        self.chunks = chunks

    def forward(self, x: Tensor) -> Tensor:
        seed = int(torch.empty((), dtype=torch.int64).random_())  # as each call of a Pipe draws one
        outputs = []
        with torch.random.fork_rng(devices=()):
            for chunk, part in enumerate(x.tensor_split(self.chunks)):
                for layer, module in enumerate(self):
                    torch.manual_seed(layer_seed(seed, chunk, layer))
                    part = module(part)
                outputs.append(part)
        return torch.cat(outputs)

    def dot(self, one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
        """As Pipe.dot."""
        return torch.stack([(left * right).sum() for left, right in zip(one, other, strict=True)]).sum()


def apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference of what this process knows, relative to the largest entry of all."""
    size = max(value.abs().max().item() for value in theirs.values())
    return max((value - theirs[name]).abs().max().item() for name, value in ours.items()) / size
