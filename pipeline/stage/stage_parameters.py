"""The parameters of one stage during one product, and their parts of the directions.

    parameter p --Aliases--> alias in its module             captured by a layer: p itself
    along(p) --> its part of each direction, in the dtype of the alias, once for each product
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

from torch import Tensor

from pipeline.data.pytrees import Grads
from pipeline.stage.hooks import hooks_asleep
from pipeline.stage.parameters import Aliases

# A parameter -> its part of each direction, where the stage is. None: it has none.
DirectionParts: TypeAlias = Callable[[Tensor], Sequence[Tensor | None]]
AddToSums: TypeAlias = Callable[[Tensor, Sequence[Tensor | None]], None]  # to the sums of a parameter


class StageParameters:
    """The parameters that one stage computes with.

    Args:
        aliases: of the parameters of its modules.
        wanted: the ids of the parameters of the space. A layer may capture one that is not registered in this stage.
        count: the number of directions.
        along: from a parameter to its part of each direction.
        add: adds to the sums of a parameter.

    Attributes:
        captured: wanted parameters that a layer has captured, by id.
    """

    def __init__(
        self, aliases: Aliases, wanted: Container[int], count: int, along: DirectionParts, add: AddToSums
    ) -> None:
        self.aliases = aliases
        self.count = count
        self.captured: dict[int, Tensor] = {}
        self._wanted = wanted
        self._along, self._add = along, add
        self._parts: dict[int, list[Tensor | None]] = {}  # of the directions, by parameter

    @property
    def owners(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, the leaf with which the layers compute), each once."""
        return [*self.aliases.trained, *[(leaf, leaf) for leaf in self.captured.values()]]

    def learn(self, leaf: Tensor) -> None:
        """Note a leaf that a graph reaches, and that is no alias."""
        if id(leaf) in self._wanted:
            self.captured[id(leaf)] = leaf

    def hooks_asleep(self) -> AbstractContextManager[None]:
        """Within: tensor hooks of captured parameters do nothing; those of others have aliases between."""
        return hooks_asleep(list(self.captured.values()))

    def parts(self, owner: Tensor, alias: Tensor) -> list[Tensor | None]:
        """A parameter's parts of all directions, in its dtype."""
        if id(owner) not in self._parts:
            self._parts[id(owner)] = [
                None if part is None else part.to(alias.dtype) for part in self._along(owner)
            ]
        return self._parts[id(owner)]

    def directions(self, tangents: Sequence[Sequence[Tensor]]) -> list[list[Tensor | None]]:
        """For each direction the tangents of what was read, and then the parameters' parts."""
        parts = [self.parts(owner, alias) for owner, alias in self.owners]
        return [[*tangents[number], *[part[number] for part in parts]] for number in range(self.count)]

    def is_last(self, number: int) -> bool:
        """Whether no other backward follows that of this direction, so that graphs may be freed."""
        return number + 1 == self.count and not self.captured

    def add(self, groups: Sequence[Grads]) -> None:
        """Give each parameter its parts: that of the gradient, where it is wanted, and one of each product."""
        for index, (owner, _) in enumerate(self.owners):
            self._add(owner, [group[index] for group in groups])

    def release(self) -> None:
        """Drop the parts of the directions."""
        self._parts.clear()
