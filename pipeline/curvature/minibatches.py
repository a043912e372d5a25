"""The data of a matrix: one mini-batch or several, the same in every product.

    (x, target)                         one mini-batch
    [(x, target), ...], a DataLoader    several; what can be gone through once only is kept in a list
    the second time through             what comes must be what came the first time, or the products are of two matrices
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from partition.rows import bare
from pipeline.curvature.identity import value_in_words
from pipeline.distributed.agreement import digest


class MiniBatch(NamedTuple):
    """A pair of the data; `digest`: a word for what it holds."""

    x: Any
    target: Any
    digest: str


class MiniBatches:
    """The data of an operator.

    Args:
        data: a tuple (x, target), or an iterable of such pairs.

    Raises:
        TypeError: it is neither.
    """

    def __init__(self, data: Any) -> None:
        if isinstance(data, tuple):
            data = [data]
        if not isinstance(data, Iterable) or isinstance(data, (Tensor, str, dict)):
            raise TypeError(
                f"the data are a {type(data).__name__}. Give one mini-batch as a tuple (x, target), or a list or a "
                "DataLoader of them."
            )
        self._data = list(data) if iter(data) is data else data
        self._digests: list[str] | None = None  # of the first time that all came

    def __iter__(self) -> Iterator[MiniBatch]:
        """
        Raises:
            ValueError: there is none, one is no pair, or they are not those of the first time.
        """
        digests: list[str] = []
        for number, item in enumerate(self._data):
            pair = _pair(item, number)
            words = ", ".join(map(value_in_words, tree_leaves(bare(pair))))
            digests.append(str(digest(words)))
            if self._digests is not None and digests[number:] != self._digests[number : number + 1]:
                raise ValueError(f"mini-batch {number} of the data is not what it was in the first product. " + _REMEDY)
            yield MiniBatch(*pair, digests[number])
        if self._digests is not None and len(digests) != len(self._digests):
            raise ValueError(
                f"the data gave {len(digests)} mini-batches, and {len(self._digests)} the first time. " + _REMEDY
            )
        if not digests:
            raise ValueError("the data hold no mini-batch. Give at least one (x, target).")
        self._digests = digests

    def fingerprint(self) -> str:
        """A digest of the mini-batches."""
        return " ".join(self._digests or [batch.digest for batch in self])


_REMEDY = (
    "Every product must see the same data: set shuffle=False, take random augmentation out, do not write the tensors, "
    "or give list(loader)."
)


def _pair(item: Any, number: int) -> tuple[Any, Any]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        shape = f"a {type(item).__name__}" + (f" of {len(item)}" if isinstance(item, (tuple, list)) else "")
        raise TypeError(f"mini-batch {number} of the data is {shape}. Give pairs (x, target); target may be None.")
    return item[0], item[1]
