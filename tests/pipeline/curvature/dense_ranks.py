"""A small symmetric matrix whose vectors lie on several processes, each played by a thread: the truth is known.

    over_ranks(matrix, 3, work)     work(A of rank 0)  work(A of rank 1)  work(A of rank 2)      three threads
                                         sum_over  <------- exchange of numbers ------->  sum_over
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipeline.curvature.linear import LinearMap
from pipeline.curvature.space import Space, Vec

T = TypeVar("T")
PATIENCE = 60.0  # seconds until a rank that waits for the others gives up


class Exchange:
    """Where the ranks meet: each brings something and gets what all have brought."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.meetings = 0
        self._brought: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, action=self._count)

    def __call__(self, rank: int, mine: Any) -> list[Any]:
        self._brought[rank] = mine
        self._barrier.wait(PATIENCE)
        all_of_them = list(self._brought)
        self._barrier.wait(PATIENCE)
        return all_of_them

    def abort(self) -> None:
        self._barrier.abort()

    def _count(self) -> None:
        self.meetings += 1


class RankSpace(Space):
    """Vectors of `size` entries: the last `tied` are on every rank, and rank 0 counts them; the rest is cut evenly."""

    def __init__(self, size: int, dtype: torch.dtype, rank: int, exchange: Exchange, tied: int = 0) -> None:
        self._size, self._dtype, self._rank, self.exchange, self.tied = size, dtype, rank, exchange, tied
        own = torch.arange(size - tied).tensor_split(exchange.ranks)
        self.places = [own[rank], torch.arange(size - tied, size)]

    size = property(lambda self: self._size)
    dtype = property(lambda self: self._dtype)
    counted = property(lambda self: [True, self._rank == 0])
    rank = property(lambda self: self._rank)
    ranks = property(lambda self: self.exchange.ranks)

    def zeros(self) -> Vec:
        return [torch.zeros(len(places), dtype=self.dtype) for places in self.places]

    def random(self, kind: str, seed: int, index: int) -> Vec:
        generator = torch.Generator().manual_seed(1000 * seed + index)
        if kind == "normal":
            whole = torch.randn(self.size, dtype=torch.float64, generator=generator)
        else:
            whole = torch.randint(2, (self.size,), generator=generator).double() * 2 - 1
        return self.cut(whole)

    def cut(self, whole: Tensor) -> Vec:
        """This rank's part of a whole vector."""
        return [whole.to(self.dtype)[places].clone() for places in self.places]

    def whole(self, vec: Vec) -> Tensor:
        """The whole vector, which no real space could hold. All ranks call it."""
        total = torch.zeros(self.size, dtype=self.dtype)
        for places, part in self.exchange(self.rank, (self.places, [shard.clone() for shard in vec])):
            for place, shard in zip(places, part, strict=True):
                total[place] = shard
        return total

    def sum_over(self, numbers: Tensor) -> Tensor:
        return torch.stack(self.exchange(self.rank, numbers.clone())).sum(0)

    def rows(self, value: Any) -> list[Any]:
        return self.exchange(self.rank, value)

    def named(self, vec: Vec) -> dict[str, Tensor]:
        return {f"rank {self.rank}": vec[0], "tied": vec[1]}

    def vec(self, named: Mapping[str, Tensor]) -> Vec:
        return [named[f"rank {self.rank}"].clone(), named["tied"].clone()]


class RankMap(LinearMap):
    """One rank's end of the matrix."""

    def __init__(self, matrix: Tensor, space: RankSpace, block: int = 4) -> None:
        self.matrix, self._space, self._block = matrix, space, block
        self.asked = 0

    name = property(lambda self: "dense matrix")
    space = property(lambda self: self._space)
    block = property(lambda self: self._block)

    def products(self, vectors: Sequence[Vec]) -> list[Vec]:
        self.asked += len(vectors)
        return [self._space.cut(self.matrix @ self._space.whole(vector)) for vector in vectors]

    def fingerprint(self) -> str:
        return str(self.matrix.double().sum().item())


def over_ranks(
    matrix: Tensor, ranks: int, work: Callable[[RankMap], T], *, tied: int = 0, block: int = 4
) -> list[T]:
    """What `work` gives on each rank. An error of one rank ends the others, and is raised here."""
    exchange = Exchange(ranks)
    results: list[Any] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(
                RankMap(matrix, RankSpace(len(matrix), matrix.dtype, rank, exchange, tied), block)
            )
        except BaseException as error:
            errors[rank] = error
            exchange.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [error for error in errors if error is not None]
    for error in sorted(found, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error
    return results
