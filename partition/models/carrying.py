"""The values that travel between the parts of a model beside the hidden state.

    carrying      arguments of blocks that are not computed from the inputs alone, for all blocks of a chain
    passing_of    values that blocks return, and that are read later than by the next block; what the first block of a
                  chain was called with, where that is read behind it; what a module of one part returned, and another
                  reads

Both follow from the flow of values through the model: from which values each was computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partition.errors import PartitionError
from partition.models.passing import Argument, Passing, Return, Slot
from partition.models.runs import ArgumentKey, BlockChain
from partition.models.sources import FoundSources, Sources


class NotCarriedError(PartitionError):
    """A block is called with a value that the first block of its chain is not called with.

    Attributes:
        number: of the block.
    """

    def __init__(self, number: int, name: str, argument: int | str) -> None:
        super().__init__(
            f"block {name!r} is called with a value that depends on the beginning of the model, and is no tensor: its "
            f"argument {argument!r}. Hand over a tensor, or cut the model by hand, as an nn.Sequential."
        )
        self.number = number


def carrying(chain: BlockChain, runs: Sequence[Sources]) -> BlockChain:
    """A chain, with what its blocks are called with that is not computed from the inputs alone.

    Raises:
        NotCarriedError: a block is called with something that the first one is not.
        PartitionError: blocks write into what others are called with.
    """
    kept: dict[ArgumentKey, int] = {}
    carried = []
    for number in range(chain.first, chain.last + 1):
        places: dict[ArgumentKey, int] = {}
        for sources in runs:
            given, block = sources.blocks[chain.first].given.leaves, sources.blocks[number]
            if number > chain.first and any(sources.of((), until=block.begin)):
                raise NotCarriedError(number, block.name, "")  # Python was told a number: it may compute between blocks
            for key, leaf in block.given.leaves.items():
                if key in chain.entries or not _is_computed(sources, number, key, leaf):
                    continue
                likely = [key, *given] if key in given else given
                same = [other for other in likely if isinstance(leaf, Tensor) and given[other] is leaf]
                if number == chain.first and _is_plain(leaf):
                    same = [key]
                if not same:
                    raise NotCarriedError(number, block.name, key[0])
                places[key] = kept.setdefault(same[0], len(kept))
        carried.append(tuple(places.items()))
    return chain._replace(kept=tuple(kept), carried=tuple(carried))


def _is_computed(sources: Sources, number: int, key: ArgumentKey, leaf: Any) -> bool:
    """Whether a leaf of a block's arguments is not computed from the inputs alone.

    Where Python or numpy draw before, it may be another one by chance.
    """
    block = sources.blocks[number]
    nodes = [block.nodes[key]] if key in block.nodes else []
    may_be_told = nodes or _is_plain(leaf) or isinstance(leaf, complex)
    found = sources.of(nodes, until=block.begin if may_be_told else -1)
    if any(words.startswith("what block ") for words in found.lost):
        raise PartitionError(
            f"block {block.name!r} is called with {found.lost[0]}: its argument {key[0]!r}. Return it; if it was "
            "written into a tensor that the model hands to several blocks, write to a copy."
        )
    is_drawn = bool(nodes) and any(time <= block.begin for time in sources.seen.drawn)
    return bool(found.slots or found.lost) or is_drawn


def _is_whole(leaf: Any) -> bool:
    """Whether no other numbers lie in the storage of a tensor."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return False
    return leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, bool | int | float | str)


def passing_of(chains: Sequence[BlockChain], shares: Sequence[Mapping[str, Any]], runs: Sequence[Sources]) -> Passing:
    """The values that pass blocks by.

    Raises:
        PartitionError: what is before a chain, or the end, reads what another part computes, and no block returns or is
            called with, nor a module returns.
    """
    readers: dict[Slot, int] = {}
    written: set[Slot] = set()
    for sources in runs:
        slots, nodes = sources.written()
        written |= slots | {slot for node in nodes for slot in _returns(sources, chains, node)}
        made: dict[int, set[int]] = {}  # by part: nodes that its modules return to later ones
        losses: list[str] = []
        for reader in range(len(chains), 0, -1):
            before = chains[reader - 1]
            past, after = chains[:reader], chains[reader : reader + 1]
            slots, lost, returned = _read(sources, past, after, shares[reader], made.pop(reader, set()))
            for node in returned:
                made.setdefault(_part_of(sources, chains, node), set()).add(node)
                slots |= _returns(sources, chains, node)
            losses += [f"{words} is used behind block {sources.blocks[before.last].name!r}" for words in lost[:1]]
            for slot in slots - {(before.last, place) for place in before.exits}:
                readers[slot] = max(reader, readers.get(slot, 0))
        begin = sources.blocks[0].begin
        lost = sources.of((), shares[0], since=-1, until=begin).lost
        losses += [f"{words} decides what is done before block {sources.blocks[0].name!r}" for words in lost[:1]]
        if losses:
            raise PartitionError(
                f"{losses[-1]}, in another part of the model, and does not travel there. Return it from a block, or "
                "from a module that is called once; turn off what drops layers at random (layerdrop=0); name the "
                "module that computes it among the blocks, blocks=[...]; or write the model as an nn.Sequential."
            )
    ordered = sorted(readers, key=lambda slot: (slot[0], str(slot[1])))
    return Passing(tuple(ordered), tuple([readers[slot] for slot in ordered]), frozenset(written))


def _returns(sources: Sources, chains: Sequence[BlockChain], node: int) -> set[Slot]:
    """The slots of a node that a module returned: none where that is behind all blocks."""
    part, call, left = _part_of(sources, chains, node), sources.call_of(node), sources.seen.flow.nodes[node].left
    assert call is not None and left is not None  # it did
    return {(chain.first, Return(call.name, place)) for chain in chains[part : part + 1] for place in left[1]}


def _part_of(sources: Sources, chains: Sequence[BlockChain], node: int) -> int:
    """The part that computes a node: 0 before the first chain, 1 before the second, ..."""
    time = sources.seen.flow.nodes[node].time
    return sum([sources.blocks[chain.first].begin < time for chain in chains])


def _read(
    sources: Sources,
    past: Sequence[BlockChain],
    after: Sequence[BlockChain],
    share: Mapping[str, Any],
    made: Collection[int],
) -> FoundSources:
    """The sources of what the part behind some chains makes: for the next one or the output; `made` for later ones."""
    blocks, before = sources.blocks, past[-1]
    reached = blocks[before.first]
    kept = {reached.nodes[key]: reached.begin for key in before.kept if key in reached.nodes}
    offered: dict[int, list[tuple[int, Slot]]] = {}
    for number in [chain.first for chain in past]:
        for key, node in blocks[number].nodes.items():
            if _is_whole(blocks[number].given[key]):
                offered.setdefault(node, []).append((blocks[number].begin, (number, Argument(key))))
    nodes, until = sources.seen.output, sources.seen.flow.tick()
    for chain in after:
        first = blocks[chain.first]
        nodes = [first.nodes[key] for key in (*chain.entries, *chain.kept) if key in first.nodes]
        until = first.begin
    end = blocks[before.last].end
    return sources.of([*nodes, *made], share, kept, end, until, offered, by=end)
