"""The task of a product: the directions, whether the gradient is wanted too, and the sums over all stages and chunks.

    vectors --along--> a parameter's part of each direction      stage s, chunk i --add--> its entries of each sum
    p that several stages read     parts by stage --join--> added in the order of the stages, over ranks too
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from pipeline.curvature.products.finite_differences import Precision
from pipeline.curvature.products.sharded import VectorSlice
from pipeline.curvature.space import Vec
from pipeline.execution.communicator import Communicator, StageGrad

OnResult: TypeAlias = Callable[[int, float, Precision], None]  # (index of a stage, relative error, its precision)


@dataclass(eq=False)
class StageChecks:
    """The checks of the stages in an operator's products, and their findings, to which each product adds.

    Attributes:
        verify: whether stages with an autograd.Function of the user's are compared with finite differences.
        confirmed: stages whose derivatives finite differences have confirmed.
        forward: for stages whose tangents were computed in both modes, whether they were the same.
        has_captured: a stage computes with a parameter past its modules, of which `ProductTask.shift` cannot change the
            values.
    """

    verify: bool
    confirmed: set[int] = field(default_factory=set)
    forward: dict[int, bool] = field(default_factory=dict)
    has_captured: bool = False


@dataclass(eq=False)
class ProductTask:
    """The task of a product.

    Attributes:
        vectors: the directions.
        slots: of the parameters of the space in this process, by id.
        gradient: whether the gradient is wanted too.
        sums: of the gradient, where it is wanted, and of each direction's product.
        shared: the ids of parameters that several stages read.
        mixes_rows: whether layers may look at all rows of a chunk.
        checks: of the stages, with what earlier products have found out.
        on_result: called for chunk 0 of each stage with the error of its rule against finite differences. None: only
            stages that must be checked are, and one that is wrong is an error.
        shift: added to the values of the parameters for this product. None: nothing.
    """

    vectors: Sequence[Vec]
    slots: Mapping[int, VectorSlice]
    gradient: bool
    sums: list[Vec]
    shared: Collection[int]
    mixes_rows: bool
    checks: StageChecks
    on_result: OnResult | None = None
    shift: Vec | None = None
    # A parameter may be captured by a stage that it is not registered in.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._views = [{key: slot.view(vec) for key, slot in self.slots.items()} for vec in self.sums]
        self._parts: list[dict[tuple[int, int], StageGrad]] = [{} for _ in self.sums]

    @property
    def number(self) -> int:
        """The number of directions."""
        return len(self.vectors)

    def along(self, device: torch.device, owner: Tensor) -> list[Tensor]:
        """A parameter's part of each direction, on a device."""
        slot = self.slots[id(owner)]
        return [slot.view(vec).to(device) for vec in self.vectors]

    def shifted(
        self, bring: Callable[[Sequence[Tensor]], Sequence[Tensor]], device: torch.device, owners: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """The values of parameters on a device, with `shift` added in memory of their own."""
        if self.shift is None:
            return bring(owners)
        with torch.inference_mode(False), torch.no_grad():
            values = list(bring(owners))
            for number, (owner, value) in enumerate(zip(owners, values, strict=True)):
                if id(owner) in self.slots:
                    shift = self.slots[id(owner)].view(self.shift)
                    values[number] = value.detach() + shift.to(device, value.dtype)
            return values

    def add(self, stage: int, owner: Tensor, grads: Sequence[Tensor | None]) -> None:
        """Add what a stage has computed for a parameter, to each of the sums."""
        key = (stage, id(owner))
        with self._lock:
            for views, parts, grad in zip(self._views, self._parts, grads, strict=True):
                if grad is None:
                    continue
                if id(owner) in self.shared:
                    _, _, total = parts.get(key, (stage, owner, None))
                    parts[key] = (stage, owner, grad if total is None else total + grad)
                else:
                    views[id(owner)].add_(grad.to(views[id(owner)].device))

    def join(self, communicator: Communicator) -> None:
        """Add up the parts of parameters that several stages read, here and on other ranks."""
        for views, parts in zip(self._views, self._parts, strict=True):
            totals = communicator.gradients.join(sorted(parts.values(), key=lambda part: part[0]))
            for owner, whole in totals.values():
                if id(owner) in self.slots:
                    views[id(owner)].add_(whole.to(views[id(owner)].device))
