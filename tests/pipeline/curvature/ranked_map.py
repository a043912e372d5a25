"""The small matrix of dense_map.py as several ranks see it: each a thread, with its own part of every vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import torch
from dense_map import DenseSpace
from torch import Tensor

from pipeline.curvature.linear import LinearMap
from pipeline.curvature.space import Vec

T = TypeVar("T")


class Meeting:
    """Where the ranks lay down what the others need; every rank must come as often as the others."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = Barrier(ranks, timeout=20.0)
        self._laid: list[object] = [None] * ranks

    def all_of(self, rank: int, mine: T) -> list[T]:
        self._laid[rank] = mine
        self._barrier.wait()
        laid = list(self._laid)
        self._barrier.wait()
        return laid  # type: ignore[return-value]

    def abort(self) -> None:
        self._barrier.abort()


class RankedSpace(DenseSpace):
    """Parameter i of `sizes` is on rank i; the last rank has none, and a copy of rank 0's that is not counted."""

    def __init__(self, whole: DenseSpace, meeting: Meeting, rank: int, sizes: Sequence[int]) -> None:
        super().__init__(whole.size, whole.dtype)
        self._whole, self._meeting, self._rank = whole, meeting, rank
        self.all_sizes, self.reduces = list(sizes), 0
        self.owner = 0 if rank == len(sizes) else rank
        self.sizes = [sizes[self.owner]]

    counted = property(lambda self: [self.owner == self._rank])
    rank = property(lambda self: self._rank)
    ranks = property(lambda self: self._meeting.ranks)

    def random(self, kind: str, seed: int, index: int) -> Vec:
        return self.cut(torch.cat(self._whole.random(kind, seed, index)))

    def cut(self, whole: Tensor) -> Vec:
        return [whole.to(self.dtype).split(self.all_sizes)[self.owner].clone()]

    def joined(self, vecs: Sequence[Vec]) -> list[Tensor]:
        """The whole vectors: for the fake's products alone, no estimator may."""
        parts = self._meeting.all_of(self._rank, [vec[0] for vec in vecs])
        return [torch.cat(one[: len(self.all_sizes)]) for one in zip(*parts, strict=True)]

    def sum_over(self, numbers: Tensor) -> Tensor:
        self.reduces += 1
        return torch.stack(self._meeting.all_of(self._rank, numbers.clone())).sum(0)

    def rows(self, value: Any) -> list[Any]:
        return self._meeting.all_of(self._rank, value)

    def named(self, vec: Vec) -> dict[str, Tensor]:
        return {str(self.owner): vec[0]}

    def vec(self, named: Mapping[str, Tensor]) -> Vec:
        return [named[str(self.owner)].clone()]


class RankedMap(LinearMap):
    """One rank's view of a matrix."""

    def __init__(self, matrix: Tensor, space: RankedSpace, block: int = 4) -> None:
        self.matrix, self._space, self._block = matrix, space, block

    name = property(lambda self: "dense matrix")
    space = property(lambda self: self._space)
    block = property(lambda self: self._block)

    def products(self, vectors: Sequence[Vec]) -> list[Vec]:
        return [self._space.cut(self.matrix @ vector) for vector in self._space.joined(vectors)]

    def fingerprint(self) -> str:
        return str(self.matrix.double().sum().item())


def on_ranks(matrix: Tensor, sizes: Sequence[int], run: Callable[[RankedMap], T]) -> list[T]:
    """What each rank's `run` returns: one rank for each size, and one more that only has a copy."""
    ranks = len(sizes) + 1
    meeting, whole = Meeting(ranks), DenseSpace(len(matrix), matrix.dtype)

    def one(rank: int) -> T:
        try:
            return run(RankedMap(matrix, RankedSpace(whole, meeting, rank, sizes)))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return [future.result() for future in [pool.submit(one, rank) for rank in range(ranks)]]
