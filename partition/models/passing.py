"""Values that pass blocks by: the skips of a U-Net, the outputs of all blocks that an end adds up, residual streams.

    block 1 ─► its output ─► block 2 ─► ... ─► block 7
                       └──────── a slot ────────► what is computed before block 7
    an argument ─► block 3 ─► its output ─► + ─► block 4
              └─────────── a slot ──────────┘
    embed(words) ─► images ─► block 1 ─► ... ─► both ─► block 5     what a module of one part returns, and another reads
            └─────────────── a slot ────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from partition.models.runs import ArgumentKey, CallArguments


class Argument(NamedTuple):
    """A leaf of a block's arguments."""

    key: ArgumentKey


class Return(NamedTuple):
    """A leaf of what a module beside the blocks returns, before the block of a slot."""

    name: str
    place: int


# A block's number; the place among the leaves of what it returns, or what there is as it is called.
ValueSlot: TypeAlias = "tuple[int, int | Argument | Return]"


class PassingPlan(NamedTuple):
    """The slots of the values that pass blocks by.

    Attributes:
        slots: of what blocks return, of what the first blocks of chains are called with, and of what modules before
            these return.
        until: for each slot the number of the last chain of blocks before which it is read; that behind the last chain
            is the end.
        written: values that blocks and modules return, hidden states among them, into which the model writes: each
            part to a copy.

    Example:
        >>> passing = PassingPlan(((1, 0), (3, 2)), (2, 4))
        >>> values = passing.filled(1, ["an output"], (None, None))
        >>> passing.outputs(values, 3, {0: "a hidden state"})
        {1: {0: 'an output'}, 3: {0: 'a hidden state'}}
        >>> passing.behind(2, values)
        (None, None)
    """

    slots: tuple[ValueSlot, ...] = ()
    until: tuple[int, ...] = ()
    written: frozenset[ValueSlot] = frozenset()

    def filled(self, number: int, leaves: Sequence[Any], values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values, with those that the block of this number returns."""
        return tuple([
            leaves[place] if block == number and isinstance(place, int) else value
            for (block, place), value in zip(self.slots, values, strict=True)
        ])

    def entered(
        self, number: int, call: CallArguments, returned: Mapping[tuple[str, int], Any], values: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """The values, with those that the block of this number is called with, and what modules before it returned."""
        return tuple([
            value if block != number or isinstance(place, int)
            else call[place.key] if isinstance(place, Argument) else returned[place]
            for (block, place), value in zip(self.slots, values, strict=True)
        ])

    def keys(self, number: int) -> list[ArgumentKey]:
        """The arguments of the block of this number that pass blocks by."""
        return [place.key for block, place in self.slots if block == number and isinstance(place, Argument)]

    def wanted(self, number: int) -> dict[str, dict[int, bool]]:
        """The values to be noted of modules before the block of this number: by name, by place, whether to copy."""
        wanted: dict[str, dict[int, bool]] = {}
        for slot in self.slots:
            block, place = slot
            if block == number and isinstance(place, Return):
                wanted.setdefault(place.name, {})[place.place] = slot in self.written
        return wanted

    def returns(self, values: tuple[Any, ...]) -> dict[str, dict[int, Any]]:
        """The values that modules of other parts returned, as far as they are there: by name, by place."""
        by_name: dict[str, dict[int, Any]] = {}
        for slot, value in zip(self.slots, values, strict=True):
            place = slot[1]
            if value is not None and isinstance(place, Return):
                by_name.setdefault(place.name, {})[place.place] = value.clone() if slot in self.written else value
        return by_name

    def arguments(self, values: tuple[Any, ...]) -> dict[int, dict[ArgumentKey, Any]]:
        """The arguments that are there: by block, by key."""
        by_block: dict[int, dict[ArgumentKey, Any]] = {}
        for (block, place), value in zip(self.slots, values, strict=True):
            if value is not None and isinstance(place, Argument):
                by_block.setdefault(block, {})[place.key] = value
        return by_block

    def outputs(self, values: tuple[Any, ...], last: int, hidden: Mapping[int, Any]) -> dict[int, dict[int, Any]]:
        """The values that are there, and the hidden state that the last block has returned: by block, by place."""
        by_block: dict[int, dict[int, Any]] = {}
        for (block, place), value in zip(self.slots, values, strict=True):
            if value is not None and isinstance(place, int):
                by_block.setdefault(block, {})[place] = value
        by_block.setdefault(last, {}).update(hidden)
        for block, place in self.written:
            if isinstance(place, int) and place in by_block.get(block, ()):
                by_block[block][place] = by_block[block][place].clone()
        return by_block

    def behind(self, chain: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values that are read again behind what comes before a chain."""
        return tuple([None if until <= chain else value for until, value in zip(self.until, values, strict=True)])
