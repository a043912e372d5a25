"""A small symmetric matrix behind the interface of estimators: the truth is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.curvature.linear import LinearMap
from pipeline.curvature.space import Space, Vec


class DenseSpace(Space):
    """Vectors of `size` entries in two shards: parameters 'a' (the first third) and 'b'."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float64) -> None:
        self._size, self._dtype = size, dtype
        self.sizes = [size // 3, size - size // 3]

    size = property(lambda self: self._size)
    dtype = property(lambda self: self._dtype)
    counted = property(lambda self: [True, True])
    rank = property(lambda self: 0)
    ranks = property(lambda self: 1)

    def zeros(self) -> Vec:
        return [torch.zeros(size, dtype=self.dtype, device="cpu") for size in self.sizes]

    def random(self, kind: str, seed: int, index: int) -> Vec:
        generator = torch.Generator().manual_seed(1000 * seed + index)
        if kind == "normal":
            whole = torch.randn(self.size, dtype=torch.float64, generator=generator, device="cpu")
        else:
            whole = torch.randint(2, (self.size,), generator=generator, device="cpu").double() * 2 - 1
        return self.cut(whole)

    def cut(self, whole: Tensor) -> Vec:
        return [part.clone() for part in whole.to(self.dtype).split(self.sizes)]

    def sum_over(self, numbers: Tensor) -> Tensor:
        return numbers

    def rows(self, value: Any) -> list[Any]:
        return [value]

    def named(self, vec: Vec) -> dict[str, Tensor]:
        return dict(zip("ab", vec, strict=True))

    def vec(self, named: Mapping[str, Tensor]) -> Vec:
        return [named[name].clone() for name in "ab"]


class DenseMap(LinearMap):
    """Counts its products."""

    def __init__(self, matrix: Tensor, block: int = 4) -> None:
        self.matrix = matrix
        self.asked = 0
        self._block = block
        self._space = DenseSpace(len(matrix), matrix.dtype)

    name = property(lambda self: "dense matrix")
    space = property(lambda self: self._space)
    block = property(lambda self: self._block)

    def products(self, vectors: Sequence[Vec]) -> list[Vec]:
        self.asked += len(vectors)
        return [self._space.cut(self.matrix @ torch.cat(vector)) for vector in vectors]

    def fingerprint(self) -> str:
        return str(self.matrix.double().sum().item())


def symmetric(values: Tensor, seed: int = 0) -> Tensor:
    """A dense symmetric matrix with these eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64, generator=generator))
    return basis @ torch.diag(values.double()) @ basis.T
