"""The interface of a matrix that is known by its products: all that an estimator asks of it.

    vectors --products--> A times each of them          all that Lanczos, Hutchinson and the others need
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pipeline.curvature.forms import Vectors, taken
from pipeline.curvature.space import Space, Vec


class LinearMap(ABC):
    """A symmetric matrix A, as its products with vectors. Over ranks every process makes the same calls."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For progress bars and messages: "Hessian"."""

    @property
    @abstractmethod
    def space(self) -> Space:
        """Where the vectors live."""

    @property
    @abstractmethod
    def block(self) -> int:
        """How many products are best asked for at a time: together they cost less, and hold their vectors meanwhile."""

    @abstractmethod
    def products(self, vectors: Sequence[Vec]) -> list[Vec]:
        """A times each of some vectors, which are not changed; new vectors."""

    def __matmul__(self, vectors: Vectors) -> Any:
        """The product with a vector, or with several at once, in the form in which they come.

        Args:
            vectors: a dict of tensors by the parameters' names (over ranks those of this rank), or a list of such
                dicts; in one process also all entries in one tensor [n], parameter after parameter, or [n, k].
        """
        given, give = taken(self.space, vectors)
        return give(self.products(given))

    def shows(self, asked: bool | None) -> bool:
        """Whether to show a progress bar: if asked to, or on a terminal; on one process."""
        return self.space.rank == 0 and (sys.stderr.isatty() if asked is None else asked)

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that is another one where A is another matrix (other parameters, data or settings), on all processes
        the same: what a run that goes on from a file compares."""
