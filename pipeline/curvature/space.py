"""The space of vectors that are as large as the parameters: where they are, and their products.

    parameters of rank 0, cuda:0    --> shard 0   a flat tensor there     Vec = [shard 0, shard 1]
    parameters of rank 0, cuda:1    --> shard 1   a flat tensor there
    parameters of rank 1            --> nothing here: rank 1 has its own Vec for the same vector
    u . w = sum over shards, here; then over the processes: one all-reduce of numbers, never of vectors

A parameter that several ranks have (tied weights) has entries on each of them, which are equal and counted once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipeline.distributed.agreement import MismatchError, difference

Vec: TypeAlias = list[Tensor]  # this process's part of a vector: a flat tensor for each shard
HOST: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # numbers about vectors, whatever the default device


class Space(ABC):
    """The vectors that a linear map takes and gives.

    Attributes:
        size: the number of entries of a vector, those of other processes too.
        dtype: of the entries: float32 or float64.
        counted: for each shard whether it counts in sums; if not, another process has the same entries.
        rank: of this process among those that share the vectors; 0 is the one that prints.
        ranks: the number of processes that share the vectors.
    """

    size: int
    dtype: torch.dtype
    counted: Sequence[bool]
    rank: int
    ranks: int

    @abstractmethod
    def zeros(self) -> Vec:
        """A new vector of zeros."""

    @abstractmethod
    def random(self, kind: str, seed: int, index: int) -> Vec:
        """A random vector, whose entries are independent with mean 0 and variance 1.

        The same entries on any number of devices and processes.

        Args:
            kind: "rademacher" (+1 or -1) or "normal".
            seed: of a run.
            index: which vector of that run.
        """

    @abstractmethod
    def sum_over(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, the same to the bit on each. All processes call it.

        Args:
            numbers: float64, on the CPU, of any shape.
        """

    @abstractmethod
    def rows(self, value: Any) -> list[Any]:
        """The values of all processes, by rank, the same on each. All processes call it.

        Args:
            value: what JSON can hold.
        """

    @abstractmethod
    def named(self, vec: Vec) -> dict[str, Tensor]:
        """This process's entries by the parameters' names, in their shapes; views of `vec`."""

    @abstractmethod
    def vec(self, named: Mapping[str, Tensor]) -> Vec:
        """A new vector from entries by name.

        Raises:
            KeyError: a name is missing, or is none of a parameter.
            ValueError: a shape is not the parameter's.
        """

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """Raise MismatchError unless all processes were given the same settings. All processes call it."""
        by_rank = self.rows({name: repr(value) for name, value in settings.items()})
        if any([words != by_rank[0] for words in by_rank]):
            raise MismatchError(f"{difference(by_rank)}. Give each process the same.")

    def dots(self, left: Sequence[Vec], right: Sequence[Vec]) -> Tensor:
        """All inner products, one all-reduce.

        Returns:
            [len(left), len(right)], float64, on the CPU, the same on every process.
        """
        return self.paired_dots(product(left, right)).view(len(left), len(right))

    def paired_dots(self, pairs: Iterable[tuple[Vec, Vec]]) -> Tensor:
        """Of each pair the inner product: [len(pairs)], one all-reduce, and one wait for each device."""
        pairs = list(pairs)
        total = torch.zeros(len(pairs), **HOST)
        for shard, counts in enumerate(self.counted):
            if counts and pairs:
                total += torch.stack([_dot(one[shard], other[shard]) for one, other in pairs]).to("cpu")
        return self.sum_over(total)

    def on_host(self, vec: Vec) -> dict[str, Tensor]:
        """This process's entries by name, on the CPU, for a result."""
        return {name: part.cpu() for name, part in self.named(vec).items()}

    def norm(self, vec: Vec) -> float:
        """The Euclidean norm."""
        return float(self.dots([vec], [vec]).clamp(min=0.0).sqrt())


_PIECE = 1 << 20  # entries that are in float64 at a time


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """The inner product in float64, which neither autocast nor TF32 touches."""
    pieces = zip(one.split(_PIECE), other.split(_PIECE), strict=True)
    return torch.stack([torch.dot(left.double(), right.double()) for left, right in pieces]).sum()


def copy(vec: Vec) -> Vec:
    """A vector of its own with the same entries."""
    return [shard.clone() for shard in vec]


def scale_(vec: Vec, factor: float) -> Vec:
    """Multiply in place; the vector itself."""
    for shard in vec:
        shard.mul_(factor)
    return vec


def add_(vec: Vec, other: Vec, factor: float = 1.0) -> Vec:
    """Add `factor` times another vector in place; the vector itself."""
    for shard, other_shard in zip(vec, other, strict=True):
        shard.add_(other_shard, alpha=factor)
    return vec
