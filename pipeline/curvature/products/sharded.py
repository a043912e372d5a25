"""The vectors of a Pipe's parameters: the shard and the entries that each parameter has.

    'net.0.weight' on cuda:0  --> shard 0, entries 0 .. 4096          each shard is one flat tensor
    'net.7.weight' on cuda:1  --> shard 1, entries 0 .. 4096
    a tied weight that another rank counts --> a shard of its own, that does not count

Parameters are found by name at each use, never kept: they may be replaced between two products.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.common.arguments import few
from pipeline.curvature.space import HOST, Space, Vec


class VectorSlice(NamedTuple):
    """The place of a parameter's entries in a vector."""

    shard: int
    start: int
    shape: torch.Size

    def view(self, vec: Vec) -> Tensor:
        """The entries, in the parameter's shape; on the memory of `vec`."""
        return vec[self.shard].narrow(0, self.start, self.shape.numel()).view(self.shape)


class SpaceParameter(NamedTuple):
    """A parameter of the space, as this process has it.

    Attributes:
        name: its first one in the model.
        shape: its shape.
        device: where its entries are.
        counts: whether it counts here, and not on another process that has it too.
    """

    name: str
    shape: torch.Size
    device: torch.device
    counts: bool


class ParameterSpace(Space):
    """Vectors with an entry for each entry of some parameters.

    Args:
        parameters: this process's parameters, in the order of the model.
        dtype: of the entries.
        rank: of this process.
        ranks: how many there are.
        sum_over: adds numbers up over the processes.
        check_ties: raises where a vector that a user gave has other entries for a tied parameter on another process.
        collective: within, what fails on one process fails on all.
    """

    def __init__(
        self,
        parameters: Sequence[SpaceParameter],
        dtype: torch.dtype,
        rank: int,
        ranks: int,
        sum_over: Callable[[Tensor], Tensor],
        check_ties: Callable[[Mapping[str, Tensor]], None] = lambda named: None,
        collective: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._collective = collective
        self._check_ties = check_ties
        self.dtype, self.rank, self.ranks, self._sum_over = dtype, rank, ranks, sum_over
        self.parameters = tuple(parameters)
        sizes: dict[tuple[torch.device, bool], int] = {}
        shards: dict[tuple[torch.device, bool], int] = {}
        self.slots: dict[str, VectorSlice] = {}
        for parameter in parameters:
            key = (parameter.device, parameter.counts)
            shard = shards.setdefault(key, len(shards))
            self.slots[parameter.name] = VectorSlice(shard, sizes.get(key, 0), parameter.shape)
            sizes[key] = sizes.get(key, 0) + parameter.shape.numel()
        self._shards = [(device, counts, sizes[device, counts]) for device, counts in shards]
        local_size = sum(size for _, counts, size in self._shards if counts)
        self.counted = [counts for _, counts, _ in self._shards]
        self.size = int(sum_over(torch.tensor([local_size], **HOST)).item())

    def zeros(self) -> Vec:
        return [torch.zeros(size, dtype=self.dtype, device=device) for device, _, size in self._shards]

    def random(self, kind: str, seed: int, index: int) -> Vec:
        if kind not in ("rademacher", "normal"):
            raise ValueError(f"kind is {kind!r}. Use 'rademacher' (+1 or -1) or 'normal'.")
        vec = self.zeros()
        for parameter in self.parameters:
            self.slots[parameter.name].view(vec).copy_(_drawn(kind, seed, index, parameter))
        return vec

    def sum_over(self, numbers: Tensor) -> Tensor:
        return self._sum_over(numbers)

    def named(self, vec: Vec) -> dict[str, Tensor]:
        return {name: slot.view(vec) for name, slot in self.slots.items()}

    def vec(self, named: Mapping[str, Tensor]) -> Vec:
        with self._collective():
            vec = self._checked_vec(named)
        self._check_ties(self.named(vec))
        return vec

    def _checked_vec(self, named: Mapping[str, Tensor]) -> Vec:
        unknown = [name for name in named if name not in self.slots]
        missing = [name for name in self.slots if name not in named]
        if unknown or missing:
            raise KeyError(
                f"a vector has one entry for each parameter: {unknown or 'none'} are no parameters here, "
                f"{missing or 'none'} are missing. Give zeros for those that you leave out; the names are "
                f"{few(self.slots)}."
            )
        vec = self.zeros()
        for name, slot in self.slots.items():
            entries = named[name]
            if entries.shape != slot.shape:
                raise ValueError(
                    f"the entries for '{name}' have shape {list(entries.shape)}, the parameter has {list(slot.shape)}."
                )
            slot.view(vec).copy_(entries.detach())
        return vec


def _drawn(kind: str, seed: int, index: int, parameter: SpaceParameter) -> Tensor:
    """By name, so that it does not matter who else is there, and on the CPU, so that it does not matter where."""
    digest = hashlib.sha256(f"{seed} {index} {parameter.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    if kind == "normal":
        return torch.randn(parameter.shape, generator=generator, **HOST)
    return torch.randint(2, parameter.shape, generator=generator, device="cpu", dtype=torch.int8) * 2 - 1
