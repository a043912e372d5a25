"""The interface of a matrix that is known by its products: all that an estimator asks of it.

    vectors --products--> A times each of them          all that Lanczos, Hutchinson and the others need

The forms in which a user gives vectors, and gets them:

    {"0.weight": tensor, ...}        by name; over ranks those of this rank
    [{...}, {...}]                   several
    tensor [n]                       all entries, parameter after parameter; in one process
    tensor [n, k]                    k vectors as columns
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

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


def if_finite(numbers: Tensor, source: str) -> Tensor:
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


NamedTensors: TypeAlias = Mapping[str, Tensor]
Vectors: TypeAlias = NamedTensors | Sequence[NamedTensors] | Tensor
ToUserForm: TypeAlias = Callable[[list[Vec]], Any]


def taken(space: Space, vectors: Vectors) -> tuple[list[Vec], ToUserForm]:
    """The vectors, and what puts results into the same form.

    Raises:
        TypeError: another form.
        ValueError: another size; a flat tensor over ranks.
        KeyError: other names.
    """
    if isinstance(vectors, Tensor):
        return _from_flat(space, vectors)
    if isinstance(vectors, Mapping):
        return [space.vec(_checked(vectors))], lambda vecs: space.named(vecs[0])
    if isinstance(vectors, Sequence) and vectors and all(isinstance(named, Mapping) for named in vectors):
        return [space.vec(_checked(named)) for named in vectors], lambda vecs: [space.named(named) for named in vecs]
    raise TypeError(
        f"a vector is a {type(vectors).__name__}. Give a dict of tensors by the parameters' names, a list of such "
        "dicts, or a flat tensor of shape [n] or [n, k]."
    )


def _checked(named: NamedTensors) -> NamedTensors:
    for name, part in named.items():
        if not isinstance(part, Tensor) or not part.is_floating_point() or part.layout is not torch.strided:
            description = type(part).__name__
            if isinstance(part, Tensor):
                description = str(part.layout if part.is_floating_point() else part.dtype)
            raise TypeError(f"the entries for '{name}' are {description}. Give a floating-point tensor, not sparse.")
    return named


def _from_flat(space: Space, vectors: Tensor) -> tuple[list[Vec], ToUserForm]:
    if space.ranks > 1:
        raise ValueError(
            "over ranks a vector is a dict of this rank's parameters by name: no rank has the whole. Give {name: "
            "torch.randn_like(p) for name, p in pipe.named_parameters()}."
        )
    _checked({"v": vectors})
    if vectors.dim() not in (1, 2) or vectors.shape[0] != space.size:
        raise ValueError(
            f"a flat vector has shape {list(vectors.shape)}; the parameters have {space.size} entries. Give shape "
            f"[{space.size}], or [{space.size}, k] for k vectors."
        )
    columns = vectors.reshape(space.size, -1).unbind(1)
    return [_cut(space, column) for column in columns], lambda vecs: _columns(space, vecs, vectors)


def _columns(space: Space, vecs: list[Vec], like: Tensor) -> Tensor:
    """Vectors as columns, in the shape and on the device of those that were given."""
    if not vecs:
        return torch.empty_like(like, dtype=space.dtype)
    parts = [[part.reshape(-1).to(like.device) for part in space.named(vec).values()] for vec in vecs]
    return torch.stack(list(map(torch.cat, parts)), 1).view(like.shape)


def _cut(space: Space, entries: Tensor) -> Vec:
    vec = space.zeros()
    views = space.named(vec).values()
    for view, part in zip(views, entries.detach().split([view.numel() for view in views]), strict=True):
        view.copy_(part.view(view.shape))
    return vec
