"""Values that travel beside the hidden state: the skips of a U-Net, the outputs of all blocks that an end adds up.

    block 1 ─► its output ─► block 2 ─► ... ─► block 7
                       └──────── a slot ────────► what is computed before block 7
    an argument ─► block 3 ─► its output ─► + ─► block 4
              └─────────── a slot ──────────┘
    time ─► embed ─► block 1, block 2, ...                          what all blocks of a chain are called with: a slot
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from partition.models.runs import ArgumentKey

# A block's number; the place among the leaves of what it returns, or the key of one of its arguments.
ValueSlot: TypeAlias = "tuple[int, int | ArgumentKey]"


class PassingPlan(NamedTuple):
    """The slots of the values that pass blocks by, or go to all of a chain.

    Attributes:
        slots: of what blocks return, and of what the first blocks of chains are called with.
        until: for each slot the number of the last chain of blocks before which it is read; that behind the last chain
            is the end, that of its own chain says that blocks alone read it.
        written: values that blocks return, hidden states among them, into which the model writes: each part to a copy.
        carried: for each block which leaf of its arguments is which slot.
        draws: in eval mode and in train mode, the numbers of the chains before whose last block what follows them drew
            on the sample as well: those of the parts before it, by the forward that all run.
        writers: the numbers of the blocks that wrote into their arguments there.
        told: attributes of modules in parts, by the names of both, that modules which contain blocks read.

    Example:
        >>> passing = PassingPlan(((1, 0), (3, 2)), (2, 4))
        >>> values = passing.filled(1, {0: "an output"}, (None, None))
        >>> passing.arrived(2, values, {(3, 0): "a hidden state"})
        {(1, 0): 'an output', (3, 0): 'a hidden state'}
        >>> passing.behind(2, values)
        (None, None)
    """

    slots: tuple[ValueSlot, ...] = ()
    until: tuple[int, ...] = ()
    written: frozenset[ValueSlot] = frozenset()
    carried: tuple[tuple[tuple[ArgumentKey, int], ...], ...] = ()
    draws: tuple[frozenset[int], ...] = (frozenset(), frozenset())
    writers: frozenset[int] = frozenset()
    told: tuple[tuple[str, str], ...] = ()

    def filled(self, number: int, made: Mapping[Any, Any], values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values, with those that are made as the block of this number is called, or by it."""
        return tuple([
            made.get(place, value) if block == number else value
            for (block, place), value in zip(self.slots, values, strict=True)
        ])

    def keys(self, number: int, least: int = 0) -> list[ArgumentKey]:
        """The arguments of the block of this number that are read before a chain, or later."""
        return [
            place for (block, place), until in zip(self.slots, self.until, strict=True)
            if block == number and isinstance(place, tuple) and until >= least
        ]  # fmt: skip

    def arrived(
        self, chain: int, values: tuple[Any, ...], hidden: Mapping[ValueSlot, Any]
    ) -> dict[ValueSlot, Any]:
        """The values that are there and are read before a chain, or later, and the hidden state."""
        there = {
            slot: value for slot, until, value in zip(self.slots, self.until, values, strict=True)
            if value is not None and until >= chain
        }  # fmt: skip
        there.update(hidden)
        return {slot: value.clone() if slot in self.written else value for slot, value in there.items()}

    def behind(self, chain: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values that are read again behind what comes before a chain."""
        return tuple([None if until <= chain else value for until, value in zip(self.until, values, strict=True)])
