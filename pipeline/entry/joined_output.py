"""The output of `pipe(x)`, joined from its chunks: how its gradients are cut, and how what belongs to it is joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.data.microbatch import row_dim
from pipeline.data.pytrees import Grads


class JoinedOutput(NamedTuple):
    """The joined output of one call.

    Attributes:
        sizes: for each of its tensors the number of rows from each chunk. Empty on ranks that did not compute it.
        batch_dim: the dim that counts rows.
        is_everywhere: whether all ranks have it; else the last one, and the others a number in its place.
    """

    sizes: Sequence[tuple[int, ...]]
    batch_dim: int
    is_everywhere: bool

    def parts(self, grads: Grads, chunks: int) -> list[Grads]:
        """The gradients of each chunk's outputs."""
        columns = [
            (None,) * chunks if grad is None else self._cut(grad, sizes)
            for grad, sizes in zip(grads, self.sizes, strict=True)
        ]
        return [tuple(column[chunk] for column in columns) for chunk in range(chunks)]

    def _cut(self, grad: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return (grad,) if len(sizes) == 1 else torch.split(grad, list(sizes), row_dim(grad, self.batch_dim))

    def join(self, parts: Sequence[Grads], grads: Grads) -> Grads:
        """From tensors for each chunk's outputs to those of the whole; None counts as zeros.

        Args:
            parts: by chunk.
            grads: of the whole output. Where one is None, so is what is joined.
        """
        columns = zip(grads, self.sizes, zip(*parts, strict=True), strict=True)
        return tuple([None if grad is None else self._joined(grad, sizes, column) for grad, sizes, column in columns])

    def _joined(self, grad: Tensor, sizes: tuple[int, ...], column: Sequence[Tensor | None]) -> Tensor | None:
        if all([part is None for part in column]):
            return None
        pairs = zip(column, self._cut(grad, sizes), strict=True)
        filled = [torch.zeros_like(piece) if part is None else part for part, piece in pairs]
        return filled[0] if len(filled) == 1 else torch.cat(filled, row_dim(grad, self.batch_dim))
