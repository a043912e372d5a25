"""The values that travel between the parts of a model beside the hidden state.

    carrying      arguments of blocks that the beginning computes with parameters, for all blocks of a chain
    passing_of    values that blocks return, and that are read later than by the next block

Both are found by running the outline on the sample, and comparing with what the model did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from partition.calls import Called
from partition.comparison import same
from partition.errors import PartitionError
from partition.outline import Chain, Key, Leaves, Outline, Run, Shape
from partition.passing import Passing


class NotCarriedError(PartitionError):
    """A block is called with a value that the first block of its chain is not called with.

    Attributes:
        number: of the block.
    """

    def __init__(self, number: int, name: str, key: Key) -> None:
        super().__init__(
            f"block {name!r} is called with a value that depends on the beginning of the model, and is no tensor: its "
            f"argument {key!r}. Hand over a tensor, or cut the model by hand, as an nn.Sequential."
        )
        self.number = number


def carrying(outline: Outline, chain: Chain, blocks: Sequence[Called], leaves: Leaves) -> Chain:
    """A chain, with what its blocks are called with that is not made again from the inputs alone.

    Raises:
        NotCarriedError: a block is called with something that the first one is not.
    """
    run = blocks[chain.first : chain.last + 1]
    first = run[0].given
    device = next(first[key].device for key in chain.entries if first[key] is not None)
    kept: dict[Key, int] = {}
    carried = []
    for number, (name, theirs) in enumerate([(call.name, call.given) for call in run], chain.first):
        ours = outline.beside(number, device, tuple(leaves))
        if ours.keys != theirs.keys:
            raise PartitionError(f"block {name!r} is called with other arguments where the beginning is elsewhere.")
        others = [key for key in theirs.keys if key not in chain.entries and not same(ours[key], theirs[key])]
        places = []
        for key in others:
            source = next((other for other in first.keys if _is(first[other], theirs[key])), None)
            if source is None:
                raise NotCarriedError(number, name, key)
            places.append((key, kept.setdefault(source, len(kept))))
        carried.append(tuple(places))
    return chain._replace(kept=tuple(kept), carried=tuple(carried))


def _is(one: Any, other: Any) -> bool:
    """Whether two values hold the same tensors, and there are some."""
    ours, theirs = tree_leaves(one), tree_leaves(other)
    are = len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))
    return are and any(isinstance(leaf, Tensor) for leaf in ours)


def passing_of(
    outline: Outline, shares: Sequence[Mapping[str, Any]], blocks: Sequence[Called], leaves: Leaves
) -> Passing:
    """The values that pass blocks by.

    What comes before a chain, and the end, are run with all values that blocks have returned so far, and without each:
    nan. Whole numbers and truth values always pass by, to the end: none of them would show that it is lacking.
    """
    readers: dict[tuple[int, int], int] = {}
    written: set[tuple[int, int]] = set()
    for reader in range(1, len(outline.chains) + 1):
        before = outline.chains[reader - 1]
        returned = {
            (number, place): leaf for number in range(before.last + 1)
            for place, leaf in enumerate(blocks[number].returned[0]) if isinstance(leaf, Tensor)
        }  # fmt: skip
        hidden = {(before.last, place) for place in before.exits}
        again = _Again(outline, shares[reader], reader, blocks, leaves, returned)
        whole = again.without(set())
        written |= again.written
        if not same(whole, again.without(set(returned) - hidden)):
            for slot in set(returned) - hidden:
                if not same(whole, again.without({slot})):
                    readers[slot] = reader
    for number, block in enumerate(blocks):
        for place, leaf in enumerate(block.returned[0]):
            if isinstance(leaf, Tensor) and not (leaf.is_floating_point() or leaf.is_complex()):
                readers[number, place] = len(outline.chains)
    slots = sorted(readers)
    return Passing(tuple(slots), tuple([readers[slot] for slot in slots]), frozenset(written))


class _Again:
    """Runs of what comes before a chain, or of the end, with values that blocks have returned on the sample.

    Attributes:
        written: the values into which it has written.
    """

    def __init__(
        self,
        outline: Outline,
        share: Mapping[str, Any],
        reader: int,
        blocks: Sequence[Called],
        leaves: Leaves,
        returned: Mapping[tuple[int, int], Tensor],
    ) -> None:
        before = outline.chains[reader - 1]
        self.written: set[tuple[int, int]] = set()
        self._outline, self._share, self._leaves, self._returned = outline, share, leaves, returned
        self._end = outline.chains[reader].first if reader < len(outline.chains) else None
        self._kept = {before.first: {key: blocks[before.first].given[key] for key in before.kept}}

    def without(self, lost: set[tuple[int, int]]) -> Any:
        """The arguments of the chain's first block, or the output of the model, with nan for some values."""
        told: dict[int, dict[int, Any]] = {}
        for (number, place), leaf in self._returned.items():
            shown = Shape.of(leaf).poison(leaf.device) if (number, place) in lost else leaf
            told.setdefault(number, {})[place] = shown.clone()
        run = Run(self._outline.chains, self._end, told, self._kept)
        device = next(leaf.device for leaf in self._returned.values())
        with torch.no_grad():
            output = self._outline.run(run, [*self._leaves], device, self._share)
        self.written |= {(number, place) for number, place in self._returned if told[number][place]._version}
        if self._end is None:
            return output
        call = run.calls[self._end]
        return [call[key] for key in call.keys]
