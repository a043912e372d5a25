"""The task of a product: the directions, and whether the gradient is wanted too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipeline.curvature.products.finite_differences import Precision
from pipeline.curvature.products.sharded import VectorSlice
from pipeline.curvature.space import Vec

OnResult: TypeAlias = Callable[[int, float, Precision], None]  # (index of a stage, relative error, its precision)


class StageChecks(NamedTuple):
    """The checks of the stages in an operator's products, and their findings, to which each product adds.

    Attributes:
        verify: whether stages with an autograd.Function of the user's are compared with finite differences.
        confirmed: stages whose derivatives finite differences have confirmed.
        forward: for stages whose tangents were computed in both modes, whether they were the same.
    """

    verify: bool
    confirmed: set[int]
    forward: dict[int, bool]


class ProductTask(NamedTuple):
    """The task of a product.

    Attributes:
        vectors: the directions.
        slots: of the parameters of the space in this process, by id.
        gradient: whether the gradient is wanted too.
        checks: of the stages, with what earlier products have found out.
        on_result: called for chunk 0 of each stage with the error of its rule against finite differences. None: only
            stages that must be checked are, and one that is wrong is an error.
        shift: added to the values of the parameters for this product. None: nothing.
    """

    vectors: Sequence[Vec]
    slots: Mapping[int, VectorSlice]
    gradient: bool
    checks: StageChecks
    on_result: OnResult | None = None
    shift: Vec | None = None

    @property
    def number(self) -> int:
        """The number of directions."""
        return len(self.vectors)

    def along(self, device: torch.device, owner: Tensor) -> list[Tensor]:
        """A parameter's part of each direction, on a device."""
        slot = self.slots[id(owner)]
        return [slot.view(vec).to(device) for vec in self.vectors]

    def moved(self, owner: Tensor, device: torch.device) -> Tensor | None:
        """A parameter's part of the shift, on a device; None for one that stays."""
        slot = self.slots.get(id(owner))
        return None if slot is None or self.shift is None else slot.view(self.shift).to(device)
