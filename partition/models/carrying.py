"""The values that travel between the parts of a model beside the hidden state.

    arguments of blocks that are not computed from the inputs alone, for all blocks of a chain
    values that blocks return, and that are read later than by the next block
    what the first block of a chain was called with, where that is read behind it

What a module of one part returned, and another reads, is what a block returned: the module becomes one.

They follow from the flow of values through the model: from which values each was computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from partition.errors import PartitionError
from partition.models.passing import PassingPlan, ValueSlot
from partition.models.runs import ArgumentKey, BlockChain
from partition.models.shapes import is_whole
from partition.models.sources import LostValue, Sources, ValueSources


class AbsentUnitsError(PartitionError):
    """Parts compute again what another part has computed, of parameters that they have to have as well.

    Attributes:
        units: parts, 0 before the first chain, and names of parameters, or of modules that are read and not called.
    """

    def __init__(self, units: Collection[tuple[int, str]]) -> None:
        names = ", ".join(sorted({repr(name) for _, name in units}))
        super().__init__(f"several parts of the model read {names}, and not all can have it. Write an nn.Sequential.")
        self.units = frozenset(units)


class LostValueError(PartitionError):
    """A part reads what another one computes, and no block returns.

    Attributes:
        names: of modules that return it, and would as blocks; none where that is not all that is lost.
    """

    def __init__(self, losses: Sequence[tuple[LostValue, str]]) -> None:
        loss, where = min(reversed(losses), key=lambda pair: bool(pair[0].module))
        super().__init__(
            f"{loss.words} {where}, in another part of the model, and does not travel there. Return it from a block, "
            "or from a module that is called once; draw random numbers before, and call the model with them, or turn "
            "off what drops layers at random (layerdrop=0); leave what hooks within blocks collect out of the sample "
            "(output_attentions); name the module that computes it among the blocks, "
            "to_sequential(model, sample, blocks=[...]); or write the model as an nn.Sequential."
        )
        self.names = set[str]() if not loss.module else {loss.module for loss, _ in losses}


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


def _carried(chain: BlockChain, runs: Sequence[Sources]) -> list[dict[ArgumentKey, ArgumentKey]]:
    """For each block of a chain its arguments that are not computed from the inputs alone: which of the first block's.

    Raises:
        NotCarriedError: a block is called with something that the first one is not.
        PartitionError: blocks write into what others are called with.
    """
    carried = []
    for number in range(chain.first, chain.last + 1):
        places: dict[ArgumentKey, ArgumentKey] = {}
        for sources in runs:
            first_leaves, block = sources.blocks[chain.first].arguments.leaves, sources.blocks[number]
            if number > chain.first and any(sources.of((), until=block.begin)):
                raise NotCarriedError(number, block.name, "")  # Python was told a number: it may compute between blocks
            for key, leaf in block.arguments.leaves.items():
                if key in chain.entries or not _is_computed(sources, number, key, leaf):
                    continue
                candidates = [key, *first_leaves] if key in first_leaves else first_leaves
                matches = [
                    candidate
                    for candidate in candidates
                    if isinstance(leaf, Tensor) and first_leaves[candidate] is leaf
                ]
                if _is_plain(leaf):  # of the first: what Python was told breaks the chain before others
                    matches = [key]
                if not matches:
                    raise NotCarriedError(number, block.name, key[0])
                places[key] = matches[0]
        carried.append(places)
    return carried


def _is_computed(sources: Sources, number: int, key: ArgumentKey, leaf: Any) -> bool:
    """Whether a leaf of a block's arguments is not computed from the inputs alone.

    Where Python or numpy draw before, it may be another one by chance.
    """
    block = sources.blocks[number]
    nodes = [block.nodes[key]] if key in block.nodes else []
    may_be_told = nodes or _is_plain(leaf) or isinstance(leaf, complex)
    origins = sources.of(nodes, until=block.begin if may_be_told else -1)
    if any(loss.words.startswith("what block ") for loss in origins.lost):
        raise PartitionError(
            f"block {block.name!r} is called with {origins.lost[0].words}: its argument {key[0]!r}. Return it; if it "
            "was written into a tensor that the model hands to several blocks, write to a copy."
        )
    is_drawn = bool(nodes) and any(time <= block.begin for time in sources.run.draw_times)
    return bool(origins.slots or origins.lost) or is_drawn


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, bool | int | float | str)


def passing_of(
    chains: Sequence[BlockChain], shares: Sequence[Mapping[str, Any]], runs: Sequence[Sources]
) -> PassingPlan:
    """The values that pass blocks by, or go to all of a chain.

    Raises:
        NotCarriedError: a block is called with something that the first one of its chain is not.
        AbsentUnitsError: parts read parameters that they do not have.
        LostValueError: what is before a chain, or the end, reads what another part computes, and no block returns or
            is called with.
        PartitionError: blocks write into what others are called with.
    """
    carried = [_carried(chain, runs) for chain in chains]
    kept = [list(dict.fromkeys(key for places in of_chain for key in places.values())) for of_chain in carried]
    readers: dict[ValueSlot, int] = {
        (chain.first, key): number
        for number, (chain, keys) in enumerate(zip(chains, kept)) for key in keys
    }  # fmt: skip
    written_slots: set[ValueSlot] = set()
    absent: set[tuple[int, str]] = set()
    losses: list[tuple[LostValue, str]] = []
    for sources in runs:
        written_slots |= sources.written()
        for reader in range(len(chains), 0, -1):
            last_chain = chains[reader - 1]
            next_keys = [*chains[reader].entries, *kept[reader]] if reader < len(chains) else []
            slots, lost = _read(sources, chains, reader, next_keys, shares[reader])
            absent |= {(reader, loss.unit) for loss in lost if loss.unit}
            where = f"is used behind block {sources.blocks[last_chain.last].name!r}"
            losses += [(loss, where) for loss in lost if not loss.unit]
            for slot in slots - {(last_chain.last, place) for place in last_chain.exits}:
                readers[slot] = max(reader, readers.get(slot, 0))
        begin = sources.blocks[0].begin
        where = f"decides what is done before block {sources.blocks[0].name!r}"
        losses += [(loss, where) for loss in sources.of((), shares[0], since=-1, until=begin).lost]
    if losses:
        raise LostValueError(losses)
    if absent:
        raise AbsentUnitsError(absent)
    slots_in_order = sorted(readers, key=lambda slot: (slot[0], str(slot[1])))
    until = tuple([readers[slot] for slot in slots_in_order])
    of_blocks = tuple([
        tuple([(key, slots_in_order.index((chain.first, of_first))) for key, of_first in places.items()])
        for chain, of_chain in zip(chains, carried) for places in of_chain
    ])  # fmt: skip
    return PassingPlan(tuple(slots_in_order), until, frozenset(written_slots), of_blocks)


def _read(
    sources: Sources,
    chains: Sequence[BlockChain],
    reader: int,
    next_keys: Iterable[ArgumentKey],
    share: Mapping[str, Any],
) -> ValueSources:
    """The sources of what the part behind some chains makes: for the next one or the output.

    Args:
        reader: how many chains are before the part.
        next_keys: the arguments of the next block that it makes.
    """
    blocks, flow = sources.blocks, sources.run.flow
    offers: dict[int, list[tuple[int, ValueSlot]]] = {}
    for number in [chain.first for chain in chains[:reader]]:
        for key, node in blocks[number].nodes.items():
            is_computed = flow.computed(node) not in flow.roots  # a part that reads a parameter has it
            if is_computed and is_whole(blocks[number].arguments[key]):  # of a slice the rest may be read as well
                offers.setdefault(node, []).append((blocks[number].begin, (number, key)))
    nodes, until = sources.run.output, flow.tick()
    if reader < len(chains):
        next_block = blocks[chains[reader].first]
        nodes = [next_block.nodes[key] for key in next_keys if key in next_block.nodes]
        until = next_block.begin
    end = blocks[chains[reader - 1].last].end
    return sources.of(nodes, share, end, until, offers)
