"""What does an estimator ask of a matrix that nobody can write down?

    vectors --products--> A times each of them          all that Lanczos, Hutchinson and the others need
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

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

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that is another one where A is another matrix (other parameters, data or settings), on all processes
        the same: what a run that goes on from a file compares."""
