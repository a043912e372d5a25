"""The interface of a matrix that is known by its products: all that an estimator asks of it.

    vectors --products--> A times each of them          all that Lanczos, Hutchinson and the others need
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from pipeline.curvature.forms import Vectors, taken
from pipeline.curvature.space import Space, Vec

T = TypeVar("T")


class LinearMap(ABC):
    """A symmetric matrix A, as its products with vectors. Over ranks every process makes the same calls.

    Attributes:
        name: for progress bars and messages: "Hessian".
        space: the space of the vectors.
        block: the best number of products at a time: together they cost less, and hold their vectors meanwhile.
    """

    name: str
    space: Space
    block: int

    @abstractmethod
    def products(self, vectors: Sequence[Vec]) -> list[Vec]:
        """A times each of some vectors, which are not changed; new vectors."""

    def __matmul__(self, vectors: Vectors) -> Any:
        """The product with a vector, or with several at once, in the form in which they come.

        Args:
            vectors: a dict of tensors by the parameters' names (over ranks those of this rank), or a list of such
                dicts; in one process also all entries in one tensor [n], parameter after parameter, or [n, k].
        """
        vecs, to_user_form = taken(self.space, vectors)
        return to_user_form(self.products(vecs))

    def dot(self, left: Vectors, right: Vectors) -> float:
        """The inner product of two vectors, over all processes, the same on each.

        Args:
            left, right: one vector each, in a form that `@` takes.
        """
        left_vecs, right_vecs = taken(self.space, left)[0], taken(self.space, right)[0]
        if len(left_vecs) != 1 or len(right_vecs) != 1:
            raise ValueError(f"dot takes two vectors, not {len(left_vecs)} and {len(right_vecs)}.")
        return float(self.space.dots(left_vecs, right_vecs))

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that is another one where A is another matrix (other parameters, data or settings), on all processes
        the same: what a run that goes on from a file compares."""


def blocks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Slices of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def products_of(A: LinearMap, vectors: Sequence[Vec]) -> Iterator[tuple[list[Vec], list[Vec]]]:
    """The vectors and A times each, as many as are best asked for at a time."""
    for block in blocks(vectors, A.block):
        yield list(block), A.products(block)


def finite(numbers: Tensor, source: str) -> Tensor:
    """The same numbers.

    Args:
        source: what the vectors are products of.

    Raises:
        FloatingPointError: some are not finite.
    """
    if not numbers.isfinite().all():
        raise FloatingPointError(
            f"a product of {source} is not finite (it gave {numbers.flatten().tolist()[:3]}): look for inf or nan in "
            "the parameters, the data or the loss. Where all of these are finite, the squares of its entries are too "
            "large to sum: take the space in float64."
        )
    return numbers
